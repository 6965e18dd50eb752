"""A local cluster under streams while faults are injected into its processes, and what its clients saw of that."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.closed_loop import ClosedLoop
from benchmarks.recovery import Observer, whole
from benchmarks.report import RESULTS
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.gateway.status import replicas_min
from eaas.model.loader import resolve_model
from eaas.ops.load.record import StreamRecord, Verdict, compare
from router.client import RouterClient
from router.view import ATTENTION, EXPERT, SERVING, View

NAME = "experiment"
# A pool that has not come back by then never will.
LIMIT_S = 60.0


class NotRepaired(RuntimeError):
    """The cluster did not come back; the text says what was missing."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What clients saw that they would not have seen without faults; all zero is the promise."""

    failed: int = 0
    lost: int = 0
    repeated: int = 0
    changed: int = 0

    @classmethod
    def of(cls, verdict: Verdict) -> Counts:
        """Of a comparison with the calm run."""
        return cls(failed=verdict.failed, lost=verdict.lost, repeated=verdict.repeated, changed=verdict.changed)

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    @property
    def clean(self) -> bool:
        """Whether no client saw anything."""
        return self == Counts()


class FaultExperiment:
    """The cluster, its streams, and the texts that they have when nothing is wrong."""

    def __init__(self, cluster: LocalCluster, seen: Observer, options: argparse.Namespace) -> None:
        self.cluster, self.seen, self.config = cluster, seen, cluster.config
        self.router = RouterClient(cluster.router_address)
        self.router.start(on_view=seen.on_view)
        self.streams = ClosedLoop(
            cluster.url,
            NAME,
            streams=options.streams,
            prompts=options.streams * 2,
            tokens=options.tokens,
            seed=options.seed,
        )
        self.reference: list[StreamRecord] = []

    def calm(self) -> None:
        """Learn every prompt's text while nothing is wrong, twice: the second must agree with the first."""
        self.wait("a whole cluster", self.is_whole)
        self.reference = self.streams.once()
        again = compare(self.streams.once(), self.reference)
        if not again.clean or again.unmatched:
            raise RuntimeError(f"two calm runs differ: {again}")

    @property
    def view(self) -> View | None:
        """The newest View."""
        return self.seen.views[-1][1] if self.seen.views else None

    def is_whole(self) -> bool:
        """Whether both pools are as they were begun with, all their processes are ready, and the router answers."""
        view = self.view
        # A process that is not ready has no member's name yet.
        ready = {name for name in self.cluster.pids() if "/" in name}
        return (
            view is not None
            and all(whole(view, pool, self.config) for pool in (EXPERT, ATTENTION))
            and {member.name for pool in (EXPERT, ATTENTION) for member in view.pool(pool)} <= ready
            and {"router", "gateway"} <= {name.partition("/")[0] for name in ready}
        )

    def is_redundant(self) -> bool:
        """Whether every expert is on as many live servers as wanted."""
        view, alive = self.view, set(self.cluster.pids().values())
        return (
            view is not None
            and replicas_min(view) >= self.config.replicas
            and all(member.pid in alive for member in view.pool(EXPERT))
        )

    def wait(self, what: str, reached: Callable[[], bool], limit_s: float = LIMIT_S) -> float:
        """Wait until that holds; how long it took, in seconds.

        Raises:
            NotRepaired: it does not within the limit.
        """
        began_s = time.monotonic()
        while not reached():
            if time.monotonic() - began_s > limit_s:
                members = [f"{one.name} {one.state}" for one in (self.view.members if self.view else ())]
                raise NotRepaired(
                    f"{what}: not within {limit_s:g} s. The router shows {members}; running: {self.cluster.pids()}."
                )
            time.sleep(0.01)
        return time.monotonic() - began_s

    def serving(self) -> list[str]:
        """Names of the expert servers that serve and whose processes are there."""
        pids = self.cluster.pids()
        found = self.view.pool(EXPERT) if self.view else ()
        return sorted(m.name for m in found if m.state == SERVING and pids.get(m.name) == m.pid)

    def workers(self) -> list[str]:
        """Names of the attention workers that take requests."""
        pids = self.cluster.pids()
        return sorted(m.name for m in (self.view.pool(ATTENTION) if self.view else ()) if m.name in pids)

    def compare(self, records: Sequence[StreamRecord]) -> Counts:
        """Those streams against the calm ones."""
        return Counts.of(compare(records, self.reference))


def options(about: str | None, *, streams: int, seconds: float) -> argparse.ArgumentParser:
    """The options that every command of this kind has."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="demo", help="checkpoint folder, hub id, or demo")
    found.add_argument("--experts", type=int, default=4)
    found.add_argument("--replicas", type=int, default=2)
    found.add_argument("--attention", type=int, default=2)
    found.add_argument("--streams", type=int, default=streams, help="clients, each of which asks without pause")
    found.add_argument("--tokens", type=int, default=64, help="of each answer")
    found.add_argument("--seconds", type=float, default=seconds, help="of streams in one run")
    found.add_argument("--seed", type=int, default=1, help="of prompts, victims and moments")
    found.add_argument("--cores", default="", help="as of eaas serve")
    found.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON lines")
    return found


def setting(chosen: argparse.Namespace) -> dict[str, Any]:
    """What the record says of the cluster and its load."""
    names = ("model", "experts", "replicas", "attention", "streams", "tokens", "seed")
    return {name: getattr(chosen, name) for name in names} | {"model": Path(chosen.model).name}


@contextlib.contextmanager
def fault_experiment(chosen: argparse.Namespace, **config: Any) -> Iterator[FaultExperiment]:
    """A cluster for the length of a `with`, calm texts known."""
    seen = Observer()
    wanted = ClusterConfig(
        model=resolve_model(chosen.model),
        served_model_name=NAME,
        experts=chosen.experts,
        attention=chosen.attention,
        replicas=chosen.replicas,
        port=0,
        cores=tuple(int(core) for core in chosen.cores.split(",") if core),
        **config,
    )
    with LocalCluster(wanted, on_event=seen.on_event) as cluster:
        experiment = FaultExperiment(cluster, seen, chosen)
        try:
            experiment.calm()
            yield experiment
        finally:
            experiment.router.close()
