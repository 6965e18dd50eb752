"""What keeps responses: the same promises of a file of SQLite and of a real etcd."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eaas.gateway.errors import ApiError
from eaas.gateway.job_store import JobsInvalid, JobState, JobStore, Leases, open_jobs
from tests.etcd import EtcdProcess, etcd_process

Open = Callable[..., JobStore]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with etcd_process() as process:
        yield process


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=pytest.mark.full(seconds=3))])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "jobs.sqlite")
    url = request.getfixturevalue("etcd").url.removeprefix("http://")
    return f"etcd://{url}/test-{time.time_ns()}"


@pytest.fixture
def store(where: str) -> Iterator[JobStore]:
    store = open_jobs(where, 100, 1 << 20)
    yield store
    store.close()


def queued(at_ms: int = 1) -> JobState:
    return JobState(status="queued", at_ms=at_ms)


def test_a_record_is_found_as_it_was_put_by_whoever_opens_the_store(where: str, store: JobStore) -> None:
    assert store.get("a") is None
    put = store.put("a", b'{"asked": 1}', queued())
    assert put is not None
    other = open_jobs(where, 100, 1 << 20)
    found = other.get("a")
    assert found is not None
    assert (found.job, found.state, found.result) == (b'{"asked": 1}', put, b"")
    other.close()


def test_an_id_is_taken_once(store: JobStore) -> None:
    assert store.put("a", b"1", queued()) is not None
    assert store.put("a", b"2", queued()) is None
    found = store.get("a")
    assert found is not None and found.job == b"1"


def test_of_two_who_change_the_same_state_one_is_told_that_it_came_late(where: str, store: JobStore) -> None:
    before = store.put("a", b"1", queued())
    assert before is not None
    other = open_jobs(where, 100, 1 << 20)
    done = msgspec.structs.replace(before, status="completed", at_ms=9)
    first = store.update("a", before, done, b'{"text": 1}')
    assert first is not None
    assert other.update("a", before, done, b'{"text": 2}') is None
    found = other.get("a")
    assert found is not None and (found.state, found.result) == (first, b'{"text": 1}')
    assert other.update("a", first, msgspec.structs.replace(first, status="failed")) is not None
    other.close()


def test_what_was_deleted_is_gone_and_changes_no_more(store: JobStore) -> None:
    before = store.put("a", b"1", queued())
    assert before is not None
    assert store.delete("a") and not store.delete("a")
    assert store.get("a") is None and store.open() == {}
    assert store.update("a", before, before) is None
    assert store.put("a", b"2", queued()) is not None
    assert store.update("a", before, before) is None, "a version of another life of the same id"


def test_what_has_not_ended_is_listed_with_its_owner_and_model_in_order_of_arrival(store: JobStore) -> None:
    for id, at_ms, owner, model in (
        ("c", 3, "", "a model"),
        ("a", 1, "x", "m"),
        ("b", 2, "y", ""),
        ("d/e", 4, "y", "n"),
    ):
        state = JobState(status="queued", at_ms=at_ms, owner=owner, model=model)
        assert store.put(id, b"1", state) is not None
    kept = [("a", ("x", "m")), ("b", ("y", "")), ("c", ("", "a model")), ("d/e", ("y", "n"))]
    assert list(store.open().items()) == kept
    found = store.get("c")
    assert found is not None
    assert store.update("c", found.state, msgspec.structs.replace(found.state, status="completed", at_ms=50))
    assert list(store.open()) == ["a", "b", "d/e"]
    assert store.forgotten(50) == [] and store.forgotten(51) == ["c"]


def test_an_owner_renews_by_all_that_it_writes_and_is_forgotten_unless_it_has_renewed(
    store: JobStore,
) -> None:
    state = store.put("a", b"1", JobState(status="queued", at_ms=1, owner="x"))
    assert state is not None
    first = store.owners()["x"]
    assert store.update("a", state, msgspec.structs.replace(state, status="in_progress")) is not None
    second = store.owners()["x"]
    store.renew("x")
    third = store.owners()["x"]
    assert len({first, second, third}) == 3
    assert not store.forget_owner("x", second) and store.owners() == {"x": third}
    assert store.forget_owner("x", third) and store.owners() == {}
    assert store.open() == {"a": ("x", "")}


def test_a_lease_ends_by_its_observer_s_clock_alone_and_while_it_looks() -> None:
    leases, now_s, version = Leases(5.0, 2.0), 1024.0, 1
    assert leases.lapsed({"dead": 1, "alive": 1}, now_s) == [], "whoever is seen first has a whole lease"
    for second in range(1, 5):
        assert leases.lapsed({"dead": 1, "alive": 1 + second}, now_s + second) == [], second
    assert leases.lapsed({"dead": 1, "alive": 6}, now_s + 5) == ["dead"]
    assert leases.lapsed({"dead": 2, "alive": 6}, now_s + 6) == [], "it lives after all"
    # The store was away for a minute, and nobody could renew.
    assert leases.lapsed({"dead": 2, "alive": 6}, now_s + 66) == []
    seed = time.time_ns()
    rng = random.Random(seed)
    leases, since_s = Leases(5.0, 2.0), 0.0
    for number in range(2000):
        gap_s, renewed = rng.choice([0.0, 0.125, 1.0, 1.5, 60.0]), rng.random() < 0.2
        now_s, version = now_s + gap_s, version + renewed
        since_s = 0.0 if renewed or not number else since_s + min(gap_s, 2.0)
        assert bool(leases.lapsed({"x": version}, now_s)) == (since_s >= 5.0), f"seed {seed}: {since_s}"


def test_no_more_is_kept_than_may_be(where: str) -> None:
    few = open_jobs(where, 2, 100)
    big = few.put("big", b"1" * 200, queued())
    assert big is not None, "one alone is always taken"
    with pytest.raises(ApiError, match="200 bytes of responses are kept, and 1 more would be over at most 100"):
        few.put("small", b"1", queued())
    assert few.delete("big")
    one = few.put("one", b"1", queued())
    assert one is not None
    assert few.put("two", b"1", queued()) is not None
    with pytest.raises(ApiError, match=r"2 responses are kept, the most .*--jobs-most"):
        few.put("three", b"1", queued())
    grown = few.update("one", one, msgspec.structs.replace(one, status="completed"), b"1" * 99)
    assert grown is not None and grown.bytes == 100
    assert few.delete("two")
    with pytest.raises(ApiError, match="100 bytes of responses are kept"):
        few.put("two", b"1", queued())
    few.close()


def test_a_value_that_the_store_cannot_take_is_refused_and_nothing_of_it_kept(store: JobStore) -> None:
    most = store._base.most_bytes
    with pytest.raises(ApiError, match=f"{most + 1} bytes found; .* takes {most} at once"):
        store.put("a", b"1" * (most + 1), queued())
    assert store.get("a") is None
    large = open_jobs_wide(store)
    before = large.put("a", b"1" * most, queued())
    assert before is not None
    with pytest.raises(ApiError, match="cannot be kept"):
        large.update("a", before, before, b"1" * (most + 1))
    assert large.update("a", before, before, b"1" * most) is not None


def open_jobs_wide(store: JobStore) -> JobStore:
    return JobStore(store._base, 100, 1 << 30)


@pytest.mark.parametrize("where", [pytest.param("sqlite", marks=())], indirect=True)
def test_a_file_that_somebody_removed_is_made_anew(where: str, store: JobStore) -> None:
    assert store.put("a", b"1", queued()) is not None
    for path in Path(where).parent.glob("jobs.sqlite*"):
        path.unlink()
    assert store.put("b", b"1", queued()) is not None
    other = open_jobs(where, 100, 1 << 20)
    assert other.get("b") is not None and other.get("a") is None
    other.close()


@pytest.mark.parametrize("where", [pytest.param("sqlite", marks=())], indirect=True)
def test_a_file_that_another_made_anew_is_the_one_that_is_written(where: str, store: JobStore) -> None:
    other = open_jobs(where, 100, 1 << 20)
    for path in Path(where).parent.glob("jobs.sqlite*"):
        path.unlink()
    assert other.put("a", b"1", queued()) is not None
    assert store.put("b", b"1", queued()) is not None
    assert other.get("b") is not None and store.get("a") is not None
    other.close()


def test_a_record_whose_writing_is_told_only_to_who_did_not_ask_is_no_other_s(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = store._base.commit

    def twice(*asked: Any) -> int:
        """As where the first endpoint of etcd is too slow to say that it did it."""
        commit(*asked)
        return commit(*asked)

    monkeypatch.setattr(store._base, "commit", twice)
    put = store.put("a", b"1", queued())
    found = store.get("a")
    assert put is not None and found is not None and found.state == put
    assert store.put("a", b"2", queued()) is None


def test_nobody_else_may_read_what_was_asked_and_said(tmp_path: Path) -> None:
    store = open_jobs(str(tmp_path / "jobs"), 1, 1)
    assert store.put("a", b"secret", queued()) is not None
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    store.close()


def test_a_store_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(JobsInvalid, match=r"cannot be opened: .*\. See that its folder"):
        open_jobs(str(tmp_path / "none" / "jobs.sqlite"), 1, 1)
    (tmp_path / "text").write_text("no database, and longer than the header of one would be" * 20)
    with pytest.raises(JobsInvalid, match="file is not a database"):
        open_jobs(str(tmp_path / "text"), 1, 1)
    with pytest.raises(JobsInvalid, match="etcd://nowhere"):
        open_jobs("etcd://nowhere", 1, 1)
    with pytest.raises(ApiError, match="cannot be used just now"):
        open_jobs("etcd://127.0.0.1:1/x", 1, 1).get("a")


def _claim_all(where: str, owner: str, found: multiprocessing.SimpleQueue[tuple[str, str]]) -> None:
    store = open_jobs(where, 1000, 1 << 20)
    while ids := [id for id, (owner, _) in store.open().items() if not owner]:
        for id in ids:
            stored = store.get(id)
            if stored is not None and not stored.state.owner:
                mine = msgspec.structs.replace(stored.state, owner=owner)
                if store.update(id, stored.state, mine) is not None:
                    found.put((id, owner))


def test_of_many_processes_that_claim_at_the_same_time_each_job_is_one_s(where: str, store: JobStore) -> None:
    ids = {f"job-{number}" for number in range(40)}
    for number, id in enumerate(sorted(ids)):
        assert store.put(id, b"1", queued(number)) is not None
    spawn = multiprocessing.get_context("spawn")
    found: multiprocessing.SimpleQueue[tuple[str, str]] = spawn.SimpleQueue()
    claimers = [spawn.Process(target=_claim_all, args=(where, f"owner-{n}", found)) for n in range(3)]
    for claimer in claimers:
        claimer.start()
    for claimer in claimers:
        claimer.join(60)
        assert claimer.exitcode == 0
    claimed = []
    while not found.empty():
        claimed.append(found.get())
    assert sorted(id for id, _ in claimed) == sorted(ids)
    assert store.open() == {id: (owner, "") for id, owner in claimed}


def _put_until_killed(where: str, said: str) -> None:
    store = open_jobs(where, 100_000, 1 << 30)
    with Path(said).open("a") as file:
        for number in range(100_000):
            if store.put(f"{os.getpid()}-{number}", b"%d" % number, queued()) is not None:
                file.write(f"{os.getpid()}-{number}\n")
                file.flush()


def test_what_was_said_to_be_kept_is_there_after_a_kill_at_any_moment(where: str, tmp_path: Path) -> None:
    seed = time.time_ns()
    rng = random.Random(seed)
    said = tmp_path / "said"
    for _ in range(3):
        child = multiprocessing.get_context("spawn").Process(target=_put_until_killed, args=(where, str(said)))
        child.start()
        size = said.stat().st_size if said.exists() else 0
        end_s = time.monotonic() + 60
        while not said.exists() or said.stat().st_size == size:
            assert time.monotonic() < end_s, "nothing was put"
            threading.Event().wait(0.01)
        threading.Event().wait(rng.uniform(0, 0.2))
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
    store = open_jobs(where, 100, 1 << 20)
    lost = [id for id in said.read_text().split() if store.get(id) is None]
    assert not lost, f"seed {seed}: {len(lost)} were said to be kept and are not: {lost[:3]}"
    store.close()
