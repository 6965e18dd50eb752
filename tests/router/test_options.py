"""An option is declared once: flag, variable, file and default give it, in this order, and it is passed on as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from router.config import ProcessOptions
from router.options import Options, OptionsInvalid, arguments, derived, option, options_of, read


@dataclass(frozen=True, kw_only=True)
class Shared(Options):
    """What two processes have"""

    wait_s: float = option(30.0, "Longest wait.", above=0)
    size: int = option(1, "How many.", least=0, most=9)


@dataclass(frozen=True, kw_only=True)
class First(Shared, ProcessOptions):
    """Do it.

    Example:
      eaas serve here --size 2
    """

    place: Path = option(Path("there"), "Where.", positional=True)
    size: int = option(2)
    names: tuple[str, ...] = option((), "Names.")
    pools: tuple[str, ...] = option((), "Pools, one at a time.", repeats=True)
    numbers: tuple[int, ...] = option((), "Numbers.")
    limit: int | None = option(None, "Bound, if any.")
    loud: bool = option(False, "Be loud.")
    colour: str = option("red", "Paint.", choices=("red", "blue"))
    hidden: int = 7


@dataclass(frozen=True, kw_only=True)
class Second(Shared):
    """Do the other thing."""

    place: str = option(help="Another place.")


def first(*words: str, environment: dict[str, str] | None = None) -> First:
    return read(First, "serve", words, environment or {})


def test_flag_counts_before_variable_before_file_before_default(tmp_path: Path) -> None:
    file = tmp_path / "eaas.toml"
    file.write_text("[serve]\nsize = 3\nwait_s = 4\nloud = true\nnames = ['a', 'b']\n[gateway]\nstall_s = 1\n")
    named = {"EAAS_SERVE_SIZE": "5", "EAAS_SERVE_CONFIG": str(file), "EAAS_SERVE_NUMBERS": "1,2"}
    assert first().size == 2
    read_there = first("--config", str(file))
    assert (read_there.size, read_there.wait_s, read_there.loud, read_there.names) == (
        3,
        4.0,
        True,
        ("a", "b"),
    )
    assert first(environment=named).size == 5
    assert first("--size", "6", "--no-loud", environment=named) == first(
        "--size=6", "--numbers=1,2", "--config", str(file), "--no-loud"
    )


def test_what_is_passed_on_is_read_back_as_it_was() -> None:
    options = first(
        *("here", "--names", "a,b", "--pools", "x:1..2", "--pools", "y:1..2", "--limit", "-1", "--loud"),
        *("--size", "2"),
    )
    words = arguments(options)
    assert words == [
        "--size=2", "here", "--names=a,b", "--pools=x:1..2", "--pools=y:1..2", "--limit=-1", "--loud",
    ]  # fmt: skip
    assert read(First, "serve", words, {}) == options
    assert arguments(First()) == []


def test_another_process_gets_what_both_declare_by_one_declaration() -> None:
    """`place` is another option there; `size` is the same with another default."""
    second = derived(first("here", "--size", "1", "--wait-s", "5"), Second, place="x")
    assert arguments(second) == ["--wait-s=5.0", "--size=1", "--place=x"]
    assert options_of(First)["size"].owner is Shared and options_of(First)["size"].help == "How many."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "x"], "--size x: a whole number is needed."),
        (["--size", "1.5"], "--size 1.5: a whole number is needed."),
        (["--size", "10"], "--size 10: at least 0 and at most 9 is needed."),
        (["--wait-s", "0"], "--wait-s 0.0: more than 0 is needed."),
        (["--wait-s", "nan"], "--wait-s nan: more than 0 is needed."),
        (["--numbers", "1,x"], "--numbers 1,x: a whole number is needed for each."),
        (["--colour", "green"], "--colour green: one of red, blue is needed."),
    ],
)
def test_nonsense_is_refused_with_what_is_needed(words: list[str], message: str) -> None:
    with pytest.raises(OptionsInvalid) as refused:
        first(*words)
    assert str(refused.value) == message
    with pytest.raises(OptionsInvalid):
        First(size=10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve]\nsise = 1\n", r"in \[serve\] sise is not known; size\?"),
        ("[serv]\nsize = 1\n", r"table serv is not known; serve\?"),
        ("size = 1\n", r"table size is not known; one of serve, "),
        ("[serve]\nsize = true\n", r"eaas.toml: size in \[serve\] True: a whole number is needed"),
        ("[serve]\nloud = 'maybe'\n", r"loud in \[serve\] maybe: true or false is needed"),
        ("[serve\n", "cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "eaas.toml"
    file.write_text(text)
    with pytest.raises(OptionsInvalid, match=message):
        first("--config", str(file))
    with pytest.raises(OptionsInvalid, match="EAAS_SERVE_LOUD maybe: true or false is needed"):
        first(environment={"EAAS_SERVE_LOUD": "maybe"})


def test_what_cannot_be_read_is_bad_usage_and_help_says_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, message in ((["--siz", "1"], "unrecognized"), (["--size"], "expected one argument")):
        with pytest.raises(SystemExit, match="2"):
            first(*words)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        read(Second, "gateway", [], {})
    assert "--place must be given" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        first("--help")
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "Usage: eaas serve [MODEL] [options] Do it.",
        "eaas serve here --size 2",
        "--size N How many. (default: 2)",
        "--wait-s SECONDS Longest wait. (default: 30)",
        "EAAS_SERVE_NAME",
        "[serve] of --config FILE",
        "Exit codes: 0",
    ):
        assert words in said, words
    assert "hidden" not in said
