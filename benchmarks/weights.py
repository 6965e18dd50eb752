"""How fast a new replica has its weights, by where they come from, and what that costs a cluster which is serving.

A receiver in this process, at the priority that expert servers load at, brings every expert of the model to where it
could be served: verified, in a packed file, its self-test row computed. Sources: this host's packed file, the
checkpoint, packed one expert at a time, and a server of a running cluster, over the transport named. Each is measured
alone, and again and again for as long as streams decode beside; their speed is given beside that of undisturbed ones.

    python -m benchmarks.weights --shape S --transport shm,nixl
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import setting
from benchmarks.report import record, spread
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from experts.checkpoint import Checkpoint
from experts.kernels import answer_of
from experts.manifest import Manifest
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts, layout_of
from experts.transfer import at_low_priority
from experts.weights import Weights, manifest_from
from p2p.endpoint import Endpoint
from p2p.transport import TransportChoice
from router.client import RouterClient
from router.view import View

PROMPTS = 4
PROMPT_TOKENS = 16
SERVERS = 2
INCARNATION = 1 << 40


@dataclass(frozen=True, kw_only=True)
class World:
    """What the receiver takes from."""

    checkpoint: Checkpoint
    whole: PackedExperts
    manifest: Manifest
    view: View
    endpoint: Endpoint
    folder: Path


def begun(world: World, source: str) -> Weights:
    """A receiver that has nothing but that source."""
    fresh = Path(tempfile.mkdtemp(dir=world.folder))
    return Weights(
        name="bench",
        packed=world.whole if source == "packed" else PackedExperts.begin(world.manifest, fresh),
        endpoint=world.endpoint if source == "peer" else None,
        checkpoint=world.checkpoint if source == "checkpoint" else None,
    )


def take(world: World, source: str, until: Callable[[], bool] = lambda: False) -> tuple[int, float]:
    """Bring experts here until all are, or `until` says so; bytes and seconds."""
    weights, shape, done = begun(world, source), world.manifest.layout.shape, 0
    began_s = time.monotonic()
    try:
        for index in range(world.manifest.layout.count):
            layer, expert = divmod(index, shape.experts)
            found = answer_of(weights.expert(layer, expert, world.view))
            if found != world.manifest.answer(layer, expert):
                raise RuntimeError(f"expert {expert} of MoE layer {layer} from {source} computes other bits")
            done += world.manifest.layout.blob_bytes
            if until():
                break
    finally:
        took_s = time.monotonic() - began_s
        weights.rest()
        if source != "packed":
            weights.packed.path.unlink()
    return done, took_s


def at_loaders_priority(act: Callable[[], None]) -> threading.Thread:
    """Run it as an expert server loads."""

    def run() -> None:
        at_low_priority()
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def alone(world: World, source: str) -> float:
    """Bytes per second with nothing beside."""
    found: list[tuple[int, float]] = []
    at_loaders_priority(lambda: found.append(take(world, source))).join()
    return found[0][0] / found[0][1]


def beside(world: World, source: str, decode: Callable[[], float]) -> tuple[float, float]:
    """Bytes per second, and the tokens per second decoded meanwhile."""
    ended, found = threading.Event(), list[tuple[int, float]]()

    def keep_on() -> None:
        while not ended.is_set():
            found.append(take(world, source, ended.is_set))

    thread = at_loaders_priority(keep_on)
    try:
        tokens_per_s = decode()
    finally:
        ended.set()
        thread.join()
    return sum(nbytes for nbytes, _ in found) / sum(seconds for _, seconds in found), tokens_per_s


@contextlib.contextmanager
def world_of(model: Path, transport: str, cores: Sequence[int], folder: Path) -> Iterator[tuple[World, LocalCluster]]:
    """A cluster that serves, and a receiver beside it."""
    config = ClusterConfig(
        model=model, served_model_name=setting.NAME, experts=SERVERS, replicas=SERVERS, port=0, cores=tuple(cores),
        transport=transport,
    )  # fmt: skip
    with contextlib.ExitStack() as closing:
        running = closing.enter_context(LocalCluster(config))
        router = RouterClient(running.router_address)
        closing.callback(router.close)
        checkpoint = Checkpoint.open(model)
        shape, dtype = ExpertShape.from_config(checkpoint.config), Dtype.BFLOAT16
        layout, view = layout_of(shape, dtype, checkpoint.fingerprint), router.status().view
        manifest = manifest_from(view, layout)
        if manifest is None:
            raise RuntimeError("no server of the cluster says what its experts are")
        endpoint = TransportChoice.parse(transport).opener()("bench/1", INCARNATION, 1)
        closing.callback(endpoint.close)
        whole = PackedExperts.open(checkpoint, shape, dtype)
        yield (
            World(
                checkpoint=checkpoint,
                whole=whole,
                manifest=manifest,
                view=view,
                endpoint=endpoint,
                folder=folder,
            ),
            running,
        )


def measure(
    world: World, running: LocalCluster, sources: Sequence[str], rounds: int, tokens: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Bytes and tokens per second by source; "none" is decoding undisturbed."""
    http = setting.HttpEndpoint.of(running)
    prompts = [[(37 * row + 11 * at) % 500 + 3 for at in range(PROMPT_TOKENS)] for row in range(PROMPTS)]
    decode = lambda: http.speed(prompts, tokens).decode  # noqa: E731
    figures: dict[str, dict[str, list[float]]] = {}

    def note(source: str, figure: str, value: float, number: int) -> None:
        if number:
            figures.setdefault(source, {}).setdefault(figure, []).append(value)

    for number in range(rounds + 1):
        for source in sources:
            note(source, "bytes_per_s", alone(world, source), number)
            note("none", "tokens_per_s", decode(), number)
            rate, tokens_per_s = beside(world, source, decode)
            note(source, "bytes_per_s_beside_streams", rate, number)
            note(source, "tokens_per_s", tokens_per_s, number)
    return {source: {figure: spread(values) for figure, values in found.items()} for source, found in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    options = setting.parser(__doc__)
    options.add_argument("--transport", default="shm", help="shm, nixl or both with a comma")
    options.add_argument("--tokens", type=int, default=64, help="tokens of each stream beside")
    parsed = options.parse_args(arguments)
    cores = setting.cores_of(parsed)
    with contextlib.ExitStack() as closing:
        model = closing.enter_context(setting.checkpoint(parsed.shape, parsed.checkpoints))
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="eaas-bench-weights-")))
        # Of this cluster alone: it is packed once, here.
        os.environ["XDG_CACHE_HOME"] = str(folder)
        for index, transport in enumerate(parsed.transport.split(",")):
            with world_of(model, transport, cores, folder) as (world, running):
                sources = ["peer"] if index else ["packed", "checkpoint", "peer"]
                figures = measure(world, running, sources, parsed.rounds, parsed.tokens)
                layout = world.manifest.layout
                nbytes = layout.count * layout.blob_bytes
            record(
                "weights",
                {
                    "shape": parsed.shape,
                    "transport": transport,
                    "experts": layout.count,
                    "expert_bytes": layout.blob_bytes,
                    "rounds": parsed.rounds,
                    "streams": PROMPTS,
                    "figures": figures,
                    "replica_s": {
                        source: float(f"{nbytes / found['bytes_per_s']['median']:.4g}")
                        for source, found in figures.items()
                        if "bytes_per_s" in found
                    },
                },
                packages=("numpy",),
                folder=parsed.results,
            )


if __name__ == "__main__":
    main()
