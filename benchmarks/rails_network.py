"""Two hosts on one machine: network namespaces joined by several veth pairs, each a rail of its own rate.

Needs root, `ip` and `tc` with tbf. `refusal()` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from types import TracebackType

# Every packet is larger than this burst, so all are dropped, and nobody is told.
_NOTHING = ("rate", "8bit", "burst", "10b", "limit", "10b")


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
    """Hosts "a" and "b". A context manager.

    Args:
        mbit: Of each rail, both ways.
    """

    def __init__(self, rails: int, mbit: float = 200) -> None:
        self.rails = rails
        self.mbit = mbit
        self._hosts = {host: f"eaas-{os.getpid()}-{host}" for host in "ab"}

    def __enter__(self) -> Network:
        try:
            for host, name in self._hosts.items():
                _run("ip", "netns", "add", name)
                self._ip(host, "link", "set", "lo", "up")
            for rail in range(self.rails):
                ends = {host: self.device(host, rail) for host in "ab"}
                _run(
                    "ip", "link", "add", ends["a"], "netns", self._hosts["a"],
                    "type", "veth", "peer", "name", ends["b"], "netns", self._hosts["b"],
                )  # fmt: skip
                for number, host in enumerate("ab", 1):
                    self._ip(host, "addr", "add", f"10.{77 + rail}.0.{number}/24", "dev", ends[host])
                    self._ip(host, "link", "set", ends[host], "up")
                self.shape(rail, self.mbit)
            for host in "ab":
                self._await_carriers(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def device(self, host: str, rail: int) -> str:
        """Name of the rail's device on that host."""
        return f"rail{host}{rail}"

    def devices(self, host: str) -> list[str]:
        return [self.device(host, rail) for rail in range(self.rails)]

    def inside(self, host: str) -> list[str]:
        """What to put before a command that is to run on that host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def shape(self, rail: int, mbit: float) -> None:
        """Set the rail's rate, both ways."""
        for host in "ab":
            self._queue(host, rail, "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")

    def cut(self, rail: int) -> None:
        """Drop every packet, in silence."""
        for host in "ab":
            self._queue(host, rail, *_NOTHING)

    def heal(self, rail: int) -> None:
        self.shape(rail, self.mbit)

    def unplug(self, rail: int) -> None:
        """Take the device down at one end: the other end loses its carrier."""
        self._ip("b", "link", "set", self.device("b", rail), "down")

    def plug(self, rail: int) -> None:
        self._ip("b", "link", "set", self.device("b", rail), "up")

    def _queue(self, host: str, rail: int, *words: str) -> None:
        # In the foreground of a cut: one short command for each end.
        command = ("tc", "qdisc", "replace", "dev", self.device(host, rail), "root", "tbf", *words)
        _run(*self.inside(host), *command)

    def _ip(self, host: str, *words: str) -> None:
        _run("ip", "-n", self._hosts[host], *words)

    def _await_carriers(self, host: str) -> None:
        # The kernel says so some time after `up`, and UCX opens no device before.
        until_s = time.monotonic() + 5
        command = ("ip", "-n", self._hosts[host], "-o", "link", "show", "up", "type", "veth")
        while True:
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            if shown.count("state UP") == self.rails:
                return
            if time.monotonic() > until_s:
                raise OSError(f"the rails of host {host} have no carrier after 5 s: {shown}")
            time.sleep(0.02)

    def _remove(self) -> None:
        for name in self._hosts.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
