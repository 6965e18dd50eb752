"""What the gateway costs: its CPU time for each streamed token, and the share of the engine's speed that is left.

The CPU time is that of the gateway's process, user and system, over whole runs (requests, prompts and stream ends
included), divided by the tokens streamed. The speed of 32 streams through HTTP is divided by that of the engine
driven directly over the same expert servers, in interleaved rounds, once every stream has its first token.

    python -m benchmarks.gateway --shape S --streams 1,8,32
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from benchmarks.engines.process import cpu_s
from benchmarks.engines.run import Speed, prompts_for
from benchmarks.make_model import SHAPES
from benchmarks.report import record, spread
from benchmarks.setting import (
    HttpEndpoint,
    checkpoint,
    cluster,
    cores_of,
    interleave,
    numbers,
    parser,
    start_peers,
)

KV_TOKENS = 16384


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line for each number of streams."""
    command = parser(__doc__)
    command.add_argument("--streams", default="1,8,32", help="streams at once, comma-separated")
    command.add_argument("--tokens", type=int, default=128, help="tokens of each stream")
    command.add_argument("--experts", type=int, default=2, help="expert servers")
    options = command.parse_args(argv)
    cores = cores_of(options)
    vocab = SHAPES[options.shape].vocab
    with checkpoint(options.shape, options.checkpoints) as model, contextlib.ExitStack() as closing:
        running = closing.enter_context(
            cluster(model, cores, servers=options.experts, endpoint=True, kv_tokens=KV_TOKENS)
        )
        endpoint = HttpEndpoint.of(running)
        own = {"ours": {"kv_tokens": KV_TOKENS, "router": running.router_address}}
        direct = start_peers(["ours"], model, cores, closing, own)["ours"]
        pids = running.pids() | {"ours": direct.pid}
        gateway = next(pid for name, pid in pids.items() if name.startswith("gateway"))
        for streams in numbers(options.streams):

            def through_http(number: int, streams: int = streams) -> tuple[Speed, float]:
                before_s = cpu_s(gateway)
                speed = endpoint.speed(prompts_for(streams, vocab, number), options.tokens)
                return speed, cpu_s(gateway) - before_s

            def driven(number: int, streams: int = streams) -> tuple[Speed, float]:
                return direct.generate(prompts_for(streams, vocab, number), options.tokens).speed, 0.0

            found = interleave({"http": through_http, "ours": driven}, options.rounds, pids)
            record("gateway", result(found, streams, options) | {"threads": len(cores)}, (), options.results)


def result(found: dict[str, list[tuple[Speed, float]]], streams: int, options: Any) -> dict[str, Any]:
    """One JSON line's figures from (speed, gateway's CPU seconds) of each round."""
    tokens = streams * options.tokens
    pairs = zip(found["http"], found["ours"], strict=True)
    return {
        "shape": options.shape,
        "streams": streams,
        "tokens": options.tokens,
        "experts": options.experts,
        "rounds": options.rounds,
        "gateway_cpu_us_per_token": spread([spent_s / tokens * 1e6 for _, spent_s in found["http"]]),
        "tokens_per_s": {name: spread([speed.decode for speed, _ in rows]) for name, rows in found.items()},
        "ratio": {"http/ours": spread([http.decode / ours.decode for (http, _), (ours, _) in pairs])},
    }


if __name__ == "__main__":
    main()
