"""Messages between a gateway and an attention worker, and how they are framed on a TCP stream.

Frame: length u32 big-endian (bytes of the body, 1 to MAX_BODY_BYTES), then the body, one msgpack message.
The gateway connects; the worker speaks first (Hello). Then Submit and Cancel flow one way, Step and Failed
the other. All limits are checked before anything is allocated for a message.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

MAX_BODY_BYTES = 64 << 20
MAX_TOP_LOGPROBS = 20
LENGTH_BYTES = 4

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Incarnation = Annotated[int, msgspec.Meta(ge=0)]
Finish = Literal["", "stop", "length"]


class ProtocolError(ValueError):
    """Something received, or about to be sent, is no message of this protocol; close the connection."""


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How to choose the tokens of one choice. Randomness is keyed by (seed, choice, index), so it repeats.

    Raises:
        ValueError: a number is out of range (a ProtocolError when it came over the wire).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0  # below 2**64; drawn by the gateway
    choice: Count = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1  # alternatives wanted beside the chosen token's own logprob; -1: neither
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < 1 << 31:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; it must be 0 to max_tokens ({self.max_tokens})"
            )
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be a finite number, 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.top_k < 1 << 31:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (no limit) or more")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must be 0 to 1")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0")
        if not (math.isfinite(self.presence_penalty) and math.isfinite(self.frequency_penalty)):
            raise ValueError("presence_penalty and frequency_penalty must be finite numbers")
        if not -1 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs is {self.logprobs}; it must be -1 (none) to {MAX_TOP_LOGPROBS}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed}; it must be 0 to 2**64 - 1")


class Submit(msgspec.Struct, kw_only=True, frozen=True, tag="submit"):
    """Generate for one choice. `output` holds the tokens already emitted by an earlier attempt: they become
    part of the context, count towards max_tokens, and the next token's index is len(output)."""

    id: RequestId
    attempt: Count
    prompt: list[TokenId]
    output: list[TokenId] = []
    params: SamplingParams


class Cancel(msgspec.Struct, kw_only=True, frozen=True, tag="cancel"):
    """Forget the request and free what it holds. Unknown ids are ignored: it may just have ended."""

    id: RequestId


class Hello(msgspec.Struct, kw_only=True, frozen=True, tag="hello"):
    """First message on every connection: who serves here, and what fits."""

    name: str
    incarnation: Incarnation
    model_hash: str
    numerics_class: str
    max_model_len: int
    vocab: int
    kv_tokens: int


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of one request. `finish` is not empty on its last: "stop" for an end or stop token (which
    is this one, carried so that the log is complete), "length" at max_tokens. `top`: the likeliest (token,
    logprob) pairs, the best first; empty unless asked for."""

    id: str
    attempt: int
    index: int
    token: int
    finish: Finish = ""
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class Step(msgspec.Struct, kw_only=True, frozen=True, tag="step", gc=False):
    """All tokens that one engine step made for one gateway."""

    tokens: list[Token]


class Failed(msgspec.Struct, kw_only=True, frozen=True, tag="failed"):
    """The request ended without a result. `retryable`: it may succeed here later, or elsewhere now.

    Codes: expert_lost, too_long, never_fits, bad_request, overloaded, internal, shutting_down.
    """

    id: str
    attempt: int
    code: str
    message: str
    retryable: bool


ToWorker = Submit | Cancel
ToGateway = Hello | Step | Failed
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToWorker | ToGateway) -> bytes:
    """One message as a frame.

    Raises:
        ProtocolError: the message is larger than MAX_BODY_BYTES.
    """
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    body_bytes = len(frame) - LENGTH_BYTES
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(
            f"A message of {body_bytes} bytes is over the limit of {MAX_BODY_BYTES}; shorten it."
        )
    frame[:LENGTH_BYTES] = body_bytes.to_bytes(LENGTH_BYTES, "big")
    return bytes(frame)


class MessageReader(Generic[M]):
    """Cuts a byte stream into messages; use `for_worker()` or `for_gateway()`. After an error it is spent."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._pending = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[M]:
        """Take received bytes; return the messages that they complete, in order.

        Raises:
            ProtocolError: a length out of range, or a body that is no message for this side.
        """
        pending = self._pending
        pending_before = bool(pending)
        if pending_before:
            pending += data
        # Nearly always `data` is one whole message: it need not pass through the buffer.
        received = pending if pending_before else data
        messages: list[M] = []
        start = 0
        while len(received) - start >= LENGTH_BYTES:
            body_start = start + LENGTH_BYTES
            body_bytes = int.from_bytes(received[start:body_start], "big")
            if not 1 <= body_bytes <= MAX_BODY_BYTES:
                raise ProtocolError(f"A frame claims {body_bytes} bytes; 1 to {MAX_BODY_BYTES} are allowed.")
            end = body_start + body_bytes
            if len(received) < end:
                break
            try:
                messages.append(self._decoder.decode(received[body_start:end]))
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise ProtocolError(
                    f"A frame of {body_bytes} bytes is no message for this side: {error}"
                ) from None
            start = end
        if pending_before:
            del pending[:start]
        elif start < len(data):
            pending += data[start:]
        return messages


def for_worker() -> MessageReader[ToWorker]:
    """Reader of what a gateway sends."""
    return MessageReader(msgspec.msgpack.Decoder(ToWorker))


def for_gateway() -> MessageReader[ToGateway]:
    """Reader of what a worker sends."""
    return MessageReader(msgspec.msgpack.Decoder(ToGateway))
