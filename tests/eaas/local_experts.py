"""Experts in this process: kernels and order of additions of the expert servers, hence their bits."""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from ctypes import c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from eaas import native
from eaas.worker.decoder import ExpertBackend, WeightsInvalid
from experts import native as experts_native
from experts.checkpoint import Checkpoint
from experts.kernels import PackedExpert, Weights, pack_expert
from experts.model import SWIGLU, Activation, Dtype, ExpertShape
from experts.tensors import tensors_of
from p2p import native as p2p_native
from p2p.build import COMMON, ROOT, run_compiler

SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def library() -> ctypes.CDLL:
    """local_experts.cpp, compiled once for its text and the native code beside which it runs.

    Raises:
        BuildFailed: no compiler, or it refused the file.
    """
    native.load()
    beside = [experts_native.LIBRARY, p2p_native.LIBRARY]
    digest = hashlib.sha256(SOURCE.read_bytes())
    for header in sorted((ROOT / "eaas" / "native").glob("*.h")):
        digest.update(header.read_bytes())
    path = ROOT / "build" / "tests" / f"local_experts-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may come to it at once: whoever is last replaces what is the same.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        flags = [*COMMON, "-I", str(ROOT), "-shared", str(SOURCE), *map(str, beside)]
        run_compiler([*flags, *(f"-Wl,-rpath,{lower.parent}" for lower in beside), "-o", str(partial)])
        partial.replace(path)
    loaded = ctypes.CDLL(str(path))
    loaded.local_experts_new.argtypes = [*[c_uint32] * 5, c_int32, c_void_p, c_uint32, c_uint32]
    loaded.local_experts_new.restype = c_void_p
    loaded.local_experts_free.argtypes = [c_void_p]
    loaded.local_experts_free.restype = None
    loaded.local_experts_set.argtypes = [c_void_p, c_uint32, c_uint32, *[c_void_p, c_uint64] * 2]
    return loaded


class LocalExperts:
    """All routed experts of a model, packed. Give `backend` to a Decoder of as many lanes, and outlive it."""

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        hidden: int,
        intermediate: int,
        top_k: int,
        dtype: Dtype,
        lanes: int = 1,
        max_rows: int = 512,
        activation: Activation = SWIGLU,
        biased: bool = False,
    ) -> None:
        """Reserve memory; every expert is zero until `set`.

        Args:
            layers: MoE layers, counted without dense ones.
            experts: Logical experts of a layer.
            hidden: Columns of a row.
            intermediate: Inner size of one expert.
            top_k: Experts of a token.
            dtype: Of rows and weights.
            lanes: Lanes of the decoder.
            max_rows: Most rows of one call.
            activation: What an expert computes between its products.
            biased: Whether its products have biases.

        Raises:
            MemoryError: the host has too little, or a size is zero.
        """
        self._library = library()
        self._sizes = (intermediate, hidden)
        sizes = (layers, experts, hidden, intermediate, top_k)
        self._dtype, self._activation = dtype, activation
        form = experts_native.form_of(activation, biased)
        where = None if form is None else ctypes.byref(form)
        self._handle = self._library.local_experts_new(*sizes, int(dtype), where, lanes, max_rows)
        if not self._handle:
            raise MemoryError(f"No memory: {layers} x {experts} experts of {hidden} x {intermediate}; none may be 0.")
        self._finalizer = weakref.finalize(self, self._library.local_experts_free, self._handle)
        call = native.address_of(self._library, "local_experts_call")
        self.backend = ExpertBackend(call=call, state=self._handle)

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: Dtype, *, lanes: int = 1, max_rows: int = 512) -> LocalExperts:
        """All experts of a checkpoint.

        Raises:
            UnknownArchitecture, ConfigInvalid: config.json describes no experts that can be served.
            CheckpointInvalid, WeightsInvalid: a tensor is missing, or of another shape or type.
        """
        shape = ExpertShape.from_config(checkpoint.config)
        local = cls(
            layers=shape.layers,
            experts=shape.experts,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            top_k=shape.top_k,
            dtype=dtype,
            lanes=lanes,
            max_rows=max_rows,
            activation=shape.activation,
            biased=shape.biased,
        )
        for layer in range(shape.layers):
            for expert in range(shape.experts):
                tensors = tensors_of(checkpoint, shape, layer, expert)
                local.set(layer, expert, tensors.gate, tensors.up, tensors.down, tensors.biases)
        return local

    def set(
        self,
        layer: int,
        expert: int,
        gate: Weights,
        up: Weights,
        down: Weights,
        biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Pack one expert: gate and up [intermediate, hidden], down [hidden, intermediate], and biases of each.

        Raises:
            WeightsInvalid: another shape or type, or no such expert.
        """
        try:
            packed = pack_expert(gate, up, down, self._dtype, activation=self._activation, biases=biases)
        except ValueError as error:
            raise WeightsInvalid(f"Expert {expert} of layer {layer}: {error}") from error
        self.place(layer, expert, packed)

    def place(self, layer: int, expert: int, packed: PackedExpert) -> None:
        """Take an expert that is packed already.

        Raises:
            WeightsInvalid: of another shape, or there is no such expert.
        """
        if (packed.intermediate, packed.hidden) != self._sizes:
            raise WeightsInvalid(
                f"Expert {expert} of layer {layer} has gate {(packed.intermediate, packed.hidden)}, not {self._sizes}."
            )
        parts = [x for array in (packed.gate_up, packed.down) for x in (array.ctypes.data, array.nbytes)]
        if self._library.local_experts_set(self._handle, layer, expert, *parts):
            raise WeightsInvalid(f"There is no expert {expert} in MoE layer {layer}, or biases are missing.")
