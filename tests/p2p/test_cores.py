"""Cores are named as people name them, and refused in words that say which there are."""

from __future__ import annotations

import os

import pytest

from p2p.native import named_cores

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("named", [(9999,), (-1,), (ALLOWED[0], ALLOWED[0])])
def test_cores_that_cannot_be_used_are_refused(named: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="--cores") as refused:
        named_cores(named)
    assert ",".join(map(str, named)) in str(refused.value)


def test_all_allowed_cores_are_the_default() -> None:
    assert named_cores(()) == tuple(ALLOWED)


def test_the_order_given_is_kept() -> None:
    assert named_cores(tuple(reversed(ALLOWED))) == tuple(reversed(ALLOWED))
