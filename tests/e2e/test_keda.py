"""KEDA's scaler and the scale endpoint drive a live cluster: pools follow the streams, and no stream can tell."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.view import ATTENTION, EXPERT
from tests.e2e.test_scaling import InBackground, Scaled, calm, scaled, stream
from tests.e2e.waiting import wait_for
from tests.router.test_keda import Keda, keda

pytestmark = pytest.mark.full(seconds=15)

__all__ = ["calm", "keda"]

POLL_S = 0.2
# A horizontal autoscaler takes the greatest size asked for in such a time (5 minutes by default).
STEADY_S = 2.0


class Autoscaler:
    """What KEDA and a horizontal autoscaler do together: the one asks the scaler, the other writes sizes.

    A pool that is not active goes to `least`; an active one to ceil(metric / target), within `least` and `most`, down
    only to the greatest size asked for lately. Sizes go to the router's scale endpoint.
    """

    def __init__(self, client: Keda, admin: str, least: int, most: int, **metadata: str) -> None:
        self._client, self._least, self._most = client, least, most
        self._ref = {"name": "pool", "namespace": "eaas", "scalerMetadata": metadata}
        self._url = f"http://{admin}/admin/pools/{metadata['pool']}/scale"
        self._asked: deque[tuple[float, int]] = deque()
        self._ended = threading.Event()
        self.written: list[int] = []
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Autoscaler:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        assert self.faults == []

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                self._turn(time.monotonic())
            except Exception as fault:
                self.faults.append(repr(fault))
                return

    def _turn(self, now_s: float) -> None:
        (spec,) = self._client.ask("GetMetricSpec", self._ref)["reply"]["metricSpecs"]
        said = self._client.ask("GetMetrics", {"scaledObjectRef": self._ref, "metricName": spec["metricName"]})
        if said.get("code") == "UNAVAILABLE":
            return  # Nobody tells the metric yet: an autoscaler leaves the size as it is.
        (value,) = said["reply"]["metricValues"]
        active = self._client.ask("IsActive", self._ref)["reply"]["result"]
        asked = math.ceil(value["metricValueFloat"] / spec["targetSizeFloat"])
        wanted = min(max(asked, max(self._least, 1)), self._most) if active else self._least
        self._asked.append((now_s, wanted))
        while now_s - self._asked[0][0] > STEADY_S:
            self._asked.popleft()
        present = self._scale()["wanted"]
        size = wanted if wanted > present else min(present, max(size for _, size in self._asked))
        if size != present:
            self.written.append(size)
            self._scale({"wanted": size})

    def _scale(self, body: dict[str, int] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url,
            json.dumps(body).encode() if body else None,
            {"content-type": "application/json"},
            method="PUT" if body else "GET",
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)


def client_of(keda: Callable[..., Keda], world: Scaled) -> Keda:
    return keda(SimpleNamespace(address=world.cluster.router_address))


def sizes(world: Scaled, pool: str) -> int:
    return sum(member.state == "serving" for member in world.members(pool))


def test_attention_workers_follow_the_streams_up_and_down(
    tiny: Path, calm: list[list[str]], keda: Callable[..., Keda]
) -> None:
    with scaled(tiny, experts=1, attention=1, replicas=1, admin_port=0) as world:
        (admin,) = world.cluster.admin_addresses
        # Eight streams, of which a worker should have three.
        metadata = {"pool": ATTENTION, "metric": "running", "target": "3"}
        with Autoscaler(client_of(keda, world), admin, 1, 3, **metadata) as scaler:
            clients = InBackground(world.cluster, repeat=True)
            try:
                wait_for("three attention workers", lambda: sizes(world, ATTENTION) == 3, world.cluster)
            finally:
                rounds = clients.result()
            wait_for("one attention worker", lambda: sizes(world, ATTENTION) == 1, world.cluster)
            assert max(scaler.written) == 3 and scaler.written[-1] == 1
        for number, texts in enumerate(rounds):
            assert texts == calm, f"round {number} of {len(rounds)}: tokens changed"


def test_a_pool_at_zero_comes_up_for_what_waits_and_goes_again(
    tiny: Path, calm: list[list[str]], keda: Callable[..., Keda]
) -> None:
    with scaled(tiny, experts=1, attention=1, replicas=1, admin_port=0) as world:
        (admin,) = world.cluster.admin_addresses
        client = client_of(keda, world)
        metadata = {"pool": ATTENTION, "metric": "running", "target": "8"}
        active = client.begin("StreamIsActive", {"scalerMetadata": metadata})
        with Autoscaler(client, admin, 0, 1, **metadata):
            wait_for("no attention worker", lambda: sizes(world, ATTENTION) == 0, world.cluster)
            assert stream(world.cluster) == calm
            wait_for("no attention worker again", lambda: sizes(world, ATTENTION) == 0, world.cluster)
        pushed = [said["reply"]["result"] for said in active()]
        assert True in pushed and pushed[-1] is False, pushed


def test_the_scale_endpoint_alone_drives_the_expert_pool_and_the_scaler_says_the_same(
    tiny: Path, calm: list[list[str]], keda: Callable[..., Keda]
) -> None:
    with scaled(tiny, experts=1, attention=1, replicas=1, admin_port=0) as world:
        (admin,) = world.cluster.admin_addresses
        client = client_of(keda, world)
        clients = InBackground(world.cluster, repeat=True)
        try:
            for wanted in (3, 1):
                body = json.dumps({"wanted": wanted}).encode()
                url = f"http://{admin}/admin/pools/{EXPERT}/scale"
                headers = {"content-type": "application/json"}
                request = urllib.request.Request(url, body, headers, method="PUT")
                with urllib.request.urlopen(request, timeout=60) as reply:
                    assert json.load(reply)["wanted"] == wanted
                assert client.values(pool=EXPERT) == (wanted, float(wanted))
                wait_for(
                    f"{wanted} expert servers", lambda: sizes(world, EXPERT) == wanted, world.cluster  # noqa: B023
                )  # fmt: skip
        finally:
            rounds = clients.result()
        for number, texts in enumerate(rounds):
            assert texts == calm, f"round {number} of {len(rounds)}: tokens changed"
