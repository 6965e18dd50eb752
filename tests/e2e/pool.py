"""An engine in the test's process over a pool of real expert servers, so that a test sees every logit's bits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.loader import load_spec, load_weights
from eaas.placement import Placement
from eaas.worker.decoder import Decoder, client_backend
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import SamplingParams, Submit
from eaas.worker.request import Request
from experts.checkpoint import Checkpoint
from experts.client import ExpertClient
from experts.devices import Device
from experts.formats import experts_dtype
from experts.kernels import numerics_class
from experts.model import Dtype, ExpertShape
from p2p.local import ShmEndpoint
from router.client import RouterClient
from router.view import Member
from tests.e2e.waiting import LIMIT_S
from tests.eaas.fake_decoder import Watched
from tests.eaas.local_experts import LocalExperts

CORES = (0, 1)
BLOCK_TOKENS = 16
Logits = dict[tuple[str, int], bytes]


class Driver:
    """An engine whose every row of logits is kept."""

    def __init__(
        self,
        model: Path,
        experts: LocalExperts | ExpertClient,
        *,
        step_tokens: int = 64,
        kv_blocks: int = 256,
        prefix_reuse: bool = False,
        deadline_s: float = 20.0,
        dtype: str = "auto",
    ) -> None:
        checkpoint = Checkpoint.open(model)
        spec = replace(load_spec(checkpoint), dtype=Dtype.resolve(dtype, checkpoint.config))
        self._experts = experts  # The decoder holds only its address.
        decoder = Decoder(
            spec,
            load_weights(checkpoint, spec),
            experts.backend if isinstance(experts, LocalExperts) else client_backend(experts.handle),
            CORES,
            kv_blocks=kv_blocks,
            max_rows=step_tokens,
        )
        self.logits: Logits = {}
        self.tokens: dict[str, list[int]] = {}
        self.steps = 0
        self.engine = Engine(
            Watched(decoder, self._keep),
            EngineConfig(
                max_model_len=spec.max_model_len,
                step_tokens=step_tokens,
                # Steps are counted, and cut where a test says: by rows alone, not by the time they take.
                prefill_share=1.0,
                kv_blocks=kv_blocks,
                block_tokens=BLOCK_TOKENS,
                vocab=spec.vocab,
                deadline_s=deadline_s,
                prefix_reuse=prefix_reuse,
            ),
        )
        self._decoder = decoder

    def _keep(self, request: Request, index: int, logits: np.ndarray) -> None:
        self.logits[request.id, index] = logits.tobytes()

    def submit(self, id: str, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        refusal = self.engine.submit(Submit(id=id, attempt=1, prompt=list(prompt), output=[], params=params))
        assert refusal is None, refusal
        self.tokens[id] = []

    def step(self) -> bool:
        outcome = self.engine.step()
        if outcome is None:
            return False
        self.steps += 1
        assert not outcome.failed, outcome.failed
        for token in outcome.tokens.get(0, []):
            assert token.index == len(self.tokens[token.id]), f"{token} after {self.tokens[token.id]}"
            self.tokens[token.id].append(token.token)
        return True

    def run(
        self, prompts: dict[str, list[int]], max_tokens: int, before: Callable[[int], None] | None = None
    ) -> Logits:
        """Submit all at once and step to the end; `before` gets the number of each step. The logits of this run."""
        self.logits.clear()
        self.steps = 0
        for id, prompt in prompts.items():
            self.submit(id, prompt, max_tokens)
        while self.engine.has_work:
            if before is not None:
                before(self.steps)
            self.step()
        return dict(self.logits)

    def close(self) -> None:
        self._decoder.close()


def local_experts(model: Path, lanes: int = len(CORES), dtype: str = "auto") -> LocalExperts:
    """Every expert in this process: no server, no window, no router; the independent record."""
    checkpoint = Checkpoint.open(model)
    element = experts_dtype(dtype, checkpoint.config, Device().keeps)
    return LocalExperts.load(checkpoint, element, lanes=lanes)


class Pool:
    """Router and expert servers as processes, and an expert client of this process."""

    def __init__(self, model: Path, servers: int, replicas: int, dtype: str = "auto") -> None:
        config = ClusterConfig(
            model=model,
            served_model_name="pool",
            experts=servers,
            attention=0,
            replicas=replicas,
            cores=CORES,
            endpoint=False,
            dtype=dtype,
        )
        self._closing = contextlib.ExitStack()
        self.cluster = self._closing.enter_context(LocalCluster(config))
        checkpoint = Checkpoint.open(model)
        element = experts_dtype(dtype, checkpoint.config, Device().keeps)
        shape = ExpertShape.from_config(checkpoint.config)
        self.router = RouterClient(self.cluster.router_address)
        self._closing.callback(self.router.close)
        identity = self.router.join(
            pool="attention",
            address="127.0.0.1:9",
            model_hash=checkpoint.fingerprint,
            numerics_class=shape.numerics_class(numerics_class(element)),
            layers=shape.layers,
            experts=shape.experts,
        )
        self._closing.callback(self.router.leave)
        endpoint = self._closing.enter_context(ShmEndpoint(identity.name, identity.incarnation, len(CORES)))
        self.client = ExpertClient(
            endpoint=endpoint,
            shape=shape,
            dtype=element,
            model_hash=checkpoint.fingerprint,
            incarnation=identity.incarnation,
            cores=CORES,
            max_tokens=512,
            deadline_s=20.0,
        )
        self._closing.callback(self.client.close)
        self.placement = Placement(self.router, self.client, shape.numerics_class(numerics_class(element)))
        self.router.start(on_view=self.placement.apply)
        self.placement.wait(30, threading.Event())
        self.replicas = replicas

    def replicas_min(self) -> int:
        """Serving replicas of the expert that has the fewest, among servers whose process is alive."""
        view = self.router.view
        alive = set(self.cluster.pids().values())
        if view is None:
            return 0
        pairs = ((layer, expert) for layer in range(view.layers) for expert in range(view.experts))
        return min(sum(member.pid in alive for member in view.replicas(*pair)) for pair in pairs)

    def serving(self) -> list[Member]:
        """Expert servers that serve, by the router's word."""
        view = self.router.view
        return [member for member in view.pool("expert") if member.state == "serving"] if view else []

    def wait_exit(self, name: str, timeout_s: float = LIMIT_S) -> None:
        """Wait until the launcher has seen the end of a member's process."""
        end_s = time.monotonic() + timeout_s
        while name in self.cluster.pids():
            assert time.monotonic() < end_s, f"{name} still runs {timeout_s} s after it was killed"
            time.sleep(0.001)

    def settle(self, servers: int, timeout_s: float = LIMIT_S) -> None:
        """Wait until that many servers serve and are attached here, with every expert on its wanted replicas."""
        end_s = time.monotonic() + timeout_s
        while True:
            self.placement.ack()
            serving = {member.name for member in self.serving()} & set(self.cluster.pids())
            if (
                len(serving) >= servers
                and self.replicas_min() >= self.replicas
                and serving <= set(self.client.attached)
            ):
                return
            assert time.monotonic() < end_s, f"not whole after {timeout_s} s: {serving}, {self.replicas_min()} replicas"
            time.sleep(0.01)

    def close(self) -> None:
        self._closing.close()


@contextlib.contextmanager
def pool_of(model: Path, servers: int, replicas: int, dtype: str = "auto") -> Iterator[Pool]:
    """A pool for the length of a `with`."""
    pool = Pool(model, servers, replicas, dtype)
    try:
        yield pool
    finally:
        pool.close()
