"""Outputs under a grammar, through real processes: valid, the same whoever dies, and no burden for others."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.model.loader import resolve_model

SEEDS = range(6)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 60},
        "lines": {
            "type": "array",
            "items": {"type": "string", "maxLength": 40},
            "minItems": 3,
            "maxItems": 5,
        },
        "act": {"type": "integer", "minimum": 1, "maximum": 5},
        "mood": {"enum": ["merry", "grave"]},
    },
    "required": ["name", "lines", "act", "mood"],
    "additionalProperties": False,
}
# What the one without a grammar must not say.
BAD = ["the", "and", "you", "KING"]
FORMAT = {"type": "json_schema", "json_schema": {"name": "scene", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    model = Path(resolve_model("demo"))
    config = ClusterConfig(model=model, served_model_name="demo", experts=2, attention=2, port=0, cores=(0, 1))
    with LocalCluster(config) as running:
        yield running


def client_of(cluster: LocalCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120.0)


def stream_all(cluster: LocalCluster, on_event: Callable[[], None] = lambda: None) -> dict[int, tuple[str, str]]:
    """Of each seed the text and how it finished, all streamed at once beside one with bad words and no grammar."""
    client, seen = client_of(cluster), {}

    def run(seed: int) -> None:
        stream = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Describe the scene."}], seed=seed, stream=True,
            max_tokens=900, temperature=1.0,
            **({"extra_body": {"bad_words": BAD}} if seed < 0 else {"response_format": FORMAT}),
        )  # fmt: skip
        text, finish = "", ""
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            finish += chunk.choices[0].finish_reason or ""
            on_event()
        seen[seed] = (text, finish)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (-1, *SEEDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_attention_workers_killed_in_mid_stream_change_nothing_under_a_schema(cluster: LocalCluster) -> None:
    wanted = stream_all(cluster)
    events, killed, lock = [0], [], threading.Lock()

    def strike() -> None:
        with lock:
            events[0] += 1
            if events[0] not in (150, 400):
                return
            members = fetch_status(cluster.url)["members"]
            # On a busy host one may be suspect for a moment.
            alive = [m for m in members if m["pool"] == "attention" and m["state"] in ("serving", "suspect")]
            victim = alive[len(killed) % len(alive)]
            killed.append(victim["name"])
            os.kill(victim["pid"], signal.SIGKILL)

    found = stream_all(cluster, strike)
    assert len(killed) == 2, f"only {events[0]} events came"
    assert found == wanted, f"{killed} were killed"
    for seed in SEEDS:
        text, finish = found[seed]
        assert finish == "stop", f"seed {seed} finished with {finish}: {text}"
        Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_makes_no_sense_is_a_400(cluster: LocalCluster, stream: bool) -> None:
    client = client_of(cluster)
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.completions.create(
            model="demo", prompt="a", stream=stream, extra_body={"structured_outputs": {"regex": "("}}
        )


@pytest.mark.parametrize(
    ("structured", "texts"),
    [
        ({"choice": ["to be", "not to be"]}, {"to be", "not to be"}),
        ({"grammar": 'start: "O" ("o" "!")?'}, {"O", "Oo!"}),
        ({"json": '{"const": [1, "a"]}'}, None),
        ({"json_object": True}, None),
    ],
)
def test_every_field_of_structured_outputs_is_kept(
    cluster: LocalCluster, structured: dict[str, Any], texts: set[str] | None
) -> None:
    reply = client_of(cluster).completions.create(
        model="demo", prompt="ROMEO:", seed=5, max_tokens=400, logit_bias={"93": 3.0},
        extra_body={"structured_outputs": structured},
    )  # fmt: skip
    choice = reply.choices[0]
    if texts is not None:
        assert choice.text in texts and choice.finish_reason == "stop"
    elif choice.finish_reason == "stop":
        found = json.loads(choice.text)
        assert found == [1, "a"] if "json" in structured else isinstance(found, dict)


def test_an_echoed_prompt_has_the_log_probabilities_that_it_would_have_as_an_output(
    cluster: LocalCluster,
) -> None:
    client = client_of(cluster)
    made = client.completions.create(model="demo", prompt="ROMEO:", max_tokens=12, temperature=0, logprobs=2)
    wanted, text = made.choices[0].logprobs, "ROMEO:" + made.choices[0].text
    assert wanted is not None and wanted.token_logprobs is not None
    whole = client.completions.create(model="demo", prompt=text, max_tokens=0, echo=True, logprobs=2)
    found = whole.choices[0].logprobs
    assert whole.choices[0].text == text and whole.usage is not None and whole.usage.completion_tokens == 0
    assert found is not None and found.token_logprobs is not None and found.token_logprobs[0] is None
    # Prefill and decode have one arithmetic: the very same numbers.
    assert found.token_logprobs[-len(wanted.token_logprobs) :] == wanted.token_logprobs
    streamed, tokens = "", []
    for chunk in client.completions.create(
        model="demo", prompt=text, max_tokens=3, echo=True, logprobs=0, temperature=0, stream=True
    ):
        streamed += chunk.choices[0].text
        tokens += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.tokens) or []
    assert streamed.startswith(text) and "".join(tokens) == streamed


def test_prompt_logprobs_come_by_token_id(cluster: LocalCluster) -> None:
    client = client_of(cluster)
    plain = client.completions.create(
        model="demo", prompt="What light?", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    entries = plain.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert entries[0] is None and len(entries) == plain.usage.prompt_tokens  # type: ignore[union-attr]
    for entry in entries[1:]:
        assert 1 <= len(entry) <= 2 and min(e["rank"] for e in entry.values() if e["rank"]) == 1
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens  # type: ignore
