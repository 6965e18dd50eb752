"""A member whose machine slept past its lease, as a suspended laptop does (CLOCK_BOOTTIME counts the sleep)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from router import client as router_client
from router.client import RouterClient
from router.host import boot_s
from tests.router.test_service import RouterProcess, until


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    process = RouterProcess(tmp_path, "--lease-s", "0.6")
    yield process
    process.stop()


def test_a_member_that_slept_past_its_lease_answers_nothing_until_the_router_has_spoken(
    router: RouterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_s, asleep, woken = [0.0], threading.Event(), threading.Event()
    monkeypatch.setattr(router_client, "boot_s", lambda: boot_s() + slept_s[0])
    member = RouterClient(router.address)
    fenced: list[str] = []

    def load() -> dict[str, float]:
        # The lease thread stands still here, as everything of that machine does.
        if asleep.is_set():
            woken.wait(30)
        return {}

    member.join(pool="expert", address="a", layers=2, experts=6, model_hash="m")
    member.start(load=load, on_fenced=fenced.append)
    witness = RouterClient(router.address)
    try:
        until(member.lease_held)
        asleep.set()
        until(lambda: not witness.status().view.pool("expert"))
        slept_s[0] = 3600.0
        assert not member.lease_held(), "it answers although an hour has passed unseen"
        woken.set()
        until(lambda: fenced)
        assert not member.lease_held()
        assert member.fenced, "it goes on under a name that the router has given up"
    finally:
        woken.set()
        member.close()
        witness.close()
