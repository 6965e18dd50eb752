"""Every process is replaced while requests run, and no client sees anything of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.ops.running import ROLLED, Roll
from router.client import RouterClient
from tests.e2e.clients import stream_all
from tests.e2e.waiting import wait_for

pytestmark = pytest.mark.full(seconds=8)

CLIENTS, TOKENS = 6, 40
PROMPTS = [f"{'word ' * (number % 7)}client {number} asks" for number in range(CLIENTS)]


@pytest.fixture(scope="module")
def events() -> list[str]:
    return []


@pytest.fixture(scope="module")
def rolled(tiny: Path, events: list[str]) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        model=tiny, served_model_name="tiny", experts=3, attention=2, replicas=2, port=0, cores=(0, 1)
    )
    with LocalCluster(config, on_event=events.append) as running:
        yield running


class Load:
    """Clients that ask one after the other, on new connections and on one that is kept."""

    def __init__(self, url: str, prompts: list[str], tokens: int) -> None:
        self._url, self._prompts, self._tokens = url, prompts, tokens
        self._begun, self._ended = threading.Event(), threading.Event()
        self.texts: list[list[list[str]]] = []
        self.errors: list[object] = []
        self.asked = 0
        self._threads = [
            threading.Thread(target=self._stream),
            threading.Thread(target=self._ask_on_one_connection),
        ]

    def _stream(self) -> None:
        while not self._ended.is_set():
            seen = stream_all(self._url, "tiny", self._prompts, self._tokens)
            self.errors += [one.error for one in seen if one.error]
            self.texts.append([one.texts for one in seen])

    def _ask_on_one_connection(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._ended.is_set():
                try:
                    reply = client.get("/v1/models")
                    self.errors += [] if reply.status_code == 200 else [reply.text]
                except httpx.HTTPError as error:
                    self.errors.append(error)
                self.asked += 1
                self._begun.set()
                self._ended.wait(0.02)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        assert self._begun.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("pool", ROLLED)
def test_a_pool_is_rolled_under_load_and_nothing_changes(rolled: LocalCluster, events: list[str], pool: str) -> None:
    calm = [one.texts for one in stream_all(rolled.url, "tiny", PROMPTS, TOKENS)]
    before = {name: pid for name, pid in rolled.pids().items() if name.startswith(pool)}
    begun = len(events)
    client = RouterClient(rolled.router_address)
    lines: list[str] = []
    try:
        with Load(rolled.url, PROMPTS, TOKENS) as load:
            Roll(rolled.url, client, wait_s=90, drain_s=10, show=lines.append).roll([pool])
    finally:
        client.close()
    logging.info("%s", lines)
    assert load.errors == []
    assert load.asked > 2
    assert all(texts == calm for texts in load.texts), f"{len(load.texts)} rounds"
    wait_for("the ends", lambda: not set(before.values()) & set(rolled.pids().values()), rolled)
    after = {name: pid for name, pid in rolled.pids().items() if name.startswith(pool)}
    assert len(after) == len(before)
    assert len(lines) == len(before)

    def ended() -> list[str]:
        return [event for event in events[begun:] if " ended " in event]

    # A process is out of the table a moment before its end is told.
    wait_for("the words on the ends", lambda: len(ended()) >= len(before), rolled)
    assert len(ended()) == len(before), ended()
    assert all("exit status 0" in event for event in ended()), ended()

    def states() -> set[str]:
        return {member["state"] for member in fetch_status(rolled.url)["members"]}

    wait_for("everyone serves", lambda: states() == {"serving"}, rolled)


def test_no_process_that_was_replaced_logged_an_error(rolled: LocalCluster) -> None:
    for log in rolled.state_dir.glob("*.log"):
        found = [line for line in log.read_text().splitlines() if " ERROR " in line or "Traceback" in line]
        assert found == [], log.name
