"""``python -m eaas.gateway``: the HTTP process of a cluster; options: eaas.gateway.config."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import grpc
import uvicorn
from starlette.types import ASGIApp

from eaas.gateway.app import create_app
from eaas.gateway.config import GatewayOptions
from eaas.gateway.dashboard.history import ClusterSnapshot
from eaas.gateway.gateway import Gateway
from eaas.gateway.guard import Connection, RequestIds
from eaas.gateway.keys import read_secret
from eaas.gateway.listening import ListenFailed, address_of, check_exposure, listen
from eaas.gateway.protection import Protection
from eaas.gateway.served_model import ModelUnusable, load_model
from eaas.gateway.status import RouterStatus
from eaas.tracing import open_tracing, version
from experts.faults import SelfInflicted
from router import child
from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.connection import pid_at
from router.faults import FaultTaker
from router.heartbeat import ending
from router.host import host_id, process_id
from router.tls import Credentials
from router.view import DRAINING, GATEWAY, View

log = logging.getLogger("eaas.gateway")

_STATUS_TIMEOUT_S = 0.5
# Longest wait for the router at the start, and then between two tries.
_JOIN_S = 1.0
_LEAVE_S = 0.2
# A client that keeps its connection may be sending its next request just now: one idle for this long is not.
_LINGER_S = 2
_TURNS_PER_S = 4
# An event loop that stands so long, while its process neither computes nor reads, never comes round again; nor does one
# that stands for so much longer whatever its process does.
_HUNG_S, _LONGEST_TURN_S = 1.0, 60.0
START_ERRORS = (ListenFailed, ModelUnusable, OSError, ValueError)


class RouterViews:
    """Views from the router, and this gateway's membership: its lease carries its load.

    A gateway serves whether or not it is a member. One that was fenced joins again, under a new name.
    """

    def __init__(
        self,
        address: str,
        own_address: str = "",
        on_drain: Callable[[], None] = lambda: None,
        faults: FaultTaker | None = None,
        credentials: Credentials | None = None,
        stands_alone: bool = False,
    ) -> None:
        """Args: on_drain: called once, on another thread, when the router wants this gateway to go and another listens
        at the same address; at any, if it stands alone: nobody takes over its socket. faults: what this process may be
        told to do to itself. credentials: of this process; None: no TLS towards the router."""
        self._on_drain, self._stands_alone = on_drain, stands_alone
        self._ordered = self._drains = False
        self.address = address
        self._own_address = own_address
        self._faults = faults
        self._credentials = credentials
        self._client = RouterClient(address, credentials)
        self._pids: dict[str, int] = {}
        self._leader = address
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_joined, name="gateway-join", daemon=True)

    @property
    def name(self) -> str:
        """As a member; ``gateway/0`` before it is one."""
        identity = self._client.identity
        return identity.name if identity else "gateway/0"

    def start(self, on_view: Callable[[View], None], load: Callable[[], Mapping[str, float]]) -> None:
        """Join, and call ``on_view``, on a thread of the client, with each newer View. A router that does not answer
        within a moment is joined later. Args: load: called on another thread of the client before each renewal."""

        def seen(view: View) -> None:
            on_view(view)
            self._look_for_drain(view)

        self._client.start(on_view=seen, load=load, faults=self._faults)
        self._join()
        self._thread.start()

    def _look_for_drain(self, view: View) -> None:
        mine = view.member(self.name)
        # Once ordered, though it was silent for a lease since and has joined again, under a name that nobody ordered.
        self._ordered = self._ordered or (mine is not None and mine.state == DRAINING)
        here = [
            member
            for member in view.pool(GATEWAY)
            if (member.address == self._own_address or self._stands_alone)
            and member.state != DRAINING
            and (member.host, member.pid) != (host_id(), process_id())
        ]
        if self._ordered and here and not self._drains:
            self._drains = True
            log.info("draining successor=%s", here[0].name)
            self._on_drain()

    def _keep_joined(self) -> None:
        while not self._closed.wait(_JOIN_S):
            if self._client.identity is None or self._client.fenced:
                self._join()

    def _join(self) -> None:
        try:
            identity = self._client.join(pool=GATEWAY, address=self._own_address, timeout_s=_JOIN_S)
            log.info("joined name=%s incarnation=%d", identity.name, identity.incarnation)
        except (RouterUnavailable, JoinRefused) as error:
            log.info("join_delayed reason=%s", error)

    def scale(self, pool: str, wanted: int, drain_s: float | None) -> None:
        """Change a pool's wanted size. Blocks shortly. Raises OrderRefused: it is out of bounds, or this process's
        certificate may not; RouterUnavailable: no router answered."""
        self._client.scale(pool, wanted, drain_s)

    def snapshot(self, *, rows: bool = True) -> ClusterSnapshot:
        """What the router tells, with the newest View or the last one seen, and how each router does, the leader first.
        Blocks shortly. Args: rows: The load of each expert too."""
        status = None
        with contextlib.suppress(RouterUnavailable, grpc.RpcError):
            status = self._client.status(timeout_s=_STATUS_TIMEOUT_S, rows=rows)
            self._leader = status.leader or self.address
            self._pids[self._leader] = status.pid
        # One name may stand for several, of which only the leader can be asked.
        addresses = self.address.split(",") if "," in self.address else [self._leader]
        found = [self._router(n, address, status is not None) for n, address in enumerate(addresses)]
        routers = tuple(sorted(found, key=lambda router: router.address != self._leader))
        if status is None:
            return ClusterSnapshot(view=self._client.view, heard=False, routers=routers)
        return ClusterSnapshot(
            view=status.view,
            heard=True,
            routers=routers,
            pools=status.pools,
            gone=status.gone,
            retirements=status.retirements,
            problem=status.problem,
            rows=status.rows if len(status.rows) else None,
        )

    def _router(self, number: int, address: str, led: bool) -> RouterStatus:
        state = "serving" if led and address == self._leader else "unreachable"
        if address != self._leader and (pid := pid_at(address, _STATUS_TIMEOUT_S, self._credentials)):
            self._pids[address], state = pid, "standby"
        # A frozen router is thawed by its pid: the one last seen is better than none.
        return RouterStatus(name=f"router/{number}", pid=self._pids.get(address), address=address, state=state)

    def suspect(self, name: str, incarnation: int, reason: str) -> None:
        """Tell the router of a member that does not do its work. Blocks shortly."""
        try:
            self._client.suspect(name, incarnation, reason, timeout_s=_STATUS_TIMEOUT_S)
        except (RouterUnavailable, grpc.RpcError) as error:
            log.info("suspicion_not_told name=%s reason=%s", name, error)

    def close(self) -> None:
        self._closed.set()
        self._client.leave(timeout_s=_LEAVE_S)
        self._client.close()


class _Server(uvicorn.Server):
    """uvicorn, which reports when it listens, and ends streams at once when it is told to stop.

    Told to drain it stops listening, and goes on until the last connection has ended or ``drain_s`` is over.
    """

    def __init__(self, settings: uvicorn.Config, gateway: Gateway, guards: Protection, options: GatewayOptions) -> None:
        super().__init__(settings)
        self._gateway, self._guards, self._options = gateway, guards, options
        self._stopping = asyncio.Event()
        self.turns: int | None = None  # how often the event loop has come round; None while it does not serve

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            gateway = self._gateway
            # What start-up made stays for ever: no collection of garbage need walk over it again.
            gc.freeze()
            log.info("ready address=%s model=%s pid=%d", gateway.address, gateway.own.model.name, os.getpid())
            child.tell_ready(self._options, gateway.views.name, gateway.address)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM, unless it is to drain, and SIGINT stop the server; the process then ends with status 0, not by the
        signal. SIGHUP has it read keys and certificate again."""
        loop = asyncio.get_running_loop()
        reread = functools.partial(self._guards.refresh, anew=True)
        acts = {signal.SIGTERM: self._term, signal.SIGINT: self._stop, signal.SIGHUP: reread}
        for number, act in acts.items():
            loop.add_signal_handler(number, act)
        try:
            yield
        finally:
            for number in acts:
                loop.remove_signal_handler(number)

    async def main_loop(self) -> None:
        """Keep the date header right until told to stop, and show that this loop goes on."""
        self.turns = 0
        while not (self._stopping.is_set() or (self._gateway.draining and not self.server_state.connections)):
            if self.turns % _TURNS_PER_S == 0:
                await self.on_tick(0)
                self._guards.refresh()
            self.turns += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0 / _TURNS_PER_S)
        self.turns = None

    def drain(self) -> None:
        """Stop listening, and end when every client has gone or was told to connect anew; on the event loop."""
        self._gateway.draining = True
        for server in self.servers:
            server.close()
        for connection in self.server_state.connections:
            if isinstance(connection, Connection):
                connection.linger(_LINGER_S)
        asyncio.get_running_loop().call_later(self._options.drain_s, self._stop)

    def _term(self) -> None:
        if self._options.drain_on_term and not self._gateway.draining:
            log.info("draining longest_s=%g", self._options.drain_s)
            self.drain()
        else:
            self._stop()

    def _stop(self) -> None:
        log.info("stopping pid=%d", os.getpid())
        self._stopping.set()
        self._gateway.stop()


def main(options: GatewayOptions) -> int:
    """Serve until SIGTERM or SIGINT. Raises START_ERRORS. Returns the exit code."""
    # Every connection is a descriptor, and the usual soft limit is 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    guards = Protection(options)
    protected = {"tls": guards.tls is not None, "keys": guards.keys is not None}
    if options.listen_fd >= 0:
        listener = socket.socket(fileno=options.listen_fd)
        check_exposure("--listen-fd", listener.getsockname()[0], **protected)
    else:
        listener = listen(options.host, options.port, options.stall_s, **protected)
    with contextlib.closing(listener):
        return _serve(options, listener, guards)


def _serve(options: GatewayOptions, listener: socket.socket, guards: Protection) -> int:
    name = options.served_model_name or options.model.resolve().name
    address, prefix = address_of(listener), options.root_path.rstrip("/")
    named = {"service": "eaas-gateway", "instance": address, "version": version()}
    tracing = open_tracing(options.trace_url, options.trace_share, **named)
    model = load_model(
        options.model, name, trusts_templates=options.trust_request_chat_template, max_model_len=options.max_model_len
    )
    views = RouterViews(
        options.router,
        address,
        on_drain=lambda: gateway.call(server.drain),
        faults=SelfInflicted() if options.allow_chaos else None,
        credentials=child.credentials(options, GATEWAY),
        stands_alone=options.listen_fd < 0,
    )
    gateway = Gateway(
        config=options,
        model=model,
        views=views,
        version=version(),
        address=address,
        resume_key=read_secret(options.resume_key_file) if options.resume_key_file else b"",
    )
    app: ASGIApp = guards.around(create_app(gateway, prefix), gateway.metrics.count_refused)
    # Outside of the keys, which go by paths.
    app = RequestIds(app, prefix, lambda: gateway.draining, logs_requests=options.log_requests)
    if tracing is not None:
        from eaas.spans import TracedRequests

        app = TracedRequests(app, tracing)
    settings = uvicorn.Config(
        app,
        http=Connection.bounded(options, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    settings.load()
    settings.ssl = guards.tls.context if guards.tls is not None else None
    server = _Server(settings, gateway, guards, options)
    heartbeat = ending(lambda: server.turns, bound_s=_HUNG_S, longest_s=_LONGEST_TURN_S)
    heartbeat.start()
    server.run(sockets=[listener])
    heartbeat.close()
    if tracing is not None:
        tracing.close()
    return 0


if __name__ == "__main__":
    sys.exit(child.start("gateway", GatewayOptions, main, START_ERRORS))
