"""Several models behind one gateway: each request goes to the model that it names, and no other model notices."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from eaas.gateway.gateway import Gateway
from eaas.ops.cli import app as cli
from eaas.ops.top import Feed, FeedRefused
from experts.checkpoint import Checkpoint
from router.proto import router_pb2 as pb
from tests.eaas.gateway_world import (
    CHAT_TEMPLATE,
    MAX_MODEL_LEN,
    FakeWorker,
    GatewayProcess,
    World,
    eventually,
    gateway_url,
    write_model,
)

OTHER_LEN = MAX_MODEL_LEN // 4
# Of each route its path, a body, and what the worker is given of it, by the model's own chat template.
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 2}, "chat"),
    "/v1/completions": ({"prompt": "TEXT", "max_tokens": 2}, "plain"),
    "/v1/responses": ({"input": "TEXT", "max_output_tokens": 2}, "chat"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 2}, "chat"),
    "/inference/v1/generate": ({"token_ids": "TEXT", "sampling_params": {"max_tokens": 2}}, "plain"),
    "/invocations": ({"prompt": "TEXT", "max_tokens": 2}, "plain"),
}


@dataclass
class Two:
    """Model "tiny", which is the gateway's own, and model "b", with a worker each, at a gateway of their own."""

    world: World
    folder: Path
    own: FakeWorker
    other: FakeWorker
    url: str = ""

    def entry(self, **more: Any) -> pb.Model:
        """The model "b", as a View shows it."""
        fields = {
            "hash": self.other.model_hash, "name": "b", "path": str(self.folder), "number": 1, "base": 8,
            "layers": 2, "experts": 4, "weight": 1, **more,
        }  # fmt: skip
        return pb.Model(**fields)

    def own_entry(self, **more: Any) -> pb.Model:
        return pb.Model(**{"hash": self.world.model_hash, "layers": 2, "experts": 4, "weight": 1, **more})

    def show(self, *models: pb.Model, workers: tuple[FakeWorker, ...] | None = None) -> None:
        """Publish a View with these models, which are both where none is given."""
        self.world.router.models = models or (self.own_entry(), self.entry())
        self.world.router.show(*((self.own, self.other) if workers is None else workers))

    def listed(self) -> list[str]:
        return [card["id"] for card in httpx.get(f"{self.url}/v1/models").json()["data"]]

    def until_listed(self, *names: str) -> None:
        eventually(lambda: self.listed() == list(names), f"{names} are served")

    def ready(self) -> None:
        self.show()
        self.until_listed("tiny", "b")
        eventually(lambda: self.workers() == [1, 1], "a worker of each")

    def workers(self) -> list[int]:
        models = httpx.get(f"{self.url}/status").json()["gateway"]["models"]
        return [len(model["attention_workers"]) for model in models]

    def ask(self, model: str | None, text: str = "hi", **more: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        body = {"prompt": text, "max_tokens": 2, **named, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


def hash_of(folder: Path) -> str:
    return Checkpoint.open(folder).fingerprint


def other_model(folder: Path, mark: str = "B", context: int = OTHER_LEN) -> Path:
    """Another checkpoint: a shorter context, and a chat template that says whose it is."""
    return write_model(folder, context=context, template=mark + CHAT_TEMPLATE)


@pytest.fixture
def two(world: World, tmp_path: Path) -> Iterator[Two]:
    folder = other_model(tmp_path / "b")
    # No gateway begins with the View of the test before.
    world.router.models = ()
    world.router.show()
    two = Two(world, folder, world.worker(), world.worker(model_hash=hash_of(folder)))
    yield two
    world.router.models = world.alone
    world.stop_workers()


@pytest.fixture
def served(two: Two) -> Iterator[Two]:
    with gateway_url(two.world) as two.url:
        two.ready()
        yield two


def test_each_request_reaches_a_worker_of_the_model_that_it_names_and_no_other(two: Two) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    # Nothing but the View says whose workers they are.
    two.own.nameless = two.other.nameless = True
    with gateway_url(two.world) as two.url:
        two.ready()
        for number in range(40):
            path, (body, kind) = draw.choice(list(ROUTES.items()))
            name, text = draw.choice(("tiny", "b", None)), f"text {number}"
            sent = json.loads(json.dumps(body).replace("TEXT", text))
            if "token_ids" in sent:
                sent["token_ids"] = list(text.encode())
            if name is not None:
                sent["model"] = name
            reply = httpx.post(two.url + path, json=sent, timeout=60)
            assert reply.status_code == 200, (seed, reply.text)
            asked, spared = (two.other, two.own) if name == "b" else (two.own, two.other)
            assert not spared.submits, f"seed {seed}: {path} of {name} went to another model's worker"
            (submit,) = asked.submits
            asked.submits.clear()
            prompt = bytes(submit.prompt).decode()
            mark = "B<user>" if name == "b" else "<user>"
            assert prompt == (f"{mark}{text}<assistant>" if kind == "chat" else text), (seed, path)
            assert reply.json().get("model", name or "tiny") == (name or "tiny"), (seed, path)
        # None was connected to for the other model's sake, not even to be found wanting.
        assert (two.own.connections, two.other.connections) == (1, 1), f"seed {seed}"


def test_tokens_are_those_of_the_model_that_is_named(served: Two) -> None:
    messages = [{"role": "user", "content": "x"}]
    for name, mark, context in (
        ("tiny", "", MAX_MODEL_LEN),
        ("b", "B", OTHER_LEN),
        (None, "", MAX_MODEL_LEN),
    ):
        named = {} if name is None else {"model": name}
        told = httpx.post(f"{served.url}/tokenize", json={"messages": messages, **named}).json()
        assert bytes(told["tokens"]).decode() == f"{mark}<user>x<assistant>"
        assert told["max_model_len"] == context
        counted = httpx.post(
            f"{served.url}/v1/messages/count_tokens", json={"model": name or "tiny", "messages": messages}
        )
        assert counted.json() == {"input_tokens": told["count"]}
        known = httpx.get(f"{served.url}/tokenizer_info", params=named).json()
        assert known["chat_template"] == mark + CHAT_TEMPLATE
        info = httpx.get(f"{served.url}/server_info", params=named).json()
        assert (info["model"], info["max_model_len"]) == (name or "tiny", context)
        assert info["models"] == ["tiny", "b"]
    back = httpx.post(f"{served.url}/detokenize", json={"model": "b", "tokens": [104, 105]})
    assert back.json() == {"prompt": "hi"}
    # What fits in one context is refused in the other's words.
    text = "x" * (OTHER_LEN + 1)
    refused = served.ask("b", text)
    assert refused.status_code == 400 and f"{OTHER_LEN} tokens" in refused.json()["error"]["message"]
    assert served.ask("tiny", text).status_code == 200


def test_all_that_can_be_asked_is_listed_and_nothing_else_is_answered(served: Two) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{served.url}/v1/models").json()["data"]}
    assert {name: card["max_model_len"] for name, card in cards.items()} == {
        "tiny": MAX_MODEL_LEN, "b": OTHER_LEN,
    }  # fmt: skip
    assert httpx.get(f"{served.url}/v1/models/b").json() == cards["b"]

    def unknown(reply: httpx.Response, name: str, *others: str) -> None:
        said = ", ".join(f"`{other}`" for other in others) or "none just now"
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "model_not_found"), reply.text
        assert error["message"] == f"The model `{name}` does not exist here. This server has {said}."

    unknown(served.ask("c"), "c", "tiny", "b")
    unknown(httpx.get(f"{served.url}/v1/models/c"), "c", "tiny", "b")
    unknown(httpx.get(f"{served.url}/server_info", params={"model": "c"}), "c", "tiny", "b")
    served.show(served.own_entry(), served.entry(leaving=True))
    served.until_listed("tiny")
    unknown(served.ask("b"), "b", "tiny")
    unknown(httpx.get(f"{served.url}/v1/models/b"), "b", "tiny")
    assert served.ask(None).status_code == 200
    served.show(served.own_entry(leaving=True), served.entry())
    served.until_listed("b")
    unknown(served.ask("tiny"), "tiny", "b")
    unknown(served.ask(None), "tiny", "b")
    assert served.ask("b").status_code == 200
    served.show(served.entry())
    served.until_listed("b")
    unknown(served.ask(None), "tiny", "b")
    served.show(served.own_entry())
    served.until_listed("tiny")
    unknown(served.ask("b"), "b", "tiny")
    assert served.ask("tiny").status_code == 200


def test_the_own_model_has_the_name_that_the_view_gives_it(served: Two) -> None:
    served.show(served.own_entry(name="a"), served.entry(name="c"))
    served.until_listed("a", "c")
    for name, worker in (("a", served.own), (None, served.own), ("c", served.other)):
        worker.submits.clear()
        assert served.ask(name).json()["model"] == (name or "a")
        assert len(worker.submits) == 1
    assert served.ask("tiny").status_code == 404 and served.ask("b").status_code == 404
    assert 'eaas_running{model="c"}' in httpx.get(f"{served.url}/metrics").text
    served.show(served.own_entry(), served.entry(name="c"))
    served.until_listed("tiny", "c")
    assert served.ask(None).json()["model"] == "tiny" and served.ask("a").status_code == 404


def stream_of(two: Two, name: str, tokens: int, headers: dict[str, str] | None = None) -> list[str]:
    """The texts of a stream, which must end well."""
    body = {"model": name, "prompt": "abcdefgh", "max_tokens": tokens, "stream": True}
    texts, done = list[str](), False
    with httpx.stream("POST", f"{two.url}/v1/completions", json=body, timeout=60, headers=headers or {}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                texts += [choice["text"] for choice in event["choices"]]
    assert done
    return texts


def test_a_model_comes_and_goes_under_streams_of_the_other_and_its_own_ones_end(two: Two) -> None:
    tokens = 400
    expected = ("abcdefgh" * tokens)[:tokens]
    with gateway_url(two.world) as two.url, ThreadPoolExecutor(2) as threads:
        two.show(two.own_entry(), workers=(two.own,))
        two.until_listed("tiny")
        two.own.step_s = 0.01
        whole = threads.submit(stream_of, two, "tiny", tokens)
        eventually(lambda: two.own.jobs, "its stream")
        assert two.ask("b").status_code == 404
        two.show()
        two.until_listed("tiny", "b")
        assert two.ask("b").json()["choices"][0]["text"] == "hi"
        two.other.step_s = 0.01
        running = threads.submit(stream_of, two, "b", tokens // 4)
        eventually(lambda: two.other.jobs, "the other's stream")
        two.show(two.own_entry(), two.entry(leaving=True))
        two.until_listed("tiny")
        assert two.ask("b").status_code == 404
        assert "".join(running.result()) == expected[: tokens // 4]
        two.show(two.own_entry(), workers=(two.own,))
        # With nothing to end, nobody stays connected to its workers.
        eventually(lambda: not two.other.writers, "an end of its connections")
        page = httpx.get(f"{two.url}/metrics").text
        assert '"tiny"' in page and '"b"' not in page
        assert not whole.done()
        two.show()
        two.until_listed("tiny", "b")
        assert two.ask("b").json()["choices"][0]["text"] == "hi"
        assert "".join(whole.result()) == expected
        assert two.own.connections == 1 and two.own.submits[0].attempt == 1


def test_what_runs_of_a_model_that_is_gone_from_the_view_waits_for_it_until_the_deadline(two: Two) -> None:
    with gateway_url(two.world, "--deadline-s", "2") as two.url, ThreadPoolExecutor(2) as threads:
        two.ready()
        two.own.frozen = two.other.frozen = True
        back, stays = (threads.submit(two.ask, name) for name in ("b", "tiny"))
        eventually(lambda: two.own.jobs and two.other.jobs, "both")
        two.show(two.own_entry(), workers=(two.own,))
        eventually(lambda: not two.other.writers, "its worker is left")
        two.show()
        two.own.frozen = two.other.frozen = False
        assert back.result().json()["choices"][0]["text"] == "hi"
        two.other.frozen = True
        lost = threads.submit(two.ask, "b")
        eventually(lambda: two.other.jobs, "another")
        two.show(two.own_entry(), workers=(two.own,))
        assert lost.result().status_code == 503
        assert stays.result().json()["choices"][0]["text"] == "hi"


def test_a_checkpoint_that_cannot_be_read_is_said_once_and_tried_again_when_its_entry_changes(
    two: Two, tmp_path: Path
) -> None:
    gateway = GatewayProcess(two.world)
    two.url = gateway.url
    wrong = other_model(tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    nowhere, third = tmp_path / "nowhere", two.entry(name="c", path=str(wrong), hash="0" * 64)
    for count in (1, 0, 1, 0, 1):
        two.show(two.own_entry(), two.entry(path=str(nowhere)), third, workers=(two.own,) * count)
        eventually(lambda count=count: two.workers() == [count], "the View")
    eventually(lambda: httpx.get(f"{two.url}/health").status_code == 200, "it serves what it could read")
    assert two.listed() == ["tiny"] and {two.ask("b").status_code, two.ask("c").status_code} == {503}
    two.show()
    two.until_listed("tiny", "b")
    assert two.ask("b").status_code == 200
    status, log = gateway.stop()
    lines = [line for line in log.splitlines() if "model_not_served" in line]
    assert status == 0 and len(lines) == 2, log
    assert sum(str(nowhere) in line for line in lines) == 1
    assert sum("It is another checkpoint" in line and f"path={wrong}" in line for line in lines) == 1


def test_a_gateway_reads_no_weights_and_believes_the_view(two: Two, tmp_path: Path) -> None:
    for folder in (two.folder, own := write_model(tmp_path / "own")):
        (folder / "model.safetensors").unlink()
    (own / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with gateway_url(two.world, "--model", str(own)) as two.url:
        two.ready()
        for name, worker in (("tiny", two.own), ("b", two.other)):
            reply = two.ask(name).json()
            assert reply["choices"][0]["text"] == "hi" and reply["system_fingerprint"]
            info = httpx.get(f"{two.url}/server_info", params={"model": name}).json()
            assert info["model_hash"] == worker.model_hash


@pytest.mark.parametrize("told", [{"name": "tiny"}, {"name": "c", "path": "own"}, {}])
def test_the_own_model_is_that_of_its_name_else_of_its_folder_else_the_nameless(two: Two, told: dict[str, str]) -> None:
    draw = random.Random(seed := time.time_ns())
    if "path" in told:
        told["path"] = str(two.world.model.resolve())
    own = two.own_entry(**told)
    shown = [own, two.own_entry(hash="1" * 64, experts=8, number=4, base=64)]
    # As a model that is another by its name or its folder has the shape of this one, so may one without a name; and one
    # of its name may have been added beside one without.
    name = {} if told else {"name": "tiny", "path": str(two.folder)}
    shown += [two.own_entry(hash="2" * 64, number=5, base=128, **name)]
    shown += [two.entry()]
    draw.shuffle(shown)
    with gateway_url(two.world) as two.url:
        two.show(*shown)
        two.until_listed(told.get("name", "tiny"), "b")
        info = httpx.get(f"{two.url}/server_info").json()
        assert info["model_hash"] == two.world.model_hash, seed
        # Known once, it is the same whoever comes or goes.
        two.show(*(entry for entry in shown if entry is not own and entry.name != "tiny"))
        two.until_listed("b")
        assert two.ask(None).status_code == 404, seed


@pytest.mark.parametrize("name", ["b", "tiny"])
def test_another_model_of_the_same_shape_is_not_taken_for_the_own_one_that_has_gone(two: Two, name: str) -> None:
    """Nor where it has that one's name by now."""
    with gateway_url(two.world) as two.url:
        two.show(two.entry(name=name), workers=(two.other,))
        two.until_listed(name)
        body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
        told = httpx.post(f"{two.url}/tokenize", json=body).json()
        assert bytes(told["tokens"]).decode() == "B<user>x<assistant>"
        assert two.ask(None).status_code == (404 if name == "b" else 200) and two.ask(name).status_code == 200


def test_a_name_that_is_another_s_once_the_view_is_there_is_asked_of_that_one(two: Two) -> None:
    """The own model has another name in the View; so it is with requests that came before."""
    two.world.router.held = True
    try:
        own = two.own_entry(name="a", path=str(two.world.model.resolve()))
        two.show(own, two.entry(name="tiny"))
        with gateway_url(two.world) as two.url, ThreadPoolExecutor(1) as asking:
            early = asking.submit(two.ask, "tiny")
            time.sleep(0.5)
            two.world.router.held = False
            # Its checkpoint may be read only now.
            assert early.result().status_code in (200, 503)
            two.until_listed("a", "tiny")
            assert two.ask("tiny").status_code == 200
            assert two.other.submits and not two.own.submits
    finally:
        two.world.router.held = False


def test_who_asks_before_a_view_names_the_model_waits_for_it_and_may_go_on_with_the_stream_later(
    two: Two,
) -> None:
    body = {"prompt": "abc", "max_tokens": 6, "stream": True}

    def events(after: str = "") -> httpx.Response:
        headers = {"last-event-id": after} if after else {}
        return httpx.post(f"{two.url}/v1/completions", json=body, headers=headers, timeout=60)

    with (
        gateway_url(two.world, "--deadline-s", "1") as two.url,
        ThreadPoolExecutor(1) as threads,
    ):
        refused = two.ask(None)
        assert refused.status_code == 503 and "knows no attention worker" in refused.json()["error"]["message"]
        early = threads.submit(events)
        eventually(lambda: httpx.get(f"{two.url}/load").json()["server_load"] == 1, "it waits")
        two.show(two.own_entry(), workers=(two.own,))
        whole = early.result().text
        ids = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
        rest = events(ids[2])
        assert rest.status_code == 200 and rest.text and whole.endswith(rest.text)


def test_who_asks_too_much_of_one_model_leaves_the_other_all_its_places(two: Two) -> None:
    with gateway_url(two.world, "--max-requests", "2") as two.url, ThreadPoolExecutor(8) as threads:
        two.ready()
        for flooded, worker, free in (("tiny", two.own, "b"), ("b", two.other, "tiny")):
            worker.frozen = True
            running = [threads.submit(two.ask, flooded) for _ in range(2)]
            eventually(lambda worker=worker: len(worker.jobs) == 2, "all places taken")
            for _ in range(3):
                refused = two.ask(flooded)
                assert refused.status_code == 429 and "retry-after" in refused.headers
                assert f"2 requests for `{flooded}` are in progress" in refused.json()["error"]["message"]
            assert two.ask(free).status_code == 200
            worker.frozen = False
            assert [one.result().status_code for one in running] == [200, 200]
        page = httpx.get(f"{two.url}/metrics").text
        for name in ("tiny", "b"):
            assert f'eaas_refused_total{{model="{name}",reason="requests"}} 3.0' in page


def test_what_is_owed_of_one_model_is_no_bound_for_the_other(two: Two) -> None:
    with gateway_url(two.world, "--max-owed-tokens", "100") as two.url, ThreadPoolExecutor(2) as threads:
        two.ready()
        two.own.frozen = True
        running = threads.submit(two.ask, "tiny", "x" * 90)
        eventually(lambda: two.own.jobs, "what is owed")
        refused = two.ask("tiny", "y" * 20)
        assert refused.status_code == 429 and "tokens are still to be computed" in refused.text
        assert two.ask("b", "y" * 90).status_code == 200
        two.own.frozen = False
        assert running.result().status_code == 200
        page = httpx.get(f"{two.url}/metrics").text
        assert 'eaas_refused_total{model="tiny",reason="tokens"} 1.0' in page
        assert 'eaas_refused_total{model="b",reason="tokens"} 0.0' in page


def test_one_page_has_the_counters_of_each_model_under_its_name(served: Two) -> None:
    asked = {"tiny": 2, "b": 3}
    for name, count in asked.items():
        for _ in range(count):
            assert served.ask(name, max_tokens=count).status_code == 200
    assert served.ask("b", "").status_code == 400
    page = httpx.get(f"{served.url}/metrics").text
    helps = [line.split()[2] for line in page.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)), "a family that is there twice is no page for Prometheus"
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    for name, count in asked.items():
        answered = ("endpoint", "completions"), ("model", name), ("status", "200")
        assert samples["eaas_requests_total", *answered] == count
        assert samples["eaas_tokens_total", ("kind", "output"), ("model", name)] == count * count
        assert samples["vllm:generation_tokens_total", ("model_name", name)] == count * count
        assert samples["eaas_attention_workers", ("model", name)] == 1
        assert samples["eaas_ttft_seconds_count", ("model", name)] == count
    refused = ("endpoint", "completions"), ("status", "400")
    found = [dict(key[1:])["model"] for key in samples if {*refused} <= {*key[1:]}]
    assert found == ["b"]
    figures = httpx.get(f"{served.url}/status").json()
    own = figures["gateway"]
    assert (own["requests"], own["output_tokens"]) == (6, 13) and figures["replicas_min"] == 1
    shown = [(model["name"], model["attention_workers"]) for model in own["models"]]
    assert shown == [("tiny", [served.own.name]), ("b", [served.other.name])]
    assert own["attention_workers"] == sorted((served.own.name, served.other.name))
    told = [(model["name"], model["state"], model["workers"]) for model in figures["models"]]
    assert told == [("tiny", "serving", 1), ("b", "serving", 1)]


def test_a_model_without_workers_takes_no_other_model_down_with_it(two: Two) -> None:
    two.show(workers=())
    with gateway_url(two.world) as two.url:
        two.until_listed("tiny", "b")

        def health() -> tuple[int, str]:
            reply = httpx.get(f"{two.url}/health")
            return reply.status_code, reply.text

        def lacks() -> list[str]:
            models = httpx.get(f"{two.url}/status").json()["gateway"]["models"]
            return [model["name"] for model in models if model["reason"]]

        eventually(lambda: lacks() == ["tiny", "b"], "nobody has any")
        status, said = health()
        assert status == 503 and all(f"model {name}: the router knows no" in said for name in ("tiny", "b"))
        for worker, other in ((two.own, "b"), (two.other, "tiny")):
            two.show(workers=(worker,))
            eventually(lambda other=other: lacks() == [other], "one lacks")
            assert health()[0] == 200
        two.show()
        eventually(lambda: lacks() == [] and health()[0] == 200, "both")
        two.show(two.own_entry(leaving=True), two.entry(), workers=(two.other,))
        eventually(lambda: lacks() == ["tiny"], "the first goes")
        assert health()[0] == 200, "who leaves lacks nothing"
        two.show(two.own_entry(leaving=True), two.entry(), workers=(two.own,))
        eventually(lambda: health()[0] == 503, "no other is left")
        two.show(two.own_entry(leaving=True), two.entry(leaving=True))
        eventually(lambda: health()[0] == 503, "nothing can be asked")


def test_a_job_of_a_model_that_was_removed_fails_in_words_and_that_of_another_ends(two: Two, tmp_path: Path) -> None:
    jobs = str(tmp_path / "jobs")
    with gateway_url(two.world, "--jobs", jobs, "--deadline-s", "1") as two.url:
        two.ready()
        two.other.frozen = True
        client = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0, timeout=60)
        first = client.responses.create(model="b", input="hi", background=True, max_output_tokens=2)
        eventually(lambda: two.other.jobs, "its beginning")
        # While its model leaves it is tried again, and ends once there is a worker.
        two.show(two.own_entry(), two.entry(leaving=True), workers=(two.own,))
        two.until_listed("tiny")

        def failures() -> float:
            page = httpx.get(f"{two.url}/metrics").text
            found = re.findall(r'^vllm:request_success_total{finished_reason="error",model_name="b"} (.*)$', page, re.M)
            return sum(map(float, found))

        eventually(lambda: failures() >= 2, "it was tried again")
        two.other.frozen = False
        two.show(two.own_entry(), two.entry(leaving=True))
        eventually(lambda: client.responses.retrieve(first.id).status == "incomplete", "the running one's end")
        two.show()
        two.until_listed("tiny", "b")
        two.other.frozen = True
        gone = client.responses.create(model="b", input="hi", background=True, max_output_tokens=2)
        eventually(lambda: two.other.jobs, "another beginning")
        two.show(two.own_entry(), workers=(two.own,))
        stays = client.responses.create(model="tiny", input="hi", background=True, max_output_tokens=2)
        eventually(lambda: client.responses.retrieve(stays.id).status == "incomplete", "the other model's")
        eventually(lambda: client.responses.retrieve(gone.id).status == "failed", "the removed model's")
        ended = client.responses.retrieve(gone.id)
        assert ended.model == "b" and ended.error is not None
        assert ended.error.message == "The model `b` does not exist here. This server has `tiny`."
        (card,) = client.models.list().data
        assert card.id == "tiny"


def test_a_job_waits_for_a_gateway_that_has_its_model(two: Two, tmp_path: Path) -> None:
    jobs = str(tmp_path / "jobs")
    with gateway_url(two.world, "--jobs", jobs, "--deadline-s", "1") as url:
        two.url = url
        two.ready()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        assert httpx.post(f"{url}/pause", params={"mode": "keep"}).status_code == 200
        job = client.responses.create(model="b", input="hi", background=True, max_output_tokens=2)
    two.other.submits.clear()
    # The View names the model, and its checkpoint is not to be read here.
    two.show(two.own_entry(), two.entry(path=str(tmp_path / "nowhere")))
    with gateway_url(two.world, "--jobs", jobs, "--deadline-s", "1") as url:
        two.url = url
        two.until_listed("tiny")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        # Longer than a deadline and two looks.
        time.sleep(3)
        assert client.responses.retrieve(job.id).status == "queued" and not two.own.submits
        two.show()
        two.until_listed("tiny", "b")
        eventually(lambda: client.responses.retrieve(job.id).status == "incomplete", "its end")
        assert len(two.other.submits) == 1 and not two.own.submits


def test_jobs_of_one_model_take_no_turn_of_the_others_and_fail_once_no_view_names_it(two: Two, tmp_path: Path) -> None:
    options = ("--jobs", str(tmp_path / "jobs"), "--deadline-s", "1")
    with gateway_url(two.world, *options, "--jobs-running", "1") as two.url:
        two.ready()
        two.other.frozen = True
        client = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0, timeout=60)
        kept = [client.responses.create(model="b", input="hi", background=True) for _ in range(2)]
        eventually(lambda: two.other.jobs, "the first of them")
        mine = client.responses.create(model="tiny", input="hi", background=True, max_output_tokens=2)
        eventually(lambda: client.responses.retrieve(mine.id).status == "incomplete", "the other model's")
        assert len(two.other.submits) == 1
        page = httpx.get(f"{two.url}/metrics").text
        assert 'eaas_jobs_running{model="b"} 1.0' in page and 'eaas_jobs_running{model="tiny"} 0.0' in page
    two.show(two.own_entry(), workers=(two.own,))
    with gateway_url(two.world, *options) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        for job in kept:
            eventually(lambda job=job: client.responses.retrieve(job.id).status == "failed", "its failure")
            error = client.responses.retrieve(job.id).error
            assert error is not None and error.message.startswith("The model `b` does not exist here.")


def test_a_stream_of_one_model_is_not_gone_on_with_by_another_of_the_same_name(two: Two, tmp_path: Path) -> None:
    folder = other_model(tmp_path / "c", "C", OTHER_LEN * 2)
    successor = two.world.worker(model_hash=hash_of(folder))
    with gateway_url(two.world) as two.url:
        two.ready()
        body = {"model": "b", "prompt": "abc", "max_tokens": 6, "stream": True}

        def events(after: str = "") -> httpx.Response:
            headers = {"last-event-id": after} if after else {}
            return httpx.post(f"{two.url}/v1/completions", json=body, headers=headers, timeout=60)

        whole = events().text
        ids = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
        rest = events(ids[2])
        assert rest.status_code == 200 and whole.endswith(rest.text) and rest.text
        entry = two.entry(hash=successor.model_hash, path=str(folder), number=2, base=16)
        two.show(two.own_entry(), entry, workers=(two.own, successor))

        def replaced() -> bool:
            cards = httpx.get(f"{two.url}/v1/models").json()["data"]
            return [card["max_model_len"] for card in cards] == [MAX_MODEL_LEN, OTHER_LEN * 2]

        eventually(replaced, "another model of that name")
        refused = events(ids[2])
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "not_resumable"
        assert not successor.submits
        assert events().status_code == 200 and len(successor.submits) == 1


def test_a_stream_of_a_model_that_leaves_is_gone_on_with_and_none_begins(two: Two) -> None:
    with gateway_url(two.world) as two.url:
        two.ready()
        body = {"model": "b", "prompt": "abc", "max_tokens": 6, "stream": True}

        def events(after: str = "", **more: Any) -> httpx.Response:
            headers = {"last-event-id": after} if after else {}
            return httpx.post(f"{two.url}/v1/completions", json=body | more, headers=headers, timeout=60)

        whole = events().text
        ids = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
        two.show(two.own_entry(), two.entry(leaving=True))
        two.until_listed("tiny")
        rest = events(ids[2])
        assert rest.status_code == 200 and whole.endswith(rest.text) and rest.text
        assert events().status_code == 404
        submits = len(two.other.submits)
        # Nobody begins one by an id that is of another request, or of none.
        assert events(ids[2], prompt="abd").status_code == events("1").status_code == 409
        assert len(two.other.submits) == submits


def test_operators_act_on_every_model_and_inspect_the_one_that_they_name(served: Two) -> None:
    url = served.url
    assert httpx.post(f"{url}/reset_prefix_cache").json() == {"success": True}
    eventually(lambda: (served.own.forgotten, served.other.forgotten) == (1, 1), "both are told")
    with ThreadPoolExecutor(2) as threads:
        assert httpx.post(f"{url}/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        waiting = [threads.submit(served.ask, name) for name in ("tiny", "b")]

        def held() -> bool:
            page = httpx.get(f"{url}/metrics").text
            return all(f'eaas_waiting{{model="{name}"}} 1.0' in page for name in ("tiny", "b"))

        eventually(held, "both wait")
        assert httpx.get(f"{url}/is_paused").json() == {"is_paused": True}
        httpx.post(f"{url}/resume")
        assert [one.result().status_code for one in waiting] == [200, 200]
    for name, worker, other in (
        ("b", served.other, served.own), (None, served.own, served.other),
    ):  # fmt: skip
        named = {} if name is None else {"model": name}
        begun = httpx.post(f"{url}/admin/inspect", json={"taps": ["final_norm"], **named}).json()
        assert worker.inspections == [begun["id"]], begun
        assert httpx.get(f"{url}/admin/inspect", params=named).json()["under_way"] is True
        assert httpx.request("DELETE", f"{url}/admin/inspect", params=named).json()["under_way"] is False
        assert worker.inspections == [begun["id"]] * 2
        worker.inspections.clear()
        assert not other.inspections
    refused = httpx.post(f"{url}/admin/inspect", json={"taps": ["final_norm"], "model": "c"})
    assert refused.status_code == 404
    for name, worker, other in (("b", served.other, served.own), ("tiny", served.own, served.other)):
        for verb in (["start", "--tap", "final_norm"], ["status"], ["stop"]):
            said = CliRunner().invoke(cli, ["inspect", *verb, "--model", name, "--url", url, "--json"])
            assert said.exit_code == 0, said.output
        assert len(worker.inspections) == 2 and not other.inspections
        worker.inspections.clear()


def test_an_inspection_that_is_asked_for_by_a_slip_or_that_no_worker_takes_is_none(served: Two) -> None:
    url = f"{served.url}/admin/inspect"
    refused = httpx.post(url, json={"taps": ["final_norm"], "request": ["mine"]})
    assert refused.status_code == 400 and not served.own.inspections
    said = "There is no field 'request' here; known are taps, requests, share, model, "
    assert refused.json()["error"]["message"].startswith(said)
    assert httpx.get(url).status_code == 404
    first = httpx.post(url, json={"taps": ["final_norm"], "requests": ["mine"]}).json()
    assert httpx.delete(url).json()["id"] == first["id"]
    served.own.says = {"fault": "No such tap.", "ended": True}
    assert "No such tap." in httpx.post(url, json={"taps": ["bogus"]}).text
    for shown in (httpx.get(url), httpx.delete(url)):
        assert (shown.json()["id"], shown.json()["taps"]) == (first["id"], ["final_norm"]), shown.text
    assert httpx.get(url, params={"id": "inspect-0"}).status_code == 404
    assert httpx.delete(url, params={"id": "inspect-0"}).status_code == 404


def test_an_inspection_is_shown_and_ended_after_its_model_has_gone(served: Two) -> None:
    url, named = f"{served.url}/admin/inspect", {"model": "b"}
    begun = httpx.post(url, json={"taps": ["final_norm"], **named}).json()
    served.show(served.own_entry(), served.entry(leaving=True))
    served.until_listed("tiny")
    assert httpx.get(url, params=named).json()["under_way"] is True
    served.show(served.own_entry(), workers=(served.own,))
    eventually(lambda: httpx.get(url, params=named).json()["under_way"] is False, "it has ended")
    ended = httpx.delete(url, params=named).json()
    assert (ended["id"], ended["model"], len(ended["workers"])) == (begun["id"], "b", 1)


def test_what_workers_say_of_an_inspection_is_printed_as_it_is(served: Two) -> None:
    served.own.says = {"folder": "/seen/[a]/1", "fault": "The sink failed: pip install 'eaas[arrow]'."}
    for verb in (["start", "--tap", "final_norm"], ["status"]):
        said = CliRunner().invoke(cli, ["inspect", *verb, "--url", served.url])
        assert said.exit_code == 0, said.output
        assert "/seen/[a]/1: The sink failed: pip install 'eaas[arrow]'." in said.output


def test_the_dashboard_is_of_the_model_that_is_asked_for(served: Two) -> None:
    def boards(**named: str) -> Iterator[dict[str, Any]]:
        with httpx.stream("GET", f"{served.url}/dashboard/events", params=named, timeout=30) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    for named, name, worker in (
        ({}, "tiny", served.own), ({"model": "tiny"}, "tiny", served.own), ({"model": "b"}, "b", served.other),
    ):  # fmt: skip
        board = next(boards(**named))
        assert (board["gateway"]["model"], board["models"]) == (name, ["tiny", "b"])
        assert [each["name"] for each in board["workers"]] == [worker.name]
        assert (board["heat"]["layers"], board["heat"]["experts"]) == (2, 4)
    both = [boards(), boards(model="b")]
    for each in both:
        next(each)
    for _ in range(3):
        assert served.ask("b", max_tokens=5).status_code == 200
    # Each counts its own.
    assert next(board for board in both[1] if board["rates"]["requests_per_s"])["rates"]["tokens_per_s"] > 0
    assert next(both[0])["rates"]["tokens_per_s"] == 0
    assert httpx.get(f"{served.url}/dashboard/events", params={"model": "c"}).status_code == 404
    with pytest.raises(FeedRefused, match=r"does not exist here\. This server has `tiny`, `b`"):
        next(iter(Feed(served.url, "c").news()))
    served.show(served.own_entry())
    served.until_listed("tiny")
    # Its stream ends with it.
    assert all(board["gateway"]["model"] == "b" for board in both[1])


def test_a_load_report_adds_up_the_work_of_all_models_and_shows_the_longest_wait() -> None:
    draw = random.Random(seed := time.time_ns())
    loads = [
        {word: draw.random() for word in ("running", "waiting", "backlog_tokens", "queue_s", "ttft_p99_s")}
        | {f"hears:attention/{number}": 1.0}
        for number in range(draw.randint(1, 4))
    ]
    gateway = SimpleNamespace(
        all=lambda: [SimpleNamespace(pool=SimpleNamespace(load=lambda load=load: load)) for load in loads],
        view=None,
    )
    found = Gateway.load(cast(Gateway, gateway))
    for word in ("running", "waiting", "backlog_tokens"):
        assert found.pop(word) == pytest.approx(sum(load[word] for load in loads)), seed
    for word in ("queue_s", "ttft_p99_s"):
        assert found.pop(word) == max(load[word] for load in loads), seed
    assert found == {f"hears:attention/{number}": 1.0 for number in range(len(loads))}, seed
