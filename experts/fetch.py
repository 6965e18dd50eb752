"""Takes packed experts from a server that serves them; `give` is the other end and has the protocol."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from experts.give import STREAM_S, WINDOW
from experts.links import brief
from experts.manifest import Manifest, ManifestInvalid, PackLayout
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from p2p.endpoint import Endpoint, P2PError, Window
from p2p.frame import PAYLOAD_OFFSET
from router.access import EXPERT
from router.connection import PLAIN, channel_to
from router.tls import Credentials
from router.view import Member

ASK_S = 2.0
PIECE_S = 5.0

_POLL_S = 0.0002
_LEAVE_S = 1.0


class SourceFailed(Exception):
    """An expert could not be had from one source; the text says why."""


def manifest_of(member: Member, layout: PackLayout, credentials: Credentials | None = None) -> Manifest:
    """Ask a server what its experts are. Blocks, at most ASK_S.

    Args:
        credentials: Of this process; None: no TLS.

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
    """Experts of one server, over a window that it writes. For use from one thread.

    Args:
        endpoint: Of this process.
        member: The server.
        manifest: Of both.
        stop: When it is set, what waits fails.
        credentials: Of this process; None: no TLS.
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
        self._stream: _Stream | None = None

    def blob(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """The packed bytes of one expert, as they came: to be compared with its digest. Blocks.

        Raises:
            SourceFailed: the server does not serve it, has gone, or puts nothing for PIECE_S.
        """
        try:
            # Young enough to live until the expert is here.
            if self._stream is not None and self._stream.age_s > STREAM_S / 2:
                self.close()
            if self._stream is None:
                channel = channel_to(self._member.address, EXPERT, self._credentials)
                self._stream = _Stream(
                    self._endpoint, self._member, channel, self._manifest.identity, self._stop
                )
            return self._stream.take(layer, expert, self._manifest.layout.blob_bytes)
        except (P2PError, OSError) as error:
            raise SourceFailed(f"{self._member.name}: {error}") from error

    def close(self) -> None:
        """Give the window back. Idempotent; the next expert opens another."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _Stream:
    """One call of Give."""

    def __init__(
        self,
        endpoint: Endpoint,
        member: Member,
        channel: grpc.Channel,
        identity: bytes,
        stop: threading.Event,
    ) -> None:
        self._endpoint, self._name, self._stop = endpoint, member.name, stop
        self._began_s = time.monotonic()
        self._sequence = 0
        self._window: Window = endpoint.export_window(WINDOW.nbytes)
        self._requests: queue.SimpleQueue[pb.GiveRequest | None] = queue.SimpleQueue()
        opening = pb.GiveOpening(
            server_incarnation=member.incarnation, identity=identity, descriptor=self._window.descriptor
        )
        self._requests.put(pb.GiveRequest(opening=opening))
        self._channel = channel
        self._call: Any = rpc.ExpertsStub(self._channel).Give.future(self._asked(), timeout=STREAM_S)

    @property
    def age_s(self) -> float:
        """Since it was opened."""
        return time.monotonic() - self._began_s

    def take(self, layer: int, expert: int, nbytes: int) -> NDArray[np.uint8]:
        """Ask for all pieces of an expert, as many at a time as there are slots, and copy each as it comes."""
        # One expert at a time: it is not mapped by anyone before its bytes are known to be right.
        blob = np.empty(nbytes, np.uint8)
        starts = range(0, nbytes, WINDOW.payload_bytes)
        first = self._sequence + 1
        for number, start in enumerate(starts):
            while self._sequence < first + min(number + WINDOW.slots, len(starts)) - 1:
                at = starts[self._sequence + 1 - first]
                self._ask(layer, expert, at, min(WINDOW.payload_bytes, nbytes - at))
            slot = WINDOW.slot_offset((first + number) % WINDOW.slots)
            self._await(slot, first + number)
            piece = blob[start : start + WINDOW.payload_bytes]
            begin = slot + PAYLOAD_OFFSET
            piece[:] = self._window.memory[begin : begin + len(piece)]
        return blob

    def close(self) -> None:
        """End the call, which has the server disconnect, and withdraw the window."""
        self._requests.put(None)
        with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            self._call.result(_LEAVE_S)
        self._channel.close()
        self._window.close()

    def _asked(self) -> Iterator[pb.GiveRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _ask(self, layer: int, expert: int, offset: int, nbytes: int) -> None:
        self._sequence += 1
        piece = pb.Piece(sequence=self._sequence, layer=layer, expert=expert, offset=offset, nbytes=nbytes)
        self._requests.put(pb.GiveRequest(piece=piece))

    def _await(self, slot: int, sequence: int) -> None:
        end_s = time.monotonic() + PIECE_S
        while int(self._window.poll(slot, 1)[0]) != sequence:
            if self._stop.is_set():
                raise SourceFailed("this server is ending.")
            if self._call.done():
                raise SourceFailed(f"{self._name}: {brief(self._call.exception())}")
            if time.monotonic() > end_s:
                raise SourceFailed(f"{self._name} put nothing for {PIECE_S:.0f} s.")
            self._endpoint.progress()
            time.sleep(_POLL_S)
