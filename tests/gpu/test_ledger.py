"""What a layer, a pass and a step launch: the table of docs/gpu.md, which may only fall; and how wide large ones are.

Counted at the shape of Qwen3-30B-A3B by `tests.gpu.recorder`, torch's own fills and copies included.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from typing import Any

import pytest

from tests.gpu.recorder import ROOT, Launch, Recording, apart

pytestmark = pytest.mark.full(seconds=10)
MODEL = "Qwen3-30B-A3B"
BATCHES = (1, 32, 512)
DOCUMENT = ROOT / "docs" / "gpu.md"
LAYER, STEP, PASS = "MoE layer of a worker", "step, beside its layers", "pass of a server"
ROW = re.compile(rf"^\| ({LAYER}|{STEP}|{PASS}) \| (.+?) \|" + r" (\d+) \|" * len(BATCHES) + "$", re.MULTILINE)

LARGE_BYTES, LEAST_PROGRAMS = 10_000_000, 100
WIDTHS = tuple(1 << power for power in range(10))
CONTEXT = 1024
# Kernels that move over LARGE_BYTES in fewer programs, and why.
NARROW = {
    "eaas.gpu.sampling.choose_kernel": "a draw walks its row's tokens in their order, and a row is one program's",
    "eaas.gpu.attention.attention_kernel": "512 keys are a program's, for equal bits: 8 rows of 1,024 are 64 programs",
}
# What these move is words of tables and pairs, none of it weights or rows.
SMALL = (
    "inputs.fetch_kernel", "inputs.patch_kernel", "wait_replies.wait_kernel", "wait_replies.wait_replies_kernel",
    "poll.poll_kernel", "group._count", "group._collect",
)  # fmt: skip


def counted(seen: Recording) -> Counter[str]:
    """Launches by name. Of what is captured, the first run counts nothing: it warms up."""
    found = Counter({"all": seen.replays + len(seen.launches) + len(seen.operations)})
    found["launch of a graph"] = seen.replays
    for launch in seen.launches:
        name = f"`{launch.kernel.split('.', 2)[2]}`"
        found[name if launch.captured else f"{name}, outside the graph"] += 1
    found.update(f"torch's `{name}`" for name, _ in seen.operations)
    return +found


def captured(seen: Recording) -> Recording:
    """That part of what was seen that became a graph."""
    return Recording(
        launches=[launch for launch in seen.launches if launch.captured],
        operations=[(name, inside) for name, inside in seen.operations if inside],
    )


def count() -> dict[str, dict[str, list[int]]]:
    """Part -> what -> launches at each of BATCHES."""
    from tests.gpu import production
    from tests.gpu.recorder import recording

    parts: dict[str, list[Counter[str]]] = {LAYER: [], STEP: [], PASS: []}
    with recording() as seen:
        one, two = (production.decoder_of(MODEL, layers=layers) for layers in (1, 2))
        server = production.server_of(MODEL)
        for batch in BATCHES:
            steps = []
            for decoder in (one, two):
                seen.clear()
                # The first step captures, and sends whole block tables.
                production.decode_step(decoder, batch)
                graph = counted(captured(seen))
                seen.clear()
                production.decode_step(decoder, batch)
                steps.append(graph + counted(seen))
            layer = steps[1] - steps[0]
            parts[LAYER].append(layer)
            parts[STEP].append(steps[0] - layer)
            seen.clear()
            server.capture(1)
            parts[PASS].append(counted(captured(seen)))
    return {
        part: {name: [counter[name] for counter in each] for name in dict.fromkeys(n for c in each for n in c)}
        for part, each in parts.items()
    }


def test_launches_are_those_of_the_table() -> None:
    """More fail; fewer ask for the table to be corrected, so that they stay."""
    found = {(part, name): tuple(counts) for part, rows in apart("tests.gpu.test_ledger:count").items()
             for name, counts in rows.items()}  # fmt: skip
    table = {(part, name): tuple(map(int, counts)) for part, name, *counts in ROW.findall(DOCUMENT.read_text())}
    none = (0,) * len(BATCHES)
    rose, fell = [], []
    for key in dict.fromkeys([*found, *table]):
        now, then = found.get(key, none), table.get(key, none)
        if now != then:
            worse = any(new > old for new, old in zip(now, then, strict=True))
            (rose if worse else fell).append(f"{': '.join(key)}: {then} in {DOCUMENT.name}, {now} found")
    lines = "\n".join(f"| {part} | {name} | {' | '.join(map(str, now))} |" for (part, name), now in found.items())
    assert not rose, "more launches than docs/gpu.md allows:\n" + "\n".join(rose)
    assert not fell, "fewer launches; correct the table of docs/gpu.md to:\n" + lines


# -- how wide launches are that move much


def moved(launch: Launch, batch: int) -> tuple[float, int]:
    """Bytes of weights and rows that a launch of a step of `batch` rows must move, and its programs that have work.

    By the definition and the cost in each kernel's file, at CONTEXT keys a row.
    """
    import numpy as np

    from eaas.gpu.attention import SPLIT_KEYS, plan_work
    from tests.gpu import production

    spec = production.spec_of_model(MODEL)
    moe, constants = spec.moe, launch.constants
    hidden, inner, top_k = spec.hidden, moe.expert_intermediate, moe.top_k
    heads, kv = spec.q_size, spec.kv_size
    programs, pairs = math.prod(launch.grid), batch * top_k
    # As even a spread over experts as there is.
    used = min(pairs, moe.experts)
    name = launch.kernel.removeprefix("eaas.gpu.").removeprefix("experts.gpu.")
    if name in SMALL:
        return 0, programs
    if name == "linear._linear":
        n, k = constants["N"], constants["K"]
        tiles = math.ceil(n / constants["FEATURES"]) * math.ceil(batch / constants["TOKENS"])
        items = tiles * (constants["PARTS"] if constants["SPLIT"] else 1)
        return 2 * n * k + batch * (2 * k + 4 * n), min(programs, items)
    if name == "ffn.grouped_kernel":
        first = constants["GATED"]
        weights = (2 if first else 1) * used * 2 * hidden * inner
        height = constants["FEATURES"] * (1 if first else 2)
        items = used * math.ceil(constants["N"] / height)
        if items < programs:
            items = used * math.ceil(2 * constants["N"] / height)
        return weights + pairs * 2 * (hidden + inner), min(programs, items)
    work = plan_work(
        np.full(batch, CONTEXT - 1, np.int32), np.arange(batch, dtype=np.int32), spec.q_heads // spec.kv_heads
    )
    splits = CONTEXT // SPLIT_KEYS
    each: dict[str, tuple[float, int]] = {
        "attention.attention_kernel": (batch * CONTEXT * 4 * kv, len(work.items) * spec.kv_heads),
        "attention.merge_kernel": (len(work.merges) * splits * 4 * heads, len(work.merges) * spec.kv_heads),
        "norm_rope.embed_kernel": (batch * hidden * 6, batch),
        "norm_rope.add_norm_kernel": (batch * hidden * 16, batch),
        "norm_rope.place_kernel": (batch * 6 * (heads + 2 * kv), batch * spec.kv_heads),
        "gate.score_kernel": (2 * moe.experts * hidden + batch * 4 * hidden, programs),
        "gate.choose_kernel": (batch * 4 * moe.experts * hidden / 512, batch),
        "dispatch.dispatch_kernel": (batch * 4 * hidden, batch),
        "gather.gather_kernel": (batch * 4 * hidden, batch),
        "reply.reply_kernel": (pairs * 4 * hidden, pairs),
        "combine.combine_kernel": (pairs * 2 * hidden + batch * 4 * hidden, batch),
        "sampling.scan_kernel": (batch * 4 * spec.vocab, programs),
        "sampling.choose_kernel": (batch * 4 * spec.vocab, batch),
    }  # fmt: skip
    size, busy = each[name]
    return size, min(programs, busy)


def narrow() -> dict[str, list[Any]]:
    """Kernel -> its worst launch among those that move over LARGE_BYTES: programs, megabytes, batch."""
    from tests.gpu import production
    from tests.gpu.recorder import recording

    worst: dict[str, list[Any]] = {}
    with recording() as seen:
        decoder, server = production.decoder_of(MODEL, layers=1), production.server_of(MODEL)
        for batch in WIDTHS:
            seen.clear()
            production.decode_step(decoder, batch)
            server.enqueue_pass()
            for launch in list(seen.launches):
                size, programs = moved(launch, batch)
                if size > LARGE_BYTES and programs < worst.get(launch.kernel, [LEAST_PROGRAMS])[0]:
                    worst[launch.kernel] = [programs, round(size / 1e6), batch]
    return worst


@functools.cache
def narrow_ones() -> dict[str, list[Any]]:
    return apart("tests.gpu.test_ledger:narrow")


def test_what_moves_much_is_spread_over_the_processors() -> None:
    too = {kernel: worst for kernel, worst in narrow_ones().items() if kernel not in NARROW}
    assert not too, f"programs with work, megabytes that they move, batch; {LEAST_PROGRAMS} programs needed: {too}"


@pytest.mark.parametrize("kernel", NARROW)
def test_who_is_excused_needs_it(kernel: str) -> None:
    assert kernel in narrow_ones(), f"{kernel} is wide enough by now: take it from the list"
