"""A whole load test, by its command line: what it reports is what the server did, and what it exits with follows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from eaas.ops.chaos.plan import FaultEvent
from eaas.ops.cli import app
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.session import duration_s
from tests.eaas.load.fake_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def load(server: FakeServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["load", server.url, *arguments])


def report_of(server: FakeServer, folder: Path, *arguments: str) -> tuple[dict[str, Any], int]:
    result = load(server, *arguments, "--json", str(folder / "report.json"))
    assert result.exit_code in (0, 1), result.output
    return json.loads((folder / "report.json").read_text()), result.exit_code


def script_file(folder: Path, *scripts: str) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(scripts) + "\n")
    return path


def test_counts_are_those_of_the_server(server: FakeServer, tmp_path: Path) -> None:
    prompts = script_file(tmp_path, "say:5", "say:9 pause:5", "status:503", "say:2 drop")
    report, code = report_of(
        server, tmp_path, "--prompts", str(prompts), "--arrivals", "closed:3", "--requests", "20",
        "--records", str(tmp_path / "records"),
    )  # fmt: skip
    summary = report["summary"]
    assert (summary["requests"], summary["failed"]) == (20, 10)
    assert summary["errors"] == {"http 503": 5, "closed": 5}
    assert summary["output_tokens"] == sum(len(served.texts) for served in server.served) == 5 * (5 + 9 + 2)
    assert code == 1, "requests failed"
    lines = (tmp_path / "records").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=StreamRecord) for line in lines]
    assert sorted(r.text for r in records) == sorted("".join(s.texts) for s in server.served)


def test_signals_do_afterwards_what_they_did_before(server: FakeServer) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    server.script = "say:2"
    assert load(server, "--rate", "100", "--requests", "3").exit_code == 0
    assert [signal.getsignal(number) for number in numbers] == handlers


def test_an_open_loop_sends_what_was_planned_and_succeeds(server: FakeServer, tmp_path: Path) -> None:
    server.script = "say:3"
    report, code = report_of(server, tmp_path, "--rate", "100", "--requests", "30", "--arrivals", "constant", "--chat")
    assert code == 0
    assert report["summary"]["requests"] == 30
    loaded = [served for served in server.served if served.body["max_tokens"] == 64]
    assert len({served.body["messages"][0]["content"] for served in loaded}) == 30, "each prompt its own words"
    assert {served.path for served in loaded} == {"/v1/chat/completions"}


@pytest.mark.parametrize(
    ("second", "found"),
    [
        ("say:30", (0, 0, 0)),
        ("say:10 skip:4 say:16", (4, 0, 0)),
        ("say:10 again:3 say:20", (0, 3, 0)),
        ("say:10 otherwise say:20", (0, 0, 1)),
    ],
)
def test_a_text_unlike_the_reference_is_found_and_ends_with_1(
    server: FakeServer, tmp_path: Path, second: str, found: tuple[int, int, int]
) -> None:
    prompts = script_file(tmp_path, "say:30")

    class Scripts(str):
        """Holds from the third request on; the first two are the reference."""

        def __bool__(self) -> bool:
            return len(server.served) > 2

    server.script = Scripts(second)
    report, code = report_of(
        server,
        tmp_path,
        "--prompts",
        str(prompts),
        "--arrivals",
        "closed:1",
        "--requests",
        "2",
        "--reference",
    )
    verdict = report["verdict"]
    per_stream = (verdict["lost"] / 2, verdict["repeated"] / 2, verdict["changed"] / 2)
    assert per_stream == found, verdict
    assert verdict["compared"] == 2
    assert code == (1 if any(found) else 0)


def test_a_plan_runs_beside_the_load_and_its_faults_are_on_the_time_line(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's runner is a stand-in, which says what it did and when by its own clock."""
    injected: dict[str, Any] = {}

    def run_plan(plan: object, url: str, *, on_event: Callable[[Any], None], stop: threading.Event) -> list[Any]:
        injected.update(plan=plan, url=url)
        while len(server.served) < 30:
            time.sleep(0.005)
        injected["at_s"] = time.monotonic()
        began = FaultEvent(at_s=0.0, phase="began", id="f1", kind="kill", targets=("expert/1",), text="killed")
        on_event(began)
        on_event(replace(began, phase="refused", id="", text="no member expert/9"))
        injected["stopped"] = stop.wait(60)
        return []

    plan = SimpleNamespace(steps=(1, 2), end_s=20.0)
    monkeypatch.setattr("eaas.ops.chaos.plan.read_plan", lambda path: {"kill.toml": plan}[str(path)])
    monkeypatch.setattr("eaas.ops.chaos.runner.run_plan", run_plan)
    server.script = "say:20"
    report, code = report_of(
        server, tmp_path, "--rate", "100", "--requests", "80", "--chaos", "kill.toml", "--warmup", "10ms"
    )
    assert injected["plan"] is plan and injected["url"] == server.url
    assert injected["stopped"], "the load's end ends the plan"
    assert code == 1, "a fault was refused"
    chaos = report["chaos"]
    assert [event["phase"] for event in chaos["events"]] == ["began", "refused"]
    (span,) = chaos["spans"]
    assert span["text"] == "kill expert/1" and span["ended_s"] == span["began_s"]
    # By the server's own record: as many requests had come when the fault began as the load's clock says.
    before = sum(served.written_s[0] < injected["at_s"] for served in server.served)
    assert 28 <= before <= 80
    assert chaos["windows"]["before"] > 0


def test_a_load_that_ends_before_its_faults_says_so_and_ends_with_1(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_plan(plan: object, url: str, *, stop: threading.Event, **rest: object) -> None:
        stop.wait(60)

    monkeypatch.setattr("eaas.ops.chaos.runner.run_plan", run_plan)
    plan = tmp_path / "late.toml"
    plan.write_text('[[fault]]\nat = "30s"\nkind = "kill"\npool = "expert"\n')
    server.script = "say:2"
    report, code = report_of(server, tmp_path, "--rate", "100", "--requests", "5", "--chaos", str(plan))
    assert report["chaos"]["problem"].startswith("The load ended before 1 of 1 faults; the plan takes 30 s.")
    assert code == 1


def test_a_plan_that_breaks_off_is_told_and_ends_with_1(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_plan(plan: object, url: str, **rest: object) -> list[Any]:
        raise ConnectionError("no gateway")

    monkeypatch.setattr("eaas.ops.chaos.plan.read_plan", str)
    monkeypatch.setattr("eaas.ops.chaos.runner.run_plan", run_plan)
    server.script = "say:2"
    report, code = report_of(server, tmp_path, "--rate", "100", "--requests", "5", "--chaos", "x.toml")
    assert report["chaos"]["problem"] == "ConnectionError: no gateway"
    assert code == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_freeze_ends_with_the_load_however_that_ends(
    server: FakeServer, tmp_path: Path, number: signal.Signals
) -> None:
    """The frozen member is a process that only has a member's name; the kernel says whether it is stopped."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", "experts"]) as member:

        def until_state(*wanted: str) -> None:
            end_s = time.monotonic() + 60
            while (state := Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[0]) not in wanted:
                assert time.monotonic() < end_s, f"{state}, {wanted} needed; {load.poll()}"
                time.sleep(0.02)

        server.members = [
            {
                "name": "expert/1",
                "pool": "expert",
                "state": "serving",
                "pid": member.pid,
                "address": "",
                "load": {},
            }
        ]
        server.script = "say:1"
        plan = tmp_path / "plan.toml"
        plan.write_text('[[fault]]\nat = "100ms"\nkind = "freeze"\ntarget = "expert/1"\nfor = "10m"\n')
        report = tmp_path / "report.json"
        words = ["--rate", "5", "--for", "100s", "--chaos", str(plan), "--json", str(report)]
        load = subprocess.Popen(
            [sys.executable, "-m", "eaas.ops.cli", "load", server.url, *words], stdout=subprocess.DEVNULL
        )
        try:
            until_state("T")
            load.send_signal(number)
            load.wait(60)
            until_state("S", "R")
            assert report.exists() == (number != signal.SIGKILL)
        finally:
            load.kill()
            load.wait()
            member.kill()


def test_nobody_there_ends_with_1_and_says_what_to_do() -> None:
    with fake_server() as gone:
        pass
    result = load(gone)
    assert result.exit_code == 1
    assert "eaas serve" in result.output


def test_an_endpoint_that_asks_for_a_key_is_told_from_none(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key, server.script = "right", "say:2"
    for given, said in (("", "asks for a key and was sent none"), ("wrong", "does not take the key")):
        monkeypatch.setenv("SOME_KEY", given)
        result = load(server, "--requests", "1", "--api-key-env", "SOME_KEY")
        assert result.exit_code == 1
        assert said in result.output.replace("\n", " ") and "--api-key-env" in result.output
    monkeypatch.setenv("SOME_KEY", "right")
    assert load(server, "--requests", "1", "--api-key-env", "SOME_KEY").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arrivals", "often"], "closed:STREAMS"),
        (["--for", "5 bananas"], "no duration"),
        (["--model", "other"], "--model"),
        (["--rate", "0"], "rate over 0"),
        (["--prompts", "/no/such"], "/no/such"),
        (["--slo-ttft", "-1s"], "no duration"),
    ],
)
def test_an_option_that_makes_no_sense_ends_with_1_and_the_reason(
    server: FakeServer, arguments: list[str], said: str
) -> None:
    result = load(server, *arguments)
    assert result.exit_code == 1, result.output
    assert said in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("60s", 60.0), ("2m", 120.0), ("1.5h", 5400.0), ("7", 7.0), ("10us", 1e-5)],
)
def test_durations_are_read_with_their_units(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)
