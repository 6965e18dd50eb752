"""A prompt's log-probabilities, whatever pieces they come in, in the shapes of both APIs."""

from __future__ import annotations

from eaas.gateway.logprobs import PromptScores

SCORES = [
    (-0.5, 2, [(9, -0.1), (5, -0.5)]),
    (-1.5, 1, [(6, -1.5), (7, -2.0)]),
    (-2.5, 40, [(1, -0.2), (2, -0.3)]),
]


class Names:
    def token_text(self, token: int) -> str:
        return f"t{token}"

    def token_bytes(self, token: int) -> bytes:
        return b"t%d" % token


def scores_of(named: int = 2, by_id: int = 2) -> PromptScores:
    return PromptScores([4, 5, 6, 7], Names(), named=named, by_id=by_id)


def test_pieces_told_again_count_once_and_gaps_are_left_out() -> None:
    whole, pieces = scores_of(), scores_of()
    whole.take(1, SCORES)
    pieces.take(2, SCORES[1:])  # nothing is known of the one before it
    pieces.take(1, SCORES[:2])
    pieces.take(1, SCORES[:1])  # another attempt begins again
    pieces.take(2, SCORES[1:])
    assert pieces.named() == whole.named() and pieces.by_id() == whole.by_id()


def test_the_first_token_has_no_log_probability_and_others_have_as_many_as_asked_for() -> None:
    scores = scores_of(named=1, by_id=2)
    scores.take(1, SCORES)
    named, by_id = scores.named(), scores.by_id()
    assert named is not None and by_id is not None
    assert [token.chosen.text for token in named] == ["t4", "t5", "t6", "t7"]
    assert [token.chosen.logprob for token in named] == [None, -0.5, -1.5, -2.5]
    assert [len(token.top) for token in named] == [0, 1, 1, 1]
    assert by_id[0] is None
    assert by_id[1] == {
        "5": {"logprob": -0.5, "rank": 2, "decoded_token": "t5"},
        "9": {"logprob": -0.1, "rank": 1, "decoded_token": "t9"},
    }
    assert by_id[3] is not None and by_id[3]["7"] == {"logprob": -2.5, "rank": 40, "decoded_token": "t7"}


def test_a_shape_that_was_not_asked_for_is_not_made() -> None:
    assert scores_of(named=-1).named() is None and scores_of(by_id=-1).by_id() is None
