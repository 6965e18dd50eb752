"""Which server holds which experts. Pure.

Goals, in this order: every expert on as many distinct servers as wanted; what is in place stays; in each
layer all servers hold equally many experts (one more or less); copies of an expert lie in two zones;
a server shares its replicas with few others (copysets), so that two losses at once rarely meet. From nothing,
experts lie on two rings of all servers, slice i of every layer on servers i .. i + replicas - 1 of its ring: four
neighbours, near and far, so that load which one server cannot take has a short way to any other. Later joins and
losses move only what evenness asks for, thinnest pairs of servers first, which keeps the pairs few.

Copies beyond those wanted (`redundant`) are placed by load, in router.balance; here they stay while there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import gcd

from router import bitmap
from router.bitmap import indexes


def place(
    *,
    layers: int,
    experts: int,
    replicas: int,
    capacity: Mapping[str, int],
    current: Mapping[str, int] | None = None,
    doubtful: Set[str] = frozenset(),
    zones: Mapping[str, str] | None = None,
    redundant: int = 0,
) -> dict[str, int]:
    """Place experts on distinct servers, moving as little as evenness allows: first one copy of each, then a second.

    Args:
        layers, experts: Shape: MoE layers, logical experts in each.
        replicas: Copies wanted of every expert; there are fewer of some where no more fit.
        capacity: (layer, expert) pairs that fit on each live server, by name, in ring order; 0 = all.
        current: Bitmaps (see router.bitmap) of what is in place, by name. Servers not in `capacity` are lost.
        doubtful: Servers that may be dead: they keep what they have and get nothing, and an expert that only
            they hold gets one more copy elsewhere.
        zones: What fails together, by name; a server without one is in a zone of that sort, "".
        redundant: Copies beyond `replicas` that may stay in each layer.

    Returns:
        A bitmap for each live server.
    """
    current = current or {}
    names = list(capacity)
    pairs = layers * experts
    places = [min(capacity[name] or pairs, pairs) for name in names]
    healthy = sum(1 << i for i, name in enumerate(names) if name not in doubtful)
    copies = min(replicas, len(names))
    zone = [(zones or {}).get(name, "") for name in names]
    if names and not any(current.get(name, 0) for name in names):
        current = _rings(names, zone, layers, experts, copies)
        ring_places = -(-experts * copies // len(names)) * layers
        if not doubtful and min(places) >= ring_places and len({*zone}) == 1:
            return dict(current)
    shared = [[0] * len(names) for _ in names]
    totals = [0] * len(names)
    grid: list[_Layer] = []
    servers = indexes(healthy)
    together: dict[str, int] = {}
    for i, name in enumerate(zone):
        together[name] = together.get(name, 0) | 1 << i
    beside = [together[name] for name in zone]
    mask = (1 << experts) - 1
    for number in range(layers):
        held = [current.get(name, 0) >> (number * experts) & mask for name in names]
        room = [places[i] // layers + (number < places[i] % layers) for i in range(len(names))]
        layer = _Layer(
            experts=experts,
            copies=copies,
            redundant=redundant,
            room=room,
            healthy=healthy,
            zone=zone,
            shared=shared,
            totals=totals,
            servers=servers,
            beside=beside,
        )
        layer.take(held)
        grid.append(layer)
    result = [0] * len(names)
    for number, layer in enumerate(grid):
        layer.trim()
        layer.fill()
        layer.even()
        layer.part_zones()
        for expert, holders in enumerate(layer.holders):
            for server in indexes(holders):
                result[server] |= 1 << (number * experts + expert)
    return dict(zip(names, result, strict=True))


def _rings(names: Sequence[str], zone: Sequence[str], layers: int, experts: int, copies: int) -> dict[str, int]:
    """Half of the experts on the ring of servers in order, half on the ring of every stride-th server."""
    count = len(names)
    order = _interleaved(zone)
    stride = _stride([zone[i] for i in order]) if copies == 2 else 1
    near = [names[i] for i in order]
    far = [near[place * stride % count] for place in range(count)]
    # Equal slices on the first ring; the second, or the only one, has the rest, and with it what is uneven.
    each = experts // (2 * count) if stride > 1 else 0
    placed = dict.fromkeys(names, 0)
    for layer in range(layers):
        for slice_ in range(count):
            # The phase hands the longer slices round, layer by layer.
            phase, rest = layer % count, experts - each * count
            first, end = (slice_ * rest + phase) // count, ((slice_ + 1) * rest + phase) // count
            near_bits = bitmap.of_pairs(((layer, each * slice_ + i) for i in range(each)), experts)
            far_bits = bitmap.of_pairs(((layer, each * count + expert) for expert in range(first, end)), experts)
            for step in range(copies):
                placed[near[(slice_ + step) % count]] |= near_bits
                placed[far[(slice_ + step) % count]] |= far_bits
    return placed


def _interleaved(zone: Sequence[str]) -> list[int]:
    """Indexes of servers, zones taking turns as long as they last; as they come where there is one zone."""
    turn: dict[str, int] = {}
    places: list[tuple[float, int]] = []
    for index, name in enumerate(zone):
        turn[name] = turn.get(name, 0) + 1
        places.append(((turn[name] - 0.5) / zone.count(name), index))
    return [index for _, index in sorted(places)] if len(turn) > 1 else list(range(len(zone)))


def _stride(zone: Sequence[str]) -> int:
    """A stride that visits all servers and meets new neighbours in other zones, near the root of their number; or 1."""
    count = len(zone)

    def cost(stride: int) -> tuple[int, float]:
        if len({*zone}) == 1:
            return 0, abs(stride - count**0.5)
        return sum(zone[i] == zone[(i + stride) % count] for i in range(count)), abs(stride - count**0.5)

    strides = [stride for stride in range(2, (count + 1) // 2) if gcd(stride, count) == 1]
    return min(strides, key=cost, default=1)


@dataclass
class _Layer:
    """One layer while it is being placed. servers: indexes of the healthy. beside: for each server, a mask of those
    in its zone. holders: for each expert, a mask of those that hold it.

    shared and totals belong to all layers: how many experts each two servers share, and how many each holds.
    """

    experts: int
    copies: int
    redundant: int
    room: list[int]
    healthy: int
    zone: list[str]
    shared: list[list[int]]
    totals: list[int]
    servers: list[int]
    beside: list[int]
    holders: list[int] = field(default_factory=list[int])
    load: list[int] = field(default_factory=list[int])

    def take(self, held: Sequence[int]) -> None:
        """Start from what is in place, up to each server's room."""
        self.holders = [0] * self.experts
        self.load = [0] * len(held)
        for server, bits in enumerate(held):
            for expert in indexes(bits)[: self.room[server]]:
                self._add(expert, server)

    def trim(self) -> None:
        """Drop copies beyond those wanted and the redundant ones, never the last healthy one."""
        beyond = sum(max(0, holders.bit_count() - self.copies) for holders in self.holders) - self.redundant
        for expert in range(self.experts):
            while beyond > 0 and self.holders[expert].bit_count() > self.copies:
                spare = indexes(self.holders[expert] & self.healthy)
                if len(spare) < 2:
                    break
                self._remove(expert, max(spare, key=lambda s: (self.load[s], self.totals[s], s)))
                beyond -= 1

    def fill(self) -> None:
        """Add missing copies, first for the experts with fewest."""
        for copy in range(1, self.copies + 1):
            for expert in range(self.experts):
                holders = self.holders[expert]
                wanted = holders.bit_count() < copy or (copy == 1 and not holders & self.healthy)
                if wanted and not self._add_copy(expert, copy) and self._is_full(copy):
                    break

    def _is_full(self, copy: int) -> bool:
        """True if no server has room, nor would if every expert had `copy` copies."""
        spare = any((holders & self.healthy).bit_count() > copy for holders in self.holders)
        return not spare and all(self.load[s] >= self.room[s] for s in self.servers)

    def even(self) -> None:
        """Move copies from the fullest to the emptiest server until they differ by one at most.

        Redundant copies lie where the load wants them: they may make more of a difference.
        """
        beyond = sum(max(0, holders.bit_count() - self.copies) for holders in self.holders)
        slack = -(-min(beyond, self.redundant) // max(1, len(self.room)))
        servers = self.servers
        groups: dict[int, list[int]] = {}
        for expert, holders in enumerate(self.holders):
            groups.setdefault(holders, []).append(expert)
        while True:
            open_ = [s for s in servers if self.load[s] < self.room[s]]
            if not open_:
                return
            to = self._emptiest(open_)[0]
            most = max(map(self.load.__getitem__, servers))
            if most <= self.load[to] + 1 + slack:
                return
            fullest = sum(1 << s for s in servers if self.load[s] == most)
            moves = [
                (self._strangeness(holders, out, to), out, holders)
                for holders, members in groups.items()
                if members and holders & fullest and not holders >> to & 1
                for out in indexes(holders & fullest)
            ]
            _, out, holders = min(moves)
            expert = groups[holders].pop()
            self._remove(expert, out)
            self._add(expert, to)
            groups.setdefault(self.holders[expert], []).append(expert)

    def _emptiest(self, servers: list[int]) -> list[int]:
        """Those with the least in this layer, and of these with the least in all."""
        for least in (self.load, self.totals):
            low = min(map(least.__getitem__, servers))
            servers = [s for s in servers if least[s] == low]
        return servers

    def part_zones(self) -> None:
        """Where all copies of an expert lie in one zone, exchange one for another expert's in another zone."""
        if len({*self.zone}) < 2 or self.copies < 2:
            return
        for expert in range(self.experts):
            holders = self.holders[expert]
            if holders and not holders & ~self.beside[(holders & -holders).bit_length() - 1]:
                self._exchange(expert)

    def _exchange(self, expert: int) -> None:
        holders = self.holders[expert]
        healthy = indexes(self.healthy)
        own = {self.zone[s] for s in indexes(holders)}
        for out in [s for s in healthy if holders >> s & 1]:
            for to in [s for s in healthy if self.zone[s] not in own]:
                for other in range(self.experts):
                    theirs = self.holders[other]
                    if not theirs >> to & 1 or theirs >> out & 1:
                        continue
                    if self._zones(theirs ^ (1 << to) ^ (1 << out)) >= min(2, self._zones(theirs)):
                        self._remove(expert, out)
                        self._remove(other, to)
                        self._add(expert, to)
                        self._add(other, out)
                        return

    def _zones(self, holders: int) -> int:
        return len({self.zone[server] for server in indexes(holders)})

    def _strangeness(self, holders: int, out: int, to: int) -> tuple[int, int, int, int]:
        """How bad a move is: zones lost; pairs of servers that it newly joins; how thick the pairs that it thins."""
        others = indexes(holders & ~(1 << out))
        lost = self._zones(holders) - self._zones(holders ^ (1 << out) | 1 << to)
        new = sum(1 for other in others if not self.shared[to][other])
        thick = sum(self.shared[out][other] for other in others)
        return max(0, lost), new, thick, -self.totals[out]

    def _add_copy(self, expert: int, copy: int) -> bool:
        holders = self.holders[expert]
        absent = [s for s in self.servers if not holders >> s & 1]
        open_ = [s for s in absent if self.load[s] < self.room[s]]
        if open_:
            others = indexes(holders)
            zones = {self.zone[other] for other in others}
            # One word of the order after the other: few servers are left for those that take long to say.
            open_ = [s for s in open_ if self.zone[s] not in zones] or open_
            open_ = self._emptiest(open_)
            rows = [self.shared[other] for other in others] or [self.totals]
            known = rows[0] if len(rows) == 1 else [*map(sum, zip(*rows, strict=True))]
            self._add(expert, max(open_, key=known.__getitem__))
            return True
        if self._is_full(copy):
            # To search for a chain of moves where there is none took minutes with 100 of 512 servers.
            return False
        tried: set[int] = set()
        for server in absent:
            if self._make_room(server, copy, tried):
                self._add(expert, server)
                return True
        return False

    def _make_room(self, server: int, copy: int, tried: set[int]) -> bool:
        """Free one place, by a chain of moves or by dropping a copy of an expert that has more than `copy`."""
        if server in tried:
            return False
        tried.add(server)
        if self.load[server] < self.room[server]:
            return True
        mine = [e for e in range(self.experts) if self.holders[e] >> server & 1]
        for expert in mine:
            if (self.holders[expert] & self.healthy).bit_count() > copy:
                self._remove(expert, server)
                return True
        for expert in mine:
            for other in indexes(self.healthy & ~self.holders[expert]):
                if self._make_room(other, copy, tried):
                    self._remove(expert, server)
                    self._add(expert, other)
                    return True
        return False

    def _add(self, expert: int, server: int) -> None:
        for other in indexes(self.holders[expert]):
            self.shared[server][other] += 1
            self.shared[other][server] += 1
        self.holders[expert] |= 1 << server
        self.load[server] += 1
        self.totals[server] += 1

    def _remove(self, expert: int, server: int) -> None:
        self.holders[expert] &= ~(1 << server)
        self.load[server] -= 1
        self.totals[server] -= 1
        for other in indexes(self.holders[expert]):
            self.shared[server][other] -= 1
            self.shared[other][server] -= 1
