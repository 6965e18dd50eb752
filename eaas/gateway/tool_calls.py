"""Tool calls: which form a model writes them in, the reader that finds them in a stream, and which ones a request lets
the model make or has it make. Pure.

A reader takes text in pieces of any size and gives out what is certain: text for the client, the name of a call as soon
as it is read, and its arguments as they come, in the model's own characters. What is no call after all is text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class CallStyle:
    """How models of one family write their calls.

    Attributes:
        begin: What stands before a call, or before the calls where ``listed``.
        end: What stands after each call; "" where ``listed``.
        listed: The calls are one JSON list, or, as newer models of the family have it, ``name{...}`` each.
        id_letters: Length of a call's id, where the family's templates insist on one; 0: they do not.
    """

    begin: str
    end: str = ""
    listed: bool = False
    id_letters: int = 0


HERMES = CallStyle(begin="<tool_call>", end="</tool_call>")
MISTRAL = CallStyle(begin="[TOOL_CALLS]", listed=True, id_letters=9)
_STYLES = (HERMES, MISTRAL)


def style_of(template: str) -> CallStyle:
    """The style that a chat template shows to its model; Hermes's, the most common, where it shows none."""
    return next((style for style in _STYLES if style.begin in template), HERMES)


class CallBegun(NamedTuple):
    """The name of call number ``number`` (from 0) is known."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of call number ``number``: a piece of JSON text."""

    number: int
    text: str


Part = str | CallBegun | CallArguments

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])', re.DOTALL
)
_NAMED = re.compile(r"([\w.:/-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_NAMED_SO_FAR = re.compile(r"[\w.:/-]+\s*(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?\s*")


class _Call:
    """One call, an object ``{"name": ..., "arguments": {...}}``, or its arguments alone where the name stood before."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""
        self.name: str | None = None
        self._depth = 0
        self._quoted = self._escaped = False
        self._closed: list[int] = []  # where an object or list within the call's own object ended
        self._end = -1  # end of the whole
        self._from = -1  # where the arguments begin
        self._sent = 0  # end of what was given out of them

    def named(self, name: str, start: int = 0) -> list[Part]:
        """Take its name, which stood before the object; or in it, where the arguments begin at ``start``."""
        self.name, self._from, self._sent = name, start, start
        return [CallBegun(self.number, name)]

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """Read on; returns what became certain, and what follows the call once it has ended (else None)."""
        start = len(self.text)
        self.text += text
        self._scan(start)
        rest = None if self._end < 0 else self.text[self._end :]
        if rest is not None:
            self.text = self.text[: self._end]
        parts: list[Part] = []
        if self.name is None and (head := _HEAD.match(self.text)):
            with contextlib.suppress(ValueError):
                parts += self.named(json.loads(head[1]), head.end())
        if self.name is None and rest is not None:
            return self._whole(), rest
        if self.name is not None and (more := self._more()):
            parts.append(CallArguments(self.number, more))
        return parts, rest

    def _scan(self, start: int) -> None:
        for position in range(start, len(self.text)):
            character = self.text[position]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self._closed.append(position + 1)
                elif self._depth == 0:
                    self._end = position + 1
                    return

    def _more(self) -> str:
        end = len(self.text)
        if self._from:
            end = next((closed for closed in self._closed if closed > self._from), end)
        more = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return more

    def _whole(self) -> list[Part]:
        """A call whose object is of another order than the usual one; nothing when it is no call."""
        try:
            call = json.loads(self.text)
        except (ValueError, RecursionError):
            return []
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not name:
            return []
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        return [*self.named(name), CallArguments(self.number, arguments)]


class CallReader:
    """Reads one choice's text. ``calls`` counts the calls begun so far."""

    def __init__(self, style: CallStyle) -> None:
        self._style = style
        self.calls = 0
        self._mode = self._text
        self._held = ""  # read, and not yet judged
        self._passed = ""  # what was passed over since the last text, should it turn out to be text
        self._call: _Call | None = None

    def push(self, text: str) -> list[Part]:
        """Read on; returns what became certain."""
        self._held += text
        parts: list[Part] = []
        while self._mode(parts):
            pass
        return parts

    def flush(self, *, cut: bool = False) -> list[Part]:
        """The end of the text; returns what was held back.

        Args:
            cut: A limit ended the text, not the model: what was still to become a call is left out. Else it is text.
        """
        rest = self._passed + self._held
        if self._call is not None:
            rest = self._passed + self._call.text if self._call.name is None else ""
        if cut and self._mode in (self._before, self._in_call, self._after):
            rest = ""
        self._held = self._passed = ""
        self._call = None
        self._mode = self._text
        return [rest] if rest else []

    # Each mode reads what it can of what is held, and says whether another is to go on now.

    def _text(self, parts: list[Part]) -> bool:
        begin, held = self._style.begin, self._held
        at = held.find(begin)
        if at >= 0:
            if at:
                parts.append(held[:at])
            self._held, self._passed = held[at + len(begin) :], begin
            self._mode = self._before
            return True
        keep = next(
            n
            for n in range(min(len(begin) - 1, len(held)), -1, -1)
            if begin.startswith(held[len(held) - n :])
        )
        if len(held) > keep:
            parts.append(held[: len(held) - keep])
            self._held = held[len(held) - keep :]
        return False

    def _pass(self, characters: str) -> None:
        rest = self._held.lstrip(characters)
        self._passed += self._held[: len(self._held) - len(rest)]
        self._held = rest

    def _before(self, parts: list[Part]) -> bool:
        listed = self._style.listed
        self._pass(" \t\r\n[," if listed else " \t\r\n")
        held = self._held
        if not held:
            return False
        call = _Call(self.calls)
        if listed and (name := _NAMED.match(held)):
            parts += call.named(name[1])
            self.calls += 1
            self._held = held[name.end() :]
        if self._held[0] == "{":
            self._call, self._mode = call, self._in_call
            return True
        if listed and _NAMED_SO_FAR.fullmatch(held):
            return False
        self._is_text(parts, self._passed)
        return True

    def _in_call(self, parts: list[Part]) -> bool:
        call = self._call
        if call is None:
            raise RuntimeError("a reader in a call has none: it was flushed meanwhile")
        held, self._held = self._held, ""
        found, rest = call.feed(held)
        parts += found
        self.calls += any(isinstance(part, CallBegun) for part in found)
        if rest is None:
            return False
        self._call, self._held = None, rest
        if call.name is None:
            self._is_text(parts, self._passed + call.text)
        else:
            self._passed = ""
            self._mode = self._after
        return True

    def _after(self, parts: list[Part]) -> bool:
        style = self._style
        held = self._held = self._held.lstrip()
        if not held:
            return False
        if style.listed:
            if held[0] == ",":
                self._mode = self._before
                return True
            self._held = held[1:] if held[0] == "]" else held
            self._mode = self._between
            return True
        if len(held) < len(style.end) and style.end.startswith(held):
            return False
        self._held = held.removeprefix(style.end)
        self._mode = self._between
        return True

    def _between(self, parts: list[Part]) -> bool:
        # White space after a call belongs to nobody.
        self._held = self._held.lstrip()
        if self._held:
            self._mode = self._text
        return bool(self._held)

    def _is_text(self, parts: list[Part], passed: str) -> None:
        parts.append(passed)
        self._passed = ""
        self._mode = self._text


def read_calls(style: CallStyle, text: str, *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """A whole text taken apart: what is no call, and (name, arguments) of each call. cut: as for `flush`."""
    reader = CallReader(style)
    words: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in (*reader.push(text), *reader.flush(cut=cut)):
        if isinstance(part, str):
            words.append(part)
        elif isinstance(part, CallBegun):
            calls.append((part.name, []))
        else:
            calls[part.number][1].append(part.text)
    return "".join(words), [(name, "".join(arguments)) for name, arguments in calls]


# JSON as templates show it and models were trained to write it; white space that may grow for ever is none.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_PARALLEL = 16


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        shown: Tool descriptions in OpenAI's form, for the chat template; none where the model shall not call any.
        must_call: The model must call at least one.
        parallel: It may call several at once.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    parallel: bool = True


def tool_use(tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool | None) -> ToolUse:
    """What a request's three fields say together.

    Args:
        tools: OpenAI's ``tools``, each with "function" that has a "name".
        choice: OpenAI's ``tool_choice``; None is "auto" where there are tools.

    Raises:
        ValueError: the choice is none that OpenAI knows, or names no tool that is there.
    """
    names: list[str] | None = None
    several = parallel is not False
    match choice if choice == {} else choice or "auto":
        case "none":
            return ToolUse()
        case "auto" | "required" as mode:
            pass
        case {"type": "function", "function": {"name": str(name)}}:
            mode, names, several = "required", [name], False
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]},
        } if names := _names_of(allowed):
            pass
        case {}:
            raise ValueError(
                "the object is not understood; {'type': 'function', 'function': {'name': ...}} or "
                "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}} is needed"
            )
        case other:
            raise ValueError(
                f"it is {other!r}; 'none', 'auto', 'required' or an object that names a function is needed"
            )
    known = {tool["function"]["name"] for tool in tools}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ValueError(f"it names {unknown[0]!r}, which is not among the tools")
    if mode == "required" and not tools:
        raise ValueError("it asks for a call, and there are no tools; send 'tools' as well")
    shown = [tool for tool in tools if names is None or tool["function"]["name"] in names]
    return ToolUse(shown=shown, must_call=mode == "required", parallel=several)


def _names_of(tools: Sequence[Any]) -> list[str]:
    names: list[str] = []
    for tool in tools:
        match tool:
            case {"function": {"name": str(name)}}:
                names.append(name)
            case _:
                pass
    return names


def call_grammar(use: ToolUse, style: CallStyle, marks: Mapping[str, int]) -> str:
    """The language of one or more calls of these tools as the model's family writes them, in llguidance's Lark.

    Args:
        marks: The tokens that stand for ``style.begin`` and ``style.end``, where they are added ones: llguidance takes
            some of these, special or not, for no text.
    """
    rules = [_object_rule(number, tool["function"]) for number, tool in enumerate(use.shown)]
    objects = " | ".join(f"object_{number}" for number in range(len(use.shown)))
    begin, end = (
        f"<[{marks[mark]}]>" if mark in marks else json.dumps(mark) for mark in (style.begin, style.end)
    )
    more = MOST_PARALLEL - 1 if use.parallel else 0
    if style.listed:
        several = f' (", " object){{0,{more}}}' if more else ""
        start = f'{begin} "[" object{several} "]"'
    else:
        call = f'{begin} "\\n" object "\\n" {end}'
        rules.append(f"call: {call}")
        start = 'call ("\\n" call)' + f"{{0,{more}}}" if more else "call"
    return "\n".join([f"start: {start}", f"object: {objects}", *rules])


def _object_rule(number: int, function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {"type": "object"}
    spaced = json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)
    opening = '{"name": ' + json.dumps(function["name"], ensure_ascii=False) + ', "arguments": '
    arguments = f"arguments_{number}: %json {spaced}"
    return f'object_{number}: {json.dumps(opening, ensure_ascii=False)} arguments_{number} "}}"\n{arguments}'
