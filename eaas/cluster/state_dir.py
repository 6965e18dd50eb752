"""Where a cluster of this host keeps what must last as long as it: its journal and its logs.

Never in a temporary folder: whatever ages files away there would take a running cluster's. Each cluster has a folder
of its own under $XDG_STATE_HOME/eaas, and a lock on it for life: a folder whose lock can be had is of one that ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "cluster-"


class StateDirUnusable(OSError):
    """No folder can be had there; the text says where, why, and what to do."""


def default_root() -> Path:
    """$XDG_STATE_HOME/eaas, by default ~/.local/state/eaas."""
    found = os.environ.get("XDG_STATE_HOME", "")
    # Relative ones are to be ignored, says the XDG Base Directory Specification.
    return (Path(found) if os.path.isabs(found) else Path.home() / ".local" / "state") / "eaas"  # noqa: PTH117


class StateDir:
    """One cluster's folder. `close` removes it.

    Attributes:
        path: The folder.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Remove what ended clusters left under `root`, and make a folder there.

        Raises:
            StateDirUnusable: it cannot be made or locked.
        """
        root = root or default_root()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Between making a folder and locking it nobody may sweep.
            with _locked(root):
                _sweep(root)
                self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
                self._lock = _lock(self.path)
        except (OSError, RuntimeError) as error:
            raise StateDirUnusable(
                f"{root} cannot hold the cluster's journal and logs: {error}. Name another folder with --state-dir."
            ) from error

    def ensure(self) -> None:
        """Make the folder again if somebody has removed it, with a lock of its own. Raises OSError."""
        if self._lock < 0 or self.path.is_dir():
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.path.parent):
            self.path.mkdir(mode=0o700)
            try:
                lock = _lock(self.path)
            except OSError:
                # Without a lock it is nobody's; the next call tries again.
                self.path.rmdir()
                raise
            os.close(self._lock)
            self._lock = lock
        logger.warning("state_dir_made_anew path=%s", self.path)

    def close(self) -> None:
        """Remove the folder and give up its lock. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(folder)
        except OSError:
            # It is in use, or somebody else's.
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock until it is closed, or its process has ended. Raises OSError: another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
