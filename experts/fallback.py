"""The expert client and server without native code: the functions of client.h and server.h, in Python.

For machines without a compiler: correct, and slow. The same windows, frames and messages, one lane. A server
that misses its time is avoided, one that hangs up is given up.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import time
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from experts import native
from experts.activation import Activation
from experts.fallback_ends import OVERDUE_NS, ClientEnd, Place, ServerEnd, ServerSide, SlotView, view_at
from experts.kernels import PackedExpert, packed_bytes
from experts.model import Dtype, ExpertShape
from experts.native import ClientLink, ServerCounters, ServerLink, ServerStats
from experts.wire import WireShape
from p2p.window import WindowLayout

MOST_SERVERS = 64

_OK, _LOST, _ARGUMENT, _FULL = 0, -1, -2, -3
_EMPTY, _ATTACHED, _GONE = 0, 1, 2
_WINDOW_HEADER = struct.Struct("<IIQIIQQ")
_WINDOW_MAGIC, _WINDOW_VERSION = 0x57503250, 1


def wire_of(
    layers: int, experts: int, hidden: int, inter: int, top_k: int, dtype: int, model_hash: int
) -> WireShape:
    """What the sizes and the dtype's number say that a native library is given."""
    shape = ExpertShape(
        architecture="",
        layer_ids=tuple(range(layers)),
        experts=experts,
        hidden=hidden,
        intermediate=inter,
        top_k=top_k,
    )
    return WireShape(shape=shape, dtype=Dtype(dtype), model_hash=model_hash)


@cache
def load() -> Any:
    """The native library, or where it is missing one that stands in for it.

    Raises:
        IsaUnavailable: EAAS_ISA asks for what this machine cannot run.
    """
    return native.load_or_none() or FallbackLibrary()


class FallbackLibrary:
    """The exported functions of the native library that `experts.client` and `experts.server` use.

    Names and arguments are those of client.h, server.h and window.h; a handle is a number.
    """

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def _keep(self, made: object) -> int:
        handle = next(self._handles)
        self._objects[handle] = made
        return handle

    def p2p_window_init(
        self, address: int, nbytes: int, incarnation: int, slots: int, payload_bytes: int
    ) -> int:
        stride_bytes = WindowLayout(slots=slots, payload_bytes=payload_bytes).stride_bytes
        fields = (_WINDOW_MAGIC, _WINDOW_VERSION, incarnation, slots, 0, payload_bytes, stride_bytes)
        _WINDOW_HEADER.pack_into(view_at(address, nbytes), 0, *fields)
        return 0

    def expert_server_new(
        self, layers: int, experts: int, hidden: int, intermediate: int, top_k: int, dtype: int,
        model_hash: int, incarnation: int, lanes: int, cores: object, page: int | None, most_slot_bytes: int,
    ) -> int:  # fmt: skip
        wire = wire_of(layers, experts, hidden, intermediate, top_k, dtype, model_hash)
        return self._keep(ServerEnd(wire, incarnation, page or 0))

    def expert_server_set_form(self, handle: int, form: native.ExpertForm) -> None:
        server: ServerEnd = self._objects[handle]
        activation = Activation(alpha=form.alpha, limit=form.limit, shift=form.shift)
        shape = replace(server.wire.shape, activation=activation, biased=bool(form.biased))
        server.wire = replace(server.wire, shape=shape)

    def expert_server_free(self, handle: int) -> None:
        del self._objects[handle]

    def expert_server_add_client(self, handle: int, reference: Any) -> int:
        server: ServerEnd = self._objects[handle]
        # A copy: the caller's structure is gone when this returns.
        link = ClientLink.from_buffer_copy(reference._obj)
        layout = WindowLayout(slots=link.slots, payload_bytes=link.slot_bytes)
        with server.lock:
            index = next((i for i in range(MOST_SERVERS) if i not in server.clients), _FULL)
            if index >= 0:
                server.clients[index] = ServerSide(
                    link, SlotView(link.rx, layout), SlotView(link.tx, layout), [0] * link.slots
                )
        return index

    def expert_server_remove_client(self, handle: int, index: int) -> None:
        with self._objects[handle].lock:
            self._objects[handle].clients.pop(index, None)

    def expert_server_set_expert(self, handle: int, layer: int, expert: int, gate_up: int, down: int) -> int:
        server: ServerEnd = self._objects[handle]
        shape, dtype = server.wire.shape, server.wire.dtype
        up_bytes = packed_bytes(dtype, -(-shape.intermediate // 32), shape.hidden, shape.biased)
        down_bytes = packed_bytes(dtype, -(-shape.hidden // 64), shape.intermediate, shape.biased)
        packed = PackedExpert(
            dtype=dtype,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            gate_up=np.frombuffer(view_at(gate_up, up_bytes), np.uint8),
            down=np.frombuffer(view_at(down, down_bytes), np.uint8),
            activation=shape.activation,
            biased=shape.biased,
        )
        with server.lock:
            server.experts[layer, expert] = packed
        return _OK

    def expert_server_clear_expert(self, handle: int, layer: int, expert: int) -> None:
        with self._objects[handle].lock:
            self._objects[handle].experts.pop((layer, expert), None)

    def expert_server_set_lease(self, handle: int, boottime_ns: int) -> None:
        server: ServerEnd = self._objects[handle]
        # A fence is for good: no later renewal undoes it.
        server.lease_ns = boottime_ns if server.lease_ns else 0

    def expert_server_stop(self, handle: int) -> None:
        self._objects[handle].stopped = True

    def expert_server_run(self, handle: int, max_ns: int) -> int:
        return self._objects[handle].run(max_ns)

    def expert_server_counters(self, handle: int, reference: Any) -> None:
        ctypes.memmove(
            ctypes.addressof(reference._obj),
            ctypes.addressof(self._objects[handle].counters),
            ctypes.sizeof(ServerCounters),
        )

    def expert_client_new(
        self, layers: int, experts: int, hidden: int, top_k: int, dtype: int, model_hash: int,
        incarnation: int, lanes: int, page: int, most_tokens: int,
    ) -> int:  # fmt: skip
        wire = wire_of(layers, experts, hidden, 1, top_k, dtype, model_hash)
        return self._keep(ClientEnd(wire, incarnation, page or 0, most_tokens))

    def expert_client_free(self, handle: int) -> None:
        del self._objects[handle]

    def expert_client_add_server(self, handle: int, reference: Any) -> int:
        client: ClientEnd = self._objects[handle]
        link = ServerLink.from_buffer_copy(reference._obj)
        layout = WindowLayout(slots=link.slots, payload_bytes=link.slot_bytes)
        with client.lock:
            taken = client.places.keys() | client.left
            index = next((i for i in range(MOST_SERVERS) if i not in taken), _FULL)
            if index >= 0:
                # Replaced whole: a call may be walking over the old one.
                client.places = {
                    **client.places,
                    index: Place(link, SlotView(link.tx, layout), SlotView(link.rx, layout)),
                }
        return index

    def expert_client_remove_server(self, handle: int, index: int) -> None:
        client: ClientEnd = self._objects[handle]
        with client.lock:
            if index in client.places:
                client.leaving.add(index)
                client.adopt()

    def expert_client_server_idle(self, handle: int, index: int) -> int:
        client: ClientEnd = self._objects[handle]
        with client.lock:
            client.left.discard(index)
            return int(index not in client.places)

    def expert_client_publish_routes(self, handle: int, epoch: int, table: int) -> None:
        client: ClientEnd = self._objects[handle]
        routes = (
            np.frombuffer(view_at(table, client.routes.size), np.uint8).reshape(client.routes.shape).copy()
        )
        with client.lock:
            client.pending = (epoch, routes)
            if not client.in_call:
                client.adopt()

    def expert_client_adopted_epoch(self, handle: int) -> int:
        return self._objects[handle].epoch

    def expert_client_take_routed(self, handle: int, rows: int, activated: int) -> None:
        client: ClientEnd = self._objects[handle]
        with client.lock:
            for address, counts in ((rows, client.routed_rows), (activated, client.routed_calls)):
                np.frombuffer(view_at(address, counts.nbytes), np.uint32)[:] = counts.ravel()
                counts[:] = 0

    def expert_client_stats(self, handle: int, index: int, reference: Any) -> int:
        place = self._objects[handle].places.get(index)
        stats = place.stats if place else ServerStats()
        stats.speed = 1.0
        # Nothing probes a server here: whatever is overdue may have been lost.
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        waiting = list(place.waiting.values()) if place else []
        stats.late_slots = stats.lost_slots = sum(now_ns - sent.sent_ns >= OVERDUE_NS for sent in waiting)
        stats.state = (_GONE if place.gone else _ATTACHED) if place else _EMPTY
        ctypes.memmove(ctypes.addressof(reference._obj), ctypes.addressof(stats), ctypes.sizeof(ServerStats))
        return _OK

    def expert_exchange(
        self,
        handle: int,
        layer: int,
        rows: int,
        count: int,
        ids: int,
        weights: int,
        out: int,
        drop: int | None,
        deadline_ns: int,
    ) -> int:
        client: ClientEnd = self._objects[handle]
        shape, element = client.wire.shape, np.float32 if client.wire.dtype is Dtype.FLOAT32 else np.uint16
        x = np.frombuffer(view_at(rows, count * shape.hidden * client.wire.dtype.nbytes), element)
        experts = np.frombuffer(view_at(ids, count * shape.top_k * 2), np.uint16).reshape(count, shape.top_k)
        gates = np.frombuffer(view_at(weights, count * shape.top_k * 4), np.float32).reshape(
            count, shape.top_k
        )
        result = np.frombuffer(view_at(out, count * shape.hidden * 4), np.float32).reshape(
            count, shape.hidden
        )
        if (
            not 0 <= layer < shape.layers
            or not 1 <= count <= client.most_tokens
            or experts.max() >= shape.experts
        ):
            return _ARGUMENT
        marks = None if drop is None else np.frombuffer(view_at(drop, count), np.uint8)
        rows_of = client.call(layer, x.reshape(count, shape.hidden), experts, marks, deadline_ns)
        if rows_of is None:
            return _LOST
        total = gates[:, 0, None] * rows_of[:, 0]
        for k in range(1, shape.top_k):
            total += gates[:, k, None] * rows_of[:, k]
        result += total
        return _OK
