"""The decoder without native code: the equations of `eaas.engine.reference`, a row at a time, in torch.

For machines without a compiler: correct, and slow. Every operation sees one row, so its shape depends on the
row's position alone, and a row's bits on its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eaas.engine.decoder import (
    BLOCK_TOKENS,
    DecoderError,
    ExpertsLost,
    StepLimits,
    StepPlan,
    plan_arrays,
    rope_tables,
)
from eaas.engine.reference import ModelMath
from eaas.model.spec import ModelSpec
from experts import client, int8
from experts.kernels import from_dtype, to_dtype
from experts.model import Dtype

_MLP_ROLES = {f"{mlp}_{part}_proj" for mlp in ("dense", "shared") for part in ("gate", "up", "down")}
_INT8_ROLES = {"q", "k", "v", "o"} | _MLP_ROLES


class Exchange(Protocol):
    """Who computes routed experts: `experts.client.ExpertClient`, or a stand-in."""

    def exchange(
        self,
        layer: int,
        rows: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
        *,
        deadline_s: float,
        drop: np.ndarray | None = None,
    ) -> np.ndarray:
        """Sums over the experts, float32 [rows, hidden]; `drop`: as in `StepPlan`. Raises client.ExpertsLost."""
        ...


def numerics_class(dtype: Dtype) -> str:
    """Name of this decoder's arithmetic; no native kernel has it."""
    names = {Dtype.FLOAT32: "f32", Dtype.BFLOAT16: "bf16", Dtype.INT8: f"int8-g{int8.GROUP}"}
    return f"cpu-{names[dtype]}-torch-1"


class _Int8Math(ModelMath):
    """The equations with the dense layers' products in int8, bit for bit those of the native kernels."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, np.ndarray]) -> None:
        head = "embed" if spec.tie_embeddings else "head"
        roles = [role for role in weights if role == head or role.split(".")[-1] in _INT8_ROLES]
        self._quantised = {role: int8.quantise(from_dtype(np.asarray(weights[role]))) for role in roles}
        kept = {role: array for role, array in weights.items() if role == "embed" or role not in roles}
        super().__init__(spec, kept, torch.float32)

    def product(self, x: Tensor, role: str) -> Tensor:
        rows = from_dtype(to_dtype(x.numpy(), Dtype.INT8))
        return torch.from_numpy(int8.product(int8.quantise(rows), self._quantised[role]))


class FallbackDecoder:
    """What `eaas.engine.decoder.Decoder` is, in torch: weights held in float32 or int8, keys and values in the dtype.

    From its making to `close`, torch computes with one thread in this process: how a sum is split over
    threads must not show in its bits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, np.ndarray],
        experts: Exchange,
        kv_blocks: int,
        *,
        block_tokens: int = BLOCK_TOKENS,
        max_rows: int = 512,
    ) -> None:
        """Arguments as for `Decoder`; every array of `weights` may be released afterwards."""
        self.spec = spec
        self.dtype = spec.dtype
        self._limits = StepLimits(
            vocab=spec.vocab,
            max_rows=max_rows,
            max_positions=min(spec.max_model_len, kv_blocks * block_tokens),
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
        )
        self._experts = experts
        int8_mode = self.dtype is Dtype.INT8
        self._math = _Int8Math(spec, weights) if int8_mode else ModelMath(spec, weights, torch.float32)
        self._cosines, self._sines = map(torch.from_numpy, rope_tables(spec, self._limits.max_positions))
        # Pages are the host's until a position is written: an empty cache costs nothing.
        size = (spec.layers, kv_blocks * block_tokens, spec.kv_heads, spec.head_dim)
        element = torch.float32 if self.dtype is Dtype.FLOAT32 else torch.bfloat16
        self._keys, self._values = torch.empty(size, dtype=element), torch.empty(size, dtype=element)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._closed = False

    @property
    def numerics_class(self) -> str:
        """Equal strings promise equal bits, on equal machines."""
        return numerics_class(self.dtype)

    def close(self) -> None:
        """Give torch its threads back. Idempotent; no step may follow."""
        if not self._closed:
            self._closed = True
            torch.set_num_threads(self._threads)

    @torch.inference_mode()
    def step(self, plan: StepPlan, deadline_s: float) -> np.ndarray:
        """Run the rows through the model and store their keys and values.

        Args:
            plan: What to run.
            deadline_s: Longest wait for one expert call.

        Returns:
            float32 [len(plan.logits_rows), vocab].

        Raises:
            ExpertsLost: an expert had no live replica until the deadline.
            PlanInvalid: the plan is outside the limits; nothing was run.
        """
        if self._closed:
            raise DecoderError("The decoder is closed; make another one.")
        arrays = plan_arrays(plan)
        fault = self._limits.fault(arrays)
        if fault:
            raise self._limits.refusal(*fault, arrays)
        tables = torch.from_numpy(arrays[3]).long()
        tokens, positions, sequences, _, wanted = (array.tolist() for array in arrays)
        places = torch.arange(self._limits.block_tokens)
        # Where the keys of each sequence are, by position.
        slots = {
            sequence: (tables[sequence, :, None] * self._limits.block_tokens + places).flatten()
            for sequence in set(sequences)
        }

        def attend(layer: int, row: int, h: Tensor) -> Tensor:
            last, window = positions[row], self.spec.sliding_window[layer]
            here = slice(last, last + 1)
            q, k, v = self._math.qkv(layer, h, self._cosines[here], self._sines[here])
            keys, values, mine = self._keys[layer], self._values[layer], slots[sequences[row]]
            keys[mine[last]], values[mine[last]] = k[:, 0], v[:, 0]
            seen = mine[max(0, last + 1 - window) if window else 0 : last + 1]
            return self._math.mix(
                layer, q, *(cache[seen].float().transpose(0, 1) for cache in (keys, values))
            )

        def route(layer: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            rows, chosen = to_dtype(h.numpy(), self.dtype), ids.numpy().astype(np.uint16)
            try:
                out = self._experts.exchange(
                    layer, rows, chosen, weights.numpy(), deadline_s=deadline_s, drop=plan.drop
                )
            except client.ExpertsLost as lost:
                raise ExpertsLost(str(lost)) from lost
            return torch.from_numpy(out)

        rows = self._math.run([[token] for token in tokens], attend, route)
        logits = np.empty((len(wanted), self.spec.vocab), dtype=np.float32)
        for number, row in enumerate(wanted):
            logits[number] = self._math.head(rows[row])[0]
        return logits
