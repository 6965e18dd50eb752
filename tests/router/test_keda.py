"""The external scaler as KEDA drives it: a client generated from KEDA's own interface, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.client import RouterClient
from router.journal import JournalUnusable
from router.keda import ExternalScaler, TriggerInvalid, trigger_of
from router.proto import externalscaler_pb2 as pb
from router.state import Config, State
from tests.router.test_service import HOST, SHAPE, RouterProcess, Server, started, until

__all__ = ["started"]

PROTO = Path(__file__).with_name("keda_externalscaler.proto")
# Knows nothing of this repository: it reads JSON lines [method, request], prints what KEDA would have received.
CLIENT = """
import json, sys, threading
import grpc
from google.protobuf.json_format import MessageToDict
import keda_externalscaler_pb2 as pb, keda_externalscaler_pb2_grpc as rpc

stub = rpc.ExternalScalerStub(grpc.insecure_channel(sys.argv[1]))
lock = threading.Lock()

def say(number, **said):
    with lock:
        print(json.dumps({"call": number, **said}), flush=True)

def words(message):
    return MessageToDict(message, always_print_fields_with_no_presence=True)

def call(number, method, request):
    kind = pb.GetMetricsRequest if method == "GetMetrics" else pb.ScaledObjectRef
    try:
        streams = method.startswith("Stream")
        reply = getattr(stub, method)(kind(**request), timeout=None if streams else 30)
        for message in reply if streams else [reply]:
            say(number, reply=words(message))
    except grpc.RpcError as error:
        say(number, code=error.code().name, detail=error.details())

for number, line in enumerate(sys.stdin):
    threading.Thread(target=call, args=(number, *json.loads(line)), daemon=True).start()
"""


class Keda:
    """The generated client at work."""

    def __init__(self, folder: Path, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, address],
            cwd=folder,
            env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: list[dict[str, Any]] = []
        self.calls = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.said.append(json.loads(line))

    def begin(self, method: str, request: dict[str, Any]) -> Callable[[], list[dict[str, Any]]]:
        """Call, and return what gives the answers so far."""
        assert self.process.stdin is not None
        number = self.calls
        self.calls += 1
        self.process.stdin.write(json.dumps([method, request]) + "\n")
        self.process.stdin.flush()
        return lambda: [said for said in self.said if said["call"] == number]

    def ask(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        answers = self.begin(method, request)
        until(answers)
        return answers()[0]

    def values(self, **metadata: str) -> tuple[int, float]:
        """What KEDA does each polling interval: the spec's name, then the metric under that name."""
        ref = {"name": "experts", "namespace": "eaas", "scalerMetadata": metadata}
        (spec,) = self.ask("GetMetricSpec", ref)["reply"]["metricSpecs"]
        metric = {"scaledObjectRef": ref, "metricName": spec["metricName"]}
        (value,) = self.ask("GetMetrics", metric)["reply"]["metricValues"]
        assert value["metricName"] == spec["metricName"]
        return int(value["metricValue"]), value["metricValueFloat"]

    def active(self, **metadata: str) -> bool:
        return self.ask("IsActive", {"scalerMetadata": metadata})["reply"]["result"]


@pytest.fixture
def keda(tmp_path: Path) -> Iterator[Callable[[RouterProcess], Keda]]:
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}"),
            *(f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", PROTO.name),
        ],
        check=True,
    )
    clients: list[Keda] = []

    def start(router: RouterProcess) -> Keda:
        clients.append(Keda(tmp_path, router.address))
        return clients[-1]

    yield start
    for client in clients:
        client.process.kill()
        client.process.wait()


def test_keda_reads_the_wanted_size_of_each_pool(
    started: Callable[..., RouterProcess], keda: Callable[..., Keda]
) -> None:
    router = started("--experts", "3", "--attention", "2")
    client = keda(router)
    spec = client.ask("GetMetricSpec", {"scalerMetadata": {"pool": "expert"}})["reply"]
    assert spec == {"metricSpecs": [{"metricName": "eaas-expert-wanted", "targetSize": "1", "targetSizeFloat": 1.0}]}
    # Keys that KEDA keeps for itself, and those it took from the environment, come along.
    assert client.values(pool="expert", scalerAddress=router.address, enableTLS="false") == (3, 3.0)
    assert client.values(poolFromEnv="attention") == (2, 2.0)
    assert client.active(pool="expert")
    control = RouterClient(router.address)
    control.scale("expert", 5)
    assert client.values(pool="expert") == (5, 5.0)
    control.close()


def test_activity_is_pushed_when_a_pool_goes_to_zero_and_comes_back(
    started: Callable[..., RouterProcess], keda: Callable[..., Keda]
) -> None:
    router = started("--attention", "1")
    client = keda(router)
    stream = client.begin("StreamIsActive", {"scalerMetadata": {"pool": "attention"}})
    until(stream)
    control = RouterClient(router.address)
    for wanted in (0, 2):
        control.scale("attention", wanted)
        until(lambda: stream()[-1]["reply"]["result"] == bool(wanted))  # noqa: B023
        assert client.active(pool="attention") == bool(wanted)
    assert [said["reply"]["result"] for said in stream()] == [True, False, True]
    control.close()


def test_keda_may_scale_by_what_the_members_report(
    started: Callable[..., RouterProcess], keda: Callable[..., Keda]
) -> None:
    router = started("--experts", "2", "--lease-s", "1")
    client = keda(router)
    servers = [Server(router) for _ in range(2)]  # each says that it is busy for a quarter of its time
    busy = {"pool": "expert", "metric": "busy", "target": "0.7"}
    spec = client.ask("GetMetricSpec", {"scalerMetadata": busy})["reply"]["metricSpecs"][0]
    assert spec == {"metricName": "eaas-expert-busy", "targetSize": "1", "targetSizeFloat": 0.7}
    until(lambda: client.values(**busy)[1] == 0.5)
    assert client.values(**busy)[0] == 1, "a KEDA that knows whole numbers alone rounds up, never to nothing"
    assert client.active(**busy)
    assert not client.active(**busy, activation="2")

    gateway = RouterClient(router.address)
    gateway.join(pool="gateway", address="a", pid=3, host=HOST, **SHAPE)
    gateway.start(load=lambda: {"running": 9.0, "waiting": 4.0, "queue_s": 1.5})
    waits = {"pool": "attention", "metric": "waiting", "target": "8"}
    until(lambda: client.values(**waits) == (4, 4.0))
    assert client.values(pool="attention", metric="running", target="8") == (0, 0.0), "they run on workers"
    assert client.active(**waits), "with no worker left, what waits at the gateway wakes the pool"
    assert client.active(**busy, activation="2"), "and the expert servers that it will need"
    for each in servers:
        each.die()
    gateway.close()


def test_a_metric_that_live_members_do_not_tell_is_no_zero(
    started: Callable[..., RouterProcess], keda: Callable[..., Keda]
) -> None:
    router = started("--lease-s", "1")
    client, server = keda(router), Server(router)
    ref = {"scalerMetadata": {"pool": "expert", "metric": "rows_per_s", "target": "100"}}
    metric = {"scaledObjectRef": ref, "metricName": "eaas-expert-rows-per-s"}
    for method, request in (("GetMetrics", metric), ("IsActive", ref)):
        said = client.ask(method, request)
        assert said["code"] == "UNAVAILABLE"
        assert "no member of pool expert reports 'rows_per_s' (members: 1)" in said["detail"]
    server.die()


def test_what_keda_may_do_without_is_unimplemented_and_what_is_wrong_is_named(
    started: Callable[..., RouterProcess], keda: Callable[..., Keda]
) -> None:
    client = keda(started())
    good = {"scalerMetadata": {"pool": "expert"}}
    assert client.ask("StreamMetricSpec", good)["code"] == "UNIMPLEMENTED"
    said = client.ask("GetMetrics", {"scaledObjectRef": good, "metricName": "eaas-expert-busy"})
    assert said["code"] == "INVALID_ARGUMENT"
    assert said["detail"].startswith("metricName 'eaas-expert-busy' found, 'eaas-expert-wanted' needed")
    bad = {"name": "experts", "namespace": "eaas", "scalerMetadata": {"pool": "experts"}}
    for method in ("IsActive", "StreamIsActive", "GetMetricSpec"):
        said = client.ask(method, bad)
        assert said["code"] == "INVALID_ARGUMENT"
        assert said["detail"].startswith("ScaledObject eaas/experts: pool 'experts' found, one of expert,")


def test_a_router_that_no_longer_decides_ends_the_stream_and_tells_no_numbers() -> None:
    states: list[State] = [State(wanted={"expert": 1}), State(wanted={"expert": 1})]

    def state() -> State:
        if not states:
            raise JournalUnusable("another router leads")
        return states.pop()

    async def listen() -> None:
        scaler = ExternalScaler(Config(), state)
        stream = scaler.StreamIsActive(request, call)
        assert (await anext(stream)).result
        for ask in (anext(stream), scaler.IsActive(request, call), scaler.GetMetrics(metric, call)):
            with pytest.raises(JournalUnusable, match="another router leads"):
                await ask

    request = pb.ScaledObjectRef(scalerMetadata={"pool": "expert"})
    metric = pb.GetMetricsRequest(scaledObjectRef=request, metricName="eaas-expert-wanted")
    call: Any = None
    asyncio.run(listen())


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "pool '' found, one of expert, attention needed"),
        ({"pool": "gateway"}, "pool 'gateway' found"),
        ({"pool": "expert", "Metric": "busy"}, "metadata Metric is unknown; known are pool, metric, target"),
        ({"pool": "expert", "metric": "gpu_utilisation", "target": "1"}, "metric 'gpu_utilisation' of pool"),
        ({"pool": "expert", "metric": "kv_use", "target": "1"}, "one of wanted, busy, rows_per_s needed"),
        ({"pool": "expert", "metric": "busy"}, "metric busy without a target found"),
        ({"pool": "expert", "target": "0"}, "target '0' found, a number over 0 needed"),
        ({"pool": "expert", "target": "nan"}, "target 'nan' found, a number from 0 needed"),
        ({"pool": "expert", "target": "inf"}, "target 'inf' found"),
        ({"pool": "expert", "target": "70%"}, "target '70%' found"),
        ({"pool": "expert", "activation": "-1"}, "activation '-1' found"),
    ],
)
def test_each_mistake_in_the_metadata_is_explained(metadata: dict[str, str], message: str) -> None:
    with pytest.raises(TriggerInvalid, match=message.replace("(", r"\(")):
        trigger_of(metadata)


def test_the_whole_target_is_never_zero() -> None:
    trigger = trigger_of({"pool": "attention", "metric": "kv_use", "target": "0.001"})
    assert math.ceil(trigger.target) == 1
