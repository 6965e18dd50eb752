"""The expert server's end: one pass (take, compute, reply) as kernels alone, and many passes enqueued ahead.

Nothing of a pass is the host's business. PASSES of them are captured as one CUDA graph, and a thread keeps LAUNCHES of
these graphs enqueued: one launch by the host for 256 passes. It looks at a counter of passes in host memory that the
last kernel of a pass writes. An idle pass lasts `idle_s`; once the stop word is set a pass ends as soon as it begins,
so that what is enqueued is over in milliseconds.

Clients and experts come and go by writes into tables. A client's row is filled, then made live; it is taken back by
the reverse, and its windows may be unmapped after `detach` returned, which waits until no pass can still know them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from experts.gpu.gather import gather
from experts.gpu.layout import (
    SCALE_GROUP,
    CountWord,
    ExchangeShape,
    HostWord,
    PeerWord,
    RowsBack,
    RowsOut,
    ServerWord,
)
from experts.gpu.reply import reply
from experts.gpu.tables import ServerTables, signed
from experts.gpu.take import take

PASSES = 256  # of one graph
LAUNCHES = 2  # enqueued: one runs, one waits
IDLE_S = 0.001
LOOK_S = 0.0005


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What a pass computes: its tensors never move, what is in them does.

    Attributes:
        rows: bf16 [R, hidden], or e4m3 with scales.
        scales: float32 [R, hidden / 128], or None.
        row_of: int32 [P], pair to row.
        slots: int32 [P], weight slot of each pair; -1: nothing is to be computed.
        n_pairs: int32 [1], pairs there are.
        out: [P, hidden], bf16 or float32, to be filled by pair.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_of: torch.Tensor
    slots: torch.Tensor
    n_pairs: torch.Tensor
    out: torch.Tensor


class Compute(Protocol):
    """Launches what fills `batch.out`: experts of any kind."""

    def __call__(self, batch: Batch) -> None:
        """Enqueue on the current stream; may be captured."""
        ...


class DeviceServer:
    """Answers requests of clients that write into its windows.

    Args:
        shape: Agreed with the clients.
        clients: Places for clients, at most 64.
        compute: The experts.
        incarnation: This server's own, u64.
        device: A GPU, or "cpu" in the interpreter.
        keep_e4m3: Whether the experts take e4m3 rows and their scales as they travel.
        idle_s: How long a pass waits for a first request, at most.
    """

    def __init__(
        self,
        shape: ExchangeShape,
        *,
        clients: int,
        compute: Compute,
        incarnation: int,
        device: torch.device | str,
        keep_e4m3: bool = False,
        idle_s: float = IDLE_S,
    ) -> None:
        if not 0 < idle_s <= IDLE_S:
            raise ValueError(
                f"idle_s is {idle_s}; above 0 and at most {IDLE_S}: a stop must not wait for passes."
            )
        if keep_e4m3 and shape.rows_out is not RowsOut.E4M3:
            raise ValueError("keep_e4m3 with rows that travel as bf16; choose e4m3 rows or leave it out.")
        self.tables = ServerTables(shape, clients=clients, incarnation=incarnation, device=device)
        self._compute, self._idle_ns = compute, int(idle_s * 1e9)
        on, rows = self.tables.device, clients * shape.capacity
        scales = torch.zeros(rows, shape.hidden // SCALE_GROUP, device=on) if keep_e4m3 else None
        back = torch.bfloat16 if shape.rows_back is RowsBack.BF16 else torch.float32
        self.batch = Batch(
            rows=torch.zeros(
                rows, shape.hidden, dtype=torch.float8_e4m3fn if keep_e4m3 else torch.bfloat16, device=on
            ),
            scales=scales,
            row_of=self.tables.row_of,
            slots=self.tables.slots,
            n_pairs=self.tables.n_pairs,
            out=torch.zeros(self.tables.pairs, shape.hidden, dtype=back, device=on),
        )
        self._writes = torch.cuda.Stream(on) if on.type == "cuda" else None
        self._stream = torch.cuda.Stream(on, priority=-1) if on.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_passes = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._paused = False
        self.launches = 0

    @property
    def passes(self) -> int:
        """Passes done, by the counter that the kernels keep in host memory."""
        return int(self.tables.host[HostWord.PASSES])

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
            self.tables.done[place].zero_()
            self.tables.rejected[place].zero_()
            self.tables.peers[place].copy_(row)
            # Live last: a pass that sees it sees the rest.
            self.tables.peers[place, PeerWord.LIVE].fill_(1)

        self._write(write)

    def detach(self, place: int, timeout_s: float = 5.0) -> None:
        """Serve a client no more; idempotent. Afterwards no pass knows its windows.

        Raises:
            ValueError: no such place.
            TimeoutError: the passes do not get on.
        """
        if not 0 <= place < self.tables.clients:
            raise ValueError(f"place is {place}; 0 to {self.tables.clients - 1} exist.")
        self._write(lambda: self.tables.peers[place, PeerWord.LIVE].fill_(0))
        self.settle(timeout_s)

    def settle(self, timeout_s: float = 5.0) -> None:
        """Wait until no pass can still know what tables said before the last write.

        Raises:
            TimeoutError: the passes do not get on.
        """
        if self._thread is None:
            return
        # One that began before the write may still know it; the next does not.
        needed, end_s = self.passes + 2, time.monotonic() + timeout_s
        while self.passes < needed and self._thread.is_alive():
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"no two passes ended in {timeout_s} s; the device is stuck. Restart the server."
                )
            time.sleep(LOOK_S)

    def hold(self, layer: int, expert: int, slot: int) -> None:
        """Answer for an expert whose weights lie in `slot`; -1: no more. From the next pass on.

        Raises:
            ValueError: no such layer or expert.
        """
        shape = self.tables.shape
        if not (0 <= layer < shape.layers and 0 <= expert < shape.experts):
            raise ValueError(
                f"expert {expert} of layer {layer}; there are {shape.experts} of {shape.layers} layers."
            )
        self._write(lambda: self.tables.held[layer, expert].fill_(slot))

    def enqueue_pass(self) -> None:
        """Launch one pass on the current stream; may be captured. In the interpreter, run it."""
        take(self.tables, self._idle_ns)
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
            raise ValueError("this server serves already; stop it first.")
        # Tables and scratch were made on other streams: what is zero to begin with must be so by now.
        torch.cuda.synchronize(self.tables.device)
        self._set_stop(1)
        with torch.cuda.stream(self._stream):
            # Code is loaded now: later that might wait for a device that is never idle.
            self.enqueue_pass()
        torch.cuda.synchronize(self.tables.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; this one does nothing that a graph cannot hold.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(passes):
                self.enqueue_pass()
        self._graph, self._graph_passes = graph, passes

    def serve(self) -> None:
        """Keep the captured passes enqueued from a thread of its own until `stop`; captures them if need be.

        Raises:
            ValueError: there is no GPU, or this server serves already.
        """
        if self._graph is None:
            self.capture()
        if self._thread is not None:
            raise ValueError("this server serves already; stop it first.")
        self._stopping.clear()
        self._set_stop(int(self._paused))
        self._thread = threading.Thread(target=self._feed, name="expert-passes", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the passes; idempotent.

        Raises:
            TimeoutError: they do not end.
            RuntimeError: they had failed before; the cause is attached.
        """
        self._set_stop(1)
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                raise TimeoutError(
                    f"passes did not end in {timeout_s} s; the device is stuck. Restart the server."
                )
            self._thread = None
        self.check()

    def pause(self, paused: bool) -> None:
        """Have every pass end as soon as it begins, or no longer. Cheap where nothing changes."""
        if paused != self._paused:
            self._paused = paused
            self._set_stop(int(paused))

    def check(self) -> None:
        """Whether the passes still run.

        Raises:
            RuntimeError: they ended by an error of the device; the cause is attached.
        """
        if self._failure is not None:
            raise RuntimeError("the passes ended by an error of the device.") from self._failure

    def counters(self) -> dict[str, int]:
        """Requests by status, rows, pairs, experts activated, busy time and batches so far, as of the last pass.

        Of what the kernels wrote into host memory: the device is not asked.
        """
        values = self.tables.host[HostWord.COUNTS :].tolist()
        return {word.name.lower(): values[word] for word in CountWord if word is not CountWord.WORDS}

    def served(self) -> np.ndarray:
        """Pairs asked of each expert so far, int64 [layers, experts]. Asks the device."""
        return self.tables.served.cpu().numpy()

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

    def _set_stop(self, value: int) -> None:
        self._write(lambda: self.tables.control[ServerWord.STOP : ServerWord.STOP + 1].fill_(value))

    def _write(self, write: Callable[[], object]) -> None:
        if self._writes is None:
            write()
            return
        # Beside the passes, which never leave their stream idle.
        with torch.cuda.stream(self._writes):
            write()
        self._writes.synchronize()
