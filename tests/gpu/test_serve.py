"""`eaas serve` over the kernels of GPUs, in the attention worker too: a server killed in mid-stream is not seen."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi", reason="needs fastapi, for the gateway; make setup installs it")
pytest.importorskip("openai", reason="needs openai, a real client; make test installs it")

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.process import StartFailed
from eaas.cluster.status import fetch_status
from tests.e2e.clients import Seen, stream_all
from tests.gpu.device import DEVICE

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=40)]

TOKENS = 5
PROMPTS = ["abcd", "efg"]
# The interpreter takes seconds for a step: one layer, and rows of the least width that the kernels carry.
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
}  # fmt: skip


def quantize(model: Path) -> None:
    """Store a checkpoint's experts in FP8 as DeepSeek-V3's are: each 128 x 128 has a scale."""
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        matrix = tensors[name].float()
        rows, k = matrix.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-k // 128) * 128)
        padded[:rows, :k] = matrix
        blocks = padded.view(-(-rows // 128), 128, -(-k // 128), 128)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :k]
        tensors[name] = codes.to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate"],
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("stored", ["bf16", "fp8"])
def test_a_killed_server_changes_no_token(tmp_path: Path, stored: str) -> None:
    model = make_model("tiny", "qwen3_moe", tmp_path / "model", seed=3, dtype="bfloat16", overrides=SMALL)
    if stored == "fp8":
        quantize(model)
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
        # Of one kind of checkpoint as a whole, of the other in two halves.
        overlap=stored == "fp8",
        lease_s=10.0,
    )
    cluster = LocalCluster(config)
    try:
        try:
            cluster.start()
        except StartFailed as failed:
            # One GPU for three processes: it is refused where there is no MPS, which no test may change.
            if DEVICE == "cuda" and "would share" in str(failed):
                pytest.skip(f"needs MPS, or a GPU for each of 3 processes; found: {failed}")
            raise
        classes = {member.get("numerics_class", "") for member in fetch_status(cluster.url)["members"]}
        assert {name.split("-")[0] for name in classes} - {""} == {device.partition(":")[0]}, classes
        assert all(stored in name.split("-") for name in classes if name), classes
        (worker,) = cluster.state_dir.glob("attention*.log")
        said = worker.read_text()
        assert 0 < said.find("warmed rows=16 done=5 total=5") < said.find(" ready "), said
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
