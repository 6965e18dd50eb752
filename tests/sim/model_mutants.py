"""The planted mutants of what the router core does with several models, as data."""

from __future__ import annotations

from tests.sim.core_mutants import Mutant

MODEL_MUTANTS = {
    "gives a new model bits of another": Mutant(
        "models",
        "(len(state.models), width(state))",
        "(len(state.models), width(replace(state, models=state.models[:-1])))",
        "one model's experts are taken for another's",
    ),
    "gives a new model the bits of a removed one": Mutant(
        "models",
        "(len(state.models), width(state))",
        "(len(state.models), next((m.base for m in state.models if m.leaving), width(state)))",
        "who has an older View takes one model's experts for another's",
    ),
    "gives a model that comes again other bits": Mutant(
        "models",
        "(known.number, known.base) if known else",
        "(known.number, width(state)) if known else",
        "who has an older View takes one model's experts for another's",
    ),
    "never unloads a model that was removed": Mutant(
        "moves",
        "    made = {name: held | unwanted for name, held in made.items()}\n",
        "",
        "no server is to hold it, so nobody is ever found to have made it",
    ),
    "keeps copies of a model that was removed": Mutant(
        "moves",
        "[record.share for record in members]) | unwanted\n",
        "[record.share for record in members])\n",
        "memory fills with what nobody asks for",
    ),
    "places a model on who has not opened it": Mutant(
        "moves",
        "for record in members if record.opened >> model.number & 1]",
        "for record in members if record.opened]",
        "what a server cannot hold yet is waited for as if it could",
    ),
    "waits for every server to open a model": Mutant(
        "moves",
        "if begun and opened < len(placeable) and state.now_s - since_s < longest_s:",
        "if begun and opened < len(placeable):",
        "one server without the folder keeps the model from all",
    ),
    "forgets what servers have opened": Mutant(
        "core",
        "hashes = (record.model, *event.opened)",
        "hashes = (record.model,)",
        "a second model is never placed",
    ),
    "never drains the workers of a model that was removed": Mutant(
        "lifecycle",
        "        for record in asking or ():\n",
        "        for record in ():\n",
        "they serve nobody, for ever",
    ),
    "drains workers of a model that leaves while they are busy": Mutant(
        "models",
        "return None if _busy(state, model, asking, 0) else asking",
        "return asking",
        "streams that it began have nowhere to go",
    ),
    "places a model that was removed for ever": Mutant(
        "models",
        "return tuple(model for model in state.models if not model.leaving or _is_asked(state, model))",
        "return state.models",
        "memory fills with what nobody asks for",
    ),
    "counts the workers of all models together": Mutant(
        "models",
        "    if len(state.models) < 2:\n",
        "    if state.models:\n",
        "one model has all of them, and another none",
    ),
    "fences the last worker of a model": Mutant(
        "records",
        "if r.name != name and r.model == model)",
        "if r.name != name)",
        "workers of other models serve nobody in its place",
    ),
    "weighs every model's copies as the first's": Mutant(
        "moves",
        "copies_budget(config, model) - on_the_way",
        "copies_budget(config, state.models[0]) - on_the_way",
        "rows wait behind gigabytes of weights",
    ),
    "has all models share one budget": Mutant(
        "moves",
        "(record.target & ~record.loaded & own).bit_count()",
        "(record.target & ~record.loaded).bit_count()",
        "a model that comes whole holds up the repair of another",
    ),
    "lets all workers drain for as long as the first model's": Mutant(
        "lifecycle",
        "    until_s = state.now_s + state.drain_s.get(group(state, record.pool, record.model), events.DRAIN_S)\n    s",
        "    until_s = state.now_s + state.drain_s.get(record.pool, events.DRAIN_S)\n    s",
        "an operator's word for one model is taken for another's",
    ),
    "leaves the wanted size of a name behind": Mutant(
        "models",
        "if pool not in (former, name)}",
        "if pool != name}",
        "processes are ordered for a pool that is none any more",
    ),
    "waits for a model that nobody opened": Mutant(
        "moves",
        "begun = opened and not model.take(placed)",
        "begun = not model.take(placed)",
        "nothing settles, so no copy follows the load",
    ),
    "takes the load of a model that went for another's": Mutant(
        "balance",
        "known = [len(seen.load) for seen in state.seen] == [model.experts for model, _ in layers]",
        "known = len(state.seen) == len(layers)",
        "every tick fails, or copies go where nobody asks for them",
    ),
    "places a model anew when it wakes": Mutant(
        "moves",
        "models=tuple(model for model in served(state)",
        "models=tuple(model for model in awake(state)",
        "each first request waits for seconds, where one server has not its folder",
    ),
    "never wakes a model": Mutant(
        "models",
        'works = load.get("running", 0) + load.get("waiting", 0) > 0',
        "works = not load",
        "who asks waits for ever",
    ),
    "puts a model to sleep while it is asked": Mutant(
        "models",
        "if not whole or _busy(state, model, _asking(state, model), 1):",
        "if not whole:",
        "streams wait until it has loaded again",
    ),
    "puts a model to sleep under who drains": Mutant(
        "models",
        "if not whole or _busy(state, model, _asking(state, model), 1):",
        "if not whole or idle_askers(state, model) is None:",
        "its last streams wait until it has loaded again",
    ),
    "takes no worker in a lost one's place while a model leaves": Mutant(
        "models",
        "return bool(state.wanted.get(group(state, ATTENTION, model.hash))) or any(_asking(state, model))",
        "return any(_asking(state, model))",
        "its streams have nowhere to go on",
    ),
    "goes by the word of workers alone": Mutant(
        "models",
        'if any(load.get(f"{FOR}{model.number}", 0) > most for load in gates):',
        "if not gates:",
        "what a gateway holds for a slow reader ends when its model leaves",
    ),
    "gives a name to two models": Mutant(
        "lifecycle",
        'with_fields(model, name=""))',
        "model)",
        "the workers of the second are taken for those of the first",
    ),
    "counts rows for the first model": Mutant(
        "core",
        "routed[model.base : model.base + pairs] +=",
        "routed[:pairs] +=",
        "copies go where nobody asks for them",
    ),
    "takes workers of a model that leaves": Mutant(
        "core",
        "if known.leaving and event.pool in ASKING_POOLS and not replaces:",
        "if known.leaving and not event.pool:",
        "it never goes",
    ),
    "has the workers of all models judge together": Mutant(
        "liveness",
        "[[r for r in able if r.model == model] for model in dict.fromkeys(r.model for r in able)]",
        "[able]",
        "who asks for what is sound outvotes who reads damage",
    ),
    "brings back a model that was removed": Mutant(
        "models",
        "if event.again and known:",
        "if event.again and known and not known.leaving:",
        "an operator had let it go",
    ),
    "believes of a later model what was said by a View of another term": Mutant(
        "core",
        "if event.epoch <= max(foreign, liveness.seen) else state.models",
        "if not event else state.models",
        "its bits were others' there",
    ),
    "lets a worker say which model is the first": Mutant(
        "core",
        "brings = event.pool == EXPERT and not state.named.get(EXPERT)",
        "brings = not event",
        "which process comes first is chance",
    ),
    "lets a server of another model in once all servers are gone": Mutant(
        "core",
        "brings = event.pool == EXPERT and not state.named.get(EXPERT)",
        "brings = event.pool == EXPERT",
        "workers of the model that is served are fenced",
    ),
}
