"""Moving bytes between processes: round trips and bandwidth of each transport, interleaved within one run.

Every process holds one end of every transport (benchmarks/transports). A cell is one transport, topology and size; a
round measures all cells of a size one after the other, the next round begins with the next transport. Round trips
carry the bytes both ways, one at a time; bandwidth is of requests, four under way on each link, each answered with 8
bytes. Ratios are taken within a round.

    python -m benchmarks.p2p --what latency,bandwidth,copies,idle --topology 1to1,4to1,1to4

Appends JSON lines to p2p.jsonl, and draws p2p.svg of the newest where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import p2p_incast
from benchmarks.p2p_plot import plot
from benchmarks.probe import last_cache_bytes
from benchmarks.report import RESULTS, record, spread
from benchmarks.setting import numbers
from benchmarks.transports.native import COPIES, Copies, build
from benchmarks.transports.process import Star
from benchmarks.transports.side import SLOTS, Load, Missing, pinned

TRANSPORTS = ("memcpy", "shm", "shm-parked", "shm-python", "nixl", "nixl-put", "nixl-bare", "grpc", "gloo")
PACKAGES = ("numpy", "grpcio", "nixl-cu13")
# Bytes of a reply that only says "taken".
TAKEN_BYTES = 8
FEWEST, MOST = 4, 5000
IDLE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How many processes there are beside the hub, and who drives."""

    others: int
    hub_drives: bool


TOPOLOGIES = {
    "1to1": Topology(others=1, hub_drives=True),
    "4to1": Topology(others=4, hub_drives=False),
    "1to4": Topology(others=4, hub_drives=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for; append JSON lines, draw the plot."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--what", default="latency,bandwidth,copies,idle,incast")
    command.add_argument("--topology", default=",".join(TOPOLOGIES))
    command.add_argument("--transports", default=",".join(TRANSPORTS))
    command.add_argument("--latency", default="8,64,512,4096,32768,262144,1048576", help="bytes, each way")
    command.add_argument("--bandwidth", default="4096,65536,524288,4194304,67108864", help="bytes of a request")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--cell-s", type=float, default=0.1, help="seconds for which a round measures a cell")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON lines")
    options = command.parse_args(argv)
    what = options.what.split(",")
    with tempfile.TemporaryDirectory(prefix="eaas-p2p-") as folder:
        loops = build(Path(folder))
        if "copies" in what:
            copies(loops, options)
        stars = (
            {}
            if not {"latency", "bandwidth", "idle"} & set(what)
            else {
                others: [name for name in options.topology.split(",") if TOPOLOGIES[name].others == others]
                for others in (1, 4)
            }
        )
        for others, names in stars.items():
            if names:
                with star(others, what, loops, options) as (running, transports):
                    for name in names:
                        measure(running, transports, name, what, options)
                    if "idle" in what and others == 1:
                        idle(running, transports, options)
    if "incast" in what:
        for result in p2p_incast.results():
            write(result, options)
    try:
        plot(options.results)
    except ImportError:
        print("plot: skipped, needs the package matplotlib. Get it: pip install matplotlib", file=sys.stderr)


@contextlib.contextmanager
def star(
    others: int, what: Sequence[str], loops: Path, options: argparse.Namespace
) -> Iterator[tuple[Star, list[str]]]:
    """Processes joined by every transport that can run here; for each that can't, one line on stderr says why."""
    sizes = [TAKEN_BYTES]
    sizes += numbers(options.latency) if "latency" in what else []
    sizes += numbers(options.bandwidth) if "bandwidth" in what else []
    cores = len(os.sched_getaffinity(0))
    with Star(others, max(sizes), loops) as running:
        usable = []
        for transport in options.transports.split(","):
            try:
                if others > 1 and transport in ("memcpy", "nixl-put", "nixl-bare"):
                    continue  # measured as a baseline, between two processes
                if transport == "shm" and 1 + others > cores:
                    raise Missing(f"{1 + others} polling processes need as many cores, found {cores}; see shm-parked.")
                running.open(transport)
                usable.append(transport)
            except Missing as missing:
                print(f"{transport}, {others + 1} processes: skipped, {missing}", file=sys.stderr)
        yield running, usable


def measure(
    running: Star, transports: Sequence[str], name: str, what: Sequence[str], options: argparse.Namespace
) -> None:
    """All sizes of one topology."""
    for kind in ("latency", "bandwidth"):
        for nbytes in numbers(getattr(options, kind)) if kind in what else ():
            cells = {transport: Cell(running, transport, name, kind, nbytes) for transport in transports}
            for cell in cells.values():
                cell.calibrate(options.cell_s)
            order = list(cells)
            for number in range(options.rounds):
                turn = number % len(order)
                for transport in order[turn:] + order[:turn]:
                    cells[transport].measure()
            result: dict[str, Any] = {
                "topology": name,
                "measure": kind,
                "bytes": nbytes,
                "rounds": options.rounds,
            }
            result |= {"transports": {transport: cell.figures() for transport, cell in cells.items()}}
            write(result | {"times_slower": slower(cells)}, options)


class Cell:
    """One transport, topology, kind and size: its figure in each round."""

    def __init__(self, running: Star, transport: str, name: str, kind: str, nbytes: int) -> None:
        self._running, self._transport, self._kind = running, transport, kind
        self._topology = TOPOLOGIES[name]
        self._nbytes = nbytes
        self._count = FEWEST
        self._rounds: list[dict[str, float]] = []

    def calibrate(self, seconds: float) -> None:
        """Warm up, and choose how many requests fill the time."""
        # The fastest of three: one that was disturbed would say that very few do.
        spent_ns = min(max(answer["total_ns"] for answer in self._drive()) for _ in range(3))
        self._count = min(MOST, max(FEWEST, int(seconds * self._count * 1e9 / spent_ns)))

    def measure(self) -> None:
        """One round."""
        answers = self._drive()
        if self._kind == "latency":
            us = sorted(ns / 1e3 for answer in answers for ns in answer["rounds_ns"])
            self._rounds.append({"p50": us[len(us) // 2], "p99": us[len(us) * 99 // 100]})
        else:
            moved = self._nbytes * self._count * self._topology.others
            ns = max(answer["total_ns"] for answer in answers)
            self._rounds.append({"gb_per_s": moved / ns})

    def figures(self) -> dict[str, Any]:
        """Over the rounds: medians, and the spread of the first figure."""
        names = list(self._rounds[0])
        medians = {name: statistics.median(round_[name] for round_ in self._rounds) for name in names}
        return {name: float(f"{value:.4g}") for name, value in medians.items()} | {
            "requests": self._count,
            "spread": spread([round_[names[0]] for round_ in self._rounds]),
        }

    def cost(self, number: int) -> float:
        """Of one round: time a byte or a request takes, up to a factor."""
        figures = self._rounds[number]
        return figures["p50"] if self._kind == "latency" else 1 / figures["gb_per_s"]

    @property
    def rounds(self) -> int:
        """How many were measured."""
        return len(self._rounds)

    def _drive(self) -> list[Any]:
        cores = sorted(os.sched_getaffinity(0))
        # Lanes: whoever wakes another is about to leave the core that the other wakes on.
        alone = self._transport == "shm-parked"
        parked = alone or 1 + self._topology.others > len(cores)
        latency = self._kind == "latency"
        load = Load(
            request_bytes=self._nbytes,
            reply_bytes=self._nbytes if latency else TAKEN_BYTES,
            depth=1 if latency else SLOTS,
            count=self._count,
            parked=parked,
            cores=cores[:1] if alone else cores,
        )
        return self._running.run(self._transport, load, self._topology.hub_drives)[0]


def slower(cells: Mapping[str, Cell]) -> dict[str, dict[str, float]]:
    """How many times slower than shm each transport is, and NIXL's put and signal than its bare calls."""
    pairs = [("nixl-put", "nixl-bare"), ("shm-parked", "memcpy"), ("shm", "memcpy")]
    base = next((name for name in ("shm", "shm-parked") if name in cells), "")
    pairs += [(name, base) for name in cells if name not in (base, "memcpy")]
    return {
        f"{one}/{other}": spread([cells[one].cost(i) / cells[other].cost(i) for i in range(cells[one].rounds)])
        for one, other in pairs
        if one in cells and other in cells
    }


def copies(loops: Path, options: argparse.Namespace) -> None:
    """Within one process and on one core: what put, seal and open cost beside copying the same bytes."""
    for nbytes in (4096, 65536, 524288):
        for footprint in ("warm", "4 x L3"):
            pieces = 1 if footprint == "warm" else 4 * last_cache_bytes() // (2 * nbytes)
            measured = Copies(loops, nbytes, pieces)
            calls = max(1, int(options.cell_s * 5e9) // nbytes // pieces) * pieces
            rounds: dict[str, list[float]] = {what: [] for what in COPIES}
            with pinned(min(os.sched_getaffinity(0))):
                for _ in range(options.rounds + 1):
                    for what in COPIES:
                        rounds[what].append(nbytes * calls / measured.ns(what, calls))
            for figures in rounds.values():
                del figures[0]  # warmed up
            result = {
                "measure": "copies",
                "bytes": nbytes,
                "footprint": footprint,
                "rounds": options.rounds,
                "gb_per_s": {what: spread(figures) for what, figures in rounds.items()},
                "of_memcpy": {
                    what: spread([a / b for a, b in zip(rounds[what], rounds[copy], strict=True)])
                    for what, copy in (("put", "copy_out"), ("put_sealed", "copy_out"), ("open", "copy_in"))
                },
            }
            write(result, options)


def idle(running: Star, transports: Sequence[str], options: argparse.Namespace) -> None:
    """CPU time of a parked thread that waits for a request which comes seconds later."""
    cores = sorted(os.sched_getaffinity(0))
    load = Load(request_bytes=TAKEN_BYTES, reply_bytes=TAKEN_BYTES, depth=1, count=1, parked=True, cores=cores[:1])
    shares = {}
    for transport in ("shm-parked", "shm-python", "nixl"):
        if transport in transports:
            [served] = running.run(transport, load, True, IDLE_S)[1]
            shares[transport] = float(f"{served['cpu_s'] / served['wall_s']:.3g}")
    write({"measure": "idle", "seconds": IDLE_S, "cpu_share": shares}, options)


def write(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Append one line."""
    found = [name for name in PACKAGES if any(d.name == name for d in importlib.metadata.distributions(name=name))]
    record("p2p", result, found, options.results)


if __name__ == "__main__":
    main()
