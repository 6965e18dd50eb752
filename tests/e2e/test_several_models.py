"""Two models on one pool of expert servers answer as each does alone, whatever happens to the pool or the other."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from experts.pack import model_entry
from router.client import OrderRefused, RouterClient
from router.view import of_model
from tests.e2e.clients import Seen, stream_all
from tests.e2e.waiting import wait_for

pytestmark = pytest.mark.full(seconds=60)

SERVERS, TOKENS, CLIENTS = 3, 40, 6
# Experts of other shapes, and of another number.
WIDE = {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 6}


@dataclass(frozen=True)
class Asked:
    """A model, and what every client sees of it when it is served alone and nothing fails."""

    name: str
    folder: Path
    prompts: list[str]
    alone: list[list[str]]


def whole(seen: list[Seen]) -> list[list[str]]:
    assert [one.error for one in seen] == [None] * len(seen)
    assert [one.finish for one in seen] == [["length"]] * len(seen)
    return [one.texts for one in seen]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Asked]:
    seed = time.time_ns() % 1_000_000
    random_, folder = random.Random(seed), tmp_path_factory.mktemp("models")
    found: list[Asked] = []
    for name, arch, overrides in (
        ("qwen", "qwen3_moe", {}),
        ("mixtral", "mixtral", WIDE),
        ("olmoe", "olmoe", {}),
    ):
        # The seed is the folder's name too: it stands in whatever fails.
        path = make_model("tiny", arch, folder / f"{name}-{seed}", seed=seed, overrides=overrides)
        prompts = [
            " ".join(random_.choice(("tale", "of", "two", "pools")) for _ in range(random_.randint(1, 40)))
            for _ in range(CLIENTS)
        ]
        config = ClusterConfig(model=path, served_model_name=name, experts=SERVERS, replicas=2, port=0, cores=(0, 1))
        with LocalCluster(config) as running:
            alone = whole(stream_all(running.url, name, prompts, TOKENS))
        found.append(Asked(name, path, prompts, alone))
    assert found[0].alone != found[1].alone
    return found


@pytest.fixture(scope="module")
def cluster(models: list[Asked]) -> Iterator[LocalCluster]:
    served = tuple(f"{model.name}={model.folder}" for model in models[:2])
    config = ClusterConfig(models=served, experts=SERVERS, replicas=2, port=0, cores=(0, 1), allow_chaos=True)
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def router(cluster: LocalCluster) -> Iterator[RouterClient]:
    client = RouterClient(cluster.router_address)
    yield client
    client.close()


def together(
    cluster: LocalCluster, asked: list[Asked], on_token: Callable[[int], None] = lambda count: None
) -> dict[str, list[list[str]]]:
    """Clients of several models at once. on_token: gets the running number of tokens of the first's."""
    seen: dict[str, list[Seen]] = {}

    def run(model: Asked, act: Callable[[int], None]) -> None:
        seen[model.name] = stream_all(cluster.url, model.name, model.prompts, TOKENS, act)

    threads = [
        threading.Thread(target=run, args=(model, on_token if number == 0 else lambda count: None))
        for number, model in enumerate(asked)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: whole(each) for name, each in seen.items()}


def is_whole(cluster: LocalCluster, router: RouterClient) -> bool:
    view = router.status().view
    replicas = [
        len(cut.replicas(layer, expert))
        for model in view.models
        for cut in [of_model(view, model.hash)]
        for layer in range(cut.layers)
        for expert in range(cut.experts)
    ]
    workers = [m for m in fetch_status(cluster.url)["members"] if m["pool"] == "attention"]
    serving = all(m["state"] == "serving" for m in workers) and len(workers) == len(view.models)
    return min(replicas) >= 2 and serving and len(view.pool("expert")) == SERVERS


def test_each_model_answers_as_it_does_alone(cluster: LocalCluster, models: list[Asked], router: RouterClient) -> None:

    def listed() -> list[str]:
        return [model["id"] for model in httpx.get(f"{cluster.url}/v1/models", timeout=60).json()["data"]]

    # A gateway reads the second model's tokenizer once it has seen that there is one.
    wait_for("both models", lambda: listed() == ["qwen", "mixtral"], cluster)
    wait_for("two replicas of everything", lambda: is_whole(cluster, router), cluster)
    shapes = {(model.layers, model.experts, model.base) for model in router.status().view.models}
    assert shapes == {(4, 8, 0), (4, 6, 32)}
    for member in router.status().view.pool("expert"):
        held = int.from_bytes(member.serving, "little")
        assert held & (1 << 32) - 1 and held >> 32, f"{member.name} holds one model alone"
    found = together(cluster, models[:2])
    for model in models[:2]:
        assert found[model.name] == model.alone, f"{model.folder.name}: tokens differ from those alone"


@pytest.mark.parametrize("pool", ["expert", "attention"])
def test_a_killed_process_changes_no_token_of_any_model(
    cluster: LocalCluster, models: list[Asked], router: RouterClient, pool: str
) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    wait_for("two replicas of everything", lambda: is_whole(cluster, router), cluster)
    at = draw.randrange(CLIENTS, CLIENTS * TOKENS * 3 // 4)
    victim = draw.choice(sorted(name for name in cluster.pids() if name.startswith(f"{pool}/")))

    def on_token(count: int) -> None:
        if count == at:
            os.kill(cluster.pids()[victim], signal.SIGKILL)

    found = together(cluster, models[:2], on_token)
    for model in models[:2]:
        assert found[model.name] == model.alone, f"seed {seed}: {victim} killed, {model.folder.name} changed"
    wait_for("two replicas of everything again", lambda: is_whole(cluster, router), cluster)


def test_a_model_comes_and_goes_under_the_streams_of_another(
    cluster: LocalCluster, models: list[Asked], router: RouterClient
) -> None:
    wait_for("two replicas of everything", lambda: is_whole(cluster, router), cluster)
    third = models[2]
    entry, numerics_class = model_entry(third.name, third.folder)
    answers: list[dict[str, list[list[str]]]] = []
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            answers.append(together(cluster, models[:1]))

    streams = threading.Thread(target=go_on)
    streams.start()
    try:
        router.add_model(entry, attention=1, numerics_class=numerics_class)

        def listed() -> list[str]:
            return [m["id"] for m in httpx.get(f"{cluster.url}/v1/models").json()["data"]]

        wait_for("three models", lambda: third.name in listed() and is_whole(cluster, router), cluster)
        assert whole(stream_all(cluster.url, third.name, third.prompts, TOKENS)) == third.alone

        def leave(count: int) -> None:
            # Under its own streams, once each has begun: they end as if it stayed.
            if count == (CLIENTS - 1) * TOKENS + 1:
                router.remove_model(third.name)

        left = whole(stream_all(cluster.url, third.name, third.prompts, TOKENS, leave))
        assert left == third.alone, f"{third.folder.name}: removed while it answered"
        wait_for("its end", lambda: len(router.status().view.models) == 2, cluster)
        wait_for("the gateway's list without it", lambda: third.name not in listed(), cluster)
        refused = httpx.post(f"{cluster.url}/v1/completions", json={"model": third.name, "prompt": "x"})
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        with pytest.raises(OrderRefused, match="no model"):
            router.remove_model(third.name)
        view = router.status().view
        ends = max(model.base + model.layers * model.experts for model in view.models)
        assert all(int.from_bytes(m.target, "little") >> ends == 0 for m in view.members), "something is held"
        assert not router.status().gone or all(
            gone.reason in ("drained", "its process ended") for gone in router.status().gone
        )
    finally:
        stop.set()
        streams.join()
    assert answers and all(found["qwen"] == models[0].alone for found in answers), models[0].folder.name


@pytest.mark.parametrize("journal", ["deleted", "put back"])
def test_a_lost_journal_costs_no_stream_of_any_model(models: list[Asked], tmp_path: Path, journal: str) -> None:
    """Of two models that were named at the start and one that was added since the copy was made."""
    seed = time.time_ns()
    at = random.Random(seed).randrange(CLIENTS, CLIENTS * TOKENS * 3 // 4)
    first, second, third = models
    served = tuple(f"{model.name}={model.folder}" for model in (first, second))
    config = ClusterConfig(models=served, experts=SERVERS, replicas=2, port=0, cores=(0, 1))
    with LocalCluster(config) as cluster, closing(RouterClient(cluster.router_address)) as router:
        wait_for("two replicas of everything", lambda: is_whole(cluster, router), cluster)
        pid, kept = cluster.pids()["router/0"], Path(cluster.state_dir) / "router.sqlite"
        os.kill(pid, signal.SIGSTOP)
        for file in kept.parent.glob(f"{kept.name}*") if journal == "put back" else ():
            shutil.copy(file, tmp_path)
        os.kill(pid, signal.SIGCONT)
        entry, numerics_class = model_entry(third.name, third.folder)
        router.add_model(entry, attention=1, numerics_class=numerics_class)
        wait_for("a third model", lambda: is_whole(cluster, router), cluster)
        supervisor: RouterClient = cluster._router  # type: ignore[assignment]
        answers, stop, term = list[dict[str, list[list[str]]]](), threading.Event(), router.status().view

        def on_token(count: int) -> None:
            if count == at and not answers:
                # It would put back at once what is removed under it.
                os.kill(pid, signal.SIGSTOP)
                for file in kept.parent.glob(f"{kept.name}*"):
                    file.unlink()
                for file in tmp_path.glob(f"{kept.name}*"):
                    shutil.copy(file, kept.parent)
                os.kill(pid, signal.SIGKILL)

        def go_on() -> None:
            while not stop.is_set():
                answers.append(together(cluster, models, on_token))

        streams = threading.Thread(target=go_on)
        streams.start()
        try:

            def is_another() -> bool:
                return router.status().view.salt != term.salt and is_whole(cluster, router)

            wait_for("two replicas of everything by another term", is_another, cluster)
        finally:
            stop.set()
            streams.join()
        # Whenever they were asked, while the router was away, or had just come back, too.
        for model in models:
            same = bool(answers) and all(found[model.name] == model.alone for found in answers)
            assert same, f"seed {seed}: {model.folder.name} changed"
        names = [model.name for model in router.status().view.models]
        assert names == [first.name, second.name, third.name], f"seed {seed}: {names}"

        def follows() -> bool:
            view, now = supervisor.view, router.status().view
            return view is not None and (view.salt, view.epoch) == (now.salt, now.epoch)

        wait_for("the supervisor", follows, cluster)
        again = together(cluster, models)
        for model in models:
            assert again[model.name] == model.alone, f"seed {seed}: {model.folder.name} changed afterwards"


def test_an_idle_model_holds_no_memory_and_comes_back_with_the_next_request(
    models: list[Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first model something runs all the time; of the second nothing, between two rounds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    served = tuple(f"{model.name}={model.folder}" for model in models[:2])
    config = ClusterConfig(models=served, experts=SERVERS, replicas=2, port=0, cores=(0, 1), sleep_after_s=1.0)
    with LocalCluster(config) as cluster, closing(RouterClient(cluster.router_address)) as router:
        busy, idle = models[:2]
        stop, answers = threading.Event(), list[list[list[str]]]()

        def go_on() -> None:
            while not stop.is_set():
                answers.append(whole(stream_all(cluster.url, busy.name, busy.prompts[:1], TOKENS)))

        streams = threading.Thread(target=go_on)
        streams.start()
        try:
            for _ in range(3):
                assert whole(stream_all(cluster.url, idle.name, idle.prompts, TOKENS)) == idle.alone

                def asleep() -> bool:
                    awake, other = router.status().view.models
                    return other.asleep and not awake.asleep

                wait_for("sleep", asleep, cluster)
                hash = router.status().view.models[1].hash
                (packed,) = (tmp_path / "eaas" / "packed").glob(f"{hash}*.experts")
                wait_for("its memory", partial(is_out, packed), cluster)
            (log,) = Path(cluster.state_dir).glob("router*.log")
            told = re.findall(r"model_(sleeps|wakes) name=(\S+)", log.read_text())
            assert told.count(("sleeps", idle.name)) >= 3 and told.count(("wakes", idle.name)) >= 2, told
        finally:
            stop.set()
            streams.join()
        assert answers and all(one == busy.alone[:1] for one in answers), busy.folder.name


def is_out(path: Path) -> bool:
    """Whether no byte of a file is in memory, whoever maps it."""
    said = subprocess.run(["fincore", "-bnro", "RES", str(path)], check=True, capture_output=True, text=True)
    return int(said.stdout) == 0
