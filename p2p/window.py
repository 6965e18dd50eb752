"""How a window is laid out: one header page, then slots. native/window.h holds the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2p.frame import PAYLOAD_LIMIT, PAYLOAD_OFFSET

PAGE_BYTES: Final = 4096
SLOTS_LIMIT: Final = 4096


@dataclass(frozen=True, kw_only=True)
class WindowLayout:
    """Slots of one payload capacity behind a header page.

    Raises:
        ValueError: slots not in 1..4096, or capacity not in 1..2^30.
    """

    slots: int
    payload_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= SLOTS_LIMIT:
            raise ValueError(f"{self.slots} slots asked for; choose 1 to {SLOTS_LIMIT}.")
        if not 1 <= self.payload_bytes <= PAYLOAD_LIMIT:
            raise ValueError(f"{self.payload_bytes} payload bytes asked for; choose 1 to {PAYLOAD_LIMIT}.")

    @property
    def stride_bytes(self) -> int:
        """From one slot to the next: signal line, header and capacity, in whole pages."""
        return -(-(PAYLOAD_OFFSET + self.payload_bytes) // PAGE_BYTES) * PAGE_BYTES

    @property
    def nbytes(self) -> int:
        """Of the whole window."""
        return PAGE_BYTES + self.slots * self.stride_bytes

    def slot_offset(self, index: int) -> int:
        """Offset of slot `index`, which is where its signal word lies.

        Raises:
            IndexError: there is no such slot.
        """
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} asked for; this window has slots 0 to {self.slots - 1}.")
        return PAGE_BYTES + index * self.stride_bytes
