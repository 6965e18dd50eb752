"""An expert server's Python half: who is attached, what is held, when to stop. Rows stay in native code."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import grpc

from experts import native
from experts.config import MOST_SLOTS
from experts.give import Giver, Refused
from experts.links import CONNECT_BACK_S, Closer
from experts.model import Dtype, ExpertShape
from experts.paths import DataPath, cpu_path
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from experts.wire import model_hash_of
from p2p import faults
from p2p.endpoint import Endpoint, P2PError, Peer, Status, Window
from p2p.window import WindowLayout
from router.host import name_thread

log = logging.getLogger(__name__)

LANE_0 = "expert-lane-0"
RUN_NS = 1_000_000_000

Reply = TypeVar("Reply")


class ServerClosed(RuntimeError):
    """The server was closed; it holds nothing any more."""


@dataclass(frozen=True, kw_only=True)
class _Attached:
    """One client's memory."""

    index: int
    incarnation: int
    window: Window
    peer: Peer


class ExpertServer:
    """Serves packed experts to clients over the windows of one endpoint. For use from any thread."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        shape: ExpertShape,
        dtype: Dtype,
        model_hash: str,
        cores: Sequence[int] = (-1,),
        slots: int = MOST_SLOTS,
        path: DataPath | None = None,
    ) -> None:
        """
        Args:
            endpoint: Its name and incarnation are the server's.
            model_hash: The checkpoint's fingerprint (hex).
            cores: One for each lane, -1 unpinned.
            slots: Most requests in flight of one client.
            path: Who carries and computes the rows; that of CPUs unless given.

        Raises:
            ValueError: the lanes cannot be started, or a size is out of range.
        """
        self.shape, self.dtype, self.model_hash = shape, dtype, model_hash
        self.cores = tuple(cores)
        self._most_slots = slots
        self._endpoint = endpoint
        self._path = path or cpu_path()
        self._library = self._path.library
        core_array = (ctypes.c_int32 * len(self.cores))(*self.cores)
        self._handle = self._library.expert_server_new(
            shape.layers,
            shape.experts,
            shape.hidden,
            shape.intermediate,
            shape.top_k,
            dtype,
            model_hash_of(model_hash),
            endpoint.incarnation,
            len(self.cores),
            core_array,
            endpoint.page_address or None,
            self._path.most_slot_bytes,
        )
        if not self._handle:
            raise ValueError(
                f"lanes on cores {list(self.cores)} could not start for {shape}. Name cores that may be used."
            )
        if not shape.plain:
            self._set_form(shape)
        self._closer = Closer(endpoint)
        self._exporting = (
            threading.Lock()
        )  # `close` waits for it: a window is exported while the endpoint is open
        # Guards the handle, which `close` frees, and the clients. The lease waits for it too: never held while a
        # window is made, which takes the network long, or a link is closed.
        self._lock = threading.Lock()
        self._counters = native.ServerCounters()
        self._clients: dict[str, _Attached] = {}
        self._thread: threading.Thread | None = None
        self.broken = ""  # why nothing is served any more, once that is so

    def _set_form(self, shape: ExpertShape) -> None:
        if not hasattr(self._library, "expert_server_set_form"):
            raise ValueError(
                f"experts of {shape.architecture} have an activation and biases that only CPUs compute; serve them"
                " with --device cpu."
            )
        form = native.ExpertForm.of(shape.activation, shape.biased)
        self._library.expert_server_set_form(self._handle, form)

    @property
    def incarnation(self) -> int:
        """Of this server."""
        return self._endpoint.incarnation

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of those attached."""
        return tuple(self._clients)

    def set_expert(self, layer: int, expert: int, gate_up: int, down: int) -> None:
        """Serve an expert from packed weights at two addresses, mapped until `clear_expert` returns.

        Raises:
            ValueError: there is no such expert, or an address is null.
            ServerClosed: `close` was called.
        """
        with self._lock:
            if not self._handle:
                raise ServerClosed(f"{self._endpoint.name} was closed; nothing can be loaded into it.")
            code = self._library.expert_server_set_expert(self._handle, layer, expert, gate_up, down)
        if code != 0:
            raise ValueError(
                f"expert {expert} of layer {layer} is outside {self.shape}, or its address is null"
            )

    def clear_expert(self, layer: int, expert: int) -> None:
        """Stop serving an expert; on return its weights are no longer read."""
        with self._lock:
            if self._handle:
                self._library.expert_server_clear_expert(self._handle, layer, expert)

    def doubtful(self) -> tuple[int, int] | None:
        """(layer, expert) of one that gave rows that are not finite since it was last told here; None: none did.

        Kernels that do not look at their rows, those of GPUs and without a compiler, tell of none.
        """
        with self._lock:
            if not self._handle or not hasattr(self._library, "expert_server_take_doubtful"):
                return None
            place = self._library.expert_server_take_doubtful(self._handle)
        return None if place < 0 else divmod(place, self.shape.experts)

    def set_lease(self, boottime_ns: int) -> None:
        """Answer only before this CLOCK_BOOTTIME instant; 0 fences the server for good."""
        with self._lock:
            if self._handle:
                self._library.expert_server_set_lease(self._handle, boottime_ns)

    def start(self) -> None:
        """Serve, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name=LANE_0, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            name_thread()
            while not (code := self._library.expert_server_run(self._handle, RUN_NS)):
                pass
            if code < 0:
                raise MemoryError("no memory is left for a batch of requests; free some, or raise the limit.")
        except Exception as error:
            # A member that renews its lease and answers nobody would never be replaced.
            log.exception("serving_ended name=%s", self._endpoint.name)
            self.broken = f"{self._endpoint.name} serves no more: {error}"

    def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        """Exchange windows with a client; one that attaches again is given new ones.

        Raises:
            Refused: it is no client for this server, or there is no place left.
        """
        self._check(request)
        with ExitStack() as undo:
            try:
                layout = WindowLayout(slots=request.slots, payload_bytes=request.slot_bytes)
                peer = self._endpoint.connect(request.reply_descriptor, CONNECT_BACK_S)
            except (P2PError, ValueError) as error:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{request.name}: {error}") from error
            # While this side stays connected the client cannot free its window, and refuses more at a limit.
            undo.callback(self._endpoint.disconnect, peer)
            if peer.incarnation != request.incarnation or peer.nbytes < layout.nbytes:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{request.name}: its window is of incarnation {peer.incarnation} with {peer.nbytes}"
                    f" bytes; {request.incarnation} and {layout.nbytes} are needed.",
                )
            with self._exporting:
                # While this is held the endpoint is open too: it is closed after this server.
                if not self._handle:
                    raise Refused(grpc.StatusCode.UNAVAILABLE, f"{self._endpoint.name} is ending.")
                window = self._export(request.name, layout)
                undo.callback(window.close)
                with self._lock:
                    self._admit(request, layout, window, peer)
            undo.pop_all()
        faults.point("client-attached")
        log.info(
            "client_attached name=%s incarnation=%d slots=%d",
            request.name,
            request.incarnation,
            request.slots,
        )
        return pb.AttachReply(
            request_descriptor=window.descriptor,
            server_incarnation=self.incarnation,
            cores=self.cores,
            rings_lanes=isinstance(self._library, ctypes.CDLL) and self._endpoint.shares_doorbells,
            wire_version=self._path.wire_version,
        )

    def _export(self, name: str, layout: WindowLayout) -> Window:
        try:
            window = self._endpoint.export_window(layout.nbytes)
        except (P2PError, OSError) as error:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{name}: no window of {layout.nbytes} bytes here ({error}); try again.",
            ) from error
        self._library.p2p_window_init(
            window.address, window.nbytes, window.incarnation, layout.slots, layout.payload_bytes
        )
        return window

    def _admit(self, request: pb.AttachRequest, layout: WindowLayout, window: Window, peer: Peer) -> None:
        link = native.ClientLink(
            rx=window.address,
            rx_bytes=window.nbytes,
            tx=peer.address,
            tx_bytes=peer.nbytes,
            bell_page=peer.page_address or None,
            client_incarnation=request.incarnation,
            client_lanes=request.lanes,
            # A page that is not the client's own is that of the transport's pump, which waits on one lane.
            bell_lanes=request.lanes if self._endpoint.shares_doorbells else 1,
            slots=layout.slots,
            slot_bytes=layout.payload_bytes,
        )
        self._drop(request.name)
        faults.link(peer.address, request.name)
        index = self._library.expert_server_add_client(self._handle, ctypes.byref(link))
        if index < 0:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{request.name}: no place beside {len(self._clients)} clients, or a wrong window layout.",
            )
        self._clients[request.name] = _Attached(
            index=index, incarnation=request.incarnation, window=window, peer=peer
        )

    def _check(self, request: pb.AttachRequest) -> None:
        ours = (self.incarnation, self.model_hash, self.shape.layers, self.shape.experts, self.shape.hidden)
        ours = (*ours, self.shape.top_k, int(self.dtype), self._path.wire_version)
        theirs = (
            request.server_incarnation,
            request.model_hash,
            request.layers,
            request.experts,
            request.hidden,
        )
        # Before it could be said there was only the first.
        theirs = (*theirs, request.top_k, request.dtype, request.wire_version or 1)
        words = ("incarnation", "model", "layers", "experts", "hidden", "top_k", "dtype", "wire version")
        wrong = [
            f"{word} {found} (here {needed})"
            for word, found, needed in zip(words, theirs, ours, strict=True)
            if found != needed
        ]
        if wrong:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{request.name} asks for {', '.join(wrong)}. Serve one model, from one release.",
            )
        if (
            not 1 <= request.slots <= self._most_slots
            or not 1 <= request.slot_bytes <= self._path.most_slot_bytes
        ):
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{request.name} asks for {request.slots} slots of {request.slot_bytes} bytes;"
                f" at most {self._most_slots} of {self._path.most_slot_bytes} are given.",
            )

    def reap(self) -> None:
        """Free the windows of clients that are gone; to be called a few times a second."""
        self._endpoint.progress()
        with self._lock:
            for name, attached in list(self._clients.items()):
                if self._endpoint.status(attached.peer) is Status.GONE:
                    self._drop(name)

    def _drop(self, name: str) -> None:
        attached = self._clients.pop(name, None)
        if attached is None:
            return
        self._library.expert_server_remove_client(self._handle, attached.index)
        self._closer.give_back(attached.peer, attached.window)
        log.info("client_detached name=%s incarnation=%d", name, attached.incarnation)

    def counters(self) -> dict[str, int]:
        """What was served so far, by the names in server.h; after `close`, what was served at all."""
        with self._lock:
            return self._count()

    def _count(self) -> dict[str, int]:
        counters = self._counters
        if self._handle:
            self._library.expert_server_counters(self._handle, ctypes.byref(counters))
        return {str(name): int(getattr(counters, str(name))) for name, *_ in counters._fields_}

    def close(self) -> None:
        """Stop serving and free everything but the endpoint. Idempotent."""
        if not self._handle:
            return
        self._library.expert_server_stop(self._handle)
        if self._thread:
            self._thread.join()
        with self._exporting, self._lock:
            for name in list(self._clients):
                self._drop(name)
            self._count()
            handle, self._handle = self._handle, None
            self._library.expert_server_free(handle)
        self._closer.close()


class ExpertsService(rpc.ExpertsServicer):
    """gRPC shell of one server; `server` and `giver` are None until it is a member, and once it ends."""

    def __init__(self) -> None:
        self.server: ExpertServer | None = None
        self.giver: Giver | None = None

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        # Once: it becomes None again when the process ends.
        server = self.server
        return _answer(context, pb.AttachReply, server and (lambda: server.attach(request)))

    def Manifest(self, request: pb.ManifestRequest, context: grpc.ServicerContext) -> pb.ManifestReply:
        giver = self.giver
        return _answer(context, pb.ManifestReply, giver and (lambda: giver.manifest(request)))

    def Give(self, request_iterator: Iterator[pb.GiveRequest], context: grpc.ServicerContext) -> pb.GiveReply:
        giver = self.giver
        return _answer(
            context, pb.GiveReply, giver and (lambda: giver.give(request_iterator, context.time_remaining()))
        )


def _answer(
    context: grpc.ServicerContext, refusal: Callable[[], Reply], act: Callable[[], Reply] | None
) -> Reply:
    """What `act` returns, or the status that it refuses with."""
    try:
        if act is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "This process is no member; try again.")
        return act()
    except Refused as refused:
        log.warning("refused peer=%s reason=%s", context.peer(), refused)
        context.set_code(refused.code)
        context.set_details(str(refused))
        return refusal()
