"""The admin listener as operators, browsers and Prometheus meet it: a real router, real HTTP."""

from __future__ import annotations

import http.client
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.client import RouterClient
from router.journal import JournalUnusable
from router.metrics import RouterMetrics
from router.pools import Counts
from router.state import MOST_MEMBERS, Config, State
from tests.router.test_service import HOST, SHAPE, RouterProcess, Server, failing, started, until

__all__ = ["started"]

ROOT = Path(__file__).resolve().parents[2]
JSON = {"content-type": "application/json"}
POOL = {"least": 0, "is_scaling": False, "starting": 0, "draining": 0, "held_up": ""}


class Admin:
    """Asks the admin listener, over a new connection each time."""

    def __init__(self, port: int, key: str = "") -> None:
        self.port = port
        self.key = key

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {**({"authorization": f"Bearer {self.key}"} if self.key else {}), **(headers or {})}
        connection.request(method, path, sent, given)
        reply = connection.getresponse()
        said = reply.read()
        connection.close()
        assert not [name for name, _ in reply.getheaders() if name.lower().startswith("access-control")]
        return reply.status, json.loads(said) if "json" in (reply.getheader("content-type") or "") else said

    def put(self, pool: str, body: object, **headers: str) -> tuple[int, Any]:
        return self.ask("PUT", f"/admin/pools/{pool}/scale", body, {**JSON, **headers})

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Samples of /metrics by (name, label values ...)."""
        page = self.ask("GET", "/metrics")[1].decode()
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_listener_is_off_unless_asked_for_and_its_libraries_are_not_loaded(
    started: Callable[..., RouterProcess],
) -> None:
    router = started()
    assert router.process is not None
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    assert len([line for line in listening.splitlines() if f"pid={router.process.pid}," in line]) == 1
    code = "import sys, router.__main__; print({'uvicorn', 'prometheus_client'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_the_launcher_is_told_where_the_admin_listener_is(started: Callable[..., RouterProcess]) -> None:
    router = started("--admin-port", "0")
    assert Admin(int(router.admin.rpartition(":")[2])).ask("GET", "/healthz") == (200, {"problem": ""})
    assert router.stop() == 0


def test_rows_of_each_expert_add_up_over_all_attention_workers(
    started: Callable[..., RouterProcess], port: int
) -> None:
    router = started("--admin-port", str(port), "--experts", "1", "--attention", "2", "--lease-s", "1")
    admin, workers = Admin(port), [Server(router, "attention") for _ in range(2)]
    assert admin.ask("GET", "/admin/experts") == (200, {"rows": []})
    layers, experts = SHAPE["layers"], SHAPE["experts"]
    rows = np.arange(layers * experts, dtype=np.uint32)
    for worker in workers:
        worker.client.routed(rows, rows)
    expected = (2 * rows.reshape(layers, experts)).tolist()
    until(lambda: admin.ask("GET", "/admin/experts") == (200, {"rows": expected}))
    # Of another shape, it is of no model here.
    workers[0].client.routed(rows[:1], rows[:1])
    workers[1].client.routed(rows, rows)
    expected = (3 * rows.reshape(layers, experts)).tolist()
    until(lambda: admin.ask("GET", "/admin/experts") == (200, {"rows": expected}))
    for worker in workers:
        worker.die()


def test_pools_are_shown_and_scaled(started: Callable[..., RouterProcess], port: int) -> None:
    router = started("--admin-port", str(port), "--experts", "1", "--attention", "0", "--lease-s", "1")
    server, admin = Server(router), Admin(port)
    until(lambda: server.views and [m.state for m in server.views[-1].members] == ["serving"])
    expert = {"pool": "expert", "wanted": 1, "live": 1, "most": MOST_MEMBERS - 1, **POOL}
    attention = {"pool": "attention", "wanted": 0, "live": 0, "most": MOST_MEMBERS, **POOL}
    assert admin.ask("GET", "/admin/pools") == (200, {"pools": [expert, attention]})
    scaled = {**expert, "wanted": 3, "is_scaling": True}
    assert admin.put("expert", {"wanted": 3, "drain_s": 2.5}) == (200, scaled)
    assert admin.ask("GET", "/admin/pools/expert/scale") == (200, scaled)
    router.stop(signal.SIGKILL)
    router.start()
    assert admin.ask("GET", "/admin/pools/expert/scale")[1]["wanted"] == 3, "it was durable"
    client = RouterClient(router.address)
    launches = client.launches(HOST)
    next(launches), next(launches)
    assert admin.ask("GET", "/admin/pools/expert/scale")[1]["starting"] == 2
    client.close()
    server.die()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"wanted": 2000}, 409, r"2000 members of pool 'expert' asked for; give 0 to"),
        ({"wanted": -1}, 400, r"wanted -1 found, a whole number from 0 needed"),
        ({"wanted": True}, 400, r"wanted True found"),
        ({"wanted": 2.0}, 400, r"wanted 2\.0 found"),
        ({"wanted": 10**400}, 400, r"wanted 1000"),
        ({"wanted": 2, "drain_s": 0}, 400, r"drain_s 0 found, seconds, over 0"),
        ({"wanted": 2, "drain_s": 10**400}, 400, r"drain_s 1000"),
        (b'{"wanted": 2, "drain_s": NaN}', 400, r"drain_s nan found"),
        ({"wanted": 2, "drains": 3}, 400, r'\{"wanted": 6\} or \{"wanted": 6, "drain_s": 30\} needed'),
        ([], 400, r"body '\[\]' found"),
        (b"", 400, r"body '' found"),
        (b"[" * 4000, 400, r"body '\[\[\["),
        (b"\xff\xfe", 400, r"body"),
        (b" " * 5000, 413, r"over 4096 bytes found, at most 4096 needed"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused_and_changes_nothing(
    admin: Admin, body: object, status: int, message: str
) -> None:
    found, said = admin.put("expert", body)
    assert (found, sorted(said["error"])) == (status, ["do", "found", "message", "needed"])
    assert re.search(message, said["error"]["message"]), said
    assert admin.ask("GET", "/admin/pools/expert/scale")[1]["wanted"] == 1


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """One router for the tests that change nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    router = RouterProcess(tmp_path_factory.mktemp("router"), "--admin-port", str(number))
    yield Admin(number)
    router.stop(signal.SIGKILL)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        (
            "GET",
            "/",
            404,
            "/admin/pools/{pool}/scale, /admin/members/{name}/retire, /admin/faults or /healthz needed",
        ),
        ("GET", "/admin/pools/experts/scale", 404, "pool 'experts' found, one of expert, attention needed"),
        ("GET", "/admin/pools/gateway/scale", 404, "pool 'gateway' found"),
        ("GET", "/admin/pools/expert/scale/more", 404, "path /admin/pools/expert/scale/more found"),
        ("POST", "/admin/pools/expert/scale", 405, "method POST found, GET, HEAD, PUT needed"),
        ("DELETE", "/metrics", 405, "method DELETE found"),
    ],
)
def test_what_is_not_there_is_said(admin: Admin, method: str, path: str, status: int, message: str) -> None:
    found, said = admin.ask(method, path)
    assert found == status
    assert message in said["error"]["message"]


def test_a_member_is_retired_by_name_and_asked_again_nothing_more_happens(
    started: Callable[..., RouterProcess], port: int
) -> None:
    router = started("--admin-port", str(port), "--experts", "2", "--replicas", "2", "--lease-s", "1")
    admin, servers = Admin(port), [Server(router, loads=False) for _ in range(2)]
    name = servers[0].name
    path = f"/admin/members/{name}/retire"
    status, said = admin.ask("GET", path)
    assert status == 404 and f"{name}, which nobody retires" in said["error"]["message"]
    for body in (
        {},
        {"operation": ""},
        {"operation": "x" * 129},
        {"operation": 7},
        {"operation": "a", "more": 1},
        [],
    ):
        status, said = admin.ask("POST", path, body, JSON)
        assert status == 400 and "an id of 1 to 128 printable characters" in said["error"]["message"], body
    began_s = time.time()
    status, first = admin.ask("POST", path, {"operation": "a"}, JSON)
    assert (status, first["name"], first["operation"]) == (200, name, "a"), first
    assert not first["safe_to_terminate"] and abs(first["asked_unix_s"] - began_s) < 60
    assert admin.ask("POST", path, {"operation": "a"}, JSON)[1]["asked_unix_s"] == first["asked_unix_s"]
    status, said = admin.ask("POST", path, {"operation": "b"}, JSON)
    assert status == 409 and f"operation a retires {name} already" in said["error"]["message"]
    other = f"/admin/members/{servers[1].name}/retire"
    status, said = admin.ask("POST", other, {"operation": "a"}, JSON)
    assert (
        status == 409
        and f"operation a retires {name}; give {servers[1].name} one of its own" in said["error"]["message"]
    )
    status, said = admin.ask("POST", "/admin/members/expert/9/retire", {"operation": "c"}, JSON)
    assert status == 404 and "expert/9 is neither a member nor the router" in said["error"]["message"]
    assert admin.ask("PUT", path, {"operation": "a"}, JSON)[0] == 405
    # Nobody starts another, so it goes as soon as the other holds all.
    for server in servers:
        server.loads = True
        until(lambda server=server: bool(server.views))
        server.see(server.views[-1])
    until(lambda: admin.ask("GET", path)[1]["safe_to_terminate"])
    assert router.stop(signal.SIGKILL) < 0
    router.start()
    assert admin.ask("GET", path)[1]["state"] == "gone", "forgotten by a restart"
    assert admin.ask("POST", path, {"operation": "a"}, JSON)[1]["safe_to_terminate"]
    assert admin.ask("POST", path, {"operation": "b"}, JSON)[0] == 404


def test_a_router_that_is_retired_ends_in_order_and_its_successor_is_not_meant(
    started: Callable[..., RouterProcess], port: int
) -> None:
    router = started("--admin-port", str(port))
    admin, path = Admin(port), "/admin/members/router/0/retire"
    status, said = admin.ask("POST", "/admin/members/router/1/retire", {"operation": "a"}, JSON)
    assert status == 404 and "nor the router that decides, router/0" in said["error"]["message"]
    status, said = admin.ask("POST", path, {"operation": "a"}, JSON)
    assert (status, said["state"], said["safe_to_terminate"]) == (200, "gone", True)
    assert router.process is not None and router.process.wait(timeout=60) == 0
    router.start()
    assert admin.ask("POST", path, {"operation": "a"}, JSON)[1]["safe_to_terminate"]
    time.sleep(0.5)
    assert router.process.poll() is None, "one operation ended two routers"
    assert admin.ask("POST", path, {"operation": "b"}, JSON)[0] == 200
    assert router.process.wait(timeout=60) == 0


def test_a_page_in_a_browser_can_neither_read_nor_change_anything(admin: Admin) -> None:
    for host in ("evil.example", f"evil.example:{admin.port}", "127.0.0.1.evil.example", "", "[::1]evil"):
        status, said = admin.ask("GET", "/admin/pools", headers={"host": host})
        assert (status, said["error"]["needed"]) == (421, "a loopback name"), host
    for host in (f"localhost:{admin.port}", "LOCALHOST", f"[::1]:{admin.port}", "127.0.0.1"):
        assert admin.ask("GET", "/admin/pools", headers={"host": host})[0] == 200, host
    # What a page may send to a foreign site without asking; and the asking, which is answered with no permission.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        headers = {"content-type": kind, "origin": "https://evil.example"}
        assert admin.ask("PUT", "/admin/pools/expert/scale", {"wanted": 2}, headers)[0] == 415, kind
    asking = {"origin": "https://evil.example", "access-control-request-method": "PUT"}
    assert admin.ask("OPTIONS", "/admin/pools/expert/scale", headers=asking)[0] == 405


def test_a_request_without_end_is_cut(admin: Admin) -> None:
    with socket.create_connection(("127.0.0.1", admin.port)) as endless:
        endless.settimeout(10)
        try:
            for _ in range(100):
                endless.sendall(b"GET /metrics HTTP/1.1\r\nx-a: " + b"a" * 65536)
            reply = endless.recv(4096)
        except ConnectionError:
            reply = b""
    assert not reply or reply.startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", admin.port)) as slow:
        slow.settimeout(20)
        slow.sendall(
            b"PUT /admin/pools/expert/scale HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: 12\r\n\r\n{"
        )
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    assert admin.ask("GET", "/admin/pools")[0] == 200


def test_a_key_is_asked_of_everyone_but_a_health_probe(
    started: Callable[..., RouterProcess], port: int, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    router = started("--admin-port", str(port), "--admin-key-file", str(key))
    for wrong in ("", "0123456789abcdef0123456789abcdee", "x"):
        for path in (
            "/metrics",
            "/admin/pools",
            "/admin/pools/expert/scale",
            "/admin/members/router/0/retire",
        ):
            status, said = Admin(port, wrong).ask("GET", path)
            assert status == 401
            assert said["error"]["do"] == "send the header Authorization: Bearer KEY"
        assert Admin(port, wrong).put("expert", {"wanted": 2})[0] == 401
        retire = Admin(port, wrong).ask("POST", "/admin/members/router/0/retire", {"operation": "a"}, JSON)
        assert retire[0] == 401
    assert Admin(port).ask("GET", "/healthz")[0] == 200
    assert Admin(port, key.read_text().strip()).put("expert", {"wanted": 2})[0] == 200
    assert router.stop() == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("\n", "holds no key"),
        ("short", "at least 16"),
        ("two words of key", "spaces"),
    ],
)
def test_a_key_file_that_holds_no_key_is_refused_at_the_start(
    tmp_path: Path, content: str | None, message: str
) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
    said, status = failing(tmp_path, ["--admin-port", "0", "--admin-key-file", str(key)])
    assert message in said
    assert status == 1


@pytest.mark.parametrize("taken", [True, False])
def test_an_admin_port_that_cannot_be_had_is_named(tmp_path: Path, taken: bool, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        said, status = failing(tmp_path, ["--admin-port", str(port if taken else 70000)])
    refused = f"port {port} of 127.0.0.1 cannot be used for --admin-port"
    assert (refused if taken else "--admin-port 70000: at least 0 and at most 65535 is needed.") in said
    assert status == 1


def test_a_router_that_cannot_write_is_unhealthy_and_scales_nothing(
    started: Callable[..., RouterProcess], port: int
) -> None:
    router, admin = started("--admin-port", str(port)), Admin(port)
    assert router.process is not None
    limit = resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, (1, limit[1]))
    status, said = admin.put("expert", {"wanted": 5})
    assert (status, said["error"]["needed"]) == (503, "one that can")
    status, said = admin.ask("GET", "/healthz")
    assert status == 503
    assert "cannot be written" in said["problem"]
    assert admin.metrics()[("eaas_router_up",)] == 0
    assert admin.ask("GET", "/admin/pools/expert/scale")[1]["wanted"] == 1
    resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, limit)
    until(lambda: admin.ask("GET", "/healthz")[0] == 200)
    assert admin.put("expert", {"wanted": 5})[0] == 200


def test_metrics_follow_what_happens(started: Callable[..., RouterProcess], port: int) -> None:
    router = started("--admin-port", str(port), "--experts", "2", "--replicas", "2", "--lease-s", "1")
    servers, admin = [Server(router) for _ in range(2)], Admin(port)
    until(lambda: admin.metrics()[("eaas_replicas_min",)] == 2)
    until(lambda: admin.metrics().get(("eaas_pool_load", "expert", "busy")) == 0.5)
    # Asked one after the other: anew where an epoch began in between.
    end_s = time.monotonic() + 60
    while True:
        first, epoch = admin.metrics(), servers[0].client.status().view.epoch
        if first[("eaas_router_epoch",)] == epoch or time.monotonic() > end_s:
            break
    assert first[("eaas_members", "expert", "serving")] == 2
    assert first[("eaas_router_up",)] == 1
    assert first[("eaas_router_term",)] == 1
    assert first[("eaas_router_epoch",)] == epoch
    assert first[("eaas_replicas_wanted",)] == 2
    assert first[("eaas_moves_in_flight",)] == 0
    assert first[("eaas_pool_wanted", "expert")] == 2
    assert first[("eaas_pool_live", "expert")] == 2
    assert first[("eaas_scale_changes_total", "expert")] == 0
    admin.put("expert", {"wanted": 4})
    admin.put("expert", {"wanted": 4})
    servers[0].client.report_exit(HOST, servers[1].pid)
    servers[1].loads = False
    until(lambda: admin.metrics()[("eaas_replicas_min",)] == 1)
    second = admin.metrics()
    assert second[("eaas_scale_changes_total", "expert")] == 1, "asked again, it does not change again"
    assert second[("eaas_scale_changes_total", "attention")] == 0
    assert second[("eaas_members_fenced_total", "expert")] == 1
    assert second[("eaas_pool_wanted", "expert")] == 4
    assert second[("eaas_router_epoch",)] > first[("eaas_router_epoch",)]
    for server in servers:
        server.die()


def test_a_router_that_does_not_decide_says_only_that() -> None:
    def state() -> State:
        raise JournalUnusable("this router is a standby")

    page = RouterMetrics(Config(), state, Counts(), lambda: "").page().decode()
    assert [line for line in page.splitlines() if not line.startswith("#")] == [
        "eaas_router_up 0.0",
        "eaas_router_failed_ticks_total 0.0",
    ]


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, found none on PATH")
def test_promtool_finds_nothing_wrong_with_the_metrics(admin: Admin) -> None:
    page = admin.ask("GET", "/metrics")[1]
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


@pytest.mark.full(seconds=5)
@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus, found none on PATH")
def test_prometheus_scrapes_with_the_example_in_deploy(
    started: Callable[..., RouterProcess], port: int, tmp_path: Path
) -> None:
    key = tmp_path / "admin.key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    started("--admin-port", str(port), "--admin-key-file", str(key), "--experts", "3")
    example = (ROOT / "deploy" / "prometheus.yaml").read_text()
    for shown, here in (
        ("127.0.0.1:9100", f"127.0.0.1:{port}"),
        ("/etc/eaas/admin.key", str(key)),
        ("15s", "1s"),
    ):
        assert shown in example
        example = example.replace(shown, here)
    (tmp_path / "prometheus.yaml").write_text(example)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        web = free.getsockname()[1]
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yaml'}", "--log.level=error"]
    command += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{web}"]
    process = subprocess.Popen(command)
    try:

        def value(query: str) -> str:
            asked = f"http://127.0.0.1:{web}/api/v1/query?query={urllib.parse.quote(query)}"
            try:
                with urllib.request.urlopen(asked, timeout=30) as reply:
                    found = json.load(reply)["data"]["result"]
            except OSError:
                return ""
            return found[0]["value"][1] if found else ""

        until(lambda: value("eaas_router_up") == "1")
        assert value('eaas_pool_wanted{pool="expert"}') == "3"
        assert value('up{job="eaas-router"}') == "1"
    finally:
        process.terminate()
        process.wait(60)
