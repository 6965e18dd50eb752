"""What operators change at a gateway by HTTP: pause and resume, abort, forget, scale."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.eaas.gateway_world import FakeWorker, World, eventually, gateway_url

BODY: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 120, "temperature": 0}


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    worker = world.worker(step_s=0.01)
    world.router.show(worker)
    return worker


@pytest.fixture(scope="module")
def url(world: World, worker: FakeWorker) -> Iterator[str]:
    with gateway_url(world) as url:
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200, "a worker")
        yield url


@pytest.fixture
def running(url: str, worker: FakeWorker) -> Iterator[Future[httpx.Response]]:
    """A request of two choices with some tokens already."""
    with ThreadPoolExecutor(1) as pool:
        before = worker.sent
        body = {**BODY, "n": 2, "request_id": "mine"}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30)
        eventually(lambda: worker.sent > before + 10, "tokens")
        yield answer
        httpx.post(f"{url}/resume")


def choices_of(answer: Future[httpx.Response]) -> list[tuple[str, str]]:
    reply = answer.result(60)
    assert reply.status_code == 200, reply.text
    return [(choice["text"], choice["finish_reason"]) for choice in reply.json()["choices"]]


def whole(text: str) -> bool:
    return text == ("abcdefgh" * 15)


def paused(url: str) -> bool:
    return httpx.get(f"{url}/is_paused").json()["is_paused"]


def test_a_pause_that_keeps_has_everybody_wait_and_loses_no_token(
    url: str, worker: FakeWorker, running: Future[httpx.Response]
) -> None:
    assert httpx.post(f"{url}/pause?mode=keep").json() == {"status": "paused"}
    eventually(lambda: not worker.jobs, "the worker is told")
    sent = worker.sent
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=30)
        eventually(lambda: b'eaas_waiting{model="tiny"} 3.0' in httpx.get(f"{url}/metrics").content, "all wait")
        assert paused(url) and worker.sent == sent and not running.done()
        assert httpx.post(f"{url}/resume").json() == {"status": "resumed"} and not paused(url)
        assert [(whole(text), end) for text, end in choices_of(running)] == [(True, "length")] * 2
        assert whole(choices_of(late)[0][0])


def test_a_pause_that_waits_lets_those_in_progress_end(
    url: str, worker: FakeWorker, running: Future[httpx.Response]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        pause = pool.submit(httpx.post, f"{url}/pause?mode=wait", timeout=30)
        eventually(lambda: paused(url), "it is paused")
        refused = httpx.post(f"{url}/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "paused")
        assert pause.result(60).json() == {"status": "paused"}
    assert [(whole(text), end) for text, end in choices_of(running)] == [(True, "length")] * 2


def test_a_pause_that_aborts_ends_what_runs_with_what_it_has_said(
    url: str, worker: FakeWorker, running: Future[httpx.Response]
) -> None:
    httpx.post(f"{url}/pause")
    for text, end in choices_of(running):
        assert end == "abort" and 0 < len(text) < 120 and ("abcdefgh" * 15).startswith(text)
    eventually(lambda: not worker.jobs, "the worker is told")
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 503
    assert httpx.post(f"{url}/v1/messages", json={}).json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
def test_requests_are_aborted_by_the_names_that_their_clients_gave(
    url: str, running: Future[httpx.Response], path: str
) -> None:
    assert httpx.post(url + path, json={"request_ids": ["other"]}).json()["aborted"] == 0
    assert not running.done()
    assert httpx.post(url + path, json={"request_ids": ["mine"]}).json() == {
        "status": "aborted",
        "aborted": 1,
    }
    assert [end for _, end in choices_of(running)] == ["abort", "abort"]
    assert httpx.post(url + path, json={"request_ids": []}).json()["aborted"] == 0


def test_all_requests_are_aborted_by_the_route_for_that_alone(url: str, running: Future[httpx.Response]) -> None:
    refused = httpx.post(f"{url}/inference/v1/abort_requests", json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_ids")
    assert httpx.post(f"{url}/inference/v1/abort_requests", json={"request_ids": []}).json()["aborted"] == 0
    # A slip in the name of the field ends nothing.
    refused = httpx.post(f"{url}/abort_requests", json={"request_id": ["mine"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
    assert not running.done()
    assert httpx.post(f"{url}/abort_requests", json={}).json()["aborted"] == 1
    assert [end for _, end in choices_of(running)] == ["abort", "abort"]


def test_a_stream_that_is_aborted_ends_as_streams_do(url: str, worker: FakeWorker) -> None:
    ends: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as reply:
        for number, line in enumerate(reply.iter_lines()):
            if number == 4:
                assert httpx.post(f"{url}/abort_requests", json={}).json()["aborted"] == 1
            if line.startswith("data: "):
                ends.append(line)
    assert '"finish_reason":"abort"' in ends[-2] and ends[-1] == "data: [DONE]", ends[-2:]


def test_the_wrong_mode_is_refused_by_name(url: str) -> None:
    reply = httpx.post(f"{url}/pause?mode=drop")
    assert reply.status_code == 400 and "'drop'" in reply.json()["error"]["message"]
    assert not paused(url)


def test_workers_are_told_to_forget(url: str, worker: FakeWorker) -> None:
    before = worker.forgotten
    assert httpx.post(f"{url}/reset_prefix_cache").json() == {"success": True}
    eventually(lambda: worker.forgotten == before + 1, "the worker is told")


def test_a_pool_is_scaled_by_the_router(world: World, url: str) -> None:
    asked = {"new_data_parallel_size": 3, "drain_timeout": 7}
    assert httpx.post(f"{url}/scale_elastic_ep", json=asked).status_code == 200
    assert httpx.post(f"{url}/scale_elastic_ep", json={**asked, "pool": "expert"}).status_code == 200
    assert world.router.scaled[-2:] == [("attention", 3, 7.0), ("expert", 3, 7.0)]
    for wrong in ({}, {"new_data_parallel_size": 0}, {"new_data_parallel_size": 10}, {**asked, "pool": "x"}):
        reply = httpx.post(f"{url}/scale_elastic_ep", json=wrong)
        assert reply.status_code == 400 and reply.json()["error"]["param"], reply.text
    assert len(world.router.scaled) == 2


@pytest.mark.parametrize("path", ["/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/scale_elastic_ep"])
def test_a_page_of_another_origin_changes_nothing(url: str, path: str) -> None:
    reply = httpx.post(url + path, headers={"origin": "http://evil.example"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "other_origin")
    assert not paused(url)
