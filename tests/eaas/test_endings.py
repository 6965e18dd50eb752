"""Signals that come at any moment, and many at once, end each process that waits for them; none ever hangs."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import subprocess
import sys
import time

import pytest

LIMIT_S = 30.0
TIMES = 40
# Nothing but what the signals meet: the main thread's wait, as in the real process, and what ends it.
CLUSTER = """
from eaas.ops import starting
class Cluster:
    def __init__(self, *_, **__): pass
    start = stop = lambda self: None
starting.LocalCluster = Cluster
def main():
    starting.run_cluster(None, show=print, on_ready=lambda _: ready())
"""
EXPERT = """
from experts import __main__ as expert
def serve(options, ending):
    ready()
    while not ending.wanted.wait(0.0005):
        pass
expert.serve = serve
def main():
    expert.main(None)
"""
ATTENTION = """
from eaas.worker.__main__ import Ending
def main():
    ending = Ending()
    ready()
    while not ending.asked.wait(0.0005):
        pass
    ending.done()
"""
LAUNCHER = """
from router import child, launcher
from router.config import LauncherOptions
child.tell_ready = lambda *_: ready()
def main():
    launcher.main(LauncherOptions(router="127.0.0.1:1", exec="true"))
"""
CHAOS = """
from types import SimpleNamespace
from eaas.ops.chaos import cli, inject, runner
inject.open_injector = lambda *_: SimpleNamespace(close=lambda: None)
def run_plan(plan, injector, on_event, stop):
    ready()
    while not stop.wait(0.0005):
        pass
    return []
runner.run_plan = run_plan
def main():
    cli._carry_out(None, False, "", "", None, False)
"""
# Each time in a process of its own, which has imported everything already.
FORKS = """
import os
def ready():
    os.write(1, b"%d\\n" % os.getpid())
PROGRAM
for _ in range(TIMES):
    if not (pid := os.fork()):
        try:
            main()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.write(1, b"ended\\n")
"""
ENDS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize(
    ("program", "numbers"),
    [
        pytest.param(CLUSTER, (*ENDS, signal.SIGHUP), id="cluster"),
        pytest.param(EXPERT, ENDS, id="expert"),
        pytest.param(ATTENTION, ENDS, id="attention"),
        pytest.param(LAUNCHER, ENDS, id="launcher"),
        pytest.param(CHAOS, (*ENDS, signal.SIGHUP), id="chaos"),
    ],
)
def test_a_process_ends_whenever_and_however_often_it_is_told(
    program: str, numbers: tuple[signal.Signals, ...]
) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    words = [sys.executable, "-c", FORKS.replace("PROGRAM", program).replace("TIMES", str(TIMES))]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, bufsize=0) as parent,
        selectors.DefaultSelector() as ends,
    ):
        assert parent.stdout is not None
        ends.register(parent.stdout, selectors.EVENT_READ)
        for number in range(TIMES):
            pid = int(parent.stdout.readline())
            time.sleep(draw.random() * 0.02)
            with contextlib.suppress(ProcessLookupError):
                # At paces of their own, so that some come while what an earlier one began still runs.
                longest_s = draw.choice((0.0, 1e-5, 1e-4))
                for _ in range(draw.randint(1, 400)):
                    os.kill(pid, draw.choice(numbers))
                    until_s = time.monotonic() + draw.random() * longest_s
                    while time.monotonic() < until_s:
                        pass
            ended = ends.select(LIMIT_S)
            if not ended:
                os.kill(pid, signal.SIGKILL)
                parent.kill()
            assert ended, f"seed {seed}: process {number} hangs after its signals"
            assert parent.stdout.readline() == b"ended\n", f"seed {seed}"


def test_what_fails_on_a_signal_hears_the_next() -> None:
    """Nor does it leave to others' files the descriptor to which signals are written."""
    program = """
import os, signal, threading
from router import child
heard = threading.Semaphore(0)
def act():
    heard.release()
    raise RuntimeError("cannot join thread before it is started")
child.on_signals(act, signal.SIGTERM)
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
    if not heard.acquire(timeout=20):
        raise SystemExit("not heard")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
