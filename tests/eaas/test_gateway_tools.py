"""Tools in chats as the real `openai` client sees them, and the parameters that shape a chat's turn and its stream."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.eaas.gateway_world import EOS, FakeWorker, World, gateway_url

USER = {"role": "user", "content": "hi"}
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
JUMP = {"type": "function", "function": {"name": "jump", "description": "Jump."}}
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "jump", "arguments": {}}\n</tool_call>'
)


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


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": [USER], **fields})


def test_calls_of_a_whole_answer_are_tool_calls(client: openai.OpenAI, worker: FakeWorker, says: Any) -> None:
    says(CALLS)
    choice = chat(client, tools=[LOOK, JUMP]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = choice.message.tool_calls
    assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("function", "look", '{"at": "é"}'),
        ("function", "jump", "{}"),
    ]
    assert len({c.id for c in calls}) == 2 and all(c.id.startswith("call_") for c in calls)
    assert prompt_of(worker).startswith("(tools look jump)")
    assert worker.submits[-1].params.grammar is None, "a model that may choose is not bound"


def test_calls_of_a_stream_are_deltas_as_they_come(client: openai.OpenAI, says: Any) -> None:
    says("Well: " + CALLS)
    chunks = list(chat(client, tools=[LOOK, JUMP], stream=True, stream_options={"include_usage": True}))
    *chunks, usage = chunks
    assert usage.choices == [] and usage.usage.completion_tokens == len(("Well: " + CALLS).encode()) + 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Well: "
    calls: dict[int, dict[str, str]] = {}
    pieces = 0
    for call in [call for delta in deltas for call in delta.tool_calls or ()]:
        if call.id:
            assert call.index == len(calls) and call.type == "function"
            calls[call.index] = {"name": call.function.name, "arguments": ""}
        calls[call.index]["arguments"] += call.function.arguments
        pieces += 1
    assert list(calls.values()) == [
        {"name": "look", "arguments": '{"at": "é"}'},
        {"name": "jump", "arguments": "{}"},
    ]
    assert pieces > 6, "arguments wait for nothing but their token"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]


def test_the_clients_own_assembly_of_a_stream_agrees(client: openai.OpenAI, says: Any) -> None:
    says(CALLS)
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=[LOOK, JUMP]) as stream:  # type: ignore[list-item]
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls or ()] == ["look", "jump"]


def test_words_without_a_call_end_with_stop(client: openai.OpenAI, says: Any) -> None:
    says("no <tool in sight")
    choice = chat(client, tools=[LOOK]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == (
        "stop",
        "no <tool in sight",
        None,
    )
    chunks = list(chat(client, tools=[LOOK], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "no <tool in sight"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_call_cut_off_at_the_limit_ends_with_length(client: openai.OpenAI, says: Any) -> None:
    says(CALLS)
    for stream in (False, True):
        reply = chat(client, tools=[LOOK], max_completion_tokens=45, stream=stream)
        assert (list(reply)[-1] if stream else reply).choices[0].finish_reason == "length"


def test_half_the_head_of_a_call_is_shown_to_nobody(client: openai.OpenAI, says: Any) -> None:
    says("Well: " + CALLS)
    limit = len('Well: <tool_call>{"na')
    choice = chat(client, tools=[LOOK], max_completion_tokens=limit).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == (
        "length",
        "Well: ",
        None,
    )
    chunks = list(chat(client, tools=[LOOK], max_completion_tokens=limit, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Well: "
    assert chunks[-1].choices[0].finish_reason == "length"


def test_without_tools_a_call_is_text(client: openai.OpenAI, says: Any) -> None:
    says(CALLS)
    for more in ({}, {"tools": [LOOK], "tool_choice": "none"}):
        choice = chat(client, **more).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", CALLS)


MUST = [
    ("required", ["look", "jump"]),
    ({"type": "function", "function": {"name": "jump"}}, ["jump"]),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [LOOK]}}, ["look"]),
]


@pytest.mark.parametrize(("choice", "names"), MUST, ids=["required", "named", "allowed"])
def test_a_call_that_must_be_made_is_a_grammar_of_the_tools(
    client: openai.OpenAI, worker: FakeWorker, says: Any, choice: Any, names: list[str]
) -> None:
    says(CALLS)
    reply = chat(client, tools=[LOOK, JUMP], tool_choice=choice)
    assert reply.choices[0].finish_reason == "tool_calls"
    grammar = worker.submits[-1].params.grammar
    assert grammar is not None and grammar.kind == "lark"
    assert [name for name in ("look", "jump") if f'\\"{name}\\"' in grammar.text] == names
    assert ("{0,15}" in grammar.text) == (not isinstance(choice, dict) or choice["type"] != "function")
    chat(client, tools=[LOOK, JUMP], tool_choice=choice, parallel_tool_calls=False)
    single = worker.submits[-1].params.grammar
    assert single is not None and "{0,15}" not in single.text


def test_calls_and_their_results_reach_the_template(client: openai.OpenAI, worker: FakeWorker) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    history = [
        {"role": "developer", "content": "rules"}, USER, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a wall"}]},
    ]  # fmt: skip
    chat(client, messages=history, max_tokens=1)
    assert prompt_of(worker) == "<system>rules<user>hi<assistant>[look x c1]<tool>a wall<assistant>"


_FILE = io.BytesIO()
np.save(_FILE, np.zeros((2, 3, 4), np.uint8))
NPY = _FILE.getvalue()
# Experts that are no .npy file of integers, or of other bytes than it says.
UNREADABLE = [
    base64.b64encode(file).decode()
    for file in (
        b"", b"\x93NUMPY\x01\x00v\x00", NPY.replace(b"|u1", b"|O8"), NPY.replace(b"False", b"True "),
        NPY.replace(b"\x01\x00v", b"\x02\x00v"), NPY + b"\0", NPY[:-1], NPY.replace(b"(2, ", b"(9, "),
        NPY.replace(b"(2, 3, 4)", b"(24,)    "), NPY.replace(b"|u1", b"<f4"), b" " + NPY,
    )
] + ["a", "é", "[" * 100000]  # fmt: skip
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "function"}]}), ("tools", {"tools": [{"type": "retrieval"}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}), ("tools", {"tools": "look"}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
    ("tools", {"tools": [LOOK] * 129}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 70000]}}}],
               "tool_choice": "required"}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": "sometimes"}), ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "jump"}}}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": 3}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}), ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": "auto"}), ("modalities", {"modalities": ["text", "audio"]}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    *(("force_routed_experts", {"force_routed_experts": given}) for given in UNREADABLE),
    ("routed_experts", {"routed_experts": True}), ("request_id", {"request_id": "a b"}),
    ("request_id", {"request_id": "x" * 129}), ("return_token_ids", {"return_token_ids": 1}),
    ("include_stop_str_in_output", {"include_stop_str_in_output": "yes"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), WRONG, ids=[f"{n}-{i}" for i, (n, _) in enumerate(WRONG)])
def test_what_cannot_be_served_is_a_400_that_names_the_field(url: str, name: str, fields: dict[str, Any]) -> None:
    reply = httpx.post(f"{url}/v1/chat/completions", json={"model": "tiny", "messages": [USER], **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert name in (error["param"] or "") or name in error["message"], error


def test_what_openai_ignores_is_ignored(client: openai.OpenAI) -> None:
    more = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "modalities": ["text"],
            "safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "low"}  # fmt: skip
    assert chat(client, max_tokens=1, **more).choices[0].message.content == "<"


# -- the turn


def test_a_final_message_is_gone_on_with(client: openai.OpenAI, worker: FakeWorker) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon "}]
    more = {"continue_final_message": True, "chat_template_kwargs": {"mark": "[END]"}}
    chat(client, messages=messages, max_tokens=1, extra_body=more)
    assert prompt_of(worker) == "<user>hi[END]<assistant>Once upon "


def test_the_assistants_turn_can_be_left_out(client: openai.OpenAI, worker: FakeWorker) -> None:
    chat(client, max_tokens=1, extra_body={"add_generation_prompt": False})
    assert prompt_of(worker) == "<user>hi"


# -- what the answer carries


def test_a_client_may_name_its_request(url: str, client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=1, extra_body={"request_id": "mine"}).id == "chatcmpl-mine"
    # Two at once under one name do not disturb each other.
    body = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 50, "request_id": "same", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as first:
        second = httpx.post(f"{url}/v1/completions", json={**body, "stream": False}).json()
        text = b"".join(first.iter_bytes()).decode()
    assert second["id"] == "cmpl-same" and [len(c["text"]) for c in second["choices"]] == [50, 50]
    assert text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"length"') == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_are_those_of_the_prompt_and_of_every_token(url: str, worker: FakeWorker, path: str) -> None:
    is_chat = "chat" in path
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "é"}]} if is_chat else {"prompt": "aéb"}
    body = {"model": "tiny", **content, "max_tokens": 9, "return_token_ids": True, "stop": "zz"}
    whole = httpx.post(f"{url}{path}", json=body).json()
    prompt = worker.submits[-1].prompt
    ids = [prompt[i % len(prompt)] for i in range(9)]
    choice = whole["choices"][0]
    assert choice["token_ids"] == ids
    assert (whole if is_chat else choice)["prompt_token_ids"] == prompt
    lines = httpx.post(f"{url}{path}", json={**body, "stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(line.partition("data: ")[2]) for line in lines]
    assert (chunks[0] if is_chat else chunks[0]["choices"][0])["prompt_token_ids"] == prompt
    assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", ())] == ids


def test_token_ids_of_calls_are_complete(client: openai.OpenAI, says: Any) -> None:
    says(CALLS)
    chunks = list(chat(client, tools=[LOOK, JUMP], stream=True, logprobs=True, extra_body={"return_token_ids": True}))
    ids = [t for chunk in chunks for t in (chunk.choices[0].model_extra or {}).get("token_ids", ())]
    assert ids == [*CALLS.encode(), EOS]
    shown = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    assert len(shown) >= len(CALLS)


def test_a_stop_string_is_shown_when_asked(client: openai.OpenAI) -> None:
    more = {"include_stop_str_in_output": True}
    reply = client.completions.create(model="tiny", prompt="abcd", max_tokens=9, stop=["bc"], extra_body=more)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abc", "stop")
    more["stop_token_ids"] = [ord("c")]  # type: ignore[assignment]
    reply = client.completions.create(model="tiny", prompt="abcd", max_tokens=9, extra_body=more)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abc", "stop")


# -- the tokenizer, and what platforms ask


def test_tokens_are_counted_and_named_and_turned_back(url: str) -> None:
    reply = httpx.post(f"{url}/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert reply == {
        "count": 3,
        "max_model_len": 8192,
        "tokens": [97, 195, 169],
        "token_strs": ["a", "Ã", "©"],
    }
    back = httpx.post(f"{url}/detokenize", json={"model": "tiny", "tokens": [*reply["tokens"], EOS]})
    assert back.json() == {"prompt": "aé<|endoftext|>"}
    messages = {"messages": [USER], "tools": [LOOK], "model": "tiny"}
    tokens = httpx.post(f"{url}/tokenize", json=messages).json()["tokens"]
    assert bytes(tokens).decode() == "(tools look)<user>hi<assistant>"
    tokens = httpx.post(f"{url}/tokenize", json={"messages": [USER], "continue_final_message": True}).json()["tokens"]
    assert bytes(tokens).decode() == "<user>hi"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": [USER]}), ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"messages": [{"role": "bad", "content": ""}]}), ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [10**6]}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {}),
    ],
)  # fmt: skip
def test_the_tokenizer_refuses_what_makes_no_sense(url: str, path: str, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{url}{path}", json=body)
    assert reply.status_code == 400 and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.post(f"{url}{path}", json={"model": "other", "prompt": "a", "tokens": []}).status_code == 404


def test_platforms_are_told_what_is_served_and_how_busy_it_is(url: str, worker: FakeWorker) -> None:
    assert httpx.get(f"{url}/ping").status_code == httpx.post(f"{url}/ping").status_code == 200
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    worker.frozen = True
    try:
        with httpx.Client() as session:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
            with pytest.raises(httpx.ReadTimeout):
                session.post(f"{url}/v1/completions", json=body, timeout=0.2)
            assert httpx.get(f"{url}/load").json()["server_load"] <= 1
    finally:
        worker.frozen = False
    info = httpx.get(f"{url}/server_info").json()
    assert (info["model"], info["max_model_len"], info["vocab"]) == ("tiny", 8192, 260)


def test_embeddings_are_refused_in_plain_words(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="tiny", input="a")
