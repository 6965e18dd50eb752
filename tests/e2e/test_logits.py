"""The served model is the checkpoint's model: logits beside transformers' own, all families, through real servers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines.gate_tap import EXPERT_CALL
from benchmarks.make_model import make_model
from eaas.model.loader import load_spec, load_weights, resolve_model
from eaas.worker.decoder import Decoder, ExpertBackend
from eaas.worker.plan import StepPlan
from experts.checkpoint import Checkpoint
from experts.model import Dtype, ExpertShape
from tests.e2e.pool import BLOCK_TOKENS, CORES, local_experts, pool_of

ARCHITECTURES = (
    "qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "dots1",
    "minimax_m2",
)  # fmt: skip
LENGTHS = (1, 2, 7, 16, 33, 100, 300)
CHUNK = 64


def served(model: Path, prompts: Sequence[Sequence[int]], dtype: str = "auto") -> list[np.ndarray]:
    """float32 [tokens, vocab] logits of every position of each prompt, through an expert server process."""
    checkpoint = Checkpoint.open(model)
    spec = replace(load_spec(checkpoint), dtype=Dtype.resolve(dtype, checkpoint.config))
    blocks = -(-max(map(len, prompts)) // BLOCK_TOKENS)
    with pool_of(model, servers=1, replicas=1, dtype=dtype) as pool:
        weights = load_weights(checkpoint, spec)
        decoder = Decoder(spec, weights, pool.client.handle, CORES, kv_blocks=blocks, max_rows=CHUNK)
        found = [forced(decoder, prompt, blocks) for prompt in prompts]
        decoder.close()
    return found


def forced(decoder: Decoder, prompt: Sequence[int], blocks: int) -> np.ndarray:
    parts = []
    for start in range(0, len(prompt), CHUNK):
        tokens = np.array(prompt[start : start + CHUNK], np.int32)
        rows = np.arange(len(tokens), dtype=np.int32)
        plan = StepPlan(
            token_ids=tokens,
            positions=rows + start,
            seqs=np.zeros_like(rows),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            logits_rows=rows,
        )
        parts.append(decoder.step(plan, 30.0).copy())
    return np.concatenate(parts)


def transformers_run(
    model: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """float64 [positions, vocab] logits, and the gates' choices [layers, positions, top_k], sorted."""
    peer = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    chosen = watch_gates(peer)
    with torch.inference_mode():
        logits = [peer(torch.tensor([prompt])).logits[0].double().numpy() for prompt in prompts]
    return np.concatenate(logits), np.stack([np.concatenate(parts) for parts in chosen.values()])


def random_prompts(vocab: int, seed: int) -> list[list[int]]:
    source = np.random.default_rng(seed)
    return [source.integers(0, vocab, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float32_logits_equal_those_of_transformers(arch: str, tmp_path: Path) -> None:
    model = make_model("tiny", arch, tmp_path / arch, seed=2, dtype="float32")
    prompts = random_prompts(512, seed=2)
    ours = np.concatenate(served(model, prompts))
    theirs, _ = transformers_run(model, prompts, torch.float32)
    assert np.abs(ours - theirs).max() < 2e-4, f"{arch}, seed 2"
    top = np.sort(theirs, axis=-1)
    clear = top[:, -1] - top[:, -2] > 1e-3
    assert clear.mean() >= 0.99, f"{arch}, seed 2: {1 - clear.mean():.2%} of positions have no clear winner"
    assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all(), f"{arch}, seed 2"


def test_the_demonstration_model_chooses_the_same_tokens_everywhere() -> None:
    model = resolve_model("demo")
    prompts = random_prompts(Checkpoint.open(model).config["vocab_size"], seed=3)
    ours = np.concatenate(served(model, prompts, "float32"))
    theirs, _ = transformers_run(model, prompts, torch.float32)
    assert np.abs(ours - theirs).max() < 2e-4, "seed 3"
    assert (ours.argmax(-1) == theirs.argmax(-1)).all(), "seed 3"


class Watched:
    """Experts in this process that remember which were asked for: the gate's choice, layer by layer."""

    def __init__(self, model: Path) -> None:
        self._experts = local_experts(model, lanes=1)
        self.chosen: dict[int, list[np.ndarray]] = {}
        real = EXPERT_CALL(self._experts.backend.call)
        top_k = ExpertShape.from_config(Checkpoint.open(model).config).top_k

        def call(state: int, pool: int, lane: int, layer: int, rows: int, n: int, ids: int, *rest: int) -> int:
            asked = np.ctypeslib.as_array(ctypes.cast(ids, ctypes.POINTER(ctypes.c_uint16)), (n, top_k))
            self.chosen.setdefault(layer, []).append(np.sort(asked.astype(np.int64), axis=-1))
            return real(state, pool, lane, layer, rows, n, ids, *rest)

        self._call = EXPERT_CALL(call)
        address = ctypes.cast(self._call, ctypes.c_void_p).value
        self.backend = ExpertBackend(call=address or 0, state=self._experts.backend.state)

    def table(self) -> np.ndarray:
        """[layers, positions, top_k], sorted."""
        return np.stack([np.concatenate(self.chosen[layer]) for layer in sorted(self.chosen)])


def watch_gates(peer: torch.nn.Module) -> dict[str, list[np.ndarray]]:
    """The experts that each gate of a transformers model chooses, from now on."""
    chosen: dict[str, list[np.ndarray]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, out: chosen.setdefault(name, []).append(np.sort(out[-1].numpy(), axis=-1))

    for name, module in peer.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(keep(name))
    return chosen


def bfloat16_run(model: Path, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Our logits in bfloat16, and the gates' choices. One lane and no server: other tests show the same bits."""
    checkpoint = Checkpoint.open(model)
    spec = load_spec(checkpoint)
    blocks = -(-max(map(len, prompts)) // BLOCK_TOKENS)
    experts = Watched(model)
    weights = load_weights(checkpoint, spec)
    decoder = Decoder(spec, weights, experts.backend, CORES[:1], kv_blocks=blocks, max_rows=CHUNK)
    logits = np.concatenate([forced(decoder, prompt, blocks) for prompt in prompts])
    decoder.close()
    return logits, experts.table()


@pytest.mark.full(seconds=6)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_errs_no_more_than_transformers(arch: str, tmp_path: Path) -> None:
    """Relative L2 error of each position against a float64 forward of the same weights: median and p99.

    Where a gate's margin is below an engine's rounding error, that engine asks other experts, and the logits are
    another function: such positions are counted apart, for both alike, and ours may not be more.
    """
    model = make_model("tiny", arch, tmp_path / arch, seed=4, dtype="bfloat16")
    # p99 needs many positions: one flipped gate early in a prompt moves all that follow it a little.
    prompts = [prompt for seed in range(4, 12) for prompt in random_prompts(512, seed)]
    exact, exact_gates = transformers_run(model, prompts, torch.float64)
    theirs, their_gates = transformers_run(model, prompts, torch.bfloat16)
    ours, our_gates = bfloat16_run(model, prompts)
    our_flips = (our_gates != exact_gates).any(axis=(0, 2))
    their_flips = (their_gates != exact_gates).any(axis=(0, 2))
    assert our_flips.sum() <= 1.1 * their_flips.sum() + 2, f"{arch}: {our_flips.sum()} against {their_flips.sum()}"
    clear = ~(our_flips | their_flips)
    assert clear.mean() > 0.5, f"{arch}: only {clear.mean():.0%} of positions have the exact experts in both"

    def errors(logits: np.ndarray) -> np.ndarray:
        return (np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1))[clear]

    for name, figure in (("median", 50), ("p99", 99)):
        mine, other = np.percentile(errors(ours), figure), np.percentile(errors(theirs), figure)
        print(f"{arch} {name}: {mine:.5f} against {other:.5f}; apart {our_flips.mean():.2%}, {their_flips.mean():.2%}")
        assert mine <= 1.1 * other, f"{arch}, seeds 4-11: {name} error {mine:.4f}, transformers {other:.4f}"
