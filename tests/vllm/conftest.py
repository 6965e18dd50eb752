"""Real vLLM engines, whose experts a pool of real processes computes; each test takes about a minute."""

from __future__ import annotations

import pytest

from tests.vllm.servers import environment, tried


@pytest.fixture(params=tried())
def version(request: pytest.FixtureRequest) -> str:
    """Each vLLM that the plug-in was tried with; skips where it is not installed."""
    environment(request.param)
    return request.param


@pytest.fixture(scope="session")
def newest() -> str:
    """The last of them; skips where it is not installed."""
    environment(tried()[-1])
    return tried()[-1]
