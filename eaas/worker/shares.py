"""Who comes next of tenants that want more than there is: fair queueing by tokens. Pure.

A flow is what one tenant wants in one class. Its tag is the tokens that were computed for it, over its weight; the flow
with the lowest tag comes first, so that flows which always want more get tokens by their weights. What a flow did not
use is not saved up: when it wants something again it begins at the lowest tag of those that wait, and where nobody
waits all begin anew.

A request holds its slot until it ends. So who is admitted is decided by what those that run will take too, as far as
can be reckoned: a flow whose many requests have just begun is not taken for one that has had little.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def has_room(used: int, weight: int, total: int, weights: int, most: int) -> bool:
    """Whether one more of a tenant is let in where at most `most` are.

    A tenant that has less than its part is let in beyond that, up to an eighth more: who came first and took it all
    keeps nobody out.

    Args:
        used: The tenant's own, of the `total` that are there.
        weight: The tenant's, of `weights`, the sum of all that have some there, its own included.
    """
    return total < most or (used * weights < most * weight and total < most + max(1, most // 8))


class Flows:
    """All tenants of one scheduler, by class and name."""

    def __init__(self) -> None:
        self._flows: dict[tuple[bool, str], Flow] = {}

    @property
    def contested(self) -> bool:
        """Whether there is more than one: while there is not, nobody's tokens need counting."""
        return len(self._flows) > 1

    def of(self, share: Share, *, background: bool) -> Flow:
        """A tenant's flow, which is about to want one more."""
        key = background, share.tenant
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= MOST_IDLE:
                self._flows = {key: flow for key, flow in self._flows.items() if flow.live}
            flow = self._flows[key] = Flow(background=background)
        flow.weight, flow.token = share.weight, 1 / share.weight
        if self.contested and not flow.waiting:
            self._begin(flow)
        return flow

    def _begin(self, flow: Flow) -> None:
        """A flow wants more than it has: nothing that it left to others before is made up for."""
        waiting = [other for other in self._flows.values() if other.waiting]
        rivals = [other.tag for other in waiting if other.background == flow.background]
        flow.tag = max(flow.tag, min(rivals)) if rivals else 0.0
        classes = {other.background for other in waiting}
        for key, other in list(self._flows.items()):
            if other.background not in classes:
                other.tag = 0.0
                if not other.live and other is not flow:
                    del self._flows[key]

    def waiting(self) -> list[Flow]:
        """Those with requests that wait, those in the background last, and of each class the lowest tag first. Any
        thread."""
        waiting = [flow for flow in list(self._flows.values()) if flow.waiting]
        return sorted(waiting, key=Flow.turn) if len(waiting) > 1 else waiting

    def reckon(self, running: Iterable[Request]) -> None:
        """Note what each flow's running requests will take."""
        for flow in self._flows.values():
            flow.ahead = flow.tag
        for request in running:
            request.flow.ahead += reckoned_tokens(request) * request.flow.token

    def next(self, *, background: bool) -> Flow | None:
        """The flow of a class whose request is to be admitted next; None: none waits."""
        waiting = [flow for flow in self._flows.values() if flow.waiting and flow.background == background]
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        return min(waiting, key=lambda flow: (flow.ahead, flow.waiting[0].order))

    def weights(self, flow: Flow) -> int:
        """Of all that have requests, and this one."""
        return sum(other.weight for other in self._flows.values() if other.live or other is flow)
