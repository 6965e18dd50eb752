"""What the compiler makes of the exchange's kernels for an H200: registers, spills, and the order of memory."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest

from experts.gpu.layout import ExchangeShape, RowsOut, constants_of, power_of_two, row_warps
from experts.gpu.words import LAYOUT
from tests.gpu.aot import SHARED_LIMIT_BYTES, Built, compile_kernel

SHAPE = ExchangeShape(
    layers=58,
    experts=256,
    hidden=7168,
    top_k=8,
    capacity=512,
    rows_out=RowsOut.E4M3,
    model_hash=1 << 62,
)
WORDS = "*i64"
CALL = {
    "rows": "*bf16", "ids": "*i32", "n_rows": "*i32", "peers": WORDS, "routes": "*i32", "suspect": WORDS,
    "owed": WORDS, "sequence": WORDS, "control": WORDS, "place": "*i32", "asked": WORDS,
}  # fmt: skip
COUNTS = {"listed": "*u64", "counted": WORDS, "routed": WORDS}
WAIT_WARPS = 4  # half a processor's registers at most
SEND_WARPS, BACK_WARPS = row_warps(SHAPE.hidden // 2), row_warps(SHAPE.answer_words)
GATHER_WARPS = row_warps(SHAPE.row_words)
# Kernel: its pointers and integers, its warps, and the most registers a thread may have.
KERNELS = {
    "dispatch": (CALL | COUNTS | {"layer": "i32"}, SEND_WARPS, 80),
    "wait_replies": (
        CALL | dict.fromkeys(("before", "limits", "took", "seen"), WORDS)
        | {"before": "*i32", "report": "i64", "layer": "i32"},
        WAIT_WARPS,
        255,
    ),
    "combine": (
        {
            "weights": "*fp32", "n_rows": "*i32", "control": WORDS, "place": "*i32", "asked": WORDS, "report": "i64",
            "blank": "i64", "out": "*fp32",
        },
        BACK_WARPS,
        128,
    ),
    "poll": (
        {
            "control": WORDS, "peers": WORDS, "held": "*i32", "done": WORDS, "rejected": WORDS, "jobs": WORDS,
            "slots": "*i32", "row_of": "*i32", "origin": "*i32", "n_pairs": "*i32",
            "counts": WORDS, "asked_in": WORDS, "idle_ns": "i32",
        },
        4,
        200,
    ),
    "gather": (
        {
            "control": WORDS, "jobs": WORDS, "origin": "*i32", "n_pairs": "*i32", "rows": "*i32", "scales": "*fp32",
        },
        GATHER_WARPS,
        64,
    ),
    "reply": (
        {"out": "*i32", "control": WORDS, "jobs": WORDS, "origin": "*i32", "n_pairs": "*i32", "counts": WORDS},
        BACK_WARPS,
        64,
    ),
}  # fmt: skip
OWN = {
    "SERVERS": 8, "REPLICAS": 2, "ROUNDS": 4, "WIDTH": 8, "WIDE": 8, "TILE": 8192, "SEND_THREADS": 32 * SEND_WARPS,
    "WAIT_THREADS": 32 * WAIT_WARPS, "BACK_THREADS": 32 * BACK_WARPS, "CLIENTS": 4, "CLIENTS_WIDE": 4,
    "SLOTS_WIDE": 2, "ROW_TILE": power_of_two(SHAPE.row_words), "ANSWER_TILE": power_of_two(SHAPE.answer_words),
    "LAYOUT": LAYOUT,
}  # fmt: skip
ACQUIRE = re.compile(r"@p ld\.acquire\.sys\.global\.b64")
RELEASE = re.compile(r"@p st\.release\.sys\.global\.b64")


def test_what_waits_leaves_its_processor_to_the_others() -> None:
    """Two programs of the experts' products stand on each processor, and so does one warp beside them."""
    kernel = compile_kernel(
        "experts.gpu.wait_replies", "wait_kernel", {"control": WORDS, "asked": WORDS, "limits": WORDS},
        {"SERVERS": 32, "WIDTH": 32, "LAYOUT": LAYOUT},
        num_warps=1,
    )  # fmt: skip
    assert kernel.spills == 0 and kernel.registers <= 40, f"{kernel.registers} registers"
    assert kernel.shared_bytes <= 1024, f"{kernel.shared_bytes} shared bytes"
    assert ACQUIRE.search(kernel.ptx) and "%globaltimer" in kernel.ptx and "nanosleep" in kernel.ptx


@functools.cache
def built(name: str, nvshmem: Path | None = None) -> Built:
    """The kernel, compiled once; where puts go by NVSHMEM, with its library of device functions."""
    signature, warps, _ = KERNELS[name]
    names = importlib.import_module(f"experts.gpu.{name}").__dict__[f"{name}_kernel"].arg_names
    own = OWN | {"THREADS": 32 * warps}
    constants = constants_of(names, SHAPE, own)
    return compile_kernel(
        f"experts.gpu.{name}", f"{name}_kernel", signature, constants, num_warps=warps, nvshmem=nvshmem
    )


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_without_spills(name: str) -> None:
    kernel = built(name)
    assert kernel.spills == 0 and kernel.registers <= KERNELS[name][2], f"{name}: {kernel.registers} registers"
    assert kernel.shared_bytes <= 32 * 1024 < SHARED_LIMIT_BYTES, f"{name}: {kernel.shared_bytes} shared bytes"


@pytest.mark.parametrize("name", ["dispatch", "reply", "wait_replies"])
def test_signals_compile_to_a_release_of_the_whole_system_behind_a_barrier(name: str) -> None:
    """Between a program's last barrier and its signal nothing is stored."""
    ptx = built(name).ptx
    signals = [match.start() for match in RELEASE.finditer(ptx)]
    assert signals, f"{name} releases nothing"
    for at in signals:
        before = ptx[:at].rpartition("bar.sync")
        assert before[1] and "st.global" not in before[2], f"{name}: stores between its barrier and its signal"


@pytest.mark.parametrize("name", KERNELS)
def test_no_atomic_has_the_scope_of_the_system_and_each_word_is_one_threads(name: str) -> None:
    """Peers on PCIe know no atomics; and a word that several threads loaded could be several values."""
    kernel = built(name)
    assert not re.search(r"(atom|red)\S*\.sys", kernel.ptx), f"{name} has an atomic of the whole system"
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", kernel.ttgir, re.MULTILINE))
    lines = [line for line in kernel.ttgir.splitlines() if "inline_asm" in line and "setp" in line]
    words = [re.findall(r"tensor<(\d+)x\w+, (#\w+)>", line)[-1] for line in lines]
    assert len(words) == len(re.findall(r"@p (?:ld|st)\.\w+\.sys", kernel.ptx)), f"{name}: {words}"
    for lanes, layout in words:
        threads = r"sizePerThread = \[1\], threadsPerWarp = \[32\], warpsPerCTA = \[(\d+)\], order = \[0\]"
        warps = re.search(threads, layouts[layout])
        assert warps and int(lanes) >= 32 * int(warps[1]), f"{name}: {lanes} words, {layouts[layout]}"


@pytest.mark.parametrize("name", ["wait_replies", "poll"])
def test_waits_compile_to_acquires_a_clock_and_naps(name: str) -> None:
    ptx = built(name).ptx
    assert ACQUIRE.search(ptx) and "%globaltimer" in ptx and "nanosleep" in ptx, name


@pytest.mark.parametrize("name", ["combine", "gather"])
def test_rows_that_a_peer_may_write_compile_to_wide_loads_that_are_made_once(name: str) -> None:
    ptx = built(name).ptx
    assert "ld.volatile.global.v4" in ptx, f"{name} reads rows word by word"


@pytest.mark.parametrize("name", ["dispatch", "reply", "combine"])
def test_rows_compile_to_wide_stores(name: str) -> None:
    assert "st.global.v4" in built(name).ptx, f"{name} writes rows word by word"
