"""The shell around the core, driven without sockets: what it does where the store or a member misbehaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from router import service as shell
from router.events import Event, Join, Loaded, Renewed, StartProcess, Tick
from router.faults import FaultInvalid
from router.injection import ChaosNotAllowed, KeyNeeded, TooManyFaults
from router.journal import JournalUnusable
from router.keda import NothingReported, TriggerInvalid
from router.messages import STANDBY, from_message, renewed_of
from router.proto import router_pb2 as pb
from router.service import CallRefused, Guard, NotLeading, RouterService
from router.state import Config, State
from router.view import PROTOCOL

HOST = "a-host-of-this-test"


class Memory:
    """A store that can be full."""

    def __init__(self) -> None:
        self.is_full = False
        self.on_save: Callable[[], None] = lambda: None

    def load(self) -> State:
        return State()

    def save(self, before: State, after: State) -> bool:
        if self.is_full and (before.members is not after.members or before.epoch != after.epoch):
            raise JournalUnusable("disk full")
        self.on_save()
        return True

    def prove(self, state: State) -> None:
        if self.is_full:
            raise JournalUnusable("disk full")

    def close(self) -> None:
        pass


class Aborted(Exception):
    pass


class Call:
    async def abort(self, code: grpc.StatusCode, details: str, metadata: object = ()) -> None:
        raise Aborted(code, details, metadata)


CALL: Any = Call()


class Scene:
    """A leading router whose time passes by hand."""

    def __init__(self, config: Config, election: Any = None) -> None:
        self.store = Memory()
        self.now_s = 0.0
        self.service = RouterService(config, self.store, clock=lambda: self.now_s, election=election)
        self.service.lead()

    def give(self, event: Event) -> None:
        self.now_s += 0.03
        try:
            self.service._apply(event)
        except JournalUnusable as error:
            self.service._problem = str(error)

    def go_on(self, rounds: int) -> None:
        """Members live and load what they must; the router ticks."""
        for _ in range(rounds):
            for record in list(self.service.state.members.values()):
                self.give(Renewed(name=record.name, incarnation=record.incarnation))
                epoch = self.service.state.epoch
                if record.target != record.loaded:
                    self.give(Loaded(name=record.name, incarnation=record.incarnation, held=record.target, epoch=epoch))
            self.give(Tick())


def test_a_launcher_that_goes_while_nothing_can_be_written_is_forgotten_once_it_can() -> None:
    async def scene() -> None:
        scene = Scene(Config(experts_wanted=3, attention_wanted=0, form_s=1.0))
        service, store = scene.service, scene.store
        orders: Any = service.Launches(pb.LaunchesRequest(host=HOST), CALL)
        first = asyncio.ensure_future(anext(orders))
        await asyncio.sleep(0)
        for pid in (100, 101):
            request = pb.JoinRequest(
                protocol=PROTOCOL, pool="expert", address="a", pid=pid, host=HOST, layers=2, experts=4
            )
            scene.give(from_message(Join, request))
        assert service.state.launchers == (HOST,)
        store.is_full = True
        scene.now_s += 1.0
        scene.give(Tick())
        assert service.problem == "disk full"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await orders.aclose()
        store.is_full, service._problem = False, ""
        service._carry_out(StartProcess(host=HOST, pool="expert"))
        scene.go_on(50)
        await asyncio.sleep(3 * Config.tick_s)
        assert service.state.launchers == ()
        scene.go_on(800)
        service.step_down()

    asyncio.run(scene())


def test_a_load_that_cannot_be_is_not_taken_from_a_report() -> None:
    odd = {"huge": 1e308, "negative": -1.0, "nan": math.nan, "inf": math.inf, "x" * 65: 1.0}
    true = {"busy": 0.5, "running": 0.0, "backlog_tokens": 1e15}
    assert renewed_of(pb.RenewRequest(name="a", load={**odd, **true})).load == true
    many = {f"word{number}": 1.0 for number in range(1000)}
    assert len(renewed_of(pb.RenewRequest(name="a", load=many)).load) == 256


def test_a_tick_that_fails_does_not_end_the_router_unless_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    step, faults = shell.step, 3

    def faulty(config: Config, state: State, event: Event, now_s: float) -> object:
        nonlocal faults
        if isinstance(event, Tick) and faults:
            faults -= 1
            raise OverflowError("too large")
        return step(config, state, event, now_s)

    monkeypatch.setattr(shell, "step", faulty)

    async def status(service: RouterService) -> str:
        return (await service.Status(pb.StatusRequest(), CALL)).problem

    async def scene() -> None:
        nonlocal faults
        service = Scene(Config(tick_s=0.001)).service
        running = asyncio.create_task(service.run())
        while faults:
            await asyncio.sleep(0.001)
        assert "OverflowError('too large')" in await status(service)
        while await status(service):
            await asyncio.sleep(0.001)
        assert service.counts.failed_ticks == 3
        faults = 10**6
        with pytest.raises(OverflowError):
            await running
        service.step_down()

    asyncio.run(scene())


def test_what_was_saved_too_late_orders_no_process() -> None:
    class Lease:
        leader, problem, held = "127.0.0.1:2", "", True

        def leads(self) -> bool:
            return self.held

    async def scene() -> None:
        lease = Lease()
        scene = Scene(Config(experts_wanted=1, attention_wanted=0, form_s=1.0), lease)
        service = scene.service

        def lose() -> None:
            lease.held = False

        scene.store.on_save = lose
        orders: Any = service.Launches(pb.LaunchesRequest(host=HOST), CALL)
        first = asyncio.ensure_future(anext(orders))
        for _ in range(5):
            await asyncio.sleep(0)
        assert [start.pool for start in service._state.starts] == ["expert"]
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        service.step_down()

    asyncio.run(scene())


@pytest.mark.parametrize("drain_s", [math.nan, math.inf, -1.0, 1e7])
def test_a_drain_without_end_is_refused(drain_s: float) -> None:
    async def scene() -> None:
        service = Scene(Config()).service
        with pytest.raises(CallRefused, match=r"drain_s is .*; give more than 0 and at most 1000000"):
            await service.Scale(pb.ScaleRequest(pool="expert", wanted=1, drain_s=drain_s), CALL)
        service.step_down()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("error", "code", "metadata"),
    [
        (NotLeading("another leads"), grpc.StatusCode.UNAVAILABLE, ((STANDBY, "1"),)),
        (JournalUnusable("disk full"), grpc.StatusCode.UNAVAILABLE, ()),
        (NothingReported("no load"), grpc.StatusCode.UNAVAILABLE, ()),
        (TriggerInvalid("no pool"), grpc.StatusCode.INVALID_ARGUMENT, ()),
        (CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "too many"), grpc.StatusCode.INVALID_ARGUMENT, ()),
        (FaultInvalid("no fault"), grpc.StatusCode.INVALID_ARGUMENT, ()),
        (TooManyFaults("64 faults"), grpc.StatusCode.RESOURCE_EXHAUSTED, ()),
        (KeyNeeded("no key"), grpc.StatusCode.PERMISSION_DENIED, ()),
        (ChaosNotAllowed("not allowed"), grpc.StatusCode.FAILED_PRECONDITION, ()),
    ],
)
def test_what_an_answer_raises_is_told_as_a_status(error: Exception, code: grpc.StatusCode, metadata: object) -> None:
    """By calls of one answer and of many; what comes before the error is still told."""

    async def one(request: object, context: object) -> None:
        raise error

    async def many(request: object, context: object) -> AsyncIterator[int]:
        yield 7
        raise error

    async def judge() -> None:
        service = Scene(Config()).service

        async def guarded(handler: Any) -> Any:
            async def found(details: object) -> Any:
                return handler

            details: Any = SimpleNamespace(method="/router.v1.Router/Watch")
            return await Guard(service, needs_roles=False).intercept_service(found, details)

        unary = await guarded(grpc.unary_unary_rpc_method_handler(one))
        with pytest.raises(Aborted) as told:
            await unary.unary_unary(None, CALL)
        assert told.value.args == (code, str(error), metadata)
        stream = await guarded(grpc.unary_stream_rpc_method_handler(many))
        answers = stream.unary_stream(None, CALL)
        assert await anext(answers) == 7
        with pytest.raises(Aborted) as told:
            await anext(answers)
        assert told.value.args == (code, str(error), metadata)
        service.step_down()
        with pytest.raises(Aborted, match="no router leads"):
            await anext(stream.unary_stream(None, CALL))

    asyncio.run(judge())
