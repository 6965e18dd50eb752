"""The Grafana dashboard: every expression is PromQL, and names what is emitted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.documented import ROOT, labels_in, names_in, table

DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [(each["name"], each["expr"]) for each in DASHBOARD["annotations"]["list"]]
SERIES = {series: row for row in table() for series in row.series}


def test_every_expression_names_metrics_and_labels_that_are_emitted() -> None:
    for title, expression in EXPRESSIONS:
        names = names_in(expression)
        assert names and names <= SERIES.keys(), (title, names - SERIES.keys())
        labels = {label for name in names for label in SERIES[name].labels} | {"le"}
        assert labels_in(expression) <= labels, (title, expression)


def test_every_legend_names_labels_that_its_expression_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {
                label.strip()
                for group in re.findall(r"\bby\s*\(([^)]*)\)", target["expr"])
                for label in group.split(",")
            }
            assert wanted <= kept, (panel["title"], wanted - kept)


def test_every_expression_is_promql(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian: prometheus), found none")
    rules = [
        {"record": f"dashboard:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, (_, expression) in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_their_own_ids_and_places() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_a_name_that_nobody_emits_would_be_found() -> None:
    assert names_in('sum by (pool) (rate(eaas_gone_total{pool="a"}[5m])) > 0 and on () up') == {
        "eaas_gone_total",
        "up",
    }
    assert labels_in('sum by (pool, reason) (a{job="x",status=~"5.."})') == {
        "pool",
        "reason",
        "job",
        "status",
    }
