"""Which tokens of a request are guessed ahead, and when that pays. Pure.

A guess (a draft) is a row of the same step as the token before it. It is kept if the token that is chosen before it is
the guess, and then its own logits choose the next token: the bits of a row do not depend on the rows beside it, so that
nothing a client sees tells whether there were drafts. They come from what the request has said or was told before
(prompt lookup), or from its grammar, where that leaves one way to go on.

A draft costs a row, which makes the step longer by what `StepTime` has learned, and saves a step's part with the
chance that drafts of its kind have had: it is made only where that raises the tokens a second of all requests together.
Where it does not, one is tried from time to time, for at most PROBING of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from eaas.worker.request import Request, TokenArray

# Tokens that must be the same before a place where the output may go on as it did there. Where LONG are, it mostly
# does.
GRAM, LONG = 3, 8
# Tokens of a prompt that are remembered: its last.
MOST_TOLD = 1 << 14
# Kinds of drafts, and the chance that each has to begin with.
FORCED, COPIED, ALIKE = range(3)
CHANCES = (0.9, 0.8, 0.3)
# How fast what a request was right about, and what all were, displaces what was thought before.
OWN, ALL = 1 / 8, 1 / 64
# A draft must raise the tokens a second by so much of its own cost: rows also cost time between steps.
MARGIN = 1.1
PROBING = 0.005
# Steps without drafts after one with them ended for want of experts.
STILL_STEPS = 4096
_SHIFT = 20  # bits of a token; beyond, two sequences may look alike, which costs a wrong guess


class Lookup:
    """Where a request has said, or was told, what it has said last.

    Attributes:
        chances: Of each kind, that the next draft of it is right.
        kind: Of the drafts that are out.
        said: How much of the output is known here.
    """

    __slots__ = ("_at", "_gram", "_places", "_tokens", "chances", "kind", "said")

    def __init__(self, prompt: TokenArray, chances: Sequence[float]) -> None:
        """Args: chances: of each kind, as long as nothing is known of this request."""
        self.chances, self.kind = list(chances), FORCED
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}
        self._gram = self._at = self.said = 0
        self._take(prompt[-MOST_TOLD:].tolist())

    def follow(self, output: Sequence[int]) -> None:
        """Take what was added to the output since the last time."""
        self._take(output[self.said :])
        self.said = len(output)

    def guess(self, most: int) -> list[int]:
        """What followed the last place that looks like this one, at most so many tokens; sets `kind`."""
        at, tokens = self._at, self._tokens
        if not at:
            return []
        same = GRAM
        while same < LONG and at > same and tokens[at - 1 - same] == tokens[-1 - same]:
            same += 1
        self.kind = COPIED if same == LONG else ALIKE
        return tokens[at : at + most]

    def _take(self, made: Sequence[int]) -> None:
        tokens, places, gram, at = self._tokens, self._places, self._gram, self._at
        mask = (1 << GRAM * _SHIFT) - 1
        for token in made:
            tokens.append(token)
            gram = (gram << _SHIFT | token) & mask
            at = places.get(gram, 0)
            places[gram] = len(tokens)
        # The first tokens have too few before them to be known again.
        self._gram, self._at = gram, at if at >= GRAM else 0


class StepTime:
    """How long steps take by their rows: a line through those seen, the last most."""

    def __init__(self) -> None:
        # Sums over the steps: of weights, rows, seconds, rows * rows and rows * seconds.
        self._weight = self._rows = self._s = self._rows2 = self._rows_s = 0.0
        # Until steps of two sizes were seen, a row is thought to take a quarter of a step of one.
        self._line = 3.0, 1.0

    def took(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. One that waited for something else counts little."""
        if self._weight:
            seconds = min(seconds, 3 * self.of(rows))
        kept = 0.99
        self._weight = kept * self._weight + 1
        self._rows = kept * self._rows + rows
        self._s = kept * self._s + seconds
        self._rows2 = kept * self._rows2 + rows * rows
        self._rows_s = kept * self._rows_s + rows * seconds
        mean, mean_s = self._rows / self._weight, self._s / self._weight
        varied = self._rows2 / self._weight - mean * mean
        share = self._line[1] / (self._line[0] + self._line[1] * mean)
        if varied > 0.01:
            share = (self._rows_s / self._weight - mean * mean_s) / varied / mean_s
        # A row costs something, and no more than its even part.
        a_row = mean_s * min(max(share, 0.02 / mean), 1 / mean)
        self._line = mean_s - a_row * mean, a_row

    @property
    def a_row_s(self) -> float:
        """By how much one more row makes a step longer."""
        return self._line[1]

    def of(self, rows: int) -> float:
        """How long a step of so many rows takes."""
        return self._line[0] + self._line[1] * rows


class Speculation:
    """The drafts of one scheduler's requests.

    Attributes:
        most: Tokens guessed ahead of a request; 0: none.
        drafted, accepted: Tokens that were guessed and computed, and those that were right.
    """

    def __init__(self, most: int) -> None:
        self.drafted = self.accepted = 0
        self.most = most
        self._lookups: dict[Request, Lookup] = {}
        self._time = StepTime()
        self._chances = list(CHANCES)
        # Seconds that may be lost on drafts that are likely wrong.
        self._spare_s = 0.0
        self._still = 0

    @property
    def wrong(self) -> int:
        """Rows that were computed for nothing."""
        return self.drafted - self.accepted

    def draft(self, requests: Sequence[Request]) -> None:
        """Choose the drafts of those that generate, for the next step: `Request.drafts`.

        Of one whose grammar forbids some of them, fewer will do.
        """
        offers: list[tuple[float, int, int]] = []
        guesses: list[list[int]] = []
        for request in requests:
            request.drafts = []
        if self._still:
            self._still -= 1
            return
        for number, request in enumerate(requests):
            guess, rate = self._guess(request)
            guesses.append(guess)
            chance = rate
            for ahead in range(len(guess)):
                offers.append((chance, -ahead, number))
                chance *= rate
        time_, rows, taken = self._time, len(requests), 0
        made, cost_s = float(rows), MARGIN * time_.a_row_s
        offers.sort(reverse=True)
        while taken < len(offers) and offers[taken][0] * time_.of(rows) > cost_s * made:
            made += offers[taken][0]
            rows += 1
            taken += 1
        if not taken and offers and self._spare_s >= time_.a_row_s:
            taken = 1
            self._spare_s -= time_.a_row_s
        for _, _, number in offers[:taken]:
            drafts = requests[number].drafts
            drafts.append(guesses[number][len(drafts)])

    def judged(self, request: Request, right: int) -> None:
        """Learn from the drafts of a request, of which the first `right` were what was chosen."""
        self.drafted += len(request.drafts)
        self.accepted += right
        lookup = self._lookups[request]
        kind = lookup.kind
        for found in [1.0] * right + [0.0] * (right < len(request.drafts)):
            lookup.chances[kind] += OWN * (found - lookup.chances[kind])
            self._chances[kind] += ALL * (found - self._chances[kind])

    def took(self, rows: int, seconds: float) -> None:
        """A step of so many rows, each of which gave logits, took so long."""
        self._time.took(rows, seconds)
        self._spare_s = min(self._spare_s + PROBING * seconds, 2 * self._time.a_row_s)

    def lost(self, requests: Sequence[Request]) -> None:
        """A step of these ended for want of experts, which may be wanted by drafts alone: make none for a while."""
        self._still = STILL_STEPS
        for request in requests:
            request.drafts = []

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._lookups.pop(request, None)

    # -- inside ----------------------------------------------------------------------------------------------

    def _guess(self, request: Request) -> tuple[list[int], float]:
        """Tokens that may come next, and the chance of each if those before it were right."""
        params = request.params
        room = min(self.most, params.max_tokens - len(request.output) - 1)
        # What was noted, or left out, for a row that is then not kept would be told of the request. Those in the
        # background may have few rows.
        if room <= 0 or params.drop_lost_experts or params.wants_routing or request.share.background:
            return [], 0.0
        lookup = self._lookups.get(request)
        if lookup is None:
            lookup = self._lookups[request] = Lookup(request.prompt, self._chances)
        lookup.follow(request.output)
        lookup.kind = FORCED
        forced = [] if request.constraint is None else request.constraint.forced()[:room]
        guess = forced or lookup.guess(room)
        return guess, lookup.chances[lookup.kind]
