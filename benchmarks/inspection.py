"""What recording costs a model that serves: tokens per second with and without an inspection, steps of one engine.

Experts in process, so that nothing else is in the way. Every request is recorded, at all layers, by what workers use:
native taps, ring, and the sink's thread beside the lanes on the same cores. Modes:

    residuals    every layer's residual stream, all rows, to files of safetensors
    everything   embedding, attention, gates, chosen experts, residuals and final norm, to files
    statistics   of every layer's residual stream, to nowhere
    views        gates and chosen experts, to the live views
    hangs        residuals, to a sink that takes nothing, into a ring of 1 MiB
    full         residuals, to a sink that fails at its first delivery, as files on a full disk do

A round of a mode steps two engines by turns, BLOCK steps each, one recorded and one not, so that a machine whose speed
changes within a second changes both; which of the two is recorded changes with each round. Their tokens must be equal.
The clock starts after WARM_S, half the tokens at the latest: by then a sink has delivered once, or failed, and pages
were touched for the first time, as of an inspection that is under way for minutes.

`steps` is by how much longer recorded steps took than the others, in percent: the median of the rounds, and its
quarters. The sink's thread works beside the steps of both engines, and so stands in both: `sink` is its CPU time over
that of the recorded steps. `cost_percent`, their sum, is the most that an inspection costs, as if all lanes waited for
the sink all the time and nothing of that were in `steps`.

    python -m benchmarks.inspection --shape S --batch 1,8 --rounds 9
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.driven import BLOCK_TOKENS, STEP_TOKENS, Driven
from benchmarks.engines.run import prompts_for
from benchmarks.report import record
from benchmarks.setting import checkpoint, cores_of, interleave, numbers, parser
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.inspector import Inspector
from eaas.worker.protocol import Inspect, Inspected, SamplingParams, Submit
from eaas.worker.sinks import Rows, Sink, opened
from eaas.worker.taps import Tap
from experts.checkpoint import Checkpoint
from experts.model import Dtype
from tests.eaas.local_experts import LocalExperts

KV_TOKENS = 8192
WARM_S = 1.5
BLOCK = 8
RESIDUALS = ["layers.*.residual"]
EVERYTHING = [
    "embed", "layers.*.attention", "layers.*.gate", "layers.*.experts", "layers.*.residual", "final_norm",
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "residuals": {"taps": RESIDUALS},
    "everything": {"taps": EVERYTHING},
    "statistics": {"taps": RESIDUALS, "statistics": True, "sink": "views"},
    "views": {"taps": ["layers.*.gate", "layers.*.experts"], "sink": "views"},
    "hangs": {"taps": RESIDUALS, "ring_bytes": 1 << 20},
    "full": {"taps": RESIDUALS},
}


class Hangs(Sink):
    """A sink that never takes what it is given."""

    def take(self, rows: Rows) -> None:
        """For ever."""
        threading.Event().wait()


class Full(Hangs):
    """A sink with no space left."""

    def take(self, rows: Rows) -> None:
        """Fail."""
        raise OSError(errno.ENOSPC, "No space left on device")


@dataclass
class Seen:
    """A round, once it was warm."""

    blocks: int = 0
    plain_s: float = 0.0
    recorded_s: float = 0.0
    sink_s: float = 0.0
    tokens_per_s: float = 0.0


class Run:
    """A batch that one engine computes, recorded or not."""

    def __init__(self, driven: Driven, inspector: Inspector, prompts: Sequence[Sequence[int]], tokens: int, id: str):
        spec = driven.decoder.spec
        config = EngineConfig(
            max_model_len=spec.max_model_len, step_tokens=STEP_TOKENS, kv_blocks=KV_TOKENS // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS, vocab=spec.vocab, prefix_reuse=False,
        )  # fmt: skip
        self._engine, self._inspector = Engine(driven.decoder, config), inspector
        self._engine.inspect(inspector)
        self.tokens: dict[str, list[int]] = {}
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            name, inspected = str(number), f"{id}/r{number}"
            self._engine.submit(Submit(id=name, attempt=1, prompt=list(prompt), params=params, inspected=inspected))
            self.tokens[name] = []

    def steps(self, most: int) -> float:
        """How long some steps took, in seconds; 0 where nothing is left."""
        began_s = time.perf_counter()
        for _ in range(most):
            if not self._engine.has_work:
                return 0.0
            outcome = self._engine.step()
            self._inspector.news()
            for token in outcome.tokens.get(0, []) if outcome else []:
                self.tokens[token.id].append(token.token)
        return time.perf_counter() - began_s


class Bench:
    """Two engines over the same experts."""

    def __init__(self, model: Path, cores: Sequence[int], closing: contextlib.ExitStack) -> None:
        experts = LocalExperts.load(Checkpoint.open(model), Dtype.BFLOAT16, lanes=len(cores), max_rows=STEP_TOKENS)
        self._sides = [
            Driven(model=model, backend=experts.backend, cores=cores, kv_tokens=KV_TOKENS, closing=closing)
            for _ in range(2)
        ]
        self.facts, self.spec, self._experts = self._sides[0].facts, self._sides[0].decoder.spec, experts
        self.told: dict[str, list[Inspected]] = {}
        self._folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        self._numbers = itertools.count()

    def run(self, number: int, mode: str, batch: int, tokens: int) -> Seen:
        """One round of a mode. Raises RuntimeError: tokens were changed."""
        sides, prompts = self._sides[:: 1 if number % 2 else -1], prompts_for(batch, self.spec.vocab, number)
        id = f"inspect-{next(self._numbers)}"
        inspectors = [Inspector(self.spec, side.decoder, STEP_TOKENS, partial(self._sink, mode)) for side in sides]
        before = threading.enumerate()  # threads of sinks that hang are among them
        refusal = inspectors[1].begin(Inspect(id=id, **MODES[mode]), owner=1)
        if refusal is not None:
            raise RuntimeError(refusal.fault)
        plain, recorded = (
            Run(side, inspector, prompts, tokens, id) for side, inspector in zip(sides, inspectors, strict=True)
        )
        (thread,) = [it for it in threading.enumerate() if it.name == "inspection" and it not in before]
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        warm_from_s, blocks, sink_s, seen = time.perf_counter() + WARM_S, tokens // BLOCK, 0.0, Seen()
        for block in range(blocks):
            if block and not seen.blocks and (time.perf_counter() > warm_from_s or 2 * block >= blocks):
                sink_s, seen.blocks = time.clock_gettime(clock), blocks - block
            took = {run: run.steps(BLOCK) for run in ((plain, recorded) if block % 2 else (recorded, plain))}
            if seen.blocks and took[plain] and took[recorded]:
                seen.plain_s, seen.recorded_s = seen.plain_s + took[plain], seen.recorded_s + took[recorded]
        seen.sink_s = time.clock_gettime(clock) - sink_s
        seen.tokens_per_s = seen.blocks * BLOCK * batch / seen.plain_s
        while plain.steps(BLOCK) + recorded.steps(BLOCK):
            pass
        self._end(inspectors[1], id, mode)
        if plain.tokens != recorded.tokens:
            raise RuntimeError(f"{mode} changed tokens, so nothing is timed.")
        return seen

    def _end(self, inspector: Inspector, id: str, mode: str) -> None:
        inspector.end(id)
        while (news := inspector.news()) is None or not news[1].ended:
            time.sleep(0.01)
        self.told.setdefault(mode, []).append(news[1])

    def _sink(self, mode: str, order: Inspect, taps: tuple[Tap, ...]) -> Sink:
        if mode in ("hangs", "full"):
            return Hangs() if mode == "hangs" else Full()
        return opened(self._folder, "worker", "", None, order, taps)


def quarters(values: Sequence[float] | np.ndarray) -> list[float]:
    """The lower quarter, the median and the upper quarter."""
    return [round(float(value), 2) for value in np.percentile(values, (25, 50, 75))]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line for each batch size."""
    command = parser(__doc__)
    command.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    command.add_argument("--tokens", type=int, default=512, help="of each prompt in a round")
    command.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    options = command.parse_args(argv)
    cores, allowed, results = cores_of(options), os.sched_getaffinity(0), list[dict[str, Any]]()
    with checkpoint(options.shape, options.checkpoints) as model, contextlib.ExitStack() as closing:
        bench = Bench(model, cores, closing)
        for batch in numbers(options.batch):
            measures = {
                mode: partial(bench.run, mode=mode, batch=batch, tokens=options.tokens)
                for mode in options.modes.split(",")
            }
            found = interleave(measures, options.rounds, {})
            steps = {mode: [100 * (it.recorded_s / it.plain_s - 1) for it in seen] for mode, seen in found.items()}
            sink = {mode: [100 * it.sink_s / it.recorded_s for it in seen] for mode, seen in found.items()}
            results.append({
                "shape": options.shape,
                "batch": batch,
                "threads": len(cores),
                "rounds": options.rounds,
                "tokens": options.tokens,
                "block": BLOCK,
                "warm_s": WARM_S,
                "tokens_per_s": round(float(np.median([it.tokens_per_s for seen in found.values() for it in seen])), 1),
                "steps": {mode: quarters(all) for mode, all in steps.items()},
                "sink": {mode: quarters(all) for mode, all in sink.items()},
                "cost_percent": {mode: quarters(np.add(steps[mode], sink[mode])) for mode in found},
                "dropped": {mode: sum(told.dropped for told in bench.told[mode]) for mode in found},
                **bench.facts,
            })  # fmt: skip
            bench.told.clear()
    # The engine has pinned this thread, and the processor's cores are part of a record.
    os.sched_setaffinity(0, allowed)
    for result in results:
        record("inspection", result, (), options.results)


if __name__ == "__main__":
    main()
