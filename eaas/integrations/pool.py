"""A membership in an expert pool, for a program that has everything of a model but its experts.

It is what an attention worker is to expert servers: it follows the router's placement, has its rows computed by
whichever replica lives, and acknowledges epochs, so that nothing that it may still ask for is unloaded. A process that
was frozen for longer than its lease is no member any more; it becomes a new one with its next call.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eaas.placement import Placement, StartFailed
from experts.client import ExpertClient
from experts.model import Dtype, ExpertShape
from p2p.endpoint import P2PError
from p2p.transport import TransportChoice
from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.tls import Credentials, CredentialsInvalid
from router.view import CLIENT, EXPERT, Identity, View, carrier_of, covering

log = logging.getLogger(__name__)

START_S = 60.0
LEAVE_S = 0.2
_TOLD_S = 2.0
LEASE_POLL_S = 0.005
# 1,024 rows of 7,168 bfloat16 are 14 MB, which go in chunks that fit the windows.
MOST_ROWS = 1024
_CPU = "cpu"

Rows = NDArray[np.float32] | NDArray[np.uint16]


class ConnectFailed(RuntimeError):
    """The pool cannot be joined; the text says what was found, what is needed and what to do."""


class ExpertPool:
    """The experts of one model, computed elsewhere. For use from any thread; close it when done.

    Attributes:
        shape: Of the experts.
        router: Address of the pool's router.
        transport: How rows travel.
        credentials: What this process proves itself with; None: nothing.
    """

    def __init__(
        self,
        router: str,
        shape: ExpertShape,
        *,
        fingerprint: str = "",
        transport: str = "shm",
        tls_dir: str | Path | None = None,
        deadline_s: float = 30.0,
        start_s: float = START_S,
    ) -> None:
        """Join, and wait until every expert can be reached.

        Args:
            router: host:port of the router; of several, all with commas between.
            shape: Of the experts that the caller's model needs.
            fingerprint: Of the caller's checkpoint; empty: not compared with the pool's.
            transport: As the pool's.
            tls_dir: Folder with ca.pem, cert.pem and key.pem of the role `client`; None: the cluster has no TLS.
            deadline_s: Longest wait of one call for experts that are lost.
            start_s: Longest wait for the pool to be there and whole.

        Raises:
            ConnectFailed: no such pool, it serves another model, or the certificate cannot be used.
        """
        try:
            self.credentials = Credentials(Path(tls_dir), CLIENT) if tls_dir is not None else None
        except CredentialsInvalid as error:
            raise ConnectFailed(str(error)) from error
        self.shape = shape
        self.deadline_s = deadline_s
        self.router, self.transport, self._fingerprint = router, transport, fingerprint
        self._lock = threading.Lock()
        self._closed = False
        self._session = _Session(self, start_s)

    @property
    def dtype(self) -> Dtype:
        """That the pool computes in."""
        return self._session.dtype

    def exchange(
        self, layer: int, rows: Rows, ids: NDArray[np.uint16], weights: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Have rows computed by their experts, and added up with their weights, in float32 and in the order of k.

        Args:
            layer: Counted over MoE layers.
            rows: [n, hidden], any n; float32, or bfloat16 as uint16, as `dtype` says.
            ids: [n, top_k] experts.
            weights: [n, top_k].

        Returns:
            [n, hidden].

        Raises:
            ExpertsLost: no live replica of some expert answered within `deadline_s`. The call may be made again.
            ConnectFailed: this process had lost its membership, and cannot have another.
            ValueError: a shape, layer or expert id is wrong.
        """
        session = self._live_session()
        with session.call():
            parts = [
                session.client.exchange(layer, rows[at:end], ids[at:end], weights[at:end])
                for at, end in ((at, at + MOST_ROWS) for at in range(0, len(rows), MOST_ROWS))
            ]
        if not parts:
            return np.zeros((0, self.shape.hidden), np.float32)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Leave the pool. No call may be running, nor come. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._session.close()

    def __enter__(self) -> ExpertPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self, view: View, start_s: float) -> str:
        """Compare the pool with what this model needs; the numerics class that it computes in.

        Raises:
            ConnectFailed: they differ.
        """
        shape = self.shape
        servers = [member for member in view.pool(EXPERT) if member.numerics_class]
        if not servers:
            raise ConnectFailed(
                f"The router at {self.router} knows no expert server after {start_s:g} s. Start some: eaas pool MODEL."
            )
        if (view.layers, view.experts) != (shape.layers, shape.experts):
            raise ConnectFailed(
                f"The pool at {self.router} serves {view.layers} layers of {view.experts} experts, this model has"
                f" {shape.layers} of {shape.experts}. Start a pool from this model's checkpoint."
            )
        if self._fingerprint and view.model_hash and self._fingerprint != view.model_hash:
            raise ConnectFailed(
                f"The pool at {self.router} serves the checkpoint {view.model_hash[:16]}, this model was loaded from"
                f" {self._fingerprint[:16]}. Start the pool and load the model from the same folder."
            )
        found = [member.numerics_class for member in servers]
        usable = [name for name in found if carrier_of(name) == _CPU]
        if not usable:
            raise ConnectFailed(
                f"The pool at {self.router} computes as {found[0]}, whose windows lie on a GPU; connect to a pool of"
                " CPU servers."
            )
        # Of several classes one that has every expert, where there is such a one already.
        whole = covering(view)
        return next((name for name in usable if name in whole), usable[0])

    def _live_session(self) -> _Session:
        with self._lock:
            if self._closed:
                raise ConnectFailed("The connection to the expert pool was closed; connect again.")
            end_s = time.monotonic() + self.deadline_s
            while not self._session.router.lease_held():
                if self._session.fenced.is_set():
                    log.warning("joining_anew router=%s", self.router)
                    self._session.close()
                    self._session = _Session(self, self.deadline_s)
                elif time.monotonic() > end_s:
                    raise ConnectFailed(f"No word from the router at {self.router} since this process slept.")
                else:
                    time.sleep(LEASE_POLL_S)
            return self._session


class _Session:
    """One membership, from joining to leaving."""

    def __init__(self, pool: ExpertPool, start_s: float) -> None:
        self.fenced = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._running = 0
        with contextlib.ExitStack() as closing:
            try:
                self._open(pool, start_s, closing)
            except (JoinRefused, P2PError, RouterUnavailable, StartFailed, ValueError) as error:
                raise ConnectFailed(f"The expert pool at {pool.router} cannot be joined: {error}") from error
            self._closing = closing.pop_all()

    def _open(self, pool: ExpertPool, start_s: float, closing: contextlib.ExitStack) -> None:
        router = self.router = RouterClient(pool.router, pool.credentials)
        closing.callback(router.close)
        identity, view, found = _join(router, pool, start_s)
        self.dtype = Dtype.of_class(found)
        shape = pool.shape
        closing.callback(self._leave)
        endpoint = TransportChoice.parse(pool.transport).opener()(identity.name, identity.incarnation, 1)
        closing.callback(endpoint.close)
        self.client = ExpertClient(
            endpoint=endpoint,
            shape=shape,
            dtype=self.dtype,
            model_hash=view.model_hash,
            incarnation=identity.incarnation,
            on_adopted=router.ack,
            max_tokens=MOST_ROWS,
            deadline_s=pool.deadline_s,
            credentials=pool.credentials,
        )
        closing.callback(self.client.close)
        placement = self._placement = Placement(router, self.client, found)
        router.start(on_view=placement.apply, load=self._load, on_fenced=lambda reason: self.fenced.set())
        placement.wait(start_s, self._ended)
        log.info("pool_joined router=%s name=%s class=%s", pool.router, identity.name, found)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """While this runs the session is busy, and the router ends no drain of it."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def close(self) -> None:
        """Leave, and give back all that is held."""
        self._ended.set()
        self._closing.close()

    def _leave(self) -> None:
        try:
            self.router.leave(timeout_s=LEAVE_S)
        except RouterUnavailable as error:
            log.info("leave_failed reason=%s", error)

    def _load(self) -> dict[str, float]:
        """What goes with each renewal: calls that run, the pace of servers, and about once a second what was sent to
        which expert.
        """
        self._placement.tell_routed()
        return {"running": float(self._running), **self.client.load()}


def _join(router: RouterClient, pool: ExpertPool, start_s: float) -> tuple[Identity, View, str]:
    """Become a member once an expert server is one: who this is then, the View, and the numerics class to ask.

    Raises ConnectFailed, JoinRefused, RouterUnavailable.
    """
    end_s = time.monotonic() + start_s
    while True:
        view = _first_view(router, max(0.1, end_s - time.monotonic()))
        found = pool.check(view, start_s)
        try:
            identity = router.join(
                pool=CLIENT,
                address="",
                model_hash=view.model_hash,
                numerics_class=found,
                layers=pool.shape.layers,
                experts=pool.shape.experts,
                timeout_s=start_s,
            )
        except JoinRefused:
            # No client joins without a server: where the last has gone since, another is waited for.
            if router.status(timeout_s=_TOLD_S).view.pool(EXPERT):
                raise
        else:
            return identity, view, found


def _first_view(router: RouterClient, start_s: float) -> View:
    """The View once it names an expert server, or the last one within the time. Raises RouterUnavailable."""
    end_s = time.monotonic() + start_s
    try:
        router.status(timeout_s=min(start_s, _TOLD_S))
    except RouterUnavailable as error:
        # A minute without a word looks like a hang; most often the address is wrong.
        log.warning("waiting_for_router longest_s=%g reason=%s", start_s, error)
    while True:
        view = router.status(timeout_s=max(0.1, end_s - time.monotonic())).view
        if view.pool(EXPERT) or time.monotonic() > end_s:
            return view
        time.sleep(0.1)
