"""Servers whose replies arrive damaged, as clients report them: fenced and replaced. Pure.

A client counts the replies that fail a check, asks a server that gives such only where no other replica exists, and
says so with its load: `corrupt:expert/3` with their number. That is evidence of this one server, unlike silence; but
it is a word, and a client may lie, or damage what it reads itself. So a server goes only where

- more than half of the clients name it, each for some time and of late, and none that names over a quarter of the pool;
- none went for this within AGAIN_S, and no other is missing, suspect or on its way out;
- its experts are served elsewhere: before that it is only suspect, which has them copied.

Fewer liars than honest clients cost nothing; if all lie, it is a server an hour, one at a time. Whoever is not believed
loses little: it goes on asking other replicas.
"""

from __future__ import annotations

from router import drains
from router.classes import can_talk
from router.events import Command
from router.leases import is_last_replica
from router.records import evolve, pool, with_pulse
from router.state import Config, State
from router.view import ASKING_POOLS, EXPERT

WORD = "corrupt:"
REACHED = "servers_"  # the servers that the client is attached to, by their pace
AGAIN_S = 3600.0
CORRUPT = "gave corrupt replies"


def judge(config: Config, state: State, commands: list[Command]) -> State:
    """Fence at most one server, accused for long enough; who holds last replicas is suspect until others hold them."""
    # Who falls silent on a word has not said it for so long; who accuses one after another has named them all.
    long_s = max(config.least_silence_s, 2 * config.renew_s)
    accused = _accused(state, long_s)
    if not accused and not state.accused:
        return state
    since = {name: state.accused.get(name, state.now_s) for name in accused}
    if since != state.accused:
        state = evolve(state, accused=since)
    for name, since_s in since.items():
        if state.now_s - since_s < long_s:
            continue
        if is_last_replica(state, name):
            suspected = evolve(state.pulses[name], accused_until_s=state.now_s + config.lease_s)
            state = with_pulse(state, name, suspected)
        elif state.now_s >= state.blame_again_s and _others_are_well(state, name):
            state = evolve(state, blame_again_s=state.now_s + AGAIN_S)
            return drains.end(config, state, name, CORRUPT, commands)
    return state


def _accused(state: State, long_s: float) -> list[str]:
    """Expert servers that enough clients accuse, in the order of joining."""
    servers = [record.name for record in pool(state, EXPERT)]
    clients = [r.name for r in state.members.values() if r.pool in ASKING_POOLS and r.ready]
    accusers = dict.fromkeys(servers, 0)
    for client in clients:
        pulse = state.pulses[client]
        named = {word.removeprefix(WORD) for word in pulse.load if word.startswith(WORD)}.intersection(
            servers
        )
        reached = sum(count for word, count in pulse.load.items() if word.startswith(REACHED))
        reached = min(reached, len(servers))
        believed = len(named) < reached and (len(named) < 2 or 4 * len(named) <= reached)
        if believed and state.now_s - pulse.renewed_s < long_s:
            for name in named:
                accusers[name] += 1
    return [name for name, count in accusers.items() if 2 * count > _clients_of(state, name, clients)]


def _clients_of(state: State, name: str, clients: list[str]) -> int:
    """How many of these attention workers can ask a server: others have nothing to say of it."""
    own = state.members[name].numerics_class
    return sum(can_talk(state.members[client].numerics_class, own) for client in clients)


def _others_are_well(state: State, name: str) -> bool:
    """Whether the pool lacks nobody, and none but that server is suspect or on its way in or out."""
    others = [record for record in pool(state, EXPERT) if record.name != name]
    well = [r for r in others if r.ready and not r.draining and r.name not in state.suspects]
    return len(well) == len(others) and len(others) + 1 >= state.wanted[EXPERT]
