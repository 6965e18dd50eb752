"""A launcher for processes that EaaS does not start itself: each order of the router becomes one command or one POST.

    eaas launcher --router 127.0.0.1:7000 --exec ./start-or-stop.sh
    eaas launcher --router 127.0.0.1:7000 --host cloud --webhook https://fleet.example/eaas

The router says which pool needs one more process and which member's process must end; whoever carries that out
answers only for having tried. A try that failed is reported as a start that failed, so that the router waits longer
before the next. What was started outlives the launcher, and joins the router under the launcher's host name.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from router import child
from router.access import LAUNCHER, is_loopback
from router.client import RouterClient, RouterUnavailable
from router.config import START_TRIES_S, LauncherOptions
from router.events import StartProcess, StopProcess
from router.host import HOST_VARIABLE, host_id
from router.state import Config
from router.tls import Credentials, CredentialsInvalid
from router.view import View, launched_pool

log = logging.getLogger("router.launcher")

_BACKOFF_FIRST_S = 0.5
_BACKOFF_MOST_S = 30.0
# Linux gives no process a pid from here on (PID_MAX_LIMIT).
_PID_LIMIT = 1 << 22
# Answers that another try may better: too early, too many, or the far side's own trouble.
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class OrderFailed(Exception):
    """An order could not be carried out; the text says why. pid: of the command that ended, if there was one.
    is_final: another try cannot help."""

    def __init__(self, message: str, *, pid: int = 0, is_final: bool = False) -> None:
        super().__init__(message)
        self.pid = pid
        self.is_final = is_final


class LauncherInvalid(ValueError):
    """The launcher cannot be set up as asked."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One thing to do. key: the same for every try of this order.

    pid: of the member's process. For a start elsewhere the number under which it must join, above every real pid; 0 for
    one on this machine, which joins under its own. until_s: on the monotonic clock, no try may last longer.
    """

    key: str
    action: str
    pool: str
    host: str
    router: str
    member: str = ""
    pid: int = 0
    until_s: float = math.inf

    @property
    def said(self) -> dict[str, str | int]:
        """What whoever carries it out is told, by name."""
        return {name: getattr(self, name) for name in ("action", "pool", "member", "pid", "host", "router")}


def run_command(order: Order, command: str, timeout_s: float) -> int:
    """Run a shell command, with the order in its environment, to its end; returns its pid.

    A start may take as long as it likes: the command may be the process that was asked for, in the foreground.

    Raises:
        OrderFailed: it ended with a status other than 0, or a stop took longer than timeout_s.
    """
    told = {f"EAAS_{name.upper()}": str(value) for name, value in order.said.items()}
    try:
        # A session of its own: what is started here outlives the launcher and its terminal.
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **told, "EAAS_ORDER": order.key},
            start_new_session=True,
        )
    except OSError as error:
        raise OrderFailed(f"the command cannot be run: {error}") from error
    try:
        status = process.wait(None if order.action == "start" else timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise OrderFailed(f"the command ran for over {timeout_s:g} s and was ended") from None
    if status != 0:
        raise OrderFailed(f"the command ended with status {status}", pid=process.pid)
    return process.pid


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A followed redirect would turn the POST into a GET, or carry the key to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


def post(order: Order, url: str, timeout_s: float, key: str = "") -> int:
    """POST the order as JSON, with an Idempotency-Key that stays the same from try to try; returns 0.

    Raises:
        OrderFailed: no answer in time, or another status than 2xx.
    """
    headers = {"content-type": "application/json", "idempotency-key": order.key}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(order.said).encode(), headers, method="POST")
    try:
        left_s = min(timeout_s, max(0.1, order.until_s - time.monotonic()))
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=left_s):
            return 0
    except urllib.error.HTTPError as error:
        with error:
            raise OrderFailed(f"{url} answered {error.code}", is_final=error.code not in _TRY_AGAIN) from None
    except (OSError, ValueError) as error:
        raise OrderFailed(f"{url} did not answer: {error}") from error


def _webhook(options: LauncherOptions) -> Callable[[Order], int]:
    url = urllib.parse.urlsplit(options.webhook)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise LauncherInvalid(f"--webhook {options.webhook} found, an http:// or https:// address needed")
    key = ""
    if options.webhook_key_file:
        try:
            key = options.webhook_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LauncherInvalid(f"--webhook-key-file cannot be read: {error}") from error
        if not key or not key.isascii() or not key.isprintable():
            raise LauncherInvalid(f"{options.webhook_key_file} holds no key: one line of printable ASCII")
        if url.scheme == "http" and not is_loopback(url.hostname):
            raise LauncherInvalid(
                f"--webhook {options.webhook} would carry the key unencrypted to another host; use https://"
            )
    return partial(post, url=options.webhook, timeout_s=options.timeout_s, key=key)


class Launcher:
    """Follows the router's orders for one host; each order on a thread of its own, so that none waits for another."""

    def __init__(self, router: str, host: str, carry: Callable[[Order], int], credentials: Credentials | None) -> None:
        """Nothing is sent yet.

        Args:
            host: Name under which to take orders.
            carry: Carries an order out; gives the pid, or the order's, of what has ended, else 0. Raises OrderFailed.
        """
        self._carry, self._tries = carry, {"start": 1, "stop": 1}
        self._router, self._host = router, host
        self._is_here = self._host == host_id()
        self._client = RouterClient(router, credentials)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Starts that have neither failed nor joined, oldest first: key -> (pool, when ordered).
        self._starting: dict[str, tuple[str, float]] = {}
        self._members: set[str] = set()

    @classmethod
    def of(cls, options: LauncherOptions) -> Launcher:
        """By command or by webhook.

        Raises:
            LauncherInvalid: the address makes no sense, or the key file cannot be read.
            CredentialsInvalid: as --tls-dir says.
        """
        carry = (
            _webhook(options)
            if options.webhook
            else partial(run_command, command=options.exec, timeout_s=options.timeout_s)
        )
        proof = child.credentials(options, LAUNCHER)
        launcher = cls(options.router, options.host or host_id(), carry, proof)
        # A command that starts a process may have done so before it failed; only the router may order another.
        launcher._tries = {"start": options.tries if options.webhook else 1, "stop": options.tries}
        return launcher

    def follow(self) -> None:
        """Carry out orders until `close`."""
        self._client.start(on_view=self._see)
        for command in self._client.launches(self._host, self._present_starts):
            order = self._order(command)
            log.info("ordered action=%s pool=%s member=%s", order.action, order.pool, order.member)
            if order.action == "start":
                with self._lock:
                    self._starting[order.key] = (order.pool, time.monotonic())
            threading.Thread(target=self._carry_out, args=(order,), name=order.key, daemon=True).start()

    def close(self) -> None:
        """Detach. What was started goes on."""
        self._closed.set()
        self._client.close()

    def _order(self, command: StartProcess | StopProcess) -> Order:
        made = partial(Order, key=str(uuid.uuid4()), host=self._host, router=self._router)
        if isinstance(command, StopProcess):
            pool = command.name.partition("/")[0]
            return made(action="stop", pool=pool, member=command.name, pid=command.pid)
        pid = 0 if self._is_here else _PID_LIMIT + secrets.randbelow((1 << 31) - _PID_LIMIT)
        return made(action="start", pool=command.pool, pid=pid, until_s=time.monotonic() + START_TRIES_S)

    def _carry_out(self, order: Order) -> None:
        if order.action == "stop" and (foreign := self._foreign(order.pid)):
            log.error("not_stopped member=%s pid=%d reason=%s", order.member, order.pid, foreign)
            return
        for number, wait_s in enumerate(_backoff(), start=1):
            try:
                pid = self._carry(order)
            except OrderFailed as error:
                said = (order.action, order.pool, order.member, number, error)
                log.warning("order_failed action=%s pool=%s member=%s try=%d reason=%s", *said)
                if error.is_final or number >= self._tries[order.action] or time.monotonic() + wait_s >= order.until_s:
                    self._give_up(order, error.pid)
                    return
                if self._closed.wait(wait_s):
                    return
            else:
                log.info("done action=%s pool=%s member=%s", order.action, order.pool, order.member)
                self._report(pid, "")
                return

    def _foreign(self, pid: int) -> str:
        """Why a process must not be ended, or empty: a member may claim any pid, and a command may kill by it.

        What an earlier launcher of this host started is this one's to end too: the proof is what a start leaves
        in the process's environment, or, elsewhere, a number that no process has and only a launcher gives.
        """
        if pid <= 1:
            return "no pid of a member"
        if not self._is_here:
            return "" if pid >= _PID_LIMIT else "no number of an order"
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError as error:
            return f"it has ended, or is not ours: {error}"
        mark = f"{HOST_VARIABLE}={self._host}".encode()
        return "" if mark in environment else f"no launcher started it: {HOST_VARIABLE} is not this host there"

    def _give_up(self, order: Order, pid: int) -> None:
        if order.action == "stop":
            log.error("not_stopped member=%s pid=%d: end it by hand", order.member, order.pid)
            return
        with self._lock:
            never_joined = self._starting.pop(order.key, None) is not None
        self._report(pid, order.pool if never_joined else "")

    def _report(self, pid: int, pool: str) -> None:
        """Tell the router of a process of this host that ended (pid), of a start that failed (pool), or both."""
        # Only on its own machine does a pid name the process: elsewhere another may have it. An order's number does.
        pid = pid if self._is_here or pid >= _PID_LIMIT else 0
        if not pid and not pool:
            return
        for wait_s in _backoff():
            try:
                self._client.report_exit(self._host, pid, pool)
                return
            except RouterUnavailable as error:
                log.warning("report_delayed pid=%d pool=%s reason=%s", pid, pool, error)
            if self._closed.wait(wait_s):
                return

    def _see(self, view: View) -> None:
        present = {it.name: launched_pool(view, it) for it in view.members if it.host == self._host}
        with self._lock:
            for name in present.keys() - self._members:
                joined = [key for key, (pool, _) in self._starting.items() if pool == present[name]]
                if joined:
                    del self._starting[joined[0]]
            self._members = set(present)

    def _present_starts(self) -> Mapping[str, int]:
        # After so long the router has given up on a start, and may have ordered another.
        since_s = time.monotonic() - Config.start_s
        with self._lock:
            self._starting = {key: start for key, start in self._starting.items() if start[1] > since_s}
            return Counter(pool for pool, _ in self._starting.values())


def _backoff() -> Iterator[float]:
    wait_s = _BACKOFF_FIRST_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _BACKOFF_MOST_S)


def main(options: LauncherOptions) -> int:
    """Carry out orders until SIGTERM or SIGINT. Raises as Launcher does. Returns the exit code."""
    launcher = Launcher.of(options)
    child.on_signals(launcher.close, signal.SIGTERM, signal.SIGINT)
    child.tell_ready(options, "launcher/0", options.router)
    launcher.follow()
    return 0


if __name__ == "__main__":
    sys.exit(child.start("launcher", LauncherOptions, main, (ValueError, CredentialsInvalid)))
