"""Whole steps on a GPU: greedy tokens that no batch size changes, and tokens a second of a Qwen3-30B-A3B shape.

The experts are in this process; their servers are timed in `exchange`. The roofline of a step is the bytes it must
read, over the card's copy rate: dense weights once, each activated expert once, the keys and values of every row's
context. Weights and cache are random; what the gate chooses from them activates nearly as many experts as an even
spread would, and the figure counts those of an even spread.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.local_experts import LocalExperts
from benchmarks.gpu.timing import copy_rate
from benchmarks.make_model import make_model
from eaas.gpu.decoder import GpuDecoder
from eaas.gpu.weights import DeviceWeights, source_of
from eaas.model.families import spec_of, tensors_of
from eaas.model.loader import load_spec, load_weights
from eaas.model.spec import ModelSpec
from eaas.native import SAMPLE_ROW
from eaas.worker.plan import StepPlan
from experts.checkpoint import Checkpoint
from experts.gpu.weights import ExpertWeights
from experts.model import ExpertShape
from tests.eaas.reference import ReferenceDecoder

Say = Callable[[Mapping[str, Any]], None]
DEVICE = "cuda"
BLOCK_TOKENS = 16
NEW_TOKENS = 24
SEQUENCES = 16
CONTEXT = 1024
STEPS = 20
# A row of which two experts are nearly tied may take the other one, and be off by 0.2: the median is judged.
OFF = 0.1
PREFILL_ROWS = 2048
BATCHES = (1, 32, 128, 256)  # the last where the card has room for its cache
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "vocab_size": 151_936,
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "moe_intermediate_size": 768, "intermediate_size": 6144, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "use_sliding_window": False,
}  # fmt: skip


def run(report: Say) -> None:
    """Shape S, the speed of the large shape, then shape L, whose checkpoint takes long to write."""
    greedy(report, "S")
    speed(report)
    greedy(report, "L")


# ---- greedy tokens


def greedy(report: Say, shape: str) -> None:
    """Tokens of a checkpoint made from a seed: alone, in batches, in chunks and in two micro-batches."""
    seed = random.SystemRandom().randrange(1 << 31)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint.open(make_model(shape, "qwen3_moe", Path(folder), seed))
        spec, experts = load_spec(checkpoint), ExpertShape.from_config(checkpoint.config)
        arrays = load_weights(checkpoint, spec)
        weights = DeviceWeights.upload(spec, source_of(arrays), DEVICE)
        local = experts_of(checkpoint, experts, max_rows=512)
        source = np.random.default_rng(seed)
        prompts = [source.integers(3, spec.vocab, size).tolist() for size in source.integers(5, 90, SEQUENCES)]
        decoder = GpuDecoder(spec, weights, local, kv_blocks=256, max_rows=512, device=DEVICE)
        ways = {
            "alone": (False, 1, 512),
            "batches of 16": (False, 16, 512),
            "batches of 5, prompts in chunks of 7": (False, 5, 7),
            "two micro-batches": (True, 16, 64),
        }
        made = {}
        for name, (decoder.double_batching, batch, chunk) in ways.items():
            made[name] = generate(decoder, batch, chunk, prompts)
        first = made["alone"]
        for name, result in made.items():
            report(
                {
                    "what": "greedy tokens and logits, as alone",
                    "shape": shape,
                    "way": name,
                    "sequences": SEQUENCES,
                    "tokens": sum(map(len, result[0])),
                    "seed": seed,
                    "holds": result[0] == first[0] and result[1] == first[1],
                }
            )
        if shape == "S":
            reference = ReferenceDecoder(
                spec,
                arrays,
                lambda layer, expert: tuple(checkpoint.tensor(n) for n in experts.names(layer, expert)),  # type: ignore[return-value]
                rounded=True,
            )
            offs = []
            for prompt, found in zip(prompts, first[1], strict=True):
                wanted = reference.logits(prompt)[-1]
                offs.append(float(np.linalg.norm(np.frombuffer(found, np.float32) - wanted) / np.linalg.norm(wanted)))
            off = statistics.median(offs)
            report(
                {
                    "what": "logits against the definition", "shape": shape, "seed": seed, "off": round(off, 4),
                    "most": round(max(offs), 4), "holds": off < OFF,
                }
            )  # fmt: skip
        decoder.close()


def experts_of(checkpoint: Checkpoint, shape: ExpertShape, max_rows: int) -> LocalExperts:
    """All experts of a checkpoint, on the device."""
    slots = shape.layers * shape.experts
    weights = ExpertWeights.allocate(slots=slots, hidden=shape.hidden, intermediate=shape.intermediate, device=DEVICE)
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            matrices = (checkpoint.tensor(name) for name in shape.names(layer, expert))
            # A copy: a mapped file cannot be written, which torch warns of.
            weights.load(layer * shape.experts + expert, *(np.array(matrix) for matrix in matrices))
    return local_of(weights, shape.layers, shape.experts, shape.top_k, max_rows)


def local_of(weights: ExpertWeights, layers: int, experts: int, top_k: int, max_rows: int) -> LocalExperts:
    """Experts in slots in order of layer and number."""
    table = torch.arange(layers * experts, dtype=torch.int32, device=DEVICE).view(layers, experts)
    # An expert's row goes to combine as servers send it: the bits are to be theirs.
    return LocalExperts(weights=weights, table=table, top_k=top_k, max_rows=max_rows, row_dtype=torch.bfloat16)


def generate(
    decoder: GpuDecoder, batch: int, chunk: int, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[bytes]]:
    """Greedy tokens of each prompt, `batch` sequences at a time, and the bytes of the first logits of each."""
    tokens: list[list[int]] = []
    logits: list[bytes] = []
    for begin in range(0, len(prompts), batch):
        group = [list(prompt) for prompt in prompts[begin : begin + batch]]
        size = -(-max(len(prompt) + NEW_TOKENS for prompt in group) // BLOCK_TOKENS)
        tables = np.arange(len(group) * size, dtype=np.int32).reshape(len(group), size)[::-1].copy()
        for seq, prompt in enumerate(group):
            for first in range(0, len(prompt), chunk):
                part = prompt[first : first + chunk]
                last = first + len(part) == len(prompt)
                made = decoder.step(
                    plan_of(
                        part,
                        range(first, first + len(part)),
                        [seq] * len(part),
                        tables,
                        [len(part) - 1] * last,
                    ),
                    60.0,
                )
            logits.append(made[0].tobytes())
            prompt.append(int(made[0].argmax()))
        for _ in range(NEW_TOKENS - 1):
            rows = range(len(group))
            ends = [len(prompt) - 1 for prompt in group]
            plan = plan_of([prompt[-1] for prompt in group], ends, rows, tables, rows)
            found = decoder.step_tokens(plan, greedily(len(group)), 60.0)
            if not found.sound.all():
                raise RuntimeError(f"Logits are not finite in rows {np.flatnonzero(~found.sound)}.")
            for prompt, token in zip(group, found.tokens.tolist(), strict=True):
                prompt.append(token)
        tokens += [prompt[-NEW_TOKENS:] for prompt in group]
    return tokens, logits


def plan_of(
    tokens: Sequence[int],
    positions: Sequence[int],
    seqs: Sequence[int],
    tables: np.ndarray,
    wanted: Sequence[int],
) -> StepPlan:
    """A step's plan."""
    return StepPlan(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        seqs=np.array(seqs, dtype=np.int32),
        block_tables=tables,
        logits_rows=np.array(wanted, dtype=np.int32),
    )


def greedily(rows: int) -> np.ndarray:
    """The highest logit, for each row."""
    ways = np.zeros(rows, dtype=SAMPLE_ROW)
    ways["repetition"], ways["top_p"], ways["top_count"] = 1.0, 1.0, -1
    return ways


# ---- speed


def speed(report: Say) -> None:
    """Tokens a second of one GPU at each batch size, with and without two micro-batches."""
    spec = replace(spec_of(QWEN3_30B_A3B), max_model_len=CONTEXT + 4 * BLOCK_TOKENS)
    moe, rate = spec.moe, copy_rate()
    torch.manual_seed(random.SystemRandom().randrange(1 << 31))
    weights = DeviceWeights.upload(spec, random_source(spec), DEVICE)
    slots = len(spec.moe_layers) * moe.experts
    experts = ExpertWeights.allocate(
        slots=slots, hidden=spec.hidden, intermediate=moe.expert_intermediate, device=DEVICE
    )
    for slot in range(slots):
        experts.gate_up[slot].normal_(0, spec.hidden**-0.5)
        experts.down[slot].normal_(0, moe.expert_intermediate**-0.5)
    size = -(-spec.max_model_len // BLOCK_TOKENS)
    cache = size * BLOCK_TOKENS * spec.layers * 2 * spec.kv_size * 2
    room = int(0.85 * torch.cuda.mem_get_info()[0])
    batches = [batch for batch in BATCHES if batch * cache <= room]
    most = max(batches)
    local = local_of(experts, len(spec.moe_layers), moe.experts, moe.top_k, PREFILL_ROWS)
    decoder = GpuDecoder(spec, weights, local, kv_blocks=most * size, max_rows=PREFILL_ROWS, device=DEVICE)
    tables = np.random.default_rng(1).permutation(most * size).astype(np.int32).reshape(most, size)
    prefill(report, decoder, tables)
    for decoder.double_batching in (False, True):
        for batch in batches:
            if decoder.double_batching and batch == 1:
                continue
            began_s = time.perf_counter()
            decoder.warm([batch])
            warm_s = time.perf_counter() - began_s
            plans = plans_of(batch, tables, spec.vocab)
            times = [timed(decoder, next(plans), batch) for _ in range(STEPS + 2)][2:]
            step_s = statistics.median(times)
            bound_s = step_bytes(spec, batch) / rate
            report(
                {
                    "what": "decode, Qwen3-30B-A3B shape, experts in this process",
                    "batch": batch,
                    "context": CONTEXT,
                    "two_micro_batches": decoder.double_batching,
                    "tokens_per_s": round(batch / step_s, 1),
                    "step_ms": round(step_s * 1e3, 3),
                    "worst_step_ms": round(max(times) * 1e3, 3),
                    "roofline_ms": round(bound_s * 1e3, 3),
                    "of_roofline": round(bound_s / step_s, 3),
                    "first_step_s": round(warm_s, 1),
                }
            )
            if not decoder.double_batching:
                report(launches(decoder, next(plans), batch))
    decoder.close()


def prefill(report: Say, decoder: GpuDecoder, tables: np.ndarray) -> None:
    """Fill every sequence's context, so that what decoding reads is what a model writes."""
    decoder.warm([PREFILL_ROWS])
    each, took_s = PREFILL_ROWS // CONTEXT, []
    for first in range(0, len(tables), each):
        seqs = np.repeat(np.arange(first, min(first + each, len(tables))), CONTEXT).tolist()
        tokens = np.random.default_rng(first).integers(0, decoder.spec.vocab, len(seqs)).tolist()
        positions = [*range(CONTEXT)] * (len(seqs) // CONTEXT)
        plan = plan_of(tokens, positions, seqs, tables, [len(seqs) - 1])
        began_s = time.perf_counter()
        decoder.step(plan, 60.0)
        took_s.append(time.perf_counter() - began_s)
    step_s = statistics.median(took_s)
    report(
        {
            "what": "prefill, Qwen3-30B-A3B shape, experts in this process",
            "rows": PREFILL_ROWS,
            "tokens_per_s": round(PREFILL_ROWS / step_s, 1),
            "step_ms": round(step_s * 1e3, 2),
        }
    )


def random_source(spec: ModelSpec) -> Callable[[str], Tensor]:
    """Role -> random weights on the device, norms near 1."""
    shapes = {role: plan.shape for role, plan in tensors_of(spec).items()}

    def source(role: str) -> Tensor:
        shape = shapes[role]
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        return tensor.normal_(1.0, 0.1) if len(shape) == 1 else tensor.normal_(0.0, shape[1] ** -0.5)

    return source


def plans_of(batch: int, tables: np.ndarray, vocab: int) -> Iterator[StepPlan]:
    """Decode steps of `batch` sequences, one position further each."""
    for position in range(CONTEXT, CONTEXT + STEPS + 4):
        tokens = np.random.default_rng(position).integers(0, vocab, batch).tolist()
        yield plan_of(tokens, [position] * batch, range(batch), tables, range(batch))


def timed(decoder: GpuDecoder, plan: StepPlan, batch: int) -> float:
    """Seconds of one step by the host's clock, from plan to tokens."""
    began_s = time.perf_counter()
    found = decoder.step_tokens(plan, greedily(batch), 60.0)
    took_s = time.perf_counter() - began_s
    if not found.sound.all():
        raise RuntimeError(f"Logits are not finite in rows {np.flatnonzero(~found.sound)}.")
    return took_s


def step_bytes(spec: ModelSpec, batch: int) -> int:
    """Bytes that a decode step must read: each dense weight and activated expert once, and every row's context."""
    moe = spec.moe
    dense = spec.layers * spec.hidden * (2 * spec.q_size + 2 * spec.kv_size + moe.experts)
    activated = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** batch)
    experts = len(spec.moe_layers) * activated * 3 * spec.hidden * moe.expert_intermediate
    cache = batch * CONTEXT * spec.layers * 2 * spec.kv_size
    return round(2 * (dense + experts + cache + spec.vocab * spec.hidden))


def launches(decoder: GpuDecoder, plan: StepPlan, batch: int) -> dict[str, Any]:
    """What one step asks of the driver, by the profiler's trace: one graph launch, and no kernel beside it."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        decoder.step_tokens(plan, greedily(batch), 60.0)
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith(("cuda", "cu"))}
    graphs = sum(count for name, count in calls.items() if "GraphLaunch" in name)
    kernels = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    return {
        "what": "launches of a decode step",
        "batch": batch,
        "graphs": graphs,
        "kernels_outside": kernels,
        "calls": calls,
        "holds": graphs == 1 and kernels == 0,
    }
