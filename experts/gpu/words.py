"""The numbers of layout.py as kernels read them: `tl.load(job + JOB.STATE)`.

Triton lets a kernel read constants of modules, and does not look at them when it searches its cache on disk for a
kernel that was compiled before: so every kernel that reads any takes LAYOUT, a digest of them all, as a constant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import IntEnum
from types import ModuleType

import triton.language as tl

from experts import wire
from experts.gpu import layout, patience
from p2p.frame import ATTEMPT_LIMIT, PAYLOAD_OFFSET, SIGNAL_BYTES
from p2p.window import PAGE_BYTES

_digest = hashlib.sha256()


def _constants(name: str, numbers: Mapping[str, int] | type[IntEnum]) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}")
    values = numbers if isinstance(numbers, Mapping) else {word.name: int(word) for word in numbers}
    for word, value in values.items():
        setattr(module, word, tl.constexpr(value))
    _digest.update(f"{name} {sorted(values.items())}".encode())
    return module


CLIENT = _constants("CLIENT", layout.ClientWord)
SERVER = _constants("SERVER", layout.ServerWord)
PEER = _constants("PEER", layout.PeerWord)
ASKED = _constants("ASKED", layout.AskedWord)
JOB = _constants("JOB", layout.JobWord)
REPORT = _constants("REPORT", layout.ReportWord)
SEEN = _constants("SEEN", layout.SeenWord)
HOST = _constants("HOST", layout.HostWord)
COUNT = _constants("COUNT", layout.CountWord)
MARK = _constants("MARK", layout.Mark)
VERDICT = _constants("VERDICT", layout.Verdict)
STATUS = _constants("STATUS", wire.Status)
OUT = _constants("OUT", layout.RowsOut)
# Where things lie in a window, from the address of a slot: its signal, both headers, then the list or the answers.
SLOT = _constants(
    "SLOT",
    {
        "FIRST": PAGE_BYTES,  # from the window's address
        "HEADERS": SIGNAL_BYTES,
        "PAYLOAD": PAYLOAD_OFFSET,
        "LIST": PAYLOAD_OFFSET + wire.HEADER_BYTES,
    },
)
PATIENCE = _constants(
    "PATIENCE",
    {
        "SIZES": patience.SIZES,
        "LEAST": patience.LEAST_PAIRS,
        "STEPS": patience.STEPS,
        "EARNED": patience.HEDGE_EARNED,
        "COST": patience.HEDGE_COST,
        "MOST": patience.HEDGE_CALLS * patience.HEDGE_COST,
    },
)
WIRE = _constants(
    "WIRE",
    {
        "FRAME_WORD": layout.FRAME_WORD,
        "WORD": layout.WIRE_WORD,
        "REQUEST": wire.Kind.REQUEST,
        "REPLY": wire.Kind.REPLY,
        "REQUEST_WORD": layout.WIRE_WORD | wire.Kind.REQUEST << 48,
        "REPLY_WORD": layout.WIRE_WORD | wire.Kind.REPLY << 48,
        "BYTES": wire.HEADER_BYTES,
        "WORDS": wire.HEADER_BYTES // 4,  # u32
        "BLOCK_WORDS": 256,  # u32 words of a block of the frame's checksum
        "LISTED": layout.LISTED,
        "SCALE_GROUP": layout.SCALE_GROUP,
        "ANSWERS": int(layout.RowsOut.BF16),  # how answers travel
        "ATTEMPTS": ATTEMPT_LIMIT,
    },
)
# Which u64 of both headers holds a field, alone or in its lower bits: 0 to 7 are the frame's (p2p/native/frame.h).
_FRAME_WORDS = ("MAGIC", "INCARNATION", "SEQUENCE", "ATTEMPT", "REMAINING_NS", "SENDER", "COVERED", "CHECKSUM")
_WIRE_WORDS = ("magic", "model_hash", "routing_hash", "layer", "pairs", "dtype", "service_ns", "digest")
HEAD = _constants(
    "HEAD",
    {name: index for index, name in enumerate(_FRAME_WORDS)}
    | {f"WIRE_{name.upper()}": 8 + wire.OFFSETS[name] // 8 for name in _WIRE_WORDS},
)
LAYOUT = int.from_bytes(_digest.digest()[:7], "little")
