"""The documents: links lead somewhere, files that are named are there, and README.md stays short."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import typer.main
import yaml

from docs import site_links
from eaas.ops import cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MOST_README_LINES = 150
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
CODE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
# `experts/native/wire.h`; a folder ends with a slash or is left alone.
NAMED = re.compile(
    r"`((?:\.\./)*(?:eaas|experts|router|p2p|tests|benchmarks|deploy|docs)/[\w./-]+\.(?:py|cpp|h|md|toml|yaml|json))\b"
)


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@cache
def anchors(path: Path) -> set[str]:
    """How a page's headings are linked to."""
    text = CODE.sub("", path.read_text())
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in shown}


def broken(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "code", CODE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def test_every_link_leads_somewhere() -> None:
    wrong = [f"{page.relative_to(ROOT)}: {target}" for page in documents() for target in broken(page, page.read_text())]
    assert not wrong, "links that lead nowhere:\n" + "\n".join(wrong)


def test_files_that_are_named_are_there() -> None:
    wrong = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in documents()
        if page.name != "CHANGELOG.md"
        for name in NAMED.findall(page.read_text())
        if not (ROOT / name.lstrip("./")).exists()
    ]
    assert not wrong, "files that are not there:\n" + "\n".join(wrong)


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A *short* page\n")
    text = "[`a`](page.md#a-short-page) [b](page.md#long) [c](gone.md) [d](https://example.com) `[e](f.md)`\n"
    text += "```\n[e](f.md)\n```\n"
    assert broken(page, text) == ["page.md#long", "gone.md"]


def test_the_site_has_every_page_once() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [page for value in values for page in pages(value)]  # pyright: ignore[reportGeneralTypeIssues]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_site_says_of_other_files_where_they_are() -> None:
    shown = site_links.on_page_markdown("[a](../x/y.py), [x/y.py](../x/y.py), [b](c.md#d), ![e](../f.svg)")
    assert shown == "a (`x/y.py`), `x/y.py`, [b](c.md#d), ![e](../f.svg)"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().count("\n")
    assert lines <= MOST_README_LINES, f"README.md has {lines} lines, at most {MOST_README_LINES}: move some to docs/"


def commands(text: str) -> list[list[str]]:
    """The words after `eaas` of every command line in a page's shell blocks; only up to a pipe or a comment."""
    found = []
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.split(r"\s#|[|>&;]", line)[0].split()
            if words and words[0].rpartition("/")[2] == "eaas":
                found.append(words[1:])
    return found


def test_every_command_line_has_a_verb_and_options_that_there_are() -> None:
    root = typer.main.get_command(cli.app)
    declared = set(re.findall(r"^\| `(--[\w-]+)`", (DOCS / "options.md").read_text(), re.MULTILINE))
    wrong = []
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for words in commands(page.read_text()):
            verb, place = root, 0
            while (more := getattr(verb, "commands", None)) and place < len(words) and words[place] in more:
                verb, place = more[words[place]], place + 1
            known = declared | {option for parameter in verb.params for option in parameter.opts}
            unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
            if place == 0 or unknown:
                wrong.append(f"{page.name}: eaas {' '.join(words)}: {', '.join(unknown) or 'no such verb'}")
    assert not wrong, "\n".join(wrong)
