"""The client's Python half: attaches to servers as the View names them, and publishes routes to native code.

client = ExpertClient(endpoint=endpoint, shape=shape, dtype=dtype, model_hash=checkpoint.fingerprint,
                      incarnation=identity.incarnation, cores=cores)
router.start(on_view=lambda view: (client.apply_view(view), router.ack(client.adopted_epoch)))
client.apply(arrays)                                   # or native code calls expert_call(client.handle, ...)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from experts.accounts import Accounts, observation_of
from experts.backend import (
    Backend,
    ClientBackend,
    ExpertsLost,
    HostArrays,
    LinkRefused,
    ServerLink,
    ServerState,
    ServerStats,
)
from experts.cpu import CpuBackend
from experts.links import Attacher, AttachFailed, Link, LinkReaper
from experts.model import Dtype, ExpertShape
from experts.pace import Observation, Track, load_entries, observe_all
from experts.proto import experts_pb2 as pb
from experts.routes import NO_SERVER, empty_table, table_of
from experts.wire import WireShape, model_hash_of
from p2p import faults
from p2p.endpoint import Endpoint
from router.events import Totals
from router.tls import Credentials
from router.view import Member, View

log = logging.getLogger(__name__)

SLOTS = 4  # requests in flight to one server
RETRY_S = 0.25
# Replies that were lost for good hold their slots for ever, so the link is made anew: so long after all slots wait, or
# some that will hardly be answered. Not more often: what is under way on the old link is asked for again.
RELINK_S = 2.0
RELINK_LOST_S = 10.0


class ExpertClient:
    """Dispatches rows to expert servers and combines what comes back. For use from any thread.

    Attributes:
        shape, dtype, model_hash, deadline_s: As it was made with.
        weight: Of its rows; another counts at servers that are attached from then on.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        shape: ExpertShape,
        dtype: Dtype,
        model_hash: str,
        incarnation: int,
        cores: Sequence[int] = (-1,),
        deadline_s: float = 30.0,
        max_tokens: int = 4096,
        on_adopted: Callable[[int], None] | None = None,
        backend: Backend | None = None,
        credentials: Credentials | None = None,
        patience_s: float = 0.0,
        weight: int = 1,
    ) -> None:
        """
        Args:
            endpoint: Where windows and doorbells come from; it must have a doorbell lane for each of `cores`.
            model_hash: The checkpoint's fingerprint (hex).
            cores: One for each lane that will make calls together, -1 unpinned; a server on one of them gets that lane.
            deadline_s: Of `apply`, unless it names its own.
            max_tokens: Most rows of one call; `apply` makes as many as it needs.
            on_adopted: Called with each newly adopted epoch, from whichever thread saw it, to acknowledge it.
            backend: What carries the rows; that of CPUs unless given.
            credentials: Of this process; None: no TLS.
            patience_s: How long a call waits for experts that no live server has, where that is shorter than its
                deadline: for callers whose calls carry rows of many. 0: until its deadline. CPUs only.
            weight: Of this client's rows, 1 to 1,000, where clients want more than a server can compute. CPUs only.

        Raises:
            ValueError: a size is out of range, or one token does not fit in a slot.
        """
        self.shape, self.dtype, self.deadline_s = shape, dtype, deadline_s
        self._cores, self._on_adopted = tuple(cores), on_adopted
        self.model_hash, self.weight = model_hash, weight
        backend = backend or CpuBackend()
        wire = WireShape(shape=shape, dtype=dtype, model_hash=model_hash_of(model_hash))
        self._layout = backend.window(wire, max_tokens, SLOTS)
        self.backend: ClientBackend = backend.client(
            wire,
            incarnation=incarnation,
            lanes=len(self._cores),
            bell_page=endpoint.page_address,
            max_tokens=max_tokens,
            patience_s=patience_s,
        )
        self._attacher = Attacher(
            endpoint=endpoint,
            backend=backend,
            layout=self._layout,
            credentials=credentials,
            weight=lambda: self.weight,
            request=pb.AttachRequest(
                name=endpoint.name,
                incarnation=incarnation,
                model_hash=model_hash,
                layers=shape.layers,
                experts=shape.experts,
                hidden=shape.hidden,
                top_k=shape.top_k,
                dtype=dtype,
                lanes=len(self._cores),
                slots=self._layout.slots,
                slot_bytes=self._layout.payload_bytes,
            ),
        )
        self._reaper = LinkReaper(endpoint)
        self._accounts = Accounts(shape, dtype, endpoint)
        self._tracks: dict[str, Track] = {}
        # Guards all below. The lease waits for it too: never held while native code calls, a server is awaited or
        # a link is closed.
        self._lock = threading.RLock()
        self._servers: dict[str, Link] = {}
        self._leaving: list[Link] = []
        self._attaching: dict[tuple[str, int], threading.Thread] = {}
        self._unreached: set[tuple[str, int]] = set()  # name and incarnation, since they were last attached
        self._stuck_since_s: dict[str, float] = {}
        self._view: View | None = None
        self._table = empty_table(self.shape)
        self._complete = True
        self._complete_epoch = 0
        self._acked_epoch = 0
        self._next_lane = -1
        self._closed, self._freed = threading.Event(), False
        self._calls = threading.Lock()
        self._upkeep = threading.Thread(target=self._keep_up, name="expert-links", daemon=True)
        self._upkeep.start()

    @property
    def handle(self) -> int:
        """Address of the native client, for expert_call; 0 where kernels make the calls."""
        return self.backend.handle

    @property
    def adopted_epoch(self) -> int:
        """Newest epoch whose routes are in use; no call in flight uses older ones. 0 after `close`."""
        return 0 if self._freed else self.backend.adopted_epoch

    @property
    def attached(self) -> tuple[str, ...]:
        """Names of the servers that this client can write to, in the order in which they joined."""
        return tuple(self._servers)

    @property
    def covers(self) -> bool:
        """Whether every expert of every layer has an attached server."""
        return bool((self._table[:, :, 0] != NO_SERVER).all())

    def apply_view(self, view: View) -> None:
        """Publish the routes to attached servers, begin to attach new ones, let go of those no longer named.

        Does not wait for a server: its routes are published when it is attached. One that cannot be reached
        is tried again until a View drops it. Until then an expert that only it would serve stays with the
        servers that had it, and the epoch is not adopted; where none of them is left, it is, for nothing older
        is in use, and somebody may have to unload before the expert can be served again. The first epoch is
        adopted when every server is attached.
        """
        with self._lock:
            # Views may still come while this process ends.
            if self._closed.is_set() or (self._view is not None and view.epoch < self._view.epoch):
                return
            self._view = view
            self._settle(view)

    def _settle(self, view: View) -> None:
        members = {member.name: member for member in view.pool("expert")}
        wanted = {name: member for name, member in members.items() if member.serving_count}
        self._unreached &= {(name, member.incarnation) for name, member in wanted.items()}
        leaving = {name for name in self._servers if self._is_lost(name, members.get(name))}
        missing = [m for name, m in wanted.items() if name not in self._servers or name in leaving]
        if not missing:
            # Make before break: until then a server that drains may be the only one to hold what it held.
            leaving |= self._servers.keys() - wanted.keys()
        left = [self._servers.pop(name) for name in leaving]
        self._complete = not missing
        try:
            self._publish(view, complete=not missing)
        finally:
            # After the routes: none of them names these any more.
            for server in left:
                self.backend.remove_server(server.place)
            self._leaving += left
            for member in missing:
                self._begin_attach(member)
        self._release_idle()

    def _is_lost(self, name: str, member: Member | None) -> bool:
        server = self._servers[name]
        return member is None or member.incarnation != server.member.incarnation or self._is_gone(server)

    def _publish(self, view: View, *, complete: bool) -> None:
        places = {name: server.place for name, server in self._servers.items()}
        given_up = {name for name, _ in self._unreached}
        table = table_of(self.shape, view, places, given_up)
        if not complete:
            # While it is not adopted, whoever served these experts before still holds them.
            usable = np.isin(self._table, list(places.values()))
            empty = ~np.isin(table, list(places.values())).any(axis=2)
            kept = np.where(usable, self._table, table)
            complete = self._complete_epoch > 0 and not usable[empty].any()
            table[empty] = kept[empty]
        epoch = view.epoch if complete else self._complete_epoch
        self.backend.publish(epoch, table)
        self._complete_epoch, self._table = epoch, table
        self._tell_adopted()

    def _tell_adopted(self) -> None:
        epoch = self.adopted_epoch
        if epoch > self._acked_epoch:
            self._acked_epoch = epoch
            if self._on_adopted:
                self._on_adopted(epoch)

    def _begin_attach(self, member: Member) -> None:
        key = (member.name, member.incarnation)
        if key in self._attaching:
            return
        # A thread for each: no number of servers that do not answer may delay one that does.
        thread = threading.Thread(target=self._attach, args=(member,), name="expert-attach", daemon=True)
        thread.start()
        self._attaching[key] = thread

    def _attach(self, member: Member) -> None:
        try:
            link = self._attacher.attach(member)
            with self._lock:
                self._admit(link)
        except AttachFailed as error:
            with self._lock:
                self._unreached.add((member.name, member.incarnation))
            log.warning("attach_failed server=%s address=%s error=%s", member.name, member.address, error)
        except Exception:
            log.exception("attach_broken server=%s address=%s", member.name, member.address)
        finally:
            with self._lock:
                del self._attaching[member.name, member.incarnation]

    def _admit(self, link: Link) -> None:
        member, view = link.member, self._view
        now = view.member(member.name) if view else None
        named = now is not None and now.incarnation == member.incarnation and now.serving_count
        if self._closed.is_set() or view is None or not named:
            self._reaper.give_back(link.peer, link.window)
            return
        lane = self._lane_for(link.cores)
        reached = ServerLink(
            tx=link.peer.address,
            tx_bytes=link.peer.nbytes,
            rx=link.window.address,
            rx_bytes=link.window.nbytes,
            bell_page=link.peer.page_address,
            server_incarnation=member.incarnation,
            # Not the peer's: that one hangs up as well when the server merely withdraws its own window.
            liveness_fd=link.window.liveness_fd,
            slots=self._layout.slots,
            slot_bytes=self._layout.payload_bytes,
            lane=lane,
            lanes=len(link.cores) if link.rings_lanes and self._shares_cores(link.cores) else 1,
        )
        faults.link(link.peer.address, member.name)
        try:
            place = self.backend.add_server(reached)
        except LinkRefused as refused:
            log.error("attach_refused server=%s reason=%s", member.name, refused)
            self._reaper.give_back(link.peer, link.window)
            return
        before = self._servers.get(member.name)
        self._unreached.discard((member.name, member.incarnation))
        servers = self._servers | {member.name: replace(link, place=place)}
        # As they joined, whichever answered first: reports keep their order.
        self._servers = dict(sorted(servers.items(), key=lambda item: item[1].member.incarnation))
        log.info(
            "server_attached server=%s incarnation=%d place=%d lane=%d", member.name, member.incarnation, place, lane
        )
        self._settle(view)
        if before:
            # After the routes. Its server has dropped it, so that its slots are freed when that hang-up is seen.
            self.backend.remove_server(before.place)
            self._leaving.append(before)

    def _shares_cores(self, cores: Sequence[int]) -> bool:
        return min(cores, default=-1) >= 0 and tuple(cores) == self._cores[: len(cores)]

    def _lane_for(self, cores: Sequence[int]) -> int:
        # Wake on the core that the waker is about to leave; elsewhere a wake costs several times as much.
        if cores and cores[0] >= 0 and cores[0] in self._cores:
            return self._cores.index(cores[0])
        self._next_lane += 1
        return self._next_lane % len(self._cores)

    def _is_gone(self, server: Link) -> bool:
        state = self.backend.stats(server.place).state
        return state == ServerState.GONE or self._attacher.is_gone(server)

    def _release_idle(self) -> None:
        """Give back what native code no longer touches; the server frees its side when it sees the hang-up."""
        for server in list(self._leaving):
            if not self.backend.is_idle(server.place):
                continue
            self._leaving.remove(server)
            self._accounts.leave(server.member.name, self.backend.stats(server.place))
            self._reaper.give_back(server.peer, server.window)
            member = server.member
            log.info("server_detached server=%s incarnation=%d", member.name, member.incarnation)

    def _keep_up(self) -> None:
        while not self._closed.wait(RETRY_S):
            try:
                with self._lock:
                    self._keep_up_once()
            except Exception:
                # Without this thread no server is attached again and nothing is released.
                log.exception("upkeep_failed")

    def _keep_up_once(self) -> None:
        if self._closed.is_set() or self._view is None:
            return
        self._release_idle()
        if not self._complete or any(self._is_gone(server) for server in self._servers.values()):
            self._settle(self._view)
        self._relink(time.monotonic())
        self._tell_adopted()

    def _relink(self, now_s: float) -> None:
        stats = {name: self.backend.stats(server.place) for name, server in self._servers.items()}
        full = {name for name, seen in stats.items() if seen.held_slots >= self._layout.slots}
        stuck = full | {name for name, seen in stats.items() if seen.lost_slots}
        self._stuck_since_s = {name: self._stuck_since_s.get(name, now_s) for name in stuck}
        for name, since_s in self._stuck_since_s.items():
            if now_s - since_s >= (RELINK_S if name in full else RELINK_LOST_S):
                log.warning("link_stuck server=%s stuck_s=%.1f", name, now_s - since_s)
                self._stuck_since_s[name] = now_s
                self._begin_attach(self._servers[name].member)

    def apply(self, arrays: HostArrays, deadline_s: float | None = None) -> None:
        """One expert call of any number of rows, from a thread without lanes: out = sum over k, in its order and in
        float32, of weight times the expert's row, rounded once to out's type.

        A row that is not finite is sent to nobody; what comes of it is NaN. Each `max_tokens` rows have that
        deadline anew.

        Raises:
            ExpertsLost: no live replica answered before the deadline; `out` is untouched.
            ValueError: a layer or an expert id is out of range; `out` is untouched.
            MemoryError: none is left; `out` is untouched.
        """
        wait_s = self.deadline_s if deadline_s is None else deadline_s
        with self._calls:
            try:
                self.backend.apply(arrays, int(wait_s * 1e9))
            except ExpertsLost as lost:
                raise ExpertsLost(
                    f"No live replica of every expert of layer {arrays.layer} answered within {wait_s:g} s; attached:"
                    f" {', '.join(self._servers) or 'none'}. Make the call again, or add replicas."
                ) from lost

    def stats(self) -> dict[str, ServerStats]:
        """What was counted of each attached server, by name, in the order of `attached`."""
        with self._lock:
            return {name: self.backend.stats(server.place) for name, server in self._servers.items()}

    def observations(self) -> dict[str, Observation]:
        """How fast each attached server answers."""
        with self._lock:
            return {
                name: observation_of(self.backend.stats(server.place), server.peer)
                for name, server in self._servers.items()
            }

    def load(self) -> dict[str, float]:
        """The load report's words on the pace of servers since the last report. For one reporter."""
        self._tracks = observe_all(self._tracks, self.observations())
        return load_entries(self._tracks)

    def totals(self) -> list[Totals]:
        """What was done with each server since this client began, as the router's metrics show it."""
        with self._lock:
            servers = [*self._servers.values(), *self._leaving]
            links = [(s.member.name, self.backend.stats(s.place), s.peer) for s in servers]
            return self._accounts.totals(links)

    def take_routed(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Rows sent to each logical expert since the last time, and calls that had any; each [layers * experts]."""
        with self._lock:
            if self._freed:
                none = np.zeros(self.shape.layers * self.shape.experts, np.uint32)
                return none, none
            return self.backend.take_routed()

    def close(self) -> None:
        """Detach from all servers; the endpoint stays. No call may be running, nor come. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._attacher.close()
        self._upkeep.join()
        with self._lock:
            attaching = list(self._attaching.values())
        for thread in attaching:
            thread.join()
        with self._lock:
            self._leaving += self._servers.values()
            self._servers = {}
            for server in self._leaving:
                self.backend.remove_server(server.place)
            self._release_idle()
            self._freed = True
            self.backend.close()
        self._reaper.close()
