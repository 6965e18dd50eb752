"""The attention worker's end: expert calls that kernels make, so that a step with its calls is one captured graph.

A call is four launches: `dispatch`, two of `arrive` (which also mends), `combine`. None of their arguments changes when
servers come, go or fail: that is written into tables. Launch all calls of one client on one stream, or in an order
that streams keep; two micro-batches in flight take two clients, each with windows of its own.

Between steps, where they are launched: `begin` gives the next one its time, `publish` changes servers and routes,
`report` says, after the host has waited for a step, what became of it, and `reclaim` takes back slots whose late
reply came. A slot that still owes one is not used again before `link` gives the place new windows.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl

from experts.gpu.arrive import arrive
from experts.gpu.combine import combine
from experts.gpu.dispatch import dispatch
from experts.gpu.layout import ClientWord, ExchangeShape, Mark, ReportWord, Verdict
from experts.gpu.tables import ClientTables
from experts.gpu.words import CLIENT, PEER, SLOT
from p2p.device import load_acquire

DEFAULT_PATIENCE_S = 0.002  # one wait: forty times what a layer takes, and a step survives a hundred of them


@dataclass(frozen=True, kw_only=True)
class Link:
    """One server as its client sees it.

    Attributes:
        request: Address of this client's request window at the server.
        reply: Address of the server's reply window here.
        incarnation: The server's, u64.
        live: Whether it may be asked.
    """

    request: int
    reply: int
    incarnation: int
    live: bool = True


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What became of a step's calls.

    Attributes:
        lost: Tokens with an expert that nobody answered for in time: their rows are NaN.
        corrupt: Tokens with an answer that was not whole: their rows are NaN. Run the step again.
        mended: Pairs that were sent again.
        retired: Slots that were put aside.
        verdicts: By place, what went wrong with a server.
    """

    lost: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    mended: int = 0
    retired: int = 0
    verdicts: dict[int, frozenset[Verdict]] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether every row of the step is right."""
        return not self.lost and not self.corrupt


class DeviceClient:
    """Expert calls of one attention worker.

    Args:
        shape: Agreed with the servers.
        servers: Places for servers, at most 64.
        replicas: Of an expert, at most 8.
        tokens: Of a call, at most; more than a frame holds go in several.
        incarnation: This client's own, u64.
        device: A GPU, or "cpu" in the interpreter.
        rounds: How often missing pairs go to the next replica.
        patience_s: How long a server may take before they do.
        alone_s: How much longer one may take that nobody could take over from.
    """

    def __init__(
        self,
        shape: ExchangeShape,
        *,
        servers: int,
        replicas: int,
        tokens: int,
        incarnation: int,
        device: torch.device | str,
        rounds: int = 2,
        patience_s: float = DEFAULT_PATIENCE_S,
        alone_s: float = 0.0,
    ) -> None:
        self.tables = ClientTables(
            shape,
            servers=servers,
            replicas=replicas,
            tokens=tokens,
            rounds=rounds,
            incarnation=incarnation,
            device=device,
        )
        self.tables.set_control(ClientWord.PATIENCE_NS, int(patience_s * 1e9))
        self.tables.set_control(ClientWord.ALONE_NS, int(alone_s * 1e9))
        self._links: list[Link | None] = [None] * servers
        self._routes = torch.full((shape.layers, shape.experts, replicas), -1, dtype=torch.int32)
        self._steps = 0

    def link(self, place: int, link: Link | None) -> None:
        """Put a server with new windows in a place, or nobody; `publish` lets the next step see it.

        The windows that the place had before must be out of everyone's reach: its slots are taken to be free.

        Raises:
            ValueError: no such place, or an address is not a multiple of 64.
        """
        if not 0 <= place < self.tables.servers:
            raise ValueError(f"place is {place}; 0 to {self.tables.servers - 1} exist.")
        if link is not None and (link.request % 64 or link.reply % 64):
            raise ValueError(
                f"windows at {link.request:#x} and {link.reply:#x}; multiples of 64 bytes are needed."
            )
        self._links[place] = link
        self.tables.forget(place)

    def publish(self, routes: Sequence[Sequence[Sequence[int]]] | torch.Tensor | None = None) -> None:
        """Let the steps launched from now on see the links, and these routes or those there were.

        Args:
            routes: [layers, experts, replicas]: places in order of preference, then -1.

        Raises:
            ValueError: the routes are not of this shape, or name a place that does not exist.
        """
        if routes is not None:
            self._routes = torch.as_tensor(routes, dtype=torch.int32).contiguous().cpu()
        rows = [
            (link.request, link.reply, link.incarnation, int(link.live)) if link else (0, 0, 0, 0)
            for link in self._links
        ]
        self.tables.publish(rows, self._routes)

    def begin(self, budget_s: float) -> None:
        """Give the next step its time: its waits end `budget_s` after its first call begins."""
        self._steps += 1
        self.tables.set_control(ClientWord.BUDGET_NS, int(budget_s * 1e9))
        self.tables.set_control(ClientWord.STEP, self._steps)

    def enqueue(
        self,
        layer: int,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        n_rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch one expert call; may be captured.

        Args:
            layer: Counted over MoE layers.
            rows: bf16 [B, hidden].
            ids: int32 [B, top_k].
            weights: float32 [B, top_k].
            n_rows: int32 [1] on the device: rows that count.
            out: float32 [B, hidden].

        Raises:
            ValueError: a shape or type does not fit.
        """
        for first in range(0, len(rows), self.tables.shape.capacity):
            dispatch(self.tables, layer, rows, ids, n_rows, first)
            arrive(self.tables, layer, rows, ids, n_rows, first)
            combine(self.tables, layer, rows, ids, weights, n_rows, out, first)

    def report(self) -> StepReport:
        """What became of the calls since the last report. Wait for the step first: nothing may be running."""
        words = self.tables.report.tolist()
        self.tables.report.zero_()
        head, flags = ReportWord.WORDS, words[ReportWord.WORDS :]
        marks = words[head + self.tables.servers :]
        return StepReport(
            lost=tuple(token for token, mark in enumerate(marks) if mark & Mark.LOST),
            corrupt=tuple(token for token, mark in enumerate(marks) if mark & Mark.CORRUPT),
            mended=words[ReportWord.MENDED],
            retired=words[ReportWord.RETIRED],
            verdicts={
                place: frozenset(verdict for verdict in Verdict if flags[place] >> verdict & 1)
                for place in range(self.tables.servers)
                if flags[place]
            },
        )

    def take_routed(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows asked of each expert since the last time, and steps that asked any: uint32 [layers, experts] each.

        Call it where steps are launched, and between them; asks the device.
        """
        rows, steps = self.tables.routed[:2].cpu().numpy().astype(np.uint32)
        self.tables.routed[:2].zero_()
        return rows, steps

    def seen(self) -> np.ndarray:
        """What was seen of each place since its `link`: int64 [servers, SeenWord.WORDS]. As `take_routed`."""
        return self.tables.seen.cpu().numpy().copy()

    def reclaim(self) -> None:
        """Take back slots whose late reply has come since; a server that owes none is trusted again."""
        reclaim_kernel[(1,)](
            self.tables.peers, self.tables.suspect, self.tables.owed, self.tables.control,
            **self.tables.constants(reclaim_kernel.arg_names), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def retired(self) -> dict[int, int]:
        """Slots put aside, by place. Asks the device."""
        owed = (self.tables.owed != 0).sum(dim=1).tolist()
        return {place: count for place, count in enumerate(owed) if count}


@triton.jit
def reclaim_kernel(
    peers, suspect, owed, control,
    SERVERS: tl.constexpr, SLOTS: tl.constexpr, REPLY_STRIDE: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Free the slots whose late replies have come, and trust servers that owe none."""
    copy = tl.load(control + CLIENT.COPY)
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    window = tl.load(peers + (copy * SERVERS + server) * PEER.WORDS + PEER.REPLY, mask=there, other=0)
    owes = tl.zeros([WIDTH], tl.int32)
    owed_any = tl.zeros([WIDTH], tl.int32)
    for slot in tl.static_range(SLOTS):
        number = tl.load(owed + server * SLOTS + slot, mask=there, other=0)
        out = (number != 0) & (window != 0)
        seen = load_acquire((window + SLOT.FIRST + slot * REPLY_STRIDE).to(tl.pointer_type(tl.int64)), out)
        # The server's signal comes after all it writes there: it is done with the slot.
        came = out & (seen == number)
        tl.store(owed + server * SLOTS + slot, tl.zeros([WIDTH], tl.int64), mask=came)
        owes |= (out & (came == 0)).to(tl.int32)
        owed_any |= out.to(tl.int32)
    trusted = (owed_any != 0) & (owes == 0)
    tl.store(suspect + server, tl.zeros([WIDTH], tl.int64), mask=there & trusted)
