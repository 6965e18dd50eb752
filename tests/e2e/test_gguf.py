"""A folder of .gguf files answers as transformers does: with its own reading of the file, and with gguf's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from tests.e2e.pool import Driver, local_experts, pool_of
from tests.e2e.test_logits import random_prompts, served, transformers_run
from tests.experts.test_gguf import FAMILIES, mixed, model


def some(families: Iterable[str], *first: str) -> list[Any]:
    """These families; those after the first ones take their time."""
    slow = pytest.mark.full(seconds=8)
    return [pytest.param(arch, marks=() if arch in first else slow) for arch in families]


@pytest.mark.parametrize("arch", some(FAMILIES, "mixtral"))
def test_float32_logits_equal_those_of_transformers_on_the_dequantized_weights(arch: str, tmp_path: Path) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    folder, plain = model(tmp_path, arch, seed=seed)
    prompts = random_prompts(512, seed)
    ours = np.concatenate(served(folder, prompts, "float32"))
    theirs, _ = transformers_run(plain, prompts, torch.float32)
    assert theirs.std() > 0.1, f"logits so flat compare nothing, seed {seed}"
    assert np.abs(ours - theirs).max() < 2e-4, f"{arch}, seed {seed}"


# Of these transformers reads .gguf files.
@pytest.mark.parametrize("arch", some(["qwen3_moe", "qwen2_moe"], "qwen3_moe"))
def test_float32_logits_equal_those_of_transformers_on_the_same_file(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks for accelerate before it reads such a file, and then does without.
    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda: True)
    seed = int(np.random.default_rng().integers(1 << 31))
    folder, _ = model(tmp_path, arch, seed=seed, kind=lambda name: Kind.Q8_0 if "token_embd" in name else mixed(name))
    prompts = random_prompts(512, seed)
    ours = np.concatenate(served(folder, prompts, "float32"))
    peer = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file="model.gguf",
        config=AutoConfig.from_pretrained(folder),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    with torch.inference_mode():
        theirs = np.concatenate([peer(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts])
    assert np.abs(ours - theirs).max() < 2e-4, f"{arch}, seed {seed}"


def test_experts_in_four_bits_give_the_same_bits_in_process_and_on_servers(tmp_path: Path) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    kinds = {"gate": Kind.Q4_K, "up": Kind.Q4_0, "down": Kind.Q4_K}
    folder, plain = model(
        tmp_path,
        seed=seed,
        kind=lambda name: next((kinds[part] for part in kinds if f"{part}_exps" in name), Kind.Q8_0),
    )
    prompts = random_prompts(512, seed)
    asked = {str(number): prompt for number, prompt in enumerate(prompts)}
    driver = Driver(folder, local_experts(folder), step_tokens=128)
    alone = driver.run(asked, 8)
    driver.close()
    for servers in (1, 4):
        with pool_of(folder, servers, replicas=1) as pool:
            assert "int4g32" in {member.numerics_class for member in pool.serving()}.pop()
            driver = Driver(folder, pool.client)
            assert driver.run(asked, 8) == alone, f"{servers} servers, seed {seed}"
            driver.close()
    # As near to the numbers that the codes stand for as bfloat16 is, in the median of rows: a tenth of them, in which
    # gates choose otherwise, makes up to half of all that differs.
    ours = np.concatenate(served(folder, prompts))
    theirs, _ = transformers_run(plain, prompts, torch.float32)
    rounded, _ = transformers_run(plain, prompts, torch.bfloat16)
    off, its = (np.median(np.abs(logits - theirs).mean(axis=-1)) for logits in (ours, rounded))
    assert off < its, f"seed {seed}: {off} against {its}"
