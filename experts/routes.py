"""The table by which a client's native code finds an expert's servers. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np
from numpy.typing import NDArray

from experts.model import ExpertShape
from router.view import View

MOST_REPLICAS = 8  # EXPERTS_MAX_REPLICAS
NO_SERVER = 255  # EXPERTS_NO_SERVER
AWAITED = 254  # EXPERTS_AWAITED: in the last place of an expert that has a live replica which is not attached
# Of a row: whether a term that nobody can compute may be left out of its sum, and whether one was.
KEEP, MAY_DROP, DROPPED = 0, 1, 2

Table = NDArray[np.uint8]

# As waterfill.h has it: slow is not dead.
_SPEED_BOUND = 8.0


def empty_table(shape: ExpertShape) -> Table:
    """Routes to nobody, uint8 [layers, experts, MOST_REPLICAS]."""
    return np.full((shape.layers, shape.experts, MOST_REPLICAS), NO_SERVER, np.uint8)


def work_of(table: Table, work: NDArray[np.float64], places: int) -> NDArray[np.float64]:
    """[layers, places]: the work of the experts that each place is first asked for."""
    first = table[:, :, 0]
    return np.stack([np.where(first == place, work, 0.0).sum(axis=1) for place in range(places)], axis=1)


def speeds_of(work: NDArray[np.float64], service_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Speeds of servers relative to their mean, from what each computed and the time it took; NaN where unknown."""
    known = (work > 0) & (service_ns > 0)
    speed = np.full(len(work), np.nan)
    if known.any():
        each = work[known] / service_ns[known]
        speed[known] = np.clip(each / each.mean(), 1 / _SPEED_BOUND, _SPEED_BOUND)
    return speed


def spread(table: Table, work: NDArray[np.float64], speed: NDArray[np.float64]) -> Table:
    """The same replicas in another order: of each expert first that server which ends earliest with it.

    In each layer the experts of most work are given out first. For clients whose kernels ask the first live replica.

    Args:
        table: As `table_of` gives it.
        work: [layers, experts] that each expert makes, in any unit.
        speed: Of each place; places without one have none.
    """
    layers, experts, _ = table.shape
    known = table < len(speed)
    # Whoever is nobody or awaited stays behind those who can be asked.
    place = np.where(known, table, 0)
    load = np.zeros((layers, len(speed)))
    order = np.argsort(-work, axis=1, kind="stable")
    layer = np.arange(layers)
    ordered = table.copy()
    for turn in range(experts):
        expert = order[:, turn]
        servers = place[layer, expert]
        ends = (load[layer[:, None], servers] + work[layer, expert][:, None]) / speed[servers]
        ends[~known[layer, expert]] = np.inf
        rank = np.argsort(ends, axis=1, kind="stable")
        ordered[layer, expert] = np.take_along_axis(table[layer, expert], rank, axis=1)
        first = np.take_along_axis(servers, rank[:, :1], axis=1)[:, 0]
        load[layer, first] += np.where(np.isinf(ends.min(axis=1)), 0.0, work[layer, expert])
    return ordered


def busiest(table: Table, work: NDArray[np.float64], speed: NDArray[np.float64]) -> float:
    """How long all layers take, one after another, each as long as its busiest server, where the first are asked."""
    return float((work_of(table, work, len(speed)) / speed).max(axis=1).sum())


def table_of(shape: ExpertShape, view: View, places: Mapping[str, int], given_up: Container[str]) -> Table:
    """Who serves each expert by a View, uint8 [layers, experts, MOST_REPLICAS].

    Args:
        places: Of each attached server its place in the native client, by name.
        given_up: Servers that could not be reached, and are not awaited.
    """
    table = empty_table(shape)
    depth = np.zeros((shape.layers, shape.experts), np.intp)
    awaited = np.zeros(depth.shape, bool)
    for member in view.pool("expert"):
        bits = np.unpackbits(np.frombuffer(member.serving, np.uint8), bitorder="little")[: depth.size]
        held = np.zeros(depth.size, bool)
        held[: len(bits)] = bits.astype(bool)
        if member.name not in places:
            if member.name not in given_up:
                awaited |= held.reshape(depth.shape)
            continue
        layers, experts = np.nonzero(held.reshape(depth.shape) & (depth < MOST_REPLICAS))
        table[layers, experts, depth[layers, experts]] = places[member.name]
        depth[layers, experts] += 1
    last = table[:, :, -1]
    last[awaited & (last == NO_SERVER)] = AWAITED
    return table
