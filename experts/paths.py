"""The data path that a process uses: who moves and computes rows, and what windows it needs for that.

Clients, servers and their links decide who talks with whom; none of that depends on what carries the rows. A path is
the functions of client.h, server.h and window.h, those of the CPU's library or of a GPU's, and the numbers that go with
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experts import native
from experts.kernels import numerics_class, self_test
from experts.model import Dtype
from experts.wire import MAX_ROWS, VERSION, WireShape
from p2p.window import WindowLayout

# 2 bytes for the 2 operations of each row: 165 GFLOP/s over 30 GB/s make an activated expert about as dear as 5 rows.
CPU_ACTIVATION_ROWS = 5.0
# Larger frames of several servers collide at a client (incast).
CHUNK_BYTES = 512 << 10


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """One way to carry rows.

    Attributes:
        library: The functions of client.h, server.h and window.h.
        wire_version: Both sides must speak the same one.
        most_slot_bytes: Payload that a server grants a slot, at most.
        numerics_class: Name of its arithmetic in a dtype: equal names promise equal bits. ValueError where it has none.
        self_test: Compares it with the definition in a dtype; raises KernelsBroken.
        activation_rows: Rows of one expert that cost as much as reading its weights.
        window: Windows of a client, both ways, from what is agreed, most tokens of a call, and slots for each server.
            Raises ValueError where none fits.
    """

    library: Any
    wire_version: int
    most_slot_bytes: int
    numerics_class: Callable[[Dtype], str]
    self_test: Callable[[Dtype], None]
    activation_rows: float
    window: Callable[[WireShape, int, int], WindowLayout]


def cpu_path(library: Any = None) -> DataPath:
    """Rows go through host memory, in frames of at most CHUNK_BYTES.

    Args:
        library: None: the native library; NativeMissing where it is not built.
    """
    return DataPath(
        library=library or native.load(),
        wire_version=VERSION,
        most_slot_bytes=1 << 20,
        numerics_class=numerics_class,
        self_test=self_test,
        activation_rows=CPU_ACTIVATION_ROWS,
        window=chunked_window,
    )


def chunked_window(wire: WireShape, most_tokens: int, slots: int) -> WindowLayout:
    """Slots for the largest call, or for chunks of it.

    Raises:
        ValueError: one token does not fit in a slot, or no call may have so many.
    """
    top_k = wire.shape.top_k
    most = max(wire.reply_bytes(most_tokens * top_k), wire.request_bytes(most_tokens, most_tokens * top_k))
    layout = WindowLayout(slots=slots, payload_bytes=min(CHUNK_BYTES, most))
    one_token = max(wire.reply_bytes(top_k), wire.request_bytes(1, top_k))
    if one_token > layout.payload_bytes or not 1 <= most_tokens <= MAX_ROWS:
        raise ValueError(
            f"One token takes {one_token} bytes and a slot holds {layout.payload_bytes};"
            f" max_tokens is {most_tokens}, of 1 to {MAX_ROWS}. Fewer or smaller tokens are needed."
        )
    return layout
