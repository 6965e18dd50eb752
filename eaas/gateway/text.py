"""From token ids to what one request's client is shown: text, stop strings, log-probabilities, experts, the end. Pure.

A choice turns each accepted token into visible text at once, when the token arrives, so that a stop string
cancels the work even while the client reads slowly, and hands it to its generation, which keeps it for the
response: a slow reader holds up nobody but itself.
"""

from __future__ import annotations

import base64
import io
from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from eaas.gateway.errors import ErrorReply
from eaas.gateway.event_ids import EventIds, not_resumable
from eaas.gateway.formats import Delta, Ending, FinishedChoice, Format
from eaas.gateway.logprobs import PromptScores, TokenLogprobs, TokenNames, token_logprobs
from eaas.gateway.stops import StopMatcher
from eaas.worker.protocol import RoutedExperts

if TYPE_CHECKING:
    from eaas.model.tokenizer import Detokenizer

Alternatives = Sequence[tuple[int, float]]
_encode = msgspec.json.encode

# Events that a slow reader's stream keeps, some 300 tokens; the connection's own buffers come before them.
HELD_BYTES = 1 << 16
# Of one request, in prompts and outputs, counting each choice: what is told of their experts is kept until it is
# answered.
MOST_ROUTED_TOKENS = 1 << 17


class NoText:
    """A detokenizer that says nothing, for clients which want token ids alone."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Echo(NamedTuple):
    """The prompt's text, shown before the first token; alone: and nothing after it."""

    text: str
    alone: bool


class Generation:
    """All choices of one request.

    ``on_change`` is called when the response has something to do: at the end of the last choice, at a failure, and in a
    stream, where each piece is one server-sent event, when there is something to take.

    Attributes:
        pieces: What became visible, where it is not streamed.
        chunks: Events of a stream that the response has yet to take.
        full: HELD_BYTES of them lay there, and ``on_full`` was called; whoever has taken them sets it back.
        events: Event templates under the present numerics classes; None: they are yet to be made.
        ids: Gives the events of a stream their ids; None: they have none.
        write: Takes each new event at once, past ``chunks``, or says False; None while these are to be taken first, or
            the response is at work itself.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        make_events: Callable[[], Format] | None = None,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: make_events: event templates of a stream under the present numerics classes; None: there is none."""
        self.choices: list[Choice] = []
        self.open_choices = 0
        self.pieces: list[Delta] = []
        self.error: ErrorReply | None = None
        self.numerics_classes: tuple[str, ...] = ()
        self.dropped = False  # computed without some experts that were lost, as the client allowed
        self.on_change = on_change
        self._make_events, self._on_full = make_events, on_full
        self.events: Format | None = None
        self._opened = False
        self._held_bytes = 0
        self.full = False
        self.ids: EventIds | None = None
        self.chunks: list[bytes] = []
        self.write: Callable[[bytes], bool] | None = None
        # What stands around a text in an event of the only choice; None where there is more to its events.
        self._template: tuple[bytes, bytes] | None = None

    @property
    def completion_tokens(self) -> int:
        """Every accepted token counts, shown or not."""
        return sum(choice.said for choice in self.choices)

    @property
    def ended(self) -> bool:
        """Whether every choice has ended or the request failed."""
        return self.open_choices == 0 or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether the response has something to do now."""
        return self.ended or bool(self.chunks)

    def computed_by(self, numerics_class: str) -> None:
        """Note a numerics class that takes part in the answer; later events name it too."""
        if numerics_class not in self.numerics_classes:
            self.numerics_classes = (*self.numerics_classes, numerics_class)
        self.events = self._template = None

    def experts_dropped(self) -> None:
        """Note that from here on terms of lost experts are missing; later events say so."""
        self.dropped = True
        self.events = self._template = None
        if self.ids is not None and self.ids.behind:
            self.fail(not_resumable("It was computed with all experts, of which some are lost now.").reply)

    def write_text(self, text: str, tokens: int) -> bool:
        """Take a text that is all that became visible of the only choice, which has so many tokens, if its event can be
        written at once; False: it is to be shown. Most events go this way: they cost as little as can be."""
        template, write, ids = self._template, self.write, self.ids
        if template is None or write is None or not (ids is None or ids.seen is None):
            return False
        event = template[0] + _encode(text) + template[1]
        if ids is not None:
            event = ids.of_token(tokens) + event
        if not write(event):
            self._keep(event)
        return True

    def show(self, piece: Delta) -> None:
        """Take what became visible of a choice; in a stream write its event, if that can be done at once."""
        if piece.ending is not None:
            self.open_choices -= 1
        if self._make_events is None:
            self.pieces.append(piece)
            if piece.ending is not None and self.open_choices == 0:
                self.on_change()
            return
        events = self.events or self._open(self._make_events)
        if piece.text or piece.logprobs or piece.tokens:
            event = events.event(piece)
        else:
            event = b"" if piece.ending is None else events.event(Delta(piece.index, "", ending=piece.ending))
        if self.ids is not None and event:
            event = self.ids.of(piece.index, event)
        if self.write is not None and self.open_choices and event and self.write(event):
            return
        if event or piece.ending is not None or self.chunks:
            self._keep(event)

    def _keep(self, event: bytes) -> None:
        # Nothing is written past what waits.
        self.write = None
        self.chunks.append(event)
        self._held_bytes += len(event)
        if self._held_bytes > HELD_BYTES and not self.full and self.open_choices:
            self.full = True
            self._on_full()
        self.on_change()

    def _open(self, make_events: Callable[[], Format]) -> Format:
        events = self.events = make_events()
        self._template = events.text_template(0) if len(self.choices) == 1 else None
        if not self._opened:
            self._opened = True
            first = b"".join(events.first(index) for index in range(len(self.choices)))
            first = first if self.ids is None else self.ids.first(first)
            # What was seen begins no response: it may yet be refused with a status.
            self.chunks += [first] if first else []
        return events

    def take(self) -> bytes:
        """The events since the last call."""
        chunks, self.chunks, self._held_bytes = self.chunks, [], 0
        return b"".join(chunks)

    def fail(self, reply: ErrorReply) -> None:
        """End the request with an error; the first one counts."""
        if self.error is None:
            self.error = reply
            self.on_change()

    def finished_choices(self) -> list[FinishedChoice]:
        """All choices in order, put together from their pieces, once the generation has ended without error."""
        pieces: list[list[Delta]] = [[] for _ in self.choices]
        for piece in self.pieces:
            pieces[piece.index].append(piece)
        return [choice.finished(mine) for choice, mine in zip(self.choices, pieces, strict=True)]


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One choice's way from token ids to visible text; it joins ``generation`` when it is made.

    Attributes:
        matcher: None when there are no stop strings.
        min_tokens: Tokens before which no stop string counts.
        names: Given when log-probabilities are wanted.
        wants_tokens: Token ids are handed on with the text.
        stop_shown: What a stop token stands for is shown.
        echo: What is still to be shown before the first token.
        scores: Takes the log-probabilities of the prompt, where they are wanted.
        routing: Takes the experts of its tokens, where they are wanted.
        counted: Each event says what it has used so far.
        stops: The client's stop tokens.
        tokens: How many it has.
        stop_reason: The stop string or the client's stop token that ended it.
    """

    generation: Generation
    index: int
    detokenizer: Detokenizer
    matcher: StopMatcher | None
    min_tokens: int
    names: TokenNames | None
    wants_tokens: bool = False
    stop_shown: bool = False
    echo: Echo | None = None
    scores: PromptScores | None = None
    routing: RoutedExpertsLog | None = None
    counted: bool = False
    stops: Container[int] = ()
    tokens: int = 0
    stop_reason: int | str | None = None
    _silent: bool = field(init=False)
    _plain: bool = field(init=False)
    _read: int = field(init=False, default=0)  # characters read from the detokenizer
    _shown: int = field(init=False, default=0)  # characters handed to the response
    # Log-probabilities of tokens not yet visible, each with the offset of its first character.
    _waiting: list[tuple[int, TokenLogprobs]] = field(init=False, default_factory=list)
    _ids: list[int] = field(init=False, default_factory=list)  # of tokens not yet handed on
    _unsaid: int = field(init=False, default=0)  # tokens that are not the client's

    def __post_init__(self) -> None:
        self._silent = isinstance(self.detokenizer, NoText)
        nothing_more = self.matcher is None and self.names is None and self.echo is None
        self._plain = nothing_more and not (self.wants_tokens or self.counted)
        self.generation.choices.append(self)
        self.generation.open_choices += 1

    def token(self, token: int, finish: str, logprob: float | None, top: Alternatives) -> bool:
        """Take the next token of this choice. True when a stop string ended it: the worker does not know of that yet.

        Args: finish: "" while it goes on; "length" at its limit; "complete" when a grammar lets nothing follow; "stop"
        when ``token`` is an end token, which has no text of its own."""
        generation = self.generation
        self.tokens += 1
        if self._plain and not finish:
            # Most tokens: they cost as little as can be.
            text = self.detokenizer.push(token)
            if text:
                offset = self._shown
                self._shown = offset + len(text)
                if not generation.write_text(text, self.tokens):
                    generation.show(Delta(self.index, text, None, offset))
            return False
        if self.echo is not None and self._show_echo(self.echo):
            return True
        if self.wants_tokens:
            self._ids.append(token)
        stops = finish == "stop"
        text = self.detokenizer.push(token) if self.stop_shown or not stops else ""
        # Where ids alone are told the last is one of them.
        if self.names is not None and (self._silent or not stops):
            score = float("-inf") if logprob is None else logprob
            self._waiting.append((self._read, token_logprobs(self.names, token, score, top)))
        if stops:
            self.stop_reason = token if token in self.stops else None
            self.end("stop", text)
            return False
        self._read += len(text)
        matcher = self.matcher
        if matcher is not None and self.tokens > self.min_tokens:
            text = matcher.push(text)
            if matcher.stopped:
                self.stop_reason = matcher.found
                self._show(text, "stop", everything=False)
                return True
        if finish:
            self.end("stop" if finish == "complete" else finish, text)
        elif text or self._silent:
            self._show(text, None, everything=self._silent)
        return False

    @property
    def said(self) -> int:
        """How many of its tokens are the client's."""
        return self.tokens - self._unsaid

    def finished(self, pieces: Sequence[Delta]) -> FinishedChoice:
        """The whole choice. Args: pieces: all that became visible of it."""
        return FinishedChoice(
            index=self.index,
            text="".join(piece.text for piece in pieces),
            finish_reason=next((piece.ending.reason for piece in pieces if piece.ending), "length"),
            logprobs=[one for p in pieces for one in p.logprobs or ()] if self.names is not None else None,
            tokens=[one for p in pieces for one in p.tokens or ()] if self.wants_tokens else None,
            prompt_logprobs=None if self.scores is None else self.scores.by_id(),
            routed_experts=None if self.routing is None else self.routing.encoded(),
            stop_reason=self.stop_reason,
        )

    def _show_echo(self, echo: Echo) -> bool:
        """Show the prompt, once; True when that is all."""
        self.echo = None
        logprobs = None if self.scores is None else self.scores.named()
        self._read = self._shown = len(echo.text)
        # The token that made the worker speak is not the client's.
        self._unsaid = int(echo.alone)
        ending = Ending("length") if echo.alone else None
        tokens = [] if self.wants_tokens else None
        self.generation.show(Delta(self.index, echo.text, logprobs, 0, tokens, ending))
        return echo.alone

    def end(self, finish: str, text: str = "") -> None:
        """End the choice here. Args: text: that of its last token."""
        rest = self.detokenizer.flush()
        matcher = self.matcher
        if matcher is None:
            self._show(text + rest, finish, everything=True)
            return
        # The last characters may still complete a stop string.
        text += matcher.push(rest)
        stopped = matcher.stopped
        if stopped:
            self.stop_reason = matcher.found
        self._show(text + matcher.flush(), "stop" if stopped else finish, everything=not stopped)

    def _show(self, text: str, finish: str | None, *, everything: bool) -> None:
        offset = self._shown
        self._shown += len(text)
        logprobs: list[TokenLogprobs] | None = None
        if self.names is not None:
            waiting = self._waiting
            count = len(waiting) if everything else bisect_left(waiting, self._shown, key=itemgetter(0))
            logprobs = [entry for _, entry in waiting[:count]]
            del waiting[:count]
        tokens: list[int] | None = None
        if self.wants_tokens:
            tokens, self._ids = self._ids, []
        ending = None if finish is None else Ending(finish, self.stop_reason)
        self.generation.show(Delta(self.index, text, logprobs, offset, tokens, ending))


class RoutedExpertsLog:
    """The experts of one choice's tokens, gathered piece by piece; what a replay tells again counts once."""

    __slots__ = ("_pieces", "_shape", "_stop", "_width")

    def __init__(self, start: int) -> None:
        """Args: start: The first token that the client wants, at most the length of the prompt."""
        self._stop = start
        self._pieces: list[bytes] = []
        self._shape = (0, 0)
        self._width = 1

    def take(self, piece: RoutedExperts) -> None:
        """Take those of tokens number ``piece.start`` to ``piece.stop`` - 1; what leaves a gap is left out."""
        tokens = piece.stop - piece.start
        if piece.start > self._stop or tokens < 1:
            return
        self._shape = (piece.layers, piece.top_k)
        bytes_each = len(piece.experts) // tokens
        self._width = bytes_each // (piece.layers * piece.top_k)
        self._pieces.append(piece.experts[(self._stop - piece.start) * bytes_each :])
        self._stop = max(self._stop, piece.stop)

    def encoded(self) -> str | None:
        """As vLLM returns them: base64 of a .npy file, [tokens - 1, layers, top_k]; None where none were told.

        No step has computed the last token, so no experts were chosen for it.
        """
        if not self._pieces:
            return None
        found = np.frombuffer(b"".join(self._pieces), f"<u{self._width}")
        file = io.BytesIO()
        np.save(file, found.reshape(-1, *self._shape), allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()
