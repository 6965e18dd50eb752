"""The router's store, SQLite or etcd: what was committed is there again; and only the leader commits to etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from eaas.ops.credentials import make_certs
from router import etcd_store
from router.core import step
from router.etcd import Etcd, EtcdInvalid, delete, get, pairs, put
from router.etcd_store import ClusterInvalid, Election, EtcdStore, prefix_of
from router.events import Exited, Join, Loaded, Started
from router.journal import Journal, JournalUnusable, Store
from router.state import Config, MemberRecord, State
from router.view import GoneMember
from tests.etcd import EtcdProcess, etcd_process

pytestmark = pytest.mark.full(seconds=0.6)

DURABLE = ("salt", "term", "epoch", "joined", "named", "wanted", "models", "members")
CONFIG = Config(experts_wanted=3, replicas=2)


class Leader:
    """A router that has won the election, and its store."""

    def __init__(self, url: str, cluster: str, timeout_s: float = 1.0, tls_dir: Path | None = None) -> None:
        self.etcd = Etcd(url, timeout_s, tls_dir=tls_dir)
        self.election = Election(self.etcd, prefix_of(cluster), ttl_s=60)
        self.store = EtcdStore(self.etcd, cluster, self.election)
        asyncio.run(self.election.win("127.0.0.1:1"))

    def resign(self) -> None:
        asyncio.run(self.election.resign())


@pytest.fixture(scope="module")
def running() -> Iterator[EtcdProcess]:
    with etcd_process() as process:
        yield process


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> str:
    """A cluster's name that no other test uses."""
    return "".join(letter if letter.isalnum() else "." for letter in request.node.name)[:64]


Open = Callable[[], Store]


@pytest.fixture(params=["sqlite", "etcd"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again and again, each time as the router that comes after the last one."""
    last = ExitStack()

    def sqlite() -> Store:
        last.close()
        journal = Journal(tmp_path / "journal")
        last.callback(journal.close)
        return journal

    def etcd() -> Store:
        last.close()
        leader = Leader(request.getfixturevalue("running").url, request.getfixturevalue("cluster"))
        last.callback(leader.resign)
        return leader.store

    yield sqlite if request.param == "sqlite" else etcd
    last.close()


def history(store: Store, steps: int = 60, seed: int = 0) -> State:
    """Commit a history step by step; the state that the store must hold."""
    dice = random.Random(seed)
    state = store.load()
    for now in range(steps):
        if now == 0:
            event = Started(salt=9)
        elif dice.random() < 0.4:
            event = Join(pool="expert", address="a", pid=now, host="h", layers=3, experts=11, model_hash="m")
        elif state.members and dice.random() < 0.7:
            record = dice.choice(list(state.members.values()))
            event = Loaded(name=record.name, incarnation=record.incarnation, held=record.target, epoch=state.epoch)
        else:
            event = Exited(host="h", pid=dice.randrange(now))
        after, _ = step(CONFIG, state, event, now / 10)
        store.save(state, after)
        state = after
    return state


def crowd(count: int, epoch: int = 1, bits: int = 64) -> State:
    """A state of many members, with records of that many hexadecimal digits each."""
    members = [
        MemberRecord(
            name=f"expert/{n}",
            pool="expert",
            incarnation=n,
            address="a",
            pid=n,
            host="h",
            target=random.Random(n).getrandbits(4 * bits),
        )
        for n in range(1, count + 1)
    ]
    return State(salt=3, term=1, epoch=epoch, joined=count, members={m.name: m for m in members})


def assert_equal(found: State, wanted: State, note: str = "") -> None:
    for name in DURABLE:
        assert getattr(found, name) == getattr(wanted, name), f"{note}: {name}"
    assert list(found.members) == list(wanted.members), f"{note}: order of joining"
    assert set(found.gone) == set(wanted.gone), note


@pytest.mark.parametrize("seed", range(3))
def test_what_was_saved_step_by_step_is_loaded_whole(opened: Open, seed: int) -> None:
    state = history(opened(), seed=seed)
    assert_equal(opened().load(), state, f"seed {seed}")


def test_a_new_store_is_empty_and_a_state_without_change_is_not_written(opened: Open) -> None:
    store = opened()
    assert store.load() == State()
    state = history(store, steps=9)
    assert not store.save(state, replace(state, now_s=99.0))
    assert store.save(state, replace(state, epoch=state.epoch + 1))
    assert opened().load().epoch == state.epoch + 1


def test_a_commit_of_any_size_is_one_commit(opened: Open) -> None:
    store = opened()
    state = store.load()
    many = replace(crowd(300), gone=tuple(gone(n) for n in range(1000, 1064)))
    store.save(state, many)
    assert_equal(opened().load(), many)
    store = opened()
    store.load()
    few = replace(crowd(3, epoch=2), gone=tuple(gone(n) for n in range(2000, 2064)))
    store.save(many, few)
    assert_equal(opened().load(), few)


def test_records_of_a_large_model_fit(opened: Open) -> None:
    """60 layers of 256 experts: 4 kB for each bitmap, 64 servers."""
    store = opened()
    store.load()
    large = crowd(64, bits=15_360 * 2)
    store.save(State(), large)
    assert_equal(opened().load(), large)


def test_a_proof_leaves_what_counted(opened: Open) -> None:
    store = opened()
    state = history(store)
    store.prove(state)
    assert_equal(opened().load(), state)


def gone(number: int) -> GoneMember:
    return GoneMember(name=f"expert/{number}", incarnation=number, host="h", pid=number, reason="left")


# Only etcd from here on.


def raw(leader: Leader, cluster: str) -> dict[str, tuple[str, str]]:
    """Every key of a cluster but the leader's: value and revision of its last change."""
    _, (answer,) = leader.etcd.txn([], [get(f"{prefix_of(cluster)}state/", prefix=True)])
    return {key: (kv["value"], kv["mod_revision"]) for key, kv in pairs(answer).items()}


def test_a_deposed_leader_writes_nothing(running: EtcdProcess, cluster: str) -> None:
    first = Leader(running.url, cluster)
    state = history(first.store)
    # Its lease ends while it is frozen: it does not know.
    first.etcd.call("lease/revoke", {"ID": first.election._lease})
    assert first.election.leads(), "by its own clock"
    second = Leader(running.url, cluster)
    taken = second.store.load()
    assert_equal(taken, state)
    led, _ = step(CONFIG, taken, Started(salt=1), 0.0)
    second.store.save(taken, led)
    assert led.term == state.term + 1
    before = raw(second, cluster)
    with pytest.raises(JournalUnusable, match="is written by another router, which leads now"):
        first.store.save(state, crowd(3, epoch=99))
    assert not first.election.leads(), "the refusal tells it"
    with pytest.raises(JournalUnusable):
        first.store.save(state, crowd(300, epoch=99))
    with pytest.raises(JournalUnusable):
        first.store.prove(state)
    with pytest.raises(JournalUnusable):
        first.store.load()
    assert raw(second, cluster) == before
    assert second.store.save(led, replace(led, epoch=led.epoch + 1))
    second.resign()


def test_of_two_that_see_no_leader_one_wins(running: EtcdProcess, cluster: str) -> None:
    winners: list[Leader] = []

    class Slow(Etcd):
        """Between this router's look at the key and its own attempt, another wins."""

        def call(self, path, body):
            if path == "lease/grant":
                winners.append(Leader(running.url, cluster))
            return super().call(path, body)

    late = Election(Slow(running.url), prefix_of(cluster), ttl_s=60)
    assert not late._campaign("127.0.0.1:2")
    assert not late.leads()
    assert late.leader == "127.0.0.1:1"
    assert winners[0].store.load() == State()
    winners[0].resign()


def test_a_leader_whose_key_is_gone_writes_nothing(running: EtcdProcess, cluster: str) -> None:
    leader = Leader(running.url, cluster)
    state = history(leader.store)
    leader.etcd.call("lease/revoke", {"ID": leader.election._lease})
    before = raw(leader, cluster)
    with pytest.raises(JournalUnusable, match="leads now"):
        leader.store.save(state, crowd(3, epoch=99))
    assert raw(leader, cluster) == before


class CutEtcd(Etcd):
    """Carries out the first `calls` transactions; of the next, only the answer or all is lost."""

    def __init__(self, url: str, calls: int, *, carried_out: bool) -> None:
        super().__init__(url)
        self.calls, self.carried_out = calls, carried_out

    def call(self, path, body):
        self.calls -= 1
        if self.calls >= 0:
            return super().call(path, body)
        if self.calls == -1 and self.carried_out:
            super().call(path, body)
        raise etcd_store.EtcdUnavailable("cut")


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("count", [3, 250])
def test_a_crash_between_any_two_operations_leaves_one_state_or_the_other(
    running: EtcdProcess, cluster: str, count: int, carried_out: bool
) -> None:
    """Of a commit in one transaction, and of one in several."""
    old, new = crowd(count), crowd(count, epoch=2, bits=70)
    outcomes = []
    for calls in range(20):
        name = f"{cluster[:50]}.{calls}"
        leader = Leader(running.url, name)
        leader.store.load()
        leader.store.save(State(), old)
        leader.store._etcd = CutEtcd(running.url, calls, carried_out=carried_out)
        try:
            leader.store.save(old, new)
        except JournalUnusable:
            pass
        else:
            assert_equal(_taken(leader, running.url, name), new, "saved")
            break
        found = _taken(leader, running.url, name)
        assert_equal(found, new if found.epoch == 2 else old, f"cut at call {calls}")
        outcomes.append(found.epoch)
    assert outcomes == sorted(outcomes), "from one call on it counts"
    assert len(outcomes) == (1 if count == 3 else 8), "each call of a commit was cut once"


def _taken(leader: Leader, url: str, cluster: str) -> State:
    leader.resign()
    after = Leader(url, cluster)
    state = after.store.load()
    assert not any("/redo/" in key for key in raw(after, cluster)), "nothing half-written is left"
    assert_equal(after.store.load(), state, "loading twice")
    after.resign()
    return state


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("count", [3, 250])
def test_a_lost_answer_is_repaired_by_the_leader_itself(
    running: EtcdProcess, cluster: str, count: int, carried_out: bool
) -> None:
    old, lost, new = crowd(count), crowd(count + 2, epoch=2, bits=70), crowd(count + 1, epoch=3, bits=80)
    for calls in range(1 if count == 3 else 8):
        leader = Leader(running.url, f"{cluster[:50]}.{calls}")
        store = leader.store
        store.load()
        store.save(State(), old)
        store._etcd = CutEtcd(running.url, calls, carried_out=carried_out)
        with pytest.raises(JournalUnusable):
            store.save(old, lost)
        store._etcd = leader.etcd
        with pytest.raises(JournalUnusable, match="cut"):
            store.save(old, new)  # Without asking: what is stored is not known.
        store.prove(old)
        assert_equal(store.load(), old, f"cut at call {calls}")
        store.save(old, new)
        assert_equal(store.load(), new, f"cut at call {calls}")
        leader.resign()


def test_a_commit_that_arrives_late_changes_nothing(running: EtcdProcess, cluster: str) -> None:
    """The network held a transaction back, and the leader has gone on since."""
    leader = Leader(running.url, cluster)
    held: list[tuple[str, object]] = []

    class Slow(Etcd):
        def call(self, path, body):
            held.append((path, body))
            raise etcd_store.EtcdUnavailable("timed out")

    leader.store.load()
    leader.store.save(State(), crowd(5))
    leader.store._etcd = Slow(running.url)
    with pytest.raises(JournalUnusable, match="timed out"):
        leader.store.save(crowd(5), crowd(4, epoch=7))
    leader.store._etcd = leader.etcd
    leader.store.prove(crowd(5))
    before = raw(leader, cluster)
    ((path, body),) = held
    assert not leader.etcd.call(path, body).get("succeeded")
    assert raw(leader, cluster) == before
    leader.resign()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state/counters", '{"layout": 2, "salt"'),
        ("state/counters", "[]"),
        ("state/counters", None),
        ("state/members/", '{"name": "expert/1"}'),
        ("state/members/", "{"),
        ("state/gone/", "7"),
    ],
)
def test_a_damaged_value_is_refused_not_guessed(
    running: EtcdProcess, cluster: str, key: str, value: str | None
) -> None:
    leader = Leader(running.url, cluster)
    history(leader.store)
    whole = f"{prefix_of(cluster)}{key}"
    damaged = min(found for found in raw(leader, cluster) if found.startswith(whole))
    leader.etcd.txn([], [delete(damaged) if value is None else put(damaged, value)])
    with pytest.raises(JournalUnusable, match=f"{damaged} cannot be read"):
        leader.store.load()
    leader.resign()


def test_another_layout_is_named(running: EtcdProcess, cluster: str) -> None:
    leader = Leader(running.url, cluster)
    leader.etcd.txn([], [put(f"{prefix_of(cluster)}state/counters", json.dumps({"layout": 99}))])
    with pytest.raises(JournalUnusable, match="has layout 99, this router writes 2; give another --cluster"):
        leader.store.load()
    leader.resign()


def test_clusters_do_not_see_each_other(running: EtcdProcess) -> None:
    one, other = Leader(running.url, "blue"), Leader(running.url, "blu")
    state = history(one.store)
    assert other.store.load() == State()
    other.store.save(State(), crowd(2))
    assert_equal(one.store.load(), state)
    for leader in (one, other):
        leader.resign()
    for name in ("", "a/b", "*", "x" * 65):
        with pytest.raises(ClusterInvalid, match="give 1 to 64 of letters"):
            prefix_of(name)


def test_an_etcd_that_is_away_or_hangs_is_named_and_waited_for(cluster: str) -> None:
    with etcd_process() as process:
        leader = Leader(process.url, cluster)
        state = history(leader.store)
        # Each of those commits had its time; this one is to find out soon that nobody answers.
        leader.etcd._timeout_s = 0.5
        process.freeze()
        with pytest.raises(JournalUnusable, match=r"etcd at .* cannot be used: .*timed out.* See that it runs"):
            leader.store.save(state, crowd(2, epoch=99))
        leader.etcd._timeout_s = 1.0
        process.thaw()
        process.kill()
        with pytest.raises(JournalUnusable, match="Connection refused"):
            leader.store.prove(state)
        process.start()
        leader.store.prove(state)
        assert_equal(leader.store.load(), state)


def test_a_dead_endpoint_is_passed_over(running: EtcdProcess, cluster: str) -> None:
    leader = Leader(f"http://127.0.0.1:1,{running.url}", cluster)
    state = history(leader.store)
    assert_equal(leader.store.load(), state)
    leader.resign()


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("http://10.0.0.7:2379", "in the clear to another host; use https"),
        ("http://127.0.0.1:2379,http://etcd.example:2379", "in the clear to another host; use https"),
        ("127.0.0.1:2379", "http://HOST:PORT or https://HOST:PORT needed"),
        ("http://127.0.0.1", "http://HOST:PORT or https://HOST:PORT needed"),
        ("http://127.0.0.1:99999", "cannot be used"),
        ("https://user:secret@etcd.example:2379", "carries more than scheme, host and port"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(urls: str, message: str) -> None:
    with pytest.raises(EtcdInvalid, match=message) as refusal:
        Etcd(urls)
    assert "secret" not in str(refusal.value)


def test_an_etcd_that_asks_for_a_certificate_is_shown_one_and_its_own_is_looked_at(tmp_path: Path) -> None:
    make_certs(tmp_path / "ours", roles=["router"], hosts=["127.0.0.1"])
    make_certs(tmp_path / "others", roles=["router"], hosts=["127.0.0.1"])
    ours, others = (tmp_path / whose / "router" for whose in ("ours", "others"))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "ca.pem").write_bytes((ours / "ca.pem").read_bytes())
    with etcd_process(ours) as running:
        leader = Leader(running.url, "sealed", tls_dir=ours)
        state = history(leader.store)
        assert_equal(leader.store.load(), state)
        leader.resign()
        for tls_dir in (None, others, bare):
            with pytest.raises(etcd_store.EtcdUnavailable):
                Etcd(running.url, tls_dir=tls_dir).call("kv/range", {"key": "YQ=="})
    with pytest.raises(EtcdInvalid, match=r"--etcd-tls-dir .* needs ca\.pem"):
        Etcd(running.url, tls_dir=tmp_path)


def test_a_peer_that_is_no_etcd_is_no_success(cluster: str) -> None:
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        etcd = Etcd(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(etcd_store.EtcdUnavailable):
            etcd.call("kv/range", {"key": "YQ=="})
        server.shutdown()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
@pytest.mark.parametrize("endpoints", [1, 3])
def test_a_peer_that_answers_byte_by_byte_costs_one_budget(answer: bytes, endpoints: int) -> None:
    sent = 0

    def drip(link: socket.socket) -> None:
        nonlocal sent
        with link, contextlib.suppress(OSError):
            link.sendall(answer)
            for _ in range(200):
                link.sendall(b" ")
                sent += 1
                time.sleep(0.02)

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(etcd_store.EtcdUnavailable, match="timed out"):
            Etcd(",".join([url] * endpoints), timeout_s=0.6).call("kv/range", {})
        # Bytes that were sent in the budget, at 50 a second; without it all of them are.
        assert sent <= 100
        server.shutdown(socket.SHUT_RDWR)
