"""The experts layer's part of a frame: one request or reply. The one description of it, for CPUs and GPUs. Pure.

All fields little-endian. Where the two forms differ, rows packed (version 2: host memory, native code) stand before
rows sealed one by one (version 3: device memory, kernels; experts/gpu/layout.py has their places)::

    offset size  field
         0    4  magic "EXPT"
         4    2  version
         6    2  kind: 1 request, 2 reply
         8    8  model hash: first 8 bytes of the checkpoint's fingerprint
        16    8  routing hash: of the routing list; a reply repeats the request's | a request says 0, a reply repeats
                 the checksum of the request's frame
        24    4  layer, counted over MoE layers
        28    4  rows | tokens of this call, listed or not
        32    4  pairs
        36    4  hidden
        40    2  dtype served, by experts.model.Dtype (a request's rows: bfloat16 unless 0; a reply's: float32)
                 | form of the rows: 1 bf16, 2 e4m3 (a request's), 2 float32 (a reply's)
        42    2  status: 0 OK, 1 NOT_HELD, 2 INVALID; a request says 0
        44    2  reply lane: the client's doorbell to ring | 0
        46    2  zero
        48    8  service time in ns (reply), 0 in a request
        56    8  digest of the rows (reply, OK), else 0; what it tells of: wire.h | 0
    request: routing list of pairs x {row u16, expert u16, k_slot u16, zero u16}, padded to 64;
             then rows of hidden elements, each padded to 64 bytes
    reply:   pairs x hidden float32 in the order of the routing list; nothing where the status is not OK

`python -m experts.wire` prints what native code has of it: the build writes native/build/wire_format.h so. Kernels
have their offsets from here too (experts/gpu/words.py). Nothing but the standard library is imported: it is built
before anything is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from experts.model import Dtype, ExpertShape

MAGIC: Final = 0x54505845
VERSION: Final = 2  # rows packed
SEALED_VERSION: Final = 3  # rows sealed one by one
MAX_ROWS: Final = 65535

# Bytes of each field.
HEADER: Final[Mapping[str, int]] = {
    "magic": 4,
    "version": 2,
    "kind": 2,
    "model_hash": 8,
    "routing_hash": 8,
    "layer": 4,
    "rows": 4,
    "pairs": 4,
    "hidden": 4,
    "dtype": 2,
    "status": 2,
    "reply_lane": 2,
    "zero0": 2,
    "service_ns": 8,
    "digest": 8,
}
PAIR: Final[Mapping[str, int]] = {"row": 2, "expert": 2, "k_slot": 2, "zero": 2}
OFFSETS: Final = dict(zip(HEADER, accumulate(HEADER.values(), initial=0), strict=False))
HEADER_BYTES: Final = sum(HEADER.values())
PAIR_BYTES: Final = sum(PAIR.values())


class Kind(IntEnum):
    """Which way a message goes."""

    REQUEST = 1
    REPLY = 2


class Status(IntEnum):
    """A server's verdict on a request."""

    OK = 0
    NOT_HELD = 1
    INVALID = 2


@dataclass(frozen=True, kw_only=True)
class WireShape:
    """What both ends agree on before the first request."""

    shape: ExpertShape
    dtype: Dtype
    model_hash: int  # u64

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a request."""
        return _pad(self.shape.hidden * self.dtype.nbytes)

    def request_bytes(self, rows: int, pairs: int) -> int:
        """Bytes of a request."""
        return HEADER_BYTES + _pad(pairs * PAIR_BYTES) + rows * self.row_bytes

    def reply_bytes(self, pairs: int) -> int:
        """Bytes of a reply whose status is OK."""
        return HEADER_BYTES + pairs * self.shape.hidden * 4


def model_hash_of(fingerprint: str) -> int:
    """The u64 that travels for a checkpoint's fingerprint (hex): its first 8 bytes, little-endian."""
    return int.from_bytes(bytes.fromhex(fingerprint[:16]), "little")


def native_header() -> str:
    """The text of wire_format.h."""
    numbers = {"WIRE_MAGIC": (4, MAGIC), "WIRE_VERSION": (2, VERSION), "MAX_ROWS": (4, MAX_ROWS)}
    numbers |= {f"WIRE_{kind.name}": (2, kind.value) for kind in Kind}
    numbers |= {f"STATUS_{status.name}": (2, status.value) for status in Status}
    lines = ["// Written by `python -m experts.wire`, which describes every field.", "#pragma once"]
    lines += ["#include <cstdint>", "", "namespace experts {", ""]
    lines += [f"constexpr {_uint(nbytes)} {name} = {value};" for name, (nbytes, value) in numbers.items()]
    for name, fields in (("WireHeader", HEADER), ("WirePair", PAIR)):
        lines += ["", f"struct {name} {{", *(f"    {_uint(size)} {field};" for field, size in fields.items()), "};"]
        lines += [f"static_assert(sizeof({name}) == {sum(fields.values())});"]
    return "\n".join([*lines, "", "}  // namespace experts", ""])


def _uint(nbytes: int) -> str:
    return f"uint{8 * nbytes}_t"


def _pad(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


if __name__ == "__main__":
    print(native_header(), end="")
