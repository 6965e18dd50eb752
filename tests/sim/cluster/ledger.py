"""The world's own account of calls, tokens and requests, and what it promises of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.sim.cluster.members import expert_row
from tests.sim.cluster.workers import HEDGES_FREE, HEDGES_OF_CALLS, MASK, SLOTS, Call, Worker, mixed

if TYPE_CHECKING:
    from tests.sim.cluster.clients import Request
    from tests.sim.cluster.models import TrueModel
    from tests.sim.cluster.shell import Shown
    from tests.sim.cluster.world import World

_SLACK_S = 1.0


class Ledger:
    """Open requests with the tokens shown of each; calls with the pairs filled."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open: dict[int, tuple[Request, list[int]]] = {}
        self.ends: Counter[str] = Counter()
        self.tokens = self.calls = 0
        self._ended: set[int] = set()
        self._filled: dict[Call, set[tuple[int, int]]] = {}
        self._must_succeed_s = float("inf")
        self._begun_s: dict[int, float] = {}

    def _check(self, kept: bool, promise: str, story: str) -> None:
        if not kept:
            self.world.judge.broken(promise, story)

    # Requests.

    def begun(self, request: Request) -> None:
        """A client asked."""
        self.open[request.id] = (request, [])
        self._begun_s[request.id] = self.world.now_s

    def emitted(self, request: Request, index: int, token: int) -> None:
        """The client was shown a token."""
        self.tokens += 1
        found = self.open.get(request.id)
        if found is None:
            self.world.judge.broken("a request ends once", f"request {request.id} got a token after its end")
        tokens = found[1]
        self._check(
            index == len(tokens),
            "token indexes are contiguous",
            f"request {request.id}: index {index} after {len(tokens)} tokens",
        )
        right = self._right(request.model, request.seed, index, tokens[-1] if tokens else 0)
        self._check(
            token == right,
            "greedy output is that of a run without faults",
            f"request {request.id}, token {index}: {token} for {right}",
        )
        tokens.append(token)

    def _right(self, model: TrueModel, seed: int, index: int, last: int) -> int:
        """The token that a run without faults gives, and without other models."""
        experts = model.experts
        value = (((seed + index) * 0x9E3779B1) + last * 0x85EBCA6B + 12345) & MASK
        for layer in range(model.layers):
            first, base = value % experts, model.at + layer * experts
            rows = [expert_row(base + first, value)]
            if model.top_k == 2:
                second = (first + 1 + (value >> 8) % (experts - 1)) % experts
                rows.append(expert_row(base + second, value))
            for row in rows:
                value = mixed(value, row)
        return value

    def ended(self, request: Request, how: str) -> None:
        """The client was told that its request is over."""
        found = self.open.pop(request.id, None)
        self._check(found is not None, "a request ends once", f"request {request.id} ended again: {how}")
        self.ends[how] += 1
        begun_s = self._begun_s.pop(request.id)
        now_s = self.world.now_s
        self._check(
            now_s <= request.deadline_s + _SLACK_S,
            "a request ends by its deadline",
            f"request {request.id} ended {now_s - request.deadline_s:.2f} s after its deadline",
        )
        if how == "ok":
            self._check(
                len(found[1]) == request.most,
                "a request ends whole",
                f"request {request.id} ended with {len(found[1])} of {request.most} tokens",
            )
        else:
            self._check(
                begun_s < self._must_succeed_s,
                "requests succeed once all is well",
                f"request {request.id} ended by {how}, {now_s - begun_s:.1f} s after it was begun",
            )

    def all_must_succeed_from(self, when_s: float) -> None:
        """Faults are over and all came back: no request begun from then on may fail."""
        self._must_succeed_s = when_s

    def placed(self, request: Request, worker: Worker, shown: Shown | None) -> None:
        """A gateway handed a request to a worker."""
        row = shown.rows.get(worker.name) if shown is not None else None
        self._check(
            row is None or row.phase != "draining",
            "who drains gets no new streams",
            f"request {request.id} was given to {worker.name}",
        )
        self._check(
            worker.model is request.model,
            "a request runs on a worker of its model",
            f"request {request.id} of {request.model.hash} was given to {worker.name} of {worker.model.hash}",
        )
        known = self.world.judge.present.get(worker.incarnation)
        self._check(
            known is None or known.begun,
            "who is not ready gets no streams",
            f"request {request.id} was given to {worker.name}",
        )

    # Calls.

    def begin_call(self, call: Call) -> None:
        """One layer of a step is about to be asked of the servers."""
        self.calls += 1
        self._filled[call] = set()

    def filled(self, call: Call, token: int, k: int) -> None:
        """An answer for (token, k) was taken."""
        filled = self._filled[call]
        self._check((token, k) not in filled, "each (call, token, k) is combined once", f"({call.id}, {token}, {k})")
        filled.add((token, k))

    def combined(self, call: Call) -> None:
        """All answers of a layer were added up."""
        wanted, found = len(call.values) * call.top_k, len(self._filled.pop(call))
        self._check(wanted == found, "each (call, token, k) is combined once", f"call {call.id}: {found} of {wanted}")

    def dropped(self, call: Call) -> None:
        """A call was abandoned: nobody waits for it."""
        self._filled.pop(call, None)

    def hedged(self, worker: Worker) -> None:
        """A hedge was sent."""
        self._check(
            worker.hedges <= worker.calls / HEDGES_OF_CALLS + HEDGES_FREE + 1,
            "hedges stay within their cap",
            f"{worker.name}: {worker.hedges} hedges in {worker.calls} calls",
        )

    # Now and then.

    def look(self) -> None:
        """What can be seen only by looking."""
        now_s = self.world.now_s
        for request, _ in self.open.values():
            self._check(
                now_s <= request.deadline_s + _SLACK_S,
                "a request ends by its deadline",
                f"request {request.id} is open {now_s - request.deadline_s:.1f} s after its deadline",
            )
        for process in self.world.processes.values():
            if isinstance(process, Worker):
                for link in process.links.values():
                    self._check(
                        link.free + len(link.flying) == SLOTS,
                        "credits are conserved",
                        f"{process.name} to {link.name}: {link.free} free, {len(link.flying)} in flight",
                    )

    def close(self) -> None:
        """The end of the run."""
        self.look()
