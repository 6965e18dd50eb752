"""A cluster on five hosts, as its operators start it: each role by its documented command, TLS everywhere, three etcd.

    a  etcd  router  gateway            expert
    b  etcd  router  gateway            expert
    c  etcd                  attention  expert
    d                        attention  expert
    out                                           clients

Every host has an address of its own on three networks: `ctl` for control, API and etcd, `rail0` and `rail1` for rows.
What ends is started again after half a second, as systemd does by the units in deploy/systemd.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hosts.network import Network
from eaas.model.loader import resolve_model
from eaas.ops.credentials import make_certs
from router.host import HOST_VARIABLE

NETWORKS = ("ctl", "rail0", "rail1")
RAILS = NETWORKS[1:]
ROLES: Mapping[str, Sequence[str]] = {
    "a": ("etcd", "router", "gateway", "expert"),
    "b": ("etcd", "router", "gateway", "expert"),
    "c": ("etcd", "attention", "expert"),
    "d": ("attention", "expert"),
}
OUTSIDE = "out"
# Each means all gateways, in another order: half of the clients ask one of two first.
NAMES = {"one.test": 1, "two.test": -1}
STREAMS, TOKENS = 16, 160
# Part of a run's tokens after which a fault strikes.
AT = 0.3
RESTART_S = 0.5
LIMIT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The cluster, and what differs from how it is documented. roles: what runs on each host. transport: of all, with
    {host} for where it is. environment, prefix: of the
    processes of a host, variables, and what comes before their commands."""

    roles: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(ROLES))
    transport: str = f"shm+nixl:{','.join(RAILS)}"
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    prefix: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


@dataclass(frozen=True)
class Outcome:
    """What the clients of one run saw. stalls_ms: the longest time between two tokens, of each stream. tokens_per_s: of
    all together, between the first token and the last."""

    texts: list[list[str]]
    errors: list[str]
    stalls_ms: list[float]
    tokens_per_s: float


class Unit:
    """One process of a host, and its successors."""

    def __init__(self, host: str, role: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.host, self.role = host, role
        self._command, self._environment, self.log = command, environment, log
        self.process: subprocess.Popen[bytes] | None = None
        self.enabled = True
        self._ended_s = 0.0

    def tend(self, now_s: float) -> None:
        """Start it where it does not run and should, half a second after its end."""
        if self.process is not None and self.process.poll() is not None:
            self.process, self._ended_s = None, now_s
        if self.process is None and self.enabled and now_s - self._ended_s >= RESTART_S:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment,
                    start_new_session=True,
                )  # fmt: skip

    def terminate(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class HostsCluster:
    """Use as a context manager; ready when the first request can be answered and every expert has two replicas."""

    def __init__(self, network: Network, folder: Path, setting: Setting) -> None:
        self.network, self.folder, self.setting = network, folder, setting
        self._units: list[Unit] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._tending = threading.Thread(target=self._tend, daemon=True)

    def __enter__(self) -> HostsCluster:
        try:
            self._make_secrets()
            for host, roles in self.setting.roles.items():
                for number, role in enumerate(roles):
                    prefix = [*self.network.inside(host), *self.setting.prefix.get(host, ())]
                    command = [*prefix, *self._command(host, role)]
                    environment = {
                        **os.environ,
                        "XDG_CACHE_HOME": str(self.folder / host / "cache"),
                        # A namespace has the machine's name, and is another host.
                        HOST_VARIABLE: host,
                        **self.setting.environment.get(host, {}),
                    }
                    self._units.append(
                        Unit(host, role, command, environment, self.folder / f"{host}-{number}-{role}.log")
                    )
            self._tending.start()
            self.wait_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        if self._tending.ident is not None:
            self._tending.join()
        for unit in self._units:
            unit.kill()
            if unit.process is not None:
                unit.process.wait()

    # -- what its operators do

    def lose(self, host: str) -> None:
        """Its power fails: nothing that it sent leaves it any more, and all its processes end at once."""
        for network in NETWORKS:
            self.network.cut(host, network)
        self.stop(host)

    def stop(self, host: str, role: str = "") -> None:
        """Kill the processes of a host, or of one role there, until `resume`."""
        with self._lock:
            for unit in self._of(host, role):
                unit.enabled = False
                unit.kill()

    def resume(self, host: str, role: str = "") -> None:
        """Let them be started again, and reach the others."""
        for network in NETWORKS:
            self.network.heal(host, network)
        with self._lock:
            for unit in self._of(host, role):
                unit.enabled = True

    def kill(self, host: str, role: str) -> None:
        """Its process is started again."""
        with self._lock:
            for unit in self._of(host, role):
                unit.kill()

    def roll(self) -> None:
        """Replace every process by a new one, one after another, as `docs/deploy.md` says."""
        for pool in ("expert", "attention"):
            for name in [member["name"] for member in self._members() if member["pool"] == pool]:
                subprocess.run(
                    [
                        *self.network.inside(OUTSIDE),
                        *_eaas("retire", name, "--wait", "--tls-dir", str(self.folder / "certs")),
                        *("--router", self._routers),
                    ],
                    check=True,
                    capture_output=True,
                )
                self.wait_whole()
        for role in ("router", "gateway"):
            for host in self._where(role):
                with self._lock:
                    for unit in self._of(host, role):
                        unit.terminate()
                time.sleep(RESTART_S)
                self.wait_whole()

    def status(self) -> dict[str, Any] | None:
        """What a gateway says of the cluster; None while none answers."""
        done = subprocess.run([*self._outside("status")], capture_output=True, text=True, env=self._client_environment)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def _members(self) -> list[dict[str, Any]]:
        return (self.status() or {"members": []})["members"]

    def is_whole(self) -> bool:
        """Whether all serve, and every expert has two replicas."""
        state = self.status()
        if state is None:
            return False
        serving = [member["pool"] for member in state["members"] if member["state"] == "serving"]
        pools = ("gateway", "attention", "expert")
        return state["replicas_min"] >= 2 and all(serving.count(pool) == self._count(pool) for pool in pools)

    def wait_whole(self, limit_s: float = LIMIT_S) -> float:
        """Seconds until it is whole."""
        began_s = time.monotonic()
        while not self.is_whole():
            if time.monotonic() - began_s > limit_s:
                raise AssertionError(f"not whole after {limit_s:g} s: {self.status()}\n{self.last_words()}")
            time.sleep(0.3)
        return time.monotonic() - began_s

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"-- {unit.log.name}\n" + "\n".join(unit.log.read_text(errors="replace").splitlines()[-12:])
            for unit in self._units
            if unit.log.exists()
        )

    # -- what its clients see

    def stream(
        self, act: Callable[[], object] | None = None, *, streams: int = STREAMS, tokens: int = TOKENS
    ) -> Outcome:
        """All clients at once; `act` when AT of all tokens has come, and all clients again until it is done."""
        acting: Future[object] | None = None
        seen = list[Any]()
        with ThreadPoolExecutor(1) as thread:
            while not seen or (acting is not None and not acting.done()):
                for said in self._say(streams, tokens):
                    seen += said.get("seen", [])
                    if act is not None and acting is None and said.get("tokens", 0) >= AT * streams * tokens:
                        acting = thread.submit(act)
        if acting is not None:
            acting.result()
        elif act is not None:
            raise RuntimeError(f"the clients ended before anything could befall them: {seen[:2]}")
        times = np.array([at_s for one in seen for at_s in one["at_s"]])
        whole = [one for one in seen if (len(one["tokens"]), one["finish"]) == (tokens, ["length"])]
        return Outcome(
            texts=[one["tokens"] for one in seen],
            errors=[
                f"{one['error'] or one['finish']} after {len(one['tokens'])} tokens" for one in seen if one not in whole
            ],
            stalls_ms=[1e3 * float(np.diff(one["at_s"]).max(initial=0.0)) for one in seen],
            tokens_per_s=len(times) / float(np.ptp(times)),
        )

    def _say(self, streams: int, tokens: int) -> Iterator[dict[str, Any]]:
        with subprocess.Popen(
            self._outside("streams", str(streams), str(tokens)),
            stdout=subprocess.PIPE, text=True, env=self._client_environment,
        ) as client:  # fmt: skip
            yield from map(json.loads, client.stdout or ())

    # -- inside

    def _where(self, role: str) -> list[str]:
        return [host for host, roles in self.setting.roles.items() if role in roles]

    def _count(self, role: str) -> int:
        return sum(list(roles).count(role) for roles in self.setting.roles.values())

    def _of(self, host: str, role: str) -> list[Unit]:
        return [unit for unit in self._units if unit.host == host and role in ("", unit.role)]

    def _tend(self) -> None:
        while not self._stopping.wait(0.05):
            with self._lock:
                for unit in self._units:
                    unit.tend(time.monotonic())

    def _outside(self, verb: str, *words: str) -> list[str]:
        return [
            *self.network.inside(OUTSIDE),
            sys.executable,
            "-m",
            "benchmarks.hosts.outside",
            verb,
            self._urls,
            *words,
        ]

    @property
    def _urls(self) -> str:
        return ",".join(f"https://{name}:8000" for name in NAMES)

    @property
    def _routers(self) -> str:
        return ",".join(f"{self.network.address(host, 'ctl')}:7000" for host in self._where("router"))

    @property
    def _client_environment(self) -> dict[str, str]:
        return os.environ | {
            "EAAS_API_KEY": (self.folder / "key").read_text(),
            "SSL_CERT_FILE": str(self.folder / "certs" / "gateway" / "ca.pem"),
        }

    def _make_secrets(self) -> None:
        certs = self.folder / "certs"
        for host, roles in self.setting.roles.items():
            addresses = [self.network.address(host, "ctl"), *NAMES]
            for made in make_certs(certs, sorted({*roles} - {"etcd"}), hosts=addresses):
                shutil.copytree(made, self.folder / host / made.name)
            if {"etcd", "router"} & set(roles):
                # etcd obeys whoever has a certificate of its CA, so that it has one of its own.
                (made,) = make_certs(self.folder / "etcd-certs", ["router"], hosts=addresses)
                shutil.copytree(made, self.folder / host / "etcd-tls")
        make_certs(certs, ["operator"])
        (self.folder / "resume.key").write_bytes(os.urandom(32))
        (self.folder / "resume.key").chmod(0o600)
        done = subprocess.run(
            [*_eaas("keys", "new"), str(self.folder / "keys.json"), "clients", "--operator"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        (self.folder / "key").write_text(done.stdout.strip())

    def _command(self, host: str, role: str) -> list[str]:
        at, tls = self.network.address(host, "ctl"), self.folder / host
        etcds = {name: self.network.address(name, "ctl") for name in self._where("etcd")}
        if role == "etcd":
            files = {"trusted-ca-file": "ca.pem", "cert-file": "cert.pem", "key-file": "key.pem"}
            return [
                "etcd", "--name", host, "--data-dir", str(self.folder / host / "etcd"), "--logger", "zap",
                "--listen-client-urls", f"https://{at}:2379", "--advertise-client-urls", f"https://{at}:2379",
                "--listen-peer-urls", f"https://{at}:2380", "--initial-advertise-peer-urls", f"https://{at}:2380",
                "--initial-cluster", ",".join(f"{name}=https://{there}:2380" for name, there in etcds.items()),
                "--client-cert-auth", "--peer-client-cert-auth",
                # As for hosts far from each other: these are processes of one busy machine.
                "--heartbeat-interval", "200", "--election-timeout", "2000",
                *(f"--{name}={tls / 'etcd-tls' / file}" for name, file in files.items()),
                *(f"--peer-{name}={tls / 'etcd-tls' / file}" for name, file in files.items()),
            ]  # fmt: skip
        common = ["--tls-dir", str(tls / role), "--host", at]
        if role == "router":
            urls = ",".join(f"https://{there}:2379" for there in etcds.values())
            return _eaas(
                "router", *common, "--port", "7000", "--store", "etcd", "--etcd", urls,
                "--etcd-tls-dir", str(tls / "etcd-tls"), "--replicas", "2",
                "--experts", str(self._count("expert")), "--attention", str(self._count("attention")),
                "--number", str(self._where("router").index(host)),
            )  # fmt: skip
        common += ["--router", self._routers, "--model", str(resolve_model("demo"))]
        if role == "gateway":
            return _eaas(
                "gateway", *common, "--port", "8000", "--keys-file", str(self.folder / "keys.json"),
                "--tls-cert", str(tls / "gateway" / "cert.pem"), "--tls-key", str(tls / "gateway" / "key.pem"),
                "--resume-key-file", str(self.folder / "resume.key"), "--served-model-name", "demo",
            )  # fmt: skip
        common += ["--transport", self.setting.transport.format(host=host), "--trust-network"]
        if role == "attention":
            workers = self._where("attention")
            cores = range(os.cpu_count() or 1)[workers.index(host) :: len(workers)]
            return _eaas("attention", *common, "--cores", ",".join(map(str, cores)), "--kv-tokens", "16384")
        return _eaas("expert", *common, "--zone", host)


def _eaas(*words: str) -> list[str]:
    return [sys.executable, "-m", "eaas.ops.cli", *words]


@contextmanager
def hosts_cluster(
    setting: Setting | None = None, prepare: Callable[[Network, Path], None] = lambda network, folder: None
) -> Iterator[HostsCluster]:
    """The cluster on hosts made for it, which `prepare` may change, and keep files for in a folder of the cluster."""
    setting, memory = setting or Setting(), Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="eaas-hosts-", dir=memory if memory.is_dir() else None) as folder,
        Network([*setting.roles, OUTSIDE], NETWORKS) as network,
    ):
        gateways = [network.address(host, "ctl") for host, roles in setting.roles.items() if "gateway" in roles]
        network.name_hosts(OUTSIDE, {name: gateways[::way] for name, way in NAMES.items()})
        prepare(network, Path(folder))
        with HostsCluster(network, Path(folder), setting) as cluster:
            yield cluster
