"""The shell around the router's core: gRPC in, journal, gRPC out. One thread, one event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from router import events
from router.core import step
from router.etcd_store import Election
from router.faults import Fault, FaultInvalid, FaultRefused
from router.host import boot_s, host_id
from router.injection import Injections, KeyNeeded, TooManyFaults, Watcher
from router.journal import JournalUnusable, Store
from router.keda import NothingReported, TriggerInvalid
from router.lifecycle import DRAINED, ORDERLY
from router.messages import (
    LEADER,
    SERVICE,
    STANDBY,
    from_message,
    launch_message,
    loaded_of,
    renewed_of,
    routed_of,
    scale_of,
    taken_of,
    to_message,
    totals_of,
)
from router.models import groups, named
from router.pools import Counts, pool_size
from router.proto import router_pb2 as pb
from router.proto import router_pb2_grpc as rpc
from router.publication import Publication
from router.records import view_of
from router.retiring import retirement, retirements
from router.state import Config, State
from router.tls import guarded, why_not
from router.view import NO_ROWS, Identity, PoolSize, Retirement, Status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
_Command = TypeVar("_Command")

# What a standby answers too.
_ANSWERED = ("/grpc.", f"/{SERVICE}/Status")


class NotLeading(JournalUnusable):
    """Another router decides, or none yet."""


class CallRefused(Exception):
    """The core refuses what was asked; the text says why, the code how that is said over gRPC."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


# How a caller hears of what an answer raises: by the first that it is.
_CODES = {
    JournalUnusable: grpc.StatusCode.UNAVAILABLE,
    NothingReported: grpc.StatusCode.UNAVAILABLE,
    TriggerInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    FaultInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    TooManyFaults: grpc.StatusCode.RESOURCE_EXHAUSTED,
    KeyNeeded: grpc.StatusCode.PERMISSION_DENIED,
    FaultRefused: grpc.StatusCode.FAILED_PRECONDITION,
}
_REFUSALS = (CallRefused, *_CODES)


class Guard(grpc.aio.ServerInterceptor):
    """Around every call: whether the caller may make it, whether this router may answer it, and errors as statuses."""

    def __init__(self, service: RouterService, needs_roles: bool) -> None:
        """Args: needs_roles: a caller's certificate must allow the method; else there are no certificates."""
        self._service, self._needs_roles = service, needs_roles

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or (method.startswith("/grpc.") and not self._needs_roles):
            return handler

        def check(request: Any, context: Context) -> None:
            if self._needs_roles and (reason := why_not(context, method, request)):
                raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason)
            if not method.startswith(_ANSWERED):
                self._service.require_leading()

        def guard(behaviour: Callable[..., Any]) -> Callable[..., Any]:
            async def one(request: Any, context: Context) -> Any:
                try:
                    check(request, context)
                    return await behaviour(request, context)
                except _REFUSALS as error:
                    await _abort(context, error)

            async def each(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
                async for request in requests:
                    check(request, context)
                    yield request

            async def many(request: Any, context: Context) -> AsyncIterator[Any]:
                try:
                    check(request, context)
                    # Each message of a stream makes a claim of its own.
                    streams = handler.request_streaming and self._needs_roles
                    answers = behaviour(each(request, context) if streams else request, context)
                    if inspect.isawaitable(answers):
                        # Health writes its answers itself.
                        await answers
                        return
                    async with aclosing(answers):
                        async for answer in answers:
                            yield answer
                except _REFUSALS as error:
                    await _abort(context, error)

            return many if handler.response_streaming else one

        return guarded(handler, guard)


async def _abort(context: Context, error: Exception) -> NoReturn:
    code = (
        error.code
        if isinstance(error, CallRefused)
        else next(code for kind, code in _CODES.items() if isinstance(error, kind))
    )
    # Of a refusal for want of leading nothing was carried out: the caller may ask the router that leads at once.
    await context.abort(code, str(error), ((STANDBY, "1"),) if isinstance(error, NotLeading) else ())
    raise RuntimeError("abort returned")


class ExitWatch:
    """Watches processes on the running event loop; reports each that ends, once."""

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        """Args: on_exit: called with the pid, on the event loop."""
        self._on_exit = on_exit
        self._watched: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Watch one process of this host; one that has already ended is reported soon."""
        loop = asyncio.get_running_loop()
        if pid <= 0 or pid in self._watched:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(self._on_exit, pid)
            return
        except OSError as error:
            # Without pidfd (old kernel, too many files) the lease still ends; it only takes longer.
            log.warning("exit_not_watched pid=%d reason=%s", pid, error)
            return
        self._watched[pid] = fd
        loop.add_reader(fd, self._ended, pid)

    def forget(self, pid: int) -> None:
        """Stop watching. Idempotent."""
        fd = self._watched.pop(pid, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for pid in list(self._watched):
            self.forget(pid)

    def _ended(self, pid: int) -> None:
        self.forget(pid)
        self._on_exit(pid)


_AGAIN_S = 1.0
_ALL_LOST_S, _MOST_WAITS = 0.02, 10
# Told of a change at once, each watcher takes 100 us: half of the time is left for the rest, and what comes within a
# fraction of it is told together.
_TELL_ONE_S, _GATHER_ONE_S = 200e-6, 40e-6
# Ticks that fail in a row before the router gives up: it judges nobody meanwhile.
_MOST_FAILED_TICKS = 100


class RouterService(rpc.RouterServicer):
    """Carries events to the core and its commands out, each commit before its consequences."""

    def __init__(
        self,
        config: Config,
        store: Store,
        clock: Callable[[], float] = boot_s,
        election: Election | None = None,
        allow_chaos: bool = False,
        name: str = "router/0",
        named: Callable[[], Iterable[events.AddModel]] = tuple,
    ) -> None:
        """Must be made on the event loop that will serve; does nothing before `lead`.

        Args: election: None where there is only one router. allow_chaos: faults may be injected. name: of this router.
        named: models to serve where the journal does not know them, asked for as each term begins.
        """
        self.name = name
        self.retired = asyncio.Event()  # this router must end
        self.health = HealthServicer()
        self._config = config
        self.counts = Counts()
        self._store, self._named = store, named
        self._clock = clock
        self._election = election
        self._host = host_id()
        self._exits = ExitWatch(self._exit_seen)
        self._state = State()
        self._led = False
        self.turns = 0  # how often the loop has looked at the clock
        self._problem = ""
        self._fault = ""
        self._published = Publication()
        self._watchers: set[Watcher] = set()
        self._telling: asyncio.TimerHandle | None = None
        self._told_s = 0.0
        self._lost = asyncio.Event()  # somebody is, since the last tick
        self.injections = Injections(
            allow_chaos,
            lambda: {record.name: record.incarnation for record in self._state.members.values()},
            lambda: self._state.term,
        )
        self._launchers: dict[str, asyncio.Queue[events.StartProcess | events.StopProcess | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def leads(self) -> bool:
        """True while this router decides. False at once when its lease may have ended, whatever else waits."""
        return self._led and (self._election is None or self._election.leads())

    def lead(self) -> None:
        """Begin a term with the stored state.

        Raises:
            JournalUnusable: it cannot be read, or the new term not be committed.
        """
        self._state = self._store.load()
        self._led = True
        try:
            self._apply(events.Started(salt=secrets.randbelow(1 << 20)))
            # Before anybody is answered: whoever joins, or asks for one, finds them.
            for entry in self._named():
                if refused := _first(events.Refused, self._apply(entry)):
                    log.warning("model_not_served name=%s reason=%s", entry.model.name, refused.message)
        except JournalUnusable:
            self.step_down()
            raise
        self._set_problem("")
        for record in self._state.members.values():
            self._watch_exit(record.host, record.pid)
        log.info(
            "term_started term=%d epoch=%d members=%d", self._state.term, self._state.epoch, len(self._state.members)
        )

    def require_leading(self) -> None:
        """Raises NotLeading: another router decides."""
        if not self.leads():
            leader = self._election.leader if self._election else ""
            raise NotLeading(f"this router is a standby; {leader or 'no router'} leads")

    @property
    def state(self) -> State:
        """What is known now. Raises NotLeading: then nothing is."""
        self.require_leading()
        return self._state

    @property
    def problem(self) -> str:
        """Why nothing can be committed, or decided; empty when all is well."""
        return self._problem or self._fault or (self._election.problem if self._election else "")

    def step_down(self) -> None:
        """Stop deciding: end every stream and forget what is only the leader's to know. Idempotent."""
        self._led = False
        self._exits.close()
        for queue in self._launchers.values():
            queue.put_nowait(None)
        self._launchers.clear()
        self._state = State()
        self._problem = ""
        self._published = Publication()
        self._tell_watchers()

    async def follow(self, election: Election, address: str) -> None:
        """Lead whenever this router, reached at `address`, wins the election; until cancelled."""
        while True:
            await election.win(address)
            try:
                self.lead()
            except JournalUnusable as error:
                self._set_problem(str(error))
                await election.resign()
                # Not at once: another router may find what this one could not.
                await asyncio.sleep(_AGAIN_S)
                continue
            await self.tell_health()
            reason = await election.keep()
            self.step_down()
            log.error("stepped_down reason=%s", reason)
            await self.tell_health()
            await election.resign()

    async def run(self) -> None:
        """Tick until cancelled. Raises what a tick raises, once too many in a row have failed."""
        await self.tell_health()
        failed = 0
        while True:
            self.turns += 1
            with suppress(TimeoutError):
                # What is lost is placed anew sooner; but of a host all go at once, and first everyone is told of it.
                await asyncio.wait_for(self._lost.wait(), self._config.tick_s)
                await asyncio.sleep(_ALL_LOST_S)
                for _ in range(_MOST_WAITS):
                    if self._telling is None:
                        break
                    await asyncio.sleep(_ALL_LOST_S)
            self._lost.clear()
            if not self.leads():
                continue
            try:
                if self._problem:
                    self._store.prove(self._state)
                    self._set_problem("")
                self._apply(events.Tick())
                failed, self._fault = 0, ""
            except JournalUnusable as error:
                self._set_problem(str(error))
            except Exception as error:
                # A fault of the core that a restart would meet again; leases and streams of all members go on.
                failed += 1
                self.counts.failed_ticks += 1
                self._fault = f"the router cannot decide, see its log: {error!r}"
                log.exception("tick_failed in_a_row=%d", failed)
                if failed >= _MOST_FAILED_TICKS:
                    raise

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        commands = self.apply(from_message(events.Join, request))
        if (joined := _first(events.Joined, commands)) is None:
            reason = _reasons(commands)
            log.warning("join_refused pool=%s address=%s reason=%s", request.pool, request.address, reason)
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, reason)
        log.info("joined name=%s address=%s pid=%d", joined.name, request.address, request.pid)
        self._watch_exit(request.host, request.pid)
        identity = Identity(
            name=joined.name,
            incarnation=joined.incarnation,
            term=self._state.term,
            lease_s=self._config.lease_s,
            renew_s=self._config.renew_s,
        )
        return to_message(identity, salt=self._state.salt)

    async def Renew(self, requests: AsyncIterator[pb.RenewRequest], context: Context) -> AsyncIterator[pb.RenewReply]:
        said = None
        async for request in requests:
            # An answer costs as much as three renewals, and nearly all say the same.
            if (reply := self._renew(request)) != said:
                said = reply
                yield reply

    def _renew(self, request: pb.RenewRequest) -> pb.RenewReply:
        if _first(events.UnknownMember, self.apply(renewed_of(request))):
            return self._gone(request.incarnation)
        name, incarnation = request.name, request.incarnation
        known = self._state.liveness.get(name)
        if known is None:
            # It was only waited for, and has drained.
            return self._gone(incarnation)
        if request.acked != known.acked or known.journaled:
            acked = events.Acked(name=name, incarnation=incarnation, epoch=request.acked, salt=request.salt)
            self.apply(acked)
        if routed := routed_of(request):
            self.apply(routed)
            self.counts.add_rows(self._state, routed)
        if request.totals:
            # They are read when somebody looks; what else the renewal says is not kept.
            self.counts.add_totals(request.name, partial(totals_of, pb.RenewRequest(totals=request.totals)))
        return pb.RenewReply(incarnation=request.incarnation, salt=self._state.salt)

    def _gone(self, incarnation: int) -> pb.RenewReply:
        gone = next((each for each in self._state.gone if each.incarnation == incarnation), None)
        reason = gone.reason if gone else ""
        return pb.RenewReply(incarnation=incarnation, fenced=True, drained=reason in ORDERLY, reason=reason)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.View | bytes]:
        watcher = Watcher(request.incarnation, taken_of(request))
        self._watchers.add(watcher)
        self.injections.attach(request.name, watcher)
        published, shown = self._published, 0
        try:
            while self.leads():
                for order in watcher.take():
                    yield pb.View(order=order)
                if not watcher.orders:
                    watcher.told.set()
                # Only the newest: a watcher that is slow to read skips what is already past.
                # A term that has not heard its members has nothing to show.
                if published is not self._published:
                    # Another term began meanwhile: what it does not know of went unseen.
                    published, shown = self._published, 0
                if shown != published.epoch:
                    view, shown = published.since(shown), published.epoch
                    yield view
                await watcher.changed.wait()
        finally:
            self._watchers.discard(watcher)
            self.injections.detach(request.name, watcher)
        self.require_leading()

    async def Loaded(self, request: pb.LoadedRequest, context: Context) -> pb.LoadedReply:
        commands = self.apply(loaded_of(request))
        return pb.LoadedReply(
            fenced=_first(events.UnknownMember, commands) is not None, stale=_first(events.Stale, commands) is not None
        )

    async def Suspect(self, request: pb.SuspectRequest, context: Context) -> pb.SuspectReply:
        log.warning("suspected name=%s by=%s reason=%s", request.name, request.by, request.reason)
        self.apply(from_message(events.Suspected, request))
        return pb.SuspectReply()

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        self.apply(from_message(events.Left, request))
        return pb.LeaveReply()

    async def ReportExit(self, request: pb.ReportExitRequest, context: Context) -> pb.ReportExitReply:
        fenced = _first(events.Fenced, self.apply(from_message(events.Exited, request)))
        return pb.ReportExitReply(name=fenced.name if fenced else "")

    async def Launches(self, request: pb.LaunchesRequest, context: Context) -> AsyncIterator[pb.LaunchCommand]:
        queue: asyncio.Queue[events.StartProcess | events.StopProcess | None] = asyncio.Queue()
        replaced = self._launchers.get(request.host)
        self._launchers[request.host] = queue
        if replaced is not None:
            replaced.put_nowait(None)
        try:
            log.info("launcher_attached host=%s", request.host)
            self.apply(from_message(events.LauncherAttached, request))
            while (command := await queue.get()) is not None:
                yield launch_message(command)
        finally:
            if self._launchers.get(request.host) is queue:
                del self._launchers[request.host]
                self._report(events.LauncherDetached(host=request.host))

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleReply:
        return pb.ScaleReply(pool=to_message(self.scale(scale_of(request))))

    def scale(self, event: events.Scale) -> PoolSize:
        """Change a pool's wanted size; returns what the pool is like then.

        Raises:
            CallRefused: no such pool, or a size that it may not have.
            JournalUnusable: then nothing has happened.
        """
        if refused := _first(events.Refused, self.apply(event)):
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, refused.message)
        return pool_size(self._config, self._state, event.pool)

    async def AddModel(self, request: pb.AddModelRequest, context: Context) -> pb.Model:
        return self._model(from_message(events.AddModel, request), grpc.StatusCode.FAILED_PRECONDITION)

    async def RemoveModel(self, request: pb.RemoveModelRequest, context: Context) -> pb.Model:
        return self._model(events.RemoveModel(name=request.name), grpc.StatusCode.NOT_FOUND)

    def _model(self, event: events.AddModel | events.RemoveModel, code: grpc.StatusCode) -> pb.Model:
        commands = self.apply(event)
        if (serves := _first(events.Serves, commands)) is None:
            raise CallRefused(code, _reasons(commands))
        model = serves.model
        log.info("model name=%s hash=%s number=%d leaving=%s", model.name, model.hash, model.number, model.leaving)
        return to_message(model)

    async def Retire(self, request: pb.RetireRequest, context: Context) -> pb.Retirement:
        return to_message(self.retire(request.name, request.operation))

    def retire(self, name: str, operation: str) -> Retirement:
        """Have a member, or this router, go; returns how far that has come.

        Args:
            operation: Empty: the one under which it goes already, or a new one.

        Raises:
            CallRefused: no such member, or another operation.
            JournalUnusable: then nothing has happened.
        """
        own, gone = os.getpid() if name == self.name else 0, self._state.gone
        known = None if own else retirement(self._state, name)
        operation = operation or (known.operation if known else str(uuid.uuid4()))
        event = events.Retire(name=name, operation=operation, unix_s=time.time(), router_pid=own)
        commands = self.apply(event)
        if own and self._state.gone is not gone:
            log.info("retired name=%s operation=%s", name, operation)
            self.retired.set()
        if refused := _first(events.Refused, commands):
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, refused.message)
        found = retirement(self._state, name)
        if found is None or _first(events.UnknownMember, commands):
            do = f"{name} is neither a member nor the router that decides, {self.name}. `eaas status` lists them"
            raise CallRefused(grpc.StatusCode.NOT_FOUND, do)
        return found

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        status = Status(
            view=view_of(self._config, self._state),
            pools={name: pool_size(self._config, self._state, name) for name in groups(self._state)},
            problem=self.problem,
            gone=self._state.gone,
            pid=os.getpid(),
            leader=self._election.leader if self._election else "",
            rows=self.counts.rows if request.rows else NO_ROWS,
            retirements=retirements(self._state),
        )
        return to_message(status)

    async def Inject(self, request: pb.InjectRequest, context: Context) -> pb.InjectReply:
        self.injections.require_no_key()
        injection = await self.injections.inject(request.names, from_message(Fault, request.fault))
        return pb.InjectReply(id=injection.fault.id)

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearReply:
        self.injections.require_no_key()
        return pb.ClearReply(ids=self.injections.clear(request.id))

    async def Faults(self, request: pb.FaultsRequest, context: Context) -> pb.FaultsReply:
        return pb.FaultsReply(injections=[to_message(known) for known in self.injections.known()])

    def apply(self, event: events.Event) -> list[events.Command]:
        """What the core answers to an event, once it is durable. Raises JournalUnusable: then nothing has happened."""
        try:
            return self._apply(event)
        except NotLeading:
            raise
        except JournalUnusable as error:
            self._set_problem(str(error))
            raise

    def _apply(self, event: events.Event) -> list[events.Command]:
        # Before anything is answered, even what changes nothing: another may have decided otherwise since.
        self.require_leading()
        state, commands = step(self._config, self._state, event, self._clock())
        if self._problem and any(isinstance(c, events.Publish) for c in commands):
            raise JournalUnusable(self._problem)
        self._store.save(self._state, state)
        self.counts.note(self._state, state, commands)
        if state.models is not self._state.models:
            slept = {model.number: model.asleep for model in self._state.models}
            for model in named(self._config, state):
                if slept.get(model.number, model.asleep) != model.asleep:
                    log.info("%s name=%s", "model_sleeps" if model.asleep else "model_wakes", model.name)
        self._state = state
        # Another may have begun to lead while that was saved; whoever leads orders what is missing.
        leads = self.leads()
        for command in commands:
            if leads or not isinstance(command, events.StartProcess | events.StopProcess):
                self._carry_out(command)
        return commands

    def _carry_out(self, command: events.Command) -> None:
        match command:
            case events.Publish():
                self._published.publish(self._config, self._state)
                self._tell_watchers()
            case events.StartProcess() | events.StopProcess():
                if queue := self._launchers.get(command.host):
                    log.info("ordered %s", command)
                    queue.put_nowait(command)
                else:
                    # It has just gone, which is not written down yet; the core orders again elsewhere, or later.
                    log.warning("not_ordered %s: the host has no launcher", command)
            case events.Fenced():
                self._lost.set()
                level = logging.INFO if command.reason == DRAINED else logging.WARNING
                log.log(level, "fenced name=%s reason=%s", command.name, command.reason)
            case events.UnknownMember() | events.Stale():
                log.info("ignored %s", command)
            case events.Scaled():
                log.info("scaled pool=%s wanted=%d why=%r", command.pool, command.wanted, command.why)
            case events.Joined() | events.Refused():
                pass

    def _tell_watchers(self) -> None:
        if self._telling is None:
            loop, count = asyncio.get_running_loop(), len(self._watchers)
            due_s = max(loop.time() + _GATHER_ONE_S * count, self._told_s + _TELL_ONE_S * count)
            self._telling = loop.call_at(due_s, self._tell_now)

    def _tell_now(self) -> None:
        self._telling, self._told_s = None, asyncio.get_running_loop().time()
        for watcher in self._watchers:
            watcher.changed.set()

    def _watch_exit(self, host: str, pid: int) -> None:
        if host == self._host:
            self._exits.watch(pid)

    def _exit_seen(self, pid: int) -> None:
        log.info("exit_seen pid=%d", pid)
        self._report(events.Exited(host=self._host, pid=pid))

    def _report(self, event: events.Exited | events.LauncherDetached) -> None:
        """What this router saw itself must not be lost: it is said again until it can be written down."""
        if isinstance(event, events.LauncherDetached) and event.host in self._launchers:
            return  # Another launcher has come: what it said replaces what was known of this one.
        try:
            self.apply(event)
        except NotLeading:
            return  # Whoever leads next watches every member that is then left, and hears launchers anew.
        except JournalUnusable:
            asyncio.get_running_loop().call_later(self._config.tick_s, self._report, event)

    def _set_problem(self, problem: str) -> None:
        if problem == self._problem:
            return
        if problem:
            log.error("journal_unusable reason=%s", problem)
        else:
            log.info("journal_usable")
        self._problem = problem
        task = asyncio.get_running_loop().create_task(self.tell_health())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def tell_health(self) -> None:
        """Say to whoever asks or waits how this router does."""
        status, leads = health_pb2.HealthCheckResponse, self.leads()
        well = leads and not self._problem
        for name, said in (("", well), (SERVICE, well), (LEADER, leads)):
            await self.health.set(name, status.SERVING if said else status.NOT_SERVING)


def _first(kind: type[_Command], commands: list[events.Command]) -> _Command | None:
    return next((command for command in commands if isinstance(command, kind)), None)


def _reasons(commands: list[events.Command]) -> str:
    return "; ".join(command.message for command in commands if isinstance(command, events.Refused))


class CannotListen(Exception):
    """An address cannot be bound, or not as asked."""
