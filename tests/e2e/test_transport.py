"""The model served over nixl: the same tokens as over shared memory, and the same when an expert server dies."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.loader import resolve_model

PROMPTS = ("ROMEO:", "To be", "KING HENRY:", "What light")
TOKENS = 96

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu13") is None,
        reason="needs the package nixl-cu13 (pip install --no-deps nixl-cu13), found none",
    ),
    pytest.mark.full(seconds=12),
]


@pytest.fixture(scope="module", params=["nixl:lo", "shm+nixl:lo"])
def served(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        model=resolve_model("demo"),
        served_model_name="demo",
        experts=3,
        port=0,
        cores=(0, 1),
        transport=request.param,
    )
    cluster = LocalCluster(config)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def complete(url: str, prompt: str, tokens: int = TOKENS) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())["choices"][0]["text"]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    config = ClusterConfig(model=resolve_model("demo"), served_model_name="demo", experts=2, port=0, cores=(0, 1))
    cluster = LocalCluster(config)
    try:
        cluster.start()
        return [complete(cluster.url, prompt) for prompt in PROMPTS]
    finally:
        cluster.stop()


def test_nixl_gives_the_tokens_that_shared_memory_gives(served: LocalCluster, expected: list[str]) -> None:
    assert [complete(served.url, prompt) for prompt in PROMPTS] == expected


def test_an_expert_server_killed_under_streams_over_nixl_changes_nothing(
    served: LocalCluster, expected: list[str]
) -> None:
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: found.update({prompt: complete(served.url, prompt)}))
        for prompt in PROMPTS
    ]
    for thread in threads:
        thread.start()
    victim = next(pid for name, pid in served.pids().items() if name.startswith("expert"))
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert found == dict(zip(PROMPTS, expected, strict=True))
