"""Where a step's microseconds go: the lanes of a decoder stamp the end of each phase, in native code."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from eaas.worker.decoder import Decoder

# By the numbers of eaas/native/decoder.h and, from 100 on, experts/native/client.h.
PHASES = {
    0: "begin", 1: "norm", 2: "project", 3: "attend", 4: "output", 5: "gate", 6: "dense", 7: "gather",
    8: "gate_up", 9: "down", 10: "combine", 11: "head", 12: "meet",
    100: "plan", 101: "send", 102: "away", 103: "reply", 104: "combine", 105: "meet in call",
}  # fmt: skip


class StepTrace:
    """Traces a decoder for the length of a `with`. About 30 ns a stamp.

    Phases are those of the decoder's lanes. "send" holds whatever an expert server computes on the same core as
    soon as it is rung, "reply" the rest of the wait for it; "meet" is waiting for the other lanes.
    """

    def __init__(self, decoder: Decoder, lanes: int, capacity: int = 1 << 15) -> None:
        """Args: capacity: stamps of each lane, some 20 for each layer of each step; more are dropped."""
        self._decoder = decoder
        self._stamps = np.zeros((lanes, capacity, 2), np.uint64)
        self._counts = np.zeros(lanes, np.uint32)

    def __enter__(self) -> StepTrace:
        self._decoder.trace(self._stamps, self._counts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._decoder.trace(None, None)

    def steps(self) -> list[list[dict[str, float]]]:
        """Microseconds by phase, of each lane, of each step so far; not while a step runs."""
        lanes = [self._lane(*pair) for pair in zip(self._stamps, self._counts.tolist(), strict=True)]
        return [list(step) for step in zip(*lanes, strict=True)]

    def _lane(self, stamps: np.ndarray, count: int) -> list[dict[str, float]]:
        steps: list[dict[str, float]] = []
        before_ns = 0
        for at_ns, phase in stamps[:count].tolist():
            name = PHASES[phase]
            if name == "begin":
                steps.append({})
            else:
                steps[-1][name] = steps[-1].get(name, 0.0) + (at_ns - before_ns) / 1e3
            before_ns = at_ns
        return steps
