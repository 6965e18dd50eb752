"""The router's page for Prometheus, read from its state at the moment of the scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.counts import EVICTIONS, Counts, coverage
from router.faults import KINDS
from router.injection import Injections
from router.journal import JournalUnusable
from router.member_metrics import member_families
from router.pools import moves_in_flight, pool_load, pool_size, replicas_min
from router.records import phase
from router.state import LAUNCHED_POOLS, Config, State
from router.view import POOLS

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
