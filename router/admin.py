"""The admin listener: pools, health and metrics over HTTP, apart from what members use.

    GET  /admin/pools               every pool, as below
    GET  /admin/pools/{pool}/scale  {"pool", "wanted", "live", "starting", "draining", "least", "most", "held_up",
                                     "is_scaling"}
    PUT  /admin/pools/{pool}/scale  {"wanted": 6, "drain_s": 30} -> the same, once it is durable
    POST /admin/members/{name}/retire {"operation": "ID"} -> {"name", "operation", "state", "safe_to_terminate",
                                     "asked_unix_s", "waits_for", "only_here", "running"}, once it is durable
    GET  /admin/members/{name}/retire  how far that has come, the same
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
import re
import socket
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.access import OPERATOR, bound_address, host_port, is_loopback
from router.config import RouterOptions
from router.events import DRAIN_S, LONGEST_DRAIN_S, Scale
from router.faults import Fault, FaultInvalid, FaultRefused, Injection
from router.injection import ChaosNotAllowed, TooManyFaults
from router.journal import JournalUnusable
from router.metrics import CONTENT_TYPE, RouterMetrics
from router.models import groups, named
from router.pools import pool_size
from router.records import view_of
from router.retiring import OPERATION, is_operation, retirement
from router.service import CallRefused, CannotListen, RouterService
from router.state import Config
from router.tls import Credentials, peer_role

log = logging.getLogger(__name__)

_BODY_BYTES = 4096
_BODY_S = 5.0
_CONNECTIONS = 64
_LEAST_KEY = 16
_HOSTS = ("127.0.0.1", "localhost", "[::1]")

_FAULT_STATUS = {FaultInvalid: 400, ChaosNotAllowed: 403, TooManyFaults: 429}


@dataclass(eq=False)
class _Refused(Exception):
    """A status, what was found, what is needed and what to do; else in words of its own."""

    status: int
    found: str
    needed: str
    do: str
    message: str = ""

    def response(self) -> Response:
        said = {
            "message": self.message or f"{self.found} found, {self.needed} needed: {self.do}",
            "found": self.found,
            "needed": self.needed,
            "do": self.do,
        }
        # The rest of a body that was not read is still to come; it must not be read as the next request.
        more = {
            401: {"www-authenticate": "Bearer"},
            408: {"connection": "close"},
            413: {"connection": "close"},
        }
        # Escaped: what was found may hold half of a surrogate pair, which no encoding has.
        text = json.dumps({"error": said})
        return Response(text, self.status, more.get(self.status), "application/json")


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
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        try:
            response = await self._answer(Request(scope, receive))
        except _Refused as refused:
            response = refused.response()
        except JournalUnusable as error:
            found = f"a router that cannot decide ({error})"
            do = "mend that, or ask the router that leads, and try again"
            response = _Refused(503, found, "one that can", do).response()
        except Exception:
            log.exception("admin_request_failed path=%s", scope["path"])
            response = _Refused(500, "a fault of the router", "none", "see its log").response()
        response.headers.update({"cache-control": "no-store", "x-content-type-options": "nosniff"})
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        method, path = request.method, request.scope["path"]
        if not self._exposed:
            _check_host(request.headers.get("host", ""))
        if path == "/healthz":
            _check_method(method, "GET", "HEAD")
            problem = self._router.problem
            return JSONResponse({"problem": problem}, 503 if problem else 200)
        self._check_key(request.headers.get("authorization", ""))
        pages: dict[str, Callable[[], Response]] = {
            "/metrics": lambda: Response(self._metrics.page(), headers={"content-type": CONTENT_TYPE}),
            "/admin/pools": lambda: JSONResponse({"pools": [self._pool(name) for name in groups(self._router.state)]}),
            "/admin/experts": lambda: JSONResponse(self._rows()),
        }
        if path in pages:
            _check_method(method, "GET", "HEAD")
            return pages[path]()
        if found := re.fullmatch("/admin/faults(?:/(.+))?", path):
            return await self._faults(request, found[1] or "")
        if found := re.fullmatch("/admin/pools/(.*)/scale", path):
            return await self._scale(request, found[1])
        if found := re.fullmatch("/admin/members/(.+)/retire", path):
            return await self._retire(request, found[1])
        named = ("/admin/pools/{pool}/scale", "/admin/members/{name}/retire", "/admin/faults")
        known = ", ".join((*pages, *named))
        raise _Refused(404, f"path {path}", f"{known} or /healthz", "ask for one of these")

    def _pool(self, name: str) -> dict[str, Any]:
        size = pool_size(self._config, self._router.state, name)
        return {"pool": name, **asdict(size), "is_scaling": size.is_scaling}

    async def _scale(self, request: Request, pool: str) -> Response:
        if pool not in (pools := groups(self._router.state)):
            needed = f"one of {', '.join(pools)}"
            raise _Refused(404, f"pool {pool!r}", needed, "GET /admin/pools lists them")
        _check_method(request.method, "GET", "HEAD", "PUT")
        if request.method == "PUT":
            wanted, drain_s = _read_scale(await _read_body(request))
            try:
                self._router.scale(Scale(pool=pool, wanted=wanted, drain_s=drain_s))
            except CallRefused as refused:
                least, most = self._config.bounds(pool.partition(":")[0])
                do = "PUT a size within the bounds"
                raise _Refused(409, f"wanted {wanted}", f"{least} to {most}", do, str(refused)) from None
        return JSONResponse(self._pool(pool))

    async def _retire(self, request: Request, name: str) -> Response:
        _check_method(request.method, "GET", "HEAD", "POST")
        if request.method == "POST":
            operation = _read_operation(await _read_body(request))
            try:
                return JSONResponse(asdict(self._router.retire(name, operation)))
            except CallRefused as refused:
                status = 404 if refused.code is grpc.StatusCode.NOT_FOUND else 409
                needed, do = "a member that this operation may retire", "GET this path"
                raise _Refused(status, f"{name}, operation {operation}", needed, do, str(refused)) from None
        found = retirement(self._router.state, name)
        if found is None:
            raise _Refused(404, f"{name}, which nobody retires,", "one that is retired", "POST here to begin")
        return JSONResponse(asdict(found))

    def _rows(self) -> dict[str, Any]:
        """Of the first model; where models have names, of each."""
        rows, found = self._router.counts.rows, dict[str, list[list[int]]]()
        for model in named(self._config, self._router.state):
            own = rows[model.base :][: model.layers * model.experts]
            known = len(own) == model.layers * model.experts > 0
            found[model.name] = own.reshape(model.layers, -1).tolist() if known else []
        first = {"rows": next(iter(found.values()), [])}
        return first | {"models": found} if any(found) else first

    async def _faults(self, request: Request, id: str) -> Response:
        injections = self._router.injections
        if not injections.allowed:
            do = "start router and members with --allow-chaos, where faults may be injected"
            raise _Refused(403, "a router without --allow-chaos", "one with it", do)
        _check_method(request.method, *(("DELETE",) if id else ("GET", "HEAD", "POST", "DELETE")))
        if request.method == "DELETE":
            return JSONResponse({"cleared": injections.clear(urllib.parse.unquote(id))})
        if request.method != "POST":
            shown = view_of(self._config, self._router.state).members
            members = [{"name": m.name, "pool": m.pool, "state": m.state} for m in shown]
            faults = [_injected(injection) for injection in injections.known()]
            return JSONResponse({"faults": faults, "members": members})
        names, said = _read_fault(await _read_body(request))
        try:
            return JSONResponse(_injected(await injections.inject(names, Fault.from_dict(said))))
        except (FaultInvalid, FaultRefused) as error:
            found = f"{said.get('kind')} of {', '.join(names)}"[:100]
            do = "GET /admin/faults lists members and faults"
            status = _FAULT_STATUS.get(type(error), 409)
            raise _Refused(status, found, "a fault that each of them takes", do, str(error)) from None

    def _check_key(self, given: str) -> None:
        if self._digest is None:
            return
        scheme, _, key = given.partition(" ")
        # Digests of equal length, compared in constant time: the answer's delay tells nothing of the key.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._digest):
            do = "send the header Authorization: Bearer KEY"
            raise _Refused(401, "another key" if given else "no key", "the key of --admin-key-file", do)


def _check_host(host: str) -> None:
    name = host.lower()
    if not name.endswith("]"):
        head, _, port = name.rpartition(":")
        name = head if head and port.isdigit() else name
    if name not in _HOSTS:
        do = f"ask {', '.join(_HOSTS)}; a browser that was sent here by another name is refused"
        raise _Refused(421, f"header Host {host!r}", "a loopback name", do)


def _check_method(method: str, *known: str) -> None:
    if method not in known:
        raise _Refused(405, f"method {method}", ", ".join(known), "use one of these")


async def _read_body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page may send other types to a foreign site without asking first.
        found = f"content-type {kind or 'none'}"
        raise _Refused(415, found, "application/json", "set the header content-type")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > _BODY_BYTES:
                    found, needed = f"over {_BODY_BYTES} bytes", f"at most {_BODY_BYTES}"
                    raise _Refused(413, found, needed, "send only what is asked for")
    except (TimeoutError, ClientDisconnect):
        needed = f"all of it in {_BODY_S:g} s"
        raise _Refused(408, "part of a body", needed, "send it again") from None
    return bytes(body)


def _json_of(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _read_scale(body: bytes) -> tuple[int, float]:
    said, do = _json_of(body), "send such a body"
    if not isinstance(said, dict) or not {"wanted"} <= said.keys() <= {"wanted", "drain_s"}:
        needed = '{"wanted": 6} or {"wanted": 6, "drain_s": 30}'
        raise _Refused(400, f"body {body[:64].decode('utf-8', 'replace')!r}", needed, do)
    wanted, drain_s = said["wanted"], said.get("drain_s", DRAIN_S)
    if type(wanted) is not int or not 0 <= wanted < 1 << 31:
        raise _Refused(400, f"wanted {wanted!r}"[:100], "a whole number from 0", do)
    if type(drain_s) not in (int, float) or not 0 < drain_s <= LONGEST_DRAIN_S:
        needed = f"seconds, over 0 and at most {LONGEST_DRAIN_S:g}"
        raise _Refused(400, f"drain_s {drain_s!r}"[:100], needed, do)
    return wanted, float(drain_s)


def _read_operation(body: bytes) -> str:
    said = _json_of(body)
    if not isinstance(said, dict) or said.keys() != {"operation"} or not is_operation(said["operation"]):
        found, needed = f"body {body[:64].decode('utf-8', 'replace')!r}", f'{{"operation": {OPERATION}}}'
        raise _Refused(400, found, needed, "send such a body")
    return said["operation"]


def _read_fault(body: bytes) -> tuple[list[str], dict[str, Any]]:
    said = _json_of(body)
    if isinstance(said, dict) and said.keys() == {"names", "fault"}:
        names, fault = said["names"], said["fault"]
        listed = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        if listed and isinstance(fault, dict):
            # The router gives the id.
            return names, {"id": "", **fault}
    needed = '{"names": ["expert/3"], "fault": {"kind": "slow", "for_s": 10, "times": 10}}'
    raise _Refused(400, f"body {body[:64].decode('utf-8', 'replace')!r}", needed, "send such a body")


def _injected(injection: Injection) -> dict[str, Any]:
    return {"fault": injection.fault.to_dict(), "names": list(injection.names), "remaining_s": injection.remaining_s}


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
            f"port {port} of {bound} cannot be used for --admin-port ({error}): stop what listens there or give another"
        ) from error
