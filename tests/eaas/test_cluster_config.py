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
