"""Load of the busiest server under our balance and under EPLB, on a world of drifting popularity.

python -m benchmarks.balance --world PATH [--setting default,one_replica,slow,heavy] [--seeds 10]

The world (a Python file with a dataclass `World`) gives each interval's batches. Ours: clients split their own batch
with the shipped waterfill, the router improves its placement between intervals by what it saw. EPLB: replicas greedily
to the largest load per replica, heaviest first onto the lightest server, anew at each interval; rows split evenly over
replicas, and with our waterfill. A figure is max over mean of rows / speed; the bound is the best fractional split.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import RESULTS, record
from experts import native
from router import balance
from router.placement import place

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "one_replica": {"zipf": 0.5, "slots": 288, "min_replicas": 1},
    "slow": {"slow_servers": 8},
    "moderate": {"zipf": 0.5},
}
POLICIES = ("ours", "eplb_even", "eplb_waterfill")
TITLES = {"ours": "ours", "eplb_even": "EPLB, even split", "eplb_waterfill": "EPLB, our waterfill"}
PLACES, REPLICAS = 64, 8  # of the waterfill's arrays
# Errors of clients' splits cancel in part: of 16 the sum is as uneven as one of 4 would be.
SPLIT_ROWS_SHARE = 4


@dataclass
class Figures:
    """Of one policy and seed: busiest over mean for each batch, copies made for each interval."""

    busiest: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)


def load_world(path: Path) -> type:
    """The class `World` of a file that is no module of ours."""
    spec = importlib.util.spec_from_file_location("balance_world", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is no Python file; give the world's with --world")
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules["balance_world"] = module
    spec.loader.exec_module(module)
    return module.World


def indexes(mask: int) -> list[int]:
    """Servers of a mask, lowest first."""
    return [server for server in range(PLACES) if mask >> server & 1]


class Clients:
    """Many clients' splits by the shipped waterfill, under one placement."""

    def __init__(self, holders: Sequence[int], speed: NDArray[np.float64], expert_cost: float) -> None:
        self.masks = np.array(holders, np.uint64)
        self.speed, self.cost, self.servers = np.ones(PLACES), expert_cost, len(speed)
        self.speed[: len(speed)] = speed
        self.slots = np.full((len(holders), REPLICAS), PLACES)
        for expert, mask in enumerate(holders):
            found = indexes(mask)
            self.slots[expert, : len(found)] = found
        self.library = native.load()

    def load(self, batch: NDArray[np.int64], turn: int) -> NDArray[np.float64]:
        """[servers] rows of all clients; batch: [clients, experts]."""
        total = np.zeros(PLACES + 1)
        rows = np.empty((batch.shape[1], REPLICAS), np.uint32)
        for client, counts in enumerate(batch.astype(np.uint32)):
            status = self.library.expert_waterfill(
                len(counts),
                counts.ctypes.data,
                self.masks.ctypes.data,
                self.speed.ctypes.data,
                self.cost,
                # As the client draws: by its identity and the call.
                (client * 0x9E3779B9 + turn) & 0xFFFFFFFF,
                rows.ctypes.data,
            )
            if status:
                raise ValueError(f"the waterfill refused its input with {status}")
            total += np.bincount(self.slots.ravel(), rows.ravel(), PLACES + 1)
        return total[: self.servers]


def even_load(batch: NDArray[np.int64], holders: Sequence[int], servers: int) -> NDArray[np.float64]:
    """[servers] rows when each expert's are split evenly over its replicas."""
    held = np.array([[mask >> server & 1 for server in range(servers)] for mask in holders], float)
    return batch.sum(0) @ (held / held.sum(1, keepdims=True))


def bounds(
    rows: NDArray[np.float64], holders: Sequence[int], speed: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Least possible busiest over mean for each load under a placement, by fractional flow and its dual.

    Args:
        rows: [loads, experts].

    Returns:
        [loads] what the most confined set of servers found must do, over the mean: never above the true bound. And
        the largest gap to the flow found, which is never below it.
    """
    flow = balance.Flow(rows.T.astype(np.float64), speed)
    for expert, mask in enumerate(holders):
        flow.put(expert, mask)
    fair = rows.sum(1) / speed.sum()
    held = [indexes(mask) for mask in holders]
    gap = 1.0
    least = np.ones(len(rows))
    for _ in range(12):
        flow.settle(20, within=1e-5)
        level = flow.level
        for number in range(len(rows)):
            order = np.argsort(-level[:, number], kind="stable")
            rank = np.empty(len(speed), int)
            rank[order] = np.arange(len(speed))
            # An expert is confined to the busiest servers once the last of its holders is among them.
            last = [int(rank[servers].max()) for servers in held]
            confined = np.bincount(last, rows[number], len(speed)).cumsum()
            least[number] = max(least[number], (confined / speed[order].cumsum()).max() / fair[number])
        gap = float((level.max(0) / least).max() - 1)
        if gap < 1e-4:
            break
    return least, gap


def eplb(load: NDArray[np.float64], servers: int, slots: int, min_replicas: int) -> list[int]:
    """Holders by the public greedy algorithm, every expert on min_replicas servers at least."""
    copies = np.full(len(load), min_replicas)
    for _ in range(slots - int(copies.sum())):
        heaviest = np.where(copies < min(servers, REPLICAS), load / copies, -1.0)
        copies[int(heaviest.argmax())] += 1
    room, busy = np.full(servers, slots // servers), np.zeros(servers)
    holders = [0] * len(load)
    for expert in np.argsort(-load / copies, kind="stable"):
        for _ in range(copies[expert]):
            open_ = [s for s in range(servers) if room[s] and not holders[expert] >> s & 1]
            if not open_:
                continue
            to = min(open_, key=lambda s: busy[s])
            holders[expert] |= 1 << to
            room[to] -= 1
            busy[to] += load[expert] / copies[expert]
    return _repaired(holders, min_replicas, servers)


def _repaired(holders: list[int], min_replicas: int, servers: int) -> list[int]:
    """The last experts may find no server that lacks them: they take the place of a copy that can be spared."""
    for expert, mask in enumerate(holders):
        while holders[expert].bit_count() < min_replicas:
            spare, to = next(
                (other, s)
                for other, theirs in enumerate(holders)
                if theirs.bit_count() > min_replicas
                for s in range(servers)
                if theirs >> s & 1 and not mask >> s & 1 and not holders[expert] >> s & 1
            )
            holders[spare] ^= 1 << to
            holders[expert] |= 1 << to
    return holders


def first_placement(world: Any) -> list[int]:
    """Where the experts lie before anything was seen."""
    names = [f"expert/{number + 1}" for number in range(world.servers)]
    room: int = world.slots // world.servers
    placed = place(
        layers=1,
        experts=world.experts,
        replicas=world.min_replicas,
        capacity=dict.fromkeys(names, room),
    )
    return [
        sum(1 << server for server, name in enumerate(names) if placed[name] >> expert & 1)
        for expert in range(world.experts)
    ]


def copied(before: Sequence[int], after: Sequence[int]) -> int:
    """Copies that were not there before."""
    return sum((new & ~old).bit_count() for old, new in zip(before, after, strict=True))


def play(path: Path, fields: dict[str, Any], budget: int, cost: float, seed: int) -> dict[str, Any]:
    """One seed: figures of each policy, bounds of our placements, and the largest gap of a bound."""
    world = load_world(path)(**fields)
    speed, servers = world.speed, world.servers
    rules = balance.Rules(min_replicas=world.min_replicas, budget=budget)
    pool = [balance.Server(room=world.slots // servers, speed=float(one)) for one in speed]
    ours = first_placement(world)
    theirs = eplb(np.ones(world.experts), servers, world.slots, world.min_replicas)
    found = {name: Figures() for name in POLICIES}
    least: list[float] = []
    worst_gap, seen = 0.0, None
    for interval, batches in enumerate(world.batches(seed)):
        at_ours, at_theirs = Clients(ours, speed, cost), Clients(theirs, speed, cost)
        for step, batch in enumerate(batches):
            fair = batch.sum() / speed.sum()
            turn = interval * len(batches) + step
            for name, load in (
                ("ours", at_ours.load(batch, turn)),
                ("eplb_even", even_load(batch, theirs, servers)),
                ("eplb_waterfill", at_theirs.load(batch, turn)),
            ):
                found[name].busiest.append(float((load / speed).max() / fair))
        best, gap = bounds(batches.sum(1).astype(float), ours, speed)
        least += best.tolist()
        worst_gap = max(worst_gap, gap)
        rows = batches.sum((0, 1))
        seen = balance.observe(seen, rows)
        change = balance.improve(
            load=seen.load,
            spread=spread(seen, world.rows / SPLIT_ROWS_SHARE),
            holders=ours,
            servers=pool,
            rules=rules,
        )
        before, ours = ours, list(ours)
        for move in change.moves:
            ours[move.expert] ^= 1 << move.server
        found["ours"].copies.append(copied(before, ours))
        after = eplb(rows.astype(float), servers, world.slots, world.min_replicas)
        for name in ("eplb_even", "eplb_waterfill"):
            found[name].copies.append(copied(theirs, after))
        theirs = after
    return {"figures": found, "bound": least, "gap": worst_gap}


def spread(seen: balance.Seen, rows: float) -> np.ndarray:
    """[experts] relative standard deviation of the load in a batch of so many rows: drift, and counting."""
    expected = seen.load * (rows / max(float(seen.load.sum()), 1e-300))
    return np.sqrt(seen.drift**2 + 1 / np.maximum(expected, 1))


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, 95th percentile and greatest."""
    return {
        "mean": round(float(np.mean(values)), 4),
        "p95": round(float(np.percentile(values, 95)), 4),
        "max": round(float(np.max(values)), 4),
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One setting over all seeds, as it is recorded."""
    fields = {**SETTINGS[name], **({"intervals": options.intervals} if options.intervals else {})}
    world = load_world(options.world)(**fields)
    run = partial(play, options.world, fields, options.budget, options.expert_cost)
    with ProcessPoolExecutor(options.processes) as pool:
        seeds = list(pool.map(run, range(options.seeds)))
    least = [value for seed in seeds for value in seed["bound"]]
    policies = {}
    for policy in POLICIES:
        busiest = [value for seed in seeds for value in seed["figures"][policy].busiest]
        copies = [count for seed in seeds for count in seed["figures"][policy].copies]
        copied_bytes = float(np.mean(copies)) * world.expert_bytes
        policies[policy] = {**summary(busiest), "gb_per_interval": round(copied_bytes / 1e9, 4)}
        if policy == "ours":
            ratio = np.array(busiest) / np.array(least)
            policies[policy]["over_bound"] = summary(ratio.tolist())
    moved = policies["eplb_even"]["gb_per_interval"]
    return {
        "setting": name,
        "world": {**fields, "file": options.world.name},
        "seeds": options.seeds,
        "budget": options.budget,
        "expert_cost": options.expert_cost,
        "policies": policies,
        "bound": summary(least),
        "bound_gap": max(seed["gap"] for seed in seeds),
        "bytes_of_eplb": round(policies["ours"]["gb_per_interval"] / moved, 5) if moved else None,
        "by_interval": {policy: list(by_interval(seeds, policy, world)) for policy in POLICIES},
    }


def by_interval(seeds: Sequence[dict[str, Any]], policy: str, world: Any) -> Iterator[float]:
    """Mean over seeds and batches, for the plot."""
    for interval in range(world.intervals):
        here = slice(interval * world.steps, (interval + 1) * world.steps)
        yield round(float(np.mean([seed["figures"][policy].busiest[here] for seed in seeds])), 4)


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """A panel for each setting: max over mean by interval.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(4.2 * len(rows), 3.6), layout="constrained")
    for number, row in enumerate(rows, 1):
        axes = figure.add_subplot(1, len(rows), number)
        for policy in POLICIES:
            line = row["by_interval"][policy]
            gb = row["policies"][policy]["gb_per_interval"]
            axes.plot(line, label=f"{TITLES[policy]}: {gb:.2f} GB an interval", linewidth=1)
        axes.axhline(1, color="grey", linewidth=0.5)
        axes.set_title(row["setting"].replace("_", " "))
        axes.set_xlabel("interval")
        axes.set_ylabel("max / mean load")
        axes.set_ylim(0.98, 1.6)
        axes.legend(fontsize="x-small")
    figure.savefig(out, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--world", type=Path, required=True, help="file with the dataclass World")
    options.add_argument("--setting", default=",".join(SETTINGS), help="names with commas between them")
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--intervals", type=int, default=0, help="of a short run; 0: the world's")
    options.add_argument("--budget", type=int, default=8, help="copies that one change may make")
    options.add_argument("--expert-cost", type=float, default=0.0, help="rows an activation costs; the world: 0")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON lines")
    chosen = options.parse_args(arguments)
    rows = []
    for name in chosen.setting.split(","):
        rows.append(measure(name, chosen))
        record("balance", rows[-1], packages=("numpy",), folder=chosen.results)
    try:
        plot(rows, chosen.results / "balance.svg")
    except ImportError:
        print("plot: skipped, needs the package matplotlib. Get it: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
