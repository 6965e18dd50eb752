"""Expert servers and attention workers on the nodes of a Ray cluster: how `eaas serve --on ray` carries orders out.

Each order to start becomes an actor, which owns one process of its node: it starts it, and the process ends with it. So
Ray's word that an actor or its node died is the router's word that the process ended. Ray knows what is free on each
node, starts no actor where there is no room, and waits for nodes that join; of those with room, that with the fewest
members of the pool is taken. Ray serializes with pickle: actors take and give strings, and lists of strings, alone.
"""

from __future__ import annotations

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

from eaas.cluster.process import Child, StartFailed
from p2p.descriptor import Transport
from p2p.transport import TransportChoice
from router.access import LOOPBACK
from router.host import HOST_VARIABLE, PID_VARIABLE
from router.launcher import Order, OrderFailed

logger = logging.getLogger(__name__)

# Until an actor whose connection broke is asked no more, and until one that is asked to stop its process is ended.
_ANSWER_S = 1.0
# Ray believes in a node that fell silent for some 15 s more: meanwhile others are preferred.
_DOUBT_S = 30.0
# An order that nobody withdraws while the pool has room for it nowhere: the router orders again.
_LONGEST_S = 45.0


class RayUnusable(RuntimeError):
    """The Ray cluster cannot be used as asked; the text says why, and what to do."""


class ProcessOwner:
    """In an actor: one process of its node. Every method takes and gives strings, or lists of strings."""

    def where(self) -> list[str]:
        """The id and the address of the node, as Ray knows them."""
        import ray

        return [ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()]

    def start(self, pool: str, module: str, arguments: list[str], variables: list[str]) -> list[str]:
        """Start the process, and wait until it is ready.

        Args:
            variables: NAME=VALUE of its environment, beside the node's own.

        Returns:
            Its name as a member, and its pid; or an empty name, and why it could not start.
        """
        # Ray's word on what an actor should use; a process that has lanes knows better.
        os.environ.pop("OMP_NUM_THREADS", None)
        try:
            self._child = child = Child.start(
                pool=pool,
                slot=0,
                module=module,
                arguments=arguments,
                # Beside what the actor itself says, where `ray logs` finds it.
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
    """What was ordered: of which pool, on which node (by id), by which actor."""

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
        self,
        *,
        is_secured: bool,
        transport: str,
        has_gpus: bool,
        command: Callable[[str, str], tuple[str, list[str]]],
        tell: Callable[[str, bool], None],
    ) -> None:
        """Connect to Ray.

        Args:
            is_secured: Whether the processes have certificates, without which none listens beyond loopback.
            has_gpus: Whether each process needs one.
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
            raise RayUnusable(
                f"--on ray needs ray, which is not here ({error}): pip install 'eaas[ray]'."
            ) from None
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise RayUnusable(
                f"no Ray cluster is reached from here: {error}. Start it on each node, `ray start --head` on the first."
            ) from None
        self._ray, self._failed = ray, RayError
        self._command, self._tell = command, tell
        self._resources = {"num_cpus": 1, "num_gpus": int(has_gpus)}
        self._lock = threading.Lock()
        self._owned: dict[int, _Owned] = {}
        self._doubted: dict[str, float] = {}
        self._ending = False
        self._here = ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in self._alive()}
        crosses = TransportChoice.parse(transport).transport is Transport.NIXL
        self._stays = not (is_secured and crosses)
        if len(nodes) > 1 and self._stays:
            raise RayUnusable(
                f"{len(nodes)} nodes found, and between them TLS and --transport nixl are needed; found "
                f"{'TLS' if is_secured else 'no TLS'} and {transport}. Give --tls-dir (`eaas certs` makes it) and "
                "--transport nixl, or use a Ray cluster of this host alone."
            )
        self.address = LOOPBACK if self._stays else nodes[self._here]

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
                logger.warning("owner_ended member=%s node=%s reason=%s", order.member, owned.node, error)
                self._doubt(owned)
        return 0

    def end(self, within_s: float) -> None:
        """End every process, and leave Ray, which ends what is left."""
        with self._lock:
            self._ending = True
            actors = [owned.actor for owned in self._owned.values()]
        stops = [actor.stop.remote(str(within_s)) for actor in actors]
        if stops:
            self._ray.wait(stops, num_returns=len(stops), timeout=within_s + _ANSWER_S)
        self._ray.shutdown()

    def _start(self, order: Order) -> int:
        owned = self._place(order)
        words = ""
        try:
            left_s = max(1.0, min(order.until_s - time.monotonic(), _LONGEST_S))
            owned.node, address = self._ray.get(owned.actor.where.remote(), timeout=left_s)
            words = self._run(order, owned, LOOPBACK if self._stays else address)
        except self._failed as error:
            # What it owned has ended with it, or nobody has any word of it: its node may be gone.
            self._doubt(owned)
            words = f"{order.pool} on {owned.node[:12]} is lost: {error}"
            if isinstance(error, TimeoutError) and not owned.is_ready:
                words = f"no node has {self._resources} to spare for {order.pool} within {left_s:.0f} s; add nodes"
        finally:
            with self._lock:
                del self._owned[order.pid]
        if self._ending:
            return 0
        if words:
            self._tell(words, False)
            raise OrderFailed(words, pid=order.pid)
        return order.pid

    def _run(self, order: Order, owned: _Owned, address: str) -> str:
        """Start and wait; why it ended otherwise than in order, empty where it did. Raises RayError."""
        module, arguments = self._command(order.pool, address)
        given = {HOST_VARIABLE: order.host, PID_VARIABLE: str(order.pid)}
        given |= {n: v for n, v in os.environ.items() if n.startswith(("EAAS_EXPERT_", "EAAS_ATTENTION_"))}
        variables = [f"{name}={value}" for name, value in given.items()]
        name, said = self._ray.get(owned.actor.start.remote(order.pool, module, arguments, variables))
        if not name:
            self._tell(f"{said} (on {address})", True)
            return said
        owned.is_ready = True
        self._tell(f"{name} ready (on {address}, pid {said})", False)
        while True:
            try:
                status = self._ray.get(owned.actor.wait.remote())
                break
            except self._ray.exceptions.ActorUnavailableError:
                # The connection broke. If the node is there it is made again, and the process was never away.
                self._ray.get(owned.actor.where.remote(), timeout=_ANSWER_S)
        self._ray.kill(owned.actor)
        return "" if status == "0" else f"{name} ended with status {status} (on {address})"

    def _place(self, order: Order) -> _Owned:
        """An actor where the fewest members of the pool are, and of such nodes the fewest of all."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        now_s = time.monotonic()
        with self._lock:
            alike = Counter(owned.node for owned in self._owned.values() if owned.pool == order.pool)
            beside = Counter(owned.node for owned in self._owned.values())
            doubted = {node for node, at_s in self._doubted.items() if now_s - at_s < _DOUBT_S}
            able = [node["NodeID"] for node in self._alive() if self._has_room(node["Resources"])]
            # With none that could ever, a node is awaited that joins.
            node = min(able, key=lambda n: (n in doubted, alike[n], beside[n], n), default=self._here)
            # Where there is no room on it now, Ray takes another.
            where = OnNode(node, soft=not self._stays, _spill_on_unavailable=not self._stays)
            # Threads: it waits for the process, and is asked to stop it.
            actor = self._ray.remote(ProcessOwner).options(
                **self._resources, max_concurrency=4, scheduling_strategy=where
            )
            owned = self._owned[order.pid] = _Owned(pool=order.pool, node=node, actor=actor.remote())
            return owned

    def _alive(self) -> list[Any]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _has_room(self, resources: dict[str, float]) -> bool:
        wanted = {"CPU": self._resources["num_cpus"], "GPU": self._resources["num_gpus"]}
        return all(resources.get(name, 0) >= count for name, count in wanted.items())

    def _doubt(self, owned: _Owned) -> None:
        """Have an actor that does not answer ended, and others' nodes preferred to its own."""
        with self._lock:
            self._doubted[owned.node] = time.monotonic()
        self._ray.kill(owned.actor)
