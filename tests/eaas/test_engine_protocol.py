"""Messages between gateway and worker: whole, in pieces, too large, and broken."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from eaas.worker import protocol
from eaas.worker.grammar import Grammar
from eaas.worker.protocol import (
    Cancel,
    Failed,
    Hello,
    ProtocolError,
    SamplingParams,
    Step,
    Submit,
    Token,
    encode,
    for_gateway,
    for_worker,
)

SEED = 3
TO_WORKER = [
    Submit(
        id="a",
        attempt=2,
        prompt=[1, 2, 3],
        output=[4],
        params=SamplingParams(
            max_tokens=7,
            min_tokens=1,
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            seed=2**64 - 1,
            stop_token_ids=(9,),
        ),
    ),
    Cancel(id="a"),
]
TO_GATEWAY = [
    Hello(
        name="attention/1",
        incarnation=2**63 + 1,
        model_hash="ab",
        numerics_class="cpu",
        max_model_len=5,
        vocab=9,
        kv_tokens=64,
    ),
    Step(tokens=[Token("a", 2, 0, 5), Token("b", 1, 3, 6, "stop", -0.5, [(6, -0.5), (7, -1.5)])]),
    Step(tokens=[]),
    Failed(id="a", attempt=2, code="expert_lost", message="why", retryable=True),
]
SIDES = [(for_worker, TO_WORKER), (for_gateway, TO_GATEWAY)]


@pytest.mark.parametrize(("reader", "messages"), SIDES)
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 10_000])
def test_messages_arrive_however_the_stream_is_cut(reader: Any, messages: list[Any], piece: int) -> None:
    stream = b"".join(encode(message) for message in messages)
    receiving, found = reader(), []
    for start in range(0, len(stream), piece):
        found += receiving.feed(stream[start : start + piece])
    assert found == messages


@pytest.mark.parametrize("claimed", [0, protocol.MAX_BODY_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_range_is_refused_before_anything_is_kept(claimed: int) -> None:
    with pytest.raises(ProtocolError, match=f"claims {claimed} bytes; 1 to {protocol.MAX_BODY_BYTES}"):
        for_worker().feed(claimed.to_bytes(4, "big"))


def test_a_message_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_BODY_BYTES", 100)
    with pytest.raises(ProtocolError, match="over the limit of 100; shorten it"):
        encode(Cancel(id="x" * 200))


def test_a_message_for_the_other_side_is_refused() -> None:
    for reader, messages in ((for_worker, TO_GATEWAY), (for_gateway, TO_WORKER)):
        for message in messages:
            with pytest.raises(ProtocolError, match="no message for this side"):
                reader().feed(encode(message))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"min_tokens": 8}, "min_tokens is 8; it must be 0 to max_tokens"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf; it must be a finite number"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan; it must be a finite number"),
        ({"logprobs": 4097}, "logprobs is 4097; it must be -1"),
        ({"prompt_logprobs": 4097}, "prompt_logprobs is 4097; it must be -1"),
        ({"logit_bias": ((1, 100.5),)}, "a bias is outside -100 to 100"),
        ({"logit_bias": ((1, float("nan")),)}, "a bias is outside -100 to 100"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "1025 biases were given; at most 1024"),
        ({"grammar": Grammar("regex", "a"), "ignore_eos": True}, "cannot be given with ignore_eos"),
        ({"seed": 2**64}, "seed is|out of range|integer value too large"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**{"max_tokens": 5, **changes})
    if "seed" in changes:
        return  # msgpack holds nothing that large.
    fields = {
        "type": "submit",
        "id": "a",
        "attempt": 1,
        "prompt": [1],
        "params": {"max_tokens": 5, **changes},
    }
    body = msgspec.msgpack.encode(fields)
    with pytest.raises(ProtocolError, match=text):
        for_worker().feed(len(body).to_bytes(4, "big") + body)


@pytest.mark.parametrize("change", [{"prompt": [-1]}, {"prompt": [2**31]}, {"id": ""}, {"attempt": -1}])
def test_numbers_out_of_range_are_refused(change: dict[str, Any]) -> None:
    fields = {"type": "submit", "id": "a", "attempt": 1, "prompt": [1], "params": {"max_tokens": 5}, **change}
    body = msgspec.msgpack.encode(fields)
    with pytest.raises(ProtocolError, match="no message for this side"):
        for_worker().feed(len(body).to_bytes(4, "big") + body)


@pytest.mark.parametrize(("reader", "messages"), SIDES)
def test_any_damage_gives_a_message_or_a_protocol_error(reader: Any, messages: list[Any]) -> None:
    source = np.random.default_rng(SEED)
    stream = b"".join(encode(message) for message in messages)
    for trial in range(3000):
        damaged = bytearray(stream)
        for _ in range(source.integers(1, 4)):
            damaged[source.integers(len(damaged))] = source.integers(256)
        try:
            found = reader().feed(damaged)
        except ProtocolError:
            continue
        kinds = {type(message) for message in messages}
        assert all(type(message) in kinds for message in found), f"seed {SEED}, trial {trial}"
