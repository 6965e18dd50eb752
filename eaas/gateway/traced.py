"""A span for each traced request of a gateway. Imported only where traces were asked for."""

from __future__ import annotations

from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eaas.spans import Tracing, traceparent_of
from eaas.tracing import TRACEPARENT, valid_traceparent


class TracedRequests:
    """An ASGI application whose POST requests each have a span, below that of the client where it names one."""

    def __init__(self, app: ASGIApp, tracing: Tracing, model: str) -> None:
        self._app, self._tracing, self._model = app, tracing, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = valid_traceparent(headers.get(b"traceparent", b"").decode("latin-1"))
        path = scope["path"]
        span = self._tracing.start(
            f"POST {path}" if path.startswith("/v1/") else "POST",
            SpanKind.SERVER,
            given,
            attributes={
                "http.request.method": "POST",
                "url.path": path,
                "gen_ai.request.model": self._model,
            },
        )

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
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
