"""Holds each expert server to a share of one core, as if it ran on a lane of its own: a CPU quota of its process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from router.view import EXPERT, View

# Short, so that a server at its limit waits little for the next period.
PERIOD_US = 5_000
LEAST_QUOTA_US = 1_000
VERSION_1, VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
LOOK_S = 0.01


class LaneShareUnavailable(RuntimeError):
    """This machine lets no quota be set; the text says why."""


class LaneShare:
    """Gives every expert server its own quota, those that join later included, for the length of a `with`."""

    def __init__(self, view: Callable[[], View | None], share: float) -> None:
        """
        Args:
            view: Gives the cluster's newest View.
            share: Of one core, 0 to 1.

        Raises:
            LaneShareUnavailable: no control group can be made here; at the end of the `with`, for one that joined.
        """
        self._view = view
        self._quota_us, self._period_us = round(PERIOD_US * share), PERIOD_US
        if self._quota_us < LEAST_QUOTA_US:
            self._quota_us, self._period_us = LEAST_QUOTA_US, round(LEAST_QUOTA_US / share)
        self._groups: dict[int, Path] = {}
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="lane-share")

    def __enter__(self) -> LaneShare:
        self._hold_new()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        home = VERSION_1 if VERSION_1.is_dir() else VERSION_2
        for pid, group in self._groups.items():
            with contextlib.suppress(ProcessLookupError):  # It has ended.
                (home / "cgroup.procs").write_text(str(pid))
            end_s = time.monotonic() + 2
            while group.exists() and time.monotonic() < end_s:
                with contextlib.suppress(OSError):  # Its process has not quite gone.
                    group.rmdir()
        if self._error is not None:
            # Servers that joined since were not held: what was measured is something else.
            raise self._error

    def _follow(self) -> None:
        try:
            while not self._ended.wait(LOOK_S):
                self._hold_new()
        except Exception as error:
            self._error = error

    def _hold_new(self) -> None:
        view = self._view()
        for member in view.pool(EXPERT) if view else ():
            if member.pid not in self._groups:
                self._hold(member.pid)

    def _hold(self, pid: int) -> None:
        first = VERSION_1.is_dir()
        group = (VERSION_1 if first else VERSION_2) / f"eaas-{pid}"
        try:
            group.mkdir(exist_ok=True)
            if first:
                (group / "cpu.cfs_period_us").write_text(str(self._period_us))
                (group / "cpu.cfs_quota_us").write_text(str(self._quota_us))
            else:
                (group / "cpu.max").write_text(f"{self._quota_us} {self._period_us}")
            (group / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            pass  # It has ended already.
        except OSError as error:
            raise LaneShareUnavailable(
                f"no CPU quota can be set under {group.parent} ({error}); run as root, on a machine with control "
                "groups, or leave --share out."
            ) from None
        self._groups[pid] = group
