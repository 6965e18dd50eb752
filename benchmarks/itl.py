"""Gaps between tokens of streams that run, while others' prompts are computed; and what those prompts pay for it.

Streams generate by themselves first, then beside prompts that come one after another, each as soon as the one before
has its first token. Engines over one decoder and one pool of expert servers take turns: as the worker is by default,
which bounds a step by what it has measured, and with `--prefill-share 1`, where prompts take all rows that a step may
have. Before, the same prompts have the engine for themselves.

    python -m benchmarks.itl --shape S --streams 1,8,32
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.engines.driven import BLOCK_TOKENS, STEP_TOKENS, Driven, ours
from benchmarks.engines.process import available_cores
from benchmarks.make_model import SHAPES
from benchmarks.report import record, spread
from benchmarks.setting import checkpoint, cluster, numbers, parser
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import SamplingParams, Submit

KV_TOKENS = 65536
SHARES = {"bounded": 0.5, "whole": 1.0}
STREAM_PROMPT = 16


@dataclass
class Seen:
    """Of one engine, over its rounds: seconds."""

    calm_s: list[float] = field(default_factory=list[float])
    beside_s: list[float] = field(default_factory=list[float])
    alone_ttft_s: list[float] = field(default_factory=list[float])
    ttft_s: list[float] = field(default_factory=list[float])


class Turns:
    """One engine, step by step."""

    def __init__(self, driven: Driven, vocab: int, share: float) -> None:
        config = EngineConfig(
            max_model_len=driven.decoder.spec.max_model_len, step_tokens=STEP_TOKENS, vocab=vocab,
            kv_blocks=KV_TOKENS // BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, prefix_reuse=False, prefill_share=share,
        )  # fmt: skip
        self._engine, self._vocab = Engine(driven.decoder, config), vocab
        self._draw = np.random.default_rng(1)
        self._asked = 0

    def ask(self, prompt: int, tokens: int) -> str:
        """Submit a request of random tokens; its name."""
        self._asked += 1
        given = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        tokens_in = self._draw.integers(300, self._vocab, prompt).tolist()
        refusal = self._engine.submit(Submit(id=str(self._asked), attempt=1, prompt=tokens_in, params=given))
        if refusal is not None:
            raise RuntimeError(refusal.message)
        return str(self._asked)

    def step(self) -> tuple[float, set[str]]:
        """Seconds of a step, and who got a token."""
        began_s = time.perf_counter()
        outcome = self._engine.step()
        took_s = time.perf_counter() - began_s
        if outcome is None or outcome.failed:
            raise RuntimeError(f"a step failed: {outcome and outcome.failed}")
        return took_s, {token.id for token in outcome.tokens.get(0, [])}

    def first_token(self, prompt: int, gaps_s: list[float]) -> float:
        """Seconds until a prompt has its first and only token; the steps of that time go to `gaps_s`."""
        name, waited_s, got = self.ask(prompt, 1), 0.0, set[str]()
        while name not in got:
            took_s, got = self.step()
            gaps_s.append(took_s)
            waited_s += took_s
        return waited_s

    def round(self, seen: Seen, streams: int, prompt: int, prompts: int, calm: int) -> None:
        """One round; what was measured is added to `seen`."""
        seen.alone_ttft_s += [self.first_token(prompt, []) for _ in range(prompts)]
        names = [self.ask(STREAM_PROMPT, self._engine.config.max_model_len - 64) for _ in range(streams)]
        without = set(names)
        while without:
            without -= self.step()[1]
        seen.calm_s += [self.step()[0] for _ in range(calm)]
        seen.ttft_s += [self.first_token(prompt, seen.beside_s) for _ in range(prompts)]
        for name in names:
            self._engine.cancel(name)


def result_of(seen: Seen, prompt: int) -> dict[str, Any]:
    """What to record of one engine."""
    calm, beside = np.array(seen.calm_s), np.array(seen.beside_s)
    p50, p99 = ([float(np.percentile(gaps, at)) for gaps in (calm, beside)] for at in (50, 99))
    return {
        "calm_itl_ms": {"p50": round(1e3 * p50[0], 2), "p99": round(1e3 * p99[0], 2)},
        "beside_itl_ms": {"p50": round(1e3 * p50[1], 2), "p99": round(1e3 * p99[1], 2)},
        "p50_stretch": round(p50[1] / p50[0], 2),
        "p99_stretch": round(p99[1] / p99[0], 2),
        "alone_prompt_tokens_per_s": spread([prompt / ttft for ttft in seen.alone_ttft_s]),
        "prompt_tokens_per_s": spread([prompt / ttft for ttft in seen.ttft_s]),
        "of_alone": round(float(np.median(seen.alone_ttft_s) / np.median(seen.ttft_s)), 3),
        "tokens_per_s_beside": round(1 / float(beside.mean()), 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; one JSON line for each number of streams."""
    command = parser(__doc__)
    command.add_argument("--streams", default="1,8,32")
    command.add_argument("--prompt", type=int, default=512, help="tokens of each prompt that comes")
    command.add_argument("--prompts", type=int, default=3, help="of a round, one after another")
    command.add_argument("--calm", type=int, default=40, help="steps of a round without them")
    command.add_argument("--experts", type=int, default=2, help="expert servers")
    options = command.parse_args(argv)
    cores, vocab = available_cores(options.threads), SHAPES[options.shape].vocab
    with (
        checkpoint(options.shape, options.checkpoints) as model,
        cluster(model, cores, servers=options.experts, endpoint=False) as running,
        # A decoder pins the thread that steps it.
        ThreadPoolExecutor(1) as stepping,
    ):
        driven = ours(model, cores, KV_TOKENS, running.router_address)
        turns = {name: Turns(driven, vocab, share) for name, share in SHARES.items()}
        for streams in numbers(options.streams):
            found = {name: Seen() for name in turns}
            for number in range(options.rounds + 1):
                for name in list(turns)[:: 1 if number % 2 else -1]:
                    # The first round warms up, and learns.
                    seen = found[name] if number else Seen()
                    counts = streams, options.prompt, options.prompts, options.calm
                    stepping.submit(turns[name].round, seen, *counts).result()
            measured = {name: result_of(seen, options.prompt) for name, seen in found.items()}
            fixed = {"shape": options.shape, "streams": streams, "prompt": options.prompt}
            record("itl", {**fixed, "rounds": options.rounds, **measured}, folder=options.results)
        driven.close()


if __name__ == "__main__":
    main()
