"""What is said of a member that is retired, and of records and processes of another release."""

from __future__ import annotations

import pytest

from router.core import step
from router.events import Exited, Join, LauncherDetached, Left, Refused, Tick
from router.journal import record_of, record_text
from router.messages import from_message
from router.proto import router_pb2 as pb
from router.retiring import retirement, retirements
from router.state import MemberRecord
from router.view import PROTOCOL
from tests.router.retire_stories import retire
from tests.router.told import cluster, rest


def test_who_is_retired_says_what_it_waits_for_until_its_process_may_end() -> None:
    told = cluster(step, replicas=1, servers=2, workers=2, experts=6)
    assert retirements(told.state) == () and retirement(told.state, "expert/1") is None
    retire(told, "expert/1", "a")
    (going,) = retirements(told.state)
    assert (going.name, going.operation, going.asked_unix_s) == ("expert/1", "a", 5.0)
    assert (going.state, going.waits_for) == ("waiting", "a process that takes its place")
    assert going.only_here == 3 and not going.safe_to_terminate
    told.join(experts=6)
    told.give(Tick(), after_s=0.1)
    going = retirement(told.state, "expert/1")
    assert going is not None and (going.state, going.waits_for) == ("waiting", "expert/3 does not serve yet")
    told.give(LauncherDetached(host="h"))
    rest(told, rounds=1, but="expert/3")
    rest(told)
    going = retirement(told.state, "expert/1")
    assert going is not None and (going.state, going.safe_to_terminate) == ("gone", True)
    assert retirements(told.state) == ()


def test_the_last_of_what_it_serves_and_of_its_streams_is_counted() -> None:
    told = cluster(step, replicas=1, servers=2)
    told.give(LauncherDetached(host="h"))
    retire(told, "expert/1")
    retire(told, "attention/1")
    rest(told, rounds=1, load={"running": 2.0, "waiting": 1.0}, but="expert/2")
    rest(told, rounds=3, load={"running": 2.0, "waiting": 1.0}, but="expert/2")
    expert, worker = retirements(told.state)
    assert (expert.state, expert.only_here) == ("draining", 1)
    assert expert.waits_for == "verified copies of its experts elsewhere, and the last calls"
    assert (worker.state, worker.running) == ("waiting", 3)
    assert worker.waits_for == "another attention worker that serves"


def test_a_gateway_that_fell_silent_is_not_said_to_be_safe_to_end() -> None:
    told = cluster(step)
    joins = Join(pool="gateway", address="127.0.0.1:8000", pid=900, host="h")
    told.give(joins)
    retire(told, "gateway/1")
    going = retirement(told.state, "gateway/1")
    assert going is not None and going.waits_for == "another gateway that serves"
    for _ in range(40):
        for name in told.state.members:
            if name != "gateway/1":
                told.renew(name)
        told.give(Tick(), after_s=0.1)
    assert "gateway/1" not in told.state.members
    going = retirement(told.state, "gateway/1")
    assert going is not None and not going.safe_to_terminate
    assert going.waits_for.startswith("word of its process, which was silent for")
    told.give(joins)
    going = retirement(told.state, "gateway/1")
    assert going is not None and (going.name, going.state) == ("gateway/2", "draining")
    told.give(Left(name="gateway/2", incarnation=told.state.members["gateway/2"].incarnation, drain=False))
    going = retirement(told.state, "gateway/1")
    assert going is not None and going.safe_to_terminate


def test_a_gateway_that_ended_is_safe_to_end() -> None:
    told = cluster(step)
    told.give(Join(pool="gateway", address="127.0.0.1:8000", pid=900, host="h"))
    retire(told, "gateway/1")
    told.give(Exited(host="h", pid=900))
    going = retirement(told.state, "gateway/1")
    assert going is not None and going.safe_to_terminate


def test_a_record_of_an_older_router_is_read() -> None:
    record = MemberRecord(name="expert/1", pool="expert", incarnation=7, address="a", pid=1, host="h")
    text = record_text(record).replace(', "operation": ""', ', "leaving": false')
    assert "operation" not in text
    assert record_of(text) == record


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1])
def test_a_process_of_another_protocol_is_refused_in_clear_words(protocol: int) -> None:
    told = cluster(step)
    join = from_message(Join, pb.JoinRequest(pool="attention", address="a", pid=77, host="h", protocol=protocol))
    (refused,) = told.give(join)
    assert isinstance(refused, Refused)
    assert f"protocol {protocol or 'none'} found, {PROTOCOL} needed" in refused.message
    assert "same release" in refused.message
