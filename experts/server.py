"""An expert server's Python half: who is attached, what is held, when to stop. Rows stay in native code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from experts.backend import Backend, ClientLink, LinkRefused, ServerCounters
from experts.config import MOST_SLOTS, MOST_WEIGHT
from experts.cpu import CpuBackend
from experts.links import CONNECT_BACK_S, LinkReaper
from experts.model import Dtype, ExpertShape
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from experts.transfer import Refused, WeightSender
from experts.wire import WireShape, model_hash_of
from p2p import faults
from p2p.endpoint import Endpoint, P2PError, Peer, Status, Window
from p2p.nearby import NearbyEndpoint
from p2p.window import WindowLayout
from router.host import name_thread

log = logging.getLogger(__name__)

LANE_0 = "expert-lane-0"
RUN_NS = 1_000_000_000

MOST_CONFIG_BYTES = 1 << 20

Reply = TypeVar("Reply")
Who = TypeVar("Who")


class ServerClosed(RuntimeError):
    """The server was closed; it holds nothing any more."""


@dataclass(frozen=True, kw_only=True)
class _Attached:
    """One client's memory."""

    place: int
    incarnation: int
    window: Window
    peer: Peer


class HeldModel:
    """One of the models of a server, and what is held of it. For use from any thread.

    Attributes:
        number: As the server's backend knows it.
        config: Its checkpoint's config.json.
    """

    def __init__(self, server: ExpertServer, number: int, wire: WireShape, model_hash: str, config: bytes) -> None:
        self._rows, self._lock, self.number = server._rows, server._lock, number
        self.shape, self.dtype, self.model_hash, self.config = wire.shape, wire.dtype, model_hash, config
        self.closed = False  # where the lock is held, so that nobody asks what was freed

    def set_expert(self, layer: int, expert: int, gate_up: NDArray[np.uint8], down: NDArray[np.uint8]) -> None:
        """Serve an expert from packed weights, which stay mapped until `clear_expert` returns.

        Raises:
            ValueError, WeightsBroken: as `experts.backend.ServerBackend.set_expert`.
            ServerClosed: its server was closed, or this model of it.
        """
        with self._lock:
            if self.closed:
                raise ServerClosed(f"model {self.model_hash[:16]} was closed; nothing can be loaded into it.")
            self._rows.set_expert(layer, expert, gate_up, down, self.number)

    def clear_expert(self, layer: int, expert: int) -> None:
        """Stop serving an expert; on return its weights are no longer read."""
        with self._lock:
            if not self.closed:
                self._rows.clear_expert(layer, expert, self.number)

    def doubtful(self) -> tuple[int, int] | None:
        """(layer, expert) of one that gave rows that are not finite since it was last told here; None: none did.

        Kernels of GPUs do not look at their rows: they tell of none.
        """
        with self._lock:
            return None if self.closed else self._rows.take_doubtful(self.number)


class ExpertServer:
    """Serves packed experts of models to clients over the windows of one endpoint. For use from any thread."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        shape: ExpertShape,
        dtype: Dtype,
        model_hash: str,
        cores: Sequence[int] = (-1,),
        slots: int = MOST_SLOTS,
        backend: Backend | None = None,
        config: bytes = b"{}",
    ) -> None:
        """
        Args:
            endpoint: Its name and incarnation are the server's.
            model_hash: Of the first model: its checkpoint's fingerprint (hex).
            cores: One for each lane, -1 unpinned.
            slots: Most requests in flight of one client.
            backend: What carries and computes the rows; that of CPUs unless given.
            config: The checkpoint's config.json, for clients that have no checkpoint.

        Raises:
            ValueError: the lanes cannot be started, a size is out of range, or it cannot compute such experts.
        """
        self.cores = tuple(cores)
        self._most_slots = slots
        self._endpoint = endpoint
        self._backend = backend or CpuBackend()
        wire = WireShape(shape=shape, dtype=dtype, model_hash=model_hash_of(model_hash))
        self._rows = self._backend.server(
            wire, incarnation=endpoint.incarnation, cores=self.cores, bell_page=endpoint.page_address
        )
        self._reaper = LinkReaper(endpoint)
        # `close` waits for it: a window is exported while the endpoint is open.
        self._exporting = threading.Lock()
        # Guards what `close` frees, and the clients. The lease waits for it too: never held while a
        # window is made, which takes the network long, or a link is closed.
        self._lock = threading.Lock()
        self._counters = ServerCounters()
        self._clients: dict[str, _Attached] = {}
        self.first = HeldModel(self, 0, wire, model_hash, config)
        # By hash. A new one whenever it changes, so that whoever reads it needs no lock.
        self._models = {model_hash: self.first}
        self._thread: threading.Thread | None = None
        self.broken = ""  # why nothing is served any more, once that is so

    @property
    def incarnation(self) -> int:
        """Of this server."""
        return self._endpoint.incarnation

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of those attached."""
        return tuple(self._clients)

    def open_model(self, *, shape: ExpertShape, dtype: Dtype, model_hash: str, config: bytes) -> HeldModel:
        """Serve one more model, of which nothing is held yet.

        Raises:
            ValueError: it is open here already, there is no place for it, or it cannot be computed beside the first.
            ServerClosed: `close` was called.
        """
        wire = WireShape(shape=shape, dtype=dtype, model_hash=model_hash_of(model_hash))
        with self._lock:
            if self.first.closed:
                raise ServerClosed(f"{self._endpoint.name} was closed; no model can be opened.")
            if model_hash in self._models:
                raise ValueError(f"model {model_hash[:16]} is open in {self._endpoint.name} already.")
            model = HeldModel(self, self._rows.add_model(wire), wire, model_hash, config)
            self._models = {**self._models, model_hash: model}
        return model

    def close_model(self, model_hash: str) -> None:
        """Serve a model no more, of which nothing is held and that no client asks for.

        Raises:
            ValueError: it is not open, is the first, or has clients or experts.
        """
        with self._lock:
            if self.first.closed:
                return
            if not (model := self._models.get(model_hash)):
                raise ValueError(f"model {model_hash[:16]} is not open in {self._endpoint.name}.")
            self._rows.remove_model(model.number)
            model.closed = True
            self._models = {name: one for name, one in self._models.items() if one is not model}

    def set_lease(self, boottime_ns: int) -> None:
        """Answer only before this CLOCK_BOOTTIME instant; 0 fences the server for good."""
        with self._lock:
            if not self.first.closed:
                self._rows.set_lease(boottime_ns)

    def start(self) -> None:
        """Serve, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name=LANE_0, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            name_thread()
            while not self._rows.run(RUN_NS):
                pass
        except Exception as error:
            # A member that renews its lease and answers nobody would never be replaced.
            log.exception("serving_ended name=%s", self._endpoint.name)
            self.broken = f"{self._endpoint.name} serves no more: {error}"

    def turns(self) -> int | None:
        """What rises while requests are looked for, idle or not; None where that cannot be seen, and once freed.

        It does not wait for whoever serves, so it may only be asked before `close`.
        """
        return self._rows.turns()

    def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        """Exchange windows with a client; one that attaches again is given new ones.

        Raises:
            Refused: it is no client for this server, or there is no place left.
        """
        model = self._check(request)
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
                if self.first.closed:
                    raise Refused(grpc.StatusCode.UNAVAILABLE, f"{self._endpoint.name} is ending.")
                window = self._export(request.name, layout, peer)
                undo.callback(window.close)
                with self._lock:
                    self._admit(request, model, layout, window, peer)
            undo.pop_all()
        faults.point("client-attached")
        log.info("client_attached name=%s incarnation=%d slots=%d", request.name, request.incarnation, request.slots)
        return pb.AttachReply(
            request_descriptor=window.descriptor,
            server_incarnation=self.incarnation,
            cores=self.cores,
            rings_lanes=self._backend.rings_lanes and peer.shares_doorbells,
            wire_version=self._backend.wire_version,
        )

    def _export(self, name: str, layout: WindowLayout, peer: Peer) -> Window:
        endpoint = self._endpoint
        if isinstance(endpoint, NearbyEndpoint):
            endpoint = endpoint.toward(peer)
        try:
            window = endpoint.export_window(layout.nbytes)
        except (P2PError, OSError) as error:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{name}: no window of {layout.nbytes} bytes here ({error}); try again.",
            ) from error
        self._backend.prepare(window, layout)
        return window

    def _admit(
        self, request: pb.AttachRequest, model: HeldModel, layout: WindowLayout, window: Window, peer: Peer
    ) -> None:
        if model.closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"model {model.model_hash[:16]} was closed here.")
        link = ClientLink(
            rx=window.address,
            rx_bytes=window.nbytes,
            tx=peer.address,
            tx_bytes=peer.nbytes,
            bell_page=peer.page_address,
            client_incarnation=request.incarnation,
            client_lanes=request.lanes,
            # A page that is not the client's own is that of the transport's pump, which waits on one lane.
            bell_lanes=request.lanes if peer.shares_doorbells else 1,
            slots=layout.slots,
            slot_bytes=layout.payload_bytes,
            weight=request.weight or 1,
            model=model.number,
        )
        self._drop(request.name)
        faults.link(peer.address, request.name)
        try:
            place = self._rows.add_client(link)
        except LinkRefused as refused:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{request.name}: no place beside {len(self._clients)} clients: {refused}",
            ) from refused
        self._clients[request.name] = _Attached(place=place, incarnation=request.incarnation, window=window, peer=peer)

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        """What a model is: the first where the request names none.

        Raises:
            Refused: another server was meant, the model is not served here, or its configuration is too long.
        """
        models, wrong = self._models, ""
        model = models.get(request.model_hash, self.first)
        if request.server_incarnation != self.incarnation:
            wrong = f"incarnation {request.server_incarnation} is asked for, this is {self.incarnation}."
        elif request.model_hash not in ("", *models):
            wrong = f"model {request.model_hash} is asked for; here is {' and '.join(models)}."
        elif len(model.config) > MOST_CONFIG_BYTES:
            wrong = f"config.json has {len(model.config)} bytes; {MOST_CONFIG_BYTES} are told. Name the shape instead."
        if wrong:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, wrong)
        return pb.DescribeReply(config=model.config, model_hash=model.model_hash)

    def _check(self, request: pb.AttachRequest) -> HeldModel:
        models = self._models
        model = models.get(request.model_hash, self.first)
        needed = {
            "server_incarnation": self.incarnation,
            "model_hash": request.model_hash if request.model_hash in models else " or ".join(models),
            **{word: getattr(model.shape, word) for word in ("layers", "experts", "hidden", "top_k")},
            "dtype": int(model.dtype),
            "wire_version": self._backend.wire_version,
        }
        wrong = [
            f"{word.replace('_', ' ')} {getattr(request, word)} (here {wanted})"
            for word, wanted in needed.items()
            if getattr(request, word) != wanted
        ]
        if wrong:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{request.name} asks for {', '.join(wrong)}. Ask for what is served, from one release.",
            )
        slots, slot_bytes = self._most_slots, self._backend.most_slot_bytes
        fits = 1 <= request.slots <= slots and 1 <= request.slot_bytes <= slot_bytes
        if not fits or request.weight > MOST_WEIGHT:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{request.name} asks for {request.slots} slots of {request.slot_bytes} bytes and weight "
                f"{request.weight}; at most {slots} of {slot_bytes}, and weight {MOST_WEIGHT}, are given.",
            )
        return model

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
        self._rows.remove_client(attached.place)
        self._reaper.give_back(attached.peer, attached.window)
        log.info("client_detached name=%s incarnation=%d", name, attached.incarnation)

    def counters(self) -> ServerCounters:
        """What was served so far of all models; after `close`, what was served at all."""
        with self._lock:
            if not self.first.closed:
                self._counters = self._rows.counters()
            return self._counters

    def close(self) -> None:
        """Stop serving and free everything but the endpoint. Idempotent."""
        if self.first.closed:
            return
        self._rows.stop()
        if self._thread:
            self._thread.join()
        with self._exporting, self._lock:
            for name in list(self._clients):
                self._drop(name)
            self._counters = self._rows.counters()
            for model in self._models.values():
                model.closed = True
            self._rows.close()
        self._reaper.close()


class ExpertsService(rpc.ExpertsServicer):
    """gRPC shell of one server; `server` and `sender` are None until it is a member, and once it ends."""

    def __init__(self) -> None:
        self.server: ExpertServer | None = None
        self.sender: WeightSender | None = None

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        return _answer(context, pb.AttachReply, self.server, lambda server: server.attach(request))

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        return _answer(context, pb.DescribeReply, self.server, lambda server: server.describe(request))

    def Manifest(self, request: pb.ManifestRequest, context: grpc.ServicerContext) -> pb.ManifestReply:
        return _answer(context, pb.ManifestReply, self.sender, lambda sender: sender.manifest(request))

    def Give(self, request_iterator: Iterator[pb.GiveRequest], context: grpc.ServicerContext) -> pb.GiveReply:
        left_s = context.time_remaining()
        return _answer(context, pb.GiveReply, self.sender, lambda sender: sender.give(request_iterator, left_s))


def _answer(
    context: grpc.ServicerContext, refusal: Callable[[], Reply], who: Who | None, act: Callable[[Who], Reply]
) -> Reply:
    """What `act` makes of who is there, or the status that it refuses with."""
    try:
        if who is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "This process is no member; try again.")
        return act(who)
    except Refused as refused:
        log.warning("refused peer=%s reason=%s", context.peer(), refused)
        context.set_code(refused.code)
        context.set_details(str(refused))
        return refusal()
