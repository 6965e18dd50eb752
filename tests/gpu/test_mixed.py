"""`eaas serve` with servers of GPUs and of CPUs in one pool: a request stays with those where it began."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs fastapi, for the gateway, and found none; make setup installs it")
import httpx

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from tests.gpu.device import DEVICE

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=20)]

TOKENS = 4
PROMPT = "abcd"
# The interpreter takes seconds for a step: one layer, and rows of the least width that the kernels carry.
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
}  # fmt: skip
WAIT_S = 280.0


@dataclass
class Answer:
    """One stream: the class that its header names, its text, and the fingerprints of its events."""

    numerics_class: str = ""
    text: str = ""
    prints: set[str] = field(default_factory=set)


def stream(url: str, on_token=lambda answer, count: None) -> Answer:  # type: ignore[no-untyped-def]
    """A greedy completion; `on_token` gets what has come so far."""
    answer, count = Answer(), 0
    body = {
        "model": "small", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as reply:
        assert reply.status_code == 200, reply.read()
        answer.numerics_class = reply.headers["x-eaas-numerics-class"]
        for line in reply.iter_lines():
            data = line.partition("data: ")[2]
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            answer.text += event["choices"][0]["text"]
            answer.prints.add(event["system_fingerprint"])
            count += 1
            on_token(answer, count)
    return answer


def crossings(url: str) -> float:
    """Choices that went on in another class, so far."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith("eaas_class_crossings_total{")))


def experts(url: str) -> dict[str, dict]:  # type: ignore[type-arg]
    """Expert servers by class; there is one of each here."""
    members = fetch_status(url)["members"]
    return {m["numerics_class"]: m for m in members if m["pool"] == "expert" and m["experts"]}


def both(url: str) -> dict[str, Answer]:
    """An answer of each class: two at once go to two workers."""
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: stream(url), range(2)))
    return {answer.numerics_class: answer for answer in answers}


def test_requests_keep_their_class_while_its_server_is_replaced_and_others_go_on_beside(
    tmp_path: Path,
) -> None:
    model = make_model("tiny", "qwen3_moe", tmp_path / "model", seed=3, dtype="bfloat16", overrides=SMALL)
    device = "interpreter" if DEVICE == "cpu" else "cuda:0"
    config = ClusterConfig(
        model=model,
        served_model_name="small",
        experts=2,
        attention=2,
        replicas=1,
        port=0,
        device=(device, "cpu"),
        deadline_s=250.0,
        kv_tokens=256,
        step_tokens=16,
        lease_s=10.0,
    )
    cluster = LocalCluster(config)
    try:
        cluster.start()
        url = cluster.url
        held = experts(url)
        kernels = next(name for name in held if name.startswith(device.partition(":")[0]))
        plain = next(name for name in held if name.startswith("cpu-"))
        # Each class holds the whole model.
        assert [member["experts"] for member in held.values()] == [SMALL["num_experts"]] * 2
        calm = both(url)
        assert set(calm) == {kernels, plain}
        assert calm[kernels].prints.isdisjoint(calm[plain].prints)
        beside: list[Answer] = []

        def kill(answer: Answer, count: int) -> None:
            if answer.numerics_class != kernels or count != 1 or beside:
                return
            os.kill(held[kernels]["pid"], signal.SIGKILL)
            end_s = time.monotonic() + 60
            while kernels in experts(url):
                assert time.monotonic() < end_s, "the router did not notice"
                time.sleep(0.05)
            # New ones begin where all experts are, and do not wait for the other class.
            beside.append(stream(url))

        with ThreadPoolExecutor(2) as threads:
            storm = list(threads.map(lambda _: stream(url, kill), range(2)))
        assert [answer.numerics_class for answer in beside] == [plain], f"{storm}, calm {calm}"
        for answer in (*storm, *beside):
            assert answer == calm[answer.numerics_class]
        assert {answer.numerics_class for answer in storm} == {kernels, plain}
        assert crossings(url) == 0
        end_s = time.monotonic() + 60
        while kernels not in experts(url):
            assert time.monotonic() < end_s, "nobody came in its place"
            time.sleep(0.05)
        assert held[kernels]["pid"] != experts(url)[kernels]["pid"]
    finally:
        cluster.stop()
