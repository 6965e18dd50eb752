"""`eaas scale` as an operator types it: real router, and a gateway's /status beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from router.client import RouterClient
from tests.router.test_service import RouterProcess, Server, started, until

__all__ = ["started"]


def scale(*arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "eaas.ops.cli", "scale", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stdout + done.stderr


def rows(shown: str) -> dict[str, list[str]]:
    """Cells of the table's lines, by pool."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    return {line[0]: line[1:] for line in cells}


@pytest.fixture
def gateway() -> Iterator[Callable[[str], str]]:
    """Starts what answers /status with the address of a router; returns its URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(router: str) -> str:
        members = [{"name": "router/0", "pool": "router", "address": router}] if router else []

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"members": members}).encode()
                self.send_response(200 if self.path == "/status" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Answer))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_pools_are_shown_and_one_is_scaled_through_the_gateways_address_of_the_router(
    started: Callable[..., RouterProcess], gateway: Callable[[str], str]
) -> None:
    router = started("--experts", "2", "--attention", "3")
    url = gateway(router.address)
    status, shown = scale("--url", url)
    assert status == 0, shown
    assert rows(shown) == {
        "expert": ["2", "0", "0", "0", "0 to 63", ""],
        "attention": ["3", "0", "0", "0", "0 to 64", ""],
    }
    status, shown = scale("expert", "6", "--url", url)
    assert (status, rows(shown)) == (0, {"expert": ["6", "0", "0", "0", "0 to 63", ""]})
    client = RouterClient(router.address)
    assert client.status().pools["expert"].wanted == 6
    assert client.status().pools["attention"].wanted == 3
    client.close()


def test_it_waits_until_the_pool_has_its_size_or_says_that_it_has_not(
    started: Callable[..., RouterProcess],
) -> None:
    router = started("--experts", "1", "--lease-s", "1")
    first = Server(router)
    status, shown = scale("expert", "2", "--router", router.address, "--wait-s", "0.5")
    assert status == 1
    assert "pool expert has 1 of 2 processes after 0.5 s; it goes on changing" in shown
    second: list[Server] = []
    timer = threading.Timer(1.0, lambda: second.append(Server(router)))
    timer.start()
    status, shown = scale("expert", "2", "--router", router.address, "--wait-s", "20")
    assert (status, rows(shown)["expert"][:2]) == (0, ["2", "2"])
    until(lambda: second)
    for each in (first, *second):
        each.die()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["expert"], "eaas scale expert lacks the size. Give it: eaas scale expert 2"),
        (
            ["experts", "2", "--router", "ROUTER"],
            "pool 'experts' has no size of its own; scale one of expert",
        ),
        (["expert", "65", "--router", "ROUTER"], "65 members of pool 'expert' asked for; give 0 to 63"),
        (
            ["expert", "2", "--drain-s", "-1", "--router", "ROUTER"],
            "drain_s is -1.0; give more than 0 and at most 1000000",
        ),
        (["--url", "http://127.0.0.1:1"], "No EaaS gateway answers at http://127.0.0.1:1"),
        (["--url", "LONELY"], "names no router; name it with --router HOST:PORT"),
        (["--router", "127.0.0.1:1"], "the router at 127.0.0.1:1 did not answer"),
    ],
)
def test_what_cannot_be_done_is_explained(
    started: Callable[..., RouterProcess], gateway: Callable[[str], str], arguments: list[str], message: str
) -> None:
    places = {}
    if "ROUTER" in arguments:
        places["ROUTER"] = started().address
    if "LONELY" in arguments:
        places["LONELY"] = gateway("")
    status, shown = scale(*(places.get(argument, argument) for argument in arguments))
    assert status == 1
    assert message in shown
