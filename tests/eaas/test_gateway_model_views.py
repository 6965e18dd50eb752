"""What one gateway makes of the models of each View, in the test's own process: whom it serves, and what it tells."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eaas.gateway import gateway as module
from eaas.gateway.config import GatewayConfig
from eaas.gateway.dashboard.history import ClusterSnapshot
from eaas.gateway.errors import ApiError
from eaas.gateway.failover import Sequence
from eaas.gateway.gateway import Gateway, Served
from eaas.gateway.served_model import load_model
from eaas.worker.protocol import SamplingParams
from router.view import Model, View
from tests.eaas.gateway_world import World
from tests.eaas.test_gateway_models import OTHER_LEN, hash_of, other_model


class Views:
    """What a test shows to a gateway of its own process."""

    name = "gateway/7"
    load: Callable[[], Mapping[str, float]]

    def start(self, on_view: Callable[[View], None], load: Callable[[], Mapping[str, float]]) -> None:
        self.load = load

    def snapshot(self, *, rows: bool = True) -> ClusterSnapshot:
        return ClusterSnapshot(view=None, heard=False)

    def suspect(self, name: str, incarnation: int, reason: str) -> None: ...

    def scale(self, pool: str, wanted: int, drain_s: float | None) -> None: ...

    def close(self) -> None: ...


@dataclass
class Inside:
    """A gateway in the test's own process, with model "tiny" and a folder of model "b"."""

    gateway: Gateway
    views: Views
    own: Model
    other: Model
    epoch: int = 0

    def show(self, *models: Model) -> None:
        self.epoch += 1
        view = View(term=1, epoch=self.epoch, replicas_wanted=1, layers=2, experts=4, models=models)
        self.gateway.follow(view)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        end_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end_s, what
            await asyncio.sleep(0.005)

    def held(self) -> dict[str, float]:
        """What is told of each model, by its number."""
        found = {w.removeprefix("model:"): n for w, n in self.views.load().items() if w.startswith("model:")}
        return {word: n for word, n in found.items() if ":" not in word}

    def waits(self, model: Model) -> float | None:
        """What is told of choices of one model that wait; None: nothing is."""
        return self.views.load().get(f"model:{model.number}:waiting")


@asynccontextmanager
async def inside(world: World, folder: Path) -> AsyncIterator[Inside]:
    views, shape = Views(), cast(dict[str, Any], {"layers": 2, "experts": 4})
    model = load_model(world.model, "tiny")
    config = GatewayConfig()
    gateway = Gateway(config=config, model=model, views=views, version="0", address="here:1")
    own = Model(hash=world.model_hash, number=draw_number(), **shape)
    other = Model(hash=hash_of(folder), name="b", path=str(folder), number=own.number + 3, base=8, **shape)
    async with gateway.lifespan(cast(Any, None)):
        yield Inside(gateway, views, own, other)


def draw_number() -> int:
    return random.Random(time.time_ns()).randrange(1, 100)


def waiting_at(served: Served, id: str) -> Sequence:
    """A choice that waits for a worker."""
    ended = cast(Any, SimpleNamespace(fail=lambda _: None))
    sequence = Sequence(id=id, prompt=[1, 2], params=SamplingParams(max_tokens=2), choice=ended, generation=ended)
    served.pool.submit(sequence)
    return sequence


def test_the_router_is_told_what_is_held_for_each_model_and_which_takes_more(world: World, tmp_path: Path) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)

    async def scenario() -> None:
        async with inside(world, other_model(tmp_path / "b")) as at:
            own, other = str(at.own.number), str(at.other.number)
            assert at.held() == {}
            at.show(at.own, at.other)
            # Of one that is not here yet nothing is held.
            assert at.held() == {own: 1}
            assert at.waits(at.own) is None, "of one model alone everything is told already"
            await at.until(lambda: "b" in at.gateway.models, "its load")
            assert at.held() == {own: 1, other: 1}
            pool, count = at.gateway.models["b"].pool, draw.randint(2, 6)
            sequences = [waiting_at(at.gateway.models["b"], f"s{n}") for n in range(count)]
            assert at.held() == {own: 1, other: count + 1}, seed
            assert (at.waits(at.own), at.waits(at.other)) == (0, count), seed
            # Neither who reads slowly nor an operator who has all wait makes it fewer.
            pool.pause(sequences[: draw.randint(1, count)])
            pool.hold(held=True)
            assert at.held() == {own: 1, other: count + 1}, seed
            at.show(at.own, replace(at.other, leaving=True))
            assert at.held() == {own: 1, other: count}, seed
            left = draw.randint(1, count - 1)
            pool.cancel(sequences[left:])
            assert at.held() == {own: 1, other: left}, seed
            pool.cancel(sequences)
            assert at.held() == {own: 1, other: 0}
            # A request that was let in, of which nothing is submitted yet.
            at.gateway.models["b"].running += 1
            assert at.held() == {own: 1, other: 1}
            at.gateway.models["b"].running -= 1
            at.show(at.own)
            assert at.held() == {own: 1}

    asyncio.run(scenario())


def reply_of(gateway: Gateway, name: str, *, begun: bool = False) -> int:
    """The status with which a model is refused, 200 where it is there."""
    try:
        gateway.find(name, begun=begun)
    except ApiError as error:
        assert (error.reply.status == 503) == (error.reply.retry_after_s is not None)
        return error.reply.status
    return 200


def test_what_the_view_names_is_refused_for_a_while_alone_until_its_checkpoint_is_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, read = threading.Event(), module.load_model

    def slow(*args: Any, **more: Any) -> Any:
        assert later.wait(60)
        return read(*args, **more)

    async def scenario(first: bool) -> None:
        async with inside(world, other_model(tmp_path / "b")) as at:
            # Whether there is a model of that name is not known before the first View.
            assert reply_of(at.gateway, "b") == 503 and reply_of(at.gateway, "tiny") == 200
            if not first:
                at.show(at.own)
                assert reply_of(at.gateway, "b") == 404
            at.show(at.own, at.other)
            assert (reply_of(at.gateway, "b"), reply_of(at.gateway, "c")) == (503, 404)
            assert ("model b: its checkpoint is not read yet" in at.gateway.unready_reason()) == first
            at.show(at.own, replace(at.other, leaving=True))
            assert reply_of(at.gateway, "b") == 404 and "checkpoint" not in at.gateway.unready_reason()
            at.show(at.own, at.other)
            later.set()
            await at.until(lambda: reply_of(at.gateway, "b") == 200, "its load")
            assert "checkpoint" not in at.gateway.unready_reason()
            later.clear()

    monkeypatch.setattr(module, "load_model", slow)
    for first in (True, False):
        asyncio.run(scenario(first))


def test_a_checkpoint_that_could_not_be_read_is_tried_again_by_and_by(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left, read = (
        [OSError("it is away"), RuntimeError("a fault of ours"), ValueError("and another")],
        load_model,
    )

    def failing(*args: Any, **more: Any) -> Any:
        if left:
            raise left.pop(0)
        return read(*args, **more)

    async def scenario() -> None:
        async with inside(world, other_model(tmp_path / "b")) as at:
            at.show(at.own, at.other)
            await at.until(lambda: reply_of(at.gateway, "b") == 200, "its load")

    monkeypatch.setattr(module, "load_model", failing)
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    asyncio.run(scenario())
    said = [each for each in caplog.records if "model_not_served" in each.getMessage()]
    assert [each.getMessage().rpartition("=")[2] for each in said] == [
        "it is away", "a fault of ours", "and another",
    ]  # fmt: skip
    assert [bool(each.exc_info) for each in said] == [False, True, True]


def test_a_model_that_leaves_is_no_hindrance_to_the_next_of_its_name(world: World, tmp_path: Path) -> None:
    folder = other_model(tmp_path / "next", "N", OTHER_LEN * 2)

    def labels(gateway: Gateway) -> list[str]:
        """The models of one family, each of which must be there once."""
        page = gateway.metrics.page().decode()
        series = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
        assert len(series) == len({*series})
        return re.findall(r'^eaas_running{model="(.*)"}', page, re.M)

    async def scenario(leaver: str) -> None:
        async with inside(world, other_model(tmp_path / "b")) as at:
            at.show(at.own, at.other)
            await at.until(lambda: "b" in at.gateway.models, "its load")
            old = at.gateway.models[leaver]
            sequence = waiting_at(old, "s")
            first, second = (
                replace(entry, leaving=old.model.fingerprint == entry.hash) for entry in (at.own, at.other)
            )
            at.show(first, second)
            assert reply_of(at.gateway, leaver) == 404
            successor = replace(
                at.other, hash=hash_of(folder), name=leaver, path=str(folder), number=at.other.number + 1
            )
            at.show(first, second, successor)
            # Which is not here yet, and comes.
            assert reply_of(at.gateway, leaver) == 503
            await at.until(lambda: reply_of(at.gateway, leaver) == 200, "its successor")
            assert at.gateway.find(leaver).model.fingerprint == successor.hash
            assert at.gateway.listed.keys() == {"tiny", "b"}
            told = f"{leaver}@{old.model.fingerprint[:12]}"
            assert sorted(labels(at.gateway)) == sorted(["tiny", "b", told])
            number = at.own.number if leaver == "tiny" else at.other.number
            assert at.held()[str(number)] == 1 and at.held()[str(successor.number)] == 1
            # Gone from the View it still ends what it runs.
            at.show(*(entry for entry in (first, second) if not entry.leaving), successor)
            assert old in at.gateway.all() and sorted(labels(at.gateway)) == sorted(["tiny", "b", told])
            old.pool.cancel([sequence])
            at.gateway.let_go()
            assert (old in at.gateway.all()) == (leaver == "tiny")

    for leaver in ("b", "tiny"):
        asyncio.run(scenario(leaver))
