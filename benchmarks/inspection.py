"""What recording costs a model that serves: tokens per second with and without an inspection, steps of one engine.

Experts in process, so that nothing else is in the way. Every request is recorded, at all layers, by what workers use:
native taps, ring, and the sink's thread beside the lanes on the same cores. Modes:

    residuals    every layer's residual stream, all rows, to files of safetensors
    everything   embedding, attention, gates, chosen experts, residuals and final norm, to files
    statistics   of every layer's residual stream, to nowhere
    views        gates and chosen experts, to the live views
    hangs        residuals, to a sink that takes nothing, into a ring of 1 MiB
    full         residuals, to a sink that fails at once, as files on a full disk do

A round runs each mode and none, in turn; the tokens of all must be equal. Figures are medians of the rounds' ratios.

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
RESIDUALS = ["layers.*.residual"]
EVERYTHING = [
    "embed", "layers.*.attention", "layers.*.gate", "layers.*.experts", "layers.*.residual", "final_norm",
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "residuals": {"taps": RESIDUALS},
    "everything": {"taps": EVERYTHING},
    "statistics": {"taps": RESIDUALS, "statistics": True, "sink": "views"},
    "views": {"taps": ["layers.*.gate", "layers.*.experts"], "sink": "views"},
    "hangs": {"taps": RESIDUALS, "ring_bytes": 1 << 20},
    "full": {"taps": RESIDUALS},
}


class Hangs:
    """A sink that never takes what it is given."""

    where = ""

    def take(self, rows: Rows) -> None:
        """For ever."""
        threading.Event().wait()

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Full(Hangs):
    """A sink with no space left."""

    def take(self, rows: Rows) -> None:
        """Fail."""
        raise OSError(errno.ENOSPC, "No space left on device")


class Bench:
    """One engine whose runs are recorded, or not."""

    def __init__(self, model: Path, cores: Sequence[int], closing: contextlib.ExitStack) -> None:
        experts = LocalExperts.load(
            Checkpoint.open(model), Dtype.BFLOAT16, lanes=len(cores), max_rows=STEP_TOKENS
        )
        self._driven = Driven(
            model=model, backend=experts.backend, cores=cores, kv_tokens=KV_TOKENS, closing=closing
        )
        self.facts, self.spec, self._experts = self._driven.facts, self._driven.decoder.spec, experts
        self.told: dict[str, list[Inspected]] = {}
        self._folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        self._numbers = itertools.count()

    def run(self, number: int, mode: str, batch: int, tokens: int) -> tuple[float, list[list[int]]]:
        """Tokens per second of one batch, once every prompt has its first, and its tokens."""
        decoder, spec = self._driven.decoder, self.spec
        config = EngineConfig(
            max_model_len=spec.max_model_len, step_tokens=STEP_TOKENS, kv_blocks=KV_TOKENS // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS, vocab=spec.vocab, prefix_reuse=False,
        )  # fmt: skip
        engine = Engine(decoder, config)
        inspector = engine.inspector = Inspector(spec, decoder, STEP_TOKENS, partial(self._sink, mode))
        id = f"inspect-{next(self._numbers)}"
        if mode != "none":
            refusal = inspector.begin(Inspect(id=id, **MODES[mode]), owner=1)
            if refusal is not None:
                raise RuntimeError(refusal.fault)
        made: dict[str, list[int]] = {}
        for name, prompt in enumerate(prompts_for(batch, spec.vocab, number)):
            params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
            engine.submit(
                Submit(id=str(name), attempt=1, prompt=list(prompt), params=params, inspected=f"{id}/r{name}")
            )
            made[str(name)] = []
        began_s = time.perf_counter()
        while engine.has_work:
            outcome = engine.step()
            inspector.news()
            for token in outcome.tokens.get(0, []) if outcome else []:
                made[token.id].append(token.token)
                if not token.index:
                    began_s = time.perf_counter()
        took_s = time.perf_counter() - began_s
        if mode != "none":
            self._end(inspector, id, mode)
        return batch * tokens / took_s, list(made.values())

    def _end(self, inspector: Inspector, id: str, mode: str) -> None:
        inspector.end(id)
        while (news := inspector.news()) is None or not news[1].ended:
            time.sleep(0.01)
        self.told.setdefault(mode, []).append(news[1])

    def _sink(self, mode: str, order: Inspect, taps: tuple[Tap, ...]) -> Sink:
        if mode in ("hangs", "full"):
            return Hangs() if mode == "hangs" else Full()
        return opened(self._folder, "worker", None, order, taps)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line for each batch size."""
    command = parser(__doc__)
    command.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    command.add_argument("--tokens", type=int, default=128, help="of each prompt in a round")
    command.add_argument("--modes", default=",".join(list(MODES)[1:]), help="comma-separated")
    options = command.parse_args(argv)
    modes = ["none", *options.modes.split(",")]
    cores, allowed, results = cores_of(options), os.sched_getaffinity(0), list[dict[str, Any]]()
    with checkpoint(options.shape, options.checkpoints) as model, contextlib.ExitStack() as closing:
        bench = Bench(model, cores, closing)
        for batch in numbers(options.batch):
            measures = {
                mode: partial(bench.run, mode=mode, batch=batch, tokens=options.tokens) for mode in modes
            }
            found = interleave(measures, options.rounds, {})
            plain = found["none"]
            for mode in modes[1:]:
                if [tokens for _, tokens in found[mode]] != [tokens for _, tokens in plain]:
                    raise RuntimeError(f"{mode} changed tokens, so nothing is timed.")
            ratios = {
                mode: np.array([a / b for (a, _), (b, _) in zip(found[mode], plain, strict=True)])
                for mode in modes[1:]
            }
            result = {
                "shape": options.shape,
                "batch": batch,
                "threads": len(cores),
                "rounds": options.rounds,
                "tokens": options.tokens,
                "tokens_per_s": {
                    mode: round(float(np.median([rate for rate, _ in runs])), 1)
                    for mode, runs in found.items()
                },
                # Of tokens per second without, and the quarters of the rounds around the median.
                "cost_percent": {
                    mode: [round(100 * float(1 - np.percentile(ratio, at)), 2) for at in (75, 50, 25)]
                    for mode, ratio in ratios.items()
                },
                "dropped": {mode: sum(told.dropped for told in bench.told[mode]) for mode in modes[1:]},
                **bench.facts,
            }
            results.append(result)
    # The engine has pinned this thread, and the processor's cores are part of a record.
    os.sched_setaffinity(0, allowed)
    for result in results:
        record("inspection", result, (), options.results)


if __name__ == "__main__":
    main()
