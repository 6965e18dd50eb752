"""Counts the experts that a gate chooses, by standing between a decoder and its expert backend.

Every lane of every layer passes through Python, so a run with a tap is never timed.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, c_int32, c_uint32, c_uint64, c_void_p

import numpy as np

from eaas.worker.decoder import ExpertBackend

# ExpertCall of eaas/native/decoder.h, for who stands between a decoder and its experts: state, pool, lane, layer,
# rows, n, expert_ids, weights, out, drop, deadline_ns, overlap, arg.
EXPERT_CALL = CFUNCTYPE(
    c_int32, c_void_p, c_void_p, c_uint32, c_uint32, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p,
    c_void_p, c_uint64, c_void_p, c_void_p,
)  # fmt: skip


class GateTap:
    """Passes calls on; `backend` is what the decoder gets. Must outlive the decoder."""

    def __init__(self, backend: ExpertBackend, top_k: int) -> None:
        self._inner = EXPERT_CALL(backend.call)
        self._top_k = top_k
        self._rows = -1
        self._counting = False
        self._distinct = 0
        self._calls = 0
        self._layers: set[int] = set()
        self._function = EXPERT_CALL(self._pass_on)
        call = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.backend = ExpertBackend(call=call, state=backend.state)

    def start(self, rows: int) -> None:
        """Count from now on, in steps of exactly `rows` rows: those that decode."""
        self._rows, self._distinct, self._calls = rows, 0, 0
        self._layers.clear()

    @property
    def steps(self) -> int:
        """Steps counted."""
        return self._calls // max(1, len(self._layers))

    def distinct_per_step(self) -> float:
        """Distinct (layer, expert) pairs of a step, mean over the steps counted."""
        return self._distinct / max(1, self.steps)

    def _pass_on(self, state, pool, lane, layer, rows, n, ids, weights, out, drop, deadline_ns, away, arg):  # type: ignore[no-untyped-def]
        if lane == 0 and layer == 0:
            # The last layer of a prefill may have as few rows as a step that decodes; its first layer has not.
            self._counting = n == self._rows
        if lane == 0 and self._counting:
            chosen = np.ctypeslib.as_array((ctypes.c_uint16 * (n * self._top_k)).from_address(ids))
            self._distinct += len(np.unique(chosen))
            self._calls += 1
            self._layers.add(layer)
        return self._inner(state, pool, lane, layer, rows, n, ids, weights, out, drop, deadline_ns, away, arg)
