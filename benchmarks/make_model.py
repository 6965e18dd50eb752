"""Writes checkpoint folders: safetensors as a stream, each file whole or absent; and models of random weights.

The same shape and seed give the same files everywhere, and transformers loads them too.

python -m benchmarks.make_model --shape S --arch qwen3_moe --out ./S --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from eaas.model.families import spec_of, tensors_of
from eaas.model.tokenizer import BYTE_TO_CHAR
from experts.model import ExpertShape

ITEM_BYTES = {"BF16": 2, "F32": 4}
SHARD_BYTES = 2 << 30
_ALIGNMENT_BYTES = 64
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_CHUNK = 1 << 20  # weights drawn at a time; a multiple of 8, so that chunks do not change the numbers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model; `shared` is the inner size of qwen2_moe's shared expert, elsewhere it is one expert's."""

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    intermediate: int
    shared: int
    vocab: int
    max_model_len: int


SHAPES: Mapping[str, Shape] = {
    # 0.3 M parameters
    "tiny": Shape(
        hidden=64, layers=4, q_heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, intermediate=32,
        shared=64, vocab=512, max_model_len=2048,
    ),
    # 188 M: 32000 * 768 + 8 * (768 * 2048 + 32 * 3 * 768 * 256)
    "S": Shape(
        hidden=768, layers=8, q_heads=12, kv_heads=4, head_dim=64, experts=32, top_k=4, intermediate=256,
        shared=512, vocab=32_000, max_model_len=4096,
    ),
    # 1.52 B: 64000 * 1024 + 16 * (1024 * 2560 + 32 * 3 * 1024 * 896)
    "L": Shape(
        hidden=1024, layers=16, q_heads=16, kv_heads=4, head_dim=64, experts=32, top_k=4, intermediate=896,
        shared=1792, vocab=64_000, max_model_len=4096,
    ),
}  # fmt: skip

ARCHITECTURES: Mapping[str, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
}


def make_model(
    shape: str,
    arch: str,
    out: Path,
    seed: int,
    dtype: str = "bfloat16",
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder with random weights, which transformers loads too.

    Args:
        shape: "tiny", "S" or "L"; embeddings are tied.
        arch: One of ARCHITECTURES.
        out: Folder to write; files of the same names are replaced.
        seed: Same seed, same bytes, on every machine.
        dtype: "bfloat16" or "float32".
        overrides: Fields of config.json to set, for example {"sliding_window": 32}.

    Returns:
        `out`.

    Raises:
        ValueError: an unknown shape, architecture or dtype, a negative seed, or overrides that make no sense.
    """
    for what, value, known in (("shape", shape, SHAPES), ("architecture", arch, ARCHITECTURES)):
        if value not in known:
            raise ValueError(f"Unknown {what} {value!r}. Known are {', '.join(known)}.")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"Unknown dtype {dtype!r}. Known are bfloat16, float32.")
    if seed < 0:
        raise ValueError(f"The seed is {seed}; a whole number from 0 is needed.")
    config = make_config(SHAPES[shape], arch, dtype) | dict(overrides or {})
    stored = "BF16" if dtype == "bfloat16" else "F32"
    tensors = [
        TensorOut(
            name=name,
            dtype=stored,
            shape=size,
            chunks=lambda name=name, size=size: _weights(name, size, seed, stored),
        )
        for name, size in _tensor_shapes(config)
    ]
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 0})
    write_json(out / "tokenizer.json", byte_tokenizer(config["vocab_size"]))
    write_json(out / "tokenizer_config.json", tokenizer_config(config["max_position_embeddings"]))
    write_safetensors(out, tensors)
    return out


def make_config(shape: Shape, arch: str, dtype: str) -> dict[str, Any]:
    """config.json for a shape and an architecture."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "dtype": dtype,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_model_len,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5 if arch in ("mixtral", "olmoe", "glm4_moe", "gpt_oss") else 1e-6,
        "rope_theta": 1e6 if arch == "mixtral" else 10_000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "attention_dropout": 0.0,
        "num_experts_per_tok": shape.top_k,
        "bos_token_id": 0,
        "eos_token_id": [0, 2],
        "pad_token_id": 0,
    }
    mixtral_sizes = {"num_local_experts": shape.experts, "intermediate_size": shape.intermediate}
    if arch == "gpt_oss":
        yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        return config | mixtral_sizes | {
            "head_dim": shape.head_dim, "attention_bias": True, "sliding_window": 32, "rope_theta": 150_000.0,
            "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(shape.layers)],
            "rope_scaling": yarn | {"original_max_position_embeddings": shape.max_model_len // 4},
            "swiglu_limit": 7.0,
        }  # fmt: skip
    if arch == "mixtral":
        return config | mixtral_sizes | {"head_dim": shape.head_dim, "sliding_window": None}
    if arch == "minimax_m2":
        return config | mixtral_sizes | {
            "head_dim": shape.head_dim, "rotary_dim": shape.head_dim // 2, "rope_theta": 5e6, "scoring_func": "sigmoid",
            "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
        }  # fmt: skip
    if arch == "dots1":
        return config | _corrected(shape) | {"head_dim": shape.head_dim, "sliding_window": None}
    if arch == "glm4_moe":
        return config | _corrected(shape) | {
            "head_dim": shape.head_dim, "attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": True
        }  # fmt: skip
    if arch.startswith("deepseek"):
        config |= _corrected(shape) | {
            "num_key_value_heads": shape.q_heads,
            "q_lora_rank": 3 * shape.head_dim,
            "kv_lora_rank": 2 * shape.head_dim,
            "qk_nope_head_dim": shape.head_dim,
            "qk_rope_head_dim": shape.head_dim // 2,
            "v_head_dim": shape.head_dim,
            "attention_bias": False,
        }
        if arch == "deepseek_v2":
            return config | {"topk_method": "greedy", "norm_topk_prob": False}
        return config | {"n_group": 4, "topk_group": 2}
    config |= {"num_experts": shape.experts, "norm_topk_prob": arch == "qwen3_moe"}
    if arch == "olmoe":
        return config | {"intermediate_size": shape.intermediate, "attention_bias": False, "clip_qkv": None}
    config |= {
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.intermediate * shape.top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }
    if arch == "qwen2_moe":
        return config | {"shared_expert_intermediate_size": shape.shared, "qkv_bias": True}
    return config | {"head_dim": shape.head_dim, "attention_bias": False}


def _corrected(shape: Shape) -> dict[str, Any]:
    """A gate of sigmoid scores with a correction, one shared expert, and a dense layer first."""
    return {
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.intermediate * shape.top_k,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }


def byte_tokenizer(vocab: int) -> dict[str, Any]:
    """tokenizer.json that encodes bytes as tokens; nothing encodes to ids beyond, made-up words.

    Raises:
        ValueError: the vocabulary has no room for 256 bytes and the special tokens.
    """
    needed = len(SPECIAL_TOKENS) + 256
    if vocab < needed:
        raise ValueError(f"A vocabulary of {vocab} is too small: bytes and special tokens need {needed}.")
    names = [*SPECIAL_TOKENS, *(BYTE_TO_CHAR[byte] for byte in range(256))]
    names += [BYTE_TO_CHAR[ord(" ")] + _word(number) for number in range(vocab - needed)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [],
        },
    }


def tokenizer_config(max_model_len: int) -> dict[str, Any]:
    """tokenizer_config.json, chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "chat_template": CHAT_TEMPLATE,
    }


def _word(number: int) -> str:
    # Two syllables, then three once those are used up; no two numbers share a word.
    syllables = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
    length, base = 2, len(syllables)
    while number >= base**length:
        number -= base**length
        length += 1
    word = ""
    for _ in range(length):
        number, digit = divmod(number, base)
        word = syllables[digit] + word
    return word


def _tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    spec, experts = spec_of(config), ExpertShape.from_config(config)
    for plan in tensors_of(spec).values():
        yield plan.name, plan.shape
    fused, both, inter = experts.family.fused, 2 * experts.intermediate, experts.intermediate
    for layer in range(experts.layers):
        if not experts.family.prefix:
            prefix = fused.prefix.format(layer=experts.layer_ids[layer])
            for name, size in (
                (fused.gate_up, (experts.hidden, both)),
                (fused.down, (inter, experts.hidden)),
            ):
                yield prefix + name, (experts.experts, *size)
                yield f"{prefix}{name}_bias", (experts.experts, size[1])
            continue
        for expert in range(experts.experts):
            gate, up, down = experts.names(layer, expert)
            yield gate, (experts.intermediate, experts.hidden)
            yield up, (experts.intermediate, experts.hidden)
            yield down, (experts.hidden, experts.intermediate)


def _weights(name: str, shape: tuple[int, ...], seed: int, dtype: str) -> Iterable[bytes]:
    """Weights near a normal distribution: the sum of four random bytes, scaled by a power of two.

    Integers and powers of two only, so that no library's rounding shows. The standard deviation is near
    1 / sqrt(columns), which keeps activations and logits of order one at every shape.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    generator = np.random.Philox(key=key)
    centre, halvings = 0.0, 11
    if len(shape) > 1 and not name.endswith("_bias"):
        # Matrices of all experts of a layer are transposed.
        halvings = _halvings(shape[1])
    elif name.endswith("norm.weight"):
        centre, halvings = 1.0, 10
    table = _table(centre, halvings, dtype)
    count = int(np.prod(shape))
    for first in range(0, count, _CHUNK):
        size = min(_CHUNK, count - first)
        words = generator.random_raw((size + 1) // 2).astype("<u8", copy=False).view("<u4")[:size]
        pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
        yield table[(pairs & 0xFFFF) + (pairs >> 16)].tobytes()


def _halvings(columns: int) -> int:
    # The sum of four bytes has variance 4 * (256**2 - 1) / 12 = 21845; wanted: about 1 / columns, scaled.
    halvings = 0
    while 4**halvings < 21_845 * columns // 2:
        halvings += 1
    return halvings


@lru_cache(maxsize=32)
def _table(centre: float, halvings: int, dtype: str) -> np.ndarray:
    # Exact in float32: sums are below 2**10, the centre is 0 or 1.
    values = (np.arange(1021, dtype=np.float32) - 510) * np.float32(2.0**-halvings) + np.float32(centre)
    if dtype == "F32":
        return values.astype("<f4")
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


@dataclass(frozen=True, kw_only=True)
class TensorOut:
    """One tensor to write.

    Attributes:
        dtype: As safetensors spells it: "BF16" or "F32".
        chunks: Gives the little-endian bytes from the beginning, in pieces of any size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes]]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_json(path: Path, value: Any) -> None:
    """Write one JSON file, whole or not at all."""
    _replace(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])


def write_safetensors(folder: Path, tensors: Sequence[TensorOut], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write model.safetensors, or shards and their index once the data exceed `shard_bytes`.

    Weights that the folder held before are gone afterwards, however they were split.

    Returns:
        The safetensors files.

    Raises:
        ValueError: a tensor gave more or fewer bytes than its shape needs.
    """
    shards: list[list[TensorOut]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _replace(folder / name, _stream(shard))
    index = folder / "model.safetensors.index.json"
    # Leftovers of a model that was split otherwise would be read in place of this one.
    for path in [*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors"), index]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors)
        write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return [folder / name for name in names]


def _stream(tensors: Sequence[TensorOut]) -> Iterable[bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        given = 0
        for chunk in tensor.chunks():
            given += len(chunk)
            yield chunk
        if given != tensor.nbytes:
            raise ValueError(f"{tensor.name} gave {given} bytes; {tensor.dtype} {tensor.shape} needs {tensor.nbytes}.")


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
    partial.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Write a checkpoint; exits with the reason where the words make no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--shape", default="tiny", help="tiny, S (188 M parameters) or L (1.52 B)")
    parser.add_argument("--arch", default="qwen3_moe", help=", ".join(ARCHITECTURES))
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same file everywhere")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    options = parser.parse_args(argv)
    try:
        make_model(options.shape, options.arch, options.out, options.seed, options.dtype)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
