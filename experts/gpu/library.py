"""The functions of client.h and server.h over kernels: what `experts.client` and `experts.server` need of a path.

A handle is a number; names and arguments are those of the native library. Rows never come
here: whoever owns the attention worker's steps launches expert calls through `client`.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch

from experts.gpu.client_end import ClientEnd
from experts.gpu.layout import ExchangeShape
from experts.gpu.server_end import ServerEnd, bytes_at
from experts.gpu.tables import signed
from experts.kernels import KernelsBroken
from experts.model import Dtype, ExpertShape
from experts.native import ClientLink, ServerLink
from experts.routes import MOST_REPLICAS
from experts.wire import WireShape
from p2p.device import INTERPRET

# Tokens of a frame; longer calls go in several. The interpreter looks at each place of a frame, one after another.
CAPACITY = 128
CAPACITY_INTERPRETED = 8

_OK, _ARGUMENT = 0, -2
_SELF_TEST = (160, 128, 7)  # intermediate, hidden, rows


def exchange_shape(wire: WireShape) -> ExchangeShape:
    """What clients and servers of a model agree on.

    Raises:
        ValueError: the kernels cannot carry rows of this shape.
    """
    shape = wire.shape
    return ExchangeShape(
        layers=shape.layers,
        experts=shape.experts,
        hidden=shape.hidden,
        top_k=shape.top_k,
        capacity=CAPACITY_INTERPRETED if INTERPRET else CAPACITY,
        model_hash=signed(wire.model_hash),
    )


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


def self_test(device: torch.device) -> None:
    """Run a small expert through the kernels and compare with the definition.

    Raises:
        KernelsBroken: the results differ by more than rounding explains.
    """
    from experts.gpu.ffn import ffn_reference

    inter, hidden, rows = _SELF_TEST
    generator = torch.Generator().manual_seed(20250917)
    gate, up = (torch.randn(inter, hidden, generator=generator).div(8).bfloat16() for _ in range(2))
    down = torch.randn(hidden, inter, generator=generator).div(8).bfloat16()
    x = torch.randn(rows, hidden, generator=generator).bfloat16()
    found = ServerEnd.probe(gate, up, down, x, device)
    wanted = ffn_reference(x, gate, up, down)
    error = float((found.double().cpu() - wanted).norm() / wanted.norm())
    # The rows are rounded to bfloat16, 2**-9 of each, and so are the activations before them.
    if not error <= 1e-2:
        raise KernelsBroken(
            f"the kernels on {device} differ from the definition by {error:.3g}; up to 0.01 is rounding. Report this "
            f"machine's GPU, torch {torch.__version__}, and what `make gpu` says."
        )


class DeviceLibrary:
    """The exported functions of the native library that clients and servers use, over one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._objects: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def client(self, handle: int) -> ClientEnd:
        """The client of a handle: what a decoder launches its expert calls with."""
        return self._objects[handle]

    def p2p_window_init(
        self, address: int, nbytes: int, incarnation: int, slots: int, payload_bytes: int
    ) -> int:
        """Nothing to write: kernels take a window's layout from what was agreed, and a fresh one is all zero."""
        return _OK

    def _keep(self, made: object) -> int:
        handle = next(self._handles)
        self._objects[handle] = made
        return handle

    # -- servers -----------------------------------------------------------------------------------------------

    def expert_server_new(
        self, layers: int, experts: int, hidden: int, intermediate: int, top_k: int, dtype: int,
        model_hash: int, incarnation: int, lanes: int, cores: object, page: int | None, most_slot_bytes: int,
    ) -> int:  # fmt: skip
        wire = wire_of(layers, experts, hidden, intermediate, top_k, dtype, model_hash)
        return self._keep(ServerEnd(exchange_shape(wire), wire.shape, incarnation, self.device))

    def expert_server_free(self, handle: int) -> None:
        self._objects.pop(handle).close()

    def expert_server_add_client(self, handle: int, reference: Any) -> int:
        # A copy: the caller's structure is gone when this returns.
        return self._objects[handle].add_client(ClientLink.from_buffer_copy(reference._obj))

    def expert_server_remove_client(self, handle: int, index: int) -> None:
        self._objects[handle].remove_client(index)

    def expert_server_set_expert(self, handle: int, layer: int, expert: int, gate_up: int, down: int) -> int:
        return self._objects[handle].set_expert(layer, expert, gate_up, down)

    def expert_server_clear_expert(self, handle: int, layer: int, expert: int) -> None:
        self._objects[handle].clear_expert(layer, expert)

    def expert_server_set_lease(self, handle: int, boottime_ns: int) -> None:
        self._objects[handle].set_lease(boottime_ns)

    def expert_server_stop(self, handle: int) -> None:
        self._objects[handle].stop()

    def expert_server_run(self, handle: int, max_ns: int) -> int:
        return self._objects[handle].run(max_ns)

    def expert_server_counters(self, handle: int, reference: Any) -> None:
        for name, value in self._objects[handle].counters().items():
            setattr(reference._obj, name, value)

    # -- clients -----------------------------------------------------------------------------------------------

    def expert_client_new(
        self, layers: int, experts: int, hidden: int, top_k: int, dtype: int, model_hash: int,
        incarnation: int, lanes: int, page: int | None, most_tokens: int,
    ) -> int:  # fmt: skip
        wire = wire_of(layers, experts, hidden, 1, top_k, dtype, model_hash)
        return self._keep(ClientEnd(exchange_shape(wire), incarnation, most_tokens, self.device))

    def expert_client_free(self, handle: int) -> None:
        del self._objects[handle]

    def expert_client_add_server(self, handle: int, reference: Any) -> int:
        return self._objects[handle].add_server(ServerLink.from_buffer_copy(reference._obj))

    def expert_client_remove_server(self, handle: int, index: int) -> None:
        self._objects[handle].remove_server(index)

    def expert_client_server_idle(self, handle: int, index: int) -> int:
        return int(self._objects[handle].is_idle(index))

    def expert_client_publish_routes(self, handle: int, epoch: int, table: int) -> None:
        client: ClientEnd = self._objects[handle]
        count = client.shape.layers * client.shape.experts * MOST_REPLICAS
        routes = bytes_at(table, count).copy()
        client.publish(epoch, routes.reshape(client.shape.layers, client.shape.experts, MOST_REPLICAS))

    def expert_client_adopted_epoch(self, handle: int) -> int:
        return self._objects[handle].adopted_epoch

    def expert_client_take_routed(self, handle: int, rows: int, activated: int) -> None:
        client: ClientEnd = self._objects[handle]
        for address, counts in zip((rows, activated), client.take_routed(), strict=True):
            ctypes.memmove(address, counts.ctypes.data, counts.nbytes)

    def expert_client_stats(self, handle: int, index: int, reference: Any) -> int:
        for name, value in self._objects[handle].stats(index).items():
            setattr(reference._obj, name, value)
        return _OK
