"""Faults that real expert servers do to themselves: what their client meets, and that the bits stay right."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from experts import client as client_module
from experts.backend import ExpertsLost, ServerStats
from experts.faults import CannotDo, SelfInflicted
from experts.model import Dtype
from p2p import native
from p2p.transport import TransportChoice
from router.faults import Fault
from tests.experts.test_processes import Cluster, Process, settle

pytestmark = pytest.mark.alone

SEED = 41


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(Dtype.BFLOAT16)
    yield made
    made.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)


def inflict(server: Process, kind: str, for_s: float = 30.0, **options: object) -> None:
    server.tell("fault " + json.dumps({"id": "f", "kind": kind, "for_s": for_s, **options}))


def until(what: str, reached: Callable[[], object], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end_s, f"seed {SEED}: {what} not within {timeout_s} s"


@pytest.fixture
def pair(cluster: Cluster) -> Callable[[], ServerStats]:
    """Two servers with every expert on both, and a client that knows them: what it has seen of the first."""
    cluster.start(2, 2)
    client = cluster.client()
    settle(client, cluster.view())
    return lambda: next(iter(client.stats().values()))


def test_a_frame_spoiled_on_the_wire_is_refused_and_asked_for_again(
    cluster: Cluster, pair: Callable[[], ServerStats], rng: np.random.Generator
) -> None:
    inflict(cluster.servers[0], "corrupt", where="wire", share=0.3, seed=SEED)
    for _ in range(30):
        cluster.check(cluster.clients[0], rng, 8)
    assert pair().corrupt > 0


@pytest.mark.parametrize("where", ["rows", "nan"])
def test_rows_spoiled_before_their_checksum_are_wrong_or_refused_and_right_again_later(
    cluster: Cluster, rng: np.random.Generator, where: str
) -> None:
    (server,) = cluster.start(1, 1)
    client = cluster.client()
    settle(client, cluster.view())
    cluster.check(client, rng, 8)
    inflict(server, "corrupt", where=where, seed=SEED)
    with pytest.raises(Exception):  # noqa: B017  # Whatever a client makes of them, it does not get these bits.
        for _ in range(3):
            cluster.check(client, rng, 8, deadline_s=0.5)
    server.tell("clear f")
    until("right bits", lambda: is_right(cluster, rng))


def is_right(cluster: Cluster, rng: np.random.Generator) -> bool:
    try:
        cluster.check(cluster.clients[0], rng, 8, deadline_s=0.5)
    except Exception:
        return False
    return True


def test_every_frame_of_a_delayed_server_is_late(cluster: Cluster, rng: np.random.Generator) -> None:
    (server,) = cluster.start(1, 1)
    client = cluster.client()
    settle(client, cluster.view())
    cluster.check(client, rng, 8)
    inflict(server, "delay", by_s=0.1)
    assert min(cluster.check(client, rng, 8) for _ in range(3)) >= 0.1
    server.tell("clear f")
    until("an answer in time", lambda: cluster.check(client, rng, 8) < 0.1)


def test_a_slow_server_takes_so_many_times_as_long(cluster: Cluster, rng: np.random.Generator) -> None:
    (server,) = cluster.start(1, 1)
    client = cluster.client()
    settle(client, cluster.view())
    usual_ns = min(service_ns(cluster, rng) for _ in range(20))
    inflict(server, "slow", times=100.0)
    assert min(service_ns(cluster, rng) for _ in range(5)) > 20 * usual_ns
    server.tell("clear f")
    until("its usual speed", lambda: service_ns(cluster, rng) < 20 * usual_ns)


def service_ns(cluster: Cluster, rng: np.random.Generator) -> int:
    """Of one call, as the server says."""
    before = next(iter(cluster.clients[0].observations().values()))
    cluster.check(cluster.clients[0], rng, 8)
    after = next(iter(cluster.clients[0].observations().values()))
    return after.service_ns - before.service_ns


@pytest.mark.parametrize("kind", [pytest.param("loss", marks=pytest.mark.full(seconds=8)), "partition"])
def test_a_server_that_is_not_heard_is_done_without_until_it_is_again(
    cluster: Cluster, pair: Callable[[], ServerStats], rng: np.random.Generator, kind: str
) -> None:
    client = cluster.clients[0]
    for _ in range(10):
        cluster.check(client, rng, 8)
    # Long enough for the calls that are to find it silent; its own end is what brings it back.
    inflict(cluster.servers[0], kind, for_s=5.0, peers=[cluster.endpoints[0].name])
    until("its silence", lambda: (cluster.check(client, rng, 8), pair().held_slots)[1])
    replies = pair().replies
    for _ in range(10):
        cluster.check(client, rng, 8)
    assert pair().replies == replies
    until("its answers", lambda: (cluster.check(client, rng, 8), pair().replies > replies)[1])


@pytest.mark.full(seconds=3)
def test_a_server_whose_every_reply_was_lost_is_asked_again(cluster: Cluster, rng: np.random.Generator) -> None:
    """A reply that is lost for good holds its slot; with all of them held, only another link brings the server back."""
    (server,) = cluster.start(1, 1)
    client = cluster.client()
    settle(client, cluster.view())
    cluster.check(client, rng, 8)
    inflict(server, "loss", seed=SEED)
    while next(iter(client.stats().values())).held_slots < 4:
        with pytest.raises(ExpertsLost):
            cluster.check(client, rng, 8, deadline_s=0.2)
    server.tell("clear f")
    until("right bits", lambda: is_right(cluster, rng))


def test_a_link_that_lost_a_frame_is_made_anew_and_what_its_server_did_still_counts(
    cluster: Cluster,
    pair: Callable[[], ServerStats],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "RELINK_LOST_S", 1.0)
    client = cluster.clients[0]
    inflict(cluster.servers[0], "loss", seed=SEED)
    until("a lost frame", lambda: (cluster.check(client, rng, 8), pair().held_slots)[1])
    cluster.servers[0].tell("clear f")
    calls = pair().calls
    assert 0 < pair().held_slots < 4, "only a link with every slot lost was made anew"
    until("a whole link", lambda: (cluster.check(client, rng, 8), not pair().held_slots)[1])
    assert pair().calls >= calls
    assert cluster.servers[0].tell("clients") == 1


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        pytest.param("partition", 1.0, marks=pytest.mark.full(seconds=6)),
        pytest.param("loss", 0.1, marks=pytest.mark.full(seconds=4)),
    ],
)
def test_after_a_fault_of_every_link_all_servers_answer_within_seconds(
    cluster: Cluster, pair: Callable[[], ServerStats], rng: np.random.Generator, kind: str, share: float
) -> None:
    client = cluster.clients[0]
    for _ in range(10):
        cluster.check(client, rng, 8)
    # In the client's own process: what it sends is lost, or what comes is not seen.
    own = SelfInflicted(kinds=("loss", "partition"))
    own.begin(Fault(id="own", kind=kind, share=share, for_s=4.0, seed=SEED))
    end_s, right = time.monotonic() + 4.0, True
    while time.monotonic() < end_s:
        right &= is_right(cluster, rng)
    assert kind == "loss" or not right
    replies = [stats.replies for stats in client.stats().values()]
    until("right bits", lambda: is_right(cluster, rng), 5.0)
    until(
        "answers of both",
        lambda: (
            cluster.check(client, rng, 8),
            all(now.replies > then for now, then in zip(client.stats().values(), replies, strict=True)),
        )[1],
    )


def test_only_the_peers_named_are_cut_off(
    cluster: Cluster, pair: Callable[[], ServerStats], rng: np.random.Generator
) -> None:
    inflict(cluster.servers[0], "partition", peers=["attention/9"])
    for _ in range(10):
        cluster.check(cluster.clients[0], rng, 8)
    assert pair().held_slots == 0 and pair().replies > 0


def test_a_freeze_at_a_point_ends_by_itself_and_changes_no_bit(
    cluster: Cluster, pair: Callable[[], ServerStats], rng: np.random.Generator
) -> None:
    inflict(cluster.servers[0], "freeze", where="reply-after-signal", for_s=0.5)
    until("the freeze", lambda: (cluster.check(cluster.clients[0], rng, 8), pair().held_slots)[1])
    until("the thaw", lambda: (cluster.check(cluster.clients[0], rng, 8), not pair().held_slots)[1])
    assert cluster.servers[0].tell("clients") == 1


def test_what_a_process_does_not_take_is_refused_and_named() -> None:
    taker = SelfInflicted()
    assert taker.takes.kinds == ("kill", "freeze")
    for fault, words in (
        (Fault(id="a", kind="slow", times=2.0), "takes no slow; it takes kill, freeze"),
        (Fault(id="b", kind="kill", where="computed"), "never passes computed; it passes no point"),
    ):
        with pytest.raises(CannotDo, match=words):
            taker.begin(fault)
    railed = SelfInflicted(rails=TransportChoice.parse("nixl:eth0,eth1").named_rails)
    with pytest.raises(CannotDo, match="no rail 'eth7'; it has eth0, eth1"):
        railed.begin(Fault(id="c", kind="rail-down", rail="eth7"))
    with pytest.raises(CannotDo, match="takes no rail-down"):
        SelfInflicted(rails=TransportChoice.parse("shm").named_rails).begin(Fault(id="d", kind="rail-down"))
    assert taker.active == railed.active == 0


@pytest.mark.full(seconds=2)
def test_faults_end_by_themselves_and_a_second_of_one_id_replaces_the_first() -> None:
    taker = SelfInflicted(kinds=("loss",))
    taker.begin(Fault(id="a", kind="loss", for_s=30.0))
    taker.begin(Fault(id="a", kind="loss", for_s=1.0))
    taker.begin(Fault(id="b", kind="loss", for_s=2.0))
    assert taker.active == 2
    taker.end("never-begun")
    armed = ctypes.c_uint32.in_dll(native.load(), "p2p_faults_armed")
    until("their ends", lambda: not armed.value)
    assert taker.active == 0


def test_a_process_is_under_one_freeze_at_a_time_and_of_an_empty_id_all_end() -> None:
    taker = SelfInflicted(points=("computed",))
    freeze = Fault(id="a", kind="freeze", where="computed", after=1 << 30, for_s=5.0)
    taker.begin(freeze)
    with pytest.raises(CannotDo, match="under another freeze"):
        taker.begin(replace(freeze, id="b"))
    taker.begin(freeze)
    taker.begin(Fault(id="c", kind="kill", where="computed", after=1 << 30))
    taker.end("")
    assert taker.active == 0
