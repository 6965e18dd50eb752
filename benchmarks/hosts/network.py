"""Hosts on one machine: network namespaces, each with a port at a switch for every network that it is on.

A network is a bridge. What leaves a port, at either end, can be shaped, dropped in silence or unplugged; and a port's
frames can go through a process that is late with them and loses some (wire.py).

Needs root, `ip` and `tc` with tbf. `refusal()` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

# Every packet is larger than this burst, so all are dropped, and nobody is told.
_NOTHING = ("rate", "8bit", "burst", "10b", "limit", "10b")
_NAMES = Path("/etc/netns")
# Of the networks that this process makes.
_numbers = itertools.count()
Way = Literal["both", "out", "in"]


def refusal() -> str:
    """Why there can be no such network here; empty where there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs ip and tc, found no {' and no '.join(missing)} (Debian: iproute2)"
    name = f"eaas-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"needs the right to make network namespaces (root), found: {tried.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return ""


class Network:
    """Some hosts on some networks. A context manager.

    Args:
        hosts: Their names, at most 8 letters each.
        networks: Names of the networks, which each host's devices on them have too, at most 5 letters each.
        mbit: Of each port, both ways; None: as fast as it goes.
    """

    def __init__(self, hosts: Sequence[str], networks: Sequence[str], mbit: float | None = None) -> None:
        self.hosts, self.networks = tuple(hosts), tuple(networks)
        self.mbit = mbit
        number = next(_numbers)
        self._names = {host: f"eaas-{os.getpid()}-{number}-{host}" for host in (*hosts, "switch")}
        self._wires: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        try:
            for host, name in self._names.items():
                _run("ip", "netns", "add", name)
                self._ip(host, "link", "set", "lo", "up")
            for network in self.networks:
                self._ip("switch", "link", "add", network, "type", "bridge")
                self._ip("switch", "link", "set", network, "up")
                for host in self.hosts:
                    port = self._port(host, network)
                    _run(
                        "ip", "link", "add", network, "netns", self._names[host],
                        "type", "veth", "peer", "name", port, "netns", self._names["switch"],
                    )  # fmt: skip
                    self._ip(host, "addr", "add", f"{self.address(host, network)}/24", "dev", network)
                    self._ip(host, "link", "set", network, "up")
                    self._ip("switch", "link", "set", port, "master", network, "up")
                    self.heal(host, network)
            for host in self.hosts:
                self._await_carriers(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: str, network: str) -> str:
        return f"10.{77 + self.networks.index(network)}.0.{self.hosts.index(host) + 1}"

    def name_hosts(self, host: str, addresses: Mapping[str, Sequence[str]]) -> None:
        """Have names mean addresses on a host, as its /etc/hosts would."""
        # `ip netns exec` puts what lies there over /etc.
        folder = _NAMES / self._names[host]
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}\n" for name, found in addresses.items() for address in found]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def inside(self, host: str) -> list[str]:
        """What to put before a command that is to run on that host."""
        return ["ip", "netns", "exec", self._names[host]]

    def space(self, host: str) -> Path:
        """The host's namespace, as a file."""
        return Path("/run/netns") / self._names[host]

    def shape(self, host: str, network: str, mbit: float) -> None:
        """Set the port's rate, both ways."""
        self._queue(host, network, "both", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")

    def cut(self, host: str, network: str, way: Way = "both") -> None:
        """Drop every packet that the host sends there (out), that is sent to it (in), or both; in silence."""
        self._queue(host, network, way, *_NOTHING)

    def heal(self, host: str, network: str) -> None:
        if self.mbit is not None:
            self.shape(host, network, self.mbit)
            return
        for end, device in self._ends(host, network, "both"):
            command = ("tc", "-n", self._names[end], "qdisc", "del", "dev", device, "root")
            # There is none on a port that nothing was done to.
            subprocess.run(command, capture_output=True, check=False)

    def unplug(self, host: str, network: str) -> None:
        """Take the switch's port down: the host loses its carrier."""
        self._ip("switch", "link", "set", self._port(host, network), "down")

    def plug(self, host: str, network: str) -> None:
        self._ip("switch", "link", "set", self._port(host, network), "up")

    def delay(self, host: str, network: str, one_way_ms: float, loss: float) -> None:
        """Have each frame of this port, either way, come so much later, and that part of them not at all."""
        port = self._port(host, network)
        near, far, aside = f"n{port}", f"f{port}", f"b{port}"
        for tap in (near, far):
            self._ip("switch", "tuntap", "add", tap, "mode", "tap")
        self._ip("switch", "link", "add", aside, "type", "bridge")
        for device, master in ((near, aside), (far, network), (port, aside)):
            self._ip("switch", "link", "set", device, "master", master)
        for device in (near, far, aside):
            self._ip("switch", "link", "set", device, "up")
        command = (sys.executable, "-m", "benchmarks.hosts.wire", near, far, str(one_way_ms), str(loss))
        self._wires[port] = subprocess.Popen([*self.inside("switch"), *command])

    def undelay(self, host: str, network: str) -> None:
        """Make the port as it was before `delay`."""
        port = self._port(host, network)
        self._ip("switch", "link", "set", port, "master", network)
        _end(self._wires.pop(port))
        for device in (f"n{port}", f"f{port}", f"b{port}"):
            self._ip("switch", "link", "del", device)

    def processes(self, host: str) -> list[int]:
        """Pids of all that runs on a host."""
        found = subprocess.run(["ip", "netns", "pids", self._names[host]], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def counters(self, host: str, network: str) -> Mapping[str, int]:
        """bytes and packets that the host sent to a network, and that it received from it, since the start."""
        found: dict[str, int] = {}
        for way in ("tx", "rx"):
            for unit in ("bytes", "packets"):
                path = f"/sys/class/net/{network}/statistics/{way}_{unit}"
                said = subprocess.run([*self.inside(host), "cat", path], capture_output=True, text=True, check=True)
                found[f"{way}_{unit}"] = int(said.stdout)
        return found

    @staticmethod
    def _port(host: str, network: str) -> str:
        return f"{host}-{network}"

    def _ends(self, host: str, network: str, way: Way) -> list[tuple[str, str]]:
        out, into = (host, network), ("switch", self._port(host, network))
        return {"out": [out], "in": [into], "both": [out, into]}[way]

    def _queue(self, host: str, network: str, way: Way, *words: str) -> None:
        # In the foreground of a cut: one short command for each end.
        for end, device in self._ends(host, network, way):
            _run("tc", "-n", self._names[end], "qdisc", "replace", "dev", device, "root", "tbf", *words)

    def _ip(self, host: str, *words: str) -> None:
        _run("ip", "-n", self._names[host], *words)

    def _await_carriers(self, host: str) -> None:
        # The kernel says so some time after `up`, and UCX opens no device before.
        until_s = time.monotonic() + 5
        command = ("ip", "-n", self._names[host], "-o", "link", "show", "up", "type", "veth")
        while True:
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            if shown.count("state UP") == len(self.networks):
                return
            if time.monotonic() > until_s:
                raise OSError(f"the devices of host {host} have no carrier after 5 s: {shown}")
            time.sleep(0.02)

    def _remove(self) -> None:
        for wire in self._wires.values():
            _end(wire)
        for host, name in self._names.items():
            for pid in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(_NAMES / name, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
