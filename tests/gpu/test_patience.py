"""A client's kernels under a virtual clock, and servers of plain arithmetic that take as long as the test says.

What the kernels call a pause moves the clock on to what happens next, and servers answer when their pass is over. The
judge is the world's own record: who was asked what, when, and who answered.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl

from experts.gpu import client as clients
from experts.gpu import dispatch as dispatching
from experts.gpu import patience, words
from experts.gpu import wait_replies as waiting
from experts.gpu.client import GpuClient, Link, StepReport
from experts.gpu.layout import LISTED, ClientWord, Verdict
from experts.gpu.tables import fill
from p2p.device import INTERPRET
from tests.experts.test_gpu_patience import size_of, step_of
from tests.gpu.device import fresh_seed, same_bits
from tests.gpu.exchange_world import (
    CLIENT,
    SERVER,
    Call,
    reply_of,
    request_of,
    shape_of,
    slot_of,
    toy_answer,
)
from tests.gpu.frames import FRAME, WIRE, Reply, Request, seal

if not INTERPRET:
    pytest.skip("needs the interpreter, whose clock can be exchanged; found a GPU", allow_module_level=True)

SHAPE = shape_of()
FAST_NS, SLOW_NS = 300_000, 20_000_000
LEAST_LEAP_NS = 100_000
LEAP = 0.2  # of the time that a call has taken, at most: a pause
LAYER_NS = 40_000  # what a step does between two calls
DEADLINE_S = 4.0


class Server:
    """One server: passes, each over one request of every client, and what came of them."""

    def __init__(self, place: int, draw: random.Random) -> None:
        self.place, self.draw = place, draw
        self.pass_ns: float = FAST_NS
        self.request, self.reply = request_of(SHAPE), reply_of(SHAPE)
        self.memory, self.answers = self.request.numpy(), self.reply.numpy()
        self.done = [0] * SHAPE.slots
        self.hand: list[int] = []
        self.ends_ns = self.others_ns = 0
        self.prefill_ns = 0
        self.killed = ""
        self.resent = 0

    def slot(self, slot: int) -> bytes:
        """A request's slot."""
        at = SHAPE.request_window.slot_offset(slot)
        return self.memory[at : at + SHAPE.request_window.stride_bytes].tobytes()

    def fresh(self) -> list[tuple[int, int]]:
        """Requests that wait, by sequence."""
        seen = [(struct.unpack_from("<Q", self.slot(slot))[0], slot) for slot in range(SHAPE.slots)]
        return sorted((number, slot) for number, slot in seen if number > self.done[slot])

    def next_ns(self, now_ns: int) -> int:
        """When something happens here by itself."""
        return self.ends_ns if self.ends_ns else max(self.others_ns, now_ns + 1)

    def go_on(self, now_ns: int) -> None:
        """Do what is due: end a pass, begin another."""
        if self.killed == "with a request in hand" and self.hand:
            return
        if self.ends_ns and now_ns >= self.ends_ns:
            for slot in self.hand:
                self.answer(slot)
            self.hand, self.ends_ns = [], 0
            self.others_ns = now_ns + int(self.pass_ns * self.draw.random())
        if self.ends_ns or self.killed in ("idle", "silent"):
            return
        asked = self.fresh()
        if asked or now_ns >= self.others_ns:
            for number, slot in asked[:1]:
                self.hand, self.done[slot] = [slot], number
                # Of both headers: which round it is, and how many pairs.
                if FRAME.unpack_from(self.slot(slot), 64)[5]:
                    self.resent += WIRE.unpack_from(self.slot(slot), 128)[7]
            self.ends_ns = now_ns + int(self.pass_ns * self.draw.uniform(0.9, 1.05)) + self.prefill_ns
            self.prefill_ns = 0

    def answer(self, slot: int) -> None:
        """Write a reply, as far as this server still gets."""
        frame = self.slot(slot)
        head, wire = FRAME.unpack_from(frame, 64), WIRE.unpack_from(frame, 128)
        sequence, attempt, layer, rows, pairs = head[4], head[5], wire[5], wire[6], wire[7]
        assert head[3] == SERVER + self.place and head[8] == CLIENT, "a request of nobody"
        listed = np.frombuffer(frame, "<u4", rows * SHAPE.top_k, 192)
        at = SHAPE.reply_window.slot_offset(slot)
        for place in np.flatnonzero(listed):
            if self.killed == "between answers" and place >= np.flatnonzero(listed)[-1]:
                self.killed = "silent"
                return
            row = 128 + SHAPE.rows_offset + place // SHAPE.top_k * SHAPE.row_stride
            sent = torch.from_numpy(np.frombuffer(frame, np.int16, SHAPE.hidden, row).copy())
            expert = int(listed[place]) - LISTED
            answer = toy_answer(sent.view(torch.bfloat16), slot_of(SHAPE, layer, expert))
            data = answer.view(torch.int16).numpy().view("<u4")
            to = at + 192 + place * SHAPE.answer_stride
            self.answers[to : to + data.nbytes] = data.view(np.uint8)
            mark = seal(data, sequence, CLIENT, int(place)).to_bytes(8, "little")
            self.answers[to + SHAPE.answer_seal : to + SHAPE.answer_seal + 8] = np.frombuffer(mark, np.uint8)
        request = Request(shape=SHAPE, rows=rows, pairs=pairs, listed=listed.tolist(), layer=layer, sequence=sequence)
        changes = {"sender": SERVER + self.place, "attempt": attempt}
        headers = Reply(request=request, frame=changes).head(struct.unpack_from("<Q", frame, 120)[0])
        self.answers[at + 64 : at + 64 + len(headers)] = np.frombuffer(headers, np.uint8)
        if self.killed == "before the signal":
            self.killed = "silent"
            return
        self.answers[at : at + 8] = np.frombuffer(struct.pack("<Q", sequence), np.uint8)


@dataclass
class Clocked:
    """A client and its servers, each of which holds every expert, under this world's clock."""

    seed: int
    servers: int = 2
    now_ns: int = 1_000_000_000
    pairs: int = 0
    began_ns: int = 0
    longest_ns: int = 0
    suspected: list[tuple[int, StepReport]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.ends = [Server(place, draw) for place in range(self.servers)]
        self.client = GpuClient(SHAPE, servers=self.servers, replicas=self.servers, incarnation=CLIENT, device="cpu")
        for end in self.ends:
            link = Link(request=end.request.data_ptr(), reply=end.reply.data_ptr(), incarnation=SERVER + end.place)
            self.client.link(end.place, link)
        turns = torch.arange(SHAPE.experts)[:, None] + torch.arange(self.servers)[None, :]
        routes = (turns % self.servers).to(torch.int32).expand(SHAPE.layers, -1, -1)
        self.client.write_tables(routes.contiguous())

    def clock(self, counter: object, threads: object) -> tl.tensor:
        """In place of the device's."""
        return tl.full((), self.now_ns, tl.int64)

    def pause(self, duration_ns: object) -> None:
        """In place of the device's: on to what happens next."""
        leap_ns = max(LEAST_LEAP_NS, int(LEAP * (self.now_ns - self.began_ns)))
        alive = [end.next_ns(self.now_ns) for end in self.ends if not end.killed]
        following = min(alive, default=self.now_ns + leap_ns)
        self.pass_time(max(2_000, min(following - self.now_ns, leap_ns)))

    def pass_time(self, ns: int) -> None:
        """Let the servers go on for so long."""
        self.now_ns += ns
        for end in self.ends:
            end.go_on(self.now_ns)

    def call(self, number: int = 0) -> StepReport:
        """A step of one call: its bits, its end, and whom it suspected."""
        call = Call.random(SHAPE, self.seed + self.pairs, layer=number % 2, tokens=1, live=1)
        self.pass_time(LAYER_NS)
        self.began_ns = self.now_ns
        self.client.begin(DEADLINE_S)
        self.client.enqueue(*call.arguments())
        report = self.client.end()
        took_ns = self.now_ns - self.began_ns
        self.pairs += SHAPE.top_k
        self.longest_ns = max(self.longest_ns, took_ns)
        assert took_ns <= (1 + LEAP) * 1e9 * patience.run_s(DEADLINE_S), (
            f"seed {self.seed}: a call took {took_ns / 1e9} s"
        )
        if report.usable:
            assert same_bits(call.out, call.expected(SHAPE)), f"seed {self.seed}: {report}"
        alive = [end.place for end in self.ends if not end.killed]
        if any(Verdict.MISSING in report.verdicts.get(place, ()) for place in alive) or bool(
            self.client.tables.suspect[alive].any()
        ):
            self.suspected.append((number, report))
        assert not report.corrupt and not report.lost, f"seed {self.seed}, call {number}: {report}"
        return report

    def remember(self, calls: int) -> None:
        """Have so many fast calls behind: what they taught, and the credit that they earned."""
        step = step_of(2 * FAST_NS)
        self.client.tables.took[:, size_of(SHAPE.top_k), step] = calls
        self.learn()
        self.pairs += calls * SHAPE.top_k
        most = patience.HEDGE_CALLS * patience.HEDGE_COST * SHAPE.top_k
        self.credit(min(most, patience.HEDGE_EARNED * SHAPE.top_k * calls))

    def credit(self, thousandths: int) -> None:
        """Let this be the credit for hedges."""
        fill(self.client.tables.control[ClientWord.CREDIT], thousandths)

    def learn(self) -> None:
        """The host reads what the device has counted, as a worker does between steps."""
        self.client.take_routed()

    def slow(self, *places: int, pass_ns: float = SLOW_NS) -> None:
        """Passes of these servers take that long from the next on."""
        for place in places:
            self.ends[place].pass_ns = pass_ns

    @property
    def resent(self) -> int:
        """Pairs that came to a server in a later round than the first."""
        return sum(end.resent for end in self.ends)

    def judge(self) -> None:
        """Everybody has answered: nobody was suspect, and little went out twice."""
        assert not self.suspected, f"seed {self.seed}: a server that answers was suspect: {self.suspected[0]}"
        assert self.resent <= 0.05 * self.pairs, f"seed {self.seed}: {self.resent} of {self.pairs} pairs"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Clocked]]:
    """Makes worlds whose clock the kernels and the host read."""

    def made(seed: int, servers: int = 2) -> Clocked:
        world = Clocked(seed, servers)
        for module in (waiting, dispatching):
            monkeypatch.setattr(module, "clock_ns", world.clock)
        monkeypatch.setattr(waiting, "pause_ns", world.pause)
        monkeypatch.setattr(clients, "time", SimpleNamespace(monotonic=lambda: world.now_ns / 1e9))
        return world

    yield made


def slowed(world: Clocked, *places: int) -> None:
    """Slow passes at these servers until that is known and beyond, then fast ones again."""
    world.remember(30)
    for number in range(20):
        if number in (2, 18):
            world.slow(*places, pass_ns=SLOW_NS if number == 2 else FAST_NS)
        if number == 14:
            world.learn()
        world.call(number)
    world.judge()


@pytest.mark.parametrize("places", [(0, 1), (1,)], ids=["all", "one"])
def test_servers_that_become_slow_are_not_suspect(make: Callable[..., Clocked], places: tuple[int, ...]) -> None:
    slowed(make(fresh_seed()), *places)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a constant patience of 5 ms": lambda patch: patch.setattr(
        patience.Patience, "limits_ns", lambda self: np.full((2, patience.SIZES, 2), 5_000_000)
    ),
    "no credit": lambda patch: patch.setattr(words.PATIENCE, "COST", tl.constexpr(0)),
    "suspect at the hedge's limit": lambda patch: patch.setattr(
        patience.Patience,
        "limits_ns",
        lambda self, known=patience.Patience.limits_ns: known(self)[:, :, :1].repeat(2, axis=2),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_this_world_kills_mutants(name: str, make: Callable[..., Clocked], monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError, match="suspect" if name != "no credit" else "of [0-9]* pairs"):
        slowed(make(fresh_seed()), 0, 1)


PHASES = ["idle", "with a request in hand", "between answers", "before the signal"]


@pytest.mark.parametrize(("phase", "credit"), [*((phase, 0) for phase in PHASES), ("with a request in hand", 8000)])
def test_a_killed_servers_rows_come_from_another_in_time(make: Callable[..., Clocked], phase: str, credit: int) -> None:
    world = make(fresh_seed())
    world.remember(30)
    world.call(0)
    world.credit(credit * SHAPE.top_k)
    world.ends[0].killed = phase
    world.longest_ns = resent = 0
    for number in range(1, 12):
        resent += world.call(number).redispatched
        if resent:
            break
    assert resent, f"seed {world.seed}: nothing was sent again, so nothing was killed in a call"
    limit_ns = patience.HEDGE_FLOOR_NS if credit else patience.SUSPECT_FLOOR_NS
    # Looks are LEAP apart; then a pass under way at the other server, and one of its own.
    assert world.longest_ns <= (1 + LEAP) * limit_ns + 4 * FAST_NS, f"seed {world.seed}: {world.longest_ns} ns"
    assert not world.suspected, f"seed {world.seed}: {world.suspected}"
    # It is asked no more: nobody waits for it.
    world.longest_ns = 0
    assert not world.call().redispatched and world.longest_ns <= 4 * FAST_NS, f"seed {world.seed}"


def test_a_prefill_of_another_client_makes_nobody_suspect(make: Callable[..., Clocked]) -> None:
    world = make(fresh_seed())
    world.remember(30)
    for number in range(16):
        if number % 4 == 0:
            world.ends[number // 4 % 2].prefill_ns = 8_000_000
        world.call(number)
    world.judge()


def test_the_first_sound_reply_counts_whoever_gives_it(make: Callable[..., Clocked]) -> None:
    """A late original that comes before its hedge: its answers are used, and the hedge's slot is put aside."""
    world = make(fresh_seed())
    world.remember(30)
    world.credit(8000 * SHAPE.top_k)
    # All first at one server, whose pass outlasts its hedge's limit; then at another, slower still.
    routes = torch.tensor([0, 1], dtype=torch.int32).expand(SHAPE.layers, SHAPE.experts, -1).contiguous()
    world.client.write_tables(routes)
    world.slow(0, pass_ns=4_000_000)
    world.slow(1, pass_ns=30_000_000)
    report = world.call()
    assert report.redispatched == 2 and report.retired == 1, f"seed {world.seed}: {report}"
    assert world.longest_ns < 12_000_000, f"seed {world.seed}: it waited for the second"
    assert list(world.client.retired()) == [1] and not world.suspected, f"seed {world.seed}: {report}"


def test_who_is_alone_is_waited_for_until_a_run_is_over(make: Callable[..., Clocked]) -> None:
    world = make(fresh_seed(), servers=1)
    world.remember(30)
    world.slow(0, pass_ns=120_000_000)
    world.call(0)
    assert not world.suspected, f"seed {world.seed}: who is alone and answers is no suspect"
    world.ends[0].killed = "idle"
    with pytest.raises(AssertionError, match="lost"):
        for number in range(1, 3):
            world.call(number)
    assert world.longest_ns < (1 + LEAP) * 1e9 * patience.run_s(DEADLINE_S), f"seed {world.seed}"


def spoiled(end: Server, after: Callable[[], None] = lambda: None) -> None:
    """From now on this server's replies are not what their checksum says."""
    whole = end.answer

    def answer(slot: int) -> None:
        whole(slot)
        end.answers[SHAPE.reply_window.slot_offset(slot) + 72] ^= 1
        after()

    end.answer = answer  # type: ignore[method-assign]


def called(world: Clocked, routes: list[list[int]], ids: list[list[int]]) -> StepReport:
    """One call of these experts by these routes; its bits, where it has all of them."""
    width = max(map(len, routes))
    table = torch.tensor([row + [-1] * (world.servers - width) + [-1] * (width - len(row)) for row in routes])
    world.client.write_tables(table.to(torch.int32).expand(SHAPE.layers, -1, -1).contiguous())
    call = Call.random(SHAPE, world.seed, tokens=len(ids), live=len(ids))
    call.ids[:] = torch.tensor(ids, dtype=torch.int32)
    world.began_ns = world.now_ns
    world.client.begin(DEADLINE_S)
    world.client.enqueue(*call.arguments())
    report = world.client.end()
    assert report.usable, f"seed {world.seed}: {report}"
    assert same_bits(call.out, call.expected(SHAPE)), f"seed {world.seed}"
    return report


def test_who_was_only_late_is_asked_again_once_he_has_answered(make: Callable[..., Clocked]) -> None:
    """One server's answers are spoiled; each of its rows has one other, all of whom are late with rows of their own."""
    world = make(fresh_seed(), servers=4)
    world.remember(30)
    world.credit(8000 * SHAPE.top_k)
    for place in (1, 2, 3):
        world.slow(place, pass_ns=2_000_000 * place)
    spoiled(world.ends[0])
    report = called(world, [[0, 1], [0, 2], [0, 3], [1], [2], [3]], [[0, 3], [1, 4], [2, 5]])
    assert report.redispatched == 3, f"seed {world.seed}: {report}"


def test_a_slot_that_was_owed_is_used_in_the_call_that_waits(make: Callable[..., Clocked]) -> None:
    """Both slots of the only other server owe replies; they come while the call waits for a server that fails it."""
    world = make(fresh_seed())
    world.remember(30)
    world.credit(0)
    world.client.tables.owed[1] = torch.tensor([1, 2])
    world.client.tables.sequence[1] = 2
    other = world.ends[1]

    def pay() -> None:
        for slot in (0, 1):
            at = SHAPE.reply_window.slot_offset(slot)
            other.answers[at : at + 8] = np.frombuffer(struct.pack("<Q", slot + 1), np.uint8)
            other.done[slot] = slot + 1

    spoiled(world.ends[0], pay)
    report = called(world, [[0, 1]] * SHAPE.experts, [[0, 1]])
    assert report.redispatched == 2, f"seed {world.seed}: {report}"


def test_a_step_that_has_waited_to_its_end_asks_nobody(make: Callable[..., Clocked]) -> None:
    world = make(fresh_seed(), servers=1)
    world.remember(30)
    world.ends[0].killed = "idle"
    world.client.begin(DEADLINE_S)
    world.began_ns = world.now_ns
    for layer in (0, 1):
        call = Call.random(SHAPE, world.seed, layer=layer, tokens=1, live=1)
        world.client.enqueue(*call.arguments())
    world.client.end()
    assert list(world.client.retired().values()) == [1], f"seed {world.seed}: {world.client.retired()}"
