"""The model, defined: a plain torch decoder, all experts local, no cache. Slow, short, the oracle of tests.

For tokens [n]: embedding; per layer RMS norm, attention (QK norm, clip, rope, causal or sliding, grouped
heads), residual, RMS norm, dense MLP or gated experts with shared ones, residual; final norm; head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from eaas.model.spec import ModelSpec, MoeSpec, QkNorm, Score
from eaas.worker.decoder import rope_tables
from experts.kernels import Weights
from experts.model import SWIGLU, Activation
from experts.quantized import Quantized

Expert = tuple[Tensor, ...]
Attend = Callable[[int, int, Tensor], Tensor]
Route = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def to_tensor(array: Weights, dtype: torch.dtype) -> Tensor:
    """A float32 array, bfloat16 bits as uint16, or what is quantized, as a tensor of `dtype` that torch has aligned."""
    if isinstance(array, Quantized):
        array = array.dequantized()
    if array.dtype == np.uint16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(np.array(array)).to(dtype, copy=True)


class ModelMath:
    """The equations of a model; who attends to which keys, and who computes routed experts, is the caller's.

    Rows come in blocks, [rows, hidden] each; what is in one block is computed together.

    Args:
        spec: The model.
        weights: By role, as for `eaas.worker.decoder.Decoder`.
        dtype: float32, or float64 to judge others by.
        rounded: What dense products and attention take is rounded to bfloat16, as GPUs take it.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, np.ndarray], dtype: torch.dtype, rounded: bool = False
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self._taken = (lambda x: x.bfloat16().to(dtype)) if rounded else (lambda x: x)
        self._weights = {role: to_tensor(array, dtype) for role, array in weights.items()}

    def run(self, blocks: Sequence[Sequence[int]], attend: Attend, route: Route) -> list[Tensor]:
        """Rows of token ids through all layers and the final norm, in the same blocks.

        Args:
            blocks: Token ids.
            attend: (layer, block's number, its normed rows) -> what attention adds to them.
            route: (MoE layer, normed rows of all blocks, expert ids, their weights) -> sums over the experts.
        """
        moe, moe_layer = self.spec.moe, 0
        xs = [self._weights["embed"][torch.tensor(tokens)] for tokens in blocks]
        for layer in range(self.spec.layers):
            xs = [x + attend(layer, n, self._norm(x, f"{layer}.input_norm")) for n, x in enumerate(xs)]
            hs = [self._norm(x, f"{layer}.post_norm") for x in xs]
            if layer in moe.dense_layers:
                outs = [self._mlp(h, f"{layer}.dense") for h in hs]
            else:
                ids, scales = zip(*(self._gate(layer, h) for h in hs), strict=True)
                routed = route(moe_layer, torch.cat(hs), torch.cat(ids), torch.cat(scales))
                parts = zip(hs, routed.split([len(h) for h in hs]), strict=True)
                outs = [self._with_shared(layer, h, part) for h, part in parts]
                moe_layer += 1
            xs = [x + out for x, out in zip(xs, outs, strict=True)]
        return [self._norm(x, "final_norm") for x in xs]

    def head(self, x: Tensor) -> Tensor:
        """Logits [rows, vocab] of rows after the final norm."""
        return self.product(x, "embed" if self.spec.tie_embeddings else "head")

    def product(self, x: Tensor, role: str) -> Tensor:
        """Rows times the transpose of one of the dense layers' matrices."""
        return self._taken(x) @ self._weights[role].T

    def qkv(self, layer: int, h: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [q_heads, n, dim], keys [heads, n, dim] and values [heads, n, value dim] of normed rows.

        Args:
            cosines, sines: [n, pairs], of the rows' positions.
        """
        spec, n = self.spec, len(h)
        if spec.latent:
            return self._expanded(layer, h, cosines, sines)
        q, k, v = (self._project(h, f"{layer}.{role}") for role in "qkv")
        if spec.qk_norm is QkNorm.FULL:
            q, k = self._norm(q, f"{layer}.q_norm"), self._norm(k, f"{layer}.k_norm")
        q, k, v = (part.view(n, -1, spec.head_dim).transpose(0, 1) for part in (q, k, v))
        if spec.qk_norm is QkNorm.HEAD:
            q, k = self._norm(q, f"{layer}.q_norm"), self._norm(k, f"{layer}.k_norm")
        if spec.clip_qkv:
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        return _rotate(q, cosines, sines), _rotate(k, cosines, sines), v

    def _expanded(self, layer: int, h: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of latent attention: each head's whole key and value, as the latent gives them."""
        latent = self.spec.latent
        assert latent
        heads, n = self.spec.q_heads, len(h)
        low = self._norm(self.product(h, f"{layer}.q_a"), f"{layer}.q_a_norm", 1e-6) if latent.q_rank else h
        c, shared = self.product(h, f"{layer}.kv_a").split((latent.kv_rank, latent.rope_dim), -1)
        up = self.product(self._norm(c, f"{layer}.kv_a_norm", 1e-6), f"{layer}.kv_b")
        k, v = up.view(n, heads, -1).transpose(0, 1).split((latent.nope_dim, latent.value_dim), -1)
        q = self.product(low, f"{layer}.q").view(n, heads, -1).transpose(0, 1)
        q, turned = q.split((latent.nope_dim, latent.rope_dim), -1)
        if latent.interleaved:
            turned, shared = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (turned, shared))
        shared = _rotate(shared, cosines, sines).expand(heads, -1, -1)
        return torch.cat((q, _rotate(turned, cosines, sines)), -1), torch.cat((k, shared), -1), v

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Attention of n queries over m keys and its output projection, [n, hidden].

        Args:
            seen: [n, m]: which query sees which key; all see all where None.
        """
        q, k, v = (self._taken(part) for part in (q, k, v))
        queries = len(q) // len(k)
        scores = q @ k.repeat_interleave(queries, 0).transpose(1, 2) * self.spec.query_scale
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        if self.spec.sinks:
            sinks = self._weights[f"{layer}.sinks"].view(-1, 1, 1).expand(-1, q.shape[1], 1)
            scores = torch.cat((scores, sinks), -1)
        out = scores.softmax(-1)[..., : k.shape[1]] @ v.repeat_interleave(queries, 0)
        return self._project(out.transpose(0, 1).reshape(q.shape[1], -1), f"{layer}.o")

    def _norm(self, x: Tensor, role: str, eps: float | None = None) -> Tensor:
        eps = self.spec.eps if eps is None else eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self._weights[role]

    def _project(self, x: Tensor, role: str) -> Tensor:
        bias = self._weights.get(f"{role}_bias")
        out = self.product(x, role)
        return out if bias is None else out + bias

    def _mlp(self, h: Tensor, role: str) -> Tensor:
        gate, up = (self.product(h, f"{role}_{part}_proj") for part in ("gate", "up"))
        return self.product(silu(gate) * up, f"{role}_down_proj")

    def _gate(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._project(h, f"{layer}.gate")
        return choose_experts(self.spec.moe, logits, self._weights.get(f"{layer}.gate_correction"))

    def _with_shared(self, layer: int, h: Tensor, routed: Tensor) -> Tensor:
        if not self.spec.moe.shared_intermediate:
            return routed
        shared = self._mlp(h, f"{layer}.shared")
        if self.spec.moe.shared_gate:
            shared = torch.sigmoid(h @ self._weights[f"{layer}.shared_gate"].reshape(-1, 1)) * shared
        return routed + shared


class ReferenceDecoder:
    """The readable definition of a model.

    Args:
        spec: The model.
        weights: By role, as for `eaas.worker.decoder.Decoder`.
        expert: (MoE layer, expert) -> its gate, up [intermediate, hidden] and down [hidden, intermediate]; and perhaps
            a bias of each.
        dtype: float32, or float64 to judge others by.
        activation: Of its experts.
        rounded: As for `ModelMath`; experts are left as they are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, np.ndarray],
        expert: Callable[[int, int], tuple[Weights, ...]],
        dtype: torch.dtype = torch.float32,
        activation: Activation = SWIGLU,
        rounded: bool = False,
    ) -> None:
        self.spec = spec
        self._activation = activation
        self._math = ModelMath(spec, weights, dtype, rounded)
        self._expert_arrays = expert
        self._experts: dict[tuple[int, int], Expert] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every position of one sequence, [len(tokens), vocab]."""
        spec, math, n = self.spec, self._math, len(tokens)
        cosines, sines = (torch.from_numpy(table).to(math.dtype) for table in rope_tables(spec, n))
        distance = torch.arange(n)[:, None] - torch.arange(n)

        def attend(layer: int, _: int, h: Tensor) -> Tensor:
            seen = distance >= 0
            if spec.sliding_window[layer]:
                seen &= distance < spec.sliding_window[layer]
            return math.mix(layer, *math.qkv(layer, h, cosines, sines), seen)

        return math.head(math.run([tokens], attend, self._route)[0]).numpy()

    def _route(self, moe_layer: int, h: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for expert in sorted(set(ids.flatten().tolist())):
            rows, slots = torch.where(ids == expert)
            part = ffn(h[rows], *self._expert(moe_layer, expert), activation=self._activation)
            out.index_add_(0, rows, part * scales[rows, slots, None])
        return out

    def _expert(self, moe_layer: int, expert: int) -> Expert:
        key = (moe_layer, expert)
        if key not in self._experts:
            arrays = self._expert_arrays(moe_layer, expert)
            self._experts[key] = tuple(to_tensor(array, self._math.dtype) for array in arrays)
        return self._experts[key]


def ffn(h: Tensor, gate: Tensor, up: Tensor, down: Tensor, *biases: Tensor, activation: Activation = SWIGLU) -> Tensor:
    """Rows through one MLP or expert; biases of gate, up and down, or none."""
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    gated = linear(h, gate, gate_bias).clamp(max=activation.limit)
    upped = linear(h, up, up_bias).clamp(-activation.limit, activation.limit) + activation.shift
    return linear(gated * torch.sigmoid(activation.alpha * gated) * upped, down, down_bias)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    pairs = cosines.shape[-1]
    low, high, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), -1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines, rest), -1)


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


def gate_reference(norm: Tensor, weight: Tensor, correction: Tensor | None, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """Ids and weights [rows, top_k] of a norm [rows, hidden] that was not rounded; in its type."""
    return choose_experts(moe, norm @ weight.to(norm.dtype).T, correction)


def _top(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
