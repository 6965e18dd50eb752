"""Promises of `python -m experts` with a real router: load what is wanted, serve it, leave, fail clearly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts.checkpoint import Checkpoint
from experts.client import ExpertClient
from experts.kernels import ffn_reference, from_dtype
from experts.model import Dtype, ExpertShape
from p2p.local import ShmEndpoint
from router.client import RouterClient
from tests.experts.exchange import exchange
from tests.host_stalls import bounded

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INTER, EXPERTS, LAYERS, TOP_K = 64, 48, 4, 2, 2


def write_checkpoint(directory: Path, seed: int) -> None:
    """A tiny Qwen3-MoE checkpoint with experts only: all that an expert server reads."""
    directory.mkdir(parents=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER,
        "num_experts_per_tok": TOP_K,
        "hidden_act": "silu",
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    shape = ExpertShape.from_config(config)
    rng = np.random.default_rng(seed)
    header, body = {}, b""
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            gate, up, down = shape.names(layer, expert)
            for name, size in ((gate, (INTER, HIDDEN)), (up, (INTER, HIDDEN)), (down, (HIDDEN, INTER))):
                data = (rng.standard_normal(size) * 0.2).astype("<f4").tobytes()
                header[name] = {
                    "dtype": "F32",
                    "shape": list(size),
                    "data_offsets": [len(body), len(body) + len(data)],
                }
                body += data
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


class Child:
    """A process that says on a pipe when it is ready."""

    def __init__(self, arguments: list[str], cache: Path) -> None:
        reader, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, *arguments, "--ready-fd", str(writer)],
            pass_fds=(writer,),
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writer)
        with os.fdopen(reader) as pipe:
            self.said: dict[str, Any] = json.loads(pipe.readline() or "{}")
        self._log: list[str] = []
        self._drain = threading.Thread(target=lambda: self._log.extend(self.process.stderr or ()), daemon=True)
        self._drain.start()

    def end(self) -> int:
        """SIGTERM; exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=60)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_checkpoint(directory, 1)
    return directory


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Child]:
    child = Child(
        ["-m", "router", "--journal", str(tmp_path / "journal.db"), "--experts", "2", "--replicas", "2"],
        tmp_path,
    )
    yield child
    child.end()


def start_server(router: Child, model: Path, tmp_path: Path, *more: str) -> Child:
    """One expert server."""
    return Child(["-m", "experts", "--router", router.said["address"], "--model", str(model), *more], tmp_path)


def test_servers_load_what_the_router_places_and_a_client_gets_the_models_rows(
    router: Child, model: Path, tmp_path: Path
) -> None:
    servers = [start_server(router, model, tmp_path) for _ in range(2)]
    checkpoint = Checkpoint.open(model)
    shape = ExpertShape.from_config(checkpoint.config)
    control = RouterClient(router.said["address"])
    identity = control.join(pool="attention", address="127.0.0.1:1", model_hash=checkpoint.fingerprint)
    endpoint = ShmEndpoint(identity.name, identity.incarnation, 1)
    client = ExpertClient(
        endpoint=endpoint,
        shape=shape,
        dtype=Dtype.FLOAT32,
        model_hash=checkpoint.fingerprint,
        incarnation=identity.incarnation,
        on_adopted=control.ack,
    )
    control.start(on_view=client.apply_view)
    began_s = time.monotonic()
    while not (client.covers and len(client.attached) == 2) and time.monotonic() - began_s < 60:
        time.sleep(0.02)
    assert client.covers, control.status()
    rng = np.random.default_rng(2)

    def check() -> None:
        rows = rng.standard_normal((9, HIDDEN)).astype(np.float32)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(9)]).astype(np.uint16)
        gates = rng.random((9, TOP_K), dtype=np.float32)
        layer = int(rng.integers(LAYERS))
        found = exchange(client, layer, rows, ids, gates)
        wanted = np.zeros((9, HIDDEN))
        for t in range(9):
            for k in range(TOP_K):
                names = shape.names(layer, int(ids[t, k]))
                gate, up, down = (from_dtype(checkpoint.tensor(name)) for name in names)
                row = ffn_reference(gate, up, down, rows[t : t + 1], Dtype.FLOAT32)[0]
                wanted[t] += gates[t, k] * row
        np.testing.assert_allclose(found, wanted, atol=1e-5)

    for _ in range(5):
        check()
    servers[0].process.send_signal(signal.SIGKILL)
    for _ in range(5):
        check()
    client.close()
    control.leave()
    control.close()
    endpoint.close()
    assert servers[1].end() == 0
    servers[0].end()


def test_a_server_leaves_within_a_second_of_sigterm(router: Child, model: Path, tmp_path: Path) -> None:
    server = start_server(router, model, tmp_path)
    assert server.said["name"] == "expert/1"
    with bounded(1.5):
        assert server.end() == 0


def test_a_start_that_fails_says_why(router: Child, model: Path, tmp_path: Path) -> None:
    missing = start_server(router, tmp_path / "nothing", tmp_path)
    assert "no such directory" in missing.said["error"]
    assert missing.process.wait(60) == 1
    cores = start_server(router, model, tmp_path, "--cores", "a,b")
    assert "--cores a,b" in cores.said["error"]
    assert cores.process.wait(60) == 1
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    unknown = start_server(router, model, tmp_path)
    assert "GPT2LMHeadModel" in unknown.said["error"] and "Qwen3MoeForCausalLM" in unknown.said["error"]
    assert unknown.process.wait(60) == 1


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, experts.__main__; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"
