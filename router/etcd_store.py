"""The router's memory in etcd: every commit one transaction that only the leader's can be.

Keys under /eaas/CLUSTER/: `leader` (Election); `state/` and a key of router.journal; `state/redo/N`, part N of a commit
that needs several transactions, and `state/redo/parts`, their number, with which such a commit begins to count.

Each transaction demands that this router leads still and that the counters are as its last commit left them:
one whose answer was lost, and which is carried out late, changes nothing that came after it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from router.etcd import Etcd, EtcdUnavailable, Operation, created, delete, get, modified, pairs, put
from router.host import boot_s
from router.journal import COUNTERS, Changes, JournalUnusable, changes, is_same, state_of
from router.state import ConfigInvalid, State

log = logging.getLogger(__name__)

_USED = 0.9  # Of the lease; the rest allows for clocks that run at different speeds.
_RENEWALS = 5  # In each lease.
_POLL_S = 0.2


class Election:
    """One router's part in it. Belongs to the event loop that runs `win` and `keep`.

    leader: address of the router that leads, as far as known. problem: why etcd cannot be asked, or empty.
    """

    def __init__(self, etcd: Etcd, prefix: str, ttl_s: float) -> None:
        """Args: prefix: of the cluster's keys. ttl_s: lease of the leader; etcd may make it longer.

        Raises:
            ConfigInvalid: etcd grants no lease so short.
        """
        if not 2 <= ttl_s <= 600:
            raise ConfigInvalid(f"a leader's lease of {ttl_s} s found; give 2 (the least that etcd grants) to 600")
        self.leader = ""
        self.problem = ""
        self.key = f"{prefix}leader"
        self._etcd = etcd
        self._ttl_s = ttl_s
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
        return boot_s() < self._until_s

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
            await asyncio.sleep(min(self._ttl_s / _RENEWALS, max(0.0, self._until_s - boot_s())))
            if not self.leads():
                break
            asking = asyncio.create_task(asyncio.to_thread(self._renew))
            # The request may hang beyond the lease; the thread then ends by its own time budget.
            await asyncio.wait((asking,), timeout=max(0.0, self._until_s - boot_s()))
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
        sent_s = boot_s()
        granted = self._etcd.call("lease/grant", {"TTL": str(max(1, round(self._ttl_s)))})
        self._lease = granted["ID"]
        won, answers = self._etcd.txn([created(self.key, "0")], [put(self.key, address, self._lease)], [get(self.key)])
        if not won:
            self.leader = next(iter(pairs(answers[0]).values()))["value"]
            self._etcd.call("lease/revoke", {"ID": self._lease})
            return False
        self._revision = answers[0]["header"]["revision"]
        self.leader = address
        self._until_s = sent_s + _USED * float(granted["TTL"])
        return True

    def _renew(self) -> bool:
        sent_s = boot_s()
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


# etcd takes 128 operations and 1.5 MiB in a transaction unless told otherwise; a part is JSON within JSON.
_OPERATIONS = 100
_BYTES = 512 << 10
_REDO, _PARTS = "redo/", "redo/parts"


class ClusterInvalid(ValueError):
    """The cluster's name cannot be part of a key."""


def prefix_of(cluster: str) -> str:
    """What every key of a cluster begins with. Raises ClusterInvalid."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", cluster):
        raise ClusterInvalid(f"cluster name {cluster!r} found; give 1 to 64 of letters, digits, . _ and -")
    return f"/eaas/{cluster}/"


def erase(etcd: Etcd, cluster: str) -> None:
    """Forget a cluster that has ended. Raises EtcdUnavailable, ClusterInvalid."""
    etcd.txn([], [delete(prefix_of(cluster), prefix=True)])


class EtcdStore:
    """The state of one cluster, for the router that leads it. Not shared between threads."""

    def __init__(self, etcd: Etcd, cluster: str, election: Election) -> None:
        """Nothing is sent yet. Raises ClusterInvalid."""
        self._etcd = etcd
        self._election = election
        self._root = f"{prefix_of(cluster)}state/"
        self._revision = "0"
        self._doubt = ""

    def load(self) -> State:
        found = self._settled()
        self._doubt = ""
        try:
            return state_of(found)
        except JournalUnusable as error:
            raise JournalUnusable(
                f"etcd at {self._etcd.urls}, {self._root}{error}; give another --cluster, or put the value back from a "
                f"backup of etcd"
            ) from None

    def save(self, before: State, after: State) -> bool:
        if is_same(before, after):
            return False
        if self._doubt:
            raise JournalUnusable(self._doubt)
        self._write(changes(before, after))
        return True

    def prove(self, state: State) -> None:
        # What a commit did whose answer was lost is not known: everything is compared.
        found = self._settled()
        wanted = changes(State(), state)
        differing: dict[str, str | None] = {key: None for key in found if key not in wanted}
        differing |= {key: value for key, value in wanted.items() if found.get(key) != value}
        self._write({**differing, COUNTERS: wanted[COUNTERS]})
        self._doubt = ""

    def close(self) -> None:
        """Nothing is kept open."""

    def _settled(self) -> dict[str, str]:
        """All that is stored, by key, a commit by parts carried out if it counts and dropped if not."""
        found = self._read()
        if any(key.startswith(_REDO) for key in found):
            if _PARTS in found:
                self._carry_out(_parts(found))
            self._commit([delete(self._root + _REDO, prefix=True)])
            found = self._read()
        return found

    def _read(self) -> dict[str, str]:
        answer = self._transact([self._election.held()], [get(self._root, prefix=True)])[0]
        try:
            found = {key.removeprefix(self._root): kv for key, kv in pairs(answer).items()}
        except (ValueError, KeyError) as error:
            raise self._unusable(f"holds something under {self._root} that is no text: {error}") from error
        self._revision = found[COUNTERS]["mod_revision"] if COUNTERS in found else "0"
        return {key: kv["value"] for key, kv in found.items()}

    def _write(self, found: Changes) -> None:
        """Commit at once, or by parts that the next reader carries out if this router does not live to."""
        others = {key: value for key, value in found.items() if key != COUNTERS}
        counters = put(self._root + COUNTERS, found[COUNTERS] or "")
        parts = list(_split(others))
        if len(parts) <= 1:
            operations = self._operations(others)
        else:
            for number, part in enumerate(parts):
                self._commit([put(f"{self._root}{_REDO}{number}", json.dumps(part))])
            operations = [put(self._root + _PARTS, str(len(parts)))]
        answers = self._commit([*operations, counters])
        self._revision = answers[-1]["header"]["revision"]
        if len(parts) > 1:
            self._carry_out(parts)
            self._commit([delete(self._root + _REDO, prefix=True)])

    def _carry_out(self, parts: list[Changes]) -> None:
        for part in parts:
            self._commit(self._operations(part))

    def _operations(self, found: Changes) -> list[Operation]:
        return [
            delete(self._root + key) if value is None else put(self._root + key, value) for key, value in found.items()
        ]

    def _commit(self, operations: list[Operation]) -> list[dict[str, Any]]:
        return self._transact([self._election.held(), modified(self._root + COUNTERS, self._revision)], operations)

    def _transact(self, guards: list[Operation], operations: list[Operation]) -> list[dict[str, Any]]:
        try:
            done, answers = self._etcd.txn(guards, operations, [get(self._election.key)])
            leader = None if done else pairs(answers[0]).get(self._election.key)
        except (EtcdUnavailable, ValueError, KeyError) as error:
            raise self._unusable(f"cannot be used: {error}") from error
        if done:
            return answers
        if leader is None or not self._election.owns(leader):
            self._election.lose("" if leader is None else leader["value"])
            raise self._unusable("is written by another router, which leads now")
        raise self._unusable("has carried out a commit whose answer was lost")

    def _unusable(self, what: str) -> JournalUnusable:
        # Until `prove`, nothing is known of what the last transaction did.
        self._doubt = (
            f"etcd at {self._etcd.urls} {what}. See that it runs, that most of its members reach each other, "
            f"and that it has room; this router then goes on by itself."
        )
        return JournalUnusable(self._doubt)


def _split(found: Changes) -> Iterator[Changes]:
    """The changes in parts that one transaction, and one value, can take."""
    part: dict[str, str | None] = {}
    size = 0
    for key, value in found.items():
        more = len(key) + len(value or "")
        if part and (len(part) == _OPERATIONS or size + more > _BYTES):
            yield part
            part, size = {}, 0
        part[key] = value
        size += more
    if part:
        yield part


def _parts(found: Mapping[str, str]) -> list[Changes]:
    """Raises JournalUnusable."""
    try:
        return [json.loads(found[f"{_REDO}{number}"]) for number in range(int(found[_PARTS]))]
    except (ValueError, KeyError) as error:
        raise JournalUnusable(
            f"{_REDO} cannot be read: {error!r}. Put it back from a backup of etcd, or give another --cluster."
        ) from error
