"""`eaas serve --on ray` on a real Ray cluster of three nodes, each in a network namespace of its own."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.hosts.network import Network, refusal
from eaas.ops.credentials import make_certs
from tests.eaas.gateway_world import eventually

pytestmark = [
    pytest.mark.alone,
    pytest.mark.full(seconds=60),
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "-"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray (eaas[ray]), found none"),
]

ROOT = Path(__file__).resolve().parents[2]
STREAMS, TOKENS, PORT = 6, 400, 8000
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


class Node:
    """A host of a network."""

    def __init__(self, network: Network, host: str, folder: Path) -> None:
        self.network, self.host = network, host
        self.address = network.address(host, "eth0")
        self.folder = folder / host

    def command(self, *words: str) -> list[str]:
        return [*self.network.inside(self.host), sys.executable, "-m", *words]

    def start_ray(self, head: Node) -> None:
        join = ["--head", "--port=6379", "--include-dashboard=false"]
        if self is not head:
            join = [f"--address={head.address}:6379"]
        asked = [f"--node-ip-address={self.address}", "--num-cpus=4", "--object-store-memory=80000000"]
        words = ["ray.scripts.scripts", "start", *join, *asked, f"--temp-dir={self.folder}"]
        # Ray gives a node 30 s to start, which a busy host may need.
        for _ in range(3):
            done = subprocess.run(
                self.command(*words),
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
            )
            if done.returncode == 0:
                return
            self.kill()
        pytest.fail(done.stdout)

    def lose_power(self) -> None:
        """The node says nothing more, not even that its connections have ended."""
        self.network.unplug(self.host, "eth0")
        self.kill()

    def kill(self) -> None:
        """End every process of the node."""
        while pids := self.network.processes(self.host):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def inside(self, act: Callable[[], T]) -> T:
        """What `act` returns, or raises, on a thread in this namespace."""
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                with self.network.space(self.host).open("rb") as space:
                    libc = ctypes.CDLL(None, use_errno=True)
                    assert libc.setns(space.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
                found.append(act())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(timeout=180)
        if failed:
            raise failed[0]
        return found[0]


class World:
    """Three nodes of a Ray cluster, of which the first is the head and has the endpoint; a fourth can join."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.folder = folder
        self.nodes = [Node(network, host, folder) for host in network.hosts]
        self.head = self.nodes[0]
        make_certs(folder / "certs", hosts=["127.0.0.1"])
        self.log = folder / "serve.log"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(folder / "state"),
            "RAY_ADDRESS": f"{self.head.address}:6379",
        }

    def eaas(self, *words: str, output: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.head.command("eaas.ops.cli", *words),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def serve(self) -> subprocess.Popen[str]:
        sizes = ["--experts", "3", "--replicas", "2", "--attention", "2", "--port", str(PORT)]
        secured = ["--tls-dir", str(self.folder / "certs"), "--transport", "nixl", "--trust-network"]
        with self.log.open("w") as log:
            serving = self.eaas("serve", "--on", "ray", *sizes, *secured, output=log)
        eventually(lambda: "ready demo" in self.said() or serving.poll() is not None, "ready", 120)
        assert serving.poll() is None, self.said()
        return serving

    def said(self) -> str:
        return self.log.read_text()

    def status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/status", timeout=30) as answer:
                return json.load(answer)

        return self.head.inside(ask)

    def members(self, pool: str) -> Counter[str]:
        """How many members of a pool serve, by the address of their node."""
        found = [m for m in self.status()["members"] if m["pool"] == pool and m["state"] == "serving"]
        return Counter(member["address"].rpartition(":")[0] for member in found)

    def is_whole(self, experts: int) -> bool:
        state = self.status()
        return (
            self.members("expert").total() == experts
            and self.members("attention").total() == 2
            and state["replicas_min"] == 2
        )


class Streams:
    """Greedy streams side by side, each on a thread; texts, and what went wrong with any."""

    def __init__(self, node: Node) -> None:
        self.texts = [""] * STREAMS
        self.failures: list[str] = []
        self.events = 0
        self._threads = [
            threading.Thread(target=node.inside, args=(lambda n=n: self._run(n),), daemon=True) for n in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        asked = {"model": "demo", "prompt": f"ROMEO {number}:\n", "max_tokens": TOKENS, "temperature": 0}
        body = json.dumps(asked | {"stream": True, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/completions", body, {"content-type": "application/json"}
        )
        ended = False
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                for line in answer:
                    if not line.startswith(b"data: "):
                        continue
                    if ended := line.strip() == b"data: [DONE]":
                        break
                    self.texts[number] += json.loads(line[6:])["choices"][0]["text"]
                    self.events += 1
        except Exception as error:
            self.failures.append(f"stream {number}: {error!r}")
        if not ended:
            self.failures.append(f"stream {number} ended before its end, after {self.texts[number]!r}")

    def end(self) -> list[str]:
        for thread in self._threads:
            thread.join(timeout=180)
        return self.texts


@pytest.fixture
def world() -> Iterator[World]:
    # A short path: names of sockets have 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        Network(["first", "second", "third", "fourth"], ["eth0"]) as network,
    ):
        world = World(network, Path(folder))
        for node in world.nodes[:3]:
            node.start_ray(world.head)
        yield world


def test_other_nodes_are_refused_without_tls(world: World) -> None:
    refused = world.eaas("serve", "--on", "ray", "--port", str(PORT))
    said, _ = refused.communicate(timeout=60)
    assert refused.returncode == 1, said
    assert "3 nodes found, and between them TLS and --transport nixl are needed" in " ".join(said.split())


@pytest.mark.parametrize("die", [Node.kill, Node.lose_power])
def test_a_node_that_dies_fails_no_stream_and_its_members_come_back_on_others(
    world: World, die: Callable[[Node], None]
) -> None:
    serving = world.serve()
    first, second, third, fourth = (node.address for node in world.nodes)
    spread = world.members("expert")
    assert spread == Counter((first, second, third)), f"{spread}: one expert server on each node is needed"
    calm = Streams(world.head)
    texts = calm.end()
    assert not calm.failures and all(texts), calm.failures

    # The one node of the two others that has an attention worker too: streams lose both sides of theirs.
    lost = next(node for node in world.nodes[1:3] if node.address in world.members("attention"))
    streams = Streams(world.head)
    eventually(lambda: streams.events > calm.events // 8, "an eighth of the tokens")
    killed_s, at = time.monotonic(), streams.events
    die(lost)
    assert streams.events < calm.events, "the streams had ended before the node died"
    assert streams.end() == texts, f"after a node died at event {at} of {calm.events}"
    assert not streams.failures

    eventually(lambda: world.is_whole(3), f"whole again: {world.said()}", timeout_s=120)
    print(f"{die.__name__}: whole {time.monotonic() - killed_s:.1f} s after the node died")
    assert lost.address not in {*world.members("expert"), *world.members("attention")}

    world.nodes[3].start_ray(world.head)
    grown = world.eaas("scale", "expert", "4", "--tls-dir", str(world.folder / "certs"), "--url", f"127.0.0.1:{PORT}")
    said, _ = grown.communicate(timeout=60)
    assert grown.returncode == 0, said
    eventually(lambda: world.is_whole(4), f"a fourth server: {world.said()}", timeout_s=120)
    assert world.members("expert")[fourth] == 1, f"{world.members('expert')}: one on {fourth} is needed"

    again = Streams(world.head)
    assert again.end() == texts and not again.failures

    serving.terminate()
    assert serving.wait(timeout=30) == 0, world.said()
    eventually(lambda: not _computing(world), "all processes ended", timeout_s=10)


def _computing(world: World) -> list[str]:
    """Command lines of processes of the cluster that are left on any node."""
    found: list[str] = []
    for node in world.nodes:
        for pid in node.network.processes(node.host):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found += [node.address] if words[1:3] == [b"-m", b"eaas"] else []
    return found
