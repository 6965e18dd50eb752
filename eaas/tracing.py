"""Traces, for those who ask for them: the option, and the W3C header that carries a trace from process to process.

Spans are made in eaas/spans.py, which needs the extra `tracing`; nothing of it is imported before a URL is given.
"""

from __future__ import annotations

import importlib.metadata
import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.options import Options, OptionsInvalid, option

if TYPE_CHECKING:
    from eaas.spans import Tracing

# version-trace-parent-flags. Version ff is none; ids of zeros alone are none.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
LONGEST_TRACEPARENT = 55

# Of the request that is being answered; empty where it is not traced.
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")


class TracingMissing(ValueError):
    """Traces were asked for and cannot be made; the text says what to do."""


def valid_traceparent(text: str) -> str:
    """The header of a caller, or nothing where it is none: an unusable one starts a new trace, as the W3C has it."""
    return text if len(text) <= LONGEST_TRACEPARENT and _TRACEPARENT.fullmatch(text) else ""


def is_sampled(traceparent: str) -> bool:
    """Whether whoever wrote a valid header records the trace."""
    return bool(int(traceparent[-2:], 16) & 1)


def version() -> str:
    """Of this package, as it was installed."""
    try:
        return importlib.metadata.version("eaas")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


@dataclass(frozen=True, kw_only=True)
class TracingOptions(Options):
    """Traces"""

    trace_url: str = option(
        "",
        "Send traces there, by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; default: none are made.",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace_url and not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", self.trace_url):
            raise OptionsInvalid(
                f"--trace-url {self.trace_url} is no http or https URL; give one such as http://127.0.0.1:4318/v1/traces."
            )


def open_tracing(
    url: str, share: float = 1.0, *, service: str, instance: str, version: str
) -> Tracing | None:
    """What makes the spans of this process; None when no URL was given.

    Raises:
        TracingMissing: the extra is not installed.
    """
    if not url:
        return None
    try:
        from eaas.spans import Tracing
    except ImportError as error:
        raise TracingMissing(
            f"--trace-url {url} needs OpenTelemetry, and {error.name} is not installed. Run pip install "
            "'eaas[tracing]', or leave the option out."
        ) from None
    return Tracing(url, share, service=service, instance=instance, version=version)
