"""Which models a pool serves, and which bits of a bitmap are whose. Pure.

Each model is a rectangle of layers and experts, and its part of every bitmap begins at a bit that it keeps for ever:
nobody who has an older View takes one model's experts for another's. So of a model that was removed only the experts
are forgotten; should it come again, it has its number and its bits again.

A model is placed on the servers that opened it: one that still packs it, which takes minutes, serves the others
meanwhile. A model that leaves is placed for as long as anybody is there who asks for it. Gateways send it nothing new;
once its attention workers have nothing to do they are drained (router.lifecycle), and then its experts are unloaded
like any that moved. So are those of a model that sleeps; its workers stay, and the first with something to do wakes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from router.bitmap import everything, union
from router.events import AddModel, Command, Refused, RemoveModel, Serves
from router.state import LAUNCHED_POOLS, MOST_EXPERT_BYTES, MOST_MODELS, MOST_PAIRS, Config, MemberRecord, State
from router.view import ASKING_POOLS, ATTENTION, EXPERT, FOR, GATEWAY, Model, can_mix

# What a path of a URL, a field of JSON and the word of a pool can bear.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
_LONGEST_PATH, _MOST_WEIGHT = 4096, 1000


def find(state: State, hash: str) -> Model | None:
    """The model of that hash, removed or not; of an empty one the first."""
    return next((model for model in state.models if hash in ("", model.hash)), None)


def width(state: State) -> int:
    """Bits of a bitmap."""
    return max((model.base + model.layers * model.experts for model in state.models), default=0)


def bits_of(models: Iterable[Model]) -> int:
    """All bits of some models."""
    return union(model.put(everything(model.layers, model.experts)) for model in models)


def served(state: State) -> tuple[Model, ...]:
    """Models that have a placement: all but those that leave and of which nobody asks any more."""
    return tuple(model for model in state.models if not model.leaving or _is_asked(state, model))


def awake(state: State) -> tuple[Model, ...]:
    """Models whose experts are to be held. One that sleeps keeps its placement, so that no copy moves when it wakes."""
    return tuple(model for model in served(state) if not model.asleep)


def listed(state: State) -> tuple[Model, ...]:
    """Models that a View shows: all but those that left, and of which nobody holds anything any more."""
    held = union(r.target | r.loaded | r.retiring for r in state.members.values() if r.pool == EXPERT)
    return tuple(m for m in state.models if not m.leaving or m.take(held) or _is_asked(state, m))


def named(config: Config, state: State) -> tuple[Model, ...]:
    """What a View shows of models: the first, where nobody named it, as processes were started with it."""
    models, (name, path) = listed(state), config.first_model
    # In a journal from before the name was known here, another may have it.
    name = "" if any(model.name == name for model in models) else name
    return tuple(
        model if model.name or model.number else replace(model, name=name, path=model.path or path) for model in models
    )


def _is_asked(state: State, model: Model) -> bool:
    """Whether anybody asks for a model, or may yet: a worker that died while it had something to do is replaced."""
    return bool(state.wanted.get(group(state, ATTENTION, model.hash))) or any(_asking(state, model))


def _asking(state: State, model: Model) -> Iterable[MemberRecord]:
    return (
        record for record in state.members.values() if record.pool in ASKING_POOLS and record.model in ("", model.hash)
    )


def group(state: State, pool: str, hash: str) -> str:
    """The launched pool of a member that asks for that model: each but the first has attention workers of its own."""
    model = find(state, hash) if pool == ATTENTION else None
    return f"{ATTENTION}:{model.name}" if model is not None and model.number else pool


def groups(state: State) -> tuple[str, ...]:
    """The launched pools."""
    return (*LAUNCHED_POOLS, *(name for name in state.wanted if name not in LAUNCHED_POOLS))


def members_of(state: State, name: str) -> list[MemberRecord]:
    """Records of one launched pool, in the order of joining."""
    found = [r for r in state.members.values() if r.pool == name.partition(":")[0]]
    if len(state.models) < 2:
        return found
    return [record for record in found if group(state, record.pool, record.model) == name]


def idle_askers(state: State, model: Model) -> list[MemberRecord] | None:
    """Who asks for a model that leaves, and is to be drained; None while anybody has something to do for it."""
    asking = [record for record in _asking(state, model) if not record.draining]
    return None if _busy(state, model, asking, 0) else asking


def _busy(state: State, model: Model, asking: Iterable[MemberRecord], most: int) -> bool:
    """Whether any of some members has something to do for a model, or a gateway more than `most` (router.view.FOR)."""
    loads = [state.liveness[record.name].load for record in asking]
    gates = (state.liveness[r.name].load for r in state.members.values() if r.pool == GATEWAY)
    if any(load.get(f"{FOR}{model.number}", 0) > most for load in gates):
        return True
    # A report without the word says nothing of what runs.
    return any(load.get("running", 1) + load.get("waiting", 0) > 0 for load in loads)


def put_to_sleep(config: Config, state: State) -> State:
    """Let models sleep for which nobody has had anything to do for long."""
    if not config.sleep_after_s:
        return state
    busy_s: dict[int, float] = {}
    serving = union(record.serving for record in state.members.values())
    for model in state.models:
        busy_s[model.number] = since_s = state.busy_s.get(model.number, state.now_s)
        # Who drains goes on asking until it has nothing to do; and one that is not whole yet is about to be asked.
        whole = model.asleep or not bits_of([model]) & ~serving
        if not whole or _busy(state, model, _asking(state, model), 1):
            busy_s[model.number] = state.now_s
        elif not (model.asleep or model.leaving) and state.now_s - since_s >= config.sleep_after_s:
            state = with_model(state, replace(model, asleep=True))
    return state if busy_s == state.busy_s else replace(state, busy_s=busy_s)


def wake(state: State, record: MemberRecord) -> State:
    """Wake the models for which a member has just said that it has something to do."""
    load = state.liveness[record.name].load
    works = load.get("running", 0) + load.get("waiting", 0) > 0
    for model in state.models:
        own = record.pool in ASKING_POOLS and record.model in ("", model.hash) and works
        if model.asleep and (own or (record.pool == GATEWAY and load.get(f"{FOR}{model.number}", 0) > 1)):
            state = with_model(state, replace(model, asleep=False))
            state = replace(state, busy_s={**state.busy_s, model.number: state.now_s})
    return state


def with_model(state: State, model: Model) -> State:
    """The state with one model replaced, or one more."""
    number = model.number
    return replace(state, models=(*state.models[:number], model, *state.models[number + 1 :]))


def add(config: Config, state: State, event: AddModel, commands: list[Command]) -> State:
    """Serve one more model, or one anew, or change the words of one."""
    asked, known = event.model, next((m for m in state.models if m.hash == event.model.hash), None)
    if event.again and known:
        commands.append(Serves(model=known))
        return state
    if refusal := _refusal(config, state, event, known):
        commands.append(Refused(message=refusal))
        return state
    number, base = (known.number, known.base) if known else (len(state.models), width(state))
    former = group(state, ATTENTION, known.hash) if known else ""
    model = replace(asked, number=number, base=base, leaving=False, asleep=False)
    commands.append(Serves(model=model))
    if model != known:
        state = with_model(state, model)
    name = group(state, ATTENTION, model.hash)
    # Under another name it has another pool.
    wanted = {pool: size for pool, size in state.wanted.items() if pool not in (former, name)}
    wanted[name] = event.attention
    return state if wanted == state.wanted else replace(state, wanted=wanted)


def _refusal(config: Config, state: State, event: AddModel, known: Model | None) -> str:
    model = event.model
    pairs = model.layers * model.experts
    least, most = config.bounds(ATTENTION)
    classes = {record.numerics_class for record in state.members.values() if record.pool == EXPERT}
    others = [other for other in state.models if other.hash != model.hash]
    unnamed = event.again and not (model.name or state.models)
    if not (unnamed or NAME.fullmatch(model.name)):
        return f"name {model.name[:64]!r} found, up to 64 letters, digits and . _ / - needed: give another name"
    # After a loss of the journal all have the names that they had.
    shown = () if event.again else named(config, state)
    reserved = not (state.models or event.again) and model.name == config.first_model[0]
    if reserved or any(it.name == model.name and it.hash != model.hash for it in (*others, *shown)):
        return (
            f"another model is served as {model.name}: give another name, or remove that one first, and wait until it "
            f"has gone"
        )
    if known and not known.leaving and known.name not in ("", model.name):
        return f"this model is served as {known.name}: remove it first to serve it as {model.name}"
    if known and (known.layers, known.experts) != (model.layers, model.experts):
        return f"{model.name} has {known.layers} layers with {known.experts} experts here: check the model folder"
    for what, found, lowest, highest in (
        ("layers", model.layers, 1, MOST_PAIRS),
        ("experts", model.experts, 1, MOST_PAIRS),
        ("expert_bytes", model.expert_bytes, 0, MOST_EXPERT_BYTES),
        ("weight", model.weight, 1, _MOST_WEIGHT),
        ("characters of the hash", len(model.hash), 1, 256),
        ("characters of the path", len(model.path), 0, _LONGEST_PATH),
        ("attention workers", event.attention, least, most),
    ):
        if not lowest <= found <= highest:
            return f"{model.name}: {what} {found} found, {lowest} to {highest} needed"
    servers = any(record.pool == EXPERT for record in state.members.values())
    # With its shape it is known where the next one's bits begin; and what nobody named and nobody holds may stand in a
    # journal that was another cluster's.
    alone = len(others) == len(state.models) == 1 and not others[0].name
    if alone and not ((servers or event.again) and others[0].layers):
        return (
            f"another model, {others[0].hash or 'of no hash yet'}, is served here, and no expert server of it is "
            f"there: ask again once one has joined, or start a router with another --journal"
        )
    if not known and (len(state.models) >= MOST_MODELS or width(state) + pairs > MOST_PAIRS):
        return (
            f"{len(state.models)} models with {width(state)} experts were served here, removed ones too, and "
            f"{model.name} has {pairs}; {MOST_MODELS} models with {MOST_PAIRS} experts fit. Start a new cluster for it."
        )
    if classes and not any(can_mix(event.numerics_class, own) for own in classes):
        return (
            f"{model.name} has experts of numerics class {event.numerics_class}, the servers here have "
            f"{', '.join(sorted(classes))}: models of one pool have one format of numbers. Give it a pool of its own."
        )
    return ""


def remove(config: Config, state: State, event: RemoveModel, commands: list[Command]) -> State:
    """Let a model take no new requests, and go once nobody has any under way."""
    models = [m for m in named(config, state) if not m.leaving]
    model = next((m for m in models if event.name and event.name in (m.name, m.hash)), None)
    staying = [m.name or m.hash for m in models if m is not model]
    if model is None or not staying:
        what = f"no model {event.name[:64]!r} is served" if model is None else f"{event.name} is the last model"
        do = f"give one of {', '.join(staying)}" if staying else "end the cluster instead"
        commands.append(Refused(message=f"{what}: {do}"))
        return state
    leaving = replace(model, leaving=True)
    commands.append(Serves(model=leaving))
    return with_model(state, leaving)
