"""The numbers of a pool, as every hook shows them."""

from __future__ import annotations

import math
from random import Random

import pytest

from router.pools import autoscale_bounds, pool_load, replicas_min
from router.state import ConfigInvalid, Liveness, MemberRecord, Model, State


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
        state = State(model=Model(hash="m", layers=1, experts=pairs), members=members)
        plain = min(sum(bits >> pair & 1 for bits in held) for pair in range(pairs))
        assert replicas_min(state) == plain, f"seed {seed}"
    assert replicas_min(State()) == 0
