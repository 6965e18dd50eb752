"""How many expert servers for each attention worker, and whether two kinds of process pay at all. Pure.

A decode step costs an attention worker its weights and keys and values, and each expert server the weights of the
experts that some row chose, or their arithmetic where that is longer; between them travel rows, and every layer pays
one hand-over there and back. From these the planner predicts

- a disaggregated fleet of `workers` and `servers`: workers that run freely share nothing but the servers' time;
  under load they fall into step, as whoever waits for the same server is answered together, and then share each read
  of the weights, if not perfectly (IN_STEP);
- a monolithic fleet: every device has the dense weights and its share of the experts, all go in step.

With overlap each worker has two halves of its batch under way, so that one computes while the other is with the
experts; a monolithic device then hides its network behind its other half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from eaas.model.families import tensors_of
from eaas.model.spec import ModelSpec
from eaas.ops.terminal import table

# A prediction within this share of the other says nothing: that is how far the parts of the model are trusted.
MARGIN = 0.03
# How much longer a cycle of workers that fell into step by themselves lasts than one in lockstep: 1.3 to 1.5 in
# benchmarks/fleet.py's simulations, whatever the sizes.
IN_STEP = 1.4
_HIDDEN = "part of it hidden by overlap"
_OPEN = "none of it hidden: there is no overlap"


class PlanInfeasible(ValueError):
    """No fleet of the allowed size can serve that model in that time; the text says what stands in the way."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, GPU or host, as its data sheet or a measurement has it.

    Attributes:
        reach: Share of bandwidth and peak that kernels get.
        link_bytes_per_s: Of its network, each way. handover_s: One request and its reply, beside the bytes.
        price: Of one device, in any unit; only ratios count.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    handover_s: float
    reach: float = 0.7
    price: float = 1.0

    def __post_init__(self) -> None:
        for field in ("bytes_per_s", "flops_per_s", "memory_bytes", "link_bytes_per_s", "reach", "price"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{self.name}: {field} is {getattr(self, field)}; give more than 0")
        if self.handover_s < 0 or self.reach > 1:
            raise ValueError(
                f"{self.name}: handover_s {self.handover_s} and reach {self.reach}; give at least 0, at most 1"
            )

    def seconds(self, nbytes: float, flops: float) -> float:
        """The longer of reading and computing."""
        return max(nbytes / self.bytes_per_s, flops / self.flops_per_s) / self.reach


# Dense bf16 peaks and memory from the makers' data sheets; network: one 400 Gb/s port each (A100: 200). The hand-over
# is an assumption: 10 us there and back for one-sided writes between GPUs.
KNOWN = {
    name: Hardware(
        name=name,
        bytes_per_s=terabytes_per_s * 1e12,
        flops_per_s=teraflops * 1e12,
        memory_bytes=gigabytes * 1e9,
        link_bytes_per_s=link * 1e9,
        handover_s=10e-6,
    )
    for name, terabytes_per_s, teraflops, gigabytes, link in (
        ("a100", 2.04, 312, 80, 25),
        ("h100", 3.35, 989, 80, 50),
        ("h200", 4.8, 989, 141, 50),
        ("h20", 4.0, 148, 96, 50),
    )
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one model's decode step is made of; bytes and operations, the latter as 2 a multiply-add.

    Attributes:
        dense_bytes: Weights outside the routed experts that a step reads. dense_flops: For each token.
        kv_bytes, kv_flops: For each token and position before it, over all layers.
        expert_bytes: Of one expert. expert_flops: For each (token, expert) row.
        row_bytes: Of a hidden row on its way out; the rows that come back are float32.
        max_context: Positions that the model has.
    """

    layers: int
    experts: int
    top_k: int
    dense_bytes: float
    dense_flops: float
    kv_bytes: float
    kv_flops: float
    expert_bytes: float
    expert_flops: float
    row_bytes: float
    reply_bytes: float
    max_context: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Work:
        """The work of a model as it is served."""
        size = spec.dtype.nbytes
        sizes = [(role, math.prod(plan.shape)) for role, plan in tensors_of(spec).items()]
        # One row of the embedding a token; where it is the head as well, the head reads all of it.
        dense = sum(count for role, count in sizes if role != "embed" or spec.tie_embeddings)
        expert = 3 * spec.hidden * spec.moe.expert_intermediate
        return cls(
            layers=len(spec.moe_layers),
            experts=spec.moe.experts,
            top_k=spec.moe.top_k,
            dense_bytes=size * dense,
            dense_flops=2 * dense,
            kv_bytes=spec.layers * spec.kv_heads * spec.cached_dims * size,
            kv_flops=2 * spec.layers * spec.q_heads * spec.cached_dims,
            expert_bytes=size * expert,
            expert_flops=2 * expert,
            row_bytes=size * spec.hidden,
            reply_bytes=4 * spec.hidden,
            max_context=spec.max_model_len,
        )

    def chosen(self, tokens: float) -> float:
        """Experts of a layer that some of the tokens choose, if all are equally popular."""
        if self.top_k >= self.experts:
            return self.experts
        return self.experts * -math.expm1(tokens * math.log1p(-self.top_k / self.experts))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked of a fleet.

    Attributes:
        tpot_s: Longest time for an output token. context: Positions before it, mean.
        devices: Most of them in all. replicas: Copies of each expert in a disaggregated fleet.
        imbalance: The busiest server's load over the mean. overlap: Two half batches under way, in either fleet.
    """

    tpot_s: float
    context: float
    devices: int = 64
    replicas: int = 2
    imbalance: float = 1.03
    overlap: bool = False

    @property
    def waves(self) -> int:
        """Parts of a batch that are under way at once."""
        return 2 if self.overlap else 1

    def __post_init__(self) -> None:
        for name, least in (("context", 0), ("devices", 1), ("replicas", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least {least}")
        if not self.tpot_s > 0:
            raise ValueError(f"the time for a token is {self.tpot_s * 1e3:g} ms; give more than 0")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """One predicted fleet. servers 0: monolithic.

    Attributes:
        batch: Sequences of each worker. price: Of all devices.
        attention_busy, experts_busy: Shares of time that the devices of either kind compute or read. network_s: Of a
            step, whether or not it is hidden.
    """

    workers: int
    servers: int
    batch: int
    tpot_s: float
    price: float
    attention_busy: float
    experts_busy: float
    network_s: float

    @property
    def devices(self) -> int:
        return self.workers + self.servers

    @property
    def tokens_per_s(self) -> float:
        return self.workers * self.batch / self.tpot_s

    @property
    def per_price(self) -> float:
        """Tokens per second for one unit of price."""
        return self.tokens_per_s / self.price


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best of both kinds. gain: in tokens for the price, of the disaggregated over the monolithic one; 0: none."""

    disaggregated: Fleet | None
    monolithic: Fleet | None
    gain: float
    pays: bool
    why: str


def plan(work: Work, attention: Hardware, expert: Hardware, task: Task) -> Plan:
    """The best fleet of each kind, and which to run. Args: attention, expert: devices of the two pools; the monolithic
    fleet is tried on each.

    Raises PlanInfeasible: neither kind can do it, or the model has no position left after the task's context."""
    # The output token needs a position too.
    if task.context > work.max_context - 1:
        raise PlanInfeasible(
            f"{task.context:,.0f} tokens before an output token asked for; the model has {work.max_context:,.0f} "
            f"positions, one of them for that token. Give --context at most {work.max_context - 1:,.0f}."
        )
    split = _best(
        disaggregated(work, attention, expert, task, workers, servers)
        for servers in range(least_servers(work, expert, task), task.devices)
        for workers in range(1, task.devices - servers + 1)
    )
    whole = _best(
        monolithic(work, device, task, count) for device in {attention, expert} for count in range(1, task.devices + 1)
    )
    if split is None and whole is None:
        raise PlanInfeasible(_obstacle(work, attention, expert, task))
    if whole is None:
        why = "no monolithic fleet of that size fits the model in memory and meets the time for a token"
        return Plan(disaggregated=split, monolithic=None, gain=math.inf, pays=True, why=why)
    if split is None:
        why = _obstacle(work, attention, expert, task)
        return Plan(disaggregated=None, monolithic=whole, gain=-1.0, pays=False, why=why)
    gain = split.per_price / whole.per_price - 1
    if gain > MARGIN:
        why = "experts read their weights for the rows of all workers, and workers keep their memory for sequences"
    elif gain < -MARGIN:
        share = split.network_s / split.tpot_s
        why = (
            f"hand-over and network take {share:.0%} of a step, {_HIDDEN if task.overlap else _OPEN}"
            if share > 0.15
            else "the pools wait for each other longer than they save"
        )
    else:
        why = f"the difference is within {MARGIN:.0%}, which is no reason to run two kinds of process"
    return Plan(disaggregated=split, monolithic=whole, gain=gain, pays=gain > MARGIN, why=why)


def least_servers(work: Work, device: Hardware, task: Task) -> int:
    """Expert servers that hold every replica."""
    held = work.layers * work.experts * work.expert_bytes * task.replicas
    return max(task.replicas, math.ceil(held / device.memory_bytes))


def disaggregated(
    work: Work, attention: Hardware, expert: Hardware, task: Task, workers: int, servers: int
) -> Fleet | None:
    """That fleet at the largest batch that memory and time allow, or None where there is none. Args: servers: at least
    `least_servers`."""
    distinct = servers * -math.expm1(work.top_k * math.log1p(-1 / servers)) if servers > 1 else 1.0

    def fleet(batch: int) -> Fleet:
        waves, part = task.waves, batch / task.waves
        dense_s = _dense_s(work, attention, task, part) / work.layers
        alone_s = _pass_s(work, expert, task, part, servers)
        together_s = _pass_s(work, expert, task, part * workers, servers)
        out, back = part * distinct * work.row_bytes, part * work.top_k * work.reply_bytes
        worker_s = max(out, back) / attention.link_bytes_per_s
        server_s = max(out, back) * workers / servers / expert.link_bytes_per_s
        network_s = max(worker_s, server_s) + max(attention.handover_s, expert.handover_s)
        free_s = max(waves * dense_s, dense_s + network_s + alone_s, waves * workers * alone_s)
        step_s = max(waves * dense_s, dense_s + network_s + together_s, waves * together_s)
        layer_s = min(free_s, IN_STEP * step_s)
        served_s = workers * alone_s if layer_s == free_s else together_s
        return Fleet(
            workers=workers,
            servers=servers,
            batch=batch,
            tpot_s=layer_s * work.layers,
            price=workers * attention.price + servers * expert.price,
            attention_busy=waves * dense_s / layer_s,
            experts_busy=min(1.0, waves * served_s / layer_s),
            network_s=waves * network_s * work.layers,
        )

    room = attention.memory_bytes - work.dense_bytes
    return _largest(fleet, work, task, room)


def monolithic(work: Work, device: Hardware, task: Task, count: int) -> Fleet | None:
    """`count` devices in step, experts dealt out among them, at the largest batch, or None."""
    experts_bytes = work.layers * work.experts * work.expert_bytes / count

    def fleet(batch: int) -> Fleet:
        waves, part = task.waves, batch / task.waves
        dense_s = _dense_s(work, device, task, part) / work.layers
        pass_s = _pass_s(work, device, task, part * count, count)
        network_s = 0.0
        if count > 1:
            distinct = count * -math.expm1(work.top_k * math.log1p(-1 / count)) * (1 - 1 / count)
            # Every device adds up what it computed of a token and sends one row back, as wide as the one it got.
            network_s = part * distinct * work.row_bytes / device.link_bytes_per_s + device.handover_s
        layer_s = max(waves * (dense_s + pass_s), dense_s + pass_s + network_s)
        return Fleet(
            workers=count,
            servers=0,
            batch=batch,
            tpot_s=layer_s * work.layers,
            price=count * device.price,
            attention_busy=waves * dense_s / layer_s,
            experts_busy=waves * pass_s / layer_s,
            network_s=waves * network_s * work.layers,
        )

    return _largest(fleet, work, task, device.memory_bytes - work.dense_bytes - experts_bytes)


def _dense_s(work: Work, device: Hardware, task: Task, batch: float) -> float:
    positions = batch * task.context
    return device.seconds(
        work.dense_bytes + positions * work.kv_bytes, batch * work.dense_flops + positions * work.kv_flops
    )


def _pass_s(work: Work, device: Hardware, task: Task, tokens: float, servers: int) -> float:
    """One layer's experts on the busiest of the servers."""
    share = task.imbalance / servers if servers > 1 else 1.0
    nbytes = work.chosen(tokens) * work.expert_bytes * share
    return device.seconds(nbytes, tokens * work.top_k * work.expert_flops * share)


def _largest(fleet: Callable[[int], Fleet], work: Work, task: Task, room_bytes: float) -> Fleet | None:
    """By bisection: a larger batch never takes less time, and never gives fewer tokens."""
    each = max(1.0, task.context) * work.kv_bytes
    low, high = 0, int(max(0.0, room_bytes) // each)
    while low < high:
        middle = (low + high + 1) // 2
        if fleet(middle).tpot_s <= task.tpot_s:
            low = middle
        else:
            high = middle - 1
    return fleet(low) if low else None


def _best(fleets: Iterable[Fleet | None]) -> Fleet | None:
    """The most tokens for the price; of equals the fewest devices."""
    found = [fleet for fleet in fleets if fleet is not None]
    return max(found, key=lambda f: (round(f.per_price, 6), -f.devices), default=None)


def _obstacle(work: Work, attention: Hardware, expert: Hardware, task: Task) -> str:
    needed = least_servers(work, expert, task)
    if needed + 1 > task.devices:
        return (
            f"{task.replicas} replicas of every expert need {needed} expert servers of {expert.memory_bytes / 1e9:.0f} "
            f"GB and one attention worker; {task.devices} devices are allowed"
        )
    if work.dense_bytes + max(1.0, task.context) * work.kv_bytes > attention.memory_bytes:
        one = max(1.0, task.context) * work.kv_bytes
        return (
            f"the dense weights need {work.dense_bytes / 1e9:.1f} GB and one sequence {one / 1e9:.1f} GB; an attention "
            f"worker has {attention.memory_bytes / 1e9:.0f} GB"
        )
    return f"no batch meets {task.tpot_s * 1e3:g} ms for a token: allow more time, more devices or faster ones"


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for --json."""
    return {
        **asdict(plan),
        **{
            kind: asdict(fleet) | {"tokens_per_s": fleet.tokens_per_s, "per_price": fleet.per_price}
            for kind, fleet in (("disaggregated", plan.disaggregated), ("monolithic", plan.monolithic))
            if fleet is not None
        },
    }


def verdict(plan: Plan) -> str:
    """One paragraph: what to run, and why."""
    split, whole = plan.disaggregated, plan.monolithic
    if plan.pays and split is not None:
        each = split.servers / split.workers
        text = f"Yes: {split.workers} attention workers and {split.servers} expert servers, {each:.2g} for each worker."
        text += f" {plan.gain:+.0%} tokens for the price" if whole is not None else ""
    else:
        devices = 0 if whole is None else whole.workers
        text = f"No: speed alone does not pay for two kinds of process; a monolithic fleet of {devices} does better."
        text += f" Disaggregated, tokens for the price change by {plan.gain:+.0%}" if split is not None else ""
    return f"{text.rstrip('.')}: {plan.why}."


def plan_table(plan: Plan) -> Table:
    """Both fleets beside each other."""
    fleets = (plan.disaggregated, plan.monolithic)
    rows: list[tuple[str, Callable[[Fleet], str]]] = [
        ("devices", lambda f: f"{f.workers} + {f.servers} expert servers" if f.servers else str(f.workers)),
        ("sequences of each worker", lambda f: f"{f.batch:,}"),
        ("time for a token", lambda f: f"{f.tpot_s * 1e3:.1f} ms"),
        ("tokens/s", lambda f: f"{f.tokens_per_s:,.0f}"),
        ("tokens/s for a unit of price", lambda f: f"{f.per_price:,.1f}"),
        ("attention devices busy", lambda f: f"{f.attention_busy:.0%}"),
        ("expert devices busy", lambda f: f"{f.experts_busy:.0%}"),
        ("network and hand-over of a step", lambda f: f"{f.network_s * 1e3:.1f} ms"),
    ]
    return table(
        ("", "disaggregated", "monolithic"),
        ([title, *("cannot" if fleet is None else show(fleet) for fleet in fleets)] for title, show in rows),
    )
