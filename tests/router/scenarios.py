"""Short stories with one right ending, told to a core: any core, so that planted faults meet them too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from router.events import (
    Acked,
    Exited,
    Join,
    LauncherAttached,
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
from tests.router.client_stories import CLIENT_STORIES
from tests.router.copy_stories import COPY_STORIES
from tests.router.corruption_stories import CORRUPTION_STORIES
from tests.router.hang_stories import HANG_STORIES
from tests.router.load_stories import LOAD_STORIES
from tests.router.model_stories import MODEL_STORIES
from tests.router.retire_stories import RETIRE_STORIES
from tests.router.several_stories import SEVERAL_STORIES
from tests.router.term_stories import TERM_STORIES
from tests.router.told import Step, Told, cluster, lively, rest


def a_late_report_brings_nothing_back(step: Step) -> None:
    """A server asked anew for what it unloaded does not serve it by a report from before."""
    told = Told(step)
    told.join()
    told.load_all()
    before = told.state.epoch
    told.join()
    told.load_all()
    kept = told.state.members["expert/1"].target
    assert kept.bit_count() == 1, "the newcomer must take one of two experts"
    told.give(Exited(host="h", pid=2))
    record = told.state.members["expert/1"]
    assert record.target == 0b11, "what the lost server held must be loaded again"
    told.loaded("expert/1", 0b11, before)
    assert told.state.members["expert/1"].serving == kept, "a report from before the unloading was believed"
    told.loaded("expert/1", 0b11, told.state.epoch)
    assert told.state.members["expert/1"].serving == 0b11


def failed_starts_wait_longer_each_time(step: Step) -> None:
    """A process that dies before it joins is started again, but ever later, up to a bound."""
    told = Told(step)
    told.give(LauncherAttached(host="h"))
    waits_s = []
    for pid in range(20):
        began_s = told.now_s
        commands = told.give(Exited(host="h", pid=1000 + pid, pool="expert"))
        while not any(isinstance(c, StartProcess) and c.pool == "expert" for c in commands):
            commands = told.give(Tick(), after_s=0.1)
            assert told.now_s - began_s < 60, "never tried again"
        waits_s.append(told.now_s - began_s)
    assert waits_s[0] < 1, f"first retry after {waits_s[0]:.1f} s"
    assert all(later >= earlier - 0.2 for earlier, later in pairwise(waits_s)), waits_s
    assert 29 < waits_s[-1] < 31, f"last retry after {waits_s[-1]:.1f} s"


def a_stall_of_the_router_orders_only_what_was_lost(step: Step) -> None:
    """The router is frozen, a server dies meanwhile: its exit is the first that the router hears of."""
    told = cluster(step)
    commands = told.give(Exited(host="h", pid=1), after_s=3.0)
    assert [c.pool for c in commands if isinstance(c, StartProcess)] == ["expert"], commands


def silence_of_all_orders_nothing_at_first(step: Step) -> None:
    """A host too busy to answer gets no second set of processes, unless that lasts."""
    told = cluster(step)
    quiet_s = told.now_s
    orders: list[StartProcess] = []
    while not orders and told.now_s - quiet_s < 60:
        orders += [c for c in told.give(Tick(), after_s=0.1) if isinstance(c, StartProcess)]
    assert 10 < told.now_s - quiet_s < 11, f"ordered after {told.now_s - quiet_s:.1f} s of silence"
    assert len(told.state.members) == 3, "silence of all fences nobody"


def an_event_between_ticks_meets_the_same_doubt(step: Step) -> None:
    """Leases end between two ticks: what happens before the next one orders nothing in place of the silent."""
    told = cluster(step)
    for _ in range(20):
        told.give(Tick(), after_s=0.1)
    commands = told.give(Join(pool="gateway", address="a", pid=9, host="h"), after_s=0.05)
    assert not [c for c in commands if isinstance(c, StartProcess)], commands


def a_stall_ends_no_doubt(step: Step) -> None:
    """The router doubts itself, then is frozen: the first to speak afterwards condemns nobody else."""
    told = cluster(step)
    for _ in range(25):
        told.give(Tick(), after_s=0.1)
    told.renew("expert/2", after_s=20.0)
    told.give(Tick(), after_s=0.1)
    assert len(told.state.members) == 3, told.state.gone


def who_was_replaced_in_vain_costs_a_drain(step: Step) -> None:
    """A server with last replicas falls silent, is replaced, and comes back: the newest goes, nothing is lost."""
    told = cluster(step, replicas=1)
    for _ in range(40):
        told.renew("expert/2")
        told.renew("attention/1")
        told.give(Tick(), after_s=0.1)
    assert [start.pool for start in told.state.starts] == ["expert"]
    assert set(told.state.members) == {"expert/1", "expert/2", "attention/1"}, "silence took a last replica"
    told.join()
    for _ in range(40):
        for name in list(told.state.members):
            told.renew(name)
        told.load_all()
        told.ack("attention/1")
        serving = 0
        for record in told.state.members.values():
            serving |= record.serving
        assert serving == 0b11, "an expert is served by nobody"
        told.give(Tick(), after_s=0.1)
    assert set(told.state.members) == {"expert/1", "expert/2", "attention/1"}, list(told.state.members)
    assert not told.state.starts


def who_was_not_ordered_stays(step: Step) -> None:
    """An operator may run more servers than the router orders."""
    told = cluster(step)
    told.join()
    for _ in range(40):
        for name in list(told.state.members):
            told.renew(name)
        told.load_all()
        told.ack("attention/1")
        told.give(Tick(), after_s=0.1)
    assert "expert/3" in told.state.members
    assert not any(record.draining for record in told.state.members.values())


def a_pool_that_is_too_large_drains_one_at_a_time(step: Step) -> None:
    """Four expert servers, then two wanted: the newest go, one by one, and no expert is ever without a server."""
    told = cluster(step)
    told.give(Scale(pool="expert", wanted=4))
    for _ in range(2):
        assert told.state.starts, "two more are wanted and none was ordered"
        told.join()
    rest(told)
    told.give(Scale(pool="expert", wanted=2))
    went: list[str] = []
    for _ in range(60):
        before = set(told.state.members)
        rest(told, rounds=1)
        went += sorted(before - set(told.state.members))
        assert sum(record.draining for record in told.state.members.values()) <= 1
        serving = 0
        for record in told.state.members.values():
            serving |= record.serving
        assert serving == 0b11, "an expert is served by nobody"
    assert went == ["expert/4", "expert/3"], went


def nobody_else_drains_before_one_has_gone(step: Step) -> None:
    """Its experts are still on their way to the others."""
    told = cluster(step)
    told.give(Scale(pool="expert", wanted=4))
    for _ in range(2):
        told.join()
    rest(told)
    told.give(Scale(pool="expert", wanted=2))
    told.give(Tick(), after_s=0.1)
    told.give(Retire(name="expert/1", operation="a"))
    for _ in range(5):
        for name in told.state.members:
            told.renew(name)
        told.give(Tick(), after_s=0.1)
        assert sum(record.draining for record in told.state.members.values()) == 1


def a_draining_worker_ends_when_nothing_runs_on_it(step: Step) -> None:
    """An attention worker too many goes after it has heard of it and said that it is idle, and not before."""
    told = cluster(step)
    told.give(Scale(pool="attention", wanted=2))
    told.join("attention")
    rest(told)
    told.give(Scale(pool="attention", wanted=1))
    told.give(Tick(), after_s=0.1)
    record = told.state.members["attention/2"]
    assert record.draining and not told.state.members["attention/1"].draining
    for load in ({"running": 0.0}, {"running": 2.0}):
        told.give(Renewed(name=record.name, incarnation=record.incarnation, load=load), after_s=0.1)
        assert record.name in told.state.members, "ended before it heard, or with streams on it"
        told.ack(record.name)
    told.give(Renewed(name=record.name, incarnation=record.incarnation, load={"running": 0.0, "waiting": 1.0}))
    assert record.name in told.state.members, "ended with a stream that waits"
    commands = told.give(Renewed(name=record.name, incarnation=record.incarnation, load={"running": 0.0}))
    assert any(isinstance(c, StopProcess) and c.name == record.name for c in commands), commands
    assert record.name not in told.state.members


def a_drain_that_lasts_too_long_ends(step: Step) -> None:
    """A worker whose streams never end is ended after drain_s, whatever runs on it."""
    told = cluster(step)
    told.give(Scale(pool="attention", wanted=2))
    told.join("attention")
    rest(told)
    told.give(Scale(pool="attention", wanted=1, drain_s=3.0))
    began_s = told.now_s
    while "attention/2" in told.state.members:
        rest(told, rounds=1, load={"running": 1.0})
        assert told.now_s - began_s < 10, "never ended"
    assert 3 <= told.now_s - began_s < 3.5, f"ended after {told.now_s - began_s:.1f} s"


def a_pool_of_none_lets_everything_go(step: Step) -> None:
    """Scaled to zero, expert servers go one after the other; scaled up again, new ones are ordered."""
    told = Told(step, experts_wanted=2, replicas=2)
    told.give(LauncherAttached(host="h"))
    for pool in ("expert", "expert", "attention"):
        told.join(pool)
    rest(told)
    told.give(Scale(pool="expert", wanted=0))
    rest(told, rounds=40)
    assert set(told.state.members) == {"attention/1"}, list(told.state.members)
    commands = told.give(Scale(pool="expert", wanted=1))
    assert [c.pool for c in commands if isinstance(c, StartProcess)] == ["expert"], commands


def a_size_out_of_bounds_is_refused(step: Step) -> None:
    """What cannot be wanted is refused with the bounds, and changes nothing."""
    told = Told(step, experts_wanted=2, most={"expert": 4}, least={"expert": 1})
    for event in (
        Scale(pool="expert", wanted=5),
        Scale(pool="expert", wanted=0),
        Scale(pool="gateway", wanted=1),
    ):
        (refused,) = told.give(event)
        assert isinstance(refused, Refused), refused
        assert told.state.wanted == {"expert": 2, "attention": 1}


def who_was_regular_is_missed_within_a_second(step: Step) -> None:
    """After a minute of punctual renewals a silence is suspect in half a second and condemned before the lease ends."""
    told = cluster(step, servers=4)
    lively(told, 60)
    suspect_s, fenced_s = lively(told, 3, dumb="expert/4")
    assert 0.4 < suspect_s < 0.7, f"suspect after {suspect_s:.2f} s"
    assert 0.8 < fenced_s < 1.0, f"fenced after {fenced_s:.2f} s"
    assert len(told.state.members) == 4, told.state.gone


def who_is_often_late_is_waited_for(step: Step) -> None:
    """A server that now and then says nothing for over a second gets its whole lease."""
    told = cluster(step, servers=4)
    for _ in range(4):
        lively(told, 40)
        lively(told, 1.2, dumb="expert/4")
        assert len(told.state.members) == 5, "the prior is more patient than that"
    _, fenced_s = lively(told, 4, dumb="expert/4")
    assert 2.0 < fenced_s < 2.2, f"fenced after {fenced_s:.2f} s"


def the_least_silence_holds(step: Step) -> None:
    """However regular a server was, it is not fenced before the silence that was configured."""
    told = cluster(step, servers=4, least_silence_s=1.5)
    lively(told, 60)
    _, fenced_s = lively(told, 3, dumb="expert/4")
    assert 1.5 <= fenced_s < 1.7, f"fenced after {fenced_s:.2f} s"


def those_who_fall_silent_together_are_not_judged(step: Step) -> None:
    """Two of six regular servers stop at once, one after a long acquaintance and one new: neither is fenced for it."""
    told = cluster(step, servers=4)
    lively(told, 60)
    told.join()
    lively(told, 5)
    lively(told, 9, dumb="expert/4 expert/5")
    assert {"expert/4", "expert/5"} <= set(told.state.members), told.state.gone


def nothing_is_unloaded_while_a_fenced_worker_may_ask(step: Step) -> None:
    """A worker fenced before its lease ended may use old routes until it would have ended, or its exit is proved."""
    for proved in (False, True):
        told = cluster(step, servers=1, replicas=1, workers=2)
        lively(told, 60)
        spoke_s = told.state.liveness["attention/2"].renewed_s
        told.join()
        while "attention/2" in told.state.members:
            lively(told, 0.1, dumb="attention/2", step_s=0.1)
            assert told.now_s - spoke_s < 1.2
        if proved:
            told.give(Exited(host="h", pid=3))
        while not proved and told.now_s < spoke_s + 1.95:
            held = told.state.members["expert/1"].target
            assert held == 0b11, f"unloaded {told.now_s - spoke_s:.2f} s after the worker's last word"
            lively(told, 0.1, step_s=0.1)
        lively(told, 0.4)
        assert told.state.members["expert/1"].target.bit_count() == 1, "never unloaded"


def a_copy_that_does_not_arrive_is_ordered_elsewhere(step: Step) -> None:
    """A server that does not load what it was told loses the order to another, and is not asked again at once."""
    told = cluster(step, servers=3, experts=6, move_s=5.0)
    told.give(Exited(host="h", pid=1))
    stuck = next(n for n in ("expert/2", "expert/3") if told.state.members[n].target != told.state.members[n].loaded)
    told.join(experts=6)
    rest(told, rounds=60, but=stuck)
    counts = [sum(r.serving >> bit & 1 for r in told.state.members.values()) for bit in range(6)]
    assert counts == [2] * 6, f"replicas {counts}"
    assert told.state.taken_back > 0
    first = told.state.members[stuck]
    assert first.target == first.loaded, "it was asked again at once"


def copies_on_their_way_are_few_and_repairs_come_first(step: Step) -> None:
    """Within the budget, what lost a replica is ordered before anything that only moves."""
    told = cluster(step, servers=4, experts=16, copies_in_flight=100, bytes_in_flight=3000, expert_bytes=1000)
    told.give(Exited(host="h", pid=4))
    told.join(experts=16)
    short = 0
    for bit in range(16):
        short |= (sum(r.serving >> bit & 1 for r in told.state.members.values()) < 2) << bit
    assert short.bit_count() == 8
    ordered: list[int] = []
    for _ in range(60):
        away = [(n, r.target & ~r.loaded) for n, r in told.state.members.items() if r.pool == "expert"]
        assert sum(bits.bit_count() for _, bits in away) <= 3, away
        moves = [bits for _, bits in away if bits & ~short]
        repaired = [sum(r.target >> bit & 1 for r in told.state.members.values()) for bit in range(16)]
        ordered += [min(repaired)] * bool(moves)
        rest(told, rounds=1)
    assert all(least >= 2 for least in ordered), "a move was ordered while an expert had one replica"
    counts = [sum(r.serving >> bit & 1 for r in told.state.members.values()) for bit in range(16)]
    assert counts == [2] * 16, counts


def a_pool_that_grows_again_keeps_who_was_to_go(step: Step) -> None:
    """A member that drains because there were too many stays when more are wanted, or when another is lost."""
    for regrow in (Scale(pool="expert", wanted=3), Exited(host="h", pid=1)):
        told = cluster(step, servers=2)
        told.give(Scale(pool="expert", wanted=3))
        told.join()
        rest(told)
        told.give(Scale(pool="expert", wanted=2))
        told.give(Tick(), after_s=0.1)
        assert told.state.members["expert/3"].draining
        commands = told.give(regrow)
        assert not told.state.members["expert/3"].draining
        assert not [c for c in commands if isinstance(c, StartProcess)], commands
        told.give(Scale(pool="expert", wanted=len(told.state.members) - 2))
        rest(told, rounds=1)
        assert told.state.members["expert/3"].surplus
        told.give(Left(name="expert/3", incarnation=told.state.members["expert/3"].incarnation, drain=True))
        told.give(Scale(pool="expert", wanted=4))
        assert told.state.members["expert/3"].draining, "it asked to go, and was kept"


def streams_are_left_in_peace(step: Step) -> None:
    """Of two workers that were ordered, the one with fewer streams goes."""
    told = cluster(step)
    told.give(Scale(pool="attention", wanted=3))
    told.join("attention")
    told.join("attention")
    rest(told)
    for name, running in (("attention/1", 0.0), ("attention/2", 1.0), ("attention/3", 7.0)):
        incarnation = told.state.members[name].incarnation
        told.give(Renewed(name=name, incarnation=incarnation, load={"running": running}))
    told.give(Scale(pool="attention", wanted=2))
    told.give(Tick(), after_s=0.1)
    assert told.state.members["attention/2"].draining, "attention/1 is its operator's, attention/3 has more to lose"


def a_process_that_joins_anew_replaces_itself(step: Step) -> None:
    """Nobody is a member twice: a process that comes back has lost its former name."""
    told = cluster(step, servers=3)
    told.pids = 1
    name = told.join()
    assert name not in ("expert/1", "expert/2", "expert/3")
    assert "expert/2" not in told.state.members
    assert len(told.state.members) == 4


def an_order_outlives_its_launchers_stream(step: Step) -> None:
    """A process that was ordered, and joins while its launcher's stream is broken, is no operator's."""
    told = cluster(step)
    told.give(Scale(pool="expert", wanted=3))
    told.give(LauncherDetached(host="h"))
    told.join()
    told.give(LauncherAttached(host="h"))
    rest(told)
    told.give(Scale(pool="expert", wanted=2))
    rest(told)
    assert set(told.state.members) == {"expert/1", "expert/2", "attention/1"}, list(told.state.members)


def an_old_report_unloads_nothing(step: Step) -> None:
    """What a server said it held, before it said more, comes again late: nobody loses what they still ask for."""
    for restarted in (False, True):
        told = Told(step)
        told.join()
        told.join("attention")
        told.ack("attention/1")
        first = told.state.epoch
        told.loaded("expert/1", 0b01, first)
        rest(told)
        told.join()
        moves = told.state.members["expert/2"].share
        kept = told.state.members["expert/1"].share
        if restarted:
            told.give(Started(salt=2))
        told.loaded("expert/1", kept, told.state.epoch - 1 if restarted else first)
        assert restarted or told.state.members["expert/1"].serving == 0b11, "an overtaken report was believed"
        told.loaded("expert/2", moves, told.state.epoch)
        told.give(Tick(), after_s=0.1)
        assert told.state.members["expert/1"].target & moves, "unloaded before the worker acked"


def an_overtaken_report_of_one_epoch_is_no_loss(step: Step) -> None:
    told = Told(step)
    name = told.join()
    told.give(Tick(), after_s=0.1)
    incarnation, epoch = told.state.members[name].incarnation, told.state.epoch

    def report(number: int, held: int) -> None:
        told.give(Loaded(name=name, incarnation=incarnation, held=held, epoch=epoch, number=number))

    report(1, 0b01)
    report(2, 0b11)
    report(1, 0b01)
    assert told.state.members[name].loaded == 0b11, "an overtaken report was believed"
    report(3, 0b10)
    assert told.state.members[name].loaded == 0b10, "weights that proved damaged are still asked for"


def a_worker_that_has_not_begun_holds_nobody_up(step: Step) -> None:
    """Who never acked asks nobody for anything: a move does not wait for it. It begins with what is left."""
    told = Told(step)
    for pool in ("expert", "attention", "attention"):
        told.join(pool)
    told.load_all()
    told.ack("attention/1")
    seen = told.state.epoch
    told.join()
    for _ in range(5):
        told.load_all()
        told.ack("attention/1")
        told.give(Tick(), after_s=0.05)
    assert told.state.members["expert/1"].target.bit_count() == 1, "a worker that never acked holds up a move"
    incarnation = told.state.members["attention/2"].incarnation
    told.give(Acked(name="attention/2", incarnation=incarnation, epoch=seen))
    assert not told.state.members["attention/2"].ready, "it would ask for what was unloaded"
    told.ack("attention/2")
    assert told.state.members["attention/2"].ready


def full_servers_exchange(step: Step) -> None:
    """Two servers without room, each of which is to hold what the other has: both get there."""
    told = Told(step, experts_wanted=4, replicas=3)
    for capacity in (1, 1, 2, 2):
        told.join(capacity=capacity)
    told.join("attention")
    told.ack("attention/1")
    held = {"expert/1": 0b01, "expert/2": 0b10, "expert/3": 0b11, "expert/4": 0b11}
    share = {**held, "expert/1": 0b10, "expert/2": 0b01}
    members = {
        name: replace(r, share=share[name], target=held[name], loaded=held[name], serving=held[name], ready=True)
        for name, r in told.state.members.items()
        if name in held
    }
    told.state = replace(told.state, members={**told.state.members, **members}, settled=False)
    for _ in range(10):
        serving = [record.serving for record in told.state.members.values()]
        for bit in range(2):
            assert sum(bits >> bit & 1 for bits in serving) >= 2, "too many copies were let go at once"
        rest(told, rounds=1)
    assert {name: record.serving for name, record in told.state.members.items() if name in share} == share


def an_unknown_member_moves_nothing(step: Step) -> None:
    """Whatever waits to be done is not done on the word of one who is no member."""
    told = Told(step)
    told.join()
    waits = replace(told.state.members["expert/1"], target=0)
    told.state = replace(told.state, members={"expert/1": waits}, settled=False)
    commands = told.give(Left(name="expert/1", incarnation=1, drain=False))
    assert [type(command) for command in commands] == [UnknownMember], commands


STORIES = (
    a_late_report_brings_nothing_back,
    failed_starts_wait_longer_each_time,
    a_stall_of_the_router_orders_only_what_was_lost,
    silence_of_all_orders_nothing_at_first,
    an_event_between_ticks_meets_the_same_doubt,
    a_stall_ends_no_doubt,
    who_was_replaced_in_vain_costs_a_drain,
    who_was_not_ordered_stays,
    a_pool_that_is_too_large_drains_one_at_a_time,
    nobody_else_drains_before_one_has_gone,
    a_draining_worker_ends_when_nothing_runs_on_it,
    a_drain_that_lasts_too_long_ends,
    a_pool_of_none_lets_everything_go,
    a_size_out_of_bounds_is_refused,
    who_was_regular_is_missed_within_a_second,
    who_is_often_late_is_waited_for,
    the_least_silence_holds,
    those_who_fall_silent_together_are_not_judged,
    nothing_is_unloaded_while_a_fenced_worker_may_ask,
    a_copy_that_does_not_arrive_is_ordered_elsewhere,
    copies_on_their_way_are_few_and_repairs_come_first,
    a_pool_that_grows_again_keeps_who_was_to_go,
    streams_are_left_in_peace,
    a_process_that_joins_anew_replaces_itself,
    an_order_outlives_its_launchers_stream,
    an_old_report_unloads_nothing,
    an_overtaken_report_of_one_epoch_is_no_loss,
    a_worker_that_has_not_begun_holds_nobody_up,
    full_servers_exchange,
    an_unknown_member_moves_nothing,
    *LOAD_STORIES,
    *COPY_STORIES,
    *CORRUPTION_STORIES,
    *CLIENT_STORIES,
    *HANG_STORIES,
    *MODEL_STORIES,
    *RETIRE_STORIES,
    *SEVERAL_STORIES,
    *TERM_STORIES,
)
