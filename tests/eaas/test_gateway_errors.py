"""Every refusal: its status, OpenAI's error shape, and a text that says what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from eaas.gateway import errors
from eaas.worker.protocol import Failed
from tests.eaas.gateway_world import MAX_MODEL_LEN, FakeWorker, World, eventually, gateway_url
from tests.host_stalls import bounded

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
LIMIT = 64 << 10
MULTIPLE = 'start: %json {"multipleOf": 99999989}'
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(40):
    DEEP = {"items": DEEP}


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    worker = world.worker()
    world.router.show(worker)
    return worker


@pytest.fixture(scope="module")
def url(world: World, worker: FakeWorker) -> Iterator[str]:
    with gateway_url(world, "--max-body-bytes", str(LIMIT), "--max-requests", "3", "--deadline-s", "1") as url:
        yield url


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) > 10
    return body["error"]


def refused(url: str, path: str, status: int = 400, **fields: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    reply = httpx.post(f"{url}{path}", json={"model": "tiny", "max_tokens": 2, **content, **fields})
    return error_of(reply, status)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("body", ["", "{", "[1", '{"model": tiny}', '{"model": "tiny", "prompt": "\\ud800"}', "\xff"])
def test_malformed_json_is_a_400(url: str, path: str, body: str) -> None:
    reply = httpx.post(f"{url}{path}", content=body.encode("latin-1"), headers={"content-type": "application/json"})
    error = error_of(reply, 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")


def test_deeply_nested_json_is_a_400(url: str) -> None:
    body = '{"model": "tiny", "prompt": ' + "[" * 20000 + "]" * 20000 + "}"
    error_of(httpx.post(f"{url}{PLAIN}", content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("body", ["[]", "3", "null", '"text"'])
def test_json_that_is_no_object_is_a_400(url: str, body: str) -> None:
    reply = httpx.post(f"{url}{PLAIN}", content=body, headers={"content-type": "application/json"})
    assert "object" in error_of(reply, 400)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_another_content_type_is_a_415(url: str, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    error = error_of(httpx.post(f"{url}{PLAIN}", content=b"{}", headers=headers), 415)
    assert "application/json" in error["message"]


def test_a_json_content_type_with_parameters_is_taken(url: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON"):
        assert httpx.post(f"{url}{PLAIN}", content=body, headers={"content-type": kind}).status_code == 200


def test_a_declared_body_over_the_limit_is_a_413_before_it_is_read(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        lines = [
            f"POST {PLAIN} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {1 << 40}",
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        connection.settimeout(5)
        answer = b""
        while b"}}" not in answer:
            answer += connection.recv(4096)
    assert b" 413 " in answer.split(b"\r\n")[0]
    assert b'"error"' in answer


def test_an_undeclared_body_over_the_limit_is_a_413(url: str) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * (LIMIT // 4)

    reply = httpx.post(f"{url}{PLAIN}", content=body(), headers={"content-type": "application/json"})
    assert str(LIMIT) in error_of(reply, 413)["message"]


def test_an_unknown_path_is_a_404(url: str) -> None:
    for method, path in (
        ("GET", "/nothing"),
        ("POST", "/v1/audio/speech"),
        ("GET", "/v1"),
        ("GET", "/v1/models/"),
    ):
        error = error_of(httpx.request(method, f"{url}{path}"), 404)
        assert error["type"] == "invalid_request_error"


def test_a_wrong_method_is_a_405_that_names_the_right_one(url: str) -> None:
    reply = httpx.get(f"{url}{CHAT}")
    assert "POST" in error_of(reply, 405)["message"]
    assert reply.headers["allow"] == "POST"
    error_of(httpx.delete(f"{url}/v1/models"), 405)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_an_unknown_model_is_a_404_that_names_the_served_one(url: str, path: str) -> None:
    error = refused(url, path, 404, model="gpt-5")
    assert error["code"] == "model_not_found"
    assert "`gpt-5`" in error["message"] and "`tiny`" in error["message"]
    assert error_of(httpx.get(f"{url}/v1/models/gpt-5"), 404)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.retrieve("gpt-5")


WRONG = [
    ("model", 3), ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", "5"),
    ("max_tokens", 2.5),
    ("max_tokens", True), ("max_tokens", 10**30), ("min_tokens", 9), ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.01), ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1), ("min_p", 1.1), ("seed", "x"), ("seed", 2**63), ("seed", 1.5), ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("n", 0), ("n", 17), ("n", "2"), ("stop", 3),
    ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 17), ("stop", ["x" * 1025]), ("stop", [1]),
    ("stop_token_ids", [10**6]), ("stop_token_ids", "x"), ("stream", "yes"), ("stream", 1),
    ("ignore_eos", "no"),
    ("stream_options", {"include_usage": True}), ("stream_options", 1),
    ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"-5": 1}), ("logit_bias", {"999": 1}),
    ("logit_bias", [5]), ("allowed_token_ids", []), ("allowed_token_ids", [260]), ("allowed_token_ids", 5),
    ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", -2), ("prompt_logprobs", True),
    ("best_of", 3),
    ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}),
    ("structured_outputs", {}), ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("structured_outputs", {"json": "{"}), ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"regex": "a" * 5000}), ("structured_outputs", {"grammar": ""}),
    ("structured_outputs", {"structural_tag": "x"}), ("guided_choice", [""]),
    ("logit_bias", {"1" * 5000: 1}), ("structured_outputs", {"grammar": MULTIPLE}), ("guided_grammar", MULTIPLE),
    ("structured_outputs", {"json": {"multipleOf": 10**399}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}={str(v)[:20]}" for n, v in WRONG])
def test_a_wrong_value_is_a_400_that_names_the_field(url: str, name: str, value: Any) -> None:
    for path in (CHAT, PLAIN):
        error = refused(url, path, **{name: value})
        assert error["type"] == "invalid_request_error"
        assert name in (error["param"] or "") or name in error["message"], error
        assert error["param"] and error["code"], error


def test_what_is_out_of_bounds_is_said_in_the_words_that_clients_of_vllm_look_for(url: str) -> None:
    assert "(greater_than_equal)" in refused(url, CHAT, seed=-(2**63) - 1)["message"]
    assert "(less_than_equal)" in refused(url, CHAT, seed=2**63)["message"]
    message = refused(url, CHAT, logit_bias={"261": 1.0})["message"]
    assert "261 is out of vocabulary" in message and "260 tokens" in message


CHAT_ONLY = [
    ("messages", []), ("messages", "hi"), ("messages", [{"content": "no role"}]), ("messages", [3]),
    ("messages", [{"role": "user", "content": 7}]), ("messages", [{"role": "user"}]),
    ("messages", [{"role": "tool", "tool_call_id": "a", "content": None}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages", [{"role": "bad", "content": "refused by the template"}]), ("max_completion_tokens", 0),
    ("logprobs", 3), ("top_logprobs", 21), ("top_logprobs", 2), ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"multipleOf": 99999989}}}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), CHAT_ONLY, ids=[f"{n}={str(v)[:30]}" for n, v in CHAT_ONLY])
def test_a_wrong_chat_is_a_400_that_names_the_field(url: str, name: str, value: Any) -> None:
    error = refused(url, CHAT, **{name: value, **({"tool_choice": "required"} if name == "tools" else {})})
    assert name in (error["param"] or "") or name in error["message"], error


@pytest.mark.parametrize("field", ["prompt_logprobs", "logprobs"])
def test_more_of_prompts_than_is_kept_is_a_400(url: str, field: str) -> None:
    """20 alternatives, and the token itself, of each of 200 tokens of 64 prompts, are some 268,800."""
    echo = {"echo": True} if field == "logprobs" else {}
    prompts = [[5] * 200] * 64
    error = refused(url, PLAIN, prompt=prompts, max_tokens=1, **{field: 20}, **echo)
    assert error["param"] == field and "268800" in error["message"], error


def test_minus_one_asks_for_the_whole_vocabulary_where_the_server_allows_it(world: World, worker: FakeWorker) -> None:
    vocab, most = 260, 1 << 18
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": -1}
    with gateway_url(world, "--max-logprobs=-1") as url:
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200, "a worker")
        for path, fields in (
            (CHAT, {**content, "logprobs": True}),
            (PLAIN, {"prompt": "hi", "logprobs": -1}),
        ):
            body = {**fields, "prompt_logprobs": -1, "max_tokens": 2}
            httpx.post(f"{url}{path}", json=body).raise_for_status()
            params = worker.submits[-1].params
            assert (params.logprobs, params.prompt_logprobs) == (vocab, vocab)
        tokens = most // (vocab + 1) + 1
        error = refused(url, PLAIN, logprobs=-1, max_tokens=tokens)
        assert error["param"] == "max_tokens" and str((vocab + 1) * tokens) in error["message"], error


PLAIN_ONLY = [
    ("prompt", None), ("prompt", 5), ("prompt", []), ("prompt", ["a", 5]), ("prompt", [[]]),
    ("prompt", [1, -1]),
    ("prompt", [260]), ("prompt", [[5], [10**9]]), ("prompt", ""), ("prompt", ["a"] * 65), ("prompt", [True]),
    ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("echo", 1), ("suffix", "end"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), PLAIN_ONLY, ids=[f"{n}={str(v)[:30]}" for n, v in PLAIN_ONLY])
def test_a_wrong_completion_is_a_400_that_names_the_field(url: str, name: str, value: Any) -> None:
    error = refused(url, PLAIN, **{name: value})
    assert error["param"] is not None and error["param"].startswith(name), error


def test_missing_fields_are_named(url: str) -> None:
    for path, field in ((CHAT, "messages"), (PLAIN, "prompt")):
        reply = httpx.post(f"{url}{path}", json={"model": "tiny"})
        error = error_of(reply, 400)
        assert (error["param"], error["code"]) == (field, "missing_required_parameter")


def test_a_prompt_over_the_context_is_a_400(url: str) -> None:
    error = refused(url, PLAIN, prompt="x" * MAX_MODEL_LEN)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert str(MAX_MODEL_LEN) in error["message"]
    error = refused(url, CHAT, messages=[{"role": "user", "content": "x" * MAX_MODEL_LEN}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_completion_over_the_context_is_a_400_that_says_how_much_fits(url: str) -> None:
    for path, name in ((PLAIN, "max_tokens"), (CHAT, "max_completion_tokens")):
        error = refused(url, path, **{name: MAX_MODEL_LEN})
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
        assert "ask for at most" in error["message"]


FAILURES = [
    ("expert_lost", True, 503, "1"), ("internal", False, 500, None), ("internal", True, 503, "1"),
    ("too_long", False, 400, None), ("never_fits", False, 400, None), ("bad_request", False, 400, None),
    ("overloaded", True, 429, "1"), ("no_token", False, 400, None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "retryable", "status", "retry"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_worker_refuses_has_its_status(
    url: str, worker: FakeWorker, code: str, retryable: bool, status: int, retry: str | None, stream: bool
) -> None:
    worker.refuse = lambda s: Failed(
        id=s.id, attempt=s.attempt, code=code, message="it broke here", retryable=retryable
    )
    try:
        reply = httpx.post(f"{url}{PLAIN}", json={"model": "tiny", "prompt": "a", "stream": stream})
    finally:
        worker.refuse = lambda _: None
    assert "it broke here" in error_of(reply, status)["message"]
    assert reply.headers.get("retry-after") == retry


def test_bounds_that_leave_no_token_are_the_clients_fault_however_late_that_shows() -> None:
    failed = Failed(id="a", attempt=1, code="no_token", message="nothing is left", retryable=False)
    assert [errors.error_of(failed, begun=begun, after_s=0.0).reply.status for begun in (False, True)] == [
        400,
        400,
    ]


def test_a_fault_in_mid_stream_is_an_error_event_and_no_done(url: str, worker: FakeWorker) -> None:
    worker.step_s = 0.02
    try:
        with httpx.stream(
            "POST", f"{url}{CHAT}",
            json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 999,
                  "stream": True},
        ) as reply:  # fmt: skip
            lines = reply.iter_lines()
            while '"content":"s"' not in next(lines):
                pass
            submit = worker.submits[-1]
            worker.send(
                Failed(
                    id=submit.id,
                    attempt=submit.attempt,
                    code="expert_lost",
                    message="no replica",
                    retryable=True,
                )
            )
            rest = [line for line in lines if line]
    finally:
        worker.step_s = 0.001
    last = json.loads(rest[-1].removeprefix("data: "))
    assert last == {
        "error": {"message": "no replica", "type": "overloaded_error", "param": None, "code": "expert_lost"}
    }
    assert not any("[DONE]" in line or '"finish_reason":"' in line for line in rest)


def test_a_pool_that_was_scaled_to_nothing_is_not_said_to_be_restored(
    world: World, url: str, worker: FakeWorker
) -> None:
    world.router.expert_classes = ()
    worker.refuse = lambda it: Failed(
        id=it.id, attempt=it.attempt, code="expert_lost", message="no replica", retryable=True
    )
    try:
        world.router.show(worker)
        eventually(lambda: "expert/" not in httpx.get(f"{url}/status").text, "no expert server")
        reply = httpx.post(f"{url}{PLAIN}", json={"prompt": "ab"})
    finally:
        world.router.expert_classes, worker.refuse = ("",), lambda _: None
        world.router.show(worker)
    said = error_of(reply, 503)["message"]
    assert "No expert server is in the pool. Where it was scaled to 0" in said and "`eaas scale expert 2`" in said


def test_the_openai_client_raises_on_a_fault_in_mid_stream(url: str, worker: FakeWorker) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    worker.step_s = 0.02
    try:
        with pytest.raises(openai.APIError, match="no replica"):
            for _ in client.completions.create(model="tiny", prompt="ab", max_tokens=999, stream=True):
                submit = worker.submits[-1]
                worker.send(
                    Failed(
                        id=submit.id,
                        attempt=submit.attempt,
                        code="expert_lost",
                        message="no replica",
                        retryable=True,
                    )
                )
    finally:
        worker.step_s = 0.001


def test_one_request_too_many_is_a_429_with_retry_after(url: str, worker: FakeWorker) -> None:
    worker.frozen = True
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
    before = len(worker.submits)
    try:
        with httpx.Client() as client:
            held = [client.build_request("POST", f"{url}{PLAIN}", json=body) for _ in range(3)]
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(3) as threads:
                replies = [threads.submit(client.send, request) for request in held]
                eventually(lambda: len(worker.submits) == before + 3, "three requests at the worker")
                reply = httpx.post(f"{url}{PLAIN}", json=body)
                assert "3 requests" in error_of(reply, 429)["message"]
                assert reply.headers["retry-after"] == "1"
                worker.frozen = False
                assert [r.result().status_code for r in replies] == [200] * 3
    finally:
        worker.frozen = False
    # A place is given back a moment after the answer.
    eventually(
        lambda: httpx.post(f"{url}{PLAIN}", json=body).status_code == 200,
        "refused requests must not hold places",
        5.0,
    )


def test_without_a_worker_health_says_why_and_requests_end_at_the_deadline(
    url: str, world: World, worker: FakeWorker
) -> None:
    world.router.show()
    try:
        eventually(lambda: httpx.get(f"{url}/health").status_code == 503, "an unready gateway")
        reply = httpx.get(f"{url}/health")
        assert "no attention worker" in error_of(reply, 503)["message"]

        began_s = time.monotonic()
        with bounded(2.0):
            reply = httpx.post(f"{url}{PLAIN}", json={"model": "tiny", "prompt": "a"})
        assert time.monotonic() - began_s > 0.9
        assert "within 1 s" in error_of(reply, 503)["message"]
        # What has been away for a second, and never was before, is taken to be away as long again.
        assert 1 <= int(reply.headers["retry-after"]) <= 2
    finally:
        world.router.show(worker)
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200, "a ready gateway")


def run_gateway(*arguments: str) -> tuple[int, dict[str, Any], str]:
    read_fd, write_fd = os.pipe()
    command = [
        sys.executable,
        "-m",
        "eaas.gateway",
        "--router",
        "127.0.0.1:1",
        "--ready-fd",
        str(write_fd),
        *arguments,
    ]
    process = subprocess.Popen(command, pass_fds=(write_fd,), stderr=subprocess.PIPE, text=True)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        report = json.loads(pipe.readline() or "{}")
    _, log = process.communicate(timeout=60)
    return process.returncode, report, log


def test_a_port_in_use_is_named_with_what_to_do(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, report, log = run_gateway("--model", str(world.model), "--port", str(port))
    assert status == 1
    assert f"port {port}" in report["error"] and "--port" in report["error"]
    assert report["error"] in log


def test_an_address_open_to_others_is_refused(world: World) -> None:
    status, report, _ = run_gateway("--model", str(world.model), "--host", "0.0.0.0")
    assert status == 1
    assert "127.0.0.1" in report["error"]


def test_a_folder_without_a_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    status, report, _ = run_gateway("--model", str(tmp_path / "nothing"), "--port", "0")
    assert status == 1
    assert "nothing" in report["error"]


def test_a_compressed_body_is_a_415(url: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error = error_of(httpx.post(f"{url}{PLAIN}", content=b"x", headers=headers), 415)
    assert "gzip" in error["message"]


def test_people_find_their_way_from_the_root_and_heads_have_no_body(url: str) -> None:
    page = httpx.get(f"{url}/")
    assert page.status_code == 200 and "href=dashboard" in page.text
    for path in ("/", "/health", "/v1/models", "/version"):
        head = httpx.head(f"{url}{path}")
        assert (head.status_code, head.content) == (httpx.get(f"{url}{path}").status_code, b"")


def test_pages_of_other_origins_may_ask_where_that_is_allowed(world: World) -> None:
    asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with gateway_url(world, "--allowed-origins", "https://chat.example") as url:
        allowed = httpx.options(f"{url}{PLAIN}", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        other = httpx.get(f"{url}/version", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
    with gateway_url(world) as url:
        assert "access-control-allow-origin" not in httpx.options(f"{url}{PLAIN}", headers=asks).headers
