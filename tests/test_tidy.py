"""Habits that no linter knows: safe loading, small files, words of unfinished work, one name for one thing."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("eaas", "experts", "router", "p2p", "benchmarks")
SOURCES = sorted(
    path
    for package in PACKAGES
    for suffix in ("*.py", "*.cpp", "*.h")
    for path in (ROOT / package).rglob(suffix)
    if "_pb2" not in path.name and "build" not in path.parts
)
PYTHON = [path for path in SOURCES if path.suffix == ".py"]
# A state machine is one file; whatever else is that long is two ideas.
MAX_LINES = 800
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_nothing_received_can_run_code(path: Path) -> None:
    """No pickle, marshal, eval, exec or torch.load, by the syntax tree."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
            assert not names & UNSAFE_MODULES, (
                f"{name_of(path)}:{node.lineno} imports {names & UNSAFE_MODULES}"
            )
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "") not in UNSAFE_MODULES, (
                f"{name_of(path)}:{node.lineno} imports {node.module}"
            )
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                assert called.id not in UNSAFE_CALLS, f"{name_of(path)}:{node.lineno} calls {called.id}"
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert (called.value.id, called.attr) != ("torch", "load"), (
                    f"{name_of(path)}:{node.lineno} torch.load"
                )


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_no_assert_guards_input(path: Path) -> None:
    """`python -O` removes asserts, so the product has none."""
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not lines, f"{name_of(path)} asserts on lines {lines}; raise a real exception"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_stay_small_and_finished(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES, (
        f"{name_of(path)} has {text.count(chr(10))} lines, at most {MAX_LINES}: split it"
    )
    unfinished = re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b|NotImplementedError", text)
    assert not unfinished, f"{name_of(path)} holds {unfinished}"


def test_every_module_and_public_function_says_what_it_does() -> None:
    silent = []
    for path in PYTHON:
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            silent.append(name_of(path))
        for node in tree.body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            if (
                named
                and not node.name.startswith("_")
                and node.name != "main"
                and not ast.get_docstring(node)
            ):
                silent.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert not silent, "without a docstring: " + ", ".join(silent)


def test_no_large_or_built_file_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tracked = [ROOT / name for name in listed.split("\0") if name]
    weights = ROOT / "eaas" / "demo_model"
    large = [
        name_of(p)
        for p in tracked
        if p.is_file() and p.stat().st_size > 5_000_000 and weights not in p.parents
    ]
    built = [name_of(p) for p in tracked if p.suffix in (".so", ".o", ".pyc")]
    assert not large, f"over 5 MB: {large}"
    links = [name_of(p) for p in tracked if p.is_symlink()]
    assert not built, f"built files: {built}"
    # Archives, and checkouts without links, make text of them, which then is read as what it points to.
    assert not links, f"links: {links}"


def test_the_readme_states_the_recorded_figures() -> None:
    text = readme.README.read_text()
    assert readme.render(text, readme.latest()) == text, "run `python -m benchmarks.readme`"
