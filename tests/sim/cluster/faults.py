"""The fault schedule: what goes wrong, when, for how long. Faults and planned actions alike are numbered.

When fault i strikes, and with which dice, depends on the seed and i alone; whom it hits, on who is there. So a run
with some faults left out has the others as they were, and a failing run can be shrunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from router.events import Acked, AddModel, Left, Loaded, RemoveModel, Renewed, Retire, Scale, Suspected
from router.view import ATTENTION, EXPERT, GATEWAY
from tests.sim.cluster.members import ExpertServer, Process
from tests.sim.cluster.models import united
from tests.sim.cluster.network import ROUTER
from tests.sim.cluster.shell import NOTHING, Packet
from tests.sim.cluster.workers import Worker

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

Heal = Callable[[object], None]
_MOST_PROCESSES = 22
# The cluster has this long to form before anything strikes.
FORM_S = 4.0


class Schedule:
    """Strikes until stopped. struck: (number, time, kind, what) of those that did. healed_s: when the last ends."""

    def __init__(self, world: World, keep: frozenset[int] | None, pace: float) -> None:
        self.world, self.keep, self.pace = world, keep, pace
        self.struck: list[tuple[int, float, str, str]] = []
        self.counts: Counter[str] = Counter()
        self.healed_s = 0.0
        self.stopped = False
        self._faults = FAULTS if len(world.models) == 1 else FAULTS | CHANGES
        self._kinds = list(self._faults)
        weights = Random(f"{world.seed} weights")
        # Each run has faults of its own choice in plenty, so that they meet.
        self._weights = [self._faults[kind][1] * weights.choice((0.3, 1.0, 1.0, 4.0)) for kind in self._kinds]

    def start(self) -> None:
        """The first fault is on its way."""
        self.world.at(FORM_S, self._strike, 0)

    def stop(self) -> None:
        """No fault strikes from now on; those that last end by themselves."""
        self.stopped = True
        self.healed_s = max(self.healed_s, self.world.now_s)
        judge, world = self.world.judge, self.world
        for pool, size in judge.wanted.items():
            model = judge.models.of_group(pool)
            if not size and not (model is not None and judge.models.leaves(model.hash)):
                scale = Scale(pool=pool, wanted=max(1, world.config.wanted(pool)))
                world.at(self.healed_s, world.router.take, Packet(scale, ROUTER))

    def _strike(self, number: int) -> None:
        if self.stopped:
            return
        world = self.world
        dice = Random(f"{world.seed} fault {number}")
        (kind,) = dice.choices(self._kinds, self._weights)
        world.at(world.now_s + dice.expovariate(self.pace), self._strike, number + 1)
        if self.keep is not None and number not in self.keep:
            return
        what = self._faults[kind][0](self, dice)
        if what:
            self.counts[kind] += 1
            self.struck.append((number, world.now_s, kind, what))

    def heal(self, after_s: float, heal: Heal) -> None:
        """End a fault after a time."""
        end_s = self.world.now_s + after_s
        self.healed_s = max(self.healed_s, end_s)
        self.world.at(end_s, heal, None)

    def some(self, dice: Random, pool: str = "") -> Process | None:
        """A random member process."""
        found = self.world.alive(pool)
        if not pool and dice.random() < 0.9:
            found = [p for p in found if p.pool != GATEWAY]
        return dice.choice(found) if found else None


def _kill(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    if p is None:
        return ""
    p.end(True)
    return p.name


def _vanish(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    if p is None:
        return ""
    p.end(False)
    return p.name


def _kill_several(s: Schedule, dice: Random) -> str:
    found = s.world.alive(dice.choice((EXPERT, EXPERT, ATTENTION)))
    chosen = [p for p in found if dice.random() < 0.4]
    for p in chosen:
        p.end(dice.random() < 0.7)
    return ", ".join(p.name for p in chosen)


def _lose_host(s: Schedule, dice: Random) -> str:
    launcher = dice.choice(s.world.launchers)
    chosen = [p for p in s.world.alive() if p.host == launcher.host]
    launcher.down += 1
    for p in chosen:
        p.end(False)

    def heal(_: object) -> None:
        launcher.down -= 1

    s.heal(dice.uniform(0.5, 6.0), heal)
    return f"{launcher.host} with {', '.join(p.name for p in chosen)}"


def _freeze(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    if p is None:
        return ""
    span_s = dice.uniform(0.1, 0.5) if p.pool == GATEWAY else dice.choice((0.3, 1.0, 2.5, 6.0)) * dice.uniform(0.5, 1.5)
    p.asleep_s = max(p.asleep_s, s.world.now_s + span_s)
    s.healed_s = max(s.healed_s, p.asleep_s)
    return f"{p.name} for {span_s:.1f} s"


def _freeze_several(s: Schedule, dice: Random) -> str:
    span_s = dice.uniform(0.5, 8.0)
    chosen = [p for p in s.world.alive() if p.pool != GATEWAY and dice.random() < 0.5]
    for p in chosen:
        p.asleep_s = max(p.asleep_s, s.world.now_s + span_s)
        s.healed_s = max(s.healed_s, p.asleep_s)
    return f"{', '.join(p.name for p in chosen)} for {span_s:.1f} s" if chosen else ""


def _cut(s: Schedule, dice: Random, pairs: list[tuple[int, int]], both: bool) -> float:
    network = s.world.network
    ways = pairs + [(b, a) for a, b in pairs] if both else pairs
    for source, target in ways:
        network.cut(source, target)

    def heal(_: object) -> None:
        for source, target in ways:
            network.join(source, target)

    span_s = dice.choice((0.5, 2.0, 5.0)) * dice.uniform(0.5, 2.0)
    s.heal(span_s, heal)
    return span_s


def _partition_one_way(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    other = s.some(dice)
    if p is None or other is None:
        return ""
    to = ROUTER if dice.random() < 0.6 else other.uid
    pair = (p.uid, to) if dice.random() < 0.5 else (to, p.uid)
    span_s = _cut(s, dice, [pair], both=False)
    return f"{pair[0]} to {pair[1]} for {span_s:.1f} s"


def _partition(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    other = s.some(dice, dice.choice((EXPERT, ATTENTION)))
    if p is None or other is None:
        return ""
    to = ROUTER if dice.random() < 0.5 else other.uid
    span_s = _cut(s, dice, [(p.uid, to)], both=True)
    return f"{p.name} and {to} for {span_s:.1f} s"


def _split(s: Schedule, dice: Random) -> str:
    """The network falls in two; the router is on one side."""
    inside = {p.uid: dice.random() < 0.5 for p in s.world.alive()}
    inside[ROUTER] = True
    for launcher in s.world.launchers:
        inside[launcher.uid] = dice.random() < 0.5
    pairs = [(a, b) for a in inside for b in inside if inside[a] and not inside[b]]
    span_s = _cut(s, dice, pairs, both=True)
    return f"{sorted(uid for uid in inside if not inside[uid])} from the rest for {span_s:.1f} s"


def _mute(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    if p is None:
        return ""
    network, uid, span_s = s.world.network, p.uid, dice.uniform(0.3, 8.0)
    network.mute(uid, 1)
    s.heal(span_s, lambda _: network.mute(uid, -1))
    return f"{p.name} for {span_s:.1f} s"


def _noise(s: Schedule, dice: Random) -> str:
    network = s.world.network
    loss, repeat = dice.choice((0.0, 0.02, 0.2)), dice.choice((0.0, 0.05, 0.3))
    tail_s, span_s = dice.choice((0.0, 0.3, 3.0)), dice.uniform(1.0, 12.0)
    network.loss, network.repeat, network.tail_s = loss, repeat, tail_s
    network.look()

    def heal(_: object) -> None:
        network.loss = network.repeat = network.tail_s = 0.0
        network.look()

    s.heal(span_s, heal)
    # What is on its way then comes late, there and back.
    s.healed_s = max(s.healed_s, s.world.now_s + span_s + 2 * tail_s)
    return f"loss {loss}, repeat {repeat}, tail {tail_s} s for {span_s:.1f} s"


def _slow_link(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    if p is None:
        return ""
    network, uid = s.world.network, p.uid
    network.slow_s[uid] = dice.choice((0.05, 0.4, 1.2))
    network.look()

    def heal(_: object) -> None:
        network.slow_s.pop(uid, None)
        network.look()

    s.heal(dice.uniform(1.0, 10.0), heal)
    return f"{p.name} by {network.slow_s[uid]} s"


def _stall_router(s: Schedule, dice: Random) -> str:
    router, span_s = s.world.router, dice.choice((0.4, 1.5, 4.0, 12.0)) * dice.uniform(0.7, 1.3)
    router.stalled_s = max(router.stalled_s, s.world.now_s + span_s)
    s.healed_s = max(s.healed_s, router.stalled_s)
    return f"for {span_s:.1f} s"


def _crash_router(s: Schedule, dice: Random) -> str:
    router = s.world.router
    if not router.up:
        return ""
    router.end()
    span_s = dice.choice((0.1, 1.0, 4.0)) * dice.uniform(0.5, 1.5)
    s.heal(span_s, router.start)
    return f"for {span_s:.1f} s"


def _older_journal(s: Schedule, dice: Random) -> str:
    """The router starts again on a copy of its journal."""
    router = s.world.router
    if not router.up or len(router.commits) < 2:
        return ""
    router.older = dice.randint(2, dice.choice((3, 10, 60)))
    router.end()
    s.heal(dice.choice((0.1, 1.0, 4.0)) * dice.uniform(0.5, 1.5), router.start)
    return f"older by {router.older - 1} commits"


def _lost_journal(s: Schedule, dice: Random) -> str:
    """The router starts again with no journal at all."""
    router = s.world.router
    if not router.up:
        return ""
    router.older = NOTHING
    router.end()
    s.heal(dice.choice((0.1, 1.0, 4.0)) * dice.uniform(0.5, 1.5), router.start)
    return "whole"


def _full_disk(s: Schedule, dice: Random) -> str:
    router, span_s = s.world.router, dice.uniform(0.2, 6.0)
    router.unwritable += 1

    def heal(_: object) -> None:
        router.unwritable -= 1

    s.heal(span_s, heal)
    return f"for {span_s:.1f} s"


def _jump_clock(s: Schedule, dice: Random) -> str:
    jump_s = dice.choice((-5.0, -0.5, 0.6, 3.0, 30.0))
    s.world.router.clock_s += jump_s
    return f"by {jump_s} s"


def _slow_server(s: Schedule, dice: Random) -> str:
    p = s.some(dice, EXPERT)
    if not isinstance(p, ExpertServer):
        return ""
    p.factor = dice.choice((2.0, 10.0, 60.0))
    s.heal(dice.uniform(2.0, 10.0), p.quicken)
    return f"{p.name} {p.factor} times"


def _corrupt(s: Schedule, dice: Random) -> str:
    """What a server answers is damaged, or so it seems to a worker that damages what it reads, or so a worker says."""
    p = s.some(dice, dice.choice((EXPERT, EXPERT, ATTENTION)))
    if isinstance(p, ExpertServer):
        p.corrupt = p.ever_corrupt = True

        def heal(_: object) -> None:
            p.corrupt = False
    elif isinstance(p, Worker):
        victim = s.some(dice, EXPERT) if dice.random() < 0.7 else None
        p.damaged = victim is None
        if victim is not None:
            p.slanders = victim.name
            p.slandered.add(victim.name)

        def heal(_: object) -> None:
            p.damaged, p.slanders = False, ""
    else:
        return ""
    s.heal(dice.uniform(1.0, 6.0), heal)
    return p.name


def _spike(s: Schedule, dice: Random) -> str:
    clients = s.world.clients
    clients.spike = dice.choice((0.2, 3.0, 8.0))

    def heal(_: object) -> None:
        clients.spike = 1.0

    s.heal(dice.uniform(2.0, 8.0), heal)
    return f"{clients.spike} times the requests"


def _drain(s: Schedule, dice: Random) -> str:
    p = s.some(dice, dice.choice((EXPERT, EXPERT, ATTENTION)))
    if p is None:
        return ""
    left = Left(name=p.name, incarnation=p.incarnation, drain=True)
    s.world.router.take(Packet(left, ROUTER))
    return p.name


def _retire(s: Schedule, dice: Random) -> str:
    """An operator retires a member by name, asks again as he hears nothing, or another one who does not know of him."""
    p = s.some(dice, dice.choice((EXPERT, EXPERT, EXPERT, ATTENTION, ATTENTION, GATEWAY)))
    if p is None:
        return ""
    router, world = s.world.router, s.world
    asked = Retire(name=p.name, operation=f"of {p.name}", unix_s=world.now_s)
    router.take(Packet(asked, ROUTER))
    if dice.random() < 0.5:
        again_s = world.now_s + 8.0 * dice.random()
        world.at(again_s, router.take, Packet(asked, ROUTER))
        # What the router could not write down the first time begins only then.
        s.healed_s = max(s.healed_s, again_s)
    if dice.random() < 0.2:
        another = Retire(name=p.name, operation=f"another of {p.name}", unix_s=world.now_s)
        world.at(world.now_s + 2.0 * dice.random(), router.take, Packet(another, ROUTER))
    return p.name


def _leave(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    if p is None:
        return ""
    p.tell(Left(name=p.name, incarnation=p.incarnation, drain=False))
    p.end(dice.random() < 0.7)
    return p.name


def _surplus(s: Schedule, dice: Random) -> str:
    if len(s.world.processes) >= _MOST_PROCESSES:
        return ""
    live = s.world.judge.models.live()
    if len(s.world.models) == 1 or not live or dice.random() < 0.5:
        return f"pid {s.world.spawn(EXPERT, 'host-x').pid}"
    model = dice.choice(live)
    return f"pid {s.world.spawn(ATTENTION, 'host-x', model=model).pid} of {model.hash}"


def _scale(s: Schedule, dice: Random) -> str:
    world = s.world
    pool = dice.choice((EXPERT, EXPERT, ATTENTION))
    if pool == ATTENTION and len(world.models) > 1:
        pool = dice.choice([name for name in world.judge.wanted if name != EXPERT])
    # Servers of bounded memory hold all experts only when there are enough of them.
    least = world.config.experts_wanted if pool == EXPERT and world.capacity else dice.choice((0, 1, 1, 1, 1))
    wanted = dice.randint(least, 9 if pool == EXPERT else 4)
    if wanted > 8 and pool == EXPERT:
        wanted = 999  # refused
    world.router.take(Packet(Scale(pool=pool, wanted=wanted, drain_s=dice.choice((1.0, 5.0, 30.0))), ROUTER))
    return f"{pool} to {wanted}"


def _launcher_down(s: Schedule, dice: Random) -> str:
    launcher = dice.choice(s.world.launchers)
    launcher.down += 1
    if dice.random() < 0.5:
        s.world.router.detach(launcher)

    def heal(_: object) -> None:
        launcher.down -= 1

    s.heal(dice.uniform(0.5, 8.0), heal)
    return launcher.host


def _bad_starts(s: Schedule, dice: Random) -> str:
    launcher = dice.choice(s.world.launchers)
    launcher.failing += 1

    def heal(_: object) -> None:
        launcher.failing -= 1

    s.heal(dice.uniform(1.0, 8.0), heal)
    return launcher.host


def _bad_loads(s: Schedule, dice: Random) -> str:
    p = s.some(dice, EXPERT)
    if not isinstance(p, ExpertServer):
        return ""
    p.broken_s = s.world.now_s + dice.uniform(1.0, 8.0)
    s.healed_s = max(s.healed_s, p.broken_s)
    return p.name


def _accuse(s: Schedule, dice: Random) -> str:
    p = s.some(dice)
    if p is None:
        return ""
    event = Suspected(name=p.name, incarnation=p.incarnation, by="attention/1", reason="slow")
    s.world.router.take(Packet(event, ROUTER))
    return p.name


def _lie(s: Schedule, dice: Random) -> str:
    """Someone speaks under another's name, or acks what never was."""
    p, world = s.some(dice), s.world
    if p is None:
        return ""
    epoch = world.router.state.epoch
    everything = united(world.models)
    for wrong in (p.incarnation - 1, p.incarnation + 1):
        if wrong in world.judge.present:
            continue
        for event in (
            Loaded(name=p.name, incarnation=wrong, held=everything, epoch=epoch),
            Acked(name=p.name, incarnation=wrong, epoch=epoch),
            Renewed(name=p.name, incarnation=wrong),
            Left(name=p.name, incarnation=wrong, drain=False),
        ):
            world.router.take(Packet(event, ROUTER))
    world.router.take(Packet(Acked(name=p.name, incarnation=p.incarnation, epoch=epoch + 50), ROUTER))
    return p.name


def _late_messages(s: Schedule, dice: Random) -> str:
    """What members said long ago comes once more, whoever they were."""
    past = s.world.router.past
    chosen = [event for event in past if dice.random() < 0.2]
    for event in chosen:
        s.world.router.take(Packet(event, ROUTER))
    return f"{len(chosen)} of them" if chosen else ""


def _operate(s: Schedule, dice: Random, order: AddModel | RemoveModel) -> str:
    """An operator's order may be lost, or he gives it twice."""
    how = dice.choice(("", "", "", "lost", "twice"))
    if how != "lost":
        s.world.operate(order)
    if how == "twice":
        again_s = 8.0 * dice.random()
        s.world.at(s.world.now_s + again_s, s.world.operate, order)
        s.healed_s = max(s.healed_s, s.world.now_s + again_s)
    return how


def _add_model(s: Schedule, dice: Random) -> str:
    """A model that is not served, or leaves."""
    live = s.world.judge.models.live()
    away = [model for model in s.world.models if model not in live]
    if not away:
        return ""
    model = dice.choice(away)
    again = s.world.judge.models.leaves(model.hash) and dice.random() < 0.3
    return f"{model.hash} {_operate(s, dice, model.added(dice.randint(1, 2), again))}"


def _remove_model(s: Schedule, dice: Random) -> str:
    live = s.world.judge.models.live()
    if len(live) < 2:
        return ""
    model = dice.choice(live)
    name = dice.choice((s.world.judge.models.known[model.hash].name or model.hash, model.hash))
    return f"{model.hash} {_operate(s, dice, RemoveModel(name=name))}"


def _replace_model(s: Schedule, dice: Random) -> str:
    """A model is removed, and added again before it has gone, or after."""
    live = s.world.judge.models.live()
    if len(live) < 2:
        return ""
    model, world = dice.choice(live), s.world
    world.operate(RemoveModel(name=model.hash))
    after_s = dice.choice((0.1, 2.0, 10.0)) * dice.uniform(0.1, 1.0)
    added = model.added(dice.randint(1, 2), again=dice.random() < 0.3)
    world.at(world.now_s + after_s, world.operate, added)
    s.healed_s = max(s.healed_s, world.now_s + after_s)
    return f"{model.hash} for {after_s:.1f} s"


def _slow_open(s: Schedule, dice: Random) -> str:
    """A server takes longer to open every model from now on."""
    p = s.some(dice, EXPERT)
    if not isinstance(p, ExpertServer):
        return ""
    times = dice.choice((3.0, 10.0))
    p.open_s = {hash: min(20.0, open_s * times) for hash, open_s in p.open_s.items()}
    return f"{p.name} {times} times"


FAULTS: dict[str, tuple[Callable[[Schedule, Random], str], float]] = {
    "kill": (_kill, 3.0),
    "vanish": (_vanish, 1.5),
    "kill several": (_kill_several, 0.7),
    "lose host": (_lose_host, 0.5),
    "freeze": (_freeze, 4.0),
    "freeze several": (_freeze_several, 0.7),
    "partition one way": (_partition_one_way, 3.0),
    "partition": (_partition, 3.0),
    "split": (_split, 0.7),
    "mute": (_mute, 1.0),
    "noise": (_noise, 2.0),
    "slow link": (_slow_link, 1.5),
    "stall router": (_stall_router, 1.0),
    "crash router": (_crash_router, 1.5),
    "older journal": (_older_journal, 0.7),
    "lost journal": (_lost_journal, 0.7),
    "full disk": (_full_disk, 1.0),
    "jump clock": (_jump_clock, 1.0),
    "slow server": (_slow_server, 1.5),
    "corrupt": (_corrupt, 1.0),
    "spike": (_spike, 1.0),
    "drain": (_drain, 1.0),
    "retire": (_retire, 2.0),
    "leave": (_leave, 1.0),
    "surplus": (_surplus, 0.7),
    "scale": (_scale, 2.0),
    "launcher down": (_launcher_down, 1.0),
    "bad starts": (_bad_starts, 0.7),
    "bad loads": (_bad_loads, 1.0),
    "accuse": (_accuse, 1.0),
    "lie": (_lie, 0.7),
    "late messages": (_late_messages, 1.5),
}

# What else happens to a pool of several models.
CHANGES: dict[str, tuple[Callable[[Schedule, Random], str], float]] = {
    "add model": (_add_model, 4.0),
    "remove model": (_remove_model, 3.0),
    "remove model and add it again": (_replace_model, 2.0),
    "slow open": (_slow_open, 1.5),
}
