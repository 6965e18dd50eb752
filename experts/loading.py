"""Brings what a server holds to what the router wants of it: verified weights only, at low priority.

A server may hold experts of several models; those that nobody serves are loaded first, of whichever model.

Before an expert counts as held its bytes have the digest that was packed, and it answers the self-test row, where it
will be read from, with the bits that its packer recorded: memory that went bad, a wrong address or a kernel that is
not what its numerics class says show here, not in an answer.

Memory and disks go bad later too. What is held is read again and again, one expert after another, and compared with its
digest; an expert that is damaged is served no more until its right bytes were had anew. One that gives rows that are
not finite is read at once: where all replicas map one damaged file, they agree on such rows. The router hears of
damage at once, and reading goes on while others cannot be had.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from experts.kernels import PackedExpert, WeightsBroken, answer_of
from experts.server import HeldModel
from experts.transfer import at_low_priority
from experts.weights import Weights, WeightsUnavailable
from p2p import faults
from router import bitmap
from router.view import Model, View, of_model

log = logging.getLogger(__name__)

TRIES = 3
RETRY_S = 1.0
REPORT_S = 0.5
# Reading takes at most 1% of a core's time, and wakes it at most 20 times a second: 100 experts of 10 MB in 70 s.
SCRUB_SHARE, SCRUB_LEAST_S = 0.01, 0.05
# A model may give such rows by its nature: found sound, an expert is not read out of turn again for so long.
SOUND_S = 10.0

Place: TypeAlias = tuple[str, int, int]
"""Model hash, layer, expert."""


class Opened(NamedTuple):
    """A model of which experts can be held: where they are set and cleared, and where they are had from."""

    server: HeldModel
    weights: Weights


def wanted_models(view: View, name: str) -> tuple[Model, ...]:
    """Those of which a member is to hold experts, or may yet be: all but those that leave and have none at it."""
    member = view.member(name)
    target = bitmap.from_bytes(member.target) if member else 0
    return tuple(model for model in view.models if not model.leaving or model.take(target))


class Loader:
    """Follows the targets of one member in a thread of its own.

    Args:
        name: Of this member.
        server: Where experts of the model with which it joined are set and cleared.
        weights: Where those are had from.
        report: Told (whole pool's bitmap of what is held, epoch of the View, hashes of the other models that are open)
            whenever a target has been reached, and on the way there each REPORT_S.
        failed: Told why, when this process is better ended: an expert fails its self-test wherever its bytes are from,
            or no weights of its own model can be had and none ever were.
    """

    def __init__(
        self,
        *,
        name: str,
        server: HeldModel,
        weights: Weights,
        report: Callable[[bytes, int, tuple[str, ...]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._name, self._report, self._failed = name, report, failed
        self._own = weights.packed.layout.fingerprint
        # Replaced whole, under the lock: others read it without.
        self._models = {self._own: Opened(server, weights)}
        self._held: set[Place] = set()
        self._has_held = False
        self.damaged = 0  # experts found so after they had been loaded
        self._scrubbed: Place = ("", -1, -1)
        self._scrub_s = 0.0  # when the next of those that are held is to be read, by time.monotonic()
        self._doubted: Place | None = None
        self._sound_s: dict[Place, float] = {}  # when one that was doubted was found sound
        self._slept: set[str] = set()  # models that gave their memory back, and are not all here again
        self._urgent = ThreadPoolExecutor(1)
        self._view: View | None = None
        self._said: tuple[bytes, int, tuple[str, ...]] | None = None
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="expert-loader", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        # Its thread has the priority of whoever starts it, so not of one that loads at low priority.
        self._urgent.submit(time.monotonic).result()
        self._thread.start()

    def apply(self, view: View) -> None:
        """Follow this View's target from now on. Does not block."""
        with self._change:
            self._view = view
            self._change.notify()

    def open(self, server: HeldModel, weights: Weights) -> None:
        """Hold experts of one more model, until the View wants none of it. Does not block. From any thread."""
        with self._change:
            self._models = {**self._models, weights.packed.layout.fingerprint: Opened(server, weights)}
            # Another object is another View: its target is to be looked at again.
            self._view = self._view and replace(self._view)
            self._change.notify()
        if self._closed:
            weights.stop()

    @property
    def models(self) -> Mapping[str, Opened]:
        """Those of which experts can be held, by hash; the one with which this server joined first."""
        return self._models

    def holds(self, model_hash: str, layer: int, expert: int) -> bool:
        """Whether this server serves an expert, whose bytes it verified."""
        return (model_hash, layer, expert) in self._held

    def close(self) -> None:
        """Stop after the expert being loaded. Idempotent."""
        with self._change:
            self._closed = True
            self._change.notify()
        for _, weights in self._models.values():
            weights.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        at_low_priority()
        view: View | None = None
        failures, again_s = 0, math.inf
        try:
            while (found := self._next(view, again_s)) is not None:
                if found is view and self._is_due():
                    if self._read_next() is not None:
                        # Before it is had anew, which may take long.
                        self._say(found)
                        again_s = 0.0
                    continue
                view = found
                missing = self._reach(view)
                failures = failures + 1 if self._own in missing else 0
                again_s = time.monotonic() + RETRY_S if missing else math.inf
                if failures >= TRIES and not self._has_held and not self._closed:
                    # One that held experts goes on: they may be somebody's last replicas, or all models have slept.
                    raise WeightsUnavailable(missing[self._own])
        except Exception as failure:
            log.exception("load_failed name=%s", self._name)
            self._failed(str(failure))
        finally:
            self._urgent.shutdown()
            self._rest()

    def _rest(self) -> None:
        for _, weights in self._models.values():
            weights.rest()

    def _next(self, done: View | None, again_s: float) -> View | None:
        """Wait for a View after `done`, or until one of those held is to be read or `again_s`; None: closed."""
        self._doubted = self._doubtful()
        with self._change:
            while not self._closed and self._view is done and self._doubted is None:
                left_s = min(again_s, self._scrub_s if self._held else math.inf) - time.monotonic()
                if left_s <= 0:
                    break
                # None says of itself that it is doubted.
                wait_s = min(left_s, SCRUB_LEAST_S) if self._held else left_s
                self._change.wait(wait_s if wait_s < math.inf else None)
                self._doubted = self._doubtful()
            return None if self._closed else self._view

    def _doubtful(self) -> Place | None:
        if self._doubted in self._held:
            return self._doubted
        for model_hash, opened in self._models.items():
            while (pair := opened.server.doubtful()) is not None:
                place = (model_hash, *pair)
                if place in self._held and time.monotonic() - self._sound_s.get(place, -SOUND_S) >= SOUND_S:
                    return place
        return None

    def _is_due(self) -> bool:
        return bool(self._held) and (self._doubted is not None or time.monotonic() >= self._scrub_s)

    def _read_next(self) -> Place | None:
        """Read the one that is in doubt, else the next of those that are held; if it is damaged, stop serving it.

        Returns:
            The one that was damaged; None: it is sound.
        """
        doubted, self._doubted = self._doubted, None
        if doubted is None:
            held = sorted(self._held)
            self._scrubbed = next((place for place in held if place > self._scrubbed), held[0])
        model_hash, layer, expert = place = doubted or self._scrubbed
        server, weights = self._models[model_hash]
        began_s = time.thread_time()
        sound = weights.is_here(layer, expert)
        pause_s = max(SCRUB_LEAST_S, (time.thread_time() - began_s) * (1 / SCRUB_SHARE - 1))
        self._scrub_s = time.monotonic() + pause_s
        if not sound:
            # At once, whoever else holds it: an answer from these bytes would look like any other.
            server.clear_expert(layer, expert)
            self._held.discard(place)
            self.damaged += 1
            log.error("weights_damaged name=%s model=%.16s layer=%d expert=%d", self._name, *place)
            return place
        if doubted:
            self._sound_s[doubted] = time.monotonic()
        return None

    def _reach(self, view: View) -> dict[str, str]:
        """Load and drop what this View wants. Returns why experts are missing, by model; empty where none is."""
        wanted = {self._own, *(model.hash for model in wanted_models(view, self._name))}
        parts = {model_hash: of_model(view, model_hash) for model_hash in self._models.keys() & wanted}
        target = {(each, *pair) for each, part in parts.items() for pair in part.target_pairs(self._name)}
        for place in sorted(self._held - target):
            self._models[place[0]].server.clear_expert(*place[1:])
            self._held.discard(place)
        asleep = {model.hash for model in view.models if model.asleep} & parts.keys()
        for each in asleep - self._slept - {place[0] for place in self._held}:
            self._slept.add(each)
            try:
                self._models[each].weights.packed.page_out()
                log.info("paged_out model=%.16s", each)
            except OSError as error:
                # It only takes up memory: of a bad or full disk no server that holds other models is to end.
                log.warning("not_paged_out model=%.16s reason=%s", each, error)
        for gone in self._models.keys() - wanted:
            self._models[gone].weights.rest()
        with self._change:
            self._models = {each: opened for each, opened in self._models.items() if each in wanted}
        began_s = said_s = time.monotonic()
        others = {
            each: bitmap.union(bitmap.from_bytes(m.serving) for m in part.members if m.name != self._name)
            for each, part in parts.items()
        }

        def is_served(place: Place) -> bool:
            model_hash, layer, expert = place
            return bool(others[model_hash] >> (layer * parts[model_hash].experts + expert) & 1)

        # What nobody serves holds requests up.
        new = deque(sorted(target - self._held, key=lambda place: (is_served(place), place)))
        count, missing = len(new), dict[str, str]()
        while new:
            place = new.popleft()
            try:
                # Somebody waits for a model that wakes, however busy the others keep this host.
                if place[0] in self._slept - asleep:
                    self._urgent.submit(self._load, place, parts[place[0]]).result()
                else:
                    self._load(place, parts[place[0]])
            except WeightsUnavailable as unavailable:
                missing[place[0]] = str(unavailable)
                log.warning("weights_unavailable reason=%s", unavailable)
            if self._closed or self._view is not view:
                return missing
            # Loading another model takes minutes, in which what is held goes bad too.
            self._doubted = self._doubtful()
            damaged = self._read_next() if self._is_due() else None
            if damaged is not None:
                new.appendleft(damaged)
            if damaged is not None or time.monotonic() - said_s > REPORT_S:
                said_s = time.monotonic()
                self._say(view)
        self._slept &= asleep
        self._rest()
        # A View that changes nothing here is not worth a message; its target was reached before.
        if self._said is None or self._said[0] != self._bitmap(view) or count:
            log.info(
                "loaded experts=%d new=%d epoch=%d load_s=%.3f",
                len(self._held),
                count,
                view.epoch,
                time.monotonic() - began_s,
            )
        self._say(view)
        return missing

    def _bitmap(self, view: View) -> bytes:
        """What is held, as a bitmap of the whole pool."""
        bits = 0
        for model_hash in self._models:
            known = (model for model in view.models if model.hash == model_hash)
            model = next(known, Model(hash=model_hash, experts=view.experts))
            held = ((layer, expert) for of, layer, expert in self._held if of == model_hash)
            bits |= model.put(bitmap.of_pairs(held, model.experts))
        return bits.to_bytes(-(-bits.bit_length() // 8), "little")

    def _say(self, view: View) -> None:
        self._said = (self._bitmap(view), view.epoch, tuple(self._models)[1:])
        self._report(*self._said)

    def _load(self, place: Place, view: View) -> None:
        model_hash, layer, expert = place
        server, weights = self._models[model_hash]
        for attempt in range(TRIES):
            found = weights.expert(layer, expert, view, anew=attempt > 0)
            if (fault := _fault(weights, layer, expert, found)) is None:
                server.set_expert(layer, expert, found.gate_up, found.down)
                self._held.add(place)
                self._has_held = True
                faults.point("weights-loaded")
                return
            log.error("self_test_failed layer=%d expert=%d reason=%s", layer, expert, fault)
        raise WeightsBroken(
            f"expert {expert} of MoE layer {layer} failed its self-test {TRIES} times, with right bytes from every"
            f" source: {fault} See to this machine's memory and processor."
        )


def _fault(weights: Weights, layer: int, expert: int, expert_found: PackedExpert) -> str | None:
    try:
        found = answer_of(expert_found)
    except WeightsBroken as broken:
        return str(broken)
    needed = weights.packed.manifest.answer(layer, expert)
    if found == needed:
        return None
    return f"its row has SHA-256 {found.hex()[:16]}..., that of its packer had {needed.hex()[:16]}...."
