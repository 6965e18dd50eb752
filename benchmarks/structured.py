"""Outputs under a JSON schema: whether every one is valid, and what the masks cost.

Two measurements on the demonstration model, which writes verse and has never seen JSON:

    outputs    a local cluster answers `--requests` chats, each with another random schema, prompt and seed, at a
               temperature of 1; the package jsonschema checks every answer. Schemas bound every string, number and
               array, so that an answer that is followed to its end is whole.
    masks      the engine in this process, every expert too, so that its steps are as short as they get. Rounds
               alternate between a batch of free requests and one under a schema; the steps' medians, the processor
               time of a mask, of following a token (which the step waits for), and rows computed twice because their
               mask was late.

    python -m benchmarks.structured --requests 1000 --batch 1,8,32

Ends with exit code 1 when an answer was not valid.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError

from benchmarks.engines.driven import BLOCK_TOKENS, STEP_TOKENS, Driven, inproc
from benchmarks.engines.process import available_cores
from benchmarks.report import RESULTS, record, spread
from benchmarks.setting import numbers
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.loader import load_spec, resolve_model
from eaas.worker.constraint import Constraint, Grammars
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.grammar import Grammar, of_schema
from eaas.worker.protocol import SamplingParams, Submit
from experts.checkpoint import Checkpoint

NAME = "structured"
KV_TOKENS = 16384
LIMIT_S = 300.0
MAX_TOKENS = 1700
WORDS = (
    "king",
    "night",
    "love",
    "sword",
    "crown",
    "grave",
    "fool",
    "moon",
    "blood",
    "honour",
    "ghost",
    "sleep",
)
Schema = dict[str, Any]


def random_schema(draw: random.Random, depth: int = 3) -> Schema:
    """A schema of an object whose answers are short: nothing in it may go on for ever."""
    defs = {"word": {"enum": draw.sample(WORDS, 3)}, "pair": _array(draw, 0)}
    return {**_object(draw, depth), "$defs": defs}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    most = least + draw.randint(0, 2)
    return {"type": "array", "items": _value(draw, depth - 1), "minItems": least, "maxItems": most}


def _value(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-50, 50)
    leaves: list[Schema] = [
        {"type": "string", "maxLength": draw.randint(1, 16)},
        {"type": "string", "minLength": 2, "maxLength": 8},
        {"type": "string", "pattern": "^[a-z]{2,6}(-[0-9]{1,3})?$"},
        {"type": "string", "format": "date"},
        {"enum": [*draw.sample(WORDS, 2), low, None, True]},
        {"const": draw.choice(WORDS)},
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 2000)},
        {"type": "integer", "minimum": 0, "exclusiveMaximum": 700, "multipleOf": 7},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["boolean", "null"]},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}]},
    ]
    if depth < 0:
        return draw.choice(leaves)
    leaves.append({"$ref": draw.choice(("#/$defs/word", "#/$defs/pair"))})
    return draw.choice([*leaves, *[_object(draw, depth), _array(draw, depth)] * (3 * depth)])


def check_answer(url: str, schema: Schema, prompt: str, seed: int) -> tuple[str, int, str]:
    """One answer: "valid", or what is wrong with it; its tokens; the answer."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": prompt}],
        "seed": seed,
        "temperature": 1.0,
        "max_completion_tokens": MAX_TOKENS,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "it", "strict": True, "schema": schema},
        },
    }
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=LIMIT_S) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        return f"status {error.code}", 0, error.read().decode(errors="replace")
    choice, tokens = found["choices"][0], found["usage"]["completion_tokens"]
    text = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        return f"finished with {choice['finish_reason']}", tokens, text
    try:
        Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        return f"invalid: {str(error).splitlines()[0]}", tokens, text
    return "valid", tokens, text


def measure_outputs(requests: int, at_once: int, seed: int, cores: Sequence[int]) -> tuple[dict[str, Any], bool]:
    """Ask for every answer; what to record, and whether all were valid."""
    draw = random.Random(seed)
    asked = [
        (random_schema(draw), " ".join(draw.choices(WORDS, k=draw.randint(2, 12))), draw.randrange(1 << 30))
        for _ in range(requests)
    ]
    config = ClusterConfig(model=resolve_model("demo"), served_model_name=NAME, experts=2, port=0, cores=tuple(cores))
    with LocalCluster(config) as cluster, ThreadPoolExecutor(at_once) as pool:
        began_s = time.monotonic()
        answers = list(pool.map(lambda given: check_answer(cluster.url, *given), asked))
        seconds = time.monotonic() - began_s
    for (verdict, _, text), (schema, _, number) in zip(answers, asked, strict=True):
        if verdict != "valid":
            print(f"seed {number}: {verdict}\n  {json.dumps(schema)}\n  {text}", file=sys.stderr)
    tokens = [count for _, count, _ in answers]
    verdicts = Counter(verdict for verdict, _, _ in answers)
    found = {
        "what": "outputs", "requests": requests, "at_once": at_once, "seed": seed, "model": "demo",
        "verdicts": dict(verdicts), "schemas": len({json.dumps(schema) for schema, _, _ in asked}),
        "tokens": spread(tokens), "seconds": round(seconds, 1),
    }  # fmt: skip
    return found, verdicts["valid"] == requests


class Clocked:
    """Measures the masks of all constraints for the length of a `with`."""

    def __init__(self) -> None:
        self.masks_us: list[float] = []
        self.advances_us: list[float] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        compute, advance = Constraint.compute, Constraint.advance

        def timed_compute(constraint: Constraint) -> None:
            began_ns = time.thread_time_ns()
            compute(constraint)
            self.masks_us.append((time.thread_time_ns() - began_ns) / 1e3)

        def timed_advance(constraint: Constraint, token: int) -> bool:
            began_ns = time.thread_time_ns()
            ended = advance(constraint, token)
            self.advances_us.append((time.thread_time_ns() - began_ns) / 1e3)
            return ended

        setattr_both(timed_compute, timed_advance)
        try:
            yield
        finally:
            setattr_both(compute, advance)


def setattr_both(compute: Callable[[Constraint], None], advance: Callable[[Constraint, int], bool]) -> None:
    """Have constraints make masks and follow tokens so."""
    setattr(Constraint, "compute", compute)  # noqa: B010
    setattr(Constraint, "advance", advance)  # noqa: B010


def long_grammar() -> Grammar:
    """Answers that go on for longer than any run."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "parts": {"type": "array", "items": {"enum": WORDS}, "maxItems": 4},
        },
        "required": ["name", "age", "parts"],
        "additionalProperties": False,
    }
    return of_schema({"type": "array", "items": person, "minItems": 500})


@dataclass
class Steps:
    """Of each step its time and the processor time of the whole process; and how many rows were computed again."""

    wall_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    again: int = 0


class Masked:
    """An engine whose steps are timed, with and without a grammar."""

    def __init__(self, driven: Driven, model: Path) -> None:
        spec = load_spec(Checkpoint.open(model))
        grammars = Grammars.open(model, spec.vocab, spec.eos_ids)
        if grammars is None:
            raise RuntimeError(f"The tokenizer of {model} cannot follow grammars; choose another model.")
        self._vocab = spec.vocab
        self.grammars = grammars
        self.engine = Engine(
            driven.decoder,
            EngineConfig(
                max_model_len=spec.max_model_len,
                step_tokens=STEP_TOKENS,
                kv_blocks=KV_TOKENS // BLOCK_TOKENS,
                block_tokens=BLOCK_TOKENS,
                vocab=spec.vocab,
                prefix_reuse=False,
            ),
            grammars=grammars,
        )

    def run(self, batch: int, tokens: int, seed: int, grammar: Grammar | None) -> Steps:
        """Generate from random prompts; the steps that computed one row of every request."""
        source, engine = np.random.default_rng(seed), self.engine
        for number in range(batch):
            params = SamplingParams(
                max_tokens=tokens, seed=seed * 1000 + number, ignore_eos=grammar is None, grammar=grammar
            )
            prompt = source.integers(3, self._vocab, 16).tolist()
            refusal = engine.submit(Submit(id=f"{number}", attempt=1, prompt=prompt, params=params))
            if refusal is not None:
                raise RuntimeError(refusal.message)
        while engine.compiling.waiting:
            time.sleep(0.001)
        steps = Steps()
        computed, made, before = engine.computed, 0, 0
        while engine.has_work:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            outcome = engine.step()
            taken_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            if outcome is None or outcome.failed:
                raise RuntimeError(f"a step failed: {outcome and outcome.failed}")
            emitted = len(outcome.tokens.get(0, []))
            made += emitted
            if emitted == before == batch:
                steps.wall_us.append(1e6 * taken_s)
                steps.cpu_us.append(1e6 * cpu_s)
            before = emitted
        # Of n tokens of a request the last is not computed; its prompt is.
        steps.again = engine.computed - computed - 16 * batch - (made - batch)
        return steps


def measure_masks(batches: Sequence[int], tokens: int, rounds: int, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Interleaved rounds; what to record of each batch size."""
    model, grammar, found = resolve_model("demo"), long_grammar(), []
    driven = inproc(model, cores, KV_TOKENS)
    with contextlib.closing(driven):
        masked = Masked(driven, model)
        with contextlib.closing(masked.grammars):
            found += [_masks_of(masked, grammar, batch, tokens, rounds) for batch in batches]
    return found


def _masks_of(masked: Masked, grammar: Grammar, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    clock, free, bound = Clocked(), list[Steps](), list[Steps]()
    for number in range(rounds + 1):
        unbound = masked.run(batch, tokens, number, None)
        with clock.running():
            held = masked.run(batch, tokens, number, grammar)
        if number == 0:  # It warms up.
            clock.masks_us.clear()
            clock.advances_us.clear()
            continue
        free.append(unbound)
        bound.append(held)

    def medians(rounds_of: Sequence[Steps], name: str) -> list[float]:
        return [float(np.median(getattr(steps, name))) for steps in rounds_of]

    free_us, bound_us, cpu_us = medians(free, "wall_us"), medians(bound, "wall_us"), medians(free, "cpu_us")
    mask_us, advance_us = float(np.mean(clock.masks_us)), float(np.mean(clock.advances_us))
    return {
        "what": "masks", "model": "demo", "batch": batch, "rounds": rounds, "tokens": tokens,
        "free_step_us": spread(free_us), "bound_step_us": spread(bound_us), "free_step_cpu_us": spread(cpu_us),
        "bound_step_cpu_us": spread(medians(bound, "cpu_us")),
        "longer_step": spread([after / before - 1 for after, before in zip(bound_us, free_us, strict=True)]),
        "mask_cpu_us": {"mean": round(mask_us, 1), "p50": round(float(np.median(clock.masks_us)), 1),
                        "p99": round(float(np.percentile(clock.masks_us, 99)), 1)},
        "advance_cpu_us": round(advance_us, 1),
        # Both of every row, of the processor time of the free step.
        "share_of_cpu": round((mask_us + advance_us) * batch / float(np.median(cpu_us)), 4),
        "share_waited_for": round(advance_us * batch / float(np.median(cpu_us)), 4),
        "rows_again": sum(steps.again for steps in bound), "rows": rounds * batch * tokens,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, append the JSON lines, and say whether every answer was valid."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=1000, help="answers to check; 0: measure masks alone")
    options.add_argument("--at-once", type=int, default=16, help="requests under way")
    options.add_argument("--seed", type=int, default=1, help="of schemas, prompts and sampling")
    options.add_argument("--batch", default="1,8,32", help="batch sizes, comma-separated; empty: no masks")
    options.add_argument("--tokens", type=int, default=128, help="of each request whose masks are measured")
    options.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON lines")
    chosen = options.parse_args(argv)
    packages, cores, valid = ("llguidance", "jsonschema"), available_cores(0), True
    for found in measure_masks(numbers(chosen.batch), chosen.tokens, chosen.rounds, cores) if chosen.batch else ():
        record(NAME, found, packages, chosen.results)
    if chosen.requests:
        found, valid = measure_outputs(chosen.requests, chosen.at_once, chosen.seed, cores)
        record(NAME, found, packages, chosen.results)
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main())
