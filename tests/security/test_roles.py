"""Who may call what: every method of every service is in the table, and live servers keep to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from eaas.ops.credentials import make_certs
from eaas.worker.tls_listener import TlsListener
from experts.proto import experts_pb2, experts_pb2_grpc
from router.access import CALLERS, ROLES, claim_refusal, refusal, role_of, role_uri, server_name
from router.client import RouterClient, RouterUnavailable
from router.proto import externalscaler_pb2, router_pb2
from router.proto import router_pb2_grpc as rpc
from router.tls import Credentials, CredentialsInvalid, RequireRolesThreaded

FILES = (router_pb2, externalscaler_pb2, experts_pb2, health_pb2, reflection_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
MEMBERS = {"expert", "attention", "gateway", "client"}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder, hosts=["localhost", "127.0.0.1"])
    return folder


def test_every_method_is_in_the_table_and_nothing_else() -> None:
    assert set(CALLERS) == METHODS
    assert all(callers and callers <= set(ROLES) for callers in CALLERS.values())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_members_call_what_is_theirs_and_no_more(method: str) -> None:
    """What an intruder with a member's certificate could do, method by method."""
    service, name = method.rsplit("/", 1)
    callers = CALLERS[method]
    if name in ("Scale", "Inject", "Clear", "Faults", "ServerReflectionInfo"):
        assert callers == {"operator"}, "the admin's"
    elif name in ("Launches", "ReportExit"):
        assert callers == {"launcher"}, "the launcher's"
    elif service == "/experts.v1.Experts":
        assert callers <= {"expert", "attention", "client"}, "the data path's"
        assert "expert" not in callers or name != "Attach"
    elif service == "/externalscaler.ExternalScaler":
        assert callers == {"scaler"}
    elif service == "/router.v1.Router":
        assert callers <= MEMBERS | {"launcher", "operator"}
        assert "scaler" not in callers
    assert refusal("", "/grpc.health.v1.Health/Check")
    for role in set(ROLES) - callers:
        assert role in refusal(role, method) and method in refusal(role, method)
    assert refusal("operator", method + "x") != ""


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (["spiffe://eaas/expert"], "expert"),
        (["spiffe://eaas/expert/3"], "expert"),
        (["expert.eaas.internal", "spiffe://eaas/expert/a/b"], "expert"),
        (["spiffe://eaas/expert", "spiffe://eaas/operator"], ""),
        (["spiffe://other/operator"], ""),
        (["spiffe://eaas/root"], ""),
        (["spiffe://eaas/"], ""),
        (["operator.eaas.internal"], ""),
        (["x spiffe://eaas/operator"], ""),
        ([], ""),
    ],
)
def test_a_role_is_read_from_one_uri_of_ours(names: list[str], role: str) -> None:
    assert role_of(names) == role


@pytest.mark.parametrize(
    ("role", "method", "request_", "allowed"),
    [
        ("expert", "Join", {"pool": "expert"}, True),
        ("expert", "Join", {"pool": "attention"}, False),
        ("expert", "Renew", {"name": "expert/7"}, True),
        ("expert", "Renew", {"name": "attention/1"}, False),
        ("attention", "Leave", {"name": "expert/1"}, False),
        ("operator", "Leave", {"name": "expert/1"}, True),
        ("client", "Join", {"pool": "client"}, True),
        ("client", "Join", {"pool": "expert"}, False),
        ("client", "Renew", {"name": "attention/1"}, False),
        ("gateway", "Watch", {"name": ""}, True),
        ("gateway", "Watch", {"name": "expert/1"}, False),
        ("attention", "Suspect", {"by": "gateway/1", "name": "expert/1"}, False),
        ("attention", "Suspect", {"by": "attention/1", "name": "expert/1"}, True),
    ],
)
def test_a_member_speaks_only_for_its_own_kind(role: str, method: str, request_: dict[str, str], allowed: bool) -> None:
    reason = claim_refusal(role, f"/router.v1.Router/{method}", SimpleNamespace(**request_))
    assert (reason == "") == allowed, reason


def test_a_client_attaches_as_a_client_alone_and_can_do_little_else() -> None:
    allowed = {method.rsplit("/", 1)[1] for method, callers in CALLERS.items() if "client" in callers}
    assert allowed == {"Join", "Renew", "Watch", "Leave", "Status", "Attach", "Describe", "Check", "List"}
    attach = "/experts.v1.Experts/Attach"
    assert claim_refusal("client", attach, experts_pb2.AttachRequest(name="client/1")) == ""
    for name in ("attention/1", "expert/1", "clients/1"):
        assert name.partition("/")[0] in claim_refusal("client", attach, experts_pb2.AttachRequest(name=name))
    assert claim_refusal("attention", attach, experts_pb2.AttachRequest(name="client/1"))


class Router:
    """`python -m router` with a certificate."""

    def __init__(self, folder: Path, certs: Path, *flags: str) -> None:
        ready, told = os.pipe()
        command = [
            sys.executable,
            "-m",
            "router",
            "--journal",
            str(folder / "journal"),
            "--ready-fd",
            str(told),
        ]
        command += ["--die-with", str(os.getpid()), "--tls-dir", str(certs / "router"), *flags]
        self.process = subprocess.Popen(command, pass_fds=[told], stderr=subprocess.PIPE, text=True)
        os.close(told)
        with os.fdopen(ready) as line:
            self.said: dict[str, Any] = json.loads(line.readline())

    def stop(self) -> str:
        self.process.terminate()
        return self.process.communicate(timeout=60)[1]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("router")
    key = folder / "key"
    key.write_text("k" * 32)
    router = Router(folder, certs, "--admin-port", "0", "--admin-key-file", str(key), "--allow-chaos")
    yield router
    log = router.stop()
    assert "Traceback" not in log, log


def call(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """The status of an empty message, whatever kind of method it is: who is refused is refused before that matters."""
    try:
        list(channel.stream_stream(method)(iter([b""]), timeout=2.0))
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", ROLES)
def test_a_live_router_refuses_each_role_what_is_not_its_own(router: Router, certs: Path, role: str) -> None:
    denied, channel = set(), Credentials(certs / role, role).channel(router.said["address"], "router")
    # The library's health service knows no List.
    served = [m for m in METHODS if not m.startswith("/experts.") and not m.endswith("/List")]
    # A stream that is allowed ends with the call's deadline.
    with channel, ThreadPoolExecutor(len(served)) as callers:
        for method, status in zip(served, callers.map(lambda m: call(channel, m), served), strict=True):
            if status is grpc.StatusCode.PERMISSION_DENIED:
                denied.add(method)
    # Inject is answered with PERMISSION_DENIED to all where the admin listener has a key: faults are for whoever
    # brings that.
    keyed = {"/router.v1.Router/Inject", "/router.v1.Router/Clear", "/router.v1.Router/Faults"}
    wanted = {method for method in served if role not in CALLERS[method]}
    assert denied - keyed == wanted - keyed
    assert wanted <= denied


def test_a_client_of_the_router_takes_up_certificates_that_came_while_it_ran(tmp_path: Path) -> None:
    """Even those of another CA, after which nothing that was opened before could be opened again."""
    now = tmp_path / "now"
    make_certs(now)
    key = tmp_path / "key"
    key.write_text("k" * 32)
    first = Router(tmp_path, now, "--admin-port", "0", "--admin-key-file", str(key))
    client = RouterClient(first.said["address"], Credentials(now / "attention", "attention"))
    try:
        term = client.status(timeout_s=60).view.term
        later = tmp_path / "later"
        make_certs(later)
        assert admin_ask(first, now, "operator") == 200
        assert not isinstance(admin_ask(first, later, "operator"), int)
        for role in ("attention", "router"):
            for name in ("ca.pem", "key.pem", "cert.pem"):
                shutil.copy(later / role / name, now / role / name)
        # The admin listener of a router that goes on shows the new one, and knows the new operator.
        assert admin_ask(first, later, "operator") == 200
        mixed = tmp_path / "mixed"
        shutil.copytree(now / "operator", mixed / "operator")
        shutil.copytree(later / "ca", mixed / "ca")
        assert not isinstance(admin_ask(first, mixed, "operator"), int), "the old CA's operator is let in"
        first.stop()
        second = Router(tmp_path, now, "--port", first.said["address"].rpartition(":")[2])
        try:
            assert client.status(timeout_s=60).view.term > term
        finally:
            second.stop()
    finally:
        client.close()


def test_an_experts_server_refuses_whoever_is_not_its_client(certs: Path) -> None:
    """The threaded server's check, with the control service of expert servers behind it."""

    class Experts(experts_pb2_grpc.ExpertsServicer):
        def Attach(self, request: Any, context: Any) -> Any:
            return experts_pb2.AttachReply(server_incarnation=7)

        def Describe(self, request: Any, context: Any) -> Any:
            return experts_pb2.DescribeReply(config=b"{}")

        def Manifest(self, request: Any, context: Any) -> Any:
            return experts_pb2.ManifestReply(manifest=b"m")

        def Give(self, request_iterator: Any, context: Any) -> Any:
            return experts_pb2.GiveReply()

    from grpc_health.v1 import health

    server = grpc.server(ThreadPoolExecutor(8), interceptors=[RequireRolesThreaded()])
    experts_pb2_grpc.add_ExpertsServicer_to_server(Experts(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", Credentials(certs / "expert", "expert").server())
    server.start()
    try:
        for role in ROLES:
            with Credentials(certs / role, role).channel(f"127.0.0.1:{port}", "expert") as channel:
                for method in sorted(METHODS):
                    if method.startswith("/experts."):
                        status = call(channel, method)
                        allowed = role in CALLERS[method]
                        assert (status is grpc.StatusCode.OK) == allowed, f"{role} {method} {status}"
                        assert allowed or status is grpc.StatusCode.PERMISSION_DENIED
                stub: Any = health_pb2_grpc.HealthStub(channel)
                assert stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status
    finally:
        server.stop(0).wait()


def test_without_a_certificate_of_this_cluster_nobody_gets_in(router: Router, certs: Path, tmp_path: Path) -> None:
    address = router.said["address"]
    strangers = tmp_path / "strangers"
    make_certs(strangers, ["operator"])
    # Another CA's operator, who trusts this cluster's router.
    shutil.copy(certs / "ca" / "ca.pem", strangers / "operator" / "trusted.pem")
    ca = (certs / "ca" / "ca.pem").read_bytes()
    key, cert = ((strangers / "operator" / name).read_bytes() for name in ("key.pem", "cert.pem"))
    named = (("grpc.ssl_target_name_override", server_name("router")),)
    channels = {
        "in the clear": grpc.insecure_channel(address),
        "without a certificate": grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), named),
        "of another CA": grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), named),
    }
    for what, channel in channels.items():
        with channel:
            assert call(channel, "/router.v1.Router/Status") in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ), what


def test_a_caller_refuses_a_server_of_another_role(router: Router, certs: Path) -> None:
    """An expert server that took the router's address would learn nothing."""
    with Credentials(certs / "operator", "operator").channel(router.said["address"], "gateway") as channel:
        assert call(channel, "/router.v1.Router/Status") is grpc.StatusCode.UNAVAILABLE
    with Credentials(certs / "operator", "operator").channel(router.said["address"], "router") as channel:
        stub: Any = rpc.RouterStub(channel)
        assert stub.Status(router_pb2.StatusRequest(), timeout=60).pid == router.process.pid


def test_a_member_joins_and_renews_over_tls_and_not_as_another(router: Router, certs: Path) -> None:
    credentials = Credentials(certs / "expert", "expert")
    with contextlib.closing(RouterClient(router.said["address"], credentials)) as client:
        asked = {"address": "127.0.0.1:1", "model_hash": "m", "layers": 1, "experts": 2}
        with pytest.raises(RouterUnavailable, match=r"for a member of 'attention'.*says expert"):
            client.join(pool="attention", timeout_s=60, **asked)
        identity = client.join(pool="expert", timeout_s=60, **asked)
        client.start()
        end_s = time.monotonic() + 60
        while client.view is None or client.view.member(identity.name) is None:
            assert time.monotonic() < end_s, "no View came over TLS"
            time.sleep(0.02)
        client.leave(timeout_s=5)


def admin_ask(router: Router, certs: Path, role: str, key: str = "k" * 32, path: str = "/metrics") -> int | str:
    """The status, or how it ended, of a GET with a role's certificate; "": with none."""
    context = ssl.create_default_context(cafile=str(certs / "ca" / "ca.pem"))
    if role:
        context.load_cert_chain(certs / role / "cert.pem", certs / role / "key.pem")
    host, port = router.said["admin"].rsplit(":", 1)
    try:
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=server_name("router")) as link,
        ):
            link.sendall(
                f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
                "connection: close\r\n\r\n".encode()
            )
            answer = link.recv(64)
            return int(answer.split()[1]) if answer else "closed"
    except OSError as error:
        return type(error).__name__


def test_the_admin_listener_refuses_members_even_with_the_key(router: Router, certs: Path) -> None:
    assert admin_ask(router, certs, "operator") == 200
    assert admin_ask(router, certs, "") == 200
    assert admin_ask(router, certs, "", path="/healthz", key="") == 200
    assert admin_ask(router, certs, "operator", key="wrong") == 401
    for role in ("expert", "attention", "gateway", "launcher", "scaler", "router"):
        assert not isinstance(admin_ask(router, certs, role), int), role


def greet(port: int, context: ssl.SSLContext) -> bytes:
    """What a caller of an attention worker's port gets to read; empty: it was hung up on."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname=server_name("attention")) as link,
        ):
            return link.recv(5)
    except OSError:
        return b""


def test_an_attention_worker_lets_only_gateways_in(certs: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    door = TlsListener(listener, Credentials(certs / "attention", "attention"))
    try:
        with ThreadPoolExecutor(1) as caller:
            for role in ROLES:
                got = caller.submit(greet, port, Credentials(certs / role, role).client_context())
                if role != "gateway":
                    assert got.result(60) == b"", role
                    with pytest.raises(OSError):
                        door.accept()
                    continue
                end_s = time.monotonic() + 60
                while True:
                    assert time.monotonic() < end_s, "a gateway was not let in"
                    with contextlib.suppress(BlockingIOError):
                        connection, _ = door.accept()
                        break
                    time.sleep(0.01)
                connection.send(b"hello")
                assert got.result(60) == b"hello"
                connection.close()
            in_the_clear = socket.create_connection(("127.0.0.1", port), 10)
            in_the_clear.sendall(b"\x00" * 64)
            with contextlib.suppress(ConnectionResetError):
                assert in_the_clear.recv(64)[:1] in (b"", b"\x15"), "an answer other than an alert"
    finally:
        door.close()


def test_large_messages_pass_the_door_whole_both_ways(certs: Path) -> None:
    """Records of TLS are 16 KB: what OpenSSL holds back must not wait for the next byte on the wire."""
    listener = socket.create_server(("127.0.0.1", 0))
    door = TlsListener(listener, Credentials(certs / "attention", "attention"))
    sent = os.urandom(3_000_000)

    def echo() -> bytes:
        context = Credentials(certs / "gateway", "gateway").client_context()
        with (
            socket.create_connection(listener.getsockname(), 10) as plain,
            context.wrap_socket(plain, server_hostname=server_name("attention")) as link,
        ):
            back, rest = b"", sent
            link.sendall(rest)
            while len(back) < len(sent):
                back += link.recv(1 << 16)
            return back

    import select

    with ThreadPoolExecutor(1) as caller:
        got = caller.submit(echo)
        assert select.select([door], [], [], 20)[0]
        connection, _ = door.accept()
        connection.setblocking(False)
        came = bytearray()
        while len(came) < len(sent):
            assert select.select([connection], [], [], 10)[0], f"{len(came)} bytes came, and select sees no more"
            with contextlib.suppress(BlockingIOError):
                came += connection.recv(1 << 18)
        left = bytes(came)
        while left:
            assert select.select([], [connection], [], 10)[1]
            with contextlib.suppress(BlockingIOError):
                left = left[connection.send(left) :]
        assert got.result(60) == sent == bytes(came)
        connection.close()
    door.close()


def test_a_renewed_certificate_is_taken_up_without_a_restart(tmp_path: Path) -> None:
    make_certs(tmp_path, ["router"], days=1)
    credentials = Credentials(tmp_path / "router", "router")
    old = credentials.server_context()
    (tmp_path / "router" / "cert.pem").write_text("no certificate")
    assert credentials.server_context() is old, "half of a pair was used"
    make_certs(tmp_path, ["router"], days=2)
    assert credentials.server_context() is not old


@pytest.mark.parametrize("wrong", ["role", "missing", "key", "ca", "expired"])
def test_a_folder_that_proves_nothing_is_refused_at_the_start(tmp_path: Path, wrong: str) -> None:
    make_certs(tmp_path, ["router", "expert"])
    make_certs(tmp_path / "other", ["router"])
    at, role = tmp_path / "router", "router"
    reason = {
        "role": "Hostname mismatch",
        "missing": "No such file",
        "key": "KEY_VALUES_MISMATCH",
        "ca": "unable to get local issuer",
        "expired": "expired",
    }[wrong]
    if wrong == "role":
        at = tmp_path / "expert"
    elif wrong == "missing":
        (at / "key.pem").unlink()
    elif wrong == "key":
        shutil.copy(tmp_path / "other/router/key.pem", at / "key.pem")
    elif wrong == "ca":
        shutil.copy(tmp_path / "other/ca/ca.pem", at / "ca.pem")
    else:
        expire(at, tmp_path / "ca")
    with pytest.raises(CredentialsInvalid, match=f"--tls-dir .*{reason}.*Needed: ca.pem, cert.pem and key.pem"):
        Credentials(at, role)


def expire(at: Path, ca: Path) -> None:
    """Replace a certificate by one of the same names that is over."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    old = x509.load_pem_x509_certificate((at / "cert.pem").read_bytes())
    signing: Any = serialization.load_pem_private_key((ca / "key.pem").read_bytes(), None)
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=old.issuer,
        subject_name=old.subject,
        public_key=old.public_key(),
        serial_number=old.serial_number,
        not_valid_before=now - timedelta(days=2),
        not_valid_after=now - timedelta(days=1),
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    made = builder.sign(signing, hashes.SHA256())
    (at / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))


def test_keys_are_for_their_owner_alone_and_the_ca_is_kept(tmp_path: Path) -> None:
    make_certs(tmp_path, ["expert"], name="rack-3")
    authority = (tmp_path / "ca" / "ca.pem").read_bytes()
    for key in (tmp_path / "ca" / "key.pem", tmp_path / "expert" / "rack-3" / "key.pem"):
        assert key.stat().st_mode & 0o777 == 0o600, key
    assert not list((tmp_path / "expert").rglob("ca.key"))
    make_certs(tmp_path, ["router"])
    assert (tmp_path / "ca" / "ca.pem").read_bytes() == authority
    assert role_uri("expert", "rack-3") == "spiffe://eaas/expert/rack-3"
    assert Credentials(tmp_path / "expert" / "rack-3", "expert").role == "expert"


@pytest.fixture
def without_cryptography(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setitem(sys.modules, "cryptography", None)


def test_a_missing_library_says_how_to_get_it(tmp_path: Path, without_cryptography: Callable[[], None]) -> None:
    from eaas.ops.credentials import CertsFailed

    without_cryptography()
    with pytest.raises(CertsFailed, match=r"pip install 'eaas\[certs\]'"):
        make_certs(tmp_path)
