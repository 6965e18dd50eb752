"""Tool calls that a request lets the model make, or has it make; and the grammars of outputs that must be calls, or in
a language that the client named, thoughts before them included. Pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from eaas.gateway.output_reader import TEXT, properties_of, types_in
from eaas.gateway.output_styles import CallStyle, Pairs, ThoughtStyle
from eaas.worker.grammar import Grammar

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
    """What a request's three fields say together. Raises ValueError: the choice is none that OpenAI knows, or names no
    tool that is there.

    Args: tools: OpenAI's ``tools``, each with "function" that has a "name". choice: OpenAI's ``tool_choice``; None is
    "auto" where there are tools."""
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


_ANY_TEXT = "/(?s:.*)/"
_Write = Callable[[str], str]


def _written(marks: Mapping[str, int], text: str) -> str:
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(
        f"<[{marks[piece]}]>" if piece in marks else json.dumps(piece, ensure_ascii=False) for piece in pieces if piece
    )


def call_grammar(use: ToolUse, style: CallStyle, marks: Mapping[str, int]) -> str:
    """The language of one or more calls of these tools as the model's family writes them, in llguidance's Lark.

    Args:
        marks: The tokens that stand for texts of the style, where they are added ones: llguidance takes some of these,
            special or not, for no text.
    """
    write = functools.partial(_written, marks)
    # A family that has no mark before its calls makes one at a time.
    more = MOST_PARALLEL - 1 if use.parallel and style.begin else 0
    begin, between, end = map(write, (style.begin, style.between, style.end))
    if style.listed:
        begin, between, end = f'{begin} "["', '", "', '"]"'
    one = f"{begin} call {end}" if style.each else "call"
    several = f"{one} ({between} {one}){{0,{more}}}" if more else one
    start = several if style.each else f"{begin} {several} {end}"
    calls = " | ".join(f"call_{number}" for number in range(len(use.shown)))
    rules = (rule for n, tool in enumerate(use.shown) for rule in _rules(n, tool["function"], style, write))
    return "\n".join([f"start: {start}", f"call: {calls}", *rules])


def _rules(number: int, function: Mapping[str, Any], style: CallStyle, write: _Write) -> Iterator[str]:
    name, schema = function["name"], function.get("parameters") or {"type": "object"}
    before, after = write(style.open + name + style.named), write(style.close)
    if style.object:
        before, after = write('{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '), '"}"'
    elif style.named_id:
        before = f"{write(f'{style.open}functions.{name}:')} /[0-9]{{1,4}}/ {write(style.named)}"
    yield f"call_{number}: {before} arguments_{number} {after}"
    if style.pairs is None:
        yield f"arguments_{number}: {_json(schema)}"
    else:
        yield from _pairs(f"arguments_{number}", schema, style.pairs, write)


def _pairs(rule: str, schema: Mapping[str, Any], pairs: Pairs, write: _Write) -> Iterator[str]:
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    given = schema.get("required")
    required = cast("list[Any]", given) if isinstance(given, list) else []
    written: list[str] = []
    for place, (key, of) in enumerate(properties_of(schema).items()):
        if of is False:  # never there
            continue
        value, end = f"{rule}_{place}", write(pairs.value[1])
        before = write(pairs.key[0] + key + pairs.key[1] + pairs.value[0])
        written.append(f"({before} {value})" + ("" if key in required else "?"))
        if types_in(of) != TEXT:
            yield f"{value}: {_json(of, **shared)} {end}"
        elif isinstance(of.get("enum"), list):
            yield f"{value}: ({' | '.join(write(one) for one in of['enum'] if isinstance(one, str))}) {end}"
        elif "<[" in end:
            # Where a token ends the text, the text has the new line before it.
            yield f"{value}: {_ANY_TEXT} {write(pairs.value[1].lstrip())}"
        else:
            yield f"{value}[suffix={json.dumps(pairs.value[1])}]: {_ANY_TEXT}"
    yield f"{rule}: " + (" ".join(written) or '""')


def _json(schema: Any, **shared: Any) -> str:
    if schema is not False:
        # True, and whatever is no schema, bind nothing.
        given = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
        schema = {"x-guidance": _SPACING, **given, **shared}
    return "%json " + json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def after_thoughts(
    grammar: Grammar, style: ThoughtStyle, marks: Mapping[str, int], *, thinking: bool, calls: bool
) -> Grammar | None:
    """The language of thoughts and then of what a grammar describes; None where the two cannot be told apart.
    Args: marks: as for `call_grammar`. thinking: the prompt has begun a thought; else there may be one. calls: the
    grammar is of calls, which have their own marks."""
    write, text = functools.partial(_written, marks), grammar.text
    end = write(style.end)
    if grammar.kind == "gbnf" or not end.startswith("<["):
        return None
    if grammar.kind == "json_schema":
        answer = _json(json.loads(text))
    elif grammar.kind == "regex":
        # A slash would end it.
        answer = "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", text, flags=re.DOTALL) + "/"
    else:
        answer = f"%lark {{\n{text}\n}}"
    thought = f"{_ANY_TEXT} {end} /[ \\t\\r\\n]{{0,2}}/"
    thought = thought if thinking else f"({write(style.begin)} {thought})?"
    return Grammar("lark", f"start: {thought} {'' if calls else write(style.answer)} answer\nanswer: {answer}")
