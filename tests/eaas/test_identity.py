"""Promises of an Identity: one drawn value says everything that is chosen by chance about a response."""

from __future__ import annotations

import time
import uuid

from eaas.gateway.event_ids import Identity
from eaas.gateway.formats import Delta, Ending, FinishedChoice, ResponseHead, StreamUsage, Usage
from eaas.gateway.openai_format import ChatFormat
from eaas.gateway.output_reader import Reading
from eaas.gateway.output_styles import HERMES
from eaas.gateway.responses import ResponsesFormat

CALLS = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>' * 2


def drawn() -> Identity:
    return Identity(drawn=uuid.uuid4().hex, created=time.time_ns() // 10**9)


def test_what_follows_from_an_identity_is_the_same_everywhere_and_another_for_each_purpose() -> None:
    # As computed on another machine: a release that computes it otherwise resumes no stream of one before.
    known = Identity(drawn="0123456789abcdef0123456789abcdef", created=1)
    assert known.seed(0) == 1107011958121897599
    mine, other = drawn(), drawn()
    seeds = [who.seed(n) for who in (mine, other) for n in range(50)]
    made: list[str | int] = [*seeds]
    made += [
        who.call_id(c, n, letters) for who in (mine, other) for c in range(5) for n in range(5) for letters in (0, 9)
    ]
    made += [who.item_id("msg", n) for who in (mine, other) for n in range(5)]
    assert len(set(made)) == len(made), (mine, other)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert mine.call_id(1, 2, 9).isalnum() and len(mine.call_id(1, 2, 9)) == 9
    assert mine.call_id(1, 2).startswith("call_") and len(mine.call_id(1, 2)) == 29


def test_two_gateways_make_the_same_bytes_of_one_identity_in_whatever_order_its_choices_come() -> None:
    head = ResponseHead(id="x", identity=drawn(), model="m", fingerprint="f")

    def streamed(order: tuple[int, ...]) -> dict[int, bytes]:
        shape = ChatFormat(Reading(calls=HERMES)).events(head, 3, StreamUsage())
        return {index: shape.event(Delta(index, CALLS, ending=Ending("stop"))) for index in order}

    first, second = streamed((0, 1, 2)), streamed((2, 0, 1))
    assert first == second, head
    whole = ChatFormat(Reading(calls=HERMES)).body(
        head,
        [FinishedChoice(index=n, text=CALLS, finish_reason="stop", logprobs=None) for n in range(3)],
        Usage(prompt=1, completion=1),
    )
    ids = {
        event.split(b'"id":"call_')[1][:24]
        for events in first.values()
        for event in events.split(b"\n\n")
        if b"call_" in event
    }
    assert len(ids) == 6 and all(id in whole for id in ids), "a whole answer has the ids of a streamed one"
    response = [ResponsesFormat(Reading(calls=HERMES), {}).events(head, 1, StreamUsage()) for _ in range(2)]
    assert len({shape.event(Delta(0, "Well. " + CALLS, ending=Ending("stop"))) for shape in response}) == 1, head
