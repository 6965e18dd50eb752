"""What one step computes, from the scheduler through the engine to the decoder. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eaas.worker.request import Chunk, Request, TokenArray

# In place of a forced expert: the gate chooses.
FREE = 0xFFFF


@dataclass(kw_only=True, slots=True, eq=False)
class StepTaps:
    """What a step records of some of its rows, and where to (eaas.worker.taps).

    Steps of the same rows may be given the same object, with another frame each.

    Args:
        rows: int32 [r], ascending.
        places: int64 [kinds but "expert", layers]: where in `frame` what is recorded of a kind and layer begins, as
            [r, width]; below 0: nothing is.
        experts: int64 [e, 3]: layer, expert, and where its [r, hidden] begin.
        frame: float32; written by the step.
        statistics: Of each row the four of `eaas.worker.taps.STATISTICS` in place of its numbers; of logits in place
            of the first four.
    """

    rows: TokenArray
    places: NDArray[np.int64]
    experts: NDArray[np.int64]
    frame: NDArray[np.float32]
    statistics: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step: n rows, of which m + k give logits: m to choose tokens by, k for log-probabilities of prompts.

    A decoder needs those before `requests` alone.

    Args:
        token_ids: int32 [n].
        positions: int32 [n], from 0; rows of one sequence are in ascending order.
        seqs: int32 [n], row -> row of `block_tables`.
        block_tables: int32 [sequences, blocks]: cache block of positions b * block_tokens and on; what no row needs
            may hold anything. A view, valid for this step.
        logits_rows: int32 [m + k], indexes into the n rows.
        drop: uint8 [n] of experts.routes.KEEP or MAY_DROP; the step writes DROPPED where an expert's term was left
            out. None: nothing may be.
        routed: Note which experts the gates choose for the rows, for `Decoder.routing`.
        forced: uint16 [n, layers, top_k]: experts that a row has in place of the gates' choice; FREE: it has none.
            None: no row has any.
        taps: What is recorded; None: nothing.
        requests: The m requests, in the order of `logits_rows`; valid for this step.
        prompt_logprobs: Tokens of prompts that the k rows are for, in their order.
        begun: Requests none of whose rows were computed since they came, or were preempted, until this step.
        ahead: int64 [m]: how many drafts of its request each of the m rows comes after; one that has drafts is in
            `requests` once more for each. None: no row does.
    """

    token_ids: TokenArray
    positions: TokenArray
    seqs: TokenArray
    block_tables: TokenArray
    logits_rows: TokenArray
    drop: NDArray[np.uint8] | None = None
    routed: bool = False
    forced: NDArray[np.uint16] | None = None
    taps: StepTaps | None = None
    requests: Sequence[Request] = ()
    prompt_logprobs: Sequence[Chunk] = ()
    begun: Sequence[Request] = ()
    ahead: NDArray[np.int64] | None = None

    @property
    def slots(self) -> TokenArray:
        """int32 [m]: the slots of `requests`."""
        return self.seqs[self.logits_rows[: len(self.requests)]]


def forced_rows(
    by_slot: Mapping[int, NDArray[np.uint16]], seqs: TokenArray, positions: TokenArray
) -> NDArray[np.uint16] | None:
    """`StepPlan.forced` of these rows. Args: by_slot: experts of the first tokens of what runs in that slot."""
    rows: NDArray[np.uint16] | None = None
    for slot, experts in by_slot.items():
        those = np.flatnonzero((seqs == slot) & (positions < len(experts)))
        if len(those):
            if rows is None:
                rows = np.full((len(seqs), *experts.shape[1:]), FREE, np.uint16)
            rows[those] = experts[positions[those]]
    return rows
