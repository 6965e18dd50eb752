"""Whether the loops that do a process's work go on, as another thread of that process sees it.

A lease that is renewed says that a process lives. That its work loop hangs behind it, stopped, or waiting for what
never comes, only the loop's own counter shows. A sample with no count in it is held against the loop where the process
also computed nothing and no thread of it could run or waited for a disk: a long step, a host too busy to run it, and
weights that are being read are no hang. What keeps these up for `longest_s` is one all the same. Time in which the
process itself stood still counts for two samples at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from router import logs

log = logging.getLogger(__name__)

# Samples within the time that a loop may stand still, and the longest from one to the next: each wakes a thread, and on
# a host with few cores what every process does idle is taken from those that compute.
_SAMPLES, _SAMPLE_MOST_S = 5, 0.2
# Keeping a lease, and saying that one lives, takes less of a processor than this.
_IDLE_SHARE = 0.05
# A process that takes no sample for longer did not run.
_STALL_S = 0.5
_TASKS, _STAT_BYTES = Path("/proc/self/task"), 4096


@dataclass(kw_only=True, slots=True)
class Standing:
    """What samples have shown of one loop. idle_s: without a count, and without anything that could bring one."""

    bound_s: float
    longest_s: float
    seen: int | None = None
    idle_s: float = 0.0
    still_s: float = 0.0

    @property
    def sample_s(self) -> float:
        """How often to look at it."""
        return min(self.bound_s / _SAMPLES, _SAMPLE_MOST_S)

    def sample(self, count: int | None, elapsed_s: float, idle: Callable[[], bool]) -> float:
        """How long the loop has stood still, if that is longer than it ever may; else 0.

        Args:
            count: Of the loop; None: it does not run yet.
            elapsed_s: Since the last sample.
            idle: Whether the process did nothing meanwhile; only asked where the count is that of the last sample.
        """
        if count is None or count != self.seen:
            self.seen, self.idle_s, self.still_s = count, 0.0, 0.0
            return 0.0
        elapsed_s = min(elapsed_s, 2 * self.sample_s)
        self.still_s += elapsed_s
        if idle():
            self.idle_s += elapsed_s
        return self.still_s if self.idle_s > self.bound_s or self.still_s > self.longest_s else 0.0


class OwnTime:
    """time.monotonic() less the time in which this process stood still: what it gave itself no chance to do is nobody's
    delay. A heartbeat's samples show that; without them, and for half a second after each, it is time.monotonic()."""

    def __init__(self) -> None:
        # Together: replaced by one assignment, so that no reader sees one without the other.
        self._seen: tuple[float, float] | None = None  # the last sample, and what stood still before it

    def __call__(self) -> float:
        """Seconds; never goes back."""
        now_s, seen = time.monotonic(), self._seen
        return now_s if seen is None else min(now_s, seen[0] + _STALL_S) - seen[1]

    def sample(self) -> None:
        """The process runs; to be called some times in every half second, by one thread."""
        now_s, seen = time.monotonic(), self._seen
        stood_s = 0.0 if seen is None else seen[1] + max(0.0, now_s - seen[0] - _STALL_S)
        self._seen = now_s, stood_s


class Heartbeat:
    """Watches the counters of loops from a thread of its own: where one of them stands, its process does."""

    def __init__(
        self,
        *counts: Callable[[], int | None],
        bound_s: float,
        longest_s: float,
        on_change: Callable[[], None] = lambda: None,
        own_time: OwnTime | None = None,
    ) -> None:
        """Args:
        counts: One a loop; rises while that goes on, idle or not; None while there is none. None may wait for a loop.
        bound_s: Longest that a loop may stand still while the process does nothing else.
        longest_s: Longest that it may stand still whatever the process does.
        on_change: Called on the watching thread when a loop is found to stand, and when all go on after all.
        own_time: Told of each sample.
        """
        self._own_time = own_time or OwnTime()
        self._on_change = on_change
        self._loops = [(count, Standing(bound_s=bound_s, longest_s=longest_s)) for count in counts]
        self._sample_s = min(standing.sample_s for _, standing in self._loops)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self.stands_s = 0.0  # how long a loop has stood still; 0 while all go on

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching; on return no counter is read any more. Idempotent."""
        self._closed.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        at_s, cpu_s = time.monotonic(), time.process_time()
        while not self._closed.wait(self._sample_s):
            self._own_time.sample()
            now_s, now_cpu_s = time.monotonic(), time.process_time()
            elapsed_s, used_s = now_s - at_s, now_cpu_s - cpu_s
            at_s, cpu_s = now_s, now_cpu_s

            def idle(used_s: float = used_s, elapsed_s: float = elapsed_s) -> bool:
                return used_s < _IDLE_SHARE * elapsed_s and not _others_run()

            stands_s = max(standing.sample(count(), elapsed_s, idle) for count, standing in self._loops)
            changed = bool(stands_s) != bool(self.stands_s)
            self.stands_s = stands_s
            if changed:
                self._on_change()


def ending(count: Callable[[], int | None], *, bound_s: float, longest_s: float) -> Heartbeat:
    """A heartbeat that ends its process when the loop stands: for those that their launcher starts again, and without
    whom nobody waits for a replacement. Arguments as of `Heartbeat`."""

    def end() -> None:
        log.error("ended reason=the work loop stood still for %.2f s", heartbeat.stands_s)
        logs.end_at_once(1)

    heartbeat = Heartbeat(count, bound_s=bound_s, longest_s=longest_s, on_change=end)
    return heartbeat


def _others_run() -> bool:
    """Whether another thread of this process runs, wants to, or waits for a disk."""
    own = str(threading.get_native_id())
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        # No descriptor is left: nobody can tell, and a loop that computes is not to be taken for one that hangs.
        return True
    for task in tasks:
        if task.name == own:
            continue
        try:
            # Unbuffered: a third of the system calls.
            with (task / "stat").open("rb", buffering=0) as file:
                state = file.read(_STAT_BYTES).rpartition(b")")[2].split(maxsplit=1)[0]
        except (OSError, IndexError):
            continue  # It has just ended.
        if state in b"RD":
            return True
    return False
