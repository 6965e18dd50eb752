"""Sends a workload as an arrival process wants it, and keeps a record of every request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from eaas.ops.load.client import Client, Endpoint, EndpointUnreachable
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.workload import Prompt, TokenCost, Workload, words

_PROBE_WORDS = (16, 80)
# Of a closed loop after a failure, unless the server says for how long; an endpoint that is away is not asked a
# thousand times a second.
_PAUSE_S = 0.1


class Driver:
    """One run of a workload: every request so far is in `records`. Those that `stop` abandons go."""

    def __init__(self, client: Client, workload: Workload) -> None:
        self._client = client
        self._workload = workload
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self.records: list[StreamRecord] = []
        self.in_flight = 0
        self.failed = 0

    async def open_loop(self, times_s: Sequence[float]) -> None:
        """Send one request at each of these times, whatever the server does; returns when all have ended."""
        for number, planned_s in enumerate(times_s):
            index = self._workload.index(number)
            # Made before it is due, so that the making delays nothing.
            body = self._workload.body(index)
            if await self._stopped_within(planned_s - self._client.now_s):
                break
            self._launch(self._send(index, planned_s, body))
        await self._finish()

    async def closed_loop(self, streams: int, *, for_s: float = math.inf, requests: int | None = None) -> None:
        """Keep so many requests in flight until one of both ends is reached; returns when all have ended."""
        numbers = itertools.count() if requests is None else range(requests)
        await self.each(map(self._workload.index, numbers), streams, for_s=for_s)

    async def each(self, indexes: Iterable[int], streams: int, *, for_s: float = math.inf) -> None:
        """Send these bodies, so many at a time, none after `for_s`; returns when all have ended.

        After a failure a stream waits as long as the server asks it to, at least for a moment, unless all are sent.
        """
        left, all_sent = iter(indexes), asyncio.Event()
        upcoming = next(left, None)

        async def one_after_another() -> None:
            nonlocal upcoming
            while upcoming is not None and self._client.now_s < for_s:
                index, upcoming = upcoming, next(left, None)
                if upcoming is None:
                    all_sent.set()
                record = await self._send(index, self._client.now_s, self._workload.body(index))
                if record.failed:
                    pause_s = max(_PAUSE_S, record.retry_after_s or 0.0)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, min(for_s - self._client.now_s, pause_s))):
                            await all_sent.wait()

        for _ in range(streams):
            self._launch(one_after_another())
        await self._finish()

    def stop(self) -> None:
        """Send nothing more and abandon what is in flight: its records go."""
        self._stopping.set()

    def _launch(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, index: int, planned_s: float, body: bytes) -> StreamRecord:
        record = StreamRecord(prompt=index, planned_s=planned_s)
        self.records.append(record)
        self.in_flight += 1
        try:
            await self._client.stream(body, record)
        finally:
            self.in_flight -= 1
        self.failed += record.failed
        return record

    async def _stopped_within(self, seconds: float) -> bool:
        # Even when late: what was launched must get its turn.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _finish(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while self._tasks and not self._stopping.is_set():
                await asyncio.wait([*self._tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                abandoned = {id(r) for r in self.records if r.ended_s is None}
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self.records = [r for r in self.records if id(r) not in abandoned]
        finally:
            stopping.cancel()


async def learn_models(endpoint: Endpoint, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """What GET /v1/models lists.

    Raises:
        EndpointUnreachable: nothing answers, or something else does.
    """
    request = urllib.request.Request(f"{endpoint.origin}{endpoint.base}/v1/models", headers=dict(endpoint.headers))

    def fetch() -> list[dict[str, Any]]:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return list(json.load(response)["data"])

    try:
        return await asyncio.to_thread(fetch)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EndpointUnreachable(_why_no_models(endpoint, error)) from None


def _why_no_models(endpoint: Endpoint, error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
        found = "does not take the key that it was sent" if endpoint.key else "asks for a key and was sent none"
        return (
            f"{endpoint.origin}{endpoint.base} {found} (status {error.code}). Put one into the environment variable "
            f"that --api-key-env names, OPENAI_API_KEY by default."
        )
    return (
        f"No OpenAI-compatible endpoint answers at {endpoint.origin}{endpoint.base}/v1/models ({error}). Start one, "
        f"such as `eaas serve`, or give its address."
    )


async def learn_cost(endpoint: Endpoint, workload: Workload, timeout_s: float) -> TokenCost:
    """How many tokens words cost at the endpoint, from two requests for one token each. Raises EndpointUnreachable: a
    request failed, or no usage came with it."""
    client = Client(endpoint, timeout_s)
    found: list[tuple[int, int]] = []
    try:
        for count in _PROBE_WORDS:
            text = words(workload.seed, 1 << 41, count)
            record = StreamRecord(prompt=0, planned_s=0.0)
            probe = replace(workload, prompts=lambda _, text=text: Prompt(text=text))
            await client.stream(probe.body(0, max_tokens=1), record)
            if record.failed:
                raise EndpointUnreachable(f"{endpoint.origin} refuses a prompt of {count} words: {record.error}.")
            if record.prompt_tokens is None:
                # Without usage a word counts as a token: lengths are then in words.
                return TokenCost()
            found.append((count, record.prompt_tokens))
    finally:
        client.close()
    return TokenCost.of_probes(*found)
