"""Which of several routers leads: a key in etcd that lives as long as its owner's lease.

A leader counts its lease from the moment before it asked for it, on a clock that runs through suspend, and
stops leading a tenth before the end: etcd counts from later, so no other can lead before that. What a leader
that was frozen still tries to write is refused by etcd itself (`Election.held`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from router.etcd import Etcd, EtcdUnavailable, Operation, created, get, pairs, put
from router.host import boot_s
from router.state import ConfigInvalid
from router.store import JournalUnusable

log = logging.getLogger(__name__)

_USED = 0.9  # Of the lease; the rest allows for clocks that run at different speeds.
_RENEWALS = 5  # In each lease.
_POLL_S = 0.2


class Election:
    """One router's part in it. Belongs to the event loop that runs `win` and `keep`.

    leader: address of the router that leads, as far as known. problem: why etcd cannot be asked, or empty.
    """

    def __init__(self, etcd: Etcd, prefix: str, ttl_s: float, clock: Callable[[], float] = boot_s) -> None:
        """Args: prefix: of the cluster's keys. ttl_s: lease of the leader; etcd may make it longer.

        Raises:
            ConfigInvalid: etcd grants no lease so short.
        """
        if not 2 <= ttl_s <= 600:
            raise ConfigInvalid(
                f"a leader's lease of {ttl_s} s found; give 2 (the least that etcd grants) to 600"
            )
        self.leader = ""
        self.problem = ""
        self.key = f"{prefix}leader"
        self._etcd = etcd
        self._ttl_s = ttl_s
        self._clock = clock
        self._lease = ""
        self._revision = ""
        self._until_s = float("-inf")

    async def reach(self) -> None:
        """Raises JournalUnusable: etcd does not answer, so that nobody can be elected."""
        try:
            await asyncio.to_thread(self._etcd.txn, [], [get(self.key)])
        except EtcdUnavailable as error:
            raise JournalUnusable(self._away(error)) from error

    def leads(self) -> bool:
        """True while no other router can lead."""
        return self._clock() < self._until_s

    def held(self) -> Operation:
        """Comparison that makes a transaction void unless this router leads still."""
        return created(self.key, self._revision)

    def owns(self, found: Mapping[str, str]) -> bool:
        """True if the leader's key, as read (`etcd.pairs`), is this router's."""
        return found["create_revision"] == self._revision

    def lose(self, leader: str) -> None:
        """Another leads, as a refused transaction has shown."""
        self.leader = leader
        self._until_s = float("-inf")

    async def win(self, address: str) -> None:
        """Return once this router, reached at `address`, leads."""
        while True:
            try:
                if await asyncio.to_thread(self._campaign, address):
                    self.problem = ""
                    return
                self.problem = ""
            except (EtcdUnavailable, ValueError, KeyError) as error:
                self._tell(self._away(error))
            await asyncio.sleep(_POLL_S)

    async def keep(self) -> str:
        """Renew the lease; returns, while no other can lead yet, why this router leads no more."""
        reason = "another router leads"
        while self.leads():
            await asyncio.sleep(min(self._ttl_s / _RENEWALS, max(0.0, self._until_s - self._clock())))
            if not self.leads():
                break
            asking = asyncio.create_task(asyncio.to_thread(self._renew))
            # The request may hang beyond the lease; the thread then ends by its own time budget.
            await asyncio.wait((asking,), timeout=max(0.0, self._until_s - self._clock()))
            if not asking.done():
                asking.add_done_callback(lambda late: late.exception())
                reason = f"etcd at {self._etcd.urls} did not answer"
                break
            try:
                if not asking.result():
                    reason = "its lease had ended"
                    break
                self.problem = ""
                reason = "it was not running for a whole lease"
            except (EtcdUnavailable, ValueError, KeyError) as error:
                reason = self._away(error)
                self._tell(reason)
        self._until_s = float("-inf")
        return reason

    async def resign(self) -> None:
        """Give the lease back, so that another need not wait for its end; if etcd is away, it ends by itself."""
        self._until_s = float("-inf")
        lease, self._lease = self._lease, ""
        if lease:
            try:
                await asyncio.to_thread(self._etcd.call, "lease/revoke", {"ID": lease})
            except EtcdUnavailable as error:
                log.info("lease_not_revoked reason=%s", error)

    def _campaign(self, address: str) -> bool:
        _, (answer,) = self._etcd.txn([], [get(self.key)])
        found = pairs(answer).get(self.key)
        if found is not None:
            self.leader = found["value"]
            return False
        sent_s = self._clock()
        granted = self._etcd.call("lease/grant", {"TTL": str(max(1, round(self._ttl_s)))})
        self._lease = granted["ID"]
        won, answers = self._etcd.txn(
            [created(self.key, "0")], [put(self.key, address, self._lease)], [get(self.key)]
        )
        if not won:
            self.leader = next(iter(pairs(answers[0]).values()))["value"]
            self._etcd.call("lease/revoke", {"ID": self._lease})
            return False
        self._revision = answers[0]["header"]["revision"]
        self.leader = address
        self._until_s = sent_s + _USED * float(granted["TTL"])
        return True

    def _renew(self) -> bool:
        sent_s = self._clock()
        answer: dict[str, Any] = self._etcd.call("lease/keepalive", {"ID": self._lease})["result"]
        ttl_s = float(answer.get("TTL", 0))
        if ttl_s > 0 and self.leads():
            # The greater: an answer may come so late that another lease has been won since.
            self._until_s = max(self._until_s, sent_s + _USED * ttl_s)
        return ttl_s > 0

    def _away(self, error: Exception) -> str:
        return f"etcd at {self._etcd.urls} cannot be asked who leads: {error}. See that it runs and can be reached."

    def _tell(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("election_waits reason=%s", problem)
        self.problem = problem
