"""Failures injected into processes of a local cluster: what a crash and a hung host look like from outside."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from eaas.cluster.status import GatewayUnreachable, fetch_status


class ChaosRefused(RuntimeError):
    """The fault can't be injected; the text says why."""


def kill_member(url: str, target: str) -> int:
    """End member `target` of the cluster behind `url` with SIGKILL; returns its pid.

    Raises:
        ChaosRefused: no such member, no gateway, or a process of another host or user.
    """
    pid, pidfd = _open_member(url, target)
    try:
        _send(pidfd, signal.SIGKILL, target)
    finally:
        os.close(pidfd)
    return pid


def freeze_member(url: str, target: str, for_s: float) -> bool:
    """Stop member `target` with SIGSTOP for `for_s` seconds; it is thawed even when interrupted.

    Returns:
        True when the process was thawed alive, False when it was replaced in the meantime.

    Raises:
        ChaosRefused: as for `kill_member`.
    """
    _, pidfd = _open_member(url, target)
    try:
        _send(pidfd, signal.SIGSTOP, target)
        try:
            ended, _, _ = select.select([pidfd], [], [], for_s)
        finally:
            with suppress(ProcessLookupError):  # It was fenced and ended: nothing to thaw.
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        return not ended
    finally:
        os.close(pidfd)


def _open_member(url: str, target: str) -> tuple[int, int]:
    try:
        members = fetch_status(url)["members"]
    except GatewayUnreachable as error:
        raise ChaosRefused(str(error)) from None
    pids = {member["name"]: member["pid"] for member in members}
    pid = pids.get(target)
    if not pid:
        raise ChaosRefused(
            f"No member {target!r} here. The cluster at {url} has: {', '.join(pids) or 'none'}."
        )
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ChaosRefused(f"{target} (pid {pid}) has just ended, or runs on another host.") from None
    # The pid is the gateway's word; make sure that it still names a process of ours before a signal goes there.
    with suppress(OSError), Path(f"/proc/{pid}/cmdline").open("rb") as file:
        command = file.read().split(b"\0")
        if any(module in command for module in (b"router", b"experts", b"eaas.attention", b"eaas.gateway")):
            return pid, pidfd
    os.close(pidfd)
    raise ChaosRefused(
        f"Pid {pid} is not a process of EaaS on this host; {target} runs elsewhere or has ended."
    )


def _send(pidfd: int, number: signal.Signals, target: str) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        raise ChaosRefused(f"{target} has ended by itself.") from None
    except PermissionError:
        raise ChaosRefused(
            f"{target} belongs to another user; run this as the user who started the cluster."
        ) from None
