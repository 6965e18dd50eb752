"""What a router costs with 600 members, and how soon it says where experts are when servers are lost.

The members are stand-ins that compute nothing and speak the real protocol, in a process of their own: each joins over a
connection of its own, watches, renews as often as it is told to, with the load and counters of its role, and says that
it holds what it is to hold. The router is the real one, in its own process; only its bound on servers is wider than the
64 that today's clients can name.

    python -m benchmarks.router_scale --servers 512 --workers 64 --gateways 24
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
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

LAYERS, EXPERTS, HOST_SERVERS = 61, 256, 8
HASH = "a-model-of-61-layers"
# Words of a load report, by pool: as many as real members say.
LOADS = {
    EXPERT: ("busy", "rows_per_s", "pairs_per_s", "clients", "speed"),
    ATTENTION: ("busy", "kv_use", "running", "waiting", "queue_s", "tpot_p99_s", "servers_64"),
    GATEWAY: ("running", "waiting", "ttft_p99_s"),
}
TOTALS_S = 1.0


@dataclass
class StandIn:
    """One member. views, view_bytes: that came to it."""

    pool: str
    number: int
    address: str
    host: str
    identity: Any = None
    stub: Any = None
    channel: Any = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list[Any])
    epoch: int = 0
    salt: int = 0
    target: bytes = b""
    view_bytes: int = 0
    views: int = 0
    frozen: bool = False
    fenced: bool = False

    async def join(self, capacity: int) -> None:
        """Become a member, and do what members do from then on. capacity: experts of layers that it can hold."""
        self.channel = grpc.aio.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = rpc.RouterStub(self.channel)
        computes = self.pool == EXPERT
        self.identity = await self.stub.Join(
            pb.JoinRequest(
                pool=self.pool,
                address=f"10.0.{self.number >> 8}.{self.number & 255}:7200",
                pid=1_000_000 + self.number,
                host=self.host,
                model_hash=HASH,
                numerics_class="cpu-bf16-fma-1" if self.pool != GATEWAY else "",
                layers=LAYERS,
                experts=EXPERTS,
                capacity=capacity if computes else 0,
                core=-1,
                protocol=PROTOCOL,
                zone=self.host if computes else "",
            )
        )
        self.tasks = [asyncio.create_task(self.watch()), asyncio.create_task(self.renew())]

    async def watch(self) -> None:
        """Take Views as they come; an expert server says at once that it holds what it is to hold."""
        watched = pb.WatchRequest(
            name=self.identity.name, incarnation=self.identity.incarnation, differences=True
        )
        while True:
            try:
                async for view in self.stub.Watch(watched):
                    self.views += 1
                    self.view_bytes += view.ByteSize()
                    self.take(view)
                    seen(view.epoch)
                    if self.pool == EXPERT:
                        await self.report(view)
            except grpc.RpcError:
                await asyncio.sleep(0.5)

    def take(self, view: pb.View) -> None:
        """The newest epoch, and this member's own target."""
        self.epoch, self.salt = view.epoch, view.salt

    async def report(self, view: pb.View) -> None:
        """Say that all of the target is held, if it has changed."""
        own = next((member for member in view.members if member.name == self.identity.name), None)
        if own is None or own.target == self.target:
            return
        self.target = own.target
        await self.stub.Loaded(
            pb.LoadedRequest(
                name=self.identity.name,
                incarnation=self.identity.incarnation,
                bitmap=own.target,
                epoch=view.epoch,
                salt=view.salt,
            )
        )

    async def renew(self) -> None:
        """As router.client does: every renew_s, counters once a second."""
        await asyncio.sleep(random.uniform(0, self.identity.renew_s))
        counted_s = 0.0
        while not self.fenced:
            began_s = time.monotonic()
            if not self.frozen:
                totals = []
                if began_s - counted_s >= TOTALS_S:
                    counted_s = began_s
                    totals = [pb.Totals(counted={"rows": began_s, "batches": began_s, "busy_s": began_s})]
                request = pb.RenewRequest(
                    name=self.identity.name,
                    incarnation=self.identity.incarnation,
                    load={word: random.random() for word in LOADS[self.pool]},
                    acked=self.epoch,
                    seen=self.epoch,
                    salt=self.salt,
                    totals=totals,
                )
                try:
                    reply = await self.stub.Renew(request, timeout=self.identity.lease_s / 2)
                    self.fenced = reply.fenced
                except grpc.RpcError:
                    pass
            await asyncio.sleep(max(0.0, self.identity.renew_s - (time.monotonic() - began_s)))

    async def end(self) -> None:
        """Its process is gone: no word more."""
        for task in self.tasks:
            task.cancel()
        await self.channel.close()


# When an epoch was first seen by anybody.
_first_seen: dict[int, float] = {}


def seen(epoch: int) -> None:
    _first_seen.setdefault(epoch, time.monotonic())


async def members(asked: argparse.Namespace, router: int) -> dict[str, Any]:
    """Join them all, rest, and lose some."""
    pools = [(EXPERT, asked.servers), (ATTENTION, asked.workers), (GATEWAY, asked.gateways)]
    crowd = [
        StandIn(pool=pool, number=index, address=asked.address, host=f"host-{pool}-{number // HOST_SERVERS}")
        for index, (pool, number) in enumerate((pool, n) for pool, count in pools for n in range(count))
    ]
    # Twice what two replicas of everything take.
    capacity = 4 * LAYERS * EXPERTS // asked.servers
    began_s = time.monotonic()
    for start in range(0, len(crowd), 32):
        await asyncio.gather(*(member.join(capacity) for member in crowd[start : start + 32]))
    observer = grpc.aio.insecure_channel(asked.address, [("grpc.max_receive_message_length", -1)])
    stub = rpc.RouterStub(observer)

    async def whole(size: int) -> bool:
        status = await stub.Status(pb.StatusRequest())
        servers = [member for member in status.view.members if member.pool == EXPERT]
        held = np.zeros(LAYERS * EXPERTS, np.int64)
        for server in servers:
            held += np.unpackbits(np.frombuffer(server.serving, np.uint8), bitorder="little", count=len(held))
        return len(servers) == size and int(held.min()) >= 2

    async def wait_whole(size: int, limit_s: float = 300.0) -> float:
        since_s = time.monotonic()
        while not await whole(size):
            if time.monotonic() - since_s > limit_s:
                raise RuntimeError(f"not whole after {limit_s:g} s")
            await asyncio.sleep(1.0)
        return time.monotonic() - since_s

    await wait_whole(asked.servers)
    found: dict[str, Any] = {"whole_s": round(time.monotonic() - began_s, 1)}
    await asyncio.sleep(5.0)
    rest: list[float] = []
    before_bytes, rest_s = sum(member.view_bytes for member in crowd), time.monotonic()
    for _ in range(asked.rounds):
        before, at_s = cpu_s(router), time.monotonic()
        await asyncio.sleep(4.0)
        rest.append((cpu_s(router) - before) / (time.monotonic() - at_s))
    took_s = time.monotonic() - rest_s
    found["cpu_at_rest"] = spread(rest)
    found["view_bytes_per_s_at_rest"] = round((sum(m.view_bytes for m in crowd) - before_bytes) / took_s)
    found["whole_view_bytes"] = (await stub.Status(pb.StatusRequest())).view.ByteSize()

    size = asked.servers
    for kind, count in (("server_lost", 1), ("host_lost", HOST_SERVERS)):
        reactions, sent, whole_s = [], [], []
        for _ in range(asked.losses):
            servers = [member for member in crowd if member.pool == EXPERT and not member.fenced]
            host = random.choice(servers).host
            lost = [member for member in servers if member.host == host][:count]
            before = sum(member.view_bytes for member in crowd)
            newest = max(_first_seen)
            for member in lost:
                await member.end()
            at_s = time.monotonic()
            await asyncio.gather(
                *(stub.ReportExit(pb.ReportExitRequest(host=m.host, pid=1_000_000 + m.number)) for m in lost)
            )
            # Nobody may be asked for what the lost ones held, all of them: as many epochs as there are losses, at most.
            names = {member.identity.name for member in lost}
            while True:
                epochs = sorted(epoch for epoch in _first_seen if epoch > newest)
                if epochs and not names & {
                    m.name for m in (await stub.Status(pb.StatusRequest())).view.members
                }:
                    break
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.5)
            after = [_first_seen[epoch] - at_s for epoch in _first_seen if epoch > newest][:count]
            reactions.append(max(after))
            for member in lost:
                member.fenced = True
                crowd.remove(member)
            size -= len(lost)
            whole_s.append(await wait_whole(size))
            sent.append(sum(member.view_bytes for member in crowd) - before)
        found[kind] = {
            "to_publication_s": spread(reactions),
            "whole_again_s": spread(whole_s),
            "view_bytes": spread(sent),
        }
    # Silent, all of one host: from the end of the lease, or of the least silence, to the View without them.
    servers = [member for member in crowd if member.pool == EXPERT]
    host = random.choice(servers).host
    lost = [member for member in servers if member.host == host]
    at_s, newest = time.monotonic(), max(_first_seen)
    for member in lost:
        member.frozen = True
    names = {member.identity.name for member in lost}
    while names & {m.name for m in (await stub.Status(pb.StatusRequest())).view.members}:
        await asyncio.sleep(0.05)
    found["host_silent_to_publication_s"] = round(time.monotonic() - at_s, 2)
    for member in crowd:
        await member.end()
    return found


async def router(folder: Path, asked: argparse.Namespace) -> None:
    """The real router, with a wider bound."""
    options = RouterOptions(journal=folder / "journal", experts=1)
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
        await serve(options, config, store, None, stop, lambda address, admin: print(address, flush=True))
    finally:
        store.close()


def main() -> None:
    """Measure, and append one JSON line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--servers", type=int, default=512)
    options.add_argument("--workers", type=int, default=64)
    options.add_argument("--gateways", type=int, default=24)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--losses", type=int, default=5)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.folder:
        asyncio.run(router(asked.folder, asked))
        return
    with tempfile.TemporaryDirectory(prefix="eaas-router-scale-", dir="/dev/shm") as folder:
        command = [sys.executable, "-m", "benchmarks.router_scale", *sys.argv[1:], "--folder", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            asked.address = (process.stdout or sys.stdin).readline().strip()
            found = asyncio.run(members(asked, process.pid))
        finally:
            process.terminate()
            process.wait()
    sizes = {"servers": asked.servers, "workers": asked.workers, "gateways": asked.gateways}
    record("router_scale", {**sizes, "layers": LAYERS, "experts": EXPERTS, **found})


if __name__ == "__main__":
    main()
