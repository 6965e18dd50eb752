"""A network for the interpreter that delivers puts late, in pieces and in any order, but for what a signal vouches for.

Put in place of the puts and signals of p2p/device.py. A put is queued; pieces of it arrive at random moments. A signal
delivers first all that its program is entitled to, again in any order: its own puts before its last barrier, those of
the programs whose arrival it acquired by `is_last`, and those of earlier kernels of the same sender.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.runtime import interpreter

from p2p import device

Piece = tuple[np.ndarray, np.ndarray]  # addresses, words


class Network:
    """Between all senders; those of one name are one GPU's.

    Attributes:
        held: Pieces that came no sooner than they had to.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = 0
        self._random = np.random.default_rng(seed)
        self._pieces: dict[int, list[Piece]] = {}
        self._sender, self._of = "", defaultdict[str, set[int]](set)
        self._number = 0
        self._begin()
        self._signal, self._is_last = device.signal, device.is_last
        mine = {name: getattr(self, name) for name in ("put", "signal", "is_last")}
        known = {id(getattr(device, name)): name for name in mine}
        for module in [it for name, it in sys.modules.items() if name.startswith(("experts.gpu.", "tests.gpu."))]:
            for name, value in list(vars(module).items()):
                if id(value) in known:
                    monkeypatch.setattr(module, name, mine[known[id(value)]])
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_barrier", lambda builder: self._fence())

    def _begin(self) -> None:
        """Programs of a launch: what each has put, and what a signal of it vouches for."""
        self._own, self._entitled = defaultdict[object, set[int]](set), defaultdict[object, set[int]](set)
        self._arrived = defaultdict[int, set[int]](set)

    @contextmanager
    def launch(self, sender: str) -> Iterator[None]:
        """Kernels launched inside are this sender's; what its earlier ones put comes before anything of theirs."""
        self._sender = sender
        self._deliver(self._of[sender])
        self._begin()
        yield

    def put(self, at: tl.tensor, index: tl.tensor | int, words: tl.tensor, mask: tl.tensor | None = None) -> None:
        """In place of `device.put`."""
        place = getattr(index, "handle", None)
        self._queue(
            at.handle.data
            + (place.data.astype(np.int64) if place is not None else int(index)) * words.handle.data.itemsize,
            words.handle.data,
            mask,
        )

    def signal(self, at: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
        """In place of `device.signal`."""
        self._fence()
        self._deliver(self._entitled[self._program()])
        self._signal(at, value, mask)

    def is_last(self, counter: tl.tensor, total: object) -> tl.tensor:
        """In place of `device.is_last`."""
        self._fence()
        key, mine = int(counter.handle.data.ravel()[0]), self._entitled[self._program()]
        mine |= self._arrived[key]
        self._arrived[key] = set(mine)
        last = self._is_last(counter, total)
        if last.handle.data.all():
            del self._arrived[key]
        return last

    def _program(self) -> object:
        return tuple(interpreter.interpreter_builder.grid_idx)

    def _fence(self) -> None:
        program = self._program()
        self._entitled[program] |= self._own.pop(program, set())

    def _queue(self, at: np.ndarray, words: np.ndarray, mask: tl.tensor | None) -> None:
        there = np.True_ if mask is None else mask.handle.data
        at, words, there = (part.ravel() for part in np.broadcast_arrays(at, words, there))
        order = self._random.permutation(np.flatnonzero(there))
        pieces = np.array_split(order, self._random.integers(1, 4))
        self._number += 1
        self._pieces[self._number] = [(at[part].astype(np.uint64), words[part]) for part in pieces if len(part)]
        self._own[self._program()].add(self._number)
        self._of[self._sender].add(self._number)
        if self._random.random() < 0.2:
            number = self._random.choice(list(self._pieces))
            self._store(self._pieces[number][:1])
            self._pieces[number] = self._pieces[number][1:]

    def _deliver(self, puts: set[int]) -> None:
        pieces = [piece for number in puts for piece in self._pieces.pop(number, ())]
        self.held += len(pieces)
        self._store([pieces[i] for i in self._random.permutation(len(pieces))])
        puts.clear()

    def _store(self, pieces: list[Piece]) -> None:
        for at, words in pieces:
            memory.store(at, words, np.ones(len(at), dtype=bool))
