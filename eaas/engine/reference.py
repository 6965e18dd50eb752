"""The model, defined: a plain torch decoder, all experts local, no cache. Slow, short, the oracle of tests.

For tokens [n]: embedding; per layer RMS norm, attention (QK norm, clip, rope, causal or sliding, grouped
heads), residual, RMS norm, dense MLP or gated experts with shared ones, residual; final norm; head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from eaas.engine.decoder import rope_tables
from eaas.model.spec import ModelSpec, MoeSpec, QkNorm, Score

Expert = tuple[Tensor, Tensor, Tensor]


def to_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A float32 array, or bfloat16 bits as uint16, as a tensor of `dtype`."""
    if array.dtype == np.uint16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(np.array(array)).to(dtype)


class ReferenceDecoder:
    """The readable definition of a model.

    Args:
        spec: The model.
        weights: By role, as for `eaas.engine.decoder.Decoder`.
        expert: (MoE layer, expert) -> its gate, up [intermediate, hidden] and down [hidden, intermediate].
        dtype: float32, or float64 to judge others by.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, np.ndarray],
        expert: Callable[[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self._weights = {role: to_tensor(array, dtype) for role, array in weights.items()}
        self._expert_arrays = expert
        self._experts: dict[tuple[int, int], Expert] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every position of one sequence, [len(tokens), vocab]."""
        spec, weights = self.spec, self._weights
        x = weights["embed"][torch.tensor(tokens)]
        moe_layer = 0
        for layer in range(spec.layers):
            x = x + self._attention(layer, self._norm(x, f"{layer}.input_norm"))
            h = self._norm(x, f"{layer}.post_norm")
            if layer in spec.moe.dense_layers:
                x = x + self._mlp(h, f"{layer}.dense")
                continue
            x = x + self._moe(layer, moe_layer, h)
            moe_layer += 1
        head = weights["embed" if spec.tie_embeddings else "head"]
        return (self._norm(x, "final_norm") @ head.T).numpy()

    def _norm(self, x: Tensor, role: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.eps) * self._weights[role]

    def _attention(self, layer: int, h: Tensor) -> Tensor:
        spec, n = self.spec, len(h)
        q, k, v = (self._project(h, f"{layer}.{role}") for role in "qkv")
        if spec.qk_norm is QkNorm.FULL:
            q, k = self._norm(q, f"{layer}.q_norm"), self._norm(k, f"{layer}.k_norm")
        q, k, v = (part.view(n, -1, spec.head_dim).transpose(0, 1) for part in (q, k, v))
        if spec.qk_norm is QkNorm.HEAD:
            q, k = self._norm(q, f"{layer}.q_norm"), self._norm(k, f"{layer}.k_norm")
        if spec.clip_qkv:
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        q, k = self._rotate(q), self._rotate(k)
        queries = spec.q_heads // spec.kv_heads
        scores = q @ k.repeat_interleave(queries, 0).transpose(1, 2) * spec.head_dim**-0.5
        distance = torch.arange(n)[:, None] - torch.arange(n)
        seen = distance >= 0
        if spec.sliding_window[layer]:
            seen &= distance < spec.sliding_window[layer]
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(queries, 0)
        return self._project(out.transpose(0, 1).reshape(n, -1), f"{layer}.o")

    def _project(self, x: Tensor, role: str) -> Tensor:
        bias = self._weights.get(f"{role}_bias")
        out = x @ self._weights[role].T
        return out if bias is None else out + bias

    def _rotate(self, x: Tensor) -> Tensor:
        cosines, sines = (
            torch.from_numpy(table).to(self.dtype) for table in rope_tables(self.spec, x.shape[1])
        )
        low, high = x.chunk(2, -1)
        return torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)

    def _mlp(self, h: Tensor, role: str) -> Tensor:
        gate, up, down = (self._weights[f"{role}_{part}_proj"] for part in ("gate", "up", "down"))
        return (silu(h @ gate.T) * (h @ up.T)) @ down.T

    def _moe(self, layer: int, moe_layer: int, h: Tensor) -> Tensor:
        moe = self.spec.moe
        ids, scales = choose_experts(
            moe, h @ self._weights[f"{layer}.gate"].T, self._weights.get(f"{layer}.gate_bias")
        )
        out = torch.zeros_like(h)
        for expert in sorted(set(ids.flatten().tolist())):
            rows, slots = torch.where(ids == expert)
            gate, up, down = self._expert(moe_layer, expert)
            part = (silu(h[rows] @ gate.T) * (h[rows] @ up.T)) @ down.T
            out.index_add_(0, rows, part * scales[rows, slots, None])
        if not moe.shared_intermediate:
            return out
        shared = self._mlp(h, f"{layer}.shared")
        if moe.shared_gate:
            shared = torch.sigmoid(h @ self._weights[f"{layer}.shared_gate"].reshape(-1, 1)) * shared
        return out + shared

    def _expert(self, moe_layer: int, expert: int) -> Expert:
        key = (moe_layer, expert)
        if key not in self._experts:
            gate, up, down = (
                to_tensor(array, self.dtype) for array in self._expert_arrays(moe_layer, expert)
            )
            self._experts[key] = (gate, up, down)
        return self._experts[key]


def choose_experts(moe: MoeSpec, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gate: top-k of each row of logits [n, experts].

    Returns:
        Expert ids and weights, [n, top_k], in falling order of score, ties to the lowest id. The correction
        and the group limit steer the choice; the weights come from the scores alone.
    """
    sigmoid = moe.score is Score.SIGMOID
    scores = torch.sigmoid(logits) if sigmoid else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if moe.groups > 1:
        by_group = choice.unflatten(-1, (moe.groups, -1))
        # As the models were trained: sigmoid scores rank a group by its two best, softmax scores by its best.
        best = by_group.topk(min(2 if sigmoid else 1, by_group.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _top(best, moe.groups_topk), True)
        choice = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = _top(choice, moe.top_k)
    weights = scores.gather(-1, ids)
    if moe.norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    return ids, weights * moe.scaling_factor


def _top(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
