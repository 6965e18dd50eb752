"""Several models on one pool: each has bits, servers, workers and a budget of its own."""

from __future__ import annotations

from dataclasses import replace

from router.events import (
    AddModel,
    Exited,
    Join,
    Loaded,
    Refused,
    RemoveModel,
    Renewed,
    Retire,
    Serves,
    StartProcess,
    Tick,
)
from router.models import listed
from router.records import view_of
from router.view import Model, of_model
from tests.router.told import Step, Told, cluster, rest

B = Model(hash="b", name="B", path="/b", layers=2, experts=3, expert_bytes=10)


def add(told: Told, model: Model = B, attention: int = 1) -> Model:
    answers = told.give(AddModel(model=model, attention=attention))
    return next(a.model for a in answers if isinstance(a, Serves))


def refusal(told: Told, event: AddModel | RemoveModel | Join) -> str:
    before = told.state
    answers = [answer for answer in told.give(event) if isinstance(answer, Refused)]
    assert answers and told.state.models == before.models and told.state.wanted == before.wanted
    return answers[0].message


def open_(told: Told, name: str, *hashes: str) -> None:
    record = told.state.members[name]
    told.give(
        Loaded(
            name=name,
            incarnation=record.incarnation,
            held=record.target,
            epoch=told.state.epoch,
            opened=hashes,
        )
    )


def serving(told: Told, hash: str) -> list[tuple[tuple[int, int], ...]]:
    view = of_model(view_of(told.config, told.state), hash)
    return [
        tuple(divmod(bit, view.experts) for bit in range(view.layers * view.experts) if _has(member.serving, bit))
        for member in view.pool("expert")
    ]


def _has(bits: bytes, bit: int) -> bool:
    return bool(int.from_bytes(bits, "little") >> bit & 1)


def work(told: Told, name: str, running: float) -> None:
    told.give(Renewed(name=name, incarnation=told.state.members[name].incarnation, load={"running": running}))


def with_workers(step: Step) -> Told:
    """Two servers that opened both models, all at rest; attention/2 asks for B."""
    told = cluster(step, servers=2)
    add(told)
    for name in ("expert/1", "expert/2"):
        open_(told, name, "b")
    told.join("attention", model_hash="b", layers=2, experts=3)
    rest(told)
    return told


def a_model_is_placed_where_it_was_opened(step: Step) -> None:
    told = cluster(step, servers=3)
    before = serving(told, "m")
    model = add(told)
    assert (model.number, model.base) == (1, 2), "behind the two experts of the first"
    rest(told)
    assert serving(told, "b") == [()] * 3, "nobody opened it"
    open_(told, "expert/1", "b")
    rest(told, rounds=2)
    assert serving(told, "b") == [()] * 3, "one of three does not load all of it at once"
    open_(told, "expert/3", "b")
    rest(told, rounds=80)
    everything = tuple((layer, expert) for layer in range(2) for expert in range(3))
    assert serving(told, "b") == [everything, (), everything]
    open_(told, "expert/2", "b")
    rest(told)
    held = serving(told, "b")
    assert [len(one) for one in held] == [4, 4, 4], "two copies of six, evenly"
    assert serving(told, "m") == before, "and nothing of the first has moved"


def bits_are_given_once(step: Step) -> None:
    told = with_workers(step)
    told.give(RemoveModel(name="B"))
    work(told, "attention/2", 0)
    rest(told, rounds=40, load={"running": 0})
    assert [model.hash for model in listed(told.state)] == ["m"]
    third = add(told, Model(hash="c", name="B", path="/c", layers=1, experts=4), attention=0)
    assert (third.number, third.base) == (2, 8), "where a model was that is gone lies no other"
    again = add(told, replace(B, name="B2", weight=3))
    assert (again.number, again.base, again.weight) == (1, 2, 3)
    assert not any(model.leaving for model in told.state.models)


def a_model_goes_once_its_workers_have_nothing_to_do(step: Step) -> None:
    told = with_workers(step)
    held = serving(told, "b")
    assert all(held)
    work(told, "attention/2", 1)
    (answer, *_) = told.give(RemoveModel(name="B"))
    assert isinstance(answer, Serves) and answer.model.leaving
    for _ in range(30):
        told.give(Tick(), after_s=0.1)
        for name in told.state.members:
            work(told, name, float(name == "attention/2"))
        told.ack("attention/1")
        told.ack("attention/2")
    assert serving(told, "b") == held and told.state.wanted["attention:B"] == 1, "a stream runs"
    assert not told.state.members["attention/2"].draining
    work(told, "attention/2", 0)
    told.give(Tick(), after_s=0.1)
    assert "was removed" in refusal(told, Join(pool="attention", address="", pid=99, host="h", model_hash="b"))
    assert told.state.members["attention/2"].draining, "it stays until it has seen so"
    told.ack("attention/2")
    work(told, "attention/2", 0)
    assert "attention/2" not in told.state.members
    bits = 0b11111100
    assert any(record.target & bits for record in told.state.members.values()), "who was told of it may ask for a lease"
    rest(told, rounds=40, load={"running": 0})
    assert not any((r.share | r.target | r.loaded) & bits for r in told.state.members.values())
    assert "attention:B" not in told.state.wanted
    assert [model.hash for model in view_of(told.config, told.state).models] == ["m"]
    assert told.state.wanted["attention"] == 1 and not told.state.members["attention/1"].draining


def a_stream_of_a_model_that_leaves_outlives_its_worker(step: Step) -> None:
    """Gateways say what they hold, whether a worker runs it or not."""
    told = with_workers(step)
    told.join("gateway")

    def say(held: float) -> None:
        for _ in range(10):
            for name, record in list(told.state.members.items()):
                load = {"model:1": held} if record.pool == "gateway" else {"running": 0.0, "waiting": 0.0}
                told.give(Renewed(name=name, incarnation=record.incarnation, load=load))
            told.give(Tick(), after_s=0.1)

    told.give(RemoveModel(name="B"))
    gone = told.state.members["attention/2"]
    say(1)
    orders = told.give(Exited(host="h", pid=gone.pid))
    assert [order.pool for order in orders if isinstance(order, StartProcess)] == ["attention:B"]
    say(1)
    held = serving(told, "b")
    assert all(held) and told.state.wanted["attention:B"] == 1
    worker = told.join("attention", model_hash="b", layers=2, experts=3)
    say(1)
    assert serving(told, "b") == held and not told.state.members[worker].draining
    say(0)
    assert told.state.members[worker].draining


def a_name_is_free_once_its_model_has_gone(step: Step) -> None:
    told = with_workers(step)
    told.give(RemoveModel(name="B"))
    other = AddModel(model=replace(B, hash="c", experts=4), attention=1)
    assert "wait until it has gone" in refusal(told, other)
    rest(told, rounds=40, load={"running": 0})
    told.give(other)
    for name in ("expert/1", "expert/2"):
        open_(told, name, "c")
    worker = told.join("attention", model_hash="c", layers=2, experts=4)
    rest(told, rounds=40, load={"running": 0})
    assert told.state.wanted["attention:B"] == 1 and not told.state.members[worker].draining
    assert all(serving(told, "c"))
    told.give(Retire(name=worker, operation="o"))
    rest(told, load={"running": 0})
    assert worker in told.state.members, "it waits for another"


def each_model_has_workers_of_its_own(step: Step) -> None:
    told = with_workers(step)
    assert told.state.wanted == {"expert": 2, "attention": 1, "attention:B": 1}
    gone = told.state.members["attention/2"]
    orders = told.give(Exited(host="h", pid=gone.pid))
    assert [order.pool for order in orders if isinstance(order, StartProcess)] == ["attention:B"]
    told.join("attention", model_hash="m")
    assert told.state.starts, "it was of the other model"
    told.join("attention", model_hash="b", layers=2, experts=3)
    assert not told.state.starts


def a_model_that_comes_does_not_hold_up_a_repair(step: Step) -> None:
    told = cluster(step, servers=3, experts=6, copies_in_flight=2, expert_bytes=10)
    add(told, replace(B, layers=1, experts=40))
    for number in (1, 2, 3):
        open_(told, f"expert/{number}", "b")
    first = 0b111111
    loading = [record.target & ~record.loaded & ~first for record in told.state.members.values()]
    assert sum(bits.bit_count() for bits in loading) > 2, "what nobody serves is loaded at once"
    held = told.state.members["expert/3"].serving & first
    told.give(Exited(host="h", pid=told.state.members["expert/3"].pid))
    survivors = [told.state.members[name] for name in ("expert/1", "expert/2")]
    ordered = sum((record.target & ~record.loaded & first).bit_count() for record in survivors)
    assert held and ordered == 2, "as many copies as may be on their way of the first model"


def a_model_that_nobody_asks_sleeps_until_somebody_does(step: Step) -> None:
    told = cluster(step, servers=2, sleep_after_s=2.0)
    add(told)
    for name in ("expert/1", "expert/2"):
        open_(told, name, "b")
    told.join("attention", model_hash="b", layers=2, experts=3)
    rest(told)
    held = serving(told, "m")

    def go_on(rounds: int, b: float) -> None:
        """The first model always has something to do."""
        for _ in range(rounds):
            work(told, "attention/1", 1)
            work(told, "attention/2", b)
            for name in ("expert/1", "expert/2"):
                told.renew(name)
            told.load_all()
            told.ack("attention/1")
            told.ack("attention/2")
            told.give(Tick(), after_s=0.1)

    go_on(30, b=1)
    assert all(serving(told, "b"))
    go_on(19, b=0)
    assert all(serving(told, "b")), "not yet so long"
    go_on(5, b=0)
    assert serving(told, "b") == [(), ()] and serving(told, "m") == held
    (_, model) = view_of(told.config, told.state).models
    assert model.asleep, "it is still there to be asked for"
    assert not any(record.target >> 2 for record in told.state.members.values()), "nobody holds it"
    assert "attention/2" in told.state.members and told.state.wanted["attention:B"] == 1
    work(told, "attention/2", 1)
    (_, model) = view_of(told.config, told.state).models
    assert not model.asleep
    assert all(told.state.members[name].target >> 2 for name in ("expert/1", "expert/2")), "at once"
    go_on(2, b=1)
    assert all(serving(told, "b")) and serving(told, "m") == held


def a_model_does_not_sleep_under_who_does_not_say_what_runs(step: Step) -> None:
    told = cluster(step, servers=2, sleep_after_s=1.0)
    for _ in range(20):
        rest(told, rounds=1)
    assert all(serving(told, "m"))
    rest(told, rounds=20, load={"running": 0})
    assert not any(serving(told, "m")) and told.state.models[0].asleep


def models_come_and_change_while_no_server_is_there(step: Step) -> None:
    """The first has no name, and all expert servers are gone for a moment: what is known of it stays known."""
    told = with_workers(step)
    for name in ("expert/1", "expert/2"):
        told.give(Exited(host="h", pid=told.state.members[name].pid))
    assert add(told, replace(B, weight=7)).weight == 7
    assert add(told, replace(B, hash="c", name="C"), attention=0).base == 8
    told.give(RemoveModel(name="B"))
    assert not add(told).leaving


def what_does_not_fit_is_refused(step: Step) -> None:
    told = Told(step)
    early = AddModel(model=B, attention=1)
    told.join("attention", layers=0, experts=0)
    assert "no expert server of it is there" in refusal(told, early)
    told.join(numerics_class="cpu-bf16-fma-1")
    add(told)
    for model, attention, words in (
        (replace(B, hash="c", name="a b"), 1, "letters, digits"),
        (replace(B, hash="c"), 1, "another model is served as B"),
        (replace(B, name="C"), 1, "served as B: remove it first"),
        (replace(B, experts=4), 1, "2 layers with 3 experts here"),
        (replace(B, hash="c", name="C", layers=0), 1, "layers 0 found"),
        (replace(B, hash="c", name="C", weight=0), 1, "weight 0 found"),
        (replace(B, hash="c", name="C"), 65, "attention workers 65 found, 0 to 64"),
        (replace(B, hash="c", name="C", layers=1 << 10, experts=1 << 10), 1, "Start a new cluster"),
    ):
        found = refusal(told, AddModel(model=model, attention=attention))
        assert words in found, found
    other = AddModel(model=replace(B, hash="c", name="C"), attention=1, numerics_class="cpu-int8-avx2-1")
    assert "one format of numbers" in refusal(told, other)
    assert "give one of m, B" in refusal(told, RemoveModel(name="C"))
    told.give(RemoveModel(name="m"))
    assert "the last model" in refusal(told, RemoveModel(name="B"))
    stranger = Join(pool="expert", address="", pid=99, host="h", model_hash="x", layers=1, experts=2)
    assert "model x found, " in refusal(told, stranger)


def the_first_model_has_the_name_that_gateways_were_started_with(step: Step) -> None:
    """Nobody else is given it, and a View, an operator and a refusal have it, though no journal does."""
    told = Told(step, first_model=("mine", "/mine"))
    early = AddModel(model=replace(B, name="mine"), attention=1)
    assert "another model is served as mine" in refusal(told, early)
    told.join(numerics_class="cpu-bf16-fma-1")
    hash = told.state.models[0].hash
    assert "another model is served as mine" in refusal(told, early)
    add(told)
    shown = view_of(told.config, told.state).models
    assert [(model.name, model.path) for model in shown] == [("mine", "/mine"), ("B", "/b")]
    assert "give one of mine, B" in refusal(told, RemoveModel(name="C"))
    assert told.state.models[0].name == ""
    told.give(RemoveModel(name="mine"))
    assert told.state.models[0].leaving
    assert "another model is served as mine" in refusal(
        told, AddModel(model=replace(B, hash="c", name="mine"), attention=1)
    )
    rest(told, load={"running": 0})
    assert hash not in [model.hash for model in listed(told.state)]
    assert add(told, replace(B, hash="c", name="mine")).name == "mine"
    shown = view_of(told.config, told.state).models
    assert [(model.hash, model.name) for model in shown] == [("b", "B"), ("c", "mine")]


MODEL_STORIES = (
    the_first_model_has_the_name_that_gateways_were_started_with,
    a_model_is_placed_where_it_was_opened,
    bits_are_given_once,
    a_model_goes_once_its_workers_have_nothing_to_do,
    a_stream_of_a_model_that_leaves_outlives_its_worker,
    a_name_is_free_once_its_model_has_gone,
    each_model_has_workers_of_its_own,
    a_model_that_comes_does_not_hold_up_a_repair,
    a_model_that_nobody_asks_sleeps_until_somebody_does,
    a_model_does_not_sleep_under_who_does_not_say_what_runs,
    models_come_and_change_while_no_server_is_there,
    what_does_not_fit_is_refused,
)
