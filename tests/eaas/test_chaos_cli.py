"""What `eaas chaos` refuses before it asks anybody, and what its help says."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from eaas.ops.chaos.cli import chaos_app
from router.faults import KINDS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kill"], "kill whom? Name a member"),
        (
            ["kill", "expert/1", "--target", "expert/2"],
            "two targets given, expert/1 and expert/2; one is needed",
        ),
        (["kill", "expert/1", "--pool", "expert"], "one of them is needed"),
        (["kill", "expert/1", "--mode", "all"], "a target is one member; give a pool instead"),
        (["freeze", "expert/1", "--for", "soon"], "'soon' is no duration"),
        (["freeze", "expert/1", "--for", "2h"], "0 to 3600 is needed"),
        (["delay", "expert/1", "--by", "2m"], "by_s is 120.0; 0 to 60 is needed"),
        (["slow", "expert/1", "--times", "0.5"], "1 to 1000 is needed"),
        (["loss", "expert/1", "--share", "1.5"], "share is 1.5; 0 to 1 is needed"),
        (["corrupt", "expert/1", "--where", "heart"], "give one of wire, rows, nan"),
        (["kill", "expert/1", "--where", "heart"], "give one of request-half-written"),
        (["kill", "expert/1", "--within", "3s"], "within goes with where"),
        (["freeze", "expert/1", "--where", "computed", "--within", "2h"], "at most 60 s"),
        (["run", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (
            ["kill", "expert/1", "--url", "http://127.0.0.1:9"],
            "No EaaS gateway answers at http://127.0.0.1:9",
        ),
        (["list", "--admin", "127.0.0.1:9"], "No admin listener answers at http://127.0.0.1:9"),
        (
            ["clear", "--admin", "127.0.0.1:9", "--key-file", "/nowhere"],
            "--key-file /nowhere cannot be read as ASCII",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(chaos_app, arguments, env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert done.exit_code == 1, done.output
    assert message in done.stderr.replace("\n", " "), done.stderr


@pytest.mark.parametrize("arguments", [["kill", "--for", "3s"], ["slow", "--by", "5ms"], ["explode"]])
def test_options_that_a_kind_does_not_take_are_unknown(arguments: list[str]) -> None:
    assert CliRunner().invoke(chaos_app, arguments).exit_code == 2


@pytest.mark.parametrize("verb", [*KINDS, "run", "list", "clear"])
def test_every_verb_has_a_worked_line_and_its_exit_codes(verb: str) -> None:
    done = CliRunner().invoke(chaos_app, [verb, "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert done.exit_code == 0
    assert f"Example: eaas chaos {verb}" in done.output
    assert verb in ("list", "clear") or "Exit codes: 0 " in done.output
