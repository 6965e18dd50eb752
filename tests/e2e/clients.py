"""Streaming clients that keep everything they saw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import openai


@dataclass(kw_only=True)
class Seen:
    """One client's view of its stream."""

    texts: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    error: Exception | None = None


def stream_all(
    url: str,
    model: str,
    prompts: Sequence[str],
    tokens: int,
    on_token: Callable[[int], None] = lambda count: None,
    timeout_s: float = 60.0,
) -> list[Seen]:
    """Stream a greedy completion for every prompt at once, through the real openai client.

    `on_token` gets the running number of chunks over all streams, so that a fault can be timed by progress.
    """
    seen = [Seen() for _ in prompts]
    count, lock = [0], threading.Lock()

    def run(prompt: str, mine: Seen) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s)
        try:
            stream = client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=tokens,
                temperature=0,
                stream=True,
                logprobs=0,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                choice = chunk.choices[0]
                # Token strings rather than text: a token that completes no character has an empty text.
                mine.texts += choice.logprobs.tokens if choice.logprobs and choice.logprobs.tokens else []
                mine.finish += [choice.finish_reason] if choice.finish_reason else []
                with lock:
                    count[0] += 1
                    number = count[0]
                on_token(number)
        except Exception as error:
            # Of `on_token` too: a fault that could not be struck must not look like a stream that broke off.
            mine.error = error

    threads = [threading.Thread(target=run, args=pair) for pair in zip(prompts, seen, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen
