"""A request may allow that the terms of lost experts are left out: it alone, and its answer says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from experts.routes import DROPPED, KEEP, MAY_DROP
from tests.eaas.fake_decoder import FakeDecoder, expected_output
from tests.eaas.gateway_world import FakeWorker, GatewayProcess, World, eventually
from tests.eaas.test_engine import World as EngineWorld

BODY = {"model": "tiny", "prompt": "some words", "max_tokens": 20, "eaas_drop_lost_experts": True}
FIRST = 8  # token that the worker computes without an expert


class Losing(FakeDecoder):
    """Some rows of some tokens need an expert that nobody has; whoever allows it goes without."""

    def __init__(self, kv_blocks: int, needs: frozenset[int]) -> None:
        super().__init__(kv_blocks)
        self.needs = needs
        self.allowed: list[list[int]] = []

    def step(self, plan: Any, deadline_s: float) -> np.ndarray:
        """As the real one marks what it left out."""
        self.allowed.append([] if plan.drop is None else plan.drop.tolist())
        if plan.drop is not None:
            lost = np.isin(plan.token_ids, list(self.needs)) & (plan.drop != KEEP)
            plan.drop[lost] = DROPPED
        return super().step(plan, deadline_s)


def test_only_rows_of_requests_that_allow_it_may_lack_terms_and_their_blocks_are_nobody_elses() -> None:
    world = EngineWorld()
    decoder = world.decoder = world.engine._decoder = Losing(256, needs=frozenset({3}))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    calm = expected_output(prompt, 10)
    world.submit("allows", prompt, drop_lost_experts=True)
    world.submit("does not", prompt)
    outcome = world.engine.step()
    assert outcome is not None
    assert decoder.allowed == [[MAY_DROP] * len(prompt) + [KEEP] * len(prompt)]
    assert outcome.dropped == {0: [("allows", 1)]}, "its prompt holds token 3"
    world.tokens = {"allows": calm[:1], "does not": calm[:1]}
    world.run()
    assert world.tokens["does not"] == calm
    reused = world.engine.scheduler.reused_tokens
    world.submit("again", prompt)
    world.run()
    assert world.engine.scheduler.reused_tokens > reused, "what was computed whole is shared"

    fresh = EngineWorld()
    fresh.submit("allows", prompt, drop_lost_experts=True)
    fresh.run()
    fresh.submit("next", prompt)
    fresh.run()
    assert fresh.engine.scheduler.reused_tokens == 0, "what may lack terms is shared"


def test_a_request_that_lacked_nothing_is_not_marked() -> None:
    world = EngineWorld()
    world.engine._decoder = Losing(256, needs=frozenset())
    world.submit("allows", [1, 2, 3], drop_lost_experts=True)
    while (outcome := world.engine.step()) is not None:
        assert outcome.dropped == {}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("model"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def url(world: World) -> Iterator[str]:
    gateway = GatewayProcess(world)
    yield gateway.url
    gateway.stop()


@pytest.fixture(scope="module")
def worker(world: World, url: str) -> FakeWorker:
    started = world.worker(drops_at=FIRST)
    world.router.show(started)
    eventually(
        lambda: httpx.get(f"{url}/status").json()["gateway"]["attention_workers"] == [started.name],
        "a worker",
    )
    return started


@pytest.mark.usefixtures("worker")
def test_a_whole_answer_says_in_its_body_and_its_header_that_experts_were_dropped(url: str) -> None:
    short = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": FIRST})
    marked = httpx.post(f"{url}/v1/completions", json=BODY)
    unasked = httpx.post(f"{url}/v1/completions", json={**BODY, "eaas_drop_lost_experts": None})
    chat = {**BODY, "messages": [{"role": "user", "content": "words"}]}
    del chat["prompt"]
    talked = httpx.post(f"{url}/v1/chat/completions", json=chat)
    for whole in (short, unasked):
        assert "eaas_dropped_experts" not in whole.json()
        assert "x-eaas-dropped-experts" not in whole.headers
    for lacking in (marked, talked):
        assert lacking.json()["eaas_dropped_experts"] is True
        assert lacking.headers["x-eaas-dropped-experts"] == "true"
    prints = [reply.json()["system_fingerprint"] for reply in (short, unasked, marked, talked)]
    assert prints[0] == prints[1] != prints[2] == prints[3]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_it_from_the_first_token_that_lacked_something(url: str, chat: bool) -> None:
    body: dict[str, Any] = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/completions"
    if chat:
        path = "/v1/chat/completions"
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "words"}]
    before = dropped(url)
    events: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{url}{path}", json=body) as reply:
        assert "x-eaas-dropped-experts" not in reply.headers, "the first text lacked nothing"
        for line in reply.iter_lines():
            data = line.partition("data: ")[2]
            if data and data != "[DONE]":
                events.append(json.loads(data))
    marks = [event.get("eaas_dropped_experts", False) for event in events]
    assert marks == sorted(marks) and marks[0] is False and marks[-1] is True
    texts = [event for event in events if event["choices"] and chosen_text(event["choices"][0])]
    assert [event.get("eaas_dropped_experts", False) for event in texts].index(True) == FIRST
    assert [event["system_fingerprint"] != events[0]["system_fingerprint"] for event in events] == marks
    assert dropped(url) - before == 1


@pytest.mark.usefixtures("worker")
def test_a_stream_of_messages_says_it_where_it_ends(url: str) -> None:
    body = {**BODY, "stream": True, "messages": [{"role": "user", "content": "words"}]}
    del body["prompt"]
    reply = httpx.post(f"{url}/v1/messages", json=body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    by_type = {event["type"]: event for event in events}
    assert "eaas_dropped_experts" not in by_type["message_start"]["message"], "nothing was lacking yet"
    assert by_type["message_delta"]["eaas_dropped_experts"] is True


def chosen_text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def dropped(url: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith("eaas_dropped_experts_total"))


def test_the_switch_is_a_boolean(url: str) -> None:
    reply = httpx.post(f"{url}/v1/completions", json={**BODY, "eaas_drop_lost_experts": "yes"})
    assert reply.status_code == 400
    assert "eaas_drop_lost_experts" in reply.json()["error"]["message"]
