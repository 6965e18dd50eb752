"""What is random about a response, ids of its stream's events, and going on behind one of them. Pure.

An id says all that a gateway needs to make the same stream again: its Identity, the numerics class that computes it,
how many tokens of each choice had come, and which of the events that the last of them made it names. The fixed part is
sealed for one request of one API key, so that nobody else goes on with it, and no other request; the places are not:
who changes them asks for another part of their own stream.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from eaas.gateway.errors import ApiError, ErrorReply

_SEAL_BYTES = 16
# An attention worker is named by its incarnation's last bits: a hint that may be wrong, of a few bytes for each choice.
HINTS = 1 << 16
NOT_RESUMABLE = "not_resumable"
_LONGEST_PART = 1 << 13
# Ends of the ids of most events, made once: 60 bytes each.
_PLACED = 1 << 12
_PLACES = tuple(b"%d.0.0\n" % tokens for tokens in range(_PLACED))

_LETTERS = string.ascii_letters + string.digits
_encode = msgspec.msgpack.encode


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One response's: whatever in it is chosen by chance follows from this, so that every gateway that is given the
    same request under the same identity makes the same bytes.

    Attributes:
        drawn: 32 hexadecimal digits.
        created: Unix time in seconds.
    """

    drawn: str
    created: int

    def digest(self, label: str) -> bytes:
        """32 bytes for one purpose, which no other label tells anything of."""
        return hashlib.sha256(f"{self.drawn} {label}".encode()).digest()

    def seed(self, prompt: int) -> int:
        """The seed of a prompt's choices, by its number, where the client gave none; below 2**63."""
        return int.from_bytes(self.digest(f"seed {prompt}")[:8], "big") >> 1

    def item_id(self, prefix: str, number: int) -> str:
        return f"{prefix}_{self.digest(f'item {number}').hex()[:32]}"

    def call_id(self, choice: int, number: int, letters: int = 0) -> str:
        """The id of a call, by its number in its choice: of so many letters; 0: of OpenAI's form."""
        digest = self.digest(f"call {choice} {number}")
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:letters]) or f"call_{digest.hex()[:24]}"


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The fixed part of ids. hints: which worker computes each choice. classes, dropped: of the events until then."""

    drawn: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
    created: int
    classes: tuple[str, ...]
    dropped: bool
    hints: tuple[int, ...]


class Position(NamedTuple):
    """A place in a stream. counts: tokens that each choice had. last: the choice whose token made the last event;
    len(counts): none, it belongs to the stream's end. ordinal: which of the events made there it is, from 0."""

    counts: tuple[int, ...]
    last: int
    ordinal: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a client has seen of a stream that it goes on with."""

    mark: Mark
    position: Position

    @property
    def identity(self) -> Identity:
        return Identity(drawn=self.mark.drawn, created=self.mark.created)

    def of_choice(self, index: int) -> dict[str, Any]:
        """What `eaas.gateway.failover.Sequence` is told of it."""
        count, hint = self.position.counts[index], self.mark.hints[index]
        return {"seen": count, "hint": hint, "numerics_class": self.mark.classes[0]}


@dataclass(frozen=True)
class Seal:
    """Of one request: its bytes, its path, its model and whose it is. secret: what all gateways of a cluster know."""

    secret: bytes
    bound: bytes

    @classmethod
    def of(cls, secret: bytes, account: str, path: str, model: str, body: bytes) -> Seal:
        """Args: account: the name of its API key. model: hash of the one that answers, which may be another by now."""
        said = _encode((account, path, model, hashlib.sha256(body).digest()))
        return cls(secret, hashlib.sha256(said).digest())

    def run_key(self, identity: Identity, choice: int) -> str:
        """Under which attention workers know one of its choices; nobody else can guess it."""
        return self._code(b"run", _encode((identity.drawn, choice))).hex()

    def prefix(self, mark: Mark) -> bytes:
        """What its events' ids begin with."""
        said = _encode(mark)
        return base64.urlsafe_b64encode(self._code(b"id", said) + said) + b"."

    def read(self, id: str) -> Seen:
        """What an id says. Raises ApiError: 409: it is no id of this request, or its stream cannot be made again."""
        try:
            part, counts, last, ordinal = id.split(".")
            if len(part) > _LONGEST_PART:
                raise ValueError
            raw = base64.b64decode(part, b"-_", validate=True)
            seal, said = raw[:_SEAL_BYTES], raw[_SEAL_BYTES:]
            if not hmac.compare_digest(seal, self._code(b"id", said)):
                raise ValueError
            mark = msgspec.msgpack.decode(said, type=Mark)
            position = Position(tuple(map(_whole, counts.split(","))), _whole(last), _whole(ordinal))
            if len(position.counts) != len(mark.hints) or position.last > len(mark.hints):
                raise ValueError
        except (ValueError, binascii.Error, msgspec.DecodeError):
            raise not_resumable(
                "Its Last-Event-ID is of no stream that this request began: the body must be the same, byte for byte, "
                "and so must path and API key; and the gateways must share one --resume-key-file."
            ) from None
        if mark.dropped:
            raise not_resumable("It lacked lost experts, so that no server computes the same again.")
        if len(mark.classes) != 1:
            raise crossed(mark.classes)
        return Seen(mark=mark, position=position)

    def _code(self, purpose: bytes, said: bytes) -> bytes:
        # A keyed hash of its own right: through OpenSSL a code of SHA-256 takes many times as long.
        keyed = hashlib.blake2b(self.bound + said, key=self.secret, person=purpose, digest_size=_SEAL_BYTES)
        return keyed.digest()


def not_resumable(why: str) -> ApiError:
    """A 409: the stream ends where it was cut."""
    message = f"This stream cannot go on. {why} Send the request without Last-Event-ID to begin a new one."
    return ApiError(ErrorReply(status=409, message=message, param="last-event-id", code=NOT_RESUMABLE))


def crossed(classes: Sequence[str]) -> ApiError:
    """A 409 for what several numerics classes have computed."""
    return not_resumable(f"It crossed from {' to '.join(classes)}, so that no server computes the same again.")


def _whole(digits: str) -> int:
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
        raise ValueError
    return int(digits)


class Counted(Protocol):
    """A choice. tokens: how many it has."""

    tokens: int


class EventIds:
    """Gives the events of one stream their ids, and leaves out those that were seen. Attributes: seen: What is left
    out; None once nothing is."""

    def __init__(self, choices: Sequence[Counted], seen: Position | None) -> None:
        """Args: choices: all that there will be, once the first event is there."""
        self._choices, self.seen = choices, seen
        self.prefix = b""
        self._last: int = -1
        self._tokens: int = 0
        self._ordinal: int = 0

    @property
    def prefix(self) -> bytes:
        """What ids begin with; of ``Seal.prefix``."""
        return self._prefix

    @prefix.setter
    def prefix(self, prefix: bytes) -> None:
        self._prefix, self._start, self._alone = prefix, b"id: " + prefix, len(self._choices) == 1

    @property
    def behind(self) -> bool:
        """Whether some choice has fewer tokens than were seen of it."""
        return self.seen is not None and any(
            choice.tokens < count for choice, count in zip(self._choices, self.seen.counts, strict=True)
        )

    def first(self, events: bytes) -> bytes:
        """The events before every token."""
        return self._each(0, 0, events)

    def end(self, events: bytes) -> bytes:
        """The events behind every token."""
        return self._each(len(self._choices), 0, events)

    def of(self, choice: int, events: bytes) -> bytes:
        """The events that the last token of a choice has made."""
        tokens = self._choices[choice].tokens
        first = tokens != self._tokens or choice != self._last
        if first and self._alone and self.seen is None and events.find(b"\n") == len(events) - 2:
            return self.of_token(tokens) + events
        return self._each(choice, tokens, events)

    def of_token(self, tokens: int) -> bytes:
        """The id's line, of the first event that the last token of the only choice has made, where nothing is left out.
        Most tokens make one event of one line: they cost as little as can be."""
        self._last, self._tokens, self._ordinal = 0, tokens, 1
        return self._start + (_PLACES[tokens] if tokens < _PLACED else b"%d.0.0\n" % tokens)

    def _each(self, last: int, tokens: int, events: bytes) -> bytes:
        if tokens != self._tokens or last != self._last:
            self._last, self._tokens, self._ordinal = last, tokens, 0
        counts = [choice.tokens for choice in self._choices] if last or tokens else [0] * len(self._choices)
        place, shown = self.prefix + b",".join(b"%d" % count for count in counts), b""
        for event in events.split(b"\n\n")[:-1]:
            if self.seen is None or self._is_new(self.seen, last, tokens):
                shown += b"id: %b.%d.%d\n%b\n\n" % (place, last, self._ordinal, event)
            self._ordinal += 1
        if shown and self.seen is not None:
            self._look_ahead(self.seen)
        return shown

    def _is_new(self, seen: Position, last: int, tokens: int) -> bool:
        if last < len(seen.counts) and tokens != seen.counts[last]:
            return tokens > seen.counts[last]
        # The end comes behind all that the last tokens made.
        return self._ordinal > seen.ordinal if last == seen.last else last == len(seen.counts)

    def _look_ahead(self, seen: Position) -> None:
        if all(choice.tokens > count for choice, count in zip(self._choices, seen.counts, strict=True)):
            self.seen = None
