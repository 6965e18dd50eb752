"""Promises of a step's inputs: the device's tables are the plan's, whatever came before; only what changed is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eaas.gpu.inputs import CHANGES, StepInputs
from eaas.worker.decoder import PlanInvalid, StepLimits
from tests.gpu.aot import compile_kernel
from tests.gpu.device import DEVICE, fresh_seed

MOST, BLOCK_TOKENS, BLOCKS = 8, 16, 5000
LIMITS = StepLimits(vocab=100, max_rows=MOST, max_positions=4096, block_tokens=BLOCK_TOKENS, kv_blocks=BLOCKS)


def arrays_of(positions: list[int], seqs: list[int], tables: np.ndarray) -> list[np.ndarray]:
    tokens, places, numbers, wanted = (
        np.array(values, dtype=np.int32) for values in (range(len(positions)), positions, seqs, [0])
    )
    return [tokens, places, numbers, tables, wanted]


def test_the_devices_tables_follow_the_plans_whatever_changes_between_steps() -> None:
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    inputs = StepInputs(LIMITS, group=4, most=MOST, device=torch.device(DEVICE))
    tables = source.integers(0, BLOCKS, (MOST, 256)).astype(np.int32)
    for number in range(25):
        # Now and then other sequences in the slots, more slots than rows, or long tables all at once.
        if source.random() < 0.3:
            slots = int(source.choice([MOST, 3 * MOST]))
            tables = source.integers(0, BLOCKS, (slots, 256)).astype(np.int32)
        tables[source.integers(len(tables)), source.integers(256)] = source.integers(BLOCKS)
        rows = int(source.integers(1, MOST + 1))
        seqs = sorted(source.choice(len(tables), rows, replace=False).tolist())
        positions = source.integers(0, int(source.choice([20, 4096])), rows).tolist()
        size, parts = MOST, int(source.choice([1, 2]))
        inputs.fill(arrays_of(positions, seqs, tables), None, size, parts)
        step = inputs.step(size, parts)
        inputs.fetch(step)
        found = inputs.tables.cpu().numpy()
        seen = []
        for part in step.parts:
            for row in range(int(part.n_rows)):
                seq, position = int(part.seqs[row]), int(part.positions[row])
                blocks = position // BLOCK_TOKENS + 1
                number_here = len(seen)
                wanted = tables[seqs[number_here], :blocks]
                assert (found[seq, :blocks] == wanted).all(), f"step {number}, row {number_here}, seed {seed}"
                seen.append(position)
        assert seen == positions, f"step {number}, seed {seed}"
        first = -(-rows // parts)
        assert int(step.wanted[0]) == 0
        assert [int(part.n_rows) for part in step.parts] == [first, rows - first][:parts]
        again = arrays_of(positions, seqs, tables)
        inputs.fill(again, None, size, parts)
        inputs.fetch(step)
        assert int(step.n_changes) == 0, "what the device knows is sent again"


def test_a_block_that_does_not_exist_is_refused_and_nothing_is_sent() -> None:
    inputs = StepInputs(LIMITS, group=4, most=MOST, device=torch.device(DEVICE))
    tables = np.full((2, 4), -1, dtype=np.int32)
    tables[:, 0] = [7, BLOCKS]
    with pytest.raises(PlanInvalid, match=f"Row 1: its block table names a block outside 0 to {BLOCKS - 1}"):
        inputs.fill(arrays_of([3, 3], [0, 1], tables), None, MOST, 1)
    tables[1, 0] = 8
    inputs.fill(arrays_of([3, 3], [0, 1], tables), None, MOST, 1)
    with pytest.raises(PlanInvalid, match="Row 0: its block table"):
        inputs.fill(arrays_of([16, 3], [0, 1], tables), None, MOST, 1)
    step = inputs.step(MOST, 1)
    inputs.fill(arrays_of([3, 3], [0, 1], tables), None, MOST, 1)
    inputs.fetch(step)
    assert int(step.n_changes) == 0
    assert CHANGES >= MOST, "a step in which every row takes a block must fit"


@pytest.mark.parametrize(
    ("kernel", "signature", "constexprs"),
    [
        ("fetch_kernel", {"host": "*i32", "device": "*i32"}, {"BLOCK": 1024}),
        (
            "patch_kernel",
            {"changes": "*i32", "n_changes": "*i32", "tables": "*i32", "columns": "i32"},
            {"BLOCK": CHANGES},
        ),
    ],
)
def test_input_kernels_compile_for_an_h200(kernel: str, signature: dict, constexprs: dict) -> None:
    assert compile_kernel("eaas.gpu.inputs", kernel, signature, constexprs).spills == 0
