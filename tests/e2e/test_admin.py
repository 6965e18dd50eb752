"""The admin listener and `eaas scale` of a served model."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.test_command_line import descendants, run, served


def pools(address: str) -> dict[str, dict[str, object]]:
    with urllib.request.urlopen(f"{address}/admin/pools", timeout=30) as reply:
        return {pool["pool"]: pool for pool in json.load(reply)["pools"]}


@pytest.mark.full(seconds=12)
def test_a_served_model_is_scaled_by_hand_and_its_admin_address_outlives_its_router(tiny: Path) -> None:
    with served(str(tiny), "--experts", "2", "--admin-port", "0", "--autoscale", "expert:1..3") as (
        process,
        url,
    ):
        address = ""
        for line in process.stdout or ():
            if line.startswith("admin: "):
                address = line.removeprefix("admin: ").strip()
                break
        assert pools(address)["expert"]["wanted"] == 2
        assert (pools(address)["expert"]["least"], pools(address)["expert"]["most"]) == (1, 3)
        scaled = run("scale", "attention", "2", "--wait-s", "60", "--url", url)
        assert scaled.returncode == 0, scaled.stdout + scaled.stderr
        assert pools(address)["attention"]["live"] == 2
        refused = run("scale", "expert", "4", "--url", url)
        assert refused.returncode == 1
        assert "4 members of pool 'expert' asked for; give 1 to 3" in refused.stderr

        command = "\0router\0"
        (router,) = (p for p in descendants(process.pid) if command in Path(f"/proc/{p}/cmdline").read_text())
        os.kill(router, signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while True:
            try:
                assert pools(address)["attention"]["wanted"] == 2
                break
            except OSError:
                assert time.monotonic() < deadline_s, "the admin address does not answer again"
                time.sleep(0.1)


@pytest.mark.full(seconds=8)
def test_what_makes_no_sense_is_refused_before_anything_starts(tiny: Path) -> None:
    for flags, message in (
        (["--autoscale", "expert:1-6"], "such as expert:1..6"),
        (["--autoscale", "expert:3..2"], "least <= most"),
        (["--autoscale", "expert:1..2", "--autoscale", "expert:1..3"], "names pool expert twice"),
        (["--autoscale", "expert:0..0"], "most from 1 to 64"),
        (["--admin-port", "70000"], "--admin-port 70000: at least 0 and at most 65535"),
        (["--admin-key-file", "/nowhere"], "--admin-key-file without --admin-port"),
    ):
        refused = run("serve", str(tiny), *flags)
        assert refused.returncode == 1
        assert message in refused.stderr
