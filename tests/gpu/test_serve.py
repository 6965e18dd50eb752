"""`eaas serve` over the kernels of GPUs, in the attention worker too: a server killed in mid-stream is not seen."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs fastapi, for the gateway; make setup installs it")
pytest.importorskip("openai", reason="needs openai, a real client; make test installs it")

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.model.make_model import make_model
from tests.e2e.clients import Seen, stream_all
from tests.gpu.device import DEVICE

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=40)]

TOKENS = 5
PROMPTS = ["abcd", "efg"]
# The interpreter takes seconds for a step: one layer, and rows of the least width that the kernels carry.
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
}  # fmt: skip


def test_a_killed_server_changes_no_token(tmp_path: Path) -> None:
    model = make_model("tiny", "qwen3_moe", tmp_path / "model", seed=3, dtype="bfloat16", overrides=SMALL)
    device = "interpreter" if DEVICE == "cpu" else "cuda:0"
    config = ClusterConfig(
        model=model,
        served_model_name="small",
        experts=2,
        replicas=2,
        port=0,
        device=(device,),
        deadline_s=250.0,
        kv_tokens=256,
        step_tokens=16,
        lease_s=10.0,
    )
    cluster = LocalCluster(config)
    try:
        cluster.start()
        classes = {member.get("numerics_class", "") for member in fetch_status(cluster.url)["members"]}
        assert any(device.partition(":")[0] in name for name in classes), classes
        calm = texts(cluster, lambda count: None)

        def kill(count: int) -> None:
            if count == len(PROMPTS) * TOKENS // 2:
                victim = min(name for name in cluster.pids() if name.startswith("expert/"))
                os.kill(cluster.pids()[victim], signal.SIGKILL)

        assert texts(cluster, kill) == calm
    finally:
        cluster.stop()


def texts(cluster: LocalCluster, on_token) -> list[list[str]]:  # type: ignore[no-untyped-def]
    seen: list[Seen] = stream_all(cluster.url, "small", PROMPTS, TOKENS, on_token, timeout_s=280)
    assert [repr(one.error) for one in seen if one.error] == []
    assert [(one.finish, len(one.texts)) for one in seen] == [(["length"], TOKENS)] * len(PROMPTS)
    return [one.texts for one in seen]
