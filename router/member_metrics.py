"""Families for Prometheus of what members report: their load, their counters, and their links to expert servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from router.counts import Coverage
from router.events import Totals
from router.records import phase
from router.state import State
from router.view import ATTENTION, EXPERT

_PACES = ("slow_expert", "slow_link")


class _Word(NamedTuple):
    name: str
    text: str
    word: str
    more: Mapping[str, str] = {}


_SERVER = (
    _Word("eaas_server_calls", "Requests answered.", "calls"),
    _Word("eaas_server_batches", "Batches computed.", "batches"),
    _Word("eaas_server_rows", "Rows received.", "rows"),
    _Word("eaas_server_pairs", "(row, expert) pairs computed.", "pairs"),
    _Word("eaas_server_activations", "Experts activated, summed over batches.", "experts"),
    _Word("eaas_server_busy_seconds", "Time in batches.", "busy_s"),
    _Word("eaas_server_bytes", "Bytes of rows.", "received_bytes", {"direction": "received"}),
    _Word("eaas_server_bytes", "Bytes of rows.", "sent_bytes", {"direction": "sent"}),
    _Word("eaas_server_weights_damaged", "Experts found damaged after they were loaded.", "damaged"),
    _Word("eaas_server_refused", "Requests refused.", "not_held", {"reason": "not_held"}),
    _Word("eaas_server_refused", "Requests refused.", "invalid", {"reason": "invalid"}),
)
_WORKER = (
    _Word("eaas_worker_tokens", "Tokens computed, those of prompts too.", "computed_tokens"),
    _Word("eaas_worker_reused_tokens", "Tokens of prompts found in the KV cache.", "reused_tokens"),
    _Word("eaas_worker_preemptions", "Requests put back for want of KV blocks.", "preemptions"),
    _Word("eaas_worker_busy_seconds", "Time in steps.", "busy_s"),
    _Word("eaas_failovers", "(token, expert) pairs asked of another server: theirs was gone.", "failovers"),
    _Word("eaas_hedges", "(token, expert) pairs asked of another server as well: theirs was late.", "hedges"),
    _Word("eaas_lost_pairs", "(token, expert) pairs that no server answered in time.", "lost"),
    _Word("eaas_corrupt_replies", "Replies that failed validation.", "corrupt"),
)
_LINK = (
    _Word("eaas_link_calls", "Requests sent.", "calls"),
    _Word("eaas_link_rows", "Rows sent.", "rows"),
    _Word("eaas_link_failovers", "Pairs asked of another server: this one was gone.", "failovers"),
    _Word("eaas_link_hedges", "Pairs asked of another server as well: this one was late.", "hedges"),
    _Word("eaas_link_corrupt_replies", "Replies that failed validation.", "corrupt"),
    _Word("eaas_link_service_seconds", "Of the latency, what the server measured itself.", "service_s"),
    _Word("eaas_link_bytes", "Bytes of rows.", "sent_bytes", {"direction": "sent"}),
    _Word("eaas_link_bytes", "Bytes of rows.", "received_bytes", {"direction": "received"}),
)


def member_families(
    state: State, totals: Mapping[str, tuple[Totals, ...]], cover: Coverage
) -> Iterable[Metric]:
    """What is known of each member.

    Args:
        totals: Counters of members, by name.
    """
    yield from _states(state)
    yield from _copies(state)
    load = GaugeMetricFamily(
        "eaas_server_layer_load", "Rows per second, if replicas share evenly.", labels=["server", "layer"]
    )
    for layer, row in enumerate(cover.load):
        for server, rows_per_s in zip(cover.servers, row, strict=True):
            load.add_metric([server, str(layer)], float(rows_per_s))
    yield load
    own = {name: _of(seen, lambda each: not each.peer) for name, seen in totals.items()}
    servers = [([name], each) for name, seen in own.items() if _pool(name) == EXPERT for each in seen]
    workers = [([name], each) for name, seen in own.items() if _pool(name) == ATTENTION for each in seen]
    links = [
        ([name, each.peer], each)
        for name, seen in totals.items()
        for each in _of(seen, lambda each: bool(each.peer) and not each.rail)
    ]
    yield from _counters(_SERVER, ["server"], servers)
    yield from _counters(_WORKER, ["worker"], workers)
    yield from _counters(_LINK, ["worker", "server"], links)
    latency = SummaryMetricFamily(
        "eaas_link_latency_seconds", "From request to accepted reply.", labels=["worker", "server"]
    )
    for labels, each in links:
        latency.add_metric(labels, int(each.counted.get("replies", 0)), each.counted.get("latency_s", 0.0))
    yield latency
    yield from _rails(totals)


def _pool(name: str) -> str:
    return name.partition("/")[0]


def _of(seen: Iterable[Totals], which: Callable[[Totals], bool]) -> list[Totals]:
    return [each for each in seen if which(each)]


def _states(state: State) -> Iterable[Metric]:
    states = GaugeMetricFamily(
        "eaas_member_state", "1 for the state that a member is in.", labels=["member", "pool", "state"]
    )
    load = GaugeMetricFamily(
        "eaas_member_load", "What a member reports of its load.", labels=["member", "pool", "signal"]
    )
    slow = GaugeMetricFamily(
        "eaas_link_slow", "1 while a worker finds a server slow.", labels=["worker", "server", "part"]
    )
    for name, record in state.members.items():
        states.add_metric([name, record.pool, phase(state, record)], 1.0)
        for word, value in sorted(state.pulses[name].load.items()):
            kind, of_server, server = word.partition(":")
            if not of_server:
                load.add_metric([name, record.pool, word], value)
            elif kind in _PACES:
                slow.add_metric([name, server, kind.removeprefix("slow_")], value)
    yield states
    yield load
    yield slow


def _copies(state: State) -> Iterable[Metric]:
    copies = GaugeMetricFamily(
        "eaas_server_replicas",
        "Copies of experts at a server, by what it does with them.",
        labels=["server", "state"],
    )
    for name, record in state.members.items():
        if record.pool == EXPERT:
            for word, held in (
                ("serving", record.serving),
                ("loading", record.target & ~record.loaded),
                ("retiring", record.retiring),
            ):
                copies.add_metric([name, word], held.bit_count())
    yield copies


def _counters(
    words: Iterable[_Word], labels: list[str], found: Iterable[tuple[list[str], Totals]]
) -> Iterable[Metric]:
    families: dict[str, CounterMetricFamily] = {}
    found = list(found)
    for word in words:
        family = families.get(word.name)
        if family is None:
            family = CounterMetricFamily(word.name, word.text, labels=[*labels, *word.more])
            families[word.name] = family
        for values, each in found:
            family.add_metric([*values, *word.more.values()], each.counted.get(word.word, 0.0))
    return families.values()


def _rails(totals: Mapping[str, tuple[Totals, ...]]) -> Iterable[Metric]:
    labels = ["member", "peer", "rail"]
    carried = CounterMetricFamily("eaas_rail_bytes", "Bytes that a rail carried to a peer.", labels=labels)
    live = GaugeMetricFamily("eaas_rail_live", "1 while a rail to a peer carries anything.", labels=labels)
    for name, seen in totals.items():
        for each in seen:
            if each.rail:
                carried.add_metric([name, each.peer, each.rail], each.counted.get("sent_bytes", 0.0))
                live.add_metric([name, each.peer, each.rail], each.counted.get("live", 0.0))
    yield carried
    yield live
