"""A transport tried out between two processes of this host: `python -m p2p.trial nixl:eth0` measures it.

Over this host only: it tells whether a transport and its rails work and what they cost in software, not how fast
the wire between two hosts is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from p2p.endpoint import Endpoint, P2PError, Status
from p2p.transport import TransportChoice

ROUND_TRIP_BYTES: Final = 4096
BULK_BYTES: Final = 16 << 20
LIMIT_S: Final = 20.0

_DATA: Final = 4096
_WINDOW_BYTES: Final = _DATA + BULK_BYTES
_TRIPS: Final = 200
_BULKS: Final = 5
_OWN, _OTHER = 1, 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of it: why it cannot be used, or what was measured through the Python interface."""

    choice: str
    problem: str = ""
    round_trip_us: float = 0.0
    bandwidth_bytes_per_s: float = 0.0

    @property
    def usable(self) -> bool:
        return not self.problem


def try_out(choice: str, limit_s: float = LIMIT_S) -> Trial:
    """Move bytes between this process and another that it starts; at most about `limit_s`."""
    try:
        endpoint = TransportChoice.parse(choice).opener(on_device=True)("trial", _OWN, 1)
    except (P2PError, OSError, ValueError) as error:
        return Trial(choice=choice, problem=str(error))
    command = [sys.executable, "-m", "p2p.trial", "--echo", choice]
    try:
        # From where this package lies: another p2p may lie in the working directory.
        root = Path(__file__).resolve().parent.parent
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as child:
            # Whatever is awaited of a process that has ended comes to an end too.
            timer = threading.Timer(limit_s, child.kill)
            timer.start()
            try:
                return _measure(choice, endpoint, child, limit_s)
            finally:
                timer.cancel()
                child.kill()
    except (P2PError, OSError, ValueError) as error:
        return Trial(choice=choice, problem=str(error) or type(error).__name__)
    finally:
        endpoint.close()


def _measure(choice: str, endpoint: Endpoint[Any, Any], child: subprocess.Popen[str], limit_s: float) -> Trial:
    end_s = time.monotonic() + limit_s
    window = endpoint.export_window(_WINDOW_BYTES)
    print(window.descriptor.hex(), file=child.stdin, flush=True)
    offered = child.stdout.readline().strip() if child.stdout else ""
    if not offered:
        raise ValueError(f"the other process ended, or said nothing in {limit_s:g} s; what it said otherwise is above.")
    peer = endpoint.connect(bytes.fromhex(offered))
    data = np.arange(BULK_BYTES, dtype=np.uint8)

    def trip(number: int, nbytes: int) -> float:
        began_s = time.perf_counter()
        endpoint.put(peer, _DATA, data[:nbytes])
        endpoint.signal(peer, 0, number)
        while window.poll(0, 1)[0] != number:
            endpoint.progress()
            if time.monotonic() > end_s:
                raise TimeoutError(f"no answer to message {number} within {limit_s:g} s.")
        return time.perf_counter() - began_s

    trips = [trip(number, ROUND_TRIP_BYTES) for number in range(1, _TRIPS + 1)]
    bulks = [trip(number, BULK_BYTES) for number in range(_TRIPS + 1, _TRIPS + _BULKS + 1)]
    return Trial(
        choice=choice,
        round_trip_us=statistics.median(trips) * 1e6,
        bandwidth_bytes_per_s=BULK_BYTES / statistics.median(bulks),
    )


def echo(choice: str) -> None:
    """The other process: answers every signal with its own, until the first ends."""
    endpoint = TransportChoice.parse(choice).opener(on_device=True)("trial-echo", _OTHER, 1)
    window = endpoint.export_window(_WINDOW_BYTES)
    offered = sys.stdin.readline().strip()
    print(window.descriptor.hex(), flush=True)
    peer = endpoint.connect(bytes.fromhex(offered))
    answered = 0
    while endpoint.status(window) is Status.ALIVE:
        endpoint.progress()
        number = int(window.poll(0, 1)[0])
        if number != answered:
            answered = number
            endpoint.signal(peer, 0, number)
    endpoint.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--echo"]:
        echo(sys.argv[2])
    else:
        for name in sys.argv[1:] or ["shm", "nixl", "cuda"]:
            print(try_out(name))
