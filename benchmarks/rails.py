"""What a stream of messages sees while its rails fail: two hosts (namespaces), several shaped rails, real processes.

Each scenario starts two processes (rails_end.py), sends messages through slots, and does something to the rails.
Whether each message came once and whole is said by the end that received them; how long nothing came, by its clock.

    python -m benchmarks.rails --scenario cut,three,flap,two,stop,idle,step --messages 10000

Needs root, nixl-cu13, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hosts.network import Network, refusal
from benchmarks.report import record

MBIT = 200.0
SLOW_MBIT = 60.0
SLOTS = 16


def two_hosts(rails: int, mbit: float) -> Network:
    """Hosts "a" and "b", and several rails between them."""
    return Network("ab", [f"rail{number}" for number in range(rails)], mbit)


class Ends:
    """The two processes of one stream."""

    def __init__(self, network: Network, folder: Path, plan: dict[str, Any]) -> None:
        self.folder = folder
        self.arrivals_path = folder / "arrivals.npy"
        self.progress_path = folder / "progress.json"
        paths = {"arrivals": str(self.arrivals_path), "progress": str(self.progress_path)}
        self.processes = {
            role: subprocess.Popen(
                [*network.inside(host), sys.executable, "-m", "benchmarks.rails_end", role,
                 json.dumps({**plan, **paths, "rails": network.networks})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "ERROR"},
            )
            for role, host in (("writer", "a"), ("owner", "b"))
        }  # fmt: skip
        offers = {role: self.hear(role) for role in self.processes}
        self.tell("writer", offers["owner"])
        self.tell("owner", offers["writer"])
        for role in self.processes:
            self.hear(role)
        self.began_s = time.monotonic()

    def hear(self, role: str) -> dict[str, Any]:
        out = self.processes[role].stdout
        line = out.readline() if out else ""
        if not line:
            raise RuntimeError(f"the {role} ended early; its words are above.")
        return json.loads(line)

    def tell(self, role: str, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self.processes[role].stdin, flush=True)

    def state(self) -> dict[str, Any]:
        """The writer's last word on how far it is."""
        if not self.progress_path.exists():
            return {"sent": 0, "rails": [], "link": {"anomalies": 0}}
        return json.loads(self.progress_path.read_text())

    def running(self) -> bool:
        return self.processes["owner"].poll() is None and not self.arrivals_path.exists()

    def result(self) -> dict[str, Any]:
        """What both ends say once all messages are there."""
        said = {role: self.hear(role) for role in ("owner", "writer")}
        for role in self.processes:
            self.tell(role, {})
        return said

    def end(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


@contextlib.contextmanager
def stream(network: Network, **plan: Any) -> Iterator[Ends]:
    """Two processes that talk, ended whatever happens."""
    defaults = {"seed": 1, "slots": SLOTS, "payload": 32768, "exact": False, "bytes_per_s": 0}
    # In memory: a file system that waits for its disk would stop both ends, and the clock of what they see.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ends = Ends(network, Path(folder), defaults | plan)
        try:
            yield ends
        finally:
            ends.end()


def result_of(ends: Ends, cuts_s: Sequence[float] = ()) -> dict[str, Any]:
    """The result of a stream, with how long nothing came after each cut (ms)."""
    said = ends.result()
    arrivals = np.load(ends.arrivals_path)
    gaps = np.diff(arrivals) * 1e3
    stalls = [float(gaps[(arrivals[1:] > cut_s) & (arrivals[:-1] < cut_s + 1.0)].max(initial=0.0)) for cut_s in cuts_s]
    owner, writer = said["owner"], said["writer"]
    found = {name: owner[name] for name in ("received", "wrong", "doubled", "refused")}
    found |= {"sent": writer["sent"], "channel": writer["writes"], "seconds": float(np.ptp(arrivals))}
    found["owner_closed"] = owner["reads"]["closed"]
    if stalls:
        found["stall_ms"] = {f"p{p}": round(float(np.percentile(stalls, p)), 1) for p in (50, 99, 100)}
    found["longest_gap_ms"] = round(float(gaps.max(initial=0.0)), 1)
    return found


def pause(ends: Ends, seconds: float) -> bool:
    """Wait, unless the stream ends meanwhile; whether it still runs."""
    until_s = time.monotonic() + seconds
    while ends.running() and time.monotonic() < until_s:
        time.sleep(0.01)
    return ends.running()


def all_live(ends: Ends, rails: int, limit_s: float = 10.0) -> bool:
    """Wait until the writer sees all rails live; whether the stream still runs."""
    until_s = time.monotonic() + limit_s
    while ends.running() and time.monotonic() < until_s:
        found = ends.state()["rails"]
        if sum(rail["live"] for rail in found) == rails:
            break
        time.sleep(0.01)
    return ends.running()


def cut(messages: int, seed: int) -> dict[str, Any]:
    """Two rails; one at a time is cut at a random moment, healed, and back before the next: silently or by plug."""
    chance, cuts_s = random.Random(seed), []
    with two_hosts(2, MBIT) as network, stream(network, messages=messages, seed=seed) as ends:
        while pause(ends, chance.uniform(0.05, 0.2)):
            rail, silent = chance.randrange(2), chance.random() < 0.7
            (network.cut if silent else network.unplug)("b", f"rail{rail}")
            cuts_s.append(time.monotonic())
            pause(ends, chance.uniform(0.2, 0.6))
            (network.heal if silent else network.plug)("b", f"rail{rail}")
            if not all_live(ends, 2):
                break
        return {"cuts": len(cuts_s), **result_of(ends, cuts_s)}


def three(messages: int, seed: int) -> dict[str, Any]:
    """Time of the same messages over three rails, and over three of which one is cut: at best 1.5.

    Slower rails, for the rails are to be what takes the time, and not two processes on two cores.
    """
    del messages
    seconds: dict[str, list[float]] = {"whole": [], "cut": []}
    results = []
    for _ in range(3):
        for kind, took in seconds.items():
            sizes = {"messages": 1200, "seed": seed, "payload": 65536, "exact": True, "slots": 32}
            with two_hosts(3, SLOW_MBIT) as network, stream(network, **sizes) as ends:
                if kind == "cut":
                    network.cut("b", "rail0")
                results.append(result_of(ends))
                arrivals = np.load(ends.arrivals_path)
            # The switch itself has its own figure: this is about the bandwidth that is left.
            settled = arrivals[arrivals > arrivals[0] + 1.0]
            took.append(float(np.ptp(settled)) / (len(settled) - 1) * len(arrivals))
    ratio = float(np.median(np.array(seconds["cut"]) / np.array(seconds["whole"])))
    return {
        "rail_mbit": SLOW_MBIT,
        "time_ratio": round(ratio, 3),
        "ideal": 1.5,
        "seconds": seconds,
        **worst(results),
    }


def worst(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several streams, what must be zero in each."""
    found = {name: sum(result[name] for result in results) for name in ("wrong", "doubled", "refused")}
    return found | {"received": [result["received"] for result in results]}


def flap(messages: int, seed: int) -> dict[str, Any]:
    """One of two rails goes down and up every 150 ms."""
    flaps = 0
    with two_hosts(2, MBIT) as network, stream(network, messages=messages, seed=seed) as ends:
        while pause(ends, 0.15):
            network.cut("b", "rail0")
            pause(ends, 0.15)
            network.heal("b", "rail0")
            flaps += 1
        return {"flaps": flaps, **result_of(ends)}


def two(messages: int, seed: int) -> dict[str, Any]:
    """Two of three rails are cut at once, and healed later."""
    with two_hosts(3, MBIT) as network, stream(network, messages=messages, seed=seed) as ends:
        pause(ends, 0.2)
        network.cut("b", "rail0")
        network.cut("b", "rail1")
        cuts_s = [time.monotonic()]
        pause(ends, 1.0)
        network.heal("b", "rail0")
        network.heal("b", "rail1")
        return result_of(ends, cuts_s)


def stop(messages: int, seed: int) -> dict[str, Any]:
    """The writing process is frozen for three seconds (SIGSTOP): no rail is dead, so none may be closed."""
    with two_hosts(2, MBIT) as network, stream(network, messages=messages, seed=seed) as ends:
        pause(ends, 0.2)
        # The namespace's `ip netns exec` became the process itself.
        ends.processes["writer"].send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        ends.processes["writer"].send_signal(signal.SIGCONT)
        return result_of(ends)


def idle(messages: int, seed: int) -> dict[str, Any]:
    """Messages at a crawl, with much silence between: no rail is closed, nothing is called slow."""
    del messages
    with two_hosts(2, MBIT) as network, stream(network, messages=40, seed=seed, bytes_per_s=80_000) as ends:
        pause(ends, 60)
        anomalies = ends.state()["link"]["anomalies"]
        return {"anomalies": anomalies, **result_of(ends)}


def step(messages: int, seed: int) -> dict[str, Any]:
    """One rail goes from 200 to 80 Mbit/s under a full load: how long until it is called slow (ms)."""
    del messages
    sizes = {"payload": 32768, "exact": True, "messages": 8000}
    with two_hosts(1, MBIT) as network, stream(network, seed=seed, **sizes) as ends:
        pause(ends, 2.0)
        before = ends.state()["link"]["anomalies"]
        network.shape("b", "rail0", 80)
        stepped_s = time.monotonic()
        delay_ms = float("nan")
        while pause(ends, 0.0) and time.monotonic() < stepped_s + 3:
            link = ends.state()["link"]
            if link["anomalies"] > before:
                delay_ms = (link["changed_ns"] / 1e9 - stepped_s) * 1e3
                break
        network.shape("b", "rail0", MBIT)
        return {"anomalies_before": before, "flagged_after_ms": round(delay_ms, 1), **result_of(ends)}


SCENARIOS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    act.__name__: act for act in (cut, three, flap, two, stop, idle, step)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the scenarios and append one JSON line for each."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--scenario", default=",".join(SCENARIOS), help="comma-separated")
    command.add_argument("--messages", type=int, default=10_000, help="of a stream, up to 32 KiB each")
    command.add_argument("--seed", type=int, default=1)
    options = command.parse_args(argv)
    if reason := refusal():
        command.error(reason)
    for name in options.scenario.split(","):
        found = SCENARIOS[name](options.messages, options.seed)
        setting = {"scenario": name, "seed": options.seed, "messages": options.messages, "mbit": MBIT}
        record("rails", setting | found, ["nixl-cu13"])


if __name__ == "__main__":
    main()
