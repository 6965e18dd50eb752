"""Whatever a pool loses, no request of a vLLM that uses it fails, and no text changes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eaas.cluster.local import LocalCluster
from router.client import RouterClient
from tests.e2e.waiting import wait_for
from tests.vllm.servers import VOCAB, Load, Server, Stream, pool_of, serving, stream, whole, write

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=60), pytest.mark.timeout(900)]

STREAMS, TOKENS = 8, 96
SERVERS, REPLICAS = 4, 2
# A loss of the whole pool, longer than every lease and deadline of it.
LOST_S = 20.0
# One request after the other: its rows are alone in every step, so that its text is a function of its prompt.
ONE_BY_ONE = ("--enforce-eager", "--max-num-seqs=1")


@dataclass(kw_only=True)
class World:
    """A vLLM over a pool, and what it generates while nothing fails."""

    cluster: LocalCluster
    router: RouterClient
    server: Server
    prompts: list[list[int]]
    calm: list[list[int]]

    def wait_whole(self) -> None:
        wait_for("a whole pool", lambda: whole(self.cluster, self.router))

    def experts(self) -> list[int]:
        """Pids of the expert servers."""
        return [pid for name, pid in self.cluster.pids().items() if name.startswith("expert/")]


@contextlib.contextmanager
def world(
    version: str, model: Path, log: Path, *options: str, vocab: int = VOCAB, dtype: str = "float32"
) -> Iterator[World]:
    """A pool of four expert servers with two replicas of each expert, a `vllm serve` over it, its texts."""
    rng = random.Random(time.time_ns())
    prompts = [[rng.randrange(3, vocab) for _ in range(12)] for _ in range(STREAMS)]
    with pool_of(model, SERVERS, REPLICAS) as cluster:
        router = RouterClient(cluster.router_address)
        with (
            contextlib.closing(router),
            serving(version, model, log, *options, cluster=cluster, dtype=dtype) as server,
        ):
            calm = [stream(server, prompt, TOKENS) for prompt in prompts]
            assert_whole(calm)
            made = World(cluster=cluster, router=router, server=server, prompts=prompts, calm=[])
            made.calm = [seen.tokens for seen in calm]
            yield made


@pytest.fixture(scope="module")
def one_by_one(newest: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A vLLM that computes one request at a time."""
    folder = tmp_path_factory.mktemp("models")
    with world(newest, write("Qwen3Moe", folder), folder / "serve.log", *ONE_BY_ONE) as made:
        yield made


def assert_whole(seen: Sequence[Stream]) -> None:
    found = [(one.error, one.finish, len(one.tokens)) for one in seen]
    assert found == [("", "length", TOKENS)] * len(seen)


def assert_calm(made: World, done: Sequence[Sequence[Stream]], said: str) -> None:
    """That no stream failed, and each has the text of the run in which nothing did."""
    for streams, calm in zip(done, made.calm, strict=True):
        assert streams, f"{said}: a prompt was not asked"
        assert_whole(streams)
        assert [one.tokens for one in streams] == [calm] * len(streams), f"{said}: texts changed"


def strike(made: World, freeze: bool, rng: random.Random) -> None:
    """Kill an expert server, or freeze it for a while. The launcher ends one that is frozen for long."""
    handle = os.pidfd_open(rng.choice(made.experts()))
    try:
        signal.pidfd_send_signal(handle, signal.SIGSTOP if freeze else signal.SIGKILL)
        if freeze:
            time.sleep(rng.uniform(0.2, 3.0))
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
    finally:
        os.close(handle)


def strikes(made: World, kills: int, freezes: int, seed: int) -> tuple[list[list[Stream]], dict[str, list[float]]]:
    """Strike expert servers in random order, each time after the pool is whole again, under streams.

    Returns all streams, by prompt, and after each fault the longest time between two tokens of one stream in seconds,
    as "kill" and "freeze".
    """
    rng = random.Random(seed)
    order = [False] * kills + [True] * freezes
    rng.shuffle(order)
    load = Load(made.server, made.prompts, TOKENS)
    windows: list[tuple[bool, float, float]] = []
    try:
        for freeze in order:
            made.wait_whole()
            time.sleep(rng.uniform(0.2, 1.0))
            begin_s = time.monotonic()
            strike(made, freeze, rng)
            time.sleep(0.5)
            windows.append((freeze, begin_s, time.monotonic()))
        made.wait_whole()
    finally:
        done = load.stop()
    streams = [one for some in done for one in some]
    gaps: dict[str, list[float]] = {"kill": [], "freeze": []}
    for freeze, begin_s, end_s in windows:
        longest = max(one.longest_gap_s(begin_s, end_s) for one in streams)
        gaps["freeze" if freeze else "kill"].append(longest)
    return done, gaps


def told(gaps: dict[str, list[float]]) -> str:
    """The longest and the median of each kind."""
    return "; ".join(
        f"{kind}: longest {1e3 * max(found):.0f} ms, median {1e3 * statistics.median(found):.0f} ms of {len(found)}"
        for kind, found in gaps.items()
        if found
    )


def test_kills_and_freezes_change_no_text(one_by_one: World) -> None:
    seed = time.time_ns() % 2**31
    done, gaps = strikes(one_by_one, kills=5, freezes=2, seed=seed)
    assert_calm(one_by_one, done, f"seed {seed}, {told(gaps)}")
    print(told(gaps))


def test_kills_and_freezes_fail_no_request_of_a_batch(newest: str, tmp_path: Path) -> None:
    seed = time.time_ns() % 2**31
    model = write("Qwen3Moe", tmp_path, torch.bfloat16)
    options = ("--enforce-eager", f"--max-num-seqs={STREAMS}")
    with world(newest, model, tmp_path / "serve.log", *options, dtype="bfloat16") as made:
        done, gaps = strikes(made, kills=5, freezes=2, seed=seed)
        for streams in done:
            assert streams, f"seed {seed}"
            assert_whole(streams)
    print(told(gaps))


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_pool_that_is_lost_for_long_is_waited_for(one_by_one: World, how: str) -> None:
    made = one_by_one
    made.wait_whole()
    load = Load(made.server, made.prompts, TOKENS)
    try:
        time.sleep(1.0)
        begin_s = time.monotonic()
        frozen = made.experts() if how == "frozen" else []
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        while time.monotonic() < begin_s + LOST_S:
            # Those that were started in place of others are lost too.
            lost = made.experts()
            for pid in lost:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
            frozen += lost if how == "frozen" else []
            time.sleep(0.05)
        end_s = time.monotonic()
        assert made.server.healthy()
        for pid in set(frozen) & set(made.experts()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        made.wait_whole()
    finally:
        done = load.stop()
    assert_calm(made, done, how)
    streams = [one for some in done for one in some]
    longest_s = max(one.longest_gap_s(begin_s, end_s) for one in streams)
    assert longest_s > LOST_S / 2, f"tokens came while no expert was there: at most {longest_s:.1f} s apart"


def test_of_two_engines_on_one_pool_the_loss_of_one_is_not_noticed(
    one_by_one: World, newest: str, tmp_path: Path
) -> None:
    made = one_by_one
    made.wait_whole()
    folder = made.server.log.parent
    with serving(newest, folder, tmp_path / "other.log", *ONE_BY_ONE, cluster=made.cluster) as other:
        load, its = Load(made.server, made.prompts, TOKENS), Load(other, made.prompts, TOKENS)
        wait_for("texts of both", lambda: any(load.done) and any(its.done))
        other.kill()
        time.sleep(3.0)
        done, lost = load.stop(), its.stop()
    assert_calm(made, done, "an engine killed")
    assert any(one.error or one.finish is None for streams in lost for one in streams), "nothing was lost"
    clients = made.router.status().view.pool("client")
    wait_for("the killed engine's leave", lambda: len(made.router.status().view.pool("client")) == 1)
    assert clients
