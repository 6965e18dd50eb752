"""The demonstration model for training: a small Qwen3-MoE in plain torch, fast on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_MODEL_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model, in the words of the Hugging Face config."""

    vocab: int = 1024
    hidden: int = 256
    layers: int = 4
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    top_k: int = 2
    intermediate: int = 256
    rope_theta: float = 10_000.0
    eps: float = 1e-6


class RmsScale(torch.autograd.Function):
    """x / rms(x) * weight with its own backward: torch's is a dozen passes over memory on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        by_weight = grad * unit
        mean = (by_weight @ weight).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(unit, mean, value=-1).mul_(scale)
        return grad_x, by_weight.flatten(0, -2).sum(0), None


class Dropout(nn.Module):
    """Dropout whose masks are windows of one pool: drawing them anew takes a tenth of a step on a CPU."""

    def __init__(self, probability: float, pool: int = 1 << 24) -> None:
        super().__init__()
        keep = torch.rand(pool if probability else 0) >= probability
        self.mask = keep.float() / (1 - probability)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        start = int(torch.randint(self.mask.numel() - x.numel(), ()))
        return x * self.mask[start : start + x.numel()].view_as(x)


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last axis, with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return RmsScale.apply(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm on each query and key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.q_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.q_heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RmsNorm(shape.head_dim, shape.eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        size = (rows, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(size)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(size)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(size).transpose(1, 2)
        group = self.shape.q_heads // self.shape.kv_heads
        # torch's own enable_gqa takes a slow path on CPU; repeating the few key heads does not.
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention. x: [rows, heads, length, head_dim]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Experts(nn.Module):
    """Gate and SwiGLU experts; only the chosen rows of each expert are computed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.up_proj = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.intermediate))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, hidden] -> output [n, hidden], balance loss (scalar), rows per expert [experts]."""
        n, top_k = x.shape[0], self.shape.top_k
        probability = self.gate(x).softmax(-1)
        weight, chosen = probability.topk(top_k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        count = torch.bincount(flat, minlength=self.shape.experts)
        parts = x[order // top_k].split(count.tolist())
        outs = [
            F.linear(F.silu(F.linear(part, self.gate_proj[e])) * F.linear(part, self.up_proj[e]), self.down_proj[e])
            for e, part in enumerate(parts)
        ]
        scaled = torch.cat(outs) * weight.flatten()[order, None]
        out = torch.zeros_like(x).index_add(0, order // top_k, scaled)
        balance = self.shape.experts * (count / (n * top_k) * probability.mean(0)).sum()
        return out, balance, count


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape, drop: Dropout) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.mlp = Experts(shape)
        self.drop = drop

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        out, balance, count = self.mlp(self.post_attention_layernorm(x).flatten(0, 1))
        return x + self.drop(out.view_as(x)), balance, count


class Model(nn.Module):
    """Qwen3-MoE with tied embeddings."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        drop = Dropout(dropout)
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, drop) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.eps)
        self.drop = drop
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_residual = name.endswith(("o_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if into_residual else 0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """[rows, length] ids -> logits [rows, length, vocab], balance loss, rows per expert of each layer."""
        half = self.shape.head_dim // 2
        frequency = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(ids.shape[1], dtype=torch.float32)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x, balance, counts = self.drop(self.embed_tokens(ids)), torch.zeros(()), []
        for layer in self.layers:
            x, layer_balance, count = layer(x, cos, sin)
            balance = balance + layer_balance
            counts.append(count)
        return F.linear(self.norm(x), self.embed_tokens.weight), balance / len(counts), counts


def hf_config(shape: Shape) -> dict[str, Any]:
    """config.json of the model, in the Hugging Face form."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate * shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.02,
        "rms_norm_eps": shape.eps,
        "use_cache": True,
        "tie_word_embeddings": True,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "bos_token_id": 0,
        "eos_token_id": [0, 2],
        "pad_token_id": 0,
    }


def hf_tensors(model: Model) -> Mapping[str, Tensor]:
    """The weights under their Hugging Face names; the stacked experts one by one."""
    out: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            place, _, matrix = name.rpartition(".")
            for expert, part in enumerate(parameter.detach()):
                out[f"model.{place}.experts.{expert}.{matrix}.weight"] = part
        else:
            out[f"model.{name}"] = parameter.detach()
    return out
