"""A member that is to be replaced goes only when another has come, whoever restarts meanwhile."""

from __future__ import annotations

import pytest

from router.core import step
from router.events import Exited, Join, Left, Refused, Scale, Started, StartProcess, StopProcess, Tick
from router.journal import record_of, record_text
from router.messages import from_message
from router.proto import router_pb2 as pb
from router.state import MemberRecord
from router.view import PROTOCOL
from tests.router.told import Told, cluster, rest


def replace(told: Told, name: str) -> list[object]:
    incarnation = told.state.members[name].incarnation
    return list(told.give(Left(name=name, incarnation=incarnation, drain=True, replace=True)))


@pytest.mark.parametrize("name", ["expert/1", "attention/1"])
def test_it_serves_until_its_successor_does(name: str) -> None:
    told = cluster(step)
    pool = name.partition("/")[0]
    commands = replace(told, name)
    assert [c.pool for c in commands if isinstance(c, StartProcess)] == [pool]
    for _ in range(20):
        told.give(Tick(), after_s=0.1)
        rest(told, rounds=1, load={"running": 1.0})
        assert not told.state.members[name].draining, "nobody has come"
    told.join(pool)
    rest(told, load={"running": 0.0})
    assert name not in told.state.members
    assert told.state.gone[-1].reason == "drained" or pool == "expert"
    members = [record for record in told.state.members.values() if record.pool == pool]
    assert len(members) == told.state.wanted[pool]
    assert not any(record.draining or record.leaving for record in members)


def test_of_a_pool_that_is_too_large_the_one_to_be_replaced_goes_first() -> None:
    told = cluster(step, servers=3)
    told.give(Scale(pool="expert", wanted=4))
    told.join()
    rest(told)
    told.give(Scale(pool="expert", wanted=3))
    commands = replace(told, "expert/2")
    assert not [c for c in commands if isinstance(c, StartProcess)], "the fourth is its successor"
    told.give(Tick(), after_s=0.1)
    assert [r.name for r in told.state.members.values() if r.draining] == ["expert/2"]


def test_one_that_dies_before_is_replaced_once() -> None:
    told = cluster(step)
    replace(told, "expert/1")
    commands = told.give(Exited(host="h", pid=1))
    assert not [c for c in commands if isinstance(c, StartProcess)], "its successor has been ordered already"
    told.join()
    rest(told)
    assert len([r for r in told.state.members.values() if r.pool == "expert"]) == 2


def test_a_restarted_router_goes_on_with_it() -> None:
    told = cluster(step)
    replace(told, "expert/1")
    record = record_of(record_text(told.state.members["expert/1"]))
    assert record.leaving
    told.give(Started(salt=1))
    assert told.state.members["expert/1"].leaving


def test_a_record_of_an_older_router_is_read() -> None:
    record = MemberRecord(name="expert/1", pool="expert", incarnation=7, address="a", pid=1, host="h")
    text = record_text(record).replace(', "leaving": false', "")
    assert "leaving" not in text
    assert record_of(text) == record


def test_a_gateway_drains_at_once_and_is_never_ended_by_the_router() -> None:
    told = cluster(step)
    told.give(Join(pool="gateway", address="127.0.0.1:8000", pid=900, host="h"))
    commands = replace(told, "gateway/1")
    assert told.state.members["gateway/1"].draining
    assert not [c for c in commands if isinstance(c, StartProcess)], "its launcher sees it drain"
    for _ in range(20):
        commands = []
        rest(told, rounds=50)
    assert told.state.members["gateway/1"].draining
    assert not [c for c in commands if isinstance(c, StopProcess)]


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1])
def test_a_process_of_another_protocol_is_refused_in_clear_words(protocol: int) -> None:
    told = cluster(step)
    join = from_message(
        Join, pb.JoinRequest(pool="attention", address="a", pid=77, host="h", protocol=protocol)
    )
    (refused,) = told.give(join)
    assert isinstance(refused, Refused)
    assert f"protocol {protocol or 'none'} found, {PROTOCOL} needed" in refused.message
    assert "same release" in refused.message
