"""The router's memory: where it is kept, the form that a state has there, and SQLite, the store of a single router.

A store holds text by key: `counters` (JSON: layout, salt, term, epoch, joined, named, wanted, models), and for each
member a JSON record at `members/INCARNATION` or `gone/INCARNATION`, the number in 16 hexadecimal digits.

SQLite has them in one table, every commit on the disk before anyone hears of it. One router owns a journal at a time:
SQLite's exclusive lock, which ends with the process.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from router.events import AddModel
from router.state import COUNT_BITS, MemberRecord, Model, State
from router.view import GoneMember

log = logging.getLogger(__name__)

Changes = Mapping[str, str | None]
"""New value by key, None where the key goes."""

COUNTERS = "counters"
_LAYOUT = 2
_BITMAPS = ("share", "target", "loaded", "serving", "retiring")
_COUNTERS = ("salt", "term", "epoch", "joined", "named", "wanted", "models")
_Known = TypeVar("_Known", MemberRecord, GoneMember)


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


def is_same(before: State, after: State) -> bool:
    """True if nothing durable differs between a state and the next."""
    # Asked at each renewal: no text is made for it, and what did not change is the same object.
    if before.members is not after.members:
        return False
    same = all(getattr(before, word) is getattr(after, word) for word in _COUNTERS)
    return same or _counted(before) == _counted(after)


def changes(before: State, after: State) -> dict[str, str | None]:
    """What to write for `after` where `before` is stored; the counters always."""
    found: dict[str, str | None] = {COUNTERS: _counters(after)}
    for name, record in after.members.items():
        if before.members.get(name) is not record:
            found[f"members/{record.incarnation:016x}"] = record_text(record)
    for name, record in before.members.items():
        if name not in after.members:
            found[f"members/{record.incarnation:016x}"] = None
    for gone in set(after.gone) - set(before.gone):
        found[f"gone/{gone.incarnation:016x}"] = json.dumps(asdict(gone))
    for gone in set(before.gone) - set(after.gone):
        found[f"gone/{gone.incarnation:016x}"] = None
    return found


def state_of(found: Mapping[str, str]) -> State:
    """The state in what a store holds. Raises JournalUnusable: with the key that is damaged, and how."""
    if not found:
        return State()
    key = COUNTERS
    try:
        counters = json.loads(found[COUNTERS])
        layout = counters.pop("layout")
        if layout != _LAYOUT:
            raise JournalUnusable(f"{COUNTERS} has layout {layout}, this router writes {_LAYOUT}")
        models = tuple(Model(**model) for model in counters.pop("models"))
        records: list[MemberRecord] = []
        gone: list[GoneMember] = []
        for key in sorted(found):
            if key.startswith("members/"):
                records.append(record_of(found[key]))
            elif key.startswith("gone/"):
                gone.append(GoneMember(**json.loads(found[key])))
        members = {record.name: record for record in _in_order(records)}
        return State(**counters, models=models, members=members, gone=tuple(_in_order(gone)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise JournalUnusable(f"{key} cannot be read: {error!r}") from error


def _counted(state: State) -> dict[str, Any]:
    return {word: getattr(state, word) for word in _COUNTERS}


def _counters(state: State) -> str:
    found = {"layout": _LAYOUT, **_counted(state), "models": [asdict(model) for model in state.models]}
    return json.dumps(found, default=dict)


def _in_order(known: Iterable[_Known]) -> list[_Known]:
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


def entries_text(entries: Iterable[AddModel]) -> str:
    """What a router is to serve beside what its journal knows, as JSON."""
    return json.dumps([asdict(entry) for entry in entries])


def read_entries(path: Path | None) -> tuple[AddModel, ...]:
    """The entries in a file of `entries_text`; none without one. Raises JournalUnusable: it is damaged."""
    try:
        found = json.loads(path.read_text()) if path is not None and path.exists() else []
        entries = tuple(AddModel(**{**each, "model": Model(**each["model"]), "again": True}) for each in found)
        for each in (told for entry in entries for told in (entry, entry.model)):
            if wrong := [f.name for f in fields(each) if type(getattr(each, f.name)).__name__ != f.type]:
                raise TypeError(f"{', '.join(wrong)} of a wrong type")
        return entries
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JournalUnusable(f"--models-file {path} cannot be read: {error!r}; remove it") from error


class Journal:
    """A Store in a file of SQLite, open."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            JournalUnusable: no such folder, no permission, no space, another router's, or not a journal.
        """
        self.path = path
        self._whole = True  # what the file holds is all that was ever committed
        self._open()

    def _open(self) -> None:
        try:
            self._base = sqlite3.connect(self.path, isolation_level=None, timeout=0.5)
        except sqlite3.Error as error:
            raise self._unusable("opened", error) from error
        try:
            # Exclusive: a second router must not write here, and no shared-memory index is left behind.
            self._base.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            tables = {row[0] for row in self._base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables:
                self._base.execute("CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        except sqlite3.Error as error:
            self._base.close()
            raise self._unusable("opened", error) from error
        if tables - {"state"}:
            self._base.close()
            raise JournalUnusable(
                f"journal {self.path} has the tables {', '.join(sorted(tables))}, this router writes one, state; give "
                f"another --journal"
            )

    def load(self) -> State:
        try:
            return state_of(dict(self._base.execute("SELECT key, value FROM state")))
        except sqlite3.Error as error:
            raise self._unusable("read", error) from error
        except JournalUnusable as error:
            raise JournalUnusable(f"journal {self.path}: {error}; give another --journal") from error

    def save(self, before: State, after: State) -> bool:
        # Whether the file is still there is looked at with each tick: renewals come thousands a second.
        if self._whole and before.ticked_s == after.ticked_s and is_same(before, after):
            return False
        if self._is_gone() or not self._whole:
            # Somebody removed it, or its folder. What it held is known here.
            self._open_anew()
            before = State()
        elif is_same(before, after):
            return False
        self._write(changes(before, after))
        self._whole = True
        return True

    def prove(self, state: State) -> None:
        if self._is_gone() or not self._whole:
            self.save(State(), state)
        self._write(changes(state, state))

    def close(self) -> None:
        self._base.close()

    def _write(self, found: Changes) -> None:
        try:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.executemany(
                "INSERT OR REPLACE INTO state VALUES (?, ?)",
                [(key, value) for key, value in found.items() if value is not None],
            )
            self._base.executemany(
                "DELETE FROM state WHERE key = ?", [(key,) for key, value in found.items() if value is None]
            )
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise self._unusable("written", error) from error

    def _is_gone(self) -> bool:
        return str(self.path) != ":memory:" and not self.path.exists()

    def _open_anew(self) -> None:
        # Until everything is in it once, counters alone would be a journal without members.
        self._whole = False
        self._base.close()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable("made anew", error) from error
        self._open()
        log.warning("journal_made_anew path=%s", self.path)

    def _unusable(self, what: str, error: Exception) -> JournalUnusable:
        if "locked" in str(error):
            return JournalUnusable(f"journal {self.path} is used by another router; stop that one or give another file")
        if isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error):
            return JournalUnusable(f"journal {self.path} is no SQLite file; move it away or give another --journal")
        return JournalUnusable(
            f"journal {self.path} cannot be {what}: {error}. See that its folder exists, may be written and has room."
        )
