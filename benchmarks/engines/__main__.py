"""An engine's process: python -m benchmarks.engines '{"name": "llamacpp", "model": ..., "cores": [0, 1]}'

Reads one request a line from stdin, ["generate", {...}], and answers one line, {"result": ...} or {"error": ...},
on stdout; ends with stdin. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.run import BenchmarkEngine


def load(asked: Mapping[str, Any]) -> BenchmarkEngine:
    """The engine that is asked for, its model loaded; this process is confined to its cores."""
    model, cores, options = Path(asked["model"]), asked["cores"], asked["options"]
    os.sched_setaffinity(0, cores)
    if asked["name"] == "transformers":
        from benchmarks.engines.transformers import Transformers

        return Transformers(model, len(cores))
    if asked["name"] == "llamacpp":
        from benchmarks.engines.llamacpp import LlamaCpp

        return LlamaCpp(model, len(cores))
    from benchmarks.engines.driven import inproc, ours

    return (ours if asked["name"] == "ours" else inproc)(model, cores, **options)


def answer(engine: BenchmarkEngine, verb: str, arguments: dict[str, Any]) -> object:
    """The result of one request."""
    if verb == "generate":
        return asdict(engine.generate(**arguments))
    if verb == "logits":
        np.save(arguments["out"], engine.logits(arguments["prompts"]))
        return {}
    return engine.experts_used(**arguments)  # type: ignore[attr-defined]


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**fields: object) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        engine = load(json.loads(sys.argv[1]))
    except Exception as error:
        # Whatever went wrong belongs into the message of whoever asked.
        reply(error=f"{type(error).__name__}: {error}")
        raise
    reply(result=engine.facts)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            result = answer(engine, verb, arguments)
        except Exception as error:
            reply(error=f"{type(error).__name__}: {error}")
            raise
        reply(result=result)
    engine.close()


if __name__ == "__main__":
    main()
