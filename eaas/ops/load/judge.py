"""What a run was worth: its texts against a fault-free run's, its stalls, its throughput around faults. Pure.

Nothing here asks the server how it thinks it did: every figure comes from what clients recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from eaas.ops.load.record import StreamRecord

# Throughput is back when a window reaches this share of what it was before the fault.
RECOVERED = 0.95


class NothingToJudge(ValueError):
    """The records say nothing about the question; the text says what is needed."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where one stream left its reference.

    Attributes:
        prompt: Index of the request.
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
        failed: Requests with an error, a status other than 200, or no finish.
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


@dataclass(frozen=True, kw_only=True)
class FaultSpan:
    """A fault on the time line of a run, in seconds since its start; a kill ends as it begins."""

    began_s: float
    ended_s: float
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class FaultNote:
    """An event of a chaos plan. at_s: since the run's start. phase: "began", "ended" or "refused"."""

    at_s: float
    phase: str
    id: str
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a run took one fault.

    Attributes:
        recovery_s: From the fault until a sliding window is back at RECOVERED of the rate before all faults; 0 where it
            never fell below, None where it never came back.
        stalls_s: Added stall of each stream that waited at some time soon after the fault.
    """

    fault: FaultSpan
    recovery_s: float | None
    stalls_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Output tokens per second around faults.

    Attributes:
        before: From the start to the first fault.
        during: From there until the last fault has ended and throughput is back (or the run is over).
        after: The rest; None: no rest.
        loss: Share of `before` that is missing in the `loss_s` seconds after the first fault; negative: it rose.
    """

    before: float
    during: float
    after: float | None
    loss: float
    loss_s: float
    recoveries: tuple[Recovery, ...]


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Mean and nearest-rank percentiles of values in one unit."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and the interval that holds it."""

    median: float
    low: float
    high: float


def spans_of(notes: Iterable[FaultNote], over_s: float) -> list[FaultSpan]:
    """Faults that began, with their ends; one whose end nobody saw lasted until `over_s`, a kill for no time.

    Args:
        over_s: When the run was over, in seconds since its start.
    """
    began: dict[str, FaultNote] = {}
    spans: list[FaultSpan] = []
    for note in notes:
        if note.phase == "began":
            began[note.id] = note
        elif note.phase == "ended" and note.id in began:
            first = began.pop(note.id)
            spans.append(FaultSpan(began_s=first.at_s, ended_s=note.at_s, text=first.text))
    for left in began.values():
        ended_s = left.at_s if left.kind == "kill" else max(left.at_s, over_s)
        spans.append(FaultSpan(began_s=left.at_s, ended_s=ended_s, text=left.text))
    return sorted(spans, key=lambda span: span.began_s)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of sorted values: the least value that `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Mean and percentiles; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.50),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        most=ordered[-1],
    )


def bootstrap_interval(
    values: Sequence[float], seed: int, *, level: float = 0.95, draws: int = 10_000
) -> Interval:
    """The median of `values` (such as paired differences) and its percentile bootstrap interval.

    Raises:
        NothingToJudge: no values.
    """
    if not values:
        raise NothingToJudge("0 values have no median; at least 1 is needed.")
    found = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(found), size=(draws, len(found)))
    medians = np.sort(np.median(found[picks], axis=1))
    edge = (1.0 - level) / 2.0
    low, high = np.quantile(medians, [edge, 1.0 - edge])
    return Interval(median=float(np.median(found)), low=float(low), high=float(high))


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
        shown = (
            f"{''.join(found[here : here + 8])[:40]!r}, expected {''.join(wanted[there : there + 8])[:40]!r}"
        )
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
        again = _best_repeat(found, here, wanted, there, goes_on)
        gone = _best_loss(found, here, wanted, there, goes_on)
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
        differences.append(
            Difference(prompt=record.prompt, kind="changed", at=len(record.text), tokens=1, text=text)
        )
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


# Texts that agree by chance for fewer tokens must not pass for a stream that went on.
_GOES_ON = 4


def _onward(found: Sequence[str], here: int, wanted: Sequence[str], there: int, goes_on: int) -> int:
    """How far both agree from here; -1 where that is too short to show that the stream went on."""
    same = _equal(found, here, wanted, there)
    both_end = len(found) - here == same == len(wanted) - there
    return same if both_end or same >= goes_on else -1


def _best_repeat(
    found: Sequence[str], here: int, wanted: Sequence[str], there: int, goes_on: int
) -> tuple[int, int]:
    """The repetition of what has just come that explains `found` best: (agreement after it, its length)."""
    best = (-1, 0)
    for size in range(1, min(here, len(found) - here) + 1):
        if found[here - size : here] == found[here : here + size]:
            best = max(best, (_onward(found, here + size, wanted, there, goes_on), -size))
    return best[0], -best[1]


def _best_loss(
    found: Sequence[str], here: int, wanted: Sequence[str], there: int, goes_on: int
) -> tuple[int, int]:
    """The gap in `wanted` that explains `found` best: (agreement after it, its length)."""
    best = (-1, 0)
    for size in range(1, len(wanted) - there):
        if found[here] == wanted[there + size]:
            best = max(best, (_onward(found, here, wanted, there + size, goes_on), -size))
    return best[0], -best[1]


def added_stalls(records: Iterable[StreamRecord], fault_s: float, window_s: float = 5.0) -> list[float]:
    """For each stream that waits at some time in the window after the fault: its longest such wait, less what is usual.

    Waits are those for the first piece, for each next one and for the end; one that touches the window counts whole,
    wherever it began or ended, and so does a stream that began after the fault. Usual is, of the first wait, the median
    over streams whose first wait does not touch the window; of the others, that stream's median gap, and nothing where
    fewer than three pieces came.

    Args:
        fault_s: When the fault struck.
        window_s: Seconds after it in which a wait is taken for its effect.

    Returns:
        Seconds, one for each such stream; at least 0.
    """
    records = list(records)

    def touches(earlier: float, later: float) -> bool:
        return later > fault_s and earlier < fault_s + window_s

    calm = [
        ttft_s
        for record in records
        if (ttft_s := record.ttft_s) is not None
        and not touches(record.token_s[0] - ttft_s, record.token_s[0])
    ]
    usual_ttft_s = median(calm) if calm else 0.0
    stalls: list[float] = []
    for record in records:
        sent_s, ended_s, times = record.sent_s, record.ended_s, record.token_s
        if sent_s is None or ended_s is None or not touches(sent_s, ended_s):
            continue
        usual_s = median(record.gaps_s) if len(times) >= 3 else 0.0
        points = [sent_s, *times, ended_s]
        waits = [
            later - earlier - (usual_s if number else usual_ttft_s)
            for number, (earlier, later) in enumerate(pairwise(points))
            if touches(earlier, later)
        ]
        stalls.append(max(0.0, *waits))
    return stalls


class Timeline:
    """Arrivals of all streams' output tokens, for rates between any two moments."""

    def __init__(self, records: Iterable[StreamRecord]) -> None:
        times: list[float] = []
        weights: list[float] = []
        for record in records:
            # Where a server puts several tokens into one piece, each piece stands for its share of them.
            pieces = len(record.token_s)
            times += record.token_s
            weights += [record.output_tokens / pieces if record.tokens and pieces else 1.0] * pieces
        order = np.argsort(np.asarray(times, dtype=np.float64), kind="stable")
        self._times: NDArray[np.float64] = np.asarray(times, dtype=np.float64)[order]
        self._sums: NDArray[np.float64] = np.concatenate(
            ([0.0], np.cumsum(np.asarray(weights, dtype=np.float64)[order]))
        )

    @property
    def last_s(self) -> float:
        """When the last token came; 0 without any."""
        return float(self._times[-1]) if len(self._times) else 0.0

    def rate(self, from_s: float, to_s: float) -> float:
        """Tokens per second that came in [from_s, to_s); 0 of an empty span."""
        if to_s <= from_s:
            return 0.0
        first, last = np.searchsorted(self._times, [from_s, to_s], side="left")
        return float(self._sums[last] - self._sums[first]) / (to_s - from_s)


def windows(
    records: Sequence[StreamRecord],
    faults: Sequence[FaultSpan],
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    loss_s: float = 30.0,
    slide_s: float = 1.0,
    stall_s: float = 5.0,
) -> Windows:
    """Throughput before, during and after faults, and how the run took each of them.

    Args:
        start_s: Where steady load begins; what came earlier is left out.
        end_s: Where it ends; default: the last token.
        loss_s: Span after the first fault over which the loss is counted, as far as the run goes.
        slide_s: Width of the window that slides on after a fault.
        stall_s: A fall of throughput or a silence within this after a fault is its effect.

    Raises:
        NothingToJudge: no fault, or no steady load before the first or after it.
    """
    if not faults:
        raise NothingToJudge("0 faults; at least 1 is needed for windows around it.")
    ordered = sorted(faults, key=lambda fault: fault.began_s)
    first_s = ordered[0].began_s
    line = Timeline(records)
    over_s = line.last_s if end_s is None else end_s
    before = line.rate(start_s, first_s)
    if not before or over_s <= first_s:
        raise NothingToJudge(
            f"{before:.3g} tokens/s from {start_s:g} s to the first fault at {first_s:g} s, and the run ends at "
            f"{over_s:g} s; tokens on both sides of the fault are needed."
        )
    recoveries = tuple(
        Recovery(
            fault=fault,
            recovery_s=_recovery(line, fault.began_s, over_s, before * RECOVERED, slide_s, stall_s),
            stalls_s=tuple(added_stalls(records, fault.began_s, stall_s)),
        )
        for fault in ordered
    )
    settled_s = first_s
    for one in recoveries:
        back_s = over_s if one.recovery_s is None else one.fault.began_s + one.recovery_s
        settled_s = max(settled_s, back_s, one.fault.ended_s)
    settled_s = min(max(settled_s, first_s + slide_s), over_s)
    loss_to_s = min(first_s + loss_s, over_s)
    return Windows(
        before=before,
        during=line.rate(first_s, settled_s),
        after=line.rate(settled_s, over_s) if over_s > settled_s else None,
        loss=1.0 - line.rate(first_s, loss_to_s) / before,
        loss_s=loss_to_s - first_s,
        recoveries=recoveries,
    )


def loss_between(
    run: Iterable[StreamRecord], reference: Iterable[StreamRecord], from_s: float, to_s: float
) -> float | None:
    """Share of the reference's tokens between two moments that the run lacks; None where the reference had none.

    Two runs of one open loop and seed were offered the same load at the same times, so its ups and downs cancel.
    """
    expected = Timeline(reference).rate(from_s, to_s)
    return 1.0 - Timeline(run).rate(from_s, to_s) / expected if expected else None


def _recovery(
    line: Timeline, fault_s: float, over_s: float, enough: float, slide_s: float, stall_s: float
) -> float | None:
    """Seconds from the fault to the first sliding window that is back, after the first that is not."""
    step_s = slide_s / 20.0
    fallen = False
    for number in range(math.floor(max(0.0, over_s - slide_s - fault_s) / step_s) + 1):
        after_s = number * step_s
        rate = line.rate(fault_s + after_s, min(fault_s + after_s + slide_s, over_s))
        if fallen and rate >= enough:
            return after_s
        if not fallen and after_s > stall_s:
            return 0.0
        fallen = fallen or rate < enough
    return None if fallen else 0.0
