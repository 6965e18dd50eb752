"""Packed experts from one server to another: put into the taker's window piece by piece, as fast as it asks.

The window has SLOTS slots. The piece of sequence s goes into the payload of slot s % SLOTS, and then s becomes that
slot's signal. The taker asks for a piece only when it has copied what its slot held before, so that it sets the pace,
and no more than the window is ever under way. It looks at no header: what it copied is compared with the digest of
the whole expert.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from experts.links import CONNECT_BACK_S, brief
from experts.manifest import Manifest, ManifestInvalid, PackLayout
from experts.pack import PackedExperts
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from p2p.descriptor import decode
from p2p.endpoint import Endpoint, P2PError, Peer, Window
from p2p.frame import PAYLOAD_OFFSET
from p2p.window import WindowLayout
from router.access import EXPERT
from router.connection import PLAIN, channel_to
from router.tls import Credentials
from router.view import Member

log = logging.getLogger(__name__)

WINDOW = WindowLayout(slots=4, payload_bytes=1 << 20)
TAKERS = 4
LOW_NICE = 19
STREAM_S = 120.0
ASK_S = 2.0
PIECE_S = 5.0

_POLL_S = 0.0002
_LEAVE_S = 1.0


class Refused(Exception):
    """What a server is asked and does not do; the text says why, `code` is the gRPC status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class SourceFailed(Exception):
    """An expert could not be had from one source; the text says why."""


def at_low_priority() -> None:
    """Let rows come before what this thread does from now on."""
    # Not SCHED_IDLE: a thread that may starve must never hold the interpreter's lock.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_NICE)


class WeightSender:
    """Gives what one server serves. For use from any thread.

    Args:
        endpoint: The server's.
        packed: Its weights, of each model that it has now.
        serves: Whether this server vouches for the bytes of (model hash, layer, expert): it verified them itself.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        packed: Callable[[], Sequence[PackedExperts]],
        serves: Callable[[str, int, int], bool],
    ) -> None:
        self._endpoint, self._packed, self._serves = endpoint, packed, serves
        self._lock = threading.Lock()
        self._takers = Counter[str]()  # by what they are being given
        self._closed = False
        # One thread for all takers: what this costs the rows has a bound.
        self._putting = ThreadPoolExecutor(1, "weight-sender", initializer=at_low_priority)

    def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply:
        """What the experts are.

        Raises:
            Refused: another server or model was meant.
        """
        known = {packed.layout.fingerprint: packed for packed in self._packed()}
        packed = self._find(request.server_incarnation, "model", request.model_hash, known)
        return pb.ManifestReply(manifest=packed.manifest.encode())

    def give(self, requests: Iterator[pb.GiveRequest], remaining_s: float | None) -> pb.GiveReply:
        """Serve one taker until it has no more requests. Blocks.

        Raises:
            Refused: it asks for what it cannot be given.
        """
        if remaining_s is None or remaining_s > STREAM_S + 1:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"a deadline of {STREAM_S} s or less is needed.")
        with self._place("weights", TAKERS):
            opening = next(requests, pb.GiveRequest()).opening
            known = {packed.manifest.identity.hex(): packed for packed in self._packed()}
            packed = self._find(opening.server_incarnation, "manifest", opening.identity.hex(), known)
            # One is kept for each other model: the first load of this one must not keep it from being repaired.
            most = max(1, TAKERS + 1 - len(known))
            with self._place(f"weights of model {packed.layout.fingerprint[:16]}", most):
                peer = self._connect(opening.descriptor)
                try:
                    for request in requests:
                        self._submit(peer, packed, request.piece).result()
                except P2PError as error:
                    raise Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
                finally:
                    self._endpoint.disconnect(peer)
        return pb.GiveReply()

    def close(self) -> None:
        """Give nothing more. On return nobody reads the weights. Idempotent."""
        with self._lock:
            self._closed = True
        self._putting.shutdown()

    def _find(self, incarnation: int, what: str, wanted: str, known: Mapping[str, PackedExperts]) -> PackedExperts:
        if incarnation != self._endpoint.incarnation or wanted not in known:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {incarnation} with {what} {wanted[:16]} was meant;"
                f" here is {self._endpoint.incarnation} with {', '.join(each[:16] for each in known)}.",
            )
        return known[wanted]

    @contextlib.contextmanager
    def _place(self, what: str, most: int) -> Iterator[None]:
        with self._lock:
            if self._takers[what] >= most:
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{most} others are being given {what}; try again.")
            self._takers[what] += 1
        try:
            yield
        finally:
            with self._lock:
                self._takers[what] -= 1

    def _connect(self, descriptor: bytes) -> Peer:
        try:
            # Before it is connected: an image of the window may be made.
            if (nbytes := decode(descriptor).nbytes) != WINDOW.nbytes:
                raise ValueError(f"a window of {nbytes} bytes was offered; {WINDOW.nbytes} are needed.")
            return self._endpoint.connect(descriptor, CONNECT_BACK_S)
        except (P2PError, OSError, ValueError) as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    def _submit(self, peer: Peer, packed: PackedExperts, piece: pb.Piece) -> Future[None]:
        with self._lock:
            if self._closed:
                raise Refused(grpc.StatusCode.UNAVAILABLE, f"{self._endpoint.name} is ending.")
            return self._putting.submit(self._put, peer, packed, piece)

    def _put(self, peer: Peer, packed: PackedExperts, piece: pb.Piece) -> None:
        layout = packed.layout
        end = piece.offset + piece.nbytes
        if not (1 <= piece.nbytes <= WINDOW.payload_bytes and end <= layout.blob_bytes and piece.sequence):
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"piece {piece.sequence}: {piece.nbytes} bytes at {piece.offset} of {layout.blob_bytes}.",
            )
        if not self._serves(layout.fingerprint, piece.layer, piece.expert):
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"expert {piece.expert} of MoE layer {piece.layer} is not served here."
            )
        slot = WINDOW.slot_offset(piece.sequence % WINDOW.slots)
        blob = packed.blob(piece.layer, piece.expert)
        self._endpoint.put(peer, slot + PAYLOAD_OFFSET, blob[piece.offset : end])
        # Signal last: the taker copies the piece as soon as it changes.
        self._endpoint.signal(peer, slot, piece.sequence)


def manifest_of(member: Member, layout: PackLayout, credentials: Credentials | None = None) -> Manifest:
    """Ask a server what its experts are. Blocks, at most ASK_S.

    Raises:
        SourceFailed: it does not answer, or packs them otherwise.
    """
    request = pb.ManifestRequest(server_incarnation=member.incarnation, model_hash=layout.fingerprint)
    limit = ("grpc.max_receive_message_length", layout.head_bytes + 1024)
    try:
        with channel_to(member.address, EXPERT, credentials, (*PLAIN, limit)) as channel:
            reply = rpc.ExpertsStub(channel).Manifest(request, timeout=ASK_S)
        return Manifest.decode(reply.manifest, layout)
    except (grpc.RpcError, ManifestInvalid) as error:
        raise SourceFailed(f"{member.name}: {brief(error)}") from error


class PeerSource:
    """Experts of one server, over a window that it writes, by one call of Give at a time. For use from one thread.

    Args:
        stop: When it is set, what waits fails.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        member: Member,
        manifest: Manifest,
        stop: threading.Event,
        credentials: Credentials | None = None,
    ) -> None:
        self._endpoint, self._member, self._manifest, self._stop = endpoint, member, manifest, stop
        self._credentials = credentials
        self._window: Window | None = None
        self._began_s = 0.0

    def blob(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """The packed bytes of one expert, as they came: to be compared with its digest. Blocks.

        Raises:
            SourceFailed: the server does not serve it, has gone, or puts nothing for PIECE_S.
        """
        try:
            # Young enough to live until the expert is here.
            if time.monotonic() - self._began_s > STREAM_S / 2:
                self.close()
            return self._take(self._window or self._open(), layer, expert)
        except (P2PError, OSError) as error:
            raise SourceFailed(f"{self._member.name}: {error}") from error

    def close(self) -> None:
        """End the call, which has the server disconnect, and withdraw the window. Idempotent; the next expert opens
        another.
        """
        if self._window is None:
            return
        self._requests.put(None)
        with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            self._call.result(_LEAVE_S)
        self._channel.close()
        self._window.close()
        self._window = None

    def _open(self) -> Window:
        with contextlib.ExitStack() as undo:
            window = undo.enter_context(contextlib.closing(self._endpoint.export_window(WINDOW.nbytes)))
            self._began_s, self._sequence = time.monotonic(), 0
            self._requests: queue.SimpleQueue[pb.GiveRequest | None] = queue.SimpleQueue()
            opening = pb.GiveOpening(
                server_incarnation=self._member.incarnation,
                identity=self._manifest.identity,
                descriptor=window.descriptor,
            )
            self._requests.put(pb.GiveRequest(opening=opening))
            self._channel = undo.enter_context(
                contextlib.closing(channel_to(self._member.address, EXPERT, self._credentials))
            )
            asked = iter(self._requests.get, None)
            self._call: Any = rpc.ExpertsStub(self._channel).Give.future(asked, timeout=STREAM_S)
            undo.pop_all()
        self._window = window
        return window

    def _take(self, window: Window, layer: int, expert: int) -> NDArray[np.uint8]:
        """Ask for all pieces of an expert, as many at a time as there are slots, and copy each as it comes."""
        # One expert at a time: it is not mapped by anyone before its bytes are known to be right.
        nbytes = self._manifest.layout.blob_bytes
        blob = np.empty(nbytes, np.uint8)
        starts = range(0, nbytes, WINDOW.payload_bytes)
        first = self._sequence + 1
        for number, start in enumerate(starts):
            while self._sequence < first + min(number + WINDOW.slots, len(starts)) - 1:
                at = starts[self._sequence + 1 - first]
                self._ask(layer, expert, at, min(WINDOW.payload_bytes, nbytes - at))
            slot = WINDOW.slot_offset((first + number) % WINDOW.slots)
            self._await(window, slot, first + number)
            piece = blob[start : start + WINDOW.payload_bytes]
            begin = slot + PAYLOAD_OFFSET
            piece[:] = window.memory[begin : begin + len(piece)]
        return blob

    def _ask(self, layer: int, expert: int, offset: int, nbytes: int) -> None:
        self._sequence += 1
        piece = pb.Piece(sequence=self._sequence, layer=layer, expert=expert, offset=offset, nbytes=nbytes)
        self._requests.put(pb.GiveRequest(piece=piece))

    def _await(self, window: Window, slot: int, sequence: int) -> None:
        name, end_s = self._member.name, time.monotonic() + PIECE_S
        while int(window.poll(slot, 1)[0]) != sequence:
            if self._stop.is_set():
                raise SourceFailed("this server is ending.")
            if self._call.done():
                raise SourceFailed(f"{name}: {brief(self._call.exception())}")
            if time.monotonic() > end_s:
                raise SourceFailed(f"{name} put nothing for {PIECE_S:.0f} s.")
            self._endpoint.progress()
            time.sleep(_POLL_S)
