"""A folder of .gguf files is the checkpoint that it was made from, bit for bit as gguf dequantizes it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.make_model import make_model
from eaas.model.loader import load_spec, load_weights
from experts.checkpoint import Checkpoint, CheckpointInvalid, read_config
from experts.formats import experts_dtype
from experts.kernels import pack_expert
from experts.model import Dtype, ExpertShape
from experts.quantized import Quantized
from experts.tensors import tensors_of
from tests.experts.gguf_files import write_gguf

SIZES: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 256}
FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 256, "head_dim": 64},
    "qwen2_moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "olmoe": {"tie_word_embeddings": False},
    "mixtral": {"head_dim": 32},
    "glm4_moe": {"moe_intermediate_size": 256},
}


def mixed(name: str) -> Kind:
    """As in a file of Q4_K_M, with every other type somewhere."""
    for part, kind in (
        ("ffn_down_exps", Kind.Q6_K),
        ("_exps", Kind.Q4_K),
        ("gate_inp", Kind.F32),
        ("attn_q", Kind.Q4_K),
        ("attn_k", Kind.Q8_0),
        ("attn_v", Kind.Q5_K),
        ("attn_output", Kind.Q4_0),
        ("token_embd", Kind.BF16),
        ("ffn_down", Kind.F16),
    ):
        if part in name:
            return kind
    return Kind.Q8_0


def model(root: Path, arch: str = "qwen3_moe", *, seed: int, kind: Any = mixed, parts: int = 1) -> tuple[Path, Path]:
    """The folder with .gguf files, and that of the same weights in float32."""
    sizes = SIZES | FAMILIES[arch]
    source = make_model("tiny", arch, root / "source", seed=seed, dtype="float32", overrides=sizes)
    return root / "gguf", write_gguf(source, root / "gguf", kind, seed=seed, parts=parts)


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_weight_is_what_gguf_dequantizes(arch: str, tmp_path: Path) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    folder, plain = model(tmp_path, arch, seed=seed)
    found, needed = Checkpoint.open(folder), Checkpoint.open(plain)
    assert set(needed.names()) <= set(found.names())
    shape = ExpertShape.from_config(needed.config)
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            ours, theirs = (tensors_of(checkpoint, shape, layer, expert) for checkpoint in (found, needed))
            for part in ("gate", "up", "down"):
                weights = getattr(ours, part)
                weights = weights.dequantized() if isinstance(weights, Quantized) else weights
                assert np.array_equal(weights, getattr(theirs, part)), f"{part}, seed {seed}"
    spec = replace(load_spec(found), dtype=Dtype.FLOAT32)
    ours, theirs = (load_weights(checkpoint, spec) for checkpoint in (found, needed))
    narrow = load_weights(found, replace(spec, dtype=Dtype.BFLOAT16))
    assert ours.keys() == theirs.keys() == narrow.keys()
    # What is decoded takes no more room than it needs; the gate is kept in full.
    assert narrow["0.q"].dtype == np.uint16 and narrow["1.gate"].dtype == np.float32
    for role, weights in ours.items():
        if weights.dtype == np.uint16:
            weights = (weights.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(weights, theirs[role]), f"{role}, seed {seed}"


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q4_0])
def test_four_bits_are_kept_as_codes_that_dequantize_to_the_same_bits(kind: Kind, tmp_path: Path) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    folder, plain = model(tmp_path, seed=seed, kind=lambda name: kind if "exps" in name else Kind.Q8_0)
    found, needed = Checkpoint.open(folder), Checkpoint.open(plain)
    for name in ExpertShape.from_config(needed.config).names(1, 3):
        quantized = found.quantized(name)
        assert quantized is not None and quantized.group == 32 and quantized.codes.max() == 15
        assert np.array_equal(quantized.dequantized(), needed.tensor(name)), f"{name}, seed {seed}"
    assert found.quantized("model.embed_tokens.weight") is None
    file, name = found._file("model.norm.weight"), ExpertShape.from_config(needed.config).names(1, 3)[0]
    long = replace(file.entries[name], shape=(256 * 256,))
    file.entries = {**file.entries, name: long}
    assert found.quantized(name) is None and found.tensor(name).shape == (256 * 256,)
    assert needed.quantized("model.embed_tokens.weight") is None


@pytest.mark.parametrize(
    ("down", "kept"), [(Kind.Q4_K, Dtype.INT4_G32), (Kind.Q4_0, Dtype.INT4_G32), (Kind.Q6_K, Dtype.BFLOAT16)]
)
def test_experts_stay_in_four_bits_where_all_of_them_are(down: Kind, kept: Dtype, tmp_path: Path) -> None:
    folder, _ = model(tmp_path, seed=1, kind=lambda name: down if "ffn_down_exps" in name else Kind.Q4_K)
    checkpoint = Checkpoint.open(folder)
    assert experts_dtype("auto", checkpoint.config, frozenset(Dtype)) is kept
    assert experts_dtype("float32", checkpoint.config, frozenset(Dtype)) is Dtype.FLOAT32
    if kept is Dtype.INT4_G32:
        # A host without the file may say so in its config.json.
        said = {"quantization_config": {"quant_method": "gguf", "experts_bits": 4}}
        assert experts_dtype("auto", read_config(folder) | said, frozenset(Dtype)) is kept
    found = tensors_of(checkpoint, ExpertShape.from_config(checkpoint.config), 1, 3)
    assert isinstance(found.gate, Quantized)
    packed = pack_expert(found.gate, found.up, found.down, kept)
    assert packed.dtype is kept and load_spec(checkpoint).dtype is Dtype.BFLOAT16


def test_a_model_in_parts_is_read_and_a_missing_part_is_named(tmp_path: Path) -> None:
    folder, plain = model(tmp_path, seed=3, parts=3)
    found, needed = Checkpoint.open(folder), Checkpoint.open(plain)
    for name in needed.names():
        assert found.tensor(name).shape == needed.shape(name)
    (folder / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointInvalid, match=r"model-00002-of-00003\.gguf: is missing"):
        Checkpoint.open(folder)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder, _ = model(tmp_path, seed=3)
    (folder / "other.gguf").write_bytes((folder / "model.gguf").read_bytes())
    with pytest.raises(CheckpointInvalid, match=r"is in model\.gguf and in other\.gguf\. Keep the files of one"):
        Checkpoint.open(folder)


def test_the_fingerprint_tells_files_apart(tmp_path: Path) -> None:
    folder, _ = model(tmp_path, seed=3)
    before = Checkpoint.open(folder).fingerprint
    assert Checkpoint.open(folder).fingerprint == before
    file = folder / "model.gguf"
    data = bytearray(file.read_bytes())
    entry = Checkpoint.open(folder)._file("model.norm.weight")
    at = entry._start + entry.entries["model.norm.weight"].begin
    data[at] ^= 1
    file.write_bytes(data)
    assert Checkpoint.open(folder).fingerprint != before


def test_the_fingerprint_does_not_depend_on_the_names_that_gguf_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = model(tmp_path, seed=3)
    before, known = Checkpoint.open(folder), gguf.get_tensor_name_map

    def more(*arguments: Any) -> Any:
        names = known(*arguments)
        names.mapping["model.an_alias"] = names.mapping["model.norm"]
        return names

    monkeypatch.setattr(gguf, "get_tensor_name_map", more)
    after = Checkpoint.open(folder)
    assert "model.an_alias.weight" in after and "model.an_alias.weight" not in before
    assert after.fingerprint == before.fingerprint


def test_another_model_or_family_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = model(tmp_path, seed=3)
    config = json.loads((folder / "config.json").read_text())
    for named, text in (
        ({"architectures": ["OlmoeForCausalLM"]}, "is of 'qwen3moe'; config.json needs 'olmoe'"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8},
            "DeepseekV3ForCausalLM is not read from GGUF, only Glm4Moe",
        ),
        ({"num_experts": 4}, r"is \(8, 256, 256\); config.json says 4 experts"),
    ):
        (folder / "config.json").write_text(json.dumps(config | named))
        with pytest.raises(CheckpointInvalid, match=text):
            Checkpoint.open(folder)


def test_every_truncation_and_no_flipped_bit_of_the_head_ends_otherwise_than_in_words(tmp_path: Path) -> None:
    folder, _ = model(tmp_path, seed=3)
    file = folder / "model.gguf"
    whole = file.read_bytes()
    generator = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 31)))
    head = Checkpoint.open(folder)._file("model.norm.weight")._start
    for length in [0, 3, 23, 24, *generator.integers(24, len(whole), 40).tolist(), len(whole) - 100]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointInvalid, match=r"model\.gguf: .*(Download it|at least 24)"):
            Checkpoint.open(folder)
    for place in generator.integers(0, head, 100).tolist():
        data = bytearray(whole)
        data[place] ^= 1 << int(generator.integers(8))
        file.write_bytes(data)
        try:
            checkpoint = Checkpoint.open(folder)
            for name in generator.choice(checkpoint.names(), 8):
                checkpoint.tensor(str(name))
        except CheckpointInvalid as error:
            assert str(error), f"byte {place}, seed {seed}"


def header(*parts: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + b"".join(parts)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"GGML" + bytes(40), "begins with b'GGML', version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(9), "version 50331648, not GGUF 2 or 3"),
        (header(struct.pack("<Q", 1 << 60)), "header ends after byte 32"),
        (header(struct.pack("<Q1sI", 1, b"a", 9)), "a has 9 axes"),
        (header(struct.pack("<Q1sIQIQ", 1, b"a", 1, 8, 99, 0)), "a has type 99; gguf does not know it"),
        (
            header(struct.pack("<Q1sIQIQ", 1, b"a", 1, 100, 12, 0)),
            "a is Q4_K: rows of 100, blocks of 256",
        ),
        (header(struct.pack("<Q1sIQQIQ", 1, b"a", 2, 256, 0, 12, 0)), r"a is \(0, 256\); an axis has"),
        (
            header(struct.pack("<Q1sIQIQ", 1, b"a", 1, 1 << 40, 0, 0)),
            "a lies at bytes 0 to 4398046511104 of 0",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"f", 77), "field f has type 77"),
        (
            b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 0),
            "general.alignment is 0; a number from 1 is needed",
        ),
    ],
)
def test_a_malformed_head_is_refused_with_the_reason(tmp_path: Path, content: bytes, text: str) -> None:
    make_model("tiny", "qwen3_moe", tmp_path, seed=1)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=text):
        Checkpoint.open(tmp_path)


def test_the_library_is_asked_for_where_a_gguf_file_is_and_nowhere_else(tmp_path: Path) -> None:
    folder, plain = model(tmp_path, seed=3)
    script = (
        "import sys; sys.modules['gguf'] = None\n"
        "from experts.checkpoint import Checkpoint, CheckpointInvalid\n"
        f"Checkpoint.open({str(plain)!r})\n"
        f"try: Checkpoint.open({str(folder)!r})\n"
        "except CheckpointInvalid as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'eaas[gguf]'" in done.stdout


def test_a_type_that_gguf_does_not_decode_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = model(tmp_path, seed=3)
    monkeypatch.delattr(gguf.quants, "Q5_K")
    with pytest.raises(CheckpointInvalid, match=r"attn_v\.weight is Q5_K, which gguf does not decode"):
        Checkpoint.open(folder)
