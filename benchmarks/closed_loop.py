"""Streams that go on and on: each asks for its next text as soon as the last one ended, on a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence

from eaas.ops.load.client import Client, Endpoint
from eaas.ops.load.record import StreamRecord

# A stream that has not ended by then never will.
LIMIT_S = 90.0
# After a failure; a gateway that is away is not asked a thousand times a second.
PAUSE_S = 0.1


class ClosedLoop:
    """`streams` clients of one gateway. Client i asks for prompts i, i + streams, ... and begins again at the end.

    Attributes:
        ended: Every stream that ended, as its client saw it; times count from `zero_s` (monotonic).
    """

    def __init__(self, url: str, model: str, *, streams: int, prompts: int, tokens: int, seed: int) -> None:
        draw = random.Random(seed)
        self._endpoint = Endpoint.of_url(url)
        self._bodies = [
            json.dumps(
                {
                    "model": model,
                    "prompt": [draw.randrange(3, 250) for _ in range(draw.randrange(8, 33))],
                    "max_tokens": tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "ignore_eos": True,
                }
            ).encode()
            for _ in range(prompts)
        ]
        self._turns = [list(range(slot, prompts, streams)) for slot in range(streams)]
        self._stopping = threading.Event()
        self.ended: list[StreamRecord] = []
        self.zero_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Time on the clock of the records."""
        return time.monotonic() - self.zero_s

    @property
    def is_warm(self) -> bool:
        """Whether each client has had an answer: its connection is there, and so is what first answers make grow."""
        slots = len(self._turns)
        return len({record.prompt % slots for record in list(self.ended) if not record.failed}) == slots

    def once(self) -> list[StreamRecord]:
        """Ask for every prompt once; the records in the order of prompts.

        Raises:
            RuntimeError: a stream failed, although nothing was injected.
        """
        self.ended, self.zero_s = [], time.monotonic()
        self._stopping.clear()
        asyncio.run(self._ask(once=True))
        failed = [f"{record.status} {record.error}" for record in self.ended if record.failed]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(self.ended)} streams failed without a fault: {failed[0]}")
        return sorted(self.ended, key=lambda record: record.prompt)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ask for the length of a `with`; what is under way at its end is waited for."""
        self.ended, self.zero_s = [], time.monotonic()
        self._stopping.clear()
        thread = threading.Thread(target=lambda: asyncio.run(self._ask(once=False)), name="streams")
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

    async def _ask(self, *, once: bool) -> None:
        client = Client(self._endpoint, LIMIT_S)
        client.t0_s = self.zero_s

        async def one_after_another(turns: Sequence[int]) -> None:
            while not self._stopping.is_set():
                for prompt in turns:
                    if self._stopping.is_set():
                        return
                    record = StreamRecord(prompt=prompt, planned_s=client.now_s)
                    await client.stream(self._bodies[prompt], record)
                    self.ended.append(record)
                    if record.failed:
                        await asyncio.sleep(PAUSE_S)
                if once:
                    return

        try:
            await asyncio.gather(*(one_after_another(turns) for turns in self._turns))
        finally:
            client.close()
