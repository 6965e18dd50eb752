"""Puts and a signal by NVSHMEM's device functions, linked into a Triton kernel: one PE to itself.

It shows that a linked module is loaded, registered and runs; what crosses between two GPUs takes two PEs.
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu.nvshmem_host import DEVICE_LIBRARIES, Group, library, unique_id
from p2p import device

ROWS, WORDS = 128, 1024  # u32 words of a row
_ROW_BYTES = tl.constexpr(WORDS * 4)
_WORDS = tl.constexpr(WORDS)


@triton.jit
def put_kernel(window, number, counter):
    """Put a row from each program; the last one signals."""
    row = tl.program_id(0)
    index = tl.arange(0, _WORDS)
    at = window + 64 + row.to(tl.int64) * _ROW_BYTES
    device.put(at, index, (row * _WORDS + index + number).to(tl.int32))
    device.ship(at, at != 0, _ROW_BYTES)
    if device.is_last(counter, tl.num_programs(0)):
        device.signal(window, number + window * 0, window != 0)


@triton.jit
def get_kernel(window, seen, rows):
    """Acquire the signal, then copy a row."""
    tl.store(seen, device.load_acquire(window.to(tl.pointer_type(tl.int64))))
    tl.debug_barrier()
    index = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    tl.store(rows + index, tl.load((window + 64 + 4 * index.to(tl.int64)).to(tl.pointer_type(tl.int32))))


def run(report: Callable[[Mapping[str, Any]], None]) -> None:
    """One PE, three signals."""
    device.TRANSPORT = tl.constexpr("nvshmem")
    linked = {"nvshmem": str(library(*DEVICE_LIBRARIES))}
    counter, seen = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    rows = torch.zeros(ROWS * WORDS, dtype=torch.int32, device="cuda")
    with closing(Group(unique_id(), pe=0, pes=1)) as group:
        window = group.allocate(64 + ROWS * WORDS * 4)
        built = put_kernel.warmup(window, 16, counter, grid=(ROWS,), extern_libs=linked)
        built._init_handles()  # loads the module, which `register` must see before the launch
        group.register(built.module)
        for number in (16, 32, 48):  # of one divisibility, so of one build
            put_kernel[(ROWS,)](window, number, counter, extern_libs=linked)
            get_kernel[(ROWS,)](window, seen, rows)
            wanted = torch.arange(ROWS * WORDS, dtype=torch.int32, device="cuda") + number
            holds = int(seen) == number and torch.equal(rows, wanted)
            report({"what": "puts of one PE to itself", "rows": ROWS, "signal": number, "holds": holds})
