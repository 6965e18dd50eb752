"""What one step reads that the host decides: written to pinned memory, fetched by the step's first kernel.

Every step of one size runs the same launches on the same addresses, so that a captured graph serves them all; what
differs is here. int32 words, in this order, for a step of `size` rows and `parts` micro-batches:

    HEAD words       0: words in use; then, COUNT_STRIDE words apart: rows of all and of each part, items and merges of
                     each part, logits rows, choices, changed table entries
    size             token ids
    size             positions
    size             sequences, as rows of the device's block tables
    size             rows whose logits are wanted
    CHOICE_WORDS *   how the token of each of those is chosen (`eaas.gpu.sampling`)
    4 * CHANGES      changed entries of the block tables: row, column, block, 0
    per part         4 * size / parts: merges; ITEM_WORDS * (size / parts + partials): items (`eaas.gpu.attention`)

Rows of part p begin at p * size / parts. Block tables stay on the device: a step sends only the entries that changed,
one for each 16 tokens of a sequence, where whole tables would be megabytes.

Cost: the words in use over PCIe, some 20 bytes a row and 32 an item: 1 to 3 us.
"""
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eaas.gpu.attention import ITEM_WORDS, PARTIALS, SPLIT_KEYS, plan_work
from eaas.gpu.sampling import CHOICE_WORDS
from eaas.worker.decoder import StepLimits

HEAD = 64
COUNT_STRIDE = 4  # words: a count begins at a multiple of 16 bytes
CHANGES = 512
_FETCHED = 1024  # words that a program fetches
_COUNTS = ("rows", "rows 0", "rows 1", "items 0", "items 1", "merges 0", "merges 1", "logits", "choices", "changes")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One micro-batch of a step of some size, on the device.

    Attributes:
        begin, size: Its rows of the step.
        n_rows, n_items, n_merges: int32 [1].
        tokens, positions, seqs: int32 [size].
        items, merges: As `eaas.gpu.attention.attention` takes them.
    """

    begin: int
    size: int
    n_rows: Tensor
    n_items: Tensor
    n_merges: Tensor
    tokens: Tensor
    positions: Tensor
    seqs: Tensor
    items: Tensor
    merges: Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of some size, on the device.

    Attributes:
        wanted: int32 [size], rows whose logits are wanted; n_wanted int32 [1] of them.
        choices: int32 [size, CHOICE_WORDS], the first n_choices int32 [1] of which choose tokens.
        n_changes: int32 [1]; changes int32 [CHANGES, 4].
    """

    size: int
    parts: tuple[Part, ...]
    wanted: Tensor
    n_wanted: Tensor
    choices: Tensor
    n_choices: Tensor
    changes: Tensor
    n_changes: Tensor


class StepInputs:
    """Inputs of one decoder's steps, and its block tables on the device.

    Args:
        group: Query heads of a key head.
        most: Rows of its largest step.
    """

    def __init__(self, limits: StepLimits, *, group: int, most: int, device: torch.device) -> None:
        self._limits = limits
        self._group = group
        self._most = most
        self.partials = min(PARTIALS, most * -(-limits.max_positions // SPLIT_KEYS))
        words = HEAD + (4 + CHOICE_WORDS) * most + 4 * CHANGES + 2 * (4 * most + ITEM_WORDS * (most + self.partials))
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._words = self._host.numpy()
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        columns = -(-limits.max_positions // limits.block_tokens)
        self._mirror = np.full((most, columns), -1, dtype=np.int32)
        self._sound = np.zeros(most, dtype=np.int64)
        self._tables_host = torch.from_numpy(self._mirror)
        self.tables = torch.full((most, columns), -1, dtype=torch.int32, device=device)

    def step(self, size: int, parts: int) -> Step:
        """The device's side of steps of `size` rows, in `parts` micro-batches."""
        places = _Places(size, parts, self.partials)

        def view(begin: int, *shape: int) -> Tensor:
            return self._device[begin : begin + int(np.prod(shape))].view(*shape)

        def count(name: str) -> Tensor:
            return view(places.count(name), 1)

        each = size // parts
        return Step(
            size=size,
            parts=tuple(
                Part(
                    begin=number * each,
                    size=each,
                    n_rows=count(f"rows {number}"),
                    n_items=count(f"items {number}"),
                    n_merges=count(f"merges {number}"),
                    tokens=view(places.tokens + number * each, each),
                    positions=view(places.positions + number * each, each),
                    seqs=view(places.seqs + number * each, each),
                    items=view(places.items[number], each + self.partials, ITEM_WORDS),
                    merges=view(places.merges[number], each, 4),
                )
                for number in range(parts)
            ),
            wanted=view(places.wanted, size),
            n_wanted=count("logits"),
            choices=view(places.choices, size, CHOICE_WORDS),
            n_choices=count("choices"),
            changes=view(places.changes, CHANGES, 4),
            n_changes=count("changes"),
        )

    def clear(self) -> None:
        """Say that nothing is to be done: a step then changes nothing."""
        self._words[:HEAD] = 0
        self._words[0] = HEAD

    def fill(self, arrays: Sequence[np.ndarray], choices: np.ndarray | None, size: int, parts: int) -> None:
        """Write a plan's rows for the next step of that size.

        Args:
            arrays: What `eaas.worker.decoder.plan_arrays` gave; `StepLimits.fault_of_rows` finds nothing.
            choices: int32 [wanted, CHOICE_WORDS]; None: no tokens are chosen.

        Raises:
            PlanInvalid: a row's position lies in a block that does not exist; nothing was written.
        """
        tokens, positions, _, _, wanted = arrays
        rows_of_tables, changes = self._take_tables(arrays)
        places, words = _Places(size, parts, self.partials), self._words
        each, rows = size // parts, len(tokens)
        first = -(-rows // parts)
        bounds = [(0, first), (first, rows)][:parts]
        words[:HEAD] = 0
        for number, (begin, end) in enumerate(bounds):
            to = number * each
            for place, array in ((places.tokens, tokens), (places.positions, positions), (places.seqs, rows_of_tables)):
                words[place + to : place + to + end - begin] = array[begin:end]
            work = plan_work(positions[begin:end], rows_of_tables[begin:end], self._group, self.partials)
            for place, array in ((places.items[number], work.items), (places.merges[number], work.merges)):
                words[place : place + array.size] = array.ravel()
            words[places.count(f"rows {number}")] = end - begin
            words[places.count(f"items {number}")] = len(work.items)
            words[places.count(f"merges {number}")] = len(work.merges)
            words[0] = places.items[number] + work.items.size
        words[places.wanted : places.wanted + len(wanted)] = rows_in_buffers(wanted, rows, size, parts)
        if choices is not None:
            words[places.choices : places.choices + choices.size] = choices.ravel()
            words[places.count("choices")] = len(choices)
        words[places.changes : places.changes + changes.size] = changes.ravel()
        words[places.count("changes")] = len(changes)
        words[places.count("rows")] = rows
        words[places.count("logits")] = len(wanted)

    def fetch(self, step: Step) -> None:
        """Launch what brings the inputs to the device and its block tables up to date."""
        places = _Places(step.size, len(step.parts), self.partials)
        fetch(self._host, self._device, places.end)
        patch_kernel[(1,)](
            step.changes, step.n_changes, self.tables, self.tables.shape[1], BLOCK=CHANGES, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip

    def _take_tables(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the device's tables for a plan's rows, and the entries to change there.

        Raises:
            PlanInvalid: a row's position lies in a block that does not exist.
        """
        _, positions, sequences, tables, _ = arrays
        used = np.unique(sequences)
        rows = sequences
        own = used
        if len(tables) > self._most:
            # More sequences than a step can have rows: those in use are numbered anew.
            rows = np.searchsorted(used, sequences).astype(np.int32)
            own = np.arange(len(used))
        columns = int(positions.max()) // self._limits.block_tokens + 1
        given, mine = tables[used, :columns], self._mirror[own, :columns]
        differ = given != mine
        changed = np.flatnonzero(differ.any(axis=1))
        sound = self._sound.copy()
        if len(changed):
            whole = self._mirror[own[changed]]
            whole[:, :columns] = given[changed]
            sound[own[changed]] = self._limits.sound_blocks(whole)
        fault = self._limits.fault_of_blocks((arrays[0], positions, rows), sound)
        if fault:
            raise self._limits.refusal(*fault, arrays)
        if not len(changed):
            return rows, np.zeros((0, 4), dtype=np.int32)
        self._sound = sound
        self._mirror[own[changed]] = whole
        row, column = np.nonzero(differ)
        if len(row) > CHANGES:
            self.tables.copy_(self._tables_host)
            return rows, np.zeros((0, 4), dtype=np.int32)
        return rows, np.stack([own[row], column, given[row, column], np.zeros_like(row)], axis=1).astype(np.int32)


class _Places:
    """Where everything begins, in words."""

    def __init__(self, size: int, parts: int, partials: int) -> None:
        each = size // parts
        self.tokens = HEAD
        self.positions, self.seqs, self.wanted = (HEAD + size * number for number in (1, 2, 3))
        self.choices = HEAD + 4 * size
        self.changes = self.choices + CHOICE_WORDS * size
        begin = self.changes + 4 * CHANGES
        self.merges = [begin + 4 * each * number for number in range(parts)]
        begin += 4 * size
        room = ITEM_WORDS * (each + partials)
        self.items = [begin + room * number for number in range(parts)]
        self.end = begin + room * parts

    @staticmethod
    def count(name: str) -> int:
        """Where a count lies."""
        return COUNT_STRIDE * (1 + _COUNTS.index(name))


def rows_in_buffers(rows: np.ndarray, count: int, size: int, parts: int) -> np.ndarray:
    """Where rows of a step of `count` lie in buffers of `size`, half of which a second micro-batch has."""
    first = -(-count // parts)
    return rows if parts == 1 else np.where(rows < first, rows, rows - first + size // parts)


def fetch(host: Tensor, device: Tensor, most: int) -> None:
    """Launch a copy of int32 words in use, as the first of them counts, of at most so many."""
    grid = triton.cdiv(most, _FETCHED)
    fetch_kernel[(grid,)](host, device, BLOCK=_FETCHED, num_warps=4, enable_fp_fusion=False)


@triton.jit
def fetch_kernel(host, device, BLOCK: tl.constexpr):
    """A program copies BLOCK words, as far as they are in use."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Volatile: what the host wrote since the last step must be read, whatever a cache holds.
    used = tl.load(host, volatile=True)
    value = tl.load(host + word, mask=word < used, other=0, volatile=True)
    tl.store(device + word, value, mask=word < used)


@triton.jit
def patch_kernel(changes, n_changes, tables, columns, BLOCK: tl.constexpr):
    """Write changed entries of the block tables."""
    change = tl.arange(0, BLOCK)
    there = change < tl.load(n_changes)
    row = tl.load(changes + change * 4, mask=there, other=0)
    column = tl.load(changes + change * 4 + 1, mask=there, other=0)
    block = tl.load(changes + change * 4 + 2, mask=there, other=0)
    tl.store(tables + row.to(tl.int64) * columns + column, block, mask=there)
