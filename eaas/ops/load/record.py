"""What one client saw of its stream, and how that differs from the same stream of a run without faults. Pure.

Nothing here asks the server how it thinks it did: every figure comes from what clients recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Texts that agree by chance for fewer tokens must not pass for a stream that went on.
_GOES_ON = 4


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
    def ttft_planned_s(self) -> float | None:
        """From the planned time to the first piece."""
        return self.token_s[0] - self.planned_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds for each output token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2 or len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """From sending to the end."""
        return self.ended_s - self.sent_s if self.ended_s is not None and self.sent_s is not None else None

    @property
    def e2e_planned_s(self) -> float | None:
        """From the planned time to the end."""
        return self.ended_s - self.planned_s if self.ended_s is not None else None

    @property
    def dispatch_s(self) -> float | None:
        """How late it was sent."""
        return self.sent_s - self.planned_s if self.sent_s is not None else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each piece and the next."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where one stream left its reference.

    Attributes:
        kind: "lost", "repeated" or "changed".
        at: Characters of text before it.
        tokens: How many tokens; a change counts as one, since all that follows it differs anyhow.
        text: Found and expected there, in short.
    """

    prompt: int
    kind: str
    at: int
    tokens: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What clients saw that they would not have seen without faults.

    Attributes:
        failed: Requests, as `StreamRecord.failed`.
        lost: Tokens of the reference that are missing, those that a failed request never got not counted again.
        repeated: Tokens that came twice.
        changed: Requests whose text, finish reason or token count is another.
        compared: Requests that had a whole reference to be compared with.
        unmatched: Requests without one.
        differences: The first of each kind in each stream.
    """

    failed: int
    lost: int
    repeated: int
    changed: int
    compared: int = 0
    unmatched: int = 0
    differences: tuple[Difference, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether no client saw anything."""
        return self.failed == self.lost == self.repeated == self.changed == 0


def compare(run: Iterable[StreamRecord], reference: Iterable[StreamRecord]) -> Verdict:
    """Each stream of `run` against the stream of the same request in a run without faults.

    A reference that failed is none. Where both sent one piece for each token, tokens are compared; else characters, and
    tokens are counted at the reference's characters for each.
    """
    whole = {record.prompt: record for record in reference if not record.failed}
    failed = compared = unmatched = 0
    differences: list[Difference] = []
    for record in run:
        failed += record.failed
        expected = whole.get(record.prompt)
        if expected is None:
            unmatched += 1
            continue
        compared += 1
        differences += differences_of(record, expected)
    return Verdict(
        failed=failed,
        lost=sum(one.tokens for one in differences if one.kind == "lost"),
        repeated=sum(one.tokens for one in differences if one.kind == "repeated"),
        changed=sum(one.kind == "changed" for one in differences),
        compared=compared,
        unmatched=unmatched,
        differences=tuple(differences),
    )


def differences_of(record: StreamRecord, expected: StreamRecord) -> list[Difference]:
    """How a stream differs from its reference, in order; a change is the last, as all after it differs anyhow."""
    by_token = all(one.failed or one.tokens in (None, len(one.pieces)) for one in (record, expected))
    found: Sequence[str] = record.pieces if by_token else record.text
    wanted: Sequence[str] = expected.pieces if by_token else expected.text
    per_token = 1.0 if by_token else max(1.0, len(wanted) / max(1, expected.output_tokens))
    goes_on = math.ceil(_GOES_ON * per_token)
    differences: list[Difference] = []

    def tell(kind: str, here: int, there: int, units: int = 0) -> None:
        shown = f"{''.join(found[here : here + 8])[:40]!r}, expected {''.join(wanted[there : there + 8])[:40]!r}"
        tokens = 1 if kind == "changed" else math.ceil(units / per_token)
        at = len("".join(found[:here]))
        differences.append(Difference(prompt=record.prompt, kind=kind, at=at, tokens=tokens, text=shown))

    here = there = 0
    while True:
        same = _equal(found, here, wanted, there)
        here, there = here + same, there + same
        left_found, left_wanted = len(found) - here, len(wanted) - there
        if not left_found:
            if left_wanted and not record.failed:
                tell("lost", here, there, left_wanted)
            break
        # What has just come and comes again, or a gap in what was wanted: whichever explains `found` best.
        repeats = range(1, min(here, left_found) + 1)
        again, gone = (
            _best(found, here, wanted, there, goes_on, skips)
            for skips in (
                ((n, 0) for n in repeats if found[here - n : here] == found[here : here + n]),
                ((0, n) for n in range(1, left_wanted) if found[here] == wanted[there + n]),
            )
        )
        if max(again[0], gone[0]) < 0:
            tell("changed", here, there)
            break
        if again[0] >= gone[0]:
            tell("repeated", here, there, again[1])
            here += again[1]
        else:
            tell("lost", here, there, gone[1])
            there += gone[1]
    if not differences and not record.failed and _ends(record) != _ends(expected):
        text = f"ended {_ends(record)}, expected {_ends(expected)}"
        differences.append(Difference(prompt=record.prompt, kind="changed", at=len(record.text), tokens=1, text=text))
    return differences


def _ends(record: StreamRecord) -> tuple[str | None, int | None]:
    return record.finish, record.tokens


def _equal(a: Sequence[str], i: int, b: Sequence[str], j: int) -> int:
    """Length of the longest equal run from a[i] and b[j], by doubling and halving slices."""
    most = min(len(a) - i, len(b) - j)
    least, step = 0, 1
    while step and least < most:
        size = min(step, most - least)
        if a[i + least : i + least + size] == b[j + least : j + least + size]:
            least += size
            step *= 2
        else:
            step = size // 2
    return least


def _onward(found: Sequence[str], here: int, wanted: Sequence[str], there: int, goes_on: int) -> int:
    """How far both agree from here; -1 where that is too short to show that the stream went on."""
    same = _equal(found, here, wanted, there)
    both_end = len(found) - here == same == len(wanted) - there
    return same if both_end or same >= goes_on else -1


def _best(
    found: Sequence[str], here: int, wanted: Sequence[str], there: int, goes_on: int, skips: Iterable[tuple[int, int]]
) -> tuple[int, int]:
    """Of ways to skip so many in `found` and in `wanted`: how far both agree after the best, and how many it skips."""
    ways = ((_onward(found, here + a, wanted, there + b, goes_on), -a - b) for a, b in skips)
    agreement, skipped = max(ways, default=(-1, 0))
    return agreement, -skipped
