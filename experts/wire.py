"""The experts layer's part of a frame: one request or reply, laid out; native/wire.h reads and writes it. Pure.

All fields little-endian:

    offset size  field
         0    4  magic "EXPT"
         4    2  version (2)
         6    2  kind: 1 request, 2 reply
         8    8  model hash: first 8 bytes of the checkpoint's fingerprint
        16    8  routing hash: of the routing list; a reply repeats the request's
        24    4  layer, counted over MoE layers
        28    4  rows
        32    4  pairs
        36    4  hidden
        40    2  dtype served: 0 float32, 1 bfloat16, 2 int8 (a request's rows: bfloat16 unless 0; a reply's: float32)
        42    2  status: 0 OK, 1 NOT_HELD, 2 INVALID; a request says 0
        44    2  reply lane: the client's doorbell to ring
        46    2  zero
        48    8  service time in ns (reply), 0 in a request
        56    8  digest of the rows (reply, OK), else 0; what it tells of: wire.h
    request: routing list of pairs x {row u16, expert u16, k_slot u16, zero u16}, padded to 64;
             then rows of hidden elements, each padded to 64 bytes
    reply:   pairs x hidden float32 in the order of the routing list; nothing where the status is not OK
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from experts.model import Dtype, ExpertShape

VERSION: Final = 2
HEADER_BYTES: Final = 64
PAIR_BYTES: Final = 8
MAX_ROWS: Final = 65535


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


def _pad(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64
