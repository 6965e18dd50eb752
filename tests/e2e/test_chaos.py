"""`eaas chaos` as an operator types it, on a real cluster: what it does, what it says, and that all of it reverts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_command_line import EAAS, run, served, serving

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef"
ENVIRONMENT = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}


@dataclass
class Cluster:
    """One that is served: its gateway, and the admin listener."""

    url: str
    admin: str

    def chaos(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run("chaos", *arguments, "--url", self.url)

    def events(self, *arguments: str) -> list[dict[str, Any]]:
        done = self.chaos(*arguments, "--json")
        assert done.returncode in (0, 1), done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def lasting(self) -> list[dict[str, Any]]:
        done = self.chaos("list", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def members(self) -> dict[str, tuple[int, int]]:
        """Pid and incarnation of each."""
        members = json.loads(run("status", "--json", "--url", self.url).stdout)["members"]
        return {member["name"]: (member["pid"], member["incarnation"]) for member in members}

    def pid(self, name: str) -> int:
        return self.members()[name][0]

    def some_expert(self) -> str:
        return min(name for name in serving(self.url) if name.startswith("expert/"))

    def whole(self) -> list[str]:
        """Wait until nothing is injected and both expert servers serve; their names."""
        # A router that was killed may not be back yet.
        until(lambda: self.chaos("clear").returncode == 0)
        found: list[str] = []

        def both() -> bool:
            found[:] = sorted(name for name in serving(self.url) if name.startswith("expert/"))
            return len(found) == 2

        until(both)
        return found


@contextmanager
def cluster(model: Path, *flags: str) -> Iterator[Cluster]:
    with served(str(model), "--experts", "2", "--admin-port", "0", *flags) as (process, url):
        said = next(line for line in process.stdout or () if line.startswith("admin: "))
        yield Cluster(url, said.removeprefix("admin: ").strip())


@pytest.fixture(scope="module")
def open_cluster(tiny: Path) -> Iterator[Cluster]:
    """One that takes faults."""
    with cluster(tiny, "--allow-chaos") as found:
        yield found


@pytest.fixture(scope="module")
def closed_cluster(tiny: Path) -> Iterator[Cluster]:
    """One that was not started with --allow-chaos."""
    with cluster(tiny) as found:
        yield found


@contextmanager
def begun(cluster: Cluster, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`eaas chaos ARGUMENTS --json`, once its first fault has begun."""
    command = [*EAAS, "chaos", *arguments, "--json", "--url", cluster.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)


def until(holds: Callable[[], object], most_s: float = 60.0) -> None:
    end_s = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {most_s} s"
        time.sleep(0.02)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.full(seconds=15)
def test_a_dry_run_says_what_the_seed_chooses_and_does_nothing(closed_cluster: Cluster, tmp_path: Path) -> None:
    before = closed_cluster.members()
    chosen = set()
    for seed in range(6):
        done = closed_cluster.chaos("kill", "--pool", "expert", "--seed", str(seed), "--dry-run")
        assert done.returncode == 0, done.stderr
        found = re.fullmatch(r" +0\.0 s  would kill (expert/\d+)\n", done.stdout)
        assert found, done.stdout
        chosen.add(found[1])
        again = closed_cluster.chaos("kill", "--pool", "expert", "--seed", str(seed), "--dry-run", "--json")
        assert json.loads(again.stdout)["targets"] == [found[1]], f"seed {seed}"
    assert len(chosen) == 2, f"six seeds choose only {chosen}"
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nat = "20s"\nkind = "freeze"\npool = "expert"\nmode = "all"\nfor = "1m"')
    done = closed_cluster.chaos("run", str(plan), "--dry-run")
    assert re.fullmatch(r" +20\.0 s  would freeze expert/\d+, expert/\d+ for 60 s\n", done.stdout), done.stdout
    unknown = closed_cluster.chaos("kill", "--target", "expert/99", "--dry-run")
    assert unknown.returncode == 1 and "No member 'expert/99'" in unknown.stdout
    assert closed_cluster.members() == before
    assert closed_cluster.lasting() == []


@pytest.mark.full(seconds=5)
def test_ctrl_c_thaws_what_is_frozen(closed_cluster: Cluster) -> None:
    """Both servers: one that is silent alone may be replaced before a busy host has come to the signal."""
    names = closed_cluster.whole()
    pids = [closed_cluster.pid(name) for name in names]
    for number in (signal.SIGINT, signal.SIGTERM):
        with begun(closed_cluster, "freeze", "--pool", "expert", "--mode", "all", "--for", "60s") as (process, event):
            assert (event["phase"], sorted(event["targets"])) == ("began", names)
            until(lambda: all(stopped(pid) for pid in pids))
            process.send_signal(number)
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 130
            ended, both = json.loads(said), ", ".join(event["targets"])
            assert (ended["phase"], ended["text"]) == ("ended", f"freeze of {both}: thawed {both}")
            assert not any(stopped(pid) for pid in pids)


@pytest.mark.full(seconds=5)
def test_a_freeze_ends_with_its_command_even_when_that_is_killed(closed_cluster: Cluster) -> None:
    """Both servers: where all are silent at once the router blames itself, and replaces nobody."""
    pids = [closed_cluster.pid(name) for name in closed_cluster.whole()]
    with begun(closed_cluster, "freeze", "--pool", "expert", "--mode", "all", "--for", "60s") as (process, _):
        # Each thread stops when it is next scheduled.
        until(lambda: all(stopped(pid) for pid in pids))
        process.kill()
        process.wait()
    until(lambda: not any(stopped(pid) for pid in pids))
    assert closed_cluster.lasting() == []


@pytest.mark.full(seconds=6)
def test_what_others_froze_is_listed_and_cleared(closed_cluster: Cluster) -> None:
    names = closed_cluster.whole()
    # At once: one that is silent alone is replaced, and a look at the status takes a second.
    for pid in [closed_cluster.pid(name) for name in names]:
        os.kill(pid, signal.SIGSTOP)
    left = [(one["fault"]["kind"], one["fault"]["id"]) for one in closed_cluster.lasting()]
    assert sorted(left) == [("freeze", name) for name in names]
    done = closed_cluster.chaos("clear")
    assert (done.returncode, done.stdout) == (0, f"cleared {', '.join(names)}\n"), done.stderr
    assert closed_cluster.lasting() == []
    done = closed_cluster.chaos("clear", "fault-99")
    assert done.returncode == 1 and "No fault 'fault-99' lasts" in done.stderr


@pytest.mark.full(seconds=8)
def test_a_member_that_was_replaced_is_not_said_to_be_thawed(closed_cluster: Cluster) -> None:
    name = closed_cluster.some_expert()
    done = closed_cluster.chaos("freeze", name, "--for", "20s")
    assert done.returncode == 0, done.stderr
    assert "thawed" not in done.stdout
    assert f"{name} was replaced while frozen" in done.stdout
    closed_cluster.whole()


@pytest.mark.full(seconds=8)
def test_kill_and_freeze_need_no_router(closed_cluster: Cluster) -> None:
    closed_cluster.whole()
    with begun(closed_cluster, "freeze", "router/0", "--for", "3s") as (process, _):
        name = closed_cluster.some_expert()
        pid = closed_cluster.pid(name)
        done = closed_cluster.chaos("kill", name)
        assert done.returncode == 0, done.stderr
        assert f"killed {name} (pid {pid})" in done.stdout
        until(lambda: not Path(f"/proc/{pid}").exists())
        said, _ = process.communicate(timeout=60)
        assert "thawed router/0" in said
    assert "killed router/0" in closed_cluster.chaos("kill", "--pool", "router").stdout
    closed_cluster.whole()


@pytest.mark.full(seconds=6)
def test_the_rest_is_refused_without_allow_chaos(closed_cluster: Cluster) -> None:
    closed_cluster.whole()
    name = closed_cluster.some_expert()
    for verb in (["slow", name], ["kill", name, "--where", "computed"], ["partition", "--pool", "expert"]):
        done = closed_cluster.chaos(*verb)
        assert done.returncode == 1, verb
        assert "--allow-chaos" in done.stderr, done.stderr
    done = run("chaos", "list", "--admin", closed_cluster.admin)
    assert done.returncode == 1 and "--allow-chaos" in done.stderr
    assert name in serving(closed_cluster.url)


def test_a_plan_is_carried_out_at_its_times_and_ctrl_c_reverts_the_rest(open_cluster: Cluster, tmp_path: Path) -> None:
    slow, other = open_cluster.whole()
    path = tmp_path / "plan.toml"
    path.write_text(f"""
        seed = 7
        [[fault]]
        at = "0s"
        kind = "slow"
        target = "{slow}"
        times = 2
        for = "60s"
        [[fault]]
        at = "500ms"
        kind = "delay"
        target = "attention/1"
        by = "1ms"
        for = "1s"
        [[fault]]
        at = "1s"
        kind = "loss"
        target = "{other}"
        share = 0.001
        for = "60s"
    """)
    with begun(open_cluster, "run", str(path)) as (process, first):
        assert process.stdout is not None
        assert (first["phase"], first["kind"], first["targets"]) == ("began", "slow", [slow])
        events = [first] + [json.loads(process.stdout.readline()) for _ in range(3)]
        assert [(event["phase"], event["kind"]) for event in events[1:]] == [
            ("began", "delay"),
            ("began", "loss"),
            ("ended", "delay"),
        ]
        for event, due_s in zip(events, (0.0, 0.5, 1.0, 1.5), strict=True):
            assert event["at_s"] >= due_s, event
        assert {one["fault"]["kind"] for one in open_cluster.lasting()} == {"slow", "loss"}
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    ended = [json.loads(line) for line in said.splitlines()]
    assert {(event["phase"], event["text"]) for event in ended} == {
        ("ended", f"slow of {slow}: cleared"),
        ("ended", f"loss of {other}: cleared"),
    }
    assert open_cluster.lasting() == []


@pytest.mark.full(seconds=6)
def test_one_terminal_ends_what_another_began(open_cluster: Cluster) -> None:
    open_cluster.whole()
    name = open_cluster.some_expert()
    with begun(open_cluster, "slow", name, "--times", "3", "--for", "10m") as (process, event):
        (lasts,) = open_cluster.lasting()
        assert lasts["fault"] == {"id": event["id"], "kind": "slow", "for_s": 600.0, "times": 3.0}
        assert lasts["names"] == [name]
        assert f"slow {name} times 3" in open_cluster.chaos("list").stdout
        assert open_cluster.chaos("clear", event["id"]).stdout == f"cleared {event['id']}\n"
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert json.loads(said)["phase"] == "ended"
    assert open_cluster.chaos("list").stdout == "nothing is injected\n"


@pytest.mark.full(seconds=8)
def test_faults_by_hand_are_counted_and_shown(open_cluster: Cluster) -> None:
    def counted(kind: str) -> float:
        page = urllib.request.urlopen(f"{open_cluster.admin}/metrics", timeout=60).read().decode()
        found = re.search(rf'^eaas_faults_injected_total{{kind="{kind}"}} (\S+)', page, re.MULTILINE)
        assert found, page
        return float(found[1])

    name, other = open_cluster.whole()
    before = {kind: counted(kind) for kind in ("kill", "freeze", "loss")}
    with begun(open_cluster, "loss", name, "--share", "0", "--for", "60s") as (process, _):

        def shown() -> bool:
            members = json.loads(run("status", "--json", "--url", open_cluster.url).stdout)["members"]
            return next(m for m in members if m["name"] == name)["load"].get("faults") == 1

        until(shown)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    frozen = open_cluster.chaos("freeze", name, "--for", "300ms")
    assert frozen.returncode == 0 and f"thawed {name}" in frozen.stdout, frozen.stdout
    # The other one: on a busy host what was frozen may be about to be replaced.
    pid = open_cluster.pid(other)
    killed = open_cluster.chaos("kill", other)
    assert killed.returncode == 0, killed
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert {kind: counted(kind) - before[kind] for kind in before} == {"kill": 1, "freeze": 1, "loss": 1}


@pytest.mark.full(seconds=15)
def test_a_remote_cluster_is_reached_through_its_admin_listener(tiny: Path, tmp_path: Path) -> None:
    """Whoever has its key; its router then takes faults from nobody else."""
    key_file, wrong = tmp_path / "key", tmp_path / "wrong"
    key_file.write_text(KEY)
    wrong.write_text(KEY[::-1])
    with cluster(tiny, "--allow-chaos", "--admin-key-file", str(key_file)) as keyed:
        remote = ["--admin", keyed.admin, "--key-file", str(key_file)]
        name = keyed.some_expert()
        done = run("chaos", "slow", name, "--times", "2", "--for", "500ms", *remote)
        assert done.returncode == 0, done.stderr
        assert f"slow {name} times 2" in done.stdout and "over" in done.stdout
        pid = keyed.pid(name)
        assert run("chaos", "kill", name, *remote).returncode == 0
        until(lambda: not Path(f"/proc/{pid}").exists())
        done = run("chaos", "list", *remote)
        assert (done.returncode, done.stdout) == (0, "nothing is injected\n"), done.stderr
        assert run("chaos", "clear", *remote).stdout == "nothing is injected\n"
        for refused, message in (
            (run("chaos", "list", "--admin", keyed.admin), "no key found"),
            (
                run("chaos", "kill", name, "--admin", keyed.admin, "--key-file", str(wrong)),
                "another key found",
            ),
            (keyed.chaos("slow", keyed.some_expert(), "--times", "2", "--for", "500ms"), "admin listener"),
        ):
            assert refused.returncode == 1 and message in refused.stderr, refused.stderr
