"""The router's memory: SQLite, every commit on the disk before anyone hears of it.

Tables: counters (one row: layout, salt, term, epoch, joined, model), named (pool, last number), wanted (pool, size),
members and gone (name, one JSON record). One router owns a journal at a time: SQLite's exclusive lock, which
ends with the process.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Protocol, TypeVar

from router.state import COUNT_BITS, MemberRecord, Model, State
from router.view import GoneMember

_Known = TypeVar("_Known", MemberRecord, GoneMember)

_BITMAPS = ("share", "target", "loaded", "serving", "retiring")


class JournalUnusable(Exception):
    """The store cannot be opened, read or written; the message says which and why."""


class Store(Protocol):
    """The durable part of the router's state. Not shared between threads."""

    def load(self) -> State:
        """The durable state of the last commit; the empty State for a new store. Raises JournalUnusable."""
        ...

    def save(self, before: State, after: State) -> bool:
        """Commit what changed between two states, durably; returns whether anything did.

        Raises:
            JournalUnusable: nothing of it counts. Nobody may hear of `after`.
        """
        ...

    def prove(self, state: State) -> None:
        """Make `state`, the last one that counted, what the store holds. Raises JournalUnusable while that is
        not possible."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...


def in_order(known: Iterable[_Known]) -> list[_Known]:
    """Members, or those that went, in the order of joining: incarnations of different terms have different salts."""
    return sorted(known, key=lambda one: one.incarnation & ((1 << COUNT_BITS) - 1))


def record_text(record: MemberRecord) -> str:
    """A member as JSON, bitmaps in hexadecimal."""
    return json.dumps({**asdict(record), **{name: f"{getattr(record, name):x}" for name in _BITMAPS}})


def record_of(text: str) -> MemberRecord:
    """The member in a text of `record_text`. Raises ValueError, TypeError or KeyError if it is none."""
    found = json.loads(text)
    # A field that it lacks came after the router that wrote it.
    known = {field.name: found[field.name] for field in fields(MemberRecord) if field.name in found}
    record = MemberRecord(**known)
    return replace(record, **{name: int(found[name], 16) for name in _BITMAPS})


log = logging.getLogger(__name__)

_LAYOUT = 3
_TABLES = """
CREATE TABLE IF NOT EXISTS counters (
    one INTEGER PRIMARY KEY CHECK (one = 1), layout INTEGER NOT NULL, salt INTEGER NOT NULL, term INTEGER NOT
    NULL, epoch INTEGER NOT NULL, joined INTEGER NOT NULL, model TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS named (pool TEXT PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS wanted (pool TEXT PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS members (incarnation INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, record TEXT
NOT NULL); CREATE TABLE IF NOT EXISTS gone (incarnation INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, record
TEXT NOT NULL);
"""


class Journal:
    """An open journal. Not shared between threads."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            JournalUnusable: no such folder, no permission, no space, another router's, or not a journal.
        """
        self.path = path
        self._open()

    def _open(self) -> None:
        path = self.path
        try:
            self._base = sqlite3.connect(path, isolation_level=None, timeout=0.5)
        except sqlite3.Error as error:
            raise self._unusable("opened", error) from error
        try:
            # Exclusive: a second router must not write here, and no shared-memory index is left behind.
            self._base.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.executescript(_TABLES)
            row = self._base.execute("SELECT layout FROM counters").fetchone()
        except sqlite3.Error as error:
            self._base.close()
            raise self._unusable("opened", error) from error
        if row is not None and row[0] != _LAYOUT:
            self._base.close()
            raise JournalUnusable(
                f"journal {path} has layout {row[0]}, this router writes {_LAYOUT}; give another --journal"
            )

    def load(self) -> State:
        """The durable state of the last commit; the empty State for a new journal. Raises JournalUnusable."""
        try:
            counters = self._base.execute("SELECT salt, term, epoch, joined, model FROM counters").fetchone()
            if counters is None:
                return State()
            salt, term, epoch, joined, model = counters
            named = dict(self._base.execute("SELECT pool, number FROM named"))
            wanted = dict(self._base.execute("SELECT pool, number FROM wanted"))
            records = [record_of(row[0]) for row in self._base.execute("SELECT record FROM members")]
            gone = [GoneMember(**json.loads(row[0])) for row in self._base.execute("SELECT record FROM gone")]
            known = Model(**json.loads(model))
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise self._unusable("read", error) from error
        return State(
            salt=salt,
            term=term,
            epoch=epoch,
            joined=joined,
            named=named,
            wanted=wanted,
            model=known,
            members={record.name: record for record in in_order(records)},
            gone=tuple(in_order(gone)),
        )

    def save(self, before: State, after: State) -> bool:
        """Commit what changed between two states, durably; returns whether anything did.

        Raises:
            JournalUnusable: nothing of it was committed.
        """
        if self._is_gone():
            # Somebody removed it, or its folder. What it held is known here.
            self._open_anew()
            before = State()
        same = before.members is after.members and before.wanted is after.wanted
        if same and _counters(before) == _counters(after):
            return False
        written = {n: r for n, r in after.members.items() if before.members.get(n) is not r}
        removed = [record for name, record in before.members.items() if name not in after.members]
        came = set(after.gone) - set(before.gone)
        forgotten = set(before.gone) - set(after.gone)
        try:
            self._base.execute("BEGIN IMMEDIATE")
            self._write_counters(after)
            self._base.executemany("INSERT OR REPLACE INTO named VALUES (?, ?)", list(after.named.items()))
            self._base.executemany("INSERT OR REPLACE INTO wanted VALUES (?, ?)", list(after.wanted.items()))
            self._base.executemany(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?)",
                [(r.incarnation, r.name, record_text(r)) for r in written.values()],
            )
            self._base.executemany(
                "DELETE FROM members WHERE incarnation = ?", [(r.incarnation,) for r in removed]
            )
            self._base.executemany(
                "INSERT INTO gone VALUES (?, ?, ?)",
                [(g.incarnation, g.name, json.dumps(asdict(g))) for g in came],
            )
            self._base.executemany(
                "DELETE FROM gone WHERE incarnation = ?", [(g.incarnation,) for g in forgotten]
            )
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise self._unusable("written", error) from error
        return True

    def prove(self, state: State) -> None:
        """Write the counters again, durably. Raises JournalUnusable while that is not possible."""
        if self._is_gone():
            self.save(State(), state)
        try:
            self._base.execute("BEGIN IMMEDIATE")
            self._write_counters(state)
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise self._unusable("written", error) from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._base.close()

    def _is_gone(self) -> bool:
        return str(self.path) != ":memory:" and not self.path.exists()

    def _open_anew(self) -> None:
        self._base.close()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable("made anew", error) from error
        self._open()
        log.warning("journal_made_anew path=%s", self.path)

    def _write_counters(self, state: State) -> None:
        self._base.execute(
            "INSERT OR REPLACE INTO counters VALUES (1, ?, ?, ?, ?, ?, ?)", (_LAYOUT, *_counters(state))
        )

    def _roll_back(self) -> None:
        if self._base.in_transaction:
            self._base.execute("ROLLBACK")

    def _unusable(self, what: str, error: Exception) -> JournalUnusable:
        if "locked" in str(error):
            return JournalUnusable(
                f"journal {self.path} is used by another router; stop that one or give another file"
            )
        if isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error):
            return JournalUnusable(
                f"journal {self.path} is no SQLite file; move it away or give another --journal"
            )
        return JournalUnusable(
            f"journal {self.path} cannot be {what}: {error}. "
            f"See that its folder exists, may be written and has room."
        )


def _counters(state: State) -> tuple[int, int, int, int, str]:
    return state.salt, state.term, state.epoch, state.joined, json.dumps(asdict(state.model))
