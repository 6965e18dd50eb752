"""Messages between a gateway and an attention worker, and how they are framed on a TCP stream.

Frame: length u32 big-endian (bytes of the body, 1 to MAX_BODY_BYTES), then the body, one msgpack message.
The gateway connects; the worker speaks first (Hello). Then Submit, Cancel, ForgetBlocks, Inspect and EndInspection flow
one way, Step, Failed and Inspected the other. All limits are checked before anything is allocated for a message.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from eaas.worker.grammar import Grammar
from experts.config import MOST_WEIGHT

# Of these messages; a worker of another is not used.
PROTOCOL = 11
MAX_BODY_BYTES = 64 << 20
# Of a step's 256 rows and 512 tokens of prompts, some 14 bytes each, 44 MB: they fit in one body. Gateways allow fewer.
MAX_TOP_LOGPROBS = 4096
MAX_BIASES = 1024
# Sequences of bad words, as vLLM has it.
MAX_BAD = 1024
MOST_BIAS = 100.0
LENGTH_BYTES = 4

# Characters of a tenant's name.
MAX_TENANT = 64

RunKey = Annotated[str, msgspec.Meta(max_length=128)]
InspectionId = Annotated[str, msgspec.Meta(pattern=r"^inspect-[0-9a-z-]{1,32}$")]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Incarnation = Annotated[int, msgspec.Meta(ge=0)]
Finish = Literal["", "stop", "length", "complete"]


class ProtocolError(ValueError):
    """Something received, or about to be sent, is no message of this protocol; close the connection."""


class ForcedExperts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The experts of the first tokens of prompt and output, which take the place of the gates' choice.

    `experts`: uint16 [tokens, layers, top_k], C order, little-endian.
    """

    layers: Count
    top_k: Count
    experts: bytes


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
    drop_lost_experts: bool = False  # leave out the terms of experts that no server has, and say so
    grammar: Grammar | None = None  # the language that the output must be in; None: any
    logit_bias: tuple[tuple[TokenId, float], ...] = ()  # added to the logits of these tokens
    allowed_token_ids: tuple[TokenId, ...] = ()  # no other token is chosen; none given: all are allowed
    # KV blocks are shared under the same one alone.
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""
    # Sequences that are not in the output.
    bad_tokens: tuple[Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1)], ...] = ()
    # Who comes first, the lower the earlier; of equals, who came first.
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    prompt_logprobs: int = -1  # as logprobs, for each token of the prompt but the first; -1: none
    # What is computed of a token is weighted by the gates' scores all the same.
    forced: ForcedExperts | None = None
    routed_from: int = -1  # the experts of each token from this one on are told; -1: of none

    def __post_init__(self) -> None:
        logprobs = f"-1 (none) to {MAX_TOP_LOGPROBS}"
        for name, sound, needed in (
            ("max_tokens", 1 <= self.max_tokens < 1 << 31, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens ({self.max_tokens})"),
            ("temperature", 0.0 <= self.temperature < math.inf, "a finite number, 0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 1 << 31, "0 (no limit) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "above 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("logprobs", -1 <= self.logprobs <= MAX_TOP_LOGPROBS, logprobs),
            ("prompt_logprobs", -1 <= self.prompt_logprobs <= MAX_TOP_LOGPROBS, logprobs),
            ("seed", 0 <= self.seed < 1 << 64, "0 to 2**64 - 1"),
        ):
            if not sound:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {needed}")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"{len(self.logit_bias)} biases were given; at most {MAX_BIASES} are possible")
        if len(self.bad_tokens) > MAX_BAD:
            raise ValueError(f"{len(self.bad_tokens)} bad sequences were given; at most {MAX_BAD} are possible")
        if not all(-MOST_BIAS <= bias <= MOST_BIAS for _, bias in self.logit_bias):
            raise ValueError(f"a bias is outside -{MOST_BIAS:g} to {MOST_BIAS:g}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("a grammar says where an output ends: it cannot be given with ignore_eos")

    @property
    def wants_routing(self) -> bool:
        """Whether the experts of its tokens are told."""
        return self.routed_from >= 0


class Share(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """On whose behalf tokens are computed, which says when and never which: of tenants that want more than there is,
    each has its `weight`'s part. What is in `background` yields to what is not."""

    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""
    weight: Annotated[int, msgspec.Meta(ge=1, le=MOST_WEIGHT)] = 1
    background: bool = False


class Submit(msgspec.Struct, kw_only=True, frozen=True, tag="submit", omit_defaults=True):
    """Generate for one choice. `output` holds the tokens already emitted by an earlier attempt: they become
    part of the context, count towards max_tokens, and the next token's index is len(output). `traceparent`: the W3C
    header of the gateway's span, where the request is traced. `key`: whoever else asks for the same under it has the
    tokens of one run, whose computing outlives the connection that it was asked for over; "": none may.
    `inspected`: an inspection's id, a slash, and the name under which that records its rows; "": none does."""

    id: RequestId
    attempt: Count
    prompt: list[TokenId]
    output: list[TokenId] = []
    params: SamplingParams
    share: Share = Share()
    traceparent: Annotated[str, msgspec.Meta(max_length=55)] = ""
    key: RunKey = ""
    inspected: Annotated[str, msgspec.Meta(max_length=300)] = ""


class Cancel(msgspec.Struct, kw_only=True, frozen=True, tag="cancel"):
    """Forget the request and free what it holds. Unknown ids are ignored: it may just have ended."""

    id: RequestId


class ForgetBlocks(msgspec.Struct, frozen=True, tag="forget_blocks"):
    """No request that comes from now on reuses a KV block that was computed for one before."""


class Inspect(msgspec.Struct, kw_only=True, frozen=True, tag="inspect", omit_defaults=True):
    """Begin an inspection, of which a worker has one at a time: record what is named in `taps` (eaas.worker.taps) of
    rows of the requests that are submitted as inspected. Sent again, it changes nothing.

    Args:
        model: The name by which clients ask for what is served.
        statistics: Of each row its mean, root mean square, greatest magnitude, and count of numbers that are not
            finite (eaas.worker.taps.STATISTICS), in place of its numbers.
        policy: What gives way where the ring is full: the oldest rows, the newest, or serving, which waits.
        sink: Where rows go (eaas.worker.sinks); "views": nowhere, what `Inspected.views` says is enough.
        ring_bytes: Of rows that wait for the sink.
        for_s: Then it ends by itself.
    """

    id: InspectionId
    taps: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=1024)]
    model: str | None = None
    statistics: bool = False
    policy: Literal["drop-oldest", "drop-newest", "block"] = "drop-oldest"
    sink: Literal["safetensors", "npy", "arrow", "spans", "views"] = "safetensors"
    ring_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 34)] = 256 << 20
    for_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0


class EndInspection(msgspec.Struct, kw_only=True, frozen=True, tag="end_inspection"):
    """Record nothing more, deliver what there is, and close the sink. Unknown ids are ignored."""

    id: InspectionId


class Hello(msgspec.Struct, kw_only=True, frozen=True, tag="hello"):
    """First message on every connection: who serves here, and what fits."""

    name: str
    incarnation: Incarnation
    model_hash: str
    numerics_class: str
    max_model_len: int
    vocab: int
    kv_tokens: int
    protocol: int = PROTOCOL
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of one request. `finish` is not empty on its last: "stop" for an end or stop token (which is this one,
    carried so that the log is complete), "complete" when this token is text and the grammar lets nothing follow it,
    "length" at max_tokens. `top`: the likeliest (token, logprob) pairs, the best first; empty unless asked for."""

    id: str
    attempt: int
    index: int
    token: int
    finish: Finish = ""
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of tokens number `start` (1 or more) and on of a prompt: each its own, its rank (1: the
    likeliest), and the likeliest (token, logprob) pairs at its place. All of a prompt come before its request's first
    token."""

    id: str
    attempt: int
    start: int
    tokens: list[tuple[float, int, list[tuple[int, float]]]]


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The experts that the gates chose for tokens number `start` to `stop` - 1 of prompt and output.

    `experts`: [tokens, layers, top_k], C order, little-endian; one byte each where the model has at most 256, else two.
    Those of all tokens before one come with that one or before it.
    """

    id: str
    attempt: int
    start: int
    stop: int
    layers: int
    top_k: int
    experts: bytes


class LayerView(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the gate of one MoE layer chose of late.

    Args:
        layer: Among all layers.
        entropy: Mean entropy of its scores, of the greatest possible, for each of the last windows of time, the newest
            last; negative: nothing was recorded in it.
        pairs: Two experts, the lower first, and how often both were chosen for a row; those that were oftenest.
        tokens: The commonest tokens, and of each the experts that were chosen oftenest for it, with how often.
    """

    layer: int
    entropy: list[float] = []
    pairs: list[tuple[int, int, int]] = []
    tokens: list[tuple[int, list[tuple[int, int]]]] = []


class Inspected(msgspec.Struct, kw_only=True, frozen=True, tag="inspected", omit_defaults=True):
    """How an inspection goes: about once a second while it is under way, and when it has ended.

    A record is what one tap says of one row. All that were produced are delivered, dropped, or still on their way.

    Args:
        fault: Why it was refused, or why the sink takes no more; empty: all is well.
        ended: Nothing more is said of it.
        folder: Where the worker's files are, on its host.
        views: Of layers whose gate or experts are recorded.
    """

    id: str
    produced: int = 0
    delivered: int = 0
    dropped: int = 0
    fault: str = ""
    ended: bool = False
    folder: str = ""
    views: list[LayerView] = []


class WorkerLoad(msgspec.Struct, kw_only=True, frozen=True, gc=False, omit_defaults=True):
    """How busy a worker is, with all gateways: requests in steps and in the queue, and the share of KV blocks held.

    Counted since it began: `preemptions`, and tokens of prompts `looked_up` in the KV cache and `reused` from there;
    submits that were answered by a run in progress (`joined`) or that had ended (`kept`), and tokens `told` so.
    """

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    preemptions: int = 0
    looked_up: int = 0
    reused: int = 0
    joined: int = 0
    kept: int = 0
    told: int = 0


class Step(msgspec.Struct, kw_only=True, frozen=True, tag="step", gc=False, omit_defaults=True):
    """All tokens that one engine step made for one gateway; none: a sign of life.

    `dropped`: (request, attempt) of each request among them that was computed, in this step or before, without the
    terms of lost experts. `begun`: (request, attempt) of each request whose computing begins with the next step, said
    before it: should the worker die, no other can be the cause. `load`: a few times a second while there is work, and
    when there is none any more.
    """

    tokens: list[Token]
    dropped: list[tuple[str, int]] = []
    prompts: list[PromptLogprobs] = []
    routed: list[RoutedExperts] = []
    begun: list[tuple[str, int]] = []
    load: WorkerLoad | None = None


class Failed(msgspec.Struct, kw_only=True, frozen=True, tag="failed"):
    """The request ended without a result. `retryable`: it may succeed here later, or elsewhere now.

    Codes: expert_lost, class_lost, too_long, never_fits, bad_request, no_token (what the client bound the output by
    allows none), overloaded, internal, shutting_down.
    """

    id: str
    attempt: int
    code: str
    message: str
    retryable: bool

    @classmethod
    def of(cls, request: Any, code: str, message: str, *, retryable: bool) -> Failed:
        """The end of a request, or of what was submitted as one: of whatever has its id and attempt."""
        return cls(id=request.id, attempt=request.attempt, code=code, message=message, retryable=retryable)


ToWorker = Submit | Cancel | ForgetBlocks | Inspect | EndInspection
ToGateway = Hello | Step | Failed | Inspected
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToWorker | ToGateway) -> bytes:
    """One message as a frame. Raises ProtocolError: the message is larger than MAX_BODY_BYTES."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    body_bytes = len(frame) - LENGTH_BYTES
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"A message of {body_bytes} bytes is over the limit of {MAX_BODY_BYTES}; shorten it.")
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
                raise ProtocolError(f"A frame of {body_bytes} bytes is no message for this side: {error}") from None
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
