"""Stories of members that an operator retires by name."""

from __future__ import annotations

from router.events import (
    Command,
    Exited,
    Fenced,
    Join,
    LauncherDetached,
    Left,
    Loaded,
    Refused,
    Renewed,
    Retire,
    Scale,
    Started,
    StartProcess,
    StopProcess,
    Tick,
    UnknownMember,
)
from router.journal import record_of, record_text
from tests.router.told import Step, Told, cluster, rest


def retire(told: Told, name: str, operation: str = "") -> list[Command]:
    """An operator has a member go."""
    return told.give(Retire(name=name, operation=operation or f"of {name}", unix_s=5.0))


def starts(commands: list[Command]) -> list[str]:
    """Pools that a process was ordered for."""
    return [command.pool for command in commands if isinstance(command, StartProcess)]


def _serves_until_its_successor_does(step: Step, name: str) -> None:
    told = cluster(step)
    pool = name.partition("/")[0]
    assert starts(retire(told, name)) == [pool]
    for _ in range(20):
        told.give(Tick(), after_s=0.1)
        rest(told, rounds=1, load={"running": 1.0})
        assert not told.state.members[name].draining, "nobody has come"
    told.join(pool)
    rest(told, load={"running": 0.0})
    assert name not in told.state.members
    assert (told.state.gone[-1].name, told.state.gone[-1].operation) == (name, f"of {name}")
    members = [record for record in told.state.members.values() if record.pool == pool]
    assert len(members) == told.state.wanted[pool]
    assert not any(record.draining or record.operation for record in members)


def a_retired_server_serves_until_its_successor_does(step: Step) -> None:
    _serves_until_its_successor_does(step, "expert/1")


def a_retired_worker_serves_until_its_successor_does(step: Step) -> None:
    _serves_until_its_successor_does(step, "attention/1")


def of_a_pool_that_is_too_large_the_retired_goes_first(step: Step) -> None:
    told = cluster(step, servers=3)
    told.give(Scale(pool="expert", wanted=4))
    told.join()
    rest(told)
    told.give(Scale(pool="expert", wanted=3))
    assert not starts(retire(told, "expert/2")), "the fourth is its successor"
    told.give(Tick(), after_s=0.1)
    assert [r.name for r in told.state.members.values() if r.draining] == ["expert/2"]


def a_retired_member_that_dies_is_replaced_once(step: Step) -> None:
    told = cluster(step)
    retire(told, "expert/1")
    assert not starts(told.give(Exited(host="h", pid=1))), "its successor has been ordered already"
    told.join()
    rest(told)
    assert len([r for r in told.state.members.values() if r.pool == "expert"]) == 2


def a_server_that_never_comes_to_serve_can_be_retired(step: Step) -> None:
    told = cluster(step)
    told.give(Scale(pool="expert", wanted=3))
    stuck = told.join()
    rest(told, but=stuck)
    assert not told.state.members[stuck].ready
    retire(told, stuck)
    rest(told, rounds=2, but=stuck)
    assert stuck in told.state.members, "its successor has not come"
    told.join()
    rest(told, rounds=400, but=stuck)
    assert stuck not in told.state.members


def a_retirement_outlives_the_router(step: Step) -> None:
    told = cluster(step)
    retire(told, "expert/1")
    assert record_of(record_text(told.state.members["expert/1"])).operation == "of expert/1"
    told.give(Started(salt=1))
    told.join()
    for name in told.state.members:
        record = told.state.members[name]
        if record.pool == "expert":
            salt = told.state.salt
            told.give(Loaded(name=name, incarnation=record.incarnation, held=record.target, epoch=0, salt=salt))
    rest(told, rounds=60, load={"running": 0.0})
    assert "expert/1" not in told.state.members


def a_retired_gateway_drains_at_once_and_is_never_ended(step: Step) -> None:
    told = cluster(step)
    told.give(Join(pool="gateway", address="127.0.0.1:8000", pid=900, host="h"))
    assert not starts(retire(told, "gateway/1")), "its launcher sees it drain"
    assert told.state.members["gateway/1"].draining
    for _ in range(20):
        rest(told, rounds=50)
    assert told.state.members["gateway/1"].draining
    commands = told.give(Tick(), after_s=0.1)
    assert not [c for c in commands if isinstance(c, StopProcess)]


def a_gateway_is_not_what_was_retired_under_its_pid_before(step: Step) -> None:
    told = cluster(step)
    retired = told.state.members["expert/1"]
    retire(told, "expert/1")
    told.join()
    rest(told, load={"running": 0.0})
    assert told.state.gone[-1].operation == "of expert/1"
    told.give(Join(pool="gateway", address="127.0.0.1:8000", pid=retired.pid, host=retired.host))
    assert not told.state.members["gateway/1"].draining, "another container's first process"


def a_retired_gateway_that_joins_anew_still_drains(step: Step) -> None:
    told = cluster(step)
    told.give(Join(pool="gateway", address="127.0.0.1:8000", pid=900, host="h"))
    retire(told, "gateway/1")
    told.give(Join(pool="gateway", address="127.0.0.1:8000", pid=900, host="h"))
    record = told.state.members["gateway/2"]
    assert record.draining and record.operation == "of gateway/1" and record.asked_unix_s == 5.0
    assert not retire(told, "gateway/1"), "the same operation again"
    told.give(Left(name="gateway/2", incarnation=record.incarnation, drain=False))
    told.give(Join(pool="gateway", address="127.0.0.1:8000", pid=900, host="h"))
    assert not told.state.members["gateway/3"].draining, "the one that was retired has ended"


def one_operation_retires_one_member(step: Step) -> None:
    told = cluster(step, servers=3)
    retire(told, "expert/1", "a")
    members = told.state.members
    assert not retire(told, "expert/1", "a")
    (refused,) = retire(told, "expert/1", "b")
    assert isinstance(refused, Refused) and "operation a retires expert/1 already" in refused.message
    (refused,) = retire(told, "expert/2", "a")
    assert isinstance(refused, Refused) and "operation a retires expert/1" in refused.message
    (refused,) = retire(told, "expert/2", "x" * 129)
    assert isinstance(refused, Refused) and "1 to 128 printable characters needed" in refused.message
    assert [type(c) for c in retire(told, "expert/9", "c")] == [UnknownMember]
    assert told.state.members is members
    told.join()
    rest(told)
    assert "expert/1" not in told.state.members
    assert not retire(told, "expert/1", "a"), "how it ended is remembered"
    assert [type(c) for c in retire(told, "expert/1", "b")] == [UnknownMember]


def without_a_launcher_a_server_drains_at_once_but_keeps_what_only_it_serves(step: Step) -> None:
    told = cluster(step, replicas=1)
    told.give(LauncherDetached(host="h"))
    only = told.state.members["expert/1"].serving
    retire(told, "expert/1")
    told.give(Tick(), after_s=0.1)
    assert told.state.members["expert/1"].draining
    # Nobody loads the copies, for longer than any drain may last.
    for _ in range(400):
        for name in told.state.members:
            told.renew(name)
        told.ack("attention/1")
        told.give(Tick(), after_s=0.1)
        assert told.state.members["expert/1"].serving == only, "an expert is served by nobody"
    rest(told)
    assert "expert/1" not in told.state.members
    assert told.state.members["expert/2"].serving == 0b11


def the_last_worker_that_is_retired_waits_for_another(step: Step) -> None:
    told = cluster(step)
    told.give(LauncherDetached(host="h"))
    retire(told, "attention/1")
    rest(told, rounds=400, load={"running": 1.0})
    assert not told.state.members["attention/1"].draining
    told.join("attention")
    rest(told, rounds=2, load={"running": 1.0})
    assert told.state.members["attention/1"].draining
    told.give(Exited(host="h", pid=told.pids))
    rest(told, rounds=400, load={"running": 1.0})
    assert "attention/1" in told.state.members, "its streams have nowhere to go"
    told.join("attention")
    rest(told, rounds=4, load={"running": 1.0})
    assert "attention/1" not in told.state.members, "its time to drain is over, and another serves"


def a_worker_that_is_retired_goes_without_another_where_none_is_wanted(step: Step) -> None:
    told = cluster(step)
    retire(told, "attention/1")
    told.give(Scale(pool="attention", wanted=0))
    # The process that was ordered before may still come, for a minute.
    rest(told, rounds=1000, load={"running": 1.0})
    assert "attention/1" not in told.state.members


def how_a_retirement_ended_is_remembered_whoever_comes_and_goes(step: Step) -> None:
    told = cluster(step, servers=3)
    retire(told, "expert/1", "a")
    told.join()
    rest(told)
    for _ in range(200):
        name = told.join("client", experts=2)
        incarnation = told.state.members[name].incarnation
        told.give(Left(name=name, incarnation=incarnation, drain=False))
    assert not retire(told, "expert/1", "a")
    assert len(told.state.gone) <= 128


def a_client_that_is_retired_goes_when_it_is_idle(step: Step) -> None:
    told = cluster(step)
    name = told.join("client", experts=2)
    told.ack(name)
    retire(told, name)
    told.ack(name)
    incarnation = told.state.members[name].incarnation
    commands = told.give(Renewed(name=name, incarnation=incarnation, load={"running": 0.0}))
    assert [c.name for c in commands if isinstance(c, Fenced)] == [name]


def a_router_that_is_retired_is_remembered(step: Step) -> None:
    told = cluster(step)
    again = Retire(name="router/0", operation="a", router_pid=77)
    told.give(again)
    gone = told.state.gone
    assert (gone[-1].name, gone[-1].pid, gone[-1].operation) == ("router/0", 77, "a")
    told.give(again)
    assert told.state.gone is gone, "its successor is not meant"
    told.give(Retire(name="router/0", operation="b", router_pid=78))
    assert len({one.incarnation for one in told.state.gone}) == len(told.state.gone) == len(gone) + 1


RETIRE_STORIES = (
    a_retired_server_serves_until_its_successor_does,
    a_retired_worker_serves_until_its_successor_does,
    of_a_pool_that_is_too_large_the_retired_goes_first,
    a_retired_member_that_dies_is_replaced_once,
    a_server_that_never_comes_to_serve_can_be_retired,
    a_retirement_outlives_the_router,
    a_retired_gateway_drains_at_once_and_is_never_ended,
    a_gateway_is_not_what_was_retired_under_its_pid_before,
    a_retired_gateway_that_joins_anew_still_drains,
    one_operation_retires_one_member,
    without_a_launcher_a_server_drains_at_once_but_keeps_what_only_it_serves,
    the_last_worker_that_is_retired_waits_for_another,
    a_worker_that_is_retired_goes_without_another_where_none_is_wanted,
    how_a_retirement_ended_is_remembered_whoever_comes_and_goes,
    a_client_that_is_retired_goes_when_it_is_idle,
    a_router_that_is_retired_is_remembered,
)
