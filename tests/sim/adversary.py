"""How badly a simulated network behaves, and what of it happened. Used by `tests.sim.network`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """How badly the network behaves. Rates are probabilities, times are (shortest, longest).

    A piece is lost, repeated or flipped, never two of these: their rates add up to at most 1.

    Args:
        delay_ns: Journey of a piece.
        pieces: A put is torn into at most so many, at any byte.
        late_rate: Of a put whose sender stalls in the middle: the rest comes `late_ns` later.
        late_ns: How late that is.
        repeat_rate: Of a piece or signal applied a second time, `late_ns` after the first.
        loss_rate: Of a piece or signal that never arrives.
        overtake_rate: Of a signal that does not wait for the puts before it, as it ought to.
        flip_rate: Of a piece or signal that arrives with one bit wrong.
        recycles: The memory of a closed window, zeroed, is that of the next one of its size that an endpoint
            of this name exports, as where a restarted process is given the same pages: late writes to the
            old window land in the new.
        notice_ns: From a death until `status` shows it; by then nothing of the dead is under way any more.

    Raises:
        ValueError: a rate is outside 0 to 1, or a time or number of pieces makes no sense.
    """

    delay_ns: tuple[int, int] = (1_000, 20_000)
    pieces: int = 3
    late_rate: float = 0.0
    late_ns: tuple[int, int] = (1_000_000, 50_000_000)
    repeat_rate: float = 0.0
    loss_rate: float = 0.0
    overtake_rate: float = 0.0
    flip_rate: float = 0.0
    recycles: bool = False
    notice_ns: int = 1_000_000

    def __post_init__(self) -> None:
        rates = (self.overtake_rate, self.late_rate, self.repeat_rate, self.loss_rate, self.flip_rate)
        times = (self.delay_ns, self.late_ns, (0, self.notice_ns))
        fates = self.loss_rate + self.repeat_rate + self.flip_rate
        if not all(0 <= rate <= 1 for rate in (*rates, fates)) or self.pieces < 1:
            raise ValueError(f"{self}: rates from 0 to 1 and at least one piece needed.")
        if any(not 0 <= shortest <= longest for shortest, longest in times):
            raise ValueError(f"{self}: times are (shortest, longest), from 0.")


@dataclass(kw_only=True)
class Counts:
    """What the network has done so far, in pieces and signals; `recycled` in windows."""

    applied: int = 0
    late: int = 0
    repeated: int = 0
    lost: int = 0
    overtook: int = 0
    flipped: int = 0
    recycled: int = 0
