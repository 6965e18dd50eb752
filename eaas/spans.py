"""What makes the spans of one process and sends them, and those of an attention worker.

Imported only where traces were asked for. Of a worker, each traced choice has a span, and of the steps that it is in
its first and one in EVERY. There is never one for an expert call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eaas.traceparent import TRACEPARENT, is_sampled, valid_traceparent

if TYPE_CHECKING:
    from eaas.worker.engine import Engine, Outcome
    from eaas.worker.protocol import Submit
    from eaas.worker.request import Request

EVERY = 64
# Of one step; its own span would grow with the batch.
MOST_LINKS = 16
MOST_EVENTS = 128  # of one span, by default everywhere
# Traced choices at one worker at once; more go untraced.
MOST_LIVE = 256
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
        return self._tracer.start_span(name, above, kind, attributes=attributes, links=links, start_time=began_ns)

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


class _Choice:
    """One traced choice at a worker."""

    __slots__ = ("began", "first", "had", "request", "span")

    def __init__(self, request: Request, span: Span) -> None:
        self.request, self.span = request, span
        self.had = len(request.output)
        self.first = False
        self.began = False

    @property
    def has_run(self) -> bool:
        """Whether some step has computed rows of it."""
        return self.request.computed > 0 or len(self.request.output) > self.had


class WorkerSpans:
    """Spans of the choices that an attention worker computes. For the thread that steps its engine.

    What it costs grows with the traced choices alone, and not with tokens.
    """

    def __init__(self, tracing: Tracing, engine: Engine, every: int = EVERY) -> None:
        """Args: every: of so many steps with traced choices one has a span, beside the first of each choice."""
        self._tracing, self._engine, self._every = tracing, engine, every
        self._live: dict[tuple[int, str], _Choice] = {}
        # Of choices that are recorded, by name; some have ended before all that was recorded of them is told.
        self._inspected: dict[str, str] = {}
        self._steps = 0

    def submitted(self, message: Submit, owner: int) -> None:
        """A choice was taken by the engine."""
        parent = valid_traceparent(message.traceparent)
        request = self._engine.find(owner, message.id)
        if not parent or not is_sampled(parent) or request is None or len(self._live) >= MOST_LIVE:
            return
        self._end_over()
        span = self._tracing.start(
            "attention",
            SpanKind.SERVER,
            parent,
            attributes={
                "eaas.choice": message.id,
                "eaas.attempt": message.attempt,
                "eaas.prompt_tokens": len(message.prompt),
                "eaas.replayed_tokens": len(message.output),
            },
        )
        self._live[owner, message.id] = _Choice(request, span)
        if message.inspected:
            _, _, name = message.inspected.partition("/")
            self._inspected[name] = traceparent_of(span)
            while len(self._inspected) > 2 * MOST_LIVE:
                del self._inspected[next(iter(self._inspected))]

    def begin_step(self) -> int:
        """Before a step: its time since 1970 in nanoseconds, or 0 where no traced choice is there."""
        return time.time_ns() if self._live else 0

    def end_step(self, began_ns: int, outcome: Outcome | None, rows: int) -> None:
        """After it. Args: began_ns: as `begin_step` gave it. rows: tokens that it computed."""
        if not began_ns or not self._live:
            return
        self._steps += 1
        ran = [choice for choice in self._live.values() if choice.has_run]
        fresh = [choice for choice in ran if not choice.began]
        for choice in fresh:
            choice.began = True
        if ran and (fresh or self._steps % self._every == 0):
            self._record(began_ns, fresh or ran, rows)
        for choice in ran:
            if not choice.first and len(choice.request.output) > choice.had:
                choice.first = True
                choice.span.add_event("first_token")
        if outcome is not None and outcome.failed:
            self._note_failures(outcome)
        self._end_over()

    def between(self) -> None:
        """Between steps: end the spans of choices that were cancelled, or whose gateway went away."""
        if self._live:
            self._end_over()

    def add_activations(self, name: str, position: int, rows: int, events: Mapping[str, Mapping[str, float]]) -> None:
        """Tell what was recorded of rows of a traced choice; of one that is not traced, nothing. Any thread.
        Args: name: of the choice, as its Submit has it in `inspected` behind the inspection's. position: of the first
        of `rows` rows. events: of each tap by name, attributes."""
        parent = self._inspected.get(name)
        if parent is None:
            return
        found = list(events.items())
        about = {"eaas.position": position, "eaas.rows": rows}
        for begin in range(0, len(found), MOST_EVENTS):
            span = self._tracing.start("activations", SpanKind.INTERNAL, parent, attributes=about)
            for tap, values in found[begin : begin + MOST_EVENTS]:
                span.add_event(tap, {f"eaas.{key}": value for key, value in values.items()})
            span.end()

    def stop(self) -> None:
        """End the spans of all that is left: the worker stops, and its choices go on elsewhere."""
        for choice in self._live.values():
            choice.span.set_status(Status(StatusCode.ERROR, "shutting_down"))
            choice.span.end()
        self._live.clear()

    def _record(self, began_ns: int, choices: list[_Choice], rows: int) -> None:
        first, *others = choices
        span = self._tracing.start(
            "step",
            SpanKind.INTERNAL,
            traceparent_of(first.span),
            began_ns,
            {"eaas.rows": rows, "eaas.running": self._engine.scheduler.running, "eaas.traced": len(self._live)},
            [Link(choice.span.get_span_context()) for choice in others[:MOST_LINKS]],
        )
        span.end()

    def _note_failures(self, outcome: Outcome) -> None:
        for owner, failures in outcome.failed.items():
            for failed in failures:
                choice = self._live.get((owner, failed.id))
                if choice is not None:
                    choice.span.set_status(Status(StatusCode.ERROR, failed.code))

    def _end_over(self) -> None:
        find = self._engine.find
        for (owner, id), choice in list(self._live.items()):
            if find(owner, id) is not choice.request:
                request = choice.request
                choice.span.set_attribute("eaas.output_tokens", len(request.output) - choice.had)
                choice.span.set_attribute("eaas.preemptions", request.preemptions)
                choice.span.end()
                del self._live[owner, id]


class TracedRequests:
    """An ASGI application whose POST requests each have a span, below that of the client where it names one."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = valid_traceparent(headers.get(b"traceparent", b"").decode("latin-1"))
        path = scope["path"]
        name = f"POST {path}" if path.startswith("/v1/") else "POST"
        known = {"http.request.method": "POST", "url.path": path}
        span = self._tracing.start(name, SpanKind.SERVER, given, attributes=known)

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if served := scope.get("state", {}).get("served"):
                    span.set_attribute("gen_ai.request.model", served.model.name)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                for name, value in message.get("headers", ()):
                    if name == b"x-request-id":
                        span.set_attribute("eaas.request_id", value.decode("latin-1"))
                span.add_event("response_began")
            await send(message)

        token = TRACEPARENT.set(traceparent_of(span))
        try:
            await self._app(scope, receive, watch)
        except BaseException as error:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            TRACEPARENT.reset(token)
            span.end()
