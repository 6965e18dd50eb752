"""The socket that clients connect to. Its owner may be the launcher, which hands it to one gateway after another."""

from __future__ import annotations

import socket

from router.access import bound_address, host_port


class ListenFailed(Exception):
    """The address cannot be listened on; the text says why and what to do."""


def check_exposure(option: str, host: str, *, tls: bool, keys: bool) -> str:
    """The IP address to listen on; `option` says where it was given. Beyond loopback TLS and keys are needed. Raises
    Exposed: it is no address, or other machines could reach a gateway without these."""
    return bound_address(option, host, {"TLS (--tls-cert and --tls-key)": tls, "keys (--keys-file)": keys})


def listen(host: str, port: int, stall_s: float = 60.0, *, tls: bool = False, keys: bool = False) -> socket.socket:
    """A listening socket. Raises Exposed as `check_exposure` does, ListenFailed where the port is taken."""
    address = check_exposure("--host", host, tls=tls, keys=keys)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection: the kernel ends one whose client takes no bytes for so long. Streams are
        # ended earlier, and counted; this is for all else.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1500))
        # What the kernel keeps for a slow reader, else up to 4 MiB each: 128 KiB a round trip is far above any stream.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
        listener.bind((address, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ListenFailed(
            f"port {port} on {host} cannot be had ({reason}). Stop what holds it, or choose another with --port "
            "(0 takes a free one)."
        ) from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """host:port, in the form of a URL."""
    host, port = listener.getsockname()[:2]
    return host_port(host, port)
