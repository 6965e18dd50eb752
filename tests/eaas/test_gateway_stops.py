"""Promises of the stop matcher and of the token log."""

from __future__ import annotations

import random

import pytest

from eaas.gateway.failover import TokenLog
from eaas.gateway.stops import StopAutomaton, StopMatcher


def shown_by_the_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """Where the first stop string ends, the longest that ends there is cut off: by trying everything."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def pieces_of(text: str, source: random.Random) -> list[str]:
    pieces = []
    while text:
        size = source.randint(0, 4)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(4))
def test_matches_the_definition_whatever_the_token_boundaries(seed: int) -> None:
    source = random.Random(seed)
    for trial in range(400):
        text = "".join(source.choice("abc") for _ in range(source.randint(0, 24)))
        stops = [
            "".join(source.choice("abc") for _ in range(source.randint(1, 5))) for _ in range(source.randint(1, 4))
        ]
        matcher = StopMatcher(StopAutomaton(stops))
        shown = "".join(matcher.push(piece) for piece in pieces_of(text, source))
        stopped = matcher.stopped
        shown += matcher.flush()
        assert (shown, stopped) == shown_by_the_definition(text, stops), f"seed {seed} trial {trial} {text} {stops}"


@pytest.mark.parametrize("seed", range(2))
def test_withholds_only_what_could_still_begin_a_stop_string(seed: int) -> None:
    source = random.Random(seed)
    for trial in range(300):
        text = "".join(source.choice("ab") for _ in range(16))
        stops = ["".join(source.choice("ab") for _ in range(source.randint(2, 6)))]
        matcher = StopMatcher(StopAutomaton(stops))
        seen = shown = ""
        for character in text:
            seen += character
            shown += matcher.push(character)
            if matcher.stopped:
                break
            held = seen[len(shown) :]
            longest = max(n for n in range(len(seen) + 1) if stops[0].startswith(seen[len(seen) - n :]))
            assert len(held) == longest, f"seed {seed} trial {trial} {seen} {stops}"


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(StopAutomaton(["END"]))
    assert matcher.push("one E") == "one "
    assert matcher.push("NDtwo") == ""
    assert matcher.stopped
    assert matcher.push("three") == "" == matcher.flush()


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopAutomaton([""])


def test_only_the_next_token_of_the_current_attempt_is_accepted() -> None:
    log = TokenLog([1, 2, 3])
    assert log.accept(1, 0, 10)
    assert not log.accept(1, 0, 11), "a repeated index"
    assert not log.accept(1, 2, 12), "a gap"
    assert not log.accept(2, 1, 13), "an attempt to come"
    log.lose()
    assert not log.accept(1, 1, 14), "an attempt that was lost"
    assert log.accept(2, 1, 15)
    assert log.output == [10, 15]


def test_losses_are_counted_only_while_no_token_comes() -> None:
    log = TokenLog([1])
    log.lose()
    log.lose(alone=True)
    assert (log.losses, log.lost_alone) == (2, 1)
    assert log.accept(3, 0, 7)
    assert (log.losses, log.lost_alone) == (0, 0)
    log.move()
    assert (log.losses, log.lost_alone) == (0, 0)
