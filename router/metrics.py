"""The router's page for Prometheus, read from its state at the moment of the scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from router.counts import EVICTIONS, Counts, Coverage, coverage
from router.events import Totals
from router.faults import KINDS
from router.injection import Injections
from router.journal import JournalUnusable
from router.pools import moves_in_flight, pool_load, pool_size, replicas_min
from router.records import phase
from router.state import LAUNCHED_POOLS, Config, State
from router.view import ATTENTION, EXPERT, POOLS

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


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
        """The text of /metrics."""
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
        up = "1 while the router decides, and can commit what it decides."
        yield GaugeMetricFamily("eaas_router_up", up, value=float(not problem))
        failed = "Ticks that a fault of the router ended; its log has the cause."
        yield CounterMetricFamily("eaas_router_failed_ticks", failed, value=self._counts.failed_ticks)
        if state is not None:
            yield from self._cluster(state)
        if self._injections is not None and self._injections.allowed:
            yield from self._faults(self._injections)

    def _cluster(self, state: State) -> Iterable[Metric]:
        cover = coverage(self._config, state)
        for name, text, value in (
            ("router_term", "Starts of a router on this journal.", state.term),
            ("router_epoch", "Number of the newest placement.", state.epoch),
            ("replicas_wanted", "Copies wanted of every expert.", self._config.replicas),
            ("replicas_min", "Copies of the expert that has the fewest.", replicas_min(state)),
            ("moves_in_flight", "Copies of experts being loaded or given up.", moves_in_flight(state)),
            ("launchers", "Launchers attached.", len(state.launchers)),
            ("experts_lost", "Experts, each layer's counted, that no server may be asked for.", cover.lost),
            ("experts_below_wanted", "Experts, each layer's counted, with too few copies.", cover.below),
        ):
            yield GaugeMetricFamily(f"eaas_{name}", text, value=float(value))
        members = GaugeMetricFamily("eaas_members", "Members, by state.", labels=["pool", "state"])
        phases = Counter((record.pool, phase(state, record)) for record in state.members.values())
        for labels, count in sorted(phases.items()):
            members.add_metric(labels, count)
        yield members
        balance = GaugeMetricFamily(
            "eaas_balancedness", "Mean over greatest load of an expert server; absent without load."
        )
        if cover.balancedness is not None:
            balance.add_metric([], cover.balancedness)
        yield balance
        yield from self._pools(state)
        yield from self._moves()
        yield from member_families(state, self._counts.totals, cover)
        for name, text, counted in (
            ("scale_changes", "Times that a pool's wanted size changed.", self._counts.scale_changes),
            ("members_fenced", "Members that have gone.", self._counts.fenced),
            ("launches", "Processes ordered from launchers.", self._counts.launches),
        ):
            family = CounterMetricFamily(f"eaas_{name}", text, labels=["pool"])
            # A counter that begins with its first event hides that event from rate().
            for pool in LAUNCHED_POOLS:
                family.add_metric([pool], counted[pool])
            yield family

    def _moves(self) -> Iterable[Metric]:
        for name, text, count in (
            ("copies_loaded", "Copies of experts that servers loaded and verified.", self._counts.loaded),
            ("copies_unloaded", "Copies of experts that servers gave up.", self._counts.unloaded),
            (
                "migrations",
                "Copies of experts that a server took up while it served already.",
                self._counts.migrated,
            ),
        ):
            yield CounterMetricFamily(f"eaas_{name}", text, value=count)
        evictions = CounterMetricFamily(
            "eaas_evictions", "Members ended that did not go by themselves.", labels=["pool", "reason"]
        )
        for pool in POOLS:
            for why in EVICTIONS.values():
                evictions.add_metric([pool, why], self._counts.evictions[pool, why])
        yield evictions

    def _faults(self, injections: Injections) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "eaas_faults_injected", "Faults injected on purpose, by kind.", labels=["kind"]
        )
        for kind in KINDS:
            family.add_metric([kind], injections.counts[kind])
        yield family
        text = "Faults injected on purpose that last."
        yield GaugeMetricFamily("eaas_faults_active", text, value=float(injections.active))

    def _pools(self, state: State) -> Iterable[Metric]:
        sizes = {pool: pool_size(self._config, state, pool) for pool in LAUNCHED_POOLS}
        for name, text in (
            ("wanted", "Wanted processes."),
            ("live", "Members that are not draining."),
            ("starting", "Processes ordered that are no members yet."),
            ("draining", "Members on their way out."),
            ("least", "Fewest processes that may be wanted."),
            ("most", "Most processes that may be wanted."),
        ):
            family = GaugeMetricFamily(f"eaas_pool_{name}", text, labels=["pool"])
            for pool, size in sizes.items():
                family.add_metric([pool], getattr(size, name))
            yield family
        failures = GaugeMetricFamily("eaas_pool_failed_starts", "Failed starts in a row.", labels=["pool"])
        for pool in LAUNCHED_POOLS:
            failures.add_metric([pool], state.failures[pool].count if pool in state.failures else 0)
        yield failures
        load = GaugeMetricFamily(
            "eaas_pool_load",
            "What members report: the worst of a time or a fill, the sum of the rest.",
            labels=["pool", "signal"],
        )
        for pool in POOLS:
            for word, value in sorted(pool_load(state, pool).items()):
                # What is said of one server is no load of the pool.
                if ":" not in word:
                    load.add_metric([pool, word], value)
        yield load


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
        for word, value in sorted(state.liveness[name].load.items()):
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
