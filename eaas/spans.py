"""What makes the spans of one process and sends them. Imported only where traces were asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_EXPORT_S = 1.0
_FLUSH_S = 0.4
_DELAY_MS = 500

_wire = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans and sends them from a thread of its own. A receiver that is away costs spans, never requests."""

    def __init__(self, url: str, share: float, *, service: str, instance: str, version: str) -> None:
        resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "service.version": version}
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MS))
        self._tracer = self._provider.get_tracer("eaas", version)

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: str = "",
        began_ns: int | None = None,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """Begin a span. Args: parent: a valid traceparent, or nothing. began_ns: since 1970; now unless given."""
        above = _wire.extract({"traceparent": parent}) if parent else None
        return self._tracer.start_span(
            name, above, kind, attributes=attributes, links=links, start_time=began_ns
        )

    def close(self) -> None:
        """Send what there is, for a moment: an orderly end is promised within a second."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(_FLUSH_S)


def traceparent_of(span: Span) -> str:
    """The header that names a span as the parent; empty where it is not recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _wire.inject(carrier, set_span_in_context(span))
    return carrier["traceparent"]
