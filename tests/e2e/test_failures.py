"""A failure behind the gateway changes nothing that a client can see."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import openai
import pytest

from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from router.client import RouterClient
from tests.e2e.clients import Seen, stream_all
from tests.e2e.waiting import wait_for

CLIENTS, TOKENS = 16, 48
PROMPTS = [f"{'word ' * (number % 7)}client {number} asks" for number in range(CLIENTS)]


@pytest.fixture(scope="module")
def calm(cluster: LocalCluster) -> list[Seen]:
    """What every client sees when nothing fails."""
    seen = stream_all(cluster.url, "tiny", PROMPTS, TOKENS)
    assert_whole(seen)
    return seen


def assert_whole(seen: list[Seen]) -> None:
    assert [one.error for one in seen] == [None] * len(seen)
    assert [one.finish for one in seen] == [["length"]] * len(seen)
    assert [len(one.texts) for one in seen] == [TOKENS] * len(seen)


def whole_pool(cluster: LocalCluster, servers: int = 4, replicas: int = 2, lost: str = "") -> bool:
    """Whether so many serve. lost: one that must not be among them: the router hears of its end a moment later."""
    state = fetch_status(cluster.url)
    serving = [m["name"] for m in state["members"] if m["pool"] == "expert" and m["state"] == "serving"]
    return len(serving) == servers and state["replicas_min"] >= replicas and lost not in serving


def strike(cluster: LocalCluster, pool: str, number: signal.Signals, seed: int) -> tuple[list[Seen], str]:
    """Stream all clients and hit a random member of `pool` at a random point of the progress."""
    rng = random.Random(seed)
    at = rng.randrange(CLIENTS, CLIENTS * TOKENS * 3 // 4)
    names = sorted(name for name in cluster.pids() if name.startswith(f"{pool}/"))
    victim = rng.choice(names)
    pid = cluster.pids()[victim]

    def on_token(count: int) -> None:
        if count == at:
            os.kill(pid, number)

    return stream_all(cluster.url, "tiny", PROMPTS, TOKENS, on_token), victim


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full(seconds=5)) for seed in (1, 2))])
def test_killing_an_expert_server_changes_nothing(cluster: LocalCluster, calm: list[Seen], seed: int) -> None:
    wait_for("a whole pool", lambda: whole_pool(cluster), cluster)
    struck, victim = strike(cluster, "expert", signal.SIGKILL, seed)
    assert_whole(struck)
    assert [one.texts for one in struck] == [one.texts for one in calm], f"seed {seed}: {victim} killed, tokens changed"
    replaced = f"4 serving members without {victim}, with 2 replicas of every expert"
    wait_for(replaced, lambda: whole_pool(cluster, lost=victim), cluster)


def test_a_frozen_expert_server_changes_nothing(cluster: LocalCluster, calm: list[Seen]) -> None:
    wait_for("a whole pool", lambda: whole_pool(cluster), cluster)
    struck, victim = strike(cluster, "expert", signal.SIGSTOP, seed=7)
    assert_whole(struck)
    assert [one.texts for one in struck] == [one.texts for one in calm], f"{victim} frozen, tokens changed"
    wait_for(f"4 serving members without {victim}", lambda: whole_pool(cluster, lost=victim), cluster)


def test_killing_the_attention_worker_changes_nothing(cluster: LocalCluster, calm: list[Seen]) -> None:
    struck, victim = strike(cluster, "attention", signal.SIGKILL, seed=11)
    assert_whole(struck)
    assert [one.texts for one in struck] == [one.texts for one in calm], f"{victim} killed, tokens changed"


def test_killing_the_router_changes_nothing(cluster: LocalCluster, calm: list[Seen]) -> None:
    epoch = fetch_status(cluster.url)["epoch"]
    struck, _ = strike(cluster, "router", signal.SIGKILL, seed=13)
    assert_whole(struck)
    assert [one.texts for one in struck] == [one.texts for one in calm], "router killed, tokens changed"
    wait_for("the router's return", lambda: "router/0" in cluster.pids(), cluster)
    wait_for("a higher epoch", lambda: fetch_status(cluster.url)["epoch"] > epoch, cluster)
    wait_for("a whole pool", lambda: whole_pool(cluster), cluster)
    # The new router repairs as the old one did.
    struck, victim = strike(cluster, "expert", signal.SIGKILL, seed=17)
    assert [one.texts for one in struck] == [one.texts for one in calm]
    wait_for("4 serving members under the new router", lambda: whole_pool(cluster, lost=victim), cluster)


def test_a_frozen_gateway_goes_on_where_it_was(cluster: LocalCluster, calm: list[Seen]) -> None:
    """Frozen for longer than its lease, it is no member any more when it wakes; its streams are its own."""

    def thaw() -> None:
        wait_for("the end of its membership", lambda: not router.status().view.pool("gateway"), cluster)
        os.kill(pid, signal.SIGCONT)

    def on_token(count: int) -> None:
        if count == CLIENTS * TOKENS // 3:
            os.kill(pid, signal.SIGSTOP)
            thawing.start()

    (name,) = [name for name in cluster.pids() if name.startswith("gateway/")]
    pid = cluster.pids()[name]
    router, thawing = RouterClient(cluster.router_address), threading.Thread(target=thaw)
    try:
        struck = stream_all(cluster.url, "tiny", PROMPTS, TOKENS, on_token)
        thawing.join()
        assert [one.texts for one in struck] == [one.texts for one in calm], "gateway frozen, tokens changed"
        wait_for("another membership", lambda: len(router.status().view.pool("gateway")) == 1, cluster)
        assert cluster.pids()[name] == pid, "the gateway was ended"
    finally:
        os.kill(pid, signal.SIGCONT)
        router.close()


def test_a_hung_router_is_replaced(cluster: LocalCluster, calm: list[Seen]) -> None:
    hung = cluster.pids()["router/0"]
    struck, _ = strike(cluster, "router", signal.SIGSTOP, seed=19)
    assert [one.texts for one in struck] == [one.texts for one in calm], "router frozen, tokens changed"
    wait_for("another router", lambda: cluster.pids().get("router/0", hung) != hung, cluster)
    wait_for("a whole pool", lambda: whole_pool(cluster), cluster)


@pytest.mark.full(seconds=5)
def test_a_client_that_goes_away_frees_everything(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=30)

    seen_running = threading.Event()

    def begun() -> openai.Stream[openai.types.Completion]:
        return client.completions.create(
            model="tiny",
            prompt="go on",
            max_tokens=1900,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )

    def leave_early() -> None:
        stream = begun()
        next(iter(stream))
        seen_running.wait(60)
        stream.close()

    def stay() -> None:
        for _ in begun():
            pass

    workers = [pid for name, pid in cluster.pids().items() if name.startswith("attention")]
    began_s = time.monotonic()
    readers = [threading.Thread(target=stay) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    natural_s = time.monotonic() - began_s

    threads = [threading.Thread(target=leave_early) for _ in range(8)]
    for thread in threads:
        thread.start()

    def held() -> list[float]:
        members = fetch_status(cluster.url)["members"]
        loads = [m["load"] for m in members if m["pool"] == "attention"]
        return [load.get("running", 0) + load.get("waiting", 0) for load in loads]

    wait_for("requests in the attention worker", lambda: sum(held()) > 0, cluster)
    seen_running.set()
    for thread in threads:
        thread.join()
    took_s = wait_for("no request left in the attention worker", lambda: sum(held()) == 0, cluster)
    assert took_s < natural_s / 2, f"{took_s:.1f} s, and {natural_s:.1f} s had they gone on"
    assert [pid for name, pid in cluster.pids().items() if name.startswith("attention")] == workers
