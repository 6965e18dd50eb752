"""An operator looks into a cluster that serves, by the API and by `eaas inspect`, while workers die; others may not."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.gateway.keys import Key, digest_of, new_key, write_keys
from eaas.model.loader import resolve_model
from eaas.ops.cli import app
from tests.e2e.test_taps import CLOSE, Peer, Records

pytestmark = pytest.mark.full(seconds=10)

SECRET = "zephyrous quixotry of the wharf"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def cluster(seen: Path) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        model=resolve_model("demo"),
        served_model_name="demo",
        experts=2,
        attention=2,
        port=0,
        cores=(0, 1),
        dtype="float32",
        inspect_folder=seen,
    )
    with LocalCluster(config) as running:
        yield running


def begin(cluster: LocalCluster, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{cluster.url}/admin/inspect", json=fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def end(cluster: LocalCluster) -> dict[str, Any]:
    reply = httpx.delete(f"{cluster.url}/admin/inspect", timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(cluster: LocalCluster, name: str = "", **fields: Any) -> dict[str, Any]:
    body = {"prompt": f"{SECRET} and more", "return_token_ids": True, "ignore_eos": True, **fields}
    headers = {"x-request-id": name} if name else {}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_worker_killed_meanwhile_changes_no_token_and_what_came_is_right(cluster: LocalCluster, seen: Path) -> None:
    calm = ask(cluster, max_tokens=1200, temperature=0)["choices"][0]
    state = begin(cluster, taps=["layers.*.residual", "final_norm", "logits"], ring_bytes=1 << 28)
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(ask(cluster, max_tokens=1200, temperature=0)))
    asking.start()
    asking.join(0.3)
    assert asking.is_alive(), "it was answered before its worker could be killed"
    # Whichever computes it is dead then.
    for name in [name for name in cluster.pids() if name.startswith("attention")]:
        os.kill(cluster.pids()[name], signal.SIGKILL)
        time.sleep(0.05)
    asking.join(60)
    # Now and then the files are complete, whoever died.
    after = ask(cluster, "of-a-worker-that-came-later", max_tokens=5)
    told = end(cluster)
    choice = found[0]["choices"][0]
    assert choice["token_ids"] == calm["token_ids"]
    assert any("connection was lost" in worker["fault"] for worker in told["workers"]), told
    last = [worker for worker in told["workers"] if not worker["fault"]]
    assert last and all(w["produced"] == w["delivered"] + w["dropped"] for w in last), told
    records, peer = Records(seen / state["id"]), Peer(resolve_model("demo"))
    for whole, name in ((choice, found[0]["id"]), (after["choices"][0], after["id"])):
        tokens = [*whole["prompt_token_ids"], *whole["token_ids"]][:-1]
        mine, theirs = records.of_answer(name), peer(tokens)
        assert len(mine["position"]), name
        assert (mine["token"] == np.array(tokens)[mine["position"]]).all()
        for tap in ("layers.0.residual", "layers.3.residual", "final_norm", "logits"):
            worst = np.abs(mine[tap] - theirs[tap][mine["position"]]).max()
            assert worst < 5 * CLOSE, f"{name} {tap}: {worst}"


def test_only_the_requests_that_were_named(cluster: LocalCluster, seen: Path) -> None:
    state = begin(cluster, taps=["embed"], requests=["wanted", "cmpl-by-body"])
    assert state["share"] == 0
    ids = [
        ask(cluster, "wanted", max_tokens=3)["id"],
        ask(cluster, "by-body", request_id="by-body", max_tokens=3)["id"],
    ]
    ask(cluster, "other", max_tokens=3)
    told = end(cluster)
    names = set(Records(seen / state["id"]).requests)
    assert len(names) == 2 and all(any(name.startswith(f"{id}-") for name in names) for id in ids)
    # What is seen of prompts is in the files alone.
    for path in cluster.state_dir.rglob("*.log"):
        assert SECRET not in path.read_text(errors="replace"), path
    assert told["dropped"] == 0 < told["delivered"]


def test_a_share_is_chosen_by_the_ids_of_responses(cluster: LocalCluster, seen: Path) -> None:
    state = begin(cluster, taps=["final_norm"], share=0.5)
    ids = {ask(cluster, max_tokens=1)["id"] for _ in range(40)}
    end(cluster)
    names = {name.rsplit("-", 2)[0] for name in Records(seen / state["id"]).requests}
    assert names < ids and 5 <= len(names) <= 35


def test_what_cannot_be_recorded_is_refused_in_words(cluster: LocalCluster) -> None:
    url = f"{cluster.url}/admin/inspect"
    for fields, said in (
        ({"taps": ["layers.99.residual"]}, "other layers"),
        ({"taps": []}, "taps"),
        ({"taps": ["embed"], "sink": "spans"}, "--trace-url"),
        ({"taps": ["embed"], "share": 2}, "share"),
    ):
        reply = httpx.post(url, json=fields)
        assert reply.status_code == 400 and said in reply.text, reply.text
    begin(cluster, taps=["embed"])
    assert httpx.post(url, json={"taps": ["embed"]}).status_code == 409
    end(cluster)
    assert httpx.post(url, json={"taps": ["embed"]}, headers={"origin": "http://evil"}).status_code == 403


def test_the_command_line_says_the_same(cluster: LocalCluster, seen: Path, tmp_path: Path) -> None:
    run = CliRunner()
    taps = ["--tap", "layers.*.residual", "--tap", "layers.*.gate", "--tap", "final_norm"]
    begun = run.invoke(app, ["inspect", "start", *taps, "--url", cluster.url])
    assert begun.exit_code == 0 and "under way" in begun.output, begun.output
    ask(cluster, max_tokens=8)
    assert run.invoke(app, ["inspect", "status", "--url", cluster.url]).exit_code == 0
    stopped = run.invoke(app, ["inspect", "stop", "--json", "--url", cluster.url])
    assert stopped.exit_code == 0 and '"under_way": false' in stopped.output
    folder = max(seen.iterdir(), key=lambda path: path.stat().st_mtime)
    page = tmp_path / "lens.html"
    made = run.invoke(app, ["inspect", "report", str(folder), "--model", "demo", "--out", str(page)])
    assert made.exit_code == 0, made.output
    assert "<html" in page.read_text()
    refused = run.invoke(app, ["inspect", "start", "--tap", "bogus", "--url", cluster.url])
    assert refused.exit_code == 1 and "is no tap" in refused.output


def test_what_was_recorded_is_read_back_as_the_page_says(
    cluster: LocalCluster, seen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow, found none: pip install 'eaas[arrow]'")
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    codes = re.findall("^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for sink, code in zip(("safetensors", "npy", "arrow"), codes, strict=True):
        state = begin(cluster, taps=["final_norm"], sink=sink)
        by_header = ask(cluster, "my-request", max_tokens=3)["id"]
        assert ask(cluster, request_id="my-request", max_tokens=3)["id"] == "cmpl-my-request"
        end(cluster)
        exec(code.replace("seen/inspect-1a2b3c4d", str(seen / state["id"])), {})
        names = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("cmpl-")}
        assert {name.rpartition("-")[0].rpartition("-")[0] for name in names} == {by_header, "cmpl-my-request"}, names
        assert all(re.fullmatch("cmpl-.*-[0-9a-f]{8}-0", name) for name in names), names


def one_of_each(**more: Any) -> ClusterConfig:
    """A cluster of the demonstration model with an expert server and an attention worker."""
    sizes: dict[str, Any] = {"experts": 1, "attention": 1, "replicas": 1, "port": 0, "cores": (0, 1)}
    return ClusterConfig(model=resolve_model("demo"), served_model_name="demo", **sizes, **more)


def test_of_two_gateways_at_one_address_that_is_asked_which_has_the_inspection(tmp_path: Path) -> None:
    config = one_of_each(gateways=2, inspect_folder=tmp_path)
    with LocalCluster(config) as running:

        def inspect(*verb: str) -> dict[str, Any]:
            said = CliRunner().invoke(app, ["inspect", *verb, "--url", running.url, "--json"])
            assert said.exit_code == 0, said.output
            return json.loads(said.output)

        end_s = time.monotonic() + 60
        # One after another, so that both say so.
        while [httpx.get(f"{running.url}/health").status_code for _ in range(12)] != [200] * 12:
            assert time.monotonic() < end_s, "both serve"
        before = ""
        # Of several, so that some come to each.
        for _ in range(8):
            id = inspect("start", "--tap", "embed")["id"]
            for verb in (["status"], ["status", id]):
                shown = inspect(*verb)
                assert (shown["id"], shown["under_way"]) == (id, True), f"{verb}, before it {before}"
            ended = inspect("stop") if before else inspect("stop", id)
            assert (ended["id"], ended["under_way"]) == (id, False)
            assert inspect("status")["id"] == id
            before = id
        nobody = CliRunner().invoke(app, ["inspect", "stop", "inspect-0", "--url", running.url])
        assert nobody.exit_code == 1 and "no inspection inspect-0" in nobody.output


def test_it_is_off_by_default_and_for_operators_alone(tmp_path: Path) -> None:
    keys, user, operator = tmp_path / "keys", new_key(), new_key()
    entries = [
        Key(name="user", sha256=digest_of(user)), Key(name="boss", sha256=digest_of(operator), operator=True)
    ]  # fmt: skip
    write_keys(keys, entries)
    config = one_of_each(keys_file=keys)
    with LocalCluster(config) as running:
        url = f"{running.url}/admin/inspect"
        for method in ("POST", "GET", "DELETE"):
            for key, status in (("", 401), (user, 403)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                reply = httpx.request(method, url, headers=headers)
                assert reply.status_code == status, (method, reply.text)
        bearer = {"authorization": f"Bearer {operator}"}
        reply = httpx.post(url, json={"taps": ["embed"]}, headers=bearer)
        assert reply.status_code == 400 and "--inspect-folder" in reply.text
