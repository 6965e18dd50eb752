"""How connections end: HTTP/1.0, clients that are done with asking, and clients that have gone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.eaas.gateway_world import FakeWorker, World, eventually, gateway_url

LONG = {"prompt": "abcdefgh", "max_tokens": 60}


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


def asked(url: str, body: dict[str, Any], version: str = "1.1") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(text) + text)
    return connection


def rest(connection: socket.socket) -> bytes:
    found = b""
    while data := connection.recv(1 << 16):
        found += data
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_its_answer_without_chunks(url: str, stream: bool) -> None:
    head, _, body = rest(asked(url, {**LONG, "stream": stream}, "1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    if stream:
        ids, lines = ([line for line in body.split(b"\n") if line.startswith(of)] for of in (b"id: ", b"data: "))
        assert len(ids) == len(lines) == body.count(b"\n\n") and lines[-1] == b"data: [DONE]"
        body = b"".join(json.loads(line[6:])["choices"][0]["text"].encode() for line in lines[:-1])
    else:
        body = json.loads(body)["choices"][0]["text"].encode()
    assert body == (b"abcdefgh" * 8)[:60]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_done_with_asking_gets_its_whole_answer(url: str, stream: bool) -> None:
    connection = asked(url, {**LONG, "stream": stream})
    connection.shutdown(socket.SHUT_WR)
    answer = rest(connection)
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    assert answer.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in answer
    assert b"[DONE]" in answer if stream else (b"abcdefgh" * 8)[:60] in answer


@pytest.mark.parametrize(("stream", "version"), [(False, "1.1"), (True, "1.1"), (False, "1.0")])
def test_what_a_client_that_has_gone_asked_for_is_computed_no_further(
    url: str, worker: FakeWorker, stream: bool, version: str
) -> None:
    connection = asked(url, {**LONG, "max_tokens": 8000, "stream": stream}, version)
    eventually(lambda: bool(worker.jobs), "it is computed")
    connection.close()
    eventually(lambda: not worker.jobs, "it is cancelled")
