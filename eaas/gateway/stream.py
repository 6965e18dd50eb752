"""From an admitted request to its response: submit, wait, answer whole or as a stream.

The status line waits for the first visible text, so that a request which cannot be served fails with a status
that clients know how to retry; a failure after that is an error event, and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eaas.gateway.budgets import Account
from eaas.gateway.errors import ApiError, ErrorReply
from eaas.gateway.event_ids import HINTS, EventIds, Identity, Mark, Seal, Seen, crossed
from eaas.gateway.failover import Sequence as PoolSequence
from eaas.gateway.formats import Format, ResponseHead, StreamUsage, Usage
from eaas.gateway.guard import CLIENT_GONE, CLIENT_STALLED, Connection
from eaas.gateway.logprobs import PromptScores, TokensById
from eaas.gateway.pool import WorkerPool
from eaas.gateway.protection import account_of, key_name_of, reserve_tokens
from eaas.gateway.responses import ResponsesFormat
from eaas.gateway.schema import ChatRequest, CompletionRequest
from eaas.gateway.served_model import ServedModel
from eaas.gateway.stops import StopAutomaton, StopMatcher
from eaas.gateway.text import Choice, Echo, Generation, NoText, RoutedExpertsLog
from eaas.worker.protocol import SamplingParams, Share

# Of an answer's tokens, so many at most are taken from its key's budget before it begins; the rest when it has ended.
_RESERVED_OUTPUT = 256
_CLASS_HEADER = "x-eaas-numerics-class"
_DROPPED_HEADER = "x-eaas-dropped-experts"


@dataclass(frozen=True, kw_only=True)
class Work:
    """A validated request.

    Attributes:
        prompts: Token ids of each prompt; every one gets ``wanted.choices`` choices.
        params: What all choices share; max_tokens is set for each prompt in ``limits``.
        limits: Tokens that each prompt's choices may generate.
        usage_stats: Every chunk of the stream has the usage of its choice so far.
        shown_tokens: Special tokens that the format reads in the text.
        tokens_by_id: Log-probabilities name tokens by their ids.
        share: Whose it is, and whether it is in the background.
        echoes: What is shown of each prompt before its choices' first tokens; None: nothing.
    """

    wanted: ChatRequest | CompletionRequest
    format: Format
    prompts: Sequence[list[int]]
    limits: Sequence[int]
    params: SamplingParams
    include_usage: bool
    usage_stats: bool
    shown_tokens: frozenset[int]
    tokens_by_id: bool
    echoes: Sequence[Echo] | None
    share: Share

    def cost(self, most_output: int) -> int:
        """Tokens to be computed for it, of which at most so many are reckoned for the output of each choice."""
        outputs = (min(limit, most_output) for limit in self.limits)
        return self.wanted.choices * sum(
            len(prompt) + output for prompt, output in zip(self.prompts, outputs, strict=True)
        )


class Exchange:
    """One request in progress: its choices, and what its client has been told. ``close`` must follow."""

    def __init__(
        self,
        work: Work,
        model: ServedModel,
        pool: WorkerPool,
        identity: Identity,
        *,
        on_close: Callable[[], None] = lambda: None,
        seal: Seal | None = None,
        seen: Seen | None = None,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Args: seal: of the request, where its stream may be gone on with; None: it may not, and its events have no
        ids. seen: what the client has seen of it before. told: more that each choice's Sequence is told."""
        self.seal, self._seen, self._told = seal, seen, told or {}
        self._work, self._model, self._pool = work, model, pool
        self.metrics = pool.metrics
        self._on_close = on_close
        wanted, self.identity = work.wanted, identity
        # Two clients may choose the same name, and one response be made twice: within this process each has its own.
        self.own_id = f"{work.format.prefix}{identity.drawn}-{uuid.uuid4().hex[:8]}"
        self.id = work.format.prefix + (wanted.request_id or identity.drawn)
        self.request_id = wanted.request_id
        self.in_background = work.share.background
        self.key_name = ""  # whose API key asked; empty: none was needed
        # Awaited when the response has ended well, before that is said.
        self.keep: Callable[[], Awaitable[None]] | None = None
        self._changed = asyncio.Event()
        self._connection: Connection | None = None
        self._closed = False
        self._account: Account | None = None
        self._reserved = 0
        on_change, streamed = self._changed.set, bool(wanted.stream)
        self.generation = Generation(on_change, self._events if streamed else None, self._pause)
        if seal is not None and streamed:
            position = None if seen is None else seen.position
            self.generation.ids = EventIds(self.generation.choices, position)
        self.prompt_tokens = sum(len(prompt) for prompt in work.prompts)
        automaton = StopAutomaton(wanted.stop) if wanted.stop else None
        self._sequences: list[PoolSequence] = []
        echoes = work.echoes or repeat(None)
        for number, (prompt, limit, echo) in enumerate(zip(work.prompts, work.limits, echoes, strict=False)):
            seed = identity.seed(number) if wanted.seed is None else work.params.seed
            for draw in range(wanted.choices):
                params = msgspec.structs.replace(work.params, seed=seed, choice=draw, max_tokens=limit)
                self._sequences.append(self._sequence(len(self._sequences), prompt, params, echo, automaton))

    def _sequence(
        self, index: int, prompt: list[int], params: SamplingParams, echo: Echo | None, automaton: StopAutomaton | None
    ) -> PoolSequence:
        work, wanted, tokenizer = self._work, self._work.wanted, self._model.tokenizer
        shown = TokensById(tokenizer) if work.tokens_by_id else tokenizer
        named, by_id = wanted.echo_count, wanted.prompt_count
        stop_shown, detokenizer = bool(wanted.include_stop_str_in_output), NoText()
        if wanted.detokenize is not False:
            skip_special = wanted.skip_special_tokens is not False
            detokenizer = tokenizer.detokenizer(skip_special=skip_special, shown=work.shown_tokens)
        choice = Choice(
            generation=self.generation,
            index=index,
            detokenizer=detokenizer,
            matcher=StopMatcher(automaton, stop_shown=stop_shown) if automaton is not None else None,
            min_tokens=params.min_tokens,
            names=shown if params.logprobs >= 0 else None,
            wants_tokens=bool(wanted.return_token_ids) or wanted.detokenize is False,
            stop_shown=stop_shown,
            echo=echo,
            scores=PromptScores(prompt, shown, named=named, by_id=by_id) if max(named, by_id) >= 0 else None,
            routing=RoutedExpertsLog(min(params.routed_from, len(prompt))) if params.wants_routing else None,
            stops=params.stop_token_ids,
            counted=work.usage_stats,
        )
        return PoolSequence(
            id=f"{self.own_id}-{index}",
            prompt=prompt,
            params=params,
            choice=choice,
            generation=self.generation,
            share=work.share,
            response_id=self.id,
            open_end=wanted.token_limit is None and wanted.default_limit is None,
            **({} if self.seal is None else {"key": self.seal.run_key(self.identity, index)}),
            **({} if self._seen is None else self._seen.of_choice(index)),
            **self._told,
        )

    async def answer(self, request: Request, stall_s: float, before: Sequence[Exchange] = ()) -> Response:
        """Submit the choices and wait for what the response begins with.

        Args: stall_s: how long a client may read nothing of a stream. before: those of the same response whose client
        goes on with this one. Raises ApiError: the request failed before anything was sent, or its key's budget is
        spent."""
        self.key_name = key_name_of(request.scope)
        self._reserve(account_of(request.scope))
        self.begin()
        self._connection = Connection.of(request.scope)
        self._connection.when_gone(self._on_gone)
        for one in before:
            # Not before this one is told by the same runs.
            one.leave()
        generation = self.generation
        while not generation.ready:
            await self.wait()
        if generation.error is not None:
            raise ApiError(generation.error)
        headers = {_CLASS_HEADER: ",".join(generation.numerics_classes)}
        if generation.dropped:
            headers[_DROPPED_HEADER] = "true"
        if self._work.wanted.stream:
            return EventStream(self, headers, stall_s)
        if self.keep is not None:
            await self.keep()
        return Response(self.body(), media_type="application/json", headers=headers)

    def not_kept(self) -> None:
        """Have the response say that it is not kept, though its client asked for that."""
        if isinstance(self._work.format, ResponsesFormat):
            self._work.format.not_kept()

    def begin(self) -> None:
        if self._seen is None:
            self.metrics.prompt_tokens += self.prompt_tokens
        else:
            self.metrics.resumes += 1
        for sequence in self._sequences:
            self._pool.submit(sequence)

    def stay(self) -> tuple[str, int]:
        """Let no choice leave the numerics class in which all have begun. Returns that and the hint whom to ask for the
        first choice. Raises ApiError: 409, it has crossed from one to another already."""
        known = self.generation.numerics_classes
        classes = {*known, *(sequence.numerics_class or known[0] for sequence in self._sequences)}
        if len(classes) > 1:
            raise crossed(sorted(classes))
        for sequence in self._sequences:
            sequence.seen = sequence.seen or 0
        return known[0], self._sequences[0].incarnation % HINTS

    def body(self) -> bytes:
        """The whole response, once the generation has ended without error."""
        return self._work.format.body(self._head(), self.generation.finished_choices(), self._usage())

    async def wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _pause(self) -> None:
        self._pool.pause(self._sequences)

    def resume(self) -> None:
        """Go on after a pause: the client has read what there was."""
        self._pool.resume(self._sequences)

    def _head(self) -> ResponseHead:
        """What all events share; its fingerprint changes when another numerics class has taken over, or experts are
        dropped."""
        generation = self.generation
        return ResponseHead(
            id=self.id,
            identity=self.identity,
            model=self._model.name,
            fingerprint=self._model.system_fingerprint(generation.numerics_classes, generation.dropped),
            dropped=generation.dropped,
        )

    def _events(self) -> Format:
        work, ids = self._work, self.generation.ids
        if ids is not None and self.seal is not None:
            known, hints = self.generation, [sequence.incarnation % HINTS for sequence in self._sequences]
            drawn, created = self.identity.drawn, self.identity.created
            ids.prefix = self.seal.prefix(Mark(drawn, created, known.numerics_classes, known.dropped, tuple(hints)))
        now = self._usage_of if work.usage_stats else None
        usage = StreamUsage(last=work.include_usage, now=now)
        return work.format.events(self._head(), len(self._sequences), usage)

    def _usage_of(self, index: int) -> Usage:
        prompt = self._work.prompts[index // self._work.wanted.choices]
        return Usage(prompt=len(prompt), completion=self.generation.choices[index].said)

    def _usage(self) -> Usage:
        return Usage(prompt=self.prompt_tokens, completion=self.generation.completion_tokens)

    def last_events(self, error: ErrorReply | None) -> bytes:
        """What ends a stream, which failed or did not."""
        events = self.generation.events or self._events()
        if error is not None:
            # Without an id, so that the last one is that of an event that can be gone on behind.
            return events.failure(error)
        ids, end = self.generation.ids, events.end(self._usage())
        return end if ids is None else ids.end(end)

    def cancel(self) -> None:
        """End a request here and now, on somebody's word; its response ends with what there is."""
        ended = self.generation.ended
        for sequence in self._pool.cancel(self._sequences):
            if not ended:
                sequence.choice.end("abort")

    def leave(self) -> None:
        """End it: its client has gone."""
        self._pool.cancel(self._sequences)
        self.generation.fail(CLIENT_GONE)

    def close(self) -> None:
        """Cancel what still runs and let the next request in. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._pool.cancel(self._sequences)
        if self._connection is not None:
            self._connection.when_gone(None)
        if self._account is not None:
            self._account.settle(self._reserved, self.used(), time.monotonic())
        self._on_close()

    def _reserve(self, account: Account | None) -> None:
        if account is None:
            return
        outputs = (min(limit, _RESERVED_OUTPUT) for limit in self._work.limits)
        reserved = self.prompt_tokens + self._work.wanted.choices * sum(outputs)
        reserve_tokens(account, reserved, self.metrics.count_refused)
        self._account, self._reserved = account, reserved

    def used(self) -> int:
        """Tokens on its key's account: none where it failed by our fault before there were any."""
        error, made = self.generation.error, self.generation.completion_tokens
        if self._seen is not None:
            made = max(0, made - sum(self._seen.position.counts))
        return 0 if error is not None and error.status >= 500 and not made else self.prompt_tokens + made

    def _on_gone(self) -> None:
        # At once, not when the response next wakes: the worker frees the blocks within one step.
        self.metrics.disconnects += 1
        self.metrics.slow_readers += self._connection is not None and self._connection.timed_out
        self.leave()


class EventStream(Response):
    """Server-sent events of one exchange, each sent as soon as the client's connection takes it.

    The first and the last events go the way of ASGI. Between them each event is written to the connection when its
    token arrives: waking a task and walking through the layers of ASGI costs several times the token's own work.
    While the connection takes no more, events wait in the generation and go the way of ASGI again, which waits too.
    Once HELD_BYTES of them wait, the workers stop computing for this stream until the client has read; a client that
    does not read for ``stall_s``, or takes longer than that for what the connection and the generation hold, is ended.

    ``on_end`` is told the status: 200, that of the error event, or 499 when the client went away.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, headers: dict[str, str], stall_s: float) -> None:
        self._stall_s = stall_s
        self._exchange = exchange
        self.on_end: Callable[[int], None] | None = None
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            connection = Connection.of(scope)
            try:
                error = await self._send_events(send, connection)
            except TimeoutError:
                error = CLIENT_STALLED
                self._exchange.metrics.slow_readers += 1
                # What was not read yet is lost.
                connection.transport.abort()
                await connection.flow.drain()
            status = 200 if error is None else error.status
        finally:
            self._exchange.close()
            if self.on_end is not None:
                self.on_end(status)

    async def _send_events(self, send: Send, connection: Connection) -> ErrorReply | None:
        exchange, generation = self._exchange, self._exchange.generation
        while True:
            # What is taken here must be sent before anything is written past it.
            generation.write = None
            body = generation.take()
            error, ended = generation.error, generation.ended
            if error is CLIENT_GONE:
                return error
            if ended:
                if error is None and exchange.keep is not None:
                    await exchange.keep()
                body += exchange.last_events(error)
            # Who reads at once is not waited for, and a timer costs more than the write.
            waits = connection.flow.write_paused or generation.full
            async with asyncio.timeout(self._stall_s if waits else None):
                if body or ended:
                    await send({"type": "http.response.body", "body": body, "more_body": not ended})
                if generation.full and not ended:
                    await connection.flow.drain()
                    generation.full = False
                    exchange.resume()
            if ended:
                return error
            if not generation.ready:
                generation.write = connection.write_chunk
                await exchange.wait()
