"""``python -m eaas.gateway``: the HTTP process of a cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import importlib.metadata
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import uvicorn

from eaas.gateway.app import Gateway, create_app
from eaas.gateway.config import GatewayConfig
from eaas.gateway.http_guard import Connection, RequestIds
from eaas.gateway.load_model import ModelUnusable, load_model
from eaas.gateway.status import RouterStatus
from router import child
from router.channel import router_address
from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.view import GATEWAY, View

log = logging.getLogger("eaas.gateway")

_STATUS_TIMEOUT_S = 0.5
# Longest wait for the router at the start, and then between two tries.
_JOIN_S = 1.0
_LEAVE_S = 0.2


class StartFailed(Exception):
    """The gateway cannot start; the text says why and what to do."""


class RouterViews:
    """Views from the router, and this gateway's membership: its lease carries its load.

    A gateway serves whether or not it is a member. One that was fenced joins again, under a new name.
    """

    def __init__(self, address: str, own_address: str = "") -> None:
        self.address = address
        self._own_address = own_address
        self._client = RouterClient(address)
        self._pid: int | None = None
        self._leader = address
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_joined, name="gateway-join", daemon=True)

    @property
    def name(self) -> str:
        """As a member; ``gateway/0`` before it is one."""
        identity = self._client.identity
        return identity.name if identity else "gateway/0"

    def start(self, on_view: Callable[[View], None], load: Callable[[], Mapping[str, float]]) -> None:
        """Join, and call ``on_view``, on a thread of the client, with each newer View.

        A router that does not answer within a moment is joined later.

        Args:
            load: Called on another thread of the client before each renewal.
        """
        self._client.start(on_view=on_view, load=load)
        self._join()
        self._thread.start()

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

    def latest(self) -> tuple[View | None, RouterStatus]:
        """The router's present View, or the last one seen; and how the router does. Blocks shortly."""
        try:
            status = self._client.status(timeout_s=_STATUS_TIMEOUT_S)
        except (RouterUnavailable, grpc.RpcError):
            # A frozen router is thawed by its pid: the one last seen is better than none.
            return self._client.view, self._router("unreachable")
        self._pid = status.pid
        self._leader = status.leader or self.address
        return status.view, self._router("serving")

    def _router(self, state: str) -> RouterStatus:
        return RouterStatus(pid=self._pid, address=self._leader, state=state)

    def close(self) -> None:
        """Leave, and end the threads."""
        self._closed.set()
        try:
            self._client.leave(timeout_s=_LEAVE_S)
        except RouterUnavailable as error:
            log.info("leave_unanswered error=%s", error)
        self._client.close()


class _Server(uvicorn.Server):
    """uvicorn, which reports when it listens, and ends streams at once when it is told to stop."""

    def __init__(
        self, config: uvicorn.Config, *, on_started: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._on_stop = on_stop
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then report."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the server; the process then ends with status 0, not by the signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def main_loop(self) -> None:
        """Keep the date header right until told to stop; uvicorn's own loop wakes ten times a second for it."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    def _stop(self) -> None:
        log.info("stopping pid=%d", os.getpid())
        self.should_exit = True
        self._stopping.set()
        self._on_stop()


def parser() -> argparse.ArgumentParser:
    """The options of this process."""
    options = argparse.ArgumentParser(
        prog="eaas gateway",
        description="Serve the OpenAI API over HTTP for the attention workers that the router knows.",
        epilog="Example: eaas gateway --router 127.0.0.1:7000 --model ./checkpoint --port 8000. "
        "Exit codes: 0 stopped, 1 it could not start (the reason is printed), 2 wrong options.",
    )
    options.add_argument(
        "--router",
        required=True,
        type=router_address,
        metavar="HOST:PORT,...",
        help="Address of each router.",
    )
    options.add_argument(
        "--model", required=True, type=Path, help="Checkpoint folder: tokenizer and configuration."
    )
    options.add_argument(
        "--served-model-name", default="", help="Name that clients use; default: the folder's name."
    )
    options.add_argument("--host", default="127.0.0.1", help="Address to listen on; loopback only.")
    options.add_argument("--port", type=int, default=8000, help="TCP port; 0 takes a free one.")
    options.add_argument(
        "--deadline-s", type=float, default=30.0, help="Longest wait for an attention worker."
    )
    options.add_argument(
        "--max-requests", type=int, default=1024, help="Requests in progress; more are refused."
    )
    options.add_argument("--max-body-bytes", type=int, default=4 << 20, help="Largest request body.")
    options.add_argument(
        "--stall-s", type=float, default=60.0, help="End a client that reads nothing for so long."
    )
    child.add_options(options)
    options.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return options


def listen(host: str, port: int, stall_s: float) -> socket.socket:
    """A listening socket on a loopback address.

    Raises:
        StartFailed: not loopback, not an address, or the port is taken.
    """
    name = "127.0.0.1" if host == "localhost" else host
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        raise StartFailed(f"--host {host} is no IP address; use 127.0.0.1 or ::1.") from None
    if not address.is_loopback:
        raise StartFailed(
            f"--host {host} can be reached from outside, and this gateway has neither TLS nor keys. Listen "
            "on 127.0.0.1 and put a proxy with TLS in front."
        )
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection: the kernel ends one whose client takes no bytes for so long.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
        listener.bind((str(address), port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise StartFailed(
                f"Port {port} on {host} is in use by another process. Stop that process, or choose another "
                "port with --port (0 takes a free one)."
            ) from None
        raise StartFailed(
            f"Port {port} on {host} cannot be opened: {error}. Choose another with --port."
        ) from None
    listener.setblocking(False)
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway until SIGTERM or SIGINT. Returns the exit code."""
    options = parser().parse_args(arguments)
    child.begin(options, options.log_level)
    try:
        listener = listen(options.host, options.port, options.stall_s)
        with contextlib.closing(listener):
            return _serve(options, listener)
    except (StartFailed, ModelUnusable, ValueError) as error:
        log.error("start_failed error=%s", error)
        child.tell_failed(options, str(error))
        return 1


def _serve(options: argparse.Namespace, listener: socket.socket) -> int:
    name = options.served_model_name or options.model.resolve().name
    config = GatewayConfig(
        model_name=name,
        deadline_s=options.deadline_s,
        max_requests=options.max_requests,
        body_limit_bytes=options.max_body_bytes,
    )
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    gateway = Gateway(
        config=config,
        model=load_model(options.model, name),
        views=RouterViews(options.router, address),
        version=_version(),
    )
    gateway.address = address

    def started() -> None:
        # What start-up made stays for ever: no collection of garbage need walk over it again.
        gc.freeze()
        log.info("ready address=%s model=%s pid=%d", gateway.address, name, os.getpid())
        child.tell_ready(options, gateway.name, gateway.address)

    settings = uvicorn.Config(
        RequestIds(create_app(gateway)),
        http=Connection,
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    _Server(settings, on_started=started, on_stop=gateway.stop).run(sockets=[listener])
    return 0


def _version() -> str:
    try:
        return importlib.metadata.version("eaas")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


if __name__ == "__main__":
    sys.exit(main())
