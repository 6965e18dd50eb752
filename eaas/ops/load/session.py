"""One whole load test: learn the endpoint, drive it, strike it if asked to, and report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from eaas.ops.load.arrivals import Arrivals, Point, knee, next_rate, schedule
from eaas.ops.load.client import Client, Endpoint, EndpointUnreachable
from eaas.ops.load.driver import Driver, Progress, learn_cost, learn_models, watched
from eaas.ops.load.faults import PlanRun
from eaas.ops.load.measures import Slo, summarise
from eaas.ops.load.members import AdminUnreachable, MemberWatch, expert_rows, rows_between
from eaas.ops.load.prompts import (
    DEFAULT_TOKENS,
    Prompts,
    PromptsInvalid,
    TokenCost,
    Workload,
    read_prompts,
    trace_prompts,
    word_prompts,
)
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.report import Run, as_report
from eaas.ops.load.traces import TraceRequest, fit, read_trace

_EVERY_S = 0.25
# Of the requests of a rate, so many must keep the promise.
KEPT_SHARE = 0.95
_MOST_LINES = 1_000_000
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for; the command line explains each."""

    endpoint: Endpoint
    arrivals: Arrivals
    rate: float | None = None
    speed: float = 1.0
    for_s: float | None = None
    requests: int | None = None
    model: str = ""
    prompts: Path | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    context: int | None = None
    timeout_s: float = 600.0
    warmup_s: float = 2.0
    slo: Slo = field(default_factory=Slo)
    sweep: bool = False
    reference: bool = False
    chaos: Path | None = None
    admin: str = ""
    admin_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The report, and the records that it was made of."""

    report: dict[str, Any]
    records: Sequence[StreamRecord]


class Session:
    """A load test in progress. `stop` ends it early; what was seen by then is reported."""

    def __init__(self, options: Options, progress: Callable[[str, Driver, Client], None]) -> None:
        self._options = options
        self._progress = progress
        self._driver: Driver | None = None
        self._plan: PlanRun | None = None
        self._stopped = False
        self._trace: list[TraceRequest] = []

    def stop(self) -> None:
        """Send nothing more, revert faults, report."""
        self._stopped = True
        if self._driver is not None:
            self._driver.stop()

    async def run(self) -> Outcome:
        """Raises EndpointUnreachable, AdminUnreachable, ArrivalsInvalid, PromptsInvalid, TraceInvalid, OSError."""
        with _endings_call(self.stop):
            return await self._run()

    async def _run(self) -> Outcome:
        options = self._options
        workload = await self._workload()
        client = Client(options.endpoint, options.timeout_s)
        try:
            if options.sweep:
                return await self._sweep(client, workload)
            reference: list[StreamRecord] | None = None
            if options.reference:
                reference = (await self._drive("reference", client, workload, options.rate))[0].records
            run, records = await self._struck(client, workload)
            if reference is not None and not self._stopped:
                # Closed loops may get further in one run than in the other.
                known = {record.prompt for record in reference if not record.failed}
                missing = sorted({record.prompt for record in records} - known)
                if missing:
                    driver = Driver(client, workload)
                    client.start()
                    await self._shown(
                        "rest of the reference",
                        driver,
                        client,
                        driver.each(missing, options.arrivals.streams or 8),
                    )
                    # They belong to no time of the reference run, only to its texts.
                    texts = [replace(record, token_s=[]) for record in driver.records]
                    reference = [*reference, *texts]
        finally:
            client.close()
        return Outcome(
            report=as_report(self._settings(workload), run, options.slo, reference), records=records
        )

    async def _struck(self, client: Client, workload: Workload) -> tuple[Run, list[StreamRecord]]:
        """The run itself: with its faults, and with the cluster watched where there is one."""
        options = self._options
        before = expert_rows(options.admin, options.admin_key) if options.admin else []
        watch = MemberWatch(options.endpoint.origin, lambda: client.now_s)
        plan = (
            PlanRun(options.chaos, options.endpoint.origin, lambda: client.now_s) if options.chaos else None
        )
        watching = await asyncio.to_thread(watch.start)
        try:
            cpu_s = time.process_time()
            driver, end_s = await self._drive(
                "load", client, workload, options.rate, plan.start if plan is not None else lambda: None
            )
            cpu_s = time.process_time() - cpu_s
        finally:
            # In a thread: both wait for theirs.
            if plan is not None:
                await asyncio.to_thread(plan.stop)
            if watching:
                await asyncio.to_thread(watch.stop)
        try:
            after = expert_rows(options.admin, options.admin_key) if options.admin else []
            rows, rows_note = rows_between(before, after)
        except AdminUnreachable as error:
            # It may be what the plan has struck; what else was seen is worth its report.
            rows, rows_note = [], str(error)
        run = Run(
            records=driver.records,
            end_s=end_s,
            warmup_s=options.warmup_s,
            notes=plan.notes if plan is not None else (),
            problem=plan.problem if plan is not None else "",
            servers=watch.servers,
            expert_rows=rows,
            expert_rows_note=rows_note,
            cpu_s=cpu_s,
        )
        return run, driver.records

    async def _drive(
        self,
        title: str,
        client: Client,
        workload: Workload,
        rate: float | None,
        on_start: Callable[[], None] = lambda: None,
    ) -> tuple[Driver, float]:
        """Send the workload once; returns the driver and when the last request was due."""
        options = self._options
        driver = self._driver = Driver(client, workload)
        if self._stopped:
            driver.stop()
        if options.arrivals.kind == "closed":
            client.start()
            work = driver.closed_loop(
                options.arrivals.streams, for_s=options.for_s, requests=options.requests
            )
        else:
            times = self._times(rate)
            client.start()
            work = driver.open_loop(times)
        on_start()
        await self._shown(title, driver, client, work)
        last_s = max((record.planned_s for record in driver.records), default=0.0)
        return driver, options.for_s if options.for_s is not None and not self._stopped else last_s

    def _times(self, rate: float | None) -> list[float]:
        options = self._options
        if self._trace:
            return [request.at_s for request in self._trace]
        return schedule(
            options.arrivals,
            1.0 if rate is None else rate,
            options.seed,
            for_s=options.for_s,
            requests=options.requests,
        )

    async def _shown(
        self, title: str, driver: Driver, client: Client, work: Coroutine[Any, Any, None]
    ) -> None:
        show: Progress = lambda seen: self._progress(title, seen, client)  # noqa: E731
        await watched(work, driver, show, _EVERY_S)

    async def _sweep(self, client: Client, workload: Workload) -> Outcome:
        """Find the highest rate at which KEPT_SHARE of the requests keep the SLO; the report is of that rate's run."""
        options = self._options
        start = 1.0 if options.rate is None else options.rate
        points: list[Point] = []
        shown: list[dict[str, Any]] = []
        best: tuple[Run, list[StreamRecord]] | None = None
        while not self._stopped and (rate := next_rate(points, start)) is not None:
            cpu_s = time.process_time()
            driver, end_s = await self._drive(f"rate {rate:.3g}", client, workload, rate)
            if self._stopped and points:
                break
            found = summarise(driver.records, options.slo)
            kept = found.requests > 0 and found.good >= KEPT_SHARE * found.requests
            points.append(Point(rate=rate, kept=kept))
            # Of the time in which requests were sent: the wait for the last answers is no load.
            shown.append(
                {
                    "rate": rate,
                    "kept": kept,
                    "goodput": found.good / end_s if end_s else 0.0,
                    "requests": found.requests,
                }
            )
            if best is None or rate == knee(points):
                run = Run(records=driver.records, end_s=end_s, cpu_s=time.process_time() - cpu_s)
                best = run, driver.records
        if best is None:
            raise EndpointUnreachable("the sweep was ended before its first rate.")
        settings = self._settings(workload) | {"rate": knee(points) or "below every rate tried"}
        return Outcome(report=as_report(settings, best[0], options.slo, sweep=shown), records=best[1])

    async def _workload(self) -> Workload:
        options = self._options
        models = await learn_models(options.endpoint)
        named = {str(model.get("id")): model for model in models}
        model = options.model or next(iter(named), "")
        if model not in named:
            raise EndpointUnreachable(
                f"{options.endpoint.origin} serves {', '.join(named) or 'no model'}; {model or 'none'} was asked for. "
                f"Name one with --model."
            )
        context = options.context or named[model].get("max_model_len")
        workload = Workload(
            model=model,
            chat=options.endpoint.chat,
            prompts=word_prompts(options.seed, 1, TokenCost()),
            max_tokens=options.max_tokens or 64,
            temperature=options.temperature,
            seed=options.seed,
            options=(("ignore_eos", True),) if options.ignore_eos else (),
        )
        if options.prompts is not None:
            with options.prompts.open(encoding="utf-8") as file:
                prompts = read_prompts(islice(file, _MOST_LINES))
            if not options.endpoint.chat and any(prompt.messages for prompt in prompts):
                raise PromptsInvalid(f"{options.prompts} holds chat messages; add --chat.")
            return replace(workload, prompts=lambda index: prompts[index], distinct=len(prompts))
        cost = await learn_cost(options.endpoint, workload, options.timeout_s)
        made: Prompts
        if options.arrivals.kind == "trace":
            with Path(options.arrivals.path).open(encoding="utf-8") as file:
                recorded = read_trace(islice(file, _MOST_LINES))
            self._trace = fit(
                recorded, speed=options.speed, rate=options.rate, for_s=options.for_s, limit=options.requests,
                context=int(context) if context else None, most_output=options.max_tokens,
            )  # fmt: skip
            made = trace_prompts(self._trace, options.seed, cost)
        else:
            made = word_prompts(options.seed, options.prompt_tokens or DEFAULT_TOKENS, cost)
        return replace(workload, prompts=made)

    def _settings(self, workload: Workload) -> dict[str, Any]:
        options, arrivals = self._options, self._options.arrivals
        kind = {"closed": f"closed:{arrivals.streams}", "gamma": f"gamma:{arrivals.shape:g}"}.get(
            arrivals.kind, f"trace {Path(arrivals.path).name}" if arrivals.path else arrivals.kind
        )
        said: dict[str, Any] = {
            "endpoint": f"{options.endpoint.origin}{options.endpoint.path}",
            "model": workload.model,
            "arrivals": kind,
            "rate": "" if arrivals.kind == "closed" else options.rate or "",
            "seconds": options.for_s or "",
            "most tokens": workload.max_tokens,
            "temperature": workload.temperature,
            "seed": options.seed,
            "plan": options.chaos.name if options.chaos else "",
        }
        return {name: value for name, value in said.items() if value != ""}


@contextlib.contextmanager
def _endings_call(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when this process is told to end; afterwards signals do what they did before.

    A closed loop of uvloop leaves its handlers behind, and they do nothing: what calls this within a longer life would
    never again heed Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _ENDINGS}
    for number in _ENDINGS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            # None: it was set by no Python code, and cannot be set again from here.
            if handler is not None:
                signal.signal(number, handler)
