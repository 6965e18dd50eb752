"""The public client of an expert pool, for a program that has everything of a model but its experts.

    from eaas.pool import connect

    with connect("127.0.0.1:7000") as pool:  # what `eaas pool MODEL` printed
        out = pool.apply(layer, hidden, topk_ids, topk_weights)

The program is to expert servers what an attention worker is: it follows the router's placement, has its rows computed
by whichever replica lives, and acknowledges epochs, so that nothing that it may still ask for is unloaded. A process
that was frozen for longer than its lease is no member any more; it becomes a new one with its next call.
docs/pool.md tells more. Nothing here imports torch: tensors are read where they lie.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import eaas.beside  # noqa: F401
from eaas.cluster.status import GatewayUnreachable, RouterUnknown, router_address
from eaas.placement import Placement, StartFailed
from experts import native
from experts.backend import ExpertsLost, HostArrays
from experts.client import ExpertClient
from experts.config import MOST_WEIGHT
from experts.links import AttachFailed, config_of
from experts.model import ConfigInvalid, Dtype, ExpertShape
from p2p.endpoint import P2PError
from p2p.transport import TransportChoice
from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.tls import Credentials, CredentialsInvalid
from router.view import CLIENT, EXPERT, Identity, Member, View, carrier_of, covering, of_model

__all__ = [
    "ConnectFailed", "Dtype", "ExpertShape", "ExpertsLost", "HostArrays", "Pool", "ShapeMismatch", "Threads", "connect",
]  # fmt: skip

log = logging.getLogger(__name__)

START_S = 60.0
LEAVE_S = 0.2
_TOLD_S = 2.0
LEASE_POLL_S = 0.005
# 1,024 rows of 7,168 bfloat16 are 14 MB, which go in chunks that fit the windows.
MOST_ROWS = 1024
_CPU = "cpu"
# uint16: the bits of bfloat16, of which numpy has none.
_ROWS = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "uint16": Dtype.BFLOAT16}
_IDS = {"int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
_WEIGHTS = {"float32": 4}


class ConnectFailed(RuntimeError):
    """The pool cannot be joined; the text says what was found, what is needed and what to do."""


class ShapeMismatch(ValueError):
    """An array, a layer or an expert's number is none of this model's; the text says which, and what is needed."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Threads of the caller's program, one for each lane of a call.

    For a program whose threads spin between its parallel loops, as OpenMP's do: while a call lasts they wait for expert
    servers instead, and leave them the cores. Servers on one of `cores` are waited for there, where they wake a thread
    soonest.

    Attributes:
        cores: Of each, which is pinned to it; -1: left as it is.
        parallel_for: Address of a function like torch_parallel_for (torch/csrc/stable/c/shim.h); 0: with one thread.
    """

    cores: tuple[int, ...] = (-1,)
    parallel_for: int = 0

    def make_calls_of(self, client: ExpertClient) -> None:
        """Before its first call."""
        if self.parallel_for:
            cores = (ctypes.c_int32 * len(self.cores))(*self.cores)
            native.load().expert_client_set_team(client.handle, self.parallel_for, cores)


def connect(
    router: str,
    *,
    tls: str | Path | None = None,
    model: str = "",
    shape: ExpertShape | None = None,
    fingerprint: str = "",
    transport: str = "shm",
    deadline_s: float = 30.0,
    start_s: float = START_S,
    calls: int = 1,
    threads: Threads | None = None,
    weight: int = 1,
) -> Pool:
    """Join an expert pool, and wait until every expert can be reached.

    Args:
        router: host:port of the pool's router; of several, all with commas between; or the URL of a gateway, whose
            cluster's expert servers are used.
        tls: Folder with ca.pem, cert.pem and key.pem of the role `client`, where the cluster has TLS.
        model: Its name among those that the pool serves; empty: the one of the shape and the fingerprint.
        shape: Of the experts that the caller's model needs; None: as the pool says.
        fingerprint: Of the caller's checkpoint; empty: not compared with the pool's.
        transport: As the pool's: shm or nixl.
        deadline_s: Longest wait of a call for experts that are lost.
        start_s: Longest wait for the pool to be there and whole.
        calls: Most calls at the same time; each has a membership of its own.
        threads: Of the caller's, which make its calls; None: the one that calls.
        weight: Of its rows, 1 to 1,000, where those who share expert servers want more than these can compute.

    Raises:
        ConnectFailed: no such pool, it serves other models, or the certificate cannot be used.
    """
    try:
        credentials = Credentials(Path(tls), CLIENT) if tls is not None else None
        address = router_address(router) if "://" in router else router
        return Pool(
            router=address,
            shape=shape or _served(address, credentials, start_s, model, fingerprint),
            credentials=credentials,
            model=model,
            fingerprint=fingerprint,
            transport=transport,
            deadline_s=deadline_s,
            start_s=start_s,
            calls=calls,
            threads=threads or Threads(),
            weight=weight,
        )
    except (ConfigInvalid, CredentialsInvalid, GatewayUnreachable, RouterUnavailable, RouterUnknown) as error:
        raise ConnectFailed(str(error)) from error


@dataclass(kw_only=True, eq=False, repr=False)
class Pool:
    """The experts of one model, computed elsewhere; `connect` makes one. For use from any thread; close it when done.

    A child made by fork has no use of it: each call there raises ConnectFailed, and `close` does nothing.

    Attributes: as the arguments of `connect` of these names, and
        router: Address of the pool's router.
        credentials: What this process proves itself with; None: nothing.
        fingerprint: Of the checkpoint that it serves; a pool that serves another is not joined again.
        dtype: That the pool computes in; rows of another are converted.
    """

    router: str
    shape: ExpertShape
    credentials: Credentials | None
    model: str
    fingerprint: str
    transport: str
    deadline_s: float
    start_s: InitVar[float]
    calls: InitVar[int]
    threads: Threads
    weight: int
    dtype: Dtype = field(init=False)

    def __post_init__(self, start_s: float, calls: int) -> None:
        """Join. Raises ConnectFailed."""
        if calls < 1 or not 1 <= self.weight <= MOST_WEIGHT:
            needed = f"1 or more, and 1 to {MOST_WEIGHT}, are needed"
            raise ValueError(f"calls is {calls} and weight {self.weight}; {needed}.")
        self._pid = os.getpid()
        self._calling: set[int] = set()
        self._freed, self._closed = threading.Condition(), False
        self._sessions = calls
        self._idle: list[_Session] = []
        try:
            while len(self._idle) < calls:
                self._idle.append(_Session(self, start_s))
        except BaseException:
            self._sessions = len(self._idle)
            self.close()
            raise

    def apply(
        self,
        layer: int,
        hidden: Any,
        topk_ids: Any,
        topk_weights: Any,
        out: Any = None,
        deadline_s: float | None = None,
    ) -> Any:
        """Have rows computed by their experts and added up with their weights: in float32, in the order of k, rounded
        once. So the bits of a row depend neither on its batch nor on which servers answered.

        Arrays are torch tensors in the CPU's memory or numpy arrays; where they are not contiguous, a copy is read.

        Args:
            layer: Counted over MoE layers, from 0.
            hidden: [n, hidden] float32 or bfloat16 (with numpy: ml_dtypes' or the bits as uint16), any n. A row that
                is not finite is sent to nobody, and NaN comes of it.
            topk_ids: [n, top_k] experts, integers of 16, 32 or 64 bits; -1: none, which contributes nothing.
            topk_weights: [n, top_k] float32.
            out: [n, hidden] float32 or bfloat16, contiguous, overwritten when all is there; may be `hidden`. None: a
                new one like `hidden`.
            deadline_s: Longest wait for experts that are lost, for each 1,024 rows; None: as for `connect`.

        Returns:
            out.

        Raises:
            ExpertsLost: no live replica of some expert answered within the deadline. The call may be made again.
            ConnectFailed: closed, forked, or this process had lost its membership and cannot have another.
            ShapeMismatch: a shape, the layer or an expert's number is none of this model's.
            TypeError: an array of another type, or in a device's memory.
            Whatever is raised, out is as it was.
        """
        width, top_k = self.shape.hidden, self.shape.top_k
        rows, rows_type, rows_at = _readable("hidden", hidden, _ROWS, None, width)
        n = rows.shape[0]
        ids, id_bytes, ids_at = _readable("topk_ids", topk_ids, _IDS, n, top_k)
        weights, _, weights_at = _readable("topk_weights", topk_weights, _WEIGHTS, n, top_k)
        if out is None:
            out = rows.new_empty(rows.shape) if hasattr(rows, "new_empty") else np.empty_like(rows)
        result, out_type, out_at = _readable("out", out, _ROWS, n, width)
        if result is not out or not getattr(getattr(out, "flags", None), "writeable", True):
            raise TypeError("out is read-only or not contiguous; a contiguous array that can be written is needed.")
        arrays = HostArrays(
            *(layer, rows_at, Dtype(rows_type), n, ids_at, id_bytes, weights_at, out_at, Dtype(out_type))
        )
        self.apply_pointers(arrays, deadline_s)
        del rows, ids, weights  # Kept until here: they may be copies.
        return out

    def apply_pointers(self, arrays: HostArrays, deadline_s: float | None = None) -> None:
        """`apply` of contiguous arrays by their addresses, which are taken on trust. Raises ExpertsLost, ConnectFailed,
        ShapeMismatch: as `apply`."""
        if not 0 <= arrays.layer < self.shape.layers:
            raise ShapeMismatch(
                f"layer {arrays.layer} is asked for; the pool has MoE layers 0 to {self.shape.layers - 1}, counted"
                " without the dense ones."
            )
        with self._turn(self.deadline_s if deadline_s is None else deadline_s) as session:
            try:
                session.client.apply(arrays, deadline_s)
            except ValueError as error:
                raise ShapeMismatch(self._wrong(arrays)) from error

    def close(self) -> None:
        """Leave the pool, once the calls of other threads have ended. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._freed:
            self._closed = True
            self._freed.notify_all()
            # A signal's handler may close it within a call of its own thread, which ends no sooner.
            own = threading.get_ident() in self._calling
            self._freed.wait_for(lambda: len(self._idle) + own == self._sessions)
            for session in self._idle:
                session.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self, view: View, start_s: float) -> str:
        """Compare the pool with what this model needs; the numerics class that it computes in. Raises ConnectFailed:
        they differ."""
        shape, servers = self.shape, _servers(view)
        if not servers:
            raise ConnectFailed(_none_there(self.router, start_s))
        if (view.layers, view.experts) != (shape.layers, shape.experts):
            raise ConnectFailed(
                f"The pool at {self.router} serves {view.layers} layers of {view.experts} experts, this model has"
                f" {shape.layers} of {shape.experts}. Start a pool from this model's checkpoint."
            )
        if self.fingerprint and view.model_hash and self.fingerprint != view.model_hash:
            raise ConnectFailed(
                f"The pool at {self.router} serves the checkpoint {view.model_hash[:16]}, this model was loaded from"
                f" {self.fingerprint[:16]}. Start the pool and load the model from the same folder."
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

    @contextlib.contextmanager
    def _turn(self, deadline_s: float) -> Iterator[_Session]:
        """A live membership that no other call has meanwhile; waits for one."""
        if os.getpid() != self._pid:
            raise ConnectFailed(
                f"The pool was connected in process {self._pid}, of which this one, {os.getpid()}, is a fork. Connect"
                " again after the fork."
            )
        with self._freed:
            self._freed.wait_for(lambda: self._idle or self._closed)
            if self._closed:
                raise ConnectFailed("The connection to the expert pool was closed; connect again.")
            session = self._idle.pop()
            self._calling.add(threading.get_ident())
        try:
            session = self._live(session, deadline_s)
            session.busy = True
            # What serves nobody now is to be read again: not by the next renewal, but from now on.
            session.placement.rouse()
            yield session
        finally:
            session.busy = False
            with self._freed:
                self._calling.discard(threading.get_ident())
                self._idle.append(session)
                self._freed.notify_all()

    def _live(self, session: _Session, deadline_s: float) -> _Session:
        """This membership, or a new one where it was lost."""
        end_s = time.monotonic() + deadline_s
        while not session.router.lease_held():
            if session.fenced.is_set():
                log.warning("joining_anew router=%s", self.router)
                session.close()
                return _Session(self, deadline_s)
            if time.monotonic() > end_s:
                raise ConnectFailed(f"No word from the router at {self.router} since this process slept.")
            time.sleep(LEASE_POLL_S)
        return session

    def _wrong(self, arrays: HostArrays) -> str:
        """What of a call was refused: an expert's number, for the rest was looked at before."""
        read = ctypes.string_at(arrays.ids, arrays.n * self.shape.top_k * arrays.id_bytes)
        ids = np.frombuffer(read, f"i{arrays.id_bytes}")
        found = ids[(ids < -1) | (ids >= self.shape.experts)][:3].tolist()
        return (
            f"topk_ids names the experts {found}; each layer has experts 0 to {self.shape.experts - 1}, and -1 stands"
            " for none."
        )


def _readable(name: str, array: Any, kinds: Mapping[str, int], n: int | None, width: int) -> tuple[Any, int, int]:
    """An array, or a copy that is contiguous; the number of its type; its address. Raises TypeError, ShapeMismatch."""
    kind = str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")
    place = str(getattr(array, "device", _CPU))
    tensor = hasattr(array, "data_ptr")
    if kind not in kinds or place != _CPU or not (tensor or hasattr(array, "__array_interface__")):
        raise TypeError(
            f"{name} is {kind} on {place}; a torch tensor or a numpy array in the CPU's memory is needed, of"
            f" {' or '.join(kinds)}."
        )
    if array.ndim != 2 or array.shape[1] != width or n not in (None, array.shape[0]):
        needed = "n" if n is None else n
        raise ShapeMismatch(f"{name} is {tuple(array.shape)}; ({needed}, {width}) is needed by the pool's model.")
    if tensor:
        array = array.contiguous()
        return array, kinds[kind], array.data_ptr()
    array = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return array, kinds[kind], array.ctypes.data


class _Session:
    """One membership, from joining to leaving."""

    def __init__(self, pool: Pool, start_s: float) -> None:
        self.fenced = threading.Event()
        self._ended = threading.Event()
        self.busy = False  # while it is, the router ends no drain of it
        with contextlib.ExitStack() as closing:
            try:
                self._open(pool, start_s, closing)
            except (JoinRefused, OSError, P2PError, RouterUnavailable, StartFailed, ValueError) as error:
                raise ConnectFailed(f"The expert pool at {pool.router} cannot be joined: {error}") from error
            self._closing = closing.pop_all()

    def _open(self, pool: Pool, start_s: float, closing: contextlib.ExitStack) -> None:
        router = self.router = RouterClient(pool.router, pool.credentials)
        closing.callback(router.close)
        identity, view, found = _join(router, pool, start_s)
        dtype = pool.dtype = Dtype.of_class(found)
        pool.fingerprint = pool.fingerprint or view.model_hash
        closing.callback(router.leave, timeout_s=LEAVE_S)
        endpoint = TransportChoice.parse(pool.transport).opener()(
            identity.name, identity.incarnation, len(pool.threads.cores)
        )
        closing.callback(endpoint.close)
        self.client = ExpertClient(
            endpoint=endpoint,
            shape=pool.shape,
            dtype=dtype,
            model_hash=view.model_hash,
            incarnation=identity.incarnation,
            cores=pool.threads.cores,
            on_adopted=router.ack,
            max_tokens=MOST_ROWS,
            deadline_s=pool.deadline_s,
            credentials=pool.credentials,
            weight=pool.weight,
        )
        closing.callback(self.client.close)
        pool.threads.make_calls_of(self.client)
        # Where its servers' class is gone for good, and another is there, the next call joins that.
        placement = self.placement = Placement(router, self.client, found, on_obsolete=self.fenced.set)
        router.start(on_view=placement.apply, load=self._load, on_fenced=lambda reason: self.fenced.set())
        placement.wait(start_s, self._ended)
        log.info("pool_joined router=%s name=%s class=%s", pool.router, identity.name, found)

    def close(self) -> None:
        """Leave, and give back all that is held."""
        self._ended.set()
        self._closing.close()

    def _load(self) -> dict[str, float]:
        """What goes with each renewal: whether a call runs, the pace of servers, and about once a second what was sent
        to which expert."""
        self.placement.tell_routed()
        self.placement.judge()
        return {"running": float(self.busy), **self.client.load()}


def _join(router: RouterClient, pool: Pool, start_s: float) -> tuple[Identity, View, str]:
    """Become a member once an expert server is one: who this is then, the View, and the numerics class to ask.

    Raises ConnectFailed, JoinRefused, RouterUnavailable.
    """
    end_s = time.monotonic() + start_s
    while True:
        view = _first_view(router, max(0.1, end_s - time.monotonic()))
        view = _of_model(view, pool.router, pool.model, pool.fingerprint, pool.shape)
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


def _of_model(view: View, router: str, name: str, fingerprint: str, shape: ExpertShape | None) -> View:
    """The View of the model that is meant; of one alone `Pool.check` says what differs. Raises ConnectFailed."""
    if len(view.models) < 2 and not name:
        return of_model(view, view.models[0].hash if view.models else "")
    sizes = (shape.layers, shape.experts) if shape is not None else None
    fitting = [
        it
        for it in view.models
        if name in ("", it.name) and fingerprint in ("", it.hash) and sizes in (None, (it.layers, it.experts))
    ]
    if len(fitting) == 1:
        return of_model(view, fitting[0].hash)
    served = ", ".join(f"{it.name or 'one without a name'} (checkpoint {it.hash[:16]})" for it in view.models)
    raise ConnectFailed(
        f"The pool at {router} serves {served}; {len(fitting)} of these fit what is asked for{name and f', {name}'}."
        " Give the name, or the checkpoint's folder, of one of them."
    )


def _servers(view: View) -> list[Member]:
    return [member for member in view.pool(EXPERT) if member.numerics_class]


def _none_there(router: str, start_s: float) -> str:
    return f"The router at {router} knows no expert server after {start_s:g} s. Start some: eaas pool MODEL."


def _served(address: str, credentials: Credentials | None, start_s: float, name: str, fingerprint: str) -> ExpertShape:
    """Of the experts that the pool serves, of the model that is meant, as its servers tell it.

    Raises ConfigInvalid, ConnectFailed, RouterUnavailable.
    """
    end_s = time.monotonic() + start_s
    said = _none_there(address, start_s)
    with contextlib.closing(RouterClient(address, credentials)) as router:
        while True:
            view = _first_view(router, max(0.1, end_s - time.monotonic()))
            view = _of_model(view, address, name, fingerprint, None)
            for member in _servers(view):
                try:
                    return ExpertShape.from_config(config_of(member, credentials, view.model_hash))
                except AttachFailed as error:
                    said = f"No expert server of the pool at {address} says what it serves: {error}"
            if time.monotonic() > end_s:
                raise ConnectFailed(said)
            time.sleep(0.1)
