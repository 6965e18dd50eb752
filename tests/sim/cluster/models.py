"""The models of a simulated pool as they truly are, and the world's own record of which the router serves.

Everything in the world counts experts in coordinates of its own, in which each model has its place whether it is served
or not, so that what a server holds is one bitmap whatever the router calls it. What the router publishes is read by the
models of that View, and what is reported to it is written by the models of the last View that the server followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from router.events import AddModel, Join, Refused, RemoveModel, Serves
from router.state import LAUNCHED_POOLS, State
from router.view import ATTENTION, EXPERT, Model

if TYPE_CHECKING:
    from tests.sim.cluster.judge import Judge
    from tests.sim.cluster.members import Process
    from tests.sim.cluster.shell import Row, Shown

EXPERT_BYTES = 1000
FIRST = "m"


@dataclass(frozen=True, kw_only=True)
class TrueModel:
    """One model. at: bit of its first expert in the world's bitmaps. attention: workers that are asked for with it."""

    hash: str
    name: str
    layers: int
    experts: int
    expert_bytes: int = EXPERT_BYTES
    at: int = 0
    attention: int = 1

    @property
    def top_k(self) -> int:
        """Experts that are asked for each row."""
        return min(2, self.experts)

    @property
    def mask(self) -> int:
        """Its bits in the world's bitmaps."""
        return ((1 << self.layers * self.experts) - 1) << self.at

    def added(self, attention: int, again: bool = False) -> AddModel:
        """What an operator says to have it served. again: under another name than at first."""
        # One that its first server made known has no name as yet.
        name = (self.name or "model-0") + "-again" * again
        model = Model(
            hash=self.hash,
            name=name,
            path=f"/models/{name}",
            layers=self.layers,
            experts=self.experts,
            expert_bytes=self.expert_bytes,
        )
        return AddModel(model=model, attention=attention)


def drawn(first: TrueModel, count: int, dice: Random) -> list[TrueModel]:
    """The first model and others of shapes of their own."""
    models = [first]
    for number in range(1, count):
        last = models[-1]
        models.append(
            TrueModel(
                hash=f"{FIRST}{number}",
                name=f"model-{number}",
                layers=dice.randint(1, 3),
                experts=dice.randint(2, 8),
                expert_bytes=dice.choice((EXPERT_BYTES // 4, EXPERT_BYTES, 3 * EXPERT_BYTES)),
                at=last.at + last.layers * last.experts,
                attention=dice.randint(1, 2),
            )
        )
    return models


class Models:
    """known: models that the router was ever told of, by hash, as it answered; what a put back journal lost aside."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.world = judge, judge.world
        self.known: dict[str, Model] = {}
        self.hashes: dict[str, str] = {}  # by every name that a model ever had

    # What there is.

    def true(self, hash: str) -> TrueModel:
        """The model of that hash; the first where none is said."""
        return next((model for model in self.world.models if model.hash == hash), self.world.models[0])

    def live(self) -> list[TrueModel]:
        """Models that are served, and do not leave."""
        return [m for m in self.world.models if m.hash in self.known and not self.known[m.hash].leaving]

    def leaves(self, hash: str) -> bool:
        """Whether a model was removed."""
        return hash in self.known and self.known[hash].leaving

    def group(self, pool: str, hash: str) -> str:
        """The launched pool of a member."""
        model = self.known.get(hash)
        return f"{ATTENTION}:{model.name}" if pool == ATTENTION and model and model.number else pool

    def of_group(self, group: str) -> TrueModel | None:
        """The model of which the attention workers of a launched pool are; None for expert servers."""
        if not group.startswith(ATTENTION):
            return None
        name = group.partition(":")[2]
        if name:
            return self.true(self.hashes[name]) if name in self.hashes else None
        first = next((known.hash for known in self.known.values() if not known.number), "")
        return self.true(first)

    def remembered(self, dice: Random) -> list[AddModel]:
        """What whoever starts the router remembers of what was served, also what was removed; sometimes nothing."""
        if dice.random() < 0.5:
            return []
        known = sorted(self.known.values(), key=lambda model: model.number)
        sizes = self.judge.wanted
        return [
            AddModel(model=model, attention=sizes.get(self._group(model), 1), again=True)
            for model in known
            if model.name or not model.number
        ]

    # What the router says.

    def serves(self, event: AddModel | RemoveModel, answer: Serves) -> None:
        """An operator was told that a model is served, or that it leaves."""
        model, known = answer.model, self.known.get(answer.model.hash)
        self._fits(model)
        if isinstance(event, AddModel) and event.again and known is not None:
            if _durable(model) != _durable(known):
                self.judge.broken("who repeats what was served changes nothing", f"{model} was {known}")
            return
        if isinstance(event, AddModel):
            if model.leaving:
                self.judge.broken("a model that was added stays", f"{answer}")
            if known is not None and known.number:
                self.judge.wanted.pop(self._group(known), None)
            self.judge.wanted[self._group(model)] = event.attention
            self.hashes[model.name] = model.hash
        elif known is not None and _durable(replace(known, leaving=True)) != _durable(model):
            self.judge.broken("a model that leaves is as it was", f"{model} was {known}")
        self.known[model.hash] = model

    def refused(self, event: Join | AddModel | RemoveModel, answer: Refused) -> None:
        """Somebody was told no: he asks for what is not served, or for the last model to go."""
        if isinstance(event, Join):
            fits = event.model_hash in self.known and not self.leaves(event.model_hash)
            if fits or event.pool != ATTENTION or event.model_hash == self.world.models[0].hash not in self.known:
                self.judge.broken("who fits may join", f"{answer} at {event}")
        elif isinstance(event, AddModel):
            known = self.known.get(event.model.hash)
            others = [model for model in self.known.values() if model.hash != event.model.hash]
            if event.again and any(event.model.name == model.name for model in others):
                return  # An older journal has another by that name.
            servers = [known for known in self.judge.present.values() if known.pool == EXPERT]
            if not servers and not any(model.name for model in self.known.values()):
                return  # Of the only model, which nobody named, too little is known yet.
            if known is not None and not known.leaving and known.name not in ("", event.model.name):
                return  # It has another name, as an order that came twice said.
            self.judge.broken("a model that fits is served", f"{answer} at {event}")
        else:
            live = [model.hash for model in self.live()]
            if event.name in live and len(live) > 1:
                self.judge.broken("a model goes where others stay", f"{answer} at {event}")

    def _group(self, model: Model) -> str:
        return f"{ATTENTION}:{model.name}" if model.number else ATTENTION

    def _fits(self, model: Model) -> None:
        """Numbers and bases never move, and no two models share a bit."""
        known = self.known.get(model.hash)
        place = (model.number, model.base, model.layers, model.experts)
        true = self.true(model.hash)
        if model.hash != true.hash or (model.layers, model.experts) != (true.layers, true.experts):
            self.judge.broken("a model has its own shape", f"{model} is {true}")
        if known is not None and place != (known.number, known.base, known.layers, known.experts):
            self.judge.broken("numbers and bases of models never move", f"{model} was {known}")
        end = model.base + model.layers * model.experts
        for other in self.known.values():
            if other.hash == model.hash:
                continue
            apart = end <= other.base or other.base + other.layers * other.experts <= model.base
            if not apart or other.number == model.number:
                self.judge.broken("each model has experts of its own", f"{model} beside {other}")

    def note(self, state: State) -> None:
        """A member joined: with the first of all the router learns which model is served."""
        for model in state.models:
            if model.hash not in self.known and not model.name:
                self._fits(model)
                self.known[model.hash] = model

    def restarted(self, state: State, restored: bool) -> None:
        """A new term begins with the models of its journal; one that was put back may lack some."""
        if restored:
            self.known = {model.hash: model for model in state.models}
            return
        named = {hash: _durable(m) for hash, m in self.known.items() if m.name or hash != FIRST}
        kept = {model.hash: _durable(model) for model in state.models}
        if not named.items() <= kept.items():
            self.judge.broken("models outlive a restart", f"{named}, then {kept}")

    def published(self, shown: Shown) -> None:
        """A View lists every model that is to be served, each at its place."""
        for model in shown.models:
            self._fits(model)
            known = self.known.get(model.hash)
            # One that had gone has no name: a server, or an older journal, may hold something of it all the same.
            named = known is not None and (model.name == known.name or (known.leaving and not model.name))
            if known is None or not named or known.leaving != model.leaving:
                self.judge.broken("a View lists models as they are served", f"{model}, known as {known}")
        listed = {model.hash for model in shown.models}
        missing = [m.hash for m in self.known.values() if not m.leaving and m.name and m.hash not in listed]
        if missing:
            self.judge.broken("a View lists every model that is served", f"{missing} are missing")

    def resized(self, before: State, state: State) -> None:
        """Nobody is to ask for a model that leaves any more; that is decided when nobody has anything to do for it."""
        for group, wanted in before.wanted.items():
            model = self.of_group(group)
            if model is None or state.wanted.get(group, 0) == wanted or not self.leaves(model.hash):
                continue
            if state.wanted.get(group, 0):
                continue  # by an operator, of which the judge hears
            self.judge.wanted[group] = 0
        for group in before.wanted.keys() - state.wanted.keys():
            model = self.of_group(group)
            stays = model is not None and not self.leaves(model.hash) and self.group(ATTENTION, model.hash) == group
            if group in LAUNCHED_POOLS or stays:
                self.judge.broken("wanted sizes last", f"that of {group} is forgotten")
            self.judge.wanted.pop(group, None)

    # What members do.

    def askers(self, hash: str) -> list[Process]:
        """Members that ask for a model, as far as the judge knows."""
        found = [known.process for known in self.judge.present.values() if known.pool == ATTENTION]
        return [process for process in found if process is not None and process.model.hash == hash]

    def forsaken(self, shown: Shown) -> int:
        """Bits of models that sleep, or leave and of which nobody asks: they may be let go at once."""
        asleep = self.asleep(shown)
        return united(
            self.true(hash)
            for hash, model in self.known.items()
            if hash in asleep or (model.leaving and not self.askers(hash))
        )

    def asleep(self, shown: Shown) -> set[str]:
        """Models that sleep."""
        return {model.hash for model in shown.models if model.asleep}

    def busy(self, hash: str) -> list[str]:
        """Who said last that he has something to ask of a model."""
        workers = [known for known in self.judge.present.values() if known.pool == ATTENTION]
        return [w.name for w in workers if w.model == hash and w.load.get("running", 0) + w.load.get("waiting", 0)]

    def awaits_one_who_can(self, shown: Shown, row: Row) -> bool:
        """Whether a server is to go and has experts of a model that no other one can open: it stays until one comes."""
        others = [self.world.members.get(other.incarnation) for other in shown.experts if other.phase != "draining"]
        opened = {hash for server in others for hash in (server.opened if server is not None else ())}
        kept = united(model for model in self.live() if model.hash not in opened)
        return row.phase == "draining" and bool(row.serving & kept)

    def unrest(self, shown: Shown) -> str:
        """What is not as it should be at rest."""
        listed = {model.hash: model for model in shown.models}
        for hash, model in self.known.items():
            true = self.true(hash)
            servers = [row for row in shown.experts if row.target & true.mask]
            if hash in listed and listed[hash].asleep and servers:
                return f"{model.name or hash} sleeps, and {[row.name for row in servers]} are to hold it"
            if model.leaving:
                if hash in listed or servers or self.askers(hash):
                    return f"{model.name or hash} was removed and has not gone: {[row.name for row in servers]}"
                holders = [p.name for p in self.world.processes.values() if p.pool == "expert" and p.held & true.mask]
                if holders:
                    return f"{holders} hold experts of {model.name or hash}, which was removed"
        for process in self.world.processes.values():
            if process.pool == "expert" and (waits := process.unopened()):
                return f"{process.name} opens or closes {waits}"
        return ""


def _durable(model: Model) -> Model:
    """What an operator's word alone changes: of the first model members may know more, models fall asleep, and one that
    has gone gives its name up."""
    return replace(model, expert_bytes=0, asleep=False, name="" if model.leaving else model.name)


def united(models: Iterable[TrueModel]) -> int:
    """All bits of some models."""
    bits = 0
    for model in models:
        bits |= model.mask
    return bits
