"""What it saves and costs to serve two models from one pool of expert servers, beside a pool for each.

    python -m benchmarks.several_models week --peak 8               # simulated: benchmarks.several_weeks says how
    python -m benchmarks.several_models memory --shape S
    python -m benchmarks.several_models mixing --shape S --rounds 9
    python -m benchmarks.several_models live --shape S --seconds 600        # 40 minutes: two loads, two arrangements

memory: a model and a fine-tune of it that shares 90% of its experts, on three servers, beside the model alone.
mixing: what one model pays for another's being there idle, and what batches of two models cost beside batches of one.
live: two models under square waves, on one pool beside a pool for each. Each expert server is held to a share of a
core, so that servers are what the load fills; this machine's cores bound how many of them there can be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import several_weeks
from benchmarks.engines.process import settle
from benchmarks.engines.run import PROMPT_TOKENS, Speed
from benchmarks.http_client import StreamRecord as Stream
from benchmarks.http_client import speed_of, stream_batch
from benchmarks.lane_share import LaneShare
from benchmarks.make_model import SHAPES, make_model
from benchmarks.report import record, spread
from benchmarks.setting import HttpEndpoint, NotTheSameModel, cores_of, interleave, numbers, parser
from benchmarks.several_weeks import Load, Weeks
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.gateway.status import replicas_min
from eaas.ops.load.client import Client, Endpoint
from eaas.ops.load.record import StreamRecord
from router.client import RouterClient
from router.view import EXPERT

BENCHMARK = "several_models"
# A pool whose servers do not hold every expert of every model by then never will.
LIMIT_S = 120.0
# A scrubber has looked at what there is by then, and a server has freed what it only needed to open a model.
REST_S = 5.0
EXPERT_TENSOR = re.compile(r"\.layers\.(\d+)\..*\.experts\.(\d+)\.")
# Low beside high, as in the square waves of benchmarks.several_weeks; prompt and new tokens of a request.
LOW, PROMPT, TOKENS = several_weeks.LOW, 16, 16
SAMPLE_S = 0.1


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Have the processes that start within a `with` keep packed experts there, so that nothing stays behind."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


@contextlib.contextmanager
def serving(models: Mapping[str, Path], servers: int, cores: Sequence[int], **more: Any) -> Iterator[Pool]:
    """A cluster of these models for the length of a `with`, every expert on as many servers as wanted."""
    attention = more.pop("attention", 1)
    config = ClusterConfig(
        models=tuple(f"{name}={path},attention={attention}" for name, path in models.items()),
        experts=servers,
        replicas=min(2, servers),
        port=0,
        cores=tuple(cores),
        kv_tokens=32768,
        **more,
    )
    with LocalCluster(config) as cluster, contextlib.closing(RouterClient(cluster.router_address)) as router:
        router.start()
        end_s = time.monotonic() + LIMIT_S
        while (view := router.view) is None or replicas_min(view) < config.replicas:
            if time.monotonic() > end_s:
                raise RuntimeError(f"experts lack replicas after {LIMIT_S:g} s; see the logs in {cluster.state_dir}")
            time.sleep(0.05)
        yield Pool(cluster=cluster, router=router)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A cluster that serves one model or several."""

    cluster: LocalCluster
    router: RouterClient

    def pids(self, pool: str = "") -> dict[str, int]:
        """Pids of its processes, or of one pool of them, by name."""
        return {name: pid for name, pid in self.cluster.pids().items() if name.startswith(pool)}

    def streams(self, asked: Sequence[tuple[str, Sequence[Sequence[int]]]], tokens: int) -> list[Stream]:
        """Streams of several models at once, in the order in which they are listed: (name, prompts)."""
        address = HttpEndpoint.of(self.cluster).address
        with ThreadPoolExecutor(len(asked)) as threads:
            batches = threads.map(lambda one: stream_batch(address, one[0], one[1], tokens), asked)
            return [stream for batch in batches for stream in batch]


def prompts_of(number: int, count: int, vocab: int) -> list[list[int]]:
    """Prompts of random tokens; other numbers have others."""
    return np.random.default_rng(number).integers(3, vocab, (count, PROMPT_TOKENS)).tolist()


# -- week --------------------------------------------------------------------------------------------------------------


def week(chosen: argparse.Namespace) -> None:
    """Server-seconds of one pool beside two, simulated: slow waves and square ones, apart and in phase."""
    with ProcessPoolExecutor(len(cores_of(chosen))) as workers:
        weeks = Weeks(workers, chosen.headroom)
        for name, apart in itertools.product(chosen.loads.split(","), (True, False)):
            period_s = 0.0 if name == "week" else float(name)
            load = Load(trace=chosen.trace, world=chosen.world, peak=chosen.peak, period_s=period_s, apart=apart)
            found = several_weeks.compare(weeks, load, chosen.least)
            result = {
                "measure": "week",
                "load": f"square wave of {period_s:g} s" if period_s else "week",
                "apart": apart,
                "trace": chosen.trace.name,
                "peak": chosen.peak,
                "least": chosen.least,
                "headroom": chosen.headroom,
                **found,
            }
            print(
                several_weeks.shown(f"{result['load']}, {'apart' if apart else 'in phase'}", found),
                flush=True,
            )
            record(BENCHMARK, result, (), chosen.results)


# -- memory ------------------------------------------------------------------------------------------------------------


def fine_tune(source: Path, out: Path, share: float, seed: int) -> int:
    """Copy a checkpoint and rewrite a share of its experts, each with its own values in another order.

    Returns:
        How many (layer, expert) pairs were rewritten.

    Raises:
        ValueError: it has no tensors of single experts.
    """
    shutil.copytree(source, out)
    places: dict[tuple[int, int], list[tuple[Path, int, int]]] = {}
    for path in sorted(out.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if match := EXPERT_TENSOR.search(name):
                begin, end = (8 + size + offset for offset in tensor["data_offsets"])
                places.setdefault((int(match[1]), int(match[2])), []).append((path, begin, end))
    if not places:
        raise ValueError(f"{source} has no tensors such as model.layers.0.mlp.experts.0.up_proj.weight to rewrite.")
    pairs = sorted(places)
    chance = np.random.default_rng(seed)
    rewritten = chance.choice(len(pairs), round(share * len(pairs)), replace=False)
    for path, begin, end in itertools.chain.from_iterable(places[pairs[i]] for i in rewritten):
        with path.open("r+b") as file:
            file.seek(begin)
            values = np.frombuffer(file.read(end - begin), np.uint16)
            file.seek(begin)
            file.write(np.roll(values, int(chance.integers(1, len(values)))).tobytes())
    return len(rewritten)


def resident_bytes(path: Path) -> int:
    """Bytes of a file that the page cache holds now (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        there = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapping, np.uint8)
        failed = libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(len(mapping)),
            ctypes.c_void_p(there.ctypes.data),
        )
        # A mapping with a view on it can't be closed.
        del view
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    return int(np.count_nonzero(there & 1)) * mmap.PAGESIZE


def private_bytes(pid: int) -> int:
    """A process's memory that no file backs: its own, and its part of what it shares with its peers."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = dict(re.findall(r"^(Pss_Anon|Pss_Shmem): +(\d+) kB$", rollup, re.MULTILINE))
    return 1024 * (int(found["Pss_Anon"]) + int(found["Pss_Shmem"]))


def memory_of(models: Mapping[str, Path], chosen: argparse.Namespace, folder: Path) -> dict[str, int]:
    """Memory of a pool that has served every model, its packed experts in a cache of its own."""
    vocab = SHAPES[chosen.shape].vocab
    with cache_in(folder), serving(models, chosen.servers, cores_of(chosen)) as pool:
        pool.streams([(name, prompts_of(1, 8, vocab)) for name in models], 16)
        time.sleep(REST_S)
        packs = sorted((folder / "eaas" / "packed").glob("*.experts"))
        return {
            "packs": len(packs),
            "pack_bytes": sum(path.stat().st_size for path in packs),
            "disk_bytes": sum(512 * path.stat().st_blocks for path in packs),
            "resident_bytes": sum(map(resident_bytes, packs)),
            "private_bytes": sum(map(private_bytes, pool.pids(EXPERT).values())),
        }


def memory(chosen: argparse.Namespace) -> None:
    """Memory of a pool that serves a model and a fine-tune of it, beside the pool of the model alone.

    Counted are the packed experts that the page cache holds, once whoever maps them, and what the servers hold of
    their own beyond those of the model alone: what a server takes as a process is on both sides and in neither figure.
    No part of it are checkpoints, which are read once, and attention workers, which each model has of its own.
    """
    with tempfile.TemporaryDirectory(prefix="eaas-several-") as temporary:
        folder = Path(temporary)
        first = make_model(chosen.shape, "qwen3_moe", folder / "first", seed=1)
        rewritten = fine_tune(first, folder / "second", chosen.rewritten, seed=2)
        one = memory_of({"first": first}, chosen, folder / "one")
        two = memory_of({"first": first, "second": folder / "second"}, chosen, folder / "two")
    beyond = max(0, two["private_bytes"] - one["private_bytes"])
    result = {
        "measure": "memory",
        "shape": chosen.shape,
        "servers": chosen.servers,
        "experts": SHAPES[chosen.shape].layers * SHAPES[chosen.shape].experts,
        "rewritten": rewritten,
        "one": one,
        "two": two,
        "ratio": round((two["resident_bytes"] + beyond) / one["resident_bytes"], 4),
        "ratio_of_resident": round(two["resident_bytes"] / one["resident_bytes"], 4),
        "ratio_of_disk": round(two["disk_bytes"] / one["disk_bytes"], 4),
        "bound": {"ratio": 1.15},
    }
    record(BENCHMARK, result, (), chosen.results)


# -- mixing ------------------------------------------------------------------------------------------------------------


def mixing(chosen: argparse.Namespace) -> None:
    """What an idle model costs another, and batches of two models beside batches of one; interleaved rounds.

    `alone` and `beside` are half the streams, all of the first model: on a pool of its own, and on the one that serves
    the second too. `one` is all streams of the first model, on two attention workers; `mixed` half of each model's,
    each on its own worker. Rows of two models share no expert, so that more weights are read for as many rows.
    """
    cores, vocab = cores_of(chosen), SHAPES[chosen.shape].vocab
    with models_of(chosen) as (first, second), contextlib.ExitStack() as closing:
        pools = {
            "alone": closing.enter_context(serving({"first": first}, chosen.servers, cores)),
            "one": closing.enter_context(serving({"first": first}, chosen.servers, cores, attention=2)),
            "both": closing.enter_context(serving({"first": first, "second": second}, chosen.servers, cores)),
        }
        pids = {f"{name} {one}": pid for name, pool in pools.items() for one, pid in pool.pids().items()}
        for streams in chosen.streams:

            def asked(
                number: int, models: Sequence[str], half: int = streams // 2
            ) -> list[tuple[str, list[list[int]]]]:
                return [(name, prompts_of(2 * number + i, half, vocab)) for i, name in enumerate(models)]

            def speed(pool: Pool, number: int, *models: str, asked: Any = asked) -> Speed:
                return speed_of(pool.streams(asked(number, models), chosen.tokens), chosen.tokens)

            alone = ["".join(s.texts()) for s in pools["alone"].streams(asked(1, ["first"]), chosen.tokens)]
            mixed = ["".join(s.texts()) for s in pools["both"].streams(asked(1, ["first", "second"]), chosen.tokens)]
            if mixed[: len(alone)] != alone:
                raise NotTheSameModel("the first model says something else in batches with the second")
            found = interleave(
                {
                    "alone": lambda n, speed=speed: speed(pools["alone"], n, "first"),
                    "beside": lambda n, speed=speed: speed(pools["both"], n, "first"),
                    "one": lambda n, speed=speed: speed(pools["one"], n, "first", "first"),
                    "mixed": lambda n, speed=speed: speed(pools["both"], n, "first", "second"),
                },
                chosen.rounds,
                pids,
            )
            result = {
                "measure": "mixing",
                "shape": chosen.shape,
                "second": chosen.second,
                "servers": chosen.servers,
                "streams": streams,
                "tokens": chosen.tokens,
                "rounds": chosen.rounds,
                "tokens_per_s": {name: spread([one.decode for one in speeds]) for name, speeds in found.items()},
                "ratio": {
                    f"{a}/{b}": spread([x.decode / y.decode for x, y in zip(found[a], found[b], strict=True)])
                    for a, b in (("beside", "alone"), ("mixed", "one"))
                },
            }
            record(BENCHMARK, result, (), chosen.results)


@contextlib.contextmanager
def models_of(chosen: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Two models of one shape and of other weights; they and their packed experts go at the end of the `with`."""
    with tempfile.TemporaryDirectory(prefix="eaas-several-") as temporary, cache_in(Path(temporary)):
        first = make_model(chosen.shape, "qwen3_moe", Path(temporary) / "first", seed=1)
        yield first, make_model(chosen.shape, chosen.second, Path(temporary) / "second", seed=2)


# -- live --------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Seen:
    """What became of one round on one arrangement. server_s: of live expert servers, as the routers showed them."""

    records: list[StreamRecord] = field(default_factory=list[StreamRecord])
    server_s: float = 0.0

    def ttft_s(self, percent: float) -> float:
        """A percentile of the times to the first token, counted from when a request was due."""
        times = [record.ttft_planned_s for record in self.records if not record.failed]
        return float(np.percentile([time_s for time_s in times if time_s is not None], percent))


def arrivals(seed: int, half_s: float, rates: Sequence[float]) -> list[float]:
    """When requests of one model come: at random, at the first rate for half a period, then at the second."""
    chance = np.random.default_rng(seed)
    times: list[float] = []
    for half, rate in enumerate(rates):
        due_s = half * half_s
        while (due_s := due_s + chance.exponential(1 / rate)) < (half + 1) * half_s:
            times.append(due_s)
    return times


def body_of(name: str, prompt: Sequence[int]) -> bytes:
    """A streamed request of TOKENS greedy tokens."""
    return json.dumps(
        {
            "model": name,
            "prompt": list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ).encode()


class Counter(threading.Thread):
    """Counts live expert servers over time, by what routers say of them."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        super().__init__(name="counter")
        self._pools, self._ended, self.server_s = pools, threading.Event(), 0.0

    def __enter__(self) -> Counter:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        last_s = time.monotonic()
        while True:
            ended = self._ended.wait(SAMPLE_S)
            live = sum(pool.router.status().pools[EXPERT].live for pool in self._pools)
            now_s = time.monotonic()
            self.server_s += live * (now_s - last_s)
            last_s = now_s
            if ended:
                return


def replay(pool_of: Mapping[str, Pool], asked: Mapping[str, Sequence[float]], seed: int, vocab: int) -> Seen:
    """Send each model's requests when they are due, whatever became of those before."""
    seen = Seen()
    draw = np.random.default_rng(seed)
    due = sorted((due_s, name) for name, times in asked.items() for due_s in times)
    bodies = [body_of(name, draw.integers(3, vocab, PROMPT).tolist()) for _, name in due]
    clients = {name: Client(Endpoint.of_url(pool.cluster.url), LIMIT_S) for name, pool in pool_of.items()}

    async def send_all() -> None:
        began_s = time.monotonic()
        for client in clients.values():
            client.t0_s = began_s
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, (due_s, name) in enumerate(due):
                    await asyncio.sleep(due_s - clients[name].now_s)
                    seen.records.append(StreamRecord(prompt=number, planned_s=due_s))
                    tasks.create_task(clients[name].stream(bodies[number], seen.records[-1]))
        finally:
            for client in clients.values():
                client.close()

    with Counter(list({id(pool): pool for pool in pool_of.values()}.values())) as counter:
        asyncio.run(send_all())
    seen.server_s = counter.server_s
    return seen


def capacity(pool: Pool, name: str, vocab: int) -> float:
    """Requests a second that a pool ends where far more are asked for."""
    rates = []
    for number in range(3):
        began_s = time.monotonic()
        pool.streams([(name, np.random.default_rng(number).integers(3, vocab, (32, PROMPT)).tolist())], TOKENS)
        rates.append(32 / (time.monotonic() - began_s))
    return float(np.median(rates[1:]))


def live(chosen: argparse.Namespace) -> None:
    """Two models under square waves on real processes: one pool beside a pool for each, by turns.

    `apart`: one model is asked much while the other is asked a tenth of it, by turns. `in phase`: both at once; a pool
    for both that has fewer servers than two pools then has more to do on each, and `ttft_p99_ratio` says what that
    costs. All pools are there all the time; one arrangement is asked at a time.
    """
    cores, vocab = cores_of(chosen), SHAPES[chosen.shape].vocab
    half_s = min(chosen.half_s, chosen.seconds / 2)
    rounds = max(1, round(chosen.seconds / (2 * half_s)))
    with models_of(chosen) as (first, second), contextlib.ExitStack() as closing:
        models = {"first": first, "second": second}
        one = closing.enter_context(serving(models, chosen.pooled, cores, expert_lanes=1))
        own = {
            name: closing.enter_context(serving({name: path}, chosen.servers, cores, expert_lanes=1))
            for name, path in models.items()
        }
        for pool in (one, *own.values()):
            closing.enter_context(LaneShare(lambda pool=pool: pool.router.view, chosen.share))
        arrangements: dict[str, Mapping[str, Pool]] = {"one": dict.fromkeys(models, one), "two": own}
        pids = {
            f"{number} {name}": pid
            for number, pool in enumerate((one, *own.values()))
            for name, pid in pool.pids().items()
        }
        for name in models:  # Everyone's first requests are slow, and not what is measured.
            capacity(one, name, vocab)
        high = chosen.load * min(capacity(pool, name, vocab) for name, pool in own.items())
        wave = (high, LOW * high)
        for load in ("apart", "in phase"):
            found: dict[str, list[Seen]] = {name: [] for name in arrangements}
            for number in range(rounds):
                rates = {"first": wave, "second": wave[::-1] if load == "apart" else wave}
                asked = {name: arrivals(2 * number + i, half_s, rates[name]) for i, name in enumerate(models)}
                for name in list(arrangements)[:: 1 if number % 2 else -1]:
                    settle(pids)
                    found[name].append(replay(arrangements[name], asked, number, vocab))
            result = {
                "measure": "live",
                "load": load,
                "shape": chosen.shape,
                "models": ["qwen3_moe", chosen.second],
                "servers": chosen.servers,
                "pooled": chosen.pooled,
                "share_of_core": chosen.share,
                "seconds": rounds * 2 * half_s,
                "half_s": half_s,
                "requests_per_s": {"high": round(high, 2), "low": round(LOW * high, 2)},
                **{name: figures(seen) for name, seen in found.items()},
                "server_seconds_saved": round(
                    1 - sum(s.server_s for s in found["one"]) / sum(s.server_s for s in found["two"]), 4
                ),
                "ttft_p99_ratio": spread(
                    [a.ttft_s(99) / b.ttft_s(99) for a, b in zip(found["one"], found["two"], strict=True)]
                ),
            }
            record(BENCHMARK, result, (), chosen.results)
            if failed := result["one"]["failed"] + result["two"]["failed"]:
                sys.exit(f"{failed} requests failed")


def figures(rounds: Sequence[Seen]) -> dict[str, Any]:
    """One arrangement's figures over all rounds."""
    records = [record for seen in rounds for record in seen.records]
    whole = Seen(records=records)
    return {
        "requests": len(records),
        "failed": sum(record.failed for record in records),
        "ttft_p50_s": round(whole.ttft_s(50), 4),
        "ttft_p99_s": round(whole.ttft_s(99), 4),
        "ttft_p99_of_rounds_s": spread([seen.ttft_s(99) for seen in rounds]),
        "server_seconds": round(sum(seen.server_s for seen in rounds), 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one part; append JSON lines."""
    options = parser(__doc__)
    parts = options.add_subparsers(required=True)

    def part(run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        about = run.__doc__ or ""
        found = parts.add_parser(
            run.__name__,
            help=about.partition("\n")[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        found.set_defaults(run=run)
        return found

    shared = Path("../shared")
    one = part(week)
    one.add_argument("--trace", type=Path, default=shared / "data/AzureLLMInferenceTrace_conv.csv")
    one.add_argument("--world", type=Path, default=shared / "bench/elastic_week.py")
    one.add_argument("--loads", default="week,600", help="week, or the period of a square wave in seconds")
    one.add_argument("--peak", type=float, default=8, help="servers that one model needs at its peak")
    one.add_argument("--least", type=int, default=1, help="servers that a scaled pool never goes below")
    one.add_argument("--headroom", type=float, default=0.0, help="of every scaled pool; 0: tuned for each")
    one = part(memory)
    one.add_argument("--servers", type=int, default=3)
    one.add_argument("--rewritten", type=float, default=0.1, help="share of the experts that the fine-tune changes")
    one = part(mixing)
    one.add_argument("--servers", type=int, default=2)
    one.add_argument("--second", default="qwen3_moe", help="architecture of the second model")
    one.add_argument("--streams", type=numbers, default=[2, 8, 32], help="of both models together, even")
    one.add_argument("--tokens", type=int, default=64, help="of each stream")
    one = part(live)
    one.add_argument("--servers", type=int, default=3, help="of each model's own pool")
    one.add_argument("--pooled", type=int, default=4, help="of the one pool for both")
    one.add_argument("--second", default="mixtral", help="architecture of the second model")
    one.add_argument("--seconds", type=float, default=600.0, help="of each load on each arrangement")
    one.add_argument("--half-s", type=float, default=60.0, help="half a period of the square wave")
    one.add_argument("--load", type=float, default=0.4, help="high rate over what a model's own pool can do at most")
    one.add_argument("--share", type=float, default=0.1, help="of a core for each expert server")
    chosen = options.parse_args(argv)
    chosen.run(chosen)


if __name__ == "__main__":
    main()
