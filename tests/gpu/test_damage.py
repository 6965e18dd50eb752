"""Damage: what is torn, flipped, old or another's is refused by the GPU exchange; and mutants that these tests kill."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl

from experts.gpu import combine as combining
from experts.gpu import dispatch as dispatching
from experts.gpu import gather as gathering
from experts.gpu import pack, reply
from experts.gpu import poll as polling
from experts.gpu import wait_replies as waiting
from experts.gpu.layout import LISTED, AskedWord, CountWord, JobWord, RowsOut, Verdict
from experts.gpu.server import GpuServer
from experts.wire import Status
from p2p.device import INTERPRET, signal
from tests.gpu import test_protocol
from tests.gpu.device import DEVICE, fresh_seed, same_bits
from tests.gpu.exchange_world import (
    CLIENT,
    SERVER,
    Call,
    World,
    put_bytes,
    reply_of,
    request_of,
    settle,
    shape_of,
    slot_of,
    toy_experts,
)
from tests.gpu.frames import Reply, Request

SMALL = shape_of(capacity=1, top_k=1, rows_out=RowsOut.E4M3)


class ServerEnd:
    """A server and the window of its only client."""

    def __init__(self) -> None:
        self.end = GpuServer(SMALL, clients=1, compute=toy_experts, incarnation=SERVER, device=DEVICE, idle_s=0.00002)
        self.request, self.reply = request_of(SMALL), reply_of(SMALL)
        self.at = SMALL.request_window.slot_offset(0)
        self.end.attach(0, request=self.request.data_ptr(), reply=self.reply.data_ptr(), incarnation=CLIENT)
        for expert in range(SMALL.experts):
            self.end.hold(0, expert, slot_of(SMALL, 0, expert))

    def status_of(self, slot: bytes) -> int | None:
        """What `poll` says of a slot's bytes; None where it sees no request."""
        tables = self.end.tables
        for table in (tables.done, tables.rejected, tables.n_pairs):
            table.zero_()
        put_bytes(self.request, self.at, slot)
        polling.poll(tables, 0)
        return int(tables.jobs[0, JobWord.STATUS]) if int(tables.jobs[0, JobWord.STATE]) else None


def good_request(**changes: object) -> Request:
    """What the server takes."""
    fields = {"shape": SMALL, "rows": 1, "pairs": 1, "listed": [LISTED + 4], "sequence": 7} | changes
    return Request(**fields)  # type: ignore[arg-type]


def test_a_server_refuses_every_flipped_byte_of_headers_and_list() -> None:
    seed = fresh_seed()
    bits = torch.randint(0, 8, (400,), generator=torch.Generator().manual_seed(seed)).tolist()
    server, slot = ServerEnd(), bytearray(good_request().slot())
    assert server.status_of(bytes(slot)) == Status.OK
    for at in range(64, len(slot)):
        torn = slot.copy()
        torn[at] ^= 1 << bits[at]
        assert server.status_of(bytes(torn)) == Status.INVALID, f"seed {seed}: byte {at}, bit {bits[at]}"
    assert server.status_of(bytes(slot)) == Status.OK


def test_a_server_refuses_every_flipped_byte_of_a_row_and_its_seal() -> None:
    seed = fresh_seed()
    bits = torch.randint(0, 8, (400,), generator=torch.Generator().manual_seed(seed)).tolist()
    world, _ = sent_row(seed)
    end, slot = world.ends[0], world.request_slot(0)
    tables, at = end.tables, 128 + SMALL.rows_offset
    polling.poll(tables, 0)
    for offset in [*range(4 * SMALL.row_words), *range(SMALL.row_seal, SMALL.row_seal + 8)]:
        tables.jobs[0, JobWord.BAD] = 0
        slot[at + offset] ^= 1 << bits[offset]
        gathering.gather(tables, end.batch.rows, end.batch.scales)
        slot[at + offset] ^= 1 << bits[offset]
        assert int(tables.jobs[0, JobWord.BAD]) == 1, f"seed {seed}: byte {offset}, bit {bits[offset]}"
    tables.jobs[0, JobWord.BAD] = 0
    gathering.gather(tables, end.batch.rows, end.batch.scales)
    assert int(tables.jobs[0, JobWord.BAD]) == 0


FRAME_FIELDS = {
    "another server's": {"incarnation": SERVER + 1},
    "another client's": {"sender": CLIENT + 1},
    "an earlier sequence": {"sequence": 6},
    "no flag": {"flags": 0},
    "another flag": {"flags": 3},
    "another version": {"version": 2},
    "an attempt too high": {"attempt": 1 << 16},
    "too long": {"length": SMALL.rows_offset + 2 * SMALL.row_stride},
    "less covered": {"covered": 64},
}
WIRE_FIELDS = {
    "another model": {"model": 78},
    "no such layer": {"layer": 2},
    "a reply": {"kind": 2},
    "another version": {"version": 2},
    "no rows": {"rows": 0},
    "too many rows": {"rows": 2},
    "no pairs": {"pairs": 0},
    "too many pairs": {"pairs": 2},
    "narrower rows": {"hidden": 64},
    "bf16 rows": {"form": 1},
    "a status": {"status": 1},
    "a routing hash": {"routing": 5},
    "a last word": {"last": 1},
}


def test_a_server_refuses_each_wrong_field_under_a_checksum_that_holds() -> None:
    server = ServerEnd()
    for name, fields in FRAME_FIELDS.items():
        assert server.status_of(good_request(frame=fields).slot(7)) == Status.INVALID, name
    for name, fields in WIRE_FIELDS.items():
        assert server.status_of(good_request(wire=fields).slot()) == Status.INVALID, name
    for name, word in {"no such expert": LISTED + 6, "no mark": 4, "nothing": 0}.items():
        assert server.status_of(good_request(listed=[word]).slot()) == Status.INVALID, name
    assert server.status_of(good_request(frame={"attempt": 65535}).slot()) == Status.OK


def test_an_unsound_request_is_told_so_and_only_its_very_signal_is_put_aside() -> None:
    server = ServerEnd()
    tables = server.end.tables
    put_bytes(server.request, server.at, good_request(sequence=9, frame={"sender": 1}).slot())
    for _ in range(2):
        server.end.enqueue_pass()
    settle()
    assert server.end.counters().invalid == 1 and tables.done.tolist() == [[0, 0]]
    assert tables.rejected[0, 0] == 9
    answer = server.reply.cpu().numpy().tobytes()[SMALL.reply_window.slot_offset(0) :]
    bare = Reply(
        request=good_request(sequence=9, layer=0),
        status=2,
        service_ns=int.from_bytes(answer[176:184], "little"),
        wire={"rows": 0, "pairs": 0},
    )
    words = good_request(sequence=9, frame={"sender": 1}).slot()
    assert answer[64:192] == bare.head(int.from_bytes(words[120:128], "little"))
    # A sound request with a lower sequence is not late: the number that was seen proves nothing.
    assert server.end.tables.rejected[0, 0] == 9
    put_bytes(server.request, server.at, good_request(sequence=3).slot())
    polling.poll(tables, 0)
    assert int(tables.jobs[0, JobWord.STATUS]) == Status.OK


def test_a_torn_row_makes_its_request_invalid_and_no_expert_sees_it_answered() -> None:
    seed = fresh_seed()
    world, call = sent_row(seed)
    world.request_slot(0)[128 + SMALL.rows_offset + 17] ^= 4
    world.ends[0].enqueue_pass()
    waiting.wait_replies(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    report = world.client.report()
    assert report.verdicts == {0: {Verdict.REFUSED}} and report.retired == 0, f"seed {seed}"
    assert not bool(world.reply_slot(0)[192 : 192 + SMALL.answer_stride].any()), "a torn row was answered"


def test_a_client_refuses_every_flipped_byte_of_a_replys_headers() -> None:
    seed = fresh_seed()
    bits = torch.randint(0, 8, (400,), generator=torch.Generator().manual_seed(seed)).tolist()
    world, call = sent_row(seed)
    world.ends[0].enqueue_pass()
    slot = world.reply_slot(0)
    assert verdict_of(world, call) == Verdict.ARRIVED
    for at in range(64, 192):
        slot[at] ^= 1 << bits[at]
        assert verdict_of(world, call) == Verdict.CORRUPT, f"seed {seed}: byte {at}, bit {bits[at]}"
        slot[at] ^= 1 << bits[at]
    assert verdict_of(world, call) == Verdict.ARRIVED


def test_a_client_refuses_each_wrong_field_under_a_checksum_that_holds() -> None:
    world, call = sent_row(fresh_seed())
    world.ends[0].enqueue_pass()
    settle()
    slot, row = world.reply_slot(0), world.client.tables.asked[0, 0]
    request_sum = int(row[AskedWord.CHECKSUM]) % (1 << 64)
    request = Request(shape=SMALL, rows=1, pairs=1, listed=[], sequence=1)

    def verdict(frame: dict[str, int], wire: dict[str, int], status: int = 0) -> int:
        head = Reply(request=request, status=status, frame=frame, wire=wire).head(request_sum)
        put_bytes(slot, 64, head)
        return verdict_of(world, call)

    assert verdict({}, {}) == Verdict.ARRIVED
    for frame in ({"incarnation": CLIENT + 1}, {"sender": SERVER + 1}, {"sequence": 0}, {"attempt": 1}, {"flags": 0},
                  {"covered": 0}, {"length": 64}, {"remaining": 1}):  # fmt: skip
        assert verdict(frame, {}) == Verdict.CORRUPT, str(frame)
    for wire in ({"model": 1}, {"routing": 1}, {"layer": 1}, {"rows": 2}, {"pairs": 2}, {"form": 2}, {"kind": 1},
                 {"hidden": 64}, {"status": 3}, {"last": 1}):  # fmt: skip
        assert verdict({}, wire) == Verdict.CORRUPT, str(wire)
    assert verdict({}, {}, status=1) == Verdict.REFUSED
    # Who could not read the request repeats nothing of it.
    assert verdict({}, {"layer": 1, "routing": 3, "rows": 0}, status=2) == Verdict.REFUSED
    assert verdict({"sender": 5}, {}, status=2) == Verdict.CORRUPT


def test_a_client_refuses_a_flip_in_every_word_of_an_answer_and_every_byte_of_its_seal() -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    bytes_of_words = torch.arange(SMALL.answer_words) * 4 + torch.randint(
        0, 4, (SMALL.answer_words,), generator=generator
    )
    bits = torch.randint(0, 8, (400,), generator=torch.Generator().manual_seed(seed)).tolist()
    world, call = sent_row(seed)
    world.ends[0].enqueue_pass()
    assert verdict_of(world, call) == Verdict.ARRIVED
    slot = world.reply_slot(0)
    for offset in [*bytes_of_words.tolist(), *range(SMALL.answer_seal, SMALL.answer_seal + 8)]:
        slot[192 + offset] ^= 1 << bits[offset]
        assert corrupt(world, call), f"seed {seed}: byte {offset}, bit {bits[offset]}"
        slot[192 + offset] ^= 1 << bits[offset]
    assert not corrupt(world, call)
    assert same_bits(call.out, call.expected(SMALL))


def test_a_client_refuses_old_torn_and_exchanged_answers_and_says_whose() -> None:
    seed = fresh_seed()
    shape = shape_of(top_k=2)
    world = World(shape=shape, servers=1, replicas=1, rounds=0)
    first, call = Call.random(shape, seed), Call.random(shape, seed + 1)
    world.call(first)
    old = world.reply_slot(0)[192:].clone()
    world.call(call)
    assert same_bits(call.out[:3], call.expected(shape))
    slot, stride = world.reply_slot(0), shape.answer_stride
    answers = slot[192:].clone()

    def places(found: torch.Tensor, token: int, k: int) -> slice:
        at = (token * shape.top_k + k) * stride
        return slice(at, at + stride)

    def put(place: slice, what: torch.Tensor) -> None:
        slot[192 + place.start : 192 + place.stop] = what

    one, other = places(answers, 1, 0), places(answers, 1, 1)
    half = answers[one].clone()
    half[:100] = old[one][:100]
    for name, changes in {
        "an earlier call's": [(one, old[one])],
        "two of an earlier call": [(one, old[one]), (other, old[other])],
        "torn between two calls": [(one, half)],
        "from another place": [(one, answers[other])],
        "exchanged": [(one, answers[other]), (other, answers[one])],
    }.items():
        for place, what in changes:
            put(place, what)
        settle()
        assert corrupt(world, call) == (1,), f"seed {seed}: {name} was used"
        assert bool(call.out[1].isnan().all())
        put(one, answers[one])
        put(other, answers[other])
    world.client.report()
    put(one, old[one])
    combine(world, call)
    settle()
    assert world.client.report().verdicts == {0: {Verdict.CORRUPT}}


def test_an_earlier_reply_is_not_taken_for_one_that_never_came() -> None:
    world = World(servers=1, replicas=1, rounds=0)
    world.call(Call.random(world.shape, fresh_seed()))
    call = Call.random(world.shape, fresh_seed())
    world.begin()
    dispatching.dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    waiting.wait_replies(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    settle()
    assert world.client.report().verdicts == {0: {Verdict.MISSING}}


def test_no_signal_comes_before_what_it_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRET:
        pytest.skip("needs the interpreter, which can look between two stores; found a GPU")
    world = World(shape=SMALL, servers=1, replicas=1, rounds=0)
    early, puts = [], []

    def watch(module: ModuleType, name: str) -> None:
        def watched(at: tl.tensor, *rest: object) -> object:
            for window in (world.request_slot(0), world.reply_slot(0)):
                if ((at.handle.data >= window.data_ptr()) & (at.handle.data < window.data_ptr() + 4096)).any():
                    puts.append(name)
                    early.extend([f"{module.__name__}.{name}"] * int(window[:8].any()))
            return store(at, *rest)

        store = getattr(module, name)
        monkeypatch.setattr(module, name, watched)

    for module in (pack, reply):
        watch(module, "put")
    call = Call.random(SMALL, fresh_seed(), tokens=1, live=1)
    dispatching.dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    world.ends[0].enqueue_pass()
    assert not early and len(puts) > 30, f"of {len(puts)} puts these came after their signal: {early}"
    assert verdict_of(world, call) == Verdict.ARRIVED


def sent_row(seed: int) -> tuple[World, Call]:
    """A world of the smallest frames, and a call that was sent."""
    world = World(shape=SMALL, servers=1, replicas=1, rounds=0)
    call = Call.random(SMALL, seed, tokens=1, live=1)
    dispatching.dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    settle()
    return world, call


def verdict_of(world: World, call: Call) -> int:
    """What `wait_replies` says of the reply that is there."""
    tables = world.client.tables
    tables.asked[0, 0, AskedWord.VERDICT] = Verdict.WAITING
    waiting.wait_replies(tables, call.layer, call.rows, call.ids, call.n_rows)
    return int(tables.asked[0, 0, AskedWord.VERDICT])


def combine(world: World, call: Call) -> None:
    """Add up what is there."""
    combining.combine(world.client.tables, call.layer, call.rows, call.ids, call.weights, call.n_rows, call.out)


def corrupt(world: World, call: Call) -> tuple[int, ...]:
    """Tokens that `combine` refuses."""
    combine(world, call)
    settle()
    return world.client.report().corrupt


@triton.jit
def _always(total):
    return total == total


@triton.jit
def _any_signal(seen, number):
    return seen != 0


@triton.jit
def _any_request(seen, answered, refused):
    return seen != 0


@triton.jit
def _no_stamp(sequence, incarnation, place):
    return (sequence * 0 + incarnation * 0 + place).to(tl.uint64)


@triton.jit
def _any_words(words, needed):
    return words == words


@triton.jit
def _any_checksum(words, lane, listed, blocks):
    return blocks == blocks


def _any_head(words: tl.tensor, *rest: object) -> tl.tensor:
    return polling.word_of(words, rest[0], 2) == polling.word_of(words, rest[0], 2)


_write_header = pack.write_header


def _signal_first(slot_at: tl.tensor, mask: tl.tensor, kind: object, incarnation: object, sequence: tl.tensor,
                  *rest: object) -> object:  # fmt: skip
    signal(slot_at, sequence, mask)
    return _write_header(slot_at, mask, kind, incarnation, sequence, *rest)


MUTANTS = {
    "no seal check at the server": (
        [(gathering, "sound", _always)],
        test_a_torn_row_makes_its_request_invalid_and_no_expert_sees_it_answered,
    ),
    "no seal check at the client": (
        [(combining, "sound", _always)],
        test_a_client_refuses_old_torn_and_exchanged_answers_and_says_whose,
    ),
    "seals without their sequence": (
        [(combining, "row_stamp", _no_stamp), (reply, "row_stamp", _no_stamp)],
        test_a_client_refuses_old_torn_and_exchanged_answers_and_says_whose,
    ),
    "the client compares no sequence": (
        [(waiting, "has_come", _any_signal)],
        test_an_earlier_reply_is_not_taken_for_one_that_never_came,
    ),
    "the server compares no sequence": (
        [(polling, "is_fresh", _any_request)],
        test_protocol.test_a_request_is_answered_once_and_an_old_signal_never,
    ),
    "the client reads no header": (
        [(waiting, "same_words", _any_words)],
        test_a_client_refuses_each_wrong_field_under_a_checksum_that_holds,
    ),
    "the server reads no header": (
        [(polling, "head_sound", _any_head)],
        test_a_server_refuses_each_wrong_field_under_a_checksum_that_holds,
    ),
    "the server adds no checksum": (
        [(polling, "checksum_holds", _any_checksum)],
        test_a_server_refuses_every_flipped_byte_of_headers_and_list,
    ),
    "requests signalled before their headers": (
        [(dispatching, "write_header", _signal_first)],
        test_no_signal_comes_before_what_it_tells_of,
    ),
    "replies signalled before their headers": (
        [(reply, "write_header", _signal_first)],
        test_no_signal_comes_before_what_it_tells_of,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_these_tests_kill_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRET:
        pytest.skip("needs the interpreter, whose device functions can be exchanged; found a GPU")
    changes, judge = MUTANTS[name]
    for module, function, mutant in changes:
        monkeypatch.setattr(module, function, mutant)
    patched = {"monkeypatch": monkeypatch} if judge is test_no_signal_comes_before_what_it_tells_of else {}
    with pytest.raises(AssertionError):
        judge(**patched)


def test_counters_have_a_word_for_each_status() -> None:
    """`poll` counts a request at its status."""
    assert [CountWord.REQUESTS, CountWord.NOT_HELD, CountWord.INVALID] == [0, 1, 2] == list(Status)
