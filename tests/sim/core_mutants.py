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
        "suspects=frozenset(suspects)",
        "suspects=state.suspects | frozenset(suspects)",
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
        "if most <= (self.load[to] + 1 + slack) / self.weight[to]:",
        "if most <= (self.load[to] + 99 + slack) / self.weight[to]:",
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
    "makes room with what is still asked for": Mutant(
        "moves",
        "unwanted = target & ~(record.share | held | retiring)",
        "unwanted = target & ~(record.share | held)",
        "a worker that has not acked asks for what is gone",
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
    "lets an old report overtake a new one": Mutant(
        "core",
        "    if event.epoch < pulse.reported:\n",
        "    if event.epoch < 0:\n",
        "what a server has loaded since is forgotten",
    ),
    "unloads at once what is no longer reported": Mutant(
        "moves",
        "withdrawn = record.serving & record.target & ~serving",
        "withdrawn = record.serving & held & spare",
        "workers that have not acked still ask for it",
    ),
    "forgets what a lost launcher ordered": Mutant(
        "launches",
        "in state.starts + state.orphans)",
        "in state.starts)",
        "its process counts as an operator's, a surplus for ever",
    ),
    "never suspects before the prior": Mutant(
        "suspicion",
        "if rhythm.samples < LEARNED:",
        "if rhythm.samples >= 0:",
        "a rhythm that was learned is not used",
    ),
    "knows nothing of tails": Mutant(
        "suspicion",
        "max(lease_s / 50, excess_s / max(1, beyond))",
        "lease_s / 50",
        "who is often late is taken for dead",
    ),
    "fences before the least silence": Mutant(
        "leases",
        " and silence_s >= config.least_silence_s)",
        ")",
        "two renewals must be missed first",
    ),
    "counts only the condemned when it doubts itself": Mutant(
        "leases",
        "missed += silence_s > 2 * config.renew_s",
        "missed += silence_s > config.lease_s",
        "the first of many that fell silent together is fenced",
    ),
    "forgets that the fenced may live": Mutant(
        "records",
        "and not ended and until_s",
        "and ended and until_s",
        "it still asks for what is unloaded, until its lease ends",
    ),
    "waits for those whose end is proved": Mutant(
        "core",
        "    if len(ghosts) < len(state.ghosts):\n",
        "    if len(ghosts) < 0:\n",
        "moves stand still for a lease",
    ),
    "waits for copies for ever": Mutant(
        "orders",
        "if state.now_s - batch.since_s >= config.move_s:",
        "if not batch:",
        "a server that cannot load keeps an expert from the others",
    ),
    "asks a stuck server again at once": Mutant(
        "orders",
        "wait_s = config.move_s * 2.0",
        "wait_s = 0.0 * 2.0",
        "the same copy is ordered and taken back without end",
    ),
    "orders all copies at once": Mutant(
        "orders",
        "config.bytes_in_flight // state.model.expert_bytes))",
        "99))",
        "rows wait behind gigabytes of weights",
    ),
    "moves before it repairs": Mutant(
        "orders",
        "    queue = queue or {",
        "    queue = {",
        "a second loss meets a copy that was not yet repaired",
    ),
    "replaces who was to go": Mutant(
        "drains",
        "draining[: max(0, missing)]",
        "draining[:0]",
        "a process is ended and another started in its place",
    ),
    "keeps who asked to go": Mutant(
        "drains",
        "if record.surplus and not surplus else",
        "if not record.draining else",
        "an operator's drain is taken back",
    ),
    "ends the worker with most streams": Mutant(
        "drains",
        'return load.get("running", 0) + load.get("waiting", 0)',
        'return -load.get("running", 0)',
        "more streams must move than need to",
    ),
    "knows a process twice": Mutant(
        "core",
        "if same and event.pid > 0 and",
        "if same and event.pid < 0 and",
        "a process that joined anew is waited for under its old name",
    ),
    "waits for workers that never began": Mutant(
        "records",
        "if r.pool in ASKING_POOLS and r.ready]",
        "if r.pool in ASKING_POOLS]",
        "",
    ),
    "lets a late beginner use what was given up": Mutant(
        "core",
        "not record.ready and event.epoch >= state.unloaded_epoch:",
        "not record.ready:",
        "",
    ),
    "never exchanges without room": Mutant(
        "moves",
        "return lowest(free, wanted.bit_count())",
        "return 0",
        "",
    ),
    "moves at a stranger's word": Mutant(
        "core",
        "isinstance(commands[-1], Stranger | Refused)",
        "False",
        "",
    ),
    "balances while things move": Mutant(
        "rebalance",
        "    if not _is_at_rest(state):\n",
        "    if not state:\n",
        "two plans pull at the same copies",
    ),
    "balances never": Mutant(
        "rebalance",
        "state = _improve(config, state, layer, members)",
        "state = evolve(state)",
        "the busiest expert stays the bottleneck",
    ),
    "makes any number of copies": Mutant(
        "rebalance",
        "places = experts * replicas + config.redundant",
        "places = 99 * len(records)",
        "memory fills with copies that nobody allowed",
    ),
    "drops the last copy for balance": Mutant(
        "rebalance",
        "min_replicas=replicas",
        "min_replicas=0",
        "an expert falls under its wanted replicas",
    ),
    "scales past the bounds": Mutant(
        "autoscale",
        "wanted = min(max(wanted, least), most)\n",
        "pass\n",
        "a policy orders more than the operator allowed",
    ),
    "shares experts with everybody": Mutant(
        "placement",
        "placed[far[(slice_ + step) % count]] |= far_bits",
        "placed[far[(slice_ + step * (layer + 1)) % count]] |= far_bits",
        "any two losses meet in some expert",
    ),
    "drains several at once": Mutant(
        "drains",
        "if not all(r.ready and not r.draining and",
        "if not all(r.ready and",
        "a pool shrinks faster than its experts can move",
    ),
    "drains one too many": Mutant(
        "drains",
        "len(members) <= state.wanted[name]",
        "len(members) < state.wanted[name]",
        "the pool falls below its wanted size, and grows, and shrinks",
    ),
    "forgets the wanted sizes": Mutant(
        "core",
        "wanted=state.wanted or {",
        "wanted={",
        "a restarted router undoes what was scaled",
    ),
    "takes a last replica for its replies": Mutant(
        "blame",
        "or is_last_replica(state, name):",
        "or not name:",
        "its experts are nowhere, however damaged its replies",
    ),
    "drops the copies of who is accused and may not go": Mutant(
        "blame",
        "if stays or is_last",
        "if is_last",
        "they are made and dropped without end",
    ),
    "believes who accuses everybody": Mutant(
        "blame",
        "believed = len(named) < reached and (len(named) < 2 or 4 * len(named) <= reached)",
        "believed = True",
        "a worker with damaged memory takes the servers one after another",
    ),
    "believes a single liar": Mutant(
        "blame",
        "if 2 * _voices(accusers) > _voices(judges):",
        "if accusers:",
        "a worker that lies takes a good server",
    ),
    "lets clients judge beside attention workers": Mutant(
        "blame",
        "return [record for record in able if record.pool == ATTENTION] or able",
        "return able",
        "one program that joins often takes a good server",
    ),
    "counts a process as often as it joined": Mutant(
        "blame",
        "(record.host, record.pid) if record.pid > 0 else record.name",
        "record.name",
        "one program with damaged memory outvotes the others",
    ),
    "hears who cannot ask a server": Mutant(
        "blame",
        "able = [record for record in asking if can_talk(record.numerics_class, own)]",
        "able = asking",
        "those who cannot know take a good server",
    ),
    "has clients keep a model that nobody serves": Mutant(
        "core",
        "held = any(record.pool in LAUNCHED_POOLS for",
        "held = any(record.pool != GATEWAY for",
        "a program that nobody ended keeps the next model out",
    ),
    "leaves clients of another model in": Mutant(
        "core",
        "return any(known and said and known != said for known, said in pairs)",
        "return False",
        "clients read the placement of another model in the shape of theirs",
    ),
    "has a client say which model is served": Mutant(
        "core",
        "if event.pool != CLIENT:\n        model = Model(",
        "if event.pool:\n        model = Model(",
        "a program that came first keeps the cluster's own model out",
    ),
    "takes servers for their replies one after another": Mutant(
        "blame",
        "state.now_s >= state.blame_again_s and ",
        "",
        "if all lie, no server is left that was there before",
    ),
    "takes a server for its replies while another is missing": Mutant(
        "blame",
        " and _others_are_well(state, name):",
        ":",
        "what was one server's fault costs two at once",
    ),
    "shows the unready as suspect": Mutant(
        "records",
        "    if not record.ready:\n",
        "    if not record.ready and record.name not in state.suspects:\n",
        "gateways give it streams before it may ask for anything",
    ),
}
