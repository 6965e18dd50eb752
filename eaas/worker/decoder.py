"""The decoder: one native step from token ids to logits, over the rows of many sequences.

All of a step runs in native code (eaas/native/decoder_step.cpp), SPMD over lanes, with the GIL released. This
module packs the weights, describes the model, and checks what it passes on.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from eaas import native
from eaas.model.families import tensors_of
from eaas.model.spec import Latent, ModelSpec, Score
from eaas.worker.plan import StepPlan, StepTaps
from eaas.worker.sample import DeviceSamples
from eaas.worker.taps import KINDS, OF_EXPERTS
from experts import native as experts_native
from experts.model import Dtype

BLOCK_TOKENS = 16  # positions of one cache block, unless asked otherwise


class DecoderError(RuntimeError):
    """The decoder cannot do what was asked; the text says why and what to change."""


class ExpertsLost(DecoderError):
    """No replica of an expert answered before the deadline. The step may be run again: nothing is broken.

    Attributes:
        rows: Those rows of the plan whose experts did not answer; None where that is not known.
    """

    def __init__(self, text: str = "", rows: np.ndarray | None = None) -> None:
        super().__init__(text)
        self.rows = rows


class PlanInvalid(DecoderError):
    """A step's plan names something outside the limits of this decoder."""


class WeightsInvalid(DecoderError):
    """A weight is missing or has another size than the spec says."""


@dataclass(frozen=True, kw_only=True)
class ExpertBackend:
    """Who computes routed experts: a native function with the signature of `expert_call`, and its state.

    Attributes:
        call: Address of the function.
        state: Address of its first argument; it must outlive the decoder.
        missing: What says which tokens of the call made last had no answer: indexes, and how many tokens it had.
            Takes the most there may be.
    """

    call: int
    state: int
    missing: Callable[[int], tuple[np.ndarray, int]] | None = None


def client_backend(handle: int) -> ExpertBackend:
    """Expert servers, through the client of that handle (`experts.client.ExpertClient.handle`)."""
    library = experts_native.load()

    def missing(capacity: int) -> tuple[np.ndarray, int]:
        rows = np.zeros(capacity, np.uint8)
        count = library.expert_client_missing(handle, rows.ctypes.data, capacity)
        return np.flatnonzero(rows), count

    return ExpertBackend(call=native.address_of(library, "expert_call"), state=handle, missing=missing)


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What a decoder can run in one step."""

    CODES: ClassVar = (
        native.DECODER_E_ROWS, native.DECODER_E_TOKEN, native.DECODER_E_POSITION, native.DECODER_E_SEQUENCE,
        native.DECODER_E_BLOCK, native.DECODER_E_LOGITS_ROW,
    )  # fmt: skip

    vocab: int
    max_rows: int
    max_positions: int
    block_tokens: int
    kv_blocks: int

    @classmethod
    def of(cls, spec: ModelSpec, *, max_rows: int, block_tokens: int, kv_blocks: int) -> StepLimits:
        """Those of a decoder of a model, with a cache of so many blocks."""
        return cls(
            vocab=spec.vocab,
            max_rows=max_rows,
            max_positions=min(spec.max_model_len, kv_blocks * block_tokens),
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
        )

    def fault_of_rows(self, arrays: Sequence[np.ndarray]) -> tuple[int, int] | None:
        """The first thing in a plan that is outside the limits, but for the blocks that tables name: one of CODES, and
        the row; None where nothing is."""
        tokens, positions, sequences, tables, wanted = arrays
        if not 1 <= len(tokens) <= self.max_rows or len(wanted) > self.max_rows:
            return native.DECODER_E_ROWS, 0
        room = min(self.max_positions, tables.shape[1] * self.block_tokens)
        for code, array, end in (
            (native.DECODER_E_TOKEN, tokens, self.vocab),
            (native.DECODER_E_POSITION, positions, room),
            (native.DECODER_E_SEQUENCE, sequences, len(tables)),
            (native.DECODER_E_LOGITS_ROW, wanted, len(tokens)),
        ):
            outside = np.flatnonzero((array < 0) | (array >= end))
            if len(outside):
                return code, int(outside[0])
        return None

    def sound_blocks(self, tables: np.ndarray) -> np.ndarray:
        """How many blocks of each table, from the first, name a block that exists."""
        return np.logical_and.accumulate((tables >= 0) & (tables < self.kv_blocks), axis=1).sum(axis=1)

    def fault_of_blocks(self, arrays: Sequence[np.ndarray], sound: np.ndarray) -> tuple[int, int] | None:
        """The same of the blocks alone. Args: sound: of each table, as `sound_blocks` counts."""
        outside = np.flatnonzero(arrays[1] // self.block_tokens >= sound[arrays[2]])
        return (native.DECODER_E_BLOCK, int(outside[0])) if len(outside) else None

    def refusal(self, status: int, where: int, arrays: Sequence[np.ndarray]) -> PlanInvalid:
        """In words, why a plan is refused: one of CODES, the row, and what `plan_arrays` gave."""
        tokens, positions, sequences, tables, wanted = arrays
        match status:
            case native.DECODER_E_ROWS:
                text = f"{len(tokens)} rows, {len(wanted)} logits rows; 1 to {self.max_rows} are possible."
            case native.DECODER_E_TOKEN:
                text = f"Row {where}: token {tokens[where]} is outside the vocabulary of {self.vocab}."
            case native.DECODER_E_POSITION:
                room = min(self.max_positions, tables.shape[1] * self.block_tokens)
                text = f"Row {where}: position {positions[where]}; 0 to {room - 1} have a place."
            case native.DECODER_E_SEQUENCE:
                text = f"Row {where}: sequence {sequences[where]}; there are {len(tables)} block tables."
            case native.DECODER_E_BLOCK:
                text = f"Row {where}: its block table names a block outside 0 to {self.kv_blocks - 1}."
            case _:
                text = f"Logits row {wanted[where]} is asked for; there are {len(tokens)} rows."
        return PlanInvalid(text)


class Decoder:
    """A model's attention side, its weights packed, with a paged key-value cache.

    One thread at a time. A row's logits depend only on its sequence's tokens up to it, the weights and the
    numerics class: not on batch, chunking, paging or lanes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, np.ndarray],
        experts: int | ExpertBackend,
        cores: Sequence[int],
        kv_blocks: int,
        *,
        block_tokens: int = BLOCK_TOKENS,
        max_rows: int = 512,
        dtype: Dtype | None = None,
    ) -> None:
        """Pack the weights; all but "embed" may be released afterwards.

        Args:
            weights: By role (`eaas.model.families.tensors_of`); float32, or bfloat16 bits as uint16.
            experts: Handle of an expert client with as many lanes as `cores`, or another backend.
            cores: Core of each lane, -1: unpinned. Lane 0 is the thread that calls `step`.
            block_tokens: Positions per block, a multiple of 16.
            max_rows: Most rows of one step.
            dtype: Of matrix products, keys and values; the spec's where None.

        Raises:
            WeightsInvalid: a weight is missing or of the wrong size.
            DecoderError: sizes that cannot be served, too little memory, or cores that the host refuses.
            NativeMissing: the native library is not built.
        """
        self.spec = spec
        self.dtype = Dtype(spec.dtype if dtype is None else dtype)
        self.block_tokens = block_tokens
        self.max_rows = max_rows
        self._limits = StepLimits.of(spec, max_rows=max_rows, block_tokens=block_tokens, kv_blocks=kv_blocks)
        self.max_positions = self._limits.max_positions
        self._taps: StepTaps | None = None
        self._native_taps: Any = None
        self._library = native.load()
        self._logits = np.empty((0, spec.vocab), dtype=np.float32)
        places = kv_blocks * block_tokens
        each = spec.layers * spec.kv_heads * spec.cached_dims * self.dtype.nbytes
        each += 2 * len(spec.moe_layers) * spec.moe.top_k
        if places * each > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise DecoderError(
                f"A KV cache of {places:,} tokens takes {places * each / 2**30:,.1f} GiB of memory; this host has "
                f"{memory / 2**30:.1f} GiB. Lower --kv-tokens: {memory // each // 2:,} tokens take half of it."
            )
        # Costs memory where it was written alone.
        self._routed = np.zeros((places, len(spec.moe_layers), spec.moe.top_k), dtype=np.uint16)
        backend = experts if isinstance(experts, ExpertBackend) else client_backend(experts)
        self._missing = backend.missing
        self._handle = self._new(backend, cores)
        self._finalizer = weakref.finalize(self, self._library.decoder_free, self._handle)
        # Read in place, so that workers of one host share its pages.
        self._embed = weight_of(weights, "embed")
        for role, plan in tensors_of(spec).items():
            layer, _, name = role.rpartition(".")
            if spec.latent and name in ("q", "kv_a", "kv_b"):
                if (matrix := weight_of(weights, role)).shape != plan.shape:
                    raise WeightsInvalid(f"Weight {role} has shape {list(matrix.shape)}; {list(plan.shape)} is needed.")
                for part, cut in absorbed(spec.latent, name, matrix).items():
                    self._set({f"{layer}.{part}": cut}, part, int(layer))
            # One call takes the gate's and the up projection.
            elif not name.endswith("_up_proj"):
                self._set(weights, name.replace("_gate_proj", "_gate_up"), int(layer or 0))
        if spec.tie_embeddings:
            self._set(weights, "head", 0)

    def close(self) -> None:
        """Free the native memory and stop the lanes. Idempotent; no step may follow."""
        self._handle = 0
        self._finalizer()

    def step(self, plan: StepPlan, deadline_s: float) -> np.ndarray:
        """Run the rows through the model and store their keys and values.

        Args:
            deadline_s: Seconds from now until an expert call gives up.

        Returns:
            float32 [len(plan.logits_rows), vocab]; valid until the next step.

        Raises:
            ExpertsLost: an expert had no live replica until the deadline.
            PlanInvalid: the plan is outside the limits; nothing was run.
        """
        return self._run(plan, deadline_s)[: len(plan.logits_rows)]

    def step_tokens(self, plan: StepPlan, rows: np.ndarray, deadline_s: float) -> DeviceSamples:
        """As `step`, but choose the tokens of rows that want the highest logit and nothing else: their logits are not
        written to memory, which costs a pass over them.

        Args:
            rows: How to choose, an array of `eaas.native.SAMPLE_ROW`, one for each of plan.logits_rows.

        Raises:
            DecoderError: there are more or fewer rows than logits.
            ExpertsLost, PlanInvalid: as `step`.
        """
        check_ways(plan, rows)
        chosen = np.empty(len(rows), dtype=np.int32)
        logits = self._run(plan, deadline_s, samples=rows.ctypes.data, chosen=chosen.ctypes.data)
        sampled = chosen != native.DECODER_LEFT
        left = len(rows) - int(sampled.sum())
        return DeviceSamples(
            sampled=sampled, tokens=chosen, sound=chosen != native.DECODER_NOT_FINITE, logits=logits[:left]
        )

    def _run(self, plan: StepPlan, deadline_s: float, **choices: int) -> np.ndarray:
        """Run a step. Its logits are the first rows of what is returned."""
        if not self._handle:
            raise DecoderError("The decoder is closed; make another one.")
        arrays = plan_arrays(plan)
        tokens, positions, sequences, tables, wanted = arrays
        if len(self._logits) < len(wanted) <= self.max_rows:
            self._logits = np.empty((len(wanted), self.spec.vocab), dtype=np.float32)
        native_plan = native.DecoderPlan(
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            sequences=sequences.ctypes.data,
            tables=tables.ctypes.data,
            logits_rows=wanted.ctypes.data,
            logits=self._logits.ctypes.data,
            drop=None if plan.drop is None else plan.drop.ctypes.data,
            routed=self._routed.ctypes.data if plan.routed else None,
            forced=None if plan.forced is None else self._forced(plan.forced, len(tokens)).ctypes.data,
            taps=None if plan.taps is None else self._pointer_to(plan.taps),
            deadline_ns=time.monotonic_ns() + round(max(deadline_s, 0.0) * 1e9),
            rows=len(tokens),
            tables_rows=tables.shape[0],
            table_blocks=tables.shape[1],
            logits_count=len(wanted),
            **choices,
        )
        where = ctypes.c_uint32()
        status = self._library.decoder_step(self._handle, native_plan, ctypes.byref(where))
        if status:
            self._fail(status, where.value, arrays)
        return self._logits

    def _forced(self, forced: np.ndarray, rows: int) -> np.ndarray:
        layers, top_k, experts = self.routing_shape
        if forced.dtype != np.uint16 or forced.shape != (rows, layers, top_k) or not forced.flags.c_contiguous:
            raise PlanInvalid(
                f"forced is {forced.dtype} {list(forced.shape)}; contiguous uint16 {[rows, layers, top_k]} is needed."
            )
        if np.any((forced >= experts) & (forced[..., :1] != native.DECODER_FREE)):
            raise PlanInvalid(f"An expert of {experts} or more is forced; there are {experts}.")
        return forced

    def _pointer_to(self, taps: StepTaps) -> Any:
        """Whoever made them has checked them against the model."""
        if taps is not self._taps:
            self._taps = taps
            found = native.DecoderTaps(
                rows=taps.rows.ctypes.data,
                places=taps.places.ctypes.data,
                experts=taps.experts.ctypes.data,
                statistics=taps.statistics,
                rows_count=len(taps.rows),
                experts_count=len(taps.experts),
            )
            self._native_taps = found, ctypes.pointer(found)
        found, pointer = self._native_taps
        found.frame = taps.frame.ctypes.data
        return pointer

    @property
    def tap_kinds(self) -> frozenset[str]:
        """What it can record of rows (eaas.worker.taps)."""
        return frozenset(KINDS if self.spec.moe_layers else {*KINDS} - OF_EXPERTS)

    @property
    def tap_floats(self) -> int:
        """Most numbers that a step can record: any."""
        return sys.maxsize

    @property
    def routing_shape(self) -> tuple[int, int, int]:
        """MoE layers, experts chosen in each, and experts to choose from."""
        return len(self.spec.moe_layers), self.spec.moe.top_k, self.spec.moe.experts

    def routing(self, places: Sequence[int]) -> np.ndarray:
        """The experts that the gates chose for cached positions, which were computed in steps that noted them.

        Args:
            places: Block times positions of a block, and the position in it.

        Returns:
            uint16 [places, MoE layers, top_k], the highest score first.
        """
        return self._routed[np.array(places, dtype=np.int64)]

    def trace(self, stamps: np.ndarray | None, counts: np.ndarray | None) -> None:
        """Have the lanes stamp their phases from the next step on, or no longer; see `benchmarks.step_trace`.

        Args:
            stamps: uint64 [lanes, capacity, 2]: CLOCK_MONOTONIC nanoseconds, and the phase that ended then.
            counts: uint32 [lanes]: stamps of each lane, which may be set back between steps. Both must outlive
                the tracing.
        """
        capacity = 0 if stamps is None else stamps.shape[1]
        places = [None if array is None else array.ctypes.data for array in (stamps, counts)]
        self._library.decoder_trace(self._handle, places[0], capacity, places[1])

    def _new(self, backend: ExpertBackend, cores: Sequence[int]) -> int:
        spec, moe = self.spec, self.spec.moe
        shape = native.DecoderShape(
            hidden=spec.hidden,
            layers=spec.layers,
            q_heads=spec.q_heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab,
            rope_pairs=len(spec.rope.inv_freq),
            q_rank=spec.latent.q_rank if spec.latent else 0,
            kv_rank=spec.latent.kv_rank if spec.latent else 0,
            nope_dim=spec.latent.nope_dim if spec.latent else 0,
            value_dim=spec.latent.value_dim if spec.latent else 0,
            experts=moe.experts,
            top_k=moe.top_k,
            dense_intermediate=spec.intermediate if moe.dense_layers else 0,
            shared_intermediate=moe.shared_intermediate,
            shared_gate=moe.shared_gate,
            qk_norm=native.QK_NORMS.index(spec.qk_norm.value),
            gate_sigmoid=moe.score is Score.SIGMOID,
            gate_normalise=moe.norm_topk,
            groups=moe.groups,
            groups_kept=moe.groups_topk,
            kv_blocks=self._limits.kv_blocks,
            block_tokens=self.block_tokens,
            max_rows=self.max_rows,
            max_positions=self.max_positions,
            dtype=int(self.dtype),
            eps=spec.eps,
            clip_qkv=spec.clip_qkv,
            gate_scale=moe.scaling_factor,
            query_scale=spec.query_scale,
        )
        order = {layer: index for index, layer in enumerate(spec.moe_layers)}
        moe_layers = np.array([order.get(layer, -1) for layer in range(spec.layers)], dtype=np.int32)
        windows = np.array(spec.sliding_window, dtype=np.uint32)
        cosines, sines = rope_tables(spec, self.max_positions)
        lanes = np.array(cores, dtype=np.int32)
        error = ctypes.c_int32()
        handle = self._library.decoder_new(
            shape,
            moe_layers.ctypes.data,
            windows.ctypes.data,
            cosines.ctypes.data,
            sines.ctypes.data,
            len(lanes),
            lanes.ctypes.data,
            backend.call,
            backend.state,
            ctypes.byref(error),
        )
        if handle:
            return handle
        if error.value == native.DECODER_E_SHAPE:
            raise DecoderError(
                f"The native decoder cannot serve heads of {spec.head_dim} (even, at most 576), "
                f"{moe.experts} experts (at most 4096), blocks of {self.block_tokens} positions (a multiple "
                f"of 16), {len(lanes)} lanes (1 to 64) or {self.max_rows} rows. Change the one out of range."
            )
        raise DecoderError(
            f"Memory for {self._limits.kv_blocks} blocks of {self.block_tokens} positions, or cores {list(cores)}, "
            "could not be had. Ask for a smaller cache, or other cores."
        )

    def _set(self, weights: Mapping[str, np.ndarray], role: str, layer: int) -> None:
        prefix = "" if role in ("embed", "head", "final_norm") else f"{layer}."
        second = None
        if role.endswith("_gate_up"):
            stem = prefix + role.removesuffix("_gate_up")
            data, second = weight_of(weights, f"{stem}_gate_proj"), weight_of(weights, f"{stem}_up_proj")
            if (second.dtype, second.shape) != (data.dtype, data.shape):
                raise WeightsInvalid(f"{stem}_up_proj and {stem}_gate_proj differ in shape or type; they must not.")
        elif role == "embed" or (role == "head" and self.spec.tie_embeddings):
            data = self._embed
        else:
            data = weight_of(weights, prefix + role)
        status = self._library.decoder_set(
            self._handle,
            layer,
            native.ROLES.index(role),
            data.ctypes.data,
            None if second is None else second.ctypes.data,
            int(Dtype.FLOAT32 if data.dtype == np.float32 else Dtype.BFLOAT16),
            data.size,
        )
        if status:
            raise WeightsInvalid(f"Weight {prefix}{role} has shape {list(data.shape)}, which the spec does not allow.")

    def _fail(self, status: int, where: int, arrays: Sequence[np.ndarray]) -> None:
        if status in StepLimits.CODES:
            raise self._limits.refusal(status, where, arrays)
        rows = self._missing_rows(arrays)
        unanswered = "some" if rows is None else len(rows)
        raise ExpertsLost(f"The expert call failed (code {status}); {unanswered} rows had no answer.", rows)

    def _missing_rows(self, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
        tokens, wanted = arrays[0], arrays[-1]
        if self._missing is None:
            return None
        rows, count = self._missing(self.max_rows)
        # The last layer computes only the rows that give logits.
        return rows if count == len(tokens) else wanted[rows] if count == len(wanted) else None


def rope_tables(spec: ModelSpec, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float32 [positions, len(inv_freq)], attention factor included.

    Angles are rounded to float32, as transformers rounds them; cosines are computed in double precision.
    """
    inv_freq = np.array(spec.rope.inv_freq, dtype=np.float32)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
    factor = np.float32(spec.rope.attention_factor)
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor


def absorbed(latent: Latent, name: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """A matrix of latent attention as the native decoder has it, by role (eaas/native/decoder.h).

    The pairs that rope turns come in two halves, in queries and keys alike, which no product sees; the rotated part of
    the key is first; and kv_b is cut into what takes queries to the latent's space and what takes latents to values.

    Args:
        name: "q", "kv_a" or "kv_b"; its shape is that of `eaas.model.families.tensors_of`.
    """
    nope, rope, rank = latent.nope_dim, latent.rope_dim, latent.kv_rank
    halves = np.arange(rope).reshape(-1, 2).T.ravel() if latent.interleaved else np.arange(rope)
    if name == "q":
        by_head = matrix.reshape(-1, nope + rope, matrix.shape[1])
        return {"q": np.concatenate((by_head[:, :nope], by_head[:, nope + halves]), axis=1)}
    if name == "kv_a":
        return {"kv_a": np.concatenate((matrix[rank + halves], matrix[:rank]))}
    by_head = matrix.reshape(-1, nope + latent.value_dim, rank)
    return {"key_up": by_head[:, :nope].swapaxes(1, 2), "value_up": by_head[:, nope:]}


def weight_of(weights: Mapping[str, np.ndarray], role: str) -> np.ndarray:
    """A weight by its role, contiguous: float32, or bfloat16 bits as uint16. Raises WeightsInvalid."""
    array = weights.get(role)
    if array is None:
        raise WeightsInvalid(f"Weight {role} is missing; the spec needs it.")
    if array.dtype not in (np.float32, np.uint16):
        raise WeightsInvalid(f"Weight {role} is {array.dtype}; float32, or bfloat16 as uint16, is needed.")
    return np.ascontiguousarray(array)


def check_ways(plan: StepPlan, rows: np.ndarray) -> None:
    """Raises DecoderError: there are more or fewer ways to sample than logits rows."""
    if len(rows) != len(plan.logits_rows):
        raise DecoderError(f"{len(rows)} ways to sample for {len(plan.logits_rows)} logits rows; one each is needed.")


def plan_arrays(plan: StepPlan) -> list[np.ndarray]:
    """A plan's arrays in the order of its attributes, contiguous.

    Raises:
        PlanInvalid: one has another type or length.
    """
    wanted = (
        ("token_ids", plan.token_ids, 1),
        ("positions", plan.positions, 1),
        ("seqs", plan.seqs, 1),
        ("block_tables", plan.block_tables, 2),
        ("logits_rows", plan.logits_rows, 1),
    )
    arrays = []
    for name, array, dimensions in wanted:
        if array.dtype != np.int32 or array.ndim != dimensions:
            raise PlanInvalid(
                f"{name} is {array.dtype} {list(array.shape)}; int32 of {dimensions} dimensions is needed."
            )
        arrays.append(np.ascontiguousarray(array))
    if not len(arrays[0]) == len(arrays[1]) == len(arrays[2]):
        raise PlanInvalid(f"{len(arrays[0])} tokens, {len(arrays[1])} positions and {len(arrays[2])} sequences differ.")
    drop = plan.drop
    if drop is not None and (drop.dtype != np.uint8 or drop.shape != arrays[0].shape or not drop.flags.c_contiguous):
        raise PlanInvalid(f"drop is {drop.dtype} {list(drop.shape)}; contiguous uint8, one for each row, is needed.")
    return arrays
