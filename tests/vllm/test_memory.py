"""A vLLM with a pool neither holds experts nor reads them."""

from __future__ import annotations

import json
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.make_model import make_model
from tests.experts.checkpoint_files import resident
from tests.vllm.servers import Server, pool_of, serving, stream

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=150), pytest.mark.timeout(900)]

# Of the experts' bytes, what a worker is smaller by.
LEAST_SAVED = 0.95
READ_AHEAD = 0.1
# Beside each tensor that is read, the kernel reads some of its neighbors.
AROUND = 256 << 10


def experts_of(file: Path) -> list[tuple[int, int]]:
    """Where experts' tensors lie in a file of safetensors: begin and end in bytes."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(length))
    offsets = [tensor["data_offsets"] for name, tensor in header.items() if ".experts." in name]
    return [(8 + length + begin, 8 + length + end) for begin, end in offsets]


def held(file: Path) -> float:
    """Share of the insides of experts' tensors that the kernel holds of a file."""
    pages = resident(file)
    inside = [
        pages[(begin + AROUND) // mmap.PAGESIZE : (end - AROUND) // mmap.PAGESIZE] for begin, end in experts_of(file)
    ]
    return float(np.concatenate(inside).mean())


def anonymous_bytes(server: Server) -> int:
    """What its worker holds for itself, after it has answered."""
    assert len(stream(server, range(3, 40), 8).tokens) == 8
    found = re.search(r"^Anonymous: +(\d+) kB$", Path(f"/proc/{server.worker()}/smaps_rollup").read_text(), re.M)
    assert found
    return int(found[1]) << 10


def test_experts_are_neither_held_nor_read(version: str, tmp_path: Path) -> None:
    folder = make_model("S", "qwen3_moe", tmp_path / "S", seed=1, dtype="float32")
    file = folder / "model.safetensors"
    size = sum(end - begin for begin, end in experts_of(file))
    with serving(version, folder, tmp_path / "stock.log", "--enforce-eager") as server:
        stock = anonymous_bytes(server)
    assert held(file) > 0.99, "stock reads experts, and this would see it"
    with pool_of(folder) as cluster:
        with file.open("rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert held(file) == 0.0, "the pool holds the checkpoint"
        with serving(version, folder, tmp_path / "serve.log", "--enforce-eager", cluster=cluster) as server:
            with_pool = anonymous_bytes(server)
        # Reading other tensors, the kernel reads ahead, 8 MiB at a time on some disks. The pool noted the digest of
        # the file, which is read for no fingerprint any more.
        assert held(file) <= READ_AHEAD, "experts were read"
    saved = (stock - with_pool) / size
    assert saved >= LEAST_SAVED, f"{stock >> 20} MiB alone, {with_pool >> 20} with a pool; experts: {size >> 20}"
    print(f"{version}: {stock >> 20} MiB alone, {with_pool >> 20} with a pool; experts: {size >> 20}")
