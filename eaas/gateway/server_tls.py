"""HTTPS for clients: the certificate they see, which may change while the gateway runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

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
