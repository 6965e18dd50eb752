"""What ends a lease on its member's side: its own silence (CLOCK_BOOTTIME counts a suspended machine's sleep), not a
router that it does not hear."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
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


class Relay:
    """A port in front of the router's, whose network can be cut: nothing passes, and no connection ends."""

    def __init__(self, port: int) -> None:
        self._to, self._passes, self._sockets = port, threading.Event(), []
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, far = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._sockets += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._passes.wait()
                sink.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    def close(self) -> None:
        self.heal()
        for one in (self._listener, *self._sockets):
            # Closing alone wakes no thread that waits there.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_a_member_cut_off_from_the_router_alone_goes_on_until_it_hears_that_it_was_fenced(
    router: RouterProcess,
) -> None:
    """To it a cut looks like a router that is away, and for that nobody may stop."""
    relay = Relay(router.port)
    member, witness, fenced = RouterClient(relay.address), RouterClient(router.address), list[str]()
    member.join(pool="expert", address="a", layers=2, experts=6, model_hash="m")
    member.start(on_fenced=fenced.append)
    try:
        until(lambda: witness.status().view.pool("expert"))
        relay.cut()
        until(lambda: not witness.status().view.pool("expert"))
        assert member.lease_held() and not fenced
        relay.heal()
        until(lambda: fenced)
        assert not member.lease_held()
    finally:
        relay.close()
        member.close()
        witness.close()


@pytest.mark.parametrize("hears", [True, False])
def test_a_member_that_slept_past_its_lease_answers_nothing_until_the_router_has_spoken(
    router: RouterProcess, monkeypatch: pytest.MonkeyPatch, hears: bool
) -> None:
    """A router that it does not hear has half a lease for that: it may be away."""
    slept_s, asleep, woken = [0.0], threading.Event(), threading.Event()
    monkeypatch.setattr(router_client, "boot_s", lambda: boot_s() + slept_s[0])
    relay = Relay(router.port)
    member = RouterClient(relay.address)
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
        if not hears:
            relay.cut()
        woke_s = boot_s()
        woken.set()
        until(lambda: fenced or member.lease_held())
        if not hears:
            assert not fenced and boot_s() - woke_s >= 0.3, "it answers though nobody has told it that it may"
            relay.heal()
            until(lambda: fenced)
        assert not member.lease_held()
        assert member.fenced, "it goes on under a name that the router has given up"
    finally:
        woken.set()
        relay.close()
        member.close()
        witness.close()
