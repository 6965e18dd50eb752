"""The exchange in one process, client's and server's kernels called in turn: right bits, or a clear word that not."""

from __future__ import annotations

import struct
import threading
import time

import numpy as np
import pytest
import torch

from experts.gpu import client as calling
from experts.gpu import dispatch as dispatching
from experts.gpu.backend import GpuBackend
from experts.gpu.client import Link
from experts.gpu.combine import combine
from experts.gpu.dispatch import dispatch, dispatch_reference
from experts.gpu.gather import gather
from experts.gpu.layout import LISTED, CountWord, HostWord, RowsOut, SeenWord, ServerWord, Verdict
from experts.gpu.poll import poll, poll_reference
from experts.gpu.reply import reply, reply_reference
from experts.gpu.server import Batch, GpuServer, lease_on_device
from experts.gpu.wait_replies import wait_replies, wait_replies_reference
from experts.model import Dtype, ExpertShape
from experts.wire import WireShape
from p2p.device import CLOCK_STEP_NS
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
    toy_experts,
)
from tests.gpu.frames import Reply, Request, seal

FORMS = [
    pytest.param({}, marks=pytest.mark.smoke),
    {"rows_out": RowsOut.E4M3, "top_k": 3},
    {"rows_out": RowsOut.E4M3, "hidden": 384},
]


@pytest.mark.parametrize("form", FORMS, ids=["bf16", "e4m3", "e4m3-384"])
def test_a_call_gives_the_bits_of_a_local_one(form: dict[str, object]) -> None:
    seed = fresh_seed()
    world = World(shape=shape_of(**form))
    for layer, tokens, live in ((0, 4, 3), (1, 7, 6)):
        call = Call.random(world.shape, seed + layer, layer=layer, tokens=tokens, live=live)
        world.call(call)
        assert same_bits(call.out[:live], call.expected(world.shape)), f"seed {seed}, layer {layer}"
        assert bool(call.out[live:].isnan().all()), "rows that do not count were written"
    report = world.client.report()
    assert report.usable and not report.verdicts and not report.redispatched


def test_rows_of_any_size_travel_as_e4m3_in_the_bits_of_torch() -> None:
    """Subnormals, zeros and the largest bf16 among them."""
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    world = World(shape=shape_of(rows_out=RowsOut.E4M3, top_k=1), servers=1, replicas=1)
    call = Call.random(world.shape, seed, tokens=4, live=4)
    sizes = torch.exp2(torch.randint(-40, 40, (4, 128), generator=generator).float())
    call.rows.copy_((call.rows.cpu().float() * sizes).bfloat16())
    call.rows[1] = 0
    call.rows[2, 5] = torch.finfo(torch.bfloat16).max
    call.rows[3, :64] *= 2.0**-20
    dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    world.ends[0].enqueue_pass()
    batch = world.ends[0].batch
    largest = call.rows.float().abs().amax(dim=1, keepdim=True).clamp_min(2.0**-100)
    codes = (call.rows.float() * (torch.full_like(largest, 448) / largest)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert batch.scales is not None
    assert same_bits(batch.scales[:4], largest * (1 / 448)), f"seed {seed}"
    assert same_bits(batch.rows[:4], codes), f"seed {seed}"


@pytest.mark.full(seconds=30)
def test_a_step_of_512_rows_asks_each_server_once_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the client's own call; where a server takes a pass for each frame, it reads every expert once."""
    seed = fresh_seed()
    world = World(shape=shape_of(layers=1, experts=48, top_k=8, capacity=512), replicas=1)

    def look(*arguments: object) -> None:
        for end in world.ends:
            poll(end.tables, 0)
            # What the rest of a pass leaves behind.
            end.tables.n_pairs.zero_()
            end.tables.control[ServerWord.PASS] += 1

    monkeypatch.setattr(calling, "wait_replies", look)
    monkeypatch.setattr(calling, "combine", lambda *arguments: None)
    call = Call.random(world.shape, seed, tokens=512, live=512)
    world.client.enqueue(*call.arguments())
    settle()
    ids = set(call.ids.flatten().tolist())
    for place, end in enumerate(world.ends):
        counts = end.tables.counts.tolist()
        assert counts[CountWord.EXPERTS] == sum(expert % 2 == place for expert in ids), f"seed {seed}"
        assert counts[CountWord.REQUESTS] == 1 and counts[CountWord.ROWS] == 512, f"seed {seed}"


def test_a_step_in_one_call_in_four_and_row_by_row_has_the_same_bits() -> None:
    """And one pass of each server serves a call."""
    seed = fresh_seed()
    world = World(shape=shape_of(layers=1, experts=12, top_k=4, capacity=16), replicas=1)

    def run(call: Call) -> None:
        before = [end.counters() for end in world.ends]
        world.call(call)
        ids = set(call.ids.flatten().tolist())
        for place, (was, end) in enumerate(zip(before, world.ends, strict=True)):
            now, asked = end.counters(), sum(expert % 2 == place for expert in ids)
            assert now.batches - was.batches == now.requests - was.requests == (asked > 0), f"seed {seed}"
            assert now.experts - was.experts == asked, f"seed {seed}: server {place}, {len(call.rows)} rows"

    whole = Call.random(world.shape, seed, tokens=16, live=16)
    run(whole)
    for begin, count in ((0, 4), (4, 4), (8, 4), (12, 4), (seed % 16, 1), (seed % 15, 1)):
        rows = slice(begin, begin + count)
        part = Call(
            layer=0, rows=whole.rows[rows].clone(), ids=whole.ids[rows].clone(), weights=whole.weights[rows].clone(),
            n_rows=torch.full_like(whole.n_rows, count), out=torch.full_like(whole.out[rows], float("nan")),
        )  # fmt: skip
        run(part)
        assert same_bits(part.out, whole.out[rows]), f"seed {seed}: {count} rows from {begin} on"


def test_frames_are_what_the_layout_says() -> None:
    """Headers, lists, rows and seals of a request and its reply, against plain arithmetic and the judge of frames."""
    seed = fresh_seed()
    shape = shape_of(rows_out=RowsOut.E4M3)
    world = World(shape=shape, servers=1, replicas=1)
    call = Call.random(shape, seed, layer=1, tokens=3, live=3)
    world.call(call)
    slot = world.request_slot(0).cpu().numpy().tobytes()
    assert struct.unpack_from("<Q", slot, 0) == (1,)
    listed = (call.ids.cpu().numpy().ravel() + LISTED).tolist()
    request = Request(shape=shape, layer=1, rows=3, pairs=6, listed=listed)
    head = request.head(remaining_ns=struct.unpack_from("<Q", slot, 96)[0])
    assert slot[64 : 64 + len(head)] == head, f"seed {seed}"
    for token in range(3):
        row = slot[128 + shape.rows_offset + token * shape.row_stride :][: shape.row_stride]
        words = np.frombuffer(row[: 4 * shape.row_words], "<u4")
        assert struct.unpack_from("<Q", row, shape.row_seal) == (seal(words, 1, SERVER, token),), f"seed {seed}"
    answer = world.reply_slot(0).cpu().numpy().tobytes()
    reply = Reply(request=request, service_ns=struct.unpack_from("<Q", answer, 176)[0])
    head = reply.head(struct.unpack_from("<Q", slot, 120)[0])
    assert answer[64 : 64 + len(head)] == head
    for place in range(6):
        row = answer[192 + place * shape.answer_stride :][: shape.answer_stride]
        words = np.frombuffer(row[: shape.answer_seal], "<u4")
        assert struct.unpack_from("<Q", row, shape.answer_seal) == (seal(words, 1, CLIENT, place),), f"seed {seed}"


def test_a_list_of_many_blocks_has_the_frames_checksum() -> None:
    """Over 256 words the checksum has more than one block; both ends agree on it."""
    seed = fresh_seed()
    shape = shape_of(top_k=32, experts=40, capacity=9)
    world = World(shape=shape, servers=1, replicas=1)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(40, generator=generator)[:32] for _ in range(8)]).to(torch.int32)
    rows = torch.randn(8, 128, generator=generator).bfloat16().to(DEVICE)
    count = torch.tensor([8], dtype=torch.int32, device=DEVICE)
    dispatch(world.client.tables, 0, rows, ids.to(DEVICE), count)
    settle()
    slot = world.request_slot(0).cpu().numpy().tobytes()
    request = Request(shape=shape, rows=8, pairs=256, listed=(ids.ravel() + LISTED).tolist())
    head = request.head(remaining_ns=struct.unpack_from("<Q", slot, 96)[0])
    assert slot[64 : 64 + len(head)] == head, f"seed {seed}"
    poll(world.ends[0].tables, 0)
    assert world.ends[0].tables.counts[: CountWord.PAIRS + 1].tolist() == [1, 0, 0, 256], f"seed {seed}"


def test_a_server_reads_a_long_list_piece_by_piece() -> None:
    """Over 1,024 words; some of them ask for nothing."""
    seed = fresh_seed()
    shape = shape_of(top_k=32, experts=40, capacity=70)
    listed = np.random.default_rng(seed).integers(0, 40, 70 * 32) + LISTED
    listed[np.random.default_rng(seed + 1).random(70 * 32) < 0.4] = 0
    end = GpuServer(shape, clients=1, compute=toy_experts, incarnation=SERVER, device=DEVICE, idle_s=0.00002)
    for expert in range(40):
        end.hold(1, expert, 3 * expert)
    window, answers = request_of(shape), reply_of(shape)
    end.attach(0, request=window.data_ptr(), reply=answers.data_ptr(), incarnation=CLIENT)
    asks = np.flatnonzero(listed)
    request = Request(shape=shape, layer=1, rows=70, pairs=len(asks), listed=listed.tolist())
    put_bytes(window, shape.request_window.slot_offset(0), request.slot())
    poll(end.tables, 0)
    count = int(end.tables.n_pairs[0])
    assert count == len(asks) and int(end.tables.counts[0]) == 1, f"seed {seed}"
    found = dict(zip(end.tables.origin[:count].tolist(), end.tables.slots[:count].tolist(), strict=True))
    assert found == {int(i): 3 * (int(listed[i]) - LISTED) for i in asks}, f"seed {seed}"
    assert end.tables.row_of[:count].tolist() == [i // 32 for i in end.tables.origin[:count].tolist()]


def test_nothing_to_send_asks_nobody() -> None:
    world = World()
    call = Call.random(world.shape, fresh_seed(), live=0)
    world.call(call)
    assert bool(call.out.isnan().all()) and world.client.report().usable
    assert all(end.counters().requests == 0 for end in world.ends)
    assert world.client.tables.sequence.tolist() == [0, 0]


def test_a_pass_counts_its_work_and_its_time_in_memory_of_the_host() -> None:
    seed = fresh_seed()
    world = World(servers=1, replicas=1)
    end = world.ends[0]
    activated = 0
    for number in range(3):
        call = Call.random(world.shape, seed + number, layer=number % 2)
        world.call(call)
        activated += len(set(call.ids[:3].flatten().tolist()))
    found = end.counters()
    assert (found.batches, found.requests, found.rows, found.pairs) == (3, 3, 9, 18), f"seed {seed}"
    assert found.experts == activated, f"seed {seed}: an expert counts once in each pass"
    assert found.busy_ns > 0
    # bf16 both ways.
    hidden = world.shape.hidden
    assert (found.received_bytes, found.sent_bytes) == (9 * hidden * 2, 18 * hidden * 2)
    if DEVICE == "cpu":
        # From the look that found the request to the last: by the interpreter's clock two looks or three a pass.
        assert 3 * 20_000 <= found.busy_ns <= 9 * 20_000
    for _ in range(2):
        end.enqueue_pass()
    settle()
    assert end.counters() == found, "idle passes are not busy"
    seen = world.client.tables.seen[0].tolist()
    assert seen[SeenWord.REPLIES] == 3 and seen[SeenWord.PAIRS] == 18, f"seed {seed}"
    assert 0 < seen[SeenWord.SERVICE_NS] <= found.busy_ns, f"seed {seed}: a reply tells how long it took"


def test_an_empty_pass_changes_nothing() -> None:
    world = World(servers=1, replicas=1)
    world.call(Call.random(world.shape, fresh_seed()))
    end, before = world.ends[0], world.replies[0].clone()
    kept = {name: getattr(end.tables, name).clone() for name in ("done", "rejected", "held", "counts")}
    passes = end.passes
    for _ in range(2):
        end.enqueue_pass()
    settle()
    assert end.passes == passes + 2 and int(end.tables.n_pairs[0]) == 0
    assert torch.equal(world.replies[0], before)
    assert all(torch.equal(getattr(end.tables, name), value) for name, value in kept.items())


def test_the_stop_word_ends_a_pass_at_once() -> None:
    world = World(servers=1, replicas=1)
    end = world.ends[0]
    dispatch_one(world)
    end.end_passes()
    clock = int(end.tables.control[4])
    end.enqueue_pass()
    settle()
    assert end.counters().requests == 0 and end.passes == 1
    if DEVICE == "cpu":
        assert int(end.tables.control[4]) - clock <= 2 * 20_000, "a stopped pass waited"


def test_who_watches_sees_passes_go_on_idle_and_without_a_lease() -> None:
    world = World(servers=1, replicas=1)  # whose windows the passes look into
    end = world.ends[0]
    # Toy experts ask the device how many pairs there are, which a captured pass cannot.
    end._compute = lambda batch: None
    assert end.turns() is None, "none has ended yet"
    seen = 0
    try:
        for lease_ns in ((1 << 63) - 1, 0):
            end.set_lease(lease_ns)
            end.run(100_000_000)
            before, seen = seen, end.turns() or 0
            assert seen > before
    finally:
        end.close()


def test_a_route_changes_between_steps_without_anything_being_built_anew() -> None:
    seed = fresh_seed()
    world = World()
    world.call(Call.random(world.shape, seed))
    asked = [end.counters().pairs for end in world.ends]
    routes = torch.full_like(world.routes(), -1)
    routes[:, :, 0] = 1
    world.client.write_tables(routes)
    call = Call.random(world.shape, seed + 1)
    world.call(call)
    assert same_bits(call.out[:3], call.expected(world.shape)), f"seed {seed}"
    now = [end.counters().pairs for end in world.ends]
    assert now[0] == asked[0] and now[1] == asked[1] + 6
    world.link(1, live=False)
    world.client.write_tables(world.routes())
    call = Call.random(world.shape, seed + 2)
    world.call(call)
    assert same_bits(call.out[:3], call.expected(world.shape)), f"seed {seed}"
    assert world.ends[1].counters().pairs == now[1], "a server that is not live was asked"


def test_an_expert_that_is_not_held_is_said_to_be_lost_and_its_server_is_not_suspect() -> None:
    world = World(servers=1, replicas=1, rounds=1)
    call = Call.random(world.shape, fresh_seed())
    world.ends[0].hold(0, int(call.ids[1, 0]), -1)
    world.call(call)
    report = world.client.report()
    assert report.lost == (0, 1, 2) and not report.usable
    assert report.verdicts == {0: {Verdict.REFUSED}} and report.retired == 0
    assert bool(call.out[:3].isnan().all())
    assert world.ends[0].counters().not_held == 1
    world.ends[0].hold(0, int(call.ids[1, 0]), int(call.ids[1, 0]))
    world.call(call)
    assert same_bits(call.out[:3], call.expected(world.shape)) and world.client.report().usable


def test_an_expert_that_nobody_has_is_lost_at_once() -> None:
    world = World()
    call = Call.random(world.shape, fresh_seed())
    routes = world.routes()
    routes[0, int(call.ids[2, 1])] = -1
    world.client.write_tables(routes)
    world.call(call)
    report = world.client.report()
    assert 2 in report.lost and not report.verdicts
    whole = [token for token in range(3) if token not in report.lost]
    assert same_bits(call.out[whole], call.expected(world.shape)[whole])


def test_a_silent_server_is_suspect_its_slot_is_put_aside_and_a_late_reply_is_never_used() -> None:
    seed = fresh_seed()
    world = World(servers=2, replicas=1, rounds=0)
    call = Call.random(world.shape, seed)
    tables = world.client.tables
    dispatch(tables, 0, call.rows, call.ids, call.n_rows)
    world.ends[1].enqueue_pass()
    wait_replies(tables, 0, call.rows, call.ids, call.n_rows)
    combine(tables, 0, call.rows, call.ids, call.weights, call.n_rows, call.out)
    report = world.client.report()
    assert report.verdicts == {0: {Verdict.MISSING}} and report.retired == 1
    assert world.client.retired() == {0: 1}
    # It wakes, and answers into a slot that nobody looks at; the next call goes by the other slot.
    again = Call.random(world.shape, seed + 1)
    world.begin()
    dispatch(tables, 0, again.rows, again.ids, again.n_rows)
    for _ in range(2):
        for end in world.ends:
            end.enqueue_pass()
    wait_replies(tables, 0, again.rows, again.ids, again.n_rows)
    combine(tables, 0, again.rows, again.ids, again.weights, again.n_rows, again.out)
    assert same_bits(again.out[:3], again.expected(world.shape)), f"seed {seed}"
    assert tables.asked[0, 0, 1] == 1, "the slot that owes a reply was used"
    world.client.reclaim()
    settle()
    assert world.client.retired() == {} and tables.suspect.tolist() == [0, 0]


def test_a_slot_that_owes_a_reply_stays_aside_until_new_windows_come() -> None:
    world = World(servers=1, replicas=1, rounds=0)
    call = Call.random(world.shape, fresh_seed())
    for step in (1, 2):
        # A step that has waited to its end asks nobody any more.
        world.begin()
        for _ in range(2):
            dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
            wait_replies(world.client.tables, 0, call.rows, call.ids, call.n_rows)
        assert world.client.retired() == {0: step}
    world.client.reclaim()
    assert world.client.retired() == {0: 2}
    world.client.report()
    world.call(call)
    assert world.client.report().lost == (0, 1, 2), "a server without a free slot was asked"
    renew(world)
    world.call(call)
    assert same_bits(call.out[:3], call.expected(world.shape)) and world.client.report().usable


def test_a_restarted_server_answers_nothing_that_its_old_self_was_asked() -> None:
    seed = fresh_seed()
    world = World(servers=1, replicas=1, rounds=0)
    call = Call.random(world.shape, seed)
    dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    old = world.ends[0]
    world.ends[0] = GpuServer(
        world.shape, clients=1, compute=toy_experts, incarnation=SERVER + 99, device=DEVICE, idle_s=0.00002
    )
    world.ends[0].attach(0, request=world.requests[0].data_ptr(), reply=world.replies[0].data_ptr(), incarnation=CLIENT)
    world.ends[0].enqueue_pass()
    assert world.ends[0].counters().invalid == 1 and old.counters().requests == 0
    wait_replies(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    combine(world.client.tables, 0, call.rows, call.ids, call.weights, call.n_rows, call.out)
    report = world.client.report()
    assert report.verdicts == {0: {Verdict.CORRUPT}}, "a reply of another incarnation was believed"
    assert bool(call.out[:3].isnan().all())


def test_a_request_is_answered_once_and_an_old_signal_never() -> None:
    world = World(servers=1, replicas=1)
    end = world.ends[0]
    for _ in range(2):
        world.call(Call.random(world.shape, fresh_seed()))
    end.enqueue_pass()
    assert end.counters().requests == 2
    slot = world.request_slot(0)
    slot[:8] = torch.tensor(list(struct.pack("<Q", 1)), dtype=torch.uint8)
    end.enqueue_pass()
    assert end.counters().requests == 2 and end.counters().invalid == 0


def test_two_clients_are_served_in_one_pass() -> None:
    seed = fresh_seed()
    world, other = World(servers=1, replicas=1), World(servers=1, replicas=1)
    end = world.ends[0]
    end.attach(1, request=other.requests[0].data_ptr(), reply=other.replies[0].data_ptr(), incarnation=CLIENT)
    calls = [Call.random(world.shape, seed + i, layer=i, live=2 + i) for i in range(2)]
    for one, call in zip((world, other), calls, strict=True):
        dispatch(one.client.tables, call.layer, call.rows, call.ids, call.n_rows)
    end.enqueue_pass()
    for one, call in zip((world, other), calls, strict=True):
        wait_replies(one.client.tables, call.layer, call.rows, call.ids, call.n_rows)
        combine(one.client.tables, call.layer, call.rows, call.ids, call.weights, call.n_rows, call.out)
        live = int(call.n_rows[0])
        assert same_bits(call.out[:live], call.expected(world.shape)), f"seed {seed}"
    assert end.passes == 1 and end.counters().requests == 2
    end.detach(1)
    end.enqueue_pass()
    assert end.counters().requests == 2


def test_a_steps_time_ends_its_waits() -> None:
    world = World(servers=1, replicas=1, rounds=0, patience_s=1.0)
    call = Call.random(world.shape, fresh_seed())
    world.client.begin(0.0001)
    settle()
    dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    wait_replies(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    settle()
    assert world.client.report().verdicts == {0: {Verdict.MISSING}}
    if DEVICE == "cpu":
        assert int(world.client.tables.control[6]) < 20 * 20_000, "the wait went past the step's deadline"


def test_definitions_of_what_kernels_choose() -> None:
    routes = np.array([[0, 1], [1, 0], [2, -1]])
    chosen, rows = dispatch_reference(np.array([[0, 1], [2, 0]]), routes, np.array([1, 2, 0]))
    assert chosen.tolist() == [[1, 1], [-1, 1]] and rows == {1: {0, 1}}
    assert poll_reference({0: 9, 1: 8, 2: 3}, {0: 4, 1: 4, 2: 3}) == 1
    assert poll_reference({0: 3}, {0: 3}) is None
    answered = wait_replies_reference([[0, 1], [0, 2], [2], [3]], {(0, 0), (1, 1), (2, 0)})
    assert answered == [1, 0, 0, None]
    answers = torch.zeros(1, 3, 2)
    reply_reference(torch.tensor([[1.0, 2.0]]), torch.tensor([2], dtype=torch.int32), answers)
    assert answers.tolist() == [[[0, 0], [0, 0], [1, 2]]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": 100}, "hidden is 100; 128 to 65536 is possible."),
        ({"hidden": 192}, "hidden is 192; a multiple of 128 is needed."),
        ({"top_k": 33}, "top_k is 33; 1 to 32 is possible."),
        ({"slots": 0}, "slots is 0; 1 to 32 is possible."),
    ],
)
def test_a_shape_that_cannot_be_says_what_can(change: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shape_of(**change)


def test_steps_of_more_rows_than_a_frame_holds_are_refused_before_there_is_a_client() -> None:
    backend = GpuBackend(torch.device(DEVICE))
    model = ExpertShape(architecture="", layer_ids=(0,), experts=4, hidden=128, intermediate=64, top_k=2)
    wire = WireShape(shape=model, dtype=Dtype.BFLOAT16, model_hash=7)
    assert backend.window(wire, 512, 2).payload_bytes >= 512 * 2 * 256
    with pytest.raises(ValueError, match=r"steps of up to 513 rows.*at most 512.*--step-tokens 512 or less"):
        backend.window(wire, 513, 2)


def test_wrong_arguments_are_refused_in_words() -> None:
    world = World(servers=1, replicas=1)
    client, end = world.client, world.ends[0]
    call = Call.random(world.shape, 1)
    layer, rows, ids, weights, n_rows, out = call.arguments()
    with pytest.raises(ValueError, match="layer is 2; this model has MoE layers 0 to 1"):
        client.enqueue(2, rows, ids, weights, n_rows, out)
    with pytest.raises(ValueError, match="9 rows; a call has 1 to 8"):
        client.enqueue(layer, *Call.random(world.shape, 1, tokens=9).arguments()[1:])
    with pytest.raises(ValueError, match=r"rows: found torch.float32 \(4, 128\), needed torch.bfloat16"):
        client.enqueue(layer, rows.float(), ids, weights, n_rows, out)
    with pytest.raises(ValueError, match=r"weights: found torch\.float64"):
        combine(client.tables, layer, rows, ids, weights.double(), n_rows, out)
    with pytest.raises(ValueError, match="place is 1; 0 to 0 exist"):
        client.link(1, None)
    with pytest.raises(ValueError, match="multiples of 64 bytes are needed"):
        client.link(0, Link(request=3, reply=64, incarnation=1))
    with pytest.raises(ValueError, match="routes name places -1 to 7; 0 to 0 exist"):
        client.write_tables(torch.full_like(world.routes(), 7).clamp_min(-1).index_fill_(1, torch.tensor([0]), -1))
    with pytest.raises(ValueError, match="place 0 is taken; detach its client first"):
        end.attach(0, request=64, reply=64, incarnation=1)
    with pytest.raises(ValueError, match="expert 6 of layer 0; there are 6 of 2 layers"):
        end.hold(0, 6, 0)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="in the interpreter call enqueue_pass"):
            end.serve()


def dispatch_one(world: World) -> Call:
    call = Call.random(world.shape, fresh_seed())
    world.begin()
    dispatching.dispatch(world.client.tables, 0, call.rows, call.ids, call.n_rows)
    return call


def renew(world: World) -> None:
    """New windows between the client and its only server."""
    world.ends[0].detach(0)
    for windows, window in (
        (world.requests, request_of(world.shape)),
        (world.replies, reply_of(world.shape)),
    ):
        windows[0] = window
    world.ends[0].attach(0, request=world.requests[0].data_ptr(), reply=world.replies[0].data_ptr(), incarnation=CLIENT)
    world.link(0)
    world.client.write_tables()


@pytest.mark.smoke
def test_past_its_lease_a_server_answers_nothing_whatever_became_of_its_host() -> None:
    """Passes go on, as they do while a host is frozen, and only the device's clock says that the lease is over."""
    seed = fresh_seed()
    world = World(servers=1, replicas=1)
    end = world.ends[0]
    for before_a_lease in (True, False):
        call = Call.random(world.shape, seed)
        world.call(call)
        assert same_bits(call.out[:3], call.expected(world.shape)), f"seed {seed}: {before_a_lease}"
        end.set_lease(boottime_ns() + LONG_NS)
    let_lease_end(end)
    before, counted = signals_of(world), end.counters()
    dispatch_one(world)
    for _ in range(3):
        end.enqueue_pass()
    assert signals_of(world) == before, f"seed {seed}: answered without a lease"
    assert end.counters() == counted, f"seed {seed}: computed without a lease"
    end.set_lease(boottime_ns() + LONG_NS)
    end.enqueue_pass()
    assert signals_of(world) != before, f"seed {seed}: renewed, what waits is not answered"
    before = signals_of(world)
    dispatch_one(world)
    end.set_lease(0)
    end.set_lease(boottime_ns() + LONG_NS)
    end.enqueue_pass()
    assert signals_of(world) == before, f"seed {seed}: a fence is for good"


def test_a_pass_that_outlasts_the_lease_releases_no_signal_and_a_later_one_answers() -> None:
    seed = fresh_seed()
    world = World(servers=1, replicas=1)
    end = world.ends[0]
    world.call(Call.random(world.shape, seed))
    before = signals_of(world)
    call, tables = Call.random(world.shape, seed + 1), world.client.tables
    world.begin()
    dispatching.dispatch(tables, 0, call.rows, call.ids, call.n_rows)
    poll(end.tables, 20_000)
    gather(end.tables, end.batch.rows, end.batch.scales)
    toy_experts(end.batch)
    let_lease_end(end)
    reply(end.tables, end.batch.out)
    assert signals_of(world) == before, f"seed {seed}: answered past its lease"
    end.set_lease(boottime_ns() + LONG_NS)
    end.enqueue_pass()
    assert signals_of(world) != before, f"seed {seed}"
    wait_replies(tables, 0, call.rows, call.ids, call.n_rows)
    combine(tables, 0, call.rows, call.ids, call.weights, call.n_rows, call.out)
    settle()
    assert same_bits(call.out[:3], call.expected(world.shape)), f"seed {seed}"


@pytest.mark.parametrize("step_ns", [1, 32, 1000, CLOCK_STEP_NS])
def test_the_device_ends_a_lease_early_rather_than_late(step_ns: int) -> None:
    seed = fresh_seed()
    draw = np.random.default_rng(seed)
    for _ in range(200):
        ahead_ns, end_ns = int(draw.integers(-(1 << 40), 1 << 60)), int(draw.integers(1 << 41, 1 << 50))
        read_ns, later_ns = end_ns - int(draw.integers(1 << 31)), int(draw.integers(1 << 10))
        seen_ns = (read_ns + ahead_ns) // step_ns * step_ns
        ends_ns = lease_on_device(end_ns, read_ns + later_ns, seen_ns)
        # By the host's clock, when the device's, which goes in steps, first says so.
        ends_ns = -(-ends_ns // step_ns) * step_ns - ahead_ns
        assert end_ns - later_ns - 2 * CLOCK_STEP_NS <= ends_ns <= end_ns, f"seed {seed}"


def test_a_pass_tells_the_host_when_it_ended_by_the_clock_of_leases() -> None:
    world, seen = World(servers=1, replicas=1), [0]
    for _ in range(3):
        before_ns = boottime_ns()
        world.ends[0].enqueue_pass()
        settle()
        seen.append(int(world.ends[0].tables.host[HostWord.CLOCK_NS]))
        assert DEVICE != "cpu" or before_ns <= seen[-1] <= boottime_ns()
    assert seen == sorted(set(seen))


def test_a_wait_for_passes_that_do_not_end_ends_and_leaves_the_client_in_its_place() -> None:
    world, stuck = World(servers=1, replicas=1), threading.Event()
    end = world.ends[0]
    end._thread = threading.Thread(target=stuck.wait)  # keeps no passes enqueued
    end._thread.start()
    end._taken.add(0)
    try:
        for wait in (end.detach, lambda place, timeout_s: end.end_passes(timeout_s)):
            with pytest.raises(TimeoutError, match="the device is stuck"):
                wait(0, timeout_s=0.05)
    finally:
        stuck.set()
    end.close()
    end.remove_client(0)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs the interpreter, whose passes the host makes; found a GPU")
def test_a_client_is_not_let_go_while_the_interpreters_pass_stands_still() -> None:
    begun, go_on = threading.Event(), threading.Event()
    world = World(servers=1, replicas=1)
    end = world.ends[0]

    def compute(batch: Batch) -> None:
        begun.set()
        go_on.wait()

    end._compute = compute
    turning = threading.Thread(target=end.run, args=(1 << 40,))
    turning.start()
    try:
        assert begun.wait(60)
        with pytest.raises(TimeoutError, match="the device is stuck"):
            end.detach(0, timeout_s=0.05)
    finally:
        go_on.set()
        end.stop()
        turning.join()
    end.detach(0)


LONG_NS = 3_600_000_000_000


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def let_lease_end(end: GpuServer) -> None:
    """Nobody renews it."""
    end.set_lease(lease_ns := boottime_ns() + 5_000_000)
    while boottime_ns() <= lease_ns:
        time.sleep(0.005)


def signals_of(world: World) -> list[bytes]:
    """Those of the first server's replies."""
    settle()
    return [bytes(world.reply_slot(0, slot)[:8].cpu().numpy()) for slot in range(world.shape.slots)]
