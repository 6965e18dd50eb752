"""The W3C header that carries a trace from process to process."""

from __future__ import annotations

import re
from contextvars import ContextVar

# version-trace-parent-flags. Version ff is none; ids of zeros alone are none.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
LONGEST_TRACEPARENT = 55

# Of the request that is being answered; empty where it is not traced.
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")


def valid_traceparent(text: str) -> str:
    """The header of a caller, or nothing where it is none: an unusable one starts a new trace, as the W3C has it."""
    return text if len(text) <= LONGEST_TRACEPARENT and _TRACEPARENT.fullmatch(text) else ""


def is_sampled(traceparent: str) -> bool:
    """Whether whoever wrote a valid header records the trace."""
    return bool(int(traceparent[-2:], 16) & 1)
