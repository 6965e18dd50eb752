"""Real rails: two network namespaces, shaped links, the nixl transport between two processes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from benchmarks import rails
from benchmarks.rails_network import refusal

MISSING = refusal() or (
    "" if importlib.util.find_spec("nixl_cu13") else "needs the package nixl-cu13, found none"
)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

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
