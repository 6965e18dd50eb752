"""Traces of a live cluster, as a receiver of OTLP gets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.spans import EVERY
from tests.e2e.waiting import wait_for
from tests.otlp import Receiver, receiver

pytestmark = pytest.mark.full(seconds=6)

TOKENS = 3 * EVERY
CLIENT_SPAN = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def spans() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tiny: Path, spans: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two attention workers, and no request traced of whose client does not ask for it."""
    config = ClusterConfig(
        model=tiny, served_model_name="tiny", experts=1, replicas=1, attention=2, port=0, cores=(0, 1),
        trace_url=spans.url, trace_share=0.0, inspect_folder=tmp_path_factory.mktemp("seen"),
    )  # fmt: skip
    with LocalCluster(config) as running:
        wait_for("both workers", lambda: sum(n.startswith("attention") for n in running.pids()) == 2, running)
        yield running


def ask(cluster: LocalCluster, traceparent: str = "", **more: object) -> bytes:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True, **more}
    headers = {"content-type": "application/json", "x-request-id": "mine"}
    if traceparent:
        headers["traceparent"] = traceparent
    request = urllib.request.Request(f"{cluster.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read()


def replays(cluster: LocalCluster) -> float:
    """Choices that went on at another worker, so far."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("eaas_replays_total{"))


def ask_unmoved(cluster: LocalCluster, first: int, **more: object) -> int:
    """Ask, traced under this number or one after it, until no choice was moved: on a busy host one is now and then, for
    its worker's silence, and has a span at each."""
    for number in range(first, first + 50):
        before = replays(cluster)
        ask(cluster, sampled(number), **more)
        if replays(cluster) == before:
            return number
    pytest.fail("each of 50 choices was moved")


def trace_of(number: int) -> str:
    return f"{number:032x}"


def sampled(number: int) -> str:
    return f"00-{trace_of(number)}-{CLIENT_SPAN}-01"


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_goes_from_the_client_through_gateway_and_worker_to_some_of_its_steps(
    cluster: LocalCluster, spans: Receiver, stream: bool
) -> None:
    trace = trace_of(ask_unmoved(cluster, 100 * (1 + stream), stream=stream))
    wait_for(
        "both spans",
        lambda: bool(spans.named("attention", trace) and spans.named("POST /v1/completions", trace)),
    )
    (request,) = spans.named("POST /v1/completions", trace)
    assert (request.service, request.parent) == ("eaas-gateway", CLIENT_SPAN)
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["eaas.request_id"] == "mine"
    assert request.attributes["gen_ai.request.model"] == "tiny"
    (choice,) = spans.named("attention", trace)
    assert (choice.service, choice.parent) == ("eaas-attention", request.id)
    assert choice.instance.startswith("attention/")
    assert choice.attributes["eaas.output_tokens"] == TOKENS
    assert choice.attributes["eaas.attempt"] == 1
    assert choice.events == ("first_token",)
    assert not choice.failed and not request.failed
    wait_for("steps", lambda: bool(spans.named("step", trace)))
    steps = spans.named("step", trace)
    assert {step.parent for step in steps} == {choice.id}
    # The first, and one in EVERY of those that follow: nothing for each token, nor for an expert call.
    assert 1 + TOKENS // EVERY - 1 <= len(steps) <= 2 + TOKENS // EVERY
    # One clock: all are processes of this host.
    assert request.began_ns <= choice.began_ns <= steps[0].ended_ns <= steps[-1].ended_ns
    assert choice.ended_ns <= request.ended_ns + 5_000_000_000
    assert {span.name for span in spans.spans if span.trace == trace} == {
        "POST /v1/completions",
        "attention",
        "step",
    }


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{trace_of(77)}-{CLIENT_SPAN}-00",
        "nonsense",
        f"00-{'0' * 32}-{CLIENT_SPAN}-01",
        "00-" + "f" * 4000,
    ],
)
def test_what_nobody_asked_to_trace_is_not_traced(cluster: LocalCluster, spans: Receiver, header: str) -> None:
    before = len(spans.spans)
    ask(cluster, header, max_tokens=4)
    ask(cluster, sampled(9), max_tokens=4)
    wait_for("the span that was asked for", lambda: len(spans.named("attention", trace_of(9))) > 0)
    assert {span.trace for span in spans.spans[before:]} == {trace_of(9)}
    spans.spans = [span for span in spans.spans if span.trace != trace_of(9)]


def test_a_replay_is_a_second_span_in_the_same_trace(cluster: LocalCluster, spans: Receiver) -> None:
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(
            {"model": "tiny", "prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        ).encode(),
        {"content-type": "application/json", "traceparent": sampled(5)},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.readline()
        with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=60) as page:
            busy = [line for line in page.read().decode().splitlines() if line.startswith("eaas_worker_outstanding")]
        (worker,) = [line.split('worker="')[1].split('"')[0] for line in busy if float(line.rpartition(" ")[2]) > 0]
        os.kill(cluster.pids()[worker], signal.SIGKILL)
        assert reply.read().endswith(b"data: [DONE]\n\n")
    wait_for("the second attempt", lambda: bool(spans.named("attention", trace_of(5))))
    (second,) = spans.named("attention", trace_of(5))
    assert second.instance != worker
    assert second.attributes["eaas.attempt"] == 2
    assert second.attributes["eaas.replayed_tokens"] + second.attributes["eaas.output_tokens"] == 1000
    assert second.attributes["eaas.replayed_tokens"] > 0


def test_an_inspection_adds_statistics_to_what_is_traced(cluster: LocalCluster, spans: Receiver) -> None:
    url = f"{cluster.url}/admin/inspect"
    order = {"taps": ["layers.*.residual", "logits"], "statistics": True, "sink": "spans"}
    assert httpx.post(url, json=order).status_code == 200
    trace = trace_of(ask_unmoved(cluster, 300, max_tokens=6))
    ask(cluster, max_tokens=6)
    told = httpx.delete(url, timeout=60).json()
    assert told["produced"] == told["delivered"] > 0
    wait_for("the choice", lambda: bool(spans.named("attention", trace)))
    (choice,) = spans.named("attention", trace)
    wait_for(
        "all steps",
        lambda: (
            sum(s.attributes["eaas.rows"] for s in spans.named("activations", trace))
            == choice.attributes["eaas.prompt_tokens"] + 5
        ),
    )
    for span in spans.named("activations", trace):
        assert span.parent == choice.id
        assert span.events == (*(f"layers.{layer}.residual" for layer in range(4)), "logits")


def test_a_request_that_fails_has_a_span_too(cluster: LocalCluster, spans: Receiver) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(cluster, sampled(6), max_tokens=-1)
    wait_for("the span", lambda: bool(spans.named("POST /v1/completions", trace_of(6))))
    (request,) = spans.named("POST /v1/completions", trace_of(6))
    assert request.attributes["http.response.status_code"] == refused.value.code == 400
    assert not spans.named("attention", trace_of(6))


def test_a_receiver_that_is_not_there_costs_no_request(tiny: Path) -> None:
    config = ClusterConfig(
        model=tiny, served_model_name="tiny", experts=1, replicas=1, port=0, cores=(0, 1),
        trace_url="http://127.0.0.1:9/v1/traces",
    )  # fmt: skip
    with LocalCluster(config) as cluster:
        for _ in range(3):
            ask(cluster, max_tokens=8)


def test_nothing_of_it_is_imported_before_it_is_asked_for() -> None:
    """FastAPI brings OpenTelemetry's interfaces along; what makes and sends spans is left alone."""
    told = "import sys, eaas.gateway.__main__, eaas.worker.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    ours = (
        "opentelemetry.sdk",
        "opentelemetry.exporter",
        "eaas.spans",
    )
    found = done.stdout.split()
    assert "eaas.tracing" in found
    assert [name for name in found if name.startswith(ours)] == []


@pytest.mark.parametrize(
    ("url", "share", "message"),
    [
        ("ftp://127.0.0.1/", 1.0, "is no http or https URL"),
        ("127.0.0.1:4318", 1.0, "is no http or https URL"),
        ("http://127.0.0.1:4318/v1/traces", 1.5, "at least 0 and at most 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(tiny: Path, url: str, share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        ClusterConfig(model=tiny, served_model_name="tiny", trace_url=url, trace_share=share)


def test_without_the_extra_a_process_says_what_to_install(tiny: Path) -> None:
    told = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from eaas.tracing import open_tracing\n"
        "open_tracing('http://127.0.0.1:4318/v1/traces', service='s', instance='i', version='0')"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Run pip install 'eaas[tracing]', or leave the option out." in done.stderr
