"""What protects a gateway's listener, as its options ask: TLS, keys, bounds."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from eaas.gateway.authentication import Authentication
from eaas.gateway.config import GatewayConfig, GatewayOptions
from eaas.gateway.guard import Bounds
from eaas.gateway.keys import KeyRing

# Of links to workers, the router, files: some ten each; the rest is a reserve.
KEPT_DESCRIPTORS = 128


@dataclass(kw_only=True)
class Protection:
    """TLS and keys of one listener; None: there is none of that kind."""

    tls: ServerTls | None
    keys: KeyRing | None
    open_metrics: bool
    allowed_origins: tuple[str, ...] = ()
    _authentication: Authentication | None = None

    def around(self, app: ASGIApp, on_refused: Callable[[str], None]) -> ASGIApp:
        """The application behind the keys, for pages of other origins too where they are allowed.

        Args:
            on_refused: Told why, for each request that is refused.
        """
        if self.keys is not None:
            app = self._authentication = Authentication(
                app, self.keys, open_metrics=self.open_metrics, on_refused=on_refused
            )
        if not self.allowed_origins:
            return app
        # Outside of the keys: a browser asks first whether it may, and brings none.
        return CORSMiddleware(
            app, allow_origins=self.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    def refresh(self, *, anew: bool = False) -> None:
        """Take up what has changed in the files; cheap when nothing has."""
        if self.tls is not None:
            self.tls.refresh(anew=anew)
        if self._authentication is not None:
            self._authentication.refresh(anew=anew)

    def refresh_anew(self) -> None:
        """Read the files again though they look the same."""
        self.refresh(anew=True)


def of(options: GatewayOptions) -> Protection:
    """What the options ask for.

    Raises:
        ValueError: a file cannot be used.
    """
    return Protection(
        tls=ServerTls(options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None,
        keys=KeyRing(options.keys_file) if options.keys_file else None,
        open_metrics=options.open_metrics,
        allowed_origins=options.allowed_origins,
    )


def connections_within(wanted: int, descriptors: int) -> int:
    """As many connections as are wanted, or as leave descriptors for what else this process opens.

    Args:
        descriptors: The most that it may have.
    """
    return max(1, min(wanted, descriptors - KEPT_DESCRIPTORS))


def bounds_of(config: GatewayConfig) -> Bounds:
    """What each connection may hold."""
    return Bounds(
        connections=config.max_connections,
        head_bytes=config.head_limit_bytes,
        headers=config.max_headers,
        head_timeout_s=config.head_timeout_s,
        body_overhead_bytes=config.max_body_bytes,
    )


log = logging.getLogger(__name__)


class CertificateInvalid(ValueError):
    """A certificate and its key cannot be used: what was found, what is needed."""


class ServerTls:
    """The TLS context of a listener. `refresh` has it show another certificate from the next connection on."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises CertificateInvalid."""
        self._cert, self._key = cert, key
        self._stamp = self._found()
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
        stamp = self._found()
        if stamp == self._stamp and not anew:
            return False
        self._stamp = stamp
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

    def _found(self) -> tuple[tuple[int, int], ...]:
        try:
            return tuple((one.st_mtime_ns, one.st_ino) for one in (self._cert.stat(), self._key.stat()))
        except OSError:
            return ()


def _no_password() -> str:
    # Without this OpenSSL would ask at the terminal, and wait.
    raise ValueError("the private key has a password")
