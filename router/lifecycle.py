"""How members come and go: how a term begins, which processes are ordered, and how a pool shrinks. Pure.

A journal is older than the cluster where it was put back from a copy, or lost its last commits. Members have then seen
epochs that it never gave, hold experts of which it does not know, and some are none to it. So a term decides and
publishes nothing until every member of its journal was heard, or a lease has passed:

- members say which epoch they saw last: the next that is published is above all of these, for they ignore lower ones;
- expert servers say what they hold: what the journal does not know of stays there until all who may ask have acked;
- what was acked or reported in another term does not count: each has a salt of its own, which its Views carry, and so
  no incarnation is given twice.

Where the journal is lost whole nobody is a member, so that all join anew and epochs begin anew; whoever only watches
follows a term that it never saw, whatever its epochs are (router.client). Models are known to whoever starts the router
(router.journal.read_entries).

A pool shrinks by one member at a time, which drains; then its process is ended. An expert server has drained when its
experts are served elsewhere (router.moves); an attention worker when it has said, having seen itself shown as draining,
that nothing runs on it: a gateway that sends it a stream later, from an older View, has the stream go on elsewhere.
Whoever takes longer than the pool's drain_s is ended all the same: streams of an attention worker go on elsewhere, and
an expert server's experts too, unless it holds the last replica of one. A gateway drains by itself, once another
listens in its place, and then leaves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as with_fields

from router import events
from router.models import bits_of, group, groups, idle_askers, listed, members_of, with_model
from router.records import doubts_itself, fence, is_needed, pool, replace, with_liveness, with_record
from router.state import (
    LAUNCHED_POOLS,
    MOST_MEMBERS,
    Config,
    Failures,
    FencedClient,
    Liveness,
    MemberRecord,
    Start,
    State,
)
from router.view import ASKING_POOLS, ATTENTION, CLIENT, EXPERT, GATEWAY

SALT_MASK = (1 << 20) - 1
# A member that says more has seen nothing of the kind; what is left suffices for ever.
_MOST_EPOCH = 1 << 62


def begin_term(config: Config, state: State, event: events.Started) -> State:
    """A new term: every member was just renewed; who had gone just before, or is not in the journal, may still use what
    it had."""
    until_s = state.now_s + config.lease_s
    salts = ((event.salt + more) & SALT_MASK for more in range(3))
    fenced = tuple(FencedClient(host=gone.host, pid=gone.pid, acked=0, until_s=until_s) for gone in state.gone)
    if state.members:
        fenced = (*fenced, FencedClient(host="", pid=0, acked=0, until_s=until_s))
    return replace(
        state,
        salt=next(salt for salt in salts if salt not in (0, state.salt)),
        term=state.term + 1,
        ticked_s=state.now_s,
        unloaded_epoch=state.epoch + 1,
        liveness={name: Liveness(renewed_s=state.now_s, journaled=True) for name in state.members},
        fenced_clients=fenced,
        wanted=state.wanted or {name: config.wanted(name) for name in LAUNCHED_POOLS},
        unheard=frozenset(state.members),
        unheard_until_s=until_s,
        behind=False,
        journaled=len(state.models),
    )


def catch_up(state: State, event: events.Event) -> tuple[State, bool]:
    """The state after whatever an event says of the cluster's past, and whether it must be published now."""
    speaker = state.members.get(event.name) if isinstance(event, events.Renewed | events.Loaded) else None
    ahead = 0
    if isinstance(event, events.Renewed) and speaker is not None and speaker.pool != CLIENT:
        ahead = event.seen if event.seen <= _MOST_EPOCH else 0
    if not state.unheard:
        if ahead <= state.epoch:
            return state, isinstance(event, events.Started)
        # It was not heard when the term began.
        return _rise(state, ahead), True
    unheard = state.unheard & state.members.keys()
    if speaker is not None:
        liveness = state.liveness[speaker.name]
        if liveness.told or speaker.pool != EXPERT:
            unheard -= {speaker.name}
        if ahead > liveness.seen:
            state = with_liveness(state, speaker.name, replace(liveness, seen=ahead))
    if unheard and not (isinstance(event, events.Tick) and state.now_s >= state.unheard_until_s):
        return (state if unheard == state.unheard else replace(state, unheard=unheard)), False
    return _resume(state, unheard), True


def note_unknown_member(state: State, event: events.Renewed) -> State:
    """What one who is no member said: that it saw more than the journal knows is reason to doubt that, no more."""
    doubts = state.unheard and event.seen > state.epoch and not state.behind
    return replace(state, behind=True) if doubts else state


def _resume(state: State, unheard: frozenset[str]) -> State:
    """All were heard, or have had their time."""
    seen = max((liveness.seen for liveness in state.liveness.values()), default=0)
    behind = seen > state.epoch or state.behind
    state = replace(state, unheard=frozenset[str]())
    if behind:
        state = _rise(state, max(seen, state.epoch))
    for record in pool(state, EXPERT):
        if record.name not in unheard:
            # The journal may have lost what it holds two terms ago, when it was not heard.
            state = keep_held(state, record.name, state.liveness[record.name].unknown)
        elif behind:
            # What it held when the journal was written it may have unloaded since, or hold more. It follows no View of
            # this term before it has said so.
            state = with_record(state, replace(record, target=0, loaded=0, serving=0, retiring=0))
    return state


def _rise(state: State, epoch: int) -> State:
    return replace(state, epoch=epoch, unloaded_epoch=epoch + 1, settled=False)


def held_beyond_journal(state: State, event: events.Loaded) -> int:
    """What a server holds and the journal does not let anyone ask it for; it says so with its first report of a term.

    Somebody may ask all the same, by a View that the journal does not know.
    """
    liveness = state.liveness[event.name]
    if liveness.told:
        return liveness.unknown & event.held
    return event.held & bits_of(state.models) & ~state.members[event.name].serving if event.salt else 0


def keep_held(state: State, name: str, bits: int) -> State:
    """Leave with a server what it holds unknown to the journal, until all who may ask for it have acked."""
    record = state.members[name]
    bits &= ~record.serving
    if not bits:
        return state
    target = record.target | bits
    if record.capacity and target.bit_count() > record.capacity:
        target &= record.loaded | record.serving | record.retiring | bits
    if record.capacity and target.bit_count() > record.capacity:
        target &= record.loaded | bits
    kept = replace(record, target=target, loaded=record.loaded | bits, retiring=record.retiring | bits)
    return with_record(state, replace(kept, retiring_epoch=state.epoch + 1))


def order_starts(config: Config, state: State, commands: list[events.Command]) -> State:
    """Order a process for each place that neither a live member nor an ordered start fills.

    While the router doubts itself, those it does not hear live: a second set of processes would only load a
    host further that is too busy to answer.
    """
    for start in state.starts:
        if state.now_s >= start.until_s:
            state = replace(state, starts=_without(state.starts, start))
            state = note_failed_start(config, state, start.pool)
    if any(state.now_s >= start.until_s for start in state.orphans):
        state = replace(state, orphans=tuple(start for start in state.orphans if state.now_s < start.until_s))
    if not state.launchers:
        return state
    for name in groups(state):
        ordered = sum(1 for start in state.starts if start.pool == name)
        missing = state.wanted[name] - count_live(config, state, name) - ordered
        if missing <= 0 or state.now_s < state.failures.get(name, Failures()).next_s:
            continue
        for _ in range(missing):
            host = min(state.launchers, key=lambda h: (_burden(state, h), h))
            start = Start(host=host, pool=name, until_s=state.now_s + config.start_s)
            state = replace(state, starts=(*state.starts, start))
            commands.append(events.StartProcess(host=host, pool=name))
    return state


def count_live(config: Config, state: State, name: str) -> int:
    """Members of a pool that count: those which drain or are retired do not, nor those which look dead or stand
    still."""
    dead = state.silent if state.silent and not doubts_itself(config, state) else frozenset[str]()
    dead |= state.standing
    count = 0
    for record in members_of(state, name):
        if not (record.draining or record.operation) and record.name not in dead:
            count += 1
    return count


def attach_launcher(config: Config, state: State, event: events.LauncherAttached) -> State:
    """A launcher appears, or appears again: what it says is starting replaces what was known of its host."""
    state = detach_launcher(state, event.host)
    orphans = tuple(start for start in state.orphans if start.host != event.host)
    until_s = state.now_s + config.start_s
    starts = tuple(
        Start(host=event.host, pool=name, until_s=until_s)
        for name in groups(state)
        for _ in range(min(event.starting.get(name, 0), MOST_MEMBERS))
    )
    return replace(state, launchers=(*state.launchers, event.host), starts=state.starts + starts, orphans=orphans)


def detach_launcher(state: State, host: str) -> State:
    """A launcher is gone: nobody says any more what becomes of the orders that it had."""
    return replace(
        state,
        launchers=tuple(known for known in state.launchers if known != host),
        starts=tuple(start for start in state.starts if start.host != host),
        orphans=state.orphans + tuple(start for start in state.starts if start.host == host),
    )


def expects_start(state: State, host: str, name: str) -> bool:
    """True if a process of that host and pool was ordered and has not joined."""
    return _start(state.starts + state.orphans, host, name) is not None


def _start(starts: tuple[Start, ...], host: str, name: str) -> Start | None:
    """The oldest order for that pool."""
    return next((start for start in starts if (start.host, start.pool) == (host, name)), None)


def fill_start(state: State, host: str, name: str) -> State:
    """A process of that host and pool became a member: the oldest order is filled."""
    for word, starts in (("starts", state.starts), ("orphans", state.orphans)):
        if (start := _start(starts, host, name)) is not None:
            return replace(state, **{word: _without(starts, start)})
    return state


def note_failed_start(config: Config, state: State, name: str) -> State:
    """One more failed start of that pool: the next one waits."""
    count = state.failures.get(name, Failures()).count + 1
    wait_s = min(config.backoff_s * 2.0 ** min(count - 1, 30), config.backoff_most_s)
    failures = Failures(count=count, next_s=state.now_s + wait_s)
    return replace(state, failures={**state.failures, name: failures})


def forgive_failed_starts(state: State, name: str) -> State:
    """A member of that pool became ready: earlier failures are forgiven."""
    if name not in state.failures:
        return state
    return replace(state, failures={n: f for n, f in state.failures.items() if n != name})


def _without(starts: tuple[Start, ...], one: Start) -> tuple[Start, ...]:
    at = starts.index(one)
    return starts[:at] + starts[at + 1 :]


def _burden(state: State, host: str) -> int:
    return sum(1 for r in state.members.values() if r.host == host) + sum(1 for s in state.starts if s.host == host)


DRAINED = "drained"
OVERDUE = "its time to drain was over"
# Reasons for which a member has gone as it was told to.
ORDERLY = frozenset({DRAINED, OVERDUE})


def begin_drain(state: State, name: str, surplus: bool = False) -> State:
    """Let a member drain. Idempotent; one that was asked to go stays asked.

    Args:
        surplus: Only because its pool is too large: this is taken back should the pool be too small again.
    """
    record = state.members[name]
    if record.draining:
        return with_record(state, replace(record, surplus=False)) if record.surplus and not surplus else state
    until_s = state.now_s + state.drain_s.get(group(state, record.pool, record.model), events.DRAIN_S)
    state = with_liveness(state, name, replace(state.liveness[name], drain_until_s=until_s))
    # The publication of this very step is the first that shows it.
    draining = replace(record, draining=True, surplus=surplus, draining_epoch=state.epoch + 1)
    return with_record(state, draining)


def take_back_drains(config: Config, state: State) -> State:
    """Let members that drain as surplus stay, newest drain first, where their pool has become too small."""
    surplus = [r for r in state.members.values() if r.surplus and r.name not in state.silent]
    for name in groups(state) if surplus else ():
        missing = state.wanted[name] - count_live(config, state, name)
        mine = {r.name for r in members_of(state, name)}
        draining = sorted((r for r in surplus if r.name in mine), key=lambda r: -r.draining_epoch)
        for record in draining[: max(0, missing)]:
            state = with_record(state, replace(record, draining=False, surplus=False))
    return state


def end_leaving(state: State) -> State:
    """Drain whoever asks for a model that leaves, once nobody has anything to do for it."""
    for model in state.models:
        if not model.leaving:
            continue
        name = group(state, ATTENTION, model.hash)
        asking = idle_askers(state, model)
        if asking is not None and state.wanted.get(name):
            state = replace(state, wanted={**state.wanted, name: 0})
        for record in asking or ():
            state = begin_drain(state, record.name)
        if model.name and model not in listed(state):
            # From now on another may have the name, and with it the pool.
            sizes = {n: size for n, size in state.wanted.items() if n != name or n in LAUNCHED_POOLS}
            state = replace(with_model(state, with_fields(model, name="")), wanted=sizes)
    return state


def shrink_pools(state: State) -> State:
    """Drain one member of a pool that has more than it should; one at a time, at rest, after those that are retired.

    A member that nobody ordered is its operator's, and stays.
    """
    for name in groups(state):
        members = members_of(state, name)
        if len(members) <= state.wanted[name] or held_up(state, name):
            continue
        ordered = [record for record in members if record.ordered]
        if ordered:
            zones = Counter(record.zone for record in members)
            classes = Counter(record.numerics_class for record in members)
            # The last of a class goes last, for its requests would have to leave the class. Of equals the last: what
            # runs longest is known best.
            least = min(
                reversed(ordered),
                key=lambda record: (classes[record.numerics_class] == 1, _worth(state, record, zones)),
            )
            state = begin_drain(state, least.name, surplus=True)
    return state


def held_up(state: State, name: str) -> str:
    """Why no member of a pool may begin to drain now, in words; empty if one may."""
    if any(start.pool == name for start in state.starts):
        return "a process is starting"
    for record in members_of(state, name):
        if record.draining:
            return f"{record.name} drains"
        if not record.ready and not record.operation:
            return f"{record.name} does not serve yet"
        if record.name in state.suspects and not record.operation:
            corrupt = record.name in state.corrupt_since
            return f"{record.name} is suspect" + (": it is said to give corrupt replies" if corrupt else "")
    return ""


def _worth(state: State, record: MemberRecord, zones: Counter[str]) -> float:
    """What the pool would lose: streams that must end or move; of experts, a place in a zone that has few."""
    if record.pool == ATTENTION:
        load = state.liveness[record.name].load
        return load.get("running", 0) + load.get("waiting", 0)
    return -zones[record.zone]


def end_idle(config: Config, state: State, name: str, commands: list[events.Command]) -> State:
    """End a client of expert servers that drains and has just said that nothing runs on it."""
    record, liveness = state.members[name], state.liveness[name]
    if not record.draining or record.pool not in ASKING_POOLS or liveness.acked < record.draining_epoch:
        return state
    # A report without the word says nothing of what runs.
    if liveness.load.get("running", 1) + liveness.load.get("waiting", 0) > 0:
        return state
    return end_member(config, state, name, DRAINED, commands)


def end_overdue(config: Config, state: State, commands: list[events.Command]) -> State:
    """End the members that have drained for too long."""
    for record in state.members.values():
        if not record.draining or record.pool == GATEWAY:
            continue
        until_s = state.liveness[record.name].drain_until_s
        if until_s is None:
            # A restarted router does not know how long it has lasted.
            until_s = state.now_s + state.drain_s.get(group(state, record.pool, record.model), events.DRAIN_S)
            state = with_liveness(state, record.name, replace(state.liveness[record.name], drain_until_s=until_s))
        if state.now_s >= until_s and not is_needed(state, record):
            state = end_member(config, state, record.name, OVERDUE, commands)
    return state


def end_member(config: Config, state: State, name: str, reason: str, commands: list[events.Command]) -> State:
    """Fence a member that drained, and have its process ended where a launcher can."""
    record = state.members[name]
    state = fence(config, state, name, reason, commands)
    if record.host in state.launchers:
        commands.append(events.StopProcess(host=record.host, name=name, pid=record.pid))
    return state
