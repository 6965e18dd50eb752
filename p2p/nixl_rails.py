"""Rails of the nixl transport: how they are used and given up, and what each has done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from p2p import nixl_native

PIECE_LIMIT_BYTES: Final = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class RailConfig:
    """How rails are used and given up.

    Args:
        silence_ms: A rail that says nothing for so long, with writes under way, is doubted and then probed. TCP's
            own first retransmission comes after 200 ms; a switch costs nothing but that rail.
        grace_ms: Time for the probe's answer.
        piece_bytes: A write is cut into pieces of so many, at most 512 KiB: incast hurts only above that.
        reopen_first_s: From giving up a rail to trying it again.
        reopen_last_s: The same after many failures, doubled each time in between.

    Raises:
        ValueError: a value is out of its bounds.
    """

    silence_ms: float = 100.0
    grace_ms: float = 20.0
    piece_bytes: int = 512 * 1024
    reopen_first_s: float = 0.5
    reopen_last_s: float = 30.0

    def __post_init__(self) -> None:
        times = (self.silence_ms, self.grace_ms, self.reopen_first_s, self.reopen_last_s)
        if not all(math.isfinite(value) and value > 0 for value in times):
            raise ValueError(f"times of {times} given; each has to be positive.")
        if self.reopen_last_s < self.reopen_first_s:
            raise ValueError(
                f"reopen_last_s {self.reopen_last_s} is under reopen_first_s {self.reopen_first_s}; raise it."
            )
        if not 4096 <= self.piece_bytes <= PIECE_LIMIT_BYTES:
            raise ValueError(f"pieces of {self.piece_bytes} bytes; 4096 to {PIECE_LIMIT_BYTES} needed.")

    def native(self) -> nixl_native.ChannelConfig:
        """As native code reads it."""
        return nixl_native.ChannelConfig(
            piece_bytes=self.piece_bytes,
            silence_ns=int(self.silence_ms * 1e6),
            grace_ns=int(self.grace_ms * 1e6),
            reopen_first_ns=int(self.reopen_first_s * 1e9),
            reopen_last_ns=int(self.reopen_last_s * 1e9),
        )


@dataclass(frozen=True, kw_only=True)
class RailCounts:
    """What one rail of a peer has done, and does."""

    live: bool
    generation: int
    in_flight_bytes: int
    bytes_per_s: int
    sent_bytes: int
    switch_ns: int
