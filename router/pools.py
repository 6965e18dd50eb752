"""How large a pool is, and how large it should be. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router.records import pool
from router.state import MOST_MEMBERS, Config, State


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """One launched pool at one moment.

    live: members that are not draining. starting: ordered from a launcher, not yet members. least, most: bounds of
    wanted.
    """

    wanted: int
    live: int
    starting: int
    draining: int
    least: int
    most: int

    @property
    def is_scaling(self) -> bool:
        """True until the pool has the size that is wanted."""
        return self.live != self.wanted or self.starting > 0 or self.draining > 0


def pool_size(config: Config, state: State, name: str) -> PoolSize:
    """The sizes of one launched pool."""
    members = pool(state, name)
    draining = sum(record.draining for record in members)
    return PoolSize(
        wanted=state.wanted.get(name, config.wanted(name)),
        live=len(members) - draining,
        starting=sum(start.pool == name for start in state.starts),
        draining=draining,
        least=config.least.get(name, 0),
        most=config.most.get(name, MOST_MEMBERS),
    )
