"""From an admitted request to its response: submit, wait, answer whole or as a stream.

The status line waits for the first visible text, so that a request which cannot be served fails with a status
that clients know how to retry; a failure after that is an error event, and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eaas.engine.worker_protocol import SamplingParams
from eaas.gateway.errors import ApiError, ErrorReply
from eaas.gateway.generation import Choice, Generation, StreamedGeneration
from eaas.gateway.http_guard import CLIENT_GONE, Connection
from eaas.gateway.metrics import GatewayMetrics
from eaas.gateway.openai_format import DONE, Events, Format, ResponseHead, error_event
from eaas.gateway.sequence import Sequence as PoolSequence
from eaas.gateway.served_model import ServedModel
from eaas.gateway.stops import StopAutomaton, StopMatcher
from eaas.gateway.worker_pool import WorkerPool

_CLASS_HEADER = "x-eaas-numerics-class"


@dataclass(frozen=True, kw_only=True)
class Work:
    """A validated request.

    Attributes:
        prompts: Token ids of each prompt; every one gets ``choices`` choices.
        params: What all choices share; max_tokens is set for each prompt in ``limits``.
        limits: Tokens that each prompt's choices may generate.
        stops: Stop strings.
        open_end: The client named no limit of tokens.
    """

    format: Format
    prompts: Sequence[list[int]]
    limits: Sequence[int]
    choices: int
    params: SamplingParams
    stops: Sequence[str]
    stream: bool
    include_usage: bool
    open_end: bool


class Exchange:
    """One request in progress: its choices, and what its client has been told. ``close`` must follow."""

    def __init__(
        self,
        *,
        work: Work,
        model: ServedModel,
        pool: WorkerPool,
        metrics: GatewayMetrics,
        on_close: Callable[[], None],
    ) -> None:
        self._work = work
        self._model = model
        self._pool = pool
        self._metrics = metrics
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._created = int(time.time())
        self._id = work.format.prefix + uuid.uuid4().hex
        self._changed = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._closed = False
        on_change = self._changed.set
        self.generation = (
            StreamedGeneration(on_change, self._events) if work.stream else Generation(on_change)
        )
        self._sequences = self._make_sequences()
        self.prompt_tokens = sum(len(prompt) for prompt in work.prompts)

    def _make_sequences(self) -> list[PoolSequence]:
        work, model = self._work, self._model
        automaton = StopAutomaton(work.stops) if work.stops else None
        names = model.tokenizer if work.params.logprobs >= 0 else None
        sequences: list[PoolSequence] = []
        for number, prompt in enumerate(work.prompts):
            for draw in range(work.choices):
                index = number * work.choices + draw
                choice = Choice(
                    generation=self.generation,
                    index=index,
                    detokenizer=model.tokenizer.detokenizer(),
                    matcher=StopMatcher(automaton) if automaton is not None else None,
                    min_tokens=work.params.min_tokens,
                    names=names,
                )
                limit = work.limits[number]
                params = msgspec.structs.replace(work.params, choice=draw, max_tokens=limit)
                sequences.append(
                    PoolSequence(
                        id=f"{self._id}-{index}",
                        prompt=prompt,
                        params=params,
                        choice=choice,
                        generation=self.generation,
                        open_end=work.open_end,
                    )
                )
        return sequences

    async def answer(self, request: Request) -> Response:
        """Submit the choices and wait for what the response begins with.

        Raises:
            ApiError: the request failed before anything was sent.
        """
        self._listener = self._loop.create_task(self._listen(request.receive))
        self._metrics.prompt_tokens += self.prompt_tokens
        for sequence in self._sequences:
            self._pool.submit(sequence)
        generation = self.generation
        while not generation.ready:
            await self.wait()
        if generation.error is not None:
            raise ApiError(generation.error)
        headers = {_CLASS_HEADER: ",".join(generation.numerics_classes)}
        if isinstance(generation, StreamedGeneration):
            return EventStream(self, generation, headers)
        usage = generation.usage(self.prompt_tokens)
        body = self._work.format.body(self.head(), generation.finished_choices(), usage)
        return Response(body, media_type="application/json", headers=headers)

    async def wait(self) -> None:
        """Sleep until the generation has changed."""
        await self._changed.wait()
        self._changed.clear()

    def head(self) -> ResponseHead:
        """What all events share; its fingerprint changes when another numerics class has taken over."""
        return ResponseHead(
            id=self._id,
            created=self._created,
            model=self._model.name,
            fingerprint=self._model.system_fingerprint(self.generation.numerics_classes),
        )

    def _events(self) -> Events:
        return self._work.format.events(self.head(), len(self._sequences), self._work.include_usage)

    def last_events(self) -> bytes:
        """What ends a stream in which nothing went wrong."""
        usage = self.generation.usage(self.prompt_tokens)
        return (self._events().usage(usage) if self._work.include_usage else b"") + DONE

    def close(self) -> None:
        """Cancel what still runs and let the next request in. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._pool.cancel(self._sequences)
        if self._listener is not None:
            self._listener.cancel()
        self._on_close()

    async def _listen(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
        if not self._closed:
            # At once, not when the response next wakes: the worker frees the blocks within one step.
            self._metrics.disconnects += 1
            self._pool.cancel(self._sequences)
            self.generation.fail(CLIENT_GONE)


class EventStream(Response):
    """Server-sent events of one exchange, each sent as soon as the client's connection takes it.

    The first and the last events go the way of ASGI. Between them each event is written to the connection when its
    token arrives: waking a task and walking through the layers of ASGI costs several times the token's own work.
    While the connection takes no more, events wait in the generation and go the way of ASGI again, which waits too.

    ``on_end`` is told the status: 200, that of the error event, or 499 when the client went away.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, generation: StreamedGeneration, headers: dict[str, str]) -> None:
        self._exchange = exchange
        self._generation = generation
        self.on_end: Callable[[int], None] | None = None
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: send the stream to its end."""
        status = 500
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            error = await self._send_events(send, Connection.of(scope))
            status = 200 if error is None else error.status
        finally:
            self._exchange.close()
            if self.on_end is not None:
                self.on_end(status)

    async def _send_events(self, send: Send, connection: Connection | None) -> ErrorReply | None:
        exchange, generation = self._exchange, self._generation

        def write(event: bytes) -> None:
            if connection is None or not connection.write_chunk(event):
                generation.write = None
                generation.chunks.append(event)
                generation.on_change()

        while True:
            # What is taken here must be sent before anything is written past it.
            generation.write = None
            body = generation.take()
            error, ended = generation.error, generation.ended
            if error is CLIENT_GONE:
                return error
            if error is not None:
                body += error_event(error.body())
            elif ended:
                body += exchange.last_events()
            if body or ended:
                await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if ended:
                return error
            if not generation.ready:
                generation.write = write
                await exchange.wait()
