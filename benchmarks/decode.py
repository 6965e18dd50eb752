"""Decoding speed through the HTTP endpoint, beside other engines in the same run.

The same weights, the same prompts, rounds interleaved so that the machine's moods hit every engine alike; medians
and the ratio of each round pair count, never absolute figures. Correctness first: before any timing, the engines'
logits for the prompts are compared.

    python -m benchmarks.decode --shape S --batch 1,8 --peers transformers
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.http_client import Speed, speed_of, stream_batch
from benchmarks.report import record, spread
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.make_model import make_model

PROMPT_TOKENS, NEW_TOKENS = 16, 64


class Transformers:
    """transformers' own `generate` over the same checkpoint, greedy, in this process."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
        self._model.eval()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[list[int]], Speed]:
        """New tokens of each prompt, and the speed; the first token is timed apart and taken off for decoding."""
        torch = self._torch
        ids = torch.tensor(prompts)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            started = time.perf_counter()
            self._model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options)
            first_s = time.perf_counter() - started
            started = time.perf_counter()
            out = self._model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
            total_s = time.perf_counter() - started
        speed = Speed(
            decode=len(prompts) * (tokens - 1) / max(total_s - first_s, 1e-9),
            whole=len(prompts) * tokens / total_s,
        )
        return out[:, ids.shape[1] :].tolist(), speed


def prompts_for(batch: int, vocab: int, seed: int) -> list[list[int]]:
    """`batch` random prompts of PROMPT_TOKENS ids below `vocab`."""
    return np.random.default_rng(seed).integers(300, vocab, size=(batch, PROMPT_TOKENS)).tolist()


def check_same_model(
    ours: Callable[[Sequence[Sequence[int]]], list[str]], peer: Transformers, model: Path, vocab: int
) -> float:
    """Share of first tokens on which both engines agree, over 16 prompts.

    Raises:
        RuntimeError: under half agree: these are not the same model (bf16 rounding alone moves few of them).
    """
    from eaas.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model)
    prompts = prompts_for(16, vocab, seed=99)
    theirs, _ = peer.generate(prompts, 2)
    same = sum(text == tokenizer.decode([row[0]]) for text, row in zip(ours(prompts), theirs, strict=True))
    if same < 8:
        raise RuntimeError(
            f"Only {same} of 16 first tokens agree with transformers: not the same model, so no timing."
        )
    return same / 16


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and append one JSON line for each batch size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="S", choices=["tiny", "S", "L"])
    parser.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    parser.add_argument("--peers", default="transformers", help="transformers, or nothing")
    parser.add_argument("--experts", type=int, default=2, help="expert servers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    cores = tuple(sorted(os.sched_getaffinity(0)))[: options.threads]
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as folder:
        model = Path(folder) / options.shape
        make_model(options.shape, "qwen3_moe", model, seed=1, dtype="bfloat16")
        peer = Transformers(model, options.threads) if options.peers == "transformers" else None
        vocab = {"tiny": 512, "S": 32000, "L": 64000}[options.shape]
        config = ClusterConfig(
            model=model,
            served_name="bench",
            experts=options.experts,
            replicas=min(2, options.experts),
            port=0,
            cores=cores,
        )
        with LocalCluster(config) as cluster:
            host, _, port = cluster.url.removeprefix("http://").rpartition(":")
            address = (host, int(port))

            def first_texts(prompts: Sequence[Sequence[int]]) -> list[str]:
                return [stream.texts()[0] for stream in stream_batch(address, "bench", prompts, 1)]

            agreement = check_same_model(first_texts, peer, model, vocab) if peer else None
            for batch in map(int, options.batch.split(",")):
                measure(address, peer, batch, vocab, options, agreement)


def measure(
    address: tuple[str, int],
    peer: Transformers | None,
    batch: int,
    vocab: int,
    options: argparse.Namespace,
    agreement: float | None,
) -> None:
    """Interleaved rounds at one batch size; records medians and the median ratio."""
    ours: list[Speed] = []
    theirs: list[Speed] = []
    for number in range(options.rounds + 1):
        prompts = prompts_for(batch, vocab, seed=number)
        speed = speed_of(stream_batch(address, "bench", prompts, NEW_TOKENS), NEW_TOKENS)
        peer_speed = peer.generate(prompts, NEW_TOKENS)[1] if peer else speed
        if number:  # The first round warms both up.
            ours.append(speed)
            theirs.append(peer_speed)
    result: dict[str, object] = {
        "shape": options.shape,
        "batch": batch,
        "experts": options.experts,
        "threads": options.threads,
        "rounds": options.rounds,
        "tokens_per_s": spread([speed.decode for speed in ours]),
        "tokens_per_s_with_prefill": spread([speed.whole for speed in ours]),
    }
    if peer:
        pairs = list(zip(ours, theirs, strict=True))
        result["transformers_tokens_per_s"] = spread([speed.decode for speed in theirs])
        result["transformers_tokens_per_s_with_prefill"] = spread([speed.whole for speed in theirs])
        result["ratio"] = spread([mine.decode / other.decode for mine, other in pairs])
        result["ratio_with_prefill"] = spread([mine.whole / other.whole for mine, other in pairs])
        result["first_token_agreement"] = agreement
    record("decode", result, ("transformers",) if peer else ())


if __name__ == "__main__":
    main()
