"""Checkpoints and clusters of real processes for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.make_model import make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", "qwen3_moe", folder, seed=1, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[LocalCluster]:
    """Four expert servers, each expert on two, one attention worker, all with the HTTP endpoint."""
    config = ClusterConfig(model=tiny, served_model_name="tiny", experts=4, replicas=2, port=0, cores=(0, 1))
    with LocalCluster(config) as running:
        yield running
