"""A cluster on five hosts keeps its promises while hosts, and the links between them, fail: no client sees anything."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest

from benchmarks.hosts.cluster import HostsCluster, Outcome, Setting, hosts_cluster
from benchmarks.hosts.faults import FAULTS, HostFault
from benchmarks.hosts.network import refusal

pytestmark = [
    pytest.mark.alone,
    pytest.mark.full(seconds=25),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "-"),
    pytest.mark.skipif(
        shutil.which("etcd") is None,
        reason="needs etcd on PATH (Debian: apt-get install etcd-server), found none",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu13") is None,
        reason="needs the package nixl-cu13 (pip install --no-deps nixl-cu13), found none",
    ),
]


@pytest.fixture(scope="module")
def whole() -> Iterator[tuple[HostsCluster, Outcome]]:
    """The documented cluster, and what its clients see while nothing fails."""
    with hosts_cluster() as cluster:
        yield cluster, cluster.stream()


def check(name: str, fault: HostFault, cluster: HostsCluster, calm: Outcome) -> None:
    seen = cluster.stream(lambda: fault.strike(cluster))
    fault.mend(cluster)
    assert not seen.errors, f"{name}: {seen.errors}\n{cluster.last_words()}"
    for number, text in enumerate(seen.texts):
        assert text == calm.texts[number % len(calm.texts)], f"{name}: tokens of stream {number} changed"
    cluster.wait_whole()


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.setting == Setting()])
def test_a_fault_of_hosts_or_links_changes_nothing(name: str, whole: tuple[HostsCluster, Outcome]) -> None:
    cluster, calm = whole
    cluster.wait_whole()
    check(name, FAULTS[name], cluster, calm)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.setting != Setting()])
def test_a_host_whose_clock_is_wrong_serves_as_the_others(name: str) -> None:
    fault = FAULTS[name]
    if why := fault.refusal():
        pytest.skip(why)
    with hosts_cluster(fault.setting) as cluster:
        check(name, fault, cluster, cluster.stream())
