"""Every feature of the API while faults are injected: each answer must be that of the calm run, to the last field.

A round draws requests over all features (completions, chat and responses; streamed or not; several choices and
prompts, seeds, penalties, biases, log-probabilities, echoes, ends, grammars, tools, experts), asks all of them in calm,
side by side, and again while faults are injected that are drawn as for the soak. Bodies, tokens, finish reasons and
usage are compared; only what is another in each answer by design (ids, times, whose turn it is in a stream of several
choices) is left out.

    python -m benchmarks.features --rounds 300

The first seed is drawn from the clock and printed; each round has one of its own, the next after the last's. Ends with
exit code 1, and the seeds of the rounds that differed, when any did.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.fault_experiment import FaultExperiment, fault_experiment, options, setting
from benchmarks.report import record
from benchmarks.soak import GATEWAY, REFUSALS, Step, carry_out, plan

REQUESTS = 8
# The faults of a round are injected within so long.
STRIKES_S = 0.8
TIMEOUT_S = 60.0
# Each answer has its own.
DRAWN = frozenset({"id", "created", "created_at", "item_id", "call_id"})
WORDS = (
    "king",
    "night",
    "love",
    "blood",
    "crown",
    "swear",
    "Romeo",
    "thou",
    "grave",
    "summer",
    "O,",
    "never",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "fetch", "parameters": SCHEMA}}
Asked = tuple[str, dict[str, Any]]


def drawn(seed: int) -> list[Asked]:
    """The requests of a round: path and body."""
    draw = random.Random(seed)
    return [draw.choice((_completion, _completion, _chat, _chat, _response))(draw) for _ in range(REQUESTS)]


def _text(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 40)))


def _some(draw: random.Random, share: float, **fields: Any) -> dict[str, Any]:
    """Each field with that chance."""
    return {name: value for name, value in fields.items() if draw.random() < share}


def _sampling(draw: random.Random) -> dict[str, Any]:
    """What completions and chat share."""
    warm = draw.random() < 0.6
    body = {
        "max_tokens": draw.randint(8, 120),
        # Without one the server draws another each time.
        "seed": draw.randrange(1 << 31),
        "temperature": round(draw.uniform(0.2, 1.5), 2) if warm else 0.0,
    }
    body |= _some(draw, 0.25, top_p=0.9, top_k=draw.randint(1, 50), min_p=0.02)
    body |= _some(draw, 0.25, presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=1.2)
    body |= _some(draw, 0.2, n=draw.randint(2, 3), stop=["the", "\n\n"], stop_token_ids=[draw.randrange(9, 400)])
    body |= _some(draw, 0.2, logit_bias={str(draw.randrange(400)): 4.0}, return_token_ids=True, min_tokens=5)
    body |= _some(draw, 0.2, ignore_eos=True, include_stop_str_in_output=True)
    if draw.random() < 0.5:
        body |= {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": draw.random() < 0.5},
        }
    else:
        body |= _some(draw, 0.3, prompt_logprobs=draw.randint(0, 4), return_routed_experts=True)
    return body


def _bound(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Sometimes the output follows a grammar."""
    if draw.random() < 0.4:
        body.pop("ignore_eos", None)
        body |= draw.choice(
            (
                {"guided_regex": "[a-z]{3,8}( [a-z]{3,8}){2,6}"},
                {"guided_choice": ["to be", "not to be", "neither"]},
                {"guided_grammar": 'root ::= ("ay" | "nay") (" " ("ay" | "nay"))*'},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}},
                {"response_format": {"type": "json_object"}},
            )
        )
    return body


def _completion(draw: random.Random) -> Asked:
    body = _bound(draw, _sampling(draw))
    prompts = [_text(draw) for _ in range(draw.choice((1, 1, 1, 3)))]
    body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    body |= _some(draw, 0.3, logprobs=draw.randint(0, 5), truncate_prompt_tokens=draw.randint(3, 20))
    return "/v1/completions", body | _some(draw, 0.2, echo=True)


def _chat(draw: random.Random) -> Asked:
    body = _sampling(draw)
    body["messages"] = [{"role": "user", "content": _text(draw)} for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": draw.randint(0, 5)}
    if draw.random() < 0.25:
        body.pop("ignore_eos", None)
        body |= {"tools": [TOOL], "tool_choice": "required"}
    elif draw.random() < 0.2:
        body["messages"].append({"role": "assistant", "content": "Ay,"})
        body |= {"continue_final_message": True, "echo": draw.random() < 0.5}
    else:
        body = _bound(draw, body)
    return "/v1/chat/completions", body


def _response(draw: random.Random) -> Asked:
    body: dict[str, Any] = {
        "input": _text(draw),
        "max_output_tokens": draw.randint(16, 100),
        "temperature": 0.0,
    }
    body |= _some(draw, 0.5, stream=True, instructions="Speak in verse.")
    if draw.random() < 0.3:
        body["text"] = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    return "/v1/responses", body


def plain(found: Any) -> Any:
    """An answer without what each has of its own."""
    if isinstance(found, dict):
        return {name: plain(value) for name, value in found.items() if name not in DRAWN}
    return [plain(item) for item in found] if isinstance(found, list) else found


def told(events: list[Any]) -> Any:
    """What a stream says of each choice, and of its tokens: choices take turns as they come."""
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event.get("choices", ()):
            choices.setdefault(choice["index"], []).append(choice)
    if len(choices) < 2:
        return events
    heads = [{name: value for name, value in event.items() if name not in ("choices", "usage")} for event in events]
    return [sorted(choices.items()), events[-1].get("usage"), heads]


def ask(client: httpx.Client, asked: Asked) -> Any:
    """Status and body; of a stream, its events."""
    path, body = asked
    reply = client.post(path, json=body)
    if not body.get("stream") or reply.status_code != 200:
        return [reply.status_code, plain(reply.json())]
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    ended = data[-1:] == ["[DONE]"]
    return [
        reply.status_code,
        ended,
        told([plain(json.loads(line)) for line in (data[:-1] if ended else data)]),
    ]


def inject(experiment: FaultExperiment, draw: random.Random, faults: Sequence[Step], outcomes: Counter[str]) -> None:
    """Carry faults out, at moments drawn."""
    for at_s, step in sorted((draw.uniform(0, STRIKES_S), step) for step in faults):
        time.sleep(at_s / len(faults))
        outcomes[f"{step.pool} {step.fault.kind}: {carry_out(experiment, step)}"] += 1


def cleared(experiment: FaultExperiment) -> bool:
    """Take all faults back; False while no router answers, for it may have a fault itself."""
    try:
        experiment.router.clear()
    except REFUSALS:
        return False
    return True


def rounds(experiment: FaultExperiment, first: int, count: int) -> dict[str, Any]:
    """That many rounds; what differed is in "differed"."""
    outcomes: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    differed: list[int] = []
    faults = (step for step in plan(first, 1e3) if step.pool != GATEWAY)
    with (
        httpx.Client(base_url=experiment.cluster.url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        for seed in range(first, first + count):
            asked = drawn(seed)
            calm = list(pool.map(lambda one: ask(client, one), asked))
            statuses.update(found[0] for found in calm)
            draw = random.Random(f"{seed} faults")
            steps = [next(faults) for _ in range(draw.randint(1, 3))]
            injecting = threading.Thread(target=inject, args=(experiment, draw, steps, outcomes))
            injecting.start()
            under_fire = list(pool.map(lambda one: ask(client, one), asked))
            injecting.join()
            for one, was, now in zip(asked, calm, under_fire, strict=True):
                if was != now:
                    differed.append(seed)
                    print(
                        f"seed {seed}: {one}\ncalm: {json.dumps(was)}\nwith faults: {json.dumps(now)}",
                        flush=True,
                    )
            experiment.wait("a router that takes faults back", lambda: cleared(experiment))
            experiment.wait("a whole cluster", experiment.is_whole)
            if (seed - first + 1) % 25 == 0:
                print(f"{seed - first + 1} rounds, {len(differed)} answers differ", flush=True)
    return {
        "requests": count * REQUESTS,
        "statuses": {str(status): number for status, number in statuses.items()},
        "outcomes": dict(outcomes),
        "differed": differed,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run, and append one JSON line."""
    found = options(__doc__, streams=2, seconds=0)
    found.add_argument("--rounds", type=int, default=20)
    found.set_defaults(experts=3, seed=time.time_ns() // 1_000_000)
    chosen = found.parse_args(argv)
    print(f"first seed {chosen.seed}", flush=True)
    with fault_experiment(chosen, allow_chaos=True) as experiment:
        result = rounds(experiment, chosen.seed, chosen.rounds)
    record(
        "features",
        {**setting(chosen), "rounds": chosen.rounds, **result},
        ("numpy", "grpcio"),
        chosen.results,
    )
    print(json.dumps(result))
    if result["differed"]:
        sys.exit(f"again: python -m benchmarks.features --rounds 1 --seed {result['differed'][0]}")


if __name__ == "__main__":
    main()
