"""Weights of many experts in device memory: slots that are loaded one by one, while graphs that read them exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from experts.gpu.tiles import BLOCK, K_TILE, blocks_of, k_tiles_of, pack_blocks, unpack_blocks
from experts.model import Dtype
from experts.quantized import Codes, Quantized

FP8_TILE = 128  # columns that share a scale

Matrix = np.ndarray | torch.Tensor


def as_tensor(matrix: Matrix) -> torch.Tensor:
    """A numpy or torch matrix as a tensor; uint16 of numpy are the bits of bfloat16."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    if matrix.dtype == np.uint16:
        return torch.from_numpy(np.ascontiguousarray(matrix).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(matrix))


def check_expert(
    slot: int, slots: int, hidden: int, intermediate: int, gate: Matrix | Quantized, up: Matrix | Quantized,
    down: Matrix | Quantized,
) -> None:  # fmt: skip
    """Whether an expert fits its slot.

    Raises:
        ValueError: it does not.
    """
    if not 0 <= slot < slots:
        raise ValueError(f"Slot {slot} of {slots}; 0 to {slots - 1} exist.")
    wide, high = (intermediate, hidden), (hidden, intermediate)
    found = [tuple(matrix.shape) for matrix in (gate, up, down)]
    if found != [wide, wide, high]:
        raise ValueError(f"gate, up, down have shapes {found}; {[wide, wide, high]} are needed.")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """bfloat16 experts.

    Attributes:
        gate_up: [slots, 2 * blocks of I, k tiles of H, BLOCK, K_TILE]: blocks of gate and up alternate.
        down: [slots, blocks of H, k tiles of I, BLOCK, K_TILE].
    """

    dtype: ClassVar[Dtype] = Dtype.BFLOAT16
    widest_group: ClassVar[int] = 128  # pairs that `grouped_ffn` takes together

    slots: int
    hidden: int
    intermediate: int
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def allocate(cls, *, slots: int, hidden: int, intermediate: int, device: torch.device | str) -> ExpertWeights:
        """Empty slots: a slot holds nothing sensible before it is loaded.

        Raises:
            ValueError: rows of `hidden` elements would not begin at multiples of 16 bytes.
        """
        if hidden % 8:
            raise ValueError(f"hidden is {hidden}; a multiple of 8 is needed, so that rows begin at 16 bytes.")
        tile = (BLOCK, K_TILE)
        wide = (slots, 2 * blocks_of(intermediate), k_tiles_of(hidden), *tile)
        high = (slots, blocks_of(hidden), k_tiles_of(intermediate), *tile)
        return cls(
            slots=slots,
            hidden=hidden,
            intermediate=intermediate,
            gate_up=torch.empty(wide, dtype=torch.bfloat16, device=device),
            down=torch.empty(high, dtype=torch.bfloat16, device=device),
        )

    @property
    def act_width(self) -> int:
        """Columns of the activation: the intermediate size up to whole tiles; those beyond it are zero."""
        return blocks_of(self.intermediate) * BLOCK

    @property
    def expert_bytes(self) -> int:
        """Bytes of one slot."""
        return 2 * (self.gate_up[0].numel() + self.down[0].numel())

    def load(self, slot: int, gate: Matrix, up: Matrix, down: Matrix) -> None:
        """Write one expert into a slot: gate and up [I, H], down [H, I]; float32 is rounded to nearest even.

        In stream order: what was launched before still reads what was there.

        Raises:
            ValueError: no such slot, or other shapes.
        """
        check_expert(slot, self.slots, self.hidden, self.intermediate, gate, up, down)
        on = self.gate_up.device
        gates, ups, downs = (pack_blocks(as_tensor(matrix).to(on).to(torch.bfloat16)) for matrix in (gate, up, down))
        self.gate_up[slot, 0::2].copy_(gates)
        self.gate_up[slot, 1::2].copy_(ups)
        self.down[slot].copy_(downs)

    def unload(self, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of gate and up [I, H] and down [H, I] that a slot holds."""
        wide = (self.intermediate, self.hidden)
        gate, up = (unpack_blocks(self.gate_up[slot, i::2], *wide) for i in (0, 1))
        return gate.clone(), up.clone(), unpack_blocks(self.down[slot], *reversed(wide)).clone()


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8ExpertWeights:
    """float8_e4m3fn experts, a float32 scale for each row and 128 columns of a matrix: W = q * scale.

    Attributes:
        gate_up: [slots, 2 * blocks of I, k tiles of H, BLOCK, FP8_TILE]: blocks of gate and up alternate.
        down: [slots, blocks of H, k tiles of I, BLOCK, FP8_TILE].
        gate_up_scales: float32 [slots, gate or up, tiles of I, k tiles of H, FP8_TILE]: those of 128 rows together.
        down_scales: float32 [slots, tiles of H, k tiles of I, FP8_TILE].
    """

    dtype: ClassVar[Dtype] = Dtype.FP8
    widest_group: ClassVar[int] = 64  # pairs that `grouped_ffn` takes together

    slots: int
    hidden: int
    intermediate: int
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor
    down_scales: torch.Tensor

    @classmethod
    def allocate(cls, *, slots: int, hidden: int, intermediate: int, device: torch.device | str) -> Fp8ExpertWeights:
        """As `ExpertWeights.allocate`."""
        if hidden % 16:
            raise ValueError(f"hidden is {hidden}; a multiple of 16 is needed, so that rows begin at 16 bytes.")
        across, inner = k_tiles_of(hidden, FP8_TILE), k_tiles_of(intermediate, FP8_TILE)
        wide = (slots, 4 * inner, across, BLOCK, FP8_TILE)
        high = (slots, blocks_of(hidden), inner, BLOCK, FP8_TILE)
        return cls(
            slots=slots,
            hidden=hidden,
            intermediate=intermediate,
            gate_up=torch.empty(wide, dtype=torch.float8_e4m3fn, device=device),
            down=torch.empty(high, dtype=torch.float8_e4m3fn, device=device),
            gate_up_scales=torch.empty(slots, 2, inner, across, FP8_TILE, device=device),
            down_scales=torch.empty(slots, across, inner, FP8_TILE, device=device),
        )

    @property
    def act_width(self) -> int:
        """Columns of the activation: the intermediate size up to whole tiles; those beyond it are zero."""
        return k_tiles_of(self.intermediate, FP8_TILE) * FP8_TILE

    @property
    def expert_bytes(self) -> int:
        """Bytes of one slot, scales included."""
        scales = self.gate_up_scales[0].numel() + self.down_scales[0].numel()
        return self.gate_up[0].numel() + self.down[0].numel() + 4 * scales

    def load(self, slot: int, gate: Quantized, up: Quantized, down: Quantized) -> None:
        """Write one expert into a slot: gate and up [I, H], down [H, I], as a checkpoint holds them. In stream order.

        Raises:
            ValueError: no such slot, or other shapes, codes or groups.
        """
        check_expert(slot, self.slots, self.hidden, self.intermediate, gate, up, down)
        for matrix in (gate, up, down):
            if (matrix.kind, matrix.group, matrix.offsets) != (Codes.E4M3, FP8_TILE, None):
                raise ValueError(
                    f"A matrix has codes {matrix.kind.value} in groups of {matrix.group}"
                    f"{'' if matrix.offsets is None else ' with offsets'}; e4m3 in groups of {FP8_TILE} is needed."
                )
        for i, matrix in enumerate((gate, up)):
            self._write(matrix, self.gate_up[slot, i::2], self.gate_up_scales[slot, i])
        self._write(down, self.down[slot], self.down_scales[slot])

    def unload(self, slot: int) -> tuple[Quantized, Quantized, Quantized]:
        """Copies of gate and up [I, H] and down [H, I] that a slot holds."""
        wide = (self.intermediate, self.hidden)
        gate, up = (_read(self.gate_up[slot, i::2], self.gate_up_scales[slot, i], *wide) for i in (0, 1))
        return gate, up, _read(self.down[slot], self.down_scales[slot], *reversed(wide))

    @staticmethod
    def _write(matrix: Quantized, codes: torch.Tensor, scales: torch.Tensor) -> None:
        packed = pack_blocks(as_tensor(matrix.codes).to(codes.device), FP8_TILE)
        # An odd number of blocks leaves one that is read: its bytes are zero. So are scales of rows that are not there.
        place = codes.view(torch.uint8)
        place[len(packed) :].zero_()
        place[: len(packed)].copy_(packed)
        tiles, across, _ = scales.shape
        padded = torch.zeros(tiles * FP8_TILE, across)
        padded[: len(matrix.scales)] = as_tensor(matrix.scales)
        scales.copy_(padded.view(tiles, FP8_TILE, across).transpose(1, 2))


def _read(codes: torch.Tensor, scales: torch.Tensor, rows: int, k: int) -> Quantized:
    by_row = scales.transpose(1, 2).reshape(-1, scales.shape[1])[:rows]
    return Quantized(
        kind=Codes.E4M3,
        codes=unpack_blocks(codes.view(torch.uint8), rows, k).contiguous().cpu().numpy(),
        scales=by_row.contiguous().cpu().numpy(),
        group=FP8_TILE,
    )
