"""Gateways and those who ask them: requests, the workers that serve them, and what is shown of them.

The token log is the product's own; the rest follows eaas/gateway/pool.py.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from eaas.gateway.failover import TokenLog
from router.events import Left
from router.view import ATTENTION, GATEWAY
from tests.sim.cluster.members import Process
from tests.sim.cluster.network import LOST
from tests.sim.cluster.workers import Stream, Worker

if TYPE_CHECKING:
    from tests.sim.cluster.models import TrueModel
    from tests.sim.cluster.shell import Shown
    from tests.sim.cluster.world import World

DEADLINE_S = 20.0
_SILENCE_S = 2.0
_SWEEP_S = 0.5
_OPEN_PER_WORKER = 10
_LOSSES = 6


class Request:
    """One request: a stream of greedy tokens."""

    __slots__ = ("deadline_s", "gateway", "id", "link", "log", "model", "most", "refused", "seed")

    def __init__(self, id: int, seed: int, most: int, deadline_s: float, gateway: Gateway, model: TrueModel) -> None:
        self.id, self.seed, self.most, self.deadline_s, self.gateway = id, seed, most, deadline_s, gateway
        self.model = model
        self.log = TokenLog([])
        self.link: Connection | None = None
        self.refused: set[int] = set()


class Connection:
    """A gateway's connection to one worker."""

    __slots__ = ("heard_s", "incarnation", "requests", "worker")

    def __init__(self, worker: Worker, incarnation: int, now_s: float) -> None:
        self.worker, self.incarnation, self.heard_s = worker, incarnation, now_s
        self.requests: dict[int, Request] = {}


class Gateway(Process):
    """A gateway."""

    def __init__(
        self, world: World, uid: int, group: str, host: str, ordered: bool, model: TrueModel | None = None
    ) -> None:
        super().__init__(world, uid, group, host, ordered, model)
        self.requests: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.links: dict[int, Connection] = {}
        self._connecting: set[int] = set()
        self.drains = False  # once told to, under whatever name
        world.at(world.now_s + _SWEEP_S, self._sweep, None)

    def measure(self) -> dict[str, float]:
        return {"running": float(len(self.requests)), "waiting": float(len(self.waiting))}

    def fenced(self) -> None:
        """A gateway holds its clients' connections: it goes on, as another member."""
        self._speaking = False
        self.name = ""
        self.join(None)

    def end(self, proved: bool) -> None:
        if self.living:
            for request in list(self.requests.values()):
                self._forget(request)
                self.world.ledger.ended(request, "gateway died")
        super().end(proved)

    # Workers.

    def see(self, shown: Shown) -> None:
        own = shown.rows.get(self.name)
        self.drains = self.drains or (own is not None and own.phase == "draining")
        present = {row.incarnation: row for row in shown.pool(ATTENTION) if row.phase != "warming"}
        for incarnation in [i for i in self.links if i not in present]:
            self._drop(incarnation)
        for incarnation in present:
            if incarnation not in self.links and incarnation not in self._connecting:
                self._connecting.add(incarnation)
                self.world.at(self.world.now_s + 0.004, self._connect, incarnation)
        self._place_waiting()

    def _connect(self, incarnation: int) -> None:
        world = self.world
        if not self.living:
            return
        rows = self.view.pool(ATTENTION) if self.view is not None else []
        if incarnation not in {row.incarnation for row in rows}:
            self._connecting.discard(incarnation)
            return
        worker = world.members.get(incarnation)
        up = worker is not None and worker.living and worker.asleep_s <= world.now_s
        if not up or world.network.is_cut(self.uid, worker.uid):
            world.at(world.now_s + 0.4, self._connect, incarnation)
            return
        world.happened += 1
        self._connecting.discard(incarnation)
        self.links[incarnation] = Connection(worker, incarnation, world.now_s)
        self._place_waiting()

    def lost(self, incarnation: int) -> None:
        """A worker hung up."""
        if self.living and incarnation in self.links:
            self._drop(incarnation)
            self._reconnect(incarnation)

    def _reconnect(self, incarnation: int) -> None:
        if incarnation not in self._connecting:
            self._connecting.add(incarnation)
            self.world.at(self.world.now_s + 0.4, self._connect, incarnation)

    def _drop(self, incarnation: int) -> None:
        link = self.links.pop(incarnation)
        for request in list(link.requests.values()):
            # The end of the connection ends there what it had asked for.
            self._cancel(request)
            self._replay(request)

    # Requests.

    def submit(self, request: Request) -> None:
        """A client asks."""
        self.requests[request.id] = request
        self.world.at(request.deadline_s, self._expire, request)
        self._place(request)

    def models(self) -> list[TrueModel]:
        """Of which it takes requests: all that are served and do not leave."""
        models = self.world.models
        if len(models) == 1:
            return models
        if self.view is None:
            return []
        taken = {model.hash for model in self.view.models if not model.leaving}
        asleep = {model.hash for model in self.view.models if model.asleep}
        served = 0
        for row in self.view.experts:
            served |= row.serving
        return [m for m in models if m.hash in taken and (m.hash in asleep or not m.mask & ~served)]

    def _candidates(self, model: TrueModel) -> list[Connection]:
        rows = self.view.rows.values() if self.view is not None else ()
        for wanted in ("serving", "suspect"):
            found = [
                self.links[row.incarnation]
                for row in rows
                if row.pool == ATTENTION
                and row.phase == wanted
                and row.incarnation in self.links
                and row.model == model.hash
            ]
            if found:
                return found
        return []

    def _place(self, request: Request) -> None:
        links = [link for link in self._candidates(request.model) if link.incarnation not in request.refused]
        link = min(links, key=lambda found: (len(found.requests), found.incarnation), default=None)
        if link is None:
            request.refused.clear()
            self.waiting[request.id] = request
            return
        self.waiting.pop(request.id, None)
        world, log = self.world, request.log
        if not link.requests:
            link.heard_s = world.now_s
        link.requests[request.id] = request
        request.link = link
        index = len(log.output)
        last = log.output[-1] if index else 0
        stream = Stream(self, request.id, log.attempt, request.seed, index, last, request.most)
        world.ledger.placed(request, link.worker, self.view)
        delay_s = world.network.delay(self.uid, link.worker.uid, self.dice)
        if delay_s != LOST:
            world.at(world.now_s + delay_s, link.worker.submit, stream)

    def _place_waiting(self) -> None:
        for request in list(self.waiting.values()):
            self._place(request)

    def _replay(self, request: Request) -> None:
        self._unlink(request)
        request.log.lose()
        if request.log.losses >= _LOSSES:
            self._end(request, "given up")
        else:
            self._place(request)

    def _unlink(self, request: Request) -> None:
        link, request.link = request.link, None
        if link is not None:
            link.requests.pop(request.id, None)

    def _cancel(self, request: Request) -> None:
        link = request.link
        if link is not None:
            delay_s = self.world.network.delay(self.uid, link.worker.uid, self.dice)
            if delay_s != LOST:
                what = (request.id, request.log.attempt)
                self.world.at(self.world.now_s + delay_s, link.worker.cancel, what)

    def _forget(self, request: Request) -> None:
        self._unlink(request)
        self.requests.pop(request.id, None)
        self.waiting.pop(request.id, None)

    def _end(self, request: Request, how: str) -> None:
        self._forget(request)
        self.world.ledger.ended(request, how)

    def _expire(self, request: Request) -> None:
        if self.living and self.requests.get(request.id) is request:
            self._cancel(request)
            self._end(request, "deadline")

    def tokens(self, what: tuple[Worker, list[tuple[int, int, int, int]]]) -> None:
        """All tokens of one step of a worker."""
        worker, tokens = what
        world = self.world
        if not self.living:
            return
        world.happened += 1
        link = self.links.get(worker.incarnation)
        if link is not None:
            link.heard_s = world.now_s
        for id, attempt, index, token in tokens:
            request = self.requests.get(id)
            if request is None:
                continue
            log = request.log
            if not log.accept(attempt, index, token):
                if attempt == log.attempt and index > len(log.output):
                    self._cancel(request)
                    request.refused.add(worker.incarnation)
                    self._replay(request)
                continue
            world.ledger.emitted(request, index, token)
            if len(log.output) == request.most:
                self._end(request, "ok")

    def _sweep(self, _: Any) -> None:
        """Drop workers that are silent with work."""
        if not self.living:
            return
        world = self.world
        for incarnation, link in list(self.links.items()):
            if link.requests and world.now_s - link.heard_s >= _SILENCE_S + world.step_s * 3:
                self._drop(incarnation)
                self._reconnect(incarnation)
        if self.waiting:
            self._place_waiting()
        if self.drains and not self.requests and self.name:
            self.tell(Left(name=self.name, incarnation=self.incarnation, drain=False))
            self.end(True)
            return
        world.at(world.now_s + _SWEEP_S, self._sweep, None)


class Clients:
    """Those who ask. spike: how many times the usual rate."""

    def __init__(self, world: World, rate: float) -> None:
        self.world = world
        self.dice = Random(f"{world.seed} clients")
        self.rate = rate
        self.spike = 1.0
        self._ids = 0

    def start(self) -> None:
        """Begin to ask."""
        self.world.at(0.5, self._ask, None)

    def _has_room(self, model: TrueModel) -> bool:
        """Whether the workers of one of several models have few enough requests that each is served in time."""
        world = self.world
        if len(world.models) == 1:
            return True
        known = world.judge.models
        wanted = world.judge.wanted.get(known.group(ATTENTION, model.hash), 0)
        begun = sum(request.model is model for request, _ in world.ledger.open.values())
        return begun < _OPEN_PER_WORKER * max(1, wanted)

    def _ask(self, _: Any) -> None:
        world, dice = self.world, self.dice
        gateways = [p for p in world.processes.values() if isinstance(p, Gateway) and not p.drains]
        if not gateways:
            gateways = [world.spawn(GATEWAY, "host-a")]
        wanted = sum(size for group, size in world.judge.wanted.items() if group.startswith(ATTENTION))
        if len(world.ledger.open) < _OPEN_PER_WORKER * max(1, wanted):
            gateway = gateways[dice.randrange(len(gateways))]
            if models := [model for model in gateway.models() if self._has_room(model)]:
                self._ids += 1
                model = models[0] if len(world.models) == 1 else dice.choice(models)
                request = Request(
                    *(self._ids, dice.getrandbits(32), dice.randint(2, 10)),
                    *(world.now_s + DEADLINE_S, gateway, model),
                )
                world.ledger.begun(request)
                gateway.submit(request)
        world.at(world.now_s + dice.expovariate(self.rate * self.spike), self._ask, None)
