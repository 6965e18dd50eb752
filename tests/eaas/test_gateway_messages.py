"""Anthropic's Messages API as the real `anthropic` client sees it: whole, streamed in order, with tools, refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from eaas.worker.protocol import Failed
from tests.eaas.gateway_world import FakeWorker, World, eventually, gateway_url

TOOL: Any = {
    "name": "look", "description": "Look.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
ASK: Any = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    worker = world.worker()
    world.router.show(worker)
    return worker


@pytest.fixture(scope="module")
def url(world: World, worker: FakeWorker) -> Iterator[str]:
    with gateway_url(world) as url:
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200, "a worker")
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


@pytest.fixture
def says(worker: FakeWorker) -> Iterator[Any]:
    """Have the worker say a text and end, whatever it is asked."""
    yield lambda text: worker.script.append(text)
    worker.script.clear()


def prompt_of(worker: FakeWorker) -> str:
    return bytes(worker.submits[-1].prompt).decode()


def test_a_message_is_answered_whole(client: anthropic.Anthropic, worker: FakeWorker) -> None:
    reply = client.messages.create(**{**ASK, "max_tokens": 5}, system="be", extra_body={"temperature": 0.5})
    assert prompt_of(worker) == "<system>be<user>hi<assistant>"
    assert [(block.type, getattr(block, "text", "")) for block in reply.content] == [("text", "<syst")]
    assert (reply.role, reply.model, reply.stop_reason) == ("assistant", "tiny", "max_tokens")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (29, 5)
    assert worker.submits[-1].params.temperature == 0.5


def test_how_a_message_ends_is_told(client: anthropic.Anthropic, says: Any) -> None:
    says("done")
    assert client.messages.create(**ASK).stop_reason == "end_turn"
    says("one two three")
    reply = client.messages.create(**ASK, stop_sequences=["two"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "two")
    assert getattr(reply.content[0], "text", "") == "one "


def test_blocks_of_every_supported_kind_reach_the_template(
    client: anthropic.Anthropic, worker: FakeWorker, says: Any
) -> None:
    says("ok")
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}]},
                {"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    client.messages.create(**{**ASK, "messages": turns}, tools=[TOOL])
    assert prompt_of(worker) == "(tools look)<user>ab<assistant>c[look é t1]<tool>seen<user>d<assistant>"


@pytest.mark.parametrize("text", [CALL, f"I look. {CALL}{CALL}"])
def test_calls_become_blocks_whole_and_streamed(client: anthropic.Anthropic, says: Any, text: str) -> None:
    says(text)
    reply = client.messages.create(**ASK, tools=[TOOL])
    calls = [block for block in reply.content if block.type == "tool_use"]
    assert reply.stop_reason == "tool_use" and len(calls) == text.count("<tool_call>")
    assert all((call.name, call.input) == ("look", {"at": "é"}) for call in calls)
    says(text)
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    plain = [block.model_dump(exclude={"id"}) for block in streamed.content]
    assert plain == [block.model_dump(exclude={"id"}) for block in reply.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", reply.usage.output_tokens)


def test_a_stream_says_what_the_whole_answer_says(client: anthropic.Anthropic, says: Any) -> None:
    says("some words, é, and more")
    whole = client.messages.create(**ASK)
    says("some words, é, and more")
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == "some words, é, and more"
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


def test_a_tool_that_must_be_called_bounds_the_output(
    client: anthropic.Anthropic, worker: FakeWorker, says: Any
) -> None:
    says(CALL)
    client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "look"})
    assert worker.submits[-1].params.grammar is not None
    says('{"a": 1}')
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    client.messages.create(**ASK, output_config=form)
    assert worker.submits[-1].params.grammar is not None


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic, worker: FakeWorker) -> None:
    body: Any = {key: ASK[key] for key in ("model", "messages")}
    counted = client.messages.count_tokens(**body, system="be").input_tokens
    reply = client.messages.create(**{**ASK, "max_tokens": 1}, system="be")
    assert counted == reply.usage.input_tokens == len(prompt_of(worker))


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"model": "other"}, 404, "`other`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "'image'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, 400, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools.0"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": []}}}, 400, "output_config"),
    ],
)
def test_refusals_have_the_shape_that_the_client_knows(
    url: str, changed: dict[str, Any], status: int, said: str
) -> None:
    reply = httpx.post(f"{url}/v1/messages", json={**ASK, **changed})
    assert reply.status_code == status, reply.text
    error = reply.json()
    assert error["type"] == "error"
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert error["error"]["type"] == kind and said in error["error"]["message"], error


def test_a_stream_that_fails_raises_in_the_client(client: anthropic.Anthropic, worker: FakeWorker) -> None:
    worker.step_s = 0.02
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="no replica"),
            client.messages.stream(**ASK) as stream,
        ):
            for _ in stream:
                job = worker.submits[-1]
                worker.send(
                    Failed(
                        id=job.id,
                        attempt=job.attempt,
                        code="expert_lost",
                        message="no replica",
                        retryable=True,
                    )
                )
    finally:
        worker.step_s = 0.001
