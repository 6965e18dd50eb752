"""Real rails: two network namespaces, shaped links, the nixl transport between two processes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rails
from benchmarks.hosts.network import Network, refusal

MISSING = refusal() or ("" if importlib.util.find_spec("nixl_cu13") else "needs the package nixl-cu13, found none")
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.alone,
    pytest.mark.full(seconds=8),
]

SEED = 5


def promised(found: dict[str, Any], messages: int) -> None:
    """Every message came, once, as it was sent."""
    seen = {name: found[name] for name in ("received", "wrong", "doubled", "refused")}
    assert seen == {"received": messages, "wrong": 0, "doubled": 0, "refused": 0}, f"seed {SEED}: {found}"


def test_messages_survive_real_rails_that_are_cut_and_healed() -> None:
    found = rails.cut(4000, SEED)
    promised(found, 4000)
    assert found["cuts"] > 0 and found["owner_closed"] > 0, found


def test_two_of_three_real_rails_at_once() -> None:
    found = rails.two(5000, SEED)
    promised(found, 5000)
    assert found["owner_closed"] == 2, found


def test_a_stopped_process_is_no_dead_rail() -> None:
    found = rails.stop(3000, SEED)
    promised(found, 3000)
    assert found["owner_closed"] == 0, found


def test_silence_between_messages_is_neither_a_dead_rail_nor_a_slow_one() -> None:
    found = rails.idle(0, SEED)
    promised(found, 40)
    assert (found["owner_closed"], found["anomalies"]) == (0, 0), found


@contextmanager
def process(network: Network, host: str, role: str) -> Iterator[subprocess.Popen[str]]:
    """A role of nixl_process.py on that host, over all rails; ended at the latest after half a minute."""
    command = [*network.inside(host), sys.executable, "-m", "tests.p2p.nixl_process", role]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "RAILS": ",".join(network.networks)}
    pipe = subprocess.PIPE
    made = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment, cwd=root)
    late = threading.Timer(30, made.kill)
    late.start()
    try:
        yield made
    finally:
        late.cancel()
        made.kill()
        made.communicate()


def asked(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(text + "\n")
    return process.stdout.readline().strip()


def test_a_dead_rail_does_not_keep_a_writer_from_joining() -> None:
    with (
        Network("ab", ["rail0", "rail1"], mbit=200) as network,
        process(network, "a", "own") as owner,
        process(network, "b", "leave") as writer,
    ):
        descriptor = asked(owner, "4096")
        network.cut("b", "rail1")
        # Its own limit is a minute.
        assert asked(writer, descriptor) == "connected"
        assert asked(writer, "go") == "disconnected"
        assert asked(owner, "digest 7") == hashlib.sha256(b"\x07" * 4088).hexdigest()


def test_what_was_put_before_leaving_arrives_over_a_slow_rail() -> None:
    size = 1 << 20
    # A piece takes longer than giving up a silent rail.
    with (
        Network("ab", ["rail0"], mbit=4) as network,
        process(network, "a", "own") as owner,
        process(network, "b", "leave") as writer,
    ):
        assert asked(writer, asked(owner, str(size))) == "connected"
        assert asked(writer, "go") == "disconnected"
        assert asked(owner, "digest 7") == hashlib.sha256(b"\x07" * (size - 8)).hexdigest()
