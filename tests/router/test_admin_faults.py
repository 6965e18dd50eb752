"""Faults over the admin listener: who may inject them, what is refused, and what the metrics say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.client import FaultRefused, RouterClient
from router.faults import Fault, FaultsTaken
from tests.router.test_admin import JSON, Admin
from tests.router.test_service import HOST, SHAPE, RouterProcess, started, until

__all__ = ["started"]

KEY = "0123456789abcdef0123456789abcdef"
SLOW = {"kind": "slow", "for_s": 30, "times": 10}


class Taker:
    """A member that takes faults and only writes them down."""

    takes = FaultsTaken(kinds=("slow", "kill"), points=("computed",))

    def __init__(self, router: RouterProcess) -> None:
        self.begun: dict[str, Fault] = {}
        self.ended: list[str] = []
        self.client = RouterClient(router.address)
        pid = 2_000_000 + threading.get_ident() % 1000
        self.name = self.client.join(pool="expert", address="nowhere", pid=pid, host=HOST, **SHAPE).name
        self.client.start(
            on_view=lambda view: self.client.loaded(view.member(self.name).target, view.epoch), faults=self
        )

    @property
    def active(self) -> int:
        return len(self.begun) - len(self.ended)

    def begin(self, fault: Fault) -> None:
        self.begun[fault.id] = fault

    def end(self, fault_id: str) -> None:
        self.ended.append(fault_id)


@pytest.fixture
def chaos(started: Callable[..., RouterProcess], tmp_path: Path) -> Iterator[tuple[RouterProcess, Taker, Admin]]:
    """A router that takes faults, one member, and who may ask for them."""
    path = tmp_path / "key"
    path.write_text(KEY)
    router = started("--admin-port", "0", "--admin-key-file", str(path), "--experts", "1", "--allow-chaos")
    taker = Taker(router)
    yield router, taker, Admin(int(router.admin.rpartition(":")[2]), KEY)
    taker.client.close()


def inject(admin: Admin, names: object, fault: object, **headers: str) -> tuple[int, Any]:
    return admin.ask("POST", "/admin/faults", {"names": names, "fault": fault}, {**JSON, **headers})


def test_a_fault_is_injected_listed_counted_and_cleared(chaos: tuple[RouterProcess, Taker, Admin]) -> None:
    _, taker, admin = chaos
    status, listed = admin.ask("GET", "/admin/faults")
    assert status == 200 and listed["faults"] == []
    assert [(m["name"], m["pool"]) for m in listed["members"]] == [(taker.name, "expert")]

    status, injected = inject(admin, [taker.name], SLOW)
    assert status == 200, injected
    id = injected["fault"]["id"]
    assert injected["fault"] == {"id": id, **SLOW} and injected["names"] == [taker.name]
    assert 0 < injected["remaining_s"] <= 30
    until(lambda: id in taker.begun)
    assert taker.begun[id] == Fault(id=id, kind="slow", for_s=30, times=10)
    (active,) = admin.ask("GET", "/admin/faults")[1]["faults"]
    assert active["fault"] == injected["fault"] and active["remaining_s"] > 0
    metrics = admin.metrics()
    assert metrics["eaas_faults_injected_total", "slow"] == 1 and metrics["eaas_faults_injected_total", "kill"] == 0
    assert metrics["eaas_faults_active",] == 1

    assert admin.ask("DELETE", "/admin/faults/nothing") == (200, {"cleared": []})
    assert admin.ask("DELETE", f"/admin/faults/{id}") == (200, {"cleared": [id]})
    until(lambda: taker.ended == ["nothing", id])
    assert admin.metrics()["eaas_faults_active",] == 0
    second = inject(admin, [taker.name], SLOW)[1]["fault"]["id"]
    assert second != id
    assert admin.ask("DELETE", "/admin/faults") == (200, {"cleared": [second]})


def test_nothing_of_it_is_answered_without_the_key(chaos: tuple[RouterProcess, Taker, Admin]) -> None:
    _, taker, admin = chaos
    for key in ("", KEY[:-1], KEY + "0"):
        stranger = Admin(admin.port, key)
        assert stranger.ask("GET", "/admin/faults")[0] == 401
        assert inject(stranger, [taker.name], SLOW)[0] == 401
        assert stranger.ask("DELETE", "/admin/faults")[0] == 401
    # Nor where members are answered, without any.
    for act in (
        lambda: taker.client.inject([taker.name], Fault(id="", kind="slow", times=2.0)),
        taker.client.clear,
    ):
        with pytest.raises(FaultRefused, match="only over its admin listener, with the key"):
            act()
    assert not taker.begun and not taker.ended


def test_a_path_that_names_no_fault_clears_none(chaos: tuple[RouterProcess, Taker, Admin]) -> None:
    _, taker, admin = chaos
    assert inject(admin, [taker.name], SLOW)[0] == 200
    assert admin.ask("DELETE", "/admin/faults/")[0] == 404
    assert [one["remaining_s"] > 0 for one in admin.ask("GET", "/admin/faults")[1]["faults"]] == [True]


def test_a_router_without_allow_chaos_says_so(started: Callable[..., RouterProcess]) -> None:
    router = started("--admin-port", "0")
    admin = Admin(int(router.admin.rpartition(":")[2]))
    for method, path in (("GET", "/admin/faults"), ("POST", "/admin/faults"), ("DELETE", "/admin/faults/x")):
        status, said = admin.ask(method, path, {"names": ["expert/1"], "fault": SLOW}, JSON)
        assert status == 403, said
        assert "--allow-chaos" in said["error"]["message"]
    assert not [name for name in admin.metrics() if "fault" in name[0]]


@pytest.mark.parametrize(
    ("names", "fault", "status", "message"),
    [
        (["expert/9"], SLOW, 400, "'expert/9' is no member"),
        ([], SLOW, 400, '{"names": ["expert/3"], "fault": '),
        ("expert/1", SLOW, 400, '{"names": ["expert/3"], "fault": '),
        (["expert/1", 3], SLOW, 400, '{"names": ["expert/3"], "fault": '),
        (["expert/1"], [], 400, '{"names": ["expert/3"], "fault": '),
        (["expert/1"], {"kind": "explode"}, 400, "'explode' is no fault"),
        (["expert/1"], {"kind": "\udc00"}, 400, "'\\udc00' is no fault"),
        (["\ud800"], SLOW, 400, "'\\ud800' is no member"),
        (["expert/1"], {**SLOW, "times": 10**400}, 400, "times is"),
        (["expert/1"], {**SLOW, "for_s": 1e9}, 400, "for_s is 1000000000.0; 0 to 3600 is needed"),
        (["expert/1"], {"kind": "delay", "by_s": 0.1}, 400, "takes no delay; it takes slow, kill"),
        (["expert/1"], {"kind": "kill", "where": "combined"}, 400, "never passes combined"),
    ],
)
def test_what_cannot_be_injected_is_refused(
    chaos: tuple[RouterProcess, Taker, Admin], names: object, fault: object, status: int, message: str
) -> None:
    _, taker, admin = chaos
    answered, said = inject(admin, names, fault)
    assert answered == status, said
    assert message in said["error"]["message"]
    assert not taker.begun


def test_bodies_are_bounded_and_methods_known(chaos: tuple[RouterProcess, Taker, Admin]) -> None:
    _, taker, admin = chaos
    assert inject(admin, [taker.name] * 1000, SLOW)[0] == 413
    assert admin.ask("POST", "/admin/faults", b"{}", {"content-type": "text/plain"})[0] == 415
    assert admin.ask("PUT", "/admin/faults", {}, JSON)[0] == 405
    assert admin.ask("POST", "/admin/faults/x", {}, JSON)[0] == 405
