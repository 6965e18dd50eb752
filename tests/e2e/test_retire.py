"""One process of each role is retired by name while clients stream, and no client sees anything of it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from tests.e2e.clients import stream_all
from tests.e2e.test_command_line import run
from tests.e2e.test_roll import Load
from tests.e2e.waiting import wait_for

pytestmark = pytest.mark.full(seconds=10)

STREAMS, TOKENS = 16, 24
PROMPTS = [f"{'word ' * (number % 7)}client {number} asks" for number in range(STREAMS)]


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        model=tiny,
        served_model_name="tiny",
        experts=3,
        attention=2,
        replicas=2,
        port=0,
        cores=(0, 1),
        admin_port=0,
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def calm(served: LocalCluster) -> list[list[str]]:
    """What the clients get when nothing happens."""
    return [one.texts for one in stream_all(served.url, "tiny", PROMPTS, TOKENS)]


def ask(served: LocalCluster, method: str, name: str, operation: str = "") -> tuple[int, dict[str, Any]]:
    """As curl would ask the admin listener."""
    body = json.dumps({"operation": operation}).encode() if method == "POST" else None
    url = f"http://{served.admin_addresses[0]}/admin/members/{name}/retire"
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method=method)
    until_s = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            # A router that was retired is started again.
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def names(served: LocalCluster, pool: str) -> dict[str, int]:
    """Members of a pool that serve, with their pids."""
    members = fetch_status(served.url)["members"]
    return {m["name"]: m["pid"] for m in members if m["pool"] == pool and m["state"] == "serving"}


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("pool", "by"),
    [("expert", "curl"), ("attention", "eaas retire"), ("gateway", "eaas retire --here"), ("router", "curl")],
)
def test_a_member_retired_by_name_ends_and_is_replaced_and_streams_see_nothing(
    served: LocalCluster, calm: list[list[str]], pool: str, by: str
) -> None:
    before = names(served, pool)
    name, pid = next(iter(before.items()))
    operation = f"move {name} by {by} at {time.time_ns()}"
    with Load(served.url, PROMPTS, TOKENS) as load:
        if by == "curl":
            status, said = ask(served, "POST", name, operation)
            assert (status, said["name"], said["operation"]) == (200, name, operation), said
            assert ask(served, "POST", name, operation)[0] == 200, "asked again, nothing more happens"
            wait_for("it is safe", lambda: ask(served, "GET", name)[1]["safe_to_terminate"], served)
        else:
            which = [pool, "--here"] if by.endswith("--here") else [name]
            retired = run("retire", *which, "--operation", operation, "--wait", "--url", served.url, timeout_s=240)
            assert retired.returncode == 0, retired.stdout + retired.stderr
            assert "safe to terminate" in retired.stdout
        wait_for(f"the end of {name}", lambda: not is_running(pid), served)

        def is_replaced() -> bool:
            now = names(served, pool)
            return len(now) == len(before) and pid not in now.values()

        wait_for("another in its place", is_replaced, served)
        settled = len(load.texts)
        wait_for("a round of streams served since", lambda: len(load.texts) > settled + 1, served)
    assert load.errors == []
    assert all(texts == calm for texts in load.texts), f"{len(load.texts)} rounds"
    said = ask(served, "GET", name)[1]
    assert (said["operation"], said["state"], said["safe_to_terminate"]) == (operation, "gone", True), said
    state = fetch_status(served.url)
    assert state["retirements"] == []
    assert state["replicas_min"] == 2


def test_two_operations_on_one_member_and_names_of_nobody_are_refused_in_words(served: LocalCluster) -> None:
    name = next(iter(names(served, "expert")))
    assert ask(served, "POST", name, "first")[0] == 200
    shown = fetch_status(served.url)["retirements"]
    assert [(one["name"], one["operation"]) for one in shown] == [(name, "first")]
    status, said = ask(served, "POST", name, "second")
    assert status == 409
    assert f"operation first retires {name} already" in said["error"]["message"]
    followed = run("retire", name, "--wait", "--url", served.url)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "first" in followed.stdout
    status, said = ask(served, "POST", name, "second")
    assert (status, ask(served, "POST", name, "first")[0]) == (404, 200), said
    unknown = run("retire", "expert/99", "--url", served.url)
    assert unknown.returncode == 1
    assert "expert/99 is neither a member nor the router" in unknown.stderr


def test_no_process_that_was_retired_logged_an_error(served: LocalCluster) -> None:
    for log in served.state_dir.glob("*.log"):
        found = [line for line in log.read_text().splitlines() if " ERROR " in line or "Traceback" in line]
        assert found == [], log.name
