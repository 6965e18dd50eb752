"""What the kernels of eaas/gpu compute, by its definition, in torch: for tests and measurements to compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    seqs: Tensor,
    tables: Tensor,
    window: int,
) -> Tensor:
    """What `attention` writes, by its definition, in double; arguments as there."""
    rows, q_heads, dim = queries.shape
    _, kv_heads, block_tokens, _ = keys.shape
    out = torch.zeros(rows, q_heads, dim, dtype=torch.float64, device=queries.device)
    for row in range(rows):
        last = int(positions[row])
        seen = torch.arange(max(0, last + 1 - window) if window else 0, last + 1, device=queries.device)
        blocks = tables[int(seqs[row])].long()[seen // block_tokens]
        k, v = (cache[blocks, :, seen % block_tokens].double() for cache in (keys, values))
        k, v = (part.repeat_interleave(q_heads // kv_heads, 1) for part in (k, v))
        scores = torch.einsum("hd,nhd->hn", queries[row].double(), k) * dim**-0.5
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition in double: x [B, K] and W [N, K] to float64 [B, N]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def add_norm_reference(x: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its norm; in the type of x."""
    total = x + addend
    return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight


def rotate_reference(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads [rows, heads, head_dim] turned by tables [rows, head_dim / 2]."""
    low, high = x.chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)


def greedy_reference(logits: Tensor) -> Tensor:
    """The highest logit of each row, the lowest id on a tie: int64 [rows]."""
    highest = logits.max(-1, keepdim=True).values
    return (logits == highest).int().argmax(-1)
