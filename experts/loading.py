"""Brings what a server holds to what the router wants of it: verified weights only, at low priority."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from experts.kernels import ffn, to_dtype
from experts.pack import PackCorrupt, PackedExperts
from router.view import View

log = logging.getLogger(__name__)

LOADER_NICE = 10


class WeightsBroken(RuntimeError):
    """An expert's weights do not give finite rows."""


class Holder(Protocol):
    """What is loaded into: `experts.server.ExpertServer`."""

    def set_expert(self, layer: int, expert: int, gate_up: int, down: int) -> None: ...

    def clear_expert(self, layer: int, expert: int) -> None: ...


class Loader:
    """Follows the targets of one member in a thread of its own.

    Args:
        name: Of this member.
        server: Where experts are set and cleared.
        packed: Maps the packed experts; called with True to have a corrupt cache rebuilt.
        report: Told (bitmap of what is held, epoch of the View) whenever a target has been reached.
        failed: Told why, when the target cannot be reached.
    """

    def __init__(
        self,
        *,
        name: str,
        server: Holder,
        packed: Callable[[bool], PackedExperts],
        report: Callable[[bytes, int], None],
        failed: Callable[[str], None],
    ) -> None:
        self._name, self._server, self._report, self._failed = name, server, report, failed
        self._open = packed
        self._packed = packed(False)
        # Experts set from a map that was replaced are still read there.
        self._maps = [self._packed]
        self._held: set[tuple[int, int]] = set()
        self._view: View | None = None
        self._reported: tuple[bytes, int] | None = None
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

    def close(self) -> None:
        """Stop after the expert being loaded. Idempotent."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        # Rows come first. Not SCHED_IDLE: a thread that may starve must never hold the interpreter's lock.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADER_NICE)
        view: View | None = None
        try:
            while (view := self._next(view)) is not None:
                self._reach(view)
        except Exception as failure:
            log.exception("load_failed name=%s", self._name)
            self._failed(str(failure))

    def _next(self, done: View | None) -> View | None:
        with self._change:
            self._change.wait_for(lambda: self._closed or self._view is not done)
            return None if self._closed else self._view

    def _superseded(self, view: View) -> bool:
        return self._closed or self._view is not view

    def _reach(self, view: View) -> None:
        target = set(view.target_pairs(self._name))
        for layer, expert in sorted(self._held - target):
            self._server.clear_expert(layer, expert)
            self._held.discard((layer, expert))
        began_s, new = time.monotonic(), sorted(target - self._held)
        for layer, expert in new:
            self._load(layer, expert)
            if self._superseded(view):
                return
        held = view.bitmap(sorted(self._held))
        # A View that changes nothing here is not worth a message; its target was reached before.
        if self._reported is None or self._reported[0] != held or new:
            log.info(
                "loaded experts=%d new=%d epoch=%d load_s=%.3f",
                len(self._held),
                len(new),
                view.epoch,
                time.monotonic() - began_s,
            )
        self._reported = (held, view.epoch)
        self._report(held, view.epoch)

    def _load(self, layer: int, expert: int) -> None:
        try:
            self._packed.verify(layer, expert)
        except PackCorrupt as corrupt:
            log.error("pack_corrupt layer=%d expert=%d reason=%s", layer, expert, corrupt)
            self._packed = self._open(True)
            self._maps.append(self._packed)
            self._packed.verify(layer, expert)
        weights = self._packed.expert(layer, expert)
        probe = to_dtype(np.linspace(-1, 1, weights.hidden, dtype=np.float32)[None], weights.dtype)
        if not np.isfinite(ffn(weights, probe)).all():
            raise WeightsBroken(
                f"expert {expert} of MoE layer {layer} gives rows that are not finite. Check the checkpoint."
            )
        address, _ = self._packed.blob(layer, expert)
        self._server.set_expert(layer, expert, address, address + self._packed.layout.gate_up_bytes)
        self._held.add((layer, expert))
