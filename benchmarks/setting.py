"""What the commands that compare engines share: options, checkpoints, clusters, rounds."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.engines.process import EngineProcess, available_cores, missing, settle
from benchmarks.engines.run import Speed
from benchmarks.http_client import StreamRecord, speed_of, stream_batch
from benchmarks.make_model import SHAPES, make_model
from benchmarks.report import RESULTS
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster

T = TypeVar("T")
NAME = "bench"
# Distribution of each engine's package, for the record of versions.
DISTRIBUTIONS = {"transformers": "transformers", "llamacpp": "llama-cpp-python"}


class NotTheSameModel(RuntimeError):
    """An engine computes something else, so its speed means nothing."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that all commands have."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", default="S", choices=sorted(SHAPES))
    options.add_argument("--rounds", type=int, default=9, help="interleaved rounds, after one that warms up")
    options.add_argument("--threads", type=int, default=0, help="cores to use; 0: all that are allowed")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON lines")
    options.add_argument("--checkpoints", type=Path, help="folder that keeps checkpoints for the next run")
    # A command that is told to end takes its processes and files with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return options


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


@contextlib.contextmanager
def checkpoint(shape: str, keep: Path | None = None, **overrides: object) -> Iterator[Path]:
    """A Qwen3-MoE checkpoint of random weights in bfloat16, for the length of a `with`.

    Args:
        keep: Where to look for it first, and to leave it; a name tells shape and overrides.
        overrides: Fields of config.json.
    """
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as folder:
        name = "-".join([shape, *(f"{field}={value}" for field, value in sorted(overrides.items()))])
        kept = (keep or Path(folder)) / name
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            # Under its name only when it is whole.
            fresh = kept.with_name(f"{name}.partial")
            make_model(shape, "qwen3_moe", fresh, seed=1, overrides=overrides).rename(kept)
        yield kept


def cluster(
    model: Path,
    cores: Sequence[int],
    *,
    servers: int,
    workers: int = 1,
    lanes: int = 0,
    replicas: int = 0,
    endpoint: bool,
    kv_tokens: int = 65536,
) -> LocalCluster:
    """A cluster not started yet: with the HTTP endpoint, or the bare expert pool.

    Args:
        workers: Attention workers, where there is an endpoint.
        lanes: Of each expert server; 0: the cores are dealt out among them.
        replicas: Of each expert; 0: two where there are two servers, as `eaas serve` does.
    """
    config = ClusterConfig(
        model=model,
        served_model_name=NAME,
        experts=servers,
        expert_lanes=lanes,
        replicas=replicas or min(2, servers),
        port=0,
        cores=tuple(cores),
        endpoint=endpoint,
        attention=workers if endpoint else 0,
        kv_tokens=kv_tokens,
    )
    return LocalCluster(config)


class HttpEndpoint:
    """An engine as clients meet it: streamed completions over raw sockets, one for each prompt, all at once."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    @classmethod
    def of(cls, running: LocalCluster) -> HttpEndpoint:
        """Our own, of a cluster that runs."""
        host, _, port = running.url.removeprefix("http://").rpartition(":")
        return cls((host, int(port)))

    def streams(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[StreamRecord]:
        """What came of each, and when."""
        return stream_batch(self.address, NAME, prompts, tokens)

    def speed(self, prompts: Sequence[Sequence[int]], tokens: int) -> Speed:
        """Of all together."""
        return speed_of(self.streams(prompts, tokens), tokens)

    def texts(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
        """What each stream said."""
        return ["".join(stream.texts()) for stream in self.streams(prompts, tokens)]

    def first_texts(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The first token of each answer."""
        return [stream.texts()[0] for stream in self.streams(prompts, 2)]


def start_peers(
    names: Sequence[str],
    model: Path,
    cores: Sequence[int],
    closing: contextlib.ExitStack,
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, EngineProcess]:
    """The engines that can run here, by name; for each that can't, one line on stderr says what it needs."""
    engines: dict[str, EngineProcess] = {}
    for name in names:
        reason = missing(name)
        if reason:
            print(reason, file=sys.stderr)
            continue
        process = EngineProcess(name, model, cores, **options.get(name, {}))
        engines[name] = closing.enter_context(process)
    return engines


def interleave(measures: Mapping[str, Callable[[int], T]], rounds: int, pids: Mapping[str, int]) -> dict[str, list[T]]:
    """Measure each once a round, after all processes have come to rest; each round begins with the next one.

    Args:
        measures: By name; called with the number of the round.
        rounds: That count; round 0 warms up.
        pids: Processes that must not disturb one another.

    Returns:
        Results by name, in the order of rounds.
    """
    names = list(measures)
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            settle(pids)
            result = measures[name](number)
            if number:
                results[name].append(result)
    return results


def cores_of(options: argparse.Namespace) -> list[int]:
    """The cores that the options allow."""
    return available_cores(options.threads)
