"""Rails that fail under a channel: nothing lost, nothing doubled, no switch without cause; by seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.p2p.rails_world import MS, Stream, World


def check(stream: Stream, messages: int, why: str) -> None:
    assert stream.received == stream.sent, f"{why}: {len(stream.received)} of {messages} came"
    assert (stream.doubled, stream.torn, stream.backwards) == (0, 0, 0), why


def cuts_and_heals(world: World, seed: int, paths: int, share: float) -> tuple[list[int], Callable[[int], None]]:
    chance = random.Random(seed)
    cuts: list[int] = []

    def disturb(_: int) -> None:
        up = [i for i in range(paths) if not world.rails[i].cut]
        if len(up) > 1 and chance.random() < share:
            rail = chance.choice(up)
            cuts.append(world.now_ns)
            world.cut(rail)
            world.at(world.now_ns + chance.randrange(4 * MS, 900 * MS), lambda: world.heal(rail))

    return cuts, disturb


@pytest.mark.parametrize("seed", range(6))
def test_messages_survive_rails_cut_at_random_offsets(seed: int) -> None:
    world = World(seed, paths=2 + seed % 2, bytes_per_s=1e6)
    stream = Stream(world, seed)
    cuts, disturb = cuts_and_heals(world, seed, 2 + seed % 2, 0.02)
    stream.run(3000, disturb)
    check(stream, 3000, f"seed {seed}")
    assert len(cuts) > 3 and world.counts("writer").sent_again > 0, f"seed {seed}: nothing was cut in flight"
    world.close_all()


@pytest.mark.full(seconds=15)
def test_a_shell_that_does_not_close_before_it_says_so_is_caught() -> None:
    harmed = 0
    for seed in range(8):
        world = World(seed, fences=False, bytes_per_s=1e6)
        stream = Stream(world, seed)
        _, disturb = cuts_and_heals(world, seed, 2, 0.01)
        stream.run(1500, disturb, limit_s=60)
        harmed += stream.torn + stream.backwards + stream.doubled + (stream.received != stream.sent)
        world.close_all()
    assert harmed, "late writes of a cut rail did no harm: the fence protects from nothing here"


def test_a_frozen_writer_is_no_dead_rail() -> None:
    world = World(1)
    stream = Stream(world, 1)
    stream.run(100)
    stream.run(200, lambda sent: world.frozen.update(writer=sent == 150), limit_s=5)
    assert len(stream.received) < 200
    assert world.counts("owner").closed == 0 and world.counts("owner").doubts == 0
    world.frozen["writer"] = False
    stream.run(200)
    check(stream, 200, "after the thaw")
    assert world.counts("owner").closed == 0


def test_a_frozen_owner_is_no_dead_rail() -> None:
    world = World(2)
    stream = Stream(world, 2)
    stream.run(200, lambda sent: world.frozen.update(owner=sent == 150), limit_s=5)
    world.frozen["owner"] = False
    stream.run(300)
    check(stream, 300, "after the thaw")
    assert world.counts("owner").closed == 0


def test_an_idle_gap_is_no_dead_rail() -> None:
    world = World(3)
    stream = Stream(world, 3)
    stream.run(50)
    for _ in range(20_000):
        world.step()
    assert world.counts("owner").doubts == world.counts("owner").closed == 0
    stream.run(100)
    check(stream, 100, "after the gap")


def test_a_healed_rail_comes_back_and_carries_again() -> None:
    world = World(4)
    stream = Stream(world, 4)
    stream.run(400, lambda sent: world.cut(0) if sent == 100 else None)
    assert world.counts("writer").closed == 1
    world.heal(0)
    for _ in range(20_000):
        world.step()
    assert world.counts("writer").opened == world.counts("owner").opened == 3
    world.cut(1)
    stream.run(600)
    check(stream, 600, "over the rail that came back")


def test_two_of_three_rails_at_once_cost_nothing_but_time() -> None:
    world = World(5, paths=3)
    stream = Stream(world, 5)

    def disturb(sent: int) -> None:
        if sent == 200:
            world.cut(0)
            world.cut(2)

    stream.run(1000, disturb)
    check(stream, 1000, "two at once")
    assert world.counts("owner").closed == 2 and not any(world.lost.values())


def test_a_broken_transport_switches_at_once_and_the_last_one_is_a_lost_peer() -> None:
    world = World(6)
    stream = Stream(world, 6)

    def disturb(sent: int) -> None:
        if sent == 200:
            world.transports[0, 0].broken = True

    begun_ns = world.now_ns
    stream.run(400, disturb)
    check(stream, 400, "after the break")
    assert world.now_ns - begun_ns < 1000 * MS
    world.transports[1, 0].broken = True
    for (rail, _), transport in list(world.transports.items()):
        transport.broken |= rail == 0
    for _ in range(10):
        world.step()
    assert world.lost == {"writer": True, "owner": True}


def test_the_switch_takes_no_longer_than_silence_grace_and_closing() -> None:
    worst_ns = 0
    for seed in range(20):
        world = World(seed)
        stream = Stream(world, seed)
        at = 50 + seed
        gap = [0, 0]

        def disturb(sent: int, at: int = at, world: World = world) -> None:
            if sent == at:
                world.cut(0)

        before = world.now_ns
        while len(stream.received) < 300:
            count = len(stream.received)
            stream.run(count + 1 if count + 1 <= 300 else 300, disturb)
            gap[0] = max(gap[0], world.now_ns - before)
            before = world.now_ns
        worst_ns = max(worst_ns, gap[0])
        world.close_all()
    assert worst_ns < (100 + 20 + 10 + 20) * MS, f"{worst_ns / MS} ms"


def test_a_put_over_several_rails_is_whole_when_its_signal_shows() -> None:
    for seed in range(5):
        world = World(seed, paths=3)
        data = random.Random(seed).randbytes(LAYOUT_BYTES := 20_000)
        world.image[4096 : 4096 + LAYOUT_BYTES] = memoryview(data)
        world.lib.p2p_writer_put(world.writer, 4096, LAYOUT_BYTES, world.now_ns)
        world.lib.p2p_writer_signal(world.writer, 8, 9, world.now_ns)
        world.at(world.now_ns + seed * 200_000, lambda world=world: world.cut(1))
        while world.window[8] != 9:
            world.step()
            assert world.now_ns < 5_000 * MS, f"seed {seed}"
        assert world.window[4096 : 4096 + LAYOUT_BYTES].tobytes() == data, f"seed {seed}"
        world.close_all()


def test_of_two_puts_to_the_same_bytes_the_later_stays() -> None:
    first, end, word = 64, 4080, 4088  # of the header page, which holds no slot
    for seed in range(20):
        world = World(seed, paths=2)
        world.rails[1].bytes_per_s /= 20
        chance = random.Random(seed)
        for number in range(1, 6):
            world.image[first:end] = number
            world.lib.p2p_writer_put(world.writer, first, end - first, world.now_ns)
            world.lib.p2p_writer_signal(world.writer, word, number, world.now_ns)
            for _ in range(chance.randrange(1, 60)):
                world.step()
                signalled, least = world.window[word], world.window[first:end].min()
                assert least >= signalled, f"seed {seed}: signal {signalled}, and bytes of put {least}"
        while world.window[word] != 5:
            world.step()
            assert world.now_ns < 5_000 * MS, f"seed {seed}"
        assert set(world.window[first:end].tolist()) == {5}, f"seed {seed}"
        world.close_all()


def test_a_write_that_was_refused_but_is_under_way_harms_nobody() -> None:
    for seed in range(40):
        world = World(seed, bytes_per_s=1e6)
        world.closing_ns = 90 * MS
        stream = Stream(world, seed)

        def disturb(sent: int, world: World = world, seed: int = seed) -> None:
            if sent == 60:
                world.cut(0)  # what is under way lands when it heals, before the owner has closed
                world.transports[0, 0].refuses = True
                world.at(world.now_ns + (12 + 2 * seed) * MS, lambda: world.heal(0))

        stream.run(160, disturb)
        check(stream, 160, f"seed {seed}")
        assert world.counts("owner").closed == 1, f"seed {seed}"
        world.close_all()


def test_slow_rails_are_not_taken_for_dead_ones() -> None:
    for mbit in (10, 4):
        world = World(7, bytes_per_s=mbit * 125_000)
        stream = Stream(world, 7)
        stream.run(300)
        check(stream, 300, f"{mbit} Mbit/s")
        world.lib.p2p_writer_put(world.writer, 4096, 20_000, world.now_ns)
        for _ in range(3000):
            world.step()
        assert world.counts("owner").closed == 0, f"{mbit} Mbit/s"
        world.close_all()


def test_a_path_whose_opening_fails_is_offered_again_at_once() -> None:
    world = World(8)
    stream = Stream(world, 8)
    joins: list[int] = []
    join = world.join

    def fails_first(index: int, generation: int, address: bytes) -> None:
        joins.append(generation)
        if generation == 1:
            world.lib.p2p_end_path_closed(world.writer, index, generation, world.now_ns)
        else:
            join(index, generation, address)

    world.join = fails_first  # type: ignore[method-assign]
    stream.run(400, lambda sent: world.cut(0) if sent == 100 else None)
    world.heal(0)
    begun_ns = world.now_ns
    while world.counts("writer").opened < 3:
        world.step()
        assert world.now_ns < begun_ns + 2500 * MS, f"joins so far: {joins}"
    assert joins == [1, 2]
    stream.run(600)
    check(stream, 600, "over the path that opened the second time")
