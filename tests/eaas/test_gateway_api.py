"""The OpenAI API as the real `openai` client sees it, through the real gateway process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from eaas.gateway.__main__ import RouterViews
from eaas.gateway.status import RouterStatus
from eaas.worker.grammar import Grammar
from router.proto import router_pb2 as pb
from tests.eaas.gateway_world import (
    EOS,
    MAX_MODEL_LEN,
    FakeRouter,
    FakeWorker,
    World,
    eventually,
    gateway_url,
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


def events(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The raw events of a stream: parsed objects, and the string [DONE]."""
    reply = httpx.post(f"{url}{path}", json={"model": "tiny", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = reply.text.split("\n\n")
    assert lines.pop() == ""
    data = [line.partition("data: ")[2] for line in lines]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "eaas"


def test_a_completion_comes_whole(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="abc", max_tokens=7)
    assert reply.choices[0].text == "abcabca"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 7, 10)
    assert reply.id.startswith("cmpl-")
    assert reply.system_fingerprint and reply.system_fingerprint.startswith("fp_")


def test_a_completion_streams_each_token_once(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="abc", max_tokens=7, stream=True))
    texts = [chunk.choices[0].text for chunk in chunks]
    assert texts == ["a", "b", "c", "a", "b", "c", "a"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_comes_whole_through_the_chat_template(client: openai.OpenAI, worker: FakeWorker) -> None:
    reply = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        max_completion_tokens=5,
    )
    prompt = "<system>be<user>hi<assistant>"
    assert bytes(worker.submits[-1].prompt).decode() == prompt
    assert reply.choices[0].message.content == prompt[:5]
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage is not None and reply.usage.prompt_tokens == len(prompt)


def test_a_chat_stream_has_the_role_first_and_one_finish_reason_and_done_last(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    *chunks, done = events(url, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:]] == list("<use")
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_has_the_usage_so_far_when_asked(url: str, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hello"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = events(url, path, {**body, "max_tokens": 4, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (counts, done) == ([0] * ("chat" in path) + [1, 2, 3, 4, 4], "[DONE]")
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1 and not chunks[-1]["choices"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "reason"),
    [({"stop": ["x", "cd"]}, "cd"), ({"stop_token_ids": [ord("d")]}, ord("d")), ({"max_tokens": 3}, None)],
)
def test_what_stopped_a_choice_is_told(url: str, stream: bool, asked: dict[str, Any], reason: Any) -> None:
    body = {"prompt": "abcdef", "max_tokens": 9, **asked}
    if stream:
        last = events(url, "/v1/completions", body)[-2]["choices"][0]
        assert last.get("stop_reason") == reason
    else:
        last = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
        assert last["stop_reason"] == reason and last["prompt_logprobs"] is last["token_ids"] is None
    assert last["finish_reason"] == ("length" if reason is None else "stop")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_comes_in_a_last_chunk_without_choices_when_asked(url: str, path: str) -> None:
    content = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi there"}
    body = {**content, "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(url, path, body)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 3
    assert all(chunk["usage"] is None for chunk in chunks)


def test_choices_and_prompts_of_one_request_are_drawn_apart(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.submits.clear()
    reply = client.completions.create(model="tiny", prompt=["ab", "xyz"], n=2, max_tokens=4)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["abab", "abab", "xyzx", "xyzx"]
    assert reply.usage is not None and reply.usage.prompt_tokens == 5, "a prompt counts once"
    assert reply.usage.completion_tokens == 16
    assert [submit.params.choice for submit in worker.submits] == [0, 1, 0, 1]
    assert len({submit.id for submit in worker.submits}) == 4
    seeds = [submit.params.seed for submit in worker.submits]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3], "each prompt has draws of its own"
    worker.submits.clear()
    client.completions.create(model="tiny", prompt=["ab", "ab"], max_tokens=4, seed=7)
    assert [submit.params.seed for submit in worker.submits] == [7, 7], "a client's seed is every prompt's"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("last", "shown"), [("assistant", "so farsay"), ("user", "say")])
def test_a_chat_is_shown_its_last_message_first_where_that_is_the_assistants(
    url: str, worker: FakeWorker, stream: bool, last: str, shown: str
) -> None:
    worker.script[:] = ["say"]
    body = {"messages": [{"role": last, "content": "so far"}], "max_tokens": 3, "echo": True}
    if stream:
        *chunks, _ = events(url, "/v1/chat/completions", body)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        reply = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        text = reply["choices"][0]["message"]["content"]
        assert reply["usage"]["completion_tokens"] == 3
    worker.script.clear()
    assert text == shown


def test_choices_stream_side_by_side_and_each_ends_once(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "n": 3}
    *chunks, _ = events(url, "/v1/chat/completions", body)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "<user"
        assert [choice["finish_reason"] for choice in own].count("length") == 1


def test_token_prompts_are_taken_as_they_are(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=[72, 105], max_tokens=3)
    assert reply.choices[0].text == "HiH"
    reply = client.completions.create(model="tiny", prompt=[[72, 105], [33]], max_tokens=2)
    assert [choice.text for choice in reply.choices] == ["Hi", "!!"]


def test_every_sampling_parameter_reaches_the_worker(url: str, worker: FakeWorker) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "repetition_penalty": 1.1, "min_tokens": 2, "max_tokens": 4,
        "ignore_eos": True, "stop_token_ids": [9],
    }  # fmt: skip
    reply = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "abc", "unknown": 1, **given})
    assert reply.status_code == 200, reply.text
    params = worker.submits[-1].params
    for name, value in given.items():
        expected = {"seed": 2**64 - 3, "stop_token_ids": (9,)}.get(name, value)
        assert getattr(params, name) == expected, name


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}},
            "json_schema", '{"b":1,"a":2}',
        ),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"choice": ["a", "\u00e9"]}}, "lark", 'start: "a" | "\u00e9"'),
        ({"guided_grammar": 'start: "x"'}, "lark", 'start: "x"'),
        ({"response_format": {"type": "text"}, "logit_bias": {"5": -100, "7": 1.5}}, None, ""),
        ({"allowed_token_ids": [72, 105], "prompt_logprobs": 3}, None, ""),
    ],
)  # fmt: skip
def test_what_binds_the_output_reaches_the_worker(
    url: str, worker: FakeWorker, given: dict[str, Any], kind: str | None, text: str
) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = httpx.post(f"{url}{path}", json={"model": "tiny", "max_tokens": 2, **prompt, **given})
        assert reply.status_code == 200, reply.text
        params = worker.submits[-1].params
        assert params.grammar == (None if kind is None else Grammar(kind, text))  # type: ignore[arg-type]
        assert params.logit_bias == (((5, -100.0), (7, 1.5)) if "logit_bias" in given else ())
        assert params.allowed_token_ids == tuple(given.get("allowed_token_ids", ()))
        assert params.prompt_logprobs == given.get("prompt_logprobs", -1)


def test_an_echo_comes_first_and_alone_costs_no_completion(client: openai.OpenAI) -> None:
    for prompt in (["Hi", "!?"], [[72, 105], [33, 63]]):
        reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, echo=True, n=2)  # type: ignore[arg-type]
        assert [choice.text for choice in reply.choices] == ["HiHi", "HiHi", "!?!?", "!?!?"]
    alone = client.completions.create(model="tiny", prompt="Hi", max_tokens=0, echo=True)
    assert alone.choices[0].text == "Hi" and alone.choices[0].finish_reason == "length"
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=3, echo=True, stream=True, stop="iH")
    assert "".join(chunk.choices[0].text for chunk in stream) == "HiH", "a stop string is sought in the output alone"


def test_a_seed_is_drawn_for_each_request_that_gives_none(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.submits.clear()
    for _ in range(2):
        client.completions.create(model="tiny", prompt="abc", max_tokens=1)
    first, second = (submit.params.seed for submit in worker.submits)
    assert first != second


def test_defaults_are_those_of_openai(client: openai.OpenAI, worker: FakeWorker) -> None:
    client.completions.create(model="tiny", prompt="abc")
    params = worker.submits[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stop="<")
    assert worker.submits[-1].params.max_tokens == MAX_MODEL_LEN - len("<user>hi<assistant>")


def test_characters_of_several_tokens_appear_whole(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="é€😀", max_tokens=9, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["é", "€", "😀"]


def test_an_end_token_ends_with_stop_and_without_text(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=[65, 66, EOS], max_tokens=9)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("AB", "stop")
    assert reply.usage is not None and reply.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_choice_and_cancels_the_work(
    client: openai.OpenAI, worker: FakeWorker, stream: bool
) -> None:
    worker.cancels.clear()
    request: dict[str, Any] = {
        "model": "tiny",
        "prompt": "one two three ",
        "max_tokens": 1000,
        "stop": ["x", "thr"],
    }
    if stream:
        chunks = list(client.completions.create(**request, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    else:
        reply = client.completions.create(**request)
        text = reply.choices[0].text
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage is not None and reply.usage.completion_tokens == len("one two thr")
    assert text == "one two "
    eventually(lambda: worker.cancels == [worker.submits[-1].id], "one cancel")


def test_withheld_text_appears_when_no_stop_string_comes(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="abcd", max_tokens=3, stop="bcX")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abc", "length")


def test_stop_strings_count_only_after_min_tokens(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="ab", max_tokens=20, stop="ab", extra_body={"min_tokens": 5})
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("ababab", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_one_entry_for_each_token(client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "é"}], "max_tokens": 8, "logprobs": True,
        "top_logprobs": 2, "stop": "zz",
    }  # fmt: skip
    if stream:
        chunks = list(client.chat.completions.create(**request, stream=True))
        entries = [entry for chunk in chunks if (p := chunk.choices[0].logprobs) for entry in p.content or []]
    else:
        logprobs = client.chat.completions.create(**request).choices[0].logprobs
        assert logprobs is not None
        entries = logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == "<user>é".encode()
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)
    assert entries[0].token == entries[0].top_logprobs[0].token == "<"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_text_offsets(client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "logprobs": 2}
    if stream:
        parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**request, stream=True)]
    else:
        parts = [client.completions.create(**request).choices[0].logprobs]
    found = [part for part in parts if part is not None]
    assert [token for part in found for token in part.tokens or []] == list("abca")
    assert [offset for part in found for offset in part.text_offset or []] == [0, 1, 2, 3]
    assert [p for part in found for p in part.token_logprobs or []] == [-0.5] * 4
    assert next(top for part in found for top in part.top_logprobs or []) == {"a": -0.5, "b": -2.0}


def test_logprobs_of_a_stop_string_are_not_shown(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="abcd", max_tokens=9, logprobs=0, stop="cd")
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert (reply.choices[0].text, logprobs.tokens) == ("ab", ["a", "b"])


def test_the_request_id_is_echoed_or_drawn(url: str) -> None:
    assert httpx.get(f"{url}/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    drawn = {httpx.get(f"{url}/nothing").headers["x-request-id"] for _ in range(2)}
    assert len(drawn) == 2


def test_health_version_and_metrics_answer(url: str) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/version").json()["version"]
    page = httpx.get(f"{url}/metrics").text
    for name in (
        "requests_total",
        "tokens_total",
        "ttft_seconds",
        "itl_seconds",
        "e2e_seconds",
        "running",
        "replays",
    ):
        assert f"eaas_{name}" in page, name


def test_status_lists_every_process(url: str, worker: FakeWorker) -> None:
    status = httpx.get(f"{url}/status").json()
    assert status["model"] == "tiny"
    assert status["epoch"] >= 1
    members = {member["name"]: member for member in status["members"]}
    assert set(members) == {"router/0", "gateway/0", "expert/1", worker.name}
    assert members["expert/1"] == {
        **members["expert/1"], "experts": 8, "state": "serving", "incarnation": "4d", "load": {"busy": 0.25},
    }  # fmt: skip
    assert members["gateway/0"]["pid"] == status["gateway"]["pid"]
    assert status["replicas_min"] == 1

    def router_state() -> str:
        return httpx.get(f"{url}/status").json()["members"][0]["state"]

    # It is asked with a time limit.
    eventually(lambda: router_state() == "serving", "a router that answers in time")


def test_status_names_the_process_that_the_router_is_now(world: World, url: str) -> None:
    def shown() -> int:
        return httpx.get(f"{url}/status").json()["members"][0]["pid"]

    before = world.router.pid
    # The router is asked with a time limit, and where it does not answer in time its pid is not known.
    eventually(lambda: shown() == before, "the pid of the router")
    world.router.pid = before + 1
    eventually(lambda: shown() == before + 1, "the pid of a restarted router, another process")


class MemberRouter(FakeRouter):
    """Takes members too, and knows each until it is told to forget."""

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.loads: list[dict[str, float]] = []
        self.forgotten: set[str] = set()
        super().__init__()

    def Join(self, request: pb.JoinRequest, context: object) -> pb.JoinReply:
        self.joined.append(request.pool)
        name = f"gateway/{len(self.joined)}"
        return pb.JoinReply(name=name, incarnation=len(self.joined), term=1, lease_s=0.4, renew_s=0.02)

    def Renew(self, requests: Iterator[pb.RenewRequest], context: object) -> Iterator[pb.RenewReply]:
        for request in requests:
            self.loads.append(dict(request.load))
            yield pb.RenewReply(incarnation=request.incarnation, fenced=request.name in self.forgotten)

    def Leave(self, request: pb.LeaveRequest, context: object) -> pb.LeaveReply:
        self.forgotten.add(request.name)
        return pb.LeaveReply()


def test_a_gateway_is_a_member_whose_lease_carries_its_load_and_joins_again_when_fenced() -> None:
    router = MemberRouter()
    views = RouterViews(router.address, "127.0.0.1:8000")
    assert views.name == "gateway/0"
    views.start(lambda view: None, lambda: {"waiting": 3.0})
    assert views.name == "gateway/1"
    eventually(lambda: {"waiting": 3.0} in router.loads, "the load")
    router.forgotten.add("gateway/1")
    eventually(lambda: views.name == "gateway/2", "another membership")
    views.close()
    assert router.joined == ["gateway", "gateway"]
    assert "gateway/2" in router.forgotten, "it did not leave"
    router.stop()


def test_a_router_that_does_not_answer_is_shown_with_its_last_process() -> None:
    router = FakeRouter()
    views = RouterViews(router.address)
    assert views.snapshot().routers == (RouterStatus(pid=router.pid, address=router.address, state="serving"),)
    router.stop()
    assert views.snapshot().routers == (RouterStatus(pid=router.pid, address=router.address, state="unreachable"),)
    views.close()


def test_sixty_four_clients_get_their_own_text(client: openai.OpenAI) -> None:
    def one(number: int) -> tuple[str, str]:
        prompt = f"client {number}."
        chunks = client.completions.create(model="tiny", prompt=prompt, max_tokens=40, stream=True)
        return prompt, "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(16) as threads:
        for prompt, text in threads.map(one, range(64)):
            assert text == (prompt * 40)[:40]


def test_long_prompts_are_encoded_like_short_ones(client: openai.OpenAI, worker: FakeWorker) -> None:
    prompt = "long " * 1200
    client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert bytes(worker.submits[-1].prompt).decode() == prompt


def test_the_gateway_does_not_load_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, eaas.gateway.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


BATCH = "/v1/chat/completions/batch"


def test_a_batch_of_conversations_has_a_choice_for_each(url: str, worker: FakeWorker) -> None:
    worker.submits.clear()
    conversations = [[{"role": "user", "content": word}] for word in ("alpha", "be")]
    body = {"messages": conversations, "max_tokens": 9, "logprobs": True, "return_token_ids": True}
    reply = httpx.post(f"{url}{BATCH}", json=body).json()
    prompts = [f"<user>{word}<assistant>" for word in ("alpha", "be")]
    assert sorted(bytes(submit.prompt).decode() for submit in worker.submits) == sorted(prompts)
    assert reply["object"] == "chat.completion"
    # A worker of these tests repeats its prompt.
    said = [(choice["index"], choice["message"]["content"]) for choice in reply["choices"]]
    assert said == [(0, prompts[0][:9]), (1, prompts[1][:9])]
    assert all(len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 9 for choice in reply["choices"])
    assert reply["usage"] == {
        "prompt_tokens": sum(map(len, prompts)), "completion_tokens": 18,
        "total_tokens": sum(map(len, prompts)) + 18,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"messages": [{"role": "user", "content": "one conversation"}]}, "messages.0"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
    ],
)
def test_what_a_batch_cannot_have_is_a_400_that_names_it(url: str, asked: dict[str, Any], named: str) -> None:
    body = {"messages": [[{"role": "user", "content": "a"}]], "max_tokens": 1, **asked}
    reply = httpx.post(f"{url}{BATCH}", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, named), reply.text
