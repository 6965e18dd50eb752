"""One request as the engine sees it: tokens known, tokens computed, blocks held. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from eaas.worker.protocol import Failed, Finish, SamplingParams, Share, Token

TokenArray = npt.NDArray[np.int32]


class Refused(Exception):
    """A request that this worker will not take; `code` and `retryable` go into the reply."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable

    def reply(self, request: Request) -> Failed:
        """What its owner is told."""
        return Failed.of(request, self.code, str(self), retryable=self.retryable)


class Follower(Protocol):
    """Where an output stands in its grammar: `eaas.worker.constraint.Constraint`, or a stand-in."""

    fault: str
    mask: npt.NDArray[np.uint32]
    made: int

    def ready(self, timeout_s: float) -> bool: ...
    def advance(self, token: int) -> bool: ...
    def forced(self) -> list[int]: ...
    def look(self, drafts: Sequence[int]) -> list[int]: ...


@dataclass(kw_only=True, slots=True, eq=False)
class Flow:
    """What one tenant wants in one class (eaas.worker.shares).

    Attributes:
        share: Whose it is, as its last request had it.
        token: What a token weighs in `tag`: 1 over the weight.
        tag: Tokens that were computed for it while others wanted some, over its weight.
        ahead: The tag as it will be when those of its requests that run have ended, as far as can be reckoned.
        live: Its requests that have not ended, of which `waiting` hold no blocks, the next to be admitted first.
    """

    share: Share
    token: float = 1.0
    tag: float = 0.0
    ahead: float = 0.0
    live: int = 0
    waiting: deque[Request] = field(default_factory=lambda: deque[Request]())

    def turn(self) -> tuple[bool, float]:
        """Sorts flows: the next first."""
        return self.share.background, self.tag


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A request from its admission to its end.

    Attributes:
        owner: Who submitted it (a connection number); `(owner, id)` is unique among live requests.
        prompt: int32 [n].
        output: Tokens emitted so far, those of earlier attempts included; the next index is its length.
        stops: Tokens that end it.
        submitted_s: When it was submitted, by the engine's clock.
        moved_s: When a step last computed rows of it while experts were lost; before one has, when it was submitted.
        flow: Of its tenant and class, once it is queued.
        order: Arrival number; the youngest has the highest.
        slot: Its row in the scheduler's tables while it runs, else -1.
        context: int32; what must be computed before the next token can be chosen: prompt and output as they
            were when it was last admitted to run.
        computed: Tokens whose keys and values are in the KV pool.
        blocks, digests: Blocks held, and the names of the first full ones.
        published: How many of its blocks have been named to the pool.
        dropped: Some of it was computed without the terms of lost experts.
        constraint: What says which tokens its grammar lets through; None: all.
        prompt_scored: Tokens of the prompt whose log-probabilities were told, the first included; all where none are
            wanted.
        routed: Tokens whose experts were told, or need not be.
        forced, forced_digest: uint16 [tokens, layers, top_k]: those of its first tokens, in place of the gates' choice.
        key: That of its run; "": none.
        told, told_most: Its last tokens with their log-probabilities, and how many are kept; None: none are.
        finish: Why it ended, where its last token ended it.
        inspected: As its Submit has it.
        drafts: Tokens that are guessed to come next; whatever they are, what is chosen is the same.
    """

    owner: int
    id: str
    attempt: int
    prompt: TokenArray
    output: list[int]
    params: SamplingParams
    share: Share = field(default_factory=Share)
    eos: InitVar[frozenset[int]] = frozenset()
    submitted_s: float = 0.0
    moved_s: float = field(init=False)
    stops: frozenset[int] = field(init=False)
    flow: Flow = field(init=False)
    order: int = -1
    slot: int = -1
    context: TokenArray = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    preemptions: int = 0
    published: int = 0
    dropped: bool = False
    constraint: Follower | None = None
    prompt_scored: int = field(init=False)
    routed: int = field(init=False)
    forced: npt.NDArray[np.uint16] | None = None
    forced_digest: bytes = b""
    key: str = ""
    told: list[Token] | None = None
    told_most: int = 0
    finish: Finish = ""
    inspected: str = ""
    drafts: list[int] = field(default_factory=list[int])

    def __post_init__(self, eos: frozenset[int]) -> None:
        params = self.params
        self.moved_s, self.context = self.submitted_s, self.prompt
        stops = frozenset(params.stop_token_ids)
        self.stops = stops if params.ignore_eos else stops | eos
        # What has a token has told them all.
        tells = params.prompt_logprobs >= 0 and not self.output
        self.prompt_scored = 1 if tells else len(self.prompt)
        self.routed = self.length - 1 if self.output else min(params.routed_from, len(self.prompt))

    @property
    def length(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def final_length(self) -> int:
        """Tokens that it can come to hold at most: prompt and max_tokens."""
        return len(self.prompt) + self.params.max_tokens

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Tokens number `start` to `stop` - 1 of prompt and output."""
        prompt = self.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        generated = self.output[max(0, start - len(prompt)) : stop - len(prompt)]
        return np.concatenate((prompt[start:], np.array(generated, dtype=np.int32)))


class Chunk(NamedTuple):
    """Tokens `start` to `stop` - 1 of a request's context, or of its prompt."""

    request: Request
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many these are."""
        return self.stop - self.start

    def prompt_logprobs(self) -> Chunk:
        """The tokens of the prompt whose log-probabilities these rows give first: each row those of the next."""
        request = self.request
        last = min(self.stop + 1, len(request.prompt))
        return Chunk(request, min(max(self.start + 1, request.prompt_scored), last), last)
