"""Recorded arrivals: Azure's CSV and Mooncake's JSON lines, fitted to a time scale and a model's context. Pure.

Azure: TIMESTAMP,ContextTokens,GeneratedTokens. Mooncake: timestamp (ms), input_length, output_length, and hash_ids, one
for each 512 tokens of the prompt: equal ids at the head of two prompts are a shared prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

BLOCK_TOKENS = 512


class TraceInvalid(ValueError):
    """The file is no such trace; the text names the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        at_s: Since the first one.
        prompt_tokens, output_tokens: Its lengths.
        blocks: Names of the blocks of BLOCK_TOKENS that its prompt begins with; empty: it shares nothing.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(lines: Iterable[str]) -> list[TraceRequest]:
    """The requests of a trace in order of time, the first at 0.

    Raises:
        TraceInvalid: neither format, or a line that breaks it.
    """
    found: list[TraceRequest] = []
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        try:
            if text.startswith("{"):
                found.append(_mooncake(json.loads(text)))
            elif not columns:
                columns = [name.strip() for name in text.split(",")]
                if not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
                    raise ValueError(
                        "neither a JSON object nor a header with TIMESTAMP, ContextTokens, GeneratedTokens"
                    )
            else:
                found.append(_azure(dict(zip(columns, text.split(","), strict=True))))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TraceInvalid(f"line {number} of the trace, {text[:60]!r}: {reason}.") from None
    if not found:
        raise TraceInvalid("the trace holds no request; a CSV of Azure or JSON lines of Mooncake are needed.")
    found.sort(key=lambda request: request.at_s)
    first_s = found[0].at_s
    return [replace(request, at_s=request.at_s - first_s) for request in found]


def _azure(row: dict[str, str]) -> TraceRequest:
    # Seven digits of a second: numpy reads them, and knows the days between.
    at = np.datetime64(row["TIMESTAMP"].strip().removesuffix("Z").partition("+")[0].replace(" ", "T"), "ns")
    at_s = float((at - np.datetime64("2020-01-01", "ns")) / np.timedelta64(1, "s"))
    return _checked(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())


def _mooncake(row: dict[str, Any]) -> TraceRequest:
    blocks = tuple(int(block) for block in row.get("hash_ids", ()))
    return _checked(
        float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), blocks
    )


def _checked(at_s: float, prompt: int, output: int, blocks: tuple[int, ...]) -> TraceRequest:
    if prompt < 0 or output < 0 or not np.isfinite(at_s):
        raise ValueError(f"time {at_s} s, {prompt} and {output} tokens; none may be negative or endless")
    return TraceRequest(at_s=at_s, prompt_tokens=max(1, prompt), output_tokens=max(1, output), blocks=blocks)


def fit(
    requests: Sequence[TraceRequest],
    *,
    speed: float = 1.0,
    rate: float | None = None,
    for_s: float | None = None,
    limit: int | None = None,
    context: int | None = None,
    most_output: int | None = None,
) -> list[TraceRequest]:
    """A trace made to fit.

    Args:
        speed: How many times faster than recorded. rate: instead of it, the mean requests per second wanted.
        for_s: Requests planned at or after this are left out. limit: so are those beyond so many.
        context: Tokens of the model's context: an output is clipped to half of it, then a prompt to what is left.
        most_output: Outputs are clipped to so many tokens.

    Raises:
        TraceInvalid: a speed that is none.
    """
    if rate is not None:
        span_s = requests[-1].at_s
        speed = rate * span_s / (len(requests) - 1) if span_s > 0 else 1.0
    if not 0 < speed < float("inf"):
        raise TraceInvalid(
            f"a trace cannot be replayed {speed:g} times faster; give a speed or a rate over 0."
        )
    fitted: list[TraceRequest] = []
    for request in requests[:limit]:
        at_s = request.at_s / speed
        if for_s is not None and at_s >= for_s:
            break
        prompt, output = request.prompt_tokens, request.output_tokens
        if most_output is not None:
            output = min(output, most_output)
        if context is not None:
            output = max(1, min(output, context // 2))
            prompt = max(1, min(prompt, context - output))
        fitted.append(replace(request, at_s=at_s, prompt_tokens=prompt, output_tokens=output))
    return fitted
