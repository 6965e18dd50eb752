"""Background responses survive the end of any process, and of all at once: each ends once, as it would have."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import GatewayUnreachable, fetch_status
from eaas.gateway.job_store import OPEN, JobState, open_jobs
from tests.e2e.test_command_line import descendants, served
from tests.e2e.waiting import wait_for
from tests.etcd import etcd_process

# Some seconds of work for the cluster, so that it is killed in the middle.
JOBS, TOKENS = 12, 600
ENDED = ("completed", "incomplete", "failed", "cancelled")


def asked(number: int) -> dict[str, Any]:
    """A request: greedy, or sampled by a seed of its own."""
    sampled = {"temperature": 1.0, "extra_body": {"seed": number, "ignore_eos": True}}
    greedy = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
    tokens = TOKENS // 2 + number * TOKENS // JOBS
    more = sampled if number % 2 else greedy
    return {"model": "tiny", "input": f"job {number} asks", "max_output_tokens": tokens, **more}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


def again(act: Callable[[], Any], until_s: float) -> Any:
    """What an act says once somebody answers: a connection that ends, and a 503, are tried again."""
    while True:
        try:
            return act()
        except (openai.APIConnectionError, openai.InternalServerError, httpx.TransportError) as error:
            assert time.monotonic() < until_s, repr(error)
            time.sleep(0.1)


def ended(url: str, ids: list[str], limit_s: float = 150) -> list[Response]:
    client, until_s = client_of(url), time.monotonic() + limit_s
    found: list[Response] = []
    for id in ids:
        while (response := again(lambda id=id: client.responses.retrieve(id), until_s)).status not in ENDED:
            assert time.monotonic() < until_s, f"{len(found)} of {len(ids)} ended: {response}"
            time.sleep(0.1)
        found.append(response)
    return found


class Listener(threading.Thread):
    """Hears all events of one response, wherever it must ask for the rest, which it does until that time."""

    def __init__(self, url: str, id: str, until_s: float) -> None:
        super().__init__(daemon=True)
        self.url, self.id, self.until_s = url, id, until_s
        self.events: list[bytes] = []
        self.cuts = 0

    def run(self) -> None:
        while not (self.events and b'"response.incomplete"' in self.events[-1]):
            after = {"starting_after": str(len(self.events) - 1)} if self.events else {}
            pending = b""
            try:
                params = {"stream": "true", **after}
                with httpx.stream("GET", f"{self.url}/v1/responses/{self.id}", params=params, timeout=20) as reply:
                    for chunk in reply.iter_bytes() if reply.status_code == 200 else ():
                        *whole, pending = (pending + chunk).split(b"\n\n")
                        self.events += [event + b"\n\n" for event in whole]
            except httpx.TransportError:
                self.cuts += 1
            if time.monotonic() >= self.until_s:
                break
            time.sleep(0.05)


def calm_texts(client: openai.OpenAI) -> list[str]:
    """What all jobs say when nothing fails."""
    patient = client.with_options(timeout=120)
    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(lambda n: patient.responses.create(**asked(n)).output_text, range(JOBS)))


def ends_of(where: str, ids: list[str]) -> dict[str, JobState]:
    """How each is stored, with the version under which that was written."""
    with contextlib.closing(open_jobs(where, 1, 1)) as store:
        found = {id: store.get(id) for id in ids}
    return {id: stored.state for id, stored in found.items() if stored is not None}


@pytest.fixture(scope="module")
def struck(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, Path]]:
    path = tmp_path_factory.mktemp("jobs") / "responses.sqlite"
    config = ClusterConfig(
        model=tiny, served_model_name="tiny", experts=4, replicas=2, attention=2, gateways=2, port=0,
        cores=(0, 1), jobs=str(path),
    )  # fmt: skip
    with LocalCluster(config) as running:
        yield running, path


def check(calm: list[str], found: list[Response], what: str) -> None:
    assert [one.status for one in found] == ["incomplete"] * len(found), what
    assert [one.output_text for one in found] == calm, what


def test_jobs_whose_gateways_workers_and_servers_are_killed_end_once_as_they_would_have(
    struck: tuple[LocalCluster, Path],
) -> None:
    cluster, path = struck
    seed = time.time_ns()
    rng = random.Random(seed)
    client, until_s = client_of(cluster.url), time.monotonic() + 180
    calm = calm_texts(client)
    sent = [again(lambda n=n: client.responses.create(**asked(n), background=True), until_s) for n in range(JOBS)]
    listeners = [Listener(cluster.url, one.id, until_s) for one in sent[:4]]
    for listener in listeners:
        listener.start()
    killed = []
    for _ in range(8):
        time.sleep(rng.uniform(0.05, 0.8))
        pools = ("gateway/", "attention/", "expert/")
        name, pid = rng.choice([one for one in sorted(cluster.pids().items()) if one[0].startswith(pools)])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(name)
    what = f"seed {seed}, killed {killed}"
    check(calm, ended(cluster.url, [one.id for one in sent]), what)
    ends = ends_of(str(path), [one.id for one in sent])
    for listener in listeners:
        listener.join(60)
        with httpx.Client(timeout=20) as plain:
            whole = again(
                lambda id=listener.id: plain.get(f"{cluster.url}/v1/responses/{id}", params={"stream": "true"}).content,
                until_s,
            )
        assert b"".join(listener.events) == whole, f"{what}: {listener.cuts} cuts"
    # Whoever was late with the same job changed nothing.
    time.sleep(8)
    assert ends_of(str(path), [one.id for one in sent]) == ends, what


@contextlib.contextmanager
def kept_at(store: str, folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Where responses are kept, and what kills that and starts it again: nothing does where it is a file."""
    if store == "sqlite":
        yield str(folder / "responses.sqlite"), lambda: None
        return
    with etcd_process() as etcd:

        def strike() -> None:
            etcd.kill()
            etcd.start()

        yield f"etcd://{etcd.url.removeprefix('http://')}/jobs", strike


@pytest.mark.full(seconds=60)
@pytest.mark.parametrize("store", ["sqlite", "etcd"])
def test_jobs_outlive_all_processes_of_their_cluster_killed_at_once(tiny: Path, tmp_path: Path, store: str) -> None:
    seed = time.time_ns()
    rng = random.Random(seed)
    with kept_at(store, tmp_path) as (where, strike):
        options = (str(tiny), "--experts", "2", "--jobs", where)
        with served(*options) as (process, url):
            client = client_of(url)
            calm = calm_texts(client)
            ids = [client.responses.create(**asked(number), background=True).id for number in range(JOBS)]
            heard = Listener(url, ids[-1], 0.0)
            heard.start()
            # By progress: on a fast machine all may have ended within any fixed time. The last job is the longest.
            at = rng.randrange(1, TOKENS // 4)
            wait_for(f"event {at} of the last job", lambda: len(heard.events) >= at)
            family = [process.pid, *descendants(process.pid)]
            rng.shuffle(family)
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            strike()
            process.wait()
            heard.join(30)
        with pytest.raises(GatewayUnreachable):
            fetch_status(url)
        before = ends_of(where, ids)
        left = sum(state.status in OPEN for state in before.values())
        with served(*options) as (_, url):
            check(calm, ended(url, ids), f"seed {seed}, {left} had not ended")
            ends = ends_of(where, ids)
            whole = httpx.get(f"{url}/v1/responses/{ids[-1]}", params={"stream": "true"}).content
            assert whole.startswith(b"".join(heard.events)), f"seed {seed}: what was heard before is another's"
            assert heard.events and left
            # Whoever was late with the same job changed nothing.
            time.sleep(2)
            assert ends_of(where, ids) == ends, f"seed {seed}"
        assert all(ends[id] == state for id, state in before.items() if state.status not in OPEN), seed
        assert all(state.losses <= 1 for state in ends.values()), f"seed {seed}: {ends}"
