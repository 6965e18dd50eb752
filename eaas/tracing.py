"""Traces, for those who ask for them: options, and the W3C header that carries a trace from process to process.

Spans are made in eaas/spans.py, which needs the extra `tracing`; nothing of it is imported before a URL is given.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING

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


def add_options(options: argparse.ArgumentParser, *, begins: bool) -> None:
    """The options of a process that may trace. Args: begins: it decides which requests are traced."""
    options.add_argument(
        "--trace-url",
        default="",
        metavar="URL",
        help="send traces there, by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; default: none are made",
    )
    if not begins:
        return
    options.add_argument(
        "--trace-share",
        type=float,
        default=1.0,
        help="share of requests that are traced, 0 to 1, where the client does not say (default 1)",
    )


def check_options(url: str, share: float) -> None:
    """Refuse what makes no sense.

    Raises:
        ValueError: no URL of HTTP, or no share.
    """
    if url and not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", url):
        raise ValueError(
            f"--trace-url {url!r} is no http or https URL; give one such as http://127.0.0.1:4318/v1/traces."
        )
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"--trace-share {share} found; give 0 (none) to 1 (every request).")


def open_tracing(
    url: str, share: float = 1.0, *, service: str, instance: str, version: str
) -> Tracing | None:
    """What makes the spans of this process; None when no URL was given.

    Raises:
        ValueError: the options make no sense.
        TracingMissing: the extra is not installed.
    """
    check_options(url, share)
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
