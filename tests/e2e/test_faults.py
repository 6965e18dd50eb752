"""Faults injected through the router do what they say to real processes, revert by themselves, and are never seen."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from router.client import FaultRefused, RouterClient, RouterUnavailable
from router.faults import CLIENT_POINTS, SERVER_POINTS, Fault
from router.view import CORRUPTS, View
from tests.e2e.clients import Seen, stream_all

CLIENTS, TOKENS = 8, 32
PROMPTS = [f"{'word ' * (number % 7)}client {number} asks" for number in range(CLIENTS)]
# Those that are passed by a server that is whole and stays so.
PASSED = [point for point in (*SERVER_POINTS, *CLIENT_POINTS) if point not in ("weights-loaded", "client-attached")]

FEW = ("reply-half-written", "step-after-tokens")


@contextlib.contextmanager
def running(tiny: Path) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        model=tiny,
        served_model_name="tiny",
        experts=3,
        attention=2,
        replicas=2,
        port=0,
        cores=(0, 1),
        allow_chaos=True,
        # Nobody here is to be ended for silence, and some are frozen for a second, on hosts that are busy.
        lease_s=4.0,
    )
    with LocalCluster(config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Its servers map one file of their own: in the usual place others may lend it experts.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with running(tiny) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def router(cluster: LocalCluster) -> Iterator[RouterClient]:
    client = RouterClient(cluster.router_address)
    yield client
    client.close()


@pytest.fixture(scope="module")
def calm(cluster: LocalCluster) -> list[Seen]:
    """What every client sees when nothing fails."""
    seen = stream_all(cluster.url, "tiny", PROMPTS, TOKENS)
    assert [len(one.texts) for one in seen] == [TOKENS] * CLIENTS, [one.error for one in seen]
    return seen


def until(what: str, reached: Callable[[], object], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end_s, f"{what} not reached within {timeout_s} s"
        time.sleep(0.02)


def view_of(router: RouterClient) -> View:
    """Of a router that may be on its way back."""
    end_s = time.monotonic() + 60
    while True:
        try:
            return router.status().view
        except RouterUnavailable:
            assert time.monotonic() < end_s, "the router does not come back"


def is_whole(router: RouterClient) -> bool:
    """Three expert servers serve, every expert twice, and two attention workers take requests."""
    view = view_of(router)
    serving = [m for m in view.members if m.state == "serving"]
    pools = [m.pool for m in serving]
    return (
        (pools.count("expert"), pools.count("attention"), pools.count("gateway")) == (3, 2, 1)
        and len(view.members) == 6
        and all(
            len(view.replicas(layer, expert)) >= 2 for layer in range(view.layers) for expert in range(view.experts)
        )
    )


def members(router: RouterClient) -> set[tuple[str, int]]:
    """Who they are: name and incarnation."""
    return {(member.name, member.incarnation) for member in view_of(router).members}


def pid_of(router: RouterClient, name: str) -> int:
    member = view_of(router).member(name)
    assert member is not None, name
    return member.pid


def first(router: RouterClient, pool: str) -> str:
    return view_of(router).pool(pool)[0].name


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z, or empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def streams(cluster: LocalCluster) -> tuple[list[Seen], threading.Thread]:
    found: list[Seen] = []
    thread = threading.Thread(target=lambda: found.extend(stream_all(cluster.url, "tiny", PROMPTS, TOKENS)))
    thread.start()
    return found, thread


def assert_unseen(found: list[Seen], calm: list[Seen], why: str) -> None:
    assert [one.error for one in found] == [None] * CLIENTS, why
    assert [one.texts for one in found] == [one.texts for one in calm], f"{why}: tokens changed"


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=() if point in FEW else pytest.mark.full(seconds=3)) for point in PASSED],
)
def test_a_kill_at_a_named_point_ends_the_process_there_unseen(
    cluster: LocalCluster, router: RouterClient, calm: list[Seen], point: str
) -> None:
    until("a whole cluster", lambda: is_whole(router))
    name = first(router, "expert" if point in SERVER_POINTS else "attention")
    pid = pid_of(router, name)
    router.inject([name], Fault(id=f"kill-{point}", kind="kill", where=point, after=5))
    found, streaming = streams(cluster)
    streaming.join()
    assert state_of(pid) in ("", "Z"), f"{name} lives after {point}"
    assert_unseen(found, calm, f"{name} killed at {point}")


def accused(router: RouterClient) -> bool:
    """Whether an attention worker says that a server's answers were wrong."""
    return any(word.startswith(CORRUPTS) for member in view_of(router).members for word in member.load)


def load_of(router: RouterClient, name: str) -> dict[str, float]:
    member = view_of(router).member(name)
    assert member is not None, name
    return dict(member.load)


@contextlib.contextmanager
def streaming(cluster: LocalCluster, calm: list[Seen]) -> Iterator[list[str]]:
    """Streams all the while; what was wrong with any of them."""
    wrong: list[str] = []
    stop = threading.Event()

    def stream() -> None:
        while not stop.is_set():
            for one, needed in zip(stream_all(cluster.url, "tiny", PROMPTS, TOKENS), calm, strict=True):
                if one.error or one.texts != needed.texts:
                    wrong.append(str(one.error or f"{len(one.texts)} tokens, not those of a calm run"))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        thread.join()
    assert not wrong


@pytest.fixture
def steady(cluster: LocalCluster, calm: list[Seen]) -> Iterator[list[str]]:
    with streaming(cluster, calm) as wrong:
        yield wrong


@pytest.mark.full(seconds=6)
@pytest.mark.parametrize(
    ("pool", "options"),
    [
        ("expert", {"kind": "delay", "by_s": 0.01}),
        ("expert", {"kind": "loss", "share": 0.2, "seed": 3}),
        ("expert", {"kind": "corrupt", "where": "wire", "share": 0.2, "seed": 3}),
        ("expert", {"kind": "partition"}),
        ("attention", {"kind": "delay", "by_s": 0.01}),
        ("attention", {"kind": "corrupt", "where": "wire", "share": 0.2, "seed": 3}),
        ("attention", {"kind": "partition"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_a_fault_of_a_link_is_unseen_and_ends_by_itself(
    router: RouterClient, steady: list[str], pool: str, options: dict[str, Any]
) -> None:
    # A server that the fault before had answer wrongly may still be accused of it, and be replaced under this one.
    until("a whole cluster where nobody is accused", lambda: is_whole(router) and not accused(router))
    before = members(router)
    name = first(router, pool)
    if pool == "attention":
        # One of three, so that each expert has another.
        options = options | {"peers": (first(router, "expert"),)}
    router.inject([name], Fault(id=f"{pool}-{options['kind']}", for_s=2.0, **options))
    until("the fault", lambda: load_of(router, name).get("faults") == 1)
    if (pool, options["kind"]) == ("expert", "corrupt"):
        # All say so: it is replaced, unless that was done to another within the hour.
        until("its end", lambda: (m := view_of(router).member(name)) is None or m.load.get("faults") == 0)
    else:
        until("its end", lambda: load_of(router, name).get("faults") == 0)
        # On a busy host one may be suspect for a moment.
        until("a whole cluster", lambda: is_whole(router))
        assert members(router) == before, "somebody was taken for dead"
    assert not steady


@pytest.mark.full(seconds=15)
@pytest.mark.parametrize("where", ["rows", "nan"])
def test_a_server_that_answers_wrongly_is_replaced_and_none_of_it_is_seen(
    tiny: Path, calm: list[Seen], where: str
) -> None:
    """In a cluster of its own: one server an hour is replaced for that."""
    with running(tiny) as cluster, contextlib.closing(RouterClient(cluster.router_address)) as router:
        until("a whole cluster", lambda: is_whole(router))
        with streaming(cluster, calm) as wrong:
            name = first(router, "expert")
            router.inject([name], Fault(id=f"wrong-{where}", kind="corrupt", where=where, share=1.0, for_s=20.0))
            until("its end as a member", lambda: view_of(router).member(name) is None)
            assert not wrong
            reasons = [gone.reason for gone in router.status().gone if gone.name == name]
            assert any("corrupt" in reason for reason in reasons), reasons
            until("a whole cluster", lambda: is_whole(router))


@pytest.mark.full(seconds=20)
def test_a_slow_server_says_so_and_is_as_fast_as_before_when_it_is_over(
    router: RouterClient, steady: list[str]
) -> None:
    until("a whole cluster", lambda: is_whole(router))
    name = first(router, "expert")
    until("its speed", lambda: load_of(router, name).get("speed"))
    usual = load_of(router, name)["speed"]
    router.inject([name], Fault(id="slow", kind="slow", times=50.0, for_s=10.0))
    until("its slowness", lambda: load_of(router, name)["speed"] < usual / 4)
    until("its recovery", lambda: load_of(router, name)["speed"] > usual / 4)


@pytest.mark.full(seconds=8)
def test_a_server_cut_off_works_again_though_the_router_died_meanwhile(
    cluster: LocalCluster, router: RouterClient, steady: list[str]
) -> None:
    until("a whole cluster", lambda: is_whole(router))
    name = first(router, "expert")
    router.inject([name], Fault(id="cut", kind="partition", for_s=4.0))
    until("its silence", lambda: load_of(router, name).get("faults") == 1)
    os.kill(cluster.pids()["router/0"], signal.SIGKILL)
    until("its rows", lambda: not (load := load_of(router, name)).get("faults") and load.get("rows_per_s"))


def test_a_kill_and_a_freeze_at_once_need_no_pid(
    cluster: LocalCluster, router: RouterClient, steady: list[str]
) -> None:
    until("a whole cluster", lambda: is_whole(router))
    name, other = (member.name for member in view_of(router).pool("expert")[:2])
    pid, frozen = pid_of(router, name), pid_of(router, other)
    router.inject([other], Fault(id="freeze", kind="freeze", for_s=1.0))
    until("the freeze", lambda: state_of(frozen) == "T")
    until("the thaw", lambda: state_of(frozen) != "T")
    router.inject([name], Fault(id="kill", kind="kill"))
    until("its end", lambda: state_of(pid) in ("", "Z"))


@pytest.mark.full(seconds=3)
def test_a_freeze_that_is_cleared_before_it_strikes_never_does(router: RouterClient, steady: list[str]) -> None:
    until("a whole cluster", lambda: is_whole(router))
    name = first(router, "expert")
    pid = pid_of(router, name)
    router.inject([name], Fault(id="never", kind="freeze", where="computed", after=1 << 30, for_s=5.0))
    until("the fault", lambda: load_of(router, name).get("faults") == 1)
    assert router.clear("never") == ["never"]
    until("its end", lambda: load_of(router, name).get("faults") == 0)

    def children() -> list[int]:
        # Whichever of its threads began them.
        found: list[int] = []
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                found += [int(child) for child in path.read_text().split()]
        return found

    until("no waker", lambda: all(state_of(child) in ("", "Z") for child in children()))


@pytest.mark.full(seconds=4)
@pytest.mark.parametrize("point", ["weights-loaded", "client-attached"])
def test_a_server_killed_while_its_work_grows_is_replaced(router: RouterClient, steady: list[str], point: str) -> None:
    until("a whole cluster", lambda: is_whole(router))
    name = first(router, "expert")
    pid = pid_of(router, name)
    router.inject([name], Fault(id=point, kind="kill", where=point))
    if point == "weights-loaded":
        # The newest goes; the others take over what it held.
        router.scale("expert", 2)
    else:
        # A new worker attaches to every server.
        router.inject([first(router, "attention")], Fault(id="make-room", kind="kill"))
    until("its end", lambda: state_of(pid) in ("", "Z"))
    router.scale("expert", 3)
    until("a whole cluster", lambda: is_whole(router))


@pytest.mark.full(seconds=5)
def test_a_cluster_that_does_not_allow_chaos_takes_none(tiny: Path) -> None:
    config = ClusterConfig(model=tiny, served_model_name="tiny", experts=2, port=0, cores=(0, 1))
    with LocalCluster(config) as cluster:
        router = RouterClient(cluster.router_address)
        with pytest.raises(FaultRefused, match="not started with --allow-chaos"):
            router.inject([first(router, "expert")], Fault(id="a", kind="kill"))
        assert state_of(pid_of(router, first(router, "expert"))) not in ("", "Z")
        router.close()


@pytest.mark.full(seconds=5)
@pytest.mark.parametrize("name", ["expert", "attention", "gateway"])
def test_a_freeze_ends_by_itself_even_when_the_router_is_dead(
    cluster: LocalCluster, router: RouterClient, name: str
) -> None:
    until("a whole cluster", lambda: is_whole(router))
    name = first(router, name)
    pid = pid_of(router, name)
    router.inject([name], Fault(id=f"freeze-{name}", kind="freeze", for_s=1.0))
    until("the freeze", lambda: state_of(pid) == "T")
    os.kill(cluster.pids()["router/0"], signal.SIGKILL)
    until("the thaw", lambda: state_of(pid) not in ("T", ""))
    until("a whole cluster", lambda: is_whole(router))
    assert view_of(router).member(name), "frozen for less than its lease, it is a member still"


@pytest.mark.full(seconds=10)
def test_weights_that_rot_under_a_running_pool_are_mended(cluster: LocalCluster, calm: list[Seen]) -> None:
    """Every server of the host maps the same file, so no other replica would have answered otherwise."""
    pid = next(pid for name, pid in cluster.pids().items() if name.startswith("expert/"))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    packed = next(Path(line.split()[-1]) for line in maps if line.endswith(".experts"))
    with packed.open("r+b", buffering=0) as file:
        head = file.read(64)
        blob_bytes, _, start = (int.from_bytes(head[at : at + 8], "little") for at in (40, 48, 56))
        file.seek(start)
        right = file.read(min(2048, blob_bytes))
        file.seek(start)
        file.write(bytes(byte ^ 0xFF for byte in right))

        def mended() -> bool:
            file.seek(start)
            return file.read(len(right)) == right

        until("the right bytes", mended)
    logs = "".join(path.read_text() for path in cluster.state_dir.glob("expert.*.log"))
    assert "weights_damaged" in logs
    seen = stream_all(cluster.url, "tiny", PROMPTS, TOKENS)
    assert [one.texts for one in seen] == [one.texts for one in calm]
