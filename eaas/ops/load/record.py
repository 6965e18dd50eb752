"""What one client saw of its stream. Pure: the driver writes it, every judge reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True, kw_only=True)
class StreamRecord:
    """One streamed request. Times are seconds since the run's start, on one monotonic clock.

    Attributes:
        prompt: Index of the request's body in the workload; runs of one workload are compared by it.
        planned_s: When the arrival process wanted it sent.
        sent_s: When it was handed to a connection; None: it never was.
        status: HTTP status; 0: no response came.
        token_s: When each piece of text came.
        pieces: The texts, one for each event that carried any; most servers send one for each token.
        finish: The finish reason; None: the stream never said one.
        error: "KIND: text", where KIND is connect, closed, http STATUS, stream, timeout or protocol; None: no error.
        tokens: Output tokens as the server counts them; None: it does not say.
        prompt_tokens: Prompt tokens, likewise.
        retry_after_s: When the server wants to be asked again, after its answer; None: it does not say.
        ended_s: When the stream ended, well or badly; None: it has not.
    """

    prompt: int
    planned_s: float
    sent_s: float | None = None
    status: int = 0
    token_s: list[float] = field(default_factory=list[float])
    pieces: list[str] = field(default_factory=list[str])
    finish: str | None = None
    error: str | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    retry_after_s: float | None = None
    ended_s: float | None = None

    @property
    def failed(self) -> bool:
        """Whether its client was let down: an error, a status other than 200, or a stream that ended without finish."""
        return self.error is not None or self.status != 200 or self.finish is None

    @property
    def error_kind(self) -> str:
        """The kind of its failure; empty: it did not fail."""
        if self.error is not None:
            return self.error.partition(":")[0]
        if self.status != 200:
            return f"http {self.status}"
        return "unfinished" if self.finish is None else ""

    @property
    def text(self) -> str:
        """All that came."""
        return "".join(self.pieces)

    @property
    def output_tokens(self) -> int:
        """Tokens that came: by the server's count, else one for each piece."""
        return len(self.pieces) if self.tokens is None else self.tokens

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first piece, in seconds; None without either."""
        return self.token_s[0] - self.sent_s if self.token_s and self.sent_s is not None else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each piece and the next."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]
