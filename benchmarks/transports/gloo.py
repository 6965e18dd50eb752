"""torch.distributed's gloo: isend and irecv of byte tensors over loopback TCP."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.transports.side import SILENCE_S, SLOTS, Load, rounds


class Gloo:
    """A process group of the hub, number 0, and the others."""

    pinned = False

    def __init__(self, index: int, others: int, payload_bytes: int) -> None:
        import torch
        import torch.distributed as distributed

        self._distributed: Any = distributed
        self._index, self._others = index, others
        self._links = list(range(1, others + 1)) if index == 0 else [0]
        # Only the hub's is used; a file, because it needs no port of its own.
        self._meeting = tempfile.TemporaryDirectory(prefix="eaas-gloo-")
        self._source = torch.ones(payload_bytes, dtype=torch.uint8)
        self._target = [[torch.ones(payload_bytes, dtype=torch.uint8) for _ in range(SLOTS)] for _ in self._links]

    def offers(self) -> list[str]:
        """Where the group meets."""
        return [str(Path(self._meeting.name) / "group")] * len(self._links)

    def join(self, offers: Sequence[str]) -> None:
        """Form the group."""
        where = self.offers()[0] if self._index == 0 else offers[0]
        self._distributed.init_process_group(
            "gloo",
            init_method=f"file://{where}",
            rank=self._index,
            world_size=1 + self._others,
            timeout=timedelta(seconds=SILENCE_S),
        )

    def drive(self, load: Load) -> list[int]:
        """As `Side.drive`."""
        under_way: dict[int, list[Any]] = {}
        request = self._source[: load.request_bytes]

        def post(number: int) -> None:
            works = under_way[number] = []
            for link, target in zip(self._links, self._target, strict=True):
                reply = target[number % SLOTS][: load.reply_bytes]
                works.append(self._distributed.irecv(reply, link))
                works.append(self._distributed.isend(request, link))

        def finish(number: int) -> None:
            for work in under_way.pop(number):
                work.wait()

        return rounds(load, post, finish)

    def serve(self, load: Load) -> None:
        """As `Side.serve`: links in turn, each with as many receives posted as the driver has requests under way."""
        posted: list[list[Any]] = [[] for _ in self._links]
        reply, sends = self._source[: load.reply_bytes], []
        for number in range(load.count + load.depth - 1):
            for link, target, works in zip(self._links, self._target, posted, strict=True):
                if number < load.count:
                    works.append(self._distributed.irecv(target[number % SLOTS][: load.request_bytes], link))
                if number + 1 >= load.depth:
                    works.pop(0).wait()
                    sends.append(self._distributed.isend(reply, link))
        for work in sends:
            work.wait()

    def close(self) -> None:
        """Leave the group."""
        self._distributed.destroy_process_group()
        self._meeting.cleanup()
