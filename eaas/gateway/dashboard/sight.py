"""What a gateway sees of the cluster at one moment, as the router tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eaas.gateway.dashboard.board import Router
from router.pools import PoolSize
from router.replies import GoneMember
from router.view import View


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The newest View known, and what only a router that answers tells.

    heard: a router answered just now. routers: the one that leads first. gone: the latest, oldest first. problem: why
    the router cannot decide; empty when it can. rows: [layers * experts] sent to each expert since the router began;
    None where that is not known.
    """

    view: View | None
    heard: bool
    routers: tuple[Router, ...] = ()
    pools: Mapping[str, PoolSize] = field(default_factory=dict[str, PoolSize])
    gone: tuple[GoneMember, ...] = ()
    problem: str = ""
    rows: NDArray[np.uint64] | None = field(default=None, compare=False)
