"""Fields of OpenAI's and vLLM's requests that this server knows and cannot honour. Pure.

A field that would change the answer is refused by name rather than ignored; its default is taken, since some clients
send all of them. docs/api.md lists every field with what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator


def _only(*defaults: Any) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value is not None and not any(value == known and type(value) is type(known) for known in defaults):
            raise ValueError("this server does not support it; leave it out")

    return check


# Types of fields that may be left out, null, or what the name says.
Unsupported = Annotated[Any, AfterValidator(_only(False, [], {}, ""))]
OnlyOne = Annotated[Any, AfterValidator(_only(1, 1.0))]
OnlyTrue = Annotated[Any, AfterValidator(_only(True))]
