"""Servers that clients report for corrupt replies: who is believed, and what a liar can cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from router.events import Command, Fenced, Join, Renewed, StartProcess, Tick
from router.liveness import AGAIN_S
from router.pools import pool_size
from tests.router.told import Step, Told, cluster

OK = {"servers_ok": 4.0}
Loads = Mapping[str, Mapping[str, float]]


def reports(*numbers: int, reached: float = 4.0) -> dict[str, float]:
    """The load of a client that reports these servers."""
    return {"servers_ok": reached, **{f"corrupt:expert/{number}": 3.0 for number in numbers}}


def by_all(told: Told, load: dict[str, float]) -> dict[str, dict[str, float]]:
    return {name: load for name, record in told.state.members.items() if record.pool == "attention"}


def run(told: Told, loads: Loads, seconds: float, mute: str = "", replaced: bool = True) -> list[Command]:
    """Everyone but `mute` renews, with these loads; the servers load, and those ordered join."""
    commands: list[Command] = []
    ends_s = told.now_s + seconds
    while told.now_s < ends_s:
        for name, record in list(told.state.members.items()):
            if name == mute:
                continue
            told.give(Renewed(name=name, incarnation=record.incarnation, load=loads.get(name, {})))
            if record.pool == "attention":
                told.ack(name)
        told.load_all()
        given = told.give(Tick(), after_s=0.1)
        for command in given if replaced else ():
            if isinstance(command, StartProcess):
                told.join(command.pool, experts=told.state.models[0].experts)
        commands += given
    return commands


def fenced(commands: list[Command]) -> list[str]:
    return [command.name for command in commands if isinstance(command, Fenced)]


def a_server_that_the_clients_accuse_is_fenced_within_a_second_and_replaced(step: Step) -> None:
    told = cluster(step, servers=4, workers=2)
    commands = run(told, by_all(told, reports(3)), 1.0)
    assert fenced(commands) == ["expert/3"]
    assert [c.pool for c in commands if isinstance(c, StartProcess)] == ["expert"]


def the_only_client_is_believed(step: Step) -> None:
    told = cluster(step, servers=4)
    assert fenced(run(told, by_all(told, reports(3)), 1.0)) == ["expert/3"]


def an_accusation_that_is_taken_back_at_once_fences_nobody(step: Step) -> None:
    told = cluster(step, servers=4, workers=2)
    three = by_all(told, reports(3))
    assert not fenced(run(told, three, 0.3)) and not fenced(run(told, {}, 0.3))
    assert not fenced(run(told, three, 0.3)), "the time begins anew"


def who_reports_more_than_one_and_a_quarter_is_not_believed(step: Step) -> None:
    told = cluster(step, servers=4, workers=2)
    assert not fenced(run(told, by_all(told, reports(1, 3)), 5.0))
    assert not told.state.suspects


def whoever_says_that_it_reaches_more_than_there_are_is_believed_no_more_for_it(step: Step) -> None:
    told = cluster(step, servers=4)
    assert not fenced(run(told, by_all(told, reports(1, 2, 3, reached=1e9)), 5.0))
    assert not fenced(run(told, by_all(told, reports(1, 2, 3, reached=float("nan"))), 5.0))


def who_reaches_only_whom_it_accuses_is_not_believed(step: Step) -> None:
    told = cluster(step, servers=4)
    assert not fenced(run(told, by_all(told, reports(3, reached=1.0)), 5.0))


def fewer_liars_than_honest_clients_cost_nothing(step: Step) -> None:
    for workers in (2, 3, 5):
        told = cluster(step, servers=4, workers=workers)
        liars = [f"attention/{number + 1}" for number in range(max(1, (workers - 1) // 2))]
        honest = by_all(told, OK)
        for number in (1, 2, 3):
            lies = honest | dict.fromkeys(liars, reports(number))
            assert not fenced(run(told, lies, 3.0))
        apart = {liar: reports(number + 1) for number, liar in enumerate(liars)}
        assert not fenced(run(told, honest | apart, 3.0))


def if_all_lie_it_costs_a_server_an_hour(step: Step) -> None:
    for workers in (1, 2):
        told = cluster(step, servers=4, workers=workers)
        taken: list[str] = []
        for number in (1, 2, 3, 4):
            taken += fenced(run(told, by_all(told, reports(number)), 3.0))
        assert taken == ["expert/1"]
        told.now_s = told.state.next_corruption_s - 1.0
        assert told.state.next_corruption_s > AGAIN_S
        assert fenced(run(told, by_all(told, reports(2)), 5.0)) == ["expert/2"]


def none_goes_while_another_is_missing(step: Step) -> None:
    told = cluster(step, servers=4)
    assert not fenced(run(told, {}, 1.5, mute="expert/1"))
    assert told.state.suspects == {"expert/1"}
    assert fenced(run(told, by_all(told, reports(3)), 3.0, mute="expert/1", replaced=False)) == ["expert/1"]
    assert not fenced(run(told, by_all(told, reports(3)), 5.0, replaced=False))
    told.join("expert")
    assert fenced(run(told, by_all(told, reports(3)), 5.0)) == ["expert/3"]


def a_client_that_falls_silent_upon_its_word_is_not_believed(step: Step) -> None:
    told = cluster(step, servers=4)
    run(told, by_all(told, reports(3)), 0.1)
    assert "expert/3" not in fenced(run(told, {}, 1.5, mute="attention/1"))


def a_client_that_has_just_joined_has_no_say(step: Step) -> None:
    told = cluster(step, servers=4)
    joined = told.give(Join(pool="attention", address="a", pid=99, host="h"))
    assert joined and "attention/2" in told.state.members
    loads = {"attention/1": reports(3)}
    while told.now_s < 102.0:
        for name in [n for n in told.state.members if n != "attention/2"]:
            incarnation = told.state.members[name].incarnation
            told.give(Renewed(name=name, incarnation=incarnation, load=loads.get(name, {})))
        told.give(Tick(), after_s=0.1)
    assert "expert/3" not in told.state.members


def a_last_replica_is_fenced_only_once_its_experts_are_served_elsewhere(step: Step) -> None:
    told = cluster(step, servers=4, replicas=1, experts=8)
    mine = told.state.members["expert/3"].serving
    assert mine
    commands: list[Command] = []
    while not fenced(commands):
        commands = run(told, by_all(told, reports(3)), 0.1)
        assert told.now_s < 130, "never fenced"
    elsewhere = 0
    for record in told.state.members.values():
        elsewhere |= record.serving
    assert not mine & ~elsewhere


def who_may_not_go_yet_stays_suspect_and_its_experts_stay_copied(step: Step) -> None:
    """Without its suspicion the copies went, and it held last replicas again: a move every few seconds, for an hour."""
    told = cluster(step, servers=4, replicas=1, experts=8)
    assert "expert/2" in fenced(run(told, by_all(told, reports(2)), 10.0))
    run(told, {}, 5.0)
    assert not fenced(run(told, by_all(told, reports(3)), 5.0))
    epoch = told.state.epoch
    for _ in range(20):
        run(told, by_all(told, reports(3)), 1.0)
        assert "expert/3" in told.state.suspects
    assert told.state.epoch == epoch
    run(told, {}, 5.0)
    assert not told.state.suspects


def who_holds_up_a_drain_is_named(step: Step) -> None:
    """While one is suspect nobody drains, and a last replica that is accused is."""
    told = cluster(step, servers=4, replicas=1, experts=8)
    run(told, by_all(told, reports(3)), 0.1)
    assert pool_size(told.config, told.state, "expert").held_up == ""
    told.join("expert", experts=8)
    assert pool_size(told.config, told.state, "expert").held_up == "expert/5 does not serve yet"
    told = cluster(step, servers=4, replicas=1, experts=8)
    told.state = replace(told.state, wanted={**told.state.wanted, "expert": 3})
    given: list[str] = []
    for _ in range(20):
        run(told, by_all(told, reports(3)), 0.1)
        given.append(pool_size(told.config, told.state, "expert").held_up)
    assert "expert/3 is suspect: it is said to give corrupt replies" in given, given


def the_only_server_stays(step: Step) -> None:
    told = cluster(step, servers=1, replicas=1)
    assert not fenced(run(told, by_all(told, reports(1, reached=2.0)), 5.0))


def join_clients(told: Told, count: int, pid: int) -> list[str]:
    """So many clients of one process, ready to speak."""
    names: list[str] = []
    for _ in range(count):
        told.pids = pid - 1
        names.append(told.join("client"))
        told.ack(names[-1])
    return names


def clients_neither_outvote_attention_workers_nor_shield_a_server_from_them(step: Step) -> None:
    told = cluster(step, servers=4, workers=2)
    clients = [name for pid in range(91, 96) for name in join_clients(told, 1, pid)]
    assert not fenced(run(told, by_all(told, OK) | dict.fromkeys(clients, reports(3)), 3.0))
    loads = by_all(told, reports(3)) | dict.fromkeys(clients, OK)
    assert fenced(run(told, loads, 1.0)) == ["expert/3"]


def in_a_pool_of_clients_alone_a_process_has_one_voice(step: Step) -> None:
    told = cluster(step, servers=4, workers=0)
    liars = join_clients(told, 5, 91)
    honest = join_clients(told, 1, 92) + join_clients(told, 1, 93)
    lies = dict.fromkeys(liars, reports(3))
    assert not fenced(run(told, lies | dict.fromkeys(honest, OK), 3.0))
    assert fenced(run(told, lies | dict.fromkeys(honest, reports(3)), 1.0)) == ["expert/3"]


def who_cannot_ask_a_server_has_no_say_about_it(step: Step) -> None:
    told = Told(step, experts_wanted=4, attention_wanted=2, replicas=2)
    cpu, cuda = "cpu-bf16-fma-1", "cuda-sm90-bf16-1"
    for pool, numerics_class in (*[("expert", cpu)] * 4, ("attention", cpu), ("attention", cuda)):
        told.join(pool, numerics_class=numerics_class)
    told.load_all()
    told.ack("attention/1")
    told.ack("attention/2")
    assert not fenced(run(told, {"attention/1": OK, "attention/2": reports(3)}, 3.0))
    assert fenced(run(told, {"attention/1": reports(3), "attention/2": OK}, 1.0)) == ["expert/3"]


CORRUPTION_STORIES = (
    a_server_that_the_clients_accuse_is_fenced_within_a_second_and_replaced,
    the_only_client_is_believed,
    an_accusation_that_is_taken_back_at_once_fences_nobody,
    who_reports_more_than_one_and_a_quarter_is_not_believed,
    whoever_says_that_it_reaches_more_than_there_are_is_believed_no_more_for_it,
    who_reaches_only_whom_it_accuses_is_not_believed,
    fewer_liars_than_honest_clients_cost_nothing,
    if_all_lie_it_costs_a_server_an_hour,
    none_goes_while_another_is_missing,
    a_client_that_falls_silent_upon_its_word_is_not_believed,
    a_client_that_has_just_joined_has_no_say,
    a_last_replica_is_fenced_only_once_its_experts_are_served_elsewhere,
    who_may_not_go_yet_stays_suspect_and_its_experts_stay_copied,
    who_holds_up_a_drain_is_named,
    the_only_server_stays,
    clients_neither_outvote_attention_workers_nor_shield_a_server_from_them,
    in_a_pool_of_clients_alone_a_process_has_one_voice,
    who_cannot_ask_a_server_has_no_say_about_it,
)
