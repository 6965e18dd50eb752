"""Clients that others wrote, against a cluster that serves the demonstration model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.leaks import held, reading
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from tests.e2e.test_failures import wait_for

pytestmark = pytest.mark.full(seconds=8)

DEMO = Path(__file__).parents[2] / "eaas" / "demo_model"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalCluster]:
    """Two expert servers with the built-in model."""
    config = ClusterConfig(model=DEMO, served_model_name="demo", experts=2, replicas=2, port=0, cores=(0, 1))
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(demo: LocalCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


def test_calls_that_must_be_made_are_made_and_their_arguments_are_of_the_schema(
    client: openai.OpenAI,
) -> None:
    for seed in range(5):
        reply = client.chat.completions.create(
            model="demo", messages=ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
            seed=seed, max_tokens=200,
        )  # fmt: skip
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls", f"seed {seed}: {choice}"
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3), f"seed {seed}: {arguments}"


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "demo", "messages": ASK, "tools": [WEATHER], "temperature": 0, "max_tokens": 200,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    whole = client.chat.completions.create(**request).choices[0].message.tool_calls
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert whole and streamed
    assert whole[0].to_dict()["function"]["arguments"] == streamed[0].function.arguments  # type: ignore[index]


def test_responses_and_chats_say_the_same(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="demo", messages=ASK, temperature=0, max_tokens=24)
    whole = client.responses.create(model="demo", input=ASK, temperature=0, max_output_tokens=24)
    with client.responses.stream(model="demo", input=ASK, temperature=0, max_output_tokens=24) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert chat.choices[0].message.content == whole.output_text == deltas


def test_two_hundred_that_give_up_leave_nothing_behind(demo: LocalCluster, client: openai.OpenAI) -> None:
    client.completions.create(model="demo", prompt="warm", max_tokens=1)
    wait_for("an idle worker", lambda: held(reading(demo)) == 0, demo)
    impatient = client.with_options(timeout=0.5)

    def give_up(number: int) -> str:
        request: dict[str, Any] = {
            "model": "demo", "prompt": f"Scene {number}. Enter ROMEO and JULIET. " * 8, "max_tokens": 1800,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        ends_s = time.monotonic() + 0.5
        try:
            if number % 2:
                impatient.completions.create(**request)
                return "answered"
            # A stream that goes on has no timeout of its own: its reader leaves.
            with impatient.completions.create(**request, stream=True) as stream:
                for _ in stream:
                    if time.monotonic() > ends_s:
                        return "given up"
            return "answered"
        except openai.APITimeoutError:
            return "given up"

    with ThreadPoolExecutor(50) as threads:
        ends = list(threads.map(give_up, range(200)))
    assert ends.count("given up") == 200, f"{ends.count('answered')} were answered: ask for more tokens"
    reply = client.with_options(timeout=20).completions.create(model="demo", prompt="ROMEO:", max_tokens=4)
    assert reply.choices[0].text
    wait_for("every block and slot to be free again", lambda: held(reading(demo)) == 0, demo)


LITELLM = """
    import litellm
    there = {"api_base": URL + "/v1", "api_key": "none"}
    ask = [{"role": "user", "content": "What news?"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}}}
    reply = litellm.completion(model="openai/demo", messages=ask, max_tokens=8, **there)
    assert reply.usage.completion_tokens <= 8, reply
    chunks = list(litellm.completion(model="openai/demo", messages=ask, max_tokens=8, stream=True, **there))
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] in (
        ["length"], ["stop"]), chunks
    text = litellm.text_completion(model="text-completion-openai/demo", prompt="ROMEO:", max_tokens=8, **there)
    assert text.choices[0].text, text
    said = litellm.responses(model="openai/demo", input="What news?", max_output_tokens=8, **there)
    assert said.status in ("completed", "incomplete"), said
    try:
        litellm.completion(model="openai/demo", messages=ask, max_tokens=10**6, num_retries=0, **there)
    except litellm.ContextWindowExceededError:
        print("litellm is content")
"""


def test_litellm_is_served(demo: LocalCluster) -> None:
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("needs litellm, found none: pip install litellm, in an environment of its own where it may be")
    code = f"URL = {demo.url!r}\n" + textwrap.dedent(LITELLM)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert "litellm is content" in done.stdout, done.stderr[-3000:]
