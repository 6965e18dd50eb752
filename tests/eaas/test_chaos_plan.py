"""Chaos plans as they are written: what is read, what is refused and why, and whom a seed chooses."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from eaas.ops.chaos.inject import names_of
from eaas.ops.chaos.plan import (
    Plan,
    PlanInvalid,
    Select,
    choose,
    fault_of,
    in_words,
    parse_plan,
    read_plan,
    seconds,
)
from router.faults import Fault

MEMBERS = ["router/0", "gateway/1", "attention/1", "expert/2", "expert/10", "expert/3", "expert/4"]


def test_a_plan_says_what_when_whom_and_how_long() -> None:
    plan = parse_plan("""
        seed = 7
        [[fault]]
        at = "1m"
        kind = "slow"
        target = "expert/3"
        for = "500ms"
        times = 10
        [[fault]]
        at = "20s"
        kind = "kill"
        pool = "expert"
        mode = "fixed:2"
        where = "computed"
        after = 100
        [[fault]]
        at = 40
        kind = "delay"
        pool = "attention"
        by = "5ms"
        peers = ["expert/1"]
    """)
    assert plan.seed == 7
    assert [step.at_s for step in plan.steps] == [20.0, 40.0, 60.0], "by time, whatever their order in the file"
    kill, delay, slow = plan.steps
    assert kill.fault == Fault(id="", kind="kill", where="computed", after=100, seed=7)
    assert kill.select == Select(pool="expert", mode="fixed:2")
    assert delay.fault == Fault(id="", kind="delay", for_s=10.0, by_s=0.005, peers=("expert/1",), seed=7)
    assert slow.fault == Fault(id="", kind="slow", for_s=0.5, times=10, seed=7)
    assert slow.select == Select(target="expert/3")
    assert slow.end_s == 60.5
    assert in_words(["expert/3"], slow.fault) == "slow expert/3 times 10 for 0.5 s"


def fault(text: str) -> str:
    return f'[[fault]]\nat = "1s"\nkind = "freeze"\ntarget = "expert/1"\n{text}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed =", "no TOML"),
        ("", "no fault found; at least one [[fault]] table is needed"),
        ("fault = 3", "no fault found"),
        ("sede = 3\n" + fault(""), "sede unknown; a plan has seed and [[fault]] tables"),
        ("seed = -1\n" + fault(""), "seed is -1; a whole number from 0 is needed"),
        ('seed = "x"\n' + fault(""), "seed is 'x'"),
        ('[[fault]]\nkind = "kill"\ntarget = "expert/1"', "fault 1: at is missing"),
        ('[[fault]]\nat = "1s"\ntarget = "expert/1"', "fault 1: kind is missing"),
        ('[[fault]]\nat = "1s"\nkind = 3\ntarget = "expert/1"', "kind is 3; a text in quotes is needed"),
        (
            '[[fault]]\nat = "1s"\nkind = "explode"\ntarget = "expert/1"',
            "'explode' is no fault; give one of kill, ",
        ),
        ('[[fault]]\nat = "soon"\nkind = "kill"\ntarget = "expert/1"', "'soon' is no duration"),
        ('[[fault]]\nat = "25h"\nkind = "kill"\ntarget = "expert/1"', "a plan lasts at most 86400 s"),
        ('[[fault]]\nat = "1s"\nkind = "kill"', "neither target nor pool given; one of them is needed"),
        (fault('pool = "expert"'), "target 'expert/1' and pool 'expert' given; one of them is needed"),
        (fault('mode = "all"'), "mode all with target expert/1: a target is one member; give a pool instead"),
        (
            '[[fault]]\nat = "1s"\nkind = "kill"\npool = "experts"',
            "pool 'experts' is unknown; give one of expert, ",
        ),
        (
            '[[fault]]\nat = "1s"\nkind = "kill"\npool = "expert"\nmode = "some"',
            "mode 'some' is unknown; give one, all",
        ),
        (
            '[[fault]]\nat = "1s"\nkind = "kill"\npool = "expert"\nmode = "fixed:0"',
            "mode 'fixed:0' is unknown",
        ),
        ('[[fault]]\nat = "1s"\nkind = "kill"\npool = "expert"\nmode = "percent:101"', "mode 'percent:101'"),
        (fault("untill = 3"), "untill unknown; a fault has at, kind, target, pool, mode, for, by, "),
        (fault("for = true"), "True is no duration; give a number with us, ms, s, m or h"),
        (fault('for = "2h"'), "for_s is 7200.0; 0 to 3600 is needed"),
        (fault("times = 3"), "freeze takes no times; it takes "),
        (fault("by = -1"), "-1 is no duration"),
        (fault('share = "much"'), "share is 'much'; float is needed"),
        (fault('where = "somewhere"'), "freeze at 'somewhere' is unknown; give one of request-half-written"),
        ('[[fault]]\nat = "1s"\nkind = "kill"\ntarget = "expert/1"\nfor = "3s"', "kill takes no for"),
        (fault('where = "computed"\nwithin = "61s"'), "within is 61 s; above 0 and at most 60 s is needed"),
        (fault('within = "3s"'), "within goes with where, of a kill or a freeze"),
    ],
)
def test_what_makes_no_sense_is_refused_in_clear_words(text: str, message: str) -> None:
    with pytest.raises(PlanInvalid) as refused:
        parse_plan(text)
    assert message in str(refused.value)


def test_the_file_is_named_in_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanInvalid, match=r"nothing\.toml cannot be read .* name a TOML file"):
        read_plan(tmp_path / "nothing.toml")
    path = tmp_path / "plan.toml"
    path.write_text("seed = 1")
    with pytest.raises(PlanInvalid, match=r"plan\.toml: no fault found"):
        read_plan(path)
    path.write_text(fault(""))
    assert read_plan(path) == Plan(steps=parse_plan(fault("")).steps)


@pytest.mark.parametrize(
    ("said", "meant_s"),
    [("30s", 30), ("5ms", 0.005), ("2m", 120), ("1h", 3600), ("1.5", 1.5), (3, 3), ("50us", 5e-5)],
)
def test_durations(said: object, meant_s: float) -> None:
    assert seconds(said) == pytest.approx(meant_s)


def test_a_seed_chooses_the_same_members_whatever_their_order() -> None:
    chosen = set()
    for seed in range(20):
        for mode, count in (("one", 1), ("all", 4), ("fixed:2", 2), ("percent:25", 1), ("percent:26", 2)):
            select = Select(pool="expert", mode=mode)
            names = choose(select, MEMBERS, Random(seed))
            assert len(set(names)) == count, f"seed {seed}, {mode}: {names}"
            assert all(name.startswith("expert/") for name in names), f"seed {seed}, {mode}: {names}"
            shuffled = Random(seed).sample(MEMBERS, len(MEMBERS))
            assert choose(select, shuffled, Random(seed)) == names, f"seed {seed}, {mode}"
            if mode == "one":
                chosen.update(names)
    assert len(chosen) == 4, f"20 seeds reach every server: {chosen}"
    assert choose(Select(target="router/0"), MEMBERS, Random(0)) == ["router/0"]


def test_a_choice_that_cannot_be_made_says_who_is_there() -> None:
    with pytest.raises(PlanInvalid, match=r"No member 'expert/9' here; name one of: router/0, gateway/1"):
        choose(Select(target="expert/9"), MEMBERS, Random(0))
    with pytest.raises(PlanInvalid, match="fixed:5 of pool expert needs 5 members, found 4; there are: router/0"):
        choose(Select(pool="expert", mode="fixed:5"), MEMBERS, Random(0))
    for mode in ("one", "all", "percent:10"):
        with pytest.raises(PlanInvalid, match=f"{mode} of pool expert needs 1 members, found 0; .* nobody"):
            choose(Select(pool="expert", mode=mode), [], Random(0))


def test_a_pool_is_chosen_from_among_those_at_work_and_a_name_is_anyone() -> None:
    members = [
        {"name": "expert/10", "pool": "expert", "state": "serving"},
        {"name": "expert/9", "pool": "expert", "state": "suspect"},
        {"name": "expert/11", "pool": "expert", "state": "warming"},
        {"name": "expert/2", "pool": "expert", "state": "draining"},
        {"name": "router/0", "pool": "router", "state": "unreachable"},
    ]
    assert names_of(members, "expert") == ["expert/9", "expert/10"]
    assert names_of(members) == ["expert/2", "expert/9", "expert/10", "expert/11", "router/0"]
    assert names_of(members, "router") == ["router/0"]


def test_a_fault_of_the_command_line_has_the_words_of_a_plan() -> None:
    made = fault_of("loss", 3, {"share": 0.5, "for": "1m", "peers": ["attention/1"]})
    assert made == Fault(id="", kind="loss", share=0.5, for_s=60, peers=("attention/1",), seed=3)
