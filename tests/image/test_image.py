"""The image and the chart's pods, run by podman rather than Kubernetes: they serve, die, and roll to another tag."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image import engine

TAG, NEXT = "localhost/eaas-test:1", "localhost/eaas-test:2"
ROLES = ("router", "expert", "attention", "gateway")
HTTPS = (("crt", "cert"), ("key", "key"))
PROMPTS = ("ROMEO:", "JULIET:", "To be, or not", "KING HENRY:")
lacking = engine.missing()
pytestmark = [
    pytest.mark.full(seconds=45),
    pytest.mark.alone,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(lacking), reason=lacking or "nothing is missing"),
]
# The image with nothing to write to but what it says, and no rights.
BARE = ("--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("image")
    engine.settle(made)
    return made


@pytest.fixture(scope="module")
def image(folder: Path) -> str:
    """The image; NEXT is the same with another label: what an upgrade changes to."""
    engine.build(folder, TAG)
    engine.run("buildah", "build", "-t", NEXT, "-f", "-", stdin=f"FROM {TAG}\nLABEL build=2\n")
    return TAG


def test_the_image_runs_as_nobody_in_particular_and_compiles_nothing(image: str) -> None:
    (found,) = json.loads(engine.run("podman", "image", "inspect", image))
    assert (found["Config"]["User"], found["Config"]["Entrypoint"], found["Config"]["Cmd"]) == (
        "10001:10001",
        ["eaas"],
        ["serve"],
    )
    print(f"image: {found['Size'] / 1e6:.0f} MB")
    named = "import shutil, sys, torch, nixl_cu13; sys.exit(shutil.which('g++'))"
    engine.run("podman", "run", "--rm", *BARE, "--entrypoint=python", image, "-c", named)


def test_its_own_command_serves_with_a_read_only_root(image: str) -> None:
    name, written = "eaas-test-serve", ("--tmpfs=/tmp", "--tmpfs=/cache", "--tmpfs=/journal")
    engine.run("podman", "rm", "--force", "--time=1", name, check=False)
    began = time.monotonic()
    try:
        engine.run("podman", "run", "--detach", f"--name={name}", *BARE, *written, image)
        said = engine.run("podman", "exec", name, "python", "-c", FIRST_TOKEN)
        print(f"from podman run to the first token: {time.monotonic() - began:.1f} s")
        assert json.loads(said)["choices"][0]["text"]
        began = time.monotonic()
        engine.run("podman", "stop", "--time=30", name)
        assert time.monotonic() - began < 25, "killed rather than ended"
    finally:
        engine.run("podman", "rm", "--force", "--time=1", name, check=False)


# In the container, whose network has nothing but loopback: asks until it is served, and prints the first event.
FIRST_TOKEN = """
import json, time, urllib.request
body = json.dumps({"model": "demo", "prompt": "ROMEO:", "max_tokens": 8, "stream": True}).encode()
asked = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"content-type": "application/json"})
for _ in range(6000):
    try:
        print(next(line.decode()[6:] for line in urllib.request.urlopen(asked) if line.startswith(b"data: {")))
        break
    except OSError:
        time.sleep(0.02)
"""


class Traffic:
    """Clients that stream one greedy completion after another, each at some gateway that is ready."""

    def __init__(self, node: engine.Node, key: str, ca: Path, clients: int = 2) -> None:
        self._node, self._key, self._stopping = node, key, threading.Event()
        self._context = ssl.create_default_context(cafile=str(ca))
        self._context.check_hostname = False  # Asked by address, as a Service passes connections on.
        self.endpoints: list[str] = []
        self.texts: dict[str, str] = {}
        self.answered, self.failed = 0, list[str]()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def stream(self, address: str, prompt: str) -> str:
        """The text of one completion.

        Raises:
            RuntimeError, OSError, http.client.HTTPException: it failed.
        """
        asked = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": 96,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        link = http.client.HTTPSConnection(address, 8000, timeout=120, context=self._context)
        try:
            headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
            link.request("POST", "/v1/completions", json.dumps(asked), headers)
            reply = link.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"{reply.status} {reply.read()[:300]!r}")
            text = ""
            for line in reply:
                name, _, event = line.decode().strip().partition(": ")
                if event == "[DONE]":
                    return text
                if name == "data":
                    said = json.loads(event)
                    if "error" in said:
                        raise RuntimeError(event)
                    text += "".join(choice["text"] for choice in said["choices"])
            raise RuntimeError("the stream broke off")
        finally:
            link.close()

    def _ask(self, number: int) -> None:
        while not self._stopping.is_set():
            number += 1
            prompt, address = PROMPTS[number % len(PROMPTS)], self.endpoints[number % len(self.endpoints)]
            try:
                text = self.stream(address, prompt)
                if text != self.texts.setdefault(prompt, text):
                    self.failed.append(f"another text: {text!r}, not {self.texts[prompt]!r}")
                self.answered += 1
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                self.failed.append(f"{address} {error!r}")

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.wait(2)
        return self

    def wait(self, more: int, longest_s: float = 120) -> None:
        """Wait for so many more answers."""
        wanted, ends = self.answered + more, time.monotonic() + longest_s
        while self.answered < wanted and time.monotonic() < ends:
            time.sleep(0.1)
        assert not self.failed, self.failed[:3]
        assert self.answered >= wanted, f"{self.answered} answers, {wanted} wanted in {longest_s:g} s"

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


class Cluster:
    """The chart's pods, as docs/deploy.md sets them up."""

    def __init__(self, node: engine.Node, key: str, certs: Path, admin_key: str) -> None:
        self.node, self.key, self.certs, self.admin_key = node, key, certs, admin_key

    def traffic(self) -> Traffic:
        made = Traffic(self.node, self.key, self.certs / "ca" / "ca.pem")
        made.endpoints = [pod.address for pod in self.node.of("gateway")]
        return made

    def status(self) -> str:
        """The router's state, by its admin listener: when every replica serves, there are none below wanted."""
        context = ssl.create_default_context(cafile=str(self.certs / "ca" / "ca.pem"))
        context.check_hostname = False
        (router,) = self.node.of("router")
        link = http.client.HTTPSConnection(router.address, 9100, timeout=10, context=context)
        link.request("GET", "/metrics", headers={"authorization": f"Bearer {self.admin_key}"})
        return link.getresponse().read().decode()

    def wait_whole(self, longest_s: float = 180) -> None:
        """Wait until no expert has fewer replicas than it should."""
        ends, said = time.monotonic() + longest_s, ""
        while time.monotonic() < ends:
            try:
                said = self.status()
            except OSError as error:
                said = repr(error)
            if "\neaas_experts_below_wanted 0" in said and "\neaas_moves_in_flight 0" in said:
                return
            time.sleep(0.5)
        raise TimeoutError(said[-3000:])


@pytest.fixture(scope="module")
def cluster(image: str, folder: Path) -> Iterator[Cluster]:
    certs, keys = folder / "certs", folder / "keys.json"

    def eaas(*words: str) -> str:
        return engine.run(sys.executable, "-m", "eaas.ops.cli", *words)

    eaas("certs", str(certs), "--host", "eaas-router")
    key = eaas("keys", "new", str(keys), "first").split()[-1]
    (folder / "admin.key").write_text(os.urandom(32).hex())
    (folder / "resume.key").write_bytes(os.urandom(32))
    files = {
        f"eaas-tls-{role}": {name: certs / role / name for name in ("ca.pem", "cert.pem", "key.pem")} for role in ROLES
    }
    files["eaas-https"] = {f"tls.{end}": certs / "gateway" / f"{name}.pem" for end, name in HTTPS}
    files["eaas-keys"] = {name: folder / name for name in ("keys.json", "resume.key")}
    files["eaas-admin-key"] = {"key": folder / "admin.key"}
    secrets = {name: engine.secret(folder / "secrets" / name, ones) for name, ones in files.items()}
    with engine.node(engine.rendered, secrets) as node:
        for role in ROLES:
            workload, _ = node.workload(role, image)
            for ordinal in range(workload["spec"]["replicas"]):
                node.start(role, ordinal, image)
        try:
            node.wait_ready(list(node.pods.values()))
            made = Cluster(node, key, certs, (folder / "admin.key").read_text())
            made.wait_whole()
            yield made
        except BaseException:
            for pod in node.pods.values():
                print(f"--- {pod.name}\n{pod.log()[-700:]}")
            raise


def test_the_charts_pods_serve_and_their_probes_pass(cluster: Cluster) -> None:
    for pod in cluster.node.pods.values():
        for probe in ("readinessProbe", "livenessProbe"):
            assert probe not in pod.container or pod.passes(probe), (pod.name, probe)
    with cluster.traffic() as traffic:
        traffic.wait(8)
    assert not traffic.failed
    for role in ROLES:
        status = cluster.node.of(role)[0].execute("cat", "/proc/1/status").splitlines()
        said = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        assert (said["CapEff"], said["NoNewPrivs"]) == ("0" * 16, "1"), role
        assert said["Uid"].split() == ["10001"] * 4, role


@pytest.mark.parametrize("role", ["expert", "attention", "router"])
def test_a_killed_pod_fails_no_request_and_starts_again(cluster: Cluster, role: str) -> None:
    pod = cluster.node.of(role)[-1]
    with cluster.traffic() as traffic:
        was = pod.inspect(".State.Pid")
        pod.kill()
        traffic.wait(6)
        cluster.node.wait_ready([pod])
        assert pod.inspect(".State.Pid") not in (was, "0")
        cluster.wait_whole()
        traffic.wait(4)
    assert not traffic.failed, traffic.failed[:3]


@pytest.mark.parametrize("role", ROLES)
def test_another_tag_of_the_image_rolls_out_without_a_failed_request(cluster: Cluster, role: str) -> None:
    node = cluster.node
    workload, _ = node.workload(role, NEXT)
    surges = workload["kind"] == "Deployment"
    with cluster.traffic() as traffic:
        for pod in node.of(role):
            ordinal = int(pod.name.rpartition("-")[2])
            if surges:  # maxUnavailable 0, maxSurge 1: the new one is ready before the old one is asked to end.
                node.wait_ready([node.start(role, ordinal + 10, NEXT)])
            if role == "gateway":
                traffic.endpoints = [one.address for one in node.of(role) if one is not pod]
            took = node.end(pod)
            print(f"{pod.name}: {took:.1f} s from SIGTERM to its end, {pod.grace_s} s allowed")
            assert took < pod.grace_s - 5, "killed rather than ended"
            if not surges:
                node.wait_ready([node.start(role, ordinal, NEXT)])
            cluster.wait_whole()
            traffic.wait(4)
    assert not traffic.failed, traffic.failed[:3]
    assert {pod.inspect(".ImageName") for pod in node.of(role)} == {NEXT}


def test_a_gateway_that_is_asked_to_end_lets_its_streams_end(cluster: Cluster) -> None:
    pod = cluster.node.of("gateway")[0]
    traffic = cluster.traffic()
    text = traffic.stream(pod.address, PROMPTS[0])
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.append(traffic.stream(pod.address, PROMPTS[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    name = f"{pod.name}-{pod.role}"
    subprocess.run(["podman", "kill", "--signal=TERM", name], check=True, capture_output=True)
    for thread in threads:
        thread.join()
    assert got == [text] * 4
