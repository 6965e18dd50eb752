"""docs/api.md lists every field of OpenAI's, Anthropic's and vLLM's requests, and says the truth of each."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
from anthropic.types import message_create_params as messages
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from tests.eaas.gateway_world import FakeWorker, World, eventually, gateway_url

ROUTES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "generate": ("/inference/v1/generate", {"token_ids": [104, 105], "sampling_params": {"max_tokens": 2}}),
}
PUBLISHED = {
    "chat": chat.CompletionCreateParamsBase,
    "completions": completions.CompletionCreateParamsBase,
    "responses": responses.ResponseCreateParamsBase,
    "messages": messages.MessageCreateParamsBase,
}
# As its source distribution declares them, read from the syntax tree.
VLLM = json.loads((Path(__file__).parent / "vllm_fields.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
# What each refused field might be asked for with; the first that is not its default.
ASKED: dict[str, Any] = {
    "best_of": 5, "length_penalty": 2.0, "spaces_between_special_tokens": False,
    "background": True,
}  # fmt: skip


def tables() -> dict[str, dict[str, str]]:
    """What becomes of each field, by route."""
    found: dict[str, dict[str, str]] = {}
    for route, (path, _) in ROUTES.items():
        part = PAGE.partition(f"## POST {path}\n")[2].partition("\n## ")[0]
        found[route] = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (\w+) \|", part, re.MULTILINE))
    return found


TABLES = tables()


@pytest.mark.parametrize("route", ROUTES)
def test_every_known_field_is_in_the_table(route: str) -> None:
    known = {*(get_type_hints(PUBLISHED[route]) if route in PUBLISHED else ()), "stream", *VLLM[route]}
    assert len(known) > 15
    assert not known - TABLES[route].keys()
    assert set(TABLES[route].values()) == {"honored", "refused", "ignored"}
    assert f"vLLM {VLLM['version']}" in PAGE


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    return world.worker()


@pytest.fixture(scope="module")
def url(world: World, worker: FakeWorker) -> Any:
    world.router.show(worker)
    with gateway_url(world) as url:
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200, "a worker")
        yield url
    world.router.show()
    world.stop_workers()


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_refused_is_a_400_that_names_the_field_and_its_default_is_taken(url: str, route: str) -> None:
    path, body = ROUTES[route]
    with httpx.Client(base_url=url) as client:
        for name in [name for name, what in TABLES[route].items() if what == "refused"]:
            reply = client.post(path, json={**body, name: ASKED.get(name, "x")})
            assert reply.status_code == 400, f"{name}: {reply.text}"
            error = reply.json()["error"]
            assert name in (error.get("param") or "") or f"'{name}'" in error["message"], f"{name}: {error}"
            if route == "generate" and name.endswith("routed_experts"):
                assert "one of 'sampling_params'" in error["message"]
        defaults = {name: None for name, what in TABLES[route].items() if what != "honored"}
        assert client.post(path, json={**body, **defaults}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_ignored_changes_nothing(url: str, route: str) -> None:
    path, body = ROUTES[route]
    ignored = [name for name, what in TABLES[route].items() if what == "ignored" and name != "metadata"]
    for name in ignored:
        assert httpx.post(f"{url}{path}", json={**body, name: "x"}).status_code == 200, name


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_honored_is_a_field_of_the_schema(url: str, route: str) -> None:
    described = httpx.get(f"{url}/openapi.json").json()["paths"][ROUTES[route][0]]["post"]["requestBody"]
    fields = described["content"]["application/json"]["schema"]["properties"]
    assert not {name for name, what in TABLES[route].items() if what == "honored"} - fields.keys()


def test_the_model_may_be_left_out(url: str) -> None:
    for path, body in ROUTES.values():
        assert httpx.post(f"{url}{path}", json=body).json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ({}, b"abcdefg"),
        ({"truncate_prompt_tokens": 3}, b"efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 9}, b"abcdefg"),
        ({"truncate_prompt_tokens": -1}, b"abcdefg"),
    ],
)
def test_a_prompt_is_cut_where_it_is_asked_for(
    url: str, worker: FakeWorker, asked: dict[str, Any], prompt: bytes
) -> None:
    submits = worker.submits
    submits.clear()
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": "abcdefg", "max_tokens": 1, **asked})
    assert reply.json()["usage"]["prompt_tokens"] == len(prompt), reply.text
    assert bytes(submits[0].prompt) == prompt
    assert submits[0].params.cache_salt == ""


def test_tokens_are_named_by_id_where_that_is_asked_for(url: str) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 0, "return_tokens_as_token_ids": True}
    said = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    assert said["logprobs"]["tokens"] == [f"token_id:{ord('a')}", f"token_id:{ord('b')}"]
    assert said["text"] == "ab"


def chunks(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a streamed answer consists of."""
    text = httpx.post(f"{url}{path}", json={**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_each_chunk_carries_what_its_choice_has_used_where_that_is_asked_for(url: str, route: str) -> None:
    path, body = ROUTES[route]
    body = {**body, "max_tokens": 4, "n": 2}
    asked = {"include_usage": True, "continuous_usage_stats": True}
    got = chunks(url, path, {**body, "stream_options": asked})
    prompt = got[-1]["usage"]["prompt_tokens"]
    for index in range(2):
        seen = [chunk["usage"] for chunk in got if chunk["choices"] and chunk["choices"][0]["index"] == index]
        opening = [0] if route == "chat" else []
        assert [usage["completion_tokens"] for usage in seen] == [*opening, 1, 2, 3, 4], seen
        assert {usage["prompt_tokens"] for usage in seen} == {prompt}
        assert all(usage["total_tokens"] == prompt + usage["completion_tokens"] for usage in seen)
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == 8
    # As vLLM has it, they come with the last chunk's usage or not at all.
    alone = chunks(url, path, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in chunk for chunk in alone)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_without_detokenizing_there_are_ids_and_no_text(url: str, route: str) -> None:
    path, body = ROUTES[route]
    body = {**body, "max_tokens": 4}
    asked = {**body, "detokenize": False}
    full = httpx.post(f"{url}{path}", json={**body, "return_token_ids": True}).json()["choices"][0]
    bare = httpx.post(f"{url}{path}", json=asked).json()["choices"][0]
    assert len(bare["token_ids"]) == 4
    assert bare["token_ids"] == full["token_ids"]
    assert (bare["message"]["content"] if route == "chat" else bare["text"]) == ""
    streamed = [chunk["choices"][0] for chunk in chunks(url, path, asked)]
    pieces = [piece["token_ids"] for piece in streamed if piece.get("token_ids")]
    assert pieces == [[token] for token in full["token_ids"]]
    assert not any(piece.get("text") or piece.get("delta", {}).get("content") for piece in streamed)
    scored = httpx.post(f"{url}{path}", json={**asked, "logprobs": True if route == "chat" else 0}).json()
    assert scored["choices"][0]["logprobs"]
    refused = httpx.post(f"{url}{path}", json={**asked, "stop": "x"})
    assert refused.status_code == 400
    assert "detokenize" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("role", "asked", "shown"),
    [
        ("assistant", {"continue_final_message": True}, "Well, "),
        ("assistant", {}, "Well, "),
        ("user", {"add_generation_prompt": False}, "Well, "),
        ("user", {}, ""),
        ("assistant", {"echo": False, "continue_final_message": True}, ""),
    ],
)
def test_a_chat_echoes_the_last_message_of_the_answers_role(
    url: str, role: str, asked: dict[str, Any], shown: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": "Well, "}]
    body = {"messages": messages, "max_tokens": 3, "echo": True, **asked}
    path = ROUTES["chat"][0]
    plain = httpx.post(f"{url}{path}", json={**body, "echo": None}).json()["choices"][0]["message"]["content"]
    reply = httpx.post(f"{url}{path}", json={**body, "n": 2}).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == [shown + plain] * 2
    assert reply["usage"]["completion_tokens"] == 6
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks(url, path, body)]
    assert "".join(piece or "" for piece in pieces) == shown + plain
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    called = {**body, "tools": [tool], "tool_choice": "none"}
    reply = httpx.post(f"{url}{path}", json=called).json()
    assert reply["choices"][0]["message"]["content"].startswith(shown), reply


def test_bad_words_are_given_to_the_worker_as_their_tokens(url: str, worker: FakeWorker) -> None:
    worker.submits.clear()
    body = {"prompt": "ab", "max_tokens": 1, "n": 2, "bad_words": ["cat", " cat", "é", "\n"]}
    refused = httpx.post(f"{url}/v1/completions", json=body)
    # White space alone is nothing that a text can begin with.
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bad_words")
    assert httpx.post(f"{url}/v1/completions", json={**body, "bad_words": ["cat", " cat", "é"]}).status_code == 200
    # Each letter is a token here, so that a space before it makes one more.
    wanted = (tuple(b"cat"), tuple("é".encode()))
    assert [submit.params.bad_tokens for submit in worker.submits] == [wanted] * 2
    for wrong in ([""], ["a" * 257], ["a"] * 513, "cat", [1]):
        reply = httpx.post(f"{url}/v1/completions", json={**body, "bad_words": wrong})
        assert reply.status_code == 400, wrong
        assert "bad_words" in reply.text


TEMPLATE = "{{ messages[0].content }}!{{ eos_token }}{{ mood }}"


@pytest.fixture(scope="module")
def trusting_url(world: World, url: str) -> Any:
    # It follows the same router; `url` has put the worker there.
    flags = ("--trust-request-chat-template", "--return-tokens-as-token-ids", "--enable-force-include-usage")
    with gateway_url(world, *flags) as trusting:
        eventually(lambda: httpx.get(f"{trusting}/health").status_code == 200, "a worker")
        yield trusting


def test_operators_choose_what_requests_do_not_say(url: str, trusting_url: str) -> None:
    path, body = "/v1/completions", {"prompt": "ab", "max_tokens": 2, "logprobs": 0}
    said = httpx.post(f"{trusting_url}{path}", json=body).json()["choices"][0]["logprobs"]["tokens"]
    assert said == [f"token_id:{ord('a')}", f"token_id:{ord('b')}"]
    other = httpx.post(f"{trusting_url}{path}", json={**body, "return_tokens_as_token_ids": False})
    assert other.json()["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    counted = chunks(trusting_url, path, body)
    assert [chunk["usage"]["completion_tokens"] for chunk in counted] == [1, 2, 2]
    assert counted[-1]["choices"] == [] and counted[-1]["usage"]["total_tokens"] == 4
    assert all("usage" not in chunk for chunk in chunks(url, path, body))


def test_invocations_are_chats_where_there_are_messages_and_else_completions(url: str) -> None:
    for path, body in (ROUTES["chat"], ROUTES["completions"]):
        named, told = (httpx.post(f"{url}{where}", json=body).json() for where in (path, "/invocations"))
        assert {**told, "id": 0, "created": 0} == {**named, "id": 0, "created": 0}
        assert chunks(url, "/invocations", body)[0]["object"] == chunks(url, path, body)[0]["object"]
    for wrong in ("[]", "{", '{"max_tokens": 3}', "null"):
        reply = httpx.post(f"{url}/invocations", content=wrong, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text


def test_every_key_of_a_bias_that_is_no_token_is_named(url: str) -> None:
    body = {**ROUTES["chat"][1], "logit_bias": {"x1": 1, "7": 2, "x2": 3}}
    said = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]["message"]
    assert "'x1', 'x2'" in said and "'7'" not in said


def test_a_requests_own_chat_template_is_taken_behind_the_flag_alone(
    url: str, trusting_url: str, worker: FakeWorker
) -> None:
    path, body = ROUTES["chat"]
    asked = {**body, "chat_template": TEMPLATE, "chat_template_kwargs": {"mood": "?"}}
    bare = {key: value for key, value in asked.items() if key != "max_tokens"}
    for where, what in ((path, asked), ("/tokenize", bare)):
        refused = httpx.post(f"{url}{where}", json=what)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in refused.json()["error"]["message"]
    worker.submits.clear()
    for _ in range(2):
        assert httpx.post(f"{trusting_url}{path}", json=asked).status_code == 200
    tokens = httpx.post(f"{trusting_url}/tokenize", json=bare).json()["tokens"]
    assert [submit.prompt for submit in worker.submits] == [tokens] * 2
    assert tokens == [*b"hi!", 256, *b"?"]
    hidden = {**body, "chat_template_kwargs": {"chat_template": TEMPLATE}}
    for one in (url, trusting_url):
        assert httpx.post(f"{one}{path}", json=hidden).json()["error"]["param"] == "chat_template_kwargs"
    assert httpx.post(f"{trusting_url}{path}", json=body).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{{", "{% for a in b %}", "", "a" * 65537, "{{ " + "(" * 20000 + ")" * 20000 + " }}",
        "{% if a %}" * 300 + "{% endif %}" * 300, "{% for a in range(50) %}" * 30 + "x" + "{% endfor %}" * 30,
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'a' * 999999999 }}", "{{ ().__class__.__base__.__subclasses__() }}", "{{ raise_exception('no') }}",
        "{% include '/etc/passwd' %}", "{% for a in range(50) %}{{ 'a' * 100000 }}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_that_means_harm_is_a_400(trusting_url: str, template: str) -> None:
    path, body = ROUTES["chat"]
    asked = {**body, "chat_template": template, "truncate_prompt_tokens": 5}
    reply = httpx.post(f"{trusting_url}{path}", json=asked, timeout=60)
    assert reply.status_code == 400, f"{template[:40]}: {reply.text}"
    assert reply.json()["error"]["param"] == "chat_template"


def test_priorities_reach_the_worker_and_those_that_wait_here_are_placed_by_them(
    world: World, url: str, worker: FakeWorker
) -> None:
    world.router.show()
    eventually(lambda: httpx.get(f"{url}/health").status_code == 503, "no worker")
    worker.submits.clear()
    asked = [(0, 3), (1, None), (2, -2), (3, 0), (4, 3)]
    with ThreadPoolExecutor(len(asked)) as threads:
        replies = []
        for number, priority in asked:
            body = {"prompt": f"p{number}", "max_tokens": 1, "priority": priority}
            replies.append(threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60))
            waiting = f'eaas_waiting{{model="tiny"}} {number + 1}'
            eventually(lambda waiting=waiting: waiting in httpx.get(f"{url}/metrics").text, waiting)
        world.router.show(worker)
        assert [reply.result().status_code for reply in replies] == [200] * len(asked)
    placed = [(bytes(submit.prompt).decode(), submit.params.priority) for submit in worker.submits]
    assert placed == [("p2", -2), ("p1", 0), ("p3", 0), ("p0", 3), ("p4", 3)]
    told = httpx.post(f"{url}/v1/responses", json={**ROUTES["responses"][1], "priority": 7})
    assert (told.status_code, worker.submits[-1].params.priority) == (200, 7), told.text
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "priority": 2**31}).status_code == 400
