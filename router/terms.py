"""How a term begins, on a journal that may know less than the members do. Pure.

A journal is older than the cluster where it was put back from a copy, or lost its last commits. Members have then seen
epochs that it never gave, hold experts of which it does not know, and some are none to it. So a term decides and
publishes nothing until every member of its journal was heard, or a lease has passed:

- members say which epoch they saw last: the next that is published is above all of these, for they ignore lower ones;
- expert servers say what they hold: what the journal does not know of stays there until all who may ask have acked;
- what was acked or reported in another term does not count: each has a salt of its own, which its Views carry, and so
  no incarnation is given twice.
"""

from __future__ import annotations

from router.events import Event, Loaded, Renewed, Started, Tick
from router.records import evolve, pool, with_pulse, with_record
from router.state import LAUNCHED_POOLS, Config, Ghost, Pulse, State
from router.view import CLIENT, EXPERT

SALT_MASK = (1 << 20) - 1
# A member that says more has seen nothing of the kind; what is left suffices for ever.
_MOST_EPOCH = 1 << 62


def begin(config: Config, state: State, event: Started) -> State:
    """A new term: every member was just renewed; who had gone just before, or is not in the journal, may still use what
    it had.
    """
    until_s = state.now_s + config.lease_s
    salts = ((event.salt + more) & SALT_MASK for more in range(3))
    ghosts = tuple(Ghost(host=g.host, pid=g.pid, acked=0, until_s=until_s) for g in state.gone)
    return evolve(
        state,
        salt=next(salt for salt in salts if salt not in (0, state.salt)),
        term=state.term + 1,
        ticked_s=state.now_s,
        unloaded_epoch=state.epoch + 1,
        pulses={name: Pulse(renewed_s=state.now_s, journaled=True) for name in state.members},
        ghosts=(*ghosts, Ghost(host="", pid=0, acked=0, until_s=until_s)) if state.members else ghosts,
        wanted=state.wanted or {name: config.wanted(name) for name in LAUNCHED_POOLS},
        unheard=frozenset(state.members),
        unheard_until_s=until_s,
        behind=False,
    )


def listen(config: Config, state: State, event: Event) -> tuple[State, bool]:
    """The state after whatever an event says of the cluster's past, and whether it must be published now."""
    speaker = state.members.get(event.name) if isinstance(event, Renewed | Loaded) else None
    ahead = 0
    if isinstance(event, Renewed) and speaker is not None and speaker.pool != CLIENT:
        ahead = event.seen if event.seen <= _MOST_EPOCH else 0
    if not state.unheard:
        if ahead <= state.epoch:
            return state, isinstance(event, Started)
        # It was not heard when the term began.
        return _rise(state, ahead), True
    unheard = state.unheard & state.members.keys()
    if speaker is not None:
        pulse = state.pulses[speaker.name]
        if pulse.told or speaker.pool != EXPERT:
            unheard -= {speaker.name}
        if ahead > pulse.seen:
            state = with_pulse(state, speaker.name, evolve(pulse, seen=ahead))
    if unheard and not (isinstance(event, Tick) and state.now_s >= state.unheard_until_s):
        return (state if unheard == state.unheard else evolve(state, unheard=unheard)), False
    return _resume(state, unheard), True


def strangers(state: State, event: Renewed) -> State:
    """What one who is no member said: that it saw more than the journal knows is reason to doubt that, no more."""
    return (
        evolve(state, behind=True)
        if state.unheard and event.seen > state.epoch and not state.behind
        else state
    )


def _resume(state: State, unheard: frozenset[str]) -> State:
    """All were heard, or have had their time."""
    seen = max((pulse.seen for pulse in state.pulses.values()), default=0)
    behind = seen > state.epoch or state.behind
    state = evolve(state, unheard=frozenset[str]())
    if behind:
        state = _rise(state, max(seen, state.epoch))
    for record in pool(state, EXPERT):
        if record.name not in unheard:
            # The journal may have lost what it holds two terms ago, when it was not heard.
            state = keep(state, record.name, state.pulses[record.name].unknown)
        elif behind:
            # What it held when the journal was written it may have unloaded since, or hold more. It follows no View of
            # this term before it has said so.
            state = with_record(state, evolve(record, target=0, loaded=0, serving=0, retiring=0))
    return state


def _rise(state: State, epoch: int) -> State:
    return evolve(state, epoch=epoch, unloaded_epoch=epoch + 1, settled=False)


def unknown(state: State, event: Loaded) -> int:
    """What a server holds and the journal does not let anyone ask it for; it says so with its first report of a term.

    Somebody may ask all the same, by a View that the journal does not know.
    """
    pulse = state.pulses[event.name]
    if pulse.told:
        return pulse.unknown & event.held
    everything = (1 << state.model.layers * state.model.experts) - 1
    return event.held & everything & ~state.members[event.name].serving if event.salt else 0


def keep(state: State, name: str, bits: int) -> State:
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
    return with_record(
        state,
        evolve(
            record,
            target=target,
            loaded=record.loaded | bits,
            retiring=record.retiring | bits,
            retiring_epoch=state.epoch + 1,
        ),
    )
