"""What an inspection records is what transformers computes, from the engine to the files; all families."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from benchmarks.make_model import make_model
from eaas.model.loader import load_spec, load_weights
from eaas.model.spec import ModelSpec
from eaas.worker.decoder import Decoder
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.inspector import Inspector
from eaas.worker.protocol import Inspect, Inspected, SamplingParams, Submit
from eaas.worker.sinks import opened
from eaas.worker.taps import STATISTICS
from experts.checkpoint import Checkpoint
from experts.model import Dtype
from tests.e2e.pool import BLOCK_TOKENS, CORES, local_experts
from tests.e2e.test_logits import ARCHITECTURES

EVERYTHING = (
    "embed", "layers.*.attention", "layers.*.gate", "layers.*.experts", "layers.*.residual", "layers.*.expert.3",
    "layers.2.expert.0", "final_norm", "logits",
)  # fmt: skip
STEP_TOKENS = 24
CLOSE = 2e-4  # as logits


class Records(dict[str, np.ndarray]):
    """The tensors of all parts, one after another, and whose request each row is."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        parts: list[dict[str, np.ndarray]] = []
        for path in sorted(folder.rglob("part-*.safetensors")):
            with safe_open(path, "np") as file:
                names = json.loads(file.metadata()["requests"])
                parts.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            self.requests += [names[number] for number in parts[-1]["request"]]
        super().__init__({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def in_order(self) -> dict[str, np.ndarray]:
        """By request and position, in whatever steps they were computed."""
        order = np.lexsort((self["position"], self.requests))
        return {name: tensor[order] for name, tensor in self.items()}

    def of(self, request: str) -> dict[str, np.ndarray]:
        mine = np.array([name == request for name in self.requests])
        return {name: tensor[mine] for name, tensor in self.items()}

    def of_answer(self, id: str) -> dict[str, np.ndarray]:
        """Of the one choice of an answer."""
        (name,) = {name for name in self.requests if name.startswith(f"{id}-")}
        return self.of(name)


class Bench:
    """An engine with an inspector in this process."""

    def __init__(self, model: Path, folder: Path, *, kv_blocks: int = 64) -> None:
        checkpoint = Checkpoint.open(model)
        self.spec: ModelSpec = replace(load_spec(checkpoint), dtype=Dtype.resolve("auto", checkpoint.config))
        self._experts = local_experts(model)
        weights = load_weights(checkpoint, self.spec)
        self.decoder = Decoder(
            self.spec, weights, self._experts.backend, CORES, kv_blocks=kv_blocks, max_rows=STEP_TOKENS
        )
        config = EngineConfig(
            max_model_len=self.spec.max_model_len,
            step_tokens=STEP_TOKENS,
            kv_blocks=kv_blocks,
            block_tokens=BLOCK_TOKENS,
            vocab=self.spec.vocab,
        )
        self.engine = Engine(self.decoder, config)
        self.inspector = Inspector(
            self.spec, self.decoder, STEP_TOKENS, partial(opened, folder, "attention/1.7", "f00d", None)
        )
        self.engine.inspect(self.inspector)

    def run(self, prompts: dict[str, list[int]], id: str, max_tokens: int) -> dict[str, list[int]]:
        """The output of each."""
        for name, prompt in prompts.items():
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            message = Submit(id=name, attempt=1, prompt=prompt, params=params, inspected=f"{id}/{name}")
            assert self.engine.submit(message) is None
        found: dict[str, list[int]] = {name: [] for name in prompts}
        while self.engine.has_work:
            outcome = self.engine.step()
            for token in outcome.tokens.get(0, []) if outcome else []:
                found[token.id].append(token.token)
        return found

    def ended(self, id: str) -> Inspected:
        """End it, and what is said of it then."""
        self.inspector.end(id)
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            news = self.inspector.news()
            if news is not None and news[1].ended:
                return news[1]
            time.sleep(0.01)
        raise AssertionError("the inspection did not end")


class Peer:
    """What transformers computes of one text."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._seen: dict[str, np.ndarray] = {}
        for number, layer in enumerate(self._model.model.layers):
            layer.register_forward_hook(partial(self._keep, f"layers.{number}.residual"))
            layer.self_attn.register_forward_hook(partial(self._keep, f"layers.{number}.attention"))
            for name, module in layer.mlp.named_children():
                if name in ("gate", "router"):
                    module.register_forward_hook(partial(self._keep_gate, number))
                elif name == "experts":
                    module.register_forward_hook(partial(self._keep_experts, number))
        self._model.model.embed_tokens.register_forward_hook(partial(self._keep, "embed"))
        self._model.model.norm.register_forward_hook(partial(self._keep, "final_norm"))

    def _keep(self, name: str, module: Any, args: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        self._seen[name] = out.reshape(-1, out.shape[-1]).numpy()

    def _keep_gate(self, layer: int, module: Any, args: Any, out: Any) -> None:
        self._seen[f"layers.{layer}.gate"] = out[0].numpy()
        self._seen[f"layers.{layer}.experts"] = np.sort(out[-1].numpy(), axis=-1)

    def _keep_experts(self, layer: int, module: Any, args: Any, out: Any) -> None:
        rows = args[0]
        for expert in (0, 3):
            ids = torch.full((len(rows), 1), expert)
            self._seen[f"layers.{layer}.expert.{expert}"] = module.forward(rows, ids, torch.ones(len(rows), 1)).numpy()

    def __call__(self, tokens: list[int]) -> dict[str, np.ndarray]:
        self._seen.clear()
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens])).logits[0].numpy()
        return {**self._seen, "logits": logits}


def prompts_of(spec: ModelSpec, seed: int) -> dict[str, list[int]]:
    source = np.random.default_rng(seed)
    return {f"r{n}": source.integers(0, spec.vocab, n).tolist() for n in (1, 5, 40, 61)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tap_says_what_transformers_computes(arch: str, tmp_path: Path) -> None:
    seed = time.time_ns() % 2**31
    model = make_model("tiny", arch, tmp_path / arch, seed=seed % 1000, dtype="float32")
    bench = Bench(model, tmp_path / "seen")
    assert bench.inspector.begin(Inspect(id="inspect-1", taps=[*EVERYTHING]), owner=3) is None
    prompts = prompts_of(bench.spec, seed)
    outputs = bench.run(prompts, "inspect-1", max_tokens=6)
    told = bench.ended("inspect-1")
    assert (told.fault, told.dropped) == ("", 0) and told.produced == told.delivered > 0
    seen, peer = Records(tmp_path / "seen"), Peer(model)
    assert seen["sequence"].tolist() == list(range(len(seen["sequence"])))
    assert told.produced == len(seen["sequence"]) * (len(seen) - 4)
    for name, prompt in prompts.items():
        mine, tokens = seen.of(name), [*prompt, *outputs[name][:-1]]
        assert mine["position"].tolist() == list(range(len(tokens))) and mine["token"].tolist() == tokens
        theirs = peer(tokens)
        for tap in set(mine) - {"sequence", "request", "position", "token"}:
            ours = np.sort(mine[tap], axis=-1) if tap.endswith(".experts") else mine[tap]
            assert np.abs(ours - theirs[tap]).max() < CLOSE, f"{arch}, seed {seed}: {name} {tap}"


def test_statistics_are_those_of_the_rows(tmp_path: Path) -> None:
    model = make_model("tiny", "qwen3_moe", tmp_path / "model", seed=4, dtype="float32")
    bench = Bench(model, tmp_path)
    prompts = prompts_of(bench.spec, seed=4)
    for id, statistics in (("inspect-rows", False), ("inspect-few", True)):
        order = Inspect(id=id, taps=[*EVERYTHING], statistics=statistics)
        assert bench.inspector.begin(order, owner=3) is None
        bench.run(prompts, id, max_tokens=6)
        assert not bench.ended(id).fault
        bench.engine.scheduler.forget_blocks()
    rows, few = (Records(tmp_path / id).in_order() for id in ("inspect-rows", "inspect-few"))
    for tap in set(rows) - {"sequence", "request", "position", "token"}:
        x = rows[tap].astype(np.float64)
        expected = [x.mean(1), np.sqrt((x**2).mean(1)), np.abs(x).max(1), np.zeros(len(x))]
        assert few[tap].shape == (len(x), len(STATISTICS))
        np.testing.assert_allclose(few[tap], np.stack(expected, 1), rtol=1e-4, atol=1e-5, err_msg=tap)
