"""Who comes next of tenants that want more than there is: fair queueing by tokens. Pure.

A flow is what one tenant wants in one class. Its tag is the tokens that were computed for it, over its weight; the flow
with the lowest tag comes first, so that flows which always want more get tokens by their weights. What a flow did not
use is not saved up: when it wants something again it begins at the lowest tag of those that wait, and where nobody
waits all begin anew.

A request holds its slot until it ends. So who is admitted is decided by what those that run will take too, as far as
can be reckoned: a flow whose many requests have just begun is not taken for one that has had little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eaas.worker.protocol import Share
from eaas.worker.request import Flow, Request

# Output tokens reckoned for a request, at most, until it has made as many: limits are mostly far above what is
# generated.
RECKONED_TOKENS = 256
# Flows that are remembered though they want nothing now, at most: of tenants whose one request was ahead of its turn.
MOST_IDLE = 4096


def reckoned_tokens(request: Request) -> int:
    """Tokens to be computed for a request from here on: what is left of its prompt, and as many of output as it has
    made already, but at least RECKONED_TOKENS, and at most what it may make."""
    made = len(request.output)
    prefill = max(0, len(request.context) - request.computed) if request.slot >= 0 else request.length
    return prefill + min(request.params.max_tokens - made, max(RECKONED_TOKENS, made))


def has_room(had: Mapping[Share, int], share: Share, most: int, more: int = 1) -> bool:
    """Whether a tenant is let in with so many `more` where at most `most` are to be.

    One that has less than its weight's part is let in beyond that, up to an eighth more: who came first and took it
    all keeps nobody out.

    Args:
        had: How many each tenant has, of those that have some.
    """
    total = sum(had.values()) + more
    weights = sum(other.weight for other in {*had, share})
    has_less = (had.get(share, 0) + more - 1) * weights < most * share.weight
    return total <= most or (has_less and total <= most + max(1, most // 8))


class Flows:
    """All tenants of one scheduler, by class and name."""

    def __init__(self) -> None:
        self._flows: dict[tuple[bool, str], Flow] = {}

    @property
    def contested(self) -> bool:
        """Whether there is more than one: while there is not, nobody's tokens need counting."""
        return len(self._flows) > 1

    def of(self, share: Share) -> Flow:
        """A tenant's flow, which is about to want one more."""
        key = share.background, share.tenant
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= MOST_IDLE:
                self._flows = {key: flow for key, flow in self._flows.items() if flow.live}
            flow = self._flows[key] = Flow(share=share)
        flow.share, flow.token = share, 1 / share.weight
        if self.contested and not flow.waiting:
            self._begin(flow)
        return flow

    def _begin(self, flow: Flow) -> None:
        """A flow wants more than it has: nothing that it left to others before is made up for."""
        waiting = [other for other in self._flows.values() if other.waiting]
        classes = {other.share.background for other in waiting}
        rivals = [other.tag for other in waiting if other.share.background == flow.share.background]
        flow.tag = max(flow.tag, min(rivals, default=0.0))
        for key, other in list(self._flows.items()):
            if other.share.background not in classes:
                other.tag = 0.0
                if not other.live and other is not flow:
                    del self._flows[key]

    def waiting(self) -> list[Flow]:
        """Those with requests that wait, those in the background last, and of each class the lowest tag first. Any
        thread."""
        return sorted((flow for flow in list(self._flows.values()) if flow.waiting), key=Flow.turn)

    def reckon(self, running: Iterable[Request]) -> None:
        """Note what each flow's running requests will take."""
        for flow in self._flows.values():
            flow.ahead = flow.tag
        for request in running:
            request.flow.ahead += reckoned_tokens(request) * request.flow.token

    def next(self, *, background: bool) -> Flow | None:
        """The flow of a class whose request is to be admitted next; None: none waits."""
        waiting = [flow for flow in self._flows.values() if flow.waiting and flow.share.background == background]
        return min(waiting, key=lambda flow: (flow.ahead, flow.waiting[0].order), default=None)
