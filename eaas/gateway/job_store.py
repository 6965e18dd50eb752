"""Responses that are kept, by id: a few keys for each, in a file of SQLite or in etcd.

`job/ID` is what was asked, which never changes; `state/ID` a JobState, changed by compare-and-set; `result/ID` what
came of it. `open/MS/ID` is an index of what has not ended, in order of arrival, and `ended/MS/ID` of the rest, by the
time at which it is forgotten: of each its bytes, owner and model. Times are Unix times in ms, 16 hexadecimal digits.
`owner/TOKEN` is written anew by each owner while it lives: see Leases. Every commit is durable before its call returns.

All calls block, and raise ApiError: 503 where they were not carried out, or nobody said that they were.
"""

from __future__ import annotations

import logging
import math
import secrets
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from eaas.gateway.errors import ApiError, full, internal, invalid, unavailable
from router.access import is_loopback
from router.etcd import Etcd, EtcdInvalid, EtcdUnavailable, Operation, delete, get, modified, pairs, put

log = logging.getLogger(__name__)

_ETCD = "etcd://"
# What is kept in another form has another number, and is not seen.
_TABLE = "kept_4"
TOO_LARGE, UNREADABLE, UNUSABLE = "too_large_to_keep", "unreadable", "jobs_unusable"
_BUSY_S = 5.0
OPEN = frozenset({"queued", "in_progress"})

_encode = msgspec.json.encode
T = TypeVar("T")
Found = dict[str, tuple[bytes, int]]
"""Value and version by key, in the order of the keys."""


class JobsInvalid(ValueError):
    """The store cannot be opened; the message says which and why."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """What changes of a record.

    Attributes:
        status: As OpenAI's responses have it; OPEN ones have not ended.
        at_ms: When it came; once it has ended, when it is forgotten.
        owner: The gateway process that computes it; empty: none yet.
        model: Name of the one that it asks.
        numerics_class: In which it was begun; empty: it was not.
        hint: Which attention worker began it; see eaas.gateway.event_ids.
        turn: How often it was begun anew, in another class: each time it is another response.
        losses: Owners whose leases ended before it did.
        bytes: Of job and result.
        version: What the store compares; of no meaning but to be the same.
    """

    status: str
    at_ms: int
    owner: str = ""
    model: str = ""
    numerics_class: str = ""
    hint: int = 0
    turn: int = 0
    losses: int = 0
    bytes: int = 0
    version: int = 0


class Stored(NamedTuple):
    """A record. result: empty until it has ended."""

    job: bytes
    state: JobState
    result: bytes

    def job_as(self, shape: type[T]) -> T:
        """What was asked. Raises ApiError: 500, it cannot be read."""
        return _decoded(self.job, shape)


class Leases:
    """Which owners have not renewed for `lease_s` while this observer looked. Pure.

    Hosts share no clock: an owner's lease is the time in which its version stays the same, by the observer's own clock.
    Time in which it did not look, since it stood still or the store was away, counts against nobody.
    """

    def __init__(self, lease_s: float, look_s: float) -> None:
        """Args: look_s: more than that is no time between two looks."""
        self._lease_s, self._look_s = lease_s, look_s
        self._seen: dict[str, tuple[int, float]] = {}
        self._last_s = 0.0

    def lapsed(self, versions: Mapping[str, int], now_s: float) -> list[str]:
        """Those of these owners whose leases have ended. Args: now_s: of any clock that does not leap."""
        passed_s = min(now_s - self._last_s, self._look_s)
        before, self._seen, self._last_s = self._seen, {}, now_s
        for owner, version in versions.items():
            known, same_s = before.get(owner, (0, 0.0))
            self._seen[owner] = version, same_s + passed_s if version == known else 0.0
        return [owner for owner, (_, same_s) in self._seen.items() if same_s >= self._lease_s]


class JobStore:
    """Records by id."""

    def __init__(self, base: SqliteBase | EtcdBase, most: int, most_bytes: int) -> None:
        """Args: most, most_bytes: records and bytes of them that are kept. Gateways that add one at the same time may
        each find room for it."""
        self._base, self._most, self._most_bytes = base, most, most_bytes
        self.close = base.close

    def put(self, id: str, job: bytes, state: JobState, result: bytes = b"") -> JobState | None:
        """Keep a new record; None: there is one of that id. Raises ApiError: 429, no more is kept; 400, it is too large
        for the store."""
        ended = self._base.span("ended/", "ended0")
        kept = [*self._base.span("open/", "open0").values(), *ended.values()]
        kept_bytes, more = sum(int(value.split()[0]) for value, _ in kept), len(job) + len(result)
        if len(kept) >= self._most:
            raise _full(f"{len(kept)} responses are kept, the most that this server keeps (--jobs-most)", ended)
        if kept and kept_bytes + more > self._most_bytes:
            most = f"at most {self._most_bytes} (--jobs-bytes)"
            raise _full(f"{kept_bytes} bytes of responses are kept, and {more} more would be over {most}", ended)
        state = msgspec.structs.replace(state, bytes=more)
        written = self._write(id, {f"job/{id}": 0}, state, {f"job/{id}": job, f"result/{id}": result or None})
        if written is None and (found := self.get(id)) is not None and found.job == job:
            # The first endpoint of etcd that was asked did it and did not say so. No two jobs are the same.
            return found.state
        return written

    def get(self, id: str) -> Stored | None:
        """The record; None: there is none."""
        keys = [f"{kind}/{id}" for kind in ("job", "state", "result")]
        job, state, result = map(self._base.read(*keys).get, keys)
        if job is None or state is None:
            return None
        found = msgspec.structs.replace(_decoded(state[0], JobState), version=state[1])
        return Stored(job[0], found, result[0] if result else b"")

    def update(self, id: str, before: JobState, after: JobState, result: bytes = b"") -> JobState | None:
        """Put another state in the place of `before`, with the result if it has one; None: somebody else has. Raises
        ApiError: 400, the result is too large for the store."""
        after = msgspec.structs.replace(after, bytes=before.bytes + len(result))
        writes: dict[str, bytes | None] = {_index(id, before): None}
        if result:
            writes[f"result/{id}"] = result
        return self._write(id, {f"state/{id}": before.version}, after, writes)

    def delete(self, id: str) -> bool:
        """Forget a record, which need not be readable; whether there was one."""
        spans = ("open/", "open0"), ("ended/", "ended0")
        while found := self._base.read(f"state/{id}"):
            [(text, version)] = found.values()
            try:
                index = [_index(id, _decoded(text, JobState))]
            except ApiError:
                index = [key for span in spans for key in self._base.span(*span) if key.endswith(f"/{id}")]
            keys = (f"job/{id}", f"state/{id}", f"result/{id}", *index)
            if self._base.commit({f"state/{id}": version}, dict.fromkeys(keys)):
                return True
        return False

    def open(self) -> dict[str, tuple[str, str]]:
        """Owner and model of those that have not ended, by id, the oldest first."""
        found = self._base.span("open/", "open0").items()
        told = {key.split("/", 2)[2]: value.decode().partition(" ")[2] for key, (value, _) in found}
        return {id: (owner, model) for id, (owner, _, model) in ((id, of.partition(" ")) for id, of in told.items())}

    def forgotten(self, now_ms: int) -> list[str]:
        """Ids of those that have been kept for long enough."""
        return [key.split("/", 2)[2] for key in self._base.span("ended/", f"ended/{now_ms:016x}")]

    def renew(self, owner: str) -> None:
        """Have it seen that an owner lives; whatever it writes of its own records says so too."""
        self._base.commit({}, {f"owner/{owner}": b"1"})

    def owners(self) -> dict[str, int]:
        """All owners, and the versions of their renewals."""
        return {key.partition("/")[2]: version for key, (_, version) in self._base.span("owner/", "owner0").items()}

    def forget_owner(self, owner: str, version: int) -> bool:
        """Take an owner for gone; False: it has renewed since that version."""
        return bool(self._base.commit({f"owner/{owner}": version}, {f"owner/{owner}": None}))

    def _write(
        self, id: str, versions: dict[str, int], state: JobState, writes: dict[str, bytes | None]
    ) -> JobState | None:
        found, most = sum(len(value) for value in writes.values() if value), self._base.most_bytes
        if found > most:
            taken = f"{found} bytes found; what keeps responses here takes {most} at once"
            raise invalid(f"It cannot be kept: {taken}. Make it shorter.", code=TOO_LARGE)
        index = f"{state.bytes} {state.owner} {state.model}".encode()
        writes |= {f"state/{id}": _encode(state), _index(id, state): index}
        if state.owner:
            writes[f"owner/{state.owner}"] = b"1"
        version = self._base.commit(versions, writes)
        return msgspec.structs.replace(state, version=version) if version else None


def _full(found: str, ended: Iterable[str]) -> ApiError:
    """Args: ended: keys of those that have ended; before one is forgotten, nobody knows when there is room."""
    first_ms = min((int(key.split("/")[1], 16) for key in ended), default=math.inf)
    message = f"{found}. Delete some, or try again later."
    return full(message, code="responses_full", after_s=first_ms / 1000 - time.time())


def _unusable(where: object, error: Exception) -> ApiError:
    log.error("jobs_unusable where=%s reason=%r", where, error)
    return unavailable("What keeps responses cannot be used just now. Try again.", code=UNUSABLE, after_s=0.0)


def _index(id: str, state: JobState) -> str:
    return f"{'open' if state.status in OPEN else 'ended'}/{state.at_ms:016x}/{id}"


def _decoded(text: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=shape)
    except msgspec.DecodeError as error:
        raise internal(f"What is kept of this response cannot be read: {error}.", code=UNREADABLE) from error


class SqliteBase:
    """Values by key in a file of SQLite, which all gateways of a host may share. Not for two threads at a time."""

    most_bytes = 64 << 20  # of one commit

    def __init__(self, path: str) -> None:
        """Open or create it. Raises JobsInvalid."""
        self._path, self._file = Path(path), 0
        self._base: sqlite3.Connection | None = None
        try:
            self._connection()
        except (sqlite3.Error, OSError) as error:
            raise JobsInvalid(
                f"--jobs {path} cannot be opened: {error}. See that its folder exists, may be written and has room."
            ) from error

    def _connection(self) -> sqlite3.Connection:
        """To the file at the path. It is opened anew where somebody removed it, since another gateway may have made it
        anew, and where that failed before. Raises sqlite3.Error, OSError."""
        if self._base is not None and self._path.exists() and self._path.stat().st_ino == self._file:
            return self._base
        self.close()
        # Nobody else need read what was asked and said.
        self._path.touch(mode=0o600)
        self._file = self._path.stat().st_ino
        base = sqlite3.connect(self._path, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)
        try:
            base.execute("PRAGMA journal_mode=WAL")
            base.execute("PRAGMA synchronous=FULL")
            table = f"{_TABLE} (key TEXT PRIMARY KEY, version INTEGER NOT NULL, value BLOB NOT NULL)"
            base.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        except sqlite3.Error:
            # As where the disk is full: whoever asks next tries again.
            base.close()
            raise
        self._base = base
        return base

    def read(self, *keys: str) -> Found:
        """What is at those of the keys that are there."""
        return self._found(f"key IN ({','.join('?' * len(keys))})", *keys)

    def span(self, first: str, end: str) -> Found:
        """What is at keys from `first` on and before `end`."""
        return self._found("key >= ? AND key < ? ORDER BY key", first, end)

    def commit(self, versions: Mapping[str, int], writes: Mapping[str, bytes | None]) -> int:
        """Write all (None: delete) if those keys have these versions, 0 where there is none; the new version of what
        was written, or 0: nothing was."""
        version = 1 + secrets.randbits(62)
        try:
            with self._connection() as base:
                base.execute("BEGIN IMMEDIATE")
                found = self.read(*versions)
                if any(found.get(key, (b"", 0))[1] != wanted for key, wanted in versions.items()):
                    return 0
                base.executemany(f"DELETE FROM {_TABLE} WHERE key = ?", [(key,) for key in writes])
                rows = [(key, version, value) for key, value in writes.items() if value is not None]
                base.executemany(f"INSERT INTO {_TABLE} VALUES (?, ?, ?)", rows)
        except (sqlite3.Error, OSError) as error:
            raise _unusable(self._path, error) from error
        return version

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._base is not None:
            self._base.close()
        self._base = None

    def _found(self, which: str, *values: str) -> Found:
        try:
            rows = self._connection().execute(f"SELECT key, value, version FROM {_TABLE} WHERE {which}", values)
            return {key: (value, version) for key, value, version in rows}
        except (sqlite3.Error, OSError) as error:
            raise _unusable(self._path, error) from error


class EtcdBase:
    """The same in etcd, which gateways of several hosts share: keys under /PREFIX/."""

    # etcd takes requests of 1.5 MiB, keys and all.
    most_bytes = 1_400_000

    def __init__(self, where: str, tls_dir: Path | None) -> None:
        """Nothing is sent yet. Args: where: etcd://HOST:PORT[,...]/PREFIX. tls_dir: as of Etcd. Raises JobsInvalid."""
        hosts, _, prefix = where.removeprefix(_ETCD).partition("/")
        names = hosts.split(",")
        local = all(is_loopback(name.rpartition(":")[0].strip("[]")) for name in names)
        urls = ",".join(f"http{'' if local else 's'}://{name}" for name in names)
        try:
            self._etcd = Etcd(urls, timeout_s=5.0, tls_dir=tls_dir)
        except EtcdInvalid as error:
            raise JobsInvalid(f"--jobs {where}: {error}") from None
        self._root = f"/{prefix.strip('/') or 'eaas'}/{_TABLE}/"

    def read(self, *keys: str) -> Found:
        return self._run([], [get(self._root + key) for key in keys])[1]

    def span(self, first: str, end: str) -> Found:
        return self._run([], [get(self._root + first, end=self._root + end)])[1]

    def commit(self, versions: Mapping[str, int], writes: Mapping[str, bytes | None]) -> int:
        compare = [modified(self._root + key, str(version)) for key, version in versions.items()]
        acts = [(self._root + key, value) for key, value in writes.items()]
        return self._run(compare, [delete(k) if v is None else put(k, v.decode()) for k, v in acts])[0]

    def close(self) -> None:
        """Nothing is kept open."""

    def _run(self, compare: list[Operation], acts: list[Operation]) -> tuple[int, Found]:
        """The revision of a transaction, 0 if it was refused, and what it read."""
        try:
            done, answers = self._etcd.txn(compare, acts)
            read = {key: one for answer in answers for key, one in pairs(answer).items()}
            found = {
                key.removeprefix(self._root): (one["value"].encode(), int(one["mod_revision"]))
                for key, one in read.items()
            }
            return int(answers[0]["header"]["revision"]) if done else 0, found
        except (EtcdUnavailable, ValueError, KeyError, IndexError) as error:
            raise _unusable(self._etcd.urls, error) from error


def open_jobs(where: str, most: int, most_bytes: int, tls_dir: Path | None = None) -> JobStore:
    """The store at a path, or at etcd://HOST:PORT[,...]/PREFIX. Raises JobsInvalid: it cannot be opened."""
    return JobStore(EtcdBase(where, tls_dir) if where.startswith(_ETCD) else SqliteBase(where), most, most_bytes)
