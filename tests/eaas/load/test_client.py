"""The client records what the server did: every text, every end, every failure, in the server's own words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from eaas.ops.load.client import Client, Endpoint, EndpointInvalid, EndpointUnreachable
from eaas.ops.load.driver import Driver, learn_cost, learn_models
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.workload import Prompt, Workload
from tests.eaas.load.fake_server import FakeServer, fake_server


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with fake_server() as found:
        yield found


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    running.served.clear()
    running.script = ""
    return running


def workload(*scripts: str, chat: bool = False, **fields: Any) -> Workload:
    return Workload(model="fake", chat=chat, prompts=lambda i: Prompt(text=scripts[i]), distinct=len(scripts), **fields)


def ask(server: FakeServer, *scripts: str, chat: bool = False, timeout_s: float = 20.0) -> list[StreamRecord]:
    """One request after another."""
    return ask_timed(server, *scripts, chat=chat, timeout_s=timeout_s)[0]


def ask_timed(
    server: FakeServer, *scripts: str, chat: bool = False, timeout_s: float = 20.0
) -> tuple[list[StreamRecord], float]:
    """The records, and when their time began (monotonic)."""

    async def run() -> tuple[list[StreamRecord], float]:
        client = Client(Endpoint.of_url(server.url, chat=chat), timeout_s)
        client.start()
        driver = Driver(client, workload(*scripts, chat=chat))
        await driver.closed_loop(1, requests=len(scripts))
        client.close()
        return driver.records, client.t0_s

    return asyncio.run(run())


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("how", ["", "split", "crlf", "split crlf", "close", "close split"])
def test_every_text_is_recorded_however_it_is_cut_on_the_wire(server: FakeServer, chat: bool, how: str) -> None:
    (record,), t0_s = ask_timed(server, f"say:5 pause:5 say:3 {how}", chat=chat)
    (served,) = server.served
    assert not record.failed, record
    assert record.pieces == served.texts == [f" t{n}" for n in range(8)]
    assert (record.finish, record.tokens, record.status) == ("length", 8, 200)
    assert record.prompt_tokens == 3 + 2 * len(f"say:5 pause:5 say:3 {how}".split())
    assert served.path == ("/v1/chat/completions" if chat else "/v1/completions")
    # Causality, the only promise about time: nothing is seen before it was written, nor in another order.
    assert record.sent_s is not None and record.ended_s is not None
    assert all(seen_s + t0_s >= written_s for seen_s, written_s in zip(record.token_s, served.written_s, strict=True))
    assert record.sent_s <= record.token_s[0] and sorted(record.token_s) == record.token_s
    assert record.token_s[-1] <= record.ended_s <= time.monotonic() - t0_s


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("status:503", "http 503", "refused with 503"),
        ("status:429", "http 429", "refused with 429"),
        ("say:3 error", "stream", "no replica is left"),
        ("say:3 drop", "closed", ""),
        ("say:3 silent", "stream", "without [DONE]"),
        ("say:3 silent close", "closed", "in mid-stream"),
        ("say:3 unfinished", "unfinished", ""),
        ("plain", "protocol", "all at once"),
    ],
)
def test_every_failure_is_recorded_by_kind_with_what_the_server_said(
    server: FakeServer, script: str, kind: str, text: str
) -> None:
    (record, after) = ask(server, script, "say:2")
    assert record.failed
    assert record.error_kind == kind, record
    assert text in (record.error or "")
    assert len(record.pieces) == (3 if "say" in script else 0)
    assert not after.failed, "the next request suffers nothing"


def test_a_stream_without_end_is_given_up_in_time(server: FakeServer) -> None:
    (record,) = ask(server, "say:2 pause:60000", timeout_s=2.0)
    assert record.error_kind == "timeout"
    assert record.pieces == [" t0", " t1"]
    assert record.ended_s is not None and record.ended_s > record.token_s[-1]


def test_connections_are_used_again(server: FakeServer) -> None:
    ask(server, *["say:2"] * 5)
    assert len({served.connection for served in server.served}) == 1


def test_nobody_there_is_an_error_of_connecting() -> None:
    with fake_server() as gone:
        url = gone.url
    client = Client(Endpoint.of_url(url), 5.0)
    record = StreamRecord(prompt=0, planned_s=0.0)
    asyncio.run(client.stream(b"{}", record))
    assert record.error_kind == "connect"
    assert record.failed
    with pytest.raises(EndpointUnreachable, match="eaas serve"):
        asyncio.run(learn_models(Endpoint.of_url(url)))


def test_an_open_loop_sends_on_whatever_the_server_does(server: FakeServer) -> None:
    """Twenty requests of two seconds, 5 ms apart: all are there before the first has ended."""

    async def run() -> Driver:
        client = Client(Endpoint.of_url(server.url), 20.0)
        client.start()
        driver = Driver(client, workload("say:1 pause:2000 say:1"))
        await driver.open_loop([0.005 * n for n in range(20)])
        client.close()
        return driver

    driver = asyncio.run(run())
    assert len(driver.records) == 20 and not any(record.failed for record in driver.records)
    first_end_s = min(record.ended_s or 0.0 for record in driver.records)
    sent = [record.sent_s or 0.0 for record in driver.records]
    assert sum(at_s < first_end_s for at_s in sent) > 10
    assert all(at_s >= record.planned_s for at_s, record in zip(sent, driver.records, strict=True))


def test_a_closed_loop_keeps_so_many_in_flight_and_no_more(server: FakeServer) -> None:
    async def run() -> list[StreamRecord]:
        client = Client(Endpoint.of_url(server.url), 20.0)
        client.start()
        driver = Driver(client, workload("say:2 pause:10"))
        await driver.closed_loop(4, requests=40)
        client.close()
        return driver.records

    records = asyncio.run(run())
    assert len(records) == 40
    moves = [(r.sent_s or 0.0, 1) for r in records] + [(r.ended_s or 0.0, -1) for r in records]
    # At one moment the end comes before what it made room for.
    level = most = 0
    for _, step in sorted(moves):
        level += step
        most = max(most, level)
    assert most == 4


@pytest.mark.parametrize(("refusal", "least_s"), [("status:503", 0.1), ("status:429 after:1", 1.0)])
def test_a_closed_loop_that_is_refused_waits_as_it_is_told(server: FakeServer, refusal: str, least_s: float) -> None:
    async def run(**end: Any) -> list[StreamRecord]:
        client = Client(Endpoint.of_url(server.url), 20.0)
        client.start()
        driver = Driver(client, workload(refusal))
        await driver.closed_loop(1, **end)
        client.close()
        return driver.records

    asyncio.run(run(requests=3))
    came = [served.written_s[0] for served in server.served]
    assert [later - earlier >= least_s for earlier, later in pairwise(came)] == [True, True], came
    assert len(asyncio.run(run(for_s=0.5))) <= 5, "the end of the run is not waited past"


def test_a_closed_loop_that_has_sent_all_waits_for_nothing(server: FakeServer) -> None:
    async def run() -> list[StreamRecord]:
        client = Client(Endpoint.of_url(server.url), 20.0)
        client.start()
        driver = Driver(client, workload("status:429 after:600"))
        # Refused for ten minutes: the last as it is sent, the others while they wait.
        await asyncio.wait_for(driver.closed_loop(1, requests=1), 60)
        slow = Driver(client, workload("status:429 after:600", "say:1 pause:300"))
        await asyncio.wait_for(slow.each([0, 1, 1], 2), 60)
        client.close()
        return [*driver.records, *slow.records]

    assert [record.failed for record in asyncio.run(run())] == [True, True, False, False]


def test_what_is_abandoned_leaves_no_record(server: FakeServer) -> None:
    async def run() -> Driver:
        client = Client(Endpoint.of_url(server.url), 20.0)
        client.start()
        driver = Driver(client, workload("say:1", "say:1 pause:60000"))
        task = asyncio.create_task(driver.closed_loop(1, requests=2))
        while len(server.served) < 2:
            await asyncio.sleep(0.01)
        driver.stop()
        await task
        client.close()
        return driver

    driver = asyncio.run(run())
    assert [record.prompt for record in driver.records] == [0]
    assert driver.in_flight == 0


def test_the_cost_of_a_word_is_learned_from_the_server(server: FakeServer) -> None:
    server.script = "say:1"
    cost = asyncio.run(learn_cost(Endpoint.of_url(server.url), workload(""), 10.0))
    assert (cost.fixed, cost.per_word) == (3.0, 2.0)
    assert cost.words(103) == 50


def test_the_key_travels_as_a_bearer_token_and_is_not_shown(server: FakeServer) -> None:
    endpoint = Endpoint.of_url(server.url, key="secret-key")
    assert "secret-key" not in repr(endpoint)
    client = Client(endpoint, 5.0)

    async def run() -> None:
        await client.stream(workload("say:1").body(0), StreamRecord(prompt=0, planned_s=0.0))
        client.close()

    asyncio.run(run())
    assert server.served[0].headers["authorization"] == "bearer secret-key"


@pytest.mark.parametrize(
    ("url", "path", "port"),
    [
        ("http://h:8000", "/v1/completions", 8000),
        ("h:8000/v1", "/v1/completions", 8000),
        ("https://h/v1/", "/v1/completions", 443),
        ("http://h:1/proxy/v1/chat/completions", "/proxy/v1/chat/completions", 1),
    ],
)
def test_an_address_may_be_given_in_any_usual_form(url: str, path: str, port: int) -> None:
    endpoint = Endpoint.of_url(url)
    assert (endpoint.path, endpoint.port) == (path, port)


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(EndpointInvalid, match="HOST:PORT"):
        Endpoint.of_url(url)
