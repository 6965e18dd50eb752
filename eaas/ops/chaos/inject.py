"""How a fault gets to its members: by pid or the router's gRPC on this host, or by a router's admin listener."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from eaas.cluster.status import GatewayUnreachable, fetch_status, said_by
from eaas.ops.chaos.plan import in_words
from p2p import thaw
from router.client import FaultRefused, RouterClient, RouterUnavailable
from router.faults import Fault

T = TypeVar("T")
# What a member's command line names.
_MODULES = (b"router", b"experts", b"eaas.worker", b"eaas.gateway")
# A process on its way in or out is no target of a choice among a pool; by its name it can be hit all the same.
_USABLE = ("serving", "suspect", "unreachable", "waiting")
_TIMEOUT_S = 5.0
# A fault hits at its time or not at all; a plan does not wait for a gateway that is frozen.
_STATUS_S = 1.0
# A signal goes by pid when the router does not take it within this time: longer than the router waits for a member to
# be told, or what it did late would be done twice.
_SIGNAL_S = 2.0


class ChaosRefused(RuntimeError):
    """The fault can't be injected; the text says why."""


def names_of(members: Iterable[Mapping[str, Any]], pool: str = "") -> list[str]:
    """Names of members, by pool and number; of a pool, only those at work. Args: members: With "name", "pool" and
    "state" each."""
    found = [m["name"] for m in members if not pool or (m["pool"] == pool and m["state"] in _USABLE)]
    return sorted(found, key=lambda name: (name.partition("/")[0], int(name.partition("/")[2])))


def pids_of(members: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Pids by name, of those that are known."""
    return {member["name"]: member["pid"] for member in members if member["pid"]}


class NotTaken(ChaosRefused):
    """The router, or a member, does not take the fault."""


def open_injector(url: str, admin: str = "", key_file: Path | None = None) -> Injector:
    """The way to a cluster. Raises ChaosRefused: nobody answers, or the key cannot be read.

    Args: url: of the gateway, on this host. admin: of the router's admin listener; then the gateway is not asked.
    key_file: with the key that it wants."""
    return ByAdmin(admin, key_file) if admin else ByGateway(url)


class ByGateway:
    """A cluster on this host. Every method raises ChaosRefused with the reason.

    A kill or a freeze goes through the router where that takes faults, so that it is counted and a freeze ends even if
    this process is killed; else by pid, which needs nothing else to work. The rest goes through the router alone.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._members: list[dict[str, Any]] = fetch_status(url)["members"]
        except GatewayUnreachable as error:
            raise ChaosRefused(str(error)) from None
        address = next((m["address"] for m in self._members if m["pool"] == "router"), "")
        self._router = RouterClient(address) if address else None
        self._frozen: dict[str, tuple[Frozen, dict[str, int]]] = {}

    def members(self) -> list[dict[str, Any]]:
        """{"name", "pool", "state"} of each that may be hit."""
        # A gateway that was killed or frozen on purpose answers nobody: who was there last is good enough.
        with suppress(GatewayUnreachable):
            self._members = fetch_status(self._url, _STATUS_S)["members"]
        return self._members

    def inject(self, names: Sequence[str], fault: Fault) -> tuple[str, str]:
        """Begin a fault; its id, and what was done, in words."""
        if fault.kind in ("kill", "freeze") and not fault.where:
            return self._signal(names, fault)
        for name in names:
            if name.partition("/")[0] == "router":
                raise ChaosRefused(f"{fault.kind} cannot be done to {name}; only kill and freeze at once can.")
        return self._ask(lambda client: client.inject(names, fault)), in_words(names, fault)

    def _signal(self, names: Sequence[str], fault: Fault) -> tuple[str, str]:
        pids = {name: pid for name, pid in pids_of(self._members).items() if name in names}
        id = ""
        if any(m["pool"] == "router" and m["state"] == "serving" for m in self._members):
            with suppress(ChaosRefused):  # Not started with --allow-chaos, or not for this member.
                id = self._ask(lambda client: client.inject(names, fault, timeout_s=_SIGNAL_S))
        if fault.kind == "kill":
            if not id:
                # Opened first: none is killed where one is unknown.
                with _opened(pids_of(self._members), names) as opened:
                    for name, pidfd in opened.items():
                        _send(pidfd, signal.SIGKILL, name)
            return id, "killed " + ", ".join(f"{name} (pid {pids.get(name, '?')})" for name in names)
        try:
            frozen = Frozen(pids_of(self._members), names, stop=not id)
        except ChaosRefused:
            if not id:
                raise
            # On another host: nobody here can thaw it, and it need not be.
        else:
            id = id or ",".join(names)
            self._frozen[id] = (frozen, pids)
        return id, f"froze {', '.join(names)} for {fault.for_s:g} s"

    def over(self) -> set[str]:
        """Ids of faults known to be over; one that is not known any more may last."""
        thawed = {id for id, (frozen, _) in self._frozen.items() if not frozen.lasts()}
        told = self._ask(lambda client: client.faults(timeout_s=_SIGNAL_S))
        return thawed | {one.fault.id for one in told if not one.active and one.fault.id not in self._frozen}

    def end(self, id: str, early: bool) -> str:
        """End a fault that `inject` began, before its time or when that has come; how it went, in words."""
        if id in self._frozen:
            frozen, pids = self._frozen.pop(id)
            return self._thaw(frozen, pids)
        if early:
            self._ask(lambda client: client.clear(id))
            return "cleared"
        return "over"

    def _thaw(self, frozen: Frozen, pids: dict[str, int]) -> str:
        ended = frozen.thaw()
        now = pids_of(self.members())
        replaced = [name for name, pid in pids.items() if name in ended or now.get(name) != pid]
        thawed = [name for name in pids if name not in replaced]
        said = [f"thawed {', '.join(thawed)}"] if thawed else []
        if replaced:
            said.append(f"{', '.join(replaced)} {'was' if len(replaced) == 1 else 'were'} replaced while frozen")
        return "; ".join(said)

    def clear(self, id: str) -> list[str]:
        """End a fault, or with an empty id all, before their time; ids of those ended.

        Frozen processes have their names as ids; nobody else may be there to thaw them.
        """
        pids = pids_of(self._members)
        frozen = [name for name in stopped(pids) if not id or name in id.split(",")]
        Frozen(pids, frozen, stop=False).thaw()
        if id and frozen:
            return frozen
        try:
            return frozen + self._ask(lambda client: client.clear(id))
        except NotTaken:
            # Nothing can have been injected through a router that takes nothing.
            return frozen

    def faults(self) -> list[dict[str, Any]]:
        """{"fault": {...}, "names": [...], "remaining_s": 3.2} of each that lasts, and of the latest that are over."""
        told = self._ask(lambda client: client.faults())
        known = {name for one in told if one.remaining_s > 0 for name in one.names}
        frozen = [name for name in stopped(pids_of(self._members)) if name not in known]
        found = [(one.fault.to_dict(), list(one.names), one.remaining_s) for one in told]
        found += [({"id": name, "kind": "freeze"}, [name], None) for name in frozen]
        return [{"fault": fault, "names": names, "remaining_s": remaining_s} for fault, names, remaining_s in found]

    def _ask(self, ask: Callable[[RouterClient], T]) -> T:
        if self._router is None:
            raise ChaosRefused(f"The gateway at {self._url} names no router, and only that can do this.")
        try:
            return ask(self._router)
        except FaultRefused as error:
            raise NotTaken(str(error)) from None
        except RouterUnavailable as error:
            raise ChaosRefused(str(error)) from None

    def close(self) -> None:
        """Let go of the connection; what is injected stays until its time is over."""
        if self._router is not None:
            self._router.close()


class ByAdmin:
    """A cluster anywhere, through its router's admin listener. Its methods are those of ByGateway."""

    def __init__(self, address: str, key_file: Path | None) -> None:
        self._address = (address if "://" in address else f"http://{address}").rstrip("/")
        self._headers = {"content-type": "application/json"}
        if key_file is not None:
            try:
                key = key_file.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ChaosRefused(f"--key-file {key_file} cannot be read as ASCII: {error}") from None
            self._headers["authorization"] = f"Bearer {key}"
        self.members()

    def members(self) -> list[dict[str, Any]]:
        return self._ask("GET")["members"]

    def inject(self, names: Sequence[str], fault: Fault) -> tuple[str, str]:
        id = self._ask("POST", {"names": list(names), "fault": fault.to_dict()})["fault"]["id"]
        return id, in_words(names, fault)

    def over(self) -> set[str]:
        return {one["fault"]["id"] for one in self.faults() if not one["remaining_s"]}

    def end(self, id: str, early: bool) -> str:
        if early:
            self.clear(id)
            return "cleared"
        return "over"

    def clear(self, id: str) -> list[str]:
        return self._ask("DELETE", path=f"/{urllib.parse.quote(id)}" if id else "")["cleared"]

    def faults(self) -> list[dict[str, Any]]:
        return self._ask("GET")["faults"]

    def _ask(self, method: str, body: dict[str, Any] | None = None, path: str = "") -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._address}/admin/faults{path}",
            method=method,
            headers=self._headers,
            data=json.dumps(body).encode() if body is not None else None,
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            other = f"{error.url} answered {error.code}, and not as an admin listener does."
            raise ChaosRefused(said_by(error) or other) from None
        except (OSError, ValueError) as error:
            raise ChaosRefused(
                f"No admin listener answers at {self._address} ({error}). `eaas serve --admin-port 0` prints one."
            ) from None

    def close(self) -> None:
        """Nothing is held."""


Injector = ByGateway | ByAdmin

# By pid: what a crash and a hung host look like from outside. It needs nothing of the cluster but the gateway's list of
# pids, and works on the router and the gateway as well, and while the router is dead.


def stopped(pids: Mapping[str, int]) -> list[str]:
    """Members that are stopped now, whoever did that."""
    return [name for name, pid in pids.items() if _is_stopped(pid)]


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


class Frozen:
    """Members stopped with SIGSTOP, until `thaw`, or until this process ends, even by SIGKILL."""

    def __init__(self, pids: Mapping[str, int], names: Sequence[str], *, stop: bool = True) -> None:
        """Args: pids: of every member, by name. stop: False: others have stopped them, or will at once.

        Raises:
            ChaosRefused: one cannot be frozen; then none is.
        """
        self._opened: dict[str, int] = {}
        self._pids = pids
        self._waker: subprocess.Popen[bytes] | None = None
        with _opened(pids, names) as opened:
            try:
                if stop and opened:
                    self._waker = _waker(list(opened.values()))
                for name, pidfd in opened.items():
                    if stop and _is_stopped(pids[name]):
                        # Whoever wakes it from one freeze wakes it from both.
                        raise ChaosRefused(f"{name} is frozen already; clear that, or let it end.")
                    # Kept before it is stopped, so that whatever interrupts this thaws it.
                    self._opened[name] = os.dup(pidfd)
                    if stop:
                        _send(pidfd, signal.SIGSTOP, name)
            except BaseException:
                self.thaw()
                raise

    def lasts(self) -> bool:
        """Whether one of them is stopped still."""
        return any(_is_stopped(self._pids[name]) for name in self._opened)

    def thaw(self) -> list[str]:
        """Let them go on; returns those that have ended meanwhile."""
        ended: list[str] = []
        while self._opened:
            name, pidfd = self._opened.popitem()
            # Looked at before it may run again: one that was replaced is killed, or ends as soon as it wakes.
            if select.select([pidfd], [], [], 0)[0]:
                ended.append(name)
            with suppress(ProcessLookupError):  # It was fenced and ended: nothing to thaw.
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
        waker, self._waker = self._waker, None
        if waker is not None:
            # Waited for: a waker that is late must not end the next freeze.
            waker.communicate()
        return sorted(ended)


def _waker(pidfds: list[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(thaw.__file__)), ",".join(map(str, pidfds))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=pidfds,
        # A signal for this process's group must not end the one that outlives it.
        start_new_session=True,
    )


@contextmanager
def _opened(pids: Mapping[str, int], names: Sequence[str]) -> Iterator[dict[str, int]]:
    opened: dict[str, int] = {}
    try:
        for name in names:
            opened[name] = _open_member(pids, name)
        yield opened
    finally:
        for pidfd in opened.values():
            os.close(pidfd)


def _open_member(pids: Mapping[str, int], target: str) -> int:
    pid = pids.get(target)
    if not pid:
        raise ChaosRefused(f"No member {target!r} here; name one of: {', '.join(pids) or 'nobody'}.")
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ChaosRefused(f"{target} (pid {pid}) has just ended, or runs on another host.") from None
    # The pid is the gateway's word; make sure that it still names a process of ours before a signal goes there.
    with suppress(OSError), Path(f"/proc/{pid}/cmdline").open("rb") as file:
        command = file.read().split(b"\0")
        if any(module in command for module in _MODULES):
            return pidfd
    os.close(pidfd)
    raise ChaosRefused(f"Pid {pid} is not a process of EaaS on this host; {target} runs elsewhere or has ended.")


def _send(pidfd: int, number: signal.Signals, target: str) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        raise ChaosRefused(f"{target} has ended by itself.") from None
    except PermissionError:
        raise ChaosRefused(f"{target} belongs to another user; run this as the user who started the cluster.") from None
