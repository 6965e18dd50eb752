"""Who is alive, at work and gives whole replies: silence, suspicion, leases; when the router doubts itself. Pure.

Silences are judged at ticks; between them nobody falls silent. A member that renews and says that its work loop stands
still is as good as dead, on its own word: no doubt holds that up. The last of a pool is not fenced for either while it
may be of use: a server with last replicas never; an attention worker when another serves in its place, or when none
does although a start has had its time, unless a gateway still hears one that is silent.

Suspicion says how surprising a silence is: -log10 of the chance that a member which lives is silent for so long, so 4
is one in ten thousand and 8 one in a hundred million. The chance comes from the member's own past silences, from one
renewal to the next: up to their 99th percentile as they were counted, beyond it an exponential whose mean is that of
the excesses. With a lease of 2 s, renewals every 0.25 s and no silence ever much longer, the percentile is 0.28 s and
the mean is taken as the least believed, a 50th of the lease (0.04 s): suspicion is 4 at 0.28 + 2 * 2.3 * 0.04 = 0.47 s
and 8 at 0.28 + 6 * 2.3 * 0.04 = 0.83 s. Who is often late is given more time, and who is often very late the whole
lease, which no verdict outlasts.

Until 200 silences are known, 50 s of them, the prior holds: an exponential beyond the renewal that is due whose
suspicion is 8 at the end of the lease; so it is 4 half-way, at 1.1 s.

Replies that arrive damaged are evidence of one server, unlike silence: a client counts those that fail a check, asks a
server that gives such only where no other replica exists, and says so with its load: `corrupt:expert/3` with their
number. But it is a word, and a client may lie, or damage what it reads itself. So a server goes only where

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

import math
import struct

from router import lifecycle
from router.events import Command, Renewed, StopProcess, Suspected
from router.lifecycle import note_failed_start
from router.models import group
from router.records import doubts_itself, fence, is_last_replica, is_last_worker, pool, replace, with_liveness
from router.state import LAUNCHED_POOLS, Config, MemberRecord, SilenceHistogram, State
from router.view import ASKING_POOLS, ATTENTION, CORRUPTS, EXPERT, GATEWAY, HEARS, REACHES, STANDS, can_talk


def judge_silence(config: Config, state: State, commands: list[Command]) -> State:
    """Mark suspects; fence those who look dead or whose lease ended."""
    state = _weigh(config, replace(state, ticked_s=state.now_s))
    state = _replace_standing(config, state, commands)
    if any(fenced.until_s <= state.now_s for fenced in state.fenced_clients):
        state = replace(
            state, fenced_clients=tuple(fenced for fenced in state.fenced_clients if fenced.until_s > state.now_s)
        )
    nobody_speaks = state.doubting_s is not None and len(state.silent) == len(state.members)
    if not state.silent or nobody_speaks or doubts_itself(config, state):
        return state
    for name in list(state.members):
        if name not in state.silent or is_last_replica(state, name):
            continue
        silence_s = state.now_s - state.liveness[name].renewed_s
        record = state.members[name]
        replaced = state.wanted.get(group(state, record.pool, record.model), 0) > 0 and not record.draining
        may_serve = (replaced and silence_s < config.start_s) or _is_heard(config, state, name)
        if is_last_worker(state, name) and may_serve:
            continue
        state = _end(config, state, name, f"silent for {silence_s:.2f} s", commands)
    return state


def _replace_standing(config: Config, state: State, commands: list[Command]) -> State:
    """Fence who says that its work loop stands still, once nobody needs it: others are ordered in its place before."""
    for name in [name for name in state.members if name in state.standing]:
        stands_s = state.liveness[name].load[STANDS]
        # What nobody replaces for so long serves nobody either, and holds up whoever waits for its word.
        if is_last_replica(state, name) or (is_last_worker(state, name) and stands_s < config.start_s):
            continue
        state = _end(config, state, name, f"its work loop stood still for {stands_s:.2f} s", commands)
    return state


def _end(config: Config, state: State, name: str, reason: str, commands: list[Command]) -> State:
    record = state.members[name]
    state = fence(config, state, name, reason, commands)
    if record.host in state.launchers and record.pool in LAUNCHED_POOLS:
        commands.append(StopProcess(host=record.host, name=name, pid=record.pid))
    own = group(state, record.pool, record.model)
    return state if record.ready else note_failed_start(config, state, own)


def _is_heard(config: Config, state: State, name: str) -> bool:
    """Whether a gateway that has just renewed says that it hears an attention worker."""
    return any(
        HEARS + name in state.liveness[gateway.name].load
        and state.now_s - state.liveness[gateway.name].renewed_s < config.lease_s
        for gateway in pool(state, GATEWAY)
    )


def renew(config: Config, state: State, event: Renewed) -> State:
    """A member spoke: from now on it is not silent; a suspicion ends at the next tick."""
    name = event.name
    liveness = state.liveness[name]
    silences = add_silence(liveness.silences, state.now_s - liveness.renewed_s, config.lease_s)
    state = with_liveness(state, name, replace(liveness, renewed_s=state.now_s, silences=silences, load=event.load))
    if name in state.silent:
        state = replace(state, silent=state.silent - {name})
    return state


def record_suspicion(config: Config, state: State, event: Suspected) -> State:
    """A peer's suspicion holds for one lease; it is evidence, and fences nobody."""
    until_s = state.now_s + config.lease_s
    state = with_liveness(state, event.name, replace(state.liveness[event.name], suspected_until_s=until_s))
    return replace(state, suspects=state.suspects | {event.name})


def discount_stall(config: Config, state: State) -> State:
    """Take the router's own stall, if it just ended, off everyone's silence and off its own doubt."""
    gap_s = state.now_s - state.ticked_s
    if gap_s <= config.stall_s:
        return state
    # While the router did not run, nobody could reach it: that part of their silence is its own.
    stall_s = gap_s - config.tick_s
    liveness = {
        name: replace(liveness, renewed_s=min(state.now_s, liveness.renewed_s + stall_s))
        for name, liveness in state.liveness.items()
    }
    fenced_clients = tuple(replace(fenced, until_s=fenced.until_s + stall_s) for fenced in state.fenced_clients)
    doubting_s = None if state.doubting_s is None else state.doubting_s + stall_s
    return replace(
        state,
        ticked_s=state.now_s,
        liveness=liveness,
        fenced_clients=fenced_clients,
        doubting_s=doubting_s,
        unheard_until_s=state.unheard_until_s + stall_s,
    )


def _weigh(config: Config, state: State) -> State:
    """Judge every silence anew, and whether so many at once are rather the router's own."""
    suspects: list[str] = []
    silent: list[str] = []
    standing: list[str] = []
    missed = 0
    for name, liveness in state.liveness.items():
        silence_s = state.now_s - liveness.renewed_s
        stands = STANDS in liveness.load and state.members[name].pool in LAUNCHED_POOLS
        if stands:
            standing.append(name)
        if silence_s <= config.renew_s and state.now_s >= liveness.suspected_until_s and not stands:
            continue
        found = suspicion(liveness.silences, silence_s, lease_s=config.lease_s, renew_s=config.renew_s)
        if found > SUSPECT or state.now_s < liveness.suspected_until_s or stands:
            suspects.append(name)
        if (found > DEAD and silence_s >= config.least_silence_s) or silence_s > config.lease_s:
            silent.append(name)
        # Who fell silent together is not judged together, as some are given more time: all of them have missed two
        # renewals before the first looks dead.
        missed += silence_s > 2 * config.renew_s
    state = replace(
        state,
        suspects=_same(state.suspects, suspects),
        silent=_same(state.silent, silent),
        standing=_same(state.standing, standing),
    )
    doubts = missed >= 2 and 4 * missed > len(state.members)
    if doubts != (state.doubting_s is not None):
        state = replace(state, doubting_s=state.now_s if doubts else None)
    return state


def _same(known: frozenset[str], found: list[str]) -> frozenset[str]:
    """What was found; the object that was known where that says the same, so that nothing seems to have changed."""
    return known if len(found) == len(known) and known.issuperset(found) else frozenset(found)


SUSPECT = 4.0
DEAD = 8.0
LEARNED = 200
REMEMBERED = 1000

# A histogram: silences in 64ths of a lease, the last for all that are longer, 16 bits a bucket in one int.
_BUCKETS = 65
_BITS = 16
_HALF = sum(0x7FFF << (_BITS * i) for i in range(_BUCKETS))


def add_silence(known: SilenceHistogram, silence_s: float, lease_s: float) -> SilenceHistogram:
    """The histogram with one more silence; beyond 1,000 the older half counts half."""
    bucket = min(int(silence_s * (_BUCKETS - 1) / lease_s), _BUCKETS - 1)
    counts, samples = known.counts + (1 << (_BITS * bucket)), known.samples + 1
    if samples >= REMEMBERED:
        counts = counts >> 1 & _HALF
        samples = sum(_unpacked(counts))
    return SilenceHistogram(counts=counts, samples=samples)


def suspicion(known: SilenceHistogram, silence_s: float, *, lease_s: float, renew_s: float) -> float:
    """How surprising it is that a member has been silent for so long; 0 before its renewal is due."""
    if silence_s <= renew_s:
        return 0.0
    if known.samples < LEARNED:
        return DEAD * (silence_s - renew_s) / (lease_s - renew_s)
    counts = _unpacked(known.counts)
    width_s = lease_s / (_BUCKETS - 1)
    # Nobody need renew sooner than it was told, though it often does.
    end = math.floor(renew_s / width_s) + 1
    beyond = sum(counts[end:])
    while 100 * beyond > known.samples:
        beyond -= counts[end]
        end += 1
    percentile_s = end * width_s
    if silence_s <= percentile_s:
        longer = sum(counts[int(silence_s / width_s) :])
        return min(2.0, math.log10(known.samples / max(1, longer)))
    # From the lower end of the percentile's bucket to the upper ends of theirs, so that the mean errs towards patience:
    # 14 times as much hangs on it as on the percentile.
    excess_s = sum(count * (i + 2 - end) for i, count in enumerate(counts) if i >= end) * width_s
    mean_s = max(lease_s / 50, excess_s / max(1, beyond))
    return 2.0 + (silence_s - percentile_s) / mean_s / math.log(10)


def _unpacked(counts: int) -> tuple[int, ...]:
    return struct.unpack(f"<{_BUCKETS}H", counts.to_bytes(_BUCKETS * _BITS // 8, "little"))


AGAIN_S = 3600.0


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
            return lifecycle.end_member(config, state, name, "gave corrupt replies", commands)
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
        for judges in _judges(state, name, asking):
            reporters = [record for record in judges if name in named[record.name]]
            if 2 * _voices(reporters) > _voices(judges):
                reported.append(name)
                break
    return reported


def _named(state: State, client: str, servers: list[str], long_s: float) -> set[str]:
    """The servers that a client reports; none where it is not to be believed."""
    liveness = state.liveness[client]
    named = {word.removeprefix(CORRUPTS) for word in liveness.load if word.startswith(CORRUPTS)}.intersection(servers)
    reached = sum(count for word, count in liveness.load.items() if word.startswith(REACHES))
    reached = min(reached, len(servers))
    believed = len(named) < reached and (len(named) < 2 or 4 * len(named) <= reached)
    return named if believed and state.now_s - liveness.renewed_s < long_s else set()


def _judges(state: State, name: str, asking: list[MemberRecord]) -> list[list[MemberRecord]]:
    """Who has a say about a server, for each model: attention workers that can ask it; where there is none, clients
    that can. One model's experts may be damaged and another's sound.

    Any program may be a client, as often as it likes; attention workers are the cluster's own.
    """
    own = state.members[name].numerics_class
    able = [record for record in asking if can_talk(record.numerics_class, own)]
    able = [record for record in able if record.pool == ATTENTION] or able
    return [[r for r in able if r.model == model] for model in dict.fromkeys(r.model for r in able)]


def _voices(records: list[MemberRecord]) -> int:
    """How many processes these are: what one reads damaged, all its connections call corrupt."""
    return len({(record.host, record.pid) if record.pid > 0 else record.name for record in records})


def _others_are_well(state: State, name: str) -> bool:
    """Whether the pool lacks nobody, and none but that server is suspect or on its way in or out."""
    others = [record for record in pool(state, EXPERT) if record.name != name]
    well = [r for r in others if r.ready and not r.draining and r.name not in state.suspects]
    return len(well) == len(others) and len(others) + 1 >= state.wanted[EXPERT]
