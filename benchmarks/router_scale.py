"""What a router costs with 600 members, and how soon it says where experts are when servers are lost.

The members are stand-ins that compute nothing and speak the real protocol, in processes of their own: each joins over a
connection of its own, watches, renews as often as it is told to, with the load, counters and routed rows of its role,
and says at once that it holds what it is to hold. The router is the real one, alone in its process; only its bound on
servers is wider than the 64 that today's clients can name.

    python -m benchmarks.router_scale --servers 512 --workers 64 --gateways 24
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.engines.process import cpu_s
from benchmarks.report import record, spread
from router.__main__ import serve
from router.config import RouterOptions
from router.journal import Journal
from router.proto import router_pb2 as pb
from router.proto import router_pb2_grpc as rpc
from router.state import Config
from router.view import ATTENTION, EXPERT, GATEWAY, PROTOCOL

LAYERS, EXPERTS, HOST_SERVERS, CROWDS = 61, 256, 8, 2
# Words of a load report, and counters of one report of them, by pool: as many as real members say.
LOADS = {
    EXPERT: ("busy", "rows_per_s", "pairs_per_s", "clients", "speed"),
    ATTENTION: ("busy", "kv_use", "running", "waiting", "queue_s", "tpot_p99_s", "servers_64"),
    GATEWAY: ("running", "waiting", "ttft_p99_s"),
}
COUNTED: dict[str, float] = dict.fromkeys(
    ("rows", "batches", "pairs", "busy_s", "replies", "latency_s", "hedges", "bytes"), 12345.0
)
# An attention worker counts for each server that it can name (router.state.MOST_MEMBERS), others in all.
LINKS = {EXPERT: 0, ATTENTION: 64, GATEWAY: 0}
SILENT = re.compile(r"fenced name=(\S+) reason=silent for ([0-9.]+) s")
TOLD_S = 1.0  # counters and rows
# Ready before anybody needs them: what stand-ins compute, the router's core has not.
TOTALS = {
    pool: [
        pb.Totals(counted=COUNTED),
        *(pb.Totals(peer=f"expert/{n}", counted=COUNTED) for n in range(links)),
    ]
    for pool, links in LINKS.items()
}
ROWS = np.full(LAYERS * EXPERTS, 7, "<u4").tobytes()


class StandIn:
    """One member. Times are of the monotonic clock, which all processes share."""

    def __init__(self, crowd: Crowd, pool: str, number: int) -> None:
        self.crowd, self.pool, self.number = crowd, pool, number
        self.host = f"host-{number // HOST_SERVERS}"
        self.epoch = self.salt = 0
        self.target = b""
        self.spoke_s = 0.0
        self.frozen = False
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, address: str, capacity: int) -> None:
        """Become a member, and do what members do from then on. capacity: experts of layers that it can hold."""
        self.channel = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.stub: Any = rpc.RouterStub(self.channel)
        self.identity = await self.stub.Join(
            pb.JoinRequest(
                pool=self.pool,
                address=f"10.0.{self.number >> 8}.{self.number & 255}:7200",
                pid=1_000_000 + self.number,
                host=self.host,
                model_hash="a-model-of-61-layers",
                numerics_class="cpu-bf16-fma-1" if self.pool != GATEWAY else "",
                layers=LAYERS,
                experts=EXPERTS,
                capacity=capacity if self.pool == EXPERT else 0,
                core=-1,
                protocol=PROTOCOL,
                zone=self.host if self.pool == EXPERT else "",
            )
        )
        self.tasks = [asyncio.create_task(self.watch()), asyncio.create_task(self.renew())]

    async def watch(self) -> None:
        """Take Views as they come; an expert server says at once that it holds what it is to hold."""
        name, incarnation = self.identity.name, self.identity.incarnation
        method = "/router.v1.Router/Watch"
        watching: Any = self.channel.unary_stream(method, pb.WatchRequest.SerializeToString)
        while True:
            try:
                async for message in watching(pb.WatchRequest(name=name, incarnation=incarnation)):
                    self.crowd.views += 1
                    self.crowd.bytes += len(message)
                    view, targets = self.crowd.read(message)
                    self.epoch, self.salt = view.epoch, view.salt
                    for gone in view.gone:
                        self.crowd.gone.setdefault(gone, []).append(time.monotonic())
                    target = targets.get(name)
                    if self.pool == EXPERT and target is not None:
                        if target != self.target:
                            self.target = target
                            self.crowd.ordered.append(time.monotonic())
                        await self.stub.Loaded(
                            pb.LoadedRequest(
                                name=name,
                                incarnation=incarnation,
                                bitmap=zlib.decompress(target),
                                epoch=view.epoch,
                                salt=view.salt,
                            )
                        )
            except grpc.RpcError:
                await asyncio.sleep(0.5)

    async def renew(self) -> None:
        """As router.client does: every renew_s, counters and rows once a second."""
        while True:
            try:
                async for _ in self.stub.Renew(self.renewals()):
                    pass
            except grpc.RpcError:
                await asyncio.sleep(0.5)

    async def renewals(self) -> AsyncIterator[pb.RenewRequest]:
        """What is said, when it is due."""
        identity, told_s = self.identity, 0.0
        due_s = time.monotonic() + random.uniform(0, identity.renew_s)
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if self.frozen:
                await asyncio.Event().wait()
            now_s = time.monotonic()
            self.spoke_s, due_s = now_s, max(due_s + identity.renew_s, now_s)
            request = pb.RenewRequest(
                name=identity.name,
                incarnation=identity.incarnation,
                load=dict.fromkeys(LOADS[self.pool], random.random()),
                acked=self.epoch,
                seen=self.epoch,
                salt=self.salt,
            )
            if now_s - told_s >= TOLD_S:
                told_s = now_s
                request.totals.extend(TOTALS[self.pool])
                if self.pool == ATTENTION:
                    request.rows = request.activated = ROWS
            self.crowd.renewals += 1
            yield request

    async def end(self) -> None:
        """Its process is gone: no word more."""
        for task in self.tasks:
            task.cancel()
        await self.channel.close()


class Crowd:
    """Many stand-ins in one process, told what to do in JSON lines."""

    def __init__(self) -> None:
        self.views = self.bytes = self.renewals = 0
        self.gone: dict[str, list[float]] = {}
        self.ordered: list[float] = []
        self.members: dict[int, StandIn] = {}
        self.known: dict[Any, tuple[pb.View, dict[str, bytes]]] = {}

    def read(self, message: bytes) -> tuple[pb.View, dict[str, bytes]]:
        """A View, and targets by name; what others here have been told too is not read again."""
        # The first bytes have the epoch, the last what it is a difference from.
        mark = len(message), message[:64], message[-64:]
        if mark not in self.known:
            view = pb.View.FromString(message)
            self.known = dict(list(self.known.items())[-16:])
            self.known[mark] = view, {m.name: m.target for m in view.members}
        return self.known[mark]

    async def obey(self, address: str, asked: argparse.Namespace) -> None:
        """Do what each line says, and answer it, until there are no more."""
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            verb, numbers = json.loads(line)
            chosen = [self.members[n] for n in numbers if n in self.members]
            answer: Any = {}
            if verb == "join":
                pools = [EXPERT] * asked.servers + [ATTENTION] * asked.workers + [GATEWAY] * asked.gateways
                # Twice what two replicas of everything take.
                capacity = 4 * LAYERS * EXPERTS // asked.servers
                self.members |= {n: StandIn(self, pools[n], n) for n in numbers}
                for start in range(0, len(numbers), 16):
                    some = [self.members[n] for n in numbers[start : start + 16]]
                    await asyncio.gather(*(member.join(address, capacity) for member in some))
            elif verb == "end":
                await asyncio.gather(*(member.end() for member in chosen))
                answer = {self.members.pop(m.number).identity.name: m.host for m in chosen}
            elif verb == "freeze":
                for member in chosen:
                    member.frozen = True
            elif verb == "seen":
                answer = {"views": self.views, "bytes": self.bytes, "renewals": self.renewals}
                answer |= {"gone": self.gone, "ordered": self.ordered, "watchers": len(self.members)}
                answer["spoke_s"] = {m.identity.name: m.spoke_s for m in self.members.values() if m.frozen}
                self.gone, self.ordered = {}, []
            print(json.dumps(answer), flush=True)


class Crowds:
    """All stand-ins, from the process that measures."""

    def __init__(self, asked: argparse.Namespace, address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.router_scale", *sys.argv[1:], "--address", address]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(CROWDS)]
        self.size = asked.servers + asked.workers + asked.gateways

    def tell(self, verb: str, numbers: Sequence[int] = ()) -> list[Any]:
        """What each crowd answers; a member of number n is in crowd n // HOST_SERVERS % CROWDS."""
        for index, process in enumerate(self.processes):
            own = [n for n in numbers if n // HOST_SERVERS % CROWDS == index]
            process.stdin.write(json.dumps((verb, own)) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait(timeout=30)


def measure(asked: argparse.Namespace, router: int, said: Path, crowds: Crowds, stub: Any) -> dict[str, Any]:
    """Have them all join, rest, and lose some."""

    def wait_whole(size: int) -> float:
        """Seconds until all servers hold what they are to, every expert twice."""
        since_s = time.monotonic()
        while True:
            view = stub.Status(pb.StatusRequest()).view
            servers = [member for member in view.members if member.pool == EXPERT]
            held = sum(
                np.unpackbits(np.frombuffer(s.serving, np.uint8), count=LAYERS * EXPERTS).astype(int)
                for s in servers
                if s.serving
            )
            if len(servers) == size and np.min(held) >= 2:
                return time.monotonic() - since_s
            if time.monotonic() - since_s > 120:
                raise RuntimeError(f"{len(servers)} servers, {size} wanted; copies {np.min(held)}")
            time.sleep(1.0)

    def totals(word: str) -> int:
        return sum(seen[word] for seen in crowds.tell("seen"))

    began_s, began_cpu_s = time.monotonic(), cpu_s(router)
    crowds.tell("join", range(crowds.size))
    wait_whole(asked.servers)
    found: dict[str, Any] = {
        "formed": {
            "seconds": round(time.monotonic() - began_s, 1),
            "cpu_s": round(cpu_s(router) - began_cpu_s, 1),
        }
    }
    time.sleep(5.0)
    cpu, before_bytes, before_renewals, rest_s = [], totals("bytes"), totals("renewals"), time.monotonic()
    for _ in range(asked.rounds):
        before, at_s = cpu_s(router), time.monotonic()
        time.sleep(4.0)
        cpu.append(100 * (cpu_s(router) - before) / (time.monotonic() - at_s))
    took_s = time.monotonic() - rest_s
    found["rest"] = {
        "cpu_percent": spread(cpu),
        "renewals_per_s": round((totals("renewals") - before_renewals) / took_s),
        "view_bytes_per_s": round((totals("bytes") - before_bytes) / took_s),
    }
    status = stub.Status(pb.StatusRequest()).view
    found["status_bytes"] = status.ByteSize()
    found["whole_view_bytes"] = next(iter(stub.Watch(pb.WatchRequest()))).ByteSize()

    print(found, file=sys.stderr, flush=True)
    left = set(range(asked.servers if asked.losses else 0))
    for kind, count in (("server_lost", 1), ("host_lost", HOST_SERVERS), ("host_frozen", HOST_SERVERS)):
        gone, ordered, silent, most_bytes, traffic, spent = [], [], [], [], [], []
        for _ in range(asked.losses):
            host = random.choice(sorted(left)) // HOST_SERVERS
            lost = [n for n in sorted(left) if n // HOST_SERVERS == host][:count]
            left -= {*lost}
            before = crowds.tell("seen")
            before_cpu_s, at_s = cpu_s(router), time.monotonic()
            if kind == "host_frozen":
                crowds.tell("freeze", lost)
                time.sleep(4.0)
            else:
                crowds.tell("end", lost)
                at_s = time.monotonic()
                exits = [pb.ReportExitRequest(host=f"host-{host}", pid=1_000_000 + number) for number in lost]
                reports = [stub.ReportExit.future(exit_) for exit_ in exits]
                time.sleep(2.0)
                if not all(report.result().name for report in reports):
                    raise RuntimeError("an exit was of no member")
            wait_whole(len(left))
            after = crowds.tell("seen")
            spent.append(cpu_s(router) - before_cpu_s)
            # A silence is judged by each member's own past: what the router says it was is its end.
            silences = {name: float(silent_s) for name, silent_s in SILENT.findall(said.read_text())}
            spoke = {name: at for seen in after for name, at in seen["spoke_s"].items()}
            due_s = {name: at + silences[name] for name, at in spoke.items()}
            silent += [silences[name] for name in spoke]
            late = [t - due_s.get(name, at_s) for seen in after for name, times in seen["gone"].items() for t in times]
            watchers = sum(seen["watchers"] for seen in after)
            if len(late) < 0.9 * watchers * len(lost):
                raise RuntimeError(f"{len(late)} times seen by {watchers} watchers that {len(lost)} had gone")
            gone += late
            since_s = max(due_s.values(), default=at_s)
            ordered += [t - since_s for seen in after for t in seen["ordered"]]
            traffic.append(sum(a["bytes"] - b["bytes"] for a, b in zip(after, before, strict=True)))
            views = sum(a["views"] - b["views"] for a, b in zip(after, before, strict=True))
            most_bytes.append(traffic[-1] / views)
            crowds.tell("end", lost if kind == "host_frozen" else ())
        found[kind] = {
            "gone_seen_s": percentiles_and_most(gone),
            "orders_seen_s": percentiles_and_most(ordered),
            "view_bytes_mean": spread(most_bytes),
            "traffic_bytes": spread(traffic),
            "cpu_s": spread(spent),
        } | ({"silent_s": percentiles_and_most(silent)} if silent else {})
    return found


def percentiles_and_most(values: Sequence[float]) -> dict[str, float]:
    """p50 and the greatest, to the millisecond."""
    return {"p50": round(float(np.percentile(values, 50)), 3), "most": round(max(values), 3)}


async def router(folder: Path, asked: argparse.Namespace) -> None:
    """The real router, with a wider bound."""
    config = Config(
        experts_wanted=asked.servers,
        attention_wanted=asked.workers,
        replicas=2,
        most_servers=asked.servers + 1,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    store = Journal(folder / "journal")
    try:
        options = RouterOptions(journal=folder / "journal", experts=1)
        await serve(options, config, store, None, stop, lambda address, admin: print(address, flush=True))
    finally:
        store.close()


def main() -> None:
    """Measure, print the table, and append one JSON line."""
    form = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    options.add_argument("--servers", type=int, default=512)
    options.add_argument("--workers", type=int, default=64)
    options.add_argument("--gateways", type=int, default=24)
    options.add_argument("--rounds", type=int, default=5, help="of 4 s at rest")
    options.add_argument("--losses", type=int, default=5, help="of each kind")
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--address", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.folder:
        asyncio.run(router(asked.folder, asked))
        return
    if asked.address:
        asyncio.run(Crowd().obey(asked.address, asked))
        return
    # The journal on a disk, as everywhere.
    with tempfile.TemporaryDirectory(prefix="eaas-router-scale-") as folder:
        command = [sys.executable, "-m", "benchmarks.router_scale", *sys.argv[1:], "--folder", folder]
        # As router.__main__ has it, which here is imported too late.
        environment = {**os.environ, "GRPC_EXPERIMENTS": "-event_engine_listener"}
        said = Path(folder) / "log"
        with said.open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        crowds = None
        try:
            address = process.stdout.readline().strip() if process.stdout else ""
            crowds = Crowds(asked, address)
            with grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
                found = measure(asked, process.pid, said, crowds, rpc.RouterStub(channel))
        finally:
            if crowds is not None:
                crowds.end()
            process.terminate()
            process.wait()
    sizes = {"servers": asked.servers, "workers": asked.workers, "gateways": asked.gateways}
    record("router_scale", {**sizes, "layers": LAYERS, "experts": EXPERTS, **found})


if __name__ == "__main__":
    main()
