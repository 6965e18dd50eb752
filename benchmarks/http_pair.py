"""EaaS and stock vLLM as clients meet them: the OpenAI endpoints of both on the same cores, in one run.

The same checkpoint in bfloat16, the same prompts, greedy, the same client. Rounds are interleaved, and while one is
measured every process of the other stands still. vLLM is at its best: a thread for each core (its own choice leaves
one of two idle), and Intel's OpenMP, where its environment has it. `make vllm` makes that environment.

    python -m benchmarks.http_pair --shape S --streams 1,8,32 --prompt 16,512 --rounds 9
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.run import prompts_for
from benchmarks.http_client import StreamRecord, speed_of
from benchmarks.make_model import SHAPES
from benchmarks.report import percentiles, record, spread
from benchmarks.setting import NAME, checkpoint, cores_of, interleave, numbers, parser
from benchmarks.vllm import DTYPE, VERSION, Side, agreement, eaas, free_address, healthy, missing_vllm, stock

Rounds = Sequence[Sequence[StreamRecord]]


@contextlib.contextmanager
def ours(model: Path, cores: Sequence[int], experts: int) -> Iterator[Side]:
    """`eaas serve`, ready.

    Raises:
        ServerFailed: it did not get ready.
    """
    address = free_address()
    words = ["--port", str(address[1]), "--served-model-name", NAME]
    with eaas("serve", model, cores, experts, *words) as server:
        server.wait(lambda: healthy(address))
        yield Side(address, [server])


def result(came: Mapping[str, Rounds], tokens: int) -> dict[str, Any]:
    """One JSON line's figures from the streams of each round: tokens/s of all streams together from the first request
    to the last token, once every stream has its first token, both as ratios of paired rounds; and of all streams of
    all rounds the time to the first token and between tokens, ms."""
    speeds = {name: [speed_of(records, tokens) for records in rounds] for name, rounds in came.items()}
    found: dict[str, Any] = {}
    for field, suffix in (("whole", ""), ("decode", "_decoding")):
        values = {name: [getattr(speed, field) for speed in rounds] for name, rounds in speeds.items()}
        found[f"tokens_per_s{suffix}"] = {name: spread(rounds) for name, rounds in values.items()}
        pairs = zip(values["eaas"], values["vllm"], strict=True)
        found[f"ratio{suffix}"] = spread([a / b for a, b in pairs])
    streams = {name: [record for records in rounds for record in records] for name, rounds in came.items()}
    for name, records in streams.items():
        first = np.array([record.ttft_s for record in records])
        between = np.array([wait_s for record in records for wait_s in record.itl_s])
        found.setdefault("ttft_ms", {})[name] = percentiles(first * 1e3)
        found.setdefault("itl_ms", {})[name] = percentiles(between * 1e3)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Check, measure, and append one JSON line for each length of prompts and number of streams."""
    command = parser(__doc__)
    command.add_argument("--streams", default="1,8,32", help="streams at once, comma-separated")
    command.add_argument("--prompt", default="16,512", help="tokens of each prompt, comma-separated")
    command.add_argument("--tokens", type=int, default=32, help="new tokens of each prompt")
    command.add_argument("--vllm", default=VERSION, help="version of the peer")
    command.add_argument("--vllm-dtype", default=DTYPE, help="what it computes in; EaaS: bfloat16")
    command.add_argument("--experts", type=int, default=2, help="expert servers")
    options = command.parse_args(argv)
    if reason := missing_vllm(options.vllm):
        command.error(reason)
    cores, vocab = cores_of(options), SHAPES[options.shape].vocab
    with checkpoint(options.shape, options.checkpoints) as model, contextlib.ExitStack() as closing:
        peer, facts = closing.enter_context(stock(options.vllm, model, cores, options.vllm_dtype))
        sides = {"eaas": closing.enter_context(ours(model, cores, options.experts)), "vllm": peer}
        agreed = agreement(sides["eaas"], peer, vocab)
        for side in sides.values():
            side.signal(signal.SIGSTOP)
        for prompt, streams in product(numbers(options.prompt), numbers(options.streams)):

            def asked(side: Side, number: int, prompt: int = prompt, streams: int = streams) -> Any:
                # No two batches share a beginning, which either server would not compute again.
                seed = (prompt * 1000 + streams) * 1000 + number
                return side.streams_awake(prompts_for(streams, vocab, seed, prompt), options.tokens)

            # Nothing to settle: what is not measured is stopped.
            came = interleave({name: partial(asked, side) for name, side in sides.items()}, options.rounds, {})
            line = {
                "shape": options.shape,
                "prompt": prompt,
                "streams": streams,
                "tokens": options.tokens,
                "experts": options.experts,
                "threads": len(cores),
                "version": options.vllm,
                "vllm_dtype": options.vllm_dtype,
                "vllm": facts,
                "rounds": options.rounds,
                **result(came, options.tokens),
                "first_token_agreement": agreed,
            }
            record("http_pair", line, (), options.results)


if __name__ == "__main__":
    main()
