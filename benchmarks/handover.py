"""What handing rows over to expert servers costs: microseconds a layer of dispatch and combine with empty experts.

Shape S with experts of inner size 1, so that their arithmetic is nil, and with a vocabulary of 512, so that the head
does not drown what is measured; the lanes have real attention layers to compute between two calls. Of each expert
chosen one tile is still read, 98 KB: in process by all lanes together, on servers by the lanes of the one that has
it, so that 1x1 and 2x1 show more than their hand-over where memory is slow. A step over real server processes, less a
step with the same experts in process, is what the hand-over costs: packing rows, signals, waking, waiting, copying
replies. Both engines run the same steps in turn; each step over servers is compared with the median step in process
of its own round.

    python -m benchmarks.handover --pools 1x1,1x2,2x1,4x1,8x1
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.engines.process import EngineProcess
from benchmarks.engines.run import Run, prompts_for
from benchmarks.make_model import SHAPES
from benchmarks.report import percentiles, record
from benchmarks.setting import checkpoint, cluster, cores_of, interleave, numbers, parser, start_peers

KV_TOKENS = 16384
VOCAB = 512


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line for each pool and batch size."""
    command = parser(__doc__)
    command.add_argument("--batch", default="1", help="batch sizes, comma-separated")
    command.add_argument("--tokens", type=int, default=64, help="steps of a round")
    # Many short rounds: what is looked for is a few microseconds of a step of a thousand.
    command.set_defaults(rounds=21)
    command.add_argument("--pools", default="1x1,1x2,2x1,4x1,8x1", help="servers x lanes of each, comma-separated")
    options = command.parse_args(argv)
    pools = [tuple(map(int, pool.split("x"))) for pool in options.pools.split(",")]
    if any(len(pool) != 2 for pool in pools):
        command.error(f"--pools {options.pools}: servers x lanes is needed, as in 2x1,1x2")
    cores = cores_of(options)
    with checkpoint(options.shape, options.checkpoints, moe_intermediate_size=1, vocab_size=VOCAB) as model:
        for servers, lanes in pools:
            if lanes > len(cores):
                print(f"{servers}x{lanes}: skipped, needs {lanes} cores, found {len(cores)}")
                continue
            measure(model, servers, lanes, cores, options)


def measure(model: Path, servers: int, lanes: int, cores: Sequence[int], options) -> None:  # type: ignore[no-untyped-def]
    """One pool, at each batch size."""
    layers = SHAPES[options.shape].layers
    with contextlib.ExitStack() as closing:
        running = closing.enter_context(
            cluster(model, cores, servers=servers, lanes=lanes, endpoint=False, kv_tokens=KV_TOKENS)
        )
        room = {"kv_tokens": KV_TOKENS}
        own = {"ours": room | {"router": running.router_address}, "inproc": room}
        engines = start_peers(["ours", "inproc"], model, cores, closing, own)
        prompts = prompts_for(4, VOCAB, seed=99)
        if engines["ours"].logits(prompts).tobytes() != engines["inproc"].logits(prompts).tobytes():
            raise RuntimeError("Experts in process and on servers give different bits, so nothing is timed.")
        pids = running.pids() | {name: engine.pid for name, engine in engines.items()}
        for batch in numbers(options.batch):

            def run(number: int, engine: EngineProcess, batch: int = batch) -> Run:
                return engine.generate(prompts_for(batch, VOCAB, number), options.tokens)

            measures = {name: partial(run, engine=engine) for name, engine in engines.items()}
            found = interleave(measures, options.rounds, pids)
            extra_us = over_inproc_us(found["ours"], found["inproc"], layers)
            result = {
                "shape": options.shape,
                "batch": batch,
                "servers": servers,
                "lanes_per_server": lanes,
                "threads": len(cores),
                "rounds": options.rounds,
                "tokens": options.tokens,
                "layers": layers,
                "us_per_layer": percentiles(extra_us),
                "step_us": {
                    name: percentiles(np.concatenate([steps_us(run) for run in runs])) for name, runs in found.items()
                },
            }
            record("handover", result, (), options.results)


def steps_us(run: Run) -> np.ndarray:
    """Microseconds of each decoding step."""
    return np.array(run.decode_steps_s) * 1e6


def over_inproc_us(ours: Sequence[Run], inproc: Sequence[Run], layers: int) -> np.ndarray:
    """Microseconds a layer of each step over servers beyond the median step in process of the same round."""
    return np.concatenate(
        [(steps_us(mine) - np.median(steps_us(other))) / layers for mine, other in zip(ours, inproc, strict=True)]
    )


if __name__ == "__main__":
    main()
