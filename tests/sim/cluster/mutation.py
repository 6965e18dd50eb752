"""Cores with one line changed, and who notices."""

from __future__ import annotations

import ast
import importlib
import sys
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

from tests.router.scenarios import STORIES
from tests.sim.cluster import runner
from tests.sim.cluster.world import Step
from tests.sim.core_mutants import CORE_MUTANTS, Mutant
from tests.sim.model_mutants import MODEL_MUTANTS

MUTANTS = CORE_MUTANTS | MODEL_MUTANTS
# Their classes are those of the events and of everyone else's states.
_SHARED = {"state", "events", "view", "bitmap"}
# Changes nothing: whoever notices it notices the planting.
UNCHANGED = Mutant("core", "def step(", "def step(", "")
SEEDS = 300
EVENTS = 2500


def core_modules(package: str = "router", top: str = "core") -> list[str]:
    """Modules of the core, found by what it imports."""
    folder = Path(str(importlib.import_module(package).__file__)).parent
    found: list[str] = []
    todo = [top]
    while todo:
        name = todo.pop()
        if name in found or name in _SHARED or not (folder / f"{name}.py").exists():
            continue
        found.append(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == package:
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                todo.append(str(node.module).removeprefix(f"{package}."))
    return found


def mutated(mutant: Mutant) -> Step:
    """The core's step with one line changed, in modules of its own.

    Raises:
        ValueError: the source does not say what the mutant changes, or not once.
    """
    package = sys.modules["router"]
    kept = {name: importlib.import_module(f"router.{name}") for name in core_modules()}
    path = Path(str(kept[mutant.module].__file__)) if mutant.module in kept else Path()
    source = path.read_text() if mutant.module in kept else ""
    if source.count(mutant.says) != 1:
        raise ValueError(f"{mutant.module} says {source.count(mutant.says)} times, not once: {mutant.says!r}")
    for name in kept:
        del sys.modules[f"router.{name}"]
        delattr(package, name)
    try:
        changed = ModuleType(f"router.{mutant.module}")
        changed.__file__ = str(path)
        sys.modules[changed.__name__] = changed
        setattr(package, mutant.module, changed)
        exec(compile(source.replace(mutant.says, mutant.instead), str(path), "exec"), changed.__dict__)
        return importlib.import_module("router.core").step
    finally:
        for name, original in kept.items():
            sys.modules[f"router.{name}"] = original
            setattr(package, name, original)


def noticed(mutant: Mutant, seeds: int = SEEDS, events: int = EVENTS, *, stories_first: bool = False) -> str:
    """Which promise a mutant breaks, and where; empty if nobody notices."""
    wrong = mutated(mutant)
    if stories_first and (by := told(wrong)):
        return by
    for job in runner.jobs(0, seeds, events, "both"):
        if promise := runner.run(job, wrong).promise:
            return f"{promise} (seed {job.seed}, {job.mode})"
    return "" if stories_first else told(wrong)


def told(wrong: Step) -> str:
    """The first story that ends badly with this core; empty if none."""
    for story in STORIES:
        try:
            story(wrong)
        except Exception:
            return f"{story.__name__.replace('_', ' ')} (story)"
    return ""


def _notice(name: str) -> tuple[str, str]:
    return name, noticed(MUTANTS[name])


def run_mutants(only: str, processes: int) -> int:
    """Run all mutants, or those whose name has a word in it; print who noticed each. Returns the exit code."""
    names = [name for name in MUTANTS if only in name]
    if by := noticed(UNCHANGED, seeds=6):
        print(f"the core itself breaks a promise, so mutants prove nothing: {by}")
        return 1
    width = max(map(len, names), default=0)
    alive = []
    with get_context("fork").Pool(processes) as pool:
        for name, by in pool.imap(_notice, names, chunksize=1):
            print(f"{name:{width}}  {by or 'NOBODY NOTICED'}", flush=True)
            if not by:
                alive.append(name)
    print(f"{len(names) - len(alive)} of {len(names)} mutants were noticed")
    return 1 if alive else 0
