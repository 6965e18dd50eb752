"""A real Prometheus for tests: one process on a free port of loopback, its data in a folder that it is given."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented import ROOT

RULES = ROOT / "deploy" / "helm" / "eaas" / "files" / "prometheus-alerts.yaml"
SCRAPE_S = 0.5


class Prometheus:
    """Asks one over its HTTP API."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log

    def ask(self, path: str, **query: str) -> Any:
        """The data of one answer. Raises OSError while it does not answer."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as reply:
            said = json.load(reply)
        assert said["status"] == "success", said
        return said["data"]

    def value(self, expression: str) -> float | None:
        """Of the first series that it yields; None where there is none."""
        found = self.ask("query", query=expression)["result"]
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}

    def words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-2000:]


def hurried(rules: str, seconds: float) -> dict[str, Any]:
    """The shipped rules with every wait of theirs cut to so many seconds; what they say is untouched."""
    found = yaml.safe_load(rules)
    for group in found["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = f"{seconds:g}s"
            rule["expr"] = re.sub(r"\[\d+[smh]\]", f"[{max(1, int(4 * SCRAPE_S + seconds))}s]", rule["expr"])
    return found


@contextlib.contextmanager
def prometheus(folder: Path, targets: Mapping[str, str], wait_s: float = 1.0) -> Iterator[Prometheus]:
    """Scrapes the targets, host:port by job, with the shipped rules, hurried. Skips where there is none.

    Args:
        wait_s: What each rule's `for` becomes.
    """
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus, found none on PATH")
    (folder / "rules.yaml").write_text(yaml.safe_dump(hurried(RULES.read_text(), wait_s)))
    config = {
        "global": {"scrape_interval": f"{int(1000 * SCRAPE_S)}ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=out,
            stderr=out,
        )
    found = Prometheus(process, f"http://127.0.0.1:{port}", log)
    try:
        end_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                found.ask("status/runtimeinfo")
                break
            assert time.monotonic() < end_s and process.poll() is None, found.words()
            time.sleep(0.05)
        yield found
    finally:
        process.terminate()
        process.wait(60)
