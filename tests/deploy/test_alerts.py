"""The alert rules: right by promtool; each fires on what it is for alone, and has its section of the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented import ROOT, labels_in, names_in, table
from tests.prometheus import RULES

RUNBOOK = ROOT / "deploy" / "RUNBOOK.md"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
ROUTER = 'job="eaas-router", instance="r:9100"'
ON_ROUTER = {"job": "eaas-router", "instance": "r:9100"}

# For each alert: series when it should fire, series when it should not, minutes until it fires, labels it then has.
# Values a minute apart: 1x20 is 20 more of 1, 0+5x20 rises by 5.
Story = tuple[dict[str, str], dict[str, str], int, dict[str, str]]
STORIES: dict[str, Story] = {
    "EaasRequestsFail": (
        {
            'eaas_requests_total{status="200"}': "0+98x30",
            'eaas_requests_total{status="503"}': "0+2x30",
        },
        {'eaas_requests_total{status="200"}': "0+98x30", 'eaas_requests_total{status="404"}': "0+20x30"},
        15,
        {},
    ),
    "EaasRequestsRefused": (
        {'eaas_refused_total{reason="tokens"}': "0+20x30", "eaas_requests_total": "0+100x30"},
        {'eaas_refused_total{reason="tokens"}': "0+5x30", "eaas_requests_total": "0+100x30"},
        20,
        {},
    ),
    "EaasGatewayDown": (
        {'up{job="eaas-gateway", instance="g:8000"}': "1 0x20"},
        {'up{job="eaas-gateway", instance="g:8000"}': "1x20", 'up{job="node", instance="n"}': "0x20"},
        5,
        {"job": "eaas-gateway", "instance": "g:8000"},
    ),
    "EaasFirstTokenSlow": (
        {
            'eaas_ttft_seconds_bucket{le="5.0"}': "0+90x40",
            'eaas_ttft_seconds_bucket{le="10.0"}': "0+100x40",
            'eaas_ttft_seconds_bucket{le="+Inf"}': "0+100x40",
        },
        {
            'eaas_ttft_seconds_bucket{le="2.0"}': "0+100x40",
            'eaas_ttft_seconds_bucket{le="+Inf"}': "0+100x40",
        },
        30,
        {},
    ),
    "EaasTokensSlow": (
        {
            'eaas_itl_seconds_bucket{le="0.5"}': "0+90x40",
            'eaas_itl_seconds_bucket{le="1.0"}': "0+100x40",
            'eaas_itl_seconds_bucket{le="+Inf"}': "0+100x40",
        },
        {'eaas_itl_seconds_bucket{le="0.1"}': "0+100x40", 'eaas_itl_seconds_bucket{le="+Inf"}': "0+100x40"},
        30,
        {},
    ),
    "EaasExpertsDropped": (
        {"eaas_dropped_experts_total": "0x5 1x20"},
        {"eaas_dropped_experts_total": "7x20"},
        8,
        {},
    ),
    "EaasClassCrossed": (
        {"eaas_class_crossings_total": "0x5 1x20"},
        {"eaas_class_crossings_total": "7x20"},
        8,
        {},
    ),
    "EaasExpertsLost": (
        {f"eaas_experts_lost{{{ROUTER}}}": "0 3x20", f'eaas_pool_wanted{{pool="expert", {ROUTER}}}': "2x20"},
        # A pool that was scaled to nothing on purpose.
        {f"eaas_experts_lost{{{ROUTER}}}": "0 3x20", f'eaas_pool_wanted{{pool="expert", {ROUTER}}}': "0x20"},
        5,
        ON_ROUTER,
    ),
    "EaasExpertsBelowWanted": (
        {
            f"eaas_experts_below_wanted{{{ROUTER}}}": "9x30",
            f'eaas_pool_wanted{{pool="expert", {ROUTER}}}': "2x30",
        },
        {
            f"eaas_experts_below_wanted{{{ROUTER}}}": "9x3 0x3 9x3 0x20",
            f'eaas_pool_wanted{{pool="expert", {ROUTER}}}': "2x30",
        },
        12,
        ON_ROUTER,
    ),
    "EaasMovesStuck": (
        {f"eaas_moves_in_flight{{{ROUTER}}}": "2x40"},
        {f"eaas_moves_in_flight{{{ROUTER}}}": "2x9 0 2x9 0 2x9 0"},
        25,
        ON_ROUTER,
    ),
    "EaasUnbalanced": (
        {f"eaas_balancedness{{{ROUTER}}}": "0.3x60", f'eaas_pool_live{{pool="expert", {ROUTER}}}': "4x60"},
        {f"eaas_balancedness{{{ROUTER}}}": "0.9x60", f'eaas_pool_live{{pool="expert", {ROUTER}}}': "4x60"},
        45,
        ON_ROUTER,
    ),
    "EaasCorruptReplies": (
        {'eaas_link_corrupt_replies_total{server="expert/1", worker="attention/1"}': "0x5 3x20"},
        {'eaas_link_corrupt_replies_total{server="expert/1", worker="attention/1"}': "3x20"},
        8,
        {"server": "expert/1"},
    ),
    "EaasLinkSlow": (
        {'eaas_link_slow{server="expert/1", worker="attention/1", part="link"}': "1x20"},
        {'eaas_link_slow{server="expert/1", worker="attention/1", part="link"}': "1x3 _x20"},
        12,
        {"server": "expert/1", "part": "link"},
    ),
    "EaasRailDown": (
        {'eaas_rail_live{member="attention/1", peer="expert/1", rail="mlx5_0"}': "1 0x20"},
        {'eaas_rail_live{member="attention/1", peer="expert/1", rail="mlx5_0"}': "1x20"},
        5,
        {"member": "attention/1", "peer": "expert/1", "rail": "mlx5_0"},
    ),
    "EaasEvictions": (
        {'eaas_evictions_total{pool="expert", reason="ended"}': "0x5 1 2 3 4x20"},
        {'eaas_evictions_total{pool="expert", reason="ended"}': "0x5 1x20"},
        11,
        {"pool": "expert", "reason": "ended"},
    ),
    "EaasPoolShort": (
        {
            f'eaas_pool_live{{pool="expert", {ROUTER}}}': "1x20",
            f'eaas_pool_wanted{{pool="expert", {ROUTER}}}': "2x20",
        },
        {
            f'eaas_pool_live{{pool="expert", {ROUTER}}}': "2x20",
            f'eaas_pool_wanted{{pool="expert", {ROUTER}}}': "2x20",
        },
        12,
        {"pool": "expert", **ON_ROUTER},
    ),
    "EaasStartsFail": (
        {f'eaas_pool_failed_starts{{pool="expert", {ROUTER}}}': "3x20"},
        {f'eaas_pool_failed_starts{{pool="expert", {ROUTER}}}': "2x20"},
        5,
        {"pool": "expert", **ON_ROUTER},
    ),
    "EaasNoAttentionWorker": (
        {
            'eaas_attention_workers{model="a"}': "1x20",
            'eaas_attention_workers{model="b"}': "1 0x20",
            'eaas_pool_wanted{pool="attention"}': "1x20",
            'eaas_pool_wanted{pool="attention:b"}': "1x20",
        },
        {
            'eaas_attention_workers{model="a"}': "1 0x20",
            'eaas_attention_workers{model="b"}': "1 0x20",
            'eaas_attention_workers{model="c"}': "1x20",
            'eaas_pool_wanted{pool="attention"}': "0x20",
            'eaas_pool_wanted{pool="attention:b"}': "0x20",
            'eaas_pool_wanted{pool="attention:c"}': "1x20",
        },
        5,
        {"model": "b"},
    ),
    "EaasQueueGrows": (
        {f'eaas_pool_load{{pool="attention", signal="queue_s", {ROUTER}}}': "6x20"},
        {f'eaas_pool_load{{pool="attention", signal="queue_s", {ROUTER}}}': "6 6 0 6 6 0 6 6 0 6 6 0"},
        10,
        {"pool": "attention", "signal": "queue_s", **ON_ROUTER},
    ),
    "EaasKvCacheFull": (
        {'eaas_worker_kv_use{worker="attention/1"}': "0.99x30"},
        {'eaas_worker_kv_use{worker="attention/1"}': "0.9x30"},
        15,
        {"worker": "attention/1"},
    ),
    "EaasRouterDown": (
        {'eaas_router_up{instance="a"}': "0x20", 'eaas_router_up{instance="b"}': "0x20"},
        {'eaas_router_up{instance="a"}': "0x20", 'eaas_router_up{instance="b"}': "1x20"},
        5,
        {},
    ),
    "EaasRouterFails": (
        {"eaas_router_failed_ticks_total": "0x5 2x20"},
        {"eaas_router_failed_ticks_total": "2x20"},
        7,
        {},
    ),
    "EaasFaultsInjected": ({"eaas_faults_active": "1x30"}, {"eaas_faults_active": "1x5 0x30"}, 15, {}),
}


# Of the first model, whose pool does not bear its name.
FIRST_MODEL: Story = (
    {
        'eaas_attention_workers{model="a", instance="g1"}': "1 0x20",
        'eaas_attention_workers{model="a", instance="g2"}': "1 0x20",
        'eaas_attention_workers{model="b", instance="g1"}': "0x20",
        'eaas_pool_wanted{pool="attention"}': "1x20",
        'eaas_pool_wanted{pool="attention:b"}': "0x20",
    },
    {
        'eaas_attention_workers{model="a", instance="g1"}': "1 0x20",
        'eaas_attention_workers{model="a", instance="g2"}': "1x20",
        'eaas_pool_wanted{pool="attention"}': "1x20",
    },
    5,
    {"model": "a"},
)


def promtool(*arguments: object) -> str:
    """What it says; it must be content."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian: prometheus), found none")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checks_of(story: Story, alert: str) -> list[dict[str, Any]]:
    firing, quiet, minutes, labels = story
    rule = ALERTS[alert]
    expected = {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": rule["annotations"]}
    return [
        {
            "name": f"{alert} {name}",
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": alerts}],
        }
        for name, series, alerts in (("fires", firing, [expected]), ("is quiet", quiet, []))
    ]


def test_the_rules_are_well_formed() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", RULES)


@pytest.mark.full(seconds=5)
def test_each_alert_fires_on_what_it_is_for_and_is_quiet_without(tmp_path: Path) -> None:
    assert STORIES.keys() == ALERTS.keys()
    stories = [*STORIES.items(), ("EaasNoAttentionWorker", FIRST_MODEL)]
    tests = [test for alert, story in stories for test in checks_of(story, alert)]
    told = {"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}
    path = tmp_path / "stories.yaml"
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    assert "SUCCESS" in promtool("test", "rules", path)


def test_a_rule_that_is_wrong_is_found(tmp_path: Path) -> None:
    """The judge can say no: with the condition of one rule turned round its stories fail."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian: prometheus), found none")
    rules = tmp_path / "rules.yaml"
    text = RULES.read_text()
    assert text.count("eaas_experts_lost > 0") == 1
    rules.write_text(text.replace("eaas_experts_lost > 0", "eaas_experts_lost < 0"))
    told = {
        "rule_files": [str(rules)],
        "evaluation_interval": "15s",
        "tests": checks_of(STORIES["EaasExpertsLost"], "EaasExpertsLost"),
    }
    path = tmp_path / "stories.yaml"
    path.write_text(yaml.safe_dump(told))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0, done.stdout


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_reads_what_is_emitted(alert: str) -> None:
    expression = ALERTS[alert]["expr"]
    documented = {series: row for row in table() for series in row.series}
    names = names_in(expression)
    assert names and names <= documented.keys() | {"up"}, names - documented.keys()
    labels = {label for name in names & documented.keys() for label in documented[name].labels}
    assert labels_in(expression) <= labels | {"le", "job", "instance"}


def test_every_alert_has_its_section_of_the_runbook_and_no_section_is_left_over() -> None:
    sections = re.split(r"^## ", RUNBOOK.read_text(), flags=re.M)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert sorted(titles) == sorted(ALERTS)
    for title, section in zip(titles, sections, strict=True):
        for part in ("**Meaning.**", "**First look.**", "**Action.**"):
            assert section.count(part) == 1, f"{title} has no {part}"
    anchors = {title.lower() for title in titles}
    links = re.findall(r"\(#(\w+)\)", RUNBOOK.read_text())
    assert set(links) <= anchors, set(links) - anchors
    for alert, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"deploy/RUNBOOK.md#{alert.lower()}"


def test_the_runbook_names_metrics_that_are_emitted() -> None:
    series = {name for row in table() for name in (row.name, *row.series)}
    named = set(re.findall(r"\b(?:eaas_|vllm:)\w+", RUNBOOK.read_text()))
    # Not metrics: an option of requests.
    assert named - series == {"eaas_drop_lost_experts"}
