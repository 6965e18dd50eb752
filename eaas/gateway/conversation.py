"""Chat messages as chat templates expect them. Pure.

Clients speak OpenAI's form, which differs in three places from what the templates were written for: templates know no
role "developer", read a call's arguments as an object rather than as its text, and add up contents without asking
whether there is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, oldest first, each with "role" and "content"."""
    return [_message(message) for message in messages]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(given)
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("content") is None:
        message["content"] = ""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(given: Any) -> Any:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        return given
    return {**given, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        parsed = json.loads(given)
    except (ValueError, RecursionError):
        # What a model wrote once may be no JSON; it is to see its own words again.
        return given
    return parsed if isinstance(parsed, dict) else given
