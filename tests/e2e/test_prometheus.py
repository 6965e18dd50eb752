"""Prometheus on a live cluster: it reads both pages, and the alert for lost experts fires and clears."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.request
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from tests.deploy.test_dashboard import EXPRESSIONS
from tests.e2e.waiting import wait_for
from tests.prometheus import Prometheus, prometheus

pytestmark = [
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus, found none on PATH"),
    pytest.mark.full(seconds=30),
]

LOST = "EaasExpertsLost"


def complete(cluster: LocalCluster) -> str:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 32, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=90) as reply:
        return json.load(reply)["choices"][0]["text"]


def reached(watch: Prometheus, what: str, expression: str, value: float, cluster: LocalCluster) -> None:
    wait_for(f"{what}: {expression} = {value}\n{watch.words()}", lambda: watch.value(expression) == value, cluster)


def test_the_alert_for_lost_experts_fires_and_clears_and_so_does_that_for_failing_starts(
    tiny: Path, tmp_path: Path
) -> None:
    """Every server dies, and none can start: the checkpoint is away. Then it is there again."""
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(tiny, model)
    config = ClusterConfig(
        model=model, served_model_name="tiny", experts=2, replicas=2, port=0, cores=(0, 1), admin_port=0, deadline_s=90
    )  # fmt: skip
    with LocalCluster(config) as cluster:
        targets = {
            "eaas-router": cluster.admin_addresses[0],
            "eaas-gateway": cluster.url.removeprefix("http://"),
        }
        (tmp_path / "prometheus").mkdir()
        with prometheus(tmp_path / "prometheus", targets) as watch:
            reached(watch, "both pages are read", "sum(up)", 2, cluster)
            calm = complete(cluster)
            reached(watch, "what was generated", "vllm:generation_tokens_total", 32, cluster)
            reached(watch, "nothing is lost", "eaas_experts_lost", 0, cluster)
            for title, expression in EXPRESSIONS:
                asked = expression.replace("$__rate_interval", "5s")
                assert watch.ask("query", query=asked)["resultType"] == "vector", title
            # One that was looked for before the router's first page clears with the next look.
            wait_for("nothing fires in calm", lambda: not watch.firing(), cluster)

            model.rename(away)
            for name, pid in cluster.pids().items():
                if name.startswith("expert/"):
                    os.kill(pid, signal.SIGKILL)
            wait_for(f"{LOST} fires {watch.words()}", lambda: LOST in watch.firing(), cluster)
            lost = watch.value("eaas_experts_lost")
            shape = json.loads((tiny / "config.json").read_text())
            assert lost == shape["num_hidden_layers"] * shape["num_experts"]
            texts: list[str] = []
            client = threading.Thread(target=lambda: texts.append(complete(cluster)))
            client.start()
            wait_for("the alert for starts", lambda: "EaasStartsFail" in watch.firing(), cluster)
            assert LOST in watch.firing()

            away.rename(model)
            wait_for(f"{LOST} clears", lambda: LOST not in watch.firing(), cluster)
            reached(watch, "every copy is there again", "eaas_experts_below_wanted", 0, cluster)
            wait_for("no alert fires for starts", lambda: "EaasStartsFail" not in watch.firing(), cluster)
            client.join(60)
            assert texts == [calm], "a request that came while experts were lost"
            evicted = 'eaas_evictions_total{pool="expert", reason="ended"}'
            reached(watch, "two servers were ended", evicted, 2, cluster)
