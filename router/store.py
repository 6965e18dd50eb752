"""Where the router keeps what it must not forget, and the form that a record has there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Protocol, TypeVar

from router.state import COUNT_BITS, Gone, MemberRecord, State

_Known = TypeVar("_Known", MemberRecord, Gone)

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
