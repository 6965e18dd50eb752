"""Inspections that an operator begins at this gateway: what attention workers record of its requests.

The gateway chooses the requests, tells every worker that it is connected to, those that come later too, and puts
together what they say (eaas.worker.inspector). Rows themselves never come here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from eaas.gateway.constraints import Strict
from eaas.gateway.dashboard.board import InspectionShown
from eaas.gateway.errors import ApiError, ErrorReply, invalid
from eaas.gateway.link import WorkerLink
from eaas.worker.protocol import EndInspection, Inspect, Inspected

# Workers answer between two steps; those that have ended write what they have first.
_ANSWER_S, _END_S = 3.0, 6.0
_POLL_S = 0.02
# Of what a worker says; views are for people.
_COUNTED = ("produced", "delivered", "dropped")
_TOLD = (*_COUNTED, "fault", "ended", "folder")


class InspectRequest(Strict, extra="forbid"):
    """Body of POST /admin/inspect; the fields of `eaas.worker.protocol.Inspect`, and which requests are recorded.

    requests: ids that their clients gave (the header X-Request-Id, `request_id`) or were told. share: of the others,
    chosen by the ids of their responses; all, or none where requests are named. model: whose workers record; none: of
    the gateway's own.
    """

    taps: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=1024)]
    requests: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=1024)] = ()
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    model: str | None = None
    statistics: bool = False
    policy: Literal["drop-oldest", "drop-newest", "block"] = "drop-oldest"
    sink: Literal["safetensors", "npy", "arrow", "spans", "views"] = "safetensors"
    ring_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 34)] = 256 << 20
    for_s: Annotated[float, Field(gt=0, le=86400)] = 3600.0

    def order(self, id: str) -> Inspect:
        return Inspect(id=id, **self.model_dump(exclude={"requests", "share"}))


class Inspections:
    """One inspection at a time, the last one after it has ended too. Everything on the event loop."""

    def __init__(self, links: Callable[[], Sequence[WorkerLink]]) -> None:
        self._links = links
        self._asked: dict[str, Any] = {}
        self._order: Inspect | None = None
        self._named: frozenset[str] = frozenset()
        self._share = 0.0
        self._began_s = self._ended_s = 0.0
        self._told: dict[tuple[str, int], Inspected] = {}  # by name and incarnation of the worker

    # -- what the pool asks

    def name_of(self, choice: str, response_id: str, request_id: str) -> str:
        """Under which name rows of a choice are recorded; "": they are not. Args: choice: its own name within this
        process. response_id, request_id: as its client was told, and as it named the request itself; others may name
        theirs so, too."""
        if self._order is None or not self._is_under_way:
            return ""
        named = not self._named.isdisjoint((response_id, response_id.partition("-")[2], request_id))
        # The same requests are chosen again where they are sent again.
        if named or zlib.crc32(response_id.encode()) < self._share * 2**32:
            _, drawn, index = choice.rsplit("-", 2)
            return f"{self._order.id}/{response_id}-{drawn}-{index}"
        return ""

    def link_ready(self, link: WorkerLink) -> None:
        """Have a worker that has just connected take part."""
        if self._order is None:
            return
        if not self._is_under_way:
            link.send(EndInspection(id=self._order.id))
            return
        left_s = max(0.001, self._order.for_s - (time.monotonic() - self._began_s))
        link.send(msgspec.structs.replace(self._order, for_s=left_s))

    def heard(self, link: WorkerLink, message: Inspected) -> None:
        if self._order is not None and message.id == self._order.id:
            self._told[link.name, link.incarnation] = message

    def link_lost(self, link: WorkerLink) -> None:
        """A worker is out of reach: what it recorded since it last spoke is not known."""
        key = link.name, link.incarnation
        if key in self._told and not self._told[key].ended:
            self._told[key] = msgspec.structs.replace(self._told[key], ended=True, fault="The connection was lost.")

    def close(self) -> None:
        """Its workers are gone for good."""
        self._ended_s = self._ended_s or time.monotonic()

    def shown(self) -> InspectionShown | None:
        """What people are shown while one is under way."""
        if self._order is None or not self._is_under_way:
            return None
        return InspectionShown(
            id=self._order.id,
            taps=len(self._order.taps),
            **self._counts(),
            fault=next((told.fault for told in self._told.values() if told.fault), ""),
            # Requests go to workers at random: that which has recorded most shows what all do.
            layers=max(self._told.values(), key=lambda told: told.delivered).views if self._told else [],
        )

    @property
    def _is_under_way(self) -> bool:
        order = self._order
        return order is not None and not self._ended_s and time.monotonic() - self._began_s < order.for_s

    def _counts(self) -> dict[str, int]:
        return {what: sum(getattr(told, what) for told in self._told.values()) for what in _COUNTED}

    # -- what operators ask

    async def begin(self, asked: InspectRequest) -> dict[str, Any]:
        """Begin one. Returns `state`. Raises ApiError: 409, one is under way; 400, every worker refuses it; 503, there
        is no worker."""
        if self._is_under_way and self._order is not None:
            message = f"{self._order.id} is under way at this gateway; end it first (eaas inspect stop)."
            raise ApiError(ErrorReply(status=409, message=message, code="inspection_under_way"))
        links = self._links()
        if not links:
            message = "No attention worker is connected. Begin the inspection when one serves."
            raise ApiError(ErrorReply(status=503, message=message, code="not_ready"))
        before = vars(self).copy()
        order = asked.order(f"inspect-{secrets.token_hex(4)}")
        self._asked, self._order, self._told = asked.model_dump(), order, {}
        self._named = frozenset(asked.requests)
        self._share = (0.0 if asked.requests else 1.0) if asked.share is None else asked.share
        self._began_s, self._ended_s = time.monotonic(), 0.0
        for link in links:
            link.send(order)
        await self._until(lambda: len(self._told) >= len(links), _ANSWER_S)
        refusals = [told.fault for told in self._told.values() if told.ended and told.fault]
        # It may have been ended while it waited, and another begun.
        if order is self._order and refusals and len(refusals) == len(self._told):
            # It never began: the one before is what is shown.
            vars(self).update(before)
            raise invalid(f"No attention worker records this: {refusals[0]}", code="inspection_refused")
        return self.state()

    async def end(self, id: str | None = None) -> dict[str, Any]:
        """End it, and wait for its workers to have written what they have. As `state`. Idempotent."""
        order, told = self._known(id), self._told
        if not self._ended_s:
            self._ended_s = time.monotonic()
            for link in self._links():
                link.send(EndInspection(id=order.id))
        await self._until(lambda: all(one.ended for one in told.values()), _END_S)
        return self.state()

    def _known(self, id: str | None) -> Inspect:
        if self._order is None or id not in (None, self._order.id):
            message = f"There was no inspection {id or ''}".rstrip() + " at this gateway; another at its address may "
            message += "have one: ask again. Begin one by POST /admin/inspect, or eaas inspect start."
            raise ApiError(ErrorReply(status=404, message=message, code="no_inspection"))
        return self._order

    def state(self, id: str | None = None) -> dict[str, Any]:
        """The inspection, or the last one, and how it goes at each worker. Raises ApiError: 404, there was none, or not
        that of the id."""
        order = self._known(id)
        workers = [
            {"name": name, "incarnation": incarnation, **{what: getattr(told, what) for what in _TOLD}}
            for (name, incarnation), told in sorted(self._told.items())
        ]
        return {
            "id": order.id,
            **self._asked,
            "share": self._share,
            "under_way": self._is_under_way,
            "age_s": round(time.monotonic() - self._began_s, 3),
            **self._counts(),
            "workers": workers,
        }

    async def _until(self, done: Callable[[], bool], longest_s: float) -> None:
        end_s = time.monotonic() + longest_s
        while not done() and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
