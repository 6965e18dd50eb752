"""`eaas serve --dtype int8`: a client's tokens do not depend on servers, on the batch, or on a server's death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from tests.e2e.clients import stream_all

pytestmark = pytest.mark.full(seconds=15)

PROMPTS = [f"{'word ' * (number % 5)}client {number} asks" for number in range(6)]
TOKENS = 32


def texts_of(url: str, prompts: list[str], **options: object) -> list[list[str]]:
    seen = stream_all(url, "tiny", prompts, TOKENS, **options)  # type: ignore[arg-type]
    assert [one.error for one in seen] == [None] * len(prompts)
    return [one.texts for one in seen]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[list[str]]:
    """Each prompt by itself, over one expert server."""
    with LocalCluster(
        ClusterConfig(model=tiny, served_model_name="tiny", experts=1, replicas=1, port=0, cores=(0, 1), dtype="int8")
    ) as one:
        return [texts_of(one.url, [prompt])[0] for prompt in PROMPTS]


def test_two_servers_a_batch_and_a_killed_server_give_the_tokens_of_one_alone(
    tiny: Path, alone: list[list[str]]
) -> None:
    config = ClusterConfig(
        model=tiny, served_model_name="tiny", experts=2, replicas=2, port=0, cores=(0, 1), dtype="int8"
    )
    with LocalCluster(config) as two:
        members = {member["name"]: member for member in fetch_status(two.url)["members"]}
        for name in ("expert/1", "expert/2", "attention/1"):
            assert members[name]["numerics_class"] == "cpu-int8-g64-1"
        assert texts_of(two.url, PROMPTS) == alone
        victim = two.pids()["expert/1"]

        def strike(count: int) -> None:
            if count == len(PROMPTS) * TOKENS // 3:
                os.kill(victim, signal.SIGKILL)

        assert texts_of(two.url, PROMPTS, on_token=strike) == alone
