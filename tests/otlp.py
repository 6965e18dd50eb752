"""A receiver of OTLP over HTTP, in the test's own process: it keeps every span that it is sent."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, kw_only=True)
class Received:
    """One span. Ids in hexadecimal; times since 1970 in nanoseconds."""

    service: str
    instance: str
    name: str
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[str, ...]
    failed: str


class Receiver:
    """What it has received so far."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.url = ""

    def named(self, name: str, trace: str = "") -> list[Received]:
        """Spans of that name, of one trace if one is given, by when they began."""
        found = [span for span in list(self.spans) if span.name == name and trace in ("", span.trace)]
        return sorted(found, key=lambda span: span.began_ns)

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of one export."""
        for resource in request.resource_spans:
            of = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            service=of["service.name"],
                            instance=of["service.instance.id"],
                            name=span.name,
                            trace=span.trace_id.hex(),
                            id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            began_ns=span.start_time_unix_nano,
                            ended_ns=span.end_time_unix_nano,
                            attributes={
                                each.key: getattr(each.value, each.value.WhichOneof("value"))
                                for each in span.attributes
                            },
                            events=tuple(event.name for event in span.events),
                            links=tuple(link.span_id.hex() for link in span.links),
                            failed=span.status.message if span.status.code == 2 else "",
                        )
                    )


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    """One on a free port of loopback."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            known = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if known:
                found.take(ExportTraceServiceRequest.FromString(body))
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if known else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a test says what went wrong."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
