"""One end of a stream of messages over rails: `python -m benchmarks.rails_end owner|writer JSON`, lines both ways.

Messages are frames in the slots of a window, written and read by native code; message n's payload follows from
(seed, n), so that the reading end knows what must come. The owner gives a slot back by a signal in a window of the
writer's. What the owner saw decides: each message's digest, how often it came, and when.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from p2p import native
from p2p.endpoint import Status
from p2p.nixl import NixlEndpoint, NixlPeer, NixlWindow
from p2p.window import WindowLayout

OWNER, WRITER = 31, 32
CREDITS = WindowLayout(slots=1, payload_bytes=8192)
REPORT_S = 0.02


def message(seed: int, number: int, most_bytes: int, exact: bool) -> bytes:
    """Payload of message `number`, up to `most_bytes` long, or just so long."""
    draw = np.random.Generator(np.random.Philox(key=seed, counter=number))
    size = most_bytes if exact else int(draw.integers(1, most_bytes, endpoint=True))
    return draw.bytes(size)


class End:
    """An endpoint, the window it exports and the one it writes to."""

    def __init__(self, name: str, incarnation: int, plan: dict[str, Any], own: WindowLayout) -> None:
        self.plan = plan
        self.layout = WindowLayout(slots=plan["slots"], payload_bytes=plan["payload"])
        self.endpoint = NixlEndpoint(name, incarnation, 1, rails=tuple(plan["rails"]))
        self.window: NixlWindow = self.endpoint.export_window(own.nbytes)
        layout = own.slots, own.payload_bytes
        self.library = native.load()
        self.library.p2p_window_init(self.window.address, own.nbytes, incarnation, *layout)
        say({"descriptor": self.window.descriptor.hex()})
        self.peer: NixlPeer = self.endpoint.connect(bytes.fromhex(hear()["descriptor"]))
        say({"connected": True})

    def counts(self) -> dict[str, Any]:
        """Of the channel that this end writes, and of the one that it owns."""
        return {
            "writes": self.endpoint.channel_counts(self.peer),
            "reads": self.endpoint.channel_counts(self.window),
        }


def say(line: dict[str, Any]) -> None:
    """One line to whoever started this process."""
    print(json.dumps(line), flush=True)


def hear() -> dict[str, Any]:
    """One line from there."""
    return json.loads(sys.stdin.readline())


def own(plan: dict[str, Any]) -> None:
    """Read messages until all have come; then say what was seen."""
    end = End("owner", OWNER, plan, WindowLayout(slots=plan["slots"], payload_bytes=plan["payload"]))
    layout, window, library = end.layout, end.window, end.library
    header, copy = np.zeros(64, np.uint8), np.zeros(layout.payload_bytes, np.uint8)
    seen = np.zeros(layout.slots, np.uint64)
    digests: dict[int, bytes] = {}
    doubled = refused = 0
    arrivals: list[float] = []
    while len(digests) < plan["messages"] and end.endpoint.status(window) is Status.ALIVE:
        end.endpoint.progress()
        words = window.poll(layout.slot_offset(0), layout.slots, layout.stride_bytes)
        for index in np.flatnonzero(words != seen):
            number = int(words[index])
            at = window.address + layout.slot_offset(int(index))
            ids = OWNER, WRITER, number, header.ctypes.data, copy.ctypes.data
            length = library.p2p_frame_open(at, layout.payload_bytes, *ids)
            if length < 0:
                refused += 1
                continue
            seen[index] = number
            doubled += number in digests
            digests[number] = hashlib.sha256(copy[:length].data).digest()
            arrivals.append(time.monotonic())
            end.endpoint.signal(end.peer, 4096 + 8 * int(index), number)
    wrong = sum(
        digests.get(number) != hashlib.sha256(message(plan["seed"], number, plan["payload"], plan["exact"])).digest()
        for number in range(1, plan["messages"] + 1)
    )
    np.save(plan["arrivals"], np.array(arrivals))
    say({"received": len(digests), "wrong": wrong, "doubled": doubled, "refused": refused, **end.counts()})
    sys.stdin.readline()
    end.endpoint.close()


def write(plan: dict[str, Any]) -> None:
    """Write messages as slots come free; at `bytes_per_s`, where that is not 0."""
    end = End("writer", WRITER, plan, CREDITS)
    layout, peer, library = end.layout, end.peer, end.library
    free = deque(range(layout.slots))
    sent = np.zeros(layout.slots, np.uint64)
    number, began_s, reported_s, put_bytes = 0, time.monotonic(), 0.0, 0
    progress, monitor = Path(plan["progress"]), end.endpoint.monitor(peer)
    partial = progress.with_suffix(".partial")
    while number < plan["messages"] or len(free) < layout.slots:
        end.endpoint.progress()
        given = end.window.poll(4096, layout.slots)
        for index in np.flatnonzero((given == sent) & (sent > 0)):
            sent[index] = 0
            free.append(int(index))
        now_s = time.monotonic()
        due = not plan["bytes_per_s"] or put_bytes < (now_s - began_s) * plan["bytes_per_s"]
        if free and due and number < plan["messages"]:
            number += 1
            index = free.popleft()
            payload = message(plan["seed"], number, plan["payload"], plan["exact"])
            put_bytes += len(payload)
            at = peer.address + layout.slot_offset(index)
            ctypes.memmove(at + 128, payload, len(payload))
            fields = np.array([0, OWNER, number, len(payload) << 32, 0, WRITER, 0, 0], np.uint64)
            library.p2p_frame_seal(at, fields.ctypes.data)
            library.p2p_signal_store(at, number)
            sent[index] = number
        if now_s - reported_s > REPORT_S:
            reported_s = now_s
            state = {
                "sent": number,
                "at_s": now_s,
                "rails": [rail._asdict() for rail in end.endpoint.rail_counts(peer)],
                "link": monitor.read()._asdict(),
                **end.counts(),
            }
            # Whole, whoever reads it meanwhile.
            partial.write_text(json.dumps(state))
            partial.replace(progress)
    say({"sent": number, "began_s": began_s, "ended_s": time.monotonic(), **end.counts()})
    sys.stdin.readline()
    end.endpoint.close()


if __name__ == "__main__":
    {"owner": own, "writer": write}[sys.argv[1]](json.loads(sys.argv[2]))
