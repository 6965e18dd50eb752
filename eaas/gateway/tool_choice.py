"""Which tools a model is shown, and which calls it must or may make. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eaas.gateway.tool_calls import CallStyle

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


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
) -> ToolUse:
    """What a request's three fields say together.

    Args:
        tools: OpenAI's ``tools``, each with "function" that has a "name".
        choice: OpenAI's ``tool_choice``; None is "auto" where there are tools.

    Raises:
        ValueError: the choice is none that OpenAI knows, or names no tool that is there.
    """
    mode: Any = choice or "auto"
    several = parallel is not False
    names = None
    if isinstance(choice, Mapping):
        mode, names = _named(choice)
        several = several and choice.get("type") != "function"
    if mode not in ("none", "auto", "required"):
        raise ValueError(
            f"it is {mode!r}; 'none', 'auto', 'required' or an object that names a function is needed"
        )
    if mode == "none":
        return NO_TOOLS
    known = {tool["function"]["name"] for tool in tools}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ValueError(f"it names {unknown[0]!r}, which is not among the tools")
    if mode == "required" and not tools:
        raise ValueError("it asks for a call, and there are no tools; send 'tools' as well")
    shown = [tool for tool in tools if names is None or tool["function"]["name"] in names]
    return ToolUse(shown=shown, must_call=mode == "required", parallel=several)


def _named(choice: Mapping[str, Any]) -> tuple[Literal["auto", "required"], list[str]]:
    kind = choice.get("type")
    if kind == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return "required", [name]
    elif kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if isinstance(allowed, Mapping) and allowed.get("mode") in ("auto", "required"):
            entries = allowed.get("tools")
            names: list[str] = []
            for entry in entries if isinstance(entries, list) else ():
                function = entry.get("function") if isinstance(entry, Mapping) else None
                name = function.get("name") if isinstance(function, Mapping) else None
                names += [name] if isinstance(name, str) else []
            if names:
                return allowed["mode"], names
    raise ValueError(
        "the object is not understood; {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}} is needed"
    )


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
