"""One whole load test: learn the endpoint, drive it, inject faults if asked to, and report.

Where a cluster of EaaS is behind the endpoint, its faults by plan are on the load's clock too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaas.ops.chaos.plan import FaultEvent, seconds
from eaas.ops.load.client import Client, Endpoint, EndpointUnreachable
from eaas.ops.load.driver import Driver, learn_cost, learn_models
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.report import Run, Slo, as_report
from eaas.ops.load.workload import (
    DEFAULT_TOKENS,
    TokenCost,
    Workload,
    WorkloadInvalid,
    read_arrivals,
    read_prompts,
    schedule,
    word_prompts,
)

if TYPE_CHECKING:
    from eaas.ops.load.cli import Options

_SHOWN_EVERY_S = 0.25
_MOST_LINES = 1_000_000
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The report, and the records that it was made of.
Outcome = tuple[dict[str, Any], Sequence[StreamRecord]]


def duration_s(text: str) -> float:
    """Seconds of a duration over 0, such as 500ms, 60s, 2m, or a bare number of seconds. Raises ValueError."""
    found = seconds(text)
    if not found:
        raise ValueError(f"{text!r} is no duration: more than 0 is needed, such as 60s or 500ms.")
    return found


class Session:
    """A load test in progress. `stop` ends it early; what was seen by then is reported."""

    def __init__(self, options: Options, progress: Callable[[str, Driver, Client], None]) -> None:
        """Raises ValueError, OSError: an option makes no sense, or a file cannot be read."""
        self._options = options
        self._progress = progress
        self._arrivals = read_arrivals(options.arrivals)
        ttft_s, tpot_s, e2e_s, for_s = (
            duration_s(text) if text is not None else None
            for text in (options.slo_ttft, options.slo_tpot, options.slo_e2e, options.for_)
        )
        self._slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)
        self._for_s = 60.0 if for_s is None and options.requests is None else for_s
        self._timeout_s, self._warmup_s = duration_s(options.timeout), duration_s(options.warmup)
        key = os.environ.get(options.api_key_env, "")
        self._endpoint = Endpoint.of_url(options.url, chat=options.chat or None, key=key)
        self._driver: Driver | None = None
        self._stopped = False

    def stop(self) -> None:
        """Send nothing more, revert faults, report."""
        self._stopped = True
        if self._driver is not None:
            self._driver.stop()

    async def run(self) -> Outcome:
        """Raises EndpointUnreachable, WorkloadInvalid, OSError."""
        with _endings_call(self.stop):
            workload = await self._workload()
            client = Client(self._endpoint, self._timeout_s)
            try:
                return await self._measure(client, workload)
            finally:
                client.close()

    async def _measure(self, client: Client, workload: Workload) -> Outcome:
        reference: list[StreamRecord] | None = None
        if self._options.reference:
            reference = (await self._drive("reference", client, workload))[0].records
        run = await self._with_faults(client, workload)
        if reference is not None and not self._stopped:
            # Closed loops may get further in one run than in the other.
            known = {record.prompt for record in reference if not record.failed}
            missing = sorted({record.prompt for record in run.records} - known)
            if missing:
                driver = Driver(client, workload)
                client.start()
                rest = driver.each(missing, self._arrivals.streams or 8)
                await self._shown("rest of the reference", driver, client, rest)
                # They belong to no time of the reference run, only to its texts.
                reference = [*reference, *(replace(record, token_s=[]) for record in driver.records)]
        return as_report(self._settings(workload), run, self._slo, reference), run.records

    async def _with_faults(self, client: Client, workload: Workload) -> Run:
        """The run itself, with its faults."""
        options, origin = self._options, self._endpoint.origin
        plan = PlanRun(options.chaos, origin, lambda: client.now_s) if options.chaos else None
        runs: list[asyncio.Task[None]] = []
        try:
            cpu_s = time.process_time()
            begin = (lambda: runs.append(asyncio.create_task(plan.run()))) if plan is not None else None
            driver, end_s = await self._drive("load", client, workload, begin)
            cpu_s = time.process_time() - cpu_s
        finally:
            if plan is not None:
                plan.stop()
            await asyncio.gather(*runs, return_exceptions=True)
        return Run(
            records=driver.records,
            end_s=end_s,
            warmup_s=self._warmup_s,
            events=plan.events if plan is not None else (),
            problem=plan.problem if plan is not None else "",
            cpu_s=cpu_s,
        )

    async def _drive(
        self,
        title: str,
        client: Client,
        workload: Workload,
        on_start: Callable[[], object] | None = None,
    ) -> tuple[Driver, float]:
        """Send the workload once; returns the driver and when the last request was due."""
        driver = self._driver = Driver(client, workload)
        if self._stopped:
            driver.stop()
        for_s, requests, rate = self._for_s, self._options.requests, self._options.rate
        if self._arrivals.kind == "closed":
            client.start()
            work = driver.closed_loop(self._arrivals.streams, for_s=for_s or float("inf"), requests=requests)
        else:
            times = schedule(
                self._arrivals, 1.0 if rate is None else rate, self._options.seed, for_s=for_s, requests=requests
            )
            client.start()
            work = driver.open_loop(times)
        if on_start is not None:
            on_start()
        await self._shown(title, driver, client, work)
        last_s = max((record.planned_s for record in driver.records), default=0.0)
        return driver, for_s if for_s is not None and not self._stopped else last_s

    async def _shown(self, title: str, driver: Driver, client: Client, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        while not task.done():
            await asyncio.wait([task], timeout=_SHOWN_EVERY_S)
            self._progress(title, driver, client)
        await task

    async def _workload(self) -> Workload:
        options, endpoint = self._options, self._endpoint
        named = {str(model.get("id")): model for model in await learn_models(endpoint)}
        model = options.model or next(iter(named), "")
        if model not in named:
            raise EndpointUnreachable(
                f"{endpoint.origin} serves {', '.join(named) or 'no model'}; {model or 'none'} was asked for. "
                f"Name one with --model."
            )
        workload = Workload(
            model=model,
            chat=endpoint.chat,
            prompts=word_prompts(options.seed, 1, TokenCost()),
            max_tokens=options.max_tokens or 64,
            temperature=options.temperature,
            seed=options.seed,
            options=(("ignore_eos", True),) if options.ignore_eos else (),
        )
        if options.prompts is not None:
            with options.prompts.open(encoding="utf-8") as file:
                prompts = read_prompts(islice(file, _MOST_LINES))
            if not endpoint.chat and any(prompt.messages for prompt in prompts):
                raise WorkloadInvalid(f"{options.prompts} holds chat messages; add --chat.")
            return replace(workload, prompts=lambda index: prompts[index], distinct=len(prompts))
        cost = await learn_cost(endpoint, workload, self._timeout_s)
        tokens = options.prompt_tokens or DEFAULT_TOKENS
        return replace(workload, prompts=word_prompts(options.seed, tokens, cost))

    def _settings(self, workload: Workload) -> dict[str, Any]:
        options, arrivals = self._options, self._arrivals
        said: dict[str, Any] = {
            "endpoint": f"{self._endpoint.origin}{self._endpoint.path}",
            "model": workload.model,
            "arrivals": options.arrivals,
            "rate": "" if arrivals.kind == "closed" else options.rate or "",
            "seconds": self._for_s or "",
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


class PlanRun:
    """A plan that runs beside the load, in a thread, as faults block while they last. Its outcome is as in `Run`."""

    def __init__(self, path: Path, url: str, clock: Callable[[], float]) -> None:
        """Args: url: of the gateway. clock: seconds since the load's start. Raises PlanInvalid."""
        # Here rather than in the thread: importing takes long enough to make faults late and the load uneven.
        from eaas.ops.chaos.plan import read_plan
        from eaas.ops.chaos.runner import run_plan

        plan, stop = read_plan(path), threading.Event()
        self._plan, self._clock, self.stop = plan, clock, stop.set
        self._carry_out = lambda: run_plan(plan, url, on_event=self._on_event, stop=stop)
        self.events: list[FaultEvent] = []
        self.problem = ""

    def _on_event(self, event: FaultEvent) -> None:
        text = event.text if event.phase == "refused" else f"{event.kind} {', '.join(event.targets)}"
        # Stamped here: the plan's own clock began some time after it was asked to.
        self.events.append(replace(event, at_s=self._clock(), text=text))

    async def run(self) -> None:
        """Carry it out until its end, or until `stop` reverts what lasts."""
        try:
            await asyncio.to_thread(self._carry_out)
        except Exception as error:
            # The load goes on; whoever reads the report is told that the faults did not.
            self.problem = f"{type(error).__name__}: {error}"
            return
        done, wanted = sum(event.phase != "ended" for event in self.events), len(self._plan.steps)
        if done < wanted:
            self.problem = (
                f"The load ended before {wanted - done} of {wanted} faults; the plan takes {self._plan.end_s:g} s. "
                "Give a longer --for."
            )
