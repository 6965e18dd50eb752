"""Rows carried through host memory and computed by native code: `experts.backend.Backend`.

Here the functions of client.h and server.h become methods, their codes exceptions, and their structures the records of
`experts.backend`, which says what each method does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts import kernels, native
from experts.backend import ClientLink, ExpertsLost, HostArrays, LinkRefused, ServerCounters, ServerLink, ServerStats
from experts.routes import Table
from experts.wire import MAX_ROWS, VERSION, WireShape
from p2p import native as p2p_native
from p2p.endpoint import Window
from p2p.window import WindowLayout

CHUNK_BYTES = 512 << 10  # of a frame: incast hurts only above that
MOST_SLOT_BYTES = 1 << 20  # that a client may ask for

_OK, _LOST, _FULL, _MEMORY = 0, -1, -3, -4


class CpuClient:
    """A client of client.h: `experts.backend.ClientBackend`."""

    def __init__(
        self, wire: WireShape, *, incarnation: int, lanes: int, bell_page: int, max_tokens: int, patience_s: float
    ) -> None:
        self._shape, self._library = wire.shape, native.load()
        shape = wire.shape
        self.handle: int = self._library.expert_client_new(
            *(shape.layers, shape.experts, shape.hidden, shape.top_k, wire.dtype, wire.model_hash),
            *(incarnation, lanes, bell_page, max_tokens),
        )
        if not self.handle:
            raise ValueError(f"No expert client for {shape}, {lanes} lanes, {max_tokens} tokens a call.")
        self._library.expert_client_set_patience(self.handle, int(patience_s * 1e9))

    @property
    def adopted_epoch(self) -> int:
        return int(self._library.expert_client_adopted_epoch(self.handle))

    def add_server(self, link: ServerLink) -> int:
        return _place(self._library.expert_client_add_server(self.handle, native.ServerLink(**asdict(link))))

    def remove_server(self, place: int) -> None:
        """Takes effect at a call's boundary, at once where no call runs."""
        self._library.expert_client_remove_server(self.handle, place)

    def is_idle(self, place: int) -> bool:
        """Whether the memory may go, and the place is free."""
        return bool(self._library.expert_client_server_idle(self.handle, place))

    def publish(self, epoch: int, table: Table) -> None:
        """Adopted at the running call's end, or within it where it waits for a replica; at once where none runs."""
        if self._library.expert_client_publish_routes(self.handle, epoch, table.ctypes.data):
            raise MemoryError(f"no memory for the routes of epoch {epoch}; the ones before it stay. Free some.")

    def stats(self, place: int) -> ServerStats:
        stats = native.ServerStats()
        self._library.expert_client_stats(self.handle, place, stats)
        return ServerStats(**native.values_of(stats))

    def take_routed(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        rows, activated = np.empty((2, self._shape.layers * self._shape.experts), np.uint32)
        self._library.expert_client_take_routed(self.handle, rows.ctypes.data, activated.ctypes.data)
        return rows, activated

    def apply(self, arrays: HostArrays, wait_ns: int) -> None:
        status = self._library.expert_apply(self.handle, *arrays, wait_ns)
        if status == _LOST:
            raise ExpertsLost(f"No live replica of every expert of layer {arrays.layer} answered in time.")
        if status == _MEMORY:
            raise MemoryError(f"no memory is left for a call of {arrays.n} rows; free some, or send fewer.")
        if status != _OK:
            raise ValueError(
                f"layer {arrays.layer}, a type or an expert id is out of range, or another call runs (code {status})."
            )

    def close(self) -> None:
        self._library.expert_client_free(self.handle)


class CpuServer:
    """A server of server.h: `experts.backend.ServerBackend`."""

    def __init__(self, wire: WireShape, *, incarnation: int, cores: Sequence[int], bell_page: int) -> None:
        self._shapes, self._library, self._bell_page = {0: wire.shape}, native.load(), bell_page
        *sizes, form = _sizes(wire)
        lanes = len(cores), (ctypes.c_int32 * len(cores))(*cores)
        self._handle: int = self._library.expert_server_new(
            *sizes, incarnation, *lanes, bell_page, MOST_SLOT_BYTES, form
        )
        if not self._handle:
            raise ValueError(
                f"lanes on cores {list(cores)} could not start for {wire.shape}. Name cores that may be used."
            )

    def add_model(self, wire: WireShape) -> int:
        model = self._library.expert_server_add_model(self._handle, *_sizes(wire))
        if model < 0:
            raise ValueError(f"{wire.shape} has no place beside {len(self._shapes)} models. Close one, or free memory.")
        self._shapes[model] = wire.shape
        return model

    def remove_model(self, model: int) -> None:
        if self._library.expert_server_remove_model(self._handle, model):
            raise ValueError(f"model {model} has clients or experts: take them from it, but of the first, which stays.")
        del self._shapes[model]

    def add_client(self, link: ClientLink) -> int:
        return _place(self._library.expert_server_add_client(self._handle, native.ClientLink(**asdict(link))))

    def remove_client(self, place: int) -> None:
        self._library.expert_server_remove_client(self._handle, place)

    def set_expert(
        self, layer: int, expert: int, gate_up: NDArray[np.uint8], down: NDArray[np.uint8], model: int = 0
    ) -> None:
        addresses = gate_up.ctypes.data, down.ctypes.data
        if self._library.expert_server_set_expert(self._handle, model, layer, expert, *addresses):
            raise ValueError(f"expert {expert} of layer {layer} is outside {self._shapes.get(model)}.")

    def clear_expert(self, layer: int, expert: int, model: int = 0) -> None:
        self._library.expert_server_set_expert(self._handle, model, layer, expert, None, None)

    def take_doubtful(self, model: int = 0) -> tuple[int, int] | None:
        number = self._library.expert_server_take_doubtful(self._handle, model)
        return None if number < 0 else divmod(number, self._shapes[model].experts)

    def set_lease(self, boottime_ns: int) -> None:
        self._library.expert_server_set_lease(self._handle, boottime_ns)

    def run(self, max_ns: int) -> bool:
        """Serve, parked on the doorbell where idle."""
        code = self._library.expert_server_run(self._handle, max_ns)
        if code < 0:
            raise MemoryError("no memory is left for a batch of requests; free some, or raise the limit.")
        return bool(code)

    def turns(self) -> int | None:
        """How often it went to look for requests, which it does idle too; None where it waits on no doorbell."""
        # Zero counts: a lane that never came to look for requests stands still.
        return p2p_native.load().p2p_bell_heartbeat(self._bell_page) if self._bell_page else None

    def stop(self) -> None:
        """Make `run` return within one batch, now and from then on."""
        self._library.expert_server_stop(self._handle)

    def counters(self) -> ServerCounters:
        counters = native.ServerCounters()
        self._library.expert_server_counters(self._handle, counters)
        return ServerCounters(**native.values_of(counters))

    def close(self) -> None:
        self._library.expert_server_free(self._handle)


class CpuBackend:
    """Native code and shared memory, in frames of at most CHUNK_BYTES."""

    most_slot_bytes = MOST_SLOT_BYTES
    rings_lanes = True
    numerics_class = staticmethod(kernels.numerics_class)
    self_test = staticmethod(kernels.self_test)
    wire_version = VERSION
    client, server = CpuClient, CpuServer

    def window(self, wire: WireShape, most_tokens: int, slots: int) -> WindowLayout:
        """Slots for the largest call, or for chunks of it."""

        def bytes_of(tokens: int) -> int:
            pairs = tokens * wire.shape.top_k
            return max(wire.reply_bytes(pairs), wire.request_bytes(tokens, pairs))

        layout = WindowLayout(slots=slots, payload_bytes=min(CHUNK_BYTES, bytes_of(most_tokens)))
        if bytes_of(1) > layout.payload_bytes or not 1 <= most_tokens <= MAX_ROWS:
            raise ValueError(
                f"One token takes {bytes_of(1)} bytes and a slot holds {layout.payload_bytes};"
                f" max_tokens is {most_tokens}, of 1 to {MAX_ROWS}. Fewer or smaller tokens are needed."
            )
        return layout

    def reserve(self, wire: WireShape) -> int:
        """Weights stay in the packed file, which is mapped."""
        return 0

    def prepare(self, window: Window, layout: WindowLayout) -> None:
        """Write a window's layout where both sides look for it."""
        p2p_native.load().p2p_window_init(
            window.address, window.nbytes, window.incarnation, layout.slots, layout.payload_bytes
        )


def _sizes(wire: WireShape) -> tuple[Any, ...]:
    """Of a model, as a native server takes them: at last what its experts compute beside their products."""
    shape = wire.shape
    sizes = shape.layers, shape.experts, shape.hidden, shape.intermediate, shape.top_k
    return *sizes, wire.dtype, wire.model_hash, native.form_of(shape.activation, shape.biased)


def _place(code: int) -> int:
    """A place for a peer, or what its code says.

    Raises:
        LinkRefused: there is none.
    """
    if code < 0:
        reasons = {_FULL: "all places are taken.", _MEMORY: "no memory is left."}
        raise LinkRefused(reasons.get(code, "its windows have another layout than was agreed."))
    return code
