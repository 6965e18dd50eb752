"""Which processes to order when a pool is under its wanted size. Pure."""

from __future__ import annotations

from router.events import Command, Launch, LauncherAttached
from router.records import doubts_itself, evolve
from router.state import LAUNCHED_POOLS, MOST_MEMBERS, Config, Failures, Start, State


def order(config: Config, state: State, commands: list[Command]) -> State:
    """Order a process for each place that neither a live member nor an ordered start fills.

    While the router doubts itself, those it does not hear live: a second set of processes would only load a
    host further that is too busy to answer.
    """
    for start in state.starts:
        if state.now_s >= start.until_s:
            state = evolve(state, starts=_without(state.starts, start))
            state = failed(config, state, start.pool)
    if any(state.now_s >= start.until_s for start in state.orphans):
        state = evolve(state, orphans=tuple(start for start in state.orphans if state.now_s < start.until_s))
    if not state.launchers:
        return state
    for name in LAUNCHED_POOLS:
        ordered = sum(1 for start in state.starts if start.pool == name)
        missing = state.wanted[name] - live(config, state, name) - ordered
        if missing <= 0 or state.now_s < state.failures.get(name, Failures()).next_s:
            continue
        for _ in range(missing):
            host = min(state.launchers, key=lambda h: (_burden(state, h), h))
            start = Start(host=host, pool=name, until_s=state.now_s + config.start_s)
            state = evolve(state, starts=(*state.starts, start))
            commands.append(Launch(host=host, pool=name))
    return state


def live(config: Config, state: State, name: str) -> int:
    """Members of a pool that count: those which drain or are to be replaced do not, nor those which look dead or stand
    still."""
    dead = state.silent if state.silent and not doubts_itself(config, state) else frozenset[str]()
    dead |= state.standing
    count = 0
    for record in state.members.values():
        if record.pool == name and not (record.draining or record.leaving) and record.name not in dead:
            count += 1
    return count


def attach(config: Config, state: State, event: LauncherAttached) -> State:
    """A launcher appears, or appears again: what it says is starting replaces what was known of its host."""
    state = detach(state, event.host)
    orphans = tuple(start for start in state.orphans if start.host != event.host)
    until_s = state.now_s + config.start_s
    starts = tuple(
        Start(host=event.host, pool=name, until_s=until_s)
        for name in LAUNCHED_POOLS
        for _ in range(min(event.starting.get(name, 0), MOST_MEMBERS))
    )
    return evolve(
        state, launchers=(*state.launchers, event.host), starts=state.starts + starts, orphans=orphans
    )


def detach(state: State, host: str) -> State:
    """A launcher is gone: nobody says any more what becomes of the orders that it had."""
    return evolve(
        state,
        launchers=tuple(known for known in state.launchers if known != host),
        starts=tuple(start for start in state.starts if start.host != host),
        orphans=state.orphans + tuple(start for start in state.starts if start.host == host),
    )


def expects(state: State, host: str, name: str) -> bool:
    """True if a process of that host and pool was ordered and has not joined."""
    return any((start.host, start.pool) == (host, name) for start in state.starts + state.orphans)


def joined(state: State, host: str, name: str) -> State:
    """A process of that host and pool became a member: the oldest order is filled."""
    for start in state.starts:
        if (start.host, start.pool) == (host, name):
            return evolve(state, starts=_without(state.starts, start))
    for start in state.orphans:
        if (start.host, start.pool) == (host, name):
            return evolve(state, orphans=_without(state.orphans, start))
    return state


def never_joined(config: Config, state: State, host: str, name: str) -> State:
    """A process started for a pool ended before it joined."""
    return failed(config, joined(state, host, name), name)


def failed(config: Config, state: State, name: str) -> State:
    """One more failed start of that pool: the next one waits."""
    count = state.failures.get(name, Failures()).count + 1
    wait_s = min(config.backoff_s * 2.0 ** min(count - 1, 30), config.backoff_most_s)
    failures = Failures(count=count, next_s=state.now_s + wait_s)
    return evolve(state, failures={**state.failures, name: failures})


def succeeded(state: State, name: str) -> State:
    """A member of that pool became ready: earlier failures are forgiven."""
    if name not in state.failures:
        return state
    return evolve(state, failures={n: f for n, f in state.failures.items() if n != name})


def _without(starts: tuple[Start, ...], one: Start) -> tuple[Start, ...]:
    at = starts.index(one)
    return starts[:at] + starts[at + 1 :]


def _burden(state: State, host: str) -> int:
    return sum(1 for r in state.members.values() if r.host == host) + sum(
        1 for s in state.starts if s.host == host
    )
