"""Views over a stream: what differs is told, once for all, and followed from exactly one View."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from router.client import RouterClient
from router.core import step
from router.events import Exited, Renewed, Suspected, Tick
from router.messages import view_of_message
from router.proto import router_pb2 as pb
from router.proto import router_pb2_grpc as rpc
from router.publication import Publication
from router.records import view_of
from router.state import MemberRecord, State
from router.view import View
from tests.router.told import Told, cluster


def bare(view: View) -> View:
    """Without loads, which a View has as they were when its member changed."""
    return replace(view, members=tuple(replace(member, load={}) for member in view.members))


def told(message: bytes, before: View | None) -> View | None:
    return view_of_message(pb.View.FromString(message), before)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_skips_views_has_at_last_the_same_as_who_saw_each(seed: int) -> None:
    dice = random.Random(seed)
    known = Told(step, experts_wanted=3, attention_wanted=2, replicas=2)
    publication = Publication()
    followed: list[View | None] = [None] * 4
    for turn in range(60):
        members = list(known.state.members.values())
        happens = dice.random()
        if happens < 0.3 or not members:
            known.join(dice.choice(("expert", "expert", "attention", "gateway")), experts=6)
        elif happens < 0.45:
            one = dice.choice(members)
            known.give(Exited(host=one.host, pid=one.pid))
        elif happens < 0.6:
            one = dice.choice(members)
            suspected = Suspected(by="", name=one.name, incarnation=one.incarnation, reason="")
            known.give(suspected)
        known.load_all()
        for record in known.state.members.values():
            known.give(Renewed(name=record.name, incarnation=record.incarnation, load={"busy": dice.random()}))
        known.give(Tick(), after_s=0.1)
        if known.state.epoch == publication.epoch:
            continue
        publication.publish(known.config, known.state)
        for number, view in enumerate(followed):
            if dice.random() < 0.2 * (number + 1):
                since = view.epoch if view is not None and dice.random() < 0.9 else 0
                followed[number] = now = told(publication.since(since), view)
                assert now is not None and bare(now) == bare(view_of(known.config, known.state)), (seed, turn)
    assert known.state.epoch > 20, seed


def test_a_difference_is_followed_from_its_own_view_alone() -> None:
    known = cluster(step, servers=3, experts=6)
    publication = Publication()
    publication.publish(known.config, known.state)
    base = told(publication.since(0), None)
    assert base is not None
    known.give(Exited(host="h", pid=1))
    publication.publish(known.config, known.state)
    message = publication.since(base.epoch)
    later = told(message, base)
    assert later is not None and later.member("expert/1") is None
    for other in (None, replace(base, epoch=base.epoch - 1), replace(base, salt=base.salt + 1), later):
        assert told(message, other) is None, other
    assert told(publication.since(0), later) == later


def test_who_has_seen_none_of_many_that_went_is_told_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.publication._GONE_KEPT", 2)
    known, publication = cluster(step, servers=6, experts=6), Publication()
    publication.publish(known.config, known.state)
    base = told(publication.since(0), None)
    assert base is not None
    for pid in (1, 2, 3):
        known.give(Exited(host="h", pid=pid))
        publication.publish(known.config, known.state)
    message = pb.View.FromString(publication.since(base.epoch))
    assert message.since == 0
    now = view_of_message(message, base)
    assert now is not None and len(now.pool("expert")) == 3


def test_a_difference_says_what_differs_and_is_written_once() -> None:
    members = {
        f"expert/{n}": MemberRecord(name=f"expert/{n}", pool="expert", incarnation=n, address="a", pid=n, host="h")
        for n in range(1, 401)
    }
    known = cluster(step)
    liveness = dict.fromkeys(members, known.state.liveness["expert/1"])
    state = replace(known.state, members=members, liveness=liveness, epoch=100)
    publication = Publication()
    publication.publish(known.config, state)
    changed: State = replace(
        state,
        epoch=101,
        members={n: replace(r, target=3) if n == "expert/7" else r for n, r in members.items() if n != "expert/9"},
    )
    publication.publish(known.config, changed)
    message = pb.View.FromString(publication.since(100))
    assert ([m.name for m in message.members], list(message.gone)) == (["expert/7"], ["expert/9"])
    assert publication.since(100) is publication.since(100)
    assert len(publication.since(100)) < 300 < len(publication.since(0))


class Forgetful(rpc.RouterServicer):
    """Says on its first stream what differs from a View that it never sent there."""

    def __init__(self) -> None:
        known = cluster(step, servers=3, experts=6)
        publication = Publication()
        publication.publish(known.config, known.state)
        first = publication.since(0)
        known.give(Exited(host="h", pid=1))
        publication.publish(known.config, known.state)
        lost = known.state.epoch
        known.give(Exited(host="h", pid=2))
        publication.publish(known.config, known.state)
        self.streams = [[first, publication.since(lost)], [publication.since(0)]]
        self.newest = view_of(known.config, known.state)
        self.opened = 0

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.View]:
        self.opened += 1
        yield from map(pb.View.FromString, self.streams[min(self.opened, 2) - 1])
        while context.is_active():
            time.sleep(0.05)


def test_a_lost_difference_is_not_missed_for_long() -> None:
    router, server = Forgetful(), grpc.server(ThreadPoolExecutor(4))
    rpc.add_RouterServicer_to_server(router, server)
    client = RouterClient(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    views: list[View] = []
    seen = threading.Event()

    def see(view: View) -> None:
        views.append(view)
        if view.epoch == router.newest.epoch:
            seen.set()

    client.start(on_view=see)
    try:
        assert seen.wait(60), [view.epoch for view in views]
        assert bare(views[-1]) == bare(router.newest)
        assert (router.opened, len(views)) == (2, 2), "what was not followed was shown"
    finally:
        client.close()
        server.stop(None)
