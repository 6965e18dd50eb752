"""A connection to the router, or to whichever of several leads: calls that try again, streams that open again."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.access import ROUTER, target_of
from router.host import boot_s
from router.messages import LEADER, STANDBY
from router.proto import router_pb2 as pb
from router.proto import router_pb2_grpc as rpc
from router.tls import Credentials

PLAIN = (("grpc.enable_http_proxy", 0),)
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A frozen router's sockets stay open: only unanswered pings tell. gRPC must be told to send more than two, and
    # counts ping_timeout (60 s unless set), not keepalive_timeout.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    *PLAIN,
    (
        "grpc.service_config",
        json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": LEADER}}),
    ),
)


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.Channel:
    """A channel that sends every call to the router that leads, as health tells. Raises RouterAddressInvalid."""
    return channel_to(target_of(address), ROUTER, credentials, _OPTIONS)


def channel_to(
    address: str, role: str, credentials: Credentials | None, options: Sequence[tuple[str, Any]] = PLAIN
) -> grpc.Channel:
    """A channel to a process of the cluster; with credentials over TLS, and only to one that proves its role."""
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return credentials.channel(address, role, options)


def answers(address: str, timeout_s: float, credentials: Credentials | None = None) -> bool:
    """True if the router at one address answers, leading or not."""
    with channel_to(address, ROUTER, credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return True


def pid_at(address: str, timeout_s: float, credentials: Credentials | None = None) -> int | None:
    """Process of the router at one address, leading or not; None if it does not answer."""
    with channel_to(address, ROUTER, credentials) as channel:
        stub: Any = rpc.RouterStub(channel)
        try:
            return stub.Status(pb.StatusRequest(), timeout=timeout_s).pid
        except grpc.RpcError:
            return None


def _is_of_standby(error: grpc.RpcError) -> bool:
    # It has carried nothing out: the one that leads may be asked at once.
    metadata: Any = error.trailing_metadata()
    return any(key == STANDBY for key, _ in metadata or ())


log = logging.getLogger(__name__)

AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
RETRY_MOST_S = 0.5
_RETRY_FIRST_S = 0.05


class RouterUnavailable(Exception):
    """The router cannot be reached, or cannot write its journal."""


class JoinRefused(Exception):
    """The router will not have this member: another model, shape or format of numbers."""


class OrderRefused(Exception):
    """The router will not have that size, or not retire that member."""


class Connection:
    """Every method may be called from any thread."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Nothing is sent yet. Raises RouterAddressInvalid."""
        self.address = address
        self.closed = threading.Event()
        self._credentials = credentials
        self._generation = credentials.generation() if credentials is not None else 0
        # The last is in use; streams may still run over those before.
        self._channels = [open_channel(address, credentials)]
        self._stub = rpc.RouterStub(self._channels[-1])
        self._lock = threading.Lock()
        self._streams: set[grpc.Call] = set()

    @property
    def stub(self) -> rpc.RouterStub:
        """The router's methods, over a channel that proves itself with the certificate as it is now."""
        generation = self._credentials.generation() if self._credentials is not None else 0
        with self._lock:
            if generation != self._generation and not self.closed.is_set():
                self._generation = generation
                self._channels.append(open_channel(self.address, self._credentials))
                self._stub = rpc.RouterStub(self._channels[-1])
            return self._stub

    def call(
        self,
        method: Callable[..., Any],
        request: Any,
        timeout_s: float,
        refused: type[Exception] = RouterUnavailable,
        codes: Sequence[grpc.StatusCode] = (),
    ) -> Any:
        """The answer of whoever leads.

        Args:
            refused: Raised with the router's own words, where its status is one of these codes.

        Raises:
            RouterUnavailable: no router answered in time, or with another status.
        """
        end_s = boot_s() + timeout_s
        while True:
            try:
                return method(request, timeout=max(0.0, end_s - boot_s()), wait_for_ready=True)
            except grpc.RpcError as error:
                # A router that has just ceased to lead refuses before its health has told everyone.
                if _is_of_standby(error) and not self.closed.wait(_RETRY_FIRST_S):
                    continue
                if error.code() in codes:
                    raise refused(error.details()) from None
                # To somebody without a certificate a router with TLS looks like one that is away.
                proof = "" if self._credentials else ", or name a folder of certificates where the cluster has TLS"
                raise RouterUnavailable(
                    f"{type(request).__name__.removesuffix('Request')}: the router at {self.address} did not answer "
                    f"({error.code().name}: {error.details()}); see that it runs and that the address is right{proof}"
                ) from error

    def stream(self, call: Callable[[], Any]) -> Iterator[Any]:
        """The messages of a stream, which is opened again whenever it ends, until `close`."""
        retry_s = _RETRY_FIRST_S
        while not self.closed.is_set():
            try:
                stream = call()
            except ValueError:  # what grpc raises over a channel that was closed meanwhile
                if self.closed.is_set():
                    return
                raise
            with self._lock:
                self._streams.add(stream)
            if self.closed.is_set():  # `close` may have looked before it was there
                stream.cancel()
            try:
                for message in stream:
                    retry_s = _RETRY_FIRST_S
                    yield message
            except grpc.RpcError as error:
                if not self.closed.is_set() and error.code() not in AWAY:
                    log.warning("stream_failed code=%s detail=%s", error.code(), error.details())
            finally:
                with self._lock:
                    self._streams.discard(stream)
                stream.cancel()
            self.closed.wait(retry_s)
            retry_s = min(2 * retry_s, RETRY_MOST_S)

    def close(self) -> None:
        """End every call and stream, and those to come. Idempotent."""
        self.closed.set()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def hang_up(self) -> None:
        """After `close`, once nobody waits for a call."""
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()
