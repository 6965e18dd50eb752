"""A load with a kill on its time line: the report's verdict is that of the streams, and the client saw nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eaas.cluster.local import LocalCluster
from eaas.ops.cli import app

runner = pytest.importorskip("eaas.ops.chaos.runner", reason="needs eaas.ops.chaos.runner, found none")

PLAN = """seed = 5
[[fault]]
at = "2s"
kind = "kill"
pool = "expert"
"""


def test_a_server_killed_under_load_costs_no_client_a_token(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    arguments = [
        "load", cluster.url, "--rate", "5", "--for", "5s", "--max-tokens", "48", "--ignore-eos", "--reference",
        "--chaos", str(tmp_path / "plan.toml"), "--json", str(tmp_path / "report.json"),
    ]  # fmt: skip
    before = set(cluster.pids())
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    verdict = report["verdict"]
    assert (verdict["failed"], verdict["lost"], verdict["repeated"], verdict["changed"]) == (0, 0, 0, 0)
    assert verdict["compared"] == report["summary"]["requests"] > 10
    assert report["summary"]["output_tokens"] == 48 * report["summary"]["requests"]
    (span,) = report["chaos"]["spans"]
    killed = span["text"].removeprefix("kill ")
    assert killed in before and killed not in cluster.pids(), "the launcher's record says who died"
