"""Which tokens of a request are guessed ahead, and when that pays. Pure.

A guess (a draft) is a row of the same step as the token before it. It is kept if the token that is chosen before it is
the guess, and then its own logits choose the next token: the bits of a row do not depend on the rows beside it, so that
nothing a client sees tells whether there were drafts. They come from what the request has said or was told before
(prompt lookup), or from its grammar, where that leaves one way to go on.

A draft costs a row, which makes the step longer by what `StepTime` has learned, and saves a step's part with the
chance that guesses of its kind have had, whether or not they were drafts: it is made only where that raises the tokens
a second of all requests together. Looking for guesses costs time too: where none is made again and again, they are
looked for ever more seldom.
"""

from __future__ import annotations

from collections.abc import Sequence

from eaas.worker.request import Request, TokenArray
from eaas.worker.step_time import StepTime

# Tokens that must be the same before a place where the output may go on as it did there. Where LONG are, it mostly
# does.
GRAM, LONG = 3, 8
# Tokens of a prompt that are remembered: its last.
MOST_TOLD = 1 << 14
# Kinds of guesses, and the chance that each has to begin with.
FORCED, COPIED, ALIKE = range(3)
CHANCES = (0.9, 0.8, 0.3)
# How fast a guess that was right or wrong displaces what was thought of a request, and a request what of others.
OWN, ALL = 1 / 16, 1 / 4
# Drafts must raise the tokens a second by more than so much of what they cost: rows also cost time between steps.
MARGIN = 1.1
# Part of the time for drafts that do not seem to pay: what they cost may have been learned on a bad day.
PROBING = 0.001
# Of steps with drafts, one after another, one in so many has twice as many: what a longer one takes must be tried.
MORE_EVERY = 20
# After so many steps with drafts, one after another, there is one without, so that they are held against what is true.
MOST_STREAK = 50
# After so many looks in vain one step is left out between two, after twice as many two, up to the longest pause; a new
# request goes on with what others have learned, up to a shorter one.
LOOKS, LONGEST_PAUSE, FIRST_PAUSE = 8, 16, 8
# Steps without drafts after one with them ended for want of experts.
STILL_STEPS = 4096
_SHIFT = 20  # bits of a token; beyond, two sequences may look alike, which costs a wrong guess


class Patience:
    """How often it is worth to look for guesses of one sort.

    Attributes:
        vain: Looks of which nothing came, one after another.
        next: Number of the step after which to look.
    """

    __slots__ = ("next", "vain")

    def __init__(self, vain: int) -> None:
        """Args: vain: what others have seen."""
        self.vain, self.next = min(vain, LOOKS * FIRST_PAUSE), 0

    def nothing(self, step: int) -> None:
        """A look after a step was in vain."""
        self.vain += 1
        pause = min(self.vain // LOOKS, LONGEST_PAUSE)
        self.next = step + 1 + pause
        if pause >= FIRST_PAUSE:
            # After the same step for all.
            self.next += -self.next % FIRST_PAUSE

    def something(self) -> None:
        """A guess was right."""
        self.vain //= 2
        self.next = 0


class Lookup:
    """Where a request has said, or was told, what it has said last.

    Attributes:
        chances: Of each kind, that the next guess of it is right.
        kind: Of the guess that was made last.
        said: How much of the output is known here.
        patience: Of each kind, how often to look for it.
        untried: A guess of the token that comes after those known, where it is no draft, after its kind; None: there is
            none.
    """

    __slots__ = ("_at", "_gram", "_places", "_tokens", "chances", "kind", "patience", "said", "untried")

    def __init__(self, prompt: TokenArray, chances: Sequence[float], vain: Sequence[int] = (0, 0)) -> None:
        """Args: chances, vain: of others, as long as nothing is known of this one: asking a grammar, and looking."""
        self.chances, self.kind = list(chances), FORCED
        self.untried: tuple[int, int] | None = None
        copying = Patience(vain[1])
        self.patience = Patience(vain[0]), copying, copying
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}
        self._gram = self._at = self.said = 0
        self._take(prompt[-MOST_TOLD:].tolist())

    def follow(self, output: Sequence[int]) -> None:
        """Take what was added to the output since the last time, and learn from a guess that was no draft."""
        if self.untried is not None and self.said < len(output):
            kind, token = self.untried
            self.chances[kind] += OWN * ((output[self.said] == token) - self.chances[kind])
        self.untried = None
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


class Speculation:
    """The drafts of one scheduler's requests.

    Attributes:
        most: Tokens guessed ahead of a request; 0: none.
        out: Whether any request has drafts, as they were chosen last.
        drafted, accepted: Tokens that were guessed and computed, and those that were right.
    """

    def __init__(self, most: int, rows: int) -> None:
        """Args: rows: most of a step."""
        self.drafted = self.accepted = 0
        self.most, self.out = most, False
        self._lookups: dict[Request, Lookup] = {}
        self._rows, self._time = rows, StepTime(rows)
        self._chances = list(CHANCES)
        # Looks in vain, as they were when requests ended.
        self._vain = 0, 0
        # Seconds that may be lost on drafts that do not seem to pay.
        self._spare_s, self._probing = 0.0, False
        self._streak = 0
        # Steps so far; and until which none is looked for.
        self._step = self._until = 0

    @property
    def looks(self) -> bool:
        """Whether `draft` would look for any."""
        return self.most > 0 and self._step >= self._until

    @property
    def wrong(self) -> int:
        """Rows that were computed for nothing."""
        return self.drafted - self.accepted

    def draft(self, requests: Sequence[Request]) -> None:
        """Choose the drafts of those that generate, for the next step: `Request.drafts`.

        Of one whose grammar forbids some of them, fewer will do.
        """
        self.out = False
        offers: list[tuple[float, int, int]] = []
        guesses: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            request.drafts = []
            guess, rate = self._guess(request)
            if guess:
                guesses[number] = guess
                offers += [(rate ** (1 + ahead), -ahead, number) for ahead in range(len(guess))]
        offers.sort(reverse=True)
        for _, _, number in offers[: self._worth([chance for chance, _, _ in offers], len(requests))]:
            drafts = requests[number].drafts
            drafts.append(guesses[number][len(drafts)])
            self.out = True
        self._streak = self._streak + 1 if self.out else 0
        for number, guess in guesses.items():
            request = requests[number]
            if request.drafts:
                continue
            lookup = self._lookups[request]
            lookup.patience[lookup.kind].nothing(self._step)
            if lookup.kind != FORCED:
                lookup.untried = lookup.kind, guess[0]
        if not self.out:
            known = [request for request in requests if request in self._lookups]
            due = [one.next for r in known for one in self._lookups[r].patience[r.constraint is None :]]
            self._until = min([self._step + FIRST_PAUSE, *due])

    def judged(self, request: Request, right: int) -> None:
        """Learn from the drafts of a request, of which the first `right` were what was chosen."""
        self.drafted += len(request.drafts)
        self.accepted += right
        lookup = self._lookups[request]
        kind = lookup.kind
        if right and not self._probing:
            lookup.patience[kind].something()
        for found in [1.0] * right + [0.0] * (right < len(request.drafts)):
            lookup.chances[kind] += OWN * (found - lookup.chances[kind])

    def forbidden(self, request: Request) -> None:
        """The grammar of a request lets none of its drafts through: as good as wrong, without a row."""
        lookup = self._lookups[request]
        lookup.chances[lookup.kind] *= 1 - OWN
        lookup.patience[lookup.kind].nothing(self._step)

    def took(self, rows: int, seconds: float) -> None:
        """A step of so many rows, each of which gave logits, took so long."""
        self._step += 1
        self._spare_s += PROBING * seconds
        if self._step >= self._until:
            self._time.took(rows, seconds)

    def lost(self, requests: Sequence[Request]) -> None:
        """A step of these ended for want of experts, which may be wanted by drafts alone: make none for a while."""
        self._until, self.out = self._step + STILL_STEPS, False
        for request in requests:
            request.drafts = []

    def forget(self, request: Request) -> None:
        lookup = self._lookups.pop(request, None)
        if lookup is not None:
            self._vain = lookup.patience[FORCED].vain, lookup.patience[COPIED].vain
            for kind, chance in enumerate(lookup.chances):
                self._chances[kind] += ALL * (chance - self._chances[kind])

    def _worth(self, chances: Sequence[float], rows: int) -> int:
        """How many drafts, with these chances to be kept, are best for a step of so many rows without."""
        time, made, best = self._time, float(rows), 0
        if not chances or not time.known or self._streak >= MOST_STREAK:
            return 0
        calm_s = time.of(rows)
        fastest = made / calm_s
        chances = chances[: max(0, self._rows - rows)]
        for count, chance in enumerate(chances, 1):
            made += chance
            speed = made / (calm_s + MARGIN * (time.of(rows + count) - calm_s))
            if speed > fastest:
                best, fastest = count, speed
        if best and self._streak % MORE_EVERY == MORE_EVERY - 1:
            best = min(2 * best, len(chances))
        self._probing = not best and self._spare_s >= time.of(rows + 1) - calm_s
        self._spare_s *= not self._probing
        return 1 if self._probing else best

    def _guess(self, request: Request) -> tuple[list[int], float]:
        """Tokens that may come next, and the chance of each if those before it were right."""
        params, output = request.params, request.output
        lookup = self._lookups.get(request)
        if lookup is None:
            # What was noted, or left out, for a row that is then not kept would be told of the request. Those in the
            # background may have few rows.
            if params.drop_lost_experts or params.wants_routing or request.share.background:
                return [], 0.0
            lookup = self._lookups[request] = Lookup(request.prompt, self._chances, self._vain)
        constraint, room = request.constraint, min(self.most, params.max_tokens - len(output) - 1)
        forcing, copying, _ = lookup.patience
        if constraint is not None and room > 0 and self._step >= forcing.next:
            if forced := constraint.forced()[:room]:
                lookup.kind = FORCED
                return forced, lookup.chances[FORCED]
            forcing.nothing(self._step)
        if room <= 0 or self._step < copying.next:
            return [], 0.0
        lookup.follow(output)
        guess = lookup.guess(room)
        if not guess:
            copying.nothing(self._step)
        return guess, lookup.chances[lookup.kind]
