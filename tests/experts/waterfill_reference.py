"""How a client splits the rows of one batch over replicas: waterfill.h in Python, which native code is compared with.

Every sum is made in the order of the native code, so both find the same split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

EXPERT_COST: Final = 5.0  # rows that weigh as much as reading an expert's weights
SERVERS: Final = 64
_SWEEPS = 12
_EVEN = 1 / 512


@dataclass(slots=True)
class _Want:
    number: int
    count: int
    servers: list[int]
    share: list[float]


def split_rows(
    counts: Sequence[int],
    servers: Sequence[int],
    speed: Sequence[float],
    expert_cost: float = EXPERT_COST,
    turn: int = 0,
) -> list[dict[int, int]]:
    """Rows of each expert for each of its servers, so that the busiest server ends early.

    Args:
        counts: Rows of each expert.
        servers: A mask of those that may compute it; 0: nobody.
        speed: Of each server, relative.
        expert_cost: Rows that activating an expert costs a server.
        turn: Draws the order of equal servers, 32 bits.

    Returns:
        For each expert, rows by server; servers without rows are left out.
    """
    load = [0.0] * SERVERS
    wants = [
        _Want(number, count, _indexes(mask), [])
        for number, (count, mask) in enumerate(zip(counts, servers, strict=True))
        if count and mask
    ]
    wants.sort(key=lambda want: (len(want.servers), -want.count, want.number))
    for want in wants:
        want.share, _ = _split(want, load, speed, expert_cost, turn)
        _add(load, want, expert_cost, 1)
    involved = sorted({server for want in wants for server in want.servers})
    for _ in range(_SWEEPS if wants else 0):
        loads = speeds = 0.0
        for server in involved:
            loads += load[server]
            speeds += speed[server]
        most = max(load[server] / speed[server] for server in involved)
        if most <= loads / speeds * (1 + _EVEN):
            break
        if _sweep(wants, load, speed, expert_cost, turn) <= most * most * speeds * 1e-6:
            break
    _relieve(wants, involved, load, speed, expert_cost, turn)
    owed = [0.0] * SERVERS
    found: list[dict[int, int]] = [{} for _ in counts]
    for want in wants:
        found[want.number] = _round_off(want, turn, owed)
    return found


def _sweep(wants: Sequence[_Want], load: list[float], speed: Sequence[float], cost: float, turn: int) -> float:
    """Lift each expert that has a choice and split it again where that is better; what was gained."""
    gained = 0.0
    for want in wants:
        if len(want.servers) < 2:
            continue
        was = _squares(load, speed, want.servers)
        _add(load, want, cost, -1)
        fresh, added = _split(want, load, speed, cost, turn)
        gain = was - _squares(load, speed, want.servers) - added
        if gain > 0:
            gained += gain
            want.share = fresh
        _add(load, want, cost, 1)
    return gained


def _relieve(
    wants: Sequence[_Want],
    involved: Sequence[int],
    load: list[float],
    speed: Sequence[float],
    cost: float,
    turn: int,
) -> None:
    """Have a slow server that ends last give up whatever others hold as well, where all then end sooner."""

    def end() -> tuple[float, int]:
        return max(((load[server] / speed[server], -server) for server in involved), default=(0.0, 0))

    ends, last = end()
    while speed[-last] < 1:
        kept, was = [want.share for want in wants], list(load)
        for want in wants:
            if len(want.servers) < 2 or -last not in want.servers:
                continue
            if not want.share[want.servers.index(-last)] > 0:
                continue
            _add(load, want, cost, -1)
            want.share, _ = _split(want, load, speed, cost, turn, without=-last)
            _add(load, want, cost, 1)
        sooner, following = end()
        if not sooner < ends:
            load[:] = was
            for want, share in zip(wants, kept, strict=True):
                want.share = share
            return
        ends, last = sooner, following


def _split(
    want: _Want, load: Sequence[float], speed: Sequence[float], cost: float, turn: int, without: int = -1
) -> tuple[list[float], float]:
    """Rows for each of its servers but one, and what they add to the sum of load^2 / speed."""
    servers = want.servers
    level = {server: (load[server] + cost) / speed[server] for server in servers}
    order = sorted(
        (slot for slot, server in enumerate(servers) if server != without),
        key=lambda slot: (level[servers[slot]], _lot(servers[slot], turn)),
    )

    def squared(amount: float, server: int) -> float:
        return amount * amount / speed[server]

    share = [0.0] * len(servers)
    alone = min(
        order,
        key=lambda slot: (
            squared(load[servers[slot]] + cost + want.count, servers[slot])
            - squared(load[servers[slot]], servers[slot])
        ),
    )
    server = servers[alone]
    least = squared(load[server] + cost + want.count, server) - squared(load[server], server)
    used, height = 1, 0.0
    loads = speeds = before = 0.0
    for number, slot in enumerate(order):
        server = servers[slot]
        if number and (loads + want.count) / speeds <= level[server]:
            break
        loads += load[server] + cost
        speeds += speed[server]
        before += squared(load[server], server)
        found = (loads + want.count) / speeds
        added = found * found * speeds - before
        if number and added < least:
            least, used, height = added, number + 1, found
    if used == 1:
        share[alone] = float(want.count)
    else:
        for slot in order[:used]:
            share[slot] = (height - level[servers[slot]]) * speed[servers[slot]]
    return share, least


def _lot(server: int, turn: int) -> int:
    drawn = (turn * 0x9E3779B9 + server + 1) * 0x85EBCA6B & 0xFFFFFFFF
    drawn = (drawn ^ drawn >> 15) * 0xC2B2AE35 & 0xFFFFFFFF
    return drawn ^ drawn >> 13


def _add(load: list[float], want: _Want, cost: float, sign: float) -> None:
    for server, share in zip(want.servers, want.share, strict=True):
        if share > 0:
            load[server] += sign * (share + cost)


def _squares(load: Sequence[float], speed: Sequence[float], servers: Sequence[int]) -> float:
    total = 0.0
    for server in servers:
        total += load[server] * load[server] / speed[server]
    return total


def _round_off(want: _Want, turn: int, owed: list[float]) -> dict[int, int]:
    """Whole rows, each odd one to the server that rounding owes most."""
    rows: dict[int, int] = {}
    left = want.count
    for server, share in zip(want.servers, want.share, strict=True):
        if share > 0:
            rows[server] = min(left, int(share))
            left -= rows[server]
            owed[server] += share - rows[server]
    for _ in range(left):
        to = min(rows, key=lambda server: (-owed[server], _lot(server, turn)))
        owed[to] -= 1
        rows[to] += 1
    return {server: count for server, count in rows.items() if count}


def _indexes(mask: int) -> list[int]:
    return [server for server in range(SERVERS) if mask >> server & 1]
