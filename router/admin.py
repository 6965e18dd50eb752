"""The admin listener: pools, health and metrics over HTTP, apart from what members use.

    GET  /admin/pools               every pool, as below
    GET  /admin/pools/{pool}/scale  {"pool", "wanted", "live", "starting", "draining", "least", "most", "held_up",
                                     "is_scaling"}
    PUT  /admin/pools/{pool}/scale  {"wanted": 6, "drain_s": 30} -> the same, once it is durable
    GET  /admin/experts             {"rows": [[...]]}, sent to each expert since the router began, by layer
    GET  /admin/faults              {"faults": [as below], "members": [{"name", "pool", "state"}]}
    POST /admin/faults              {"names": ["expert/3"], "fault": {...}} -> {"fault": {...}, "names", "remaining_s"}
    DELETE /admin/faults[/{id}]     one, or all, before their time -> {"cleared": [ids]}
    GET  /healthz                   200, or 503 while the router cannot write its journal
    GET  /metrics                   Prometheus

What fails answers {"error": {"message", "found", "needed", "do"}}. Faults, in the words of router/faults.py, are only
for a router with --allow-chaos. A page in a browser of this machine can neither read this (no CORS, and a foreign Host,
as after DNS rebinding, is refused) nor change it (a PUT, a DELETE, and a POST of JSON ask first).

It listens on loopback; anywhere else it needs TLS and a key. With --tls-dir it speaks TLS with the router's own
certificate. Who shows a certificate must be an operator: a member's is refused, key or not.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import socket
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.access import OPERATOR, bound_address, host_port, is_loopback
from router.config import RouterOptions
from router.events import DRAIN_S, LONGEST_DRAIN_S, Scale
from router.faults import Fault, FaultInvalid, FaultRefused, Injection
from router.injection import ChaosNotAllowed, TooManyFaults
from router.journal import JournalUnusable
from router.metrics import CONTENT_TYPE, RouterMetrics
from router.pools import pool_size
from router.records import view_of
from router.service import CallRefused, CannotListen, RouterService
from router.state import LAUNCHED_POOLS, Config
from router.tls import Credentials, peer_role
from router.view import PoolSize

log = logging.getLogger(__name__)

_BODY_BYTES = 4096
_BODY_S = 5.0
_CONNECTIONS = 64
_LEAST_KEY = 16
_JSON = b"application/json"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")

_FAULT_STATUS = {FaultInvalid: 400, ChaosNotAllowed: 403, TooManyFaults: 429}

Reply = tuple[int, bytes, bytes]


@dataclass(kw_only=True, eq=False)
class _Refused(Exception):
    status: int
    found: str
    needed: str
    do: str
    message: str = ""

    def reply(self) -> Reply:
        said = {
            "message": self.message or f"{self.found} found, {self.needed} needed: {self.do}",
            "found": self.found,
            "needed": self.needed,
            "do": self.do,
        }
        return self.status, _JSON, json.dumps({"error": said}).encode()


def key_digest(path: Path) -> bytes:
    """SHA-256 of the key in a file: one line, at least 16 characters. Only this is kept.

    Raises:
        CannotListen: no such file, or no such key in it.
    """
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotListen(f"--admin-key-file {path} cannot be read as ASCII: {error}") from error
    if len(key) < _LEAST_KEY or not key.isprintable() or " " in key:
        raise CannotListen(
            f"--admin-key-file {path} holds no key: one line of at least {_LEAST_KEY} printable characters "
            f"without spaces needed, as `openssl rand -hex 32` writes"
        )
    return hashlib.sha256(key.encode()).digest()


class AdminApp:
    """The routes, as an ASGI application."""

    def __init__(
        self, config: Config, router: RouterService, digest: bytes | None = None, exposed: bool = False
    ) -> None:
        """Args: digest: of the key that every request but /healthz must bring; None: no key. exposed: it may be asked
        under any name, not only those of loopback."""
        self._exposed = exposed
        self._config = config
        self._router = router
        self._digest = digest
        router.injections.keyed = digest is not None
        self._metrics = RouterMetrics(
            config, lambda: router.state, router.counts, lambda: router.problem, router.injections
        )

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        try:
            status, kind, body = await self._answer(scope, receive)
        except _Refused as refused:
            status, kind, body = refused.reply()
        except JournalUnusable as error:
            status, kind, body = _Refused(
                status=503,
                found=f"a router that cannot decide ({error})",
                needed="one that can",
                do="mend that, or ask the router that leads, and try again",
            ).reply()
        except Exception:
            log.exception("admin_request_failed path=%s", scope["path"])
            status, kind, body = _Refused(
                status=500, found="a fault of the router", needed="none", do="see its log"
            ).reply()
        headers = [
            (b"content-type", kind),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if status in (408, 413):
            # The rest of the body is still to come; it must not be read as the next request.
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]]) -> Reply:
        headers = dict(scope["headers"])
        if not self._exposed:
            _check_host(headers.get(b"host", b""))
        method, path = scope["method"], scope["path"]
        if path == "/healthz":
            _check_method(method, "GET", "HEAD")
            problem = self._router.problem
            return 503 if problem else 200, _JSON, json.dumps({"problem": problem}).encode()
        self._check_key(headers.get(b"authorization", b""))
        if path == "/metrics":
            _check_method(method, "GET", "HEAD")
            return 200, CONTENT_TYPE, self._metrics.page()
        if path == "/admin/pools":
            _check_method(method, "GET", "HEAD")
            return _json({"pools": [_words(pool, self._size(pool)) for pool in LAUNCHED_POOLS]})
        if path == "/admin/experts":
            _check_method(method, "GET", "HEAD")
            return _json({"rows": self._rows()})
        if path == "/admin/faults" or (path.startswith("/admin/faults/") and path != "/admin/faults/"):
            return await self._faults(method, path.removeprefix("/admin/faults")[1:], headers, receive)
        parts = path.split("/")
        if len(parts) != 5 or parts[:3] != ["", "admin", "pools"] or parts[4] != "scale":
            raise _Refused(
                status=404,
                found=f"path {path}",
                needed="/admin/pools, /admin/pools/{pool}/scale, /admin/experts, /admin/faults, /healthz or /metrics",
                do="ask for one of these",
            )
        pool = parts[3]
        if pool not in LAUNCHED_POOLS:
            raise _Refused(
                status=404,
                found=f"pool {pool!r}",
                needed=f"one of {', '.join(LAUNCHED_POOLS)}",
                do="GET /admin/pools lists them",
            )
        _check_method(method, "GET", "HEAD", "PUT")
        if method != "PUT":
            return _json(_words(pool, self._size(pool)))
        wanted, drain_s = _read_scale(await _read_body(headers, receive))
        try:
            return _json(_words(pool, self._router.scale(Scale(pool=pool, wanted=wanted, drain_s=drain_s))))
        except CallRefused as refused:
            least, most = self._config.bounds(pool)
            raise _Refused(
                status=409,
                found=f"wanted {wanted}",
                needed=f"{least} to {most}",
                do="PUT a size within the bounds",
                message=str(refused),
            ) from None

    def _rows(self) -> list[list[int]]:
        model, rows = self._router.state.model, self._router.counts.rows
        known = model.layers > 0 and len(rows) == model.layers * model.experts
        return rows.reshape(model.layers, -1).tolist() if known else []

    async def _faults(
        self,
        method: str,
        id: str,
        headers: dict[bytes, bytes],
        receive: Callable[[], Awaitable[dict[str, Any]]],
    ) -> Reply:
        """Everything under /admin/faults."""
        injections = self._router.injections
        if not injections.allowed:
            raise _Refused(
                status=403,
                found="a router without --allow-chaos",
                needed="one with it",
                do="start router and members with --allow-chaos, where faults may be injected",
            )
        _check_method(method, *(("DELETE",) if id else ("GET", "HEAD", "POST", "DELETE")))
        if method == "DELETE":
            return _json({"cleared": injections.clear(urllib.parse.unquote(id))})
        if method != "POST":
            members = view_of(self._config, self._router.state).members
            return _json(
                {
                    "faults": [_injected(injection) for injection in injections.known()],
                    "members": [{"name": m.name, "pool": m.pool, "state": m.state} for m in members],
                }
            )
        names, said = _read_fault(await _read_body(headers, receive))
        try:
            return _json(_injected(await injections.inject(names, Fault.from_dict(said))))
        except (FaultInvalid, FaultRefused) as error:
            raise _Refused(
                status=_FAULT_STATUS.get(type(error), 409),
                found=f"{said.get('kind')} of {', '.join(names)}"[:100],
                needed="a fault that each of them takes",
                do="GET /admin/faults lists members and faults",
                message=str(error),
            ) from None

    def _size(self, pool: str) -> PoolSize:
        return pool_size(self._config, self._router.state, pool)

    def _check_key(self, given: bytes) -> None:
        if self._digest is None:
            return
        scheme, _, key = given.partition(b" ")
        # Digests of equal length, compared in constant time: the answer's delay tells nothing of the key.
        same = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        if scheme.lower() != b"bearer" or not same:
            raise _Refused(
                status=401,
                found="another key" if given else "no key",
                needed="the key of --admin-key-file",
                do="send the header Authorization: Bearer KEY",
            )


def _check_host(host: bytes) -> None:
    name = host.decode("latin-1").lower()
    if not name.endswith("]"):
        head, _, port = name.rpartition(":")
        name = head if head and port.isdigit() else name
    if name not in _HOSTS:
        raise _Refused(
            status=421,
            found=f"header Host {host.decode('latin-1')!r}",
            needed="a loopback name",
            do=f"ask {', '.join(_HOSTS)}; a browser that was sent here by another name is refused",
        )


def _check_method(method: str, *known: str) -> None:
    if method not in known:
        raise _Refused(status=405, found=f"method {method}", needed=", ".join(known), do="use one of these")


async def _read_body(headers: dict[bytes, bytes], receive: Callable[[], Awaitable[dict[str, Any]]]) -> bytes:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != _JSON:
        # A page may send other types to a foreign site without asking first.
        raise _Refused(
            status=415,
            found=f"content-type {kind.decode('latin-1') or 'none'}",
            needed="application/json",
            do="set the header content-type",
        )
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > _BODY_BYTES:
                    raise _Refused(
                        status=413,
                        found=f"over {_BODY_BYTES} bytes",
                        needed=f"at most {_BODY_BYTES}",
                        do="send only what is asked for",
                    )
    except TimeoutError:
        raise _Refused(
            status=408, found="part of a body", needed=f"all of it in {_BODY_S:g} s", do="send it again"
        ) from None
    return bytes(body)


def _read_scale(body: bytes) -> tuple[int, float]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    needed, do = '{"wanted": 6} or {"wanted": 6, "drain_s": 30}', "send such a body"
    if not isinstance(said, dict) or not {"wanted"} <= said.keys() <= {"wanted", "drain_s"}:
        shown = body[:64].decode("utf-8", "replace")
        raise _Refused(status=400, found=f"body {shown!r}", needed=needed, do=do)
    wanted, drain_s = said["wanted"], said.get("drain_s", DRAIN_S)
    if type(wanted) is not int or not 0 <= wanted < 1 << 31:
        raise _Refused(status=400, found=f"wanted {wanted!r}"[:100], needed="a whole number from 0", do=do)
    if type(drain_s) not in (int, float) or not 0 < drain_s <= LONGEST_DRAIN_S:
        raise _Refused(
            status=400,
            found=f"drain_s {drain_s!r}"[:100],
            needed=f"seconds, over 0 and at most {LONGEST_DRAIN_S:g}",
            do=do,
        )
    return wanted, float(drain_s)


def _read_fault(body: bytes) -> tuple[list[str], dict[str, Any]]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict) and said.keys() == {"names", "fault"}:
        names, fault = said["names"], said["fault"]
        listed = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        if listed and isinstance(fault, dict):
            # The router gives the id.
            return names, {"id": "", **fault}
    raise _Refused(
        status=400,
        found=f"body {body[:64].decode('utf-8', 'replace')!r}",
        needed='{"names": ["expert/3"], "fault": {"kind": "slow", "for_s": 10, "times": 10}}',
        do="send such a body",
    )


def _injected(injection: Injection) -> dict[str, Any]:
    return {
        "fault": injection.fault.to_dict(),
        "names": list(injection.names),
        "remaining_s": injection.remaining_s,
    }


def _words(pool: str, size: PoolSize) -> dict[str, Any]:
    return {"pool": pool, **asdict(size), "is_scaling": size.is_scaling}


def _json(value: object) -> Reply:
    return 200, _JSON, json.dumps(value).encode()


class _Connection(H11Protocol):
    """Closed at once where the client shows a certificate of any role but an operator's.

    h11 bounds the size of a request's head, which httptools does not.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        shown = transport.get_extra_info("peercert")
        if shown and (role := peer_role(shown)) != OPERATOR:
            log.warning("admin_refused peer=%s role=%s needed=%s", self.client, role or "none", OPERATOR)
            transport.abort()


class AdminListener(uvicorn.Server):
    """uvicorn on the router's own event loop, between `begin` and `shutdown`: it takes no signals and ticks never."""

    def __init__(self, app: AdminApp, host: str, port: int, credentials: Credentials | None = None) -> None:
        """Args: host: IP address. port: 0 = any. credentials: of the router, to speak TLS with.

        Raises:
            OSError: the port cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_CONNECTIONS)
        self.address = host_port(host, self._listener.getsockname()[1])
        self._tls = credentials.open_context() if credentials is not None else None
        super().__init__(
            uvicorn.Config(
                app,  # pyright: ignore[reportArgumentType]
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                limit_concurrency=_CONNECTIONS,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,
            )
        )

    async def begin(self) -> None:
        """Answer from now on, until `shutdown`."""
        self.config.load()
        self.config.ssl = self._tls
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[self._listener])


def listen(
    options: RouterOptions, config: Config, router: RouterService, credentials: Credentials | None
) -> AdminListener:
    """The admin listener of a router, which `begin` lets answer.

    Raises:
        CannotListen: the port cannot be had, or there is no key in the file.
        Exposed: other machines could reach it, and it has no TLS or no key.
    """
    key_file, port = options.admin_key_file, options.admin_port or 0
    needed = {"TLS (--tls-dir)": credentials is not None, "key (--admin-key-file)": key_file is not None}
    bound = bound_address("--admin-host", options.admin_host, needed)
    digest = key_digest(key_file) if key_file is not None else None
    try:
        app = AdminApp(config, router, digest, exposed=not is_loopback(bound))
        return AdminListener(app, bound, port, credentials)
    except OSError as error:
        raise CannotListen(
            f"port {port} of {bound} cannot be used for --admin-port ({error}): "
            f"stop what listens there or give another"
        ) from error
