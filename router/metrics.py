"""The router's page for Prometheus, read from its state at the moment of the scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.counts import Counts
from router.journal import JournalUnusable
from router.pools import moves_in_flight, pool_load, pool_size, replicas_min
from router.records import view_of
from router.state import LAUNCHED_POOLS, Config, State
from router.view import POOLS

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    """A prometheus-client collector."""

    def __init__(
        self, config: Config, state: Callable[[], State], counts: Counts, problem: Callable[[], str]
    ) -> None:
        self._config = config
        self._state = state
        self._counts = counts
        self._problem = problem
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

    def _cluster(self, state: State) -> Iterable[Metric]:
        for name, text, value in (
            ("router_term", "Starts of a router on this journal.", state.term),
            ("router_epoch", "Number of the newest placement.", state.epoch),
            ("replicas_wanted", "Copies wanted of every expert.", self._config.replicas),
            ("replicas_min", "Copies of the expert that has the fewest.", replicas_min(state)),
            ("moves_in_flight", "Copies of experts being loaded or given up.", moves_in_flight(state)),
            ("launchers", "Launchers attached.", len(state.launchers)),
        ):
            yield GaugeMetricFamily(f"eaas_{name}", text, value=float(value))
        members = GaugeMetricFamily("eaas_members", "Members, by state.", labels=["pool", "state"])
        phases = Counter((m.pool, m.state) for m in view_of(self._config, state).members)
        for labels, count in sorted(phases.items()):
            members.add_metric(labels, count)
        yield members
        yield from self._pools(state)
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
                load.add_metric([pool, word], value)
        yield load
