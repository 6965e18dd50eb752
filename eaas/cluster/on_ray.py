"""Expert servers and attention workers on the nodes of a Ray cluster: how `eaas serve --on ray` carries orders out.

Each order to start becomes an actor, which owns one process of its node: it starts it, and the process ends with it. So
Ray's word that an actor or its node died is the router's word that the process ended. A new one goes where the fewest
members of its pool are; Ray, which knows what is free, has it elsewhere if there is no room, or wait for nodes that
join. Ray serializes with pickle: actors take and give strings, and lists of strings, alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from eaas.cluster.config import ClusterConfig
from eaas.cluster.process import Child, StartFailed
from p2p.transport import TransportChoice
from router.access import LOOPBACK
from router.host import HOST_VARIABLE, PID_VARIABLE
from router.launcher import Order, OrderFailed

# Within this an actor answers whose node is well, and a process that is well ends in order.
_ANSWER_S = 1.0
# Ray takes some 15 s to see that a node fell silent: meanwhile others are preferred.
_DOUBT_S = 30.0


class RayUnusable(RuntimeError):
    """The Ray cluster cannot be used as asked; the text says why, and what to do."""


class ProcessOwner:
    """In an actor: one process of its node."""

    def where(self) -> list[str]:
        """The id and the address of the node, as Ray knows them."""
        import ray

        return [ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()]

    def start(self, pool: str, command: list[str], variables: list[str]) -> list[str]:
        """Start the process by its module and arguments, with variables NAME=VALUE beside the node's own, until it is
        ready: its name as a member, and its pid; or an empty name, and why it could not start."""
        # Ray's word on threads is for what it runs itself.
        os.environ.pop("OMP_NUM_THREADS", None)
        try:
            self._child = child = Child.start(
                pool=pool,
                slot=0,
                module=command[0],
                arguments=command[1:],
                # Among Ray's own, where `ray logs` finds it.
                log=Path("/proc/self/fd/2").resolve(),
                environment=dict(variable.split("=", 1) for variable in variables),
            )
            while child.ready is None:
                select.select([child.ready_fd], [], [])
                child.read_ready()
        except (OSError, StartFailed) as error:
            return ["", str(error)]
        return [child.name, str(child.pid)]

    def wait(self) -> str:
        """Wait until the process has ended; its exit status, negative for a signal."""
        return str(self._child.process.wait())

    def stop(self, within_s: str) -> str:
        """End the process, in order if it can within that time; its exit status."""
        self._child.send(SIGTERM)
        try:
            self._child.process.wait(float(within_s))
        except subprocess.TimeoutExpired:
            self._child.send(SIGKILL)
        return self.wait()


@dataclass(kw_only=True)
class _Owned:
    """A process that was ordered; `node`: Ray's id of that where it is."""

    pool: str
    node: str
    actor: Any
    is_ready: bool = False


class RayNodes:
    """Carries the router's orders out on the nodes of the Ray cluster that this host belongs to.

    Attributes:
        address: Of this host, by which the other nodes reach it; loopback, where nothing may leave it.
    """

    def __init__(
        self, config: ClusterConfig, command: Callable[[str, str], list[str]], tell: Callable[[str, bool], None]
    ) -> None:
        """Connect to Ray.

        Args:
            command: The module and the arguments of a process, by its pool and its node's address.
            tell: Gets a line when a process is ready, or has ended; and whether it could not start.

        Raises:
            RayUnusable: there is none, or it has other nodes, and rows or calls cannot go there.
        """
        # Without its head for a minute Ray would end this process, and with it router and gateways.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(10**9))
        try:
            import ray
            from ray.exceptions import RayError
        except ModuleNotFoundError as error:
            raise RayUnusable(f"--on ray needs ray: {error}. Install it: pip install 'eaas[ray]'.") from None
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise RayUnusable(
                f"no Ray cluster is reached from here: {error}. Start it on each node, `ray start --head` on the first."
            ) from None
        self._ray, self._failed = ray, RayError
        self._command, self._tell = command, tell
        self._gpus = int(bool(config.gpus))
        self._lock = threading.Lock()
        self._owned: dict[int, _Owned] = {}
        self._doubted: dict[str, float] = {}
        self._ending = False
        self._here, nodes = ray.get_runtime_context().get_node_id(), self._alive()
        crosses = TransportChoice.parse(config.transport).crosses_network
        self._stays = config.tls_dir is None or not crosses
        if len(nodes) > 1 and self._stays:
            raise RayUnusable(
                f"{len(nodes)} nodes found, and between them TLS and --transport nixl are needed; found "
                f"{'TLS' if config.tls_dir else 'no TLS'} and {config.transport}. Give --tls-dir (`eaas certs` makes "
                "it), --transport nixl and --trust-network, or use a Ray cluster of this host alone."
            )
        self.address = LOOPBACK if self._stays else nodes[self._here]["NodeManagerAddress"]

    @property
    def ready(self) -> Counter[str]:
        """Processes that are ready, by pool."""
        with self._lock:
            return Counter(owned.pool for owned in self._owned.values() if owned.is_ready)

    def carry(self, order: Order) -> int:
        """Start a process, and wait until it has ended; or end one. Returns the process's number, or 0 for a stop.

        Raises:
            OrderFailed: it could not start, or ended otherwise than in order, or with its node.
        """
        if order.action == "start":
            return self._start(order)
        if (owned := self._owned.get(order.pid)) is not None:
            try:
                self._ray.get(owned.actor.stop.remote(str(_ANSWER_S)), timeout=2 * _ANSWER_S)
            except self._failed as error:
                self._tell(f"{order.member} on node {owned.node} does not answer: {error}", False)
                self._end_lost(owned)
        return 0

    def end(self, within_s: float) -> None:
        """End every process, and leave Ray, which ends what is left."""
        with self._lock:
            self._ending = True
            stops = [owned.actor.stop.remote(str(within_s)) for owned in self._owned.values()]
        if stops:
            self._ray.wait(stops, num_returns=len(stops), timeout=within_s + _ANSWER_S)
        # A thread that asks Ray for something once it is left ends this process, with status 1.
        until_s = time.monotonic() + 2 * _ANSWER_S
        while self._owned and time.monotonic() < until_s:
            time.sleep(0.01)
        # Without its head Ray waits for it for ever; of a process that is gone it ends all actors.
        atexit.unregister(self._ray.shutdown)
        leave = threading.Thread(target=self._ray.shutdown, daemon=True)
        leave.start()
        leave.join(within_s)

    def _start(self, order: Order) -> int:
        owned, address = self._place(order), ""
        try:
            left_s = max(_ANSWER_S, order.until_s - time.monotonic())
            owned.node, address = self._ray.get(owned.actor.where.remote(), timeout=left_s)
            words = self._run(order, owned, LOOPBACK if self._stays else address)
        except self._failed as error:
            # What it owned has ended with it, or with its node.
            self._end_lost(owned)
            needed = f"no node has a CPU and {self._gpus} GPUs free for {order.pool}: add nodes, or ask for less"
            words = f"{order.pool} on {address} is lost: {error}" if address else needed
        finally:
            with self._lock:
                del self._owned[order.pid]
        if words and not self._ending:
            self._tell(words, False)
            raise OrderFailed(words, pid=order.pid)
        return 0 if self._ending else order.pid

    def _run(self, order: Order, owned: _Owned, address: str) -> str:
        """Start and wait; why it ended otherwise than in order, empty where it did. Raises RayError."""
        mine = ("EAAS_EXPERT_", "EAAS_ATTENTION_")
        variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(mine)]
        variables += [f"{HOST_VARIABLE}={order.host}", f"{PID_VARIABLE}={order.pid}"]
        command = self._command(order.pool, address)
        name, said = self._ray.get(owned.actor.start.remote(order.pool, command, variables))
        if not name:
            self._tell(f"{said} (on {address})", True)
            return said
        owned.is_ready = True
        self._tell(f"{name} ready (on {address}, pid {said})", False)
        while True:
            try:
                status = self._ray.get(owned.actor.wait.remote())
                return "" if status == "0" else f"{name} ended with status {status} (on {address})"
            except self._ray.exceptions.ActorUnavailableError:
                # The connection broke. If the node is there it is made again, and the process was never away.
                self._ray.get(owned.actor.where.remote(), timeout=_ANSWER_S)

    def _place(self, order: Order) -> _Owned:
        """An actor where the fewest members of the pool are, and of such nodes the fewest of all."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        with self._lock:
            members = self._owned.values()
            asked = {each.actor.where.remote(): each.node for each in members if each.is_ready}
            silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)[1] if asked else ()
            self._doubted |= {asked[each]: time.monotonic() for each in silent}
            doubted = {node for node, at_s in self._doubted.items() if time.monotonic() - at_s < _DOUBT_S}
            beside = Counter(each.node for each in members)
            alike = Counter(each.node for each in members if each.pool == order.pool)
            has = {node: one["Resources"] for node, one in self._alive().items()}
            able = [n for n, it in has.items() if it.get("CPU", 0) >= 1 and it.get("GPU", 0) >= self._gpus]
            node = min(able, key=lambda n: (n in doubted, alike[n], beside[n], n), default=self._here)
            # Without room on that node now, Ray takes another, or awaits one.
            where = OnNode(node, soft=not self._stays, _spill_on_unavailable=not self._stays)
            # Threads: it waits for the process, and is asked to stop it.
            actor = self._ray.remote(ProcessOwner).options(
                num_cpus=1, num_gpus=self._gpus, max_concurrency=4, scheduling_strategy=where
            )
            owned = self._owned[order.pid] = _Owned(pool=order.pool, node=node, actor=actor.remote())
            return owned

    def _end_lost(self, owned: _Owned) -> None:
        """Have an actor ended that does not answer, and other nodes preferred to its own."""
        self._doubted = self._doubted | {owned.node: time.monotonic()}
        if not self._ending:
            self._ray.kill(owned.actor)

    def _alive(self) -> dict[str, Any]:
        return {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
