"""Habits that no linter knows: safe loading, small files, words of unfinished work, one name for one thing."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
from collections.abc import Mapping
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
# Hand-written lines and files of the product (p2p, experts, router, eaas) as they are. Lower both with every deletion.
MOST_LINES, MOST_FILES = 70_954, 310
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def unsafe(node: ast.AST) -> str:
    """What of pickle, marshal, eval, exec or torch.load this node of a syntax tree reaches for; empty if nothing."""
    if isinstance(node, ast.Import):
        names = {alias.name.partition(".")[0] for alias in node.names} & UNSAFE_MODULES
        return f"imports {', '.join(sorted(names))}" if names else ""
    if isinstance(node, ast.ImportFrom):
        return f"imports {node.module}" if node.module in UNSAFE_MODULES else ""
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name):
            return f"calls {called.id}" if called.id in UNSAFE_CALLS else ""
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            return "calls torch.load" if (called.value.id, called.attr) == ("torch", "load") else ""
    return ""


def test_nothing_received_can_run_code() -> None:
    """No pickle, marshal, eval, exec or torch.load, by the syntax tree."""
    found = [
        f"{name_of(path)}:{node.lineno} {what}"
        for path in PYTHON
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.stmt | ast.expr) and (what := unsafe(node))
    ]
    assert not found, "\n".join(found)


def test_no_assert_guards_input() -> None:
    """`python -O` removes asserts, so the product has none."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in PYTHON
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found, f"asserts; raise a real exception: {', '.join(found)}"


def test_files_stay_small_and_finished() -> None:
    found = []
    for path in SOURCES:
        text = path.read_text()
        if (lines := text.count("\n")) > MAX_LINES:
            found.append(f"{name_of(path)} has {lines} lines, at most {MAX_LINES}: split it")
        if unfinished := re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b|NotImplementedError", text):
            found.append(f"{name_of(path)} holds {unfinished}")
    assert not found, "\n".join(found)


def test_the_product_grows_no_more() -> None:
    """Every capability pays for its lines with others: MOST_LINES and MOST_FILES only ever go down."""
    product = [path for path in SOURCES if not path.is_relative_to(ROOT / "benchmarks")]
    lines = sum(path.read_text().count("\n") for path in product)
    assert lines <= MOST_LINES, f"{lines} hand-written product lines, at most {MOST_LINES}: delete {lines - MOST_LINES}"
    assert len(product) <= MOST_FILES, f"{len(product)} product files, at most {MOST_FILES}: merge some"


def imports_of(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The product's modules that a file imports when it runs, anywhere in it; not what only a type checker reads."""
    tree = tree_of(path)
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {
                name if (name := f"{node.module}.{alias.name}") in modules else str(node.module) for alias in node.names
            }
    return found & set(modules)


def test_imports_go_round_in_no_circle() -> None:
    modules = {name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in PYTHON}
    graph = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' imports '.join(reversed(error.args[1]))}")


def test_every_module_and_public_function_says_what_it_does() -> None:
    silent = []
    for path in PYTHON:
        tree = tree_of(path)
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            silent.append(name_of(path))
        for node in tree.body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            if named and not node.name.startswith("_") and node.name != "main" and not ast.get_docstring(node):
                silent.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert not silent, "without a docstring: " + ", ".join(silent)


def test_no_large_or_built_file_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = [ROOT / name for name in listed.split("\0") if name]
    weights = ROOT / "eaas" / "demo_model"
    large = [name_of(p) for p in tracked if p.is_file() and p.stat().st_size > 5_000_000 and weights not in p.parents]
    built = [name_of(p) for p in tracked if p.suffix in (".so", ".o", ".pyc")]
    assert not large, f"over 5 MB: {large}"
    links = [name_of(p) for p in tracked if p.is_symlink()]
    assert not built, f"built files: {built}"
    # Archives, and checkouts without links, make text of them, which then is read as what it points to.
    assert not links, f"links: {links}"


def test_readme_and_figures_state_what_was_recorded() -> None:
    for path, text in readme.pages().items():
        assert path.read_text() == text, f"{path.name} is behind: run `python -m benchmarks.readme`"
