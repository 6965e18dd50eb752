"""A client's links to expert servers: windows exchanged over gRPC, each try within ATTACH_S."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from experts.backend import Backend
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from p2p import faults
from p2p.endpoint import Endpoint, P2PError, Peer, Status, Window
from p2p.nearby import NearbyEndpoint
from p2p.window import WindowLayout
from router.access import EXPERT
from router.connection import channel_to
from router.host import host_id
from router.tls import Credentials
from router.view import Member

log = logging.getLogger(__name__)

ATTACH_S = 2.0
# For the server's connection to the client: half, so that its answer is there while the client can still connect.
CONNECT_BACK_S = ATTACH_S / 2

_LEAST_CONNECT_S = 0.05


class AttachFailed(Exception):
    """A server could not be attached now; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Windows exchanged with one server: `window` is written by it, `peer` by this side."""

    member: Member
    window: Window
    peer: Peer
    cores: Sequence[int]
    rings_lanes: bool
    place: int = -1  # in the routes, once it is attached


class Attacher:
    """Attaches to servers, any number at a time. For use from any thread.

    Args:
        request: What every server is asked; its own fields are filled in.
        weight: Of the client's rows, now.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        backend: Backend,
        layout: WindowLayout,
        request: pb.AttachRequest,
        weight: Callable[[], int],
        credentials: Credentials | None = None,
    ) -> None:
        self._endpoint, self._layout, self._request = endpoint, layout, request
        self._weight = weight
        self._backend, self._credentials = backend, credentials
        self._lock = threading.Lock()
        self._calls: set[Any] = set()
        self._closed = False
        self._host = host_id()

    def attach(self, member: Member) -> Link:
        """Exchange windows with a server, over shared memory where it can be. Blocks, at most about ATTACH_S.

        Raises:
            AttachFailed: it is not there, refuses, or this process has no memory or descriptors left.
        """
        endpoint = self._endpoint
        if isinstance(endpoint, NearbyEndpoint):
            if member.host == self._host:
                try:
                    return self._attach(member, endpoint.near)
                except AttachFailed as error:
                    # Containers of one machine, or machines that one launcher names, may not share memory.
                    log.info("not_nearby server=%s reason=%s", member.name, error)
            endpoint = endpoint.far
        return self._attach(member, endpoint)

    def _attach(self, member: Member, endpoint: Endpoint) -> Link:
        end_s = time.monotonic() + ATTACH_S
        with ExitStack() as undo:
            try:
                window = endpoint.export_window(self._layout.nbytes, self._request.incarnation)
                undo.callback(window.close)
                self._backend.prepare(window, self._layout)
                reply = self._ask(member, window)
                if (found := reply.wire_version) != (needed := self._backend.wire_version):
                    raise AttachFailed(f"wire version {found} found, {needed} needed: run one release on both sides.")
                left_s = max(_LEAST_CONNECT_S, end_s - time.monotonic())
                peer = endpoint.connect(reply.request_descriptor, left_s)
                undo.callback(endpoint.disconnect, peer)
            except (grpc.RpcError, grpc.FutureCancelledError, P2PError, OSError) as error:
                raise AttachFailed(brief(error)) from error
            if window.peer_incarnation != member.incarnation:
                # Its hang-up is the proof that its writes have ended: without it there is none.
                raise AttachFailed(
                    f"the reply window was taken by incarnation {window.peer_incarnation};"
                    f" {member.incarnation} is needed."
                )
            undo.pop_all()
        return Link(member=member, window=window, peer=peer, cores=tuple(reply.cores), rings_lanes=reply.rings_lanes)

    def _ask(self, member: Member, window: Window) -> pb.AttachReply:
        request = pb.AttachRequest(
            server_incarnation=member.incarnation,
            reply_descriptor=window.descriptor,
            wire_version=self._backend.wire_version,
            weight=self._weight(),
        )
        request.MergeFrom(self._request)
        # A channel for each try: one that is kept waits longer after each failure, and longest just when
        # its server is back.
        with channel_to(member.address, EXPERT, self._credentials) as channel:
            with self._lock:
                if self._closed:
                    raise AttachFailed("this client is being closed.")
                call = rpc.ExpertsStub(channel).Attach.future(request, timeout=ATTACH_S)
                self._calls.add(call)
            try:
                return call.result()
            finally:
                with self._lock:
                    self._calls.discard(call)

    def is_gone(self, link: Link) -> bool:
        """Whether the server has ended, let go of the reply window, or withdrawn its own."""
        ends = (link.window, link.peer)
        return any(self._endpoint.status(end) is Status.GONE for end in ends)

    def close(self) -> None:
        """Cut short every try, and refuse more. Does not wait for them."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()


def config_of(member: Member, credentials: Credentials | None, model_hash: str = "") -> dict[str, Any]:
    """The config.json of a checkpoint that a server serves, as it tells it; of the first where no hash is given.

    Raises:
        AttachFailed: it is not there, refuses, or says something else.
    """
    request = pb.DescribeRequest(server_incarnation=member.incarnation, model_hash=model_hash)
    try:
        with channel_to(member.address, EXPERT, credentials) as channel:
            found = json.loads(rpc.ExpertsStub(channel).Describe(request, timeout=ATTACH_S).config)
    except (grpc.RpcError, ValueError, RecursionError) as error:
        raise AttachFailed(f"{member.name} tells no configuration: {brief(error)}") from error
    if not isinstance(found, dict):
        raise AttachFailed(f"{member.name} tells a configuration that is no JSON object.")
    return found


class LinkReaper:
    """Gives peers and windows back one after another, on a thread of its own: over a network each may take seconds.

    For use from any thread, once for each link, when native code has let go of it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="expert-reaper")

    def give_back(self, peer: Peer, window: Window) -> None:
        """Does not wait. The window stays mapped until the peer's hang-up proves that its writes have ended."""
        self._thread.submit(self._give_back, peer, window)

    def _give_back(self, peer: Peer, window: Window) -> None:
        faults.unlink(peer.address)
        for what, close in (("peer", lambda: self._endpoint.disconnect(peer)), ("window", window.close)):
            try:
                close()
            except Exception:
                log.exception("%s_not_closed", what)

    def close(self) -> None:
        """Wait until all is given back; nothing more may come. The endpoint may be closed after this. Idempotent."""
        self._thread.shutdown()


def brief(error: BaseException | None) -> str:
    """What an error of gRPC or of ours says, in one line."""
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
