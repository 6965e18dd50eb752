"""What docs/metrics.md promises, against the pages of a live cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from eaas.cluster.local import LocalCluster
from tests.documented import table
from tests.e2e.waiting import wait_for

Page = dict[str, Metric]
PROMPT, TOKENS = "a prompt of some length, so that two blocks are filled", 24


def page_of(address: str) -> Page:
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


def pages(cluster: LocalCluster) -> dict[str, Page]:
    return {"gateway": page_of(cluster.url), "router": page_of(f"http://{cluster.admin_addresses[0]}")}


def total(page: Page, name: str, **labels: str) -> float:
    """Sum of the samples with these labels."""
    return sum(
        sample.value for sample in page[name].samples if sample.name == name and labels.items() <= sample.labels.items()
    )


def complete(cluster: LocalCluster, **more: object) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()


def test_the_table_and_a_live_scrape_agree(cluster: LocalCluster) -> None:
    complete(cluster)
    wait_for(
        "counters of an expert server",
        lambda: total(pages(cluster)["router"], "eaas_server_rows_total") > 0,
        cluster,
    )
    documented = {(row.page, row.name): row for row in table()}
    found = {(where, name): family for where, page in pages(cluster).items() for name, family in page.items()}
    assert found.keys() - documented.keys() == set(), "not in docs/metrics.md"
    assert documented.keys() - found.keys() == set(), "documented, and not on the page"
    for key, family in found.items():
        row = documented[key]
        assert (row.kind, row.meaning) == (family.type, family.documentation), key
        for sample in family.samples:
            assert tuple(sorted(sample.labels.keys() - {"le"})) == row.labels, (key, sample)


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, found none on PATH")
def test_promtool_finds_nothing_wrong_with_either_page(cluster: LocalCluster) -> None:
    for address in (cluster.url, f"http://{cluster.admin_addresses[0]}"):
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as reply:
            page = reply.read()
        said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True).stderr.decode()
        # Names of vLLM are what they are.
        assert [line for line in said.splitlines() if not line.startswith("vllm:")] == []


def test_what_vllm_counts_is_counted_alike(cluster: LocalCluster) -> None:
    before = pages(cluster)["gateway"]
    complete(cluster, n=2)
    complete(cluster, stop=["\x00"], max_tokens=3)
    after = pages(cluster)["gateway"]

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    served = {"model_name": "tiny"}
    assert grown("vllm:generation_tokens_total", **served) == 2 * TOKENS + 3
    assert grown("vllm:prompt_tokens_total", **served) > 0
    assert grown("vllm:request_success_total", finished_reason="length", **served) == 3
    assert grown("vllm:request_success_total", finished_reason="error", **served) == 0
    for name, count in (
        ("time_to_first_token_seconds", 3),
        ("inter_token_latency_seconds", 2 * (TOKENS - 1) + 2),
        ("request_generation_tokens", 3),
        ("request_time_per_output_token_seconds", 3),
        ("e2e_request_latency_seconds", 2),
    ):
        samples = [
            sum(s.value for s in page[f"vllm:{name}"].samples if s.name.endswith("_count")) for page in (before, after)
        ]
        assert samples[1] - samples[0] == count, name
    (info,) = after["vllm:cache_config_info"].samples
    assert info.labels["block_size"] == "16"
    assert int(info.labels["num_gpu_blocks"]) == cluster.config.kv_tokens // 16
    # The prompt was there before: what is looked up is found, but for its last block.
    wait_for(
        "found tokens of a prompt",
        lambda: (
            total(pages(cluster)["gateway"], "vllm:prefix_cache_hits_total")
            > total(before, "vllm:prefix_cache_hits_total")
        ),
        cluster,
    )


def test_servers_links_and_failovers_are_counted_through_a_kill(cluster: LocalCluster) -> None:
    def router() -> Page:
        return pages(cluster)["router"]

    experts = cluster.config.experts
    (victim, *_) = sorted(name for name in cluster.pids() if name.startswith("expert"))
    complete(cluster)
    # A worker tells its rows when it renews its lease.
    wait_for(
        "rows sent to the victim",
        lambda: total(router(), "eaas_link_rows_total", server=victim) > 0,
        cluster,
    )
    before = router()
    rows = total(before, "eaas_link_rows_total", server=victim)
    os.kill(cluster.pids()[victim], signal.SIGKILL)
    complete(cluster)

    def evicted(page: Page) -> float:
        return total(page, "eaas_evictions_total", pool="expert", reason="ended")

    def states(page: Page) -> dict[str, str]:
        return {s.labels["member"]: s.labels["state"] for s in page["eaas_member_state"].samples}

    found: list[Page] = []

    def mended() -> bool:
        # On one page: on a busy host a member may be suspect for a moment, or a copy be moved.
        (page,) = found[:] = [router()]
        replaced = evicted(page) == evicted(before) + 1 and victim not in states(page)
        whole = total(page, "eaas_replicas_min") == 2 and not total(page, "eaas_moves_in_flight")
        serving = list(states(page).values()).count("serving") == experts + 2
        told = total(page, "eaas_link_rows_total") > total(before, "eaas_link_rows_total")
        return replaced and whole and serving and told

    wait_for("a replacement with its experts, and the links as they are now", mended, cluster)
    (after,) = found
    assert total(after, "eaas_members", pool="expert", state="serving") == experts
    assert total(after, "eaas_experts_lost") == total(after, "eaas_experts_below_wanted") == 0
    assert total(after, "eaas_migrations_total") >= total(before, "eaas_migrations_total")
    assert total(after, "eaas_copies_loaded_total") > total(before, "eaas_copies_loaded_total")
    assert 0 < total(after, "eaas_balancedness") <= 1
    # What was done with the dead server is still told, by the worker that did it; its own counters ended with it.
    assert total(after, "eaas_link_rows_total", server=victim) >= rows > 0
    assert not [s for s in after["eaas_server_rows_total"].samples if s.labels["server"] == victim]
    shape = json.loads((cluster.config.model / "config.json").read_text())
    pairs = shape["num_hidden_layers"] * shape["num_experts"]
    assert total(after, "eaas_server_replicas", state="serving") == 2 * pairs
    assert len(after["eaas_server_layer_load"].samples) == experts * shape["num_hidden_layers"]
