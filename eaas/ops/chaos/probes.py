"""What a cluster is like from outside, as plain functions, which chaostoolkit can call: all is what JSON can say.

{"type": "probe", "name": "every expert is on two servers", "tolerance": 2,
 "provider": {"type": "python", "module": "eaas.ops.chaos.probes", "func": "replicas_min",
              "arguments": {"url": "http://127.0.0.1:8000"}}}
"""

from __future__ import annotations

import json
import time
import urllib.request

from eaas.cluster.status import asking, fetch_status
from eaas.ops.chaos.inject import members_of


def healthy(url: str, timeout_s: float = 5.0) -> bool:
    """Whether the gateway would serve a request now. False where nobody answers."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_s) as reply:
            return reply.status == 200
    except OSError:
        return False


def members_serving(url: str, pool: str) -> int:
    """Members of a pool that serve. Raises ChaosRefused where no gateway answers."""
    return sum(member["pool"] == pool and member["state"] == "serving" for member in members_of(url))


def replicas_min(url: str) -> int:
    """Servers that hold the expert which has the fewest. Raises GatewayUnreachable."""
    return fetch_status(url)["replicas_min"] or 0


def completion(url: str, prompt: str, max_tokens: int = 16, timeout_s: float = 60.0) -> str:
    """The greedy continuation of a prompt. Raises OSError when it is refused."""
    base = url.rstrip("/")
    with urllib.request.urlopen(asking(f"{base}/v1/models"), timeout=timeout_s) as reply:
        model = json.load(reply)["data"][0]["id"]
    asked = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = asking(f"{base}/v1/completions", json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.load(reply)["choices"][0]["text"]


def completes(url: str, prompt: str, expected: str, max_tokens: int = 16, timeout_s: float = 60.0) -> bool:
    """Whether a prompt's greedy continuation is the expected text. Raises OSError when it is refused."""
    return completion(url, prompt, max_tokens, timeout_s) == expected


def whole_within(url: str, wait_s: float) -> bool:
    """Whether every expert is on as many servers as wanted, at once or within `wait_s`. Raises GatewayUnreachable."""
    end_s = time.monotonic() + wait_s
    while True:
        state = fetch_status(url)
        if (state["replicas_min"] or 0) >= (state["replicas_wanted"] or 1):
            return True
        if time.monotonic() >= end_s:
            return False
        time.sleep(0.2)
