"""A new replica's weights are the right ones wherever they come from, and whatever their source does.

Real processes, each server with a packed file of its own.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from experts.checkpoint import Checkpoint
from experts.client import ExpertClient
from experts.model import Dtype, ExpertShape
from p2p.local import ShmEndpoint
from router.client import RouterClient
from tests.experts.exchange import exchange
from tests.experts.test_service import EXPERTS, HIDDEN, LAYERS, TOP_K, Child, write_checkpoint

EVERY = LAYERS * EXPERTS


class Cluster:
    """A router that wants every expert on every server, servers with caches of their own, and a client."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model, self.bare = root / "model", root / "bare"
        write_checkpoint(self.model, 1)
        self.bare.mkdir()
        shutil.copy(self.model / "config.json", self.bare)
        journal = ["--journal", str(root / "journal.db")]
        self.router = Child(["-m", "router", *journal, "--experts", "0", "--replicas", "3"], root)
        self.control = RouterClient(self.router.said["address"])
        self.children = [self.router]
        checkpoint = Checkpoint.open(self.model)
        identity = self.control.join(pool="attention", address="127.0.0.1:1", model_hash=checkpoint.fingerprint)
        self.endpoint = ShmEndpoint(identity.name, identity.incarnation, 1)
        self.client = ExpertClient(
            endpoint=self.endpoint,
            shape=ExpertShape.from_config(checkpoint.config),
            dtype=Dtype.FLOAT32,
            model_hash=checkpoint.fingerprint,
            incarnation=identity.incarnation,
            on_adopted=self.control.ack,
        )
        self.control.start(on_view=self.client.apply_view)

    def start(self, *options: str, module: tuple[str, ...] = ("experts",), bare: bool = False) -> Child:
        """A server that has packed nothing yet."""
        cache = self.root / f"cache{len(self.children)}"
        model = self.bare if bare else self.model
        wanted = ["--router", self.router.said["address"], "--model", str(model), *options]
        child = Child(["-m", *module, *wanted], cache)
        self.children.append(child)
        return child

    def wait(self, child: Child, experts: int = EVERY) -> None:
        """Until a server serves so many."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            view = self.control.view
            member = view.member(child.said["name"]) if view else None
            if member and member.serving_count == experts:
                return
            assert child.process.poll() is None, child._log
            time.sleep(0.02)
        raise AssertionError(f"{child.said} does not serve {experts}: {self.control.status()}, {child._log}")

    def rows(self) -> bytes:
        """What the client gets for the same rows each time, of all experts."""
        rng = np.random.default_rng(4)
        found = b""
        for layer in range(LAYERS):
            rows = rng.standard_normal((16, HIDDEN)).astype(np.float32)
            ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(16)]).astype(np.uint16)
            found += exchange(self.client, layer, rows, ids, rng.random((16, TOP_K), np.float32), 20.0).tobytes()
        return found

    def close(self) -> None:
        self.client.close()
        self.control.close()
        self.endpoint.close()
        for child in reversed(self.children):
            child.process.kill()
            child.process.wait(60)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_server_with_nothing_but_a_configuration_serves_the_bits_of_its_peers(cluster: Cluster) -> None:
    first = cluster.start()
    cluster.wait(first)
    wanted = cluster.rows()
    second = cluster.start("--weights", "peers", bare=True)
    cluster.wait(second)
    first.process.kill()
    assert cluster.rows() == wanted
    # And gives them in turn; its file is its peers', byte for byte.
    third = cluster.start("--weights", "peers", bare=True)
    cluster.wait(third)
    second.process.kill()
    assert cluster.rows() == wanted
    files = [path.read_bytes() for path in sorted(cluster.root.glob("cache*/eaas/packed/*.experts"))]
    assert len(files) == 3 and len(set(files)) == 1


def until_said(child: Child, words: str) -> None:
    """Until they are in what it wrote, which a thread reads a little later."""
    end_s = time.monotonic() + 60
    while words not in "".join(child._log):
        assert time.monotonic() < end_s, (words, child._log)
        time.sleep(0.02)


@pytest.mark.parametrize(
    "fault",
    [
        "die",
        pytest.param("corrupt", marks=pytest.mark.full(seconds=3)),
        pytest.param("freeze", marks=pytest.mark.full(seconds=9)),
    ],
)
def test_a_source_that_fails_midway_is_replaced_by_another(cluster: Cluster, fault: str) -> None:
    bad = cluster.start(module=("tests.experts.faulty_expert", fault))
    good = cluster.start("--weights", "checkpoint")
    for child in (bad, good):
        cluster.wait(child)
    wanted = cluster.rows()
    # The third server begins with the first.
    new = cluster.start("--weights", "peers", bare=True)
    assert new.said["name"] == "expert/3"
    cluster.wait(new)
    said = {
        "die": "expert/1: ",
        "corrupt": "expert/1 gave wrong bytes",
        "freeze": "expert/1 put nothing for 5 s",
    }
    until_said(new, said[fault])
    for child in (bad, good):
        child.process.kill()
    assert cluster.rows() == wanted


@pytest.mark.parametrize("fault", [pytest.param("die", marks=pytest.mark.full(seconds=3)), "corrupt"])
def test_a_checkpoint_replaces_the_only_source(cluster: Cluster, fault: str) -> None:
    bad = cluster.start(module=("tests.experts.faulty_expert", fault))
    cluster.wait(bad)
    wanted = cluster.rows()
    new = cluster.start()
    cluster.wait(new)
    until_said(new, "source_failed")
    bad.process.kill()
    assert cluster.rows() == wanted


def test_a_server_whose_kernels_answer_wrongly_ends_and_serves_nothing_that_failed(cluster: Cluster) -> None:
    broken = cluster.start(module=("tests.experts.faulty_expert", "broken"))
    assert broken.process.wait(60) == 1
    broken._drain.join()
    assert "expert 1 of MoE layer 0 failed its self-test 3 times" in "".join(broken._log)
    view = cluster.control.status().view
    assert all(member.serving_count <= 1 for member in view.members)


def test_a_start_without_weights_anywhere_says_so(cluster: Cluster) -> None:
    alone = cluster.start("--weights", "peers", bare=True)
    assert "no server of the cluster gives weights of model" in alone.said["error"]
    assert alone.process.wait(60) == 1
    config = json.loads((cluster.bare / "config.json").read_text())
    (cluster.bare / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 80}))
    first = cluster.start()
    cluster.wait(first)
    other = cluster.start("--weights", "peers", bare=True)
    assert "no server of the cluster gives weights of model" in other.said["error"]
    other._drain.join()
    assert "it is not of" in "".join(other._log)
