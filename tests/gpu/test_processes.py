"""The exchange between processes: servers that are killed or stopped at any point change no bit of a client's step.

Each process runs its kernels in the interpreter, over windows in memfds that both map. On a GPU this is what
benchmarks/gpu/exchange.py does with device memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from experts.gpu import reply as replying
from experts.gpu.client import GpuClient, Link, StepReport
from experts.gpu.layout import ExchangeShape, Verdict
from experts.gpu.server import Batch, GpuServer
from tests.gpu.device import DEVICE, fresh_seed, same_bits
from tests.gpu.exchange_world import CLIENT, SERVER, Call, give_patience, shape_of, slot_of, toy_experts

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="needs the interpreter in both processes; found a GPU"),
    pytest.mark.alone,
]
PATIENT_S = 0.4  # of the interpreter's clock, which a look moves on by 20 us: many seconds of this host
HASTY_S = 0.03
BRIEF_S = 0.0002
SHAPE = shape_of(capacity=3)


@dataclass
class SharedWindow:
    """A memfd, mapped here."""

    fd: int
    nbytes: int
    memory: mmap.mmap = field(init=False)
    address: int = field(init=False)

    @classmethod
    def create(cls, nbytes: int) -> SharedWindow:
        """A window of zeros."""
        fd = os.memfd_create("window")
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)

    def __post_init__(self) -> None:
        self.memory = mmap.mmap(self.fd, self.nbytes)
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)


@dataclass
class ServerProcess:
    """A server in a process of its own, and its windows here."""

    place: int
    pid: int
    request: SharedWindow
    reply: SharedWindow

    @classmethod
    def start(cls, place: int, shape: ExchangeShape, trouble: Callable[[], None] | None) -> ServerProcess:
        """Fork one that holds every expert and, after `trouble` changed it, serves until it is told to end."""
        request = SharedWindow.create(shape.request_window.nbytes)
        answers = SharedWindow.create(shape.reply_window.nbytes)
        pid = os.fork()
        if pid == 0:
            try:
                serve(place, shape, request.fd, answers.fd, trouble)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        return cls(place, pid, request, answers)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)

    def stopped(self, timeout_s: float = 60.0) -> bool:
        """Whether it was stopped by a signal meanwhile."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            pid, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            if pid:
                return os.WIFSTOPPED(status)
            time.sleep(0.01)
        return False

    def end(self) -> int | None:
        """End it, whatever its state: its exit code, negative for a signal, or None where it was waited for."""
        # The window's first page is no slot's.
        self.request.memory[0] = 1
        try:
            os.kill(self.pid, signal.SIGCONT)
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ChildProcessError, ProcessLookupError):
            return None


def serve(place: int, shape: ExchangeShape, request: int, answers: int, trouble: Callable[[], None] | None) -> None:
    """The server's process: map the windows anew, then pass after pass."""
    parent = os.getppid()
    torch.set_num_threads(1)
    windows = [
        SharedWindow(request, shape.request_window.nbytes),
        SharedWindow(answers, shape.reply_window.nbytes),
    ]
    end = GpuServer(shape, clients=1, compute=compute, incarnation=SERVER + place, device="cpu", idle_s=0.0002)
    end.attach(0, request=windows[0].address, reply=windows[1].address, incarnation=CLIENT)
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            end.hold(layer, expert, slot_of(shape, layer, expert))
    if trouble:
        trouble()
    while not windows[0].memory[0] and os.getppid() == parent:
        end.enqueue_pass()
        # Whoever has something to do gets this core.
        time.sleep(0.002)


troubled: list[Callable[[], None]] = []


def compute(batch: Batch) -> None:
    """The experts; what was put into `troubled` happens after a batch that is not empty is taken."""
    if troubled and int(batch.n_pairs[0]):
        troubled.pop(0)()
    toy_experts(batch)


def in_the_second_batch(number: int) -> Callable[[], None]:
    """Trouble: the process signals itself with a request in hand."""

    def change() -> None:
        troubled.extend((lambda: None, lambda: os.kill(os.getpid(), number)))

    return change


def late_in_the_first_batch() -> None:
    """Trouble: the process is slower, once, than anybody is patient."""
    troubled.append(lambda: time.sleep(3.0))


def after_answers(count: int, number: int) -> Callable[[], None]:
    """Trouble: the process signals itself between a reply's answers, when `count` of all so far were sealed."""

    def change() -> None:
        put, sealed = replying.put, [0]

        def stored(at: object, index: object, *rest: object) -> None:
            put(at, index, *rest)
            # An answer's words have an index each, its seal one number.
            sealed[0] += not hasattr(index, "handle")
            if sealed[0] == count and not hasattr(index, "handle"):
                os.kill(os.getpid(), number)

        replying.put = stored  # type: ignore[assignment]

    return change


@dataclass
class Processes:
    """A client here and its servers."""

    servers: list[ServerProcess]
    client: GpuClient

    def call(self, seed: int, layer: int = 0) -> None:
        """One call, whose bits must be those computed here."""
        call = Call.random(SHAPE, seed, layer=layer, tokens=3)
        self.client.enqueue(*call.arguments())
        assert same_bits(call.out, call.expected(SHAPE)), f"seed {seed}: {self.client.report()}"


@contextlib.contextmanager
def processes(
    patience_s: float, *troubles: Callable[[], None] | None, wait_s: float | None = None
) -> Iterator[Processes]:
    """As many servers as troubles; every expert is first at server 0, where it is, then at the following."""
    servers = [ServerProcess.start(place, SHAPE, trouble) for place, trouble in enumerate(troubles)]
    client = GpuClient(SHAPE, servers=len(servers), replicas=len(servers), incarnation=CLIENT, device="cpu")
    for server in servers:
        client.link(
            server.place,
            Link(
                request=server.request.address,
                reply=server.reply.address,
                incarnation=SERVER + server.place,
            ),
        )
    routes = torch.arange(len(servers), dtype=torch.int32).expand(SHAPE.layers, SHAPE.experts, -1).contiguous()
    client.write_tables(routes)
    give_patience(client, patience_s, wait_s)
    try:
        yield Processes(servers, client)
    finally:
        codes = [server.end() for server in servers]
    assert all(code in (0, None, -signal.SIGKILL) for code in codes), f"servers ended with {codes}"


@contextlib.contextmanager
def after_a_call(seed: int, *troubles: Callable[[], None] | None) -> Iterator[Processes]:
    """Processes of little patience, after a call that every server answered in time.

    Patience counts this process's looks; on a busy machine the servers may get no core meanwhile. Then anew.
    """
    for _ in range(5):
        with contextlib.ExitStack() as begun:
            world = begun.enter_context(processes(HASTY_S, *troubles, wait_s=2 * HASTY_S))
            call = Call.random(SHAPE, seed, tokens=3)
            world.client.enqueue(*call.arguments())
            report = world.client.report()
            assert report.lost or same_bits(call.out, call.expected(SHAPE)), f"seed {seed}: {report}"
            if report == StepReport() and world.client.retired() == {}:
                yield world
                return
    raise AssertionError(f"seed {seed}: not one of five first calls was answered in time, the last: {report}")


def test_calls_over_two_servers_have_the_bits_of_local_ones() -> None:
    seed = fresh_seed()
    with processes(PATIENT_S, None, None) as world:
        routes = (torch.arange(SHAPE.experts)[:, None] + torch.arange(2)) % 2
        world.client.write_tables(routes.to(torch.int32).expand(SHAPE.layers, -1, -1))
        for i in range(3):
            world.call(seed + i, layer=i % 2)
        assert world.client.report().redispatched == 0


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(in_the_second_batch(signal.SIGKILL), marks=pytest.mark.smoke),
        after_answers(8, signal.SIGKILL),
    ],
    ids=["with a request in hand", "between a reply's answers"],
)
def test_a_server_killed_in_mid_call_changes_no_bit(trouble: Callable[[], None]) -> None:
    seed = fresh_seed()
    with after_a_call(seed, trouble, None) as world:
        world.client.begin(4 * HASTY_S)
        world.call(seed + 1)
        report = world.client.report()
        assert report.redispatched == 6 and report.verdicts == {0: {Verdict.MISSING}}, f"seed {seed}: {report}"
        # From now on nobody waits for it.
        world.call(seed + 2)
        assert world.client.report().redispatched == 0
        assert world.client.retired() == {0: 1}


@pytest.mark.parametrize(
    "trouble",
    [in_the_second_batch(signal.SIGSTOP), after_answers(8, signal.SIGSTOP)],
    ids=["with a request in hand", "between a reply's answers"],
)
def test_a_server_that_thaws_writes_where_nobody_reads(trouble: Callable[[], None]) -> None:
    seed = fresh_seed()
    with after_a_call(seed, trouble, None) as world:
        world.call(seed + 1)
        report = world.client.report()
        assert report.verdicts == {0: {Verdict.MISSING}}, f"seed {seed}: {report}"
        frozen = world.servers[0]
        assert frozen.stopped()
        # Only the server that is frozen is left: without its answer the rows are lost, never wrong.
        before = bytes(frozen.reply.memory)
        frozen.signal(signal.SIGCONT)
        signal_at = SHAPE.reply_window.slot_offset(0)
        end_s = time.monotonic() + 60
        while frozen.reply.memory[signal_at] != 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        assert bytes(frozen.reply.memory) != before, "the thawed server wrote nothing: nothing was shown"
        assert world.client.retired() == {0: 1}
        world.call(seed + 2)
        assert world.client.retired() == {}, "a late reply is not seen by the next call"
        world.call(seed + 3)
        assert world.client.report().redispatched == 0
        assert frozen.reply.memory[signal_at] == 3, "a server that caught up is not asked again"


def test_with_no_replica_left_rows_are_lost_in_time_and_never_wrong() -> None:
    seed = fresh_seed()
    with after_a_call(seed, in_the_second_batch(signal.SIGKILL)) as world:
        call = Call.random(SHAPE, seed + 1, tokens=3)
        world.client.enqueue(*call.arguments())
        report = world.client.report()
        assert report.lost == (0, 1, 2) and bool(call.out.isnan().all())


def test_a_late_server_is_waited_for_where_nobody_could_take_over() -> None:
    seed = fresh_seed()
    with processes(BRIEF_S, late_in_the_first_batch, wait_s=PATIENT_S) as world:
        world.call(seed)
        assert world.client.report() == StepReport() and world.client.retired() == {}, f"seed {seed}"


def test_a_late_server_is_not_waited_for_where_another_can_answer() -> None:
    seed = fresh_seed()
    freeze = lambda: troubled.append(lambda: os.kill(os.getpid(), signal.SIGSTOP))  # noqa: E731
    with processes(BRIEF_S, freeze, None, wait_s=PATIENT_S) as world:
        world.call(seed)
        report = world.client.report()
        assert report.redispatched == 6 and report.verdicts == {0: {Verdict.MISSING}}, f"seed {seed}: {report}"
