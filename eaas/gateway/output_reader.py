"""Thoughts, words and tool calls told apart in a model's output. Pure.

A reader takes text in pieces of any size and gives out what is certain: words for the client, thoughts, the name of a
call as soon as it is read, and its arguments as they come. What is no call after all is words: nothing is lost.

Readers are written as generators that yield where they need more text, so that a format is read from top to bottom.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec

from eaas.gateway.output_styles import ANALYSIS, HARMONY, CallStyle, Pairs, ThoughtStyle


class Thought(NamedTuple):
    """More of what the model thinks aloud."""

    text: str


class CallBegun(NamedTuple):
    """The name of call number ``number`` (from 0) is known; ``id`` where the model gave it one."""

    number: int
    name: str
    id: str = ""


class CallArguments(NamedTuple):
    """More of the arguments of call number ``number``: a piece of JSON text."""

    number: int
    text: str


Part = str | Thought | CallBegun | CallArguments
Take = Callable[[str], None]
_Reads = Generator[None, None, None]
_Judges = Generator[None, None, bool]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the outputs of one request are read.

    Attributes:
        calls: How the model writes calls; None where it was shown no tools.
        thoughts: How it thinks aloud; None where it does not, or cannot. ANALYSIS: the output is messages, the first of
            which the prompt has begun.
        thinking: The prompt has begun a thought that the output goes on with.
        tools: OpenAI's ``tools``: their schemas say which arguments are text where a family writes all as text.
        shown: The client wants to see the thoughts.
    """

    calls: CallStyle | None = None
    thoughts: ThoughtStyle | None = None
    thinking: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    shown: bool = True

    def types_of(self, name: str) -> dict[str, frozenset[str]]:
        """JSON's types that each argument of a tool may have, by its name; none where its schema does not say."""
        functions = (tool["function"] for tool in self.tools)
        schema: Any = next((one.get("parameters") for one in functions if one["name"] == name), None) or {}
        return {key: types_in(one) for key, one in properties_of(schema).items()}


_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])', re.DOTALL
)
_NAME_END = re.compile(r"[^\w.:/-]")
_MOST_NAME = 256
_MOST_HEAD = 1024  # it is looked for at each piece
_NAMED_ID = re.compile(r"(?:functions\.)?([\w./-]+?)(?::\d+)?")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.([\w.:/-]+))?")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_SPACE = " \t\r\n"
_dumps = functools.partial(json.dumps, ensure_ascii=False)


class _Ended(Exception):
    """There is no more text."""


class OutputReader:
    """Reads one choice's text. ``calls`` counts the calls begun so far."""

    def __init__(self, reading: Reading) -> None:
        self.calls = 0
        self._reading = reading
        self._parts: list[Part] = []
        self._held: str = ""  # read, and not yet judged
        self._passed: str = ""  # judged to belong to a call, should it become one; else it is words
        self._in_calls = False
        self._ended = self._cut = False
        self._reads = self._all()

    def push(self, text: str) -> list[Part]:
        """Read on; returns what became certain."""
        self._held += text
        next(self._reads, None)
        parts, self._parts = self._parts, []
        return parts

    def flush(self, *, cut: bool = False) -> list[Part]:
        """The end of the text; returns what was held back. Args: cut: a limit ended it, not the model: what was to
        become a call is left out; else it is words."""
        self._ended, self._cut = True, cut
        return self.push("")

    # What became certain.

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _think(self, text: str) -> None:
        if text and self._reading.shown:
            self._parts.append(Thought(text))

    def _call(self, name: str) -> None:
        name = _encodable(name)
        style = self._reading.calls
        named = _NAMED_ID.fullmatch(name) if style is not None and style.named_id else None
        self._parts.append(CallBegun(self.calls, named[1], name) if named else CallBegun(self.calls, name))
        self.calls += 1
        self._passed = ""

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self.calls - 1, text))

    def _quote(self, text: str) -> None:
        self._argue(_dumps(text)[1:-1])

    def _pass(self, text: str) -> None:
        self._passed += text

    # Each of these reads one thing, and yields while that takes more text than there is.

    def _all(self) -> _Reads:
        reading, style = self._reading, self._reading.calls
        try:
            if reading.thoughts is ANALYSIS:
                yield from self._messages()
            elif reading.thoughts is not None:
                yield from self._thoughts(reading.thoughts)
            while style is not None and style is not HARMONY:
                yield from self._until(self._say, style.begin)
                self._passed, self._in_calls = style.begin.strip(), True
                yield from self._calls(style)
                self._passed, self._in_calls = "", False
            while True:
                self._say(self._held)
                self._held = ""
                yield from self._more()
        except _Ended:
            rest = self._passed + self._held
            if not self._in_calls or (rest.strip() and not self._cut):
                self._say(rest)
            self._held = ""

    def _more(self) -> _Reads:
        if self._ended:
            raise _Ended
        yield

    def _space(self, characters: str = _SPACE, *, passed: bool = True) -> _Reads:
        """White space, at least until something else comes; not ``passed``: it belongs to nobody."""
        while True:
            rest = self._held.lstrip(characters)
            if passed:
                self._passed += self._held[: len(self._held) - len(rest)]
            self._held = rest
            if rest:
                return
            yield from self._more()

    def _is_next(self, text: str) -> _Judges:
        """Whether this is what comes next, with any white space before it; if so, it is passed."""
        text = text.strip()
        if not text:
            return True
        yield from self._space()
        while len(self._held) < len(text) and text.startswith(self._held):
            yield from self._more()
        found = self._held.startswith(text)
        if found:
            self._passed += text
            self._held = self._held[len(text) :]
        return found

    def _until(self, take: Take, *marks: str) -> Generator[None, None, str]:
        """What stands before the first of these marks; returns that mark, without white space.

        Where the marks begin with a new line, one before the mark is the mark's.
        """
        found, lines = [mark.strip() for mark in marks], marks[0].startswith("\n")
        while True:
            held = self._held
            places = [(at, mark) for mark in found if (at := held.find(mark)) >= 0]
            at, mark = min(places, default=(len(held) - max(_overlap(held, mark) for mark in found), ""))
            certain = held[:at].removesuffix("\n") if lines else held[:at]
            take(certain)
            self._held = held[at + len(mark) :] if mark else held[len(certain) :]
            if mark:
                return mark
            try:
                yield from self._more()
            except _Ended:
                # Of a value that a limit cut off, what may have been its end is left out.
                take("" if self._cut and self._in_calls else self._held)
                self._held = ""
                raise

    # Thoughts.

    def _thoughts(self, style: ThoughtStyle) -> _Reads:
        calls = self._reading.calls
        thinks = self._reading.thinking or (yield from self._is_next(style.begin))
        passed, self._passed = self._passed, ""
        if not thinks:
            self._say(passed)
            return
        yield from self._space(passed=False)
        # A model may go on to its calls without ending the thought, where they have a mark that means nothing else.
        ends = () if calls is None or calls.each else (calls.begin,)
        mark = yield from self._until(self._think, "\n" + style.end, *ends)
        if mark == style.end:
            yield from self._space(passed=False)
        else:
            self._held = mark + self._held

    def _messages(self) -> _Reads:
        """Messages ``<|start|>assistant to=RECIPIENT<|channel|>CHANNEL<|message|>TEXT<|end|>``, whose recipient may
        stand behind the channel as well; the prompt ends with ``<|start|>assistant``."""
        spoken: set[Take] = set()
        while True:
            self._in_calls = True
            take = yield from self._header()
            self._passed, self._in_calls = "", False
            if take in spoken and take != self._argue:
                take("\n")
            spoken.add(take)
            mark = yield from self._until(take, *_MESSAGE_ENDS)
            if mark in ("<|start|>", "<|channel|>"):
                self._held = mark + self._held

    def _header(self) -> Generator[None, None, Take]:
        """What a message is: a thought, words, or the arguments of a call."""
        for begins in ("to=", "<|"):
            if (yield from self._is_next(begins)):
                yield from self._until(self._pass, "<|message|>")
                channel, recipient = _CHANNEL.search(self._passed), _RECIPIENT.search(self._passed)
                if recipient and recipient[1] and self._reading.calls is not None:
                    self._call(recipient[1])
                    return self._argue
                # What was written to a tool that nobody offered is no answer, either.
                aloud = recipient is None and channel is not None and channel[1] != "analysis"
                return self._say if aloud else self._think
        self._say(self._passed)
        return self._say

    # Calls.

    def _calls(self, style: CallStyle) -> _Reads:
        again = True
        while again:
            if not (yield from self._one(style)):
                self._say(self._passed)
                return
            self._passed = ""
            if style.listed:
                again = yield from self._is_next(",")
            else:
                again = not (yield from self._is_next(style.end)) and not style.each
        if style.listed:
            yield from self._is_next("]")
        self._passed = ""
        yield from self._space(passed=False)

    def _one(self, style: CallStyle) -> _Judges:
        """One call; False where it is none."""
        if not (yield from self._is_next(style.open)):
            return False
        yield from self._space(_SPACE + "[," if style.listed else _SPACE)
        if style.object and self._held[0] == "{":
            return (yield from self._object())
        if style.object and not style.listed:
            return False
        name = yield from self._name()
        if not name or not ((yield from self._is_next(style.named)) or style.listed):
            return False
        if style.pairs is not None:
            return (yield from self._pairs(name, style.pairs, style.close or style.end))
        yield from self._space()
        if self._held[0] != "{":
            return False
        self._call(name)
        yield from self._value(self._argue)
        yield from self._is_next(style.close)
        return True

    def _name(self) -> Generator[None, None, str]:
        while not (end := _NAME_END.search(self._held)) and len(self._held) <= _MOST_NAME:
            yield from self._more()
        name = self._held[: end.start()] if end else self._held
        self._passed += name
        self._held = self._held[len(name) :]
        return name if len(name) <= _MOST_NAME else ""

    def _value(self, take: Take, depth: int = 0) -> _Reads:
        """JSON's text up to the end of the object or list that comes; depth: of so many in whose midst it begins."""
        quoted = escaped = False
        while True:
            for at, character in enumerate(self._held, start=1):
                if escaped:
                    escaped = False
                elif quoted:
                    escaped = character == "\\"
                    quoted = character != '"'
                elif character == '"':
                    quoted = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if not depth:
                        take(self._held[:at])
                        self._held = self._held[at:]
                        return
            take(self._held)
            self._held = ""
            yield from self._more()

    def _object(self) -> _Judges:
        """A call that is an object ``{"name": ..., "arguments": {...}}``."""
        start, whole = len(self._passed), self._value(self._pass)
        for _ in whole:
            if found := _head(self._passed[start : start + _MOST_HEAD]):
                break
            yield
        else:
            found = _head(self._passed[start : start + _MOST_HEAD])
        text = self._passed[start:]
        if found:
            name, end = found
            self._held = text[end:] + self._held
            self._call(name)
            yield from self._value(self._argue)
            yield from self._value(lambda _: None, depth=1)
            return True
        call = _members(text)
        if call is not None:
            self._call(call[0])
            self._argue(call[1])
        return call is not None

    def _pairs(self, name: str, pairs: Pairs, end: str) -> _Judges:
        types, begun, whole = self._reading.types_of(name), False, True
        try:
            while whole and (yield from self._is_next(pairs.key[0])):
                start = len(self._passed)
                mark = yield from self._until(self._pass, pairs.key[1])
                key = self._passed[start:]
                self._passed += mark
                whole = yield from self._is_next(pairs.value[0])
                if whole:
                    if not begun:
                        self._call(name)
                    self._argue(f"{', ' if begun else '{'}{_dumps(key)}: ")
                    self._passed, begun = "", True
                    yield from self._typed(types.get(key, frozenset()), pairs)
            whole = whole and (yield from self._is_next(end))
            if whole and not begun:
                self._call(name)
                self._argue("{}")
            return whole
        finally:
            # What a limit cut off stays open.
            if begun and not self._cut:
                self._argue("}")

    def _typed(self, types: frozenset[str], pairs: Pairs) -> _Reads:
        """A value that is written as text, as JSON."""
        written: list[str] = []
        alone = types == TEXT
        if pairs.value[0].endswith("\n"):
            while not self._held:
                yield from self._more()
            self._held = self._held.removeprefix("\n")
        try:
            if alone:
                self._argue('"')
                yield from self._until(self._quote, pairs.value[1])
            else:
                yield from self._until(written.append, pairs.value[1])
        finally:
            text = "".join(written)
            ending = '"' if alone else _json_of(text, types)
            self._argue(text if self._cut else ending)


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which the mark may have begun."""
    most = min(len(mark) - 1, len(text))
    return next(n for n in range(most, -1, -1) if mark.startswith(text[len(text) - n :]))


def _head(text: str) -> tuple[str, int] | None:
    """The name in a call's object, and where its arguments begin; None where they have not begun yet."""
    found = _HEAD.match(text)
    try:
        return (json.loads(found[1]), found.end()) if found else None
    except ValueError:
        return None


def _members(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose object is of another order than the usual one; None when it is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(arguments, str):
        arguments = _dumps({} if arguments is None else arguments)
    return (name, _encodable(arguments)) if isinstance(name, str) and name else None


def _encodable(text: str) -> str:
    """A text whose lone surrogates, which JSON can name and UTF-8 cannot, are escapes as JSON has them."""
    return text.encode("utf-8", "backslashreplace").decode()


TEXT = frozenset({"string"})
_KINDS: dict[type, set[str]] = {
    bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}, dict: {"object"},
    type(None): {"null"},
}  # fmt: skip
# Templates show arguments of earlier calls as Jinja prints them.
_PRINTED = {"True": "true", "False": "false", "None": "null"}


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an object's members, by name; none where "properties" is no object."""
    properties = schema.get("properties")
    return cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}


def types_in(schema: Any) -> frozenset[str]:
    """JSON's types that a schema allows, as far as it says so by "type" or "anyOf"; none: it does not."""
    match schema:
        case {"type": str(given)}:
            return frozenset({given})
        case {"type": [*given]}:
            return frozenset(map(str, given))
        case {"anyOf": [*others]} if all(found := [types_in(other) for other in others]):
            return frozenset[str]().union(*found)
        case _:
            return frozenset()


def _json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON: that which it is written as, else a string, where the schema has a say as it says."""
    written = _PRINTED.get(text.strip(), text.strip())
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        value: object = msgspec.json.decode(written)
        if "string" not in types or types & _KINDS.get(type(value), set()):
            return written
    return _dumps(text)


def read_output(reading: Reading, text: str, *, cut: bool = False) -> tuple[str, str, list[tuple[CallBegun, str]]]:
    """Words, thoughts, and calls with their arguments, of a whole text. Args: cut: as for `OutputReader.flush`."""
    reader, words, thoughts = OutputReader(reading), "", ""
    calls: list[tuple[CallBegun, str]] = []
    for part in (*reader.push(text), *reader.flush(cut=cut)):
        if isinstance(part, str):
            words += part
        elif isinstance(part, Thought):
            thoughts += part.text
        elif isinstance(part, CallBegun):
            calls.append((part, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return words, thoughts, calls
