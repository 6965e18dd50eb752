"""The Responses API as the real `openai` client sees it: whole, streamed in order, cancelled, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from eaas.worker.protocol import Failed
from tests.eaas.gateway_world import FakeWorker, World, eventually, gateway_url

TOOL = {
    "type": "function", "name": "look", "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    worker = world.worker()
    world.router.show(worker)
    return worker


@pytest.fixture(scope="module")
def url(world: World, worker: FakeWorker) -> Iterator[str]:
    with gateway_url(world) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def says(worker: FakeWorker) -> Iterator[Any]:
    """Have the worker say a text and end, whatever it is asked."""
    yield lambda text: worker.script.append(text)
    worker.script.clear()


def prompt_of(worker: FakeWorker) -> str:
    return bytes(worker.submits[-1].prompt).decode()


def test_a_text_is_answered_whole(client: openai.OpenAI, worker: FakeWorker) -> None:
    reply = client.responses.create(
        model="tiny", instructions="be", input="hi", max_output_tokens=5, temperature=0.5, metadata={"a": "b"}
    )
    assert prompt_of(worker) == "<system>be<user>hi<assistant>"
    assert reply.output_text == "<syst"
    assert (reply.status, reply.model_dump()["store"]) == ("incomplete", False)
    assert reply.incomplete_details is not None and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (29, 5, 34)
    assert (reply.instructions, reply.temperature, reply.metadata) == ("be", 0.5, {"a": "b"})
    assert worker.submits[-1].params.temperature == 0.5


def test_a_response_that_ends_by_itself_is_completed(client: openai.OpenAI, says: Any) -> None:
    says("done")
    reply = client.responses.create(model="tiny", input="hi")
    assert (reply.status, reply.output_text, reply.incomplete_details) == ("completed", "done", None)
    item = reply.output[0]
    assert item.type == "message" and (item.status, item.role) == ("completed", "assistant")


def test_items_of_every_supported_kind_reach_the_template(client: openai.OpenAI, worker: FakeWorker, says: Any) -> None:
    says("ok")
    client.responses.create(
        model="tiny",
        input=[
            {"role": "developer", "content": "rules"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "see"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "x"}'},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a wall"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "sky"}],
            },
        ],  # type: ignore[list-item]
    )
    assert prompt_of(worker) == (
        "<system>rules<user>ab<assistant>see[look x c1][look  c2]<tool>a wall<tool>sky<assistant>"
    )


def test_the_published_events_come_in_order_and_numbered(client: openai.OpenAI, says: Any) -> None:
    says("a é")
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 3, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "a é"
    last = events[-1]
    assert last.type == "response.completed"
    assert (last.response.output_text, last.response.status) == ("a é", "completed")
    assert last.response.usage is not None and last.response.usage.output_tokens == 5
    assert len({e.item_id for e in events if hasattr(e, "item_id")}) == 1


def test_the_clients_own_assembly_of_a_stream_agrees(client: openai.OpenAI, says: Any) -> None:
    says("word by word")
    with client.responses.stream(model="tiny", input="hi") as stream:
        assert stream.get_final_response().output_text == "word by word"


def test_a_stream_at_its_limit_ends_incomplete(client: openai.OpenAI) -> None:
    *_, last = client.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details and last.response.incomplete_details.reason == "max_output_tokens"


def test_an_empty_answer_is_still_a_message(client: openai.OpenAI, says: Any) -> None:
    says("")
    *_, last = client.responses.create(model="tiny", input="hi", stream=True)
    assert last.type == "response.completed" and last.response.output[0].type == "message"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_of_their_own(client: openai.OpenAI, worker: FakeWorker, says: Any, stream: bool) -> None:
    says("Look:" + CALL)
    request: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [TOOL]}
    if stream:
        events = list(client.responses.create(**request, stream=True))
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == '{"at": "é"}' and len(deltas) > 3
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        reply = events[-1].response
    else:
        reply = client.responses.create(**request)
    message, call = reply.output
    assert message.type == "message" and reply.output_text == "Look:"
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("look", '{"at": "é"}', "completed")
    assert call.call_id.startswith("call_")
    assert "(tools look)" in prompt_of(worker)


def test_a_call_that_must_be_made_is_a_grammar(client: openai.OpenAI, worker: FakeWorker, says: Any) -> None:
    says(CALL)
    client.responses.create(
        model="tiny",
        input="hi",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},  # type: ignore[list-item]
    )
    grammar = worker.submits[-1].params.grammar
    assert grammar is not None and grammar.kind == "lark" and "look" in grammar.text


def test_a_format_of_the_text_is_a_grammar(client: openai.OpenAI, worker: FakeWorker, says: Any) -> None:
    says("{}")
    schema = {"type": "object", "properties": {}}
    client.responses.create(
        model="tiny", input="hi",
        text={"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}},
    )  # fmt: skip
    grammar = worker.submits[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.text) == schema


def test_logprobs_come_with_the_text_when_included(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="tiny",
        input="hi",
        max_output_tokens=3,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    part = reply.output[0].content[0]  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs] == list("<us")
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in part.logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_one_in_progress_is_cancelled_and_keeps_what_it_has(
    client: openai.OpenAI, worker: FakeWorker, stream: bool
) -> None:
    worker.step_s = 0.01
    worker.cancels.clear()
    try:
        if stream:
            events = client.responses.create(model="tiny", input="hi", stream=True)
            first = next(iter(events))
            assert first.type == "response.created"
            cancelled = client.responses.cancel(first.response.id)
            last = list(events)[-1]
            assert last.type == "response.incomplete"
            original = last.response
        else:
            # Its client learns the id with the answer; the worker knows it now.
            before = len(worker.submits)
            with ThreadPoolExecutor(1) as thread:
                waits = thread.submit(client.responses.create, model="tiny", input="hi")
                eventually(lambda: len(worker.submits) > before, "a request")
                eventually(lambda: any(job.index > 3 for job in worker.jobs.values()), "some tokens")
                cancelled = client.responses.cancel(worker.submits[-1].id.partition("-")[0])
                original = waits.result()
    finally:
        worker.step_s = 0.001
    assert cancelled.status == original.status == "cancelled"
    assert cancelled.output_text == original.output_text
    assert "<user>hi<assistant>".startswith(original.output_text[:19])
    eventually(lambda: worker.cancels == [worker.submits[-1].id], "the work to be cancelled")


def test_what_is_over_or_was_never_there_cannot_be_had(client: openai.OpenAI, says: Any) -> None:
    says("x")
    reply = client.responses.create(model="tiny", input="hi", store=True)
    for act in (client.responses.cancel, client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="none is stored"):
            act(reply.id)
    with pytest.raises(openai.NotFoundError):
        list(client.responses.input_items.list("resp_none"))


def test_a_fault_in_mid_stream_is_the_failed_event_and_raises(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.step_s = 0.02
    seen: list[Any] = []
    try:
        with pytest.raises(openai.APIError, match="no replica"):
            for event in client.responses.create(model="tiny", input="hi", stream=True):
                if not seen:
                    last = worker.submits[-1]
                    worker.send(
                        Failed(
                            id=last.id,
                            attempt=last.attempt,
                            code="expert_lost",
                            message="no replica",
                            retryable=True,
                        )
                    )
                seen.append(event)
    finally:
        worker.step_s = 0.001
    assert seen[-1].type == "response.failed"
    assert (seen[-1].response.status, seen[-1].response.error.message) == ("failed", "no replica")


WRONG: list[tuple[str, Any]] = [
    ("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("prompt", {"id": "p"}), ("background", True),
    ("truncation", "auto"), ("include", ["file_search_call.results"]), ("input", []), ("input", [3]), ("input", 3),
    ("input", [{"type": "item_reference", "id": "x"}]), ("input", [{"role": "user", "content": 3}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
    ("input", [{"type": "function_call", "name": "f", "arguments": "{}"}]),
    ("input", [{"type": "function_call_output", "call_id": "c"}]), ("input", [{"content": "no role"}]),
    ("max_output_tokens", 0), ("max_output_tokens", 10**6), ("temperature", 3), ("top_p", 0), ("top_logprobs", 21),
    ("tools", [{"type": "web_search"}]), ("tools", [{"type": "function", "name": "no spaces"}]),
    ("tool_choice", "sometimes"), ("tool_choice", "required"), ("tool_choice", {"type": "function", "name": "f"}),
    ("text", {"format": {"type": "json_schema", "name": "x"}}), ("text", {"format": {"type": "xml"}}),
    ("stream", "yes"), ("metadata", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}={str(v)[:30]}" for n, v in WRONG])
def test_what_cannot_be_served_is_a_400_that_names_the_field(url: str, name: str, value: Any) -> None:
    reply = httpx.post(f"{url}/v1/responses", json={"model": "tiny", "input": "hi", name: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"] or "").startswith(name), error


def test_what_openai_ignores_is_ignored(url: str) -> None:
    more = {"user": "u", "safety_identifier": "s", "service_tier": "auto", "prompt_cache_key": "k", "unknown": 1,
            "max_output_tokens": 1, "store": False, "verbosity": "low"}  # fmt: skip
    reply = httpx.post(f"{url}/v1/responses", json={"model": "tiny", "input": "hi", **more})
    assert reply.status_code == 200, reply.text
