"""How an attention worker follows the router's placement, within the numerics class of its requests.

For its life a worker asks expert servers of one class: its own where the pool has it, else one that it can talk with.
Requests that began there stay there. While that class lacks an expert and another is whole, new arrivals are sent on
to workers of the other; what is under way waits for the router to load the expert within the class, up to the
deadline. A worker whose class is gone from the pool for good, while it could ask another, ends, so that the one
started in its place begins in that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from experts.client import ExpertClient
from experts.config import MOST_WEIGHT
from router.client import RouterClient, RouterUnavailable
from router.view import ATTENTION, EXPERT, SERVING, View, can_talk, class_for, covering, narrowed, of_model

log = logging.getLogger("eaas.attention")

COVER_POLL_S = 0.01
WANTED_POLL_S = 1.0
ROUTED_S = 1.0


class StartFailed(Exception):
    """The worker cannot start; the text says why and what to do."""


class Stopped(Exception):
    """Told to stop before it was ready."""


class Placement:
    """Follows the router's Views of the client's model: routes go to the expert client, epochs in use to the router.

    Attributes:
        asleep: Whether no server holds the model, until a request for it comes.
        elsewhere: Why requests that come now are better off with workers of another class; empty while they are not.
    """

    def __init__(
        self,
        router: RouterClient,
        client: ExpertClient,
        own: str,
        *,
        obsolete_s: float = 30.0,
        on_obsolete: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        own: Numerics class of the worker's arithmetic.
        obsolete_s: How long its class of servers must have been gone before it is given up.
        on_obsolete: Called when it is.
        """
        self.asleep, self.elsewhere = False, ""
        self._router, self._client = router, client
        self._own, self._asked = own, ""
        self._weight = client.weight
        self._obsolete_s, self._on_obsolete = obsolete_s, on_obsolete
        self._gone_since_s: float | None = None
        self._acked = 0
        self._routed_s = time.monotonic()

    @property
    def numerics_class(self) -> str:
        """What computes its requests: its own class, and that of the servers where it is another."""
        return self._own if self._asked in ("", self._own) else f"{self._own}+{self._asked}"

    def apply(self, view: View) -> None:
        """Use a newer View; on the router client's thread."""
        view = of_model(view, self._client.model_hash)
        beside = view.models[0].weight if view.models else 1
        self.asleep = bool(view.models) and view.models[0].asleep
        self._client.weight = min(self._weight * beside, MOST_WEIGHT)
        if not self._asked:
            self._asked = class_for(view, self._own) or ""
            if self._asked:
                log.info("expert_class own=%s asked=%s", self._own, self._asked)
        self._client.apply_view(narrowed(view, self._asked or None))
        self._watch(view)
        self.ack()

    def ack(self) -> None:
        """Tell the router which epoch is in use. Any thread; cheap when nothing changed."""
        epoch = self._client.adopted_epoch
        if epoch != self._acked:
            self._acked = epoch
            self._router.ack(epoch)

    def rouse(self) -> None:
        """Have the router hear at once that there is work for a model that sleeps."""
        if self.asleep:
            self._router.renew_now()

    def tell_routed(self) -> bool:
        """Tell the router of the rows sent to each expert, if it was not in the last second; whether it was told."""
        now_s = time.monotonic()
        if now_s - self._routed_s < ROUTED_S:
            return False
        self._routed_s = now_s
        rows, activated = self._client.take_routed()
        if rows.any():
            self._router.routed(rows, activated)
        return True

    def judge(self) -> None:
        """Give the class up if it has been gone for too long. To be called from time to time."""
        since_s = self._gone_since_s
        if since_s is not None and time.monotonic() - since_s >= self._obsolete_s:
            self._gone_since_s = None
            log.warning("class_given_up asked=%s gone_s=%.1f", self._asked, self._obsolete_s)
            self._on_obsolete()

    def wait(self, timeout_s: float, asked: threading.Event) -> None:
        """Return once every expert has a replica that this process can reach, or the model sleeps, or the router wants
        no expert server: then requests wait for the pool to wake or to grow, each up to its own deadline. Raises
        StartFailed: not within the time; Stopped: asked to end."""
        end_s = time.monotonic() + timeout_s
        ask_s = 0.0
        while not self._client.covers and not self.asleep:
            if asked.wait(COVER_POLL_S):
                raise Stopped
            now_s = time.monotonic()
            if now_s > end_s:
                raise StartFailed(f"After {timeout_s:g} s {self._problem()}")
            if now_s > ask_s:
                ask_s = now_s + WANTED_POLL_S
                if self._none_wanted():
                    return

    def _watch(self, view: View) -> None:
        """Note whether the class is whole, and whether it is there at all."""
        whole = covering(view)
        gone = bool(self._asked) and all(m.numerics_class != self._asked for m in view.pool(EXPERT))
        if not gone or not any(can_talk(self._own, name) for name in whole):
            self._gone_since_s = None
        elif self._gone_since_s is None:
            self._gone_since_s = time.monotonic()
        others = [
            member.name
            for member in view.pool(ATTENTION)
            if member.state == SERVING
            and member.numerics_class != self._own
            and class_for(view, member.numerics_class) in whole - {self._asked}
        ]
        lacking = bool(self._asked) and self._asked not in whole
        self.elsewhere = (
            f"some experts have no server of class {self._asked} now; {others[0]} asks another class"
            if lacking and others
            else ""
        )

    def _none_wanted(self) -> bool:
        view = self._router.view
        if view is None or view.pool(EXPERT):
            return False
        try:
            return not self._router.status(timeout_s=WANTED_POLL_S).pools[EXPERT].wanted
        except RouterUnavailable:
            return False

    def _problem(self) -> str:
        if self._router.view is None:
            return "the router has shown no placement. See that it runs."
        view = of_model(self._router.view, self._client.model_hash)
        known = [f"{m.name} ({m.state}, {m.serving_count} experts, {m.numerics_class})" for m in view.pool(EXPERT)]
        asked = self._asked or f"those of {self._own} or its like"
        return (
            f"some of {view.layers} x {view.experts} experts are on no server that can be reached. Expert "
            f"servers: {', '.join(known) or 'none'}. This worker asks {asked}. "
            "Start as many as the model needs, of the same --device."
        )
