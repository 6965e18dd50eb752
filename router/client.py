"""Synchronous client of the router, for members, launchers and the command line.

    client = RouterClient("127.0.0.1:7000")  # or, of several routers, "10.0.0.1:7000,10.0.0.2:7000"
    client.join(pool="expert", address="127.0.0.1:7101", model_hash=..., numerics_class=..., layers=8, experts=32)
    client.start(on_view=apply, load=lambda: {"busy": 0.4}, on_fenced=stop)

Threads keep the lease, hear what the router says to that and watch the View. A router that is away, frozen or
restarting changes nothing: the last View stays, all try again, and the member goes on under the same name and
incarnation. Only being told that it is fenced ends a membership; `join` then makes the process a new member, under a
new name.

Of several routers one leads. The channel watches the health of them all and sends every call to the one that says
that it leads, so that a takeover is, to the threads, one more router that was away for a moment.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

import grpc
import numpy as np
from numpy.typing import NDArray

from router.connection import AWAY, RETRY_MOST_S, Connection, JoinRefused, OrderRefused, RouterUnavailable
from router.events import Exited, Join, Left, StartProcess, StopProcess, Suspected, Totals
from router.faults import Fault, FaultRefused, FaultTaker, Injection
from router.heartbeat import Heartbeat
from router.host import boot_s, host_id, name_thread, process_id
from router.messages import from_message, launch_of, status_of, to_message, view_of_message
from router.proto import router_pb2 as pb
from router.tls import Credentials
from router.view import CLIENT, EXPERT, STANDS, Identity, Member, Model, PoolSize, Retirement, Status, View

__all__ = ["FaultRefused", "JoinRefused", "OrderRefused", "RouterClient", "RouterUnavailable"]

log = logging.getLogger(__name__)

LEASE_THREAD = "router-lease"
# No View in use is older than so many terms.
_MOST_SALTS = 64

# With which the router says that it will not, rather than that it cannot.
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND,
)


_Outbox: TypeAlias = "SimpleQueue[pb.RenewRequest | None]"


class RouterClient:
    """One process's connection to the router. Every method may be called from any thread."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Nothing is sent yet.

        Args:
            address: "host:port" of the router; of several, all with commas between, by IP address, or one name that
                resolves to all.
            credentials: Of this process; None: no TLS.

        Raises:
            RouterAddressInvalid: a list that cannot be followed.
        """
        self.address = address
        self._connection = Connection(address, credentials)
        self._wake = threading.Event()
        self._closed = self._connection.closed
        self._lock = threading.Lock()
        self._identity: Identity | None = None
        self._fenced = False
        self._view: View | None = None
        self._acked = 0
        self._salts: list[tuple[int, int]] = []  # of the terms whose Views were seen, with the first epoch
        self._pool = ""
        # Of the term that knows what this expert server holds, and of the term that answered last.
        self._told_salt = self._heard_salt = 0
        self._held: tuple[bytes, int, tuple[str, ...]] = (b"", 0, ())
        # This member as the newest View has it, and the epoch of the first that had it so.
        self._own: tuple[Member | None, int] = (None, 0)
        self._loaded: tuple[Identity | None, bytes, int, tuple[str, ...], int] | None = None
        self._reports = 0  # of what is held, sent so far
        # What the next renewal says beside the load. What an unanswered one said is lost: nothing but balance and
        # metrics needs it.
        self._routed: tuple[NDArray[np.uint32], NDArray[np.uint32]] | None = None
        self._totals: tuple[Totals, ...] = ()
        # The stream of renewals, what it is to carry, and what the router answered, on which stream.
        self._renewing: grpc.Call | None = None
        self._outbox: _Outbox | None = None
        self._replies: deque[tuple[_Outbox | None, pb.RenewReply]] = deque()
        self._joined = threading.Event()
        self._watching: grpc.Call | None = None
        self._spoke_s = boot_s()
        self._threads: list[threading.Thread] = []
        self._on_view: Callable[[View], None] | None = None
        self._on_fenced: Callable[[str], None] | None = None
        self._on_drained: Callable[[], None] | None = None
        self._load: Callable[[], Mapping[str, float]] | None = None
        self._faults: FaultTaker | None = None
        self._heartbeat: Heartbeat | None = None

    @property
    def _stub(self) -> Any:
        return self._connection.stub

    @property
    def identity(self) -> Identity | None:
        """Name and incarnation, or None before `join`."""
        return self._identity

    @property
    def view(self) -> View | None:
        """The newest View seen, or None before the first."""
        return self._view

    @property
    def fenced(self) -> bool:
        """True once the router has said that this member is no more; `join` again clears it."""
        return self._fenced

    def lease_held(self) -> bool:
        """False when this process itself was silent for a whole lease (frozen, swapped out): it must not answer until
        the router has told whether it is still a member. A router that does not answer never ends a lease."""
        identity = self._identity
        return identity is not None and not self._fenced and boot_s() - self._spoke_s < identity.lease_s

    def join(self, *, timeout_s: float = 30.0, **said: Any) -> Identity:
        """Become a member, under a new name.

        Args:
            timeout_s: How long to wait for a router that is not there yet.
            said: Fields of `Join`; pid and host are those of this process unless given.

        Raises:
            JoinRefused: another model, shape or format of numbers; the message says which was found and needed.
            RouterUnavailable: no router answered in time, or it cannot write its journal.
        """
        joining = Join(**{"pid": process_id(), "host": host_id()} | said)
        sent_s = boot_s()
        reply = self._connection.call(self._stub.Join, to_message(joining), timeout_s, JoinRefused, _REFUSALS[:2])
        with self._lock:
            self._acked = 0
            self._salts = []
            self._pool = joining.pool
            self._told_salt = self._heard_salt = reply.salt
            self._held = (b"", 0, ())
            self._loaded = None
            # Nothing of it is to be said under another name.
            self._routed, self._totals = None, ()
            self._view = None
            self._fenced = False
            self._spoke_s = sent_s
            self._identity = from_message(Identity, reply)
            identity, watching = self._identity, self._watching
        self._joined.set()
        self._wake.set()
        if watching is not None:
            # The View with this member in it may have come before the reply, and nothing more may change: a new
            # stream brings it again.
            watching.cancel()
        return identity

    def start(
        self,
        on_view: Callable[[View], None] | None = None,
        load: Callable[[], Mapping[str, float]] | None = None,
        on_fenced: Callable[[str], None] | None = None,
        on_drained: Callable[[], None] | None = None,
        faults: FaultTaker | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Start the threads: watch the View, and keep the lease if this process has joined (now or later).

        Args:
            on_view: Called on the watch thread with each newer View; Views between may be skipped. After each
                View whose target differs, an expert server must bring what it holds to its target (drop what
                is absent, load what is new) and call `loaded`.
            load: Called on the lease thread before each renewal.
            on_fenced: Called once on the lease thread, with the reason, when this member is no more.
            on_drained: Called instead, where given, when that is because it was ordered to drain, and has.
            faults: Told on the watch thread of each fault that this process is to do to itself; None: it takes none.
            heartbeat: Of the loop that does this member's work: while it stands still renewals say so, and nothing
                else, and the router replaces this member.
        """
        if self._threads:
            raise RuntimeError("start was called twice; one RouterClient serves one process, once")
        self._on_view, self._load, self._on_fenced, self._on_drained = on_view, load, on_fenced, on_drained
        self._faults, self._heartbeat = faults, heartbeat
        self._threads = [
            threading.Thread(target=self._keep_lease, name=LEASE_THREAD, daemon=True),
            threading.Thread(target=self._hear, name="router-replies", daemon=True),
            threading.Thread(target=self._watch, name="router-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def ack(self, epoch: int) -> None:
        """Say that the routes of `epoch` are in use and no call in flight uses older ones. Does not block."""
        with self._lock:
            if epoch <= self._acked:
                return
            self._acked = epoch
        self._wake.set()

    def loaded(self, held: bytes, epoch: int, opened: tuple[str, ...] = ()) -> None:
        """Say which experts are held, verified. Does not block; sent until the router has it, the newest only.

        Args:
            held: Bitmap of the (layer, expert) pairs held, as in `Member.target`.
            epoch: Of the newest View whose target had been applied (what it no longer names, no longer served).
            opened: Hashes of the models of which it can hold experts, beyond that with which it joined.
        """
        with self._lock:
            if (held, opened) == (self._held[0], self._held[2]) and self._own[1] <= self._held[1]:
                return  # The router changed nothing of this member since that was said.
            self._held = (held, epoch, opened)
            self._loaded = (self._identity, *self._held, self._heard_salt)
        self._wake.set()

    def routed(self, rows: NDArray[np.uint32], activated: NDArray[np.uint32]) -> None:
        """Say what was sent since the last call: it goes with the next renewal. Does not block.

        Args:
            rows, activated: [layers * experts], in the order of bitmaps: rows, and batches that had any.
        """
        with self._lock:
            if self._routed is not None:
                rows, activated = rows + self._routed[0], activated + self._routed[1]
            self._routed = rows, activated

    def counted(self, totals: Iterable[Totals]) -> None:
        """Say what this process has counted since it began: it goes with the next renewal. Does not block."""
        with self._lock:
            self._totals = tuple(totals)

    def scale(self, pool: str, wanted: int, drain_s: float | None = None, timeout_s: float = 5.0) -> PoolSize:
        """Change the wanted size of a pool; the change itself takes its time.

        Args:
            drain_s: Longest drain of a member that is no longer needed; None: the router's default.

        Raises:
            OrderRefused: no such pool, out of its bounds, or not for this process's role; the message says which.
            RouterUnavailable: no router answered in time, or it cannot write its journal.
        """
        if wanted < 0:
            raise OrderRefused(f"{wanted} members of pool {pool!r} asked for; give at least 0")
        request = pb.ScaleRequest(pool=pool, wanted=wanted, drain_s=drain_s or 0.0)
        reply = self._connection.call(self._stub.Scale, request, timeout_s, OrderRefused, _REFUSALS)
        return from_message(PoolSize, reply.pool)

    def add_model(self, model: Model, attention: int = 1, numerics_class: str = "", timeout_s: float = 5.0) -> Model:
        """Have the pool serve one more model; of one that it serves, change name, path, weight and workers.

        Args:
            model: Its hash, name, path, shape, expert_bytes and weight.
            attention: Attention workers wanted of it.
            numerics_class: Of its experts on servers of this pool.

        Returns:
            The model as it is served, with its number and base.

        Raises:
            OrderRefused: it does not fit beside the others, or not for this process's role; the message says why.
            RouterUnavailable: no router answered in time, or it cannot write its journal.
        """
        request = pb.AddModelRequest(model=to_message(model), attention=attention, numerics_class=numerics_class)
        reply = self._connection.call(self._stub.AddModel, request, timeout_s, OrderRefused, _REFUSALS)
        return from_message(Model, reply)

    def remove_model(self, name: str, timeout_s: float = 5.0) -> Model:
        """Have a model take no new requests, and go once those under way have ended.

        Raises:
            OrderRefused: no such model, or not for this process's role; the message says which.
            RouterUnavailable: no router answered in time, or it cannot write its journal.
        """
        request = pb.RemoveModelRequest(name=name)
        reply = self._connection.call(self._stub.RemoveModel, request, timeout_s, OrderRefused, _REFUSALS)
        return from_message(Model, reply)

    def retire(self, name: str, operation: str = "", timeout_s: float = 5.0) -> Retirement:
        """Have a member go once others do all of its work; asked again: how far that has come.

        Args:
            operation: An id of the caller's choice; empty: the one under which it goes already, or a new one.

        Raises:
            OrderRefused: no such member, another operation, or not for this process's role; the message says which.
            RouterUnavailable: no router answered in time, or it cannot write its journal.
        """
        request = pb.RetireRequest(name=name, operation=operation)
        reply = self._connection.call(self._stub.Retire, request, timeout_s, OrderRefused, _REFUSALS)
        return from_message(Retirement, reply)

    def inject(self, names: Sequence[str], fault: Fault, timeout_s: float = 5.0) -> str:
        """Have members do a fault to themselves: each that is named is told, or none. Returns the fault's id.

        Args:
            fault: An empty id is replaced; one that is active may not be used again.

        Raises:
            FaultRefused: the router or a member does not take it; the message says what was found and needed.
            RouterUnavailable: no router answered in time.
        """
        request = pb.InjectRequest(names=names, fault=to_message(fault))
        return self._connection.call(self._stub.Inject, request, timeout_s, FaultRefused, _REFUSALS).id

    def clear(self, fault_id: str = "", timeout_s: float = 5.0) -> list[str]:
        """End a fault, or all; the ids of those that were active. Raises as `inject`."""
        request = pb.ClearRequest(id=fault_id)
        return list(self._connection.call(self._stub.Clear, request, timeout_s, FaultRefused, _REFUSALS).ids)

    def faults(self, timeout_s: float = 5.0) -> list[Injection]:
        """What is injected, and what was lately, oldest first. Raises RouterUnavailable."""
        reply = self._connection.call(self._stub.Faults, pb.FaultsRequest(), timeout_s)
        return [from_message(Injection, message) for message in reply.injections]

    def suspect(self, name: str, incarnation: int, reason: str, timeout_s: float = 1.0) -> None:
        """Tell the router that a member misbehaves. Raises RouterUnavailable."""
        by = self._identity.name if self._identity else ""
        suspected = Suspected(by=by, name=name, incarnation=incarnation, reason=reason)
        self._connection.call(self._stub.Suspect, to_message(suspected), timeout_s)

    def leave(self, drain: bool = False, timeout_s: float = 1.0) -> None:
        """Stop being a member: at once, or (drain) once its work is done elsewhere, which ends in `on_drained`.

        Where no router answers in time the lease ends by itself.
        """
        identity = self._identity
        if identity is None or self._fenced:
            return
        going = Left(name=identity.name, incarnation=identity.incarnation, drain=drain)
        if not drain:
            self._fenced = True
        try:
            self._connection.call(self._stub.Leave, to_message(going), timeout_s)
        except RouterUnavailable as error:
            log.info("leave_unanswered name=%s reason=%s", going.name, error)

    def report_exit(self, host: str, pid: int, pool: str = "", timeout_s: float = 5.0) -> str:
        """Say that a process has ended. Returns the name of the member that it was, or "". Raises RouterUnavailable.

        Args:
            host: `host_id()` of the machine.
            pool: What it was started for: if it never joined, that start has failed.
        """
        ended = Exited(host=host, pid=pid, pool=pool)
        return self._connection.call(self._stub.ReportExit, to_message(ended), timeout_s).name

    def launches(
        self, host: str, starting: Callable[[], Mapping[str, int]] = dict
    ) -> Iterator[StartProcess | StopProcess]:
        """Attach as the launcher of a host; yields what to start and stop until `close`.

        Args:
            host: `host_id()` of the machine.
            starting: Processes by pool that were started here and have not joined; asked at each (re)connection.
        """
        for command in self._connection.stream(
            lambda: self._stub.Launches(pb.LaunchesRequest(host=host, starting=dict(starting())))
        ):
            yield launch_of(host, command)

    def status(self, timeout_s: float = 5.0, rows: bool = False) -> Status:
        """Everything the router knows, rows sent to each expert only if asked for. Raises RouterUnavailable."""
        return status_of(self._connection.call(self._stub.Status, pb.StatusRequest(rows=rows), timeout_s))

    def close(self) -> None:
        """Stop the threads and the connection, without leaving. Idempotent."""
        self._connection.close()
        self._joined.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)
        self._connection.hang_up()

    def _keep_lease(self) -> None:
        name_thread()
        while not self._closed.is_set():
            identity = self._identity
            if identity is None or self._fenced:
                self._wake.wait()
                self._wake.clear()
                continue
            self._wake.clear()
            self._take_replies(identity)
            if boot_s() - self._spoke_s >= identity.lease_s:
                self._ask_again(identity)
            if self._fenced or self._identity is not identity:
                continue
            began_s = boot_s()
            try:
                # The lease first: a router that cannot write its journal refuses the report, not the renewal.
                self._renew(identity)
                self._report_loaded(identity)
                wait_s = identity.renew_s
            except grpc.RpcError as error:
                if self._closed.is_set():
                    return
                if error.code() not in AWAY:
                    log.warning("report_failed name=%s code=%s detail=%s", identity.name, error.code(), error.details())
                wait_s = min(identity.renew_s, RETRY_MOST_S)
            except ValueError:  # what grpc raises over a channel that was closed meanwhile
                if self._closed.is_set():
                    return
                raise
            # A refused or unanswered attempt counts too: only this process's own silence ends its lease. From when it
            # began: it may have been silent since.
            self._spoke_s = began_s
            if not self._fenced:
                self._wake.wait(max(0.0, wait_s - (boot_s() - began_s)))

    def _ask_again(self, identity: Identity) -> None:
        """After a silence, wait until the router has said whether this is still a member; for half a lease at most."""
        end_s, asked = boot_s() + identity.lease_s / 2, None
        # What the stream of before carries may have been said before the silence.
        if self._renewing is not None:
            self._renewing.cancel()
        before = self._outbox
        while not self._closed.is_set() and (left_s := end_s - boot_s()) > 0:
            self._wake.clear()
            if asked is not None and self._take_replies(identity) is asked:
                return
            if self._fenced or self._identity is not identity:
                return
            if self._outbox is not before:
                asked = before = self._renew(identity)
            self._wake.wait(left_s)

    def _renew(self, identity: Identity) -> _Outbox | None:
        """Say that this member goes on; returns where that was put, or None: nothing was said."""
        # Before the rest is taken: whoever is asked for its load may count something more.
        load = self._present_load()
        outbox = self._outbox
        if outbox is None or not outbox.empty():
            return None  # There is no stream, or it takes nothing now; what is left of the lease is for another.
        with self._lock:
            acked, seen = self._acked, self._view.epoch if self._view is not None else 0
            salt = next((salt for first, salt in reversed(self._salts) if first <= acked), 0)
            routed, self._routed = self._routed, None
            totals, self._totals = self._totals, ()
        request = pb.RenewRequest(
            name=identity.name,
            incarnation=identity.incarnation,
            load=load,
            acked=acked,
            salt=salt,
            seen=seen,
            totals=[to_message(each) for each in totals],
        )
        if routed is not None:
            request.rows, request.activated = (part.astype("<u4").tobytes() for part in routed)
        outbox.put(request)
        return outbox

    def _take_replies(self, identity: Identity) -> _Outbox | None:
        """Returns on which stream the last of them came; None: there was none."""
        outbox = None
        while self._replies:
            outbox, reply = self._replies.popleft()
            self._take_reply(identity, reply)
        return outbox

    def _take_reply(self, identity: Identity, reply: pb.RenewReply) -> None:
        if reply.incarnation != identity.incarnation:
            return
        if reply.fenced:
            self._fence(identity, reply.drained, reply.reason or "its lease ended or its process was reported dead")
            return
        with self._lock:
            self._heard_salt = reply.salt
            if self._pool == EXPERT and reply.salt != self._told_salt and self._identity is identity:
                # A new term: it must hear what is held here, whatever its journal says.
                self._loaded = (identity, *self._held, reply.salt)

    def _hear(self) -> None:
        # Who never joins has nothing to renew, and may not be allowed to.
        self._joined.wait()
        for reply in self._connection.stream(self._open_renewals):
            self._replies.append((self._outbox, reply))
            self._wake.set()

    def _open_renewals(self) -> Any:
        outbox: _Outbox = SimpleQueue()
        # gRPC takes what is to be sent on a thread of its own, which must not outlive the stream.
        stream = self._stub.Renew(iter(outbox.get, None))
        if not stream.add_callback(lambda: outbox.put(None)):
            outbox.put(None)
        self._renewing, self._outbox = stream, outbox
        self._wake.set()
        return stream

    def renew_now(self) -> None:
        """Have the next renewal sent at once. Does not block."""
        self._wake.set()

    def _present_load(self) -> dict[str, float]:
        if self._heartbeat is not None and self._heartbeat.stands_s:
            # Whoever asked the loop for its load might wait for what it holds.
            return {STANDS: self._heartbeat.stands_s}
        try:
            load = dict(self._load()) if self._load else {}
            return load | {"faults": float(self._faults.active)} if self._faults else load
        except Exception:
            # A caller's fault must not cost its membership.
            log.exception("load_failed")
            return {}

    def _report_loaded(self, identity: Identity) -> None:
        with self._lock:
            loaded = self._loaded
        # What a member holds must not be said, and so lost, under the name that it had before.
        if loaded is None or loaded[0] is not identity:
            return
        _, held, epoch, opened, salt = loaded
        # One that nobody answered in time may come after the next.
        self._reports += 1
        request = pb.LoadedRequest(
            name=identity.name,
            incarnation=identity.incarnation,
            bitmap=held,
            epoch=epoch,
            salt=salt,
            number=self._reports,
            opened=opened,
        )
        reply = self._stub.Loaded(request, timeout=identity.lease_s / 2)
        if reply.stale:
            log.info("loaded_report_stale name=%s epoch=%d", identity.name, epoch)
        with self._lock:
            if self._loaded is loaded:
                # It is for the term that has begun meanwhile.
                again = reply.stale and self._heard_salt != salt
                self._loaded = (identity, *self._held, self._heard_salt) if again else None
            began = salt != self._told_salt and not reply.fenced
            self._told_salt = salt if began else self._told_salt
            watching = self._watching
        if began and watching is not None:
            # What this term published before it knew was not followed: a new stream begins with the newest View.
            watching.cancel()

    def _fence(self, identity: Identity, drained: bool, reason: str) -> None:
        with self._lock:
            if self._fenced or self._identity is not identity:
                return
            self._fenced = True
        level = logging.INFO if drained else logging.WARNING
        log.log(level, "fenced name=%s incarnation=%d reason=%s", identity.name, identity.incarnation, reason)
        if drained and self._on_drained:
            self._on_drained()
        elif self._on_fenced:
            self._on_fenced(f"{identity.name} is fenced: {reason}")

    def _watch(self) -> None:
        last: View | None = None
        for message in self._connection.stream(self._open_watch):
            if message.HasField("order"):
                if self._faults:
                    self._obey(self._faults, message.order)
                continue
            last = view = view_of_message(message, last)
            if view is None:
                log.warning("view_not_followed since=%d epoch=%d", message.since, message.epoch)
                with self._lock:
                    watching = self._watching
                if watching is not None:
                    watching.cancel()
                continue
            if self._view is not None and view.epoch < self._view.epoch and not self._begins_anew(view):
                log.warning("view_ignored epoch=%d newest=%d", view.epoch, self._view.epoch)
                continue
            with self._lock:
                if self._pool == EXPERT and view.salt not in (0, self._told_salt):
                    # That term does not know yet what is held here, and might have it dropped.
                    continue
                if not self._salts or self._salts[-1][1] != view.salt:
                    self._salts = [*self._salts[1 - _MOST_SALTS :], (view.epoch, view.salt)]
                self._view = view
                own = view.member(self._identity.name) if self._identity else None
                if own is None or own is not self._own[0]:
                    self._own = own, view.epoch
            if self._on_view:
                try:
                    self._on_view(view)
                except Exception:
                    log.exception("on_view_failed epoch=%d", view.epoch)

    def _begins_anew(self, view: View) -> bool:
        """Whether to follow a View although its epoch is lower: a term that was never seen before has an older journal.

        A term counts on from the epochs that its members saw, who therefore never need to. Any program may be a client,
        so what that saw counts for nothing: its routes are those of the term before, and it is to join anew.
        """
        identity = self._identity
        if view.salt in (0, *(salt for _, salt in self._salts)):
            return False
        if identity is not None and self._pool == CLIENT:
            self._fence(identity, False, "the router has lost the journal of its term")
        return identity is None

    def _obey(self, faults: FaultTaker, order: pb.FaultOrder) -> None:
        try:
            if order.WhichOneof("order") == "begin":
                faults.begin(from_message(Fault, order.begin))
            else:
                faults.end(order.end)
        except Exception:
            log.exception("fault_order_failed %s", order)

    def _open_watch(self) -> Any:
        identity = self._identity
        request = pb.WatchRequest(
            name=identity.name if identity else "",
            incarnation=identity.incarnation if identity else 0,
            takes=to_message(self._faults.takes) if self._faults else None,
        )
        stream = self._stub.Watch(request)
        with self._lock:
            self._watching = stream
        return stream
