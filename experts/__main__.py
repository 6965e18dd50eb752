"""The expert server's process: python -m experts --router 127.0.0.1:7000 --model DIR (experts.config)"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from experts.accounts import server_totals
from experts.backend import DeviceUnavailable
from experts.checkpoint import Checkpoint, CheckpointInvalid, read_config
from experts.config import CHECKPOINT, PEERS, ExpertOptions
from experts.devices import Device
from experts.faults import SERVER_FAULTS, SelfInflicted
from experts.formats import experts_dtype, stored_as
from experts.kernels import KernelsBroken
from experts.loading import Loader, Opened, wanted_models
from experts.manifest import PackLayout
from experts.model import ConfigInvalid, Dtype, ExpertShape
from experts.native import IsaUnavailable
from experts.pack import PackedExperts, PackUnavailable, layout_of
from experts.proto import experts_pb2, experts_pb2_grpc
from experts.server import ExpertServer, ExpertsService, ServerClosed
from experts.transfer import WeightSender, at_low_priority
from experts.weights import Weights, manifest_from
from experts.wire import WireShape, model_hash_of
from p2p.endpoint import P2PError
from p2p.native import named_cores
from p2p.transport import TransportChoice
from router import child, logs
from router.access import host_port
from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.faults import SERVER_POINTS
from router.heartbeat import Heartbeat
from router.tls import Credentials, RequireRolesThreaded
from router.view import EXPERT, Model, View

log = logging.getLogger("experts")

_ASK_ROUTER_S = 2.0
_WAIT_ROUTER_S = 30.0
_TICK_S = 0.05
# Of the control service, answered and waiting together: 64 clients that attach and as many servers that take weights.
_MOST_CALLS = 128
_LEAVE_S = 0.3
_SPEED_HALF_LIFE_S = 2.0
# Between looks at what is to be opened or closed and cannot be yet, and between tries to open a model.
_AGAIN_S, _REFUSED_S = 1.0, 60.0
_COUNTED_S = 1.0
# A loop that stands so long, while its process neither computes nor reads, hangs: lanes go round every 5 ms, the first
# thread every 50.
_HUNG_S = 0.25
# A host cannot see what its GPU computes, and no pass takes so long: the device is stuck.
_HUNG_DEVICE_S = 5.0
# One that stands so long does so whatever its process does: a batch is 512 rows at most.
_LONGEST_BATCH_S = 30.0
_START_ERRORS = (
    CheckpointInvalid, ConfigInvalid, DeviceUnavailable, IsaUnavailable, JoinRefused, KernelsBroken, OSError,
    P2PError, PackUnavailable, RouterUnavailable, ValueError,
)  # fmt: skip


class StartFailed(Exception):
    """The server cannot start, or a model cannot be opened; the text says why."""


def listen(
    options: ExpertOptions, credentials: Credentials | None, service: ExpertsService, closing: ExitStack
) -> tuple[str, grpc.Server, health.HealthServicer]:
    """Start the control service. Returns the address that others call, itself and the health servicer.

    Raises:
        StartFailed: the port is taken.
    """
    control = grpc.server(
        ThreadPoolExecutor(max_workers=8),
        interceptors=[RequireRolesThreaded()] if credentials is not None else [],
        options=(("grpc.so_reuseport", 0),),
        maximum_concurrent_rpcs=_MOST_CALLS,
    )
    healthy = health.HealthServicer()
    experts_pb2_grpc.add_ExpertsServicer_to_server(service, control)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, control)
    try:
        at = host_port(options.bound_host, options.port)
        bound = control.add_secure_port(at, credentials.server()) if credentials else control.add_insecure_port(at)
    except RuntimeError as error:
        raise StartFailed(
            f"port {options.port} on {options.host} cannot be used ({error}). Choose another, or 0 for any."
        ) from error
    control.start()
    closing.callback(control.stop, 0)
    return host_port(options.told_host, bound), control, healthy


class Load:
    """The load report that goes with each lease renewal."""

    def __init__(self, server: ExpertServer, router: RouterClient, damaged: Callable[[], int] = lambda: 0) -> None:
        """Args: damaged: says how many experts were found damaged after they were loaded."""
        self._server, self._damaged, self._router = server, damaged, router
        shape = server.first.shape
        self._unit = shape.hidden * shape.intermediate / 64
        self._at_s = self._counted_s = time.monotonic()
        self._before = server.counters()
        # Fading sums; their ratio is the speed.
        self._cost = self._busy_lane_s = 0.0

    def __call__(self) -> dict[str, float]:
        """busy (0 to 1 of its lanes), rows_per_s, pairs_per_s, clients; since the last report.

        speed: rows of the first model's experts, and what costs as much, for each second that a lane is busy, over the
        last seconds with work; absent before any.
        """
        now_s, counters = time.monotonic(), self._server.counters()
        if now_s - self._counted_s >= _COUNTED_S:
            self._counted_s = now_s
            self._router.counted([server_totals(counters, self._damaged())])
        elapsed_s = max(now_s - self._at_s, 1e-3)
        before, self._before, self._at_s = self._before, counters, now_s
        # All lanes work on one batch together: the time of batches is that of every lane.
        busy_s = (counters.busy_ns - before.busy_ns) / 1e9
        if busy_s > 0:
            kept = 0.5 ** (elapsed_s / _SPEED_HALF_LIFE_S)
            self._cost = kept * self._cost + (counters.work - before.work) / self._unit
            self._busy_lane_s = kept * self._busy_lane_s + busy_s * len(self._server.cores)
        speed = {"speed": self._cost / self._busy_lane_s} if self._busy_lane_s else {}
        return speed | {
            "busy": min(1.0, busy_s / elapsed_s),
            "rows_per_s": (counters.rows - before.rows) / elapsed_s,
            "pairs_per_s": (counters.pairs - before.pairs) / elapsed_s,
            "clients": float(len(self._server.clients)),
        }


class OtherModels:
    """Opens the pool's models beside the one with which this server joined, and closes those that it has no more.

    In a thread of its own, one at a time: packing takes minutes, in which what is held is read and repaired.
    """

    def __init__(self, name: str, server: ExpertServer, loader: Loader, prepare: Callable[[Model], Opened]) -> None:
        """Args: prepare: finds a model's weights, or packs them, and opens it; raises as `serve`."""
        self._name, self._server, self._loader, self._prepare = name, server, loader, prepare
        self._made: dict[str, Opened] = {}
        self._refused: dict[str, tuple[Model, str, float]] = {}  # why, and until when it is not tried again
        self._view: View | None = None
        self._closed, self._wake = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="expert-models", daemon=True)
        self._thread.start()

    def apply(self, view: View) -> None:
        """Have this View's models open from now on. Does not block."""
        self._view = view
        self._wake.set()

    def close(self) -> None:
        """Open nothing more. Idempotent."""
        self._closed = True
        self._wake.set()
        # No longer: it may be packing for minutes, and holds nothing that others wait for.
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        at_low_priority()
        while not self._closed:
            self._wake.wait(_AGAIN_S if self._made or self._refused else None)
            self._wake.clear()
            if (view := self._view) is None:
                continue
            wanted = {model.hash: model for model in wanted_models(view, self._name)}
            self._refused = {each: why for each, why in self._refused.items() if wanted.get(each) == why[0]}
            for model_hash in self._made.keys() - self._loader.models.keys():
                # One that still has clients is asked again.
                with suppress(ValueError):
                    self._server.close_model(model_hash)
                    del self._made[model_hash]
                    log.info("model_closed hash=%s", model_hash[:16])
            for model in wanted.values():
                if self._view is view and model.hash not in self._loader.models:
                    self._open(model)

    def _open(self, model: Model) -> None:
        _, before, until_s = self._refused.get(model.hash, (model, "", 0.0))
        if time.monotonic() < until_s:
            return
        try:
            if model.hash not in self._made:
                self._made[model.hash] = self._prepare(model)
        except Exception as error:
            # Whatever it is, such as too little memory: without this thread nothing is opened or closed any more.
            known = isinstance(error, (*_START_ERRORS, ServerClosed, StartFailed))
            why = str(error) if known else repr(error)
            self._refused[model.hash] = (model, why, time.monotonic() + _REFUSED_S)
            if why != before and not self._closed:
                log.warning("model_not_opened name=%s reason=%s", model.name, why, exc_info=not known)
            return
        self._loader.open(*self._made[model.hash])
        log.info("model_opened name=%s hash=%s", model.name, model.hash[:16])


class Ending:
    """Why the process ends: a signal, or a fault that makes the exit code 1."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self.fault = ""

    def fail(self, why: str) -> None:
        """End with exit code 1."""
        self.fault = self.fault or why
        self.wanted.set()


def serve(options: ExpertOptions, ending: Ending) -> None:
    """Join, load, serve until told to end. Raises _START_ERRORS or StartFailed."""
    cores = named_cores(options.cores) if options.cores else (-1,)
    device, transport = Device.parse(options.device), TransportChoice.parse(options.transport)
    backend, new_endpoint = device.backend(), device.opener(transport)
    credentials = child.credentials(options, EXPERT)
    checkpoint, config, shape, dtype = _read(options, options.model, device)
    if (stored := stored_as(config)) not in (None, dtype):
        log.info("dequantized stored=%s served=%s device=%s", stored.label, dtype.label, device)
    backend.self_test(dtype)
    kernels = shape.numerics_class(backend.numerics_class(dtype))
    faults = None
    if options.allow_chaos:
        faults = SelfInflicted(kinds=SERVER_FAULTS, points=SERVER_POINTS, rails=transport.named_rails)
    with ExitStack() as closing:
        service = ExpertsService()
        address, control, healthy = listen(options, credentials, service, closing)
        router = RouterClient(options.router, credentials)
        closing.callback(router.close)
        model_hash = checkpoint.fingerprint if checkpoint else router.status(_WAIT_ROUTER_S).view.model_hash
        if not model_hash:
            raise StartFailed(f"the cluster of {router.address} has no model yet. Start a server with a checkpoint.")

        def cluster() -> View | None:
            # A router that is not there yet has no servers to ask.
            with suppress(RouterUnavailable):
                return None if options.weights == CHECKPOINT else router.status(_ASK_ROUTER_S).view

        packed = _packed(layout_of(shape, dtype, model_hash), checkpoint, cluster, credentials)
        wire = WireShape(shape=shape, dtype=dtype, model_hash=model_hash_of(model_hash))
        identity = router.join(
            pool=EXPERT,
            address=address,
            model_hash=model_hash,
            numerics_class=kernels,
            layers=shape.layers,
            experts=shape.experts,
            capacity=backend.reserve(wire),
            core=cores[0],
            zone=options.zone,
            expert_bytes=packed.layout.blob_bytes,
        )
        closing.callback(router.leave, timeout_s=_LEAVE_S)
        endpoint = new_endpoint(identity.name, identity.incarnation, len(cores))
        closing.callback(endpoint.close)
        server = ExpertServer(
            endpoint=endpoint,
            shape=shape,
            dtype=dtype,
            model_hash=model_hash,
            cores=cores,
            slots=options.slots,
            backend=backend,
            config=json.dumps(config).encode(),
        )
        closing.callback(server.close)

        def weights_of(packed: PackedExperts, checkpoint: Checkpoint | None) -> Weights:
            return Weights(
                name=identity.name,
                packed=packed,
                endpoint=None if options.weights == CHECKPOINT else endpoint,
                checkpoint=checkpoint,
                credentials=credentials,
            )

        def prepare(model: Model) -> Opened:
            if device.runs_kernels:
                raise StartFailed("a GPU serves one model. Start servers on CPUs for this one.")
            checkpoint, config, shape, dtype = _read(options, Path(model.path), device)
            found = shape.numerics_class(backend.numerics_class(dtype))
            if found != kernels:
                raise StartFailed(f"its experts are computed in {found}, and here in {kernels} alone.")
            said = (checkpoint.fingerprint if checkpoint else model.hash, shape.layers, shape.experts)
            if said != (model.hash, model.layers, model.experts):
                raise StartFailed(f"{model.path} holds another model here than the pool's {model.hash[:16]}.")
            packed = _packed(layout_of(shape, dtype, model.hash), checkpoint, cluster, credentials)
            encoded = json.dumps(config).encode()
            held = server.open_model(shape=shape, dtype=dtype, model_hash=model.hash, config=encoded)
            return Opened(held, weights_of(packed, checkpoint))

        loader = Loader(
            name=identity.name,
            server=server.first,
            weights=weights_of(packed, checkpoint),
            report=router.loaded,
            failed=ending.fail,
        )
        others = OtherModels(identity.name, server, loader, prepare)
        sender = WeightSender(
            endpoint=endpoint,
            packed=lambda: [each.weights.packed for each in loader.models.values()],
            serves=loader.holds,
        )
        closing.callback(sender.close)
        # Last in is first out: whoever calls the server from outside has gone when it is freed.
        closing.callback(_stop_serving, service, control, router)
        closing.callback(loader.close)
        closing.callback(others.close)

        server.set_lease(_lease_end_ns(identity.lease_s))
        service.sender, service.server = sender, server
        server.start()
        # Of this thread: it alone extends the native lease, without which nothing is answered.
        turns = 0
        heartbeat = Heartbeat(
            server.turns,
            lambda: turns,
            bound_s=_HUNG_DEVICE_S if device.runs_kernels else _HUNG_S,
            longest_s=_LONGEST_BATCH_S,
            on_change=router.renew_now,
        )
        closing.callback(heartbeat.close)

        def fenced(reason: str) -> None:
            if heartbeat.stands_s:
                _end_at_once(reason)
            server.set_lease(0)
            ending.fail(reason)

        def follow(view: View) -> None:
            # The loader first: it must know of a model that is opened for this View.
            loader.apply(view)
            others.apply(view)

        router.start(
            on_view=follow,
            load=Load(server, router, lambda: loader.damaged),
            on_fenced=fenced,
            on_drained=ending.wanted.set,
            faults=faults,
            heartbeat=heartbeat,
        )
        if device.runs_kernels and not _first_pass(server, ending):
            # Compiling cannot be broken off: whoever waited for its end would end late.
            router.leave(timeout_s=_LEAVE_S)
            logs.end_at_once(int(bool(ending.fault)))
        # Not before: what it holds is asked for at once.
        loader.start()
        healthy.set(
            experts_pb2.DESCRIPTOR.services_by_name["Experts"].full_name, health_pb2.HealthCheckResponse.SERVING
        )
        healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        log.info("ready name=%s address=%s isa=%s", identity.name, address, kernels)
        child.tell_ready(options, identity.name, address)
        heartbeat.start()
        while not ending.wanted.wait(_TICK_S):
            turns += 1
            if server.broken:
                ending.fail(server.broken)
                continue
            # Half a lease: native code stops by itself when this process slept, whoever wakes first. From before the
            # look: between the two it may sleep as well.
            end_ns = _lease_end_ns(identity.lease_s / 2)
            if router.lease_held():
                server.set_lease(end_ns)
            server.reap()
        healthy.enter_graceful_shutdown()
        if heartbeat.stands_s:
            _end_at_once(ending.fault or "a loop of it stands still")


def _first_pass(server: ExpertServer, ending: Ending) -> bool:
    """Wait until the kernels are compiled, and passes run; whether they do before the process is to end.

    Raises:
        StartFailed: they never will.
    """
    while server.turns() is None:
        if server.broken:
            raise StartFailed(server.broken)
        if ending.wanted.wait(_TICK_S):
            return False
    return True


def _end_at_once(reason: str) -> NoReturn:
    """End a process of which a thread hangs: what that holds is never let go, so that no orderly end would end."""
    log.error("ended reason=%s", reason)
    logs.end_at_once(1)


def _read(
    options: ExpertOptions, model: Path, device: Device
) -> tuple[Checkpoint | None, dict[str, Any], ExpertShape, Dtype]:
    """A model's checkpoint, where weights may be had from it, its config.json, and its experts' shape and type here."""
    checkpoint = None if options.weights == PEERS else Checkpoint.open(model)
    config = checkpoint.config if checkpoint else read_config(model)
    shape = ExpertShape.from_config(config)
    return checkpoint, config, shape, experts_dtype(options.dtype, config, device.keeps)


def _packed(
    layout: PackLayout, checkpoint: Checkpoint | None, ask: Callable[[], View | None], credentials: Credentials | None
) -> PackedExperts:
    """This host's packed file: as it is; else begun with what a server of the cluster says; else packed here."""
    if found := PackedExperts.find(layout):
        return found
    if (view := ask()) and (manifest := manifest_from(view, layout, credentials)):
        return PackedExperts.begin(manifest)
    if checkpoint:
        return PackedExperts.open(checkpoint, layout.shape, layout.dtype, progress=_log_progress)
    raise StartFailed(
        f"no server of the cluster gives weights of model {layout.fingerprint[:16]} in {layout.numerics_class}."
        " Start one with a checkpoint, or wait until one serves."
    )


def _lease_end_ns(lease_s: float) -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(lease_s * 1e9)


def _log_progress(done: int, total: int) -> None:
    if done == total or done % max(1, total // 20) == 0:
        log.info("packing done=%d total=%d", done, total)


def _stop_serving(service: ExpertsService, control: grpc.Server, router: RouterClient) -> None:
    service.sender = service.server = None
    stopped = control.stop(0)
    router.leave(timeout_s=_LEAVE_S)
    router.close()
    # A call that was cut off still runs to its end; one that awaits a frozen client is not worth the wait.
    stopped.wait(_LEAVE_S)


def main(options: ExpertOptions) -> int:
    """Serve until told to end. Raises as `serve` does. Returns the exit code."""
    ending = Ending()
    child.on_signals(ending.wanted.set, signal.SIGTERM, signal.SIGINT)
    serve(options, ending)
    # Python takes its handlers away while it ends; one more SIGTERM would then look like a crash.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if ending.fault:
        log.error("ended reason=%s", ending.fault)
        return 1
    return 0


if __name__ == "__main__":
    refusals = (*_START_ERRORS, StartFailed)
    sys.exit(child.start("expert", ExpertOptions, main, refusals, orphaned=signal.SIGKILL))
