"""Every server of an expert is gone: requests wait for another, and where none comes they end cleanly in time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from benchmarks.leaks import held, reading
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.process import Child
from eaas.cluster.status import fetch_status
from eaas.worker.engine import NEARLY_S
from router.events import StartProcess, StopProcess
from tests.e2e.clients import stream_all
from tests.e2e.waiting import LIMIT_S, wait_for
from tests.host_stalls import HostStalls

pytestmark = pytest.mark.full(seconds=12)

CLIENTS, TOKENS = 8, 64
# Of streams that must still run when all servers are killed.
MANY_TOKENS = 1200
PROMPTS = [f"{'word ' * (number % 5)}client {number} asks" for number in range(CLIENTS)]
# A request that waited for two deadlines, one after the other, would be over the first and the rest.
DEADLINE_S, REST_S = 6.0, 4.0
STEP_S = 0.25  # longest that one step takes while nothing is lost, on a busy host


class Forsaken(LocalCluster):
    """A cluster whose launcher starts nothing while `starts` is False; what was due is started after that."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self.starts = True
        self._withheld: list[Callable[[], None]] = []

    def _obey(self, command: StartProcess | StopProcess) -> None:
        if self.starts or isinstance(command, StopProcess):
            super()._obey(command)
        else:
            self._withheld.append(lambda: self._obey(command))

    def _restart(self, child: Child, status: int) -> None:
        if self.starts:
            super()._restart(child, status)
        else:
            self._withheld.append(lambda: self._restart(child, status))

    def start_again(self) -> None:
        """Start what is due, and all that comes."""
        self.starts = True
        for act in self._withheld:
            self._order(act)

    def servers(self) -> list[int]:
        """Pids of the expert servers."""
        return [pid for name, pid in self.pids().items() if name.startswith("expert")]

    def kill(self, name: str) -> None:
        """End a process, and see its end."""
        os.kill(self.pids()[name], signal.SIGKILL)
        wait_for(f"the end of {name}", lambda: name not in self.pids(), self)

    def kill_servers(self) -> None:
        """End every expert server at once."""
        for pid in self.servers():
            os.kill(pid, signal.SIGKILL)

    def is_whole(self) -> bool:
        """Whether as many servers serve as the cluster began with, each expert on as many as is wanted."""
        state = fetch_status(self.url)
        serving = [m for m in state["members"] if m["pool"] == "expert" and m["state"] == "serving"]
        return len(serving) == self.config.experts and state["replicas_min"] >= self.config.replicas


@contextlib.contextmanager
def forsaken(
    model: Path, *, servers: int = 2, replicas: int = 2, deadline_s: float, lease_s: float = 2.0
) -> Iterator[Forsaken]:
    config = ClusterConfig(
        model=model,
        served_model_name="tiny",
        experts=servers,
        replicas=replicas,
        port=0,
        cores=(0, 1),
        deadline_s=deadline_s,
        lease_s=lease_s,
    )
    cluster = Forsaken(config)
    with cluster:
        wait_for("a whole pool", cluster.is_whole, cluster)
        yield cluster


@pytest.mark.parametrize("replicas", [2, 1])
def test_all_servers_killed_at_once_cost_no_stream_a_token(tiny: Path, replicas: int) -> None:
    with forsaken(tiny, replicas=replicas, deadline_s=60.0) as cluster:
        calm = stream_all(cluster.url, "tiny", PROMPTS, TOKENS)
        for seed in range(3):
            at = random.Random(seed).randrange(CLIENTS, CLIENTS * TOKENS * 3 // 4)

            def on_token(count: int, at: int = at) -> None:
                if count == at:
                    cluster.kill_servers()

            struck = stream_all(cluster.url, "tiny", PROMPTS, TOKENS, on_token)
            assert [one.error for one in struck] == [None] * CLIENTS, f"seed {seed}"
            assert [one.finish for one in struck] == [["length"]] * CLIENTS, f"seed {seed}"
            assert [one.texts for one in struck] == [one.texts for one in calm], f"seed {seed}: tokens changed"
            wait_for("a whole pool", cluster.is_whole, cluster)


@dataclass(kw_only=True)
class Answer:
    """One request as its client saw it."""

    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    retry_after: str | None = None
    tokens: list[str] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    is_dropped: bool = False
    is_done: bool = False


def ask(
    url: str,
    prompt: str | list[int],
    tokens: int,
    *,
    stream: bool,
    begun: Callable[[], None] = lambda: None,
    may_drop: bool = False,
) -> Answer:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "stream": stream,
        "eaas_drop_lost_experts": may_drop,
    }
    answer = Answer(sent_s=time.monotonic())
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S, verify=False) as reply:
        answer.status, answer.retry_after = reply.status_code, reply.headers.get("retry-after")
        for line in reply.iter_lines():
            # An answer that is no stream, or a refusal, is one line of JSON.
            text = line.removeprefix("data: ")
            if text == "[DONE]":
                answer.is_done = True
            elif text.startswith("{"):
                said = json.loads(text)
                answer.is_dropped |= said.get("eaas_dropped_experts", False)
                answer.error = said["error"]["code"] if "error" in said else answer.error
                for choice in said.get("choices", ()):
                    answer.tokens += (choice["logprobs"] or {"tokens": []})["tokens"]
                    answer.finish = choice["finish_reason"]
                begun()
    answer.ended_s = time.monotonic()
    return answer


def ask_all(
    url: str,
    prompts: Sequence[str | list[int]],
    tokens: int,
    *,
    stream: bool,
    each_begun: Callable[[], None] = lambda: None,
    may_drop: bool = False,
) -> list[Answer]:
    """All at once; `each_begun` is called when every stream has begun."""
    barrier = threading.Barrier(len(prompts), action=each_begun)
    answers: list[Answer | None] = [None] * len(prompts)

    def run(number: int) -> None:
        waited: list[int] = []

        def begun() -> None:
            if stream and not waited:
                waited.append(barrier.wait(LIMIT_S))

        answers[number] = ask(url, prompts[number], tokens, stream=stream, begun=begun, may_drop=may_drop)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [answer for answer in answers if answer is not None]
    assert len(found) == len(prompts), "a client got no answer at all"
    return found


def test_without_replacement_requests_end_cleanly_at_the_deadline_and_nothing_stays_behind(
    tiny: Path,
) -> None:
    with forsaken(tiny, deadline_s=DEADLINE_S) as cluster:
        calm = ask_all(cluster.url, PROMPTS, MANY_TOKENS, stream=True)
        assert [(one.finish, one.is_done, len(one.tokens)) for one in calm] == [("length", True, MANY_TOKENS)] * CLIENTS
        before = reading(cluster)
        cluster.starts = False
        killed_s: list[float] = []
        late: list[Answer] = []

        def late_ones() -> None:
            wait_for("no expert server", lambda: not cluster.servers(), cluster)
            with_stream = threading.Thread(target=lambda: late.append(ask(cluster.url, "late", 5, stream=True)))
            with_stream.start()
            late.append(ask(cluster.url, "later", 5, stream=False))
            with_stream.join()

        coming = threading.Thread(target=late_ones)

        def kill() -> None:
            killed_s.append(time.monotonic())
            cluster.kill_servers()
            coming.start()

        with HostStalls() as stalls:
            struck = ask_all(cluster.url, PROMPTS, MANY_TOKENS, stream=True, each_begun=kill)
            coming.join()
        least_s, most_s = DEADLINE_S - NEARLY_S - stalls.seconds, DEADLINE_S + REST_S + stalls.seconds
        for one, whole in zip(struck, calm, strict=True):
            assert (one.status, one.error, one.finish, one.is_done) == (200, "expert_lost", None, False), one
            assert one.tokens == whole.tokens[: len(one.tokens)], "tokens changed"
            # The deadline counts from the beginning of the step that meets the loss.
            assert least_s - STEP_S <= one.ended_s - killed_s[0] < most_s, f"{one}; killed {killed_s}; {stalls.seconds}"
        for one in late:
            assert (one.status, one.error) == (503, "expert_lost"), one
            assert one.retry_after is not None and int(one.retry_after) >= 1, one
            assert not one.tokens and not one.is_done, one
            assert least_s <= one.ended_s - one.sent_s < most_s, f"{one}; {stalls.seconds}"
        after = reading(cluster)
        assert held(after) == 0, after
        for name in after:
            for what in ("fds", "threads"):
                assert after[name][what] <= before[name][what] + 2, f"{name} {what}: {before[name]} {after[name]}"

        cluster.start_again()
        wait_for("a whole pool", cluster.is_whole, cluster)
        again = ask_all(cluster.url, PROMPTS, MANY_TOKENS, stream=True)
        assert [(one.finish, one.tokens) for one in again] == [(one.finish, one.tokens) for one in calm]
        assert held(reading(cluster)) == 0


def test_only_requests_that_need_the_lost_experts_fail(tiny: Path) -> None:
    """Without a router nobody loads what the killed server held; the others' leases last long enough to serve on."""
    prompts: list[str | list[int]] = [[token] for token in range(3, 3 + 96)]
    with forsaken(tiny, servers=4, replicas=1, deadline_s=DEADLINE_S, lease_s=120.0) as cluster:
        calm = ask_all(cluster.url, prompts, 1, stream=False)
        assert [one.finish for one in calm] == ["length"] * len(prompts)
        cluster.starts = False
        cluster.kill("router/0")
        cluster.kill("expert/2")
        served: list[set[int]] = []
        for seed in range(2):
            order = random.Random(seed).sample(range(len(prompts)), len(prompts))
            answers = dict(zip(order, ask_all(cluster.url, [prompts[n] for n in order], 1, stream=False), strict=True))
            for number, one in answers.items():
                assert one.status in (200, 503), one
                assert one.tokens == (calm[number].tokens if one.status == 200 else []), f"seed {seed}: {one}"
                assert one.ended_s - one.sent_s < DEADLINE_S + REST_S, f"seed {seed}: {one}"
            served.append({number for number, one in answers.items() if one.status == 200})
        assert 0 < len(served[0]) < len(prompts)
        assert served == served[:1] * 2, "what is served is a matter of the experts that it needs alone"


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_allow_it_are_answered_without_the_lost_experts_and_say_so(tiny: Path, stream: bool) -> None:
    """Nobody loads what the killed server held: first for want of a router, then, with all servers gone, of servers."""
    prompts: list[str | list[int]] = [[token] for token in range(3, 3 + 96)]
    with forsaken(tiny, servers=4, replicas=1, deadline_s=DEADLINE_S, lease_s=120.0) as cluster:
        calm = ask_all(cluster.url, prompts, 1, stream=stream, may_drop=True)
        assert not any(one.is_dropped for one in calm)
        cluster.starts = False
        cluster.kill("router/0")
        cluster.kill("expert/2")
        without = ask_all(cluster.url, prompts, 1, stream=stream, may_drop=True)
        assert {(one.status, one.error, one.finish) for one in without} == {(200, None, "length")}
        assert max(one.ended_s - one.sent_s for one in without) < DEADLINE_S, "it waited"
        lacking = {number for number, one in enumerate(without) if one.is_dropped}
        assert 0 < len(lacking) < len(prompts)
        for number, (one, whole) in enumerate(zip(without, calm, strict=True)):
            assert number in lacking or one.tokens == whole.tokens, f"{number}: changed, and not said"
        strict = ask_all(cluster.url, prompts, 1, stream=stream)
        assert {number for number, one in enumerate(strict) if one.error} == lacking
        cluster.kill_servers()
        wait_for("no expert server", lambda: not cluster.servers(), cluster)
        alone = ask(cluster.url, prompts[0], 5, stream=stream, may_drop=True)
        assert (alone.status, alone.finish, alone.is_dropped) == (200, "length", True)
        cluster.start_again()
        wait_for("a whole pool", cluster.is_whole, cluster)

        def is_answered_whole() -> bool:
            answers = ask_all(cluster.url, prompts, 1, stream=stream, may_drop=True)
            return all(one.finish == "length" and not one.is_dropped for one in answers)

        # The worker hears of the servers from the new router, when it has found that, and attaches one by one.
        wait_for("whole answers", is_answered_whole, cluster)
        again = ask_all(cluster.url, prompts, 1, stream=stream, may_drop=True)
        assert [(one.tokens, one.is_dropped) for one in again] == [(one.tokens, False) for one in calm]
