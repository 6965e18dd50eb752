"""Promises of choosing on the device: the native sampler's tokens, whoever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eaas import native
from eaas.gpu.sampling import NOT_FINITE, OK, Scratch, can_choose, choices_of, choose, greedy_reference
from eaas.native import SAMPLE_ROW
from tests.eaas.sampling import philox
from tests.gpu.aot import compile_kernel
from tests.gpu.device import DEVICE, fresh_seed, poisoned


def rows_of(source: np.random.Generator, count: int) -> np.ndarray:
    """Random ways to choose, each filter on about half of the time."""
    rows = np.zeros(count, dtype=SAMPLE_ROW)
    rows["seed"] = source.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    rows["index"] = source.integers(0, 1 << 40, count)
    rows["choice"] = source.integers(0, 4, count)
    rows["temperature"] = source.choice(np.float32([0.0, 0.7, 1.3, 5.0]), count)
    rows["top_k"] = source.choice([0, 1, 7, 100000], count)
    rows["top_p"] = source.choice(np.float32([1.0, 0.8, 0.2, 1e-6]), count)
    rows["min_p"] = source.choice(np.float32([0.0, 0.05, 1.0]), count)
    rows["repetition"], rows["top_count"] = 1.0, -1
    return rows


def native_tokens(logits: np.ndarray, rows: np.ndarray) -> list[int]:
    """What the sampler of the engine chooses; -1 where it refuses."""
    count, vocab = logits.shape
    tokens = np.zeros(count, np.int32)
    spare = [np.zeros(count, kind) for kind in (np.float32, np.uint32, np.int32, np.float32)]
    statuses = np.zeros(count, np.int32)
    addresses = [array.ctypes.data for array in (np.ascontiguousarray(rows), tokens, *spare)]
    native.load().sampler_sample(logits.ctypes.data, count, vocab, *addresses, 1, statuses.ctypes.data)
    return np.where(statuses, -1, tokens).tolist()


def device_tokens(logits: np.ndarray, rows: np.ndarray) -> tuple[list[int], list[int]]:
    count, vocab = logits.shape
    tokens, status = poisoned(count, dtype=torch.int32), poisoned(count, dtype=torch.int32)
    choose(
        torch.from_numpy(logits).to(DEVICE),
        torch.from_numpy(choices_of(rows)).to(DEVICE),
        torch.tensor([count], dtype=torch.int32, device=DEVICE),
        Scratch.make(count, vocab, DEVICE),
        tokens,
        status,
    )
    return tokens.tolist(), status.tolist()


@pytest.mark.parametrize(("vocab", "count"), [pytest.param(300, 60, marks=pytest.mark.smoke), (5000, 12)])
def test_the_device_chooses_the_native_samplers_tokens(vocab: int, count: int) -> None:
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    rows = rows_of(source, count)
    logits = (source.standard_normal((count, vocab)) * 3).astype(np.float32)
    # Ties, also at the top.
    logits[::3] = np.round(logits[::3])
    assert can_choose(rows).all()
    tokens, status = device_tokens(logits, rows)
    wanted = native_tokens(logits, rows)
    assert status == [OK] * count
    differing = [(row, rows[row]) for row in range(count) if tokens[row] != wanted[row]]
    assert not differing, f"{differing}, seed {seed}"
    alone, _ = device_tokens(logits[5:6].copy(), rows[5:6])
    assert alone == tokens[5:6]


def test_greedy_rows_take_the_lowest_of_the_highest() -> None:
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    logits = source.integers(-3, 4, (9, 9000)).astype(np.float32)
    rows = np.zeros(9, dtype=SAMPLE_ROW)
    tokens, _ = device_tokens(logits, rows)
    assert tokens == greedy_reference(torch.from_numpy(logits)).tolist(), f"seed {seed}"


def test_rows_that_are_not_finite_are_refused_and_the_others_are_not() -> None:
    logits = np.zeros((4, 50), np.float32)
    logits[0, 49], logits[1, 3], logits[2, 7], logits[3, 9] = np.nan, np.inf, -np.inf, 1.0
    rows = rows_of(np.random.default_rng(1), 4)
    rows["temperature"] = 0.0
    tokens, status = device_tokens(logits, rows)
    assert status == [NOT_FINITE] * 3 + [OK]
    assert tokens[3] == 9


def test_rows_with_penalties_masks_biases_or_logprobs_are_left_to_the_host() -> None:
    rows = np.zeros(10, dtype=SAMPLE_ROW)
    rows["repetition"], rows["top_count"], rows["output_count"] = 1.0, -1, 3
    rows["repetition"][1], rows["presence"][2], rows["frequency"][3] = 1.1, 0.5, -0.5
    rows["forbidden_count"][4], rows["top_count"][5] = 1, 0
    for row, name in enumerate(("allowed", "allowed_too", "biased_count", "given"), start=6):
        rows[name][row] = 1
    assert can_choose(rows).tolist() == [True] + [False] * 9


def test_the_generator_is_the_engines() -> None:
    """Through a distribution of two, whose border is the uniform number itself."""
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    rows = rows_of(source, 40)
    rows["temperature"], rows["top_k"], rows["top_p"], rows["min_p"] = 1.0, 0, 1.0, 0.0
    tokens, _ = device_tokens(np.zeros((40, 2), np.float32), rows)
    for row, token in zip(rows, tokens, strict=True):
        index, key = int(row["index"]), int(row["seed"])
        words = philox([index & 0xFFFFFFFF, index >> 32, int(row["choice"]), 0], [key & 0xFFFFFFFF, key >> 32])
        assert token == words[0] >> 31, f"seed {seed}"


CHOOSE = {
    "logits": "*fp32", "choices": "*i32", "n_choices": "*i32", "highest": "*fp32", "lowest_at": "*i32",
    "finite": "*i32", "all_weights": "*fp32", "all_sums": "*fp32", "tokens": "*i32", "status": "*i32", "vocab": "i32",
}  # fmt: skip


def test_choosing_compiles_for_an_h200_without_spills() -> None:
    built = compile_kernel(
        "eaas.gpu.sampling", "choose_kernel", CHOOSE,
        {
            "SCANNED": 38, "SCANNED_PAD": 64, "SUMMED": 149, "WORDS": 12, "BLOCK": 4096, "SUM_BLOCK": 1024,
            "GREEDY_BELOW": 1e-5,
        },
        num_warps=8,
    )  # fmt: skip
    assert built.spills == 0
    scan = {name: CHOOSE[name] for name in ("logits", "n_choices", "highest", "lowest_at", "finite", "vocab")}
    assert compile_kernel("eaas.gpu.sampling", "scan_kernel", scan, {"BLOCK": 4096}).spills == 0
