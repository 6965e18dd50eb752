"""POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.eaas.gateway_world import EOS, FakeWorker, World, eventually, gateway_url

PROMPT = [97, 98, 195]  # its last token is half a character


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


def ask(url: str, sampling: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"token_ids": PROMPT, "sampling_params": sampling, **more}
    return httpx.post(f"{url}/inference/v1/generate", json=body)


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in reply.text.splitlines() if line and not line.startswith("id: ")]
    assert lines[-1] == "data: [DONE]", reply.text
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_tokens_are_answered_by_tokens(url: str, worker: FakeWorker) -> None:
    reply = ask(url, {"max_tokens": 7, "temperature": 0.0, "detokenize": False}, request_id="r1").json()
    assert reply["request_id"] == "r1" and reply["output_mode"] == "tokens"
    (choice,) = reply["choices"]
    assert choice["token_ids"] == (PROMPT * 3)[:7] and choice["finish_reason"] == "length"
    assert choice["logprobs"] is None and reply["prompt_token_ids"] is None
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert worker.submits[-1].params.temperature == 0


@pytest.mark.parametrize("name", ["cache_salt", "priority", "request_id", "stream"])
def test_what_stands_beside_the_sampling_is_not_taken_within_it(url: str, name: str) -> None:
    reply = ask(url, {"max_tokens": 1, name: "1"})
    assert reply.status_code == 400 and f"'sampling_params' has '{name}'" in reply.json()["error"]["message"]


def test_without_a_limit_there_is_all_the_room(url: str, worker: FakeWorker) -> None:
    worker.script.append("some words")
    try:
        (choice,) = ask(url, {"max_tokens": None}).json()["choices"]
    finally:
        worker.script.clear()
    assert choice["token_ids"] == [*b"some words", EOS] and choice["finish_reason"] == "stop"
    assert worker.submits[-1].params.max_tokens > 8000


def test_every_token_of_a_stream_comes_at_once_with_its_own_event(url: str) -> None:
    told = chunks(ask(url, {"max_tokens": 7, "n": 2}, stream=True, stream_options={"include_usage": True}))
    usage = told.pop()
    assert usage["usage"]["completion_tokens"] == 14 and usage["choices"] == []
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in told if chunk["choices"][0]["index"] == index]
        assert [choice["token_ids"] for choice in mine] == [[token] for token in (PROMPT * 3)[:7]]
        assert [choice["finish_reason"] for choice in mine] == [None] * 6 + ["length"]


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_log_probabilities_name_tokens_by_number_the_chosen_one_first(url: str, wanted: int) -> None:
    (choice,) = ask(url, {"max_tokens": 4, "logprobs": wanted}).json()["choices"]
    told = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in told] == choice["token_ids"] == (PROMPT * 2)[:4]
    for entry in told:
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token_id", "logprob", "rank")}
        assert len(entry["top_logprobs"]) == max(1, wanted) and entry["logprob"] == -0.5
        assert entry["rank"] == (1 if wanted else None)


def test_a_stop_string_is_found_in_the_text_that_is_not_shown(url: str, worker: FakeWorker) -> None:
    worker.script.append("one two three")
    try:
        (choice,) = ask(url, {"max_tokens": 30, "stop": ["two"]}).json()["choices"]
    finally:
        worker.script.clear()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert bytes(choice["token_ids"]) == b"one two"


def test_the_prompt_comes_back_where_it_is_wanted(url: str) -> None:
    assert ask(url, {"max_tokens": 1}, return_token_ids=True).json()["prompt_token_ids"] == PROMPT
    told = chunks(ask(url, {"max_tokens": 1}, return_token_ids=True, stream=True))
    assert told[0]["prompt_token_ids"] == PROMPT and told[0]["choices"] == []


@pytest.mark.parametrize(
    ("sampling", "more", "said"),
    [
        ({"max_tokens": 3}, {"token_ids": []}, "token_ids"),
        ({"max_tokens": 3}, {"token_ids": [10**6]}, "out of vocabulary"),
        ({"max_tokens": 3}, {"model": "other"}, "`other`"),
        ({"max_tokens": None, "min_tokens": 2147483648}, {}, "min_tokens"),
        ({"max_tokens": 3, "sampling_magic": 1}, {}, "sampling_magic"),
        ({"max_tokens": 3, "prompt": "x"}, {}, "prompt"),
        ({"max_tokens": 3, "temperature": -1}, {}, "temperature"),
        ({"max_tokens": 3}, {"output_mode": "text"}, "output_mode"),
        ({"max_tokens": 3}, {"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "features"),
        ({"max_tokens": 10**6}, {}, "maximum context length"),
    ],
)
def test_what_cannot_be_is_refused_by_name(url: str, sampling: dict[str, Any], more: dict[str, Any], said: str) -> None:
    reply = ask(url, sampling, **more)
    assert reply.status_code in (400, 404), reply.text
    assert said in reply.json()["error"]["message"], reply.text


def test_the_tokenizer_is_described_as_the_checkpoint_does(world: World, url: str) -> None:
    config = json.loads((world.model / "tokenizer_config.json").read_text())
    told = httpx.get(f"{url}/tokenizer_info").json()
    assert config.items() <= told.items() and told["tokenizer_class"] == "PreTrainedTokenizerFast"
