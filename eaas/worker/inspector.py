"""An inspection of one attention worker: rows go from steps into a ring, and from there to a sink, on its own thread.

A step writes what it records straight into the ring (eaas/native/decoder.h), in one frame, and never waits: where the
ring is full, the oldest frames give way or the new one is not made, and both are counted. Under the policy "block" the
loop takes no step instead, and stays alive. A sink that is slow, hangs or fails costs records alone.

A record is what one tap says of one row. Rows are numbered as they are computed, dropped ones included, so that whoever
reads the sink sees what is missing.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol, cast

import numpy as np

from eaas.model.spec import ModelSpec
from eaas.worker.plan import StepPlan, StepTaps
from eaas.worker.protocol import Inspect, Inspected, LayerView
from eaas.worker.request import Request
from eaas.worker.sinks import Rows, Sink, SinkFailed, SinkUnusable
from eaas.worker.taps import KINDS, STATISTICS, Tap, TapInvalid, taps_of
from eaas.worker.views import Views

log = logging.getLogger(__name__)

# Rows wait so long, or for so many bytes of them, to be delivered together.
FLUSH_S = 1.0
FLUSH_BYTES = 32 << 20
TELL_S = 1.0
_POLL_S = 0.2
# A sink that takes nothing for so long hangs: it is left to itself, and no step waits for it.
_HANGS_S = 4.0
# A process that ends has less time.
_CLOSE_S = 0.2
# Who began an inspection and is gone may be back within this.
_ALONE_S = 30.0
# What is known of a frame beside its rows takes memory, too.
MOST_FRAMES = 4096
# Of the host's memory, for rows that wait.
MOST_OF_MEMORY = 1 / 8

WAITING, HELD, FREE = range(3)
_NO_FRAME = np.empty(0, np.float32)


class Layout:
    """Where a step writes what it records of its rows: tap after tap, each [rows, width]. Pure."""

    def __init__(self, taps: tuple[Tap, ...], spec: ModelSpec, *, statistics: bool) -> None:
        self.taps, self.statistics = taps, statistics
        # A step has no other place for logits of which only statistics are wanted.
        self.widths = [len(STATISTICS) if statistics and tap.kind != "logits" else tap.width(spec) for tap in taps]
        begins = np.cumsum([0, *self.widths])
        self.row_floats = int(begins[-1])
        self._begins = begins[:-1].tolist()
        self._places = np.full((len(KINDS) - 1, spec.layers), -1, dtype=np.int64)
        experts: list[tuple[int, int, int]] = []
        for tap, begin in zip(taps, self._begins, strict=True):
            if tap.kind == "expert":
                experts.append((tap.layer, tap.expert, begin))
            else:
                self._places[KINDS.index(tap.kind), tap.layer] = begin
        self._experts = np.array(experts, dtype=np.int64).reshape(-1, 3)
        self._scaled: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # both, by how many rows

    def taps_of(self, rows: np.ndarray) -> StepTaps:
        """What a step is told to record of these rows, in a frame of [rows * row_floats] that is still to be given."""
        count = len(rows)
        known = self._scaled.get(count)
        if known is None:
            places = np.where(self._places < 0, -1, self._places * count)
            known = self._scaled[count] = places, self._experts * np.array([1, 1, count])
        places, experts = known
        return StepTaps(rows=rows, places=places, experts=experts, frame=_NO_FRAME, statistics=self.statistics)

    def parts(self, frames: np.ndarray, rows: int, memory: np.ndarray) -> list[np.ndarray]:
        """What was recorded by steps of so many rows each: of each tap [steps * rows, width], one after another.

        Args:
            frames: float32 [steps, rows * row_floats].
            memory: Of as many numbers; where the parts are.
        """
        steps, parts = len(frames), list[np.ndarray]()
        for begin, width in zip(self._begins, self.widths, strict=True):
            end = begin + width
            part = memory[begin * steps * rows : end * steps * rows]
            part.reshape(steps, -1)[:] = frames[:, begin * rows : end * rows]
            parts.append(part.reshape(-1, width))
        return [part[:, : len(STATISTICS)] for part in parts] if self.statistics else parts


class Frame:
    """What one step records: of the rows numbered from `sequence` on."""

    __slots__ = ("begin", "end", "names", "positions", "rows", "sequence", "slots", "state", "tokens")
    # Given before it is published.
    sequence: int
    positions: np.ndarray
    tokens: np.ndarray
    slots: np.ndarray
    names: Mapping[int, str]

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end, self.state, self.rows = begin, end, HELD, 0


class Ring:
    """Frames in one piece of memory, the first in the first out. One thread makes them, one takes them."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes // 4, dtype=np.float32)
        self._frames: deque[Frame] = deque()  # the oldest first
        self._lock = threading.Lock()
        self._waiting = 0  # floats
        # Behind the frames that came after it, until it goes: see `_place`.
        self._left: Frame | None = None
        # Set where the taker should not wait until it next looks by itself, which costs nobody anything.
        self.wakes = threading.Event()

    def make(self, floats: int, *, drop_oldest: bool) -> tuple[Frame | None, int]:
        """Room for a frame, None where there is none, and the rows that had to give way. Never waits for the taker."""
        dropped = 0
        with self._lock:
            while True:
                begin = self._place(floats)
                if begin is not None and len(self._frames) < MOST_FRAMES:
                    if begin == 0 and len(self._frames) == 1:
                        self._left = self._frames[0]
                    frame = Frame(begin, begin + floats)
                    self._frames.append(frame)
                    return frame, dropped
                oldest = self._frames[0] if drop_oldest and self._frames else None
                # One that is being taken is in the way for as long as it takes to copy it.
                if oldest is None or oldest.state != WAITING or floats > len(self.memory):
                    return None, dropped
                oldest.state = FREE
                self._waiting -= oldest.end - oldest.begin
                dropped += oldest.rows

    def publish(self, frame: Frame) -> None:
        """A frame that was made is whole."""
        with self._lock:
            frame.state = WAITING
            self._waiting += frame.end - frame.begin
            much = self._waiting > len(self.memory) // 4 or len(self._frames) > MOST_FRAMES // 4
            if much and not self.wakes.is_set():
                self.wakes.set()

    def take(self) -> list[Frame]:
        """Every frame that is whole, the oldest first, for the taker until it frees them."""
        with self._lock:
            found = [frame for frame in self._frames if frame.state == WAITING]
            for frame in found:
                frame.state = HELD
            self._waiting = 0
            return found

    def free(self, *frames: Frame) -> None:
        """Nobody needs these any more."""
        with self._lock:
            for frame in frames:
                frame.state = FREE

    def has_room(self, floats: int) -> bool:
        """Whether `make` would find room without dropping anything."""
        with self._lock:
            found = self._place(floats) is not None and len(self._frames) < MOST_FRAMES
        if not found:
            self.wakes.set()
        return found

    def _place(self, floats: int) -> int | None:
        frames = self._frames
        while frames and frames[0].state == FREE:
            frames.popleft()
        if not frames:
            return 0 if floats <= len(self.memory) else None
        first, last, left = frames[0].begin, frames[-1].end, frames[0] is self._left
        # Back as soon as the frame before is all that is left: so the same pages are written again and again, not each
        # of the ring's for the first time, which takes longer than the copy. Behind that frame is room as well.
        if len(frames) == 1 and floats <= first:
            return 0
        if first < last:
            if floats <= len(self.memory) - last:
                return last
            return 0 if floats <= first and not left else None
        if floats <= first - last:
            return last
        return frames[0].end if left and floats <= len(self.memory) - frames[0].end else None


class TappedDecoder(Protocol):
    """A decoder that can record rows: `eaas.worker.decoder.Decoder`."""

    @property
    def tap_kinds(self) -> Collection[str]:
        """Those of `eaas.worker.taps.KINDS` that it can."""
        ...

    @property
    def tap_floats(self) -> int:
        """Most numbers of one step."""
        ...


class Inspector:
    """The inspections of one worker, one at a time. `news` and what steps call are for the thread that steps."""

    def __init__(
        self,
        spec: ModelSpec,
        decoder: TappedDecoder,
        step_tokens: int,
        open_sink: Callable[[Inspect, tuple[Tap, ...]], Sink],
    ) -> None:
        """Args: open_sink: called on a thread of the inspection; raises SinkUnusable where there is none such."""
        self._spec, self._decoder, self._step_tokens = spec, decoder, step_tokens
        self._open_sink = open_sink
        self._now: Inspection | None = None
        # Not those of the thread that steps, which its lanes pin.
        self._cpus = os.sched_getaffinity(os.getpid())

    def begin(self, order: Inspect, owner: int) -> Inspected | None:
        """Begin an inspection, or take one that is under way over; `news` tells how it goes. Returns why not."""
        now = self._now
        if now is not None and now.order.id == order.id:
            now.owner, now.told_s, now.end_s = owner, -math.inf, time.monotonic() + order.for_s
            return None
        try:
            if now is not None and now.owner >= 0:
                raise TapInvalid(f"{now.order.id} is under way; end it first, or wait for its end.")
            layout = self._layout(order)
            begun = Inspection(
                order, layout, partial(self._open_sink, order, layout.taps), owner, self._spec, time.monotonic(),
                self._decoder.tap_floats,
            )  # fmt: skip
            begun.start(self._cpus)
        # The last: there is no thread to be had.
        except (TapInvalid, MemoryError, RuntimeError) as error:
            return Inspected(id=order.id, fault=str(error) or "There is too little memory.", ended=True)
        if now is not None:
            now.end()
        self._now = begun
        log.info("inspection_began id=%s taps=%d sink=%s", order.id, len(layout.taps), order.sink)
        return None

    def _layout(self, order: Inspect) -> Layout:
        """Raises TapInvalid: it cannot be recorded so."""
        taps = taps_of(order.taps, self._spec)
        lacking = sorted({tap.kind for tap in taps} - set(self._decoder.tap_kinds))
        if lacking:
            raise TapInvalid(f"The decoder of this worker does not record {', '.join(lacking)}.")
        layout = Layout(taps, self._spec, statistics=order.statistics)
        most = 4 * self._step_tokens * layout.row_floats
        room = min(order.ring_bytes, 4 * self._decoder.tap_floats)
        if order.policy == "block" and room < most:
            raise TapInvalid(
                f"A step of {self._step_tokens} rows records {most} bytes; there is room for {room}, and serving would "
                "wait for ever. Ask for a larger ring_bytes, or fewer taps."
            )
        memory = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * MOST_OF_MEMORY)
        if order.ring_bytes > memory:
            raise TapInvalid(
                f"A ring of {order.ring_bytes} bytes is over an eighth of this host's memory; {memory} are possible."
            )
        return layout

    def end(self, id: str) -> None:
        """End that inspection; `news` tells of it once more."""
        if self._now is not None and self._now.order.id == id:
            self._now.end()

    def owner_lost(self, owner: int) -> None:
        """Nobody is told of its inspection any more, until somebody takes it over, before long."""
        if self._now is not None and self._now.owner == owner:
            self._now.owner = -1
            self._now.end_s = min(self._now.end_s, time.monotonic() + _ALONE_S)

    @property
    def blocked(self) -> bool:
        """Whether no step may be taken until the sink has taken something, which it does."""
        now = self._now
        if now is None or now.order.policy != "block" or now.ended or now.owner < 0 or now.hangs:
            return False
        return not now.ring.has_room(self._step_tokens * now.layout.row_floats)

    def news(self) -> tuple[int, Inspected] | None:
        """What is to be told, and whom: now and then, and at the end."""
        now, now_s = self._now, time.monotonic()
        if now is None:
            return None
        if now_s >= now.end_s:
            now.end()
        over = now.ended and now.over
        if not over and (not now.opened or now_s - now.told_s < TELL_S):
            return None
        now.told_s = now_s
        told = now.told(over=over)
        if over:
            self._now = None
            now.forget()
        return (now.owner, told) if now.owner >= 0 else None

    def close(self) -> None:
        """End what is under way, for a moment."""
        if self._now is not None:
            self._now.end()
            self._now.join(_CLOSE_S)

    # -- steps

    def record(self, seqs: np.ndarray, requests: Mapping[int, Request]) -> StepTaps | None:
        """What a step of these rows is to record; `done` or `failed` follows, whichever it is.

        Args:
            seqs: int32 [rows]: the slot of each.
            requests: Those that are inspected, by slot; what is the same object is unchanged.
        """
        now = self._now
        return None if now is None or now.ended else now.record(seqs, requests)

    def done(self, plan: StepPlan) -> None:
        """The step has computed its rows."""
        if self._now is not None:
            self._now.done(plan)

    def failed(self) -> None:
        """It has not, and is tried again: nothing was recorded."""
        if self._now is not None:
            self._now.failed()


class Inspection:
    """One inspection, and the thread that brings its rows to the sink."""

    def __init__(
        self,
        order: Inspect,
        layout: Layout,
        open_sink: Callable[[], Sink],
        owner: int,
        spec: ModelSpec,
        now_s: float,
        most_floats: int,
    ) -> None:
        """Args: most_floats: of a step. Raises MemoryError: there is none for the ring."""
        self.order, self.layout, self.owner = order, layout, owner
        self.ring = Ring(order.ring_bytes)
        self.end_s, self.told_s = now_s + order.for_s, -math.inf
        self.opened = self.ended = False
        self._open_sink = open_sink
        self._most_floats = min(most_floats, len(self.ring.memory))
        self._rows = self._delivered = 0  # rows computed; records delivered
        self._gave_way = 0  # rows, by the stepping thread
        self._lost = 0  # records, by the sink's
        self._fault = self._note = self._folder = ""
        self._drops_oldest = order.policy == "drop-oldest"
        # What was last seen: what runs, and rows; of these the names by slot, which are recorded, and how.
        self._requests: Mapping[int, Request] = {}
        self._seqs = self._recorded = np.empty(0, np.int32)
        self._names: dict[int, str] = {}
        self._taps = layout.taps_of(self._recorded)
        # Of the step under way.
        self._count, self._frame = 0, cast("Frame | None", None)
        self._broken = False
        # When the sink last had taken what it was given.
        self._progress_s = time.monotonic()
        gates = sorted({tap.layer for tap in layout.taps if tap.kind in ("gate", "experts")})
        self._views = None
        if gates and not layout.statistics:
            self._views = Views(gates, spec.moe.experts, spec.moe.top_k)
        self._shown: list[LayerView] = []

    def start(self, cpus: Collection[int]) -> None:
        """Begin to deliver. Args: cpus: where the sink's thread may run."""
        self._thread = threading.Thread(target=self._run, args=(cpus,), name="inspection", daemon=True)
        self._thread.start()

    # -- the thread that steps

    def record(self, seqs: np.ndarray, requests: Mapping[int, Request]) -> StepTaps | None:
        # Most steps have the rows of the last one: a step computes for milliseconds what would take long to find anew.
        if requests is not self._requests or seqs is not self._seqs:
            self._look_at(seqs, requests)
        count = self._count = len(self._recorded)
        floats = count * self.layout.row_floats
        if not floats:
            return None
        if floats > self._most_floats:
            self._note = (
                f"Steps of {count} rows record {4 * floats} bytes and are dropped: there is room for "
                f"{4 * self._most_floats}. Ask for fewer taps, or a larger ring_bytes."
            )
            return None
        if self._fault:
            # Nobody would be given it, so `done` counts it as dropped.
            return None
        frame, gave_way = self.ring.make(floats, drop_oldest=self._drops_oldest)
        self._gave_way += gave_way
        self._frame = frame
        if frame is None:
            return None
        # All else of it was made for the first step of these rows: weights drive code and objects out of the caches, so
        # whatever is made anew in each step takes several times as long as it seems.
        self._taps.frame = self.ring.memory[frame.begin : frame.end]
        return self._taps

    def _look_at(self, seqs: np.ndarray, requests: Mapping[int, Request]) -> None:
        # Some may be of an inspection that was before, or of another gateway's.
        mine = self.order.id + "/"
        self._requests, self._seqs = requests, seqs
        self._names = {
            slot: request.inspected.removeprefix(mine)
            for slot, request in requests.items()
            if request.inspected.startswith(mine)
        }
        self._recorded = np.flatnonzero(np.isin(seqs, list(self._names))).astype(np.int32)
        # A decoder may keep it, but not the ring with it.
        self._taps.frame = _NO_FRAME
        self._taps = self.layout.taps_of(self._recorded)

    def done(self, plan: StepPlan) -> None:
        count, frame, rows = self._count, self._frame, self._recorded
        self._count, self._frame = 0, None
        first, self._rows = self._rows, self._rows + count
        if frame is None:
            # There was no room, or nothing to record.
            self._gave_way += count
            return
        frame.sequence, frame.rows, frame.names = first, count, self._names
        frame.positions, frame.tokens, frame.slots = plan.positions, plan.token_ids, plan.seqs
        if count < len(plan.seqs):
            frame.positions, frame.tokens, frame.slots = plan.positions[rows], plan.token_ids[rows], plan.seqs[rows]
        self.ring.publish(frame)

    def failed(self) -> None:
        if self._frame is not None:
            self.ring.free(self._frame)
        self._count, self._frame = 0, None

    def end(self) -> None:
        """Record nothing more. Idempotent."""
        self.ended = True
        self.ring.wakes.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the sink to have everything, but not for ever."""
        self._thread.join(timeout_s)

    def forget(self) -> None:
        """Let go of the memory, whatever the sink still does."""
        self._look_at(self._seqs, {})
        self.ring = Ring(0)

    @property
    def hangs(self) -> bool:
        """Whether the sink has not taken for long what it was given."""
        return self._thread.is_alive() and time.monotonic() - self._progress_s > _HANGS_S

    @property
    def over(self) -> bool:
        """Whether it has ended, and the sink with it, or is not waited for any more."""
        return not self._thread.is_alive() or (self.ended and self.hangs)

    def told(self, *, over: bool) -> Inspected:
        """How it goes. Args: over: what the sink has not taken by now is lost."""
        taps, hangs = len(self.layout.taps), self.hangs
        produced, delivered = self._rows * taps, self._delivered
        dropped = self._gave_way * taps + self._lost
        if over and (hangs or self._broken):
            # Nobody knows what became of what it was given.
            dropped = produced - delivered
        waits = f"The sink has taken nothing for {_HANGS_S:g} s." if hangs else self._note
        return Inspected(
            id=self.order.id,
            produced=produced,
            delivered=delivered,
            dropped=dropped,
            fault=self._fault or waits,
            ended=over,
            folder=self._folder,
            views=self._shown,
        )

    # -- the thread of the sink

    def _run(self, cpus: Collection[int]) -> None:
        try:
            os.sched_setaffinity(0, cpus)
            sink = self._open_sink()
            self._folder = sink.where
            self.opened = True
            self._deliver(sink)
        except Exception as error:
            # Whatever it is, it must not end unsaid: who steps would wait for this thread.
            self._fail(error)
            self._broken = True
        self.ended = self.opened = True

    def _deliver(self, sink: Sink) -> None:
        # What was taken is worked on once a second: the cores are the lanes' while they compute. Memory, for frames and
        # for the parts that are made of them, is taken once, and used from its beginning after each delivery: to map
        # pages anew costs more than to copy into them.
        memory, parts = np.empty((2, max(FLUSH_BYTES // 4, len(self.ring.memory))), np.float32)
        held: list[Frame] = []
        began_s, end, rows = time.monotonic(), 0, 0
        while True:
            ended, ring = self.ended, self.ring
            frames = ring.take()
            for frame in frames:
                if not rows:
                    began_s = time.monotonic()
                rows += frame.rows
                if not self._fault:
                    # While the sink takes its time, what is in the ring may give way.
                    size = frame.end - frame.begin
                    if end + size > len(memory):
                        self._flush(sink, memory[:end], parts, held, (rows - frame.rows) * len(self.layout.taps))
                        held, end, rows = [], 0, frame.rows
                    memory[end : end + size] = ring.memory[frame.begin : frame.end]
                    held.append(frame)
                    end += size
                ring.free(frame)
            if rows and (ended or 4 * end >= FLUSH_BYTES or time.monotonic() - began_s >= FLUSH_S):
                self._flush(sink, memory[:end], parts, held, rows * len(self.layout.taps))
                held, end, rows = [], 0, 0
            self._progress_s = time.monotonic()
            if not ended:
                ring.wakes.wait(_POLL_S)
                ring.wakes.clear()
            elif not frames:
                self._try(sink.close)
                return

    def _flush(self, sink: Sink, memory: np.ndarray, parts: np.ndarray, held: Sequence[Frame], records: int) -> None:
        """Deliver frames that lie one after another in memory.

        Args:
            parts: As much memory, or more, for what is made of them.
            records: That are delivered so, or lost.
        """
        begin = 0
        for count, alike in itertools.groupby(held, lambda frame: frame.rows):
            frames = list(alike)
            end = begin + len(frames) * count * self.layout.row_floats
            rows = self._rows_in(count, frames, memory[begin:end].reshape(len(frames), -1), parts[begin:end])
            self._try(lambda rows=rows: sink.take(rows))
            begin = end
        if self._try(sink.flush):
            self._delivered += records
        else:
            self._lost += records
        if self._views is not None:
            self._shown = self._views.summary()

    def _rows_in(self, count: int, frames: Sequence[Frame], memory: np.ndarray, there: np.ndarray) -> Rows:
        """What steps of so many rows have recorded. Args: memory: [steps, count * row_floats]. there: for its parts."""
        parts = self.layout.parts(memory, count, there)
        tokens = np.concatenate([frame.tokens for frame in frames])
        if self._views is not None:
            named = list(zip(self.layout.taps, parts, strict=True))
            gates, chosen = (
                {tap.layer: part for tap, part in named if tap.kind == kind} for kind in ("gate", "experts")
            )
            self._views.add(tokens, gates, chosen, time.monotonic())
        return Rows(
            sequence=np.concatenate([np.arange(f.sequence, f.sequence + count) for f in frames]),
            requests=[frame.names[slot] for frame in frames for slot in frame.slots.tolist()],
            positions=np.concatenate([frame.positions for frame in frames]),
            tokens=tokens,
            parts=parts,
        )

    def _try(self, act: Callable[[], None]) -> bool:
        """Whether the sink did it; once it has failed it is asked nothing more."""
        if not self._fault:
            try:
                act()
            except (OSError, SinkFailed) as error:
                self._fail(error)
        return not self._fault

    def _fail(self, error: Exception) -> None:
        self._fault = str(error) if isinstance(error, SinkUnusable) else f"The sink failed: {error}"
        log.error("inspection_sink_failed id=%s error=%r", self.order.id, error)
