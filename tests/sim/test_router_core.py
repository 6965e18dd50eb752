"""The router's core under every fault, by seed; and proof that these tests notice when the core is wrong."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from router.core import step
from tests.router.scenarios import STORIES
from tests.router.world import Step, run

SEEDS = 300
EVENTS = 200
CORE = (
    "suspicion",
    "placement",
    "records",
    "launches",
    "leases",
    "drains",
    "orders",
    "moves",
    "autoscale",
    "balance",
    "rebalance",
    "core",
)


def test_every_promise_holds_after_every_event_and_all_comes_back_when_faults_stop() -> None:
    for seed in range(SEEDS):
        run(step, seed, EVENTS)


# module, what it says, what the mutant says instead
MUTANTS = {
    "unloads before the acks": ("moves", "if retiring_epoch <= acked:", "if retiring_epoch:"),
    "counts acks of the epoch before": (
        "moves",
        "if retiring_epoch <= acked:",
        "if retiring_epoch - 1 <= acked:",
    ),
    "breaks before it makes": ("moves", "return covered & ~unmade", "return covered | unmade"),
    "breaks when one of two is made": ("moves", "return covered & ~unmade", "return covered"),
    "serves what is not loaded": (
        "moves",
        "    held = record.loaded & record.target\n",
        "    held = record.target\n",
    ),
    "forgets when the target shrank": (
        "moves",
        "dropped_epoch=next_epoch if dropped else record.dropped_epoch",
        "dropped_epoch=record.dropped_epoch",
    ),
    "believes stale reports": ("core", "if event.epoch < record.dropped_epoch:", "if event.epoch < 0:"),
    "believes acks of the future": (
        "core",
        "pulse.acked < event.epoch <= state.epoch",
        "pulse.acked < event.epoch",
    ),
    "uses names again": ("core", "state.named.get(event.pool, 0) + 1", "len(state.members) + 1"),
    "uses incarnations again": ("core", "joined = state.joined + 1", "joined = len(state.members) + 1"),
    "listens to strangers": ("records", "record.incarnation == incarnation", "record.incarnation != -1"),
    "trusts a joiner ahead of time": ("core", "acked=state.epoch)", "acked=state.epoch + 9)"),
    "keeps the epoch at a new term": (
        "core",
        "isinstance(event, Started) or _shows_another",
        "_shows_another",
    ),
    "fences last replicas": (
        "leases",
        "name not in state.silent or is_last_replica(state, name)",
        "name not in state.silent",
    ),
    "never doubts itself": ("leases", "doubts = missed >= 2", "doubts = missed >= 99"),
    "doubts for one lease": ("records", "config.doubt_leases * config.lease_s", "config.lease_s"),
    "counts its own stall as silence": ("leases", "if gap_s <= config.stall_s:", "if gap_s <= 1e9:"),
    "fences at half a lease": (
        "leases",
        "or silence_s > config.lease_s",
        "or silence_s > config.lease_s / 2",
    ),
    "never fences for silence": ("leases", "            silent.append(name)\n", "            pass\n"),
    "never clears a suspect": (
        "leases",
        "suspects=frozenset(suspects)",
        "suspects=state.suspects | frozenset(suspects)",
    ),
    "lets an old report overtake a new one": (
        "core",
        "    if event.epoch < pulse.reported:\n",
        "    if event.epoch < 0:\n",
    ),
    "unloads at once what is no longer reported": (
        "moves",
        "withdrawn = record.serving & record.target & ~serving",
        "withdrawn = record.serving & held & spare",
    ),
    "forgets what a lost launcher ordered": (
        "launches",
        "in state.starts + state.orphans)",
        "in state.starts)",
    ),
    "judges before it excuses its stall": (
        "core",
        "    state = leases.excuse_stall(config, state)\n    state = _apply(config, state, event, commands)\n",
        "    state = _apply(config, state, event, commands)\n    state = leases.excuse_stall(config, state)\n",
    ),
    "orders while it doubts itself": (
        "launches",
        "if state.silent and not doubts_itself(config, state) else",
        "if state.silent else",
    ),
    "counts its stall as doubt": ("leases", "state.doubting_s + stall_s", "state.doubting_s"),
    "keeps a surplus": (
        "drains",
        "            state = begin(state, least.name, surplus=True)\n",
        "            pass\n",
    ),
    "drains an operator's server": (
        "drains",
        "for record in members if record.ordered]",
        "for record in members]",
    ),
    "orders twice": ("launches", "live(config, state, name) - ordered", "live(config, state, name)"),
    "forgets to order": ("launches", "missing = state.wanted[name]", "missing = 0 * state.wanted[name]"),
    "places one copy too few": ("placement", "range(1, self.copies + 1)", "range(1, self.copies)"),
    "leaves the newcomer idle": ("placement", "if most - least < 2:", "if most - least < 99:"),
    "keeps surplus copies": ("placement", "bit_count() > self.copies:", "bit_count() > 99:"),
    "exceeds capacity": ("moves", "        if room < wanted.bit_count():", "        if room < -99:"),
    "keeps who has exited": (
        "core",
        'state = fence(config, state, record.name, "its process ended", commands, ended=True)',
        "pass",
    ),
    "retries without waiting": ("launches", "* 2.0 **", "* 0.0 **"),
    "drops drained servers at once": (
        "moves",
        "if advanced.draining and not advanced.target",
        "if advanced.draining",
    ),
    "never suspects before the prior": (
        "suspicion",
        "if rhythm.samples < LEARNED:",
        "if rhythm.samples >= 0:",
    ),
    "knows nothing of tails": ("suspicion", "max(lease_s / 50, excess_s / max(1, beyond))", "lease_s / 50"),
    "fences before the least silence": ("leases", " and silence_s >= config.least_silence_s)", ")"),
    "counts only the condemned when it doubts itself": (
        "leases",
        "missed += silence_s > 2 * config.renew_s",
        "missed += silence_s > config.lease_s",
    ),
    "forgets that the fenced may live": ("records", "and not ended and until_s", "and ended and until_s"),
    "waits for those whose end is proved": (
        "core",
        "    if len(ghosts) < len(state.ghosts):\n",
        "    if len(ghosts) < 0:\n",
    ),
    "waits for copies for ever": (
        "orders",
        "if state.now_s - batch.since_s >= config.move_s:",
        "if not batch:",
    ),
    "asks a stuck server again at once": ("orders", "wait_s = config.move_s * 2.0", "wait_s = 0.0 * 2.0"),
    "orders all copies at once": (
        "orders",
        "config.bytes_in_flight // state.model.expert_bytes))",
        "99))",
    ),
    "moves before it repairs": ("orders", "    queue = queue or {", "    queue = {"),
    "replaces who was to go": ("drains", "draining[: max(0, missing)]", "draining[:0]"),
    "keeps who asked to go": (
        "drains",
        "if record.surplus and not surplus else",
        "if not record.draining else",
    ),
    "ends the worker with most streams": (
        "drains",
        'return load.get("running", 0) + load.get("waiting", 0)',
        'return -load.get("running", 0)',
    ),
    "knows a process twice": ("core", "if event.pid > 0 and", "if event.pid < 0 and"),
    "waits for workers that never began": (
        "records",
        "if r.pool == ATTENTION and r.ready]",
        "if r.pool == ATTENTION]",
    ),
    "lets a late beginner use what was given up": (
        "core",
        "not record.ready and event.epoch >= state.unloaded_epoch:",
        "not record.ready:",
    ),
    "never exchanges without room": ("moves", "return lowest(free, wanted.bit_count())", "return 0"),
    "moves at a stranger's word": ("core", "isinstance(commands[-1], Stranger | Refused)", "False"),
    "balances while things move": ("rebalance", "    if not _is_at_rest(state):\n", "    if not state:\n"),
    "balances never": (
        "rebalance",
        "evolve(_improve(config, state, layer), balanced",
        "evolve(state, balanced",
    ),
    "makes any number of copies": (
        "rebalance",
        "places = experts * config.replicas + config.redundant",
        "places = 99 * len(records)",
    ),
    "drops the last copy for balance": ("rebalance", "min_replicas=config.replicas", "min_replicas=0"),
    "scales past the bounds": ("autoscale", "wanted = min(max(wanted, least), most)\n", "pass\n"),
}


def mutant(module: str, says: str, instead: str) -> Step:
    """The core's step with one line changed, in modules of its own."""
    names = [f"router.{name}" for name in CORE]
    package = sys.modules["router"]
    kept = {name: importlib.import_module(name) for name in names}
    for name in CORE:
        del sys.modules[f"router.{name}"]
        delattr(package, name)
    try:
        for name in CORE:
            if name == module:
                original = kept[f"router.{name}"]
                path = str(original.__file__)
                source = Path(path).read_text()
                assert source.count(says) == 1, f"{module} has {source.count(says)} times: {says}"
                changed = ModuleType(f"router.{name}")
                sys.modules[changed.__name__] = changed
                setattr(package, name, changed)
                exec(compile(source.replace(says, instead), path, "exec"), changed.__dict__)
            else:
                importlib.import_module(f"router.{name}")
        return sys.modules["router.core"].step
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
        for name, original in kept.items():
            setattr(package, name.partition(".")[2], original)


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_core_that_is_wrong_is_noticed(fault: str) -> None:
    wrong = mutant(*MUTANTS[fault])
    try:
        for story in STORIES:
            story(wrong)
        for seed in range(100):
            run(wrong, seed, EVENTS)
    except (AssertionError, KeyError, StopIteration):
        return
    pytest.fail(f"a core that {fault} passes 100 seeds")
