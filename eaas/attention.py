"""The attention worker's process: python -m eaas.attention --router ADDRESS --model FOLDER

It joins the router as a member of the pool "attention", follows the placement, and serves gateways over TCP
once every expert has a replica. One thread runs sockets and engine; the router client's threads keep the
lease and bring placements; the decoder's lanes are native threads.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from eaas import native
from eaas.engine.decoder import Decoder, DecoderError
from eaas.engine.engine import Engine, EngineConfig, StepDecoder
from eaas.engine.scheduler import SchedulerConfig
from eaas.engine.worker import Worker
from eaas.engine.worker_protocol import Hello
from eaas.model.loader import load_spec, load_weights
from experts.checkpoint import Checkpoint
from experts.client import ExpertClient
from experts.kernels import numerics_class
from experts.model import Dtype, ExpertShape
from experts.native import IsaUnavailable, NativeMissing
from experts.pace import Track, load_entries, observe_all
from p2p.cores import named_cores
from p2p.endpoint import P2PError
from p2p.native import NativeMissing as TransportMissing
from p2p.transport import HELP as TRANSPORT_HELP
from p2p.transport import TransportChoice
from router import child
from router.channel import router_address
from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.view import ATTENTION, EXPERT, View

log = logging.getLogger("eaas.attention")

# An orderly end is promised within a second; a step that waits for experts may take far longer.
STUCK_STEP_S = 0.6
BLOCK_TOKENS = 16
COVER_POLL_S = 0.01
WANTED_POLL_S = 1.0
ROUTED_S = 1.0
START_ERRORS = (
    DecoderError,
    IsaUnavailable,
    JoinRefused,
    NativeMissing,
    OSError,
    P2PError,
    RouterUnavailable,
    TransportMissing,
    ValueError,
)


class StartFailed(Exception):
    """The worker cannot start; the text says why and what to do."""


class Stopped(Exception):
    """Told to stop before it was ready."""


def parser() -> argparse.ArgumentParser:
    """The options of this process."""
    options = argparse.ArgumentParser(
        prog="eaas attention",
        description="Compute attention, gates and sampling for gateways; expert servers compute the experts.",
        epilog="Example: eaas attention --router 127.0.0.1:7000 --model ./checkpoint. "
        "Exit codes: 0 stopped by a signal, 1 could not start or was fenced (the log says why), 2 bad usage.",
    )
    options.add_argument(
        "--router", required=True, type=router_address, metavar="HOST:PORT,...", help="address of each router"
    )
    options.add_argument("--model", required=True, type=Path, help="checkpoint folder")
    options.add_argument("--dtype", default="auto", help="auto (default), bfloat16, float32 or int8")
    options.add_argument(
        "--cores", default="", help="cores of the lanes, such as 0,1; default: all that this process may use"
    )
    options.add_argument("--kv-tokens", type=int, default=65536, help="tokens that the KV pool holds")
    options.add_argument("--step-tokens", type=int, default=512, help="most rows computed in one step")
    options.add_argument("--max-running", type=int, default=256, help="most requests that run at once")
    options.add_argument("--deadline-s", type=float, default=30.0, help="longest wait for expert servers")
    options.add_argument("--start-s", type=float, default=110.0, help="longest wait for the first placement")
    options.add_argument(
        "--prefix-reuse",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute a common beginning of prompts once",
    )
    options.add_argument("--transport", default="shm", help=TRANSPORT_HELP)
    options.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 = any (default)")
    child.add_options(options)
    return options


def listen(port: int) -> socket.socket:
    """A listening socket on 127.0.0.1.

    Raises:
        StartFailed: the port is taken, or is none.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise StartFailed(
            f"Port {port} cannot be used: {error}. Choose another with --port (0: any)."
        ) from None
    return listener


class Ending:
    """Ends the process on SIGTERM, SIGINT or a fence: between two steps, or by force when a step is stuck.

    A thread reads the signals from a socket, because Python's own way waits until native code returns.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.code = 0
        self._on_stop: Callable[[str], None] = lambda reason: None
        self._last_words: Callable[[], None] = lambda: None
        self._done = threading.Event()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
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
        self._write.send(bytes([signal.SIGTERM]))

    def done(self) -> None:
        """The orderly end is complete: no force."""
        self._done.set()

    def _wait(self) -> None:
        while self._read.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
            continue
        log.info("stopping pid=%d", os.getpid())
        self.asked.set()
        self._on_stop("fenced" if self.code else "told to stop")
        if not self._done.wait(STUCK_STEP_S):
            log.warning("step_abandoned waited_s=%g", STUCK_STEP_S)
            self._last_words()
            os._exit(self.code)


class Placement:
    """Follows the router's Views: routes go to the expert client, epochs in use are told to the router."""

    def __init__(self, router: RouterClient, client: ExpertClient) -> None:
        self._router = router
        self._client = client
        self._acked = 0

    def apply(self, view: View) -> None:
        """Use a newer View; on the router client's thread."""
        self._client.apply_view(view)
        self.ack()

    def ack(self) -> None:
        """Tell the router which epoch is in use. Any thread; cheap when nothing changed."""
        epoch = self._client.adopted_epoch
        if epoch != self._acked:
            self._acked = epoch
            self._router.ack(epoch)

    def wait(self, timeout_s: float, asked: threading.Event) -> None:
        """Return once every expert has a replica that this process can reach, or the router wants no expert server:
        then requests wait for the pool to grow, each up to its own deadline.

        Raises:
            StartFailed: not within the time.
            Stopped: asked to end.
        """
        end_s = time.monotonic() + timeout_s
        ask_s = 0.0
        while not self._client.covers:
            if asked.wait(COVER_POLL_S):
                raise Stopped
            now_s = time.monotonic()
            if now_s > end_s:
                raise StartFailed(f"After {timeout_s:g} s {self._problem()}")
            if now_s > ask_s:
                ask_s = now_s + WANTED_POLL_S
                if self._none_wanted():
                    return

    def _none_wanted(self) -> bool:
        view = self._router.view
        if view is None or view.pool(EXPERT):
            return False
        try:
            return not self._router.status(timeout_s=WANTED_POLL_S).pools[EXPERT].wanted
        except RouterUnavailable:
            return False

    def _problem(self) -> str:
        view = self._router.view
        if view is None:
            return "the router has shown no placement. See that it runs."
        known = [f"{m.name} ({m.state}, {m.serving_count} experts)" for m in view.pool(EXPERT)]
        return (
            f"some of {view.layers} x {view.experts} experts are on no server that can be reached. Expert "
            f"servers: {', '.join(known) or 'none'}. Start as many as the model needs."
        )


class Load:
    """The load report that goes with each lease renewal."""

    def __init__(self, client: ExpertClient, router: RouterClient) -> None:
        self.engine: Engine | None = None
        self._client, self._router = client, router
        self._routed_s = time.monotonic()
        self._tracks: dict[str, Track] = {}
        self._at_s = time.monotonic()
        self._computed, self._busy_s = 0, 0.0

    def __call__(self) -> dict[str, float]:
        """The engine's load; since the last report busy (0 to 1, the share of time in steps) and tokens_per_s
        (computed, those of prompts too); and the paces of expert servers. Empty without an engine.
        """
        engine = self.engine
        if engine is None:
            return {}
        self._tell_routed()
        now_s, computed, busy_s = time.monotonic(), engine.computed, engine.busy_s
        elapsed_s = max(now_s - self._at_s, 1e-3)
        rate = (computed - self._computed) / elapsed_s
        busy = min(1.0, (busy_s - self._busy_s) / elapsed_s)
        self._at_s, self._computed, self._busy_s = now_s, computed, busy_s
        found = {report.name: report.totals for report in self._client.stats()}
        self._tracks = observe_all(self._tracks, found)
        return {**engine.load(), "busy": busy, "tokens_per_s": rate, **load_entries(self._tracks)}

    def _tell_routed(self) -> None:
        """Rows to each expert go with this renewal: about once a second, which is enough to balance by."""
        now_s = time.monotonic()
        if now_s - self._routed_s < ROUTED_S:
            return
        self._routed_s = now_s
        rows, activated = self._client.take_routed()
        if rows.any():
            self._router.routed(rows, activated)


class ClosingDecoder(StepDecoder, Protocol):
    """A decoder that holds something."""

    def close(self) -> None: ...


def backend() -> tuple[Callable[[Dtype], str], Callable[..., ClosingDecoder]]:
    """Who computes: the name of its arithmetic, and what makes a decoder of (spec, weights, client, cores, ...).

    Native code; where it is missing torch, of which the log has warned.
    """
    if native.load_or_none() is not None:
        return numerics_class, lambda spec, weights, client, cores, **sizes: Decoder(
            spec, weights, client.handle, cores, **sizes
        )
    # Not before it is needed: torch takes seconds and hundreds of megabytes to load.
    from eaas.engine import fallback

    return fallback.numerics_class, lambda spec, weights, client, cores, **sizes: fallback.FallbackDecoder(
        spec, weights, client, **sizes
    )


def prepare(options: argparse.Namespace, ending: Ending, closing: contextlib.ExitStack) -> Worker:
    """Join the router, load the model, wait for the experts, and report readiness.

    Args:
        closing: Takes over everything that must be closed, whatever happens here.

    Raises:
        StartFailed, Stopped, and any of START_ERRORS.
    """
    began_s = time.monotonic()
    cores = named_cores(options.cores)
    new_endpoint = TransportChoice.parse(options.transport).opener()
    kv_blocks = options.kv_tokens // BLOCK_TOKENS
    if kv_blocks < 1 or options.step_tokens < 1 or options.max_running < 1:
        raise StartFailed(
            f"--kv-tokens {options.kv_tokens}, --step-tokens {options.step_tokens}, --max-running "
            f"{options.max_running}: at least {BLOCK_TOKENS}, 1 and 1 are needed."
        )
    checkpoint = Checkpoint.open(options.model)
    spec = load_spec(checkpoint)
    spec = replace(spec, dtype=Dtype.resolve(options.dtype, checkpoint.config))
    shape = ExpertShape.from_config(checkpoint.config)
    weights = load_weights(checkpoint, spec)
    class_of, new_decoder = backend()
    kernels = class_of(spec.dtype)
    listener = closing.enter_context(listen(options.port))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    router = RouterClient(options.router)
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
    closing.callback(leave, router)
    ending.attach(lambda reason: None, lambda: leave(router))
    log.info("joined name=%s incarnation=%d", identity.name, identity.incarnation)
    endpoint = new_endpoint(identity.name, identity.incarnation, len(cores))
    closing.callback(endpoint.close)
    client = ExpertClient(
        endpoint=endpoint,
        shape=shape,
        dtype=spec.dtype,
        model_hash=checkpoint.fingerprint,
        incarnation=identity.incarnation,
        lanes=len(cores),
        cores=cores,
        # Also while no step runs: a retried connection may complete an epoch at any time.
        on_adopted=router.ack,
        max_tokens=options.step_tokens,
        deadline_s=options.deadline_s,
    )
    closing.callback(client.close)
    placement = Placement(router, client)
    load_report = Load(client, router)
    # The lease runs from the join on, and packing the weights may take longer than it lasts.
    router.start(on_view=placement.apply, load=load_report, on_fenced=ending.fenced)
    decoder = new_decoder(spec, weights, client, cores, kv_blocks=kv_blocks, max_rows=options.step_tokens)
    closing.callback(decoder.close)
    engine = load_report.engine = Engine(
        decoder,
        EngineConfig(
            scheduler=SchedulerConfig(
                max_model_len=spec.max_model_len,
                step_tokens=options.step_tokens,
                max_running=options.max_running,
                fingerprint=f"{checkpoint.fingerprint}:{kernels}",
            ),
            kv_blocks=kv_blocks,
            block_tokens=BLOCK_TOKENS,
            vocab=spec.vocab,
            eos_ids=frozenset(spec.eos_ids),
            deadline_s=options.deadline_s,
            prefix_reuse=options.prefix_reuse,
        ),
    )
    hello = Hello(
        name=identity.name,
        incarnation=identity.incarnation,
        model_hash=checkpoint.fingerprint,
        numerics_class=kernels,
        max_model_len=min(spec.max_model_len, kv_blocks * BLOCK_TOKENS),
        vocab=spec.vocab,
        kv_tokens=kv_blocks * BLOCK_TOKENS,
    )
    worker = Worker(engine, hello, listener, between_steps=placement.ack, may_answer=router.lease_held)
    ending.attach(worker.stop, lambda: leave(router))
    placement.wait(options.start_s, ending.asked)
    log.info("ready address=%s start_s=%.2f", address, time.monotonic() - began_s)
    child.tell_ready(options, identity.name, address)
    return worker


def leave(router: RouterClient) -> None:
    """Tell the router that this worker goes; without an answer its lease ends by itself."""
    try:
        router.leave(timeout_s=0.2)
    except RouterUnavailable as error:
        log.info("leave_unanswered error=%s", error)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    child.begin(options)
    ending = Ending()
    with contextlib.ExitStack() as closing:
        closing.callback(ending.done)
        try:
            worker = prepare(options, ending, closing)
        except Stopped:
            log.info("stopped_before_ready")
            return ending.code
        except (StartFailed, *START_ERRORS) as error:
            log.error("cannot_start reason=%s", error)
            child.tell_failed(options, str(error))
            return 1
        worker.run()
    return ending.code


if __name__ == "__main__":
    sys.exit(main())
