"""Attention workers and expert servers of two numerics classes in one cluster, as processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.make_model import make_model
from eaas.cluster.process import Child
from eaas.worker.protocol import Failed, Hello, Step
from router.client import RouterClient
from tests.eaas.test_attention_process import Gateway, cluster, exit_code

pytestmark = pytest.mark.alone

OWN, OTHER = "cpu-f32-fma-1", "cpu-f32-fma-1-other"
ROOT = Path(__file__).resolve().parents[2]
OTHER_CLASS = Path(__file__).parent / "other_class"
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny", "qwen3_moe", tmp_path_factory.mktemp("model"), seed=1, dtype="float32")


def hello_of(gateway: Gateway) -> Hello:
    assert isinstance(gateway.hello, Hello)
    return gateway.hello


def failure(gateway: Gateway) -> Failed:
    """The next failure that a gateway is told."""
    message = gateway.next()
    while isinstance(message, Step):
        message = gateway.next()
    assert isinstance(message, Failed)
    return message


def test_requests_stay_in_their_class_and_go_on_in_another_only_when_theirs_is_gone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_other_class(start: Callable[[], Child]) -> Child:
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(OTHER_CLASS), str(ROOT)]))
            return start()

    with cluster(tmp_path, model, 1) as world:
        world.wait(of_other_class(world.expert))
        other = of_other_class(world.attention)
        second = Gateway(world.wait(other))
        own_expert = world.expert()
        world.wait(own_expert)
        own = world.attention("--deadline-s", "2")
        first = Gateway(world.wait(own))
        router = RouterClient(world.router)
        assert hello_of(first).numerics_class == OWN
        assert hello_of(second).numerics_class == OTHER
        held = {m.numerics_class: m.serving_count for m in router.status().view.pool("expert")}
        view = router.status().view
        assert held == dict.fromkeys((OWN, OTHER), view.layers * view.experts), "each class is whole"
        first.submit("calm", PROMPT)
        calm = first.tokens("calm", 40)
        second.submit("calm", PROMPT)
        second.tokens("calm", 40)

        first.submit("storm", PROMPT, max_tokens=1500)
        storm = first.tokens("storm", 5)
        own_expert.send(signal.SIGKILL)
        end_s = time.monotonic() + 60
        while any(m.numerics_class == OWN for m in router.status().view.pool("expert")):
            assert time.monotonic() < end_s, "a killed expert server is a member still"
            time.sleep(0.01)
        # What comes now is sent on at once, and whoever asks the other class computes it. It comes while the other
        # still waits: afterwards this worker soon gives its class up and ends.
        first.submit("late", PROMPT)
        late = failure(first)
        assert (late.id, late.code, late.retryable) == ("late", "class_lost", True)
        lost = failure(first)
        assert (lost.id, lost.code, lost.retryable) == ("storm", "expert_lost", True)
        assert storm == calm[:5]
        assert other.name in late.message
        second.submit("late", PROMPT, output=storm, max_tokens=40)
        assert len(second.tokens("late", 35)) == 35

        # Its class does not come back: it ends, and who comes in its place asks those that are there.
        assert exit_code(own, 30.0) == 0, own.tail()
        successor = world.attention("--deadline-s", "2")
        third = Gateway(world.wait(successor))
        assert hello_of(third).numerics_class == f"{OWN}+{OTHER}"
        third.submit("again", PROMPT)
        assert len(third.tokens("again", 40)) == 40
        router.close()


def test_a_worker_waits_for_a_class_that_it_can_talk_with(tmp_path: Path, model: Path) -> None:
    """An expert server of GPUs is no help to a worker on a CPU."""
    with cluster(tmp_path, model, 1) as world:
        router = RouterClient(world.router)
        spec = {"model_hash": "", "layers": 0, "experts": 0}
        world.wait(world.expert())
        view = router.status().view
        other = RouterClient(world.router)
        other.join(
            pool="expert", address="127.0.0.1:1", numerics_class="cuda-sm90-f32-triton3.6-1",
            **{**spec, "layers": view.layers, "experts": view.experts, "model_hash": view.model_hash},
        )  # fmt: skip
        classes = {member.numerics_class for member in router.status().view.pool("expert")}
        assert classes == {OWN, "cuda-sm90-f32-triton3.6-1"}, "both have joined"
        gateway = Gateway(world.wait(world.attention()))
        assert hello_of(gateway).numerics_class == OWN
        gateway.submit("a", PROMPT)
        assert len(gateway.tokens("a", 40)) == 40
        other.close()
        router.close()
