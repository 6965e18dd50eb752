"""Clients: programs that ask a pool for its experts, and are nobody's own."""

from __future__ import annotations

from dataclasses import replace

from router.events import Exited, Join, Refused
from router.view import Model
from tests.router.told import Step, Told


def a_client_says_nothing_of_the_model(step: Step) -> None:
    """It may come first, or while something of the model is not known yet: the cluster's own members say it."""
    told = Told(step)
    theirs = Join(pool="client", address="", pid=7, host="h", model_hash="theirs", layers=3, experts=5)
    before = told.state
    (refused,) = told.give(theirs)
    assert isinstance(refused, Refused) and refused.message.startswith("no expert server is a member")
    assert told.state == before
    told.join(model_hash="", numerics_class="cpu-bf16-fma-1")
    told.give(replace(theirs, layers=1, experts=2, expert_bytes=9))
    assert "client/1" in told.state.members
    assert told.state.models == (Model(layers=1, experts=2),)
    (refused,) = told.give(replace(theirs, layers=1, experts=2, numerics_class="cpu-f32-fma-1"))
    assert isinstance(refused, Refused) and refused.message.startswith("numerics class cpu-f32-fma-1 found")
    told.join("attention")
    assert told.state.models[0].hash == "m"


def clients_of_a_model_that_is_gone_keep_no_other_out(step: Step) -> None:
    told = Told(step)
    told.join()
    client = told.join("client")
    told.give(Exited(host="h", pid=1))
    told.give(Join(pool="gateway", address="g", pid=9, host="h"))
    told.join()
    assert client in told.state.members, "the same model came back"
    told.give(Exited(host="h", pid=told.pids))
    told.join(model_hash="new", layers=5, experts=7)
    assert told.state.models == (Model(hash="new", layers=5, experts=7),)
    assert client not in told.state.members
    assert told.state.gone[-1].reason == "the cluster serves another model now"


CLIENT_STORIES = (a_client_says_nothing_of_the_model, clients_of_a_model_that_is_gone_keep_no_other_out)
