"""What carries and computes rows, as clients, servers and their links see it.

Those decide who talks with whom; none of that depends on what carries the rows. `experts.cpu` implements the Protocols
here over native code, `experts.gpu.backend` over kernels, and tests put others in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from experts.model import Dtype
from experts.routes import Table
from experts.wire import WireShape
from p2p.endpoint import Window
from p2p.window import WindowLayout


class LinkRefused(ValueError):
    """A peer cannot be added: its windows have another layout, or every place is taken."""


class DeviceUnavailable(RuntimeError):
    """The device cannot be used here; the text says what was found, what is needed and how to get it."""


class ExpertsLost(Exception):
    """No live replica of some expert answered before the deadline. The client is usable again."""


@dataclass(frozen=True, kw_only=True)
class ServerLink:
    """One server as its client reaches it; both windows are laid out by p2p/native/window.h, with `slots` slots of
    `slot_bytes` payload.
    """

    tx: int  # the server's window, where requests are written: its address here
    tx_bytes: int
    rx: int  # this client's window for that server, where replies appear
    rx_bytes: int
    bell_page: int = 0  # address of the server's doorbell page; 0 where the transport has none
    server_incarnation: int
    liveness_fd: int = -1  # hangs up when the server's process ends; -1 where the transport has none
    slots: int
    slot_bytes: int
    lane: int = 0  # the client's lane that packs for this server and waits for it
    lanes: int = 1  # the server's, where each has the core of the client's lane of equal number, which wakes it; else 1


@dataclass(frozen=True, kw_only=True)
class ClientLink:
    """One client as its server reaches it. Both windows have `slots` slots of `slot_bytes` payload."""

    rx: int  # this server's window, where the client's requests appear: its address here
    rx_bytes: int
    tx: int  # the client's window, where replies are written
    tx_bytes: int
    bell_page: int = 0  # address of the client's doorbell page; 0 where the transport has none
    client_incarnation: int
    client_lanes: int = 1
    bell_lanes: int = 1  # of that page: all of the client's, or fewer; a lane that has none rings the last
    weight: int = 1  # of its rows where more wait than a batch holds; only CPUs heed it
    slots: int
    slot_bytes: int
    model: int = 0  # of the server's, the one that it asks for: as `ServerBackend.add_model` numbers them


class ServerState(IntEnum):
    """What has become of a server at its client."""

    EMPTY = 0
    ATTACHED = 1
    GONE = 2
    LEAVING = 3


@dataclass(frozen=True, kw_only=True)
class ServerStats:
    """What a client counted of one server since it was attached; latencies from ring to accepted reply."""

    rows: int = 0  # sent
    pairs: int = 0  # (token, k) pairs sent
    calls: int = 0  # chunks sent
    hedges: int = 0  # pairs overdue here that were sent elsewhere as well
    redispatches: int = 0  # pairs sent elsewhere because this server died or refused them
    lost: int = 0  # pairs that were still waiting for this server when a call failed
    corrupt: int = 0  # replies that failed validation
    # Sums over the replies accepted: their number, the pairs in flight as each was asked for, its latency, and the
    # time that the server reported.
    replies: int = 0
    in_flight: int = 0
    latency_sum_ns: int = 0
    service_sum_ns: int = 0
    extra: int = 0  # of the chunks sent here, hedges of what another server was slow to answer
    quarantined_until_ns: int = 0  # it gave corrupt replies; until then it is asked where no other replica exists
    held_slots: int = 0  # retired: until a late reply arrives, or for a while after a corrupt one
    lost_slots: int = 0  # of those: a later request was answered, so that theirs will hardly be
    state: int = ServerState.EMPTY
    speed: float = 0.0  # relative to the other servers, as rows are split by it


@dataclass(frozen=True, kw_only=True)
class ServerCounters:
    """What a server counted since it began."""

    batches: int = 0
    requests: int = 0  # answered OK
    rows: int = 0  # received in them
    pairs: int = 0  # (row, expert) pairs computed
    experts: int = 0  # activated, summed over batches
    busy_ns: int = 0  # from pick-up to reply, summed over batches
    not_held: int = 0  # requests refused: an expert is not here
    invalid: int = 0  # requests refused: not understood
    # What was computed, comparable across models: pairs, and for each activated expert as many as its reading costs,
    # each times hidden x intermediate / 64.
    work: int = 0
    received_bytes: int = 0  # rows as they lie in requests, without padding
    sent_bytes: int = 0  # rows of replies


class HostArrays(NamedTuple):
    """Arguments of `expert_apply` (client.h), in its order: arrays by address, contiguous in the host's memory."""

    layer: int  # counted over MoE layers
    rows: int  # [n, hidden]
    rows_type: Dtype  # FLOAT32 or BFLOAT16, converted where the client's is another
    n: int
    ids: int  # [n, top_k] experts; -1: none, which contributes nothing
    id_bytes: int  # of an integer: 2, 4 or 8
    weights: int  # [n, top_k] float32
    out: int  # [n, hidden], overwritten last; may be `rows`
    out_type: Dtype


class ClientBackend(Protocol):
    """A client's end: rows to servers by the routes, and what comes back combined. For use from any thread."""

    @property
    def handle(self) -> int:
        """Address of the native client, for the decoder's `expert_call`; 0 where kernels make the calls."""
        ...

    @property
    def adopted_epoch(self) -> int:
        """Newest epoch whose routes are in use; nothing that is under way was asked by older ones."""
        ...

    def add_server(self, link: ServerLink) -> int:
        """A place for a server, as the routes name it.

        Raises:
            LinkRefused: there is none, or the windows have another layout than was agreed.
        """
        ...

    def remove_server(self, place: int) -> None:
        """Ask nothing of it any more; `is_idle` says when its windows are nobody's."""
        ...

    def is_idle(self, place: int) -> bool:
        """Whether nothing touches the windows of a removed server any more."""
        ...

    def publish(self, epoch: int, table: Table) -> None:
        """Use these routes, as `experts.routes.table_of` gives them, at the next call's beginning at the latest.

        Raises:
            MemoryError: nothing has changed.
        """
        ...

    def stats(self, place: int) -> ServerStats:
        """What was seen of a server."""
        ...

    def take_routed(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Rows sent to each expert since the last time, and calls that had any: [layers * experts] each."""
        ...

    def apply(self, arrays: HostArrays, wait_ns: int) -> None:
        """Calls with rows in the host's memory, by one thread at a time.

        Args:
            wait_ns: Of each call: with many rows there are several.

        Raises:
            ExpertsLost, ValueError, MemoryError: as `experts.client.ExpertClient.apply`.
            TypeError: rows lie in a device's memory here; a decoder launches the calls.
        """
        ...

    def close(self) -> None:
        """Free everything; no call is running, and every server is idle."""
        ...


class ServerBackend(Protocol):
    """A server's end: takes requests out of its clients' windows, computes, replies. For use from any thread.

    Model 0 is the one that it began with.
    """

    def add_model(self, wire: WireShape) -> int:
        """Serve one more model beside the others, in the same batches; its number.

        Raises:
            ValueError: there is no place or memory for it, or it cannot be computed beside the first.
        """
        ...

    def remove_model(self, model: int) -> None:
        """Its number may be another's from now on.

        Raises:
            ValueError: it is the first, or has clients or experts; nothing has changed.
        """
        ...

    def add_client(self, link: ClientLink) -> int:
        """A place for a client, whose requests are answered from now on.

        Raises:
            LinkRefused: there is none, or the windows have another layout than was agreed.
        """
        ...

    def remove_client(self, place: int) -> None:
        """On return its memory is touched no more."""
        ...

    def set_expert(
        self, layer: int, expert: int, gate_up: NDArray[np.uint8], down: NDArray[np.uint8], model: int = 0
    ) -> None:
        """Answer for an expert, packed as `experts.kernels` has it; the arrays stay until it is cleared.

        Raises:
            ValueError: there is no such expert.
            WeightsBroken: a device's memory holds something else than was written, or has no room.
        """
        ...

    def clear_expert(self, layer: int, expert: int, model: int = 0) -> None:
        """Answer for an expert no more; on return its weights are no longer read."""
        ...

    def take_doubtful(self, model: int = 0) -> tuple[int, int] | None:
        """(layer, expert) of one that gave a row that is not finite since the last time; None: none was seen."""
        ...

    def set_lease(self, boottime_ns: int) -> None:
        """Answer only before this CLOCK_BOOTTIME instant; 0 is for good."""
        ...

    def run(self, max_ns: int) -> bool:
        """Serve for at most that long, from one thread; True when stopped.

        Raises:
            MemoryError: none is left for a batch; its requests stay unanswered.
        """
        ...

    def turns(self) -> int | None:
        """What rises while requests are looked for or answered; None while none are, or where nobody can see it."""
        ...

    def stop(self) -> None:
        """Make `run` return, now and from then on."""
        ...

    def counters(self) -> ServerCounters:
        """What was served so far, of all models that there ever were."""
        ...

    def close(self) -> None:
        """Free everything; no thread is in `run`."""
        ...


class Backend(Protocol):
    """One way to carry and compute rows.

    Attributes:
        wire_version: Both sides must speak the same one.
        most_slot_bytes: Payload that a server grants a slot, at most.
        rings_lanes: Whether each lane of a server waits on a doorbell of its own.
    """

    wire_version: int
    most_slot_bytes: int
    rings_lanes: bool

    def numerics_class(self, dtype: Dtype) -> str:
        """Name of its arithmetic in a dtype: equal names promise equal bits.

        Raises:
            ValueError: it has none.
        """
        ...

    def self_test(self, dtype: Dtype) -> None:
        """Compare the arithmetic with its definition.

        Raises:
            KernelsBroken: they differ by more than rounding explains.
        """
        ...

    def window(self, wire: WireShape, most_tokens: int, slots: int) -> WindowLayout:
        """Windows of a client, both ways, for calls of at most `most_tokens`; `slots` for each server.

        Raises:
            ValueError: none fits.
        """
        ...

    def prepare(self, window: Window, layout: WindowLayout) -> None:
        """Make a fresh window, all zero, ready for its peer."""
        ...

    def client(
        self, wire: WireShape, *, incarnation: int, lanes: int, bell_page: int, max_tokens: int, patience_s: float
    ) -> ClientBackend:
        """A client of a model.

        Args:
            bell_page: Address of this process's doorbell page; 0 where the transport has none.
            max_tokens: Of a call.
            patience_s: How long a call waits for experts that no live server has; 0: until its deadline.

        Raises:
            ValueError: a size is out of range.
        """
        ...

    def reserve(self, wire: WireShape) -> int:
        """Take the memory for the next server's experts; (layer, expert) pairs that fit, 0: all.

        Raises:
            ValueError: none fits, or it cannot compute such experts.
        """
        ...

    def server(self, wire: WireShape, *, incarnation: int, cores: Sequence[int], bell_page: int) -> ServerBackend:
        """A server of a model.

        Args:
            cores: One for each lane, -1 unpinned.

        Raises:
            ValueError: the lanes cannot be started, or it cannot compute such experts.
        """
        ...
