"""The chaos plans of real clusters on the simulated one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eaas.ops.chaos.plan import PlanInvalid, parse_plan
from tests.sim.cluster.planned import KINDS, check
from tests.sim.cluster.runner import Job, run
from tests.sim.cluster.world import LIVENESS

ROOT = Path(__file__).resolve().parents[2]
# One of each kind, and the router.
PLAN = """
seed = 7
[[fault]]
at = "2s"
kind = "kill"
pool = "expert"
[[fault]]
at = "8s"
kind = "freeze"
pool = "expert"
for = "6s"
[[fault]]
at = "10s"
kind = "slow"
pool = "expert"
mode = "all"
times = 10
for = "5s"
[[fault]]
at = "12s"
kind = "delay"
pool = "attention"
by = "20ms"
for = "5s"
[[fault]]
at = "15s"
kind = "loss"
pool = "expert"
mode = "percent:50"
share = 0.1
for = "5s"
[[fault]]
at = "18s"
kind = "partition"
pool = "attention"
for = "3s"
[[fault]]
at = "20s"
kind = "kill"
target = "router/0"
[[fault]]
at = "22s"
kind = "freeze"
target = "router/0"
for = "4s"
"""


def test_every_promise_holds_under_a_plan_and_the_same_seed_gives_the_same_run() -> None:
    plan = parse_plan(PLAN)
    seen: set[str] = set()
    for seed in range(12):
        job = Job(seed=seed, mode=LIVENESS, events=0, plan=plan, plan_path="PLAN.toml")
        result = run(job)
        assert not result.promise, f"seed {seed}: {result.promise}: {result.story}\n{job.command()}"
        assert result.requests["ok"], f"seed {seed}: nothing was served"
        assert len(result.struck) == len(plan.steps), f"seed {seed}: {result.struck}"
        seen |= {kind for _, _, kind, _ in result.struck}
        if not seed:
            assert run(job).trace == result.trace
    assert set(KINDS) <= seen


def test_faults_strike_at_the_times_of_the_plan_for_as_long_as_it_says() -> None:
    text = '[[fault]]\nat = "3s"\nkind = "partition"\npool = "attention"\nmode = "all"\nfor = "2s"'
    result = run(Job(seed=1, mode=LIVENESS, events=0, plan=parse_plan(text)))
    assert not result.promise, result.story
    ((number, at_s, kind, what),) = result.struck
    assert (number, at_s, kind) == (0, 7.0, "partition"), "4 s for the cluster to form, then 3"
    assert what.startswith("partition attention/1") and what.endswith("for 2 s")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            'kind = "corrupt"\nwhere = "wire"',
            "corrupt cannot be simulated; the simulator has kill, freeze, slow",
        ),
        ('kind = "rail-down"', "rail-down cannot be simulated"),
        ('kind = "kill"\nwhere = "computed"', "kill at computed cannot be simulated"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(fault: str, message: str, tmp_path: Path) -> None:
    text = f'[[fault]]\nat = "1s"\npool = "expert"\n{fault}'
    with pytest.raises(PlanInvalid, match=message):
        check(parse_plan(text))
    path = tmp_path / "plan.toml"
    path.write_text(text)
    command = [sys.executable, "-m", "tests.sim", "--plan", str(path), "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr


def test_whom_a_fault_does_not_fit_is_not_hit_and_named() -> None:
    text = """
        [[fault]]
        at = "1s"
        kind = "slow"
        target = "attention/1"
        [[fault]]
        at = "2s"
        kind = "loss"
        target = "gateway/1"
    """
    result = run(Job(seed=1, mode=LIVENESS, events=0, plan=parse_plan(text)))
    assert not result.promise, result.story
    assert [kind for _, _, kind, _ in result.struck] == ["refused", "refused"]
    assert "attention/1 is no expert server" in result.struck[0][3]
    assert "gateway/1 has no links that dispatch" in result.struck[1][3]


def test_the_command_line_shows_what_struck(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[[fault]]\nat = "1s"\nkind = "freeze"\npool = "expert"\nfor = "3s"')
    command = [sys.executable, "-m", "tests.sim", "--plan", str(path), "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "freeze: freeze expert/" in done.stdout
    assert "violations 0" in done.stdout
