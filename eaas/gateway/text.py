"""From token ids to what one request's client is shown: text, stop strings, log-probabilities, the end. Pure.

A choice turns each accepted token into visible text at once, when the token arrives, so that a stop string
cancels the work even while the client reads slowly, and hands it to its generation, which keeps it for the
response: a slow reader holds up nobody but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, Protocol

from eaas.gateway.errors import ErrorReply
from eaas.gateway.openai_format import Ending, Events, FinishedChoice, TokenLogprobs, TokenText, Usage
from eaas.gateway.prompt_scores import PromptScores, Scores, TokenNames
from eaas.gateway.routing import Routing
from eaas.gateway.stops import StopMatcher

Alternatives = Sequence[tuple[int, float]]

# Events that a slow reader's stream keeps, some 300 tokens; the connection's own buffers come before them.
HELD_BYTES = 1 << 16


class Detokenizer(Protocol):
    """Token ids of one choice in, text out; incomplete characters are kept until they are whole."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Silence:
    """A detokenizer that says nothing, for clients which want token ids alone."""

    def push(self, token: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class Echo(NamedTuple):
    """The prompt's text, shown before the first token; alone: and nothing after it."""

    text: str
    alone: bool


class Piece(NamedTuple):
    """What became visible of one choice.

    Attributes:
        tokens: Ids that it came from, when they were asked for.
        finish: OpenAI's finish_reason when the choice ends with this piece, else None.
    """

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None
    tokens: list[int] | None
    finish: str | None


class Generation:
    """All choices of one request.

    ``on_change`` is called when the response has something to do: here at the end of the last choice, or at a
    failure.
    """

    __slots__ = (
        "choices",
        "completion_tokens",
        "dropped",
        "error",
        "numerics_classes",
        "on_change",
        "open_choices",
        "pieces",
    )

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.choices: list[Choice] = []
        self.open_choices = 0
        self.completion_tokens = 0
        self.pieces: list[Piece] = []
        self.error: ErrorReply | None = None
        self.numerics_classes: tuple[str, ...] = ()
        self.dropped = False  # computed without some experts that were lost, as the client allowed
        self.on_change = on_change

    @property
    def ended(self) -> bool:
        """Whether every choice has ended or the request failed."""
        return self.open_choices == 0 or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether the response has something to do now."""
        return self.ended

    def add(self, choice: Choice) -> None:
        """Count in a choice, before its first token."""
        self.choices.append(choice)
        self.open_choices += 1

    def computed_by(self, numerics_class: str) -> None:
        """Note a numerics class that takes part in the answer."""
        if numerics_class not in self.numerics_classes:
            self.numerics_classes = (*self.numerics_classes, numerics_class)

    def experts_dropped(self) -> None:
        """Note that from here on terms of lost experts are missing."""
        self.dropped = True

    def show(
        self,
        index: int,
        text: str,
        logprobs: list[TokenLogprobs] | None,
        offset: int,
        finish: str | None,
        tokens: list[int] | None = None,
    ) -> None:
        """Take what became visible of a choice, ``offset`` characters after its start.

        Args:
            finish: OpenAI's finish_reason when the choice ends with this piece, else None.
            tokens: Ids of its tokens, when they were asked for.
        """
        self.pieces.append(Piece(index, text, logprobs, tokens, finish))
        if finish is not None:
            self.open_choices -= 1
            if self.open_choices == 0:
                self.on_change()

    def fail(self, reply: ErrorReply) -> None:
        """End the request with an error; the first one counts."""
        if self.error is None:
            self.error = reply
            self.on_change()

    def usage(self, prompt_tokens: int) -> Usage:
        """Tokens so far; every accepted token counts, shown or not."""
        return Usage(prompt=prompt_tokens, completion=self.completion_tokens)

    def finished_choices(self) -> list[FinishedChoice]:
        """All choices in order, put together from their pieces, once the generation has ended without
        error."""
        texts: list[list[str]] = [[] for _ in self.choices]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in self.choices]
        tokens: list[list[int]] = [[] for _ in self.choices]
        reasons = ["length"] * len(self.choices)
        for piece in self.pieces:
            texts[piece.index].append(piece.text)
            logprobs[piece.index].extend(piece.logprobs or ())
            tokens[piece.index].extend(piece.tokens or ())
            reasons[piece.index] = piece.finish or reasons[piece.index]
        return [
            FinishedChoice(
                index=index,
                text="".join(texts[index]),
                finish_reason=reasons[index],
                logprobs=logprobs[index] if choice.wants_logprobs else None,
                tokens=tokens[index] if choice.wants_tokens else None,
                prompt_logprobs=choice.prompt_logprobs,
                routed_experts=None if choice.routing is None else choice.routing.encoded(),
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(self.choices)
        ]


class StreamedGeneration(Generation):
    """Choices that are shown as they come, each piece one server-sent event.

    Attributes:
        chunks: Events that the response has yet to take.
        full: HELD_BYTES of them lay there, and ``on_full`` was called; whoever has taken them sets it back.
        write: Takes each new event at once, past ``chunks``; None while the response is at work itself.
    """

    __slots__ = ("_events", "_held_bytes", "_make_events", "_on_full", "_opened", "chunks", "full", "write")

    def __init__(
        self,
        on_change: Callable[[], None],
        make_events: Callable[[], Events],
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: make_events: event templates under the present numerics classes."""
        super().__init__(on_change)
        self._make_events = make_events
        self._on_full = on_full
        self._held_bytes = 0
        self.full = False
        self._events: Events | None = None
        self._opened = False
        self.chunks: list[bytes] = []
        self.write: Callable[[bytes], None] | None = None

    @property
    def ready(self) -> bool:
        """Whether the response has something to do now."""
        return self.ended or bool(self.chunks)

    def computed_by(self, numerics_class: str) -> None:
        """Note a numerics class that takes part in the answer; later events name it too."""
        super().computed_by(numerics_class)
        self._events = None

    def experts_dropped(self) -> None:
        """Note that from here on terms of lost experts are missing; later events say so."""
        super().experts_dropped()
        self._events = None

    def show(
        self,
        index: int,
        text: str,
        logprobs: list[TokenLogprobs] | None,
        offset: int,
        finish: str | None,
        tokens: list[int] | None = None,
    ) -> None:
        """Make an event of what became visible, and write it if that can be done at once."""
        events = self._events or self._open()
        ending = None
        if finish is not None:
            ending = Ending(finish, self.choices[index].stop_reason)
            self.open_choices -= 1
        if text or logprobs or tokens:
            event = events.text(index, text, logprobs, offset, tokens, ending)
        else:
            event = b"" if ending is None else events.finish(index, ending)
        if self.write is not None and self.open_choices and event:
            self.write(event)
        elif event or finish is not None or self.chunks:
            self.chunks.append(event)
            self._held_bytes += len(event)
            if self._held_bytes > HELD_BYTES and not self.full and self.open_choices:
                self.full = True
                self._on_full()
            self.on_change()

    def take(self) -> bytes:
        """The events since the last call."""
        chunks, self.chunks, self._held_bytes = self.chunks, [], 0
        return b"".join(chunks)

    def _open(self) -> Events:
        events = self._events = self._make_events()
        if not self._opened:
            self._opened = True
            self.chunks.extend(events.first(index) for index in range(len(self.choices)))
        return events


class Choice:
    """One choice's way from token ids to visible text."""

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_generation",
        "_ids",
        "_index",
        "_matcher",
        "_min_tokens",
        "_names",
        "_plain",
        "_push",
        "_read",
        "_scores",
        "_shown",
        "_silent",
        "_stop_shown",
        "_stops",
        "_waiting",
        "routing",
        "stop_reason",
        "tokens",
        "wants_logprobs",
        "wants_tokens",
    )

    def __init__(
        self,
        *,
        generation: Generation,
        index: int,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        min_tokens: int,
        names: TokenNames | None,
        wants_tokens: bool = False,
        stop_shown: bool = False,
        echo: Echo | None = None,
        scores: PromptScores | None = None,
        routing: Routing | None = None,
        counted: bool = False,
        stops: Container[int] = (),
    ) -> None:
        """Join ``generation`` as choice ``index``.

        Args:
            matcher: None when there are no stop strings.
            min_tokens: Tokens before which no stop string counts.
            names: Given when log-probabilities are wanted.
            wants_tokens: Token ids are handed on with the text.
            stop_shown: What a stop token stands for is shown.
            echo: What is shown before the first token.
            scores: Takes the log-probabilities of the prompt, where they are wanted.
            routing: Takes the experts of its tokens, where they are wanted.
            counted: Each event says what it has used so far.
            stops: The client's stop tokens.
        """
        self._generation = generation
        self._index = index
        self._detokenizer = detokenizer
        self._push = detokenizer.push
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._names = names
        self.tokens = 0
        self._read = 0  # characters read from the detokenizer
        self._shown = 0  # characters handed to the response
        # Log-probabilities of tokens not yet visible, each with the offset of its first character.
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        self._silent = isinstance(detokenizer, Silence)
        plain = matcher is None and names is None and not wants_tokens and echo is None
        self._plain = plain and not counted
        self._echo = echo
        self._scores = scores
        self.routing = routing
        self._stops = stops
        # The stop string or the client's stop token that ended it.
        self.stop_reason: int | str | None = None
        self.wants_logprobs = names is not None
        self.wants_tokens = wants_tokens
        self._ids: list[int] = []  # of tokens not yet handed on
        self._stop_shown = stop_shown
        generation.add(self)

    def token(self, token: int, finish: str, logprob: float | None, top: Alternatives) -> bool:
        """Take the next token of this choice.

        Args:
            finish: "" while it goes on; "length" at its limit; "complete" when a grammar lets nothing follow;
                "stop" when ``token`` is an end token, which has no text of its own.

        Returns:
            True when a stop string ended the choice: the worker does not know of it yet.
        """
        generation = self._generation
        generation.completion_tokens += 1
        if self._plain and not finish:
            text = self._push(token)
            if text:
                offset = self._shown
                self._shown = offset + len(text)
                generation.show(self._index, text, None, offset, None)
            return False
        if self._echo is not None and self._show_echo(self._echo):
            return True
        self.tokens += 1
        if self.wants_tokens:
            self._ids.append(token)
        if finish == "stop":
            self.stop_reason = token if token in self._stops else None
            if self._names is not None and self._silent:
                # Where ids alone are told the last is one of them.
                self._waiting.append((self._read, self._name(token, logprob, top)))
            self._end("stop", self._push(token) if self._stop_shown else "")
            return False
        text = self._push(token)
        if self._names is not None:
            self._waiting.append((self._read, self._name(token, logprob, top)))
        self._read += len(text)
        matcher = self._matcher
        if matcher is not None and self.tokens > self._min_tokens:
            text = matcher.push(text)
            if matcher.stopped:
                self.stop_reason = matcher.found
                self._show(text, "stop", everything=False)
                return True
        if finish:
            self._end("stop" if finish == "complete" else finish, text)
        elif text or self._silent:
            self._show(text, None, everything=self._silent)
        return False

    def judged(self, start: int, scores: Scores) -> None:
        """Take log-probabilities of tokens number ``start`` and on of the prompt; all come before the first token."""
        if self._scores is not None:
            self._scores.take(start, scores)

    @property
    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Those of the prompt by token id, where the client wants them so."""
        return None if self._scores is None else self._scores.by_id()

    def _show_echo(self, echo: Echo) -> bool:
        """Show the prompt, once; True when that is all."""
        self._echo = None
        logprobs = None if self._scores is None else self._scores.named()
        self._read = self._shown = len(echo.text)
        # The token that made the worker speak is not the client's.
        self._generation.completion_tokens -= echo.alone
        finish = "length" if echo.alone else None
        self._generation.show(self._index, echo.text, logprobs, 0, finish, [] if self.wants_tokens else None)
        return echo.alone

    def end(self, finish: str) -> None:
        """End the choice here, for a reason of the gateway's own."""
        self._end(finish)

    def _end(self, finish: str, text: str = "") -> None:
        rest = self._detokenizer.flush()
        matcher = self._matcher
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
        if self.wants_logprobs:
            waiting = self._waiting
            count = 0
            while count < len(waiting) and (everything or waiting[count][0] < self._shown):
                count += 1
            logprobs = [entry for _, entry in waiting[:count]]
            del waiting[:count]
        tokens: list[int] | None = None
        if self.wants_tokens:
            tokens, self._ids = self._ids, []
        self._generation.show(self._index, text, logprobs, offset, finish, tokens)

    def _name(self, token: int, logprob: float | None, top: Alternatives) -> TokenLogprobs:
        names = self._names
        if names is None:
            raise ValueError("no log-probabilities were asked for this choice: check wants_logprobs first")
        chosen = TokenText(
            names.token_text(token), names.token_bytes(token), float("-inf") if logprob is None else logprob
        )
        return TokenLogprobs(
            chosen,
            [TokenText(names.token_text(other), names.token_bytes(other), value) for other, value in top],
        )
