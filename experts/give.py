"""Gives packed experts to another server: puts their bytes into its window, piece by piece, as fast as it asks.

The window has SLOTS slots. The piece of sequence s goes into the payload of slot s % SLOTS, and then s becomes that
slot's signal. The taker asks for a piece only when it has copied what its slot held before, so that it sets the pace,
and no more than the window is ever under way. It looks at no header: what it copied is compared with the digest of
the whole expert.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc

from experts.links import CONNECT_BACK_S
from experts.pack import PackedExperts
from experts.proto import experts_pb2 as pb
from p2p.descriptor import decode
from p2p.endpoint import Endpoint, P2PError, Peer
from p2p.frame import PAYLOAD_OFFSET
from p2p.window import WindowLayout

log = logging.getLogger(__name__)

WINDOW = WindowLayout(slots=4, payload_bytes=1 << 20)
TAKERS = 4
LOW_NICE = 19
STREAM_S = 120.0


class Refused(Exception):
    """What a server is asked and does not do; the text says why, `code` is the gRPC status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def at_low_priority() -> None:
    """Let rows come before what this thread does from now on."""
    # Not SCHED_IDLE: a thread that may starve must never hold the interpreter's lock.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_NICE)


class WeightSender:
    """Gives what one server serves. For use from any thread.

    Args:
        endpoint: The server's.
        packed: Its weights.
        serves: Whether this server vouches for an expert's bytes: it verified them itself.
    """

    def __init__(
        self, *, endpoint: Endpoint, packed: PackedExperts, serves: Callable[[int, int], bool]
    ) -> None:
        self._endpoint, self._packed, self._serves = endpoint, packed, serves
        self._places = threading.BoundedSemaphore(TAKERS)
        self._lock = threading.Lock()
        self._closed = False
        # One thread for all takers: what this costs the rows has a bound.
        self._putting = ThreadPoolExecutor(1, "weight-sender", initializer=at_low_priority)

    def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply:
        """What the experts are.

        Raises:
            Refused: another server or model was meant.
        """
        self._check(request.server_incarnation, "model", request.model_hash, self._packed.layout.fingerprint)
        return pb.ManifestReply(manifest=self._packed.manifest.encode())

    def give(self, requests: Iterator[pb.GiveRequest], remaining_s: float | None) -> pb.GiveReply:
        """Serve one taker until it has no more requests. Blocks.

        Raises:
            Refused: it asks for what it cannot be given.
        """
        if remaining_s is None or remaining_s > STREAM_S + 1:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"a deadline of {STREAM_S} s or less is needed.")
        if not self._places.acquire(blocking=False):
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{TAKERS} others are being given weights; try again."
            )
        try:
            opening = next(requests, pb.GiveRequest()).opening
            identity = self._packed.manifest.identity
            self._check(opening.server_incarnation, "manifest", opening.identity.hex(), identity.hex())
            peer = self._connect(opening.descriptor)
            try:
                for request in requests:
                    self._submit(peer, request.piece).result()
            except P2PError as error:
                raise Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            finally:
                self._endpoint.disconnect(peer)
        finally:
            self._places.release()
        return pb.GiveReply()

    def close(self) -> None:
        """Give nothing more. On return nobody reads the weights. Idempotent."""
        with self._lock:
            self._closed = True
        self._putting.shutdown()

    def _check(self, incarnation: int, what: str, found: str, needed: str) -> None:
        if (incarnation, found) != (self._endpoint.incarnation, needed):
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {incarnation} with {what} {found[:16]} was meant;"
                f" here is {self._endpoint.incarnation} with {needed[:16]}.",
            )

    def _connect(self, descriptor: bytes) -> Peer:
        try:
            # Before it is connected: an image of the window may be made.
            if (nbytes := decode(descriptor).nbytes) != WINDOW.nbytes:
                raise ValueError(f"a window of {nbytes} bytes was offered; {WINDOW.nbytes} are needed.")
            return self._endpoint.connect(descriptor, CONNECT_BACK_S)
        except (P2PError, OSError, ValueError) as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    def _submit(self, peer: Peer, piece: pb.Piece) -> Future[None]:
        with self._lock:
            if self._closed:
                raise Refused(grpc.StatusCode.UNAVAILABLE, f"{self._endpoint.name} is ending.")
            return self._putting.submit(self._put, peer, piece)

    def _put(self, peer: Peer, piece: pb.Piece) -> None:
        layout = self._packed.layout
        end = piece.offset + piece.nbytes
        if not (1 <= piece.nbytes <= WINDOW.payload_bytes and end <= layout.blob_bytes and piece.sequence):
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"piece {piece.sequence}: {piece.nbytes} bytes at {piece.offset} of {layout.blob_bytes}.",
            )
        if not self._serves(piece.layer, piece.expert):
            raise Refused(
                grpc.StatusCode.NOT_FOUND,
                f"expert {piece.expert} of MoE layer {piece.layer} is not served here.",
            )
        slot = WINDOW.slot_offset(piece.sequence % WINDOW.slots)
        blob = self._packed.blob(piece.layer, piece.expert)
        self._endpoint.put(peer, slot + PAYLOAD_OFFSET, blob[piece.offset : end])
        # Signal last: the taker copies the piece as soon as it changes.
        self._endpoint.signal(peer, slot, piece.sequence)
