"""The experts that a client is told of are those that transformers' gates choose, and those that it gives are those
that are computed with, also across a lost worker."""

from __future__ import annotations

import base64
import io
import os
import signal
import threading
import time
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
from eaas.gateway.text import RoutedExpertsLog
from eaas.model.loader import load_spec, load_weights
from eaas.worker.decoder import Decoder
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import ForcedExperts, SamplingParams, Submit
from experts.checkpoint import Checkpoint
from experts.model import Dtype
from tests.e2e.test_logits import watch_gates
from tests.eaas.local_experts import LocalExperts

pytestmark = pytest.mark.full(seconds=10)

TEXT = "When forty winters shall besiege thy brow, and dig deep trenches in thy beauty's field"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # In float32 a gate's margin is above the rounding errors of both.
    return make_model("tiny", "qwen3_moe", tmp_path_factory.mktemp("models") / "f32", seed=5, dtype="float32")


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    config = ClusterConfig(model=model, served_model_name="tiny", experts=2, attention=1, port=0, cores=(0, 1))
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


def ask_while_killed(cluster: LocalCluster, **fields: Any) -> dict[str, Any]:
    """The choice, whose worker is killed while it computes."""
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.extend(ask(cluster, **fields)))
    asking.start()
    pid = next(pid for name, pid in cluster.pids().items() if name.startswith("attention"))
    asking.join(0.2)
    assert asking.is_alive(), "it was answered before its worker could be killed"
    os.kill(pid, signal.SIGKILL)
    asking.join(60)
    return found[0]


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
    # A grammar that is compiled while the prompt is computed bars the first tokens for a moment.
    for letters in ("ab", "cde", "fghij"):
        bound = {"structured_outputs": {"regex": f"[{letters}]{{40}}"}, "ignore_eos": False}
        check(peer, ask(cluster, max_tokens=30, **bound)[0])
    assert "routed_experts" not in ask(cluster, max_tokens=1, return_routed_experts=False)[0]


def test_a_worker_that_is_killed_meanwhile_changes_nothing(cluster: LocalCluster, peer: Any) -> None:
    calm = ask(cluster, max_tokens=1500, seed=3)[0]
    found = ask_while_killed(cluster, max_tokens=1500, seed=3)
    check(peer, found)
    assert found["routed_experts"] == calm["routed_experts"] and found["text"] == calm["text"]


def test_a_stream_is_refused(cluster: LocalCluster) -> None:
    body = {"prompt": "a", "max_tokens": 1, "stream": True, "return_routed_experts": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body)
    assert reply.status_code == 400 and "return_routed_experts" in reply.text


def encoded(experts: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def told(choice: dict[str, Any]) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)


def drawn(peer: Any, tokens: int, seed: int) -> np.ndarray:
    """Any experts, in any order."""
    config = peer.config
    rng = np.random.default_rng(seed)
    ranks = rng.random((tokens, config.num_hidden_layers, config.num_experts)).argsort(axis=-1)
    return ranks[..., : config.num_experts_per_tok].astype(rng.choice(["u1", "<i2", "<u2", "<i8"]))


def logits_with(peer: Any, tokens: list[int], experts: np.ndarray) -> np.ndarray:
    """Transformers' logits, its first tokens computed with these experts."""
    hooks: list[Any] = []

    def force(layer: int) -> Any:
        def hook(gate: Any, args: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, scores, chosen = out
            chosen = chosen.clone()
            chosen[: len(experts)] = torch.from_numpy(experts[:, layer].astype(np.int64))
            scores = logits.softmax(-1).gather(1, chosen)
            if gate.norm_topk_prob:
                scores /= scores.sum(-1, keepdim=True)
            return logits, scores, chosen

        return hook

    gates = [module for name, module in peer.named_modules() if name.endswith(".gate")]
    for layer, gate in enumerate(gates):
        hooks.append(gate.register_forward_hook(force(layer)))
    with torch.inference_mode():
        logits = peer(torch.tensor([tokens])).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits


def check_forced(peer: Any, choice: dict[str, Any], experts: np.ndarray, seed: int) -> None:
    """Judged by transformers: each token is the best after those before it, and what follows is gated freely."""
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    assert (told(choice)[: len(experts)] == experts).all(), f"seed {seed}"
    logits = logits_with(peer, [*prompt, *output], experts)[len(prompt) - 1 : -1]
    behind = logits.max(axis=1) - logits[np.arange(len(output)), output]
    assert behind.max() < 1e-4, f"seed {seed}: token {behind.argmax()} of the output is {behind.max()} behind the best"


def test_experts_that_are_given_are_computed_with(cluster: LocalCluster, peer: Any) -> None:
    seed = time.time_ns()
    free = ask(cluster, max_tokens=60, temperature=0)[0]
    again = ask(cluster, max_tokens=60, temperature=0, force_routed_experts=encoded(told(free)))[0]
    assert (again["text"], again["routed_experts"]) == (free["text"], free["routed_experts"])
    prompt = len(free["prompt_token_ids"])
    for tokens in (1, prompt // 2, prompt, prompt + 30, prompt + 200):
        experts = drawn(peer, tokens, seed + tokens)
        found = ask(cluster, max_tokens=60, temperature=0, force_routed_experts=encoded(experts))[0]
        check_forced(peer, found, experts[: prompt + 59], seed + tokens)
        # Where no experts are told, the last layer computes no more rows than it must.
        fields = {"force_routed_experts": encoded(experts), "return_routed_experts": False}
        assert ask(cluster, max_tokens=60, temperature=0, **fields)[0]["text"] == found["text"]
        # Of what that one left in the cache nothing is taken for this one, nor the other way round.
        assert ask(cluster, max_tokens=60, temperature=0)[0]["text"] == free["text"]
        assert (
            ask(cluster, max_tokens=60, temperature=0, force_routed_experts=encoded(experts))[0]["text"]
            == found["text"]
        )
    assert found["text"] != free["text"], f"seed {seed}: other experts changed nothing"


def test_a_worker_that_is_killed_meanwhile_computes_with_them_again(cluster: LocalCluster, peer: Any) -> None:
    seed = time.time_ns()
    experts = drawn(peer, 1200, seed)
    fields = {"max_tokens": 1500, "temperature": 0, "force_routed_experts": encoded(experts)}
    calm = ask(cluster, **fields)[0]
    check_forced(peer, calm, experts, seed)
    assert ask_while_killed(cluster, **fields) == calm


class Alone:
    """An engine in this process, two requests at a time; what it tells is kept as the gateway keeps it."""

    def __init__(self, model: Path, prompts: list[list[int]], *, step_tokens: int, reuse: bool = False) -> None:
        checkpoint = Checkpoint.open(model)
        spec = load_spec(checkpoint)
        self.experts = LocalExperts.load(checkpoint, Dtype.FLOAT32, lanes=1, max_rows=step_tokens)
        weights = load_weights(checkpoint, spec)
        decoder = Decoder(
            spec,
            weights,
            self.experts.backend,
            (-1,),
            kv_blocks=24,
            max_rows=step_tokens,
            dtype=Dtype.FLOAT32,
        )
        config = EngineConfig(
            max_model_len=256, step_tokens=step_tokens, kv_blocks=24, vocab=spec.vocab, prefix_reuse=reuse
        )
        self.engine, self.prompts = Engine(decoder, config), prompts

    def run(self, forced: np.ndarray | None = None, preempt_every: int = 0) -> list[dict[str, Any]]:
        """Choices as `ask` gives them."""
        given = None
        if forced is not None:
            _, layers, top_k = forced.shape
            given = ForcedExperts(layers, top_k, forced.astype("<u2").tobytes())
        logs = [RoutedExpertsLog(0) for _ in self.prompts]
        tokens: list[list[int]] = [[] for _ in self.prompts]
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, routed_from=0, forced=given)
        for number, prompt in enumerate(self.prompts):
            message = Submit(id=str(number), attempt=1, prompt=prompt, output=[], params=params)
            assert self.engine.submit(message) is None
        steps = 0
        while (outcome := self.engine.step()) is not None:
            assert not outcome.failed
            for piece in outcome.routed.get(0, []):
                logs[int(piece.id)].take(piece)
            for token in outcome.tokens.get(0, []):
                tokens[int(token.id)].append(token.token)
            steps += 1
            if preempt_every and steps % preempt_every == 0:
                self.engine.scheduler.preempt_youngest()
        return [
            {"prompt_token_ids": prompt, "token_ids": made, "routed_experts": log.encoded()}
            for prompt, made, log in zip(self.prompts, tokens, logs, strict=True)
        ]


def two_prompts(seed: int) -> list[list[int]]:
    """With 40 tokens in common."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 512, 40).tolist()
    return [common + rng.integers(0, 512, more).tolist() for more in (21, 9)]


@pytest.mark.parametrize("reuse", [True, False])
def test_at_every_chunk_boundary(model: Path, peer: Any, reuse: bool) -> None:
    seed = time.time_ns()
    prompts, forced = two_prompts(seed), drawn(peer, 70, seed)
    for step_tokens in range(2, len(prompts[0]) + 2):
        alone = Alone(model, prompts, step_tokens=step_tokens, reuse=reuse)
        for choice in alone.run():
            check(peer, choice)
        for choice in alone.run(forced):
            check_forced(peer, choice, forced, seed)


@pytest.mark.parametrize("preempt_every", [1, 3, 7])
def test_after_preemption(model: Path, peer: Any, preempt_every: int) -> None:
    seed = time.time_ns()
    prompts, forced = two_prompts(seed), drawn(peer, 70, seed)
    for reuse in (True, False):
        alone = Alone(model, prompts, step_tokens=128, reuse=reuse)
        for choice in alone.run(preempt_every=preempt_every):
            check(peer, choice)
        for choice in alone.run(forced, preempt_every=preempt_every):
            check_forced(peer, choice, forced, seed)
        assert alone.engine.scheduler.preemptions > 2


def test_experts_that_the_model_has_not_are_refused(cluster: LocalCluster, peer: Any) -> None:
    sound = drawn(peer, 3, 1).astype("<i4")
    for wrong, words in (
        (sound[:, :1], "MoE layers"),
        (sound[..., :1], "MoE layers"),
        (sound + peer.config.num_experts, f"this model has 0 to {peer.config.num_experts - 1}"),
        (sound - 1000, f"has expert {sound.flat[0] - 1000}, which no model has"),
        (sound + 65536, f"has expert {sound.flat[0] + 65536}, which no model has"),
        (sound * 0, "has an expert twice for token 0 in MoE layer 0"),
    ):
        refused(cluster, words, force_routed_experts=encoded(wrong))
    # Such arrays are as large as a body may be; nothing is made of each fault in them.
    equal = np.zeros((80_000, *sound.shape[1:]), "u1")
    refused(cluster, "an expert twice", force_routed_experts=encoded(equal))
    refused(cluster, "2 choices", force_routed_experts=encoded(sound), n=2, temperature=1.0)


def refused(cluster: LocalCluster, words: str, **fields: Any) -> None:
    body = {"prompt": TEXT, "max_tokens": 1, **fields}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body)
    assert reply.status_code == 400 and words in reply.text, reply.text
    assert reply.json()["error"]["param"] == "force_routed_experts"
