"""Where the microseconds of a step go, whether it decodes or computes prompts: phases of each lane, median over steps.

    python -m benchmarks.trace --shape S --batch 1,8 --servers 0,1,2
    python -m benchmarks.trace --shape S --batch 1 --servers 0,2 --prefill 512

0 servers: every expert in this process. The table shows the lanes side by side; "meet" and "reply" are waiting,
"send" holds what an expert server computes on the same core as soon as it is rung. Their sum falls short of the
step's time by what Python adds: scheduling, sampling, and handing tokens out.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.engines.driven import Driven, inproc, ours
from benchmarks.engines.run import PROMPT_TOKENS, prompts_for
from benchmarks.make_model import SHAPES
from benchmarks.report import record, spread
from benchmarks.setting import checkpoint, cluster, cores_of, numbers, parser
from benchmarks.step_trace import StepTrace

TOKENS = 33
KV_TOKENS = 16384


@contextlib.contextmanager
def engine(model: Path, cores: Sequence[int], servers: int) -> Iterator[Driven]:
    """An engine in this process, over that many expert servers."""
    with contextlib.ExitStack() as closing:
        if servers:
            pool = closing.enter_context(cluster(model, cores, servers=servers, endpoint=False))
            driven = ours(model, cores, KV_TOKENS, pool.router_address)
        else:
            driven = inproc(model, cores, KV_TOKENS)
        closing.callback(driven.close)
        yield driven


def lanes_of(steps: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, float]]:
    """Of each lane the median of each phase over the steps, in microseconds."""
    lanes = []
    for spent in zip(*steps, strict=True):
        names = dict.fromkeys(name for step in spent for name in step)
        lanes.append({name: statistics.median(step.get(name, 0.0) for step in spent) for name in names})
    return lanes


def main(argv: Sequence[str] | None = None) -> None:
    """Trace, print one table for each setting, and append one JSON line each."""
    options = parser(__doc__)
    options.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    options.add_argument("--servers", default="0,2", help="expert servers, comma-separated; 0: in this process")
    options.add_argument(
        "--prefill",
        type=int,
        default=0,
        help="trace the steps that compute prompts of so many tokens instead",
    )
    chosen = options.parse_args(argv)
    length, tokens = (chosen.prefill, 1) if chosen.prefill else (PROMPT_TOKENS, TOKENS)
    cores = cores_of(chosen)
    with checkpoint(chosen.shape, chosen.checkpoints) as model:
        for servers in numbers(chosen.servers):
            with engine(model, cores, servers) as driven:
                for batch in numbers(chosen.batch):
                    steps, steps_us = [], []
                    for number in range(chosen.rounds + 1):
                        prompts = prompts_for(batch, SHAPES[chosen.shape].vocab, number, length)
                        with StepTrace(driven.decoder, len(cores)) as trace:
                            run = driven.generate(prompts, tokens)
                        if number:  # The first round warms up.
                            shown = run.steps_s if chosen.prefill else run.decode_steps_s
                            steps += trace.steps()[-len(shown) :]
                            steps_us += [seconds * 1e6 for seconds in shown]
                    report(chosen, servers, batch, steps_us, lanes_of(steps))


def report(
    chosen: argparse.Namespace,
    servers: int,
    batch: int,
    steps_us: Sequence[float],
    lanes: Sequence[dict[str, float]],
) -> None:
    """One table and one JSON line."""
    names = dict.fromkeys(name for lane in lanes for name in lane)
    about = f", prompts of {chosen.prefill}" if chosen.prefill else ""
    print(f"{chosen.shape}, batch {batch}, {servers} servers{about}: {statistics.median(steps_us):.0f} us a step")
    for name in sorted(names, key=lambda name: -max(lane.get(name, 0.0) for lane in lanes)):
        print(f"  {name:14}" + "".join(f"{lane.get(name, 0.0):10.0f}" for lane in lanes))
    result = {
        "shape": chosen.shape,
        "batch": batch,
        "servers": servers,
        **({"prefill": chosen.prefill} if chosen.prefill else {}),
        "rounds": chosen.rounds,
        "step_us": spread(steps_us),
        "lanes_us": lanes,
    }
    record("trace", result, (), chosen.results)


if __name__ == "__main__":
    main()
