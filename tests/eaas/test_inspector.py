"""Rows of an inspection arrive whole, once and in order, or are counted as dropped; and nothing waits for the sink."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eaas.worker import inspector as module
from eaas.worker.inspector import FREE, HELD, Inspector, Ring
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import Inspect, Inspected
from eaas.worker.sinks import Rows, SinkFailed, opened
from eaas.worker.taps import KINDS, TapInvalid, taps_of
from experts.checkpoint import SafetensorsFile

HIDDEN, LAYERS, EXPERTS = 8, 6, 16
SPEC: Any = SimpleNamespace(
    hidden=HIDDEN,
    layers=LAYERS,
    vocab=32,
    moe_layers=tuple(range(2, LAYERS)),
    moe=SimpleNamespace(experts=EXPERTS, top_k=2),
)
RESIDUALS = ["layers.*.residual"]
DECODER: Any = SimpleNamespace(tap_kinds=frozenset(KINDS), tap_floats=1 << 40)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is delivered once a second is so a hundred times as often."""
    monkeypatch.setattr(module, "FLUSH_S", 0.01)


class Kept:
    """A sink that checks each row: its numbers say what step, row and layer they are of."""

    where = "kept"

    def __init__(self, pause_s: float = 0.0, hang: threading.Event | None = None) -> None:
        self.sequences: list[int] = []
        self._pause_s, self._hang = pause_s, hang
        self.entered = threading.Event()

    def take(self, rows: Rows) -> None:
        self.entered.set()
        if self._hang is not None:
            self._hang.wait()
        time.sleep(self._pause_s)
        for layer, part in enumerate(rows.parts):
            expected = np.repeat((rows.tokens * 10 + layer)[:, None], HIDDEN, 1).astype(np.float32)
            assert (part == expected).all(), f"rows {rows.sequence}, layer {layer}"
        self.sequences += rows.sequence.tolist()

    def flush(self) -> None: ...

    def close(self) -> None: ...


class World:
    """An inspector of whose steps each writes what it is told to, as a decoder would."""

    def __init__(self, to: Kept | Path, **order: Any) -> None:
        """Args: to: the sink, or the folder below which it is opened."""
        self.sink: Any = to
        open_sink: Any = lambda order, taps: to  # noqa: E731
        if isinstance(to, Path):
            open_sink = partial(opened, to, "attention/1.1", "f00d", None)
        self.inspector = Inspector(SPEC, DECODER, 64, open_sink)
        self.rows = self.steps = 0
        self.requests: Any = {0: SimpleNamespace(inspected="inspect-1/r")}
        fields = {"taps": RESIDUALS, "ring_bytes": 1 << 16, **order}
        self.first = self.inspector.begin(Inspect(id="inspect-1", **fields), owner=1)

    def step(self, rows: int, *, fails: bool = False) -> bool:
        """One step of so many rows; whether there was room."""
        self.steps += 1
        numbers = np.arange(rows, dtype=np.int32)
        plan = StepPlan(
            token_ids=numbers + self.rows % 1000,
            positions=numbers,
            seqs=np.zeros(rows, np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            logits_rows=numbers[:0],
        )
        taps = self.inspector.record(plan.seqs, self.requests)
        if taps is not None:
            for layer in range(LAYERS):
                place = int(taps.places[KINDS.index("residual"), layer])
                part = taps.frame[place : place + rows * HIDDEN].reshape(rows, HIDDEN)
                part[:] = -1.0 if fails else (plan.token_ids * 10 + layer)[:, None]
        if fails:
            self.inspector.failed()
        else:
            self.inspector.done(plan)
            self.rows += rows
        return taps is not None

    def end(self, within_s: float = 20.0) -> Inspected:
        self.inspector.end("inspect-1")
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            news = self.inspector.news()
            if news is not None and news[1].ended:
                return news[1]
            time.sleep(0.002)
        raise AssertionError("it does not end")


def check(world: World, told: Inspected) -> None:
    """Produced = delivered + dropped, by the numbers in the sink."""
    found = world.sink.sequences
    assert found == sorted(set(found)), "rows came twice, or not in order"
    assert told.produced == world.rows * LAYERS, (told, world.rows)
    assert told.delivered == len(found) * LAYERS, (told, len(found))
    assert told.dropped == (world.rows - len(found)) * LAYERS, (told, world.rows, len(found))
    assert told.fault == ""


def run_a_million(policy: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    # It keeps up for a while, and then does not.
    world = World(Kept(), policy=policy, ring_bytes=1 << 20)
    while world.rows * LAYERS < 1_000_000:
        world.sink._pause_s = 0.002 if world.steps // 500 % 2 else 0.0
        while policy == "block" and world.inspector.blocked:
            time.sleep(0.0005)
        for _ in range(16):
            if policy == "block" and world.inspector.blocked:
                break
            world.step(int(draw.integers(1, 65)), fails=draw.random() < 0.05)
    world.sink._pause_s = 0.0
    told = world.end()
    check(world, told)
    assert policy != "block" or not told.dropped, f"seed {seed}: {told}"
    assert told.delivered > 0


def overflow(policy: str) -> None:
    """More than fits is recorded while the sink takes nothing, and then it takes what is left."""
    hang = threading.Event()
    world = World(Kept(hang=hang), policy=policy)
    world.step(4)
    assert world.sink.entered.wait(60)
    for number in range(200):
        world.step(64, fails=number % 7 == 0)
    hang.set()
    told = world.end()
    check(world, told)
    assert told.dropped > 0, told


@pytest.mark.parametrize("policy", ["drop-oldest", "drop-newest"])
def test_what_does_not_fit_is_dropped_and_counted(policy: str) -> None:
    overflow(policy)


@pytest.mark.parametrize("policy", ["drop-oldest", "drop-newest", "block"])
def test_of_a_million_records_each_is_delivered_or_counted(policy: str) -> None:
    run_a_million(policy, time.time_ns() % 2**32)


def test_the_oldest_or_the_newest_give_way() -> None:
    for policy, first in (("drop-newest", True), ("drop-oldest", False)):
        hang = threading.Event()
        world = World(Kept(hang=hang), policy=policy)
        while world.step(8) and world.rows < 10_000:
            if policy == "drop-oldest" and world.rows > 5_000:
                break
        last = world.rows - 1
        hang.set()
        told = world.end()
        check(world, told)
        assert told.dropped > 0 and (last not in world.sink.sequences) == first, policy


def test_no_step_waits_for_a_sink_that_hangs_and_its_end_says_so() -> None:
    hang = threading.Event()
    world = World(Kept(hang=hang))
    for _ in range(3000):
        # One that waited would wait for ever.
        world.step(16)
    told = world.end()
    assert told.dropped == told.produced == 3000 * 16 * LAYERS and "taken nothing" in told.fault
    hang.set()


def test_block_is_refused_where_it_would_block_for_ever() -> None:
    assert World(Kept(), policy="block", taps=["logits", *RESIDUALS]).first is None
    told = World(Kept(), policy="block", taps=[f"layers.*.expert.{expert}" for expert in range(9)]).first
    assert told is not None and told.ended and "ring_bytes" in told.fault, told
    told = World(Kept(), ring_bytes=1 << 34).first
    assert told is not None and "an eighth of this host's memory" in told.fault, told


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """No file of this process may be larger: writing fails, as it does on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("sink", ["safetensors", "npy"])
def test_a_disk_that_is_full_costs_records_and_leaves_no_half_file(sink: str, tmp_path: Path) -> None:
    world = World(tmp_path, sink=sink, ring_bytes=1 << 20)
    with small_files(4096):
        for _ in range(50):
            world.step(16)
        told = world.end()
    assert (told.produced, told.delivered) == (50 * 16 * LAYERS, 0) and told.dropped == told.produced
    assert "The sink failed" in told.fault and "File too large" in told.fault
    assert not any(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("sink", ["safetensors", "npy", "arrow"])
def test_what_is_written_says_of_which_checkpoint_it_is(sink: str, tmp_path: Path) -> None:
    if sink == "arrow":
        pytest.importorskip("pyarrow", reason="needs pyarrow, found none: pip install 'eaas[arrow]'")
    world = World(tmp_path, sink=sink, model="b")
    world.step(3)
    assert world.end().fault == ""
    (path,) = [path for path in tmp_path.rglob("*.*") if path.suffix in (".safetensors", ".json", ".arrows")]
    if sink == "arrow":
        import pyarrow

        metadata = pyarrow.ipc.open_stream(path.read_bytes()).schema.metadata
        told = {name.decode(): value.decode() for name, value in metadata.items()}
    else:
        told = json.loads(path.read_text()) if sink == "npy" else json.loads(SafetensorsFile(path).header)
        told = told.get("__metadata__", told)
    assert (told["model"], told["checkpoint"], told["worker"]) == ("b", "f00d", "attention/1.1")


def test_an_arrow_stream_has_every_record(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, found none: pip install 'eaas[arrow]'")
    world = World(tmp_path, sink="arrow")
    for rows in (3, 1, 16):
        world.step(rows)
    told = world.end()
    assert (told.fault, told.delivered) == ("", 20 * LAYERS)
    (path,) = tmp_path.rglob("*.arrows")
    records = arrow.ipc.open_stream(path.read_bytes()).read_all().to_pylist()
    assert sorted((r["sequence"], r["tap"]) for r in records) == [
        (number, f"layers.{layer}.residual") for number in range(20) for layer in range(LAYERS)
    ]
    assert all(len(set(r["values"])) == 1 and len(r["values"]) == HIDDEN for r in records)


def test_one_inspection_at_a_time_which_its_gateway_may_take_over() -> None:
    world = World(Kept())
    other = world.inspector.begin(Inspect(id="inspect-2", taps=RESIDUALS), owner=2)
    assert other is not None and other.ended and "inspect-1 is under way" in other.fault
    world.inspector.owner_lost(1)
    assert world.inspector.begin(Inspect(id="inspect-1", taps=RESIDUALS), owner=5) is None
    world.step(4)
    assert world.inspector.begin(Inspect(id="inspect-2", taps=RESIDUALS), owner=2) is not None
    world.inspector.owner_lost(5)
    assert world.inspector.begin(Inspect(id="inspect-2", taps=RESIDUALS), owner=2) is None
    world.inspector.close()


def test_a_thread_or_a_core_that_cannot_be_had_is_said_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        told = World(Kept()).first
        assert told is not None and told.ended and "new thread" in told.fault
    world = World(Kept())
    world.end()
    world.inspector._cpus = {1 << 20}
    assert world.inspector.begin(Inspect(id="inspect-1", taps=RESIDUALS), owner=1) is None
    assert "The sink failed" in world.end().fault


def test_requests_of_another_inspection_are_not_recorded() -> None:
    world = World(Kept())
    for name in ("", "inspect-10/r", "inspect-0/r", "inspect-1"):
        requests: Any = {0: SimpleNamespace(inspected=name)}
        assert world.inspector.record(np.zeros(1, np.int32), requests) is None, name
    world.inspector.close()


@pytest.mark.parametrize("policy", ["drop-oldest", "block"])
def test_a_sink_that_breaks_in_any_way_ends_it_and_says_so(policy: str) -> None:
    class Broken(Kept):
        def take(self, rows: Rows) -> None:
            raise ZeroDivisionError("nobody thought of this")

    world = World(Broken(), policy=policy)
    end_s = time.monotonic() + 60
    while world.inspector._now is not None and not world.inspector._now.ended:
        assert time.monotonic() < end_s
        if not world.inspector.blocked:
            world.step(4)
        time.sleep(0.001)
    assert not world.inspector.blocked
    told = world.end()
    assert "nobody thought of this" in told.fault and told.dropped == told.produced > 0


def test_block_waits_for_a_slow_sink_and_not_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HANGS_S", 0.3)
    hang = threading.Event()
    world = World(Kept(hang=hang), policy="block")
    end_s = time.monotonic() + 60
    while not world.inspector.blocked:
        assert time.monotonic() < end_s
        world.step(16)
    while world.inspector.blocked:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    hang.set()
    while world.inspector._now.hangs:  # pyright: ignore
        assert time.monotonic() < end_s
        time.sleep(0.01)
    check(world, world.end())


def test_it_ends_by_itself() -> None:
    world = World(Kept(), for_s=0.05)
    world.step(4)
    end_s = time.monotonic() + 60
    while (news := world.inspector.news()) is None or not news[1].ended:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    check(world, news[1])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layers.9.residual", "other layers"),
        ("layers.0.gate", "4 MoE layers"),
        ("layers.2.expert.16", "0 to 15"),
        ("layers.3-2.residual", "other layers"),
        ("residual", "is no tap"),
        ("layers.*.expert", "is no tap"),
    ],
)
def test_what_is_no_tap_is_refused_in_words(name: str, said: str) -> None:
    with pytest.raises(TapInvalid, match=said):
        taps_of([name], SPEC)


def test_names_stand_for_layers_that_have_it() -> None:
    found = [tap.name for tap in taps_of(["logits", "layers.*.gate", "layers.1-2.residual", "embed"], SPEC)]
    assert found == [
        "embed", "layers.1.residual", "layers.2.gate", "layers.2.residual", "layers.3.gate", "layers.4.gate",
        "layers.5.gate", "logits",
    ]  # fmt: skip


def check_places(seed: int) -> None:
    """Frames are made, published, taken and freed at random; no two that somebody uses share a place."""
    draw = np.random.default_rng(seed)
    ring = Ring(4 * 100)
    made, waiting, taken = [], [], []
    for number in range(4000):
        act = draw.integers(0, 5)
        if act < 2 and not made:
            floats = int(draw.integers(1, 60))
            frame, gave_way = ring.make(floats, drop_oldest=bool(draw.integers(0, 2)))
            while gave_way:
                gave_way -= waiting.pop(0).rows
            if frame is not None:
                frame.rows = 1
                assert frame.end - frame.begin == floats and 0 <= frame.begin <= frame.end <= 100
                made.append(frame)
        elif act == 2 and made:
            ring.publish(made[0])
            waiting.append(made.pop())
        elif act == 3 and draw.random() < 0.3:
            found = ring.take()
            assert found == waiting, f"seed {seed}, act {number}: not all, the oldest first"
            taken, waiting = taken + found, []
        elif act == 4 and (held := taken or made):
            ring.free(held.pop(0))
        used = sorted((frame.begin, frame.end) for frame in (*made, *waiting, *taken))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(used)), f"seed {seed}, act {number}"


def test_no_two_frames_share_a_place() -> None:
    for seed in range(first := time.time_ns() % 2**31, first + 10):
        check_places(seed)


def test_a_taker_that_keeps_up_has_the_same_places_written_and_one_that_stops_all_of_them() -> None:
    ring, kept, places = Ring(4 * 1000), [], set[int]()
    for number in range(200):
        frame, _ = ring.make(10, drop_oldest=False)
        assert frame is not None
        places.add(frame.begin)
        # While the step is under way, which the taker does not wait for.
        if number % 5 == 0:
            ring.free(*ring.take())
        frame.rows = 1
        ring.publish(frame)
    assert max(places) < 100
    ring.free(*ring.take()[:-1])
    while (frame := ring.make(10, drop_oldest=False)[0]) is not None:
        kept.append(frame.begin)
    assert len(set(kept)) == len(kept) > 95


# -- wrong ones are noticed


def _gives_held_away(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Ring._place

    def wrong(self: Ring, floats: int) -> int | None:
        if self._frames and self._frames[0].state == HELD:
            self._frames[0].state = FREE
        return place(self, floats)

    monkeypatch.setattr(Ring, "_place", wrong)


def _forgets_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Ring._place

    def wrong(self: Ring, floats: int) -> int | None:
        found = place(self, floats)
        left = found is None and self._frames and self._frames[0] is self._left
        return 0 if left and floats <= self._frames[0].begin else found

    monkeypatch.setattr(Ring, "_place", wrong)


def _wraps_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Ring._place

    def wrong(self: Ring, floats: int) -> int | None:
        found = place(self, floats)
        return 0 if found is None and self._frames and floats <= self._frames[0].end else found

    monkeypatch.setattr(Ring, "_place", wrong)


@pytest.mark.parametrize("mutant", [_gives_held_away, _wraps_too_far, _forgets_what_is_left])
def test_a_ring_that_shares_places_is_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(5):
            check_places(seed)


def _forgets_what_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Ring.make
    monkeypatch.setattr(Ring, "make", lambda self, floats, **how: (make(self, floats, **how)[0], 0))


def _publishes_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: module.Inspection) -> None:
        numbers = np.arange(self._count, dtype=np.int32)
        plan: Any = SimpleNamespace(positions=numbers, token_ids=numbers, seqs=self._seqs)
        self.done(plan)

    monkeypatch.setattr(module.Inspection, "failed", wrong)


def _forgets_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    done = module.Inspection.done

    def wrong(self: module.Inspection, plan: StepPlan) -> None:
        if self._frame is not None:
            done(self, plan)

    monkeypatch.setattr(module.Inspection, "done", wrong)


def _records_what_runs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    look = module.Inspection._look_at

    def wrong(self: module.Inspection, seqs: np.ndarray, requests: Any) -> None:
        if not self._names or len(seqs) != len(self._seqs):
            look(self, seqs, requests)

    monkeypatch.setattr(module.Inspection, "_look_at", wrong)


def test_rows_that_leave_or_come_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_requests(time.time_ns() % 2**31)
    _records_what_runs_no_more(monkeypatch)
    with pytest.raises(AssertionError):
        check_requests(1)


def check_requests(seed: int) -> None:
    """Of steps with requests in any slots, some of another inspection, exactly this one's rows are recorded."""
    draw, world = np.random.default_rng(seed), World(Kept())
    requests, seqs = {}, np.zeros(0, np.int32)
    for step in range(500):
        if draw.random() < 0.5:
            names = draw.choice(["inspect-1/a", "inspect-1/b", "inspect-10/c"], 4)
            slots = draw.permutation(8)[: draw.integers(1, 5)].tolist()
            found = {slot: SimpleNamespace(inspected=str(names[n])) for n, slot in enumerate(slots)}
            requests = found
        if draw.random() < 0.5:
            seqs = draw.integers(0, 8, draw.integers(1, 7)).astype(np.int32)
        taps = world.inspector.record(seqs, requests)  # pyright: ignore
        mine = {slot for slot, one in requests.items() if one.inspected.startswith("inspect-1/")}
        expected = [row for row, slot in enumerate(seqs.tolist()) if slot in mine]
        assert ([] if taps is None else taps.rows.tolist()) == expected, f"seed {seed}, step {step}"
        world.inspector.failed()
    world.inspector.close()


@pytest.mark.parametrize(
    ("mutant", "policy"),
    [
        (_forgets_what_gives_way, "drop-oldest"),
        (_publishes_what_failed, "drop-newest"),
        (_forgets_the_newest, "drop-newest"),
    ],
)
def test_a_ring_that_is_wrong_is_noticed(mutant: Any, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    failed: list[BaseException] = []
    # What a sink asserts is on its own thread.
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_value))
    with pytest.raises(AssertionError):
        overflow(policy)
        assert not failed, failed


def test_a_sink_that_fails_is_asked_nothing_more() -> None:
    class Failing(Kept):
        def flush(self) -> None:
            raise SinkFailed("the receiver is gone")

    world = World(Failing())
    end_s = time.monotonic() + 60
    while world.step(4):
        assert time.monotonic() < end_s, "what nobody takes is recorded"
        time.sleep(0.001)
    for _ in range(10):
        assert not world.step(4)
    told = world.end()
    assert told.produced == world.rows * LAYERS
    assert told.delivered == 0 and told.dropped == told.produced and "the receiver is gone" in told.fault
