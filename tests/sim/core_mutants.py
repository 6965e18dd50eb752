"""The planted mutants of the router core, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One place of the core, changed: module, what it says, what the mutant says instead, and why that is wrong."""

    module: str
    says: str
    instead: str
    why: str


MUTANTS = {
    "unloads before the acks": Mutant(
        "moves",
        "if retiring_epoch <= acked:",
        "if retiring_epoch:",
        "workers still ask for what is gone",
    ),
    "counts acks of the epoch before": Mutant(
        "moves",
        "if retiring_epoch <= acked:",
        "if retiring_epoch - 1 <= acked:",
        "that epoch still named the server",
    ),
    "breaks before it makes": Mutant(
        "moves",
        "return covered & ~unmade",
        "return covered | unmade",
        "an expert is served by nobody while it moves",
    ),
    "breaks when one of two is made": Mutant(
        "moves",
        "return covered & ~unmade",
        "return covered",
        "a move costs a copy",
    ),
    "serves what is not loaded": Mutant(
        "moves",
        "    held = record.loaded & record.target\n",
        "    held = record.target\n",
        "clients ask for weights that are not there",
    ),
    "forgets when the target shrank": Mutant(
        "moves",
        "dropped_epoch=next_epoch if dropped else record.dropped_epoch",
        "dropped_epoch=record.dropped_epoch",
        "a late report brings back what was unloaded",
    ),
    "believes stale reports": Mutant(
        "core",
        "if event.epoch < record.dropped_epoch:",
        "if event.epoch < 0:",
        "a late report brings back what was unloaded",
    ),
    "believes acks of the future": Mutant(
        "core",
        "pulse.acked < event.epoch <= state.epoch",
        "pulse.acked < event.epoch",
        "weights in use are unloaded",
    ),
    "uses names again": Mutant(
        "core",
        "state.named.get(event.pool, 0) + 1",
        "len(state.members) + 1",
        "old messages speak for a new member",
    ),
    "uses incarnations again": Mutant(
        "core",
        "joined = state.joined + 1",
        "joined = len(state.members) + 1",
        "old messages speak for a new member",
    ),
    "listens to strangers": Mutant(
        "records",
        "record.incarnation == incarnation",
        "record.incarnation != -1",
        "a fenced process goes on deciding",
    ),
    "trusts a joiner ahead of time": Mutant(
        "core",
        "acked=state.epoch)",
        "acked=state.epoch + 9)",
        "epochs that it never saw count as acked",
    ),
    "keeps the epoch at a new term": Mutant(
        "core",
        "isinstance(event, Started) or _shows_another",
        "_shows_another",
        "nobody hears of the new router",
    ),
    "fences last replicas": Mutant(
        "leases",
        "name not in state.silent or is_last_replica(state, name)",
        "name not in state.silent",
        "silence alone costs an expert",
    ),
    "never doubts itself": Mutant(
        "leases",
        "doubts = missed >= 2",
        "doubts = missed >= 99",
        "a deaf router ends a healthy cluster",
    ),
    "doubts for one lease": Mutant(
        "records",
        "config.doubt_leases * config.lease_s",
        "config.lease_s",
        "a router that is deaf a little longer ends a healthy cluster",
    ),
    "counts its own stall as silence": Mutant(
        "leases",
        "if gap_s <= config.stall_s:",
        "if gap_s <= 1e9:",
        "a frozen router ends a healthy cluster when it wakes",
    ),
    "fences at half a lease": Mutant(
        "leases",
        "or silence_s > config.lease_s",
        "or silence_s > config.lease_s / 2",
        "members are promised a whole one",
    ),
    "never fences for silence": Mutant(
        "leases",
        "            silent.append(name)\n",
        "            pass\n",
        "a process that vanished is never replaced",
    ),
    "never clears a suspect": Mutant(
        "leases",
        "if found > SUSPECT or state.now_s",
        "if found > SUSPECT or name in state.suspects or state.now_s",
        "one missed renewal lasts for ever",
    ),
    "judges before it excuses its stall": Mutant(
        "core",
        "    state = leases.excuse_stall(config, state)\n    state = _apply(config, state, event, commands)\n",
        "    state = _apply(config, state, event, commands)\n    state = leases.excuse_stall(config, state)\n",
        "a frozen router ends a healthy cluster when it wakes",
    ),
    "orders while it doubts itself": Mutant(
        "launches",
        "if state.silent and not doubts_itself(config, state) else",
        "if state.silent else",
        "a busy host gets a second set of processes",
    ),
    "counts its stall as doubt": Mutant(
        "leases",
        "state.doubting_s + stall_s",
        "state.doubting_s",
        "the time it slept counts as patience",
    ),
    "keeps a surplus": Mutant(
        "drains",
        "            state = begin(state, least.name, surplus=True)\n",
        "            pass\n",
        "a pool stays larger than wanted",
    ),
    "drains an operator's server": Mutant(
        "drains",
        "for record in members if record.ordered]",
        "for record in members]",
        "what an operator started is his",
    ),
    "orders twice": Mutant(
        "launches",
        "live(config, state, name) - ordered",
        "live(config, state, name)",
        "more processes are ordered than wanted",
    ),
    "forgets to order": Mutant(
        "launches",
        "missing = state.wanted[name]",
        "missing = 0 * state.wanted[name]",
        "a lost process is never replaced",
    ),
    "places one copy too few": Mutant(
        "placement",
        "range(1, self.copies + 1)",
        "range(1, self.copies)",
        "a single loss costs an expert",
    ),
    "leaves the newcomer idle": Mutant(
        "placement",
        "if most - least < 2:",
        "if most - least < 99:",
        "load stays where it was",
    ),
    "keeps surplus copies": Mutant(
        "placement",
        "bit_count() > self.copies:",
        "bit_count() > 99:",
        "memory fills with copies that nobody wants",
    ),
    "exceeds capacity": Mutant(
        "moves",
        "        if room < wanted.bit_count():",
        "        if room < -99:",
        "a server is asked to hold more than it can",
    ),
    "keeps who has exited": Mutant(
        "core",
        'state = fence(config, state, record.name, "its process ended", commands, ended=True)',
        "pass",
        "clients are sent to the dead",
    ),
    "retries without waiting": Mutant(
        "launches",
        "* 2.0 **",
        "* 0.0 **",
        "a process that cannot start is started as fast as it fails",
    ),
    "drops drained servers at once": Mutant(
        "moves",
        "if advanced.draining and not advanced.target",
        "if advanced.draining",
        "what it served is served by nobody",
    ),
}
