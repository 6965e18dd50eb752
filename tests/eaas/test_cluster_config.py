"""Which cores the expert servers of a local cluster get."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig, expert_cores
from eaas.worker.__main__ import decoding
from experts.devices import Device


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
def test_cores_are_dealt_out_or_given_by_the_wanted_lanes(servers: int, lanes: int, wanted: list[list[int]]) -> None:
    assert [expert_cores(slot, servers, (4, 5, 6, 7), lanes) for slot in range(servers)] == wanted


def test_servers_that_come_later_take_their_share_whatever_the_pool_began_with() -> None:
    """From one server to six, and each that comes by itself."""
    assert [expert_cores(slot, 6, (4, 5)) for slot in range(1, 6)] == [[5], [4], [5], [4], [5]]
    assert [expert_cores(slot, 1, (4, 5, 6, 7)) for slot in range(3)] == [[4, 5, 6, 7], [5, 7], [6]]


def test_a_pool_may_begin_with_nothing_and_keep_its_replicas_for_later() -> None:
    config = ClusterConfig(model=Path(), experts=0, attention=0, replicas=2)
    assert config.replicas == 2
    with pytest.raises(ValueError, match="--experts -1: at least 0 is needed"):
        ClusterConfig(model=Path(), experts=-1)


def test_more_lanes_than_cores_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 lanes for each expert server; 0 .* to 2"):
        ClusterConfig(model=Path(), cores=(0, 1), expert_lanes=3)


@pytest.mark.parametrize(("routers", "etcd"), [(0, ""), (2, ""), (0, "http://127.0.0.1:2379")])
def test_routers_that_share_nothing_are_refused(routers: int, etcd: str) -> None:
    with pytest.raises(ValueError, match=f"{routers} routers asked for"):
        ClusterConfig(model=Path(), routers=routers, etcd=etcd)
    ClusterConfig(model=Path(), routers=2, etcd="http://127.0.0.1:2379")


def test_halves_of_a_step_overlap_where_gpus_attend_and_nowhere_else() -> None:
    def config(*devices: str, attention: int = 1) -> ClusterConfig:
        return ClusterConfig(model=Path(), device=devices, experts=2, attention=attention, overlap=True)

    config("cuda:0")
    config("interpreter")
    for refused in (lambda: config("cpu"), lambda: config("cuda:0", "cpu", attention=2)):
        with pytest.raises(ValueError, match="--overlap is for attention workers on GPUs"):
            refused()
    with pytest.raises(ValueError, match="serve with --device cuda"):
        decoding(Device.parse("cpu"), True, 0, False)


def test_kinds_of_devices_may_be_mixed_where_each_has_workers_and_servers() -> None:
    def config(devices: tuple[str, ...], experts: int, attention: int) -> ClusterConfig:
        return ClusterConfig(
            model=Path(),
            served_model_name="m",
            device=devices,
            experts=experts,
            attention=attention,
            replicas=1,
        )

    config(("cuda:0", "cpu"), 2, 2)
    config(("cuda:0", "cpu"), 3, 4)
    config(("cuda:0", "cuda:1"), 2, 1)
    # A pool that is empty yet will have some of each.
    config(("cuda:0", "cpu"), 0, 2)
    for experts, attention in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"ask servers of their own kind only\. .* --attention 2 --experts 2"):
            config(("cuda:0", "cpu"), experts, attention)
