"""Our engine in this process, driven directly: over expert servers ("ours"), or with every expert here ("inproc").

The same decoder, kernels and lanes in both; only the expert backend differs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.gate_tap import GateTap
from benchmarks.engines.run import Run
from eaas.model.loader import load_spec, load_weights
from eaas.placement import Placement
from eaas.worker.decoder import Decoder, ExpertBackend, client_backend
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import SamplingParams, Submit
from experts.checkpoint import Checkpoint
from experts.client import ExpertClient
from experts.kernels import numerics_class
from experts.model import Dtype, ExpertShape
from p2p.local import ShmEndpoint
from router.client import RouterClient
from tests.eaas.local_experts import LocalExperts

BLOCK_TOKENS = 16
STEP_TOKENS = 512
DEADLINE_S = 30.0
ATTACH_S = 110.0


class RunFailed(RuntimeError):
    """The engine refused or failed a request."""


@dataclass(kw_only=True)
class Driven:
    """An engine over one expert backend. `closing` owns whatever the backend needs.

    Attributes:
        tap: Counts the experts chosen, where asked for: runs with it are not timed.
    """

    model: Path
    backend: ExpertBackend
    cores: Sequence[int]
    kv_tokens: int
    closing: contextlib.ExitStack
    tap: GateTap | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checkpoint = Checkpoint.open(self.model)
        spec = load_spec(checkpoint)
        blocks = self.kv_tokens // BLOCK_TOKENS
        weights = load_weights(checkpoint, spec)
        self.decoder = Decoder(spec, weights, self.backend, self.cores, kv_blocks=blocks, max_rows=STEP_TOKENS)
        config = EngineConfig(
            max_model_len=spec.max_model_len,
            step_tokens=STEP_TOKENS,
            kv_blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            vocab=spec.vocab,
            deadline_s=DEADLINE_S,
            prefix_reuse=False,
        )
        self._seen: list[np.ndarray] = []
        self._engine = Engine(self.decoder, config)
        # Of its own, so that a timed run never looks at logits.
        self._looking = Engine(_Kept(self.decoder, self._seen), config)
        self.facts |= {"numerics_class": numerics_class(self.decoder.dtype), "lanes": len(self.cores)}

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        """`tokens` new tokens for every prompt; each step is one call of the engine."""
        return self._run(self._engine, prompts, tokens)

    def logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [prompts, vocab] after the last token of each prompt, one prompt at a time."""
        self._seen.clear()
        for prompt in prompts:
            self._run(self._looking, [prompt], 1)
        return np.stack(self._seen)

    def experts_used(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """Run untimed and count the experts that decoding chose: distinct ones a step, over all layers.

        Raises:
            RunFailed: this engine was made without a tap.
        """
        if self.tap is None:
            raise RunFailed("This engine counts no experts; start it with count_experts.")
        self.tap.start(len(prompts))
        self._run(self._engine, prompts, tokens)
        return {"distinct_per_step": self.tap.distinct_per_step(), "steps": self.tap.steps}

    def close(self) -> None:
        """Stop the lanes and leave the pool."""
        self.decoder.close()
        self.closing.close()

    def _run(self, engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        made: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            submit = Submit(id=str(number), attempt=1, prompt=list(prompt), output=[], params=params)
            refusal = engine.submit(submit)
            if refusal is not None:
                raise RunFailed(refusal.message)
        times, counts = [began], []
        while engine.has_work:
            outcome = engine.step()
            times.append(time.perf_counter())
            if outcome is None or outcome.failed:
                raise RunFailed(f"a step failed: {outcome and outcome.failed}")
            emitted = outcome.tokens.get(0, [])
            counts.append(len(emitted))
            for token in emitted:
                made[int(token.id)].append(token.token)
        return Run(
            tokens=made,
            total_s=times[-1] - began,
            steps_s=np.diff(times).tolist(),
            made=counts,
        )


class _Kept:
    """A decoder that keeps the logits by which tokens are chosen."""

    def __init__(self, decoder: Decoder, seen: list[np.ndarray]) -> None:
        self._decoder, self._seen = decoder, seen

    def step(self, plan: StepPlan, deadline_s: float) -> np.ndarray:
        logits = self._decoder.step(plan, deadline_s)
        self._seen += [row.copy() for row in logits[: len(plan.requests)]]
        return logits


def inproc(model: Path, cores: Sequence[int], kv_tokens: int, count_experts: bool = False) -> Driven:
    """Every expert in this process: what disaggregation is measured against."""
    checkpoint = Checkpoint.open(model)
    dtype = load_spec(checkpoint).dtype
    experts = LocalExperts.load(checkpoint, dtype, lanes=len(cores), max_rows=STEP_TOKENS)
    closing = contextlib.ExitStack()
    closing.callback(lambda: experts)  # The decoder holds only its address.
    return _driven(model, experts.backend, cores, kv_tokens, closing, count_experts)


def ours(model: Path, cores: Sequence[int], kv_tokens: int, router: str, count_experts: bool = False) -> Driven:
    """Experts on the servers of a running pool.

    It joins the router as a gateway would: an attention worker's membership would draw real gateways to it.

    Args:
        router: host:port of the pool's router.
    """
    checkpoint = Checkpoint.open(model)
    shape = ExpertShape.from_config(checkpoint.config)
    dtype = Dtype.resolve("auto", checkpoint.config)
    with contextlib.ExitStack() as closing:
        client_of_router = RouterClient(router)
        closing.callback(client_of_router.close)
        identity = client_of_router.join(
            pool="gateway",
            address="127.0.0.1:9",
            model_hash=checkpoint.fingerprint,
            layers=shape.layers,
            experts=shape.experts,
        )
        closing.callback(client_of_router.leave)
        endpoint = closing.enter_context(ShmEndpoint(identity.name, identity.incarnation, len(cores)))
        client = ExpertClient(
            endpoint=endpoint,
            shape=shape,
            dtype=dtype,
            model_hash=checkpoint.fingerprint,
            incarnation=identity.incarnation,
            cores=cores,
            max_tokens=STEP_TOKENS,
            deadline_s=DEADLINE_S,
        )
        closing.callback(client.close)
        placement = Placement(client_of_router, client, numerics_class(dtype))
        client_of_router.start(on_view=placement.apply)
        placement.wait(ATTACH_S, threading.Event())
        driven = _driven(model, client_backend(client.handle), cores, kv_tokens, closing.pop_all(), count_experts)
    driven.facts |= {"servers": len(client.attached), "experts_class": numerics_class(dtype)}
    return driven


def _driven(
    model: Path,
    backend: ExpertBackend,
    cores: Sequence[int],
    kv_tokens: int,
    closing: contextlib.ExitStack,
    count_experts: bool,
) -> Driven:
    tap = GateTap(backend, load_spec(Checkpoint.open(model)).moe.top_k) if count_experts else None
    backend = tap.backend if tap else backend
    return Driven(model=model, backend=backend, cores=cores, kv_tokens=kv_tokens, closing=closing, tap=tap)
