"""Prompt processing: tokens per second of the engine in chunks, and how near its FFN kernels come to the machine.

Two engines over the same weights take turns: experts in this process, and behind expert servers. Beside them, in the
same run, an expert's product at the rows it meets in such a chunk is held against torch's bf16 product and the
measured rate of its instruction (fma, or the dot product of bfloat16 pairs).

    python -m benchmarks.prefill --shape S --prompt 128,512,2048
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import measure, product_case
from benchmarks.make_model import SHAPES, Shape, make_model
from benchmarks.probe import Lanes
from benchmarks.report import record, spread
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.loader import load_spec, load_weights
from eaas.placement import Placement
from eaas.worker.decoder import Decoder, ExpertBackend, client_backend
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import SamplingParams, Submit
from experts.checkpoint import Checkpoint
from experts.client import ExpertClient
from experts.kernels import numerics_class
from experts.model import Dtype, ExpertShape
from p2p.local import ShmEndpoint
from router.client import RouterClient
from tests.eaas.local_experts import LocalExperts

STEP_TOKENS = 512
BLOCK_TOKENS = 16


def engine_over(model: Path, experts: ExpertBackend, cores: Sequence[int], longest: int) -> Engine:
    """An engine in this process; no prefix is reused, so that every prompt is computed."""
    checkpoint = Checkpoint.open(model)
    spec = load_spec(checkpoint)
    blocks = -(-longest // BLOCK_TOKENS) + 2
    decoder = Decoder(spec, load_weights(checkpoint, spec), experts, cores, kv_blocks=blocks, max_rows=STEP_TOKENS)
    config = EngineConfig(
        max_model_len=longest + BLOCK_TOKENS,
        step_tokens=STEP_TOKENS,
        kv_blocks=blocks,
        vocab=spec.vocab,
        prefix_reuse=False,
    )
    return Engine(decoder, config)


def local_experts(model: Path, lanes: int) -> LocalExperts:
    """Every expert packed in this process."""
    return LocalExperts.load(Checkpoint.open(model), Dtype.BFLOAT16, lanes=lanes, max_rows=STEP_TOKENS)


@contextlib.contextmanager
def expert_pool(model: Path, servers: int, cores: tuple[int, ...]) -> Iterator[ExpertClient]:
    """A client attached to that many expert servers, each a process on this host."""
    config = ClusterConfig(
        model=model, served_model_name="bench", experts=servers, attention=0, replicas=min(2, servers), cores=cores,
        endpoint=False,
    )  # fmt: skip
    checkpoint = Checkpoint.open(model)
    shape = ExpertShape.from_config(checkpoint.config)
    with LocalCluster(config) as cluster, contextlib.ExitStack() as closing:
        router = RouterClient(cluster.router_address)
        closing.callback(router.close)
        identity = router.join(
            pool="attention", address="127.0.0.1:9", model_hash=checkpoint.fingerprint, layers=shape.layers,
            numerics_class=numerics_class(Dtype.BFLOAT16), experts=shape.experts,
        )  # fmt: skip
        closing.callback(router.leave)
        endpoint = closing.enter_context(ShmEndpoint(identity.name, identity.incarnation, len(cores)))
        client = ExpertClient(
            endpoint=endpoint, shape=shape, dtype=Dtype.BFLOAT16, model_hash=checkpoint.fingerprint,
            incarnation=identity.incarnation, cores=cores, max_tokens=STEP_TOKENS,
            deadline_s=20.0,
        )  # fmt: skip
        closing.callback(client.close)
        placement = Placement(router, client, numerics_class(Dtype.BFLOAT16))
        router.start(on_view=placement.apply)
        placement.wait(60, threading.Event())
        yield client


def seconds_to_first_token(engine: Engine, prompt: list[int], number: int) -> float:
    """From submission to the only token of a greedy request.

    Raises:
        RuntimeError: the engine refused or lost it.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    refusal = engine.submit(Submit(id=str(number), attempt=1, prompt=prompt, output=[], params=params))
    if refusal is not None:
        raise RuntimeError(f"The engine refused {len(prompt)} tokens: {refusal}.")
    started = time.perf_counter()
    while engine.has_work:
        outcome = engine.step()
        if outcome is not None and outcome.failed:
            raise RuntimeError(f"The prompt failed: {outcome.failed}.")
    return time.perf_counter() - started


def flops_of(shape: Shape, prompt: int) -> float:
    """Operations of a prompt: products of every layer and causal attention; the head runs for one row."""
    width = shape.head_dim * (2 * shape.q_heads + 2 * shape.kv_heads)
    row = 2.0 * shape.hidden * (width + 3 * shape.intermediate * shape.top_k + shape.experts)
    attention = 4.0 * shape.q_heads * shape.head_dim * prompt * (prompt + 1) / 2
    return shape.layers * (row * prompt + attention) + 2.0 * shape.hidden * shape.vocab


def ffn_shares(shape: Shape, rows: int, lanes: Lanes, rounds: int) -> dict[str, Any]:
    """An expert's two products at `rows` rows: shares of the instruction's rate and of torch's bf16 product."""
    shares: dict[str, Any] = {"rows_per_expert": rows}
    for name, n, k in (
        ("gate_up", shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
    ):
        (case,) = product_case(name, n, k, (rows,), gate_up=name == "gate_up")
        result = measure(case, lanes, rounds)
        shares[f"{name}_of_floor"] = result["of_floor"]
        shares[f"{name}_over_torch_bf16"] = result["torch_over_ours"]
        shares["gflop_per_s"] = result["gflop_per_s"]
    return shares


def measure_shape(name: str, options: argparse.Namespace, cores: tuple[int, ...]) -> None:
    """All prompt lengths of one shape; one JSON line each."""
    shape, prompts = SHAPES[name], [int(text) for text in options.prompt.split(",")]
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as folder, contextlib.ExitStack() as closing:
        model = make_model(name, "qwen3_moe", Path(folder) / name, seed=1, dtype="bfloat16")
        local = local_experts(model, len(cores))
        engines = {"in_process": engine_over(model, local.backend, cores, max(prompts))}
        if options.experts:
            client = closing.enter_context(expert_pool(model, options.experts, cores))
            engines["servers"] = engine_over(model, client_backend(client.handle), cores, max(prompts))
        lanes = Lanes(cores)
        closing.callback(lanes.close)
        # A decoder pins the thread that steps it; torch's threads would inherit that one core.
        stepping = closing.enter_context(ThreadPoolExecutor(1))
        for prompt in prompts:
            times: dict[str, list[float]] = {engine: [] for engine in engines}
            for number in range(options.rounds + 1):
                tokens = np.random.default_rng(number).integers(300, shape.vocab, prompt).tolist()
                for label, engine in engines.items():
                    elapsed = stepping.submit(seconds_to_first_token, engine, tokens, number).result()
                    if number:  # The first round warms up.
                        times[label].append(elapsed)
            rows = max(1, min(prompt, STEP_TOKENS) * shape.top_k // shape.experts)
            shares = ffn_shares(shape, rows, lanes, options.rounds)
            rate = shares["gflop_per_s"]["median"] * 1e9
            result = {"shape": name, "prompt": prompt, "threads": len(cores), "rounds": options.rounds}
            for label, taken in times.items():
                result[f"{label}_tokens_per_s"] = spread([prompt / value for value in taken])
                result[f"{label}_of_peak"] = spread([flops_of(shape, prompt) / value / rate for value in taken])
            record("prefill", result | {"experts": options.experts} | shares)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each shape; one JSON line for each prompt length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="S,L", help="shapes, comma-separated")
    parser.add_argument("--prompt", default="128,512,2048", help="prompt lengths, comma-separated")
    parser.add_argument("--experts", type=int, default=2, help="expert servers; 0: experts in this process only")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    with torch.inference_mode():
        for name in options.shape.split(","):
            measure_shape(name, options, tuple(sorted(os.sched_getaffinity(0))))


if __name__ == "__main__":
    main()
