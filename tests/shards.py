"""How `make test-all SHARD=K/N` divides the tests: whole files, so that the shards cost about the same."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import pytest

# Every test that was collected, those of other shards too.
COLLECTED = pytest.StashKey[list[pytest.Item]]()
# Seconds that a test takes for which no marker says them.
SECONDS, SECONDS_ALONE = 0.1, 1.0


def parse_shard(text: str) -> tuple[int, int]:
    """Number and count of "K/N", where 1 <= K <= N.

    Raises:
        argparse.ArgumentTypeError: it says anything else.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} found, a shard such as 3/6 needed")
    return int(number), int(count)


def divide(costs: Mapping[str, float], count: int) -> list[set[str]]:
    """Divide files into shards: the dearest first, each into the shard that costs least so far.

    Args:
        costs: Seconds by file.
        count: Number of shards.

    The same files and costs give the same shards on every machine; each file is in exactly one.
    """
    shards: list[set[str]] = [set() for _ in range(count)]
    totals = [0.0] * count
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        least = totals.index(min(totals))
        shards[least].add(name)
        totals[least] += costs[name]
    return shards


def seconds_of(item: pytest.Item) -> float:
    """What a test is estimated to take on two cores: what its marker `full` says, the nearest to it."""
    full = item.get_closest_marker("full")
    if full is not None:
        return float(full.kwargs["seconds"])
    return SECONDS_ALONE if item.get_closest_marker("alone") else SECONDS


def file_of(item: pytest.Item) -> str:
    """The file of a test, from the root of the repository."""
    return item.nodeid.partition("::")[0]


def costs_of(items: Sequence[pytest.Item]) -> dict[str, float]:
    """Seconds by file."""
    costs: dict[str, float] = {}
    for item in items:
        costs[file_of(item)] = costs.get(file_of(item), 0.0) + seconds_of(item)
    return costs


def shard_of(items: Sequence[pytest.Item], number: int, count: int) -> list[pytest.Item]:
    """The tests of one shard, in their order; `number` counts from 1."""
    files = divide(costs_of(items), count)[number - 1]
    return [item for item in items if file_of(item) in files]
