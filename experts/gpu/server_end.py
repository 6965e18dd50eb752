"""An expert server's side of a device library: its experts' slots, its clients' places, its lease."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import torch

from experts.gpu.ffn import grouped_ffn
from experts.gpu.group import Groups, group
from experts.gpu.layout import ExchangeShape
from experts.gpu.server import Batch, DeviceServer
from experts.gpu.weights import ExpertWeights
from experts.kernels import PackedExpert, WeightsBroken, packed_bytes
from experts.model import Dtype, ExpertShape
from experts.native import ClientLink
from experts.unpack import unpack_expert

MOST_CLIENTS = {"cuda": 16, "cpu": 2}
IDLE_S = {"cuda": 0.001, "cpu": 0.0001}  # by the device's clock, of which the interpreter has little
TILE = 64  # pairs of a group, at most: a pass has few for each expert
_SHARE = 0.8  # of the memory that is free at the start, for experts
_LOOK_S = 0.002

_OK, _ARGUMENT, _FULL = 0, -2, -3


class GroupedExperts:
    """Computes a pass's pairs with the experts that lie in slots: `experts.gpu.server.Compute`."""

    def __init__(self, weights: ExpertWeights, pairs: int, device: torch.device) -> None:
        self.weights = weights
        self._groups = Groups.allocate(pairs=pairs, slots=weights.slots, tile=TILE, device=device)
        self._act = torch.zeros(pairs, weights.act_width, dtype=torch.bfloat16, device=device)

    def __call__(self, batch: Batch) -> None:
        group(batch.slots, batch.n_pairs, self._groups)
        grouped_ffn(batch.rows, batch.row_of, self._groups, self.weights, self._act, batch.out)


class ServerEnd:
    """One expert server on one device."""

    def __init__(
        self, shape: ExchangeShape, experts: ExpertShape, incarnation: int, device: torch.device
    ) -> None:
        self._shape, self._experts, self._device = shape, experts, device
        one_bytes = 6 * experts.hidden * experts.intermediate
        slots = shape.layers * shape.experts
        if device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            slots = max(1, min(slots, int(_SHARE * free_bytes) // one_bytes))
        self._weights = ExpertWeights.allocate(
            slots=slots, hidden=experts.hidden, intermediate=experts.intermediate, device=device
        )
        self._clients = MOST_CLIENTS[device.type]
        compute = GroupedExperts(self._weights, self._clients * shape.pairs, device)
        self._server = DeviceServer(
            shape,
            clients=self._clients,
            compute=compute,
            incarnation=incarnation,
            device=device,
            idle_s=IDLE_S[device.type],
        )
        # Guards what follows; passes go on meanwhile.
        self._lock = threading.Lock()
        self._free = list(range(slots))
        self._slot_of: dict[tuple[int, int], int] = {}
        self._taken: set[int] = set()
        self._lease_ns = (1 << 63) - 1
        self._stopped = threading.Event()
        self._serving = False
        # The interpreter's passes: whether there are any, and how many ended.
        self._turned = threading.Condition()
        self._turning, self._turns = False, 0
        self._busy_ns = 0

    @staticmethod
    def probe(
        gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """Rows of one expert through the server's own kernels: float32 [rows, hidden], x bf16 [rows, hidden]."""
        rows, hidden = x.shape
        weights = ExpertWeights.allocate(slots=1, hidden=hidden, intermediate=len(gate), device=device)
        weights.load(0, gate, up, down)
        index = torch.arange(rows, dtype=torch.int32, device=device)
        batch = Batch(
            rows=x.to(device),
            scales=None,
            row_of=index,
            slots=torch.zeros_like(index),
            n_pairs=torch.full((1,), rows, dtype=torch.int32, device=device),
            out=torch.full((rows, hidden), float("nan"), device=device),
        )
        # Triton launches on the thread's own GPU, wherever the tensors lie.
        with torch.cuda.device(device.index if device.type == "cuda" else -1):
            GroupedExperts(weights, rows, device)(batch)
        return batch.out

    # -- clients -------------------------------------------------------------------------------------------------

    def add_client(self, link: ClientLink) -> int:
        """A place for a client; or a code of server.h."""
        # Kernels go by the shape alone: in a smaller window they would touch what is not theirs.
        windows = (link.rx_bytes, self._shape.request_window), (link.tx_bytes, self._shape.reply_window)
        if link.slots != self._shape.slots or any(found < needed.nbytes for found, needed in windows):
            return _ARGUMENT
        with self._lock:
            place = next((place for place in range(self._clients) if place not in self._taken), _FULL)
            if place >= 0:
                self._taken.add(place)
                self._server.attach(
                    place, request=link.rx, reply=link.tx, incarnation=link.client_incarnation
                )
        return place

    def remove_client(self, place: int) -> None:
        """Afterwards no pass knows its windows."""
        with self._lock:
            self._server.detach(place)
            self._settle()
            self._taken.discard(place)

    # -- experts -------------------------------------------------------------------------------------------------

    def set_expert(self, layer: int, expert: int, gate_up: int, down: int) -> int:
        """Copy an expert, packed at two addresses, into a slot, and read it back; a code of server.h.

        Raises:
            WeightsBroken: the device's memory holds something else than was written.
        """
        shape = self._experts
        if not (0 <= layer < shape.layers and 0 <= expert < shape.experts):
            return _ARGUMENT
        up_bytes = packed_bytes(Dtype.BFLOAT16, -(-shape.intermediate // 32), shape.hidden)
        down_bytes = packed_bytes(Dtype.BFLOAT16, -(-shape.hidden // 64), shape.intermediate)
        matrices = unpack_expert(
            PackedExpert(
                dtype=Dtype.BFLOAT16,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                gate_up=bytes_at(gate_up, up_bytes),
                down=bytes_at(down, down_bytes),
            )
        )
        with self._lock:
            slot = self._slot_of.get((layer, expert))
            if slot is not None:
                return _OK
            if not self._free:
                raise WeightsBroken(
                    f"expert {expert} of layer {layer} finds no room: {self._weights.slots} experts of "
                    f"{self._weights.expert_bytes / 2**20:.0f} MiB fit on {self._device}."
                    " Add servers, or fewer replicas."
                )
            slot = self._free.pop()
        self._weights.load(slot, *matrices)
        for name, found, wanted in zip(
            ("gate", "up", "down"), self._weights.unload(slot), matrices, strict=True
        ):
            if not np.array_equal(found.view(torch.int16).cpu().numpy().view(np.uint16), wanted):
                raise WeightsBroken(
                    f"{name} of expert {expert} of layer {layer} reads otherwise than it was written to "
                    f"{self._device}. See to its memory."
                )
        with self._lock:
            self._slot_of[layer, expert] = slot
            self._server.hold(layer, expert, slot)
        return _OK

    def clear_expert(self, layer: int, expert: int) -> None:
        """Serve an expert no more; on return its weights are no longer read."""
        with self._lock:
            slot = self._slot_of.pop((layer, expert), None)
            if slot is None:
                return
            self._server.hold(layer, expert, -1)
            self._settle()
            self._free.append(slot)

    # -- life ----------------------------------------------------------------------------------------------------

    def set_lease(self, boottime_ns: int) -> None:
        """Answer only before this CLOCK_BOOTTIME instant; 0 is for good."""
        # What is enqueued ends within its passes even where this process is frozen: nobody launches more.
        with self._lock:
            self._lease_ns = boottime_ns if self._lease_ns else 0
            self._server.pause(self._is_over())

    def run(self, max_ns: int) -> int:
        """Serve for at most that long; 1 when stopped."""
        until_s = time.monotonic() + max_ns / 1e9
        if self._device.type == "cuda" and not self._serving and not self._stopped.is_set():
            self._serving = True
            self._server.serve()
        while not self._stopped.is_set() and time.monotonic() < until_s:
            if self._device.type == "cuda":
                self._stopped.wait(_LOOK_S)
                self._server.check()
                with self._lock:
                    self._server.pause(self._is_over())
                continue
            self._turn()
        return int(self._stopped.is_set())

    def _turn(self) -> None:
        """One pass in the interpreter."""
        with self._turned:
            self._turning = True
        try:
            if self._is_over():
                time.sleep(_LOOK_S)
            else:
                batches, began_ns = self._server.counters()["batches"], time.monotonic_ns()
                self._server.enqueue_pass()
                if self._server.counters()["batches"] > batches:
                    self._busy_ns += time.monotonic_ns() - began_ns
        finally:
            with self._turned:
                self._turning = False
                self._turns += 1
                self._turned.notify_all()

    def _settle(self) -> None:
        """Wait until no pass can still know what tables said before the last write."""
        self._server.settle()
        with self._turned:
            seen = self._turns
            self._turned.wait_for(lambda: not self._turning or self._turns > seen)

    def stop(self) -> None:
        """Make `run` return 1."""
        self._stopped.set()

    def close(self) -> None:
        """End the passes."""
        self._server.stop()

    def counters(self) -> dict[str, int]:
        """By the names of ServerCounters."""
        counters = self._server.counters()
        # The interpreter's clock counts looks, and tells no time.
        return counters if self._device.type == "cuda" else counters | {"busy_ns": self._busy_ns}

    def _is_over(self) -> bool:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= self._lease_ns


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """Memory at an address, writable: uint8 [nbytes]."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
