"""Thoughts and calls of models that think aloud, as clients of each API see them, whole and streamed; and when a worker
dies in their midst."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from eaas.worker.grammar import MAX_GRAMMAR_BYTES
from tests.eaas.gateway_world import FakeWorker, World, gateway_url

USER: Any = {"role": "user", "content": "hi"}
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "far": {"type": "integer"}},
        },
    },
}
# As GLM-4.5's, with the thought begun in the prompt unless that is not wanted.
TEMPLATE = (
    "{% if tools %}<tool_call>{name}\n<arg_key>{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)
CALL = (
    "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a é</arg_value>\n"
    "<arg_key>far</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
THOUGHT = "1 < 2, é.\n"
SAID = f"{THOUGHT}</think>\n\nSo."
CALLED = f"{THOUGHT}</think>\nSo.{CALL}"
ARGUMENTS = {"at": "a é", "far": 3}


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    config = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (world.model / "tokenizer_config.json").write_text(json.dumps(config))
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
    yield lambda text: worker.script.append(text)
    worker.script.clear()


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": [USER], **fields})


def thoughts_of(message: Any) -> str | None:
    """Under both names, which must agree."""
    more = message.model_extra or {}
    assert more.get("reasoning") == more.get("reasoning_content")
    return more.get("reasoning_content")


@pytest.mark.parametrize("said", [SAID, CALLED])
def test_a_chats_thoughts_are_beside_its_content_whole_and_streamed(
    client: openai.OpenAI, says: Any, said: str
) -> None:
    says(said)
    choice = chat(client, tools=[LOOK]).choices[0]
    called = said is CALLED
    assert (thoughts_of(choice.message), choice.message.content) == (THOUGHT[:-1], "So.")
    assert choice.finish_reason == ("tool_calls" if called else "stop")
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS] * called
    *chunks, usage = chat(client, tools=[LOOK], stream=True, stream_options={"include_usage": True}, logprobs=True)
    assert usage.usage.completion_tokens == len(said.encode()) + 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(thoughts_of(delta) or "" for delta in deltas) == THOUGHT[:-1]
    assert "".join(delta.content or "" for delta in deltas) == "So."
    pieces = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
    assert not called or json.loads("".join(pieces)) == ARGUMENTS
    shown = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    assert len(shown) == len(said.encode()), "each token is told of once"
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_thoughts_can_be_left_out_or_not_be_thought(client: openai.OpenAI, says: Any) -> None:
    says(SAID)
    for stream in (False, True):
        reply = chat(client, stream=stream, extra_body={"include_reasoning": False})
        said = [c.choices[0].delta for c in reply] if stream else [reply.choices[0].message]
        assert ("".join(one.content or "" for one in said), {thoughts_of(one) for one in said}) == (
            "So.",
            {None},
        )
    # The prompt ends the thought: what looks like one is none.
    message = chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert (message.content, thoughts_of(message)) == (SAID, None)


def test_a_thought_that_a_limit_cuts_off_is_a_thought(client: openai.OpenAI, says: Any) -> None:
    says(SAID)
    choice = chat(client, max_tokens=5).choices[0]
    assert (choice.finish_reason, choice.message.content, thoughts_of(choice.message)) == (
        "length",
        "",
        SAID[:5],
    )


def test_a_stop_string_is_met_in_thoughts_and_behind_them(client: openai.OpenAI, says: Any) -> None:
    says(SAID)
    for stop, content, thoughts in (("<", "", "1 "), ("o.", "S", THOUGHT[:-1])):
        choice = chat(client, stop=stop).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", content)
        assert thoughts_of(choice.message) == thoughts
        chunks = [chunk.choices[0].delta for chunk in chat(client, stop=stop, stream=True)]
        assert "".join(thoughts_of(delta) or "" for delta in chunks) == thoughts
        assert "".join(delta.content or "" for delta in chunks) == content


def test_what_must_be_in_a_language_is_not_thought_where_no_token_ends_a_thought(
    client: openai.OpenAI, worker: FakeWorker, says: Any
) -> None:
    says('{"a": 1}')
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    message = chat(client, response_format=form).choices[0].message
    assert (message.content, thoughts_of(message)) == ('{"a": 1}', None)
    says(CALL)
    message = chat(client, tools=[LOOK], tool_choice="required").choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [ARGUMENTS]
    grammar = worker.submits[-1].params.grammar
    assert grammar is not None and "<arg_key>at</arg_key>" in grammar.text
    says(CALLED)
    message = chat(client, tools=[LOOK], tool_choice="none").choices[0].message
    assert (message.content, thoughts_of(message), message.tool_calls) == ("So." + CALL, THOUGHT[:-1], None)


@pytest.fixture
def marked_url(world: World, worker: FakeWorker) -> Iterator[str]:
    """Of a gateway whose tokenizer has a token that ends a thought."""
    path = world.model / "tokenizer.json"
    before = path.read_text()
    tokenizer = Tokenizer.from_str(before)
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(path))
    with gateway_url(world) as url:
        path.write_text(before)
        yield url


def test_whatever_language_is_accepted_is_so_with_thoughts_before_it(marked_url: str, worker: FakeWorker) -> None:
    def ask(schema: Any) -> tuple[int, str]:
        body = {"messages": [USER], "max_tokens": 1, "structured_outputs": {"json": schema}}
        reply = httpx.post(f"{marked_url}/v1/chat/completions", json=body, timeout=60)
        if reply.status_code == 200:
            grammar = worker.submits[-1].params.grammar
            assert grammar is not None and grammar.text.startswith("start: /(?s:.*)/ <[258]>")
            return 200, grammar.text
        return reply.status_code, reply.json()["error"]["message"]

    assert ask(True)[1].endswith('"key_separator":": "}}') and ask(False)[1].endswith("%json false")
    assert ask({"x-guidance": {"key_separator": "="}})[1].endswith('%json {"x-guidance":{"key_separator":"="}}')
    names = [f"{number:06}" for number in range(7000)]
    assert ask({"enum": names})[0] == 200, "written no longer than it was given"
    status, message = ask({"enum": [*names, "x" * (MAX_GRAMMAR_BYTES - len('{"enum":[]}') - 9 * 7000 - 2)]})
    assert status == 400 and "make it smaller" in message


def test_conversations_of_which_only_some_are_in_a_thought_are_no_batch(url: str) -> None:
    said = {"role": "assistant", "content": "a"}
    body: Any = {"max_tokens": 1, "continue_final_message": True, "add_generation_prompt": False}
    for last, status in ((said, 200), ({**said, "content": "<think>"}, 400)):
        body["messages"] = [[USER, said], [USER, last]]
        reply = httpx.post(f"{url}/v1/chat/completions/batch", json=body, timeout=60)
        assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == "messages"


def test_a_responses_thoughts_are_an_item_of_their_own(client: openai.OpenAI, says: Any) -> None:
    says(CALLED)
    tool: Any = {"type": "function", **LOOK["function"], "strict": None}
    whole = client.responses.create(model="tiny", input="hi", tools=[tool])
    with client.responses.stream(model="tiny", input="hi", tools=[tool]) as stream:
        events = list(stream)
    for response in (whole, stream.get_final_response()):
        thought, words, call = response.output
        assert thought.type == "reasoning" and thought.content is not None and thought.summary == []
        assert [part.text for part in thought.content] == [THOUGHT[:-1]]
        assert words.type == "message" and response.output_text == "So."
        assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT[:-1] and len(deltas) > 3
    done = [event.text for event in events if event.type == "response.reasoning_text.done"]
    assert done == [THOUGHT[:-1]]


def test_messages_say_whether_the_model_is_to_think(url: str, worker: FakeWorker, client: openai.OpenAI) -> None:
    client_of_messages = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    for thinking, ended in (("enabled", False), ("disabled", True)):
        asked: Any = {"type": thinking, **({"budget_tokens": 1024} if thinking == "enabled" else {})}
        client_of_messages.messages.create(model="tiny", max_tokens=3, messages=[USER], thinking=asked)
        assert bytes(worker.submits[-1].prompt).endswith(b"</think>") == ended
    said: Any = [{"role": "assistant", "content": "a", "reasoning": "why"}]
    chat(client, messages=[USER, *said, USER], max_tokens=1)
    assert b"(why)a" in bytes(worker.submits[-1].prompt)


def test_a_messages_thoughts_are_a_block_of_their_own(url: str, says: Any) -> None:
    says(CALLED)
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool: Any = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
    ask: Any = {"model": "tiny", "max_tokens": 500, "messages": [USER], "tools": [tool]}
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**ask), streamed):
        thought, words, call = message.content
        assert thought.type == "thinking" and thought.thinking == THOUGHT[:-1]
        assert words.type == "text" and words.text == "So."
        assert call.type == "tool_use" and call.input == ARGUMENTS
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("at", range(1, len(CALLED.encode()), 9))
def test_a_worker_that_dies_in_their_midst_changes_nothing(world: World, url: str, at: int) -> None:
    first, second = (world.worker(step_s=0.002, script=[CALLED]) for _ in range(2))
    world.router.show(first, second)
    body = {"messages": [USER], "tools": [LOOK], "stream": True}
    heard = {"reasoning_content": "", "content": "", "arguments": ""}
    died = False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for name in ("reasoning_content", "content"):
                heard[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                heard["arguments"] += call["function"]["arguments"]
            busy = next((one for one in (first, second) if one.jobs), None)
            if not died and busy is not None and busy.sent >= at:
                busy.stop()
                world.router.show(second if busy is first else first)
                died = True
    assert (heard["reasoning_content"], heard["content"]) == (THOUGHT[:-1], "So.")
    assert json.loads(heard["arguments"]) == ARGUMENTS
    assert died or at > len(CALLED.encode()) // 2, "the stream ended before the worker was to die"
