"""What the scheduler and the engine say to each other about one step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eaas.worker.request import Request, TokenArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step: n rows, of which m + k give logits: m to choose tokens by, and k to judge tokens of prompts by.

    Args:
        token_ids: int32 [n].
        positions: int32 [n]; rows of one sequence are in ascending order.
        seqs: int32 [n], row -> row of `block_tables`.
        block_tables: int32 [slots, blocks of the longest sequence]; a view, valid for this step.
        logits_rows: int32 [m + k], indexes into the n rows.
        requests: The m requests, in the order of `logits_rows`; valid for this step.
        slots: int32 [m], their slots.
        judged: What the k rows are for, in their order.
        begun: Requests none of whose rows were computed since they came, or were preempted, until this step.
        drop: uint8 [n]: 1 where a lost expert's term may be left out, else 0; None: nowhere.
        routed: The experts of some of the rows are wanted.
    """

    token_ids: TokenArray
    positions: TokenArray
    seqs: TokenArray
    block_tables: TokenArray
    logits_rows: TokenArray
    requests: list[Request]
    slots: TokenArray
    drop: NDArray[np.uint8] | None
    judged: Sequence[Judged] = ()
    begun: Sequence[Request] = ()
    routed: bool = False


class Judged(NamedTuple):
    """Tokens number `start` to `stop` - 1 of a request's prompt, whose log-probabilities a step computes."""

    request: Request
    start: int
    stop: int


class Emitted(NamedTuple):
    """A token that a step made: number `number` of the request's output; the last says how it finished. Below 0: none
    was chosen yet."""

    request: Request
    number: int
    token: int
    finish: Literal["", "stop", "length", "complete"]


class Chunk(NamedTuple):
    """Tokens `start` to `stop` - 1 of a request's context, computed in one step."""

    request: Request
    start: int
    stop: int


class Flight(NamedTuple):
    """The step between `plan` and `complete`."""

    decoding: list[Request]
    slots: TokenArray
    chunks: list[Chunk]


def judged_of(request: Request, start: int, stop: int) -> tuple[int, int]:
    """Which tokens of a prompt rows `start` to `stop` - 1 judge that were not: each row the one after it."""
    last = min(stop + 1, len(request.prompt))
    return min(max(start + 1, request.judged), last), last


def rows_to_judge(chunk: Chunk) -> int:
    """How many tokens of its prompt a chunk judges."""
    first, last = judged_of(*chunk)
    return last - first
