"""Launchers by command and by webhook, against a real router: real shells, a real HTTP server."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from router import launcher as launching
from router.client import RouterClient
from router.config import LauncherOptions
from router.events import StartProcess, StopProcess
from router.host import host_id
from router.launcher import Launcher, Order, OrderFailed, post, run_command
from router.options import read
from router.state import Config
from tests.host_stalls import bounded
from tests.router.test_service import SHAPE, RouterProcess, started, until

pytestmark = pytest.mark.alone

__all__ = ["started"]

MEMBER = """
import os, sys, time
from router.client import RouterClient
client = RouterClient(os.environ["EAAS_ROUTER"])
name = client.join(pool=os.environ["EAAS_POOL"], address="a", layers=2, experts=6, model_hash="m").name
held = lambda view: client.loaded(view.member(name).target, view.epoch) if view.member(name) else None
client.start(on_view=held)
time.sleep(60)
"""


class Hook:
    """A little HTTP server that records what it is sent and answers what it is told to."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.answers: list[int] = []
        self.answer = 200
        hook = self

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                hook.seen.append({**{k.lower(): v for k, v in self.headers.items()}, **body})
                self.send_response(hook.answers.pop(0) if hook.answers else hook.answer)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}/orders"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def starts(self) -> list[dict[str, str]]:
        return [order for order in self.seen if order["action"] == "start"]


@pytest.fixture
def hook() -> Iterator[Hook]:
    one = Hook()
    yield one
    one.server.shutdown()
    one.server.server_close()


@pytest.fixture
def launched() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(router: RouterProcess, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "router.launcher", "--router", router.address, *flags]
        processes.append(subprocess.Popen([*command, "--die-with", str(os.getpid())]))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def options(*flags: str) -> LauncherOptions:
    return read(LauncherOptions, "launcher", ["--router", "127.0.0.1:1", *flags], {})


def order(action: str = "start") -> Order:
    return Order(key="k", action=action, pool="expert", host="h", router="r", member="expert/1", pid=7)


def test_a_command_starts_a_member_and_another_replaces_it_when_it_is_lost(
    started: Callable[..., RouterProcess], launched: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    router = started("--attention", "0", "--lease-s", "60")
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    launched(router, "--exec", f"exec {sys.executable} {script}")
    client = RouterClient(router.address)

    def serving() -> list[tuple[str, int]]:
        return [(m.name, m.pid) for m in client.status().view.members if m.state == "serving"]

    until(lambda: [name for name, _ in serving()] == ["expert/1"])
    pid = serving()[0][1]
    os.kill(pid, signal.SIGKILL)
    until(lambda: [name for name, _ in serving()] == ["expert/2"])
    assert client.status().gone[0].reason == "its process ended"
    os.kill(serving()[0][1], signal.SIGKILL)
    client.close()


def test_whoever_owns_a_process_elsewhere_reports_its_end_at_once(
    started: Callable[..., RouterProcess], tmp_path: Path
) -> None:
    router = started("--attention", "0", "--lease-s", "600")
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    owned: list[subprocess.Popen[bytes]] = []
    closing = threading.Event()

    def own(order: Order) -> int:
        told = {"EAAS_HOST": order.host, "EAAS_PID": str(order.pid), "EAAS_POOL": order.pool}
        owned.append(
            subprocess.Popen([sys.executable, script], env={**os.environ, **told, "EAAS_ROUTER": order.router})
        )
        status = owned[-1].wait()
        if closing.is_set():
            return 0
        if status:
            raise OrderFailed(f"status {status}", pid=order.pid)
        return order.pid

    launcher = Launcher(router.address, "cloud", own, None)
    threading.Thread(target=launcher.follow, daemon=True).start()
    client = RouterClient(router.address)

    def serving() -> list[str]:
        return [m.name for m in client.status().view.members if m.state == "serving"]

    try:
        until(lambda: serving() == ["expert/1"])
        owned[0].kill()
        # Its lease would last ten minutes.
        until(lambda: serving() == ["expert/2"])
        assert client.status().gone[0].reason == "its process ended"
    finally:
        closing.set()
        launcher.close()
        client.close()
        for process in owned:
            process.kill()
            process.wait()


def test_processes_started_elsewhere_join_and_are_ended_under_the_number_in_their_order(
    started: Callable[..., RouterProcess], launched: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    router = started("--attention", "0", "--lease-s", "60", "--experts", "2", "--replicas", "2")
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    # What a wrapper for another machine does: it remembers what it started by the number of the order.
    launched(
        router,
        *("--host", "elsewhere", "--exec"),
        f"cd {tmp_path}; if [ $EAAS_ACTION = stop ]; then kill -9 $(cat $EAAS_PID) && touch ended-$EAAS_PID; else "
        f"{sys.executable} {script} & echo $! > $EAAS_PID; fi",
    )
    client = RouterClient(router.address)

    def serving() -> list[int]:
        return [m.pid for m in client.status().view.members if (m.state, m.host) == ("serving", "elsewhere")]

    until(lambda: len(serving()) == 2)
    pids = serving()
    assert all((tmp_path / str(pid)).exists() for pid in pids)
    client.scale("expert", 1)
    until(lambda: serving() == pids[:1])
    until(lambda: (tmp_path / f"ended-{pids[1]}").exists())
    os.kill(int((tmp_path / str(pids[0])).read_text()), signal.SIGKILL)
    client.close()


@pytest.mark.full(seconds=2)
def test_a_frozen_member_is_ended_by_the_command_that_is_told_its_pid(
    started: Callable[..., RouterProcess], launched: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    router = started("--attention", "0", "--lease-s", "0.6", "--experts", "2", "--replicas", "2")
    script, record = tmp_path / "member.py", tmp_path / "record"
    script.write_text(MEMBER)
    launched(
        router,
        "--exec",
        f"echo $EAAS_ACTION $EAAS_POOL $EAAS_MEMBER $EAAS_PID >> {record}; "
        f"if [ $EAAS_ACTION = stop ]; then kill -9 $EAAS_PID; else exec {sys.executable} {script}; fi",
    )
    client = RouterClient(router.address)

    def serving() -> dict[str, int]:
        return {m.name: m.pid for m in client.status().view.members if m.state == "serving"}

    until(lambda: set(serving()) == {"expert/1", "expert/2"})
    pids = serving()
    os.kill(pids["expert/1"], signal.SIGSTOP)
    until(lambda: f"stop expert expert/1 {pids['expert/1']}" in record.read_text().splitlines())
    until(lambda: set(serving()) == {"expert/2", "expert/3"})
    assert record.read_text().splitlines().count("start expert 0") == 3
    for pid in serving().values():
        os.kill(pid, signal.SIGKILL)
    client.close()


@pytest.mark.full(seconds=5)
def test_a_command_that_fails_is_a_failed_start_and_the_next_waits_longer(
    started: Callable[..., RouterProcess], launched: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    router = started("--attention", "0")
    record = tmp_path / "record"
    launched(router, "--exec", f"date +%s%N >> {record}; exit 3")
    until(lambda: record.exists() and len(record.read_text().split()) >= 4)
    times = [int(line) / 1e9 for line in record.read_text().split()]
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    # The router's waits are 0.5, 1, 2 s: without the reports it would wait 60 s, or not at all.
    assert gaps[0] >= 0.4, gaps
    assert gaps[1] >= 0.9, gaps
    assert gaps[2] >= 1.9, gaps


def test_a_webhook_is_told_what_to_start_and_its_processes_fill_the_order_from_anywhere(
    started: Callable[..., RouterProcess],
    launched: Callable[..., subprocess.Popen[bytes]],
    hook: Hook,
    tmp_path: Path,
) -> None:
    router = started("--attention", "0", "--lease-s", "2", "--experts", "2", "--replicas", "2")
    key = tmp_path / "key"
    key.write_text("a-secret\n")
    hook.answers = [503, 503]
    launched(router, "--host", "cloud", "--webhook", hook.url, "--webhook-key-file", str(key))
    until(lambda: len(hook.seen) == 4)
    keys = [seen["idempotency-key"] for seen in hook.seen]
    assert sorted(keys.count(key) for key in set(keys)) in ([2, 2], [1, 3]), "a try again keeps its key"
    for seen in hook.seen:
        wanted = {"action": "start", "pool": "expert", "member": "", "host": "cloud"}
        assert {name: seen[name] for name in wanted} == wanted
        assert seen["router"] == router.address
        assert seen["authorization"] == "Bearer a-secret"

    # As on other machines, where pids may be equal: each joins under the number in its order.
    pids = sorted({int(seen["pid"]) for seen in hook.seen})
    assert len(pids) == 2
    assert pids[0] >= 1 << 22, "no process of Linux has such a pid"
    members = [RouterClient(router.address) for _ in range(2)]
    names = [
        member.join(pool="expert", address="a", pid=pid, host="cloud", **SHAPE).name
        for member, pid in zip(members, pids, strict=True)
    ]
    for client, name in zip(members, names, strict=True):
        client.start(on_view=lambda v, c=client, n=name: c.loaded(m.target, v.epoch) if (m := v.member(n)) else None)
    watcher = RouterClient(router.address)
    until(lambda: [m.state for m in watcher.status().view.members] == ["serving"] * 2)
    time.sleep(0.3)
    assert len(hook.seen) == 4, "what joined filled the orders"
    members[0].close()
    until(lambda: any(o["action"] == "stop" and (o["member"], o["pid"]) == (names[0], pids[0]) for o in hook.seen))
    until(lambda: len({o["idempotency-key"] for o in hook.starts()}) == 3)
    assert [m.name for m in watcher.status().view.members] == [names[1]]
    members[1].close()
    watcher.close()


@pytest.mark.full(seconds=3)
def test_a_webhook_that_refuses_is_a_failed_start(
    started: Callable[..., RouterProcess], launched: Callable[..., subprocess.Popen[bytes]], hook: Hook
) -> None:
    router = started("--attention", "0")
    hook.answer = 403
    launched(router, "--host", "cloud", "--webhook", hook.url)
    until(lambda: len(hook.seen) >= 3)
    assert len({seen["idempotency-key"] for seen in hook.seen}) == len(hook.seen), "403 is not tried again"


@pytest.mark.full(seconds=4)
def test_what_is_starting_is_not_ordered_again_when_the_router_restarts(
    started: Callable[..., RouterProcess], launched: Callable[..., subprocess.Popen[bytes]], hook: Hook
) -> None:
    router = started("--attention", "0")
    launched(router, "--host", "cloud", "--webhook", hook.url)
    until(lambda: len(hook.seen) == 1)
    router.stop(signal.SIGKILL)
    router.start()
    time.sleep(2.5)
    assert len(hook.seen) == 1


def test_a_launcher_that_ends_leaves_what_it_started_and_stops_within_a_second(
    started: Callable[..., RouterProcess], launched: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    router = started("--attention", "0", "--lease-s", "1")
    launcher = launched(router, "--exec", f"exec {sys.executable} {script}")
    with contextlib.closing(RouterClient(router.address)) as client:
        until(lambda: [m.state for m in client.status().view.members] == ["serving"])
        with bounded(2.0):
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=60) == 0
        time.sleep(1.5)
        members = client.status().view.members
    assert [(m.name, m.host) for m in members] == [("expert/1", host_id())]
    os.kill(members[0].pid, signal.SIGKILL)


def test_a_redirect_is_not_followed_and_silence_is_a_failure(hook: Hook) -> None:
    hook.answer = 302
    with pytest.raises(OrderFailed, match="answered 302") as caught:
        post(order(), hook.url, timeout_s=1)
    assert caught.value.is_final
    assert len(hook.seen) == 1
    with pytest.raises(OrderFailed, match="did not answer") as caught:
        post(order(), "http://127.0.0.1:1/", timeout_s=1)
    assert not caught.value.is_final


@pytest.mark.full(seconds=3)
def test_a_stop_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(OrderFailed, match=r"ran for over 3 s and was ended"):
        run_command(order("stop"), f"sleep 60 & echo $! > {shlex.quote(str(pid))}; wait", timeout_s=3)
    child = Path(f"/proc/{pid.read_text().strip()}/stat")
    until(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--webhook", "http://a.example/"], "give --host NAME, which they get as EAAS_HOST"),
        (["--webhook", "file:///etc/passwd", "--host", "x"], "an http:// or https:// address needed"),
        (["--webhook", "http://a.example/", "--host", "x", "--webhook-key-file", "KEY"], "use https://"),
        (["--webhook", "https://a.example/", "--host", "x", "--webhook-key-file", "NONE"], "cannot be read"),
        (["--webhook", "https://a.example/", "--host", "x", "--webhook-key-file", "EMPTY"], "holds no key"),
        (["--exec", "true", "--webhook-key-file", "KEY"], "there is no POST to send the key with"),
        (["--exec", "true", "--tries", "0"], "--tries 0: at least 1 is needed"),
    ],
)
def test_a_launcher_that_makes_no_sense_says_why(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "KEY").write_text("secret")
    (tmp_path / "EMPTY").write_text("\n")
    named = [str(tmp_path / flag) if flag in ("KEY", "NONE", "EMPTY") else flag for flag in flags]
    with pytest.raises(ValueError, match=message):
        Launcher.of(options(*named))


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_only_what_a_launcher_started_is_ended(tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = tmp_path / "ended"
    launcher = Launcher.of(options("--host", host, "--exec", f"echo $EAAS_PID >> {ended}"))
    monkeypatch.setattr(launcher, "_report", lambda pid, pool: None)
    foreign = subprocess.Popen(["sleep", "60"])
    ours = subprocess.Popen(["sleep", "60"], env={**os.environ, "EAAS_HOST": host_id()})
    try:
        # For a moment after the exec the kernel shows none.
        until(lambda: b"EAAS_HOST" in Path(f"/proc/{ours.pid}/environ").read_bytes())
        for pid in (-1, 0, 1, os.getpid(), foreign.pid, ours.pid, 1 << 22, (1 << 31) - 1):
            launcher._carry_out(launcher._order(StopProcess(host="", name="expert/1", pid=pid)))
    finally:
        for process in (foreign, ours):
            process.kill()
            process.wait()
    allowed = [1 << 22, (1 << 31) - 1] if host else [ours.pid]
    assert [int(line) for line in ended.read_text().splitlines()] == allowed
    launcher.close()


def test_a_start_by_webhook_is_given_up_before_the_router_orders_again(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Config.start_s > launching.START_TRIES_S
    monkeypatch.setattr(launching, "START_TRIES_S", 1.0)
    hook.answer = 503
    launcher = Launcher.of(options("--host", "cloud", "--webhook", hook.url, "--tries", "50"))
    given_up: list[str] = []
    monkeypatch.setattr(launcher, "_report", lambda pid, pool: given_up.append(pool))
    start = launcher._order(StartProcess(host="", pool="expert"))
    launcher._starting[start.key] = ("expert", 0.0)
    launcher._carry_out(start)
    assert given_up == ["expert"]
    assert 1 <= len(hook.seen) <= 2
    launcher.close()
