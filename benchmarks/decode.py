"""Decoding speed of EaaS beside other engines, in one run.

Measured: "http", EaaS through its endpoint; "ours", its engine driven directly over the same expert servers;
"inproc", the same engine with every expert in its own process; and the peers transformers, llama.cpp and vLLM, which
is asked through its endpoint. The same weights, the same prompts, greedy; rounds interleaved so that the machine's
moods hit every engine alike: only the ratios of paired rounds count, never absolute figures. Each engine is a process
that sleeps while another is measured, and every round waits until it does; vLLM's are stopped.

Correctness first: before any timing, "ours" must give the bits of "inproc", "http" the tokens of "ours", and each
peer's logits and greedy tokens must be those of the same model; of vLLM the first tokens.

    python -m benchmarks.decode --shape S --batch 1,8,32 --peers inproc,transformers,llamacpp --experts 2
    python -m benchmarks.decode --shape S --batch 1,8 --peers llamacpp --busy-core
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.process import EngineProcess
from benchmarks.engines.run import Speed, prompts_for
from benchmarks.make_model import SHAPES
from benchmarks.neighbour import busy_core
from benchmarks.report import record, spread
from benchmarks.setting import (
    DISTRIBUTIONS,
    HttpEndpoint,
    NotTheSameModel,
    checkpoint,
    cluster,
    cores_of,
    interleave,
    numbers,
    parser,
    start_peers,
)
from benchmarks.vllm import VERSION, Side, agreement, missing_vllm, stock

PEERS = ("inproc", "transformers", "llamacpp")
# A server with processes of its own.
VLLM = "vllm"
# Engines divided by engines.
RATIOS = (
    ("http", "llamacpp"),
    ("http", "transformers"),
    ("http", VLLM),
    ("http", "ours"),
    ("ours", "inproc"),
    ("inproc", "llamacpp"),
)
KV_TOKENS = 16384
CHECKED_PROMPTS, CHECKED_TOKENS = 16, 8
# Rounding alone leaves both far above this; other weights, or a wrong position, far below.
LEAST_CORRELATION, LEAST_AGREEMENT = 0.99, 0.5


def check(engines: Mapping[str, EngineProcess], endpoint: HttpEndpoint, model: Path, vocab: int) -> Any:
    """Compare every engine with "ours" on the same prompts.

    Returns:
        For each peer, the median and least correlation of logits, the share of first tokens on which both agree,
        and that of later tokens as long as all before them agree.

    Raises:
        NotTheSameModel: bits, tokens or logits differ by more than rounding explains.
    """
    from eaas.model.tokenizer import Tokenizer

    prompts = prompts_for(CHECKED_PROMPTS, vocab, seed=99)
    logits = engines["ours"].logits(prompts)
    tokens = engines["ours"].generate(prompts, CHECKED_TOKENS).tokens
    tokenizer = Tokenizer.load(model)
    if endpoint.texts(prompts, CHECKED_TOKENS) != [tokenizer.decode(row) for row in tokens]:
        raise NotTheSameModel("The endpoint's tokens are not those of the engine driven directly.")
    found: dict[str, Any] = {"http": {"tokens": "identical"}}
    for name, engine in engines.items():
        if name == "ours":
            continue
        theirs, theirs_tokens = engine.logits(prompts), engine.generate(prompts, CHECKED_TOKENS).tokens
        if name == "inproc":
            if theirs.tobytes() != logits.tobytes() or theirs_tokens != tokens:
                raise NotTheSameModel("Experts in process and on servers give different bits.")
            found[name] = {"logits": "identical"}
            continue
        found[name] = closeness(logits, tokens, theirs, theirs_tokens)
        if (
            found[name]["correlation_median"] < LEAST_CORRELATION
            or found[name]["first_token_agreement"] < LEAST_AGREEMENT
            or found[name]["later_token_agreement"] < LEAST_AGREEMENT
        ):
            raise NotTheSameModel(f"{name} is not the same model, so it is not timed: {found[name]}")
    return found


def closeness(
    ours: np.ndarray, our_tokens: Sequence[Sequence[int]], theirs: np.ndarray, tokens: Sequence[Sequence[int]]
) -> dict[str, float]:
    """How near two engines' logits [prompts, vocab] and greedy tokens are to one another."""
    correlations = [float(np.corrcoef(mine, other)[0, 1]) for mine, other in zip(ours, theirs, strict=True)]
    first = later = compared = 0
    for mine, other in zip(our_tokens, tokens, strict=True):
        equal = [a == b for a, b in zip(mine, other, strict=True)]
        first += equal[0]
        # After the first difference the two no longer compute the same thing.
        agreed = equal.index(False) if False in equal else len(equal)
        compared += max(0, min(agreed + 1, len(equal)) - 1)
        later += max(0, agreed - 1)
    return {
        "correlation_median": float(np.median(correlations)),
        "correlation_min": min(correlations),
        "first_token_agreement": first / len(tokens),
        "later_token_agreement": later / compared if compared else 0.0,
    }


def measure(
    engines: Mapping[str, EngineProcess],
    endpoint: HttpEndpoint,
    peer: Side | None,
    pids: Mapping[str, int],
    batch: int,
    options: Any,
) -> dict[str, Any]:
    """Interleaved rounds at one batch size: speeds and ratios, decoding alone and with the prompts."""
    vocab = SHAPES[options.shape].vocab

    def direct(engine: EngineProcess, number: int) -> Speed:
        return engine.generate(prompts_for(batch, vocab, seed=number), options.tokens).speed

    measures = {"http": lambda number: endpoint.speed(prompts_for(batch, vocab, number), options.tokens)}
    measures |= {name: lambda number, engine=engine: direct(engine, number) for name, engine in engines.items()}
    if peer is not None:
        measures[VLLM] = lambda number: peer.speed_awake(prompts_for(batch, vocab, number), options.tokens)
        peer.signal(signal.SIGSTOP)
    speeds = interleave(measures, options.rounds, pids)
    result: dict[str, Any] = {}
    for field, suffix in (("decode", ""), ("whole", "_with_prefill")):
        values = {name: [getattr(speed, field) for speed in rounds] for name, rounds in speeds.items()}
        result[f"tokens_per_s{suffix}"] = {name: spread(rounds) for name, rounds in values.items()}
        result[f"ratio{suffix}"] = {
            f"{over}/{under}": spread([a / b for a, b in zip(values[over], values[under], strict=True)])
            for over, under in RATIOS
            if over in values and under in values
        }
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Check, measure, and append one JSON line for each batch size."""
    command = parser(__doc__)
    command.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    command.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    command.add_argument(
        "--peers", default="transformers", help=f"of {','.join((*PEERS, VLLM))}, comma-separated; or nothing"
    )
    command.add_argument("--vllm", default=VERSION, help="version of the peer vllm")
    command.add_argument("--experts", type=int, default=2, help="expert servers")
    command.add_argument("--lanes-per-server", type=int, default=0, help="0: the cores are dealt out")
    command.add_argument("--replicas", type=int, default=0, help="of each expert; 0: two, where it can be")
    command.add_argument(
        "--busy-core",
        type=int,
        nargs="?",
        const=-1,
        help="keep this core (the last one, where none is named) busy with another process in every round",
    )
    options = command.parse_args(argv)
    peers = [name for name in options.peers.split(",") if name]
    unknown = sorted(set(peers) - {*PEERS, VLLM})
    if unknown:
        command.error(f"--peers {','.join(unknown)}: known are {', '.join((*PEERS, VLLM))}")
    cores = cores_of(options)
    lacking = missing_vllm(options.vllm) if VLLM in peers else None
    if lacking:
        print(f"vllm: skipped, {lacking}", file=sys.stderr)
    busy = cores[-1] if options.busy_core == -1 else options.busy_core
    with checkpoint(options.shape, options.checkpoints) as model, contextlib.ExitStack() as closing:
        running = closing.enter_context(
            cluster(
                model,
                cores,
                servers=options.experts,
                lanes=options.lanes_per_server,
                replicas=options.replicas,
                endpoint=True,
                kv_tokens=KV_TOKENS,
            )
        )
        endpoint = HttpEndpoint.of(running)
        room = {"kv_tokens": KV_TOKENS}
        own = {"ours": room | {"router": running.router_address}, "inproc": room}
        engines = start_peers(["ours", *(name for name in peers if name != VLLM)], model, cores, closing, own)
        pids = running.pids() | {name: engine.pid for name, engine in engines.items()}
        checked = check(engines, endpoint, model, SHAPES[options.shape].vocab)
        facts, peer = {name: engine.facts for name, engine in engines.items()}, None
        if VLLM in peers and not lacking:
            peer, facts[VLLM] = closing.enter_context(stock(options.vllm, model, cores))
            found = agreement(endpoint, peer, SHAPES[options.shape].vocab)
            checked[VLLM] = {"first_token_agreement": found}
        for batch in numbers(options.batch):
            with busy_core(busy):
                measured = measure(engines, endpoint, peer, pids, batch, options)
            result = {
                "shape": options.shape,
                "batch": batch,
                "experts": options.experts,
                "lanes_per_server": options.lanes_per_server,
                "threads": len(cores),
                "busy_core": busy,
                "rounds": options.rounds,
                "tokens": options.tokens,
                **measured,
                "checked": checked,
                "engines": facts,
            }
            packages = [DISTRIBUTIONS[name] for name in engines if name in DISTRIBUTIONS]
            record("decode", result, packages, options.results)


if __name__ == "__main__":
    main()
