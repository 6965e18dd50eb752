"""The experts that a client is told of are those that transformers' gates choose, also across a lost worker."""

from __future__ import annotations

import base64
import io
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from tests.e2e.test_logits import watch_gates

pytestmark = pytest.mark.full(seconds=10)

TEXT = "When forty winters shall besiege thy brow, and dig deep trenches in thy beauty's field"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # In float32 a gate's margin is above the rounding errors of both.
    return make_model("tiny", "qwen3_moe", tmp_path_factory.mktemp("models") / "f32", seed=5, dtype="float32")


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        model=model, served_model_name="tiny", experts=2, attention=1, port=0, cores=(0, 1)
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def peer(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def ask(cluster: LocalCluster, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": TEXT, "return_token_ids": True, "return_routed_experts": True, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json={**body, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def check(peer: Any, choice: dict[str, Any], start: int = 0) -> None:
    """Every token's experts in every layer, as sets: the order among equal scores is nobody's promise."""
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    chosen = watch_gates(peer)
    with torch.inference_mode():
        peer(torch.tensor([tokens[:-1]]))
    theirs = np.stack([parts[0] for parts in chosen.values()], axis=1)
    assert found.shape == (len(tokens) - 1 - start, *theirs.shape[1:])
    assert (np.sort(found, axis=-1) == theirs[start:]).all()


def test_they_are_those_of_transformers(cluster: LocalCluster, peer: Any) -> None:
    first = ask(cluster, max_tokens=40)[0]
    check(peer, first)
    # Its prompt lies in the cache now.
    for choice in ask(cluster, max_tokens=20, n=3, temperature=1.0, seed=7):
        check(peer, choice)
    check(peer, ask(cluster, max_tokens=5, routed_experts_prompt_start=11)[0], start=11)
    check(peer, ask(cluster, max_tokens=40, stop=[first["text"][8:10]])[0])
    assert "routed_experts" not in ask(cluster, max_tokens=1, return_routed_experts=False)[0]


def test_a_worker_that_is_killed_meanwhile_changes_nothing(cluster: LocalCluster, peer: Any) -> None:
    found: list[dict[str, Any]] = []
    calm = ask(cluster, max_tokens=1500, seed=3)[0]
    asking = threading.Thread(target=lambda: found.extend(ask(cluster, max_tokens=1500, seed=3)))
    asking.start()
    pid = next(pid for name, pid in cluster.pids().items() if name.startswith("attention"))
    asking.join(0.2)
    assert asking.is_alive(), "it was answered before its worker could be killed"
    os.kill(pid, signal.SIGKILL)
    asking.join(60)
    check(peer, found[0])
    assert found[0]["routed_experts"] == calm["routed_experts"] and found[0]["text"] == calm["text"]


def test_a_stream_is_refused(cluster: LocalCluster) -> None:
    body = {"prompt": "a", "max_tokens": 1, "stream": True, "return_routed_experts": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body)
    assert reply.status_code == 400 and "return_routed_experts" in reply.text
