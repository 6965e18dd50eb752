"""Requests whose grammars are being compiled: they are queued once that is done, and hold nobody up until then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

from eaas.worker.constraint import Constraint, Grammars
from eaas.worker.grammar import Grammar, GrammarInvalid
from eaas.worker.request import Refused, Request

# Most take a millisecond. One that takes longer than this goes on in vain, but its client has an answer.
LONGEST_S = 10.0
# Each is up to 64 KB and holds a place in a queue of threads.
MOST = 1024


class _Pending(NamedTuple):
    request: Request
    constraint: Future[Constraint]
    until_s: float


class Compiling:
    """The requests of one engine that wait for their grammars, in order of arrival. Belongs to the engine's thread."""

    def __init__(
        self, grammars: Grammars | None, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """Args: as for the engine."""
        self._grammars = grammars
        self._wake = wake
        self._clock = clock
        self._pending: dict[tuple[int, str], _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def ready(self) -> bool:
        """Whether `take` would return anything."""
        if not self._pending:
            return False
        now_s = self._clock()
        return any(p.constraint.done() or now_s >= p.until_s for p in self._pending.values())

    @property
    def waiting(self) -> int:
        """How many are being compiled still."""
        return sum(not pending.constraint.done() for pending in self._pending.values())

    def requests(self) -> list[Request]:
        """Those that wait."""
        return [pending.request for pending in self._pending.values()]

    def get(self, owner: int, id: str) -> Request | None:
        """The request of that name, if it waits."""
        pending = self._pending.get((owner, id))
        return None if pending is None else pending.request

    def add(self, request: Request, grammar: Grammar) -> None:
        """Have a request's grammar compiled.

        Raises:
            Refused: grammars cannot be followed here, or too many wait.
        """
        if self._grammars is None:
            raise Refused(
                "bad_request",
                "This model's tokenizer cannot follow a grammar; the worker's log says why. Leave out response_format "
                "and structured_outputs.",
            )
        if (request.owner, request.id) in self._pending:
            raise Refused("bad_request", f"Request {request.id} is already being served; use another id.")
        if len(self._pending) >= MOST:
            raise Refused(
                "overloaded", f"{MOST} grammars wait to be compiled here; try again later.", retryable=True
            )
        params = request.params
        future = self._grammars.begin(grammar, request.output, sorted(request.stops), params.min_tokens)
        self._pending[request.owner, request.id] = _Pending(request, future, self._clock() + LONGEST_S)
        future.add_done_callback(lambda _: self._wake())

    def cancel(self, owner: int, id: str) -> bool:
        """Forget a request; False if there is none of that name."""
        pending = self._pending.pop((owner, id), None)
        if pending is None:
            return False
        pending.constraint.cancel()
        return True

    def take(self) -> list[tuple[Request, Refused | None]]:
        """Those that wait no longer, in order of arrival: each with its constraint, or why it is refused."""
        if not self.ready:
            return []
        now_s = self._clock()
        taken: list[tuple[Request, Refused | None]] = []
        for key, (request, future, until_s) in list(self._pending.items()):
            if future.done():
                taken.append((request, _settle(request, future)))
            elif now_s >= until_s:
                waiting = future.cancel()
                taken.append((request, _too_long(waiting)))
            else:
                continue
            del self._pending[key]
        return taken


def _settle(request: Request, future: Future[Constraint]) -> Refused | None:
    try:
        request.constraint = future.result()
    except GrammarInvalid as error:
        return Refused("bad_request", f"The grammar cannot be followed: {error}")
    except CancelledError:
        return Refused("shutting_down", "The worker stops.", retryable=True)
    return None


def _too_long(waiting: bool) -> Refused:
    if waiting:
        return Refused("overloaded", "Other grammars are being compiled; try again later.", retryable=True)
    return Refused("bad_request", f"The grammar took over {LONGEST_S:g} s to compile; make it simpler.")
