"""The attention worker's process: python -m eaas.worker --router ADDRESS --model FOLDER (eaas.worker.config).

It joins the router as a member of the pool "attention", follows the placement, and serves gateways over TCP
once every expert has a replica. One thread runs sockets and engine; the router client's threads keep the
lease and bring placements; the decoder's lanes are native threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from eaas.model.loader import load_spec, load_weights
from eaas.placement import Placement, StartFailed, Stopped
from eaas.tracing import open_tracing, version
from eaas.worker.config import BLOCK_TOKENS, NO_DRAFTS, NO_OVERLAP, WorkerOptions, drafts_of
from eaas.worker.constraint import Grammars
from eaas.worker.decoder import Decoder, DecoderError
from eaas.worker.engine import LEAST_WAIT, Engine, EngineConfig
from eaas.worker.inspector import Inspector
from eaas.worker.loop import MOST_REST_S, STUCK_MARGIN_S, Worker
from eaas.worker.protocol import Hello
from eaas.worker.sinks import opened
from eaas.worker.tls_listener import TlsListener
from experts.backend import DeviceUnavailable
from experts.checkpoint import Checkpoint
from experts.client import ExpertClient
from experts.devices import Device
from experts.faults import CLIENT_FAULTS, SelfInflicted
from experts.formats import experts_dtype
from experts.model import Dtype, ExpertShape
from experts.native import IsaUnavailable
from p2p import native as p2p_native
from p2p.endpoint import Endpoint, P2PError
from p2p.native import named_cores
from p2p.transport import TransportChoice
from router import child, logs
from router.access import host_port
from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.faults import CLIENT_POINTS
from router.heartbeat import Heartbeat, OwnTime
from router.view import ATTENTION

if TYPE_CHECKING:
    from eaas.gpu.decoder import GpuDecoder

log = logging.getLogger("eaas.attention")

_LEAVE_S = 0.2
# An orderly end is promised within a second; a step that waits for experts may take far longer.
STUCK_STEP_S = 0.6
# A loop that stands so long, while its process neither computes nor reads, hangs: it goes round 4 times a second
# without work, and 200 times while it waits for expert servers.
HUNG_S = 0.6
START_ERRORS = (
    DecoderError, DeviceUnavailable, IsaUnavailable, JoinRefused, OSError, P2PError, RouterUnavailable, ValueError,
)  # fmt: skip


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on an IP address. Raises StartFailed: the port is taken, or is none."""
    family, both = (socket.AF_INET6, True) if ":" in host else (socket.AF_INET, False)
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise StartFailed(f"Port {port} cannot be used: {error}. Choose another with --port (0: any).") from None


class Ending:
    """Ends the process on SIGTERM, SIGINT or a fence: between two steps, or by force when a step is stuck."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.code = 0
        self._on_stop: Callable[[str], None] = lambda reason: None
        self._last_words: Callable[[], None] = lambda: None
        self._done = threading.Event()
        self._wanted = threading.Event()
        child.on_signals(self._wanted.set, signal.SIGTERM, signal.SIGINT)
        threading.Thread(target=self._wait, name="ending", daemon=True).start()

    def attach(self, on_stop: Callable[[str], None], last_words: Callable[[], None]) -> None:
        """Say what to call when the process is to end, and what before an end by force."""
        self._on_stop, self._last_words = on_stop, last_words
        if self.asked.is_set():
            on_stop("told to stop")

    def fenced(self, reason: str) -> None:
        """The router has ended this membership: nothing that this process says counts any more."""
        log.error("fenced reason=%s", reason)
        self.code = 1
        self._wanted.set()

    def drained(self) -> None:
        """The router had ordered this worker to drain, and nothing runs here any more: an orderly end."""
        self._wanted.set()

    def done(self) -> None:
        """The orderly end is complete: no force."""
        self._done.set()
        # Python takes its handlers away while it ends; one more SIGTERM would then look like a crash.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _wait(self) -> None:
        self._wanted.wait()
        log.info("stopping pid=%d", os.getpid())
        self.asked.set()
        self._on_stop("fenced" if self.code else "told to stop")
        if not self._done.wait(STUCK_STEP_S):
            log.warning("step_abandoned waited_s=%g", STUCK_STEP_S)
            self._last_words()
            logs.end_at_once(self.code)


class Load:
    """The load report that goes with each lease renewal."""

    def __init__(self, client: ExpertClient, router: RouterClient, placement: Placement) -> None:
        self.engine: Engine | None = None
        self.worker: Worker | None = None
        self._placement = placement
        self._client, self._router = client, router
        self._at_s = time.monotonic()
        self._computed, self._busy_s = 0, 0.0

    def __call__(self) -> dict[str, float]:
        """The engine's load; since the last report busy (0 to 1, the share of time in steps) and tokens_per_s
        (computed, those of prompts too); and the paces of expert servers. Empty without an engine."""
        self._placement.judge()
        engine = self.engine
        if engine is None:
            return {}
        if self._placement.tell_routed():
            mine, *links = self._client.totals()
            self._router.counted([replace(mine, counted={**mine.counted, **engine.totals()}), *links])
        now_s, computed, busy_s = time.monotonic(), engine.computed, engine.busy_s
        elapsed_s = max(now_s - self._at_s, 1e-3)
        rate = (computed - self._computed) / elapsed_s
        busy = min(1.0, (busy_s - self._busy_s) / elapsed_s)
        self._at_s, self._computed, self._busy_s = now_s, computed, busy_s
        return {**engine.load(), "busy": busy, "tokens_per_s": rate, **self._client.load()}

    def turns(self, endpoint: Endpoint) -> int | None:
        """What rises while the worker's loop goes on, also while it waits for expert servers; None before it runs."""
        turns = self.worker.turns if self.worker is not None else None
        return None if turns is None else turns + p2p_native.load().p2p_bell_heartbeat(endpoint.page_address)


def decoding(device: Device, overlap: bool, drafts: int, taps: bool) -> Callable[..., Decoder | GpuDecoder]:
    """What makes a decoder of (spec, weights, client, cores, ...). Args: taps: rows may be recorded.

    Raises:
        ValueError: a CPU is to overlap two halves of a step, or a GPU to compute drafts.
    """
    if not device.runs_kernels:
        if overlap:
            raise ValueError(NO_OVERLAP)
        return lambda spec, weights, client, cores, **sizes: Decoder(spec, weights, client.handle, cores, **sizes)
    if drafts:
        raise ValueError(NO_DRAFTS)
    from eaas.gpu.decoder import GpuDecoder

    return lambda spec, weights, client, cores, **sizes: GpuDecoder(
        spec, weights, client.backend, device=client.backend.device, double_batching=overlap, taps=taps, **sizes
    )


def warm(decoder: GpuDecoder, asked: threading.Event) -> None:
    """Make steps of every size ready: the first request of one would wait for its kernels, and all others with it.

    Raises:
        Stopped: asked to end.
    """
    began_s = time.monotonic()
    for number, rows in enumerate(decoder.sizes, 1):
        if asked.is_set():
            raise Stopped
        decoder.warm([rows])
        taken_s = time.monotonic() - began_s
        log.info("warmed rows=%d done=%d total=%d warm_s=%.1f", rows, number, len(decoder.sizes), taken_s)


def prepare(options: WorkerOptions, ending: Ending, closing: contextlib.ExitStack) -> Worker:
    """Join the router, load the model, wait for the experts, and report readiness.

    Args:
        closing: Takes over everything that must be closed, whatever happens here.

    Raises:
        StartFailed, Stopped, and any of START_ERRORS.
    """
    began_s = time.monotonic()
    cores = named_cores(options.cores)
    device, transport = Device.parse(options.device), TransportChoice.parse(options.transport)
    backend, new_endpoint = device.backend(), device.opener(transport)
    faults = None
    if options.allow_chaos:
        faults = SelfInflicted(kinds=CLIENT_FAULTS, points=CLIENT_POINTS, rails=transport.named_rails)
    kv_blocks = options.kv_tokens // BLOCK_TOKENS
    checkpoint = Checkpoint.open(options.model)
    spec = load_spec(checkpoint)
    spec = replace(spec, dtype=Dtype.resolve(options.dtype, checkpoint.config))
    max_model_len = spec.context(options.max_model_len)
    shape = ExpertShape.from_config(checkpoint.config)
    dtype = experts_dtype(options.dtype, checkpoint.config, device.keeps)
    weights = load_weights(checkpoint, spec)
    # Before there is a lease to renew: a large vocabulary takes seconds in which nothing else runs.
    drafts = drafts_of(options.speculate)
    grammars = Grammars.open(options.model, spec.vocab, spec.eos_ids, drafts)
    if grammars is not None:
        closing.callback(grammars.close)
    new_decoder = decoding(device, options.overlap, drafts, options.inspect_folder is not None)
    # The one name says both: how experts are computed, and the rest in the type of their rows.
    kernels = shape.numerics_class(backend.numerics_class(dtype))
    credentials = child.credentials(options, ATTENTION)
    listener = closing.enter_context(listen(options.bound_host, options.port))
    address = host_port(options.told_host, listener.getsockname()[1])
    door = listener
    if credentials is not None:
        door = closing.enter_context(contextlib.closing(TlsListener(listener, credentials)))
    router = RouterClient(options.router, credentials)
    closing.callback(router.close)
    identity = router.join(
        pool=ATTENTION,
        address=address,
        model_hash=checkpoint.fingerprint,
        numerics_class=kernels,
        layers=shape.layers,
        experts=shape.experts,
        core=cores[0],
    )
    leave = partial(router.leave, timeout_s=_LEAVE_S)
    closing.callback(leave)
    ending.attach(lambda reason: None, leave)
    log.info("joined name=%s incarnation=%d", identity.name, identity.incarnation)
    tracing = open_tracing(options.trace_url, service="eaas-attention", instance=identity.name, version=version())
    if tracing is not None:
        closing.callback(tracing.close)
    endpoint = new_endpoint(identity.name, identity.incarnation, len(cores))
    closing.callback(endpoint.close)
    client = ExpertClient(
        endpoint=endpoint,
        shape=shape,
        dtype=dtype,
        model_hash=checkpoint.fingerprint,
        incarnation=identity.incarnation,
        cores=cores,
        # Also while no step runs: a retried connection may complete an epoch at any time.
        on_adopted=router.ack,
        max_tokens=options.step_tokens,
        deadline_s=options.deadline_s,
        backend=backend,
        credentials=credentials,
        # A step that waits for lost experts holds up every other request.
        patience_s=options.deadline_s * LEAST_WAIT,
        weight=options.pool_weight,
    )
    closing.callback(client.close)
    placement = Placement(router, client, kernels, obsolete_s=options.deadline_s, on_obsolete=ending.drained)
    load_report = Load(client, router, placement)
    own_time = OwnTime()
    # Only who waits on a doorbell of its own can be seen to wait.
    longest_s = options.deadline_s + STUCK_MARGIN_S
    seen_waiting = endpoint.page_address and not device.runs_kernels
    heartbeat = Heartbeat(
        lambda: load_report.turns(endpoint),
        bound_s=HUNG_S if seen_waiting else longest_s,
        longest_s=longest_s,
        on_change=router.renew_now,
        own_time=own_time,
    )
    heartbeat.start()
    closing.callback(heartbeat.close)
    # The lease runs from the join on; packing the weights, and compiling kernels, may take longer than it lasts.
    router.start(
        on_view=placement.apply,
        load=load_report,
        on_fenced=ending.fenced,
        on_drained=ending.drained,
        faults=faults,
        heartbeat=heartbeat,
    )
    decoder = new_decoder(spec, weights, client, cores, kv_blocks=kv_blocks, max_rows=options.step_tokens)
    closing.callback(decoder.close)
    if not isinstance(decoder, Decoder):
        warm(decoder, ending.asked)
    engine = load_report.engine = Engine(
        decoder,
        EngineConfig(
            max_model_len=max_model_len,
            step_tokens=options.step_tokens,
            max_running=options.max_running,
            background_rows=options.background_rows,
            prefill_share=options.prefill_share,
            drafts=drafts,
            fingerprint=f"{checkpoint.fingerprint}:{kernels}",
            kv_blocks=kv_blocks,
            block_tokens=BLOCK_TOKENS,
            vocab=spec.vocab,
            eos_ids=frozenset(spec.eos_ids),
            deadline_s=options.deadline_s,
            prefix_reuse=options.prefix_reuse,
        ),
        clock=own_time,
        grammars=grammars,
        wake=lambda: worker.wake(),
    )
    # Not before: which class of servers answers is part of what a gateway is told.
    placement.wait(options.start_s, ending.asked)
    hello = Hello(
        name=identity.name,
        incarnation=identity.incarnation,
        model_hash=checkpoint.fingerprint,
        numerics_class=placement.numerics_class,
        max_model_len=min(max_model_len, kv_blocks * BLOCK_TOKENS),
        vocab=spec.vocab,
        kv_tokens=kv_blocks * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
    )
    spans = None
    if tracing is not None:
        from eaas.spans import WorkerSpans

        spans = WorkerSpans(tracing, engine)
    if options.inspect_folder is not None:
        name = f"{identity.name}.{identity.incarnation}"
        open_sink = partial(opened, options.inspect_folder, name, checkpoint.fingerprint, spans)
        engine.inspect(Inspector(spec, decoder, options.step_tokens, open_sink))
    worker = Worker(
        engine,
        hello,
        door,
        before_step=placement.rouse,
        between_steps=placement.ack,
        may_answer=router.lease_held,
        spans=spans,
        elsewhere=lambda: placement.elsewhere,
        stands=lambda: heartbeat.stands_s > 0,
        clock=own_time,
        rest_s=MOST_REST_S if isinstance(decoder, Decoder) else 0.0,
    )
    load_report.worker = worker
    ending.attach(worker.stop, leave)
    log.info("ready address=%s start_s=%.2f", address, time.monotonic() - began_s)
    child.tell_ready(options, identity.name, address)
    return worker


def main(options: WorkerOptions) -> int:
    """Serve until told to end. Raises StartFailed. Returns the exit code."""
    ending = Ending()
    with contextlib.ExitStack() as closing:
        closing.callback(ending.done)
        try:
            worker = prepare(options, ending, closing)
        except Stopped:
            log.info("stopped_before_ready")
            return ending.code
        except START_ERRORS as error:
            raise StartFailed(str(error)) from error
        worker.run()
    return ending.code


if __name__ == "__main__":
    sys.exit(child.start("attention", WorkerOptions, main, (StartFailed,), orphaned=signal.SIGKILL))
