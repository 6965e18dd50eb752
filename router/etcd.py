"""etcd v3 by its JSON gateway: one HTTP request for each call, over the standard library.

Every call has its own connection and one time budget over all endpoints, so that a dead etcd, or one that answers
byte by byte, costs the caller that budget and never more than a fraction of a leader's lease. Only the look-up of a
name is outside it, for which the system's resolver has its own limit: give IP addresses where that counts.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from router.access import CA, CERT, KEY, is_loopback

Operation = dict[str, Any]

_ANSWER_BYTES = 256 << 20


class EtcdUnavailable(Exception):
    """No endpoint carried the call out, or none said that it did; the message says what each answered."""


class EtcdInvalid(ValueError):
    """The addresses cannot be used."""


class _Timed(io.RawIOBase):
    """What http.client needs of a connected socket, until `end_s` at the latest, however the peer behaves."""

    def __init__(self, link: socket.socket, end_s: float) -> None:
        self._link = link
        self._end_s = end_s

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._link.settimeout(_left_s(self._end_s))
            rest = rest[self._link.send(rest) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._link.settimeout(_left_s(self._end_s))
        return self._link.recv_into(buffer)

    def close(self) -> None:
        """Nothing: who opened the socket closes it, once the answer is read."""


class Etcd:
    """The endpoints of one etcd cluster. May be used from any thread."""

    def __init__(self, urls: str, timeout_s: float = 1.0, *, tls_dir: Path | None = None) -> None:
        """Nothing is sent yet.

        Args:
            urls: Comma-separated, each http://LOOPBACK:PORT or https://HOST:PORT.
            timeout_s: Budget of one call over all of them.
            tls_dir: With ca.pem, and cert.pem and key.pem if etcd asks for a certificate, read anew for each call, as
                they are renewed; None: the system's CAs.

        Raises:
            EtcdInvalid: a URL is none, carries a password, or would send in the clear to another host; or the folder's
                files cannot be used.
        """
        self.urls = urls
        self._endpoints = [_endpoint(url.strip()) for url in urls.split(",")]
        self._timeout_s = timeout_s
        self._tls_dir = tls_dir
        try:
            self._tls = _context(tls_dir)
        except (OSError, ssl.SSLError) as error:
            raise EtcdInvalid(f"--etcd-tls-dir {tls_dir}: {error}. It needs {CA}.") from None

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST to /v3/`path` at the first endpoint that answers.

        Raises:
            EtcdUnavailable: none did. A write may have been carried out all the same.
        """
        end_s = time.monotonic() + self._timeout_s
        text = json.dumps(body).encode()
        failures: list[str] = []
        for index, endpoint in enumerate(self._endpoints):
            now_s = time.monotonic()
            share_s = (end_s - now_s) / (len(self._endpoints) - index)
            try:
                found = self._post(endpoint, f"/v3/{path}", text, now_s + share_s)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{endpoint.geturl()}: {error or type(error).__name__}")
                continue
            # The endpoint that answers is asked first from now on: a dead one must not eat half of each budget.
            self._endpoints = self._endpoints[index:] + self._endpoints[:index]
            return found
        raise EtcdUnavailable("; ".join(failures))

    def txn(
        self, compare: Sequence[Operation], success: Sequence[Operation], failure: Sequence[Operation] = ()
    ) -> tuple[bool, list[dict[str, Any]]]:
        """Carry out `success` if every comparison holds, else `failure`; one transaction.

        Returns:
            Whether they held, and the answers of the branch taken, one for each operation.

        Raises:
            EtcdUnavailable: as `call`.
        """
        body = {"compare": compare, "success": success, "failure": failure}
        reply = self.call("kv/txn", body)
        return bool(reply.get("succeeded")), [next(iter(answer.values()), {}) for answer in reply.get("responses", [])]

    def _post(self, endpoint: SplitResult, path: str, body: bytes, end_s: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection(endpoint.hostname or "", endpoint.port)
        with self._connect(endpoint, end_s) as link:
            connection.sock = _Timed(link, end_s)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read(_ANSWER_BYTES)
        if response.status != 200:
            raise ValueError(f"status {response.status}, {text[:300].decode(errors='replace')}")
        # A stream (lease/keepalive) answers one object a line, each in "result"; only the first is asked for.
        found = json.loads(text.partition(b"\n")[0])
        if not isinstance(found, dict):
            raise ValueError(f"{text[:100]!r} is no answer of etcd's JSON gateway")
        return found

    def _connect(self, endpoint: SplitResult, end_s: float) -> socket.socket:
        host, port = endpoint.hostname or "", endpoint.port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for index, (family, kind, protocol, _, address) in enumerate(found):
            link = socket.socket(family, kind, protocol)
            try:
                link.settimeout(_left_s(end_s) / (len(found) - index))
                link.connect(address)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if endpoint.scheme == "http":
                    return link
                link.settimeout(_left_s(end_s))
                tls = _context(self._tls_dir) if self._tls_dir else self._tls
                return tls.wrap_socket(link, server_hostname=host)
            except OSError:
                link.close()
                if index == len(found) - 1:
                    raise
        raise OSError(f"{host} has no address")


def _left_s(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def put(key: str, value: str, lease: str = "") -> Operation:
    """Operation: write a key, gone with its lease if one is given."""
    body = {"key": _coded(key), "value": _coded(value)}
    return {"request_put": {**body, "lease": lease} if lease else body}


def delete(key: str, *, prefix: bool = False) -> Operation:
    """Operation: delete a key, or all that begin with it."""
    return {"request_delete_range": _span(key, prefix)}


def get(key: str, *, prefix: bool = False, end: str = "") -> Operation:
    """Operation: read a key; all that begin with it; or those from it on and before `end`."""
    span = {"key": _coded(key), "range_end": _coded(end)} if end else _span(key, prefix)
    return {"request_range": span}


def created(key: str, revision: str) -> Operation:
    """Comparison: the key's present life began at that revision ("0": it is not there)."""
    return {"key": _coded(key), "target": "CREATE", "create_revision": revision, "result": "EQUAL"}


def modified(key: str, revision: str) -> Operation:
    """Comparison: the key was last written at that revision ("0": it is not there)."""
    return {"key": _coded(key), "target": "MOD", "mod_revision": revision, "result": "EQUAL"}


def pairs(answer: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The answer of a `get`: by key its "value", "create_revision" and "mod_revision".

    Raises:
        ValueError: a key or value is no text.
    """
    return {
        _decoded(found["key"]): {**found, "value": _decoded(found.get("value", ""))} for found in answer.get("kvs", [])
    }


def _span(key: str, prefix: bool) -> dict[str, str]:
    if not prefix:
        return {"key": _coded(key)}
    return {"key": _coded(key), "range_end": _coded(key[:-1] + chr(ord(key[-1]) + 1))}


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text, validate=True).decode()


def _context(tls_dir: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls_dir / CA if tls_dir else None)
    if tls_dir and (tls_dir / CERT).exists():
        context.load_cert_chain(tls_dir / CERT, tls_dir / KEY)
    return context


def _endpoint(url: str) -> SplitResult:
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError as error:
        raise EtcdInvalid(f"etcd address {url!r} cannot be used: {error}") from None
    if found.scheme not in ("http", "https") or not found.hostname or port is None or found.path not in ("", "/"):
        raise EtcdInvalid(f"etcd address {url!r} found, http://HOST:PORT or https://HOST:PORT needed")
    if found.username or found.password or found.query or found.fragment:
        raise EtcdInvalid(f"etcd address of {found.hostname} carries more than scheme, host and port; leave it out")
    if found.scheme == "http" and not is_loopback(found.hostname):
        raise EtcdInvalid(
            f"etcd address {url} would send the cluster's state in the clear to another host; "
            f"use https, or an etcd on 127.0.0.1"
        )
    return found
