"""Streams over two gateways outlive either of them: killed or frozen, no client sees anything but a pause."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.worker.runs import GRACE_S
from tests.e2e.resume_trial import Asked, Seen, counters, gateways, judged, run, stream, table
from tests.e2e.waiting import wait_for

STREAMS = 8


@pytest.fixture(scope="module")
def two(tiny: Path) -> Iterator[LocalCluster]:
    # One that is frozen is a member for as long as its lease: time in which the other can be asked on a busy host.
    config = ClusterConfig(
        model=tiny, served_model_name="tiny", experts=2, port=0, gateways=2, cores=(0, 1), lease_s=6.0
    )
    with LocalCluster(config) as running:
        yield running


@pytest.mark.parametrize(("streams", "kills"), [(12, 3), pytest.param(40, 8, marks=pytest.mark.full(seconds=60))])
def test_gateways_are_killed_under_streams_of_every_kind_and_no_client_is_told(
    two: LocalCluster, streams: int, kills: int
) -> None:
    seed = time.time_ns()
    trial = run(two, seed, streams=streams, kills=kills, most_s=0.5)
    assert not trial.wrong, f"seed {seed}\n{table(trial)}\n" + "\n".join(trial.wrong)
    assert trial.kills >= kills and len(trial.streams) >= streams
    assert trial.cut, f"seed {seed}: no stream was cut\n{table(trial)}"


class Streams:
    """Long streams, whose clients read them as they come: one that reads slowly is paused, and then computed again."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster, self._pool = cluster, ThreadPoolExecutor(STREAMS)
        self._begun: list[int] = [0] * STREAMS
        self._reading = [self._pool.submit(self._read, number) for number in range(STREAMS)]
        wait_for("all streams have begun", lambda: min(self._begun) > 1, cluster)

    def _read(self, number: int) -> Seen:
        def tell() -> None:
            self._begun[number] += 1

        asked: Asked = (
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": f"{number} goes on",
                # Many more than are made while a test looks around.
                "max_tokens": 1000,
                "stream": True,
                "ignore_eos": True,
            },
        )
        return stream(self._cluster.url, "httpx", asked, tell)

    def ended(self) -> list[Seen]:
        """What their clients saw, once all have ended."""
        seen = [reading.result() for reading in self._reading]
        self._pool.shutdown()
        return seen


def at_each(cluster: LocalCluster, kept: ExitStack) -> dict[int, httpx.Client]:
    """A connection to each gateway, by its pid: whichever takes one keeps it."""
    found: dict[int, httpx.Client] = {}

    def all_met() -> bool:
        client = kept.enter_context(httpx.Client(base_url=cluster.url, timeout=30))
        found.setdefault(client.get("/status").json()["gateway"]["pid"], client)
        return len(found) == cluster.config.gateways

    wait_for("a connection to each gateway", all_met, cluster)
    return found


def test_a_stream_whose_gateway_is_killed_costs_no_token_and_no_prompt_again(two: LocalCluster) -> None:
    wait_for("both gateways", lambda: len(gateways(two)) == 2, two)
    with ExitStack() as kept:
        at = at_each(two, kept)
        streams = Streams(two)
        running = {pid: client.get("/status").json()["gateway"]["running"] for pid, client in at.items()}
        victim = max(running, key=lambda pid: running[pid])
        (other,) = at.keys() - {victim}

        def told_of_all() -> bool:
            # Workers count a prompt as its request begins to run, and say so later, with their load.
            return f'vllm:num_requests_running{{model_name="tiny"}} {STREAMS}.0' in at[other].get("/metrics").text

        wait_for("the worker's word of all streams", told_of_all, two)
        before = counters(at[other])
        os.kill(victim, signal.SIGKILL)
        seen = streams.ended()
        wrong = [word for word in (one.error for one in seen) if word]
        assert not wrong, wrong
        assert sum(one.tries > 1 for one in seen) == running[victim]

        def grew() -> dict[str, int]:
            return dict(counters(at[other]) - before)

        def heard() -> bool:
            # A worker says so with its load, once it is idle too.
            return grew().get("eaas_runs_joined_total", 0) + grew().get("eaas_runs_kept_total", 0) >= running[victim]

        wait_for("the worker's word", heard, two)
        assert grew()["eaas_resumed_tokens_total"] > 0
        assert "vllm:prefix_cache_queries_total" not in grew(), f"prompts were computed again: {grew()}"
    wrong = [word for word in (judged(two.url, one) for one in seen) if word]
    assert not wrong, "\n".join(wrong)


def test_a_frozen_gateway_of_two_is_replaced_and_its_streams_go_on_at_the_other(two: LocalCluster) -> None:
    wait_for("both gateways", lambda: len(gateways(two)) == 2, two)
    with ExitStack() as kept:
        at = at_each(two, kept)
        streams = Streams(two)
        running = {pid: client.get("/status").json()["gateway"]["running"] for pid, client in at.items()}
    frozen = max(running, key=lambda pid: running[pid])
    # New connections: each is answered by the one that is awake. Their clients are there already, as to make one takes
    # longer than to be answered.
    with ExitStack() as kept:
        clients = [kept.enter_context(httpx.Client(base_url=two.url, timeout=30, verify=False)) for _ in range(20)]
        os.kill(frozen, signal.SIGSTOP)
        assert [client.get("/v1/models").status_code for client in clients] == [200] * len(clients)
        assert frozen in gateways(two), "it was ended too early to show anything"
    seen = streams.ended()
    wait_for("its successor", lambda: frozen not in gateways(two) and len(gateways(two)) == 2, two)
    assert sum(one.tries > 1 for one in seen) == running[frozen]
    wrong = [word for word in (judged(two.url, one) for one in seen) if word]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full(seconds=30)
@pytest.mark.parametrize("gone", ["nobody asked for it in time", "its worker was killed too"])
def test_a_stream_whose_run_is_gone_costs_one_prefill_of_what_was_said(two: LocalCluster, gone: str) -> None:
    wait_for("both gateways", lambda: len(gateways(two)) == 2, two)
    prompt = f"at {time.time_ns()} it was said at some length, {gone}, that"
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    body, kind = json.dumps({**asked, "stream": True}).encode(), {"content-type": "application/json"}
    with ExitStack() as kept:
        at = at_each(two, kept)
        victim, other = at
        prompt_tokens = at[other].post("/tokenize", json={"model": "tiny", "prompt": prompt}).json()["count"]
        before, events = counters(at[other]), []
        with at[victim].stream("POST", "/v1/completions", content=body, headers=kind) as reply:
            assert reply.status_code == 200, reply.read()
            rest = b""
            for chunk in reply.iter_bytes():
                *whole, rest = (rest + chunk).split(b"\n\n")
                events += whole
                if len(events) >= 40:
                    break
            for name, pid in two.pids().items():
                if pid == victim or (name.startswith("attention/") and "worker" in gone):
                    os.kill(pid, signal.SIGKILL)
        if "worker" not in gone:
            time.sleep(GRACE_S + 1)
        last_id = events[-1].partition(b"\n")[0].removeprefix(b"id: ").decode()
        again = at[other].post("/v1/completions", content=body, headers={**kind, "last-event-id": last_id}, timeout=60)
        assert again.status_code == 200, again.text
        events += again.content.split(b"\n\n")[:-1]

        def grew() -> Counter[str]:
            return counters(at[other]) - before

        def heard() -> bool:
            # A worker says so with its load, once it is idle too.
            return grew()["vllm:prefix_cache_queries_total"] >= prompt_tokens

        wait_for("the worker's word", heard, two)
        time.sleep(1)
        # The prompt for each attempt, and what a run had said that is kept. What the KV cache has costs nothing.
        found = grew()
        told = found["eaas_resumed_tokens_total"]
        computed = found["vllm:prefix_cache_queries_total"] - found["vllm:prefix_cache_hits_total"]
        assert prompt_tokens <= computed <= 2 * prompt_tokens + told, found
        assert (told > 0) == ("worker" not in gone), found
        calm = at[other].post("/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
    said = [json.loads(event.partition(b"data: ")[2]) for event in events if b"data: {" in event]
    assert "".join(one["choices"][0]["text"] for one in said if one["choices"]) == calm
