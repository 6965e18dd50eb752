"""The folder of a cluster stays its own, whatever happens to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eaas.cluster import process
from eaas.cluster.process import StateDir


def test_a_folder_made_again_is_locked_before_the_old_lock_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = StateDir(tmp_path)
    shutil.rmtree(kept.path)
    lock, taken = process._lock, []

    def refused(folder: Path) -> int:
        taken.append(folder)
        raise BlockingIOError("another has it")

    monkeypatch.setattr(process, "_lock", refused)
    with pytest.raises(BlockingIOError):
        kept.ensure()
    assert taken == [kept.path] and not kept.path.exists(), "nobody's folder may look like one that is in use"
    monkeypatch.setattr(process, "_lock", lock)
    kept.ensure()
    other = StateDir(tmp_path)
    assert kept.path.is_dir(), "the sweep of another launcher left it alone"
    for folder in (other, kept):
        folder.close()
    assert not list(tmp_path.iterdir())
