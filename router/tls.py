"""Mutual TLS between processes: one folder for each process, with the certificate that says what it is.

    ca.pem     who may sign certificates of this cluster
    cert.pem   this process's, with its role (router/access.py), for servers and clients alike
    key.pem    its private key

Files are read again when they have changed: every new connection uses what is there then. What cannot be used is
logged, and what was there before stays in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from router.access import CA, CERT, KEY, claim_refusal, refusal, role_of, server_name

log = logging.getLogger(__name__)

_LARGEST = 1 << 20


class CredentialsInvalid(ValueError):
    """A folder's certificate cannot be used: what was found and what is needed."""


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """The files as they were at one moment."""

    stamp: tuple[tuple[int, int], ...]
    ca: bytes
    cert: bytes
    key: bytes
    server: ssl.SSLContext
    open: ssl.SSLContext
    client: ssl.SSLContext


class Credentials:
    """What a process proves its role with. For use from any thread."""

    def __init__(self, directory: Path, role: str) -> None:
        """Args: role: what the certificate must say.

        Raises:
            CredentialsInvalid: a file is missing, or they do not fit together, have expired or say another role.
        """
        self._directory, self.role = directory, role
        self._lock = threading.Lock()
        self._refused: tuple[tuple[int, int], ...] = ()
        self._generation = 0
        self._complaint = ""
        try:
            self._loaded = self._load(self._stamp())
        except (OSError, ValueError) as error:
            raise CredentialsInvalid(
                f"--tls-dir {directory}: {error}. Needed: {CA}, {CERT} and {KEY} of the role {role}, as `eaas certs` "
                "makes them."
            ) from error

    def generation(self) -> int:
        """A number that rises with each change of the files: a channel opened before goes on with what was there then,
        and cannot be opened again once that has expired."""
        self._current()
        return self._generation

    def channel(self, address: str, role: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """A channel to a server that must prove this role."""
        now = self._current()
        credentials = grpc.ssl_channel_credentials(now.ca, now.key, now.cert)
        named = (*options, ("grpc.ssl_target_name_override", server_name(role)))
        return grpc.secure_channel(address, credentials, options=named)

    def server(self) -> grpc.ServerCredentials:
        """For a gRPC server, which every caller must show a certificate of this cluster."""
        used = self._current()

        # None says that nothing has changed.
        def changed() -> Any:
            nonlocal used
            now = self._current()
            if now is used:
                return None
            used = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(_configuration(used), changed, True)

    def server_context(self) -> ssl.SSLContext:
        """For a socket that others connect to."""
        return self._current().server

    def open_context(self) -> ssl.SSLContext:
        """For a listener that lets in who shows no certificate too, and must ask for something else.

        It may be kept: each connection gets what the files hold then.
        """
        return self._current().open

    def client_context(self) -> ssl.SSLContext:
        """For a socket that connects to another; `server_name` of the role that must answer goes beside it."""
        return self._current().client

    def _current(self) -> _Loaded:
        with self._lock:
            stamp = self._loaded.stamp
            try:
                stamp = self._stamp()
                if stamp not in (self._loaded.stamp, self._refused):
                    self._loaded = self._load(stamp)
                    self._generation += 1
                    log.info("certificate_read directory=%s role=%s", self._directory, self.role)
                    self._complaint = ""
            except (OSError, ValueError) as error:
                # Not again until the files change: one of them may be about to follow.
                self._refused = stamp
                # Unknown callers of a listener come here too, and must not fill the log.
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.error("certificate_not_read directory=%s kept=the_old reason=%s", self._directory, error)
            return self._loaded

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        found = [(self._directory / name).stat() for name in (CA, CERT, KEY)]
        large = max(found, key=lambda one: one.st_size).st_size
        if large > _LARGEST:
            raise ValueError(f"a file of {large} bytes found; certificates and keys have at most {_LARGEST}")
        return tuple((one.st_mtime_ns, one.st_ino) for one in found)

    def _load(self, stamp: tuple[tuple[int, int], ...]) -> _Loaded:
        server = _context(ssl.PROTOCOL_TLS_SERVER, self._directory)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, self._directory)
        ca, cert, key = ((self._directory / name).read_bytes() for name in (CA, CERT, KEY))
        _prove(client, server, self.role)
        opened = _context(ssl.PROTOCOL_TLS_SERVER, self._directory)
        opened.verify_mode = ssl.CERT_OPTIONAL
        opened.sni_callback = self._renew
        return _Loaded(stamp=stamp, ca=ca, cert=cert, key=key, server=server, open=opened, client=client)

    def _renew(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # Called for each greeting, before a certificate is shown, whether or not it names a host.
        connection.context = self._current().open


def peer_role(certificate: Any) -> str:
    """The role that a peer's certificate says, as `SSLSocket.getpeercert` gives it; empty: none."""
    names = (certificate or {}).get("subjectAltName", ())
    return role_of(value for kind, value in names if kind == "URI")


def _configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)


def _context(protocol: int, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Both sides are ours.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(directory / CA)
    context.load_cert_chain(directory / CERT, directory / KEY)
    return context


def _prove(client: ssl.SSLContext, server: ssl.SSLContext, role: str) -> None:
    """Have both ends greet each other in memory, as two processes would: what fails there fails here, at the start.

    Raises:
        ValueError: the certificate is not trusted by its own CA, has expired, or says another role.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(to_client, to_server, server_hostname=server_name(role))
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (calling, answering, calling, answering):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise ValueError(f"{CERT} does not pass for {server_name(role)} ({why})") from error
    found = peer_role(answering.getpeercert())
    if found != role:
        raise ValueError(f"{CERT} says the role {found or 'of nobody'}, {role} is needed")


def why_not(context: Any, method: str, request: object) -> str:
    """Why who calls a gRPC method may not; empty: it may. A refusal is logged."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    role = role_of(name.decode("ascii", "replace") for name in names)
    reason = refusal(role, method) or claim_refusal(role, method, request)
    if reason:
        log.warning("call_refused peer=%s reason=%s", context.peer(), reason)
    return reason


def guarded(handler: Any, guard: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
    """The handler with its method put behind `guard`, which makes one of the same form."""
    asked, answered = (
        "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
    )
    name = f"{asked}_{answered}"
    return getattr(grpc, f"{name}_rpc_method_handler")(
        guard(getattr(handler, name)),
        request_deserializer=handler.request_deserializer,
        # What many are told is written once.
        response_serializer=lambda answer: answer if isinstance(answer, bytes) else handler.response_serializer(answer),
    )


class RequireRolesThreaded(grpc.ServerInterceptor):
    """For a server of threads: PERMISSION_DENIED, and why, unless the caller's certificate allows the method."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return handler
        method: str = handler_call_details.method

        def guard(behaviour: Callable[..., Any]) -> Callable[..., Any]:
            def checked(request: Any, context: Any, *more: Any) -> Any:
                if reason := why_not(context, method, request):
                    context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
                return behaviour(request, context, *more)

            # Health's Watch answers through a callback of its own.
            for name in ("experimental_non_blocking", "experimental_thread_pool"):
                if hasattr(behaviour, name):
                    setattr(checked, name, getattr(behaviour, name))
            return checked

        return guarded(handler, guard)
