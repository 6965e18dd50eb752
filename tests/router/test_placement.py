"""Placement: every expert where it should be, evenly, with few moves and few partners."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement import place

shapes = st.tuples(st.integers(1, 4), st.integers(1, 24), st.integers(1, 9), st.integers(1, 3))


def names(count: int, first: int = 1) -> list[str]:
    return [f"expert/{first + i}" for i in range(count)]


def loads(placed: dict[str, int], layer: int, experts: int) -> list[int]:
    mask = (1 << experts) - 1
    return [(bits >> (layer * experts) & mask).bit_count() for bits in placed.values()]


def replicas(placed: dict[str, int], pair: int) -> int:
    return sum(bits >> pair & 1 for bits in placed.values())


def partners(placed: dict[str, int], name: str) -> int:
    return sum(1 for other, bits in placed.items() if other != name and bits & placed[name])


def moved(before: dict[str, int], after: dict[str, int]) -> int:
    return sum((bits & ~before.get(name, 0)).bit_count() for name, bits in after.items())


def assert_good(placed: dict[str, int], layers: int, experts: int, copies: int) -> None:
    for pair in range(layers * experts):
        assert replicas(placed, pair) == copies, f"pair {pair}"
    for layer in range(layers):
        found = loads(placed, layer, experts)
        assert max(found) - min(found) <= 1, f"layer {layer}: {found}"


@settings(max_examples=150, deadline=None)
@given(shape=shapes)
def test_from_nothing_every_expert_has_its_replicas_evenly(shape: tuple[int, int, int, int]) -> None:
    layers, experts, servers, copies = shape
    copies = min(copies, servers)
    placed = place(layers=layers, experts=experts, replicas=copies, capacity=dict.fromkeys(names(servers), 0))
    assert_good(placed, layers, experts, copies)
    totals = [bits.bit_count() for bits in placed.values()]
    assert max(totals) - min(totals) <= layers


@settings(max_examples=150, deadline=None)
@given(shape=shapes, changes=st.lists(st.integers(0, 99), min_size=1, max_size=6))
def test_joins_and_losses_keep_replicas_and_evenness_and_move_little(
    shape: tuple[int, int, int, int], changes: list[int]
) -> None:
    layers, experts, servers, copies = shape
    capacity = dict.fromkeys(names(servers), 0)
    placed = place(layers=layers, experts=experts, replicas=min(copies, servers), capacity=capacity)
    newest = servers
    for change in changes:
        lost = 0
        if change % 2 and len(capacity) > 1:
            gone = list(capacity)[change % len(capacity)]
            lost = placed[gone].bit_count()
            capacity.pop(gone)
        else:
            newest += 1
            capacity[f"expert/{newest}"] = 0
        was = sum(bits.bit_count() for bits in placed.values())
        now = min(copies, len(capacity))
        after = place(layers=layers, experts=experts, replicas=now, capacity=capacity, current=placed)
        assert_good(after, layers, experts, now)
        added = max(0, layers * experts * now - was)
        share = -(-experts * now // len(capacity)) * layers
        # A loss moves what was lost, a join one share; evenness may ask for a few more in each layer.
        bound = max(lost, share) + added + layers * len(capacity)
        assert moved(placed, after) <= bound, f"{moved(placed, after)} moved, {bound} allowed"
        placed = after


@settings(max_examples=100, deadline=None)
@given(shape=shapes)
def test_a_placement_that_is_good_stays(shape: tuple[int, int, int, int]) -> None:
    layers, experts, servers, copies = shape
    capacity = dict.fromkeys(names(servers), 0)
    placed = place(layers=layers, experts=experts, replicas=min(copies, servers), capacity=capacity)
    again = place(layers=layers, experts=experts, replicas=min(copies, servers), capacity=capacity, current=placed)
    assert again == placed


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 3),
    experts=st.integers(1, 8),
    copies=st.integers(1, 3),
    room=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_capacity_is_respected_and_used_to_the_last_place(
    layers: int, experts: int, copies: int, room: list[int]
) -> None:
    capacity = {name: layers * places for name, places in zip(names(len(room)), room, strict=True)}
    copies = min(copies, len(room))
    usable = sum(min(places, experts) for places in room)
    placed = place(layers=layers, experts=experts, replicas=copies, capacity=capacity, current={})
    for name, bits in placed.items():
        assert bits.bit_count() <= capacity[name]
    for layer in range(layers):
        counts = [replicas(placed, layer * experts + expert) for expert in range(experts)]
        assert sum(counts) == min(usable, experts * copies), counts
        assert min(counts) >= min(copies, usable // experts), counts
    if usable >= experts * copies:
        assert place(layers=layers, experts=experts, replicas=copies, capacity=capacity) == placed


@settings(max_examples=100, deadline=None)
@given(shape=shapes, doubtful=st.sets(st.integers(0, 8), max_size=4))
def test_experts_held_only_by_servers_in_doubt_get_a_copy_elsewhere(
    shape: tuple[int, int, int, int], doubtful: set[int]
) -> None:
    layers, experts, servers, copies = shape
    capacity = dict.fromkeys(names(servers), 0)
    before = place(layers=layers, experts=experts, replicas=min(copies, servers), capacity=capacity)
    doubted = {name for i, name in enumerate(capacity) if i in doubtful}
    arguments = {"layers": layers, "experts": experts, "replicas": copies, "capacity": capacity}
    after = place(**arguments, current=before, doubtful=doubted)
    for name in doubted:
        assert after[name] == before[name], "a server in doubt keeps what it has and gets nothing"
    if len(doubted) < servers:
        sound = 0
        for name, bits in after.items():
            sound |= 0 if name in doubted else bits
        assert sound == (1 << (layers * experts)) - 1
    assert place(**arguments, current=after, doubtful=doubted) == after, "it must come to rest"


@pytest.mark.parametrize(("servers", "neighbours"), [(4, 2), (8, 4), (16, 4), (32, 4)])
def test_a_server_shares_its_replicas_with_four_neighbours(servers: int, neighbours: int) -> None:
    placed = place(layers=3, experts=64, replicas=2, capacity=dict.fromkeys(names(servers), 0))
    assert {partners(placed, name) for name in placed} == {neighbours}


def fatal_pairs(placed: dict[str, int]) -> float:
    """Share of all pairs of servers whose loss at once leaves some expert without a replica."""
    pairs = list(combinations(placed, 2))
    fatal = 0
    for one, two in pairs:
        others = 0
        for name, bits in placed.items():
            others |= 0 if name in (one, two) else bits
        fatal += bool((placed[one] | placed[two]) & ~others)
    return fatal / len(pairs)


def test_two_losses_at_once_rarely_meet() -> None:
    capacity = dict.fromkeys(names(32), 0)
    placed = place(layers=1, experts=256, replicas=2, capacity=capacity)
    assert fatal_pairs(placed) == pytest.approx(64 / 496), "two rings: 4 neighbours"
    for change in range(4):
        capacity.pop(names(32)[7 * change])
        capacity[f"expert/{90 + change}"] = 0
        placed = place(layers=1, experts=256, replicas=2, capacity=capacity, current=placed)
    assert fatal_pairs(placed) < 0.25, "after four replacements"


@pytest.mark.parametrize("zones", [(4, 4), (8, 8), (4, 4, 4), (5, 3), (6, 5, 5)])
def test_copies_lie_in_two_zones(zones: tuple[int, ...]) -> None:
    zone = {f"expert/{number}": str(number * len(zones) // sum(zones)) for number in range(sum(zones))}
    zone = dict(zip(zone, [str(i) for i, count in enumerate(zones) for _ in range(count)], strict=True))
    capacity = dict.fromkeys(zone, 0)
    placed = place(layers=2, experts=60, replicas=2, capacity=capacity, zones=zone)
    for lost in (None, "expert/1", "expert/5"):
        if lost:
            capacity.pop(lost)
            placed = place(layers=2, experts=60, replicas=2, capacity=capacity, current=placed, zones=zone)
        sizes = [sum(zone[name] == number for name in capacity) for number in set(zone.values())]
        found = [len({zone[name] for name, bits in placed.items() if bits >> pair & 1}) for pair in range(120)]
        # A zone with more than half of the servers has more than half of the copies.
        together = max(0, 2 * max(sizes) - sum(sizes)) / sum(sizes) * 60
        assert sum(count < 2 for count in found) <= 2 * (together + (1 if together else 0)), (lost, sizes)
        for layer in range(2):
            counts = loads(placed, layer, 60)
            assert max(counts) - min(counts) <= 1, counts


def test_redundant_copies_stay_while_there_is_room_and_go_first() -> None:
    capacity = dict.fromkeys(names(4), 20)
    placed = place(layers=1, experts=32, replicas=2, capacity=capacity, redundant=6)
    assert sum(bits.bit_count() for bits in placed.values()) == 64, "which experts get more, the load says"
    more = {name: bits | (0b111 << 24 if bits >> 24 & 0b111 == 0 else 0) for name, bits in placed.items()}
    added = sum(bits.bit_count() for bits in more.values()) - 64
    assert added == 6
    arguments = {"layers": 1, "experts": 32, "replicas": 2, "capacity": capacity}
    assert place(**arguments, current=more, redundant=6) == more
    fewer = place(**arguments, current=more, redundant=2)
    assert sum(bits.bit_count() for bits in fewer.values()) == 66
    capacity = dict.fromkeys(names(4), 16)
    full = place(layers=1, experts=32, replicas=2, capacity=capacity, current=more, redundant=6)
    assert all(replicas(full, expert) >= 2 for expert in range(32)), "none that is needed gives way"


@pytest.mark.parametrize("servers", [4, 8, 16, 32])
def test_a_replacement_restores_the_neighbourhood(servers: int) -> None:
    """A loss spreads over all survivors; the replacement takes just that back."""
    capacity = dict.fromkeys(names(servers), 0)
    placed = place(layers=2, experts=64, replicas=2, capacity=capacity)
    lost = placed["expert/2"].bit_count()
    capacity.pop("expert/2")
    repaired = place(layers=2, experts=64, replicas=2, capacity=capacity, current=placed)
    assert moved(placed, repaired) <= lost + 2 * servers
    capacity["expert/99"] = 0
    replaced = place(layers=2, experts=64, replicas=2, capacity=capacity, current=repaired)
    assert moved(repaired, replaced) == lost
    shared = [partners(replaced, name) for name in replaced]
    assert sum(shared) <= 5 * servers, shared
    assert max(shared) <= 6, shared
