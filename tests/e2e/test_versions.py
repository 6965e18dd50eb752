"""A process of another release among those of this one: refused in clear words, and nothing else changes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from experts.wire import VERSION
from tests.e2e.calm import Calm
from tests.e2e.waiting import wait_for

pytestmark = pytest.mark.full(seconds=15)

ROOT = Path(__file__).resolve().parents[2]
# What a process started with EAAS_OF_ANOTHER_RELEASE runs before anything else.
LATER = """
import os
if os.environ.get("EAAS_OF_ANOTHER_RELEASE") == "link":
    import p2p.shm_link
    p2p.shm_link._VERSION += 1
if os.environ.get("EAAS_OF_ANOTHER_RELEASE") == "rows":
    import experts.wire
    experts.wire.VERSION += 1
"""
REFUSALS = {
    "link": "it speaks another version; run the same release on both sides",
    "rows": f"asks for wire version {VERSION} (here {VERSION + 1}). Ask for what is served, from one release.",
}


@pytest.mark.parametrize("other", REFUSALS)
def test_a_server_of_another_release_serves_nobody_and_harms_nobody(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    calm = Calm(cluster)
    (tmp_path / "sitecustomize.py").write_text(LATER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("EAAS_OF_ANOTHER_RELEASE", other)
    pids = cluster.pids()
    victim = max(name for name in pids if name.startswith("expert/"))
    calm.check("a server replaced by one of another release", lambda: os.kill(pids[victim], signal.SIGKILL))

    def newcomers() -> list[str]:
        return [name for name in cluster.pids() if name.startswith("expert/") and name not in pids]

    wait_for("the other release's server", lambda: bool(newcomers()), cluster)
    (newcomer,) = newcomers()
    calm.check(f"{newcomer} is of another release")

    def is_refused() -> bool:
        # A worker attaches beside its steps, and a thread of its own writes its log.
        return any(REFUSALS[other] in path.read_text() for path in cluster.state_dir.glob("attention.*.log"))

    wait_for("the refusal in a worker's log", is_refused, cluster)
    # One of this release in its place makes the pool whole again.
    monkeypatch.delenv("EAAS_OF_ANOTHER_RELEASE")
    os.kill(cluster.pids()[newcomer], signal.SIGKILL)

    def is_replaced() -> bool:
        return newcomer not in {member["name"] for member in fetch_status(cluster.url)["members"]} and calm.is_whole()

    wait_for("another in its place", is_replaced, cluster)
    calm.check("all of one release again")
