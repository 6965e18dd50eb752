"""The heat map: rows a second of each layer on each expert server. Pure.

The router knows how many rows went to each expert, and each server how many it computed in all; nobody counts by layer
and server. So the rows of an expert are taken as spread evenly over its copies, and each server's column is then made
to add up to what that server itself reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eaas.gateway.dashboard.board import LOST, Heat, Server
from eaas.gateway.dashboard.history import SHOWN_S, ClusterSnapshot, History
from router import bitmap
from router.view import EXPERT, Member, View

_WINDOW_S = 5.0
_MOST_READINGS = 16
# The hottest cell of late stands for full heat; half of it is forgotten in this time, so that colors stay calm.
_HALF_LIFE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class _Reading:
    at_s: float
    rows: NDArray[np.uint64]
    reported: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Rows sent to each expert, as told over the last seconds. hottest: rows a second that stand for full heat."""

    readings: tuple[_Reading, ...] = ()
    hottest: float = 0.0

    def read(self, snapshot: ClusterSnapshot, at_s: float) -> Flow:
        """With what was just told. at_s: monotonic."""
        if snapshot.rows is None or snapshot.view is None or not snapshot.heard:
            return Flow(hottest=self.hottest)
        reported = {
            member.name: member.load["pairs_per_s"]
            for member in snapshot.view.pool(EXPERT)
            if "pairs_per_s" in member.load
        }
        kept = [r for r in self.readings if at_s - r.at_s <= _WINDOW_S + 0.5]
        if kept and (kept[-1].rows.shape != snapshot.rows.shape or (kept[-1].rows > snapshot.rows).any()):
            kept = []  # another router counts anew
        new = _Reading(at_s=at_s, rows=snapshot.rows, reported=reported)
        return Flow(readings=(*kept, new)[-_MOST_READINGS:], hottest=self.hottest)

    def rates(self) -> NDArray[np.float64] | None:
        """Rows a second of each expert; None before two readings."""
        if len(self.readings) < 2:
            return None
        old, new = self.readings[0], self.readings[-1]
        return (new.rows - old.rows).astype(np.float64) / (new.at_s - old.at_s)

    def reported(self, name: str) -> float | None:
        """Rows a second that a server says it computes, mean over the readings that have it."""
        found = [r.reported[name] for r in self.readings if name in r.reported]
        return sum(found) / len(found) if found else None


def spread(rates: NDArray[np.float64], serving: Mapping[str, bytes], shape: tuple[int, int]) -> dict[str, NDArray]:
    """Rows a second of each layer on each server, [layers] by its name: the rows of an expert spread evenly over its
    copies. Args: rates: [layers * experts]. serving: bitmap of each server. shape: (layers, experts)."""
    pairs = shape[0] * shape[1]
    held = {name: _bits(bits, pairs) for name, bits in serving.items()}
    on = sum(held.values(), np.zeros(pairs))
    each = np.divide(rates, on, out=np.zeros(pairs), where=on > 0)
    return {name: (each * bits).reshape(shape).sum(axis=1) for name, bits in held.items()}


def _bits(packed: bytes, pairs: int) -> NDArray[np.float64]:
    found = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[:pairs]
    return np.pad(found, (0, pairs - len(found))).astype(np.float64)


def heat_of(view: View, flow: Flow, history: History, now_s: float, elapsed_s: float) -> tuple[Heat, Flow]:
    """The heat map, and the flow with what stands for full heat from now on. Args: now_s: Since 1970, as in the
    history. elapsed_s: Since the last heat map."""
    members = view.pool(EXPERT)
    rates = flow.rates()
    loads: dict[str, NDArray] = {}
    if rates is not None and len(rates) == view.layers * view.experts:
        serving = {member.name: member.serving for member in members}
        loads = spread(rates, serving, (view.layers, view.experts))
    servers = [_server(view, member, loads.get(member.name), flow, history) for member in members]
    present = {member.name for member in members}
    servers += [
        replace(
            # It had the same experts, and computes nothing any more.
            _server(view, replace(lost.member, load={}), None, Flow(), History()),
            state=LOST,
            since_s=lost.at_s,
            gone_reason=lost.reason,
            replacement=lost.replacement,
        )
        for lost in history.lost
        # For as long as nobody serves in its place, and then as a memory.
        if lost.member.pool == EXPERT
        and lost.member.name not in present
        and (not lost.replacement or now_s - lost.at_s <= SHOWN_S)
    ]
    servers.sort(key=lambda server: int(server.name.rpartition("/")[2]))
    hottest = max((rows for server in servers for rows in server.rows), default=0.0)
    hottest = max(hottest, flow.hottest * 0.5 ** (elapsed_s / _HALF_LIFE_S))
    working = [server.rows_per_s for server in servers if server.state != LOST and server.experts]
    mean = sum(working) / len(working) if working else 0.0
    heat = Heat(
        layers=view.layers,
        experts=view.experts,
        servers=tuple(servers),
        hottest=hottest,
        balance=max(working) / mean if mean else None,
    )
    return heat, Flow(readings=flow.readings, hottest=hottest)


def _server(view: View, member: Member, load: NDArray | None, flow: Flow, history: History) -> Server:
    held = bitmap.by_layer(bitmap.from_bytes(member.serving), view.layers, view.experts)
    layers = load.tolist() if load is not None else [0.0] * view.layers
    total, reported = sum(layers), flow.reported(member.name)
    if not total and reported:
        # Until two readings tell where its rows go, each layer has its part.
        layers, total = [reported * count / max(1, sum(held)) for count in held], reported
    scale = reported / total if reported is not None and total > 0 else 1.0
    marks = [history.marks.get((member.name, layer)) for layer in range(view.layers)]
    return Server(
        name=member.name,
        state=member.state,
        experts=sum(held),
        rows_per_s=round(total * scale, 1),
        busy=member.load.get("busy"),
        held=tuple(held),
        rows=tuple(round(rows * scale, 1) for rows in layers),
        marks=tuple(mark.kind if mark else "" for mark in marks),
    )
