"""Responses that outlive their connections: computed in the background, kept, streamed again, cancelled, forgotten.

Every gateway looks once a second for jobs that are nobody's, or whose owner's lease has ended, and makes them its own
by compare-and-set; so the end of a job counts once too. A job holds its identity, so that whoever computes it makes the
same bytes, events included: who was told of some of them is told the rest of the same by any gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from eaas.gateway.budgets import Account
from eaas.gateway.errors import ApiError, ErrorReply, checked, internal, invalid, unavailable, wrong_field
from eaas.gateway.eta import Estimate, Eta
from eaas.gateway.event_ids import NOT_RESUMABLE, Identity
from eaas.gateway.formats import ResponseHead, error_event, named_event
from eaas.gateway.gateway import Gateway, Served
from eaas.gateway.job_store import OPEN, TOO_LARGE, UNREADABLE, UNUSABLE, JobState, JobStore, Leases, Stored, open_jobs
from eaas.gateway.protection import account_of, key_name_of, reserve_tokens, share_of
from eaas.gateway.responses import ResponsesFormat, ResponsesRequest, as_chat, input_items, repeated
from eaas.gateway.stream import Exchange, Work
from eaas.worker.protocol import Share

log = logging.getLogger(__name__)

_LOOK_S = 1.0
# Renewed at every look.
_LEASE_S = 5.0
# Longest for one answer of the store, its queue included; etcd has five seconds for one call.
_STORE_S = 10.0
# Between looks for news of a job that is computed elsewhere.
_POLL_S = 0.2
# When one ends that has all its tokens, and is being stored.
_SOON = Estimate(_POLL_S / 8, _POLL_S, _POLL_S / 4)
# A job whose owners all ended before it may be what ends them.
_MOST_LOSSES = 20
# Between attempts that failed for want of workers or experts.
_AGAIN_S, _AGAIN_MOST_S = 0.5, 15.0
# Of one job, some 30,000 tokens; a longer one is computed and kept, and cannot be streamed.
_EVENTS_BYTES = 8 << 20
_OPENING_NAMES = ("response.created", "response.queued")
_OPENING = len(_OPENING_NAMES)
# So far apart are the numbers of a job's events from those before it was begun anew; more than can be kept of one turn.
_TURN = 1_000_000
_ID = re.compile(re.escape(ResponsesFormat.prefix) + "[!-~]{1,128}")

Ts = TypeVarTuple("Ts")
R = TypeVar("R")
_encode, _decode = msgspec.json.encode, msgspec.json.decode
_with = msgspec.structs.replace


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked.

    Attributes:
        key_name: Whose API key asked; empty: none was needed.
        request: The ResponsesRequest, read only when needed; its input is items, those of earlier responses first.
        queued: The response object before anything is computed.
        run_key: Under which attention workers know its run; nobody is told of it.
        background: It was asked for in the background; else it was kept when it had ended.
    """

    key_name: str
    share: Share
    identity: Identity
    request: msgspec.Raw
    queued: dict[str, Any]
    run_key: str
    background: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: the response object, and all events, compressed; empty: they are not kept."""

    response: msgspec.Raw
    events: bytes = b""


class _Lost(Exception):
    """A job is another's now, or has ended."""


class Run:
    """A job that is computed here: by its owner, or once more for those who listen here.

    Attributes:
        state: As the store had it last. Its numerics class, where there is one, and the hint whom to ask it keeps.
        owned: This process is the owner.
        events: So far, one for each sequence number of this turn.
        nbytes: Of these.
        dropped: They were too many, and are not kept.
        last: Those that end them and hold the whole response, which are shown once it is stored.
        over: No more come: the rest, if there is one, is in the store.
        exchange: While one computes.
        used: Tokens on its key's account.
    """

    def __init__(self, id: str, job: Job, state: JobState, *, owned: bool) -> None:
        self.id, self.job, self.state, self.owned = id, job, state, owned
        self.events, self.nbytes = _opening(job), 0
        self.dropped = self.over = False
        self.last = b""
        self.exchange: Exchange | None = None
        self.used = 0
        self.task: asyncio.Task[None] | None = None
        self.listeners = 0
        self.changed = asyncio.Event()

    def begin_anew(self) -> None:
        """Nobody serves its numerics class any more: it is begun in another, and is another response."""
        log.warning("job_begun_anew id=%s class=%s", self.id, self.state.numerics_class)
        self.state = _with(self.state, numerics_class="", turn=self.state.turn + 1)
        self.events, self.nbytes, self.dropped = _opening(self.job), 0, False
        self.changed.set()


class Jobs:
    """The responses that one gateway keeps and computes. Everything runs on the event loop, but the store."""

    def __init__(
        self, gateway: Gateway, work_of: Callable[[Served, ResponsesRequest, Share, int], Awaitable[Work]]
    ) -> None:
        """Args: work_of: prepares a request. Raises JobsInvalid."""
        config = self._config = gateway.config
        self._gateway, self._work_of = gateway, work_of
        sizes = config.jobs_most, config.jobs_bytes
        self._store = open_jobs(config.jobs, *sizes, config.etcd_tls_dir) if config.jobs else None
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._owner = uuid.uuid4().hex
        self._leases = Leases(_LEASE_S, 2 * _LOOK_S)
        self._runs: dict[str, Run] = {}
        # Of those asked for here, by id: the key of its run, who predicts its end, and on whose account so many tokens
        # are reserved.
        self._asked: dict[str, tuple[str, Eta, Account | None, int]] = {}
        self._room = asyncio.Event()
        self._ends = False
        self._away_s = 0.0  # since when the store cannot be used
        gateway.beside.append(self.running)
        gateway.on_stop.append(self.end_streams)
        told = "Background responses that are computed here."
        gateway.gauges["eaas_jobs_running"] = told, lambda served: len(self._owned(served.model.name))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute jobs until the end; those that have not ended then are left to others."""
        keeper = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeper.cancel()
            runs = list(self._runs.values())
            for run in runs:
                self._drop(run)
            await asyncio.gather(keeper, *(run.task for run in runs if run.task), return_exceptions=True)
            self._thread.shutdown()
            if self._store is not None:
                self._store.close()

    def end_streams(self) -> None:
        """Let nobody listen here any more; they go on at another gateway."""
        self._ends = True
        for run in self._runs.values():
            run.changed.set()

    async def _ask(self, act: Callable[[JobStore, *Ts], R], *asked: *Ts) -> R:
        if self._store is None:
            raise invalid("This server keeps no responses; start it with --jobs.", code="nothing_is_kept")
        loop, eta = asyncio.get_running_loop(), self._gateway.own.pool.eta
        try:
            # However many ask before it of a store that is away: who has not had a turn by then asks no more.
            async with asyncio.timeout(_STORE_S):
                found = await loop.run_in_executor(self._thread, act, self._store, *asked)
        except (ApiError, TimeoutError) as error:
            if isinstance(error, ApiError) and error.reply.code != UNUSABLE:
                raise
            self._away_s = self._away_s or time.monotonic()
            after_s = eta.back_s("store", time.monotonic() - self._away_s)
            message = str(error) or "What keeps responses has not answered in time. Try again."
            raise unavailable(message, code=UNUSABLE, after_s=after_s) from error
        if self._away_s:
            eta.lasted("store", time.monotonic() - self._away_s)
        self._away_s = 0.0
        return found

    # -- computing

    async def _keep(self) -> None:
        while self._store is not None:
            try:
                await self._look()
            except ApiError as error:
                log.warning("jobs_not_looked_at reason=%s", error)
            except Exception:
                # Whatever it was, the lease must be renewed.
                log.exception("jobs_not_looked_at")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), _LOOK_S)
            self._room.clear()

    async def _look(self) -> None:
        """Renew the lease, let go of what is another's or has ended, take what is nobody's, forget what is old."""
        runs, asked = list(self._runs.values()), dict(self._asked)
        # Before the leases: who has written that a job is his has renewed before.
        open = await self._ask(JobStore.open)
        if open:
            # By all: who cannot write judges nobody.
            await self._ask(JobStore.renew, self._owner)
        owners = await self._ask(JobStore.owners)
        for owner in self._leases.lapsed(owners, time.monotonic()):
            if await self._ask(JobStore.forget_owner, owner, owners[owner]):
                del owners[owner]
        for run in runs:
            theirs = run.id not in open or (run.owned and open[run.id][0] != self._owner)
            # One that ends stores that itself.
            if theirs and not (run.owned and run.last):
                self._drop(run)
        for id, (owner, model) in open.items():
            # This process owns what it does not know of where it was not told that the store did as it was asked.
            unknown = owner == self._owner and id not in self._runs
            if (owner not in owners or unknown) and self._has_room(model):
                try:
                    await self._claim(id)
                except ApiError as error:
                    if self._away_s:
                        raise
                    # Those behind it are to be computed all the same.
                    log.error("job_unreadable id=%s reason=%s", id, error)
        for id in asked.keys() - open.keys() - self._runs.keys():
            # It was computed elsewhere, where nobody asks what it took: what was reckoned stands.
            self._settle(id, asked[id][-1])
        for id in await self._ask(JobStore.forgotten, _now_ms()):
            await self._ask(JobStore.delete, id)

    def _owned(self, model: str) -> list[Run]:
        return [run for run in self._runs.values() if run.owned and run.state.model == model]

    def _has_room(self, model: str) -> bool:
        """Whether one more job of a model may begin here; of one that is gone, to end with a word about that."""
        gateway, config, served = self._gateway, self._config, self._gateway.models.get(model)
        if gateway.draining or gateway.paused or len(self._owned(model)) >= config.jobs_running:
            return False
        if served is None:
            return not gateway.awaits(model)
        # Who waits for an answer comes first.
        return not served.pool.unready_reason() and served.pool.owed_tokens <= config.max_owed_tokens // 2

    async def _claim(self, id: str) -> None:
        try:
            found = await self._ask(JobStore.get, id)
        except ApiError as error:
            if error.reply.code == UNREADABLE:
                # Nobody can tell what came of it, nor put an end to it in its own form.
                await self._ask(JobStore.delete, id)
            raise
        if found is None or found.state.status not in OPEN:
            return
        before = found.state
        try:
            job = found.job_as(Job)
        except ApiError:
            await self._ask(JobStore.update, id, before, self._after(before, b'{"status":"failed"}'))
            raise
        lost = before.owner not in ("", self._owner)
        mine = _with(before, owner=self._owner, losses=before.losses + lost)
        claimed = await self._ask(JobStore.update, id, before, mine)
        if claimed is None:
            return
        if lost:
            log.warning("job_taken_over id=%s losses=%d", id, claimed.losses)
        # It may be computed here already, for somebody who listens.
        run = self._runs.get(id)
        if run is not None and run.state.turn == claimed.turn:
            run.state, run.owned = claimed, True
        else:
            self._start(id, job, claimed, owned=True)

    def _start(self, id: str, job: Job, state: JobState, *, owned: bool) -> Run:
        if id in self._runs:
            self._drop(self._runs[id])
        run = self._runs[id] = Run(id, job, state, owned=owned)
        run.task = asyncio.create_task(self._run(run))
        return run

    def _drop(self, run: Run) -> None:
        """Let go of it: who listens finds the rest in the store. Idempotent."""
        if self._runs.get(run.id) is run:
            del self._runs[run.id]
            if len(self._asked) > len(self._runs):
                self._room.set()
        run.over = True
        run.changed.set()
        if run.task is not None and run.task is not asyncio.current_task():
            run.task.cancel()

    async def _run(self, run: Run) -> None:
        """Compute it until it has ended; however this ends, the job has ended or is somebody's again."""
        pause_s, broken = _AGAIN_S, False
        try:
            while (error := await self._attempt(run)) is not None and _again(error):
                if error.code == NOT_RESUMABLE:
                    if not run.owned:
                        # Its owner decides what becomes of it.
                        raise _Lost
                    run.begin_anew()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MOST_S)
            while not run.owned:
                # Its owner stores that it has ended; where that is lost before, this process may become the owner.
                await asyncio.sleep(_POLL_S)
                found = await self._ask(JobStore.get, run.id)
                if found is None or found.state.status not in OPEN:
                    raise _Lost
            await self._finish(run)
        except (_Lost, ApiError) as error:
            log.info("job_left id=%s reason=%r", run.id, error)
        except Exception:
            # Counted, so that it is given up in the end, in words.
            log.exception("job_broken id=%s", run.id)
            broken = True
        finally:
            self._drop(run)
            if run.owned:
                self._settle(run.id, run.used)
            if run.owned and run.state.status in OPEN:
                after = _with(run.state, owner="", losses=run.state.losses + broken)
                try:
                    await self._ask(JobStore.update, run.id, run.state, after)
                except ApiError as error:
                    # This process claims it again then.
                    log.warning("job_not_handed_on id=%s reason=%s", run.id, error)

    def _settle(self, id: str, used: int) -> None:
        """Have a key pay what its job took, instead of what was reckoned; its end is predicted no more. Idempotent."""
        if id in self._asked:
            key, eta, account, reserved = self._asked.pop(id)
            eta.ended(key, time.monotonic(), made=0, finish="")
            if account is not None:
                account.settle(reserved, used, time.monotonic())

    async def _store_state(self, run: Run, after: JobState, result: bytes = b"") -> None:
        """Raises: _Lost; ApiError, as JobStore.update."""
        stored = await self._ask(JobStore.update, run.id, run.state, after, result)
        if stored is None:
            raise _Lost
        run.state = stored

    async def _attempt(self, run: Run) -> ErrorReply | None:
        """Compute it once, and say why that failed; `run.last` is set unless it is to be tried again. Raises _Lost."""
        gateway, job, identity = self._gateway, run.job, run.job.identity
        try:
            if run.owned and run.state.losses > _MOST_LOSSES:
                message = f"{run.state.losses} gateways ended while they computed it; it is given up."
                raise internal(message, code="attempts_exhausted")
            # What it made before that is known would say another fingerprint than the events of other gateways.
            served = await gateway.served_as(run.state.model, begun=True)
            given = checked(ResponsesRequest, bytes(job.request))
            work = await self._work_of(served, given, job.share, identity.created)
            if isinstance(work.format, ResponsesFormat):
                work.format.number_from(_number(_OPENING, run.state))
            told: dict[str, Any] = {"key": job.run_key}
            if run.state.numerics_class:
                told |= {"seen": 0, "numerics_class": run.state.numerics_class, "hint": run.state.hint}
            exchange = Exchange(work, served.model, served.pool, identity, told=told, on_close=gateway.let_go)
            run.exchange = exchange
            run.changed.set()
            if run.owned:
                gateway.exchanges[exchange.own_id] = exchange
            try:
                return await self._compute(run, exchange)
            finally:
                run.exchange, run.used = None, exchange.used()
                gateway.exchanges.pop(exchange.own_id, None)
                exchange.close()
        except ApiError as error:
            reply = error.reply
        except _Lost:
            raise
        except Exception:
            log.exception("job_failed id=%s", run.id)
            reply = internal("The server failed to compute it; its log says why.").reply
        run.last = b"" if _again(reply) else _ended(job, "failed", _number(len(run.events), run.state), reply)
        return reply

    async def _compute(self, run: Run, exchange: Exchange) -> ErrorReply | None:
        generation, place = exchange.generation, _OPENING

        def write(chunk: bytes) -> bool:
            nonlocal place
            for event in _split(chunk):
                # Those of a computation that was given up are there already, and the same.
                if place >= len(run.events) and not run.dropped:
                    run.events.append(event)
                    run.nbytes += len(event)
                    run.dropped = run.nbytes > _EVENTS_BYTES
                place += 1
            run.changed.set()
            return True

        exchange.begin()
        while not generation.ready:
            await exchange.wait()
        if generation.numerics_classes:
            numerics_class, hint = exchange.stay()
            after = _with(run.state, status="in_progress", numerics_class=numerics_class, hint=hint)
            if not run.owned:
                run.state = after
            elif after != run.state:
                # Before anybody sees an event of it.
                await self._store_state(run, after)
        write(generation.take())
        generation.write = write
        if generation.full:
            generation.full = False
            exchange.resume()
        while not generation.ended:
            await exchange.wait()
        write(generation.take())
        if generation.error is None or not _again(generation.error):
            run.last = exchange.last_events(generation.error)
        return generation.error

    async def _finish(self, run: Run) -> None:
        """Keep what came of it, and only then show its end. Raises _Lost."""
        packed = b""
        if not run.dropped:
            packed = await asyncio.to_thread(zlib.compress, b"".join([*run.events, run.last]))
        result = Result(response=_response_of(run.last), events=packed)
        while run.state.status in OPEN:
            try:
                await self._store_state(run, self._after(run.state, result.response), _encode(result))
            except ApiError as error:
                if error.reply.code != TOO_LARGE:
                    await asyncio.sleep(_LOOK_S)
                elif result.events:
                    result = Result(response=result.response)
                else:
                    run.last = _ended(run.job, "failed", _number(len(run.events), run.state), error.reply)
                    result = Result(response=_response_of(run.last))
        run.events += _split(run.last)

    def _after(self, state: JobState, response: msgspec.Raw | bytes) -> JobState:
        """The state of one that has ended so."""
        forgotten_ms = _now_ms() + int(self._config.jobs_kept_s * 1000)
        return _with(state, status=_decode(response)["status"], owner="", at_ms=forgotten_ms)

    # -- what clients ask

    async def prepare(self, request: Request, given: ResponsesRequest, identity: Identity) -> None:
        """Put what an earlier response had before a request's input, in the form in which it is kept. Raises ApiError:
        nothing is kept here; there is no such response, or it has not ended."""
        if self._store is None:
            if given.background or given.previous_response_id is not None:
                field = "background" if given.background else "previous_response_id"
                raise wrong_field(field, "this server keeps no responses; it was started without --jobs")
            given.store = False
        if given.background and given.store is False:
            raise wrong_field("store", "what is asked for with 'background' is kept; leave it out")
        if given.background and getattr(given, "eaas_drop_lost_experts", None):
            # Whoever goes on with it, or listens, computes all of it again, and must make the same.
            raise wrong_field("eaas_drop_lost_experts", "what is computed in the background lacks none; leave it out")
        if given.previous_response_id is not None:
            id = given.previous_response_id
            job, found = await self._found(id, request, "previous_response_id")
            if found.state.status in OPEN:
                message = f"is '{id}', which is {found.state.status}; wait for its end"
                raise wrong_field("previous_response_id", message)
            output = _decode(_result(found).response)["output"]
            given.input = [*_decode(job.request)["input"], *output, *input_items(given, identity)]
        elif given.background or given.store:
            given.input = list(input_items(given, identity))

    async def create(
        self, request: Request, given: ResponsesRequest, identity: Identity, served: Served, work: Work
    ) -> Response:
        """Keep a request that is to be computed in the background, and answer before it is. Raises ApiError: it cannot
        be kept, its key's budget is spent, or there is one of its id."""
        name, pool = served.model.name, served.pool
        job, account = self._job(request, given, identity, name), account_of(request.scope)
        id, reserved, mine = job.queued["id"], work.cost(self._config.batch_tokens), self._has_room(name)
        reserve_tokens(account, reserved, served.metrics.count_refused)
        new = JobState(status="queued", at_ms=_now_ms(), owner=self._owner if mine else "", model=name)
        state = None
        try:
            state = await self._ask(JobStore.put, id, _encode(job), new)
        finally:
            if account is not None and state is None:
                account.settle(reserved, 0, time.monotonic())
        if state is None:
            raise wrong_field("request_id", f"there is a response '{id}' already")
        self._asked[id] = job.run_key, pool.eta, account, reserved
        limit, ignores = work.limits[0], work.params.ignore_eos
        pool.expect(job.run_key, job.share, work.prompts[0], limit, ignore_eos=ignores)
        if mine:
            run = self._start(id, job, state, owned=True)
            if not work.wanted.stream:
                with contextlib.suppress(TimeoutError):
                    # Until it has begun, little is known of when it will end.
                    await asyncio.wait_for(run.changed.wait(), _POLL_S)
        return self._stream(id, job, -1) if work.wanted.stream else self._unfinished(job, state)

    def keeper(
        self, request: Request, given: ResponsesRequest, served: Served, exchange: Exchange
    ) -> Callable[[], Awaitable[None]]:
        """Keeps a response that was computed in the foreground; where that fails, the response says so itself."""
        name = served.model.name
        job = self._job(request, given, exchange.identity, name)

        async def keep() -> None:
            body, kept = exchange.body(), None
            state = self._after(JobState(status="", at_ms=0, model=name), body)
            result = _encode(Result(response=msgspec.Raw(body)))
            try:
                kept = await self._ask(JobStore.put, exchange.id, _encode(job), state, result)
            except ApiError as error:
                log.warning("response_not_kept id=%s reason=%s", exchange.id, error)
            if kept is None:
                exchange.not_kept()

        return keep

    async def get(self, response_id: str, request: Request) -> Response:
        """GET /v1/responses/{response_id}: how it stands; with `stream` its events after `starting_after`."""
        job, found = await self._found(response_id, request)
        asked = request.query_params
        if asked.get("stream") != "true":
            return self._answer(job, found)
        if not job.background:
            raise wrong_field("stream", "only what was asked for with 'background' can be streamed again")
        after = asked.get("starting_after", "-1")
        if not re.fullmatch(r"-1|[0-9]{1,9}", after):
            raise wrong_field("starting_after", "the sequence number of an event is needed")
        return self._stream(response_id, job, int(after))

    async def cancel(self, response_id: str, request: Request) -> Response:
        """POST /v1/responses/{response_id}/cancel: it ends, with what it has said where it is computed here; one that
        has ended is answered as it is."""
        job, found = await self._found(response_id, request)
        while found.state.status in OPEN:
            run = self._runs.get(response_id)
            if run is not None and run.owned and run.exchange is not None:
                run.exchange.cancel()
                # One that was about to be tried again is tried, and must be told again.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        while not run.over:
                            run.changed.clear()
                            await run.changed.wait()
            else:
                last = _ended(job, "cancelled", _number(_OPENING, found.state))
                events = zlib.compress(b"".join([*_opening(job), last]))
                result = Result(response=_response_of(last), events=events)
                after = self._after(found.state, result.response)
                ended = await self._ask(JobStore.update, response_id, found.state, after, _encode(result))
                if ended is not None:
                    self._forget(response_id)
            job, found = await self._found(response_id, request)
        return self._answer(job, found)

    async def delete(self, response_id: str, request: Request) -> Response:
        """DELETE /v1/responses/{response_id}: forget it; one that has not ended is computed no more."""
        await self._found(response_id, request)
        await self._ask(JobStore.delete, response_id)
        self._forget(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _forget(self, id: str) -> None:
        """Compute one no more that somebody has ended."""
        if id in self._runs:
            self._drop(self._runs[id])
        else:
            self._settle(id, 0)

    async def list_input(self, response_id: str, request: Request) -> Response:
        """GET /v1/responses/{response_id}/input_items: all that the model was given, in pages."""
        job, _ = await self._found(response_id, request)
        asked, items = request.query_params, _decode(job.request)["input"]
        limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
        if not re.fullmatch(r"[1-9][0-9]?|100", limit):
            raise wrong_field("limit", "1 to 100 is needed")
        if order not in ("asc", "desc"):
            raise wrong_field("order", "'asc' or 'desc' is needed")
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise wrong_field("after", "there is no item of that id")
        rest = items if after is None else items[ids.index(after) + 1 :]
        page = rest[: int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(page) < len(rest)})

    def _answer(self, job: Job, found: Stored) -> Response:
        if found.state.status in OPEN:
            return self._unfinished(job, found.state)
        return Response(bytes(_result(found).response), media_type="application/json")

    def _unfinished(self, job: Job, state: JobState) -> Response:
        """The response object so far, when it is expected to end, and when to ask again."""
        run, gateway = self._runs.get(job.queued["id"]), self._gateway
        eta = gateway.models.get(state.model, gateway.own).pool.eta
        exchange = None if run is None else run.exchange
        made = 0 if exchange is None else exchange.generation.completion_tokens
        estimate = eta.estimate(job.run_key, time.monotonic(), made=made)
        if estimate is None:
            estimate = eta.sent_now() if run is None or not (run.last or exchange) else _SOON
        p50_s, p90_s, after_s = estimate
        shown = {"p50_s": round(p50_s, 3), "p90_s": round(p90_s, 3)}
        headers = {"openai-poll-after-ms": str(math.ceil(after_s * 1000))}
        return JSONResponse({**job.queued, "status": state.status, "eaas_eta": shown}, headers=headers)

    async def _found(self, id: str, request: Request, param: str = "response_id") -> tuple[Job, Stored]:
        known = self._store is not None and _ID.fullmatch(id)
        found = await self._ask(JobStore.get, id) if known else None
        job = None if found is None else found.job_as(Job)
        # That there is another's is nobody's business.
        if found is None or job is None or job.key_name != key_name_of(request.scope):
            message = f"No response '{id[:128]}' is in progress here, and none is stored."
            raise ApiError(ErrorReply(status=404, message=message, param=param, code="response_not_found"))
        return job, found

    def _job(self, request: Request, given: ResponsesRequest, identity: Identity, model: str) -> Job:
        wanted = as_chat(given)
        id = ResponsesFormat.prefix + (wanted.request_id or identity.drawn)
        head = ResponseHead(id=id, identity=identity, model=model, fingerprint=None)
        return Job(
            key_name=key_name_of(request.scope),
            share=_with(share_of(request.scope), background=True),
            identity=identity,
            # Events are made of it, whoever listens.
            request=msgspec.Raw(_encode(given.model_dump(exclude_unset=True, by_alias=True) | {"stream": True})),
            queued=ResponsesFormat(None, repeated(given, wanted)).queued(head),
            run_key=uuid.uuid4().hex,
            background=bool(given.background),
        )

    # -- streams

    def _stream(self, id: str, job: Job, after: int) -> Response:
        # Of a client that reads nothing the kernel ends the connection: see eaas.gateway.listening.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(id, job, after), headers=headers, media_type="text/event-stream")

    async def _events(self, id: str, job: Job, after: int) -> AsyncGenerator[bytes]:
        """The events of a job after that sequence number, wherever it is computed."""
        until_s = time.monotonic() + self._config.deadline_s
        while not self._ends:
            try:
                found = None if id in self._runs else await self._ask(JobStore.get, id)
            except ApiError as error:
                if time.monotonic() > until_s:
                    yield error_event(error.reply.body())
                    return
                await asyncio.sleep(_POLL_S)
                continue
            until_s = time.monotonic() + self._config.deadline_s
            run = self._runs.get(id)
            if run is None and found is not None and found.state.status == "in_progress":
                run = self._start(id, job, found.state, owned=False)
            if run is not None:
                run.listeners += 1
                try:
                    while not self._ends:
                        place = _place_behind(after, run.state)
                        if place is None or (run.dropped and place >= len(run.events)):
                            yield _BEGUN_ANEW if place is None else _NO_EVENTS
                            return
                        if events := run.events[place:]:
                            after = _number(place + len(events) - 1, run.state)
                            yield b"".join(events)
                        elif run.over:
                            break
                        else:
                            run.changed.clear()
                            await run.changed.wait()
                finally:
                    run.listeners -= 1
                    if not run.listeners and not run.owned:
                        self._drop(run)
            elif found is None or (place := _place_behind(after, found.state)) is None:
                yield _NO_EVENTS if found is None else _BEGUN_ANEW
                return
            elif found.state.status in OPEN:
                opening = _opening(job)[place:]
                after += len(opening)
                yield b"".join(opening)
                await asyncio.sleep(_POLL_S)
            else:
                packed = _result(found).events
                events = _split(zlib.decompress(packed)) if packed else []
                # What another gateway cancelled has fewer than were shown here.
                rest = events[place:] if place <= len(events) else events[-1:]
                yield b"".join(rest) if events else _NO_EVENTS
                return


def _result(found: Stored) -> Result:
    return _decode(found.result, type=Result)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _again(error: ErrorReply) -> bool:
    """Whether the same may go well later."""
    return error.status in (429, 503) or error.code == NOT_RESUMABLE


def _split(events: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]


def _number(place: int, state: JobState) -> int:
    """The sequence number of the event at that place of all of its turn."""
    return place if place < _OPENING else place + state.turn * _TURN


def _place_behind(after: int, state: JobState) -> int | None:
    """The place of the event behind that sequence number; None: that is of an earlier turn."""
    place = after + 1 if after < _OPENING else after + 1 - state.turn * _TURN
    return place if place > _OPENING or after < _OPENING else None


def _opening(job: Job) -> list[bytes]:
    """The events before anything is computed."""
    names = enumerate(_OPENING_NAMES)
    return [named_event(name, {"response": job.queued, "sequence_number": n}) for n, name in names]


def _ended(job: Job, status: str, number: int, error: ErrorReply | None = None) -> bytes:
    """The events from that number on that end a job of which nothing is kept that was computed."""
    shown = None if error is None else {"code": "server_error", "message": error.message}
    fields = {"response": {**job.queued, "status": status, "error": shown}, "sequence_number": number}
    if error is None:
        return named_event("response.incomplete", fields)
    return named_event("response.failed", fields) + error_event(error.body())


def _response_of(events: bytes) -> msgspec.Raw:
    """The response object in the first of these."""
    data = events.partition(b"data: ")[2].partition(b"\n\n")[0]
    return _decode(data, type=dict[str, msgspec.Raw])["response"]


def _no_more(message: str, code: str) -> bytes:
    return error_event(ErrorReply(status=409, message=message, code=code).body())


_NO_EVENTS = _no_more(
    f"The events are not kept: they are over {_EVENTS_BYTES} bytes, or the response was deleted.", "events_not_kept"
)
_BEGUN_ANEW = _no_more(
    "No server of its numerics class is left; it is computed anew in another. Ask for all of its events.", "begun_anew"
)
