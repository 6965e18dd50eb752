"""Decode and prefill over expert servers, in processes as `eaas serve` has them, beside the same in one process.

A checkpoint of shape S is made from a seed; two servers load it under a router, and a third process is to them what an
attention worker is. The tokens must be equal; a step's time beyond that with the experts in this process, by the layer,
is what disaggregation costs on one card. Several processes share it, so MPS has to be had: where it is refused, the
reason is all there is to report.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.process import StartFailed

Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run: on a GPU as it stands here, elsewhere less.

    Attributes:
        rows: Of the steps that are timed, each a sequence; the last one is a prompt of one sequence.
        limit_s: Of a step.
    """

    device: str = "cuda:0"
    shape: str = "S"
    changes: Mapping[str, int] | None = None
    sequences: int = 8
    prompt: int = 40
    tokens: int = 16
    rows: tuple[int, ...] = (1, 32, 256)
    steps: int = 20
    limit_s: float = 20.0
    lease_s: float = 3.0


def run(report: Report, sizes: Sizes = Sizes()) -> None:
    """Report the tokens, then the times; or why there is no cluster."""
    seed = random.SystemRandom().randrange(1 << 31)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        model = make_model(
            sizes.shape,
            "qwen3_moe",
            Path(folder) / "model",
            seed,
            dtype="bfloat16",
            overrides=sizes.changes or {},
        )
        config = ClusterConfig(
            model=model, served_model_name="m", device=(sizes.device,), experts=2, replicas=2, attention=0,
            endpoint=False, state_dir=Path(folder) / "state", lease_s=sizes.lease_s,
        )  # fmt: skip
        cluster = LocalCluster(config)
        closing.callback(cluster.stop)
        try:
            cluster.start()
        except StartFailed as failed:
            report({"what": "no cluster", "said": str(failed)[-600:]})
            return
        # In a process of its own: this one has asked the driver before there was MPS, and is no client of it.
        words = [str(model), cluster.router_address, str(seed), json.dumps(asdict(sizes))]
        command = [sys.executable, "-m", "benchmarks.gpu.remote", *words]
        subprocess.run(command, env=os.environ | cluster._environment, check=True)


@contextmanager
def client_of(model: Path, router_address: str, sizes: Sizes) -> Iterator[Any]:
    """What a worker asks its expert servers through, once every expert has a replica."""
    from eaas.placement import Placement
    from eaas.worker.config import WorkerOptions
    from experts.checkpoint import Checkpoint
    from experts.client import ExpertClient
    from experts.devices import Device
    from experts.formats import experts_dtype
    from experts.model import ExpertShape
    from p2p.native import named_cores
    from p2p.transport import TransportChoice
    from router.client import RouterClient
    from router.view import ATTENTION

    options = WorkerOptions(router=router_address, model=model, device=sizes.device)
    device, checkpoint = Device.parse(sizes.device), Checkpoint.open(model)
    backend, shape = device.backend(), ExpertShape.from_config(checkpoint.config)
    dtype = experts_dtype(options.dtype, checkpoint.config, device.keeps)
    numerics = shape.numerics_class(backend.numerics_class(dtype))
    with ExitStack() as closing:
        router = RouterClient(router_address, None)
        closing.callback(router.close)
        identity = router.join(
            pool=ATTENTION, address="nowhere:1", model_hash=checkpoint.fingerprint, numerics_class=numerics,
            layers=shape.layers, experts=shape.experts, core=named_cores(())[0],
        )  # fmt: skip
        endpoint = device.opener(TransportChoice.parse(options.transport))(identity.name, identity.incarnation, 1)
        closing.callback(endpoint.close)
        client = ExpertClient(
            endpoint=endpoint, shape=shape, dtype=dtype, model_hash=checkpoint.fingerprint,
            incarnation=identity.incarnation, on_adopted=router.ack, max_tokens=max(*sizes.rows, sizes.prompt),
            deadline_s=sizes.limit_s, backend=backend, patience_s=sizes.limit_s,
        )  # fmt: skip
        closing.callback(client.close)
        placement = Placement(router, client, numerics)
        router.start(on_view=placement.apply, load=dict, on_fenced=lambda reason: None)
        placement.wait(60.0, threading.Event())
        yield client


def measure(report: Report, model: Path, client: Any, sizes: Sizes, seed: int) -> None:
    """The same steps over the servers and with the experts in this process."""
    import numpy as np

    from benchmarks.gpu import decode
    from eaas.gpu.decoder import GpuDecoder
    from eaas.gpu.weights import DeviceWeights, source_of
    from eaas.model.loader import load_spec, load_weights
    from experts.checkpoint import Checkpoint
    from experts.model import ExpertShape

    checkpoint, device = Checkpoint.open(model), client.backend.device
    spec, shape = load_spec(checkpoint), ExpertShape.from_config(checkpoint.config)
    weights = DeviceWeights.upload(spec, source_of(load_weights(checkpoint, spec)), device)
    # A step has room for a power of two.
    most = 1 << (max(*sizes.rows, sizes.prompt, 8) - 1).bit_length()
    blocks = -(-(sizes.prompt + sizes.tokens + 2 * sizes.steps) // decode.BLOCK_TOKENS)
    kv_blocks = blocks * max(*sizes.rows, sizes.sequences)
    decode.DEVICE = str(device)
    local = decode.experts_of(checkpoint, shape, most)
    source = np.random.default_rng(seed)
    prompts = [source.integers(3, spec.vocab, sizes.prompt).tolist() for _ in range(sizes.sequences)]
    decode.NEW_TOKENS = sizes.tokens
    made, times = [], []
    for experts in (client.backend, local):
        decoder = GpuDecoder(spec, weights, experts, kv_blocks=kv_blocks, max_rows=most, device=device)
        made.append(decode.generate(decoder, sizes.sequences, sizes.prompt, prompts))
        times.append([step_s(decoder, rows, blocks, sizes) for rows in sizes.rows])
        decoder.close()
    tokens = [token for one in made[0][0] for token in one]
    equal = sum(one == other for one, other in zip(tokens, (t for one in made[1][0] for t in one), strict=True))
    report(
        {
            "what": "tokens over servers, as in this process", "seed": seed, "tokens": len(tokens), "equal": equal,
            "holds": equal == len(tokens) and made[0][1] == made[1][1],
        }
    )  # fmt: skip
    for rows, there_s, here_s in zip(sizes.rows, *times, strict=True):
        report(
            {
                "what": "steps over servers", "rows": rows, "ms": round(1e3 * there_s, 3),
                "local_ms": round(1e3 * here_s, 3),
                "us_a_layer": round(1e6 * (there_s - here_s) / len(spec.moe_layers), 1),
            }
        )  # fmt: skip


def step_s(decoder: Any, rows: int, blocks: int, sizes: Sizes) -> float:
    """Median seconds of a decode step of so many sequences."""
    import numpy as np

    from benchmarks.gpu import decode

    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    times: list[float] = []
    for position in range(sizes.prompt, sizes.prompt + sizes.steps + 2):
        plan = decode.plan_of([5] * rows, [position] * rows, range(rows), tables, range(rows))
        times.append(decode.timed(decoder, plan, rows))
    return statistics.median(times[2:])


def main() -> None:
    """The client's process: MODEL ROUTER SEED SIZES."""
    from benchmarks.gpu.section import report

    model, router_address, seed, given = sys.argv[1:]
    sizes = Sizes(**json.loads(given))
    with client_of(Path(model), router_address, sizes) as client:
        measure(report, Path(model), client, sizes, int(seed))


if __name__ == "__main__":
    main()
