"""Streams of every kind over two gateways that are killed under them, one at a time and again and again.

    python -m tests.e2e.resume_trial --streams 200 --kills 50

Clients are those of openai (sync and async), of anthropic and of httpx, all by `eaas.client.resuming`, and one of a few
lines that knows server-sent events and nothing else. What each saw is compared to the last field

- with what the same request says on the quiet cluster afterwards, asked for from the first event's id on, so that seeds
  and ids are the same: of sampled streams too;
- where it is greedy, with a stream that began before anything was killed.

The seed of requests and moments is drawn from the clock and printed. Exits with 1 where a stream failed or differed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai

from benchmarks.features import SCHEMA, TOOL, Asked, drawn, plain, told
from benchmarks.make_model import make_model
from eaas.client import resuming
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster

AT_ONCE, LIMIT_S = 16, 120.0
# Between two events of each stream while there is somebody to kill, so that streams last.
PACE_S = 0.02


@dataclass
class Seen:
    """One stream as its client saw it. first: its first event, and that one's id. body: that its client sent.
    tries: requests that it took. longest_s: between two events."""

    client: str
    asked: Asked
    events: list[Any] = field(default_factory=list)
    first: tuple[bytes, str] = (b"", "")
    body: bytes = b""
    tries: int = 0
    longest_s: float = 0.0
    error: str = ""

    @property
    def is_greedy(self) -> bool:
        return self.asked[1].get("temperature", 1.0) == 0


def requests(draw: random.Random, count: int) -> list[Asked]:
    """Streams of all kinds, by turns: short and long, greedy and sampled without a seed, of one choice and of three."""
    long = {"ignore_eos": True, "logprobs": 2, "prompt": "long ago", "n": 1}
    some: list[Asked] = []
    while len(some) < count:
        text, turn = f"{draw.random()} says", len(some) % 10
        warm: dict[str, Any] = {"temperature": draw.choice([0.0, 1.0])}
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}], **warm, "max_tokens": 150}
        calls = {"tools": [TOOL], "tool_choice": "required"}
        if turn == 0:
            some.append(("/v1/completions", {**long, **warm, "max_tokens": draw.randint(300, 1200)}))
        elif turn == 1:
            some.append(("/v1/chat/completions", {**chat, "n": 3, "logprobs": True, "top_logprobs": 3}))
        elif turn == 2:
            some.append(("/v1/chat/completions", {**chat, **calls, "n": draw.choice([1, 3])}))
        elif turn == 3:
            said = {
                "model": "tiny",
                "messages": chat["messages"],
                "max_tokens": draw.randint(20, 400),
                **warm,
            }
            some.append(("/v1/messages", said | {"stop_sequences": ["zz", "qu"]}))
        elif turn == 4:
            answer = {"model": "tiny", "input": text, "max_output_tokens": draw.randint(20, 400), **warm}
            bound = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
            some.append(("/v1/responses", answer | draw.choice([{}, {"text": bound}])))
        elif turn == 5:
            form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
            some.append(("/v1/chat/completions", {**chat, "response_format": form}))
        elif turn == 6:
            some.append(("/v1/completions", {**warm, "prompt": text, "stop": ["e ", "th"], "max_tokens": 400, "n": 3}))
        else:
            some.extend(drawn(draw.randrange(1 << 62))[:1])
            # Without one the gateway draws it, and the id of an event must bring it along.
            some[-1][1].pop("seed", None)
    for _, body in some:
        body |= {"model": "tiny", "stream": True}
        for whole in ("prompt_logprobs", "return_routed_experts"):
            body.pop(whole, None)
    return some[:count]


def blocks(body: bytes) -> list[bytes]:
    """The whole events of a body."""
    return [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]


def data_of(events: list[bytes]) -> list[Any]:
    """What events say, but for their ids."""
    lines = [line[6:] for event in events for line in event.splitlines() if line.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def note(seen: Seen, library: Any, is_async: bool) -> Any:
    """A client of httpx that notes a stream's first event and the requests sent, beneath whoever resumes it."""

    def noted(stream: Any, response: Any) -> Any:
        kept = b""

        def keep(chunk: bytes) -> bytes:
            nonlocal kept
            if not seen.first[0] and response.status_code == 200:
                kept += chunk
                if b"\n\n" in kept:
                    event = blocks(kept)[0]
                    found = re.search(rb"^id: ?(.*)$", event, re.MULTILINE)
                    seen.first = event, found[1].decode() if found else ""
            return chunk

        class Sync(library.SyncByteStream):
            def __iter__(self) -> Any:
                yield from map(keep, stream)

            def close(self) -> None:
                stream.close()

        class Async(library.AsyncByteStream):
            async def __aiter__(self) -> Any:
                async for chunk in stream:
                    yield keep(chunk)

            async def aclose(self) -> None:
                await stream.aclose()

        return Async() if is_async else Sync()

    class Transport(library.HTTPTransport):
        def handle_request(self, request: Any) -> Any:
            seen.tries, seen.body = seen.tries + 1, request.content
            response = super().handle_request(request)
            response.stream = noted(response.stream, response)
            return response

    class AsyncTransport(library.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            seen.tries, seen.body = seen.tries + 1, request.content
            response = await super().handle_async_request(request)
            response.stream = noted(response.stream, response)
            return response

    if is_async:
        return library.AsyncClient(transport=AsyncTransport(), timeout=LIMIT_S)
    return library.Client(transport=Transport(), timeout=LIMIT_S)


Tell = Callable[[Any], None]


def by_openai(url: str, seen: Seen, tell: Tell) -> None:
    """The client of openai."""
    with resuming(sdk(openai.OpenAI, f"{url}/v1", note(seen, httpx2, False))) as client:
        for event in calls_of(client, seen.asked):
            tell(event.to_dict(mode="json"))


def by_openai_async(url: str, seen: Seen, tell: Tell) -> None:
    """The asynchronous client of openai."""

    async def read() -> None:
        async with resuming(sdk(openai.AsyncOpenAI, f"{url}/v1", note(seen, httpx2, True))) as client:
            async for event in await calls_of(client, seen.asked):
                tell(event.to_dict(mode="json"))

    asyncio.run(read())


def by_anthropic(url: str, seen: Seen, tell: Tell) -> None:
    """The client of anthropic."""
    with resuming(sdk(anthropic.Anthropic, url, note(seen, httpx2, False))) as client:
        for event in calls_of(client, seen.asked):
            tell(event.to_dict(mode="json"))


def by_httpx(url: str, seen: Seen, tell: Tell) -> None:
    """The client of httpx, on which others rest."""
    client = resuming(note(seen, httpx, False))
    with client, client.stream("POST", url + seen.asked[0], json=seen.asked[1]) as response:
        raised(response)
        rest = b""
        for chunk in response.iter_bytes():
            rest += chunk
            events = blocks(rest)
            rest = rest[sum(map(len, events)) :]
            for event in data_of(events):
                tell(event)


def by_few_lines(url: str, seen: Seen, tell: Tell) -> None:
    """A client of the documentation's lines (docs/serve.md), which knows server-sent events and nothing else."""
    with note(seen, httpx, False) as client:
        last_id, until_s = "", time.monotonic() + LIMIT_S
        while True:
            headers = {"last-event-id": last_id} if last_id else {}
            try:
                with client.stream("POST", url + seen.asked[0], json=seen.asked[1], headers=headers) as response:
                    raised(response)
                    event, event_id = b"", last_id
                    for line in response.iter_lines():
                        if line.startswith("id: "):
                            event_id = line[4:]
                        elif line.startswith("data: "):
                            event = line[6:].encode()
                        elif not line:
                            (said,) = data_of([b"data: " + event])
                            last_id = event_id
                            tell(said)
                            is_end = said == "[DONE]" or said.get("type") in (
                                "response.completed",
                                "response.incomplete",
                                "message_stop",
                            )
                            if is_end:
                                return
            except httpx.TransportError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(0.1)


def raised(response: Any) -> None:
    if response.status_code != 200:
        response.read()
        raise RuntimeError(f"{response.status_code}: {response.text}")


def sdk(kind: Any, url: str, http: Any) -> Any:
    return kind(base_url=url, api_key="none", max_retries=0, http_client=http)


def calls_of(client: Any, asked: Asked) -> Any:
    """The call of an SDK that sends this request. What it does not know of goes as it is."""
    path, body = asked
    known = {"model": body["model"], "stream": True}
    names = {
        "/v1/chat/completions": ("chat.completions", ("messages",)),
        "/v1/completions": ("completions", ("prompt",)),
        "/v1/responses": ("responses", ("input",)),
        "/v1/messages": ("messages", ("messages", "max_tokens")),
    }[path]
    resource = client
    for name in names[0].split("."):
        resource = getattr(resource, name)
    known |= {name: body[name] for name in names[1]}
    return resource.create(**known, extra_body={name: body[name] for name in body.keys() - known.keys()})


CLIENTS: dict[str, Callable[[str, Seen, Tell], None]] = {
    "openai": by_openai,
    "openai async": by_openai_async,
    "httpx": by_httpx,
    "few lines": by_few_lines,
}


def client_of(number: int, path: str) -> str:
    """Each kind of client in turn; anthropic's knows messages alone, and openai's all others."""
    # Ten kinds of requests, one after another: by rounds each meets each client.
    name = list(CLIENTS)[(number + number // 10) % len(CLIENTS)]
    return "anthropic" if path == "/v1/messages" and name.startswith("openai") else name


def stream(url: str, client: str, asked: Asked, tell: Callable[[], None]) -> Seen:
    """Read one stream to its end, whatever happens to gateways meanwhile."""
    seen, last_s = Seen(client, asked), time.monotonic()

    def take(event: Any) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        seen.longest_s, last_s = max(seen.longest_s, now_s - last_s), now_s
        seen.events.append(event)
        tell()

    try:
        (by_anthropic if client == "anthropic" else CLIENTS[client])(url, seen, take)
    except Exception as error:
        # What went wrong for a client is what the trial is about; all else goes on.
        seen.error = f"{type(error).__name__}: {error}"
    return seen


def again(url: str, seen: Seen) -> list[Any]:
    """The same stream on a quiet cluster, as the same client reads it: the first event, and all that follow it."""
    event, first_id = seen.first
    body = httpx.post(
        url + seen.asked[0],
        # As its client wrote it: the bytes must be the same.
        content=seen.body,
        headers={"content-type": "application/json", "last-event-id": first_id},
        timeout=LIMIT_S,
    )
    raised(body)
    return data_of([event, *blocks(body.content)])


def differs(one: list[Any], other: list[Any]) -> str:
    """How two streams differ, in words; empty where they are equal. Choices take turns as they come."""
    one, other = ([event for event in events if event != "[DONE]"] for events in (one, other))
    if told(one) == told(other):
        return ""
    at = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    what = f"{len(one)} events in place of {len(other)}" if len(one) != len(other) else "changed"
    return f"{what}, at {at}: {json.dumps(one[at : at + 1])[:400]} in place of {json.dumps(other[at : at + 1])[:400]}"


class Killer:
    """Ends a gateway now and then, never the only one that serves."""

    def __init__(
        self,
        cluster: LocalCluster,
        draw: random.Random,
        kills: int,
        most_s: float,
        seen: Mapping[int, Seen],
    ) -> None:
        """Args: most_s: The longest wait, once two serve again. seen: streams; it goes on until it has cut one."""
        self.done, self._cluster, self._draw, self._kills, self._most_s = 0, cluster, draw, kills, most_s
        self._seen, self._until_s = seen, time.monotonic() + LIMIT_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def is_done(self) -> bool:
        """Whether it kills no more."""
        return self.done >= self._kills and (
            time.monotonic() > self._until_s or any(one.tries > 1 for one in list(self._seen.values()))
        )

    def _run(self) -> None:
        while not self.is_done and not self._ended.wait(self._draw.uniform(0.0, self._most_s)):
            serving = gateways(self._cluster)
            if len(serving) > 1:
                os.kill(self._draw.choice(serving), signal.SIGKILL)
                self.done += 1


def gateways(cluster: LocalCluster) -> list[int]:
    """Pids of those that are ready."""
    return sorted(pid for name, pid in cluster.pids().items() if name.startswith("gateway/"))


def counters(gateway: httpx.Client) -> Counter[str]:
    """What a gateway counts; of workers, since it began."""
    text = gateway.get("/metrics").text
    found = re.findall(r"^((?:eaas_|vllm:)\w+_total)(?:\{[^}]*\})? ([\d.e+]+)$", text, re.MULTILINE)
    sums: Counter[str] = Counter()
    for name, value in found:
        sums[name] += int(float(value))
    return sums


@dataclass(kw_only=True)
class Trial:
    """What came of it. wrong: in words, each with its client and request. events, tries: of all streams."""

    kills: int
    streams: list[Seen]
    wrong: list[str]

    @property
    def cut(self) -> int:
        """Streams that were cut at least once."""
        return sum(seen.tries > 1 for seen in self.streams)


def run(cluster: LocalCluster, seed: int, *, streams: int, kills: int, most_s: float = 1.0) -> Trial:
    """At least so many streams, AT_ONCE at a time, while gateways are killed; compared with the same in calm."""
    draw = random.Random(seed)
    asked = requests(draw, streams)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        greedy = {n for n, (_, body) in enumerate(asked) if body.get("temperature", 1.0) == 0}
        begun = {n: pool.submit(stream, cluster.url, client_of(n, asked[n][0]), asked[n], lambda: None) for n in greedy}
        calm = {n: future.result() for n, future in begun.items()}
        seen: dict[int, Seen] = {}
        with Killer(cluster, draw, kills, most_s, seen) as killer:

            def work() -> None:
                while True:
                    with lock:
                        number = next(numbers)
                    if number >= streams and killer.is_done:
                        return
                    one = asked[number % streams]
                    client = client_of(number, one[0])
                    seen[number] = stream(cluster.url, client, one, lambda: paced(killer))

            lock, numbers = threading.Lock(), itertools.count()
            for worker in [pool.submit(work) for _ in range(AT_ONCE)]:
                worker.result()
        until_s = time.monotonic() + LIMIT_S
        while len(gateways(cluster)) < cluster.config.gateways and time.monotonic() < until_s:
            time.sleep(0.1)
        verdicts = pool.map(lambda pair: judged(cluster.url, pair[1], calm.get(pair[0] % streams)), seen.items())
        wrong = [verdict for verdict in verdicts if verdict]
    return Trial(kills=killer.done, streams=[*seen.values()], wrong=wrong)


def paced(killer: Killer) -> None:
    """Read slowly while gateways are still to be killed."""
    if not killer.is_done:
        time.sleep(PACE_S)


def judged(url: str, seen: Seen, calm: Seen | None = None) -> str:
    """What is wrong with a stream, in words; empty: nothing. calm: the same, where it is greedy, before any kill."""
    why = seen.error
    if not why:
        why = differs(seen.events, again(url, seen))
    if not why and calm is not None:
        why = calm.error or differs(plain(seen.events), plain(calm.events))
    return f"{seen.client}, {seen.tries} requests, {json.dumps(seen.asked)[:600]}: {why}" if why else ""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_model("tiny", "qwen3_moe", model, seed=1, dtype="bfloat16")
        config = ClusterConfig(model=model, served_model_name="tiny", experts=2, port=0, gateways=2, cores=(0, 1))
        with LocalCluster(config, on_event=lambda text: None) as cluster:
            trial = run(cluster, options.seed, streams=options.streams, kills=options.kills)
    print(table(trial))
    print(*trial.wrong, sep="\n")
    sys.exit(1 if trial.wrong else 0)


def table(trial: Trial) -> str:
    """The figures of a trial, for people."""
    cuts = sum(seen.tries - 1 for seen in trial.streams)
    waits = sorted(seen.longest_s for seen in trial.streams if seen.tries > 1) or [0.0]
    lines = {
        "gateways killed": trial.kills,
        "streams": len(trial.streams),
        "of them cut at least once": trial.cut,
        "events": sum(len(seen.events) for seen in trial.streams),
        "requests sent again": cuts,
        "failed, lost, repeated or changed": len(trial.wrong),
        "longest pause of a stream that was cut, s, median": f"{waits[len(waits) // 2]:.2f}",
        "longest pause of all, s": f"{waits[-1]:.2f}",
    }
    for name, count in sorted(Counter(f"{seen.client}, {seen.asked[0]}" for seen in trial.streams).items()):
        lines[f"  {name}"] = count
    return "\n".join(f"{name:<55} {value}" for name, value in lines.items())


if __name__ == "__main__":
    main()
