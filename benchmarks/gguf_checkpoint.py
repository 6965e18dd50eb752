"""A Qwen3-MoE checkpoint folder as a GGUF file for llama.cpp, every weight with the bits it has.

Matrices stay bfloat16; norms and gates become float32, exactly, as llama.cpp wants them. The experts of a layer
are stacked into one tensor. The file holds no vocabulary: token ids go in and come out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eaas.model.loader import load_spec, load_weights
from experts.checkpoint import Checkpoint
from experts.model import ExpertShape

ARCHITECTURE = "Qwen3MoeForCausalLM"
# Role of eaas.model.families.tensors_of -> name in a GGUF file.
WHOLE = {"embed": "token_embd", "head": "output", "final_norm": "output_norm"}
BY_LAYER = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate_inp",
}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def write_gguf(model: Path, out: Path) -> Path:
    """Convert a checkpoint.

    Args:
        model: Folder of a Qwen3MoeForCausalLM checkpoint in bfloat16.
        out: File to write.

    Returns:
        `out`.

    Raises:
        ImportError: the package gguf is missing.
        ValueError: another architecture or element type.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    checkpoint = Checkpoint.open(model)
    spec, shape = load_spec(checkpoint), ExpertShape.from_config(checkpoint.config)
    if spec.architecture != ARCHITECTURE or spec.moe.dense_layers or not spec.moe.norm_topk:
        raise ValueError(f"{model} is a {spec.architecture}; a plain {ARCHITECTURE} can be converted.")
    writer = gguf.GGUFWriter(out, "qwen3moe")
    writer.add_vocab_size(spec.vocab)
    writer.add_tokenizer_model("none")
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(shape.intermediate * shape.top_k)
    writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(spec.q_heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_rope_freq_base(checkpoint.config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)

    def add(name: str, array: np.ndarray) -> None:
        if array.dtype != np.uint16:
            raise ValueError(f"{name} is {array.dtype} in {model}; bfloat16 is needed.")
        if array.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, (array.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(array).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    for role, array in load_weights(checkpoint, spec).items():
        layer, _, part = role.rpartition(".")
        if layer:
            add(f"blk.{layer}.{BY_LAYER[part]}.weight", array)
        elif not (role == "head" and spec.tie_embeddings):
            add(f"{WHOLE[role]}.weight", array)
    for layer in range(shape.layers):
        names = [shape.names(layer, expert) for expert in range(shape.experts)]
        for target, sources in zip(EXPERTS, zip(*names, strict=True), strict=True):
            add(f"blk.{layer}.{target}.weight", np.stack([checkpoint.tensor(name) for name in sources]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
