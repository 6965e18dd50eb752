"""How well experts are covered by replicas, and how evenly their load falls on servers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router import bitmap
from router.records import pool
from router.state import Config, State
from router.view import EXPERT


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """One moment's placement and load.

    servers: names of the expert members. lost: (layer, expert) pairs that no member may be asked for. below: those
    with fewer replicas than wanted, the lost ones too. load: [layers, servers] rows per second, as they fall on
    servers when each expert's are split evenly over its replicas; of the last minute or two.
    """

    servers: tuple[str, ...]
    lost: int
    below: int
    load: NDArray[np.float64]

    @property
    def balancedness(self) -> float | None:
        """Mean over the greatest load of a server: 1 when all are as busy, 1/servers when one does everything; of all
        layers together, each weighted with its load. None while there is no load.
        """
        if not self.load.any():
            return None
        busiest = self.load.max(axis=1)
        return float(self.load.mean(axis=1).sum() / busiest.sum())


def coverage(config: Config, state: State) -> Coverage:
    """Of the present state. More copies than there are servers wanted are not wanted of any expert."""
    layers, experts = state.model.layers, state.model.experts
    members = pool(state, EXPERT)
    serving = np.zeros((len(members), layers * experts), bool)
    for row, record in zip(serving, members, strict=True):
        row[:] = _bits(bitmap.to_bytes(record.serving, layers, experts), layers * experts)
    copies = serving.sum(axis=0)
    wanted = min(config.replicas, max(1, state.wanted.get(EXPERT, config.replicas)))
    load = np.zeros((layers, len(members)))
    if state.routed is not None and state.routed.shape == copies.shape and members:
        age_s = max(0.0, state.now_s - state.routed_s)
        # A steady rate adds up to rate * half life / ln 2.
        rate = np.log(2) / config.routed_half_life_s * 0.5 ** (age_s / config.routed_half_life_s)
        each = state.routed * rate / np.maximum(copies, 1)
        load = (serving * each).reshape(len(members), layers, experts).sum(axis=2).T
    return Coverage(
        servers=tuple(record.name for record in members),
        lost=int((copies == 0).sum()),
        below=int((copies < wanted).sum()),
        load=load,
    )


def _bits(held: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(held, np.uint8), count=count, bitorder="little").astype(bool)
