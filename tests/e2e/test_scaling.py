"""Pools grow, shrink and vanish while clients stream, and no client can tell."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from router.client import RouterClient
from router.view import ATTENTION, EXPERT, GATEWAY, Member
from tests.e2e.clients import Seen, stream_all
from tests.e2e.waiting import wait_for

CLIENTS, TOKENS = 8, 96
PROMPTS = [f"{'word ' * (number % 5)}client {number} asks" for number in range(CLIENTS)]
# Shorter than the streams last together, so that some are cut off and go on elsewhere.
DRAIN_S = 0.5


class Scaled:
    """A cluster whose pools a test changes, and its router's word on them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.router = RouterClient(cluster.router_address)

    def close(self) -> None:
        self.router.close()

    def members(self, pool: str) -> tuple[Member, ...]:
        return self.router.status().view.pool(pool)

    def load(self, pool: str, word: str) -> float:
        return sum(member.load.get(word, 0.0) for member in self.members(pool))

    def scale(self, pool: str, wanted: int, drain_s: float = 30.0) -> None:
        """Change a pool and wait until it is so: as many serve, and no more processes are there."""
        self.router.scale(pool, wanted, drain_s)

        def done() -> bool:
            names = [member.name for member in self.members(pool) if member.state == "serving"]
            running = [name for name in self.cluster.pids() if name.startswith(pool)]
            sizes = self.router.status().pools[pool]
            return len(names) == wanted and sorted(names) == sorted(running) and not sizes.is_scaling

        wait_for(f"{wanted} in pool {pool}", done)


@contextlib.contextmanager
def scaled(tiny: Path, **sizes: int) -> Iterator[Scaled]:
    config = ClusterConfig(model=tiny, served_model_name="tiny", port=0, cores=(0, 1), **sizes)
    with LocalCluster(config) as cluster, contextlib.closing(Scaled(cluster)) as made:
        yield made


def stream(cluster: LocalCluster) -> list[list[str]]:
    """What every client saw; none may have failed."""
    return texts_of(stream_all(cluster.url, "tiny", PROMPTS, TOKENS))


def texts_of(seen: list[Seen]) -> list[list[str]]:
    assert [one.error for one in seen] == [None] * CLIENTS
    assert [one.finish for one in seen] == [["length"]] * CLIENTS
    return [one.texts for one in seen]


class InBackground:
    """Streams all clients on a thread: once, or again and again until `result` is asked for."""

    def __init__(self, cluster: LocalCluster, *, repeat: bool = False) -> None:
        self._cluster, self._repeat = cluster, repeat
        self._ended = threading.Event()
        self._seen: list[list[Seen]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._seen.append(stream_all(self._cluster.url, "tiny", PROMPTS, TOKENS))
            if not self._repeat or self._ended.is_set():
                return

    def result(self) -> list[list[list[str]]]:
        """The texts of every round."""
        self._ended.set()
        self._thread.join()
        return [texts_of(seen) for seen in self._seen]


@pytest.fixture(scope="module")
def calm(cluster: LocalCluster) -> list[list[str]]:
    """What every client sees when nothing changes."""
    return stream(cluster)


def test_pools_grow_and_shrink_under_streams_and_no_token_changes(cluster: LocalCluster, calm: list[list[str]]) -> None:
    with contextlib.closing(Scaled(cluster)) as world:
        gone_before = set(world.router.status().gone)
        clients = InBackground(cluster, repeat=True)
        try:
            world.scale(EXPERT, 1)
            world.scale(ATTENTION, 3)

            def all_work() -> bool:
                loads = [member.load.get("tokens_per_s", 0.0) for member in world.members(ATTENTION)]
                return len(loads) == 3 and all(loads)

            wait_for("load on all three attention workers", all_work)
            world.scale(EXPERT, 5)
            world.scale(ATTENTION, 1, drain_s=DRAIN_S)
        finally:
            rounds = clients.result()
        for number, texts in enumerate(rounds):
            assert texts == calm, f"round {number} of {len(rounds)}: tokens changed"
        reasons = {gone.reason for gone in set(world.router.status().gone) - gone_before}
        assert reasons <= {"drained", "its time to drain was over"}, reasons


@pytest.mark.full(seconds=10)
def test_requests_wait_for_pools_that_were_scaled_to_nothing(tiny: Path, calm: list[list[str]]) -> None:
    with scaled(tiny, experts=2, attention=1, replicas=2) as world:
        assert stream(world.cluster) == calm
        world.scale(ATTENTION, 0)
        world.scale(EXPERT, 0)
        assert set(world.cluster.pids()) == {"router/0", "gateway/1"}
        with urllib.request.urlopen(f"{world.cluster.url}/v1/models", timeout=60) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["tiny"]
        clients = InBackground(world.cluster)
        wait_for("the queue in the gateway's load", lambda: world.load(GATEWAY, "waiting") == CLIENTS)
        assert world.load(GATEWAY, "backlog_tokens") > CLIENTS * TOKENS
        world.scale(EXPERT, 2)
        world.scale(ATTENTION, 1)
        assert clients.result() == [calm]
        wait_for("an empty queue", lambda: world.load(GATEWAY, "waiting") == 0)


@pytest.mark.full(seconds=12)
def test_requests_at_an_attention_worker_wait_for_expert_servers(tiny: Path, calm: list[list[str]]) -> None:
    with scaled(tiny, experts=1, attention=1, replicas=1) as world:
        world.scale(EXPERT, 0)
        clients = InBackground(world.cluster)
        wait_for("the requests' work", lambda: world.load(ATTENTION, "running") > 0)
        # Longer than a lease: nobody is fenced for waiting.
        time.sleep(3)
        assert [member.name for member in world.members(ATTENTION)] == ["attention/1"]
        world.scale(EXPERT, 1)
        assert clients.result() == [calm]


@pytest.mark.full(seconds=8)
def test_a_cluster_begins_with_nothing_and_serves_what_queued_when_it_grows(tiny: Path, calm: list[list[str]]) -> None:
    with scaled(tiny, experts=0, attention=0, replicas=2) as world:
        assert set(world.cluster.pids()) == {"router/0", "gateway/1"}
        state = fetch_status(world.cluster.url)
        assert state["gateway"]["ready"] is False
        clients = InBackground(world.cluster)
        wait_for("the queue in the gateway's load", lambda: world.load(GATEWAY, "waiting") == CLIENTS)
        # The attention worker comes first, and takes requests before there is an expert.
        world.scale(ATTENTION, 1)
        world.scale(EXPERT, 3)
        assert clients.result() == [calm]
        assert fetch_status(world.cluster.url)["replicas_min"] == 2
