"""The numbers of a pool, as every hook shows them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from router.keda import NothingReported, trigger_of
from router.pools import autoscale_bounds, pool_load, replicas_min
from router.state import Config, ConfigInvalid, Liveness, MemberRecord, Model, State


def member(name: str, serving: int = 0) -> MemberRecord:
    return MemberRecord(
        name=name, pool=name.partition("/")[0], incarnation=1, address="", pid=1, host="h", serving=serving
    )


def test_amounts_add_up_and_of_levels_the_worst_counts() -> None:
    loads = {
        "attention/1": {"running": 3.0, "queue_s": 0.5, "kv_use": 0.9, "busy": 0.5},
        "attention/2": {"running": 4.0, "queue_s": 2.0, "kv_use": 0.2, "busy": math.nan},
        "gateway/1": {"running": 7.0, "waiting": 2.0, "queue_s": 1.0, "ttft_p99_s": 0.3},
        "gateway/2": {"waiting": 1.0, "ttft_p99_s": 0.4},
        "expert/1": {"busy": 0.25, "rows_per_s": math.inf},
    }
    state = State(
        members={name: member(name) for name in loads},
        liveness={name: Liveness(renewed_s=0.0, load=load) for name, load in loads.items()},
    )
    attention = {
        "running": 7.0,
        "queue_s": 2.0,
        "kv_use": 0.9,
        "busy": 0.5,
        "waiting": 3.0,
        "ttft_p99_s": 0.4,
    }
    assert pool_load(state, "attention") == attention
    assert pool_load(state, "expert") == {"busy": 0.25}


def test_what_waits_at_a_gateway_is_the_load_of_its_own_model() -> None:
    models = tuple(Model(hash=hash, name=hash, number=number) for number, hash in enumerate("mn"))
    loads = {
        "attention/1": {"running": 3.0},
        "attention/2": {"running": 4.0, "queue_s": 0.5},
        "gateway/1": {
            "running": 9.0, "waiting": 6.0, "queue_s": 2.0, "model:0": 3.0, "model:0:waiting": 1.0,
            "model:0:queue_s": 0.25, "model:1": 9.0, "model:1:waiting": 5.0, "model:1:queue_s": 2.0,
        },
    }  # fmt: skip
    members = {name: member(name) for name in loads}
    for name, model in (("attention/1", "m"), ("attention/2", "n")):
        members[name] = replace(members[name], model=model)
    state = State(
        models=models, members=members, wanted={"expert": 1, "attention": 1, "attention:n": 1},
        liveness={name: Liveness(renewed_s=0.0, load=load) for name, load in loads.items()},
    )  # fmt: skip
    assert pool_load(state, "attention") == {"running": 3.0, "waiting": 1.0, "queue_s": 0.25}
    assert pool_load(state, "attention:n") == {"running": 4.0, "waiting": 5.0, "queue_s": 2.0}
    trigger = trigger_of({"pool": "attention:n", "metric": "waiting", "target": "2"})
    config = Config(experts_wanted=2)
    assert (trigger.name, trigger.value(config, state)) == ("eaas-attention-n-waiting", 5.0)
    assert trigger.is_active(config, state)
    idle = replace(state, liveness={**state.liveness, "attention/2": Liveness(renewed_s=0.0, load={}),
        "gateway/1": Liveness(renewed_s=0.0, load={"model:0:waiting": 1.0, "model:1:waiting": 0.0})})  # fmt: skip
    assert not trigger.is_active(config, idle), "the other model's requests wake it not"
    assert trigger_of({"pool": "expert"}).is_active(config, idle)
    with pytest.raises(NothingReported, match="no pool attention:o; there are expert, attention, attention:n"):
        trigger_of({"pool": "attention:o"}).value(config, state)
    # A gateway of an older release tells no model apart.
    older = {"waiting": 6.0, "queue_s": 2.0, "model:0": 3.0, "model:1": 9.0}
    state = replace(state, liveness={**state.liveness, "gateway/1": Liveness(renewed_s=0.0, load=older)})
    assert pool_load(state, "attention:n")["waiting"] == 6.0


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        ([], {}),
        (["expert:1..6"], {"expert": (1, 6)}),
        (["attention:0..1", "expert:64..64"], {"attention": (0, 1), "expert": (64, 64)}),
        (["gateway:1..2"], "one of expert, attention with its least and most processes, such as expert:1..6"),
        (["expert:1..6 "], "found; give one of"),
        (["expert:1"], "found; give one of"),
        (["expert:-1..6"], "found; give one of"),
        (["expert:7..6"], "give bounds with least <= most"),
        (["expert:0..0"], "and most from 1 to 64"),
        (["expert:1..65"], "and most from 1 to 64"),
        (["expert:1..2", "expert:1..2"], "names pool expert twice"),
    ],
)
def test_bounds_on_the_command_line(asked: list[str], bounds: object) -> None:
    if isinstance(bounds, str):
        with pytest.raises(ConfigInvalid, match=bounds.replace(".", r"\.")):
            autoscale_bounds(asked)
    else:
        assert autoscale_bounds(asked) == bounds


def test_the_fewest_replicas_are_counted_over_every_expert() -> None:
    """Against the plain count, over random states (the seed is in the message)."""
    for seed in range(200):
        random = Random(seed)
        pairs = random.randint(1, 12)
        held = [random.getrandbits(pairs) | random.getrandbits(pairs) for _ in range(random.randint(0, 5))]
        members = {f"expert/{n}": member(f"expert/{n}", bits) for n, bits in enumerate(held)}
        state = State(models=(Model(hash="m", layers=1, experts=pairs),), members=members)
        plain = min(sum(bits >> pair & 1 for bits in held) for pair in range(pairs))
        assert replicas_min(Config(), state) == plain, f"seed {seed}"
    assert replicas_min(Config(), State()) == 0


def test_models_that_sleep_are_no_loss() -> None:
    """Of those awake the fewest copies count; where all sleep, nothing lacks."""
    awake, asleep = (
        Model(hash=hash, number=number, base=2 * number, layers=1, experts=2, asleep=number == 1)
        for number, hash in enumerate("mn")
    )
    members = {"expert/1": member("expert/1", 0b0011)}
    config, state = Config(experts_wanted=2, replicas=2), State(models=(awake, asleep), members=members)
    assert replicas_min(config, state) == 1, "nobody holds what sleeps"
    both = replace(state, models=(replace(awake, asleep=True), asleep), members={})
    assert replicas_min(config, both) == 2
    assert replicas_min(config, replace(both, models=(awake, asleep))) == 0
    unknown = State(models=(Model(hash=""),))
    assert replicas_min(config, unknown) == 0, "before any server says what a model has, nothing is served"
