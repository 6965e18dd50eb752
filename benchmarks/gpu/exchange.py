"""Dispatch and combine on a real GPU: a client and its servers, looped back on one card.

One process, a stream for each end, the windows in plain device memory: first the bits of a call against the experts in
this process, then what a call of 128 tokens takes beyond its experts, how often the host launches anything for the
server, and a server that stops in mid-step. `sharing` has the servers in processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.ffn import random_fp8_experts
from benchmarks.gpu.local_experts import LocalExperts
from benchmarks.gpu.timing import seconds
from experts.gpu.client import GpuClient, Link
from experts.gpu.layout import ExchangeShape, RowsOut
from experts.gpu.server import PASSES, Batch, Compute, GpuServer, GroupedExperts
from experts.gpu.weights import ExpertWeights, Fp8ExpertWeights

CLIENT, SERVER = 0xC11E47, 0x5E47E2
TOKENS, HIDDEN, TOP_K = 128, 7168, 8
WANTED_US = 40.0
CALLS = 32  # of one replay
REPLAYS = 20
PATIENCE_S = 0.01
FIRST_LAUNCH_S = 10.0
# What the processes of `sharing` compute with: all make the same weights of one seed.
TWO = ExchangeShape(layers=1, experts=16, hidden=2048, top_k=8, capacity=32)
TWO_INTERMEDIATE = 768

Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A world of which something is shown: kernels are compiled for just this one.

    Attributes:
        tokens: Of each call of a step.
    """

    shape: ExchangeShape
    intermediate: int
    tokens: tuple[int, ...]
    servers: int = 1


BITS = Plan(
    shape=ExchangeShape(layers=2, experts=32, hidden=2048, top_k=8, capacity=64),
    intermediate=768,
    tokens=(64, 37, 1, 8),
)
TIME = {
    out: Plan(
        shape=ExchangeShape(layers=1, experts=32, hidden=HIDDEN, top_k=TOP_K, capacity=TOKENS, rows_out=out),
        intermediate=2048,
        tokens=(TOKENS,) * CALLS,
    )
    for out in (RowsOut.E4M3, RowsOut.BF16)
}
STOPPED = Plan(
    shape=ExchangeShape(layers=1, experts=32, hidden=2048, top_k=TOP_K, capacity=TOKENS),
    intermediate=768,
    tokens=(TOKENS,) * CALLS,
    servers=2,
)
PLANS = (*TIME.values(), BITS, STOPPED, Plan(shape=TWO, intermediate=768, tokens=(32,), servers=2))


class Loopback:
    """A client and servers in this process, each server with every expert of every layer.

    Args:
        shape: Of the exchange.
        computes: The experts of each server.
        device: A GPU, or "cpu" in the interpreter, where `GpuServer.enqueue_pass` runs a pass.
    """

    def __init__(self, shape: ExchangeShape, computes: list[Compute], device: str = "cuda") -> None:
        self.shape, self.device, count = shape, device, len(computes)
        self.client = GpuClient(shape, servers=count, replicas=count, incarnation=CLIENT, device=device)
        self.servers = [
            GpuServer(shape, clients=1, compute=compute, incarnation=SERVER + place, device=device)
            for place, compute in enumerate(computes)
        ]
        self.requests = [self._window(shape.request_window.nbytes) for _ in computes]
        self.replies = [self._window(shape.reply_window.nbytes) for _ in computes]

    def _window(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def connect(self) -> None:
        """Let the servers serve and the client know them, the first preferred."""
        for place, server in enumerate(self.servers):
            request, reply = self.requests[place].data_ptr(), self.replies[place].data_ptr()
            server.attach(0, request=request, reply=reply, incarnation=CLIENT)
            server.tables.held.copy_(
                torch.arange(server.tables.held.numel(), dtype=torch.int32).view_as(server.tables.held)
            )
            self.client.link(place, Link(request=request, reply=reply, incarnation=SERVER + place))
        self.client.tables.limits.fill_(int(1e9 * PATIENCE_S))
        places = torch.arange(len(self.servers), dtype=torch.int32)
        self.client.write_tables(places.expand(self.shape.layers, self.shape.experts, -1).contiguous())


class Call:
    """One call's arguments, and where its result goes."""

    def __init__(self, shape: ExchangeShape, tokens: int, device: str = "cuda") -> None:
        self.rows = torch.randn(tokens, shape.hidden, device=device).bfloat16()
        ids = torch.rand(tokens, shape.experts, device=device).topk(shape.top_k, dim=1).indices
        self.ids = ids.to(torch.int32).contiguous()
        self.weights = torch.rand(tokens, shape.top_k, device=device)
        self.n_rows = torch.tensor([tokens], dtype=torch.int32, device=device)
        self.out = torch.full((tokens, shape.hidden), float("nan"), device=device)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """In the order of `GpuClient.enqueue`, without the layer."""
        return self.rows, self.ids, self.weights, self.n_rows, self.out


def run(report: Report) -> None:
    """Report the bits, the time, the host's launches, and a stopped server."""
    compile_all()
    right_bits(report)
    for plan in TIME.values():
        overhead(report, plan)
    stopped_server(report)


def compile_all() -> None:
    """Compile all plans' kernels in processes side by side: one after another that would take most of the time here.

    Raises:
        RuntimeError: one of them failed; it said why.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.exchange"]
    processes = [subprocess.Popen([*command, str(number)]) for number in range(len(PLANS))]
    failed = [number for number, process in enumerate(processes) if process.wait()]
    if failed:
        raise RuntimeError(f"plans {failed} do not compile; what their processes said is above.")


def compile_plan(plan: Plan) -> None:
    """Launch every kernel of a plan once, so that whoever comes after finds it compiled."""
    weights = experts_for(plan)
    experts = GroupedExperts(weights, plan.shape.pairs, torch.device("cuda"))
    world = Loopback(plan.shape, [experts] * plan.servers)
    steps = Steps(world, [Call(plan.shape, tokens) for tokens in sorted(set(plan.tokens))])
    if isinstance(weights, ExpertWeights):
        local_result(plan.shape, weights, steps.calls[-1], 0)
    for server in world.servers:
        server.capture(1)
    torch.cuda.synchronize()


def experts_for(plan: Plan) -> ExpertWeights | Fp8ExpertWeights:
    """What a plan's servers compute with: float8 experts where rows travel so."""
    if plan.shape.rows_out is RowsOut.E4M3:
        slots = plan.shape.layers * plan.shape.experts
        return random_fp8_experts(slots, plan.shape.hidden, plan.intermediate)
    return random_experts(plan.shape, plan.intermediate, 0)


def random_experts(shape: ExchangeShape, intermediate: int, seed: int, device: str = "cuda") -> ExpertWeights:
    """Weights of every expert of every layer, in the order of their slots."""
    weights = ExpertWeights.allocate(
        slots=shape.layers * shape.experts, hidden=shape.hidden, intermediate=intermediate, device=device
    )
    generator = torch.Generator(device=device).manual_seed(seed)
    weights.gate_up.normal_(0, shape.hidden**-0.5, generator=generator)
    weights.down.normal_(0, intermediate**-0.5, generator=generator)
    return weights


def local_result(shape: ExchangeShape, weights: ExpertWeights, call: Call, layer: int) -> torch.Tensor:
    """The same call by the experts in this process."""
    table = torch.arange(shape.layers * shape.experts, dtype=torch.int32, device=call.rows.device)
    local = LocalExperts(
        weights=weights, table=table.view(shape.layers, shape.experts), top_k=shape.top_k, max_rows=len(call.rows),
        row_dtype=torch.bfloat16,
    )  # fmt: skip
    out = torch.full_like(call.out, float("nan"))
    local.enqueue(layer, call.rows, call.ids, call.weights, call.n_rows, out)
    return out


class Steps:
    """A captured graph of calls of one client, replayed on a stream of its own."""

    def __init__(self, world: Loopback, calls: list[Call]) -> None:
        self.world, self.calls = world, calls
        if world.client.stream is None:
            raise ValueError("steps are captured on a GPU, and the client is one of the interpreter.")
        self.stream = world.client.stream
        # What the world and the calls are made of may still be on its way, on another stream.
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            # Nobody is linked yet: this only compiles the kernels and loads them.
            self._enqueue()
            world.client.reclaim()
        # Code that is used beside running servers is loaded before.
        torch.equal(self.calls[0].out, self.calls[0].out.clone())
        torch.cuda.synchronize()
        world.client.report()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._enqueue()

    def _enqueue(self) -> None:
        for i, call in enumerate(self.calls):
            self.world.client.enqueue(i % self.world.shape.layers, *call.arguments())

    def replay(self) -> float:
        """One step; its seconds by the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.world.client.begin(1.0)
            begin.record()
            self.graph.replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def right_bits(report: Report) -> None:
    """A call over a server gives the bits of the experts in this process."""
    shape = BITS.shape
    weights = random_experts(shape, BITS.intermediate, int(torch.randint(1 << 31, (1,))))
    world = Loopback(shape, [GroupedExperts(weights, shape.pairs, torch.device("cuda"))])
    steps = Steps(world, [Call(shape, tokens) for tokens in BITS.tokens])
    wanted = [local_result(shape, weights, call, i % shape.layers) for i, call in enumerate(steps.calls)]
    torch.cuda.synchronize()
    world.connect()
    serve(world)
    steps.replay()
    said = world.client.report()
    equal = all(torch.equal(call.out, found) for call, found in zip(steps.calls, wanted, strict=True))
    report({"what": "bits of a call as of local experts", "report": str(said), "holds": equal and said.usable})
    stop(world)


def serve(world: Loopback) -> None:
    """Let all servers run, and wait until their passes do.

    Raises:
        RuntimeError: they do not.
    """
    torch.cuda.synchronize()
    # All are captured before one runs: a capture waits for the device.
    for server in world.servers:
        server.capture()
    before = [server.passes for server in world.servers]
    for server in world.servers:
        server.serve()
    # The first launch of a graph brings it to the device: longer than a client is patient.
    end_s = time.monotonic() + FIRST_LAUNCH_S
    while any(server.passes <= passes for server, passes in zip(world.servers, before, strict=True)):
        for server in world.servers:
            server.check()
        if time.monotonic() > end_s:
            raise RuntimeError(f"no pass of a server ended within {FIRST_LAUNCH_S} s of its launch.")
        time.sleep(0.001)


def stop(world: Loopback) -> None:
    """End all servers."""
    for server in world.servers:
        server.end_passes()
    torch.cuda.synchronize()


def overhead(report: Report, plan: Plan) -> None:
    """What 128 tokens' exchange takes: with experts that do nothing, and beyond those that compute."""
    shape = plan.shape
    experts = GroupedExperts(experts_for(plan), shape.pairs, torch.device("cuda"))
    calls = [Call(shape, tokens) for tokens in plan.tokens]
    rows_out = shape.rows_out.name
    results: dict[str, Any] = {"what": "dispatch + combine", "tokens": TOKENS, "rows_out": rows_out}
    for name, compute in {"alone": lambda batch: None, "with experts": experts}.items():
        world = Loopback(shape, [compute])
        steps = Steps(world, calls)
        if compute is experts:
            results["experts_us"] = round(1e6 * experts_alone(world.servers[0].batch, calls[0], experts), 1)
        world.connect()
        serve(world)
        server = world.servers[0]
        for _ in range(3):
            steps.replay()
        launches, passes = server.launches, server.passes
        times = sorted(steps.replay() for _ in range(REPLAYS))
        made = server.passes - passes
        results[name] = {
            "us": round(1e6 * times[len(times) // 2] / CALLS, 1),
            "us_worst_replay": round(1e6 * times[-1] / CALLS, 1),
            "passes": made,
            "host_launches": server.launches - launches,
            "usable": world.client.report().usable,
        }
        stop(world)
    alone, beside = results["alone"], results["with experts"]
    results["alone_us"] = alone["us"]
    results["us_beyond_experts"] = round(beside["us"] - results["experts_us"], 1)
    results["wanted_us"] = WANTED_US
    results["holds"] = alone["usable"] and beside["usable"]
    report(results)
    # Launches come in whole graphs: at most one more than the passes need.
    few = beside["host_launches"] <= -(-beside["passes"] // PASSES) + 1
    report(
        {
            "what": "host launches on the server",
            "passes_of_one_launch": PASSES,
            "launches_per_pass": round(beside["host_launches"] / max(1, beside["passes"]), 5),
            "holds": few,
        }
    )


def experts_alone(batch: Batch, call: Call, experts: Compute) -> float:
    """Seconds of the experts on what one call asks, without any exchange."""
    pairs = call.ids.numel()
    batch.slots[:pairs] = call.ids.flatten()
    batch.row_of[:pairs] = (torch.arange(pairs, device="cuda") // TOP_K).to(torch.int32)
    batch.n_pairs.fill_(pairs)
    taken = seconds(lambda: experts(batch), repeats=4)
    batch.n_pairs.zero_()
    return taken


def stopped_server(report: Report) -> None:
    """The first of two servers stops in mid-step: the step completes through the other with the same rows."""
    shape, on = STOPPED.shape, torch.device("cuda")
    weights = random_experts(shape, STOPPED.intermediate, 2)
    world = Loopback(shape, [GroupedExperts(weights, shape.pairs, on) for _ in range(STOPPED.servers)])
    steps = Steps(world, [Call(shape, tokens) for tokens in STOPPED.tokens])
    world.connect()
    serve(world)
    steps.replay()
    wanted = [call.out.clone() for call in steps.calls]
    calm_s = steps.replay()
    timer = threading.Timer(0.02, world.servers[0].set_lease, (1,))
    timer.start()
    worst_s, redispatched, same, end_s = 0.0, 0, True, time.monotonic() + 2.0
    replays = 0
    while time.monotonic() < end_s and (redispatched == 0 or replays < 50):
        worst_s = max(worst_s, steps.replay())
        said = world.client.report()
        redispatched += said.redispatched
        same &= said.usable and all(torch.equal(call.out, one) for call, one in zip(steps.calls, wanted, strict=True))
        replays += 1
    timer.join()
    world.servers[0].set_lease((1 << 63) - 1)
    time.sleep(0.05)
    with torch.cuda.stream(steps.stream):
        world.client.reclaim()
    steps.stream.synchronize()
    back = not world.client.retired()
    report(
        {
            "what": "a server stopped in mid-step, in the graph",
            "calm_ms": round(1e3 * calm_s, 2),
            "worst_ms": round(1e3 * worst_s, 2),
            "patience_ms": 1e3 * PATIENCE_S,
            "pairs_mended": redispatched,
            "slots_back": back,
            "holds": same and redispatched > 0 and back and worst_s < calm_s + 3 * PATIENCE_S,
        }
    )
    stop(world)


if __name__ == "__main__":
    compile_plan(PLANS[int(sys.argv[1])])
