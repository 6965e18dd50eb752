"""Once a worker or a server is ready nothing is compiled, loaded or captured any more, whatever comes.

Torch's own kernels count too: each is loaded on its first launch, and beside a device that is never idle that may wait.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import random
import threading
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eaas.placement import Stopped
from eaas.worker.__main__ import warm
from eaas.worker.plan import StepPlan, StepTaps
from tests.gpu.device import fresh_seed
from tests.gpu.recorder import apart

MOST = 512
LAYERS = 2
# Of bytes as they lie, from host to device and back: no kernel.
COPIES = {"copy_", "copy", "tolist", "_local_scalar_dense"}


def plan(rows: int, columns: int, dice: random.Random) -> StepPlan:
    """Decoding rows and chunks of prompts, logits of some rows wanted."""
    tokens, positions, seqs = [], [], []
    while len(tokens) < rows:
        begin = dice.randrange(16 * columns - 1)
        length = min(rows - len(tokens), 16 * columns - begin, dice.choice((1, 1, 1, 7, 64, 300)))
        seqs += [seqs[-1] + 1 if seqs else 0] * length
        positions += range(begin, begin + length)
        tokens += [dice.randrange(100) for _ in range(length)]
    blocks = np.arange((seqs[-1] + 1) * columns)
    np.random.default_rng(dice.randrange(1 << 31)).shuffle(blocks)
    wanted = sorted(dice.sample(range(rows), dice.choice((rows, rows, dice.randint(0, rows)))))
    arrays = (tokens, positions, seqs, blocks.reshape(-1, columns), wanted)
    names = ("token_ids", "positions", "seqs", "block_tables", "logits_rows")
    return StepPlan(**{name: np.array(array, dtype=np.int32) for name, array in zip(names, arrays, strict=True)})


def taps(rows: int, dice: random.Random) -> StepTaps:
    """Residual streams and logits of some rows."""
    picked = sorted(dice.sample(range(rows), min(rows, 3)))
    places = np.full((7, LAYERS), -1, dtype=np.int64)
    places[4], places[6, 0] = range(0, 4 * LAYERS, 4), 4 * LAYERS
    return StepTaps(
        rows=np.array(picked, dtype=np.int32), places=places, experts=np.zeros((0, 3), dtype=np.int64),
        frame=np.zeros(1 << 16, dtype=np.float32), statistics=dice.random() < 0.5,
    )  # fmt: skip


def steps(overlap: bool, left_out: int, seed: int, recording_rows: bool = False) -> dict[str, Any]:
    """What a worker's decoder launches before it is ready and afterwards; `left_out`: a size that is not made warm."""
    from benchmarks.gpu.decode import greedily
    from experts.backend import ServerLink
    from experts.gpu.client import GpuClient
    from experts.gpu.layout import Mark, ReportWord
    from tests.gpu.production import decoder_of
    from tests.gpu.recorder import recording

    dice = random.Random(seed)
    with recording() as seen:
        decoder = decoder_of("S", LAYERS, MOST, recording_rows)
        decoder.double_batching = overlap
        for rows in decoder.sizes:
            if rows != left_out:
                decoder.warm([rows])
        ready = {(launch.kernel, launch.key) for launch in seen.launches}
        binaries: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
        for launch in seen.launches:
            constants, keys = binaries[launch.kernel]
            constants.add(str(launch.constants))
            keys.add(launch.key)
        graphs = seen.graphs
        seen.clear()

        client: Any = decoder._experts
        assert isinstance(client, GpuClient)
        tables, shape = client.tables, client.shape
        link = ServerLink(
            tx=1 << 32, tx_bytes=shape.request_window.nbytes, rx=1 << 33, rx_bytes=shape.reply_window.nbytes,
            server_incarnation=3, slots=shape.slots, slot_bytes=1,
        )  # fmt: skip
        counts = [
            *decoder.sizes,
            *(size - 1 for size in decoder.sizes[1:]),
            *(dice.randint(1, MOST) for _ in range(40)),
        ]
        dice.shuffle(counts)
        if left_out:
            counts = [left_out - 1]
        columns = -(-decoder.max_positions // decoder.block_tokens)
        places: list[int] = []
        operations: set[str] = set()
        for number, rows in enumerate(counts):
            event = number % 4
            if event == 0 and len(places) < 3:
                places.append(client.add_server(link))
            elif event == 1 and places:
                client.remove_server(places.pop())
            elif event == 2:
                routes = np.full((shape.layers, shape.experts, 8), 255, np.uint8)
                routes[:, :, : len(places)] = places
                client.publish(number, routes)
            else:
                # A slot that owes a reply, and an answer that was damaged.
                operations |= {name for name, _ in seen.operations}
                tables.owed[dice.randrange(2), 0] = number
                tables.report[ReportWord.RETIRED] = 1
                tables.report[ReportWord.WORDS + tables.servers] = Mark.CORRUPT
                seen.operations.clear()
            asked = plan(rows, columns, dice)
            if recording_rows and dice.random() < 0.5:
                asked = replace(asked, taps=taps(rows, dice))
            if dice.random() < 0.3:
                decoder.step(asked, 1.0)
            else:
                ways = greedily(len(asked.logits_rows))
                ways["top_count"][[i for i in range(len(ways)) if dice.random() < 0.2]] = 2
                decoder.step_tokens(asked, ways, 1.0)
            client._counted_s = -1.0
            client.take_routed()
        launched = {launch.kernel for launch in seen.launches}
        return {
            "binaries": {kernel: list(map(len, both)) for kernel, both in binaries.items()},
            "graphs": (graphs, seen.graphs),
            "replays": seen.replays >= len(counts),
            "beside graphs": sorted(launched),
            "new": sorted(kernel for kernel, key in {(one.kernel, one.key) for one in seen.launches} - ready),
            "operations": sorted(operations | {name for name, _ in seen.operations}),
        }


@pytest.mark.full(seconds=20)
@pytest.mark.parametrize(
    ("overlap", "taps"),
    [(False, False), (True, False), (True, True)],
    ids=["whole steps", "two micro-batches", "that record rows"],
)
def test_no_step_compiles_loads_or_captures_anything(overlap: bool, taps: bool) -> None:
    seed = fresh_seed()
    found = apart("tests.gpu.test_warm:steps", overlap, 0, seed, taps)
    sizes = MOST.bit_length()
    assert found["graphs"] == [sizes, 0] and found["replays"], f"seed {seed}: {found}"
    # Or else this showed less than it says.
    assert {"experts.gpu.client.reclaim_kernel", "eaas.gpu.linear._linear"} <= set(found["beside graphs"])
    assert not found["new"], f"seed {seed}: {found['new']}"
    assert set(found["operations"]) <= COPIES, f"seed {seed}: {found['operations']}"
    # What steps differ by chooses no binary, but where a wrapper says so by a constant.
    more = {name: counts for name, counts in found["binaries"].items() if counts[0] != counts[1]}
    # The final norm is bfloat16; streams of the same constants are float32.
    typed = {"eaas.gpu.taps.tap_kernel": [5, 6]} if taps else {}
    assert more == typed, f"constants and binaries of {more}"


@pytest.mark.full(seconds=10)
def test_a_size_that_was_left_out_is_seen() -> None:
    seed = fresh_seed()
    assert apart("tests.gpu.test_warm:steps", False, 64, seed)["graphs"] == [MOST.bit_length() - 1, 1]


def passes(name: str) -> dict[str, Any]:
    """What a server launches before it is ready and afterwards."""
    import torch

    from experts import grouped
    from experts.gpu.backend import GpuBackend
    from experts.gpu.server import GpuServer
    from experts.kernels import pack_expert, to_dtype
    from experts.model import Dtype, ExpertShape
    from experts.wire import WireShape
    from tests.gpu.recorder import recording

    dtype = Dtype[name]
    hidden, inner = 128, 72
    shape = ExpertShape(architecture="", layer_ids=(0, 1), experts=6, hidden=hidden, intermediate=inner, top_k=2)
    draw = np.random.default_rng(1)

    def expert() -> Any:
        sizes = (inner, hidden), (inner, hidden), (hidden, inner)
        if dtype is Dtype.FP8:
            return pack_expert(*(grouped.sample(dtype, *size, draw) for size in sizes), dtype)
        return pack_expert(*(to_dtype(draw.normal(size=size).astype(np.float32), dtype) for size in sizes), dtype)

    turn = iter(range(1 << 40))
    GpuServer.passes = property(lambda self: next(turn))  # type: ignore[assignment]
    with recording() as seen:
        wire = WireShape(shape=shape, dtype=dtype, model_hash=1)
        server = GpuBackend(torch.device("cuda", 0)).server(wire, incarnation=2, cores=(), bell_page=0)
        assert server.turns() is None
        server.serve()
        graphs, before = seen.graphs, {name for name, _ in seen.operations}
        seen.clear()
        for place in range(3):
            server.attach(place, request=64 * place, reply=64 * place, incarnation=place)
        for number in range(5):
            packed = expert()
            server.set_expert(number % 2, number, packed.gate_up, packed.down)
        server.clear_expert(0, 2)
        server.detach(1)
        server.set_lease(0)
        server.set_lease(1 << 62)
        found = {
            "graphs": (graphs, seen.graphs),
            "launches": [launch.kernel for launch in seen.launches],
            "operations": sorted({name for name, _ in seen.operations} - before - COPIES),
            "turns": server.turns() is not None,
        }
        server.end_passes()
        return found


@pytest.mark.full(seconds=10)
@pytest.mark.parametrize("dtype", ["BFLOAT16", "FP8"])
def test_no_pass_and_nothing_beside_one_compiles_loads_or_captures_anything(dtype: str) -> None:
    found = apart("tests.gpu.test_warm:passes", dtype)
    assert found == {"graphs": [1, 0], "launches": [], "operations": [], "turns": True}


@pytest.mark.smoke
def test_a_worker_that_is_told_to_end_makes_no_more_sizes_ready() -> None:
    asked, made = threading.Event(), []

    def make(sizes: list[int]) -> None:
        made.extend(sizes)
        if sizes == [4]:
            asked.set()

    decoder: Any = SimpleNamespace(sizes=(1, 2, 4, 8), warm=make)
    with pytest.raises(Stopped):
        warm(decoder, asked)
    assert made == [1, 2, 4]
