"""Clients: programs that ask a pool for its experts, and are nobody's own."""

from __future__ import annotations

from dataclasses import replace

from router.events import Join, Refused
from router.state import Model
from tests.router.told import Step, Told


def a_client_says_nothing_of_the_model(step: Step) -> None:
    """It may come first, or while something of the model is not known yet: the cluster's own members say it."""
    told = Told(step)
    theirs = Join(pool="client", address="", pid=7, host="h", model_hash="theirs", layers=3, experts=5)
    before = told.state
    (refused,) = told.give(theirs)
    assert isinstance(refused, Refused) and refused.message.startswith("no expert server has joined yet")
    assert told.state == before
    told.join(model_hash="", numerics_class="cpu-bf16-fma-1")
    told.give(replace(theirs, layers=1, experts=2, expert_bytes=9))
    assert "client/1" in told.state.members
    assert told.state.model == Model(layers=1, experts=2)
    (refused,) = told.give(replace(theirs, layers=1, experts=2, numerics_class="cpu-f32-fma-1"))
    assert isinstance(refused, Refused) and refused.message.startswith("numerics class cpu-f32-fma-1 found")
    told.join("attention")
    assert told.state.model.hash == "m"


CLIENT_STORIES = (a_client_says_nothing_of_the_model,)
