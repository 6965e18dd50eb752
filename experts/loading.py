"""Brings what a server holds to what the router wants of it: verified weights only, at low priority.

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
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.kernels import PackedExpert, WeightsBroken, answer_of
from experts.transfer import at_low_priority
from experts.weights import Weights, WeightsUnavailable
from p2p import faults
from router.view import View

log = logging.getLogger(__name__)

TRIES = 3
RETRY_S = 1.0
REPORT_S = 0.5
# Reading takes at most 1% of a core's time, and wakes it at most 20 times a second: 100 experts of 10 MB in 70 s.
SCRUB_SHARE, SCRUB_LEAST_S = 0.01, 0.05
# A model may give such rows by its nature: found sound, an expert is not read out of turn again for so long.
SOUND_S = 10.0


class Holder(Protocol):
    """What is loaded into: `experts.server.ExpertServer`."""

    def set_expert(
        self, layer: int, expert: int, gate_up: NDArray[np.uint8], down: NDArray[np.uint8]
    ) -> None: ...

    def clear_expert(self, layer: int, expert: int) -> None: ...

    def doubtful(self) -> tuple[int, int] | None: ...


class Loader:
    """Follows the targets of one member in a thread of its own.

    Args:
        name: Of this member.
        server: Where experts are set and cleared.
        weights: Where experts are had from.
        report: Told (bitmap of what is held, epoch of the View) whenever a target has been reached, and on the way
            there each REPORT_S.
        failed: Told why, when this process is better ended: an expert fails its self-test wherever its bytes are from,
            or no weights can be had and none are held.
    """

    def __init__(
        self,
        *,
        name: str,
        server: Holder,
        weights: Weights,
        report: Callable[[bytes, int], None],
        failed: Callable[[str], None],
    ) -> None:
        self._name, self._server, self._report, self._failed = name, server, report, failed
        self._weights = weights
        self._held: set[tuple[int, int]] = set()
        self._damaged = 0
        self._scrubbed = (-1, -1)
        self._scrub_s = 0.0  # when the next of those that are held is to be read, by time.monotonic()
        self._doubted: tuple[int, int] | None = None
        self._sound_s: dict[tuple[int, int], float] = {}  # when one that was doubted was found sound
        self._view: View | None = None
        self._said: tuple[bytes, int] | None = None
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="expert-loader", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def apply(self, view: View) -> None:
        """Follow this View's target from now on. Does not block."""
        with self._change:
            self._view = view
            self._change.notify()

    def holds(self, layer: int, expert: int) -> bool:
        """Whether this server serves an expert, whose bytes it verified."""
        return (layer, expert) in self._held

    @property
    def damaged(self) -> int:
        """How many experts were found damaged after they had been loaded."""
        return self._damaged

    def close(self) -> None:
        """Stop after the expert being loaded. Idempotent."""
        self._weights.stop()
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        at_low_priority()
        view: View | None = None
        failures, again_s = 0, math.inf
        try:
            while (found := self._next(view, again_s)) is not None:
                if found is view and self._held and (self._doubted or time.monotonic() >= self._scrub_s):
                    if not self._is_sound():
                        # Before it is had anew, which may take long.
                        self._say(found)
                        again_s = 0.0
                    continue
                view = found
                missing = self._reach(view)
                failures = failures + 1 if missing else 0
                again_s = time.monotonic() + RETRY_S if missing else math.inf
                if failures >= TRIES and not self._held and not self._closed:
                    # One that holds experts goes on: somebody else's last replica may be among them.
                    raise WeightsUnavailable(missing)
        except Exception as failure:
            log.exception("load_failed name=%s", self._name)
            self._failed(str(failure))
        finally:
            self._weights.rest()

    def _next(self, done: View | None, again_s: float) -> View | None:
        """Wait for a View after `done`, or until one of those held is to be read or `again_s`; None: closed."""
        self._doubted = None
        with self._change:
            while not self._closed and self._view is done and self._doubted is None:
                left_s = min(again_s, self._scrub_s if self._held else math.inf) - time.monotonic()
                if left_s <= 0:
                    break
                # None says of itself that it is doubted.
                wait_s = min(left_s, SCRUB_LEAST_S) if self._held else left_s
                self._change.wait(wait_s if wait_s < math.inf else None)
                self._doubted = self._doubtful() if self._held else None
            return None if self._closed else self._view

    def _doubtful(self) -> tuple[int, int] | None:
        while (pair := self._server.doubtful()) is not None:
            if pair in self._held and time.monotonic() - self._sound_s.get(pair, -SOUND_S) >= SOUND_S:
                return pair
        return None

    def _is_sound(self) -> bool:
        """Read the one that is in doubt, else the next of those that are held; if it is damaged, stop serving it."""
        doubted = self._doubted
        if doubted is None:
            held = sorted(self._held)
            self._scrubbed = next((pair for pair in held if pair > self._scrubbed), held[0])
        layer, expert = doubted or self._scrubbed
        began_s = time.thread_time()
        sound = self._weights.is_here(layer, expert)
        pause_s = max(SCRUB_LEAST_S, (time.thread_time() - began_s) * (1 / SCRUB_SHARE - 1))
        self._scrub_s = time.monotonic() + pause_s
        if not sound:
            # At once, whoever else holds it: an answer from these bytes would look like any other.
            self._server.clear_expert(layer, expert)
            self._held.discard((layer, expert))
            self._damaged += 1
            log.error("weights_damaged name=%s layer=%d expert=%d", self._name, layer, expert)
        elif doubted:
            self._sound_s[doubted] = time.monotonic()
        return sound

    def _superseded(self, view: View) -> bool:
        return self._closed or self._view is not view

    def _reach(self, view: View) -> str:
        """Load and drop what this View wants. Returns why experts are missing, empty where none is."""
        target = set(view.target_pairs(self._name))
        for layer, expert in sorted(self._held - target):
            self._server.clear_expert(layer, expert)
            self._held.discard((layer, expert))
        began_s = said_s = time.monotonic()
        new, missing = sorted(target - self._held), ""
        for layer, expert in new:
            try:
                self._load(layer, expert, view)
            except WeightsUnavailable as unavailable:
                missing = str(unavailable)
                log.warning("weights_unavailable reason=%s", missing)
            if self._superseded(view):
                return missing
            if time.monotonic() - said_s > REPORT_S:
                said_s = time.monotonic()
                self._say(view)
        self._weights.rest()
        # A View that changes nothing here is not worth a message; its target was reached before.
        if self._said is None or self._said[0] != view.bitmap(sorted(self._held)) or new:
            log.info(
                "loaded experts=%d new=%d epoch=%d load_s=%.3f",
                len(self._held),
                len(new),
                view.epoch,
                time.monotonic() - began_s,
            )
        self._say(view)
        return missing

    def _say(self, view: View) -> None:
        self._said = (view.bitmap(sorted(self._held)), view.epoch)
        self._report(*self._said)

    def _load(self, layer: int, expert: int, view: View) -> None:
        for attempt in range(TRIES):
            weights = self._weights.expert(layer, expert, view, anew=attempt > 0)
            if (fault := self._fault(layer, expert, weights)) is None:
                self._server.set_expert(layer, expert, weights.gate_up, weights.down)
                self._held.add((layer, expert))
                faults.point("weights-loaded")
                return
            log.error("self_test_failed layer=%d expert=%d reason=%s", layer, expert, fault)
        raise WeightsBroken(
            f"expert {expert} of MoE layer {layer} failed its self-test {TRIES} times, with right bytes from every"
            f" source: {fault} See to this machine's memory and processor."
        )

    def _fault(self, layer: int, expert: int, weights: PackedExpert) -> str | None:
        try:
            found = answer_of(weights)
        except WeightsBroken as broken:
            return str(broken)
        needed = self._weights.packed.manifest.answer(layer, expert)
        if found == needed:
            return None
        return f"its row has SHA-256 {found.hex()[:16]}..., that of its packer had {needed.hex()[:16]}...."
