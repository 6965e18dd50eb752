"""A quantized checkpoint is served as the weights that its format's library reads: logits beside transformers' own on
those, through real servers, and bits that no number of servers changes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.make_model import make_model
from eaas.model.families import tensors_of
from eaas.model.loader import load_spec, load_weights
from experts.checkpoint import Checkpoint
from experts.formats import stored_as
from experts.kernels import from_dtype
from experts.model import Dtype, ExpertShape
from experts.quantized import Quantized
from experts.tensors import tensors_of as expert_tensors
from tests.e2e.pool import Driver, local_experts, pool_of
from tests.e2e.test_exactness import NEW_TOKENS, different, prompts
from tests.e2e.test_logits import random_prompts, served, transformers_run
from tests.experts.quantizing import METHODS, quantize_model

WIDE = {"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 128, "num_hidden_layers": 2}
# Latents of 72 numbers: the last block of kv_a_proj_with_mqa overhangs, as that of the published checkpoints does.
DEEPSEEK = {
    "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 16,
}  # fmt: skip
FULL = pytest.mark.full(seconds=5)
FEW = ("fp8", "w4a16", "gptq-permuted")
EACH = ["mxfp4", *(pytest.param(method, marks=[] if method in FEW else FULL) for method in METHODS)]
CASES = [
    *(pytest.param("qwen3_moe", method, marks=[] if method in FEW else FULL) for method in METHODS),
    ("gpt_oss", "mxfp4"),
    ("deepseek_v3", "fp8"),
    pytest.param("deepseek_v3", "w4a16", marks=FULL),
]


class Model(NamedTuple):
    folder: Path
    plain: Path
    wanted: Any  # by tensor name, the weights that the format's library reads, in float32


def written(arch: str, method: str, root: Path) -> Model:
    overrides = {"qwen3_moe": WIDE, "deepseek_v3": DEEPSEEK}.get(arch, {})
    source = make_model("tiny", arch, root / "source", seed=7, overrides=overrides)
    folder, plain = root / "quantized", root / "plain"
    return Model(folder, plain, quantize_model(source, folder, plain, method))


@pytest.mark.parametrize(("arch", "method"), CASES)
def test_logits_are_those_of_transformers_on_the_weights_that_the_library_reads(
    arch: str, method: str, tmp_path: Path
) -> None:
    model = written(arch, method, tmp_path)
    checkpoint = Checkpoint.open(model.folder)
    spec = load_spec(checkpoint)
    for served_in, rounded in ((Dtype.FLOAT32, torch.float32), (Dtype.BFLOAT16, torch.bfloat16)):
        weights = load_weights(checkpoint, replace(spec, dtype=served_in))
        for role, plan in tensors_of(spec).items():
            found = torch.from_numpy(from_dtype(weights[role])).to(rounded)
            assert torch.equal(found, model.wanted[plan.name].to(rounded)), (arch, method, role)
    shape = ExpertShape.from_config(checkpoint.config)
    # Those of single experts; tests/experts/test_tensors.py has the fused ones.
    for layer in range(shape.layers if shape.family.prefix else 0):
        tensors = expert_tensors(checkpoint, shape, layer, layer)
        for name, found in zip(shape.names(layer, layer), (tensors.gate, tensors.up, tensors.down), strict=True):
            plain = found.dequantized() if isinstance(found, Quantized) else found
            assert np.array_equal(plain, model.wanted[name].numpy()), (arch, method, name)
    asked = random_prompts(512, seed=7)
    ours = np.concatenate(served(model.folder, asked, "float32"))
    theirs, _ = transformers_run(model.plain, asked, torch.float32)
    error = np.abs(ours - theirs).max()
    print(f"{arch} {method}: {error:.1e}")
    assert error < 2e-5, f"{arch} in {method}, seed 7"


KEPT = {
    "fp8": Dtype.FP8,
    "fp8-rows": Dtype.FP8,
    "w4a16": Dtype.INT4_G32,
    "awq": Dtype.INT4,
    "gptq": Dtype.INT4_G32,
    "mxfp4": Dtype.MXFP4,
}


@pytest.mark.parametrize("method", EACH)
def test_bits_are_the_same_in_process_and_on_one_and_four_servers(method: str, tmp_path: Path) -> None:
    model = written("gpt_oss" if method == "mxfp4" else "qwen3_moe", method, tmp_path).folder
    assert stored_as(Checkpoint.open(model).config) is KEPT.get(method)
    asked = prompts((1, 16, 33, 90))
    driver = Driver(model, local_experts(model), step_tokens=128)
    alone = driver.run(asked, NEW_TOKENS)
    driver.close()
    for servers in (1, 4):
        with pool_of(model, servers=servers, replicas=1) as pool:
            driver = Driver(model, pool.client)
            logits = driver.run(asked, NEW_TOKENS)
            driver.close()
        assert len(logits) == len(asked) * NEW_TOKENS
        assert not different(logits, alone), f"{method}, {servers} servers"


def test_gpt_oss_kept_in_mxfp4_errs_no_more_than_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = written("gpt_oss", "mxfp4", tmp_path)
    asked = random_prompts(512, seed=7)
    exact, _ = transformers_run(model.plain, asked, torch.float64)
    theirs, _ = transformers_run(model.plain, asked, torch.bfloat16)
    error, bound = (
        float(np.median(np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1)))
        for logits in (np.concatenate(served(model.folder, asked)), theirs)
    )
    print(f"median error {error:.5f} against {bound:.5f}")
    assert error < 1.1 * bound, f"seed 7: median error {error:.4f}, transformers {bound:.4f}"
