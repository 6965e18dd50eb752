"""What befalls hosts and the links between them, and how each is mended: one entry for each, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hosts.cluster import NETWORKS, RAILS, HostsCluster, Setting

CUT_S = 6.0


@dataclass(frozen=True, kw_only=True)
class HostFault:
    """strike: in the middle of streams. mend: when they have ended; the cluster must be whole again some time after.
    setting: of the cluster that it befalls. refusal: why it cannot be had here; empty: it can."""

    what: str
    strike: Callable[[HostsCluster], None]
    mend: Callable[[HostsCluster], None] = lambda cluster: None
    setting: Setting = field(default_factory=Setting)
    refusal: Callable[[], str] = lambda: ""


def _lost(host: str) -> HostFault:
    roles = {"a": "etcd, router, gateway, expert server", "c": "etcd, attention worker, expert server"}
    return HostFault(
        what=f"a host with {roles[host]} loses power",
        strike=lambda cluster: cluster.lose(host),
        mend=lambda cluster: cluster.resume(host),
    )


def _cut_for_a_while(cluster: HostsCluster) -> None:
    for network in NETWORKS:
        cluster.network.cut("c", network)
    _later(CUT_S, lambda: [cluster.network.heal("c", network) for network in NETWORKS])


def _deaf(cluster: HostsCluster) -> None:
    for network in NETWORKS:
        cluster.network.cut("d", network, "in")
    _later(CUT_S, lambda: [cluster.network.heal("d", network) for network in NETWORKS])


def _mute(cluster: HostsCluster) -> None:
    for network in NETWORKS:
        cluster.network.cut("d", network, "out")
    _later(CUT_S, lambda: [cluster.network.heal("d", network) for network in NETWORKS])


def _rows_one_way(cluster: HostsCluster) -> None:
    for rail in RAILS:
        cluster.network.cut("d", rail, "out")
    _later(CUT_S, lambda: [cluster.network.heal("d", rail) for rail in RAILS])


def _etcds_lost(*hosts: str) -> Callable[[HostsCluster], None]:
    def strike(cluster: HostsCluster) -> None:
        for host in hosts:
            cluster.stop(host, "etcd")

    return strike


def _etcds_back(*hosts: str) -> Callable[[HostsCluster], None]:
    def mend(cluster: HostsCluster) -> None:
        for host in hosts:
            cluster.resume(host, "etcd")

    return mend


def _long_link(cluster: HostsCluster) -> None:
    for network in NETWORKS:
        cluster.network.delay("d", network, one_way_ms=10, loss=0.01)


def _short_link(cluster: HostsCluster) -> None:
    for network in NETWORKS:
        cluster.network.undelay("d", network)


def _no_faketime() -> str:
    return "" if FAKETIME else "needs libfaketime (Debian: apt-get install libfaketime), found none"


def _later(wait_s: float, act: Callable[[], object]) -> None:
    threading.Timer(wait_s, act).start()


FAKETIME = next((str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), "")
_WRONG = {
    "LD_PRELOAD": FAKETIME, "FAKETIME": "+3h", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DISABLE_SHM": "1",
}  # fmt: skip

FAULTS: Mapping[str, HostFault] = {
    "attention-host-lost": _lost("c"),
    "gateway-host-lost": _lost("a"),
    "cut-off": HostFault(what=f"a host is cut off for {CUT_S:g} s", strike=_cut_for_a_while),
    "deaf": HostFault(what=f"a host hears nothing for {CUT_S:g} s, and is heard", strike=_deaf),
    "mute": HostFault(what=f"a host is not heard for {CUT_S:g} s, and hears", strike=_mute),
    "rows-one-way": HostFault(what=f"rows of a host do not arrive for {CUT_S:g} s", strike=_rows_one_way),
    "rail-cut": HostFault(
        what="one rail of a host is cut",
        strike=lambda cluster: cluster.network.cut("d", "rail0"),
        mend=lambda cluster: cluster.network.heal("d", "rail0"),
    ),
    "rail-slow": HostFault(
        what="one rail of a host carries 4 Mbit/s",
        strike=lambda cluster: cluster.network.shape("d", "rail0", 4),
        mend=lambda cluster: cluster.network.heal("d", "rail0"),
    ),
    "etcd-minority": HostFault(what="one etcd of three is lost", strike=_etcds_lost("a"), mend=_etcds_back("a")),
    "etcd-majority": HostFault(
        what="two etcds of three are lost", strike=_etcds_lost("a", "b"), mend=_etcds_back("a", "b")
    ),
    "clock-wrong": HostFault(
        what="a host's clock is three hours ahead; an expert server there is killed",
        strike=lambda cluster: cluster.kill("d", "expert"),
        setting=Setting(environment={"d": _WRONG}),
        refusal=_no_faketime,
    ),
    "clocks-apart": HostFault(
        what="a host's steady clocks are days apart from the others'; an expert server there is killed",
        strike=lambda cluster: cluster.kill("d", "expert"),
        setting=Setting(prefix={"d": ("unshare", "--time", "--boottime", "500000", "--monotonic", "70000")}),
    ),
    "long-link": HostFault(what="a host's links lose 1% and take 10 ms each way", strike=_long_link, mend=_short_link),
    "roll": HostFault(what="every process is replaced, one after another", strike=lambda cluster: cluster.roll()),
}
