"""What protects a gateway's listener: keys, and TLS.

Every request brings a key, but those that only ask whether this process lives. A key goes in ``Authorization: Bearer
KEY``, as OpenAI's clients send it; or, for browsers, as the password of Basic authentication with any user name; or in
``X-Api-Key``, as Anthropic's clients send it. It stays in the request's headers, which nothing writes anywhere.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eaas.gateway.budgets import Account, Overdrawn
from eaas.gateway.config import GatewayOptions
from eaas.gateway.errors import ApiError, ErrorReply, invalid
from eaas.gateway.keys import FileStamp, KeyRing
from eaas.gateway.messages import body_for
from eaas.worker.protocol import MAX_TENANT, Share

log = logging.getLogger(__name__)

# Load balancers and the kubelet ask these, and have no key to ask with.
OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
METRICS_PATH = "/metrics"
# What shows the cluster and the load of everybody, or changes something for everybody.
OPERATOR_PATHS = frozenset(
    (
        METRICS_PATH, "/status", "/dashboard", "/dashboard/events", "/load", "/server_info", "/pause", "/resume",
        "/is_paused", "/abort_requests", "/inference/v1/abort_requests", "/reset_prefix_cache", "/scale_elastic_ep",
        "/admin/inspect",
    )
)  # fmt: skip

TENANT_HEADER = b"x-eaas-tenant"
_ACCOUNT = "eaas.account"
_TENANT = re.compile(rb"[A-Za-z0-9._@-]{0,%d}" % MAX_TENANT)


def account_of(scope: Scope) -> Account | None:
    """On whose account a request goes; None where this gateway asks for no key."""
    return scope.get(_ACCOUNT)


def key_name_of(scope: Scope) -> str:
    """Whose key a request brought; empty where this gateway asks for none."""
    account = account_of(scope)
    return "" if account is None else account.name


def share_of(scope: Scope) -> Share:
    """Whose request it is: its key's, or, where this gateway asks for no key, whoever it names itself in
    ``x-eaas-tenant``. Raises ApiError: 400, the name is too long, or no name."""
    account = account_of(scope)
    if account is not None:
        return Share(tenant=account.name, weight=account.weight)
    given = next((value for name, value in scope["headers"] if name == TENANT_HEADER), b"")
    if not _TENANT.fullmatch(given):
        raise invalid(
            f"The header {TENANT_HEADER.decode()} is no tenant's name: at most {MAX_TENANT} letters, digits and "
            "any of ._@- are needed.",
            code="invalid_tenant",
        )
    return Share(tenant=given.decode())


def reserve_tokens(account: Account | None, tokens: int, on_refused: Callable[[str], None]) -> None:
    """Spend what a request is reckoned to take. Args: on_refused: told "key_tokens" where it is more than there is.
    Raises ApiError: 429, with the time after which there is enough."""
    overdrawn = account.spend(time.monotonic(), tokens=tokens) if account is not None else None
    if overdrawn is not None:
        on_refused("key_tokens")
        raise ApiError(_overdrawn_reply(overdrawn))


class Authentication:
    """Lets a request through to ``app`` once its key is known and its budget allows it."""

    def __init__(self, app: ASGIApp, ring: KeyRing, *, open_metrics: bool, on_refused: Callable[[str], None]) -> None:
        """Args:
        open_metrics: GET /metrics needs no key.
        on_refused: Told "key", "key_requests" or "key_tokens" for each that is refused here.
        """
        self._app, self._ring, self._on_refused = app, ring, on_refused
        self._open = OPEN_PATHS | ({METRICS_PATH} if open_metrics else frozenset[str]())
        self._accounts: dict[str, Account] = {}
        self._set_accounts()

    def refresh(self, *, anew: bool = False) -> None:
        """Use the keys that the file has now, if it has changed."""
        if self._ring.refresh(anew=anew):
            self._set_accounts()

    def _set_accounts(self) -> None:
        now_s = time.monotonic()
        # The last entry of each name says its budgets.
        by_name = {key.name: key for key in self._ring.keys}
        self._accounts = {name: self._accounts.get(name) or Account(name) for name in by_name}
        for name, key in by_name.items():
            self._accounts[name].set(key.requests_per_minute, key.tokens_per_minute, now_s)
            self._accounts[name].weight = key.weight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in self._open and scope["method"] in ("GET", "HEAD")):
            await self._app(scope, receive, send)
            return
        key = _key_in(scope["headers"])
        entry = self._ring.find(key, time.time()) if key else None
        if entry is None:
            self._on_refused("key")
            await _send(scope, send, _unknown(scope["path"], given=bool(key)))
            return
        # The patterns of routes end in `$`, which a newline at the end satisfies too.
        if scope["path"].rstrip("\n") in OPERATOR_PATHS and not entry.operator:
            self._on_refused("key")
            await _send(scope, send, _NOT_AN_OPERATORS)
            return
        account = self._accounts[entry.name]
        # What only reads costs nothing.
        if scope["method"] == "POST" and (overdrawn := account.spend(time.monotonic(), requests=1)) is not None:
            self._on_refused(f"key_{overdrawn.kind}")
            await _send(scope, send, _overdrawn_reply(overdrawn), account.headers(time.monotonic()))
            return
        scope[_ACCOUNT] = account
        if account.requests is None and account.tokens is None:
            await self._app(scope, receive, send)
            return

        async def send_with_budgets(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *account.headers(time.monotonic())]
            await send(message)

        await self._app(scope, receive, send_with_budgets)


def _key_in(headers: Sequence[tuple[bytes, bytes]]) -> str:
    given = [value for name, value in headers if name == b"authorization"]
    bare = [value for name, value in headers if name == b"x-api-key"]
    if not given and len(bare) == 1:
        return bare[0].strip().decode("latin-1")
    scheme, _, rest = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return rest.decode("latin-1")
    if scheme.lower() == b"basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(rest, validate=True).partition(b":")[2].decode("latin-1")
    return ""


def _unknown(path: str, *, given: bool) -> ErrorReply:
    found = "The API key is not known here, or has expired." if given else "No API key was given."
    # Only pages that people open in a browser ask it to ask them.
    challenge = "Bearer" if path.startswith("/v1") else 'Bearer, Basic realm="EaaS"'
    return ErrorReply(
        status=401,
        message=f"{found} Send the header Authorization: Bearer KEY; whoever runs this server gives out keys.",
        code="invalid_api_key",
        headers={"www-authenticate": challenge},
    )


_NOT_AN_OPERATORS = ErrorReply(
    status=403,
    message="This key may ask for tokens, not look at the cluster. Use one made with: eaas keys new --operator.",
    code="operator_key_needed",
    # Another key would be answered otherwise; this is RFC 6750's word for it.
    headers={"www-authenticate": 'Bearer error="insufficient_scope", Basic realm="EaaS"'},
)


def _overdrawn_reply(overdrawn: Overdrawn) -> ErrorReply:
    return ErrorReply(
        status=429,
        message=f"This key's budget of {overdrawn.per_minute} {overdrawn.kind} a minute is spent. "
        f"Try again in {overdrawn.retry_after_s} s.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=overdrawn.retry_after_s,
    )


async def _send(scope: Scope, send: Send, reply: ErrorReply, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    body = body_for(scope["path"], reply)
    headers = [(name.encode(), value.encode()) for name, value in reply.all_headers().items()]
    headers += [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        # Its body may still be coming, and nobody here reads it.
        (b"connection", b"close"),
        *more,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class CertificateInvalid(ValueError):
    """A certificate and its key cannot be used: what was found, what is needed."""


class ServerTls:
    """The TLS context of a listener. `refresh` has it show another certificate from the next connection on."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises CertificateInvalid."""
        self._cert, self._key, self._stamp = cert, key, FileStamp(cert, key)
        try:
            self.context = self._load()
        except (OSError, ValueError) as error:
            raise CertificateInvalid(
                f"--tls-cert {cert} with --tls-key {key} cannot be used ({error}); a PEM chain, this server's own "
                "certificate first, and its private key without a password are needed"
            ) from error

    def refresh(self, *, anew: bool = False) -> bool:
        """Read the files again if they have changed; True if another certificate is shown now.

        What cannot be used changes nothing, and the log says so, once.
        """
        if not self._stamp.changed() and not anew:
            return False
        try:
            # First in a context that nobody uses: half of a pair would leave the listener with nothing.
            self._load()
            self.context.load_cert_chain(self._cert, self._key, _no_password)
        except (OSError, ValueError) as error:
            log.error("certificate_not_read path=%s kept=the_old reason=%s", self._cert, error)
            return False
        log.info("certificate_read path=%s", self._cert)
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert, self._key, _no_password)
        context.set_alpn_protocols(["http/1.1"])
        return context


def _no_password() -> str:
    # Without this OpenSSL would ask at the terminal, and wait.
    raise ValueError("the private key has a password")


class Protection:
    """TLS and keys of one listener, as its options ask. Attributes: tls, keys: None: there is none of that kind."""

    def __init__(self, options: GatewayOptions) -> None:
        """Raises ValueError: a file cannot be used."""
        self.tls = ServerTls(options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None
        self.keys = KeyRing(options.keys_file) if options.keys_file else None
        self._options = options
        self._authentication: Authentication | None = None

    def around(self, app: ASGIApp, on_refused: Callable[[str], None]) -> ASGIApp:
        """The application behind the keys, for pages of other origins too where they are allowed.

        Args:
            on_refused: Told why, for each request that is refused.
        """
        if self.keys is not None:
            app = self._authentication = Authentication(
                app, self.keys, open_metrics=self._options.open_metrics, on_refused=on_refused
            )
        origins = self._options.allowed_origins
        if not origins:
            return app
        # Outside of the keys: a browser asks first whether it may, and brings none.
        return CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])

    def refresh(self, *, anew: bool = False) -> None:
        """Take up what has changed in the files; cheap when nothing has. Args: anew: read them though they look the
        same."""
        if self.tls is not None:
            self.tls.refresh(anew=anew)
        if self._authentication is not None:
            self._authentication.refresh(anew=anew)
