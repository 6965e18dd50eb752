"""The journal: what was committed is there again, whatever ended the router."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from router.core import step
from router.events import Exited, Join, Loaded, Started
from router.journal import Changes, Journal, JournalUnusable
from router.state import Config, State

DURABLE = ("salt", "term", "epoch", "joined", "named", "models", "members")

# Joins and exits for ever, telling each epoch on stdout only after its commit.
WRITER = """
import itertools, sys
from pathlib import Path
from router.core import step
from router.journal import Journal
from router.events import Exited, Join, Publish, Started
from router.state import Config

journal = Journal(Path(sys.argv[1]))
config, state = Config(experts_wanted=3, replicas=2), journal.load()
changes = (
    event
    for n in itertools.count(1)
    for event in (
        Join(pool="expert", address="a", pid=n, host="h", layers=2, experts=8),
        Exited(host="h", pid=n - 3),
    )
)
events = itertools.chain([Started(salt=5)], changes)
for now, event in enumerate(events):
    after, commands = step(config, state, event, now / 1000)
    journal.save(state, after)
    state = after
    for command in commands:
        if isinstance(command, Publish):
            print(state.term, command.epoch, ",".join(state.members), flush=True)
"""


def grown(path: Path, steps: int = 60, seed: int = 0) -> State:
    """A journal with a history, and the state that it must hold."""
    dice = random.Random(seed)
    journal = Journal(path)
    config, state = Config(experts_wanted=3, replicas=2), journal.load()
    for now in range(steps):
        if now == 0:
            event = Started(salt=9)
        elif dice.random() < 0.4:
            event = Join(pool="expert", address="a", pid=now, host="h", layers=3, experts=11, model_hash="m")
        elif state.members and dice.random() < 0.7:
            record = dice.choice(list(state.members.values()))
            event = Loaded(name=record.name, incarnation=record.incarnation, held=record.target, epoch=state.epoch)
        else:
            event = Exited(host="h", pid=dice.randrange(now))
        after, _ = step(config, state, event, now / 10)
        journal.save(state, after)
        state = after
    journal.close()
    return state


@pytest.mark.parametrize("seed", range(5))
def test_what_was_saved_step_by_step_is_loaded_whole(tmp_path: Path, seed: int) -> None:
    state = grown(tmp_path / "journal", seed=seed)
    loaded = Journal(tmp_path / "journal").load()
    for name in DURABLE:
        assert getattr(loaded, name) == getattr(state, name), f"seed {seed}: {name}"
    assert {g.name for g in loaded.gone} == {g.name for g in state.gone}, f"seed {seed}"
    assert {f.name for f in fields(State)} >= set(DURABLE)


def test_a_killed_router_forgets_nothing_that_it_told(tmp_path: Path) -> None:
    """SIGKILL at a random moment, five times: the journal is never behind what was published."""
    path = tmp_path / "journal"
    told_term, told_epoch = 0, 0
    for round_ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(20 + 13 * round_)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.wait()
        told = [line.split() for line in lines if line.endswith("\n")]
        assert int(told[0][0]) == told_term + 1, "each start is a new term"
        assert int(told[0][1]) > told_epoch, "the epoch only rises, across restarts too"
        told_term, told_epoch = int(told[-1][0]), int(told[-1][1])
        journal = Journal(path)
        state = journal.load()
        journal.close()
        assert state.term == told_term
        assert state.epoch >= told_epoch
        if state.epoch == told_epoch:
            assert ",".join(state.members) == told[-1][2]


def test_a_journal_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(JournalUnusable, match="See that its folder exists"):
        Journal(tmp_path / "no" / "such" / "folder")
    (tmp_path / "text").write_text("this is no database, " * 100)
    with pytest.raises(JournalUnusable, match="is no SQLite file"):
        Journal(tmp_path / "text")
    first = Journal(tmp_path / "journal")
    first.save(State(), State(term=1))
    with pytest.raises(JournalUnusable, match="is used by another router"):
        Journal(tmp_path / "journal")
    first.close()
    with sqlite3.connect(tmp_path / "journal") as base:
        base.execute("UPDATE state SET value = json_set(value, '$.layout', 99) WHERE key = 'counters'")
    base.close()
    with pytest.raises(JournalUnusable, match="has layout 99, this router writes 2; give another --journal"):
        Journal(tmp_path / "journal").load()
    with sqlite3.connect(tmp_path / "foreign") as base:
        base.execute("CREATE TABLE counters (one INTEGER)")
    base.close()
    with pytest.raises(JournalUnusable, match="has the tables counters, this router writes one, state; give another"):
        Journal(tmp_path / "foreign")


def test_a_damaged_record_is_refused_not_guessed(tmp_path: Path) -> None:
    grown(tmp_path / "journal")
    with sqlite3.connect(tmp_path / "journal") as base:
        base.execute("UPDATE state SET value = substr(value, 1, 40) WHERE key LIKE 'members/%'")
    base.close()
    with pytest.raises(JournalUnusable, match="cannot be read"):
        Journal(tmp_path / "journal").load()


def test_a_commit_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    state = grown(tmp_path / "journal")
    journal = Journal(tmp_path / "journal")
    journal._base.execute("PRAGMA query_only=ON")
    after, _ = step(Config(), state, Join(pool="gateway", address="a", pid=1, host="h"), 99.0)
    with pytest.raises(JournalUnusable, match="cannot be written"):
        journal.save(state, after)
    with pytest.raises(JournalUnusable, match="cannot be written"):
        journal.prove(state)
    assert journal.load().members == state.members
    journal._base.execute("PRAGMA query_only=OFF")
    journal.prove(state)
    assert journal.save(state, after)
    assert journal.load().members == after.members


def test_a_journal_that_somebody_removed_is_written_again_whole(tmp_path: Path) -> None:
    """With its folder, as whatever ages files away removes it; SQLite would go on writing to a file of no name."""
    folder = tmp_path / "state"
    folder.mkdir()
    path = folder / "journal"
    before = grown(path)
    journal = Journal(path)
    state = journal.load()
    shutil.rmtree(folder)
    ticked = replace(state, ticked_s=state.ticked_s + 0.1)
    assert journal.save(state, ticked), "what did not change is written too"
    journal.close()
    loaded = Journal(path).load()
    assert {name: getattr(loaded, name) for name in DURABLE} == {name: getattr(before, name) for name in DURABLE}


def test_a_journal_made_anew_counts_once_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters alone, without the members, would have every member fenced after the next start."""
    path = tmp_path / "journal"
    before = grown(path)
    journal = Journal(path)
    state = journal.load()
    path.unlink()
    write, full = journal._write, [True]

    def written(found: Changes) -> None:
        if full[0]:
            raise JournalUnusable("no room")
        write(found)

    monkeypatch.setattr(journal, "_write", written)
    ticked = replace(state, ticked_s=state.ticked_s + 0.1)
    for attempt in (lambda: journal.save(state, ticked), lambda: journal.prove(state)):
        with pytest.raises(JournalUnusable, match="no room"):
            attempt()
    full[0] = False
    journal.prove(state)
    journal.close()
    loaded = Journal(path).load()
    assert {name: getattr(loaded, name) for name in DURABLE} == {name: getattr(before, name) for name in DURABLE}
