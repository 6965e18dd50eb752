"""An expert server with a planted fault: python -m tests.experts.faulty_expert FAULT OPTIONS...

corrupt: one bit of every piece that it gives is wrong. die: SIGKILL in the middle of the first piece that it gives.
freeze: SIGSTOP there. broken: its kernels answer all self-tests but the first with another row.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
from typing import Any

import numpy as np

from experts import loading
from experts.kernels import PackedExpert, answer_of
from p2p.local import ShmEndpoint


def plant(fault: str) -> None:
    """Have this process do it."""
    right_put = ShmEndpoint.put
    answers = itertools.count()

    def put(self: ShmEndpoint, peer: Any, offset: int, source: Any) -> None:
        piece = np.frombuffer(source, np.uint8).copy()
        if fault == "corrupt":
            piece[len(piece) // 2] ^= 4
        right_put(self, peer, offset, piece[: len(piece) // 2])
        if fault in ("die", "freeze"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)
        right_put(self, peer, offset, piece)

    def answer(expert: PackedExpert) -> bytes:
        return bytes(32) if next(answers) else answer_of(expert)

    if fault == "broken":
        loading.answer_of = answer
    else:
        ShmEndpoint.put = put


if __name__ == "__main__":
    plant(sys.argv.pop(1))
    runpy.run_module("experts", run_name="__main__", alter_sys=True)
