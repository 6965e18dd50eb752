"""Promises of streams that are gone on with: wherever one is cut, any gateway says the rest, and nothing else."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.eaas.gateway_world import FakeWorker, GatewayProcess, World, eventually, gateway_url
from tests.eaas.test_gateway_tools import JUMP, LOOK

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TOKENS = "/v1/messages", "/inference/v1/generate"
USER = [{"role": "user", "content": "Say café to me, twice: café."}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    worker = world.worker(draws=True, step_s=0.0001)
    world.router.show(worker)
    return worker


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "resume"
    path.write_bytes(random.SystemRandom().randbytes(32))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def urls(world: World, worker: FakeWorker, key_file: Path) -> Iterator[list[str]]:
    with ExitStack() as stack:
        shared = ("--resume-key-file", str(key_file), "--deadline-s", "5")
        yield [stack.enter_context(gateway_url(world, *shared)) for _ in range(2)]


def ask(url: str, path: str, body: dict[str, Any], after: str = "", **headers: str) -> httpx.Response:
    headers |= {"last-event-id": after} if after else {}
    # Some clients escape every letter that others write as it is: the same bytes are the same request.
    sent = json.dumps({"model": "tiny", "stream": True, **body}).encode()
    return httpx.post(f"{url}{path}", content=sent, timeout=60, headers={"content-type": "application/json", **headers})


def events_of(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    events = reply.text.split("\n\n")
    assert events.pop() == "", reply.text
    return events


def id_of(event: str) -> str:
    first = event.split("\n")[0]
    assert first.startswith("id: "), event
    return first[4:]


def parts(events: Sequence[str]) -> dict[Any, list[str]]:
    """Events of each choice, and of none, in order, without their ids: those of choices may mix in any order."""
    found: dict[Any, list[str]] = {}
    for event in events:
        said = event.partition("\n")[2]
        data = said.partition("data: ")[2]
        choices = json.loads(data).get("choices") if data != "[DONE]" else None
        found.setdefault(choices[0]["index"] if choices else None, []).append(said)
    return found


COUNTED = {"include_usage": True, "continuous_usage_stats": True}
FUNCTION = {"type": "function", **LOOK["function"]}
MUST = '[{"name": "look", "parameters": {"at": "é"}}]'
STOPPING = "stop here? No: stoppage stop here. Not."
REQUESTS: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("chat", CHAT, {"messages": USER, "max_tokens": 14}, None),
    ("completion", PLAIN, {"prompt": "naïve words", "max_tokens": 14, "temperature": 0}, None),
    ("usage", CHAT, {"messages": USER, "max_tokens": 6, "stream_options": COUNTED}, None),
    ("logprobs", CHAT, {"messages": USER, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}, None),
    ("completion logprobs", PLAIN, {"prompt": "ab", "max_tokens": 9, "logprobs": 2, "stop": ["qq"]}, None),
    ("echo", PLAIN, {"prompt": "abc", "max_tokens": 4, "echo": True, "logprobs": 1}, None),
    ("echo alone", PLAIN, {"prompt": ["abc", "de"], "max_tokens": 0, "echo": True}, None),
    ("ids", PLAIN, {"prompt": "abc", "max_tokens": 4, "return_token_ids": True}, None),
    ("stops", PLAIN, {"prompt": "x", "stop": ["stop here"], "min_tokens": 3}, STOPPING),
    ("n", CHAT, {"messages": USER, "max_tokens": 7, "n": 3, "logprobs": True}, None),
    ("prompts", PLAIN, {"prompt": ["ab", "cd"], "max_tokens": 6, "n": 2, "stream_options": COUNTED}, None),
    ("tools", CHAT, {"messages": USER, "tools": [LOOK, JUMP], "n": 2}, "Well: " + CALL),
    ("must call", CHAT, {"messages": USER, "tools": [LOOK], "tool_choice": "required"}, MUST),
    ("structured", CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, '{"a": "é"}'),
    ("responses", RESPONSES, {"input": "hi you", "max_output_tokens": 12}, None),
    ("responses logprobs", RESPONSES, {"input": "hi you", "max_output_tokens": 7, "top_logprobs": 2}, None),
    ("responses calls", RESPONSES, {"input": "hi", "tools": [FUNCTION]}, "Well: " + CALL),
    ("messages", MESSAGES, {"messages": USER, "max_tokens": 12}, None),
    ("messages calls", MESSAGES, {"messages": USER, "max_tokens": 500, "tools": [TOOL]}, "Well: " + CALL),
    ("tokens", TOKENS, {"token_ids": [65, 66], "sampling_params": {"max_tokens": 9, "logprobs": 1}}, None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "says"), [one[1:] for one in REQUESTS], ids=[one[0] for one in REQUESTS])
def test_a_stream_cut_at_any_event_goes_on_at_another_gateway_bit_for_bit(
    urls: list[str], worker: FakeWorker, path: str, body: dict[str, Any], says: str | None
) -> None:
    if says is not None:
        worker.script.append(says)
    try:
        whole = events_of(ask(urls[0], path, body))
        ids = [id_of(event) for event in whole]
        assert len(set(ids)) == len(ids) > 2
        several = len({id.split(".")[1].count(",") for id in ids if "," in id}) > 0
        for number, (id, event) in enumerate(zip(ids, whole, strict=True)):
            rest = events_of(ask(urls[1], path, body, id))
            if several:
                before = parts(whole[: number + 1])
                assert {c: before.get(c, []) + parts(rest).get(c, []) for c in parts(whole)} == parts(whole), event
            else:
                assert rest == whole[number + 1 :], event
    finally:
        worker.script.clear()


def test_what_is_sampled_without_a_seed_is_another_text_each_time_and_the_same_when_it_is_gone_on_with(
    urls: list[str],
) -> None:
    body = {"messages": USER, "max_tokens": 40}
    first, second = (events_of(ask(urls[0], CHAT, body)) for _ in range(2))
    assert [e.partition("\n")[2] for e in first][2:-2] != [e.partition("\n")[2] for e in second][2:-2]
    assert events_of(ask(urls[1], CHAT, body, id_of(first[10]))) == first[11:]


def test_a_stream_is_gone_on_with_again_and_again(urls: list[str]) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    body = {"messages": USER, "max_tokens": 60}
    whole = events_of(ask(urls[0], CHAT, body))
    heard = whole[: draw.randrange(1, 20)]
    while len(heard) < len(whole):
        rest = events_of(ask(draw.choice(urls), CHAT, body, id_of(heard[-1])))
        heard += rest[: draw.randrange(1, 20)]
    assert heard == whole, seed


def test_clients_read_events_that_have_ids(urls: list[str]) -> None:
    client = openai.OpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0)
    # Greedy, the worker says the prompt: what is drawn may be bytes of which no letter comes.
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=USER,  # type: ignore[arg-type]
            max_tokens=9,
            temperature=0,
            stream=True,
        )
    )
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 9
    assert [
        event.type for event in client.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
    ][-1] == "response.incomplete"


def test_an_id_of_anything_else_is_refused_in_words(urls: list[str]) -> None:
    body = {"prompt": "abc", "max_tokens": 5}
    id = id_of(events_of(ask(urls[0], PLAIN, body))[2])
    part, *places = id.split(".")
    flipped = ("B" if part[20] != "B" else "C").join((part[:20], part[21:]))
    for path, sent, after in (
        (PLAIN, {**body, "max_tokens": 6}, id),
        (PLAIN, {"max_tokens": 5, "prompt": "abc"}, id),
        (CHAT, {"messages": USER}, id),
        (PLAIN, body, ".".join([flipped, *places])),
        (PLAIN, body, ".".join([part, "1,2", "0", "0"])),
        (PLAIN, body, ".".join([part, "1", "2", "0"])),
        (PLAIN, body, ".".join([part, "-1", "0", "0"])),
        (PLAIN, body, ".".join([part, "9" * 5000, "0", "0"])),
        (PLAIN, body, "A" * 30_000 + ".1.0.0"),
        (PLAIN, body, part), (PLAIN, body, "7"), (PLAIN, body, "é.1.0.0".encode().decode("latin-1")),
    ):  # fmt: skip
        reply = httpx.post(
            f"{urls[1]}{path}",
            content=json.dumps({"model": "tiny", "stream": True, **sent}).encode(),
            headers=[(b"content-type", b"application/json"), (b"last-event-id", after.encode("latin-1"))],
        )
        assert reply.status_code == 409, (after, reply.text)
        assert reply.json()["error"]["code"] == "not_resumable", reply.text
        assert "Last-Event-ID" in reply.json()["error"]["message"]
    whole = ask(urls[1], PLAIN, {**body, "stream": False}, id)
    assert whole.status_code == 400 and "no stream" in whole.text
    refused = ask(urls[1], MESSAGES, {"messages": USER, "max_tokens": 3}, id)
    assert refused.status_code == 409 and refused.json()["type"] == "error", "in the shape of its API"


def test_a_gateway_without_the_key_goes_on_with_its_own_streams_alone(world: World, urls: list[str]) -> None:
    body = {"prompt": "abc", "max_tokens": 5}
    with gateway_url(world) as alone:
        whole = events_of(ask(alone, PLAIN, body))
        assert events_of(ask(alone, PLAIN, body, id_of(whole[1]))) == whole[2:]
        assert ask(urls[0], PLAIN, body, id_of(whole[1])).status_code == 409
        assert ask(alone, PLAIN, body, id_of(events_of(ask(urls[0], PLAIN, body))[0])).status_code == 409
    with gateway_url(world, "--no-event-ids") as bare:
        reply = ask(bare, PLAIN, body)
        assert "id: " not in reply.text and events_of(reply)
        assert ask(bare, PLAIN, body, id_of(whole[1])).status_code == 400


def test_a_key_that_is_none_is_refused_at_the_start(world: World, tmp_path: Path) -> None:
    path = tmp_path / "key"
    for content, mode, says in (
        (b"short", 0o600, "5 bytes"),
        (b"x" * 32, 0o644, "everybody"),
        (None, 0, "cannot be read"),
    ):
        if content is not None:
            path.write_bytes(content)
            path.chmod(mode)
        else:
            path.unlink()
        gateway = GatewayProcess(world, "--resume-key-file", str(path))
        _, log = gateway.process.communicate(timeout=60)
        assert gateway.process.returncode == 1 and says in log.decode(), log


def test_a_stream_goes_on_in_its_numerics_class_or_not_at_all(
    world: World, urls: list[str], worker: FakeWorker
) -> None:
    body = {"prompt": "abcdef", "max_tokens": 8}
    whole = events_of(ask(urls[0], PLAIN, body))
    other = world.worker(numerics_class="cpu-bf16-vdpbf16-1", draws=True)
    try:
        world.router.show(worker, other)
        for _ in range(4):
            assert events_of(ask(urls[1], PLAIN, body, id_of(whole[3]))) == whole[4:]
        assert not other.submits, "it left its class"
        world.router.show(other)
        eventually(
            lambda: ask(urls[1], PLAIN, body).headers["x-eaas-numerics-class"] == other.numerics_class,
            "the other",
        )
        reply = ask(urls[1], PLAIN, body, id_of(whole[3]))
        assert reply.status_code == 409 and worker.numerics_class in reply.text and other.numerics_class in reply.text
    finally:
        world.router.show(worker)
        other.stop()


def test_a_stream_that_crossed_classes_or_lost_experts_is_not_gone_on_with(
    world: World, urls: list[str], worker: FakeWorker
) -> None:
    worker.drops_at = 3
    try:
        body = {"prompt": "abcdef", "max_tokens": 8, "eaas_drop_lost_experts": True}
        whole = events_of(ask(urls[0], PLAIN, body))
        for number, event in enumerate(whole):
            reply = ask(urls[1], PLAIN, body, id_of(event))
            says = "lost" if number < 3 else "lacked lost experts"
            if reply.status_code == 200:
                # It has gone before the first token that lacks experts: as in the stream itself, that is said.
                assert number < 3 and "eaas_dropped_experts" in reply.text
            else:
                assert reply.status_code == 409 and says in reply.text, reply.text
    finally:
        worker.drops_at = 1 << 30
    first, other = world.worker(step_s=0.01), world.worker(numerics_class="cpu-bf16-vdpbf16-1")
    body = {"prompt": "abcdef", "max_tokens": 60}
    heard = ""
    try:
        world.router.show(first)
        eventually(lambda: ask(urls[0], PLAIN, {**body, "max_tokens": 1}) and first.submits, "the first")
        with httpx.stream("POST", f"{urls[0]}{PLAIN}", json={"model": "tiny", "stream": True, **body}) as reply:
            for piece in reply.iter_text():
                heard += piece
                if heard.count("\n\n") == 5:
                    world.router.show(other)
        ids = [id_of(event) for event in heard.split("\n\n")[:-1]]
        sent = json.dumps({"model": "tiny", "stream": True, **body}, separators=(",", ":")).encode()
        reply = httpx.post(
            f"{urls[1]}{PLAIN}", content=sent,
            headers={"content-type": "application/json", "last-event-id": ids[-1]},
        )  # fmt: skip
        assert reply.status_code == 409 and "crossed from cpu-f32-fma-1 to cpu-bf16-vdpbf16-1" in reply.text, reply.text
    finally:
        world.router.show(worker)
        first.stop()
        other.stop()


def test_a_client_that_comes_back_to_the_same_gateway_ends_what_it_had_there(
    world: World, urls: list[str], worker: FakeWorker
) -> None:
    worker.step_s = 0.02
    body = json.dumps(
        {"model": "tiny", "stream": True, "prompt": "abcdef", "max_tokens": 60, "temperature": 0}
    ).encode()
    told = {"content-type": "application/json"}
    try:
        with httpx.stream("POST", f"{urls[0]}{PLAIN}", content=body, headers=told) as old:
            heard, pieces = "", old.iter_text()
            while heard.count("\n\n") < 5:
                heard += next(pieces)
            ids = [id_of(event) for event in heard.split("\n\n")[:-1]]
            before, cancels = worker.submits[-1], len(worker.cancels)
            with httpx.stream(
                "POST", f"{urls[0]}{PLAIN}", content=body, headers=told | {"last-event-id": ids[-1]}
            ) as new:
                again = worker.submits[-1]
                assert before.id != again.id and before.key == again.key != ""
                assert (before.prompt, before.params) == (again.prompt, again.params)
                eventually(lambda: worker.cancels[cancels:] == [before.id], "the end of the old one")
                rest = new.read().decode()
            assert rest.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.RemoteProtocolError):
                "".join(pieces)
        assert len(heard.split("\n\n")) - 1 + len(rest.split("\n\n")) - 1 == 61
    finally:
        worker.step_s = 0.0001


def test_another_key_goes_on_with_nobody_elses_stream(
    world: World, key_file: Path, tmp_path: Path, worker: FakeWorker
) -> None:
    from eaas.gateway.keys import Key, digest_of, write_keys

    keys = tmp_path / "keys.json"
    names = {"one": "alice", "two": "bob", "three": "alice"}
    write_keys(keys, [Key(name=name, sha256=digest_of(key)) for key, name in names.items()])
    body = {"prompt": "abc", "max_tokens": 5}
    with gateway_url(world, "--resume-key-file", str(key_file), "--keys-file", str(keys)) as url:
        whole = events_of(ask(url, PLAIN, body, authorization="Bearer one"))
        assert ask(url, PLAIN, body, id_of(whole[1]), authorization="Bearer two").status_code == 409
        rest = ask(url, PLAIN, body, id_of(whole[1]), authorization="Bearer three")
        assert events_of(rest) == whole[2:], "the successor of a key is the same name"
