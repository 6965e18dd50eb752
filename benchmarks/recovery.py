"""How long a killed server is missed: seconds until its replicas are back, and until the pool is whole again.

A local cluster serves streams all the while. Again and again one process is killed (SIGKILL), or its work thread alone
is stopped by ptrace while the process lives on and keeps its lease (--fault hang), and the router's Views and the
launcher's reports say when
    gone      the router has fenced it,
    replicas  every expert is on as many live servers as wanted (expert servers only),
    joined    its replacement is a member,
    whole     the pool has its wanted size again: the expert servers serve and every expert has its replicas;
              the attention worker takes requests,
and how much processor time the replacement had used by then.
A stream that fails, or says something else than without a fault, ends the run with an error.

    python -m benchmarks.recovery --kills 20
    python -m benchmarks.recovery --kills 20 --fault hang
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.hang import hanging, threads
from benchmarks.http_client import stream_batch
from benchmarks.report import RESULTS, record
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.gateway.status import replicas_min
from eaas.model.loader import resolve_model
from experts.server import LANE_0
from router.client import RouterClient
from router.view import ATTENTION, EXPERT, SERVING, View

NAME = "recovery"
# A pool that has not come back by then never will.
LIMIT_S = 60.0
# Between two kills, so that the next one meets a pool at rest.
REST_S = 0.5
PHASES = {EXPERT: ("gone", "replicas", "joined", "whole"), ATTENTION: ("gone", "joined", "whole")}
CPU = "start_cpu"


class Observer:
    """Keeps when each View and each report of the launcher came."""

    def __init__(self) -> None:
        self.views: list[tuple[float, View]] = []
        self.ready_s: dict[str, float] = {}

    def on_view(self, view: View) -> None:
        """Called by the router's client."""
        self.views.append((time.monotonic(), view))

    def on_event(self, text: str) -> None:
        """Called by the launcher, with words such as ``attention/2 ready``."""
        name, _, what = text.partition(" ")
        if what == "ready":
            self.ready_s[name] = time.monotonic()

    def first_s(self, since_s: float, holds: Callable[[View], bool]) -> float | None:
        """When the first View came for which that holds, of those after a moment."""
        return next((at_s for at_s, view in list(self.views) if at_s > since_s and holds(view)), None)


class Streams:
    """Clients that ask the same again and again."""

    def __init__(self, url: str, count: int, tokens: int, seed: int) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        draw = random.Random(seed)
        self._prompts = [[draw.randrange(3, 250) for _ in range(24)] for _ in range(count)]
        self._tokens = tokens
        self._wanted = self._texts()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streams")
        self.served = 0
        self.problem = ""

    def _texts(self) -> list[str]:
        if not self._prompts:
            return []
        records = stream_batch(self._address, NAME, self._prompts, self._tokens, timeout_s=LIMIT_S)
        return ["".join(one.texts()) for one in records]

    def _run(self) -> None:
        try:
            while self._prompts and not self._ended.is_set():
                if self._texts() != self._wanted:
                    self.problem = "a stream said something else than without a fault"
                    return
                self.served += len(self._prompts)
        except Exception as error:
            self.problem = f"a stream failed: {error!r}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ask for the length of a `with`.

        Raises:
            RuntimeError: a stream failed, or was not as without a fault.
        """
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()
        if self.problem:
            raise RuntimeError(self.problem)


def whole(view: View, pool: str, config: ClusterConfig) -> bool:
    """Whether a pool is as it was begun with."""
    size = config.experts if pool == EXPERT else config.attention
    serving = [member for member in view.pool(pool) if member.state == SERVING]
    return len(serving) == len(view.pool(pool)) == size and replicas_min(view) >= config.replicas


@contextlib.contextmanager
def killed(pid: int, pool: str) -> Iterator[None]:
    """A process is killed."""
    os.kill(pid, signal.SIGKILL)
    yield


def hung(pid: int, pool: str) -> contextlib.AbstractContextManager[None]:
    """The thread that does a process's work stands still for the length of a `with`: an attention worker's first."""
    return hanging(threads(pid, LANE_0)[0] if pool == EXPERT else pid)


FAULTS = {"kill": killed, "hang": hung}


def inject(cluster: LocalCluster, seen: Observer, pool: str, fault: str, draw: random.Random) -> dict[str, float]:
    """Do a fault to a member of a pool and wait for its replacement. Seconds from the fault to each phase."""
    config = cluster.config
    while not seen.views or not whole(seen.views[-1][1], pool, config):
        time.sleep(REST_S)
    time.sleep(REST_S)
    before = {member.name for member in seen.views[-1][1].pool(pool)}
    victim = draw.choice(sorted(before))
    pid = cluster.pids()[victim]
    with FAULTS[fault](pid, pool):
        return replaced(cluster, seen, pool, victim, before, fault)


def replaced(
    cluster: LocalCluster, seen: Observer, pool: str, victim: str, before: set[str], fault: str
) -> dict[str, float]:
    """Seconds from now until each phase of the replacement of a victim among the members of before."""
    config, began_s = cluster.config, time.monotonic()

    def lost(view: View) -> bool:
        return view.member(victim) is None

    marks: Mapping[str, Callable[[View], bool]] = {
        "gone": lost,
        "replicas": lambda view: lost(view) and replicas_min(view) >= config.replicas,
        "joined": lambda view: any(member.name not in before for member in view.pool(pool)),
        "whole": lambda view: lost(view) and whole(view, pool, config),
    }
    while True:
        found = {phase: seen.first_s(began_s, marks[phase]) for phase in PHASES[pool]}
        if pool == ATTENTION:
            new = [at_s for name, at_s in seen.ready_s.items() if name.startswith(pool) and at_s > began_s]
            found["whole"] = new[0] if new and found["whole"] else None
        reached = {phase: at_s - began_s for phase, at_s in found.items() if at_s is not None}
        if len(reached) == len(found):
            new = [member.pid for member in seen.views[-1][1].pool(pool) if member.name not in before]
            return reached | {CPU: sum(cpu_s(pid) for pid in new)}
        if time.monotonic() - began_s > LIMIT_S:
            raise RuntimeError(f"{victim}, {fault}: after {LIMIT_S:g} s only {sorted(reached)} were reached")
        time.sleep(0.01)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(rounds: Sequence[Mapping[str, float]], phases: Sequence[str]) -> dict[str, dict[str, float]]:
    """p50, p99 and the worst of each phase, in seconds."""
    values = {phase: np.array([one[phase] for one in rounds]) for phase in phases}
    return {
        phase: {
            name: round(float(value), 3)
            for name, value in (
                ("p50", np.percentile(found, 50)),
                ("p99", np.percentile(found, 99)),
                ("worst", found.max()),
            )
        }
        for phase, found in values.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line for each pool."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="demo", help="checkpoint folder, hub id, or demo")
    options.add_argument("--kills", type=int, default=20, help="of each pool")
    options.add_argument("--fault", choices=sorted(FAULTS), default="kill", help="done to each victim")
    options.add_argument("--experts", type=int, default=4)
    options.add_argument("--replicas", type=int, default=2)
    options.add_argument("--attention", type=int, default=2)
    options.add_argument("--streams", type=int, default=4, help="that run all the while; 0: none")
    options.add_argument("--tokens", type=int, default=64, help="of each stream")
    options.add_argument("--pools", default=f"{EXPERT},{ATTENTION}", help="to kill in, comma-separated")
    options.add_argument("--seed", type=int, default=0, help="chooses the victims and the prompts")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON lines")
    chosen = options.parse_args(argv)
    config = ClusterConfig(
        model=resolve_model(chosen.model),
        served_model_name=NAME,
        experts=chosen.experts,
        attention=chosen.attention,
        replicas=chosen.replicas,
        port=0,
    )
    seen, draw = Observer(), random.Random(chosen.seed)
    with LocalCluster(config, on_event=seen.on_event) as cluster:
        router = RouterClient(cluster.router_address)
        try:
            router.start(on_view=seen.on_view)
            streams = Streams(cluster.url, chosen.streams, chosen.tokens, chosen.seed)
            with streams.running():
                for pool in chosen.pools.split(","):
                    rounds = [inject(cluster, seen, pool, chosen.fault, draw) for _ in range(chosen.kills)]
                    result = {
                        "pool": pool,
                        "model": chosen.model,
                        "experts": config.experts,
                        "attention": config.attention,
                        "replicas": config.replicas,
                        "streams": chosen.streams,
                        "kills": chosen.kills,
                        # A record that names none is of kills, as those were made before there was another.
                        **({"fault": chosen.fault} if chosen.fault != "kill" else {}),
                        "seed": chosen.seed,
                        "seconds": summary(rounds, (*PHASES[pool], CPU)),
                    }
                    record("recovery", result, ("numpy", "grpcio"), chosen.results)
        finally:
            router.close()


if __name__ == "__main__":
    main()
