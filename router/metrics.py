"""The router's page for Prometheus, read from its state at the moment of the scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from router.events import Totals
from router.faults import KINDS
from router.injection import Injections
from router.journal import JournalUnusable
from router.models import groups, named
from router.pools import EVICTIONS, Counts, Coverage, coverage, moves_in_flight, pool_load, pool_size, replicas_min
from router.records import phase
from router.state import Config, State
from router.view import ATTENTION, EXPERT, GATEWAY, POOLS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


_PACES = ("slow_expert", "slow_link")

Samples = Iterable[tuple[Sequence[str], float]]
"""Values by their labels."""


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples | float) -> Metric:
    for labels, value in [((), samples)] if isinstance(samples, int | float) else samples:
        family.add_metric(labels, value)
    return family


def _gauge(name: str, text: str, samples: Samples | float, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"eaas_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, samples: Samples | float, labels: Sequence[str] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"eaas_{name}", text, labels=labels), samples)


class RouterMetrics:
    """A prometheus-client collector."""

    def __init__(
        self,
        config: Config,
        state: Callable[[], State],
        counts: Counts,
        problem: Callable[[], str],
        injections: Injections | None = None,
    ) -> None:
        self._config = config
        self._state = state
        self._counts = counts
        self._problem = problem
        self._injections = injections
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering must not read the state."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families; of a router that does not decide, only that it does not."""
        try:
            state, problem = self._state(), self._problem()
        except JournalUnusable as error:
            state, problem = None, str(error)
        yield _gauge("router_up", "1 while the router decides, and can commit what it decides.", not problem)
        failed = "Ticks that a fault of the router ended; its log has the cause."
        yield _counter("router_failed_ticks", failed, self._counts.failed_ticks)
        if state is not None:
            yield from self._cluster(state)
        if self._injections is not None and self._injections.allowed:
            counted = [([kind], self._injections.counts[kind]) for kind in KINDS]
            yield _counter("faults_injected", "Faults injected on purpose, by kind.", counted, ["kind"])
            yield _gauge("faults_active", "Faults injected on purpose that last.", self._injections.active)

    def _cluster(self, state: State) -> Iterable[Metric]:
        config, counts = self._config, self._counts
        cover = coverage(config, state)
        for name, text, value in (
            ("router_term", "Starts of a router on this journal.", state.term),
            ("router_epoch", "Number of the newest placement.", state.epoch),
            ("replicas_wanted", "Copies wanted of every expert.", config.replicas),
            ("replicas_min", "Copies of the expert that has the fewest, of models awake.", replicas_min(config, state)),
            ("moves_in_flight", "Copies of experts being loaded or given up.", moves_in_flight(state)),
            ("launchers", "Launchers attached.", len(state.launchers)),
            ("experts_lost", "Experts, each layer's counted, that no server may be asked for.", cover.lost),
            ("experts_below_wanted", "Experts, each layer's counted, with too few copies.", cover.below),
        ):
            yield _gauge(name, text, value)
        phases = Counter((record.pool, phase(state, record)) for record in state.members.values())
        yield _gauge("members", "Members, by state.", sorted(phases.items()), ["pool", "state"])
        text = "Mean over greatest load of an expert server; absent without load."
        yield _gauge("balancedness", text, [] if cover.balancedness is None else cover.balancedness)
        yield from self._pools(state)
        for name, text, value in (
            ("copies_loaded", "Copies of experts that servers loaded and verified.", counts.loaded),
            ("copies_unloaded", "Copies of experts that servers gave up.", counts.unloaded),
            ("migrations", "Copies of experts that a server took up while it served already.", counts.migrated),
        ):
            yield _counter(name, text, value)
        evictions = [((p, why), counts.evictions[p, why]) for p in POOLS for why in EVICTIONS.values()]
        text = "Members ended that did not go by themselves."
        yield _counter("evictions", text, evictions, ["pool", "reason"])
        text = "From the request that woke a model to its last expert served, of the last time."
        woken = [([m.name], counts.wake_s[m.number]) for m in named(config, state) if m.number in counts.wake_s]
        yield _gauge("model_wake_seconds", text, woken, ["model"])
        yield from _members(state, counts.totals, cover)
        for name, text, counted in (
            ("scale_changes", "Times that a pool's wanted size changed.", counts.scale_changes),
            ("members_fenced", "Members that have gone.", counts.fenced),
            ("launches", "Processes ordered from launchers.", counts.launches),
        ):
            # A counter that begins with its first event hides that event from rate().
            yield _counter(name, text, [([pool], counted[pool]) for pool in groups(state)], ["pool"])

    def _pools(self, state: State) -> Iterable[Metric]:
        sizes = {pool: pool_size(self._config, state, pool) for pool in groups(state)}
        for name, text in (
            ("wanted", "Wanted processes."),
            ("live", "Members that are not draining."),
            ("starting", "Processes ordered that are no members yet."),
            ("draining", "Members on their way out."),
            ("least", "Fewest processes that may be wanted."),
            ("most", "Most processes that may be wanted."),
        ):
            yield _gauge(f"pool_{name}", text, [([p], getattr(size, name)) for p, size in sizes.items()], ["pool"])
        failures = [([p], state.failures[p].count if p in state.failures else 0) for p in groups(state)]
        yield _gauge("pool_failed_starts", "Failed starts in a row.", failures, ["pool"])
        # What is said of one server is no load of the pool.
        loads = [
            ((pool, word), value)
            for pool in (*groups(state), GATEWAY)
            for word, value in sorted(pool_load(state, pool).items())
            if ":" not in word
        ]
        text = "What members report: the worst of a time or a fill, the sum of the rest."
        yield _gauge("pool_load", text, loads, ["pool", "signal"])


class _Word(NamedTuple):
    name: str
    text: str
    word: str
    more: Mapping[str, str] = {}


_SERVER = (
    _Word("server_calls", "Requests answered.", "calls"),
    _Word("server_batches", "Batches computed.", "batches"),
    _Word("server_rows", "Rows received.", "rows"),
    _Word("server_pairs", "(row, expert) pairs computed.", "pairs"),
    _Word("server_activations", "Experts activated, summed over batches.", "experts"),
    _Word("server_busy_seconds", "Time in batches.", "busy_s"),
    _Word("server_bytes", "Bytes of rows.", "received_bytes", {"direction": "received"}),
    _Word("server_bytes", "Bytes of rows.", "sent_bytes", {"direction": "sent"}),
    _Word("server_weights_damaged", "Experts found damaged after they were loaded.", "damaged"),
    _Word("server_refused", "Requests refused.", "not_held", {"reason": "not_held"}),
    _Word("server_refused", "Requests refused.", "invalid", {"reason": "invalid"}),
)
_WORKER = (
    _Word("worker_tokens", "Tokens computed, those of prompts too.", "computed_tokens"),
    _Word("worker_reused_tokens", "Tokens of prompts found in the KV cache.", "reused_tokens"),
    _Word("worker_drafted_tokens", "Tokens guessed ahead and computed.", "drafted_tokens"),
    _Word("worker_accepted_tokens", "Of these, tokens that were right.", "accepted_tokens"),
    _Word("worker_preemptions", "Requests put back for want of KV blocks.", "preemptions"),
    _Word("worker_busy_seconds", "Time in steps.", "busy_s"),
    _Word("failovers", "(token, expert) pairs asked of another server: theirs was gone.", "failovers"),
    _Word("hedges", "(token, expert) pairs asked of another server as well: theirs was late.", "hedges"),
    _Word("lost_pairs", "(token, expert) pairs that no server answered in time.", "lost"),
    _Word("corrupt_replies", "Replies that failed validation.", "corrupt"),
)
_LINK = (
    _Word("link_calls", "Requests sent.", "calls"),
    _Word("link_rows", "Rows sent.", "rows"),
    _Word("link_failovers", "Pairs asked of another server: this one was gone.", "failovers"),
    _Word("link_hedges", "Pairs asked of another server as well: this one was late.", "hedges"),
    _Word("link_corrupt_replies", "Replies that failed validation.", "corrupt"),
    _Word("link_service_seconds", "Of the latency, what the server measured itself.", "service_s"),
    _Word("link_bytes", "Bytes of rows.", "sent_bytes", {"direction": "sent"}),
    _Word("link_bytes", "Bytes of rows.", "received_bytes", {"direction": "received"}),
)


def _members(state: State, totals: Mapping[str, tuple[Totals, ...]], cover: Coverage) -> Iterable[Metric]:
    """What members report: their load, their counters (totals, by name), and their links to expert servers."""
    yield from _states(state)
    copies = [
        ((name, word), held.bit_count())
        for name, record in state.members.items()
        if record.pool == EXPERT
        for word, held in (
            ("serving", record.serving),
            ("loading", record.target & ~record.loaded),
            ("retiring", record.retiring),
        )
    ]
    text = "Copies of experts at a server, by what it does with them."
    yield _gauge("server_replicas", text, copies, ["server", "state"])
    load = [
        ((server, str(layer)), float(rows_per_s))
        for layer, row in enumerate(cover.load)
        for server, rows_per_s in zip(cover.servers, row, strict=True)
    ]
    text = "Rows per second, if replicas share evenly."
    yield _gauge("server_layer_load", text, load, ["server", "layer"])
    known = [(name, each) for name, seen in totals.items() for each in seen]
    own = [(name.partition("/")[0], [name], each) for name, each in known if not each.peer]
    links = [([name, each.peer], each) for name, each in known if each.peer and not each.rail]
    rails = [([name, each.peer, each.rail], each) for name, each in known if each.rail]
    yield from _counters(_SERVER, ["server"], [(labels, each) for pool, labels, each in own if pool == EXPERT])
    yield from _counters(_WORKER, ["worker"], [(labels, each) for pool, labels, each in own if pool == ATTENTION])
    yield from _counters(_LINK, ["worker", "server"], links)
    latency = SummaryMetricFamily(
        "eaas_link_latency_seconds", "From request to accepted reply.", labels=["worker", "server"]
    )
    for labels, each in links:
        latency.add_metric(labels, int(each.counted.get("replies", 0)), each.counted.get("latency_s", 0.0))
    yield latency
    carried = [(labels, each.counted.get("sent_bytes", 0.0)) for labels, each in rails]
    live = [(labels, each.counted.get("live", 0.0)) for labels, each in rails]
    of_rail = ["member", "peer", "rail"]
    yield _counter("rail_bytes", "Bytes that a rail carried to a peer.", carried, of_rail)
    yield _gauge("rail_live", "1 while a rail to a peer carries anything.", live, of_rail)


def _states(state: State) -> Iterable[Metric]:
    states = [((name, record.pool, phase(state, record)), 1.0) for name, record in state.members.items()]
    load: list[tuple[Sequence[str], float]] = []
    slow: list[tuple[Sequence[str], float]] = []
    for name, record in state.members.items():
        for word, value in sorted(state.liveness[name].load.items()):
            kind, of_server, server = word.partition(":")
            if not of_server:
                load.append(((name, record.pool, word), value))
            elif kind in _PACES:
                slow.append(((name, server, kind.removeprefix("slow_")), value))
    text = "1 for the state that a member is in."
    yield _gauge("member_state", text, states, ["member", "pool", "state"])
    yield _gauge("member_load", "What a member reports of its load.", load, ["member", "pool", "signal"])
    yield _gauge("link_slow", "1 while a worker finds a server slow.", slow, ["worker", "server", "part"])


def _counters(words: Iterable[_Word], labels: list[str], found: Sequence[tuple[list[str], Totals]]) -> Iterable[Metric]:
    families: dict[str, CounterMetricFamily] = {}
    for word in words:
        new = CounterMetricFamily(f"eaas_{word.name}", word.text, labels=[*labels, *word.more])
        samples = [([*at, *word.more.values()], each.counted.get(word.word, 0.0)) for at, each in found]
        _filled(families.setdefault(word.name, new), samples)
    return families.values()
