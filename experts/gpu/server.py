"""The expert server's end: one pass (poll, compute, reply) as kernels alone, and many passes enqueued ahead.

Nothing of a pass is the host's business. PASSES of them are captured as one CUDA graph, and a thread keeps LAUNCHES of
these graphs enqueued: one launch by the host for 256 passes. It looks at a counter of passes in host memory that the
last kernel of a pass writes. An idle pass lasts `idle_s`; once the stop word is set a pass ends as soon as it begins,
so that what is enqueued is over in milliseconds. Passes outlive a host that freezes: the lease's end is known to them.

Clients and experts come and go by writes into tables. A client's row is filled, then made live; it is taken back by
the reverse, and its windows may be unmapped after `detach` returned, which waits until no pass can still know them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from experts.backend import ClientLink, LinkRefused, ServerCounters
from experts.gpu.client import ACTIVATION_PAIRS
from experts.gpu.ffn import grouped_ffn
from experts.gpu.gather import gather
from experts.gpu.group import Groups, group
from experts.gpu.layout import SCALE_GROUP, CountWord, ExchangeShape, HostWord, PeerWord, RowsOut, ServerWord
from experts.gpu.poll import poll
from experts.gpu.reply import reply
from experts.gpu.tables import NO_BUDGET_NS, ServerTables, fill, signed
from experts.gpu.weights import FP8_TILE, ExpertWeights, Fp8ExpertWeights
from experts.kernels import PackedExpert, Weights, WeightsBroken, unpack_expert
from experts.quantized import Quantized
from experts.wire import WireShape
from p2p.device import CLOCK_STEP_NS, INTERPRET

PASSES = 256  # of one graph
LAUNCHES = 2  # enqueued: one runs, one waits
IDLE_S = 0.001
LOOK_S = 0.0005
CHECK_S = 0.05
SETTLE_S = 30.0 if INTERPRET else 5.0  # the longest that two passes may take


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What a pass computes: its tensors never move, what is in them does.

    Attributes:
        rows: bf16 [R, hidden], or float8_e4m3fn with scales.
        scales: float32 [R, hidden / 128], or None.
        row_of: int32 [P], pair to row.
        slots: int32 [P], weight slot of each pair; -1: nothing is to be computed.
        n_pairs: int32 [1], pairs there are.
        out: bf16 or, outside of a server, float32 [P, hidden], to be filled by pair.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_of: torch.Tensor
    slots: torch.Tensor
    n_pairs: torch.Tensor
    out: torch.Tensor


Compute: TypeAlias = Callable[[Batch], None]
"""Launches what fills `batch.out`, experts of any kind, on the current stream; may be captured."""


class GroupedExperts:
    """Computes a pass's pairs with the experts that lie in slots: a `Compute`. Float8 experts take float8 rows."""

    def __init__(self, weights: ExpertWeights | Fp8ExpertWeights, pairs: int, device: torch.device) -> None:
        self.weights = weights
        self._groups = Groups.allocate(pairs=pairs, slots=weights.slots, tile=weights.widest_group, device=device)
        kind = weights.gate_up.dtype
        self._act = torch.zeros(pairs, weights.act_width, dtype=kind, device=device)
        self._act_scales = (
            torch.zeros(pairs, weights.act_width // FP8_TILE, device=device)
            if isinstance(weights, Fp8ExpertWeights)
            else None
        )

    def __call__(self, batch: Batch) -> None:
        group(batch.slots, batch.n_pairs, self._groups)
        grouped_ffn(
            batch.rows, batch.row_of, self._groups, self.weights, self._act, batch.out, batch.scales, self._act_scales
        )  # fmt: skip


class GpuServer:
    """Answers requests of clients that write into its windows: `experts.backend.ServerBackend`.

    Args:
        clients: Places for clients, at most 64.
        incarnation: This server's own, u64.
        device: A GPU, or "cpu" in the interpreter.
        idle_s: How long a pass waits for a first request, at most.
        weights: What `set_expert` loads and `compute` reads; None where the experts come otherwise.
    """

    def __init__(
        self, shape: ExchangeShape, *, clients: int, compute: Compute, incarnation: int,
        device: torch.device | str, idle_s: float = IDLE_S,
        weights: ExpertWeights | Fp8ExpertWeights | None = None,
    ) -> None:  # fmt: skip
        if not 0 < idle_s <= IDLE_S:
            raise ValueError(f"idle_s is {idle_s}; above 0 and at most {IDLE_S}: a stop must not wait for passes.")
        self.tables = ServerTables(shape, clients=clients, incarnation=incarnation, device=device)
        self._compute, self._idle_ns, self._weights = compute, int(idle_s * 1e9), weights
        on, rows = self.tables.device, clients * shape.capacity
        narrow = shape.rows_out is RowsOut.E4M3
        scales = torch.zeros(rows, shape.hidden // SCALE_GROUP, device=on) if narrow else None
        self.batch = Batch(
            rows=torch.zeros(rows, shape.hidden, dtype=torch.float8_e4m3fn if narrow else torch.bfloat16, device=on),
            scales=scales,
            row_of=self.tables.row_of,
            slots=self.tables.slots,
            n_pairs=self.tables.n_pairs,
            out=torch.zeros(self.tables.pairs, shape.hidden, dtype=torch.bfloat16, device=on),
        )
        self._writes = torch.cuda.Stream(on) if on.type == "cuda" else None
        self._stream = torch.cuda.Stream(on, priority=-1) if on.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_passes = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self.launches = 0
        # Guards what follows; passes go on meanwhile.
        self._lock = threading.Lock()
        self._free = list(range(weights.slots)) if weights is not None else []
        self._slot_of: dict[tuple[int, int], int] = {}
        self._taken: set[int] = set()
        self._lease_ns = (1 << 63) - 1
        self._ended = threading.Event()
        # The interpreter's passes: whether there are any, and how many ended.
        self._turned = threading.Condition()
        self._turning, self._turns = False, 0
        self._busy_ns = 0

    @property
    def passes(self) -> int:
        """Passes done, by the counter that the kernels keep in host memory."""
        return int(self.tables.host[HostWord.PASSES])

    # -- clients -------------------------------------------------------------------------------------------------

    def add_client(self, link: ClientLink) -> int:
        # Kernels go by the shape alone: in a smaller window they would touch what is not theirs.
        self.tables.shape.require_windows(link.slots, request_bytes=link.rx_bytes, reply_bytes=link.tx_bytes)
        with self._lock:
            free = set(range(self.tables.clients)) - self._taken
            if not free:
                raise LinkRefused(f"all {self.tables.clients} places for clients are taken.")
            place = min(free)
            self.attach(place, request=link.rx, reply=link.tx, incarnation=link.client_incarnation)
            self._taken.add(place)
        return place

    def remove_client(self, place: int) -> None:
        """Afterwards no pass knows its windows."""
        with self._lock:
            self.detach(place)
            self._taken.discard(place)

    def attach(self, place: int, *, request: int, reply: int, incarnation: int) -> None:
        """Serve a client from the next pass on.

        Args:
            request: Address of its request window here, all zero.
            reply: Address of the reply window at the client.
            incarnation: The client's, u64.

        Raises:
            ValueError: the place does not exist or is taken, or an address is not a multiple of 64.
        """
        if not 0 <= place < self.tables.clients:
            raise ValueError(f"place is {place}; 0 to {self.tables.clients - 1} exist.")
        if request % 64 or reply % 64:
            raise ValueError(f"windows at {request:#x} and {reply:#x}; multiples of 64 bytes are needed.")
        if int(self.tables.peers[place, PeerWord.LIVE]):
            raise ValueError(f"place {place} is taken; detach its client first.")
        row = torch.tensor([request, reply, signed(incarnation), 0], dtype=torch.int64)

        def write() -> None:
            fill(self.tables.done[place], 0)
            fill(self.tables.rejected[place], 0)
            self.tables.peers[place].copy_(row)
            # Live last: a pass that sees it sees the rest.
            fill(self.tables.peers[place, PeerWord.LIVE], 1)

        self._write(write)

    def detach(self, place: int, timeout_s: float = SETTLE_S) -> None:
        """Serve a client no more; idempotent. Afterwards no pass knows its windows.

        Raises:
            ValueError: no such place.
            TimeoutError: the passes do not get on.
        """
        if not 0 <= place < self.tables.clients:
            raise ValueError(f"place is {place}; 0 to {self.tables.clients - 1} exist.")
        self._write(lambda: fill(self.tables.peers[place, PeerWord.LIVE], 0))
        self.settle(timeout_s)

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until no pass can still know what tables said before the last write.

        Raises:
            TimeoutError: the passes do not get on.
        """
        end_s = time.monotonic() + timeout_s
        with self._turned:
            seen = self._turns
            settled = self._turned.wait_for(lambda: not self._turning or self._turns > seen, timeout_s)
        # One that began before the write may still know it; the next does not.
        needed = self.passes + 2
        while settled and self._thread is not None and self._thread.is_alive() and self.passes < needed:
            settled = time.monotonic() < end_s
            time.sleep(LOOK_S)
        if not settled:
            raise TimeoutError(f"passes do not get on in {timeout_s} s; the device is stuck. Restart the server.")

    def hold(self, layer: int, expert: int, slot: int) -> None:
        """Answer for an expert whose weights lie in `slot`; -1: no more. From the next pass on.

        Raises:
            ValueError: no such layer or expert.
        """
        shape = self.tables.shape
        if not (0 <= layer < shape.layers and 0 <= expert < shape.experts):
            raise ValueError(f"expert {expert} of layer {layer}; there are {shape.experts} of {shape.layers} layers.")
        self._write(lambda: fill(self.tables.held[layer, expert], slot))

    # -- experts -------------------------------------------------------------------------------------------------

    def add_model(self, wire: WireShape) -> int:
        """Always raises ValueError: kernels are compiled for the shape of one model."""
        raise ValueError(
            f"{wire.shape} cannot be served beside another model on {self.tables.device}: a GPU's server has one."
            " Start servers of its own for it, or serve both on CPUs."
        )

    def remove_model(self, model: int) -> None:
        """Always raises ValueError: there is only the first."""
        raise ValueError(f"model {model} is the first, which stays.")

    def set_expert(
        self, layer: int, expert: int, gate_up: NDArray[np.uint8], down: NDArray[np.uint8], model: int = 0
    ) -> None:
        """Copy a packed expert into a slot, read it back, and answer for it."""
        weights, shape = self._weights, self.tables.shape
        if weights is None or not (0 <= layer < shape.layers and 0 <= expert < shape.experts):
            raise ValueError(f"expert {expert} of layer {layer} is outside {shape}, or has no slot.")
        packed = PackedExpert(
            dtype=weights.dtype, hidden=weights.hidden, intermediate=weights.intermediate, gate_up=gate_up, down=down
        )
        matrices = unpack_expert(packed)
        with self._lock:
            if (layer, expert) in self._slot_of:
                return
            if not self._free:
                raise WeightsBroken(
                    f"expert {expert} of layer {layer} finds no room: {weights.slots} experts of "
                    f"{weights.expert_bytes / 2**20:.0f} MiB fit on {self.tables.device}."
                    " Add servers, or fewer replicas."
                )
            # One that reads otherwise than it was written is nobody's any more.
            slot = self._free.pop()
        self._write(lambda: weights.load(slot, *matrices))  # type: ignore[arg-type]
        with torch.cuda.stream(self._writes):
            read = [_parts(matrix) for matrix in weights.unload(slot)]
        for name, found, wanted in zip(("gate", "up", "down"), read, matrices, strict=True):
            if not all(map(np.array_equal, found, _parts(wanted))):
                raise WeightsBroken(
                    f"{name} of expert {expert} of layer {layer} reads otherwise than it was written to "
                    f"{self.tables.device}. See to its memory."
                )
        with self._lock:
            self._slot_of[layer, expert] = slot
            self.hold(layer, expert, slot)

    def clear_expert(self, layer: int, expert: int, model: int = 0) -> None:
        with self._lock:
            slot = self._slot_of.pop((layer, expert), None)
            if slot is None:
                return
            self.hold(layer, expert, -1)
            self.settle()
            self._free.append(slot)

    def take_doubtful(self, model: int = 0) -> None:
        """Kernels do not look at their rows: they tell of none."""

    # -- life ----------------------------------------------------------------------------------------------------

    def set_lease(self, boottime_ns: int) -> None:
        """Answer only before this CLOCK_BOOTTIME instant; 0 is for good. Early by as long as no pass has ended."""
        with self._lock:
            self._lease_ns = boottime_ns if self._lease_ns else 0
            self._tell_lease()

    def _tell_lease(self) -> None:
        seen_ns = int(self.tables.host[HostWord.CLOCK_NS])
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if self._writes is None:
            seen_ns = now_ns  # in the interpreter both clocks are one
        self._set_control(ServerWord.LEASE_NS, lease_on_device(self._lease_ns, now_ns, seen_ns))

    def run(self, max_ns: int) -> bool:
        """Serve for at most that long; True when stopped.

        Raises:
            RuntimeError: the passes ended by an error of the device.
        """
        until_s = time.monotonic() + max_ns / 1e9
        on_gpu = self.tables.device.type == "cuda"
        if on_gpu and self._thread is None and not self._ended.is_set():
            self.serve()
        while not self._ended.is_set() and time.monotonic() < until_s:
            if not on_gpu:
                self._turn()
                continue
            self._ended.wait(CHECK_S)
            self.check()
        return self._ended.is_set()

    def turns(self) -> int | None:
        """Passes that ended, also without a lease. None before they run: they are compiled and captured first."""
        return self.passes if self._thread is not None else self._turns or None

    def _turn(self) -> None:
        """One pass in the interpreter."""
        with self._turned:
            self._turning = True
        try:
            batches, began_ns = self.counters().batches, time.monotonic_ns()
            self.enqueue_pass()
            if self.counters().batches > batches:
                self._busy_ns += time.monotonic_ns() - began_ns
        finally:
            with self._turned:
                self._turning = False
                self._turns += 1
                self._turned.notify_all()

    def stop(self) -> None:
        self._ended.set()

    def close(self) -> None:
        self.end_passes()

    # -- passes --------------------------------------------------------------------------------------------------

    def enqueue_pass(self) -> None:
        """Launch one pass on the current stream; may be captured. In the interpreter, run it."""
        poll(self.tables, self._idle_ns)
        gather(self.tables, self.batch.rows, self.batch.scales)
        self._compute(self.batch)
        reply(self.tables, self.batch.out)

    def capture(self, passes: int = PASSES) -> None:
        """Capture `passes` passes as one graph, which `serve` enqueues. It waits for the whole device to be idle.

        Raises:
            ValueError: there is no GPU, or this server serves already.
        """
        if self.tables.device.type != "cuda":
            raise ValueError("passes are captured on a GPU; in the interpreter call enqueue_pass() in turn.")
        if self._thread is not None:
            raise ValueError("this server serves already; end its passes first.")
        # Tables and scratch were made on other streams: what is zero to begin with must be so by now.
        torch.cuda.synchronize(self.tables.device)
        self._set_control(ServerWord.STOP, 1)
        with torch.cuda.stream(self._stream):
            # Code is loaded now: later that might wait for a device that is never idle.
            self.enqueue_pass()
        torch.cuda.synchronize(self.tables.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; this one does nothing that a graph cannot hold.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(passes):
                self.enqueue_pass()
        if self._weights is not None:
            # What `set_expert` runs, and the memory that it takes: freeing any might wait for a device that is never
            # idle. The slot holds afterwards what it held.
            self._write(lambda: self._weights.load(0, *self._weights.unload(0)))  # type: ignore[arg-type,union-attr]
        self._graph, self._graph_passes = graph, passes

    def serve(self) -> None:
        """Keep the captured passes enqueued from a thread of its own until `end_passes`; captures them if need be.

        Raises:
            ValueError: there is no GPU, or this server serves already.
        """
        if self._graph is None:
            self.capture()
        if self._thread is not None:
            raise ValueError("this server serves already; end its passes first.")
        self._stopping.clear()
        with self._lock:
            self._tell_lease()
        self._set_control(ServerWord.STOP, 0)
        self._thread = threading.Thread(target=self._feed, name="expert-passes", daemon=True)
        self._thread.start()

    def end_passes(self, timeout_s: float = 10.0) -> None:
        """End the passes; idempotent.

        Raises:
            TimeoutError: they do not end.
            RuntimeError: they had failed before; the cause is attached.
        """
        self._set_control(ServerWord.STOP, 1)
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                raise TimeoutError(f"passes did not end in {timeout_s} s; the device is stuck. Restart the server.")
            self._thread = None
        self.check()

    def check(self) -> None:
        """Whether the passes still run.

        Raises:
            RuntimeError: they ended by an error of the device; the cause is attached.
        """
        if self._failure is not None:
            raise RuntimeError("the passes ended by an error of the device.") from self._failure

    def counters(self) -> ServerCounters:
        """As of the last pass, from what the kernels wrote into host memory: the device is not asked."""
        values = self.tables.host[HostWord.COUNTS :].tolist()
        counted = {word.name.lower(): values[word] for word in CountWord if word is not CountWord.WORDS}
        if self._turns:
            # The interpreter's clock counts looks, and tells no time.
            counted["busy_ns"] = self._busy_ns
        shape, weights = self.tables.shape, self._weights
        counted["received_bytes"] = counted["rows"] * shape.row_words * 4
        counted["sent_bytes"] = counted["pairs"] * shape.answer_words * 4
        if weights is not None:
            rows = counted["pairs"] + int(ACTIVATION_PAIRS) * counted["experts"]
            counted["work"] = weights.hidden * weights.intermediate // 64 * rows
        return ServerCounters(**counted)

    def _feed(self) -> None:
        passes = self._graph_passes
        try:
            with torch.cuda.stream(self._stream):
                wanted = self.passes
                while not self._stopping.is_set():
                    while wanted - self.passes < LAUNCHES * passes:
                        self._graph.replay()  # type: ignore[union-attr]
                        self.launches += 1
                        wanted += passes
                    self._stopping.wait(LOOK_S)
                self._stream.synchronize()  # type: ignore[union-attr]
        except RuntimeError as error:
            self._failure = error

    def _set_control(self, word: ServerWord, value: int) -> None:
        self._write(lambda: fill(self.tables.control[word], value))

    def _write(self, write: Callable[[], object]) -> None:
        if self._writes is None:
            write()
            return
        # Beside the passes, which never leave their stream idle.
        with torch.cuda.stream(self._writes):
            write()
        self._writes.synchronize()


def lease_on_device(boottime_ns: int, now_ns: int, seen_ns: int) -> int:
    """When a lease ends by the device's clock, early rather than late.

    Args:
        boottime_ns: When it ends by CLOCK_BOOTTIME.
        now_ns: CLOCK_BOOTTIME, read after the device's clock: what lies between brings the end forward.
        seen_ns: The device's clock, which may be a step further by now.
    """
    return min(seen_ns + boottime_ns - now_ns - CLOCK_STEP_NS, NO_BUDGET_NS)


def _parts(matrix: Weights | torch.Tensor) -> tuple[NDArray[np.generic], ...]:
    """What a matrix is made of, in the host's memory: bits of bfloat16 as uint16; or codes and scales."""
    if isinstance(matrix, Quantized):
        return matrix.codes, matrix.scales
    if isinstance(matrix, torch.Tensor):
        return (matrix.view(torch.int16).cpu().numpy().view(np.uint16),)
    return (matrix,)
