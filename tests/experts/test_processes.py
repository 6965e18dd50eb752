"""Promises of the expert service kept by real processes over shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from experts.backend import ExpertsLost
from experts.client import ExpertClient
from experts.model import CHOICES, Dtype
from p2p.local import ShmEndpoint
from router import bitmap
from router.view import Member, View
from tests.experts.exchange import exchange
from tests.experts.steps import Weights, shape_of, to_bits
from tests.host_stalls import HostStalls, bounded

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
FINGERPRINT = "0123456789abcdef" * 4
SEED = 77
SIZES = {"hidden": 128, "intermediate": 96, "experts": 8, "top_k": 2}


def settle(client: ExpertClient, view: View) -> None:
    """Apply a View and wait until its routes are in use."""
    client.apply_view(view)
    end_s = time.monotonic() + 60
    while client.adopted_epoch < view.epoch and time.monotonic() < end_s:
        time.sleep(0.002)
    assert client.adopted_epoch == view.epoch, client.attached


class Process:
    """One expert server in a process of its own."""

    def __init__(self, incarnation: int, held: set[tuple[int, int]], dtype: Dtype, lanes: int = 1) -> None:
        self.incarnation, self.held = incarnation, held
        order = {
            "seed": SEED,
            "incarnation": incarnation,
            "held": sorted(held),
            "dtype": int(dtype),
            "lanes": lanes,
            "shape": SIZES,
            "fingerprint": FINGERPRINT,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.experts.serve_experts", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.address = ""

    def ready(self) -> None:
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the server did not start"

    def tell(self, line: str) -> int:
        """Have it obey; clients attached."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def member(self) -> Member:
        bits = bitmap.of_pairs(self.held, SIZES["experts"])
        serving = bitmap.to_bytes(bits, 2, SIZES["experts"])
        return Member(
            name=f"expert/{self.incarnation}",
            pool="expert",
            state="serving",
            incarnation=self.incarnation,
            address=self.address,
            pid=self.process.pid,
            host="here",
            target=serving,
            serving=serving,
        )


class Cluster:
    """Servers, views and the reference."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        self.shape = shape_of(**SIZES)
        self.weights = Weights(self.shape, dtype, SEED)
        self.servers: list[Process] = []
        self.clients: list[ExpertClient] = []
        self.endpoints: list[ShmEndpoint] = []
        self.epoch = 0

    def start(self, count: int, replicas: int, lanes: int = 1) -> list[Process]:
        """`count` servers with every expert on `replicas` of them."""
        every = [(layer, expert) for layer in range(2) for expert in range(SIZES["experts"])]
        held: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        for number, key in enumerate(every):
            for copy in range(replicas):
                held[(number + copy) % count].add(key)
        first = 1 + len(self.servers)
        new = [Process(first + i, held[i], self.dtype, lanes) for i in range(count)]
        self.servers += new
        for server in new:
            server.ready()
        return new

    def view(self, without: tuple[Process, ...] = ()) -> View:
        self.epoch += 1
        members = tuple(server.member() for server in self.servers if server not in without)
        return View(term=1, epoch=self.epoch, replicas_wanted=1, layers=2, experts=SIZES["experts"], members=members)

    def client(self, lanes: int = 1, max_tokens: int = 64) -> ExpertClient:
        number = 1000 + len(self.clients)
        endpoint = ShmEndpoint(f"attention/{number}", number, lanes)
        client = ExpertClient(
            endpoint=endpoint,
            shape=self.shape,
            dtype=self.dtype,
            model_hash=FINGERPRINT,
            incarnation=number,
            cores=(-1,) * lanes,
            max_tokens=max_tokens,
        )
        self.endpoints.append(endpoint)
        self.clients.append(client)
        return client

    def check(self, client: ExpertClient, rng: np.random.Generator, n: int, deadline_s: float = 20.0) -> float:
        """One call with the reference's bits; its seconds."""
        rows = to_bits(rng.standard_normal((n, SIZES["hidden"])), self.dtype)
        ids = np.stack([rng.permutation(SIZES["experts"])[: SIZES["top_k"]] for _ in range(n)]).astype(np.uint16)
        gates = rng.random((n, SIZES["top_k"]), dtype=np.float32)
        layer = int(rng.integers(2))
        out = rng.standard_normal((n, SIZES["hidden"])).astype(np.float32)
        wanted = self.weights.reference(layer, rows, ids, gates, out)
        began_s = time.monotonic()
        out += exchange(client, layer, rows, ids, gates, deadline_s)
        took_s = time.monotonic() - began_s
        assert out.tobytes() == wanted.tobytes()
        return took_s

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for endpoint in self.endpoints:
            endpoint.close()
        for server in self.servers:
            server.process.send_signal(signal.SIGCONT) if server.process.poll() is None else None
            assert server.process.stdin
            server.process.stdin.close()
        for server in self.servers:
            server.process.wait(timeout=60)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(Dtype.BFLOAT16)
    yield made
    made.close()


@pytest.mark.parametrize(("servers", "replicas", "lanes"), [(1, 1, 2), (4, 2, 1)])
def test_any_layout_of_processes_gives_the_bits_of_one(
    cluster: Cluster, servers: int, replicas: int, lanes: int
) -> None:
    cluster.start(servers, replicas, lanes)
    rng = np.random.default_rng(servers)
    for client in (cluster.client(lanes=1), cluster.client(lanes=2)):
        settle(client, cluster.view())
        for n in (1, 3, 17, 64):
            cluster.check(client, rng, n)


def test_a_prefill_of_600_rows_goes_in_chunks(cluster: Cluster) -> None:
    cluster.start(2, 1)
    client = cluster.client(max_tokens=600)
    settle(client, cluster.view())
    for seed in range(3):
        cluster.check(client, np.random.default_rng(seed), 600)
    assert all(stats.calls >= 3 for stats in client.stats().values())


@pytest.mark.parametrize("dtype", CHOICES)
def test_a_server_killed_during_calls_changes_no_bit(dtype: Dtype) -> None:
    # On a quiet machine the loss costs about 5 ms.
    cluster = Cluster(dtype)
    servers = cluster.start(3, 2)
    client = cluster.client()
    settle(client, cluster.view())
    rng = np.random.default_rng(1)
    for _ in range(5):
        cluster.check(client, rng, 20)
    killer = threading.Timer(0.05, os.kill, (servers[1].process.pid, signal.SIGKILL))
    killer.start()
    with HostStalls() as stalls:
        slowest_s = max(cluster.check(client, rng, int(rng.integers(1, 60))) for _ in range(60))
    assert slowest_s < 1.0 + stalls.seconds, (slowest_s, stalls.seconds)
    killer.join()
    client.apply_view(cluster.view(without=(servers[1],)))
    assert client.attached == ("expert/1", "expert/3")
    cluster.check(client, rng, 20)
    cluster.close()


def test_a_frozen_server_changes_no_bit_and_comes_back(cluster: Cluster) -> None:
    servers = cluster.start(2, 2)
    client = cluster.client()
    settle(client, cluster.view())
    rng = np.random.default_rng(2)
    for _ in range(10):
        cluster.check(client, rng, 20)
    os.kill(servers[0].process.pid, signal.SIGSTOP)
    for _ in range(20):
        cluster.check(client, rng, 20)
    frozen = next(iter(client.stats().values()))
    assert frozen.held_slots >= 1
    os.kill(servers[0].process.pid, signal.SIGCONT)
    waited_s = 0.0
    while next(iter(client.stats().values())).held_slots and waited_s < 60:
        cluster.check(client, rng, 20)
        time.sleep(0.02)
        waited_s += 0.02
    assert next(iter(client.stats().values())).held_slots == 0
    end_s = time.monotonic() + 60
    while next(iter(client.stats().values())).calls <= frozen.calls:
        cluster.check(client, rng, 20)
        assert time.monotonic() < end_s, "it is not asked again"


def test_the_last_replica_lost_is_said_at_the_deadline_and_new_routes_heal_it(cluster: Cluster) -> None:
    (server,) = cluster.start(1, 1)
    client = cluster.client()
    settle(client, cluster.view())
    rng = np.random.default_rng(3)
    cluster.check(client, rng, 5)
    server.process.kill()
    began_s = time.monotonic()
    with bounded(0.6), pytest.raises(ExpertsLost, match="No live replica"):
        cluster.check(client, rng, 5, deadline_s=0.3)
    assert time.monotonic() - began_s >= 0.3
    cluster.start(1, 1)
    # Published while a call waits.
    later = threading.Timer(0.2, client.apply_view, (cluster.view(without=(server,)),))
    later.start()
    cluster.check(client, rng, 5)
    later.join()
    cluster.check(client, rng, 5)


def test_views_published_during_calls_move_experts_without_a_wrong_bit(cluster: Cluster) -> None:
    first, second = cluster.start(2, 2)
    client, other = cluster.client(), cluster.client()
    for each in (client, other):
        settle(each, cluster.view())
    stop = threading.Event()
    failures: list[BaseException] = []

    def call(each: ExpertClient, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                cluster.check(each, rng, int(rng.integers(1, 40)))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=call, args=(each, i)) for i, each in enumerate((client, other))]
    for thread in threads:
        thread.start()
    for turn in range(8):
        leaving = (first, second)[turn % 2]
        view = cluster.view(without=(leaving,))
        for each in (client, other):
            each.apply_view(view)
        waiting_s = 0.0
        while min(client.adopted_epoch, other.adopted_epoch) < view.epoch and waiting_s < 60:
            time.sleep(0.005)
            waiting_s += 0.005
        assert min(client.adopted_epoch, other.adopted_epoch) == view.epoch
        for key in sorted(leaving.held)[:4]:
            leaving.tell(f"drop {key[0]} {key[1]}")
            leaving.tell(f"hold {key[0]} {key[1]}")
        view = cluster.view()
        for each in (client, other):
            each.apply_view(view)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_the_windows_of_a_client_that_goes_are_freed(cluster: Cluster) -> None:
    (server,) = cluster.start(1, 1)
    client = cluster.client()
    settle(client, cluster.view())
    assert server.tell("clients") == 1
    # A client that is killed hangs up just so: the kernel closes its sockets.
    cluster.endpoints[0].close()
    waited_s = 0.0
    while server.tell("clients") and waited_s < 60:
        time.sleep(0.02)
        waited_s += 0.02
    assert server.tell("clients") == 0


def test_a_client_of_another_model_is_refused_and_told_why(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.start(1, 1)
    endpoint = ShmEndpoint("attention/9", 9, 1)
    other = ExpertClient(
        endpoint=endpoint, shape=cluster.shape, dtype=Dtype.BFLOAT16, model_hash="ff" * 32, incarnation=9
    )
    other.apply_view(cluster.view())
    end_s = time.monotonic() + 60
    while "attach_failed" not in caplog.text and time.monotonic() < end_s:
        time.sleep(0.01)
    assert other.attached == ()
    assert "FAILED_PRECONDITION" in caplog.text and "model" in caplog.text
    other.close()
    endpoint.close()
