"""Where everything lies on the GPU data path: frames in windows, words of tables. Pure; every number is here once.

Slots and the frame's header are those of p2p/native/frame.h, in windows of p2p/window.py: one request window per client
at the server, one reply window per server at the client, both of `slots` slots, a request's reply in the slot of equal
number. A frame's flags have bit 0 set (rows are sealed one by one) and its reserved field holds how many bytes of the
payload the checksum covers; p2p/device.py says what a row's seal is. Nothing is packed together: the place of a row,
a pair and an answer follows from its token's number, so that no program waits for another to know where to write.

Payload: the header of experts/wire.py in its version 3, then::

    offset   size         request                                       reply
        64   4 * P        routing list, P = capacity * top_k words      capacity * top_k answers of `answer_stride`
      rows_offset         capacity rows of `row_stride`

A word of the routing list stands at token * top_k + k_slot: 0, nothing is asked, or LISTED + the expert. Covered are,
in a request, the header and rows * top_k words of the list; in a reply, the header. The length is that of the header
where a reply is not OK, else up to the end of the last row, sent or not. An answer stands where its pair is listed.

Row: hidden bf16, or hidden e4m3 and hidden / 128 float32 scales; then its seal (8 bytes) at `row_seal`, keyed by the
token's number. Answer: hidden bf16, then its seal at `answer_seal`, keyed by token * top_k + k_slot. Rows
and answers begin at multiples of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from experts import wire
from experts.backend import LinkRefused
from p2p.frame import MAGIC, VERSION
from p2p.window import WindowLayout

FLAG_SEALED_ROWS: Final = 1
LISTED: Final = 1 << 16
SCALE_GROUP: Final = 128  # columns that share a scale
ALIGNMENT: Final = 64
TOP_K_LIMIT: Final = 32
ROWS_LIMIT: Final = 4096

# First u64 words of the two headers, less the kind.
FRAME_WORD: Final = MAGIC | VERSION << 32 | FLAG_SEALED_ROWS << 48
WIRE_WORD: Final = wire.MAGIC | wire.SEALED_VERSION << 32


class Verdict(IntEnum):
    """A client's, on what became of a request."""

    NONE = 0  # nothing was asked
    WAITING = 1
    ARRIVED = 2
    REFUSED = 3  # the reply is sound and says so
    CORRUPT = 4
    MISSING = 5


class RowsOut(IntEnum):
    """How rows travel to a server."""

    BF16 = 1
    E4M3 = 2


class ClientWord(IntEnum):
    """Words of a client's control block, int64."""

    COPY = 0  # which copy of peers and routes is in use
    STEP = 1  # number of the step that was begun last
    BUDGET_NS = 2  # of that step
    RUN_NS = 3  # of it, for one run; all three are written by one copy
    STEP_SEEN = 10  # number of the step that has a deadline
    DEADLINE_NS = 4  # by the device's clock
    END_NS = 5  # when the step waits no longer, so that there is time to run it again
    CLOCK = 6  # the interpreter's
    ARRIVALS = 7  # programs of a dispatch that are done
    INCARNATION = 8  # the client's own
    CREDIT = 9  # for hedges, in thousandths of a pair
    WORDS = 16


class PeerWord(IntEnum):
    """Words of one server's row in a client's table, and of one client's row in a server's."""

    REQUEST = 0  # address of the request window here
    REPLY = 1  # address of the reply window here
    INCARNATION = 2  # the peer's
    LIVE = 3
    WORDS = 4


class AskedWord(IntEnum):
    """Words of what a call asked of one server in one round."""

    VERDICT = 0
    SLOT = 1
    SEQUENCE = 2
    CHECKSUM = 3
    REPLY = 4  # address of the reply's slot
    PAIRS = 5
    INCARNATION = 6  # the server's
    SENT_NS = 7
    TOOK_NS = 8  # from there until the reply was seen
    WORDS = 9


class ReportWord(IntEnum):
    """Words of a step's report; a flag word per server (1 << Verdict) and one per token (Mark) follow."""

    LOST = 0  # whether a pair has no answer
    CORRUPT = 1  # whether an answer's seal was wrong
    REDISPATCHED = 2  # pairs sent again
    RETIRED = 3  # slots put aside
    WORDS = 4


class Mark(IntEnum):
    """What is wrong with a token's sum."""

    LOST = 1
    CORRUPT = 2


class JobWord(IntEnum):
    """Words of what a server's pass took from one client."""

    STATE = 0  # 1: there is a request
    STATUS = 1
    REQUEST = 2  # address of the request's slot
    REPLY = 3  # address of the reply's slot
    SEQUENCE = 4
    ATTEMPT = 5
    ROWS = 6
    PAIRS = 7
    LAYER = 8
    CHECKSUM = 9
    CLIENT = 10  # the client's incarnation
    PICKED_NS = 11
    ANSWERED = 12  # pairs that are done
    BAD = 13  # 1: a row's seal is wrong
    MARK = 14  # address of the word that says which sequence was answered last
    WORDS = 16


class ServerWord(IntEnum):
    """Words of a server's control block, int64."""

    STOP = 0
    FOUND = 1  # pass in which a client's request was found
    PASS = 2  # passes done
    ARRIVALS = 3  # programs of `reply` that are done
    CLOCK = 4  # the interpreter's
    HOST = 5  # address of the host's words
    INCARNATION = 6  # the server's own
    LEASE_NS = 7  # when the lease ends, by the device's clock
    WORDS = 16


class SeenWord(IntEnum):
    """Words of what a client saw of one server: sound replies, pairs in them, and how long it says they took."""

    REPLIES = 0
    PAIRS = 1
    SERVICE_NS = 2
    WORDS = 4


class HostWord(IntEnum):
    """Words in the host's memory that a server's passes write."""

    PASSES = 0  # done
    CLOCK_NS = 1  # the device's clock as the last one ended
    COUNTS = 8
    WORDS = 16


class CountWord(IntEnum):
    """A server's counters."""

    REQUESTS = 0
    NOT_HELD = 1
    INVALID = 2
    PAIRS = 3
    ROWS = 4
    EXPERTS = 5  # activated: once in each pass that was asked for them
    BUSY_NS = 6  # from a pass's first request to its end
    BATCHES = 7  # passes with a request
    WORDS = 8


def aligned(nbytes: int) -> int:
    """Up to the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class ExchangeShape:
    """What a client and its servers agree on.

    Args:
        layers: MoE layers.
        experts: Per layer.
        hidden: Columns; a multiple of 128.
        top_k: Pairs of a token.
        capacity: Most rows of a step, all of which one frame holds.
        slots: Per client and server. One is in use; a second takes what is sent again.
        rows_out: Their form on the way out; answers are bf16.
        model_hash: As in experts/wire.py, taken as a signed word.

    Raises:
        ValueError: a number is out of range.
    """

    layers: int
    experts: int
    hidden: int
    top_k: int
    capacity: int
    slots: int = 2
    rows_out: RowsOut = RowsOut.BF16
    model_hash: int = 0

    def __post_init__(self) -> None:
        limits = {
            "layers": (1, 1 << 16),
            "experts": (1, LISTED),
            "hidden": (SCALE_GROUP, 1 << 16),
            "top_k": (1, TOP_K_LIMIT),
            "capacity": (1, ROWS_LIMIT),
            "slots": (1, 32),
        }
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; {least} to {most} is possible.")
        if self.hidden % SCALE_GROUP:
            raise ValueError(f"hidden is {self.hidden}; a multiple of {SCALE_GROUP} is needed.")

    @property
    def row_words(self) -> int:
        """u32 words of a row before its seal."""
        if self.rows_out is RowsOut.BF16:
            return self.hidden // 2
        return self.hidden // 4 + self.hidden // SCALE_GROUP

    @property
    def row_seal(self) -> int:
        """Offset of a row's seal."""
        return -(-self.row_words // 2) * 8

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return aligned(self.row_seal + 8)

    @property
    def answer_words(self) -> int:
        """u32 words of an answer before its seal."""
        return self.hidden // 2

    @property
    def answer_seal(self) -> int:
        """Offset of an answer's seal."""
        return self.answer_words * 4

    @property
    def answer_stride(self) -> int:
        """Bytes from one answer to the next."""
        return aligned(self.answer_seal + 8)

    @property
    def pairs(self) -> int:
        """Of one frame, at most."""
        return self.capacity * self.top_k

    @property
    def rows_offset(self) -> int:
        """Offset of a request's rows in its payload."""
        return wire.HEADER_BYTES + aligned(4 * self.pairs)

    @property
    def request_window(self) -> WindowLayout:
        """The window at the server that one client writes."""
        payload = self.rows_offset + self.capacity * self.row_stride
        return WindowLayout(slots=self.slots, payload_bytes=payload)

    @property
    def reply_window(self) -> WindowLayout:
        """The window at the client that one server writes."""
        return WindowLayout(slots=self.slots, payload_bytes=wire.HEADER_BYTES + self.pairs * self.answer_stride)

    def require_windows(self, slots: int, *, request_bytes: int, reply_bytes: int) -> None:
        """Whether windows have room for all that kernels touch, who go by this shape alone.

        Raises:
            LinkRefused: they have not.
        """
        needed = (self.slots, self.request_window.nbytes, self.reply_window.nbytes)
        if slots != needed[0] or request_bytes < needed[1] or reply_bytes < needed[2]:
            raise LinkRefused(
                f"windows of {slots} slots, {request_bytes} and {reply_bytes} bytes; {needed[0]} slots,"
                f" {needed[1]} and {needed[2]} bytes are needed."
            )

    def constants(self) -> dict[str, int]:
        """What the kernels take as constants, by their names."""
        return {
            "EXPERTS": self.experts,
            "LAYERS": self.layers,
            "HIDDEN": self.hidden,
            "K": self.top_k,
            "CAPACITY": self.capacity,
            "SLOTS": self.slots,
            "ROWS_OUT": int(self.rows_out),
            "MODEL_HASH": self.model_hash,
            "ROW_SEAL": self.row_seal,
            "ROW_STRIDE": self.row_stride,
            "ROWS_OFFSET": self.rows_offset,
            "ANSWER_SEAL": self.answer_seal,
            "ANSWER_STRIDE": self.answer_stride,
            "REQUEST_STRIDE": self.request_window.stride_bytes,
            "REPLY_STRIDE": self.reply_window.stride_bytes,
        }


def row_warps(words: int) -> int:
    """Warps of a program that holds one row of `words` u32 words in registers: at least 4 words a thread, at most 16.

    No fewer words than threads, so that each word is one thread's.
    """
    return max(1, min(16, power_of_two(words) // 128))


def constants_of(names: Iterable[str], shape: ExchangeShape, own: dict[str, int]) -> dict[str, int]:
    """Those of the shape's constants, and of these, that a kernel with arguments of these names takes."""
    known = shape.constants() | own
    return {name: known[name] for name in names if name in known}
