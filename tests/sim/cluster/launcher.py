"""Launchers of the simulated hosts: they start and end processes when told, and say which have ended."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from router.events import Command, Exited, LauncherAttached, StartProcess, StopProcess
from tests.sim.cluster.network import ROUTER
from tests.sim.cluster.shell import Packet

if TYPE_CHECKING:
    from tests.sim.cluster.members import Process
    from tests.sim.cluster.world import World

_RETRY_S = 0.5


class Launcher:
    """The launcher of one host. down: faults that keep it away. failing: faults that make its starts fail."""

    def __init__(self, world: World, host: str, uid: int) -> None:
        self.world, self.host, self.uid = world, host, uid
        self.dice = Random(f"{world.seed} launcher {host}")
        self.starting: Counter[str] = Counter()
        self.down = 0
        self.failing = 0
        self._life = 0
        self._attached_to = 0
        self._pids = 100_000 * -uid

    def attach(self, _: Any) -> None:
        """Open the stream of orders, and again whenever it breaks."""
        world, router = self.world, self.world.router
        if not self.down:
            linked = not world.network.is_cut(self.uid, ROUTER)
            streams = router.up and self._attached_to == router.life and router.launchers.get(self.host) is self
            if streams and not linked:
                # The broken connection is noticed, here and there.
                router.detach(self)
            elif linked and not streams and router.up and router.stalled_s <= world.now_s:
                self._life += 1
                starting = dict(sorted(self._unjoined().items()))
                router.launchers[self.host] = self
                self._attached_to = router.life
                if router.give(LauncherAttached(host=self.host, starting=starting)) is None:
                    router.launchers.pop(self.host, None)
        world.at(world.now_s + _RETRY_S * (0.5 + self.dice.random()), self.attach, None)

    def _unjoined(self) -> Counter[str]:
        begun = Counter(p.group for p in self.world.processes.values() if self._is_mine(p) and not p.name)
        return +(self.starting + begun)

    def _is_mine(self, process: Process) -> bool:
        return process.ordered and process.host == self.host

    def order(self, command: StartProcess | StopProcess) -> None:
        """An order on the stream."""
        world = self.world
        if self.down or world.network.is_cut(self.uid, ROUTER):
            return
        when_s = world.now_s + 0.002 * self.dice.random()
        if isinstance(command, StartProcess):
            self.starting[command.pool] += 1
            world.at(when_s + self.dice.uniform(0.1, 1.5), self._start, command.pool)
        else:
            world.at(when_s, self._stop, command.pid)

    def _start(self, pool: str) -> None:
        world = self.world
        self.starting[pool] -= 1
        model = world.judge.models.of_group(pool)
        shown = world.router.shown
        # Where to find a model's folder a View says.
        name = pool.partition(":")[2]
        named = not name or (shown is not None and name in {known.name for known in shown.models})
        if self.failing or not named:
            self._pids += 1
            self.say_exit((self._pids, pool))
        else:
            world.spawn(pool, self.host, ordered=True, model=model)

    def _stop(self, pid: int) -> None:
        for process in self.world.processes.values():
            if (process.host, process.pid) == (self.host, pid):
                process.end(True)
                return

    def saw_exit(self, process: Process) -> None:
        """A process of this host ended."""
        pool = process.group if process.ordered else ""
        self.world.at(self.world.now_s + 0.05 * self.dice.random(), self.say_exit, (process.pid, pool))

    def say_exit(self, what: tuple[int, str]) -> None:
        """Tell the router, until it has heard."""
        world = self.world
        pid, pool = what
        delay_s = world.network.delay(self.uid, ROUTER, self.dice)
        if self.down or delay_s < 0:
            world.at(world.now_s + 1.0, self.say_exit, what)
            return

        def answered(commands: list[Command] | None) -> None:
            if commands is None:
                world.at(world.now_s + _RETRY_S, self.say_exit, what)

        world.at(
            world.now_s + delay_s,
            world.router.take,
            Packet(Exited(host=self.host, pid=pid, pool=pool), self.uid, answered),
        )
