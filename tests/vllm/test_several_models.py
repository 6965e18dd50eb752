"""Two vLLM servers of two models share one pool, and a lost expert server changes no text of either."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from router.client import RouterClient
from tests.e2e.waiting import wait_for
from tests.vllm.servers import VOCAB, Load, Stream, pool_of, serving, stream, whole, write

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=150), pytest.mark.timeout(900)]

STREAMS, TOKENS, KILLS = 4, 64, 3
# One request after the other: its rows are alone in every step, so that its text is a function of its prompt.
ONE_BY_ONE = ("--enforce-eager", "--max-num-seqs=1")


def tokens_of(seen: list[Stream], said: str) -> list[list[int]]:
    found = [(one.error, one.finish, len(one.tokens)) for one in seen]
    assert found == [("", "length", TOKENS)] * len(seen), said
    return [one.tokens for one in seen]


def test_two_models_share_a_pool_and_a_killed_server_changes_no_text(newest: str, tmp_path: Path) -> None:
    seed = time.time_ns()
    rng, said = random.Random(seed), f"seed {seed}"
    models = {
        "qwen": write("Qwen3Moe", tmp_path / "qwen", seed=seed % 1000),
        # Experts of another shape, and of another number.
        "mixtral": write("Mixtral", tmp_path / "mixtral", seed=seed % 1000, intermediate_size=96, num_local_experts=6),
    }
    prompts = {name: [[rng.randrange(3, VOCAB) for _ in range(12)] for _ in range(STREAMS)] for name in models}
    alone: dict[str, list[list[int]]] = {}
    for name, folder in models.items():
        with (
            pool_of(folder, servers=3) as cluster,
            serving(newest, folder, tmp_path / f"{name}-alone.log", *ONE_BY_ONE, cluster=cluster) as server,
        ):
            alone[name] = tokens_of([stream(server, prompt, TOKENS) for prompt in prompts[name]], said)
    config = ClusterConfig(
        models=tuple(f"{name}={folder}" for name, folder in models.items()),
        experts=3,
        replicas=2,
        attention=0,
        endpoint=False,
    )
    with contextlib.ExitStack() as closing:
        cluster = closing.enter_context(LocalCluster(config))
        router = closing.enter_context(contextlib.closing(RouterClient(cluster.router_address)))
        servers = {
            name: closing.enter_context(
                serving(newest, folder, tmp_path / f"{name}-shared.log", *ONE_BY_ONE, cluster=cluster)
            )
            for name, folder in models.items()
        }
        loads = {name: Load(server, prompts[name], TOKENS) for name, server in servers.items()}
        try:
            for _ in range(KILLS):
                wait_for("a whole pool", lambda: whole(cluster, router))
                # Within streams of both.
                time.sleep(rng.uniform(0.5, 2.0))
                pids = [pid for name, pid in cluster.pids().items() if name.startswith("expert/")]
                os.kill(rng.choice(pids), signal.SIGKILL)
            wait_for("a whole pool", lambda: whole(cluster, router))
        finally:
            done = {name: load.stop() for name, load in loads.items()}
    for name, streams in done.items():
        for seen, calm in zip(streams, alone[name], strict=True):
            assert seen, f"{said}: a prompt of {name} was not asked"
            assert tokens_of(seen, said) == [calm] * len(seen), f"{said}: texts of {name} changed"
