"""A whole cluster as processes of this host: started, watched, repaired and ended by one supervisor.

With --on ray, what computes is started on the nodes of a Ray cluster instead (on_ray), by the same orders.

The supervisor decides nothing about the pools: the router says what to start and stop, and learns from the
supervisor, through pidfds, at once when a process has ended. Only the two parts that the router cannot replace,
itself and the gateways, are restarted here, on the addresses they had. A gateway that drains gets its successor first.

All gateways listen on the supervisor's one socket. Each connection waits in its one queue until whichever gateway is
awake takes it: of one that is frozen or dead none is lost, as in a queue of its own (SO_REUSEPORT) it would be.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import selectors
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from eaas.cluster.config import KEYS_FILE, MODELS_FILE, RESUME_KEY_FILE, ClusterConfig, LaunchContext, child_options
from eaas.cluster.mps import ready_gpus
from eaas.cluster.on_ray import RayNodes, RayUnusable
from eaas.cluster.process import Child, StartFailed, StateDir, keep_secret
from eaas.gateway.keys import digest_of, keys_of, write_keys
from eaas.gateway.listening import ListenFailed, address_of, listen
from eaas.settings import ROLES
from experts.devices import CUDA, Device
from experts.model import ConfigInvalid
from experts.pack import model_entry
from p2p.endpoint import P2PError
from p2p.native import named_cores
from router.access import LAUNCHER, LOOPBACK, Exposed
from router.client import OrderRefused, RouterClient, RouterUnavailable
from router.connection import answers
from router.etcd import Etcd, EtcdUnavailable
from router.etcd_store import erase
from router.events import AddModel, StartProcess, StopProcess
from router.host import host_id
from router.journal import entries_text
from router.launcher import Launcher, OrderFailed
from router.options import arguments
from router.tls import Credentials
from router.view import ATTENTION, DRAINING, EXPERT, GATEWAY, Model, View

logger = logging.getLogger(__name__)

# A part that ends is started again at once; one that keeps dying ever more slowly, after 0.1, 0.3, 0.7 ... 5 s, until
# it has lived for that long.
RESTART_FIRST_S, RESTART_MOST_S = 0.1, 5.0
# A router that answers no probe for so long is ended and started again; the token path does not miss it.
PROBE_S, HUNG_S = 1.0, 5.0
START_S, COMPILED_S = 120.0, 900.0
# A gateway that is no member any more joins again within a second, if it is awake, and the same for a busy host.
SILENT_GATEWAY_S = 2.0
# A member that is stopped ends within a second if it is well, as all roles promise; one that is frozen never does.
STOP_MOMENT_S = 1.5


def entries_of(config: ClusterConfig) -> list[tuple[Model, int, str]]:
    """What the router is told of each model that --model names, as for `RouterClient.add_model`.

    Raises: as `model_entry`; ConfigInvalid: one pool cannot serve them.
    """
    named = config.served if config.models else ()
    found = [(each, *model_entry(each.name, each.path, config.dtype, each.weight)) for each in named]
    for number, (each, model, _) in enumerate(found):
        if twin := next((other for other, known, _ in found[:number] if known.hash == model.hash), None):
            raise ConfigInvalid(
                f"--model {twin.name}={twin.path} --model {each.name}={each.path}: these are one checkpoint, byte for "
                "byte, and a model has one name. Leave one of them out."
            )
    classes = ", ".join(f"{each.name} as {kernels}" for each, _, kernels in found)
    if len({kernels for *_, kernels in found}) > 1:
        raise ConfigInvalid(
            f"one pool computes in one format of numbers; found {classes}. Give --dtype bfloat16, or use several pools."
        )
    return [(model, each.attention, kernels) for each, model, kernels in found]


def entries_after(view: View, wanted: Mapping[str, int], first: tuple[str, str]) -> tuple[AddModel, ...]:
    """What a router is told that has lost its journal: models that are served and stay, in the order of their numbers.

    Args:
        wanted: Sizes of the pools; of those that are not known that of the first model's workers.
        first: Name and folder with which processes are started, and which the router has from its options.
    """
    models = [m if (m.name, m.path) != first else replace(m, name="", path="") for m in view.models]
    staying = [model for model in models if not model.leaving and model.layers and model.experts]
    pools = [f"{ATTENTION}:{model.name}" if model.number else ATTENTION for model in staying]
    return tuple(
        AddModel(model=replace(model, asleep=False), attention=wanted.get(pool, wanted[ATTENTION]))
        for model, pool in zip(staying, pools, strict=True)
    )


class LocalCluster:
    """Router, expert servers, attention workers and gateways of a pool's models; use as a context manager.

    Raises CredentialsInvalid where the launcher has no certificate in `tls_dir`, StateDirUnusable where journal and
    logs cannot be kept, ValueError where it names cores that it may not use; and as `entries_of`.
    """

    def __init__(self, config: ClusterConfig, *, on_event: Callable[[str], None] | None = None) -> None:
        # On other nodes are other cores.
        cores = () if config.on == "ray" else named_cores(config.cores)
        self.config = config = replace(config, cores=cores)
        self._entries = entries_of(config)
        # As the router last had them: some may have been added since, and pools may have other sizes.
        self._models = tuple(model for model, *_ in self._entries)
        self._wanted: Mapping[str, int] = config.wanted
        self._served = tuple(AddModel(model=model, attention=count) for model, count, _ in self._entries)
        self._kept: tuple[AddModel, ...] = ()
        tls = config.tls_dir
        self._credentials = Credentials(tls / LAUNCHER, LAUNCHER) if tls is not None else None
        self._state = StateDir(config.state_dir)
        self.state_dir = self._state.path
        self._show = on_event or (lambda text: logger.info("%s", text))
        self._children: dict[int, Child] = {}
        self._environment: Mapping[str, str] = {}
        self._launched = 0
        self._experts_wanted = config.experts
        self._selector = selectors.DefaultSelector()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._failure: StartFailed | None = None
        self._router_addresses: dict[int, str] = {}
        # host:port of each router's admin listener, by slot; empty where there is none.
        self._admin_addresses: dict[int, str] = {}
        self._gateway_address = ""
        self._listener: socket.socket | None = None
        self._router: RouterClient | None = None
        self._ray: RayNodes | None = None
        self._launcher: Launcher | None = None
        # By pool and slot: how often in a row, and when last.
        self._restarts: dict[tuple[str, int], tuple[int, float]] = {}
        # Gateways of this host among the members, with their states, by pid.
        self._gateways: dict[int, str] = {}
        self._named: dict[str, str] = {}
        self._resume_key = secrets.token_bytes(32)
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._launch_thread = threading.Thread(target=self._follow_launches, name="launches", daemon=True)
        self._exits: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._exit_thread = threading.Thread(target=self._report_exits, name="exits", daemon=True)
        self._probe_thread = threading.Thread(target=self._probe_routers, name="probe", daemon=True)

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, timeout_s: float | None = None) -> None:
        """Start every part and return when the endpoint can answer; by default within START_S, COMPILED_S on GPUs.
        Raises StartFailed: a part did not become ready, with its name and the reason."""
        timeout_s = timeout_s or (COMPILED_S if self.config.gpus else START_S)
        try:
            if self.config.endpoint:
                self._listen()
            if self.config.on == "ray":
                self._ray = RayNodes(
                    self.config,
                    command=self._command,
                    tell=lambda text, failed: self._order(partial(self._heard, text, failed)),
                )
            else:
                self._environment = ready_gpus(self.config, self.state_dir)
        except (Exposed, ListenFailed, P2PError, RayUnusable) as error:
            self.stop()
            other = "Ray" if isinstance(error, RayUnusable) else "gateway"
            part = "GPUs" if isinstance(error, P2PError) else other
            raise StartFailed(f"{part}: {error}") from None
        self._supervisor.start()
        first = self.config.router_port
        for slot in range(self.config.routers):
            self._order(lambda slot=slot: self._spawn("router", slot, port=first and first + slot))
        if any(Device.parse(device).kind == CUDA for device in self.config.device):
            self._on_event("compiling kernels for GPUs: a minute or two, the first time")
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.05):
            if self._failure is not None:
                self.stop()
                raise self._failure
            if time.monotonic() > deadline:
                missing = self._missing()
                self.stop()
                raise StartFailed(f"After {timeout_s:.0f} s still not ready: {missing}. Logs were in {self.state_dir}.")

    def stop(self) -> None:
        """End every process, orderly first and by SIGKILL after `stop_s`; leaves nothing behind. Safe to repeat."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake()
        self._exits.put((0, ""))
        if self._supervisor.ident is not None:
            self._supervisor.join()
        for client in (self._router, self._launcher):
            if client is not None:
                client.close()
        for thread in (self._launch_thread, self._exit_thread, self._probe_thread):
            if thread.ident is not None:
                thread.join(timeout=2)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if self.config.etcd and self._router is not None:
            try:
                erase(Etcd(self.config.etcd, tls_dir=self.config.etcd_tls_dir), self.state_dir.name)
            except EtcdUnavailable as error:
                logger.warning("etcd_not_cleared cluster=%s reason=%s", self.state_dir.name, error)
        self._state.close()

    def _end_children(self) -> None:
        children = list(self._children.values())
        # Gateways go first so that no request meets a half-stopped cluster; the router last.
        for pool in ("gateway", "attention", "expert", "router"):
            for child in children:
                if child.pool.startswith(pool):
                    child.send(signal.SIGTERM)
                    child.send(signal.SIGCONT)
        deadline = time.monotonic() + self.config.stop_s
        if self._ray is not None:
            self._ray.end(self.config.stop_s)
        for child in children:
            with selectors.DefaultSelector() as waiter:
                waiter.register(child.pidfd, selectors.EVENT_READ)
                waiter.select(max(0.0, deadline - time.monotonic()))
            child.send(signal.SIGKILL)
            child.reap()
        self._children.clear()

    @property
    def url(self) -> str:
        """Base URL of the gateways, such as http://127.0.0.1:8000."""
        return f"{'https' if self.config.tls_cert else 'http'}://{self._gateway_address}"

    @property
    def admin_addresses(self) -> list[str]:
        """host:port of each router's admin listener."""
        return [address for _, address in sorted(self._admin_addresses.items())]

    @property
    def router_address(self) -> str:
        """host:port of the router; of several, all with commas between."""
        return ",".join(address for _, address in sorted(self._router_addresses.items()))

    def pids(self) -> dict[str, int]:
        """Pid of every process now running, by member name."""
        return {child.name: child.pid for child in list(self._children.values())}

    def _listen(self) -> None:
        """Take the endpoint's port, before anything starts: a large model takes minutes."""
        protected = {"tls": self.config.tls_cert is not None, "keys": self.config.asks_for_keys}
        self._listener = listen(self.config.host, self.config.port, **protected)
        self._gateway_address = address_of(self._listener)

    # -- the supervisor's thread -----------------------------------------------------------------------------------

    def _order(self, act: Callable[[], None]) -> None:
        self._orders.put(act)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # The pipe is full of wake-ups already.
            os.write(self._wake_write, b"!")

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            next_s = min((at_s for at_s, _ in self._due), default=None)
            timeout_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    continue
                child, is_exit = key.data
                self._carry_out(lambda child=child, act=self._ended if is_exit else self._report: act(child))
            for act in self._take_due():
                self._carry_out(act)
            while not self._stopping.is_set() and not self._orders.empty():
                self._carry_out(self._orders.get())

        # Here, not in `stop`: a child asked to die with its parent dies with the thread that started it.
        self._end_children()

    def _carry_out(self, act: Callable[[], None]) -> None:
        try:
            act()
        except StartFailed as failure:
            if self._ready.is_set():
                self._on_event(str(failure))
            else:
                self._failure = self._failure or failure
        except Exception:
            # The children end with this thread, so no fault of one act may end it.
            logger.exception("supervisor_act_failed")

    def _on_event(self, text: str) -> None:
        try:
            self._show(text)
        except (Exception, SystemExit) as error:
            # rich exits on a closed pipe; whoever reads may leave, we stay.
            logger.warning("event_not_shown text=%s reason=%r", text, error)

    def _spawn(self, pool: str, slot: int, port: int) -> None:
        self._launched += 1
        role = pool.partition(":")[0]
        log = self.state_dir / f"{role}.{self._launched}.log"
        try:
            self._state.ensure()
            if pool == "router":
                self._keep_models()
            if self.config.api_key:
                # Each time: the folder may have been made anew.
                write_keys(self.state_dir / KEYS_FILE, keys_of([digest_of(key) for key in self.config.api_key]))
            if pool == GATEWAY:
                keep_secret(self.state_dir / RESUME_KEY_FILE, self._resume_key)
            child = Child.start(
                pool=pool,
                slot=slot,
                module=ROLES[role].module,
                arguments=self._arguments(pool, slot, port),
                log=log,
                environment=self._environment if role in (EXPERT, ATTENTION) else {},
                pass_fds=[self._listener.fileno()] if pool == GATEWAY and self._listener else (),
            )
        except (OSError, OrderFailed) as error:
            # The router counts on what it ordered; no process has the pid 0, so this reports a start that failed.
            self._exits.put((0, pool))
            raise StartFailed(f"{pool} could not be started: {error}") from error
        self._children[child.pid] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, (child, True))
        self._selector.register(child.ready_fd, selectors.EVENT_READ, (child, False))

    def _arguments(self, pool: str, slot: int, port: int, node: str = "") -> list[str]:
        context = LaunchContext(
            state_dir=self.state_dir,
            router_address=self.router_address,
            experts_wanted=self._experts_wanted,
            listen_fd=self._listener.fileno() if self._listener else -1,
            admin_address=self._admin_addresses.get(slot, ""),
            node=node or (self._ray.address if self._ray else LOOPBACK),
            model=self._path_of(pool.partition(":")[2]),
        )
        return arguments(child_options(self.config, context, pool, slot, port))

    def _path_of(self, name: str) -> Path | None:
        """Folder of a model by its name, None of the first. Raises OrderFailed."""
        # With a lost journal the first may be another than at the start: that one had been removed.
        first = next((Path(model.path) for model in self._models[:1] if model.path and not model.number), None)
        paths = {"": first} | {model.name: Path(model.path) for model in self._models if model.path}
        if name not in paths:
            raise OrderFailed(f"nobody said where the checkpoint of {name} is; `eaas models add` does")
        return paths[name]

    def _command(self, pool: str, node: str) -> list[str]:
        """What is to run on another node: its module and its arguments."""
        self._learn()
        return [ROLES[pool.partition(":")[0]].module, *self._arguments(pool, 0, 0, node)]

    def _report(self, child: Child) -> None:
        descriptor = child.ready_fd
        try:
            child.read_ready()
        finally:
            if child.ready_fd < 0:
                self._selector.unregister(descriptor)
        if child.ready is None:
            return
        if child.pool == "router":
            self._router_ready(child)
        self._heard(f"{child.name} ready")

    def _heard(self, text: str, is_failure: bool = False) -> None:
        """What became of a process, in words. Raises StartFailed: it could not start."""
        if is_failure:
            raise StartFailed(text)
        self._on_event(text)
        if not self._missing():
            self._ready.set()

    def _router_ready(self, child: Child) -> None:
        self._router_addresses[child.slot] = child.address
        if child.ready and "admin" in child.ready:
            self._admin_addresses[child.slot] = str(child.ready["admin"])
        if self._router is not None or len(self._router_addresses) < self.config.routers:
            return
        self._router = RouterClient(self.router_address, self._credentials)
        self._router.start(on_view=lambda view: self._order(lambda: self._look_at(view)))
        self._launch_thread.start()
        self._exit_thread.start()
        self._probe_thread.start()
        for slot in range(self.config.gateways if self.config.endpoint else 0):
            self._spawn(GATEWAY, slot, port=0)

    def _look_at(self, view: View) -> None:
        self._served = entries_after(view, self._wanted, self.config.first)
        if self._served != self._kept:
            self._keep_models()
        self._tell_models(view)
        self._look_at_gateways(view)

    def _keep_models(self) -> None:
        """Keep what is served apart from the journal: each router reads it when it begins to lead."""
        file = self.state_dir / MODELS_FILE
        written = file.with_suffix(".new")
        try:
            written.write_text(entries_text(self._served))
            written.replace(file)
            self._kept = self._served
        except OSError as error:
            # Without it all goes on, unless the journal is lost too; the next View tries again.
            logger.warning("models_not_kept file=%s reason=%s", file, error)

    def _look_at_gateways(self, view: View) -> None:
        """See which gateways drain, and which have been silent for so long that they are no members any more."""
        self._gateways = {it.pid: it.state for it in view.pool(GATEWAY) if it.host == host_id()}
        for child in [child for child in self._children.values() if child.pool == GATEWAY]:
            if (state := self._gateways.get(child.pid)) is not None:
                child.joined = True
            elif child.joined:
                self._later(SILENT_GATEWAY_S, partial(self._end_silent, child))
            if state == DRAINING and not child.replaced:
                start = partial(self._succeed, child)
                self._later(0.0, partial(self._until_started, child, start))

    def _tell_models(self, view: View) -> None:
        """Say which models have come or gone since this cluster became ready."""
        before, self._named = self._named, {model.hash: model.name for model in view.models if model.name}
        for those, others, what in ((self._named, before, "added"), (before, self._named, "removed")):
            for hash in those.keys() - others.keys():
                if self._ready.is_set():
                    self._on_event(f"model {those[hash]} {what}")

    def _succeed(self, child: Child) -> None:
        """Start the successor of a gateway that drains; it goes when it sees the new one among the members."""
        if not child.replaced:
            self._spawn(child.pool, child.slot, port=0)
            child.replaced = True

    def _end_silent(self, child: Child) -> None:
        """End a gateway that is still no member, if another serves: its clients resume their streams there.

        The only one holds streams that nobody else can go on with at once: it joins again when it wakes.
        """
        others = [pid for pid, state in self._gateways.items() if pid != child.pid and state != DRAINING]
        if child.pid not in self._gateways and others and self._children.get(child.pid) is child:
            self._on_event(f"{child.name} is silent, and ended: another serves")
            child.send(signal.SIGKILL)

    def _ended(self, child: Child) -> None:
        descriptor = child.ready_fd
        if descriptor >= 0:
            self._selector.unregister(descriptor)
            if not self._ready.is_set():
                child.read_ready()  # Its own words on why it failed, if it left any.
        self._selector.unregister(child.pidfd)
        del self._children[child.pid]
        status = child.reap()
        if child.pool != "router":
            self._exits.put((child.pid, child.pool))
        self._on_event(f"{child.name} ended ({_words(status)})")
        if not self._ready.is_set() and child.ready is None:
            raise StartFailed(
                f"{child.pool} ended ({_words(status)}) before it was ready. Its last words:\n{child.tail()}"
            )
        if child.pool in ("router", GATEWAY) and not child.replaced:
            self._restart(child, status)

    def _restart(self, child: Child, status: int) -> None:
        pool, slot = child.pool, child.slot
        address = self._router_addresses[slot] if pool == "router" else self._gateway_address
        port = int(address.rpartition(":")[2])
        # One that was told to end did not fail.
        delay_s = self._backoff_s(child) if status else 0.0
        self._later(delay_s, lambda: self._until_started(child, lambda: self._spawn(pool, slot, port=port)))

    def _until_started(self, child: Child, start: Callable[[], None]) -> None:
        """Start what no order of the router's asks for again, in a child's place: again and again, if there is no
        process to be had."""
        try:
            start()
        except StartFailed:
            self._later(self._backoff_s(child), lambda: self._until_started(child, start))
            raise

    def _backoff_s(self, child: Child) -> float:
        place, now_s = (child.pool, child.slot), time.monotonic()
        count, began_s = self._restarts.get(place, (0, -RESTART_MOST_S))
        count = 0 if now_s - began_s >= RESTART_MOST_S else count + 1
        pause_s = min(RESTART_FIRST_S * (2.0 ** min(count, 30) - 1.0), RESTART_MOST_S)
        # It lives from its start on: the pause before that is no sign of health.
        self._restarts[place] = count, now_s + pause_s
        return pause_s

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Carry out an act after a while; for the supervisor's thread."""
        self._due.append((time.monotonic() + delay_s, act))

    def _take_due(self) -> list[Callable[[], None]]:
        """Those that are due now: what they put off to now waits for exits, orders and the stop."""
        now_s = time.monotonic()
        due = [act for at_s, act in self._due if at_s <= now_s]
        self._due = [(at_s, act) for at_s, act in self._due if at_s > now_s]
        return due

    def _missing(self) -> str:
        """The parts to begin with that are not ready yet, in words; empty when all are."""
        config = self.config
        parts = {"router": config.routers, GATEWAY: config.gateways if config.endpoint else 0}
        wanted = parts | config.wanted
        ready = self._ray.ready if self._ray is not None else Counter[str]()
        ready.update(child.pool for child in self._children.values() if child.ready is not None)
        missing = {pool: count - ready[pool] for pool, count in wanted.items()}
        return ", ".join(f"{count} x {pool}" for pool, count in missing.items() if count > 0)

    # -- what the router orders --------------------------------------------------------------------------------------

    def _follow_launches(self) -> None:
        router = self._router_client()
        try:
            for entry in self._entries:
                router.add_model(*entry, timeout_s=START_S)
        except (OrderRefused, RouterUnavailable) as error:
            self._order(partial(self._heard, f"the router does not serve the models: {error}", True))
            return
        if self._ray is not None:
            name = f"ray/{self.state_dir.name}"
            self._launcher = Launcher(self.router_address, name, self._ray.carry, self._credentials)
            self._launcher.follow()
            return
        for command in router.launches(host_id(), self._starting):
            if self._stopping.is_set():
                return
            if isinstance(command, StartProcess):
                self._learn()
            self._order(lambda command=command: self._obey(command))

    def _learn(self) -> None:
        """Ask the router what a process of the pool is to be told; for a thread that may wait."""
        try:
            status = self._router_client().status(timeout_s=PROBE_S)
        except RouterUnavailable as error:
            logger.warning("wanted_unknown kept=%d reason=%s", self._experts_wanted, error)
            return
        self._wanted = {**self._wanted, **{name: size.wanted for name, size in status.pools.items()}}
        self._experts_wanted, self._models = status.pools[EXPERT].wanted, status.view.models

    def _starting(self) -> dict[str, int]:
        """Processes by pool that have been started and have not joined yet."""
        view = self._router_client().view
        joined = {member.pid for member in view.members if member.host == host_id()} if view else set[int]()
        # A worker joins long before it is ready; counted twice, it would hold up the next that is needed.
        pools = [c.pool for c in list(self._children.values()) if c.ready is None and c.pid not in joined]
        return {pool: count for pool, count in Counter(pools).items() if pool not in ("router", GATEWAY)}

    def _obey(self, command: StartProcess | StopProcess) -> None:
        if isinstance(command, StopProcess):
            child = self._children.get(command.pid)
            if child is not None and child.pool != GATEWAY:
                # One that was drained is well and ends in order. One that was fenced may be frozen.
                child.send(signal.SIGTERM)
                # Its slot, and so its device, is its successor's, which may be started before it has ended.
                child.replaced = True
                self._later(STOP_MOMENT_S, lambda: self._kill(child))
            return
        view = self._router.view if self._router is not None else None
        drained = {it.pid for it in view.members if it.state == "draining" and it.host == host_id()} if view else ()
        mine = [it for it in self._children.values() if it.pool == command.pool]
        # Nor does one that is drained keep its slot: beyond the slots of its pool lie other processes' devices.
        used = {it.slot for it in mine if not it.replaced and it.pid not in drained}
        slot = next(number for number in range(len(used) + 1) if number not in used)
        self._spawn(command.pool, slot, port=0)

    def _kill(self, child: Child) -> None:
        # Its pid may be another process's by now.
        if self._children.get(child.pid) is child:
            child.send(signal.SIGKILL)

    def _report_exits(self) -> None:
        """Tell the router of ended processes; on a thread of its own, for the router itself may be away."""
        router = self._router_client()
        while not self._stopping.is_set():
            pid, pool = self._exits.get()
            while not self._stopping.is_set():
                try:
                    router.report_exit(host_id(), pid, pool, timeout_s=1.0)
                    break
                except RouterUnavailable as error:
                    logger.warning("exit_report_delayed pid=%d reason=%s", pid, error)

    def _probe_routers(self) -> None:
        """End a router that has hung, so that it is started again: nobody else watches over it."""
        answered_s: dict[int, float] = {}
        while not self._stopping.wait(PROBE_S):
            routers = [child for child in list(self._children.values()) if child.pool == "router" and child.ready]
            for child in routers:
                now_s = time.monotonic()
                if answers(child.address, PROBE_S, self._credentials):
                    answered_s[child.pid] = now_s
                elif now_s - answered_s.setdefault(child.pid, now_s) > HUNG_S:
                    self._on_event(f"{child.name} has not answered for {HUNG_S:g} s")
                    child.send(signal.SIGKILL)

    def _router_client(self) -> RouterClient:
        if self._router is None:
            raise StartFailed("The router's address is not known yet; start the router first.")
        return self._router


def _words(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
