"""A folder of .gguf files answers as transformers does: with its own reading of the file, and with gguf's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from tests.e2e.test_logits import random_prompts, served, transformers_run
from tests.experts.test_gguf import FAMILIES, mixed, model


@pytest.mark.parametrize("arch", FAMILIES)
def test_float32_logits_equal_those_of_transformers_on_the_dequantized_weights(
    arch: str, tmp_path: Path
) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    folder, plain = model(tmp_path, arch, seed=seed)
    prompts = random_prompts(512, seed)
    ours = np.concatenate(served(folder, prompts, "float32"))
    theirs, _ = transformers_run(plain, prompts, torch.float32)
    assert theirs.std() > 0.1, f"logits so flat compare nothing, seed {seed}"
    assert np.abs(ours - theirs).max() < 2e-4, f"{arch}, seed {seed}"


# Of these transformers reads .gguf files.
@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_float32_logits_equal_those_of_transformers_on_the_same_file(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks for accelerate before it reads such a file, and then does without.
    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda: True)
    seed = int(np.random.default_rng().integers(1 << 31))
    folder, _ = model(
        tmp_path, arch, seed=seed, kind=lambda name: Kind.Q8_0 if "token_embd" in name else mixed(name)
    )
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
