"""What the tests of the gateway share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.eaas.gateway_world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One world for a file's tests, each of which shows the workers that it wants."""
    world = World(tmp_path_factory.mktemp("model"))
    yield world
    world.close()
