"""Checkpoints with random weights, finding models, and the demonstration model's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bits_per_byte import end_of, measure
from benchmarks.make_model import (
    ARCHITECTURES,
    SHAPES,
    TensorOut,
    main,
    make_config,
    make_model,
    write_safetensors,
)
from eaas.model.loader import ModelNotFound, load_spec, resolve_model
from experts.checkpoint import Checkpoint
from experts.model import ExpertShape

# Of tiny qwen3_moe with seed 1: a change here changes every random model, and every result measured on one.
PINNED = {
    "bfloat16": "528765972e63f10940113fa11208f2db0c3d707b813d6a796815755490634a61",
    "float32": "7f38e8ac0df6e2d7445aa6b119c052f20a285e282783bffa2bd512f53bff3aeb",
}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("dtype", PINNED)
def test_a_seed_gives_the_same_file_everywhere(dtype: str, tmp_path: Path) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path, seed=1, dtype=dtype)
    assert sha256(folder / "model.safetensors") == PINNED[dtype]


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    one, two = (make_model("tiny", "olmoe", tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert sha256(one / "model.safetensors") != sha256(two / "model.safetensors")
    assert sha256(one / "tokenizer.json") == sha256(two / "tokenizer.json")


@pytest.mark.parametrize(("shape", "parameters"), [("S", 188e6), ("L", 1.52e9)])
def test_the_shapes_have_their_sizes(shape: str, parameters: float) -> None:
    sizes = SHAPES[shape]
    attention = sizes.hidden * sizes.head_dim * (2 * sizes.q_heads + 2 * sizes.kv_heads)
    experts = sizes.experts * 3 * sizes.hidden * sizes.intermediate
    total = sizes.vocab * sizes.hidden + sizes.layers * (attention + experts)
    assert total == pytest.approx(parameters, rel=0.005)
    for arch in ARCHITECTURES:
        assert ExpertShape.from_config(make_config(sizes, arch, "bfloat16")).experts == sizes.experts


def test_weights_are_near_normal_and_of_a_size_that_keeps_logits_of_order_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_model("tiny", "qwen3_moe", tmp_path, seed=4, dtype="float32"))
    embed = checkpoint.tensor("model.embed_tokens.weight").ravel()
    assert abs(embed.mean()) < 0.01
    assert embed.std() * 64**0.5 == pytest.approx(1, rel=0.3)
    assert np.mean(np.abs(embed) < embed.std()) == pytest.approx(0.683, abs=0.02)
    norm = checkpoint.tensor("model.norm.weight")
    assert 0.4 < norm.min() < 0.95 < 1.05 < norm.max() < 1.6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("huge", "mixtral", 1, "bfloat16"), "shape 'huge'.*tiny, S, L"),
        (("tiny", "gpt2", 1, "bfloat16"), "architecture 'gpt2'.*qwen3_moe"),
        (("tiny", "mixtral", 1, "int8"), "dtype 'int8'"),
        (("tiny", "mixtral", -1, "bfloat16"), "seed is -1"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: tuple[str, str, int, str], words: str, tmp_path: Path) -> None:
    shape, arch, seed, dtype = arguments
    with pytest.raises(ValueError, match=words):
        make_model(shape, arch, tmp_path / "out", seed, dtype)
    assert not (tmp_path / "out").exists()


def test_large_models_are_sharded_and_read_back_the_same(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((3, 5), i, np.float32) for i in range(4)}
    outs = [
        TensorOut(name=name, dtype="F32", shape=(3, 5), chunks=lambda array=array: [array.tobytes()])
        for name, array in arrays.items()
    ]
    assert len(write_safetensors(tmp_path, outs, shard_bytes=130)) == 2
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), array)
    assert not list(tmp_path.glob("*.partial"))
    assert write_safetensors(tmp_path, outs[:1]) == [tmp_path / "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tensor_of_the_wrong_length_leaves_no_file(tmp_path: Path) -> None:
    short = TensorOut(name="t", dtype="BF16", shape=(4,), chunks=lambda: [b"123456"])
    with pytest.raises(ValueError, match=r"t gave 6 bytes.*needs 8"):
        write_safetensors(tmp_path, [short])
    assert not (tmp_path / "model.safetensors").exists()


def test_a_folder_and_the_built_in_model_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model("tiny", "mixtral", tmp_path / "m", seed=1)
    assert resolve_model(folder) == folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert resolve_model("m") == folder
    assert (resolve_model("demo") / "model.safetensors").is_file(), "an empty folder named demo hides nothing"


def test_what_is_not_found_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config.json"):
        resolve_model(tmp_path)
    with pytest.raises(ModelNotFound, match="neither a model folder, nor 'demo', nor a hub id"):
        resolve_model(str(tmp_path / "missing"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"nobody/nothing: there is no such folder, .* cannot be reached"):
        resolve_model("nobody/nothing")


def test_the_demonstration_model_has_its_size_and_a_card_with_its_figures() -> None:
    folder = resolve_model("demo")
    checkpoint = Checkpoint.open(folder)
    spec = load_spec(checkpoint)
    parameters = sum(checkpoint.tensor(name).size for name in checkpoint.names())
    assert 6e6 <= parameters <= 12e6
    assert spec.layers >= 4
    assert spec.moe.experts >= 8
    assert (folder / "model.safetensors").stat().st_size <= 24e6
    card = (folder / "README.md").read_text()
    assert "bits per byte" in card
    assert f"{parameters:,}" in card


def test_bits_per_byte_counts_every_byte_once(tmp_path: Path) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path / "m", seed=1)
    text = "To be, or not to be: that is the question — Whether 'tis nobler"
    whole, pieces = measure(folder, text), measure(folder, text, window=16)
    assert whole.bytes == len(text.encode()) == whole.tokens, "one token is one byte here"
    assert pieces.tokens == whole.tokens
    # A model that knows nothing is about as good as a guess among 512 entries.
    assert 8 < whole.bits_per_byte < 12
    assert abs(pieces.bits_per_byte - whole.bits_per_byte) < 1


def test_the_end_of_a_text_is_cut_by_characters(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("é" * 9 + "x", encoding="utf-8")
    assert end_of(tmp_path / "t", 0.1) == "x"


def test_the_demonstration_model_knows_english() -> None:
    text = "First Citizen:\nWe cannot, sir, we are undone already.\n\nMENENIUS:\nI tell you, friends"
    assert measure(resolve_model("demo"), text).bits_per_byte < 3


def test_made_models_load_in_transformers_with_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for arch in ARCHITECTURES:
        folder = make_model("tiny", arch, tmp_path / arch, seed=1)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        model, info = loaded
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), arch
        assert len(tokenizer) == model.config.vocab_size == 512, arch
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_command_writes_a_model_and_says_why_it_does_not(tmp_path: Path) -> None:
    words = ["--shape", "tiny", "--arch", "mixtral", "--seed", "3"]
    main([*words, "--out", str(tmp_path / "m")])
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == ["MixtralForCausalLM"]
    assert Checkpoint.open(tmp_path / "m")
    with pytest.raises(SystemExit, match="shape 'huge'"):
        main(["--shape", "huge", "--out", str(tmp_path / "x")])
