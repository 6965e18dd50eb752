"""Grammars at work: compiled and followed by llguidance, beside the steps rather than in them.

A grammar is compiled on a thread of its own before its request is queued. After each token the next mask, one bit
for every token that may follow, is made on another, while the engine hands tokens out and computes the next step;
llguidance holds no lock of Python meanwhile. A mask that is not ready when the step's logits are holds up its own
request alone, whose row is computed again. All state is a function of the tokens, so a replay rebuilds it from them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from eaas.worker.grammar import Grammar, GrammarInvalid, of_lark
from eaas.worker.request import Refused, Request
from eaas.worker.sample import bits_of

log = logging.getLogger(__name__)

# One space, or a new line with its indentation: what JSON is printed with. Without a bound a weak model may well go on
# with blanks until it has no tokens left.
_WHITESPACE = r"( |\n[ \t]{0,16})"
# In every version blanks may be part of the separators.
_SEPARATED = {"whitespace_flexible": False, "item_separator": f",{_WHITESPACE}?", "key_separator": f":{_WHITESPACE}?"}
_TOKENIZER_LIMIT_BYTES = 64 << 20
_KEPT = 32
_COMPILERS = 2
_MESSAGE_CHARACTERS = 500
# Most take a millisecond. One that takes longer than this goes on in vain, but its client has an answer.
LONGEST_COMPILE_S = 10.0
# Each is up to 64 KB and holds a place in a queue of threads.
MOST_COMPILING = 1024
_BROKEN = "the grammar's library failed"


def spacing(llguidance: str) -> Any:
    """Where JSON has blanks: where any may stand, but before llguidance 1.8, where these may repeat without end,
    behind separators alone."""
    old = tuple(int(part) for part in llguidance.split(".")[:2]) < (1, 8)
    return _SEPARATED if old else {"whitespace_pattern": _WHITESPACE}


def _limits() -> LLParserLimits:
    """What one grammar may cost, by llguidance's own measures."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,  # some 20 ms
        step_lexer_fuel=200_000,  # some 14 ms a mask
        step_max_items=50_000,  # some 3 ms a mask
        max_lexer_states=10_000,  # some 20 MB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Constraint:
    """How far one request's output has come in its grammar. The engine's thread calls everything but `compute`.

    Attributes:
        mask: uint32 [words]: bit i % 32 of word i / 32 says whether token i may be next; valid once `ready`. Behind it
            in memory lie those of what may follow each draft.
        made: How many of all these there are.
        fault: Why it can go no further; empty while all is well.
    """

    __slots__ = (
        "_busy", "_drafts", "_early", "_ends", "_forced", "_masks", "_matcher", "_queue", "fault", "made", "mask",
    )  # fmt: skip

    def __init__(
        self,
        matcher: LLMatcher,
        words: int,
        work: queue.SimpleQueue[Constraint | None],
        *,
        ends: np.ndarray,
        early: int,
        drafts: int = 0,
    ) -> None:
        """Args:
        matcher: After the tokens so far.
        words: Of a mask.
        work: Where masks to be made are put; the caller makes the first.
        ends: uint32 [words]: tokens that end the request.
        early: How many tokens are to come before these are let through; where nothing else is possible, they are.
        drafts: Most tokens looked at ahead.
        """
        self._masks = np.zeros((1 + drafts, words), dtype=np.uint32)
        self.mask = self._masks[0]
        self.fault = ""
        self.made = 0
        self._drafts: list[int] = []
        self._forced: list[int] = []
        self._matcher = matcher
        self._queue = work
        self._ends = ends
        self._early = early
        # Held from when a mask is wanted until it is there.
        self._busy = threading.Lock()
        self._busy.acquire()

    def ready(self, timeout_s: float) -> bool:
        """Whether the mask of the next token is there, or comes within the time; 0: at once."""
        if not self._busy.acquire(timeout=timeout_s):
            return False
        self._busy.release()
        return True

    def advance(self, token: int) -> bool:
        """Take the token that was chosen by the mask. Unless another was chosen with it, `look` comes next.

        Returns:
            True when the grammar lets nothing follow it.
        """
        matcher = self._matcher
        self._early -= 1
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        try:
            if not matcher.consume_token(token):
                self.fault = _message(matcher)
                return False
            return matcher.is_stopped()
        except BaseException as error:  # as in `compute`
            self.fault = f"{_BROKEN}: {_short(str(error))}"
            return False

    def forced(self) -> list[int]:
        """The tokens that come next where the grammar lets one text alone follow: as a tokenizer would cut it."""
        # Of a long text only the first are asked for at once, and the others are still the same then.
        if not self._forced and not self.fault:
            try:
                self._forced = self._matcher.deep_copy().compute_ff_tokens()
            except BaseException as error:  # as in `compute`
                self.fault = f"{_BROKEN}: {_short(str(error))}"
        return self._forced

    def look(self, drafts: Sequence[int]) -> list[int]:
        """Have the next mask made, and after it those behind each of the drafts that may come.

        Returns:
            These drafts.
        """
        if self.fault:
            return []
        self._drafts = list(drafts)
        if self._drafts != self._forced[: len(drafts)]:
            # What is only guessed must neither change the matcher nor break it.
            try:
                valid = self._matcher.deep_copy().validate_tokens(self._drafts)
            except BaseException:  # as in `compute`; of the matcher itself its next mask will tell
                log.exception("drafts_not_judged")
                valid = 0
            del self._drafts[valid:]
        self._busy.acquire()
        self._queue.put(self)
        return self._drafts

    def compute(self) -> None:
        """Make the masks that are wanted; on whichever thread does such things."""
        self.made = 0
        try:
            if self._make(self._matcher) and self._drafts:
                ahead = self._matcher.deep_copy()
                for token in self._drafts:
                    if not ahead.consume_token(token) or ahead.is_stopped() or not self._make(ahead):
                        break
            elif not self.made:
                self.fault = _message(self._matcher)
        except BaseException as error:  # a panic of the library is no Exception, and ends this request alone
            if not self.made:
                self.fault = f"{_BROKEN}: {_short(str(error))}"
        finally:
            self._busy.release()

    def _make(self, matcher: LLMatcher) -> bool:
        mask = self._masks[self.made]
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return False
        if self._early > self.made:
            others = mask & ~self._ends
            if others.any():
                mask[:] = others
        self.made += 1
        return True


class Grammars:
    """The grammars of one worker: compiles them for its tokenizer, and makes masks, on threads of its own."""

    def __init__(self, tokenizer: LLTokenizer, *, drafts: int = 0) -> None:
        """Args: tokenizer: with the model's end tokens. drafts: most tokens guessed ahead of a request."""
        self._tokenizer, self._most_drafts = tokenizer, drafts
        self._words = -(-tokenizer.vocab_size // 32)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")
        self._work: queue.SimpleQueue[Constraint | None] = queue.SimpleQueue()
        # Two, so that one slow mask holds up few.
        self._threads = [threading.Thread(target=self._make_masks, name=f"mask-{n}", daemon=True) for n in range(2)]

    @classmethod
    def open(cls, folder: Path, vocab: int, eos_ids: Sequence[int], drafts: int = 0) -> Grammars | None:
        """For the tokenizer of a checkpoint folder; None, with a warning, where it has none that llguidance knows.

        Reading a vocabulary of 150,000 takes two seconds in which no other Python runs: not for a worker that serves.

        Args:
            vocab: Logits of a row.
            eos_ids: Tokens that end an output.
            drafts: Most tokens guessed ahead of a request.
        """
        path = folder / "tokenizer.json"
        try:
            if path.stat().st_size > _TOKENIZER_LIMIT_BYTES:
                raise ValueError(f"{path} has over {_TOKENIZER_LIMIT_BYTES} bytes")
            text = path.read_text(encoding="utf-8")
            tokenizer = LLTokenizer(text, n_vocab=vocab, eos_token=sorted(eos_ids) or None)
        except (OSError, ValueError) as error:
            log.warning("grammars_unavailable reason=%s", error)
            return None
        return cls(tokenizer, drafts=drafts)

    def begin(
        self, grammar: Grammar, output: Sequence[int], ends: Sequence[int], min_tokens: int
    ) -> Future[Constraint]:
        """Compile a grammar and follow it through the tokens that there are already.

        Args:
            output: Tokens so far.
            ends: Tokens that end the request.
            min_tokens: Tokens before which none of these is chosen, unless nothing else is possible.

        Returns:
            What comes of it, with the first mask; or GrammarInvalid.
        """
        if not any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.start()
        return self._compilers.submit(self._begin, grammar, list(output), list(ends), min_tokens)

    def close(self) -> None:
        """End the threads; what is being compiled is not waited for."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for _ in self._threads:
            self._work.put(None)

    def _begin(self, grammar: Grammar, output: list[int], ends: list[int], min_tokens: int) -> Constraint:
        try:
            return self._begun(grammar, output, ends, min_tokens)
        except GrammarInvalid:
            raise
        except BaseException as error:  # as in `Constraint.compute`: who asks for the result is the engine
            log.exception("grammar_broken kind=%s", grammar.kind)
            raise GrammarInvalid(f"{_BROKEN}: {_short(str(error))}") from error

    def _begun(self, grammar: Grammar, output: list[int], ends: list[int], min_tokens: int) -> Constraint:
        matcher, vocab = self._compiled(grammar).deep_copy(), self._tokenizer.vocab_size
        if output and not matcher.consume_tokens(output):
            raise GrammarInvalid(f"the tokens so far are not of the grammar: {_message(matcher)}")
        constraint = Constraint(
            matcher,
            self._words,
            self._work,
            ends=bits_of([token for token in ends if token < vocab], vocab),
            early=min_tokens - len(output),
            drafts=self._most_drafts,
        )
        constraint.compute()
        return constraint

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_limits())
        except ValueError as error:
            raise GrammarInvalid(_short(str(error))) from None
        if matcher.is_error():
            raise GrammarInvalid(_message(matcher))
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _make_masks(self) -> None:
        while (constraint := self._work.get()) is not None:
            constraint.compute()


class _Pending(NamedTuple):
    request: Request
    constraint: Future[Constraint]
    until_s: float


class Compiling:
    """The requests of one engine that wait for their grammars, in order of arrival. Belongs to the engine's thread."""

    def __init__(self, grammars: Grammars | None, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """Args: as for the engine."""
        self._grammars = grammars
        self._wake = wake
        self._clock = clock
        self._pending: dict[tuple[int, str], _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def ready(self) -> bool:
        """Whether `take` would return anything."""
        if not self._pending:
            return False
        now_s = self._clock()
        return any(p.constraint.done() or now_s >= p.until_s for p in self._pending.values())

    @property
    def waiting(self) -> int:
        """How many are being compiled still."""
        return sum(not pending.constraint.done() for pending in self._pending.values())

    def requests(self) -> list[Request]:
        return [pending.request for pending in self._pending.values()]

    def get(self, owner: int, id: str) -> Request | None:
        """The request of that name, if it waits."""
        pending = self._pending.get((owner, id))
        return None if pending is None else pending.request

    def add(self, request: Request, grammar: Grammar) -> None:
        """Have a request's grammar compiled. Raises Refused: grammars cannot be followed here, or too many wait."""
        if self._grammars is None:
            raise Refused(
                "bad_request",
                "This model's tokenizer cannot follow a grammar; the worker's log says why. Leave out response_format "
                "and structured_outputs.",
            )
        if (request.owner, request.id) in self._pending:
            raise Refused("bad_request", f"Request {request.id} is already being served; use another id.")
        if len(self._pending) >= MOST_COMPILING:
            raise Refused(
                "overloaded", f"{MOST_COMPILING} grammars wait to be compiled here; try again later.", retryable=True
            )
        params = request.params
        future = self._grammars.begin(grammar, request.output, sorted(request.stops), params.min_tokens)
        self._pending[request.owner, request.id] = _Pending(request, future, self._clock() + LONGEST_COMPILE_S)
        future.add_done_callback(lambda _: self._wake())

    def cancel(self, owner: int, id: str) -> bool:
        """Forget a request; False if there is none of that name."""
        pending = self._pending.pop((owner, id), None)
        if pending is None:
            return False
        pending.constraint.cancel()
        return True

    def take(self) -> list[tuple[Request, Refused | None]]:
        """Those that wait no longer, in order of arrival: each with its constraint, or why it is refused."""
        if not self.ready:
            return []
        now_s = self._clock()
        taken: list[tuple[Request, Refused | None]] = []
        for key, (request, future, until_s) in list(self._pending.items()):
            if future.done():
                taken.append((request, _settle(request, future)))
            elif now_s >= until_s:
                waiting = future.cancel()
                taken.append((request, _too_long(waiting)))
            else:
                continue
            del self._pending[key]
        return taken


def _settle(request: Request, future: Future[Constraint]) -> Refused | None:
    try:
        request.constraint = future.result()
    except GrammarInvalid as error:
        return Refused("bad_request", f"The grammar cannot be followed: {error}")
    except CancelledError:
        return Refused("shutting_down", "The worker stops.", retryable=True)
    return None


def _too_long(waiting: bool) -> Refused:
    if waiting:
        return Refused("overloaded", "Other grammars are being compiled; try again later.", retryable=True)
    return Refused("bad_request", f"The grammar took over {LONGEST_COMPILE_S:g} s to compile; make it simpler.")


def _source(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=spacing(version("llguidance")))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    text = grammar.text
    if grammar.kind == "gbnf":
        try:
            # What comes of it keeps the limits of any grammar in Lark.
            text = of_lark(gbnf_to_lark(text)).text
        except GrammarInvalid:
            raise
        except Exception as error:  # the library raises plain Exception
            raise GrammarInvalid(f"it is no EBNF: {_short(str(error))}") from None
    return LLMatcher.grammar_from_lark(text)


def _message(matcher: LLMatcher) -> str:
    return _short(matcher.get_error())


def _short(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARACTERS]
