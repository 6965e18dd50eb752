"""A fleet of attention workers and expert servers, each on cores of its own, simulated from measured costs. Pure.

Every worker decodes a fixed batch: for each layer it computes, sends each server its rows, and goes on when the last
reply is there. A server takes everything that is ready, groups it by layer, reads each activated expert once for a
group, and answers each group when it is done. Rows choose experts by a fixed skewed popularity; a worker fills each
of them into the less loaded of its replicas, as the client does.

A monolithic fleet has as many processes, each with every expert and a batch of its own: no hand-over, nothing shared.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured, in seconds, of one process on its own cores.

    Attributes:
        worker_s: Of a worker's own computation, for each layer; its batch is that of the measurement.
        handover_s: From a finished request to its pass's start and back, beyond computation.
        pass_s: Of a server's pass, whatever it holds.
        expert_s: More for each activated expert: its weights are read.
        row_s: More for each (token, expert) row.
    """

    worker_s: float
    handover_s: float
    pass_s: float
    expert_s: float
    row_s: float

    def group_s(self, experts: int, rows: int) -> float:
        """One layer's group in a pass."""
        return experts * self.expert_s + rows * self.row_s


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The part of a model that matters here."""

    layers: int
    experts: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the steps after warm-up.

    Attributes:
        tokens_per_s: Of the whole fleet.
        step_s: Of one worker's decode step.
        busy: Share of time that servers compute.
        requests_per_group: Requests of different workers that shared one read of the weights.
    """

    tokens_per_s: float
    step_s: float
    busy: float
    requests_per_group: float


def simulate(
    costs: Costs,
    shape: Shape,
    *,
    workers: int,
    servers: int,
    batch: int,
    steps: int = 24,
    warm: int = 8,
    zipf: float = 0.5,
    noise: float = 0.03,
    seed: int = 0,
) -> Outcome:
    """Run every worker for `warm + steps` decode steps.

    Args:
        batch: Sequences of each worker.
        zipf: Exponent of the experts' popularity. noise: Relative deviation of each worker's computing times.
    """
    rng = np.random.default_rng(seed)
    popularity = np.arange(1, shape.experts + 1, dtype=float) ** -zipf
    orders = [rng.permutation(shape.experts) for _ in range(shape.layers)]
    log_share = np.log(popularity)
    held = _replicas(shape, servers)
    total = (warm + steps) * shape.layers
    now_s = 0.0
    events: list[tuple[float, int, int, int]] = []  # at, kind, who, detail
    ARRIVE, FREE, READY = 0, 1, 2
    layer_of = [0] * workers
    waits = [0] * workers
    warm_s = [0.0] * workers
    end_s = [0.0] * workers
    queue: list[list[tuple[int, int, frozenset[int], int]]] = [[] for _ in range(servers)]
    on_way: dict[int, tuple[int, tuple[int, int, frozenset[int], int]]] = {}
    sent = 0
    is_busy = [False] * servers
    busy_s = 0.0
    groups = requests = 0

    def dispatch(worker: int, at_s: float) -> None:
        nonlocal sent
        layer = layer_of[worker] % shape.layers
        keys = log_share[None, :] + rng.gumbel(size=(batch, shape.experts))
        chosen = orders[layer][np.argpartition(-keys, shape.top_k - 1, axis=1)[:, : shape.top_k]]
        counts = np.bincount(chosen.ravel(), minlength=shape.experts)
        parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        load = [0.0] * servers
        for expert in np.argsort(-counts, kind="stable"):
            rows = int(counts[expert])
            if not rows:
                break
            server = min(held[int(expert)], key=lambda s: (load[s], (s + worker) % servers))
            load[server] += costs.group_s(1, rows)
            parts[server].append((int(expert), rows))
        waits[worker] = len(parts)
        for server, part in parts.items():
            request = (worker, layer, frozenset(e for e, _ in part), sum(r for _, r in part))
            on_way[sent] = (server, request)
            heapq.heappush(events, (at_s + costs.handover_s / 2, ARRIVE, server, sent))
            sent += 1

    def compute(worker: int, at_s: float) -> None:
        took = costs.worker_s * max(0.2, 1 + noise * rng.standard_normal())
        heapq.heappush(events, (at_s + took, READY, worker, 0))

    def serve(server: int, at_s: float) -> None:
        nonlocal busy_s, groups, requests
        taken, queue[server] = queue[server], []
        if not taken:
            is_busy[server] = False
            return
        is_busy[server] = True
        at = at_s + costs.pass_s
        by_layer: dict[int, list[tuple[int, int, frozenset[int], int]]] = defaultdict(list)
        for request in taken:
            by_layer[request[1]].append(request)
        for group in by_layer.values():
            experts = frozenset().union(*(request[2] for request in group))
            at += costs.group_s(len(experts), sum(request[3] for request in group))
            groups += 1
            requests += len(group)
            for worker, *_ in group:
                heapq.heappush(events, (at + costs.handover_s / 2, 3, worker, 0))
        busy_s += at - at_s
        heapq.heappush(events, (at, FREE, server, 0))

    for worker in range(workers):
        compute(worker, float(rng.uniform(0, shape.layers * costs.worker_s)))
    while events:
        now_s, kind, who, detail = heapq.heappop(events)
        if kind == ARRIVE:
            server, request = on_way.pop(detail)
            queue[server].append(request)
            if not is_busy[server]:
                serve(server, now_s)
        elif kind == FREE:
            serve(who, now_s)
        elif kind == READY:
            dispatch(who, now_s)
        else:
            waits[who] -= 1
            if waits[who]:
                continue
            layer_of[who] += 1
            if layer_of[who] == warm * shape.layers:
                warm_s[who] = now_s
            if layer_of[who] < total:
                compute(who, now_s)
            else:
                end_s[who] = now_s
    spans = [end - start for start, end in zip(warm_s, end_s, strict=True)]
    step_s = float(np.mean(spans)) / steps
    return Outcome(
        tokens_per_s=sum(batch * steps / span for span in spans),
        step_s=step_s,
        busy=busy_s / (servers * now_s),
        requests_per_group=requests / max(1, groups),
    )


def _replicas(shape: Shape, servers: int, copies: int = 2) -> list[list[int]]:
    """Servers of each expert: a ring, as the router places them from nothing."""
    copies = min(copies, servers)
    return [
        [(expert * servers // shape.experts + step) % servers for step in range(copies)]
        for expert in range(shape.experts)
    ]
