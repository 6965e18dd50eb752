"""No listener that other machines can reach without TLS and a key; and what each listener holds at most."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eaas.cluster.config import ClusterConfig
from eaas.gateway.config import GatewayConfig
from eaas.gateway.keys import Key, digest_of, new_key, write_keys
from eaas.gateway.listening import listen
from eaas.ops.credentials import make_certs
from eaas.settings import ROLES
from router.access import Exposed, bound_address, is_loopback, told_address
from router.options import options_of
from router.tls import Credentials
from tests.eaas.gateway_world import GatewayProcess, World, eventually

LOOPBACK = ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost")
OPEN = ("0.0.0.0", "::", "10.1.2.3", "192.168.0.1", "fe80::1", "2001:db8::1", "::ffff:10.0.0.1")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder, hosts=["localhost", "127.0.0.1"])
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("model"))
    world.router.show(world.worker())
    yield world
    world.close()


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("host", OPEN)
def test_an_address_that_others_reach_needs_what_is_missing(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(Exposed, match=r"can be reached by other machines.* no TLS and no key"):
        bound_address("--host", host, {"TLS": False, "key": False})
    with pytest.raises(Exposed, match="this listener has no key"):
        bound_address("--host", host, {"TLS": True, "key": False})
    assert bound_address("--host", host, {"TLS": True, "key": True})


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    assert is_loopback(bound_address("--host", host, {"TLS": False, "key": False}))


@pytest.mark.parametrize("host", ["", "example.org", "127.0.0.1.example.org", "0x7f.1", "127.0.0.1:80"])
def test_a_name_is_no_address_to_bind(host: str) -> None:
    with pytest.raises(Exposed, match="is no IP address"):
        bound_address("--host", host, {})


def test_whoever_listens_on_all_addresses_must_say_which_one_to_call() -> None:
    with pytest.raises(Exposed, match="--advertise"):
        told_address("--host", "0.0.0.0", "")
    assert told_address("--host", "0.0.0.0", "pod-3.eaas") == "pod-3.eaas"
    assert told_address("--host", "10.0.0.1", "") == "10.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_gateway_refuses_to_be_open_without_tls_and_keys(world: World, certs: Path, host: str) -> None:
    for protection in ({}, {"tls": True}, {"keys": True}):
        with pytest.raises(Exposed, match="can be reached by other machines"):
            listen(host, 0, **protection)
    if host == "0.0.0.0":
        gateway = GatewayProcess(world, "--host", host)
        assert "no TLS (--tls-cert and --tls-key) and no keys (--keys-file)" in gateway.report["error"]
        assert gateway.process.wait(60) == 1
        tls = ["--tls-cert", str(certs / "gateway/cert.pem"), "--tls-key", str(certs / "gateway/key.pem")]
        gateway = GatewayProcess(world, "--host", host, *tls)
        assert "has no keys (--keys-file)" in gateway.report["error"]
        assert gateway.process.wait(60) == 1


def test_a_socket_that_the_launcher_hands_over_is_looked_at_too(world: World) -> None:
    """The launcher checks first; this is for one that does not."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        listener.set_inheritable(True)
        command = [sys.executable, "-m", "eaas.gateway", "--router", world.router.address]
        command += ["--model", str(world.model), "--listen-fd", str(listener.fileno())]
        refused = subprocess.run(command, pass_fds=[listener.fileno()], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "--listen-fd 0.0.0.0 can be reached by other machines" in refused.stderr


def test_router_and_admin_listener_refuse_to_be_open(tmp_path: Path, certs: Path) -> None:
    journal = ["--journal", str(tmp_path / "journal")]
    refused = run("router", *journal, "--host", "0.0.0.0", "--advertise", "here")
    assert refused.returncode == 1 and "this listener has no TLS (--tls-dir)" in refused.stderr
    tls = ["--tls-dir", str(certs / "router")]
    refused = run("router", *journal, "--host", "0.0.0.0", *tls)
    assert refused.returncode == 1 and "--advertise" in refused.stderr
    open_admin = ["--admin-port", "0", "--admin-host", "0.0.0.0"]
    refused = run("router", *journal, *open_admin)
    assert refused.returncode == 1
    assert "no TLS (--tls-dir) and no key (--admin-key-file)" in refused.stderr
    refused = run("router", *journal, *open_admin, *tls)
    assert refused.returncode == 1 and "has no key (--admin-key-file)" in refused.stderr


def test_expert_servers_and_attention_workers_refuse_to_be_open(world: World) -> None:
    for module in ("experts", "eaas.worker"):
        refused = run(module, "--router", "127.0.0.1:1", "--model", str(world.model), "--host", "::")
        assert refused.returncode == 1 and "no TLS (--tls-dir)" in refused.stderr, refused.stderr


def test_a_local_cluster_refuses_before_it_starts_anything() -> None:
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 can be reached by other machines"):
        ClusterConfig(model=Path(), served_model_name="m", host="0.0.0.0")
    with pytest.raises(ValueError, match="belong together"):
        ClusterConfig(model=Path(), served_model_name="m", tls_cert=Path("c"))
    served = run("eaas.ops.cli", "serve", "demo", "--host", "0.0.0.0")
    assert served.returncode == 1 and "no keys (--keys-file)" in " ".join(served.stderr.split())


def test_every_process_listens_on_loopback_unless_told_otherwise() -> None:
    roles = {role: one.options for role, one in ROLES.items() if role not in ("serve", "pool")}
    for role, kind in roles.items():
        options = options_of(kind)
        assert options["allow_chaos"].default is False, "chaos is off unless asked for"
        assert role == "launcher" or is_loopback(options["host"].default), role
    assert is_loopback(options_of(roles["router"])["admin_host"].default)
    assert options_of(roles["router"])["admin_port"].default is None, "there is no admin listener unless asked for"


@pytest.fixture(scope="module")
def secure(world: World, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path]]:
    """An open gateway with TLS and keys, a key, and a folder with the certificate that it reads."""
    folder = tmp_path_factory.mktemp("secure")
    key = new_key()
    write_keys(folder / "keys.json", [Key(name="alice", sha256=digest_of(key))])
    for name in ("cert.pem", "key.pem"):
        (folder / name).write_bytes((certs / "gateway" / name).read_bytes())
    gateway = GatewayProcess(
        world,
        *("--host", "0.0.0.0", "--keys-file", str(folder / "keys.json")),
        *("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")),
    )
    yield gateway, key, folder
    status, log = gateway.stop()
    assert status == 0 and "Traceback" not in log, log


def https(certs: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certs / "ca" / "ca.pem"))


def test_https_streams_whole_and_plain_http_gets_nothing(secure: tuple[Any, str, Path], certs: Path) -> None:
    gateway, key, _ = secure
    port = gateway.report["address"].rpartition(":")[2]
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=https(certs), headers=headers) as client:
        eventually(lambda: client.get("/health").status_code == 200, "it is healthy")
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 300, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(texts) == "abc" * 100
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def serial(port: str, certs: Path) -> str:
    with (
        socket.create_connection(("127.0.0.1", int(port)), 10) as plain,
        https(certs).wrap_socket(plain, server_hostname="localhost") as link,
    ):
        return (link.getpeercert() or {})["serialNumber"]  # type: ignore[return-value]


def test_a_renewed_certificate_is_shown_without_a_restart(secure: tuple[Any, str, Path], certs: Path) -> None:
    gateway, _, folder = secure
    port = gateway.report["address"].rpartition(":")[2]
    before = serial(port, certs)
    (folder / "cert.pem").write_text("nothing")
    time.sleep(1.5)
    assert serial(port, certs) == before, "half of a pair was used"
    make_certs(certs, ["gateway"], hosts=["localhost", "127.0.0.1"])
    for name in ("key.pem", "cert.pem"):
        (folder / name).write_bytes((certs / "gateway" / name).read_bytes())
    eventually(lambda: serial(port, certs) != before, "the new certificate is shown")


# -- what a listener holds at most


class Raw:
    """A connection that says what it likes."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), 20)

    def say(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def answer(self) -> tuple[int, str]:
        """Status and body of what comes until it is closed; 0 for a connection that was closed without a word."""
        self.socket.settimeout(20)
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := self.socket.recv(1 << 16):
                data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        return (int(head.split()[1]), body.decode()) if head else (0, "")


@pytest.fixture(scope="module")
def plain(world: World) -> Iterator[str]:
    gateway = GatewayProcess(world, "--max-connections", "20")
    eventually(lambda: httpx.get(gateway.url + "/health").status_code == 200, "it is healthy")
    yield gateway.url
    status, log = gateway.stop()
    assert status == 0 and "Traceback" not in log, log


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
BOUNDS = GatewayConfig()


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"x: " + b"y" * (BOUNDS.head_limit_bytes + 1) + b"\r\n\r\n",
        HEAD + b"".join(b"x%d: y\r\n" % number for number in range(BOUNDS.max_headers)) + b"\r\n",
        b"GET /" + b"a" * (BOUNDS.head_limit_bytes + 1) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        # Without an end: no header is ever complete.
        HEAD + b"x: " + b"y" * 3_000_000,
        HEAD + b"y" * 3_000_000,
    ],
    ids=["long", "many", "url", "endless-value", "endless-name"],
)
def test_a_head_over_the_bounds_is_a_431_and_the_end(plain: str, head: bytes) -> None:
    raw = Raw(plain)
    raw.say(head)
    status, body = raw.answer()
    # The kernel may throw the answer away where much more was sent than was read.
    assert status in (431, 400, 0), body
    if status:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(plain + "/health").status_code == 200


def test_headers_behind_a_chunked_body_are_bounded_too(plain: str) -> None:
    raw = Raw(plain)
    raw.say(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n")
    raw.say(b"content-type: application/json\r\n\r\n1\r\n{\r\n0\r\n")
    raw.say(b"".join(b"t%d: y\r\n" % number for number in range(1000)) + b"\r\n")
    assert raw.answer()[0] == 431


def test_what_is_within_the_bounds_is_answered(plain: str) -> None:
    """As much as browsers and proxies send, one request behind the other on one connection."""
    raw = Raw(plain)
    wide = HEAD + b"cookie: " + b"y" * 30_000 + b"\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(100))
    for piece in (wide[:5], wide[5:2000], wide[2000:] + b"\r\n" + wide + b"connection: close\r\n\r\n"):
        raw.say(piece)
        time.sleep(0.02)
    raw.socket.settimeout(20)
    data = b""
    while piece := raw.socket.recv(1 << 16):
        data += piece
    assert data.count(b"HTTP/1.1 200 OK") == 2, data


def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with a shorter patience: a slow head gets a 408, a silent connection is closed."""
    import asyncio

    import uvicorn

    from eaas.gateway.guard import Connection

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def main() -> None:
        quick = Connection.bounded(GatewayConfig(head_timeout_s=0.3))
        server = uvicorn.Server(uvicorn.Config(app, http=quick, lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                silent, silent_out = await asyncio.open_connection("127.0.0.1", port)
                slow, slow_out = await asyncio.open_connection("127.0.0.1", port)
                second, second_out = await asyncio.open_connection("127.0.0.1", port)
                slow_out.write(b"GET / HTTP/1.1\r\nx: ")
                second_out.write(HEAD + b"\r\n")
                assert b"200 OK" in await asyncio.wait_for(second.readuntil(b"\r\n\r\n"), 60)
                second_out.write(HEAD)
                assert await asyncio.wait_for(silent.read(), 10) == b""
                assert b" 408 " in await asyncio.wait_for(slow.read(), 10)
                assert b" 408 " in await asyncio.wait_for(second.read(), 10)
                for out in (silent_out, slow_out, second_out):
                    out.close()
            finally:
                server.should_exit = True
                await serving

    asyncio.run(main())


def test_one_connection_too_many_is_closed_with_a_word(plain: str) -> None:
    held = [Raw(plain) for _ in range(20)]
    try:
        status, body = Raw(plain).answer()
        assert status == 503 and "too_many_connections" in body
    finally:
        for raw in held:
            raw.socket.close()
    eventually(lambda: httpx.get(plain + "/health").status_code == 200, "there is room again")


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"n": 17}, 400),
        ({"stop": ["x"] * 17}, 400),
        ({"stop": "x" * 1025}, 400),
        ({"stop_token_ids": [1] * 17}, 400),
        ({"prompt": ["x"] * 65}, 400),
        ({"prompt": "x" * 20_000}, 400),
        ({"logprobs": 21}, 400),
        ({"max_tokens": 1 << 40}, 400),
        ({"prompt": "x" * (5 << 20)}, 413),
    ],
    ids=["n", "stops", "stop", "stop-ids", "prompts", "prompt", "logprobs", "tokens", "body"],
)
def test_what_is_asked_is_bounded_before_anything_is_allocated(plain: str, more: dict[str, Any], status: int) -> None:
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 4, **more}
    assert httpx.post(plain + "/v1/completions", json=asked, timeout=60).status_code == status


def test_deep_json_is_refused(plain: str) -> None:
    deep = b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": '
    deep += b"[" * 50_000 + b"]" * 50_000 + b"}}"
    reply = httpx.post(
        plain + "/v1/chat/completions", content=deep, headers={"content-type": "application/json"}, timeout=60
    )
    assert reply.status_code == 400


def test_credentials_of_another_role_are_no_protection(certs: Path) -> None:
    with pytest.raises(ValueError, match="Hostname mismatch"):
        Credentials(certs / "expert", "router")
