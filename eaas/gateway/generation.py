"""From token ids to what one request's client is shown: text, stop strings, log-probabilities, the end. Pure.

A choice turns each accepted token into visible text at once, when the token arrives, so that a stop string
cancels the work even while the client reads slowly. What became visible waits in the generation's list until
the response takes it: a slow reader holds up nobody but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from eaas.gateway.errors import ErrorReply
from eaas.gateway.openai_format import FinishedChoice, TokenLogprobs, TokenText, Usage
from eaas.gateway.stops import StopMatcher

Alternatives = Sequence[tuple[int, float]]


class Detokenizer(Protocol):
    """Token ids of one choice in, text out; incomplete characters are kept until they are whole."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class TokenNames(Protocol):
    """Text and bytes of single tokens, for log-probabilities."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class Piece(NamedTuple):
    """What became visible of one choice.

    Attributes:
        offset: Characters of the choice before ``text``.
        finish: OpenAI's finish_reason when the choice ends with this piece, else None.
    """

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None
    offset: int
    finish: str | None


class Generation:
    """All choices of one request, and what of them the response has yet to take.

    ``on_change`` is called when there is something to take: for a stream each visible piece, for a whole
    response only the end of the last choice, or a failure.
    """

    __slots__ = (
        "choices",
        "completion_tokens",
        "error",
        "numerics_classes",
        "on_change",
        "open_choices",
        "pieces",
        "streamed",
    )

    def __init__(self, *, streamed: bool) -> None:
        self.streamed = streamed
        self.choices: list[Choice] = []
        self.open_choices = 0
        self.completion_tokens = 0
        self.pieces: list[Piece] = []
        self.error: ErrorReply | None = None
        self.numerics_classes: tuple[str, ...] = ()
        self.on_change: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether every choice has ended or the request failed."""
        return self.open_choices == 0 or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether the response can take something now."""
        return self.ended or (self.streamed and bool(self.pieces))

    def add(self, choice: Choice) -> None:
        """Count in a choice, before its first token."""
        self.choices.append(choice)
        self.open_choices += 1

    def computed_by(self, numerics_class: str) -> None:
        """Note a numerics class that takes part in the answer."""
        if numerics_class not in self.numerics_classes:
            self.numerics_classes = (*self.numerics_classes, numerics_class)

    def show(self, piece: Piece) -> None:
        """Hand a piece to the response."""
        self.pieces.append(piece)
        if piece.finish is not None:
            self.open_choices -= 1
        if self.on_change is not None and (self.streamed or self.open_choices == 0):
            self.on_change()

    def fail(self, reply: ErrorReply) -> None:
        """End the request with an error; the first one counts."""
        if self.error is None:
            self.error = reply
            if self.on_change is not None:
                self.on_change()

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def usage(self, prompt_tokens: int) -> Usage:
        """Tokens so far; every accepted token counts, shown or not."""
        return Usage(prompt=prompt_tokens, completion=self.completion_tokens)

    def finished_choices(self) -> list[FinishedChoice]:
        """All choices in order, put together from their pieces, once the generation has ended without
        error."""
        texts: list[list[str]] = [[] for _ in self.choices]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in self.choices]
        reasons = ["length"] * len(self.choices)
        for piece in self.take():
            texts[piece.index].append(piece.text)
            logprobs[piece.index].extend(piece.logprobs or ())
            reasons[piece.index] = piece.finish or reasons[piece.index]
        return [
            FinishedChoice(
                index=index,
                text="".join(texts[index]),
                finish_reason=reasons[index],
                logprobs=logprobs[index] if choice.wants_logprobs else None,
            )
            for index, choice in enumerate(self.choices)
        ]


class Choice:
    """One choice's way from token ids to visible text."""

    __slots__ = (
        "_detokenizer",
        "_generation",
        "_index",
        "_matcher",
        "_min_tokens",
        "_names",
        "_read",
        "_shown",
        "_tokens",
        "_waiting",
        "wants_logprobs",
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
    ) -> None:
        """Join ``generation`` as choice ``index``.

        Args:
            matcher: None when there are no stop strings.
            min_tokens: Tokens before which no stop string counts.
            names: Given when log-probabilities are wanted.
        """
        self._generation = generation
        self._index = index
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._names = names
        self._tokens = 0
        self._read = 0  # characters read from the detokenizer
        self._shown = 0  # characters handed to the response
        # Log-probabilities of tokens not yet visible, each with the offset of its first character.
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        self.wants_logprobs = names is not None
        generation.add(self)

    def token(self, token: int, finish: str, logprob: float | None, top: Alternatives) -> bool:
        """Take the next token of this choice.

        Args:
            finish: "" while it goes on; "length" at its limit; "stop" when ``token`` is an end token, which
                has no text of its own.

        Returns:
            True when a stop string ended the choice: the worker does not know of it yet.
        """
        generation = self._generation
        generation.completion_tokens += 1
        self._tokens += 1
        if finish == "stop":
            self._end("stop")
            return False
        text = self._detokenizer.push(token)
        if self._names is not None:
            self._waiting.append((self._read, self._name(token, logprob, top)))
        self._read += len(text)
        matcher = self._matcher
        if matcher is not None and self._tokens > self._min_tokens:
            text = matcher.push(text)
            if matcher.stopped:
                self._show(text, "stop", everything=False)
                return True
        if finish:
            self._end(finish, text)
        elif text:
            self._show(text, None, everything=False)
        return False

    def _end(self, finish: str, text: str = "") -> None:
        rest = self._detokenizer.flush()
        matcher = self._matcher
        if matcher is None:
            self._show(text + rest, finish, everything=True)
            return
        # The last characters may still complete a stop string.
        text += matcher.push(rest)
        stopped = matcher.stopped
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
        self._generation.show(Piece(self._index, text, logprobs, offset, finish))

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
