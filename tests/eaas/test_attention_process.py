"""The attention worker as a process, beside a router and expert servers that are processes too."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.make_model import make_model
from eaas.cluster.process import Child
from eaas.placement import StartFailed
from eaas.worker.__main__ import listen
from eaas.worker.protocol import (
    Failed,
    Hello,
    SamplingParams,
    Step,
    Submit,
    ToGateway,
    encode,
    for_gateway,
)
from experts.checkpoint import Checkpoint
from router.client import RouterClient
from tests.host_stalls import bounded

pytestmark = pytest.mark.alone

START_S = 60.0
# Refused before it is used: a real one would take over this process's signals.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny", "qwen3_moe", tmp_path_factory.mktemp("model"), seed=1)


class Cluster:
    """Children of this test; ended by pid."""

    def __init__(self, folder: Path, model: Path, experts: int) -> None:
        self.folder, self.model = folder, model
        self.children: list[Child] = []
        wanted = ("--experts", str(experts), "--replicas", str(experts))
        router = self.start("router", "--journal", str(folder / "journal"), *wanted)
        self.router = self.wait(router)

    def start(self, module: str, *arguments: str) -> Child:
        slot = len(self.children)
        child = Child.start(
            pool=module, slot=slot, module=module, arguments=arguments, log=self.folder / f"{slot}.log",
            environment={},
        )  # fmt: skip
        self.children.append(child)
        return child

    def wait(self, child: Child) -> str:
        end_s = time.monotonic() + START_S
        while child.ready is None:
            assert time.monotonic() < end_s, f"{child.pool}: {child.tail()}"
            starting = [other for other in self.children if other.ready_fd >= 0]
            for other in select.select([other.ready_fd for other in starting], [], [], 0.2)[0]:
                next(c for c in starting if c.ready_fd == other).read_ready()
        return child.address

    def expert(self) -> Child:
        return self.start("experts", "--router", self.router, "--model", str(self.model))

    def attention(self, *arguments: str) -> Child:
        fixed = ("--router", self.router, "--model", str(self.model), "--kv-tokens", "2048")
        return self.start("eaas.worker", *fixed, *arguments)

    def end(self) -> None:
        for child in self.children:
            child.send(signal.SIGCONT)
            child.send(signal.SIGKILL)
            child.reap()


@contextlib.contextmanager
def cluster(folder: Path, model: Path, experts: int) -> Iterator[Cluster]:
    made = Cluster(folder, model, experts)
    try:
        yield made
    finally:
        made.end()


class Gateway:
    """A gateway's connection to a worker."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.connection = socket.create_connection((host, int(port)), timeout=START_S)
        self.reader = for_gateway()
        self.arrived: list[ToGateway] = []
        self.hello = self.next()

    def submit(self, id: str, prompt: list[int], output: list[int] | None = None, **params: object) -> None:
        wanted = {"max_tokens": 40, "ignore_eos": True, "seed": 11, **params}
        sampling = SamplingParams(**wanted)  # type: ignore[arg-type]
        message = Submit(id=id, attempt=1, prompt=prompt, output=output or [], params=sampling)
        self.connection.sendall(encode(message))

    def next(self) -> ToGateway:
        while not self.arrived:
            data = self.connection.recv(65536)
            if not data:
                raise EOFError
            self.arrived += self.reader.feed(data)
        return self.arrived.pop(0)

    def tokens(self, id: str, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            message = self.next()
            assert isinstance(message, Step), message
            found += [token.token for token in message.tokens if token.id == id]
        return found


def recovered(gateway: Gateway) -> bool:
    """Whether it answers, once it has attached to the new server: that may be later than another worker has."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        gateway.submit("b", [1, 2, 3], max_tokens=3)
        count, message = 0, gateway.next()
        while isinstance(message, Step):
            count += len(message.tokens)
            if count == 3:
                return True
            message = gateway.next()
        assert isinstance(message, Failed) and message.code == "expert_lost", message
    return False


def exit_code(child: Child, timeout_s: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.process.wait(timeout_s)
    return None


def test_it_serves_loses_an_expert_server_and_leaves_in_order(tmp_path: Path, model: Path) -> None:
    """From start to end: a killed expert server changes nothing, and SIGTERM leaves nothing."""
    with cluster(tmp_path, model, 2) as world:
        attention = world.attention()
        time.sleep(0.3)
        attention.read_ready()
        assert attention.ready is None, "ready with no expert server"
        experts = [world.expert() for _ in range(2)]
        address = world.wait(attention)
        gateway = Gateway(address)
        hello = gateway.hello
        assert isinstance(hello, Hello)
        assert (hello.name, hello.kv_tokens) == (attention.name, 2048)
        assert hello.model_hash == Checkpoint.open(model).fingerprint
        prompt = list(range(3, 40))
        gateway.submit("calm", prompt)
        calm = gateway.tokens("calm", 40)

        for expert in experts:
            world.wait(expert)
        gateway.submit("storm", prompt)
        storm = gateway.tokens("storm", 5)
        experts[0].send(signal.SIGKILL)
        storm += gateway.tokens("storm", 35)
        assert storm == calm, "a killed expert server changed the tokens"
        gateway.submit("replay", prompt, output=calm[:17])
        assert gateway.tokens("replay", 23) == calm[17:]

        router = RouterClient(world.router)
        end_s = time.monotonic() + 60
        # Another look may be at a moment without tokens.
        while not (member := router.status().view.pool("attention")[0]).load.get("tokens_per_s"):
            gateway.submit("more", [1, 2])
            gateway.tokens("more", 40)
            assert time.monotonic() < end_s, "no load was reported"
        assert len(router.status().view.pool("attention")) == 1
        paces = {key for key in member.load if key.startswith(("servers_", "slow_"))}
        words = {"running", "waiting", "backlog_tokens", "queue_s", "kv_use", "busy", "tokens_per_s"}
        assert set(member.load) - paces == words
        assert 0 < member.load["busy"] <= 1
        assert sum(member.load[key] for key in paces if key.startswith("servers_")) >= 1
        assert member.state == "serving"

        gateway.submit("last", [1, 2], max_tokens=1500)
        gateway.next()
        with bounded(1.5):
            attention.send(signal.SIGTERM)
            with pytest.raises((EOFError, ConnectionResetError)):
                while True:
                    message = gateway.next()
                    if isinstance(message, Failed):
                        assert (message.id, message.code, message.retryable) == ("last", "shutting_down", True)
            assert exit_code(attention, START_S) == 0, attention.tail()
        assert router.status().view.pool("attention") == (), "it is still a member"
        router.close()


def test_a_step_stuck_without_experts_fails_at_its_deadline_or_ends_with_the_process(
    tmp_path: Path, model: Path
) -> None:
    with cluster(tmp_path, model, 1) as world:
        expert = world.expert()
        attention = world.attention("--deadline-s", "1")
        gateway = Gateway(world.wait(attention))
        expert.send(signal.SIGKILL)
        gateway.submit("a", [1, 2, 3])
        message = gateway.next()
        while isinstance(message, Step):
            message = gateway.next()
        assert isinstance(message, Failed)
        assert (message.id, message.code, message.retryable) == ("a", "expert_lost", True)
        stuck = world.attention("--deadline-s", "60")
        world.expert()
        other = Gateway(world.wait(stuck))
        assert recovered(gateway), "the worker did not recover"
        world.children[-1].send(signal.SIGKILL)
        other.submit("c", [1, 2, 3])
        time.sleep(0.3)
        stuck.send(signal.SIGTERM)
        assert exit_code(stuck, 30.0) == 0, stuck.tail()


def start_error(*arguments: str) -> str:
    read_fd, write_fd = os.pipe()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "eaas.worker", *arguments, "--ready-fd", str(write_fd)],
            pass_fds=(write_fd,),
            capture_output=True,
            timeout=START_S,
            check=False,
        )
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        report = json.loads(pipe.read())
    assert ended.returncode == 1, ended.stderr.decode()
    assert "Traceback" not in ended.stderr.decode()
    return report["error"]


def test_a_start_that_fails_says_why(tmp_path: Path, model: Path) -> None:
    usual = ["--router", "127.0.0.1:1", "--model", str(tmp_path)]
    assert str(tmp_path) in start_error(*usual)
    assert start_error(*usual, "--kv-tokens", "3") == "--kv-tokens 3: at least 16 is needed."


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=f"Port {port} cannot be used: .*Choose another with --port"):
            listen("127.0.0.1", port)


def test_experts_that_never_come_are_named(tmp_path: Path, model: Path) -> None:
    with cluster(tmp_path, model, 1) as world:
        error = start_error("--router", world.router, "--model", str(model), "--start-s", "0.3")
    assert "experts are on no server that can be reached. Expert servers: none." in error
