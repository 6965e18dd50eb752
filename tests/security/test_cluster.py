"""A whole cluster with TLS between all its processes and in front: it serves, survives a kill, and is operated."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.gateway.keys import Key, digest_of, new_key, write_keys
from eaas.ops.credentials import make_certs
from eaas.pool import ConnectFailed, connect
from experts.model import ExpertShape
from tests.eaas.gateway_world import eventually

pytestmark = pytest.mark.alone

PROMPT = "a prompt that no log may hold"


class Secure:
    """A cluster as `eaas serve --tls-dir ... --tls-cert ... --keys-file ...` starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = folder / "tiny"
        make_model("tiny", "qwen3_moe", model, seed=1, dtype="bfloat16")
        make_certs(folder / "certs", hosts=["127.0.0.1"])
        self.key = new_key()
        write_keys(folder / "keys.json", [Key(name="alice", sha256=digest_of(self.key), operator=True)])
        gateway = folder / "certs" / "gateway"
        self.cluster = LocalCluster(
            ClusterConfig(
                model=model,
                served_model_name="tiny",
                experts=2,
                replicas=2,
                port=0,
                cores=(0, 1),
                tls_cert=gateway / "cert.pem",
                tls_key=gateway / "key.pem",
                keys_file=folder / "keys.json",
                tls_dir=folder / "certs",
                log_format="json",
            )
        )
        context = ssl.create_default_context(cafile=str(folder / "certs" / "ca" / "ca.pem"))
        self.http = httpx.Client(verify=context, timeout=60)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.cluster.url}/v1", api_key=self.key, http_client=self.http, max_retries=0)

    def status(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.key}"}
        return self.http.get(f"{self.cluster.url}/status", headers=headers).json()

    def serving(self) -> set[int]:
        """Pids of the expert servers that serve."""
        return {m["pid"] for m in self.status()["members"] if m["pool"] == "expert" and m["state"] == "serving"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "EAAS_API_KEY": self.key,
            "SSL_CERT_FILE": str(self.folder / "certs" / "ca" / "ca.pem"),
        }
        command = [sys.executable, "-m", "eaas.ops.cli", *arguments, "--url", self.cluster.url]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    secure = Secure(tmp_path_factory.mktemp("secure"))
    with secure.cluster:
        yield secure


def stream(secure: Secure, tokens: int, at: int = -1, act: Any = None) -> str:
    texts = []
    events = secure.client().completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for number, event in enumerate(events):
        texts.append(event.choices[0].text)
        if number == at:
            act()
    return "".join(texts)


def test_a_killed_expert_server_is_replaced_and_no_token_changes(secure: Secure) -> None:
    eventually(lambda: len(secure.serving()) == 2, "both expert servers serve")
    calm = stream(secure, 64)
    struck = next(pid for name, pid in secure.cluster.pids().items() if name.startswith("expert/"))
    assert stream(secure, 64, 10, lambda: os.kill(struck, signal.SIGKILL)) == calm
    eventually(lambda: struck not in secure.serving() and len(secure.serving()) == 2, "the replacement serves")
    assert stream(secure, 64) == calm


def test_an_operator_with_its_certificate_scales_and_without_it_does_not(secure: Secure) -> None:
    certs = str(secure.folder / "certs")
    scaled = secure.run("scale", "expert", "3", "--wait-s", "60", "--tls-dir", certs)
    assert scaled.returncode == 0, scaled.stderr
    # It ends when the third has joined, before that serves.
    eventually(lambda: len(secure.serving()) == 3, "the third serves")
    shown = secure.run("status", "--json")
    assert json.loads(shown.stdout)["model"] == "tiny", shown.stderr
    # The launcher's certificate in the operator's place.
    wrong = secure.folder / "wrong"
    wrong.mkdir()
    (wrong / "operator").symlink_to(secure.folder / "certs" / "launcher")
    refused = secure.run("scale", "expert", "1", "--tls-dir", str(wrong))
    assert refused.returncode == 1 and "cert.pem" in refused.stderr, refused.stderr
    eventually(lambda: len(secure.serving()) == 3, "all three, none of which may be suspect for long")


def test_a_model_elsewhere_has_its_experts_computed_with_a_clients_certificate_and_no_other(
    secure: Secure,
) -> None:
    certs, router = secure.folder / "certs", secure.cluster.router_address
    for role in ("operator", "gateway"):
        with pytest.raises(ConnectFailed, match="of the role client"):
            connect(router, tls=certs / role, start_s=2.0)
    with connect(router, tls=certs / "client") as pool:
        assert pool.shape == ExpertShape.from_config(json.loads((secure.folder / "tiny" / "config.json").read_text()))
        rows = np.ones((3, pool.shape.hidden), np.float32)
        ids = np.tile(np.arange(pool.shape.top_k, dtype=np.uint16), (3, 1))
        answer = pool.apply(0, rows, ids, np.ones(ids.shape, np.float32))
    assert answer.shape == rows.shape and np.isfinite(answer).all() and answer.any()


def test_no_log_of_any_process_holds_the_prompt_or_the_key(secure: Secure) -> None:
    stream(secure, 8)
    logs = list(secure.cluster.state_dir.glob("*.log"))
    assert {path.name.partition(".")[0] for path in logs} == {"router", "expert", "attention", "gateway"}
    for path in logs:
        text = path.read_text()
        assert PROMPT not in text and secure.key not in text and "PRIVATE KEY" not in text, path.name
        for line in text.splitlines():
            assert {"time", "level", "event"} <= json.loads(line).keys(), line
