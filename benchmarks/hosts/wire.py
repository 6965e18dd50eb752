"""A long and lossy cable between two TAP devices, for kernels without netem: frames come later, and some never.

python -m benchmarks.hosts.wire NEAR FAR ONE_WAY_MS LOSS
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 1 << 16
# A cable holds no more than this: what is sent beyond it is lost, as in a switch whose queue is full.
_HELD_FRAMES = 20_000


def open_tap(name: str) -> int:
    """A TAP device that is there, as a file of frames that does not block."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def carry(near: int, far: int, delay_s: float, loss: float) -> None:
    """Carry frames between two TAPs, each way in order, until the process ends."""
    chance = random.Random()
    other = {near: far, far: near}
    under_way: dict[int, deque[tuple[float, bytes]]] = {near: deque(), far: deque()}
    while True:
        due_s = min((frames[0][0] for frames in under_way.values() if frames), default=None)
        wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        ready, _, _ = select.select([near, far], [], [], wait_s)
        now_s = time.monotonic()
        for fd in ready:
            frame = os.read(fd, _FRAME_BYTES)
            frames = under_way[other[fd]]
            if chance.random() >= loss and len(frames) < _HELD_FRAMES:
                frames.append((now_s + delay_s, frame))
        for fd, frames in under_way.items():
            while frames and frames[0][0] <= now_s:
                os.write(fd, frames.popleft()[1])


def main() -> None:
    near, far, one_way_ms, loss = sys.argv[1:]
    carry(open_tap(near), open_tap(far), float(one_way_ms) / 1e3, float(loss))


if __name__ == "__main__":
    main()
