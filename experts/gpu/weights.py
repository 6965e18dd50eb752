"""Weights of many experts in device memory: slots that are loaded one by one, while graphs that read them exist."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from experts.gpu.tiles import BLOCK, K_TILE, blocks_of, k_tiles_of, pack_blocks, unpack_blocks

FP8_TILE = 128  # columns that share a scale; so do 128 rows of weights
FP8_LARGEST = 448.0  # of float8_e4m3fn
FP8_LEAST = (
    2.0**-100
)  # the largest magnitude of a group counts as at least this: a group of zeros has a scale

Matrix = np.ndarray | torch.Tensor


def as_tensor(matrix: Matrix) -> torch.Tensor:
    """A numpy or torch matrix as a tensor; uint16 of numpy are the bits of bfloat16."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    if matrix.dtype == np.uint16:
        return torch.from_numpy(np.ascontiguousarray(matrix).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(matrix))


def check_expert(
    slot: int, slots: int, hidden: int, intermediate: int, gate: Matrix, up: Matrix, down: Matrix
) -> None:
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

    slots: int
    hidden: int
    intermediate: int
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def allocate(
        cls, *, slots: int, hidden: int, intermediate: int, device: torch.device | str
    ) -> ExpertWeights:
        """Empty slots: a slot holds nothing sensible before it is loaded.

        Raises:
            ValueError: rows of `hidden` elements would not begin at multiples of 16 bytes.
        """
        if hidden % 8:
            raise ValueError(
                f"hidden is {hidden}; a multiple of 8 is needed, so that rows begin at 16 bytes."
            )
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
    def widest_group(self) -> int:
        """Most pairs that `grouped_ffn` takes in one group."""
        return 128

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
        gates, ups, downs = (
            pack_blocks(as_tensor(matrix).to(on).to(torch.bfloat16)) for matrix in (gate, up, down)
        )
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
    """float8_e4m3fn experts, one float32 scale for each 128 x 128 of a matrix: W = q * scale.

    Attributes:
        gate_up: [slots, 2 * blocks of I, k tiles of H, BLOCK, FP8_TILE]: blocks of gate and up alternate.
        down: [slots, blocks of H, k tiles of I, BLOCK, FP8_TILE].
        gate_up_scales: float32 [slots, gate or up, k tiles of I, k tiles of H].
        down_scales: float32 [slots, k tiles of H, k tiles of I].
    """

    slots: int
    hidden: int
    intermediate: int
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor
    down_scales: torch.Tensor

    @classmethod
    def allocate(
        cls, *, slots: int, hidden: int, intermediate: int, device: torch.device | str
    ) -> Fp8ExpertWeights:
        """Empty slots: a slot holds nothing sensible before it is loaded.

        Raises:
            ValueError: rows of `hidden` elements would not begin at multiples of 16 bytes.
        """
        if hidden % 16:
            raise ValueError(
                f"hidden is {hidden}; a multiple of 16 is needed, so that rows begin at 16 bytes."
            )
        across, inner = k_tiles_of(hidden, FP8_TILE), k_tiles_of(intermediate, FP8_TILE)
        wide = (slots, 4 * inner, across, BLOCK, FP8_TILE)
        high = (slots, blocks_of(hidden), inner, BLOCK, FP8_TILE)
        return cls(
            slots=slots,
            hidden=hidden,
            intermediate=intermediate,
            gate_up=torch.empty(wide, dtype=torch.float8_e4m3fn, device=device),
            down=torch.empty(high, dtype=torch.float8_e4m3fn, device=device),
            gate_up_scales=torch.empty(slots, 2, inner, across, device=device),
            down_scales=torch.empty(slots, across, inner, device=device),
        )

    @property
    def act_width(self) -> int:
        """Columns of the activation: the intermediate size up to whole tiles; those beyond it are zero."""
        return k_tiles_of(self.intermediate, FP8_TILE) * FP8_TILE

    @property
    def widest_group(self) -> int:
        """Most pairs that `grouped_ffn_fp8` takes in one group."""
        return 64

    @property
    def expert_bytes(self) -> int:
        """Bytes of one slot, scales included."""
        scales = self.gate_up_scales[0].numel() + self.down_scales[0].numel()
        return self.gate_up[0].numel() + self.down[0].numel() + 4 * scales

    def load(self, slot: int, gate: Matrix, up: Matrix, down: Matrix) -> None:
        """Quantise one expert into a slot: gate and up [I, H], down [H, I]. In stream order.

        Raises:
            ValueError: no such slot, or other shapes.
        """
        check_expert(slot, self.slots, self.hidden, self.intermediate, gate, up, down)
        on = self.gate_up.device
        pairs = [quantise_blocks(as_tensor(matrix).to(on)) for matrix in (gate, up, down)]
        self.load_quantised(slot, [q for q, _ in pairs], [scale for _, scale in pairs])

    def load_quantised(self, slot: int, matrices: list[torch.Tensor], scales: list[torch.Tensor]) -> None:
        """Write one expert as a checkpoint holds it: gate, up, down in float8_e4m3fn, and their scales.

        Raises:
            ValueError: no such slot, or other shapes or types.
        """
        gate, up, down = matrices
        check_expert(slot, self.slots, self.hidden, self.intermediate, gate, up, down)
        for matrix, scale in zip(matrices, scales, strict=True):
            needed = tuple(k_tiles_of(size, FP8_TILE) for size in matrix.shape)
            if matrix.dtype != torch.float8_e4m3fn or tuple(scale.shape) != needed:
                raise ValueError(
                    f"A matrix is {matrix.dtype} {tuple(matrix.shape)} with scales {tuple(scale.shape)}; "
                    f"float8_e4m3fn with scales {needed}, one for each 128 x 128, is needed."
                )
        for i, matrix in enumerate((gate, up)):
            packed = pack_blocks(matrix.to(self.gate_up.device).view(torch.uint8), FP8_TILE)
            # An odd number of blocks leaves one that is read: its bytes are zero.
            place = self.gate_up[slot, i::2].view(torch.uint8)
            place[len(packed) :].zero_()
            place[: len(packed)].copy_(packed)
            self.gate_up_scales[slot, i].copy_(scales[i])
        self.down[slot].view(torch.uint8).copy_(
            pack_blocks(down.to(self.down.device).view(torch.uint8), FP8_TILE)
        )
        self.down_scales[slot].copy_(scales[2])

    def unload(self, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a slot holds, in double: gate and up [I, H] and down [H, I]."""
        wide = (self.intermediate, self.hidden)
        gate, up = (
            _dequantise(self.gate_up[slot, i::2], self.gate_up_scales[slot, i], *wide) for i in (0, 1)
        )
        return gate, up, _dequantise(self.down[slot], self.down_scales[slot], *reversed(wide))


def quantise_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W [rows, k] to float8_e4m3fn [rows, k] and scales [rows / 128, k / 128] (rounded up): W ~ q * scale."""
    rows, k = matrix.shape
    across, inner = k_tiles_of(rows, FP8_TILE), k_tiles_of(k, FP8_TILE)
    padded = torch.zeros(across * FP8_TILE, inner * FP8_TILE, device=matrix.device)
    padded[:rows, :k] = matrix
    tiles = padded.view(across, FP8_TILE, inner, FP8_TILE)
    largest = tiles.abs().amax(dim=(1, 3)).clamp_min(FP8_LEAST)
    q = (tiles * (torch.full_like(largest, FP8_LARGEST) / largest)[:, None, :, None]).to(torch.float8_e4m3fn)
    return q.view(padded.shape)[:rows, :k].contiguous(), largest / FP8_LARGEST


def _dequantise(packed: torch.Tensor, scales: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    q = unpack_blocks(packed.view(torch.uint8), rows, k).contiguous().view(torch.float8_e4m3fn).double()
    spread = scales.double().repeat_interleave(FP8_TILE, 0).repeat_interleave(FP8_TILE, 1)
    return q * spread[:rows, :k]
