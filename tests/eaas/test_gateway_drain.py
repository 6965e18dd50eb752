"""A gateway that another has replaced: no client of it is refused, and it ends."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from eaas.gateway.__main__ import RouterViews
from eaas.ops.running import Roll
from router.host import host_id, process_id
from router.view import Identity, Member, Retirement, View
from tests.eaas.gateway_world import FakeWorker, GatewayProcess, World, eventually

LINGER_S = 2.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "model")
    yield world
    world.close()


@pytest.fixture
def gateway(world: World) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(world)
    yield gateway
    gateway.process.kill()
    gateway.process.communicate()


@pytest.fixture
def worker(world: World) -> FakeWorker:
    worker = world.worker(step_s=0.01)
    world.router.show(worker)
    return worker


class Client:
    """One connection, kept as long as it can be."""

    def __init__(self, address: str) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=60)
        self.connection.connect()
        # Else it would quietly connect anew.
        self.connection.auto_open = 0

    def ask(self, tokens: int = 1) -> http.client.HTTPResponse:
        """The reply, once its body has begun."""
        body = {"model": "tiny", "prompt": "abc", "max_tokens": tokens, "stream": True}
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return self.connection.getresponse()


def is_refused(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        # It came while the listener was being closed.
        return False
    return False


def test_a_client_whose_stream_spans_the_drain_may_send_its_next_request_on_the_same_connection(
    world: World, gateway: GatewayProcess, worker: FakeWorker
) -> None:
    address = gateway.report["address"]
    clients = [Client(address) for _ in range(8)]
    replies = [client.ask(tokens=round((LINGER_S + 1) / worker.step_s)) for client in clients]
    idle = Client(address)
    assert b"[DONE]" in idle.ask().read()
    world.router.drain(address)
    eventually(lambda: is_refused(address), "the end of its listening")

    def goes_on(client: Client, reply: http.client.HTTPResponse) -> None:
        assert reply.getheader("connection") is None
        assert reply.read().endswith(b"data: [DONE]\n\n")
        last = client.ask()
        assert (last.status, last.getheader("connection")) == (200, "close")
        assert b"[DONE]" in last.read()

    # Each by itself, as clients are: none may come late because another's answer took long.
    with ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(goes_on, clients, replies))
    assert gateway.process.wait(60) == 0, "it ends with its last client"


def test_told_to_end_it_goes_on_with_its_streams_if_it_is_to_drain(world: World, worker: FakeWorker) -> None:
    gateway = GatewayProcess(world, "--drain-on-term", "--drain-s", "60")
    try:
        address = gateway.report["address"]
        client = Client(address)
        reply = client.ask(tokens=round(2 / worker.step_s))
        gateway.process.terminate()
        eventually(lambda: is_refused(address), "the end of its listening")
        assert reply.read().endswith(b"data: [DONE]\n\n"), "its stream was cut"
        assert gateway.process.wait(60) == 0, "it ends with its last client"
    finally:
        gateway.process.kill()
        gateway.process.communicate()


def test_told_twice_it_ends_its_streams_with_an_error(world: World, worker: FakeWorker) -> None:
    gateway = GatewayProcess(world, "--drain-on-term", "--drain-s", "60")
    try:
        address = gateway.report["address"]
        client = Client(address)
        reply = client.ask(tokens=round(30 / worker.step_s))
        gateway.process.terminate()
        eventually(lambda: is_refused(address), "the end of its listening")
        gateway.process.terminate()
        said = reply.read()
        assert b'"error"' in said and not said.endswith(b"[DONE]\n\n"), said[-300:]
        assert gateway.process.wait(60) == 0
    finally:
        gateway.process.kill()
        gateway.process.communicate()


def test_connections_that_nobody_uses_do_not_hold_up_the_end_of_a_drain(
    world: World, gateway: GatewayProcess, worker: FakeWorker
) -> None:
    address = gateway.report["address"]
    used, unused = Client(address), Client(address)
    assert b"[DONE]" in used.ask().read()
    world.router.drain(address)
    began_s = time.monotonic()
    assert used.connection.sock.recv(1) == unused.connection.sock.recv(1) == b""
    assert time.monotonic() - began_s >= LINGER_S / 2, "its next request may have been under way"
    assert gateway.process.wait(60) == 0


def test_a_gateway_that_was_fenced_after_its_order_to_drain_drains_as_the_member_that_it_is_now() -> None:
    told: list[bool] = []
    views = RouterViews("127.0.0.1:1", "127.0.0.1:8000", on_drain=lambda: told.append(True))

    def see(me: str, **states: str) -> None:
        views._client._identity = Identity(name=me, incarnation=1, term=1, lease_s=1, renew_s=1)
        members = tuple(
            Member(
                name=name.replace("_", "/"), pool="gateway", state=state, incarnation=1, address="127.0.0.1:8000",
                pid=process_id(), host=host_id() if name != "gateway_3" else "another",
            )
            for name, state in states.items()
        )  # fmt: skip
        views._look_for_drain(View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=1, members=members))

    try:
        see("gateway/1", gateway_1="draining")
        assert not told, "nobody has come in its place"
        # It may see itself before it knows its new name.
        see("gateway/1", gateway_2="serving")
        see("gateway/2", gateway_2="serving")
        assert not told, "nobody has come in its place"
        see("gateway/2", gateway_2="serving", gateway_3="serving")
        assert told == [True]
        see("gateway/2", gateway_2="serving", gateway_3="serving")
        assert told == [True], "told twice"
    finally:
        views.close()


def test_a_roll_waits_until_the_router_says_that_a_gateway_may_end_under_whatever_name_it_has_then() -> None:
    def view(*names: str) -> View:
        members = tuple(
            Member(name=name, pool="gateway", state="serving", incarnation=1, address="a", pid=7, host="h")
            for name in names
        )
        return View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=1, members=members)

    def said(name: str, safe: bool) -> Retirement:
        state = "gone" if safe else "draining"
        return Retirement(name=name, operation="a", state=state, safe_to_terminate=safe, asked_unix_s=1.0)

    # Silent for longer than its lease, it joins again under another name.
    answers = [said("gateway/1", False), said("gateway/3", False), said("gateway/1", True)]
    asked: list[tuple[str, str]] = []

    def retire(name: str, operation: str, **_: float) -> Retirement:
        asked.append((name, operation))
        return answers.pop(0)

    client = SimpleNamespace(
        status=lambda **_: SimpleNamespace(view=view("gateway/2") if not answers else view("gateway/1")),
        retire=retire,
    )
    lines: list[str] = []
    Roll("", client, wait_s=9, drain_s=9, show=lines.append).roll(["gateway"])  # type: ignore[arg-type]
    assert asked == [("gateway/1", ""), ("gateway/1", "a"), ("gateway/1", "a")]
    assert not answers and len(lines) == 1
