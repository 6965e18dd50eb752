"""KEDA's external scaler: the router's numbers for a Kubernetes autoscaler that adds and takes away the processes.

Keys of a trigger's metadata, beside those that KEDA keeps for itself (`scalerAddress`, `enableTLS`, ...):

    pool        "expert" or "attention"; of another model than the first "attention:NAME". Needed.
    metric      "wanted" (the size that the router wants; default) or a load word of the pool's members.
    target      How much of the metric one process should have: the autoscaler asks for ceil(metric / target).
                Default 1 for "wanted", needed for any other.
    activation  A pool at zero comes up once the metric is over this. Default 0.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import grpc

from router.models import groups
from router.pools import pool_load, pool_size
from router.proto import externalscaler_pb2 as pb
from router.proto import externalscaler_pb2_grpc as rpc
from router.state import Config, State
from router.view import ATTENTION, EXPERT

SERVICE = "externalscaler.ExternalScaler"
WANTED = "wanted"
# Never how much a GPU is used: one that waits in a loop for its next request is always full.
METRICS: Mapping[str, tuple[str, ...]] = {
    EXPERT: (WANTED, "busy", "rows_per_s"),
    ATTENTION: (
        *(WANTED, "busy", "running", "waiting", "backlog_tokens", "queue_s", "kv_use", "tokens_per_s"),
        *("ttft_p99_s", "tpot_p99_s"),
    ),
}
_OURS = ("pool", "metric", "target", "activation")
# KEDA passes the whole metadata on, its own part included.
_KEDAS = (*("scalerAddress", "enableTLS", "unsafeSsl", "caCert", "tlsClientCert", "tlsClientKey"), "tlsCertFile")
_FROM_ENV = "FromEnv"
# How often a pushed answer is looked at; KEDA's own polling is 30 s.
_LOOK_S = 0.25

Context = grpc.aio.ServicerContext


class TriggerInvalid(ValueError):
    """A trigger's metadata makes no sense: found, needed, what to do."""


class NothingReported(RuntimeError):
    """No member tells the metric, so nobody may scale by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger:
    """What one trigger of a ScaledObject asks for."""

    pool: str
    metric: str = WANTED
    target: float = 1.0
    activation: float = 0.0

    @property
    def name(self) -> str:
        """The metric's name in Kubernetes."""
        return re.sub("[^A-Za-z0-9]", "-", f"eaas-{self.pool}-{self.metric}")

    def value(self, config: Config, state: State) -> float:
        """The metric now. Raises NothingReported."""
        if self.pool not in groups(state):
            raise NothingReported(f"no pool {self.pool}; there are {', '.join(groups(state))}: set metadata `pool`")
        size = pool_size(config, state, self.pool)
        if self.metric == WANTED:
            return float(size.wanted)
        load = pool_load(state, self.pool)
        if self.metric not in load and size.live:
            raise NothingReported(
                f"no member of pool {self.pool} reports {self.metric!r} (members: {size.live}); "
                f"wait for their next renewal, or scale by another metric"
            )
        return load.get(self.metric, 0.0)

    def is_active(self, config: Config, state: State) -> bool:
        """True if the pool may not be at zero: by its metric, or because requests run or wait for it."""
        if self.metric == WANTED:
            return self.value(config, state) > self.activation
        # Expert servers are every model's.
        asking = groups(state) if self.pool == EXPERT else (self.pool,)
        loads = [pool_load(state, name) for name in asking if name != EXPERT]
        if any(load.get("running", 0.0) + load.get("waiting", 0.0) > 0 for load in loads):
            return True
        return self.value(config, state) > self.activation


def trigger_of(metadata: Mapping[str, str]) -> Trigger:
    """The trigger in a ScaledObject's metadata. Raises TriggerInvalid."""
    given = {key.removesuffix(_FROM_ENV): value for key, value in metadata.items()}
    unknown = sorted(given.keys() - {*_OURS, *_KEDAS})
    if unknown:
        raise TriggerInvalid(f"metadata {', '.join(unknown)} is unknown; known are {', '.join(_OURS)}")
    pool = given.get("pool", "")
    base = pool.partition(":")[0] if pool.startswith(f"{ATTENTION}:") else pool
    if base not in METRICS:
        raise TriggerInvalid(f"pool {pool!r} found, one of {', '.join(METRICS)} needed: set metadata `pool`")
    metric = given.get("metric", WANTED)
    if metric not in METRICS[base]:
        raise TriggerInvalid(
            f"metric {metric!r} of pool {pool} found, one of {', '.join(METRICS[base])} needed: "
            f"set metadata `metric`, or leave it out for `{WANTED}`"
        )
    if metric != WANTED and "target" not in given:
        raise TriggerInvalid(
            f"metric {metric} without a target found: set metadata `target`, how much one process should have"
        )
    target = _number(given, "target", 1.0)
    if target <= 0:
        raise TriggerInvalid(f"target {given['target']!r} found, a number over 0 needed: set metadata `target`")
    activation = _number(given, "activation", 0.0)
    return Trigger(pool=pool, metric=metric, target=target, activation=activation)


def _number(given: Mapping[str, str], key: str, default: float) -> float:
    if key not in given:
        return default
    try:
        number = float(given[key])
    except ValueError:
        number = math.nan
    # KEDA counts in thousandths of 64 bits.
    if not 0 <= number <= 2**53:
        raise TriggerInvalid(f'{key} {given[key]!r} found, a number from 0 needed, such as "0.7": set metadata `{key}`')
    return number


class ExternalScaler(rpc.ExternalScalerServicer):
    """Answers KEDA from the router's present state. What it raises is turned into a status by who serves it."""

    def __init__(self, config: Config, state: Callable[[], State]) -> None:
        """Args: state: raises JournalUnusable while this router does not decide: then nobody is told anything."""
        self._config = config
        self._state = state

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=_trigger(request).is_active(self._config, self._state()))

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> AsyncIterator[pb.IsActiveResponse]:
        trigger, told = _trigger(request), None
        while True:
            active = trigger.is_active(self._config, self._state())
            if active != told:
                told = active
                yield pb.IsActiveResponse(result=active)
            await asyncio.sleep(_LOOK_S)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        trigger = _trigger(request)
        spec = pb.MetricSpec(
            metricName=trigger.name, targetSize=math.ceil(trigger.target), targetSizeFloat=trigger.target
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        trigger = _trigger(request.scaledObjectRef)
        if request.metricName != trigger.name:
            raise TriggerInvalid(
                f"metricName {request.metricName!r} found, {trigger.name!r} needed, as GetMetricSpec says"
            )
        value = trigger.value(self._config, self._state())
        whole = min(math.ceil(value), 2**63 - 1)
        metric = pb.MetricValue(metricName=trigger.name, metricValue=whole, metricValueFloat=value)
        return pb.GetMetricsResponse(metricValues=[metric])


def _trigger(request: pb.ScaledObjectRef) -> Trigger:
    try:
        return trigger_of(request.scalerMetadata)
    except TriggerInvalid as error:
        who = f"ScaledObject {request.namespace}/{request.name}: " if request.name else ""
        raise TriggerInvalid(f"{who}{error}") from None
