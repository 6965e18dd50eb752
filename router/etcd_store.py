"""The router's memory in etcd: every commit one transaction that only the leader's can be.

Keys under /eaas/CLUSTER/: `leader` (router.election); `state/counters` (JSON: layout, salt, term, epoch,
joined, named, model); `state/members/INCARNATION` and `state/gone/INCARNATION` (one JSON record each, the
number in 16 hexadecimal digits); `state/redo/N`, part N of a commit that needs several transactions, and
`state/redo/parts`, their number, with which such a commit begins to count.

Each transaction demands that this router leads still and that the counters are as its last commit left them:
one whose answer was lost, and which is carried out late, changes nothing that came after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from router.election import Election
from router.etcd import Etcd, EtcdUnavailable, Operation, delete, get, modified, pairs, put
from router.state import Gone, MemberRecord, Model, State
from router.store import JournalUnusable, in_order, record_of, record_text

Changes = Mapping[str, str | None]
"""New value by key, None where the key goes."""

_LAYOUT = 1
# etcd takes 128 operations and 1.5 MiB in a transaction unless told otherwise; a part is JSON within JSON.
_OPERATIONS = 100
_BYTES = 512 << 10
_COUNTERS, _REDO, _PARTS = "counters", "redo/", "redo/parts"


class ClusterInvalid(ValueError):
    """The cluster's name cannot be part of a key."""


def prefix_of(cluster: str) -> str:
    """What every key of a cluster begins with. Raises ClusterInvalid."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", cluster):
        raise ClusterInvalid(f"cluster name {cluster!r} found; give 1 to 64 of letters, digits, . _ and -")
    return f"/eaas/{cluster}/"


def erase(urls: str, cluster: str) -> None:
    """Forget a cluster that has ended. Raises EtcdUnavailable, EtcdInvalid, ClusterInvalid."""
    Etcd(urls).txn([], [delete(prefix_of(cluster), prefix=True)])


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
            return _state(found)
        except JournalUnusable as error:
            raise JournalUnusable(f"etcd at {self._etcd.urls}, {self._root}{error}") from None

    def save(self, before: State, after: State) -> bool:
        if before.members is after.members and _counters(before) == _counters(after):
            return False
        if self._doubt:
            raise JournalUnusable(self._doubt)
        self._write(_changes(before, after))
        return True

    def prove(self, state: State) -> None:
        # What a commit did whose answer was lost is not known: everything is compared.
        found = self._settled()
        wanted = _changes(State(), state)
        changes: dict[str, str | None] = {key: None for key in found if key not in wanted}
        changes |= {key: value for key, value in wanted.items() if found.get(key) != value}
        self._write({**changes, _COUNTERS: wanted[_COUNTERS]})
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
        self._revision = found[_COUNTERS]["mod_revision"] if _COUNTERS in found else "0"
        return {key: kv["value"] for key, kv in found.items()}

    def _write(self, changes: Changes) -> None:
        """Commit at once, or by parts that the next reader carries out if this router does not live to."""
        others = {key: value for key, value in changes.items() if key != _COUNTERS}
        counters = put(self._root + _COUNTERS, changes[_COUNTERS] or "")
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

    def _operations(self, changes: Changes) -> list[Operation]:
        return [
            delete(self._root + key) if value is None else put(self._root + key, value)
            for key, value in changes.items()
        ]

    def _commit(self, operations: list[Operation]) -> list[dict[str, Any]]:
        return self._transact(
            [self._election.held(), modified(self._root + _COUNTERS, self._revision)], operations
        )

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


def _changes(before: State, after: State) -> dict[str, str | None]:
    """What to write for `after` where `before` is stored; the counters always."""
    changes: dict[str, str | None] = {_COUNTERS: _counters(after)}
    for name, record in after.members.items():
        if before.members.get(name) is not record:
            changes[_member_key(record.incarnation)] = record_text(record)
    for name, record in before.members.items():
        if name not in after.members:
            changes[_member_key(record.incarnation)] = None
    for gone in set(after.gone) - set(before.gone):
        changes[_gone_key(gone.incarnation)] = json.dumps(asdict(gone))
    for gone in set(before.gone) - set(after.gone):
        changes[_gone_key(gone.incarnation)] = None
    return changes


def _state(found: Mapping[str, str]) -> State:
    """Raises JournalUnusable: with the key that is damaged, and how."""
    if not found:
        return State()
    key = _COUNTERS
    try:
        counters = json.loads(found[_COUNTERS])
        layout = counters.pop("layout")
        if layout != _LAYOUT:
            raise JournalUnusable(
                f"{_COUNTERS} has layout {layout}, this router writes {_LAYOUT}; give another --cluster"
            )
        model = Model(**counters.pop("model"))
        records: list[MemberRecord] = []
        gone: list[Gone] = []
        for key in sorted(found):
            if key.startswith("members/"):
                records.append(record_of(found[key]))
            elif key.startswith("gone/"):
                gone.append(Gone(**json.loads(found[key])))
        members = {record.name: record for record in in_order(records)}
        return State(**counters, model=model, members=members, gone=tuple(in_order(gone)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise JournalUnusable(
            f"{key} cannot be read: {error!r}. Put the value back from a backup of etcd, or give another --cluster."
        ) from error


def _counters(state: State) -> str:
    return json.dumps(
        {
            "layout": _LAYOUT,
            "salt": state.salt,
            "term": state.term,
            "epoch": state.epoch,
            "joined": state.joined,
            "named": dict(state.named),
            "wanted": dict(state.wanted),
            "model": asdict(state.model),
        }
    )


def _member_key(incarnation: int) -> str:
    return f"members/{incarnation:016x}"


def _gone_key(incarnation: int) -> str:
    return f"gone/{incarnation:016x}"


def _split(changes: Changes) -> Iterator[Changes]:
    """The changes in parts that one transaction, and one value, can take."""
    part: dict[str, str | None] = {}
    size = 0
    for key, value in changes.items():
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
