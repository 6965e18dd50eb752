"""A client outside the cluster, on a host of its own: streams and their times, or what the gateways say of the cluster.

python -m benchmarks.hosts.outside streams GATEWAY,GATEWAY STREAMS TOKENS     lines, the last with all it saw
python -m benchmarks.hosts.outside status GATEWAY,GATEWAY
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice

import httpx2
import openai

from eaas.client import resuming
from eaas.cluster.status import GatewayUnreachable, fetch_status

# A gateway whose host is gone says nothing any more: who wants to go on soon asks elsewhere soon.
SILENCE_S, CONNECT_S = 3.0, 0.5


@dataclass
class Seen:
    """One stream as its client saw it. at_s: of each token, since all began."""

    tokens: list[str] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    error: str = ""


def prompt(number: int) -> str:
    """What client `number` asks."""
    return f"{'word ' * (number % 7)}client {number} asks"


def stream(url: str, number: int, tokens: int, began_s: float, seen: Seen) -> None:
    """Ask for a greedy stream at any gateway that the name means, and note what comes."""
    http = httpx2.Client(timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S), verify=os.environ["SSL_CERT_FILE"])
    key = os.environ["EAAS_API_KEY"]
    client = resuming(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http))
    try:
        chunks = client.completions.create(
            model="demo", prompt=prompt(number), max_tokens=tokens, temperature=0, stream=True, logprobs=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for chunk in chunks:
            choice = chunk.choices[0]
            said = choice.logprobs.tokens if choice.logprobs and choice.logprobs.tokens else []
            seen.tokens += said
            seen.at_s += [time.monotonic() - began_s] * len(said)
            seen.finish += [choice.finish_reason] if choice.finish_reason else []
    except Exception as error:
        # Whatever it is, it is what a client saw of the fault.
        seen.error = repr(error)


def streams(urls: list[str], count: int, tokens: int) -> None:
    """Run so many streams at once, the names dealt out among them; print how far they are, and at the end all of it."""
    began_s, all_seen = time.monotonic(), [Seen() for _ in range(count)]
    running = [
        threading.Thread(target=stream, args=(url, number, tokens, began_s, seen))
        for number, (url, seen) in enumerate(zip(islice(cycle(urls), count), all_seen, strict=True))
    ]
    for thread in running:
        thread.start()
    while any(thread.is_alive() for thread in running):
        print(json.dumps({"tokens": sum(len(seen.tokens) for seen in all_seen)}), flush=True)
        time.sleep(0.05)
    print(json.dumps({"seen": [asdict(seen) for seen in all_seen]}), flush=True)


def status(urls: list[str]) -> None:
    """Print what the first gateway that answers says of the cluster; exit with 1 if none does."""
    for url in urls:
        try:
            print(json.dumps(fetch_status(url, timeout_s=1.0)))
            return
        except GatewayUnreachable as error:
            print(error, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    verb, gateways, *sizes = sys.argv[1:]
    {"streams": streams, "status": status}[verb](gateways.split(","), *map(int, sizes))
