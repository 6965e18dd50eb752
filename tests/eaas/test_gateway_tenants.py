"""Tenants at the gateway: who a request is of, and that nobody takes every place from the others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from eaas.gateway.keys import Key, digest_of, new_key, write_keys
from eaas.worker.protocol import Share
from tests.eaas.gateway_world import FakeWorker, GatewayProcess, World, eventually

COMPLETIONS = "/v1/completions"
MOST = 8


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("model"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    worker = world.worker()
    world.router.show(worker)
    return worker


@pytest.fixture
def gateway(world: World, worker: FakeWorker) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(world, "--max-requests", str(MOST))
    eventually(lambda: httpx.get(gateway.url + "/health").status_code == 200, "the gateway is healthy")
    yield gateway
    worker.frozen = False
    gateway.stop()


def ask(url: str, tenant: str, tokens: int = 4) -> httpx.Response:
    body = {"prompt": "abcd", "max_tokens": tokens}
    return httpx.post(url + COMPLETIONS, json=body, headers={"x-eaas-tenant": tenant}, timeout=60)


def test_a_request_is_of_whom_its_header_names(gateway: GatewayProcess, worker: FakeWorker) -> None:
    for tenant in ("", "a", "team-7@example.org", "x" * 64):
        assert ask(gateway.url, tenant).status_code == 200
        assert worker.submits[-1].share == Share(tenant=tenant)
    for wrong in ("x" * 65, "a b", "ä"):
        headers = [(b"x-eaas-tenant", wrong.encode())]
        reply = httpx.post(gateway.url + COMPLETIONS, json={"prompt": "a"}, headers=headers)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_tenant", reply.text


def test_a_key_says_whose_a_request_is_and_what_it_weighs_and_the_header_does_not(
    world: World, worker: FakeWorker, tmp_path: Path
) -> None:
    key, path = new_key(), tmp_path / "keys.json"
    entry = Key(name="alice", sha256=digest_of(key), weight=3)
    write_keys(path, [entry])
    gateway = GatewayProcess(world, "--keys-file", str(path))
    try:
        eventually(lambda: httpx.get(gateway.url + "/health").status_code == 200, "the gateway is healthy")
        headers = {"authorization": f"Bearer {key}", "x-eaas-tenant": "mallory"}
        reply = httpx.post(gateway.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers=headers)
        assert reply.status_code == 200, reply.text
        assert worker.submits[-1].share == Share(tenant="alice", weight=3)
    finally:
        gateway.stop()


def test_who_has_every_place_keeps_nobody_out(gateway: GatewayProcess, worker: FakeWorker) -> None:
    for _ in range(2):
        worker.frozen = True
        with ThreadPoolExecutor(MOST + 2) as threads:

            def running(count: int) -> None:
                line = f'eaas_running{{model="tiny"}} {count}'
                eventually(lambda: line in httpx.get(gateway.url + "/metrics").text, line)

            replies = [threads.submit(ask, gateway.url, "flood") for _ in range(MOST)]
            running(MOST)
            assert ask(gateway.url, "flood").status_code == 429, "it has all there is"
            replies.append(threads.submit(ask, gateway.url, "other"))
            running(MOST + 1)
            refused = ask(gateway.url, "third")
            assert refused.status_code == 429 and "retry-after" in refused.headers, "an eighth above is the most"
            worker.frozen = False
            assert [reply.result().status_code for reply in replies] == [200] * (MOST + 1)
        assert ask(gateway.url, "third").status_code == 200
