"""Attention workers, each of one model: streams of tokens, made by calls to expert servers by the newest View's routes.

The client half follows experts/client.py: a View is adopted when no route is kept from older ones (the first, when each
server that it names is attached) and no call in flight uses older routes; a slot is used again only after its reply;
what a server does not answer in time goes to another replica, the first time as a hedge within its cap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from router.events import Routed
from router.view import GATEWAY
from tests.sim.cluster.members import ExpertServer, Process
from tests.sim.cluster.network import LOST

if TYPE_CHECKING:
    from tests.sim.cluster.clients import Gateway
    from tests.sim.cluster.models import TrueModel
    from tests.sim.cluster.shell import Row, Shown
    from tests.sim.cluster.world import World

SLOTS = 4
_WORK_S = 0.004
_PATIENCE_S = 0.15
_RETRY_S = 0.25
_BATCH = 6
# So many corrupt replies within so long, as in experts/native/client_state.h.
_CORRUPT_MOST, _CORRUPT_S = 3, 60.0
MASK = 0xFFFFFFFF
HEDGES_FREE, HEDGES_OF_CALLS = 2, 20  # 5%


def mixed(one: int, other: int) -> int:
    """A row made of two others."""
    return (one * 0x9E3779B1 + other * 0x85EBCA6B + 12345) & MASK


class Stream:
    """One request as a worker serves it."""

    __slots__ = ("attempt", "ended", "gateway", "id", "index", "last", "most", "seed")

    def __init__(self, gateway: Gateway, id: int, attempt: int, seed: int, index: int, last: int, most: int) -> None:
        self.gateway, self.id, self.attempt, self.seed = gateway, id, attempt, seed
        self.index, self.last, self.most = index, last, most
        self.ended = False


class Attached:
    """A worker's link to one server: free slots, requests in flight, slots that wait for a late reply."""

    __slots__ = (
        "_corrupt_s",
        "distrusted_s",
        "flying",
        "free",
        "gone",
        "incarnation",
        "name",
        "server",
        "shunned",
        "worker",
    )

    def __init__(self, worker: Worker, server: ExpertServer) -> None:
        self.worker, self.server = worker, server
        self.name, self.incarnation = server.name, server.incarnation
        self.free = SLOTS
        self.flying: dict[int, Dispatch] = {}
        self.gone = False
        self.shunned = False
        self.distrusted_s = 0.0  # the last choice until then
        self._corrupt_s: tuple[float, ...] = ()

    def count_corrupt(self, now_s: float) -> None:
        """One more reply failed its check."""
        self._corrupt_s = (*self._corrupt_s, now_s)[-_CORRUPT_MOST:]
        if len(self._corrupt_s) == _CORRUPT_MOST:
            self.distrusted_s = self._corrupt_s[0] + _CORRUPT_S


class Dispatch:
    """One request to one server: pairs of (token, k, bit, value)."""

    __slots__ = ("call", "given_up", "id", "link", "pairs", "sent_s", "table")

    def __init__(
        self,
        id: int,
        call: Call,
        link: Attached,
        pairs: list[tuple[int, int, int, int]],
        sent_s: float,
        table: int,
    ) -> None:
        self.id, self.call, self.link, self.pairs = id, call, link, pairs
        self.sent_s, self.table = sent_s, table
        self.given_up = False


class Call:
    """One expert call: rows of one layer. rows[token][k] is filled once; open: pairs that nobody works on."""

    __slots__ = ("hedged", "id", "layer", "missing", "open", "rows", "streams", "top_k", "values")

    def __init__(self, id: int, top_k: int, streams: list[Stream], values: list[int]) -> None:
        self.id, self.top_k, self.streams, self.values = id, top_k, streams, values
        self.layer = -1
        self.missing = 0
        self.hedged = False
        self.rows: list[list[int]] = []
        self.open: list[tuple[int, int, int, int]] = []


class Worker(Process):
    """An attention worker."""

    def __init__(
        self, world: World, uid: int, group: str, host: str, ordered: bool, model: TrueModel | None = None
    ) -> None:
        super().__init__(world, uid, group, host, ordered, model)
        self.links: dict[str, Attached] = {}
        self.routes: dict[str, int] = {}
        self.streams: dict[int, Stream] = {}
        self.call: Call | None = None
        self.calls = self.hedges = 0
        self.flights: dict[int, Dispatch] = {}
        self._attaching: set[tuple[str, int]] = set()
        self._table: list[list[Attached]] | None = None
        self._tables = 0
        self._complete_epoch = 0
        self._ids = 0
        self._stepping = False
        self.damaged = False  # reads every reply as corrupt
        self.slanders = ""  # says so of this server, whatever it reads
        self.slandered: set[str] = set()
        self._sent = [0] * (self.model.layers * self.model.experts)
        self._batches = [0] * len(self._sent)
        self._told_s = world.now_s

    def routed(self) -> Routed | None:
        now_s = self.world.now_s
        if now_s - self._told_s < 1.0:
            return None
        self._told_s = now_s
        rows, activated = np.array(self._sent, np.uint32), np.array(self._batches, np.uint32)
        self._sent, self._batches = [0] * len(self._sent), [0] * len(self._batches)
        return Routed(name=self.name, incarnation=self.incarnation, rows=rows, activated=activated)

    def measure(self) -> dict[str, float]:
        corrupt = {
            f"corrupt:{name}": 3.0
            for name, link in self.links.items()
            if self.world.now_s < link.distrusted_s or self.damaged or name == self.slanders
        }
        return {
            "running": float(len(self.streams)),
            "waiting": 0.0,
            "servers_ok": float(len(self.links)),
            **corrupt,
        }

    # Routes.

    def see(self, shown: Shown) -> None:
        self._settle(shown)

    def _settle(self, shown: Shown) -> None:
        experts = shown.of(self.model)
        rows = {row.name: row for row in experts}
        wanted = [row for row in experts if row.serving]
        leaving = [name for name, link in self.links.items() if self._is_lost(link, rows.get(name))]
        missing = [row for row in wanted if row.name not in self.links or row.name in leaving]
        if not missing:
            named = {row.name for row in wanted}
            leaving = [name for name, link in self.links.items() if name not in named or name in leaving]
        for name in leaving:
            self._let_go(self.links.pop(name))
        links = self.links
        routes = {row.name: row.serving for row in wanted if row.name in links}
        kept = False
        if missing:
            covered = 0
            for bits in routes.values():
                covered |= bits
            for name, bits in self.routes.items():
                if name in links and bits & ~covered:
                    routes[name] = routes.get(name, 0) | bits & ~covered
                    kept = True
        if not missing or (self._complete_epoch and not kept):
            self._complete_epoch = shown.epoch
        self.routes = routes
        if any(bits & ~self.model.mask for bits in routes.values()):
            self.world.judge.broken("a worker asks for experts of its own model", f"{self.name}: {routes}")
        self._table = None
        self._tables += 1
        for row in missing:
            if (row.name, row.incarnation) not in self._attaching:
                self._attaching.add((row.name, row.incarnation))
                self.world.at(self.world.now_s + 0.003, self._attach, (row.name, row.incarnation))
        self._adopt()
        if leaving and self.call is not None:
            self._give_up_flights(lambda d: d.link.name not in links)
            self._dispatch_open()
        self.begin_step()

    def _is_lost(self, link: Attached, row: Row | None) -> bool:
        return row is None or row.incarnation != link.incarnation or link.gone

    def _let_go(self, link: Attached) -> None:
        """No route names this server any more: its requests in flight are not waited for."""
        for dispatch in list(link.flying.values()):
            self._give_up(dispatch)

    def _attach(self, what: tuple[str, int]) -> None:
        """Exchange windows with a server; tried again until no View names it."""
        name, incarnation = what
        world = self.world
        if not self.living:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self._attach, what)
            return
        rows = self.view.of(self.model) if self.view is not None else ()
        row = next((row for row in rows if row.name == name), None)
        if row is None or row.incarnation != incarnation or not row.serving:
            self._attaching.discard(what)
            return
        server = world.members.get(incarnation)
        reached = server is not None and server.living and server.asleep_s <= world.now_s
        if not reached or world.network.is_cut(self.uid, server.uid):
            world.at(world.now_s + _RETRY_S, self._attach, what)
            return
        world.happened += 1
        self._attaching.discard(what)
        self.links[name] = Attached(self, server)
        self._settle(self.view)

    def hung_up(self, incarnation: int) -> None:
        """A server's process ended and its memory was unmapped: the link says so."""
        if not self.living:
            return
        if self.asleep_s > self.world.now_s:
            self.world.at(self.asleep_s, self.hung_up, incarnation)
            return
        for link in self.links.values():
            if link.incarnation == incarnation:
                link.gone = True
                if self.view is not None:
                    self._settle(self.view)
                return

    def _adopt(self) -> None:
        """Acknowledge the newest complete routes once no call in flight uses older ones."""
        if self._complete_epoch <= self.acked:
            return
        for dispatch in self.flights.values():
            if dispatch.table != self._tables:
                return
        self.acked = self._complete_epoch
        self.wake()

    # Streams.

    def submit(self, stream: Stream) -> None:
        """A gateway hands over a request."""
        if not self.living:
            return
        if self.asleep_s > self.world.now_s:
            self.world.at(self.asleep_s, self.submit, stream)
            return
        self.world.happened += 1
        known = self.streams.get(stream.id)
        if known is None or known.attempt < stream.attempt:
            if known is not None:
                known.ended = True
            self.streams[stream.id] = stream
            self.begin_step()

    def cancel(self, what: tuple[int, int]) -> None:
        """A gateway takes a request back, up to an attempt."""
        if self.living:
            if self.asleep_s > self.world.now_s:
                self.world.at(self.asleep_s, self.cancel, what)
                return
            id, attempt = what
            stream = self.streams.get(id)
            if stream is not None and stream.attempt <= attempt:
                stream.ended = True
                del self.streams[id]

    def hang_up(self) -> None:
        for gateway in self.world.alive(GATEWAY):
            if not self.world.network.is_cut(self.uid, gateway.uid):
                self.world.at(self.world.now_s + 0.01 * self.dice.random(), gateway.lost, self.incarnation)

    def begin_step(self) -> None:
        """Compute the next token of some streams, if none is being computed."""
        if self._stepping or not self.streams or not self.routes:
            return
        self._stepping = True
        world = self.world
        world.at(world.now_s + world.step_s * (0.5 + self.dice.random()), self._step, None)

    def _step(self, _: Any) -> None:
        world = self.world
        if not self.living:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self._step, None)
            return
        streams = list(self.streams.values())[:_BATCH]
        if not streams:
            self._stepping = False
            return
        self._ids += 1
        self.call = Call(self._ids, self.model.top_k, streams, [mixed(s.seed + s.index, s.last) for s in streams])
        world.at(world.now_s + _PATIENCE_S, self._watch, self.call)
        self._next_layer()

    def _next_layer(self) -> None:
        call, world = self.call, self.world
        call.layer += 1
        model = self.model
        if call.layer == model.layers:
            self._end_step(call)
            return
        experts, top_k, base = model.experts, model.top_k, model.at + call.layer * model.experts
        call.open = []
        for token, value in enumerate(call.values):
            first = value % experts
            call.open.append((token, 0, base + first, value))
            if top_k == 2:
                second = (first + 1 + (value >> 8) % (experts - 1)) % experts
                call.open.append((token, 1, base + second, value))
        for _, _, bit, _ in call.open:
            self._sent[bit - model.at] += 1
        for bit in {pair[2] for pair in call.open}:
            self._batches[bit - model.at] += 1
        call.missing = len(call.open)
        call.rows = [[-1] * top_k for _ in call.values]
        self.calls += 1
        world.ledger.begin_call(call)
        self._dispatch_open()

    def _rows(self) -> list[list[Attached]]:
        if self._table is None:
            count = self.model.layers * self.model.experts
            named = [(self.links[name], bits >> self.model.at) for name, bits in self.routes.items()]
            self._table = [[link for link, bits in named if bits >> bit & 1] for bit in range(count)]
        return self._table

    def _dispatch_open(self) -> None:
        """Send what nobody works on: each pair to its least busy replica that is not shunned."""
        call, world = self.call, self.world
        if call is None or not call.open:
            return
        table = self._rows()
        chosen: dict[Attached, list[tuple[int, int, int, int]]] = {}
        left = []
        rows = call.rows
        for pair in call.open:
            if rows[pair[0]][pair[1]] >= 0:
                continue  # a late reply brought it
            best, best_key = None, (9, 9)
            for link in table[pair[2] - self.model.at]:
                key = (link.shunned + (world.now_s < link.distrusted_s), -link.free)
                if link.free and key < best_key:
                    best, best_key = link, key
            if best is None:
                left.append(pair)
            else:
                chosen.setdefault(best, []).append(pair)
        call.open = left
        for link, pairs in chosen.items():
            self._ids += 1
            dispatch = Dispatch(self._ids, call, link, pairs, world.now_s, self._tables)
            link.free -= 1
            link.flying[dispatch.id] = self.flights[dispatch.id] = dispatch
            delay_s = world.network.delay(self.uid, link.server.uid, self.dice)
            if delay_s != LOST:
                work_s = _WORK_S * link.server.factor * (0.5 + self.dice.random())
                world.at(world.now_s + delay_s + work_s, link.server.serve, dispatch)

    def replied(self, what: tuple[Dispatch, list[tuple[int, int, int, int]]]) -> None:
        """An answer lands: the slot is free again, and each pair is filled if it was not."""
        dispatch, found = what
        world = self.world
        if not self.living:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self.replied, what)
            return
        world.happened += 1
        link = dispatch.link
        if link.flying.pop(dispatch.id, None) is None or self.links.get(link.name) is not link:
            return  # a repetition, or of a link that was torn down
        link.free += 1
        link.shunned = world.now_s < link.distrusted_s
        if link.server.corrupt:
            link.count_corrupt(world.now_s)
            found = [(token, k, bit, -1) for token, k, bit, _ in found]
        self.flights.pop(dispatch.id, None)
        call = dispatch.call
        if call is not self.call or call.layer != self._layer(dispatch):
            self._adopt()
            return
        refused = False
        for token, k, bit, row in found:
            if row < 0:
                if not dispatch.given_up:
                    call.open.append((token, k, bit, call.values[token]))
                    refused = True
            elif call.rows[token][k] < 0:
                call.rows[token][k] = row
                call.missing -= 1
                world.ledger.filled(call, token, k)
        self._adopt()
        if not call.missing:
            self._combine(call)
        elif refused and not link.gone:
            # Its routes are older than the server's target, or it lost what it held: ask again a little later.
            link.shunned = True
            world.at(world.now_s + 0.03, self._again, call)

    def _layer(self, dispatch: Dispatch) -> int:
        return (dispatch.pairs[0][2] - self.model.at) // self.model.experts

    def _again(self, call: Call) -> None:
        if call is self.call and self.living:
            self._dispatch_open()

    def _combine(self, call: Call) -> None:
        self.world.ledger.combined(call)
        call.open = []
        # What still flies was answered by others.
        self._give_up_flights(lambda d: d.call is call)
        values = []
        for value, rows in zip(call.values, call.rows, strict=True):
            for row in rows:
                value = mixed(value, row)
            values.append(value)
        call.values = values
        call.hedged = False
        self._next_layer()

    def _end_step(self, call: Call) -> None:
        world = self.world
        self.call = None
        self._adopt()
        self._stepping = False
        made: dict[Gateway, list[tuple[int, int, int, int]]] = {}
        for stream, value in zip(call.streams, call.values, strict=True):
            if stream.ended:
                continue
            made.setdefault(stream.gateway, []).append((stream.id, stream.attempt, stream.index, value))
            stream.last = value
            stream.index += 1
            if stream.index == stream.most:
                stream.ended = True
                del self.streams[stream.id]
        if made and self.lease_held():
            for gateway, tokens in made.items():
                delay_s = world.network.delay(self.uid, gateway.uid, self.dice)
                if delay_s != LOST:
                    world.at(world.now_s + delay_s, gateway.tokens, (self, tokens))
                    if not world.network.calm and world.network.again(self.dice):
                        world.at(world.now_s + delay_s + self.dice.random(), gateway.tokens, (self, tokens))
        # Others are served in turn.
        for stream in call.streams:
            if not stream.ended and self.streams.get(stream.id) is stream:
                del self.streams[stream.id]
                self.streams[stream.id] = stream
        self.begin_step()

    # What is late.

    def _watch(self, call: Call) -> None:
        """Look after a call that is not done: hedge once within the cap, then shun who is late."""
        world = self.world
        if call is not self.call or not self.living:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self._watch, call)
            return
        if all(stream.ended for stream in call.streams):
            self._give_up_flights(lambda d: d.call is call)
            world.ledger.dropped(call)
            self.call = None
            self._stepping = False
            self._adopt()
            self.begin_step()
            return
        table = self._rows()
        for dispatch in list(self.flights.values()):
            late_s = world.now_s - dispatch.sent_s
            if dispatch.call is not call or late_s < _PATIENCE_S:
                continue
            elsewhere = any(link is not dispatch.link for link in table[dispatch.pairs[0][2] - self.model.at])
            if late_s < 3 * _PATIENCE_S:
                if call.hedged or not elsewhere or self.hedges * HEDGES_OF_CALLS >= self.calls + HEDGES_FREE * 20:
                    continue
                self.hedges += 1
                call.hedged = True
                world.ledger.hedged(self)
            dispatch.link.shunned = True
            self._give_up(dispatch)
        stuck = [link for link in self.links.values() if not link.free and self._is_stuck(link)]
        for link in stuck:
            # Every slot waits for a late reply: only new windows help.
            link.gone = True
        if stuck and self.view is not None:
            self._settle(self.view)
        self._dispatch_open()
        world.at(world.now_s + _PATIENCE_S, self._watch, call)

    def _is_stuck(self, link: Attached) -> bool:
        return all(d.given_up and self.world.now_s - d.sent_s > 1.0 for d in link.flying.values())

    def _give_up_flights(self, which: Any) -> None:
        for dispatch in list(self.flights.values()):
            if which(dispatch):
                self._give_up(dispatch)

    def _give_up(self, dispatch: Dispatch) -> None:
        """Wait no longer: its pairs go to others. The slot stays taken until its late reply, or the link ends."""
        self.flights.pop(dispatch.id, None)
        if dispatch.given_up:
            return
        dispatch.given_up = True
        call = dispatch.call
        if call is self.call and self._layer(dispatch) == call.layer:
            call.open += [pair for pair in dispatch.pairs if call.rows[pair[0]][pair[1]] < 0]
