"""Checkpoints and clusters of real processes for the end-to-end tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from router.client import RouterClient
from tests.e2e.waiting import wait_for

EXPERTS, REPLICAS = 4, 2


def pytest_itemcollected(item: pytest.Item) -> None:
    """Clusters of real processes need the machine to themselves."""
    item.add_marker(pytest.mark.alone)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that use the shared cluster come last, so that it runs beside no other test."""
    files = {item.path for item in items if "shared" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path in files)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", "qwen3_moe", folder, seed=1, dtype="bfloat16")
    return folder


@pytest.fixture(scope="session")
def shared(tiny: Path) -> Iterator[LocalCluster]:
    """The cluster of all tests that need no other; they have it through `cluster`."""
    config = ClusterConfig(
        model=tiny,
        served_model_name="tiny",
        experts=EXPERTS,
        replicas=REPLICAS,
        port=0,
        cores=(0, 1),
        admin_port=0,
        allow_chaos=True,
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(shared: LocalCluster) -> LocalCluster:
    """Four expert servers, each expert on two, one attention worker, both listeners and all that faults need; whole."""
    router = RouterClient(shared.router_address)
    router.scale("expert", EXPERTS)
    router.scale("attention", 1)
    router.close()

    def whole() -> bool:
        state = fetch_status(shared.url)
        pools = [member["pool"] for member in state["members"] if member["state"] == "serving"]
        sizes = {"expert": EXPERTS, "attention": 1, "gateway": 1, "router": 1}
        return Counter(pools) == sizes and len(state["members"]) == len(pools) and state["replicas_min"] >= REPLICAS

    wait_for("a whole cluster", whole, shared)
    return shared
