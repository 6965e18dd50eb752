"""Traces, for those who ask for them: the option, and what opens them.

Spans are made in eaas/spans.py, which needs the extra `tracing`; nothing of it is imported before a URL is given.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.options import Options, OptionsInvalid, option

if TYPE_CHECKING:
    from eaas.spans import Tracing


class TracingMissing(ValueError):
    """Traces were asked for and cannot be made; the text says what to do."""


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


def open_tracing(url: str, share: float = 1.0, *, service: str, instance: str, version: str) -> Tracing | None:
    """What makes the spans of this process; None when no URL was given. Raises TracingMissing: the extra is not
    installed."""
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
