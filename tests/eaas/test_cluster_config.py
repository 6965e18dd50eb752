"""Which cores the expert servers of a local cluster get."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig, expert_cores


@pytest.mark.parametrize(
    ("servers", "lanes", "wanted"),
    [
        (1, 0, [[4, 5, 6, 7]]),
        (2, 0, [[4, 6], [5, 7]]),
        (6, 0, [[4], [5], [6], [7], [4], [5]]),
        (1, 1, [[4]]),
        (3, 2, [[4, 5], [6, 7], [4, 5]]),
        (3, 3, [[4, 5, 6], [7, 4, 5], [6, 7, 4]]),
    ],
)
def test_cores_are_dealt_out_or_given_by_the_wanted_lanes(
    servers: int, lanes: int, wanted: list[list[int]]
) -> None:
    assert [expert_cores(slot, servers, (4, 5, 6, 7), lanes) for slot in range(servers)] == wanted


@pytest.mark.parametrize("lanes", [-1, 3])
def test_more_lanes_than_cores_are_refused(lanes: int) -> None:
    with pytest.raises(ValueError, match=f"{lanes} lanes for each expert server; 0 .* to 2"):
        ClusterConfig(model=Path(), served_name="m", cores=(0, 1), expert_lanes=lanes)


@pytest.mark.parametrize(("routers", "etcd"), [(0, ""), (2, ""), (0, "http://127.0.0.1:2379")])
def test_routers_that_share_nothing_are_refused(routers: int, etcd: str) -> None:
    with pytest.raises(ValueError, match=f"{routers} routers asked for"):
        ClusterConfig(model=Path(), served_name="m", routers=routers, etcd=etcd)
    ClusterConfig(model=Path(), served_name="m", routers=2, etcd="http://127.0.0.1:2379")
