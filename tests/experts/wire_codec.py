"""The expert protocol's messages by numpy: the reference that native code is compared with, and that tests speak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts import wire as spec
from experts.model import Dtype
from experts.wire import HEADER_BYTES, MAGIC, MAX_ROWS, VERSION, Kind, Status, WireShape

HEADER = np.dtype([(name, f"<u{nbytes}") for name, nbytes in spec.HEADER.items()])
PAIR = np.dtype([(name, f"<u{nbytes}") for name, nbytes in spec.PAIR.items()])

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_COLUMN_KEY = np.uint32(0x9E3779B1)


class WireInvalid(ValueError):
    """The bytes are not a message of this model; the text says what was found and what is needed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rows for one layer's experts."""

    layer: int
    rows: NDArray[Any]  # [rows, hidden], float32, or bfloat16 as uint16
    pairs: NDArray[np.void]  # [pairs] of PAIR
    reply_lane: int = 0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to a request."""

    status: Status
    rows: NDArray[np.float32]  # [pairs, hidden]; [0, hidden] where the status is not OK
    service_ns: int = 0
    digest: int | None = None  # of the rows as they were computed; None: of the rows as they are


def routing_hash(pairs: NDArray[np.void]) -> int:
    """Hash of a routing list; order matters."""
    words = np.ascontiguousarray(pairs).view("<u8")
    mixed = (words + (np.arange(len(words), dtype=np.uint64) + np.uint64(1)) * _STEP) * _MIX
    mixed ^= mixed >> np.uint64(32)
    return (len(words) + int(np.sum(mixed * _MIX, dtype=np.uint64))) % (1 << 64)


def rows_digest(rows: NDArray[np.float32]) -> int:
    """Digest of a reply's rows, [pairs, hidden], in their order."""
    keys = (np.arange(rows.shape[1], dtype=np.uint32) * _COLUMN_KEY) | np.uint32(1)
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    total = 0
    for folded in (bits.astype(np.uint64) * keys.astype(np.uint64)).sum(axis=1, dtype=np.uint64):
        total = (total ^ int(folded)) * int(_MIX) % (1 << 64)
        total ^= total >> 32
    return total


def encode_request(wire: WireShape, request: Request) -> bytes:
    """The bytes of a request."""
    count, pairs = len(request.rows), len(request.pairs)
    payload = np.zeros(wire.request_bytes(count, pairs), np.uint8)
    header = _header(wire, Kind.REQUEST, request.layer, count, request.pairs)
    header["reply_lane"] = request.reply_lane
    payload[:HEADER_BYTES] = header.view(np.uint8)
    payload[HEADER_BYTES : HEADER_BYTES + pairs * PAIR.itemsize] = np.ascontiguousarray(request.pairs).view(np.uint8)
    rows = payload[HEADER_BYTES + _pad(pairs * PAIR.itemsize) :].reshape(count, wire.row_bytes)
    rows[:, : wire.shape.hidden * wire.dtype.nbytes] = np.ascontiguousarray(request.rows).view(np.uint8)
    return payload.tobytes()


def decode_request(wire: WireShape, payload: bytes, reply_capacity: int) -> Request:
    """Check and read a request.

    Args:
        payload: Private copy of the frame's payload.
        reply_capacity: Bytes that fit in the reply's slot.

    Raises:
        WireInvalid: any field or size is wrong.
    """
    header = _read_header(wire, payload, Kind.REQUEST)
    _need(int(header["status"]) == 0, "status", header["status"], 0)
    _need(int(header["service_ns"]) == 0, "service time", header["service_ns"], 0)
    _need(int(header["model_hash"]) == wire.model_hash, "model hash", header["model_hash"], wire.model_hash)
    _need(int(header["layer"]) < wire.shape.layers, "layer", header["layer"], f"below {wire.shape.layers}")
    _need(int(header["hidden"]) == wire.shape.hidden, "hidden", header["hidden"], wire.shape.hidden)
    _need(int(header["dtype"]) == wire.dtype, "dtype", header["dtype"], int(wire.dtype))
    rows, pairs = int(header["rows"]), int(header["pairs"])
    _need(1 <= rows <= MAX_ROWS, "rows", rows, f"1 to {MAX_ROWS}")
    _need(1 <= pairs <= rows * wire.shape.top_k, "pairs", pairs, f"1 to {rows * wire.shape.top_k}")
    _need(
        len(payload) == wire.request_bytes(rows, pairs),
        "length",
        len(payload),
        wire.request_bytes(rows, pairs),
    )
    _need(
        wire.reply_bytes(pairs) <= reply_capacity,
        "reply bytes",
        wire.reply_bytes(pairs),
        f"to {reply_capacity}",
    )
    listed = np.frombuffer(payload, PAIR, pairs, HEADER_BYTES)
    fits = (listed["row"] < rows) & (listed["expert"] < wire.shape.experts)
    fits &= (listed["k_slot"] < wire.shape.top_k) & (listed["zero"] == 0)
    _need(bool(fits.all()), "routing entries in range", int(fits.sum()), pairs)
    found = routing_hash(listed)
    _need(int(header["routing_hash"]) == found, "routing hash", header["routing_hash"], found)
    raw = np.frombuffer(payload, np.uint8, offset=HEADER_BYTES + _pad(pairs * PAIR.itemsize))
    raw = raw.reshape(rows, wire.row_bytes)[:, : wire.shape.hidden * wire.dtype.nbytes]
    element = np.float32 if wire.dtype is Dtype.FLOAT32 else np.uint16
    return Request(
        layer=int(header["layer"]),
        rows=np.ascontiguousarray(raw).view(element),
        pairs=listed,
        reply_lane=int(header["reply_lane"]),
    )


def encode_reply(wire: WireShape, request: Request | None, reply: Reply) -> bytes:
    """The bytes of a reply; `request` None: it could not be read, the reply is a bare INVALID."""
    if request is None:
        header = np.zeros((), HEADER)
        header["magic"], header["version"], header["kind"] = MAGIC, VERSION, Kind.REPLY
        header["status"] = Status.INVALID
        return header.tobytes()
    header = _header(wire, Kind.REPLY, request.layer, len(request.rows), request.pairs)
    header["status"], header["service_ns"] = reply.status, reply.service_ns
    header["reply_lane"] = request.reply_lane
    if reply.status is Status.OK:
        header["digest"] = rows_digest(reply.rows) if reply.digest is None else reply.digest
    return header.tobytes() + np.ascontiguousarray(reply.rows, np.float32).tobytes()


def decode_reply(wire: WireShape, payload: bytes, request: Request) -> Reply:
    """Check and read the reply to `request`.

    Raises:
        WireInvalid: it is not, or is damaged.
    """
    header = _read_header(wire, payload, Kind.REPLY)
    nothing = np.empty((0, wire.shape.hidden), np.float32)
    if int(header["status"]) == Status.INVALID:
        _need(len(payload) == HEADER_BYTES, "length", len(payload), HEADER_BYTES)
        return Reply(status=Status.INVALID, rows=nothing)
    wanted = _header(wire, Kind.REPLY, request.layer, len(request.rows), request.pairs)
    for field in ("model_hash", "routing_hash", "layer", "rows", "pairs", "hidden", "dtype"):
        _need(header[field] == wanted[field], field, header[field], wanted[field])
    service_ns = int(header["service_ns"])
    if int(header["status"]) == Status.NOT_HELD:
        _need(len(payload) == HEADER_BYTES, "length", len(payload), HEADER_BYTES)
        return Reply(status=Status.NOT_HELD, rows=nothing, service_ns=service_ns)
    _need(int(header["status"]) == Status.OK, "status", header["status"], "0 to 2")
    needed = wire.reply_bytes(len(request.pairs))
    _need(len(payload) == needed, "length", len(payload), needed)
    rows = np.frombuffer(payload, "<f4", offset=HEADER_BYTES).reshape(-1, wire.shape.hidden)
    digest = rows_digest(rows)
    _need(int(header["digest"]) == digest, "digest", header["digest"], digest)
    return Reply(status=Status.OK, rows=rows, service_ns=service_ns, digest=digest)


def _pad(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


def _header(wire: WireShape, kind: Kind, layer: int, rows: int, pairs: NDArray[np.void]) -> NDArray[np.void]:
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["kind"] = MAGIC, VERSION, kind
    header["model_hash"], header["routing_hash"] = wire.model_hash, routing_hash(pairs)
    header["layer"], header["rows"], header["pairs"] = layer, rows, len(pairs)
    header["hidden"], header["dtype"] = wire.shape.hidden, wire.dtype
    return header


def _read_header(wire: WireShape, payload: bytes, kind: Kind) -> np.void:
    _need(len(payload) >= HEADER_BYTES, "length", len(payload), f"{HEADER_BYTES} or more")
    header = np.frombuffer(payload, HEADER, 1)[0]
    _need(int(header["magic"]) == MAGIC, "magic", hex(header["magic"]), hex(MAGIC))
    _need(int(header["version"]) == VERSION, "version", header["version"], VERSION)
    _need(int(header["kind"]) == kind, "kind", header["kind"], int(kind))
    _need(not header["zero0"], "reserved bytes", "not zero", 0)
    answers = kind is Kind.REPLY and int(header["status"]) == Status.OK
    _need(answers or not header["digest"], "digest", header["digest"], 0)
    return header


def _need(holds: bool, what: str, found: object, needed: object) -> None:
    if not holds:
        raise WireInvalid(f"{what}: found {found}, needed {needed}. The peer speaks of another model or call; drop it.")
