"""Tokens guessed ahead: the same answers, and how much sooner they come.

Two measurements on the demonstration model:

    answers    a cluster without drafts and one with them answer `--requests` requests over all features of the API
               (benchmarks.features), the second while expert servers and attention workers are killed by turns; every
               answer must be that of the first, to the last field.
    speed      the engine in this process, every expert too, with drafts and without by turns: answers under a JSON
               schema, a choice of passages of the prompt, and verse, sampled and greedy. Outputs that fall into a
               cycle, which would be guessed with no merit, are left out and counted. Before it, what a step of more
               rows costs, which bounds all of it.

    python -m benchmarks.speculate --requests 1000 --batch 1,8

The first seed is drawn from the clock and printed. Ends with exit code 1 when an answer differed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.engines.driven import BLOCK_TOKENS, STEP_TOKENS, inproc
from benchmarks.engines.process import available_cores
from benchmarks.features import REQUESTS, TIMEOUT_S, WORDS, ask, drawn
from benchmarks.report import RESULTS, record, spread
from benchmarks.setting import numbers
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.model.loader import load_spec, resolve_model
from eaas.model.tokenizer import Tokenizer
from eaas.worker.constraint import Grammars
from eaas.worker.decoder import Decoder
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.grammar import of_choices, of_schema
from eaas.worker.protocol import SamplingParams, Submit
from experts.checkpoint import Checkpoint

NAME = "speculate"
DRAFTS = 4
KV_TOKENS = 16384
NEW_TOKENS = 128
# An output has fallen into a cycle where its last tokens, so many, are those before them by a short way.
CYCLE_END, CYCLE = 48, 16
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "profession": {"enum": [*WORDS[:6]]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "married": {"type": "boolean"},
        "residence": {"enum": ["Verona", "Venice", "Elsinore"]},
    },
    "required": ["name", "profession", "age", "married", "residence"],
    "additionalProperties": False,
}
Asked = tuple[list[int], dict[str, Any]]
PEOPLE = of_schema({"type": "array", "items": PERSON, "minItems": 500})


# ---- answers


def answers(cluster: LocalCluster, rounds: Sequence[int]) -> list[list[Any]]:
    """Of each round's requests, asked side by side."""
    with (
        httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        return [list(pool.map(lambda one: ask(client, one), drawn(seed))) for seed in rounds]


def kill_by_turns(cluster: LocalCluster, whole: int, killed: list[str], ended: threading.Event) -> None:
    """Kill an expert server, then an attention worker, and so on, each when the pool is whole again."""
    while not ended.wait(0.5):
        members = fetch_status(cluster.url)["members"]
        pool = ("expert", "attention")[len(killed) % 2]
        serving = [member for member in members if member["state"] == "serving"]
        alive = [member for member in serving if member["pool"] == pool]
        if sum(member["pool"] in ("expert", "attention") for member in serving) == whole:
            os.kill(alive[0]["pid"], signal.SIGKILL)
            killed.append(alive[0]["name"])


def drafts_of(cluster: LocalCluster) -> dict[str, float]:
    """Tokens drafted and accepted, as the routers' metrics have them; those of workers that were killed are gone."""
    lines = httpx.get(f"http://{cluster.admin_addresses[0]}/metrics").text.splitlines()
    return {
        word: sum(float(line.split()[-1]) for line in lines if line.startswith(f"eaas_worker_{word}_tokens"))
        for word in ("drafted", "accepted")
    }


def compare(model: Path, first: int, rounds: int, *, kills: bool) -> dict[str, Any]:
    """Ask two clusters for the same, with drafts and without; what differed is in "differed", by seed of its round."""
    killed, seeds = list[str](), range(first, first + rounds)
    config = ClusterConfig(
        model=model, served_model_name=NAME, experts=3, attention=2, port=0, cores=(0, 1), admin_port=0
    )
    with LocalCluster(config) as cluster:
        wanted = answers(cluster, seeds)
    with LocalCluster(replace(config, speculate=f"ngram:{DRAFTS}")) as cluster:
        ended = threading.Event()
        killing = threading.Thread(target=kill_by_turns, args=(cluster, 5, killed, ended))
        if kills:
            killing.start()
        try:
            found = answers(cluster, seeds)
        finally:
            ended.set()
            if kills:
                killing.join()
        time.sleep(1.5)  # Until the router has heard of the last.
        guessed = drafts_of(cluster)
    differed = []
    for seed, was, now in zip(seeds, wanted, found, strict=True):
        for one, before, after in zip(drawn(seed), was, now, strict=True):
            if before != after:
                differed.append(seed)
                print(f"seed {seed}: {one}\nwithout: {json.dumps(before)}\nwith: {json.dumps(after)}")
    return {
        "what": "answers", "requests": rounds * REQUESTS, "seed": first, "killed": len(killed), **guessed,
        "failed": sum(answer[0] != 200 for row in found for answer in row), "differed": differed,
    }  # fmt: skip


# ---- speed


def cycles(tokens: Sequence[int]) -> bool:
    """Whether the end of an output is one short piece again and again."""
    end = tokens[-CYCLE_END:]
    return len(end) == CYCLE_END and any(end[size:] == end[:-size] for size in range(1, CYCLE + 1))


class Task:
    """Requests of one kind.

    Attributes:
        params: What binds them all, but for the seed.
    """

    def __init__(self, kind: str, tokenizer: Tokenizer, verse: str, seed: int) -> None:
        self._draw, self._tokenizer, self._verse = random.Random(f"{kind} {seed}"), tokenizer, verse
        self._kind = kind
        self.params: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        if kind == "json":
            self.params |= {"temperature": 0.7, "grammar": PEOPLE, "ignore_eos": False}
        elif kind == "verse":
            self.params["temperature"] = 1.0
        elif kind == "choice":
            self.params["ignore_eos"] = False

    def asked(self) -> tuple[list[int], dict[str, Any]]:
        """Another prompt each time, and what binds its answer."""
        at = self._draw.randrange(len(self._verse) - 4000)
        text = self._verse[at : at + 4000]
        if self._kind == "choice":
            # The model is too small to copy by itself: its answer is to be one of the passages before it.
            passages = [text[start : start + 400].strip() for start in range(0, 1600, 400)]
            return self._tokenizer.encode("\n".join(passages)), {
                **self.params,
                "grammar": of_choices(passages),
            }
        return self._tokenizer.encode(text)[:64], self.params


class Bench:
    """Two engines over one decoder, with drafts and without."""

    def __init__(self, decoder: Decoder, model: Path) -> None:
        spec = load_spec(Checkpoint.open(model))
        self.engines: dict[str, Engine] = {}
        self.grammars: list[Grammars] = []
        for name, drafts in (("without", 0), ("with", DRAFTS)):
            config = EngineConfig(
                max_model_len=spec.max_model_len, step_tokens=STEP_TOKENS, kv_blocks=KV_TOKENS // BLOCK_TOKENS,
                block_tokens=BLOCK_TOKENS, vocab=spec.vocab, prefix_reuse=False, drafts=drafts,
            )  # fmt: skip
            grammars = Grammars.open(model, spec.vocab, spec.eos_ids, drafts)
            if grammars is None:
                raise RuntimeError(f"The tokenizer of {model} cannot follow grammars; choose another model.")
            self.grammars.append(grammars)
            self.engines[name] = Engine(decoder, config, grammars=grammars)

    def run(self, name: str, asked: Sequence[Asked]) -> tuple[list[list[int]], float]:
        """What is answered, and tokens/s from when each has its first."""
        engine, made = self.engines[name], list[list[int]]([] for _ in asked)
        for number, (prompt, params) in enumerate(asked):
            given = SamplingParams(seed=number, **params)
            refusal = engine.submit(Submit(id=f"{number}", attempt=1, prompt=prompt, params=given))
            if refusal is not None:
                raise RuntimeError(refusal.message)
        while engine.compiling.waiting:
            time.sleep(0.001)
        began_s, before = 0.0, 0
        while engine.has_work:
            outcome = engine.step()
            if outcome is None or outcome.failed:
                raise RuntimeError(f"a step failed: {outcome and outcome.failed}")
            for token in outcome.tokens.get(0, []):
                made[int(token.id)].append(token.token)
            if not began_s and all(made):
                began_s, before = time.perf_counter(), sum(map(len, made))
        return made, (sum(map(len, made)) - before) / (time.perf_counter() - began_s)

    def rows(self, task: Task, counts: Sequence[int], rounds: int) -> dict[str, float]:
        """Microseconds of a step of so many rows: the medians of rounds by turns."""
        found: dict[str, list[float]] = {f"{count}": [] for count in counts}
        for _ in range(rounds):
            for count in counts:
                _, rate = self.run("without", [task.asked() for _ in range(count)])
                found[f"{count}"].append(1e6 * count / rate)
        return {count: round(float(np.median(steps)), 1) for count, steps in found.items()}


def measure(bench: Bench, kind: str, task: Task, batch: int, rounds: int) -> dict[str, Any]:
    """Rounds by turns, after one that warms up; what to record."""
    speeds: dict[str, list[float]] = {name: [] for name in bench.engines}
    speculation = bench.engines["with"].scheduler.speculation
    cyclic = drafted = accepted = 0
    for number in range(rounds + 1):
        asked: list[Asked] = []
        while len(asked) < batch:
            tried = [task.asked() for _ in range(batch - len(asked))]
            said, _ = bench.run("without", tried)
            kept = [one for one, tokens in zip(tried, said, strict=True) if not cycles(tokens)]
            cyclic += len(tried) - len(kept)
            asked += kept
        if number == 1:
            drafted, accepted = speculation.drafted, speculation.accepted
        found: dict[str, Any] = {}
        for name in list(bench.engines)[:: 1 if number % 2 else -1]:
            found[name], rate = bench.run(name, asked)
            if number:
                speeds[name].append(rate)
        if found["with"] != found["without"]:
            raise RuntimeError(f"{kind}: other tokens with drafts than without: {asked}")
    drafted, accepted = speculation.drafted - drafted, speculation.accepted - accepted
    pairs = zip(speeds["with"], speeds["without"], strict=True)
    return {
        "what": "speed", "model": "demo", "kind": kind, "batch": batch, "rounds": rounds, "tokens": NEW_TOKENS,
        "tokens_per_s": {name: spread(found) for name, found in speeds.items()},
        "faster": spread([after / before for after, before in pairs]),
        "drafted": round(drafted / (rounds * batch * NEW_TOKENS), 3),
        "accepted": round(accepted / drafted, 3) if drafted else None, "cyclic": cyclic,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, append the JSON lines, and say whether every answer was the same."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=1000, help="answers to compare; 0: measure speed alone")
    options.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000, help="of the first round")
    options.add_argument("--batch", default="1,8", help="batch sizes, comma-separated; empty: no speed")
    options.add_argument("--rounds", type=int, default=9, help="rounds by turns, after one that warms up")
    options.add_argument("--verse", type=Path, help="text that prompts are cut from; needed for speed")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON lines")
    chosen = options.parse_args(argv)
    print(f"first seed {chosen.seed}", flush=True)
    model, cores, same = resolve_model("demo"), available_cores(0), True
    if chosen.batch:
        tokenizer, verse = Tokenizer.load(model), chosen.verse.read_text()
        driven = inproc(model, cores, KV_TOKENS)
        with contextlib.closing(driven), contextlib.ExitStack() as closing:
            bench = Bench(driven.decoder, model)
            for grammars in bench.grammars:
                closing.callback(grammars.close)
            steps = bench.rows(Task("verse", tokenizer, verse, chosen.seed), (1, 2, 3, 5, 9, 16), chosen.rounds)
            record(NAME, {"what": "rows", "model": "demo", "step_us": steps}, ("llguidance",), chosen.results)
            for batch in numbers(chosen.batch):
                for kind in ("json", "choice", "verse", "greedy verse"):
                    task = Task(kind, tokenizer, verse, chosen.seed + batch)
                    found = measure(bench, kind, task, batch, chosen.rounds)
                    record(NAME, {**found, "seed": chosen.seed}, ("llguidance",), chosen.results)
    if chosen.requests:
        found = compare(model, chosen.seed, -(-chosen.requests // REQUESTS), kills=True)
        record(NAME, found, ("llguidance",), chosen.results)
        same = not found["differed"]
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
