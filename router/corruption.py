"""Servers whose replies arrive damaged, as clients report them: fenced and replaced. Pure.

A client counts the replies that fail a check, asks a server that gives such only where no other replica exists, and
says so with its load: `corrupt:expert/3` with their number. That is evidence of this one server, unlike silence; but
it is a word, and a client may lie, or damage what it reads itself. So a server goes only where

- more than half of its judges name it, each for some time and of late, and none that names over a quarter of the pool:
  the attention workers that can ask it; only where there is none, as in a bare expert pool, the clients that can, each
  process, as it names itself, with one voice;
- none went for this within AGAIN_S, and no other is missing, suspect or on its way out;
- its experts are served elsewhere: before that it is only suspect, which has them copied.

Fewer liars than honest judges cost nothing; if most lie, it is a server an hour, one at a time. Whoever is not believed
loses little where there are other replicas: it goes on asking those. Attention workers that ask nothing find nothing
wrong, and keep a server that clients alone complain of.
"""

from __future__ import annotations

from router import lifecycle
from router.classes import can_talk, is_last_replica
from router.events import Command
from router.records import pool, replace, with_liveness
from router.state import Config, MemberRecord, State
from router.view import ASKING_POOLS, ATTENTION, EXPERT

WORD = "corrupt:"
REACHED = "servers_"  # the servers that the client is attached to, by their pace
AGAIN_S = 3600.0
CORRUPT = "gave corrupt replies"


def judge_corruption(config: Config, state: State, commands: list[Command]) -> State:
    """Fence at most one server, reported for long enough; who holds last replicas is suspect until others hold them."""
    # Who falls silent on a word has not said it for so long; who reports one after another has named them all.
    long_s = max(config.least_silence_s, 2 * config.renew_s)
    reported = _reported(state, long_s)
    if not reported and not state.corrupt_since:
        return state
    since = {name: state.corrupt_since.get(name, state.now_s) for name in reported}
    if since != state.corrupt_since:
        state = replace(state, corrupt_since=since)
    for name, since_s in since.items():
        if state.now_s - since_s < long_s:
            continue
        liveness = state.liveness[name]
        # While another went for this of late, its experts stay copied: dropped with the suspicion, they would be
        # last replicas again, and so suspect.
        stays = state.now_s < liveness.suspected_until_s and state.now_s < state.next_corruption_s
        if stays or is_last_replica(state, name):
            suspected = replace(liveness, suspected_until_s=state.now_s + config.lease_s)
            state = with_liveness(state, name, suspected)
        elif state.now_s >= state.next_corruption_s and _others_are_well(state, name):
            state = replace(state, next_corruption_s=state.now_s + AGAIN_S)
            return lifecycle.end_member(config, state, name, CORRUPT, commands)
    return state


def _reported(state: State, long_s: float) -> list[str]:
    """Expert servers that enough of their judges report, in the order of joining."""
    servers = [record.name for record in pool(state, EXPERT)]
    asking = [r for r in state.members.values() if r.pool in ASKING_POOLS and r.ready]
    named = {record.name: _named(state, record.name, servers, long_s) for record in asking}
    if not any(named.values()):
        return []
    reported: list[str] = []
    for name in servers:
        judges = _judges(state, name, asking)
        reporters = [record for record in judges if name in named[record.name]]
        if 2 * _voices(reporters) > _voices(judges):
            reported.append(name)
    return reported


def _named(state: State, client: str, servers: list[str], long_s: float) -> set[str]:
    """The servers that a client reports; none where it is not to be believed."""
    liveness = state.liveness[client]
    named = {word.removeprefix(WORD) for word in liveness.load if word.startswith(WORD)}.intersection(servers)
    reached = sum(count for word, count in liveness.load.items() if word.startswith(REACHED))
    reached = min(reached, len(servers))
    believed = len(named) < reached and (len(named) < 2 or 4 * len(named) <= reached)
    return named if believed and state.now_s - liveness.renewed_s < long_s else set()


def _judges(state: State, name: str, asking: list[MemberRecord]) -> list[MemberRecord]:
    """Who has a say about a server: attention workers that can ask it; where there is none, clients that can.

    Any program may be a client, as often as it likes; attention workers are the cluster's own.
    """
    own = state.members[name].numerics_class
    able = [record for record in asking if can_talk(record.numerics_class, own)]
    return [record for record in able if record.pool == ATTENTION] or able


def _voices(records: list[MemberRecord]) -> int:
    """How many processes these are: what one reads damaged, all its connections call corrupt."""
    return len({(record.host, record.pid) if record.pid > 0 else record.name for record in records})


def _others_are_well(state: State, name: str) -> bool:
    """Whether the pool lacks nobody, and none but that server is suspect or on its way in or out."""
    others = [record for record in pool(state, EXPERT) if record.name != name]
    well = [r for r in others if r.ready and not r.draining and r.name not in state.suspects]
    return len(well) == len(others) and len(others) + 1 >= state.wanted[EXPERT]
