"""Promises of the service on a machine without a compiler: the same results, by Python alone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from experts import fallback
from experts.client import ExpertClient, ExpertsLost
from experts.model import Dtype
from experts.paths import cpu_path
from experts.proto import experts_pb2_grpc as rpc
from experts.routes import DROPPED, KEEP, MAY_DROP
from experts.server import ExpertServer, ExpertsService
from p2p import ShmEndpoint
from router import bitmap
from router.view import Member, View
from tests.experts.steps import Weights, shape_of, to_bits

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
FINGERPRINT = "ab" * 32


@pytest.mark.parametrize("native_side", ["neither", "server", "client"])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_python_and_native_ends_understand_each_other(native_side: str, dtype: Dtype) -> None:
    of_others = threading.enumerate()
    python = cpu_path(fallback.FallbackLibrary())
    shape = shape_of()
    weights = Weights(shape, dtype, 1)
    servers: list[tuple[ExpertServer, ShmEndpoint, grpc.Server, ThreadPoolExecutor]] = []
    members = []
    every = [(layer, expert) for layer in range(shape.layers) for expert in range(shape.experts)]
    for incarnation in (5, 6):
        endpoint = ShmEndpoint(f"expert/{incarnation}", incarnation)
        server = ExpertServer(
            endpoint=endpoint,
            shape=shape,
            dtype=dtype,
            model_hash=FINGERPRINT,
            path=None if native_side == "server" else python,
        )
        held = every if incarnation == 5 else every[::2]
        for key in held:
            server.set_expert(*key, weights.gate_up[key].ctypes.data, weights.down[key].ctypes.data)
        service = ExpertsService()
        service.server = server
        pool = ThreadPoolExecutor(2)
        control = grpc.server(pool)
        rpc.add_ExpertsServicer_to_server(service, control)
        address = f"127.0.0.1:{control.add_insecure_port('127.0.0.1:0')}"
        control.start()
        server.start()
        servers.append((server, endpoint, control, pool))
        serving = bitmap.to_bytes(bitmap.of_pairs(held, shape.experts), shape.layers, shape.experts)
        members.append(
            Member(
                name=f"expert/{incarnation}", pool="expert", state="serving", incarnation=incarnation,
                address=address, pid=1, host="here", serving=serving,
            )
        )  # fmt: skip
    endpoint = ShmEndpoint("attention/1", 9)
    client = ExpertClient(
        endpoint=endpoint,
        shape=shape,
        dtype=dtype,
        model_hash=FINGERPRINT,
        incarnation=9,
        path=None if native_side == "client" else python,
    )
    empty = View(term=1, epoch=1, replicas_wanted=1, layers=shape.layers, experts=shape.experts)
    view = replace(empty, members=tuple(members))
    client.apply_view(view)
    end_s = time.monotonic() + 10
    while client.adopted_epoch < view.epoch and time.monotonic() < end_s:
        time.sleep(0.005)
    assert sorted(client.attached) == ["expert/5", "expert/6"]
    rng = np.random.default_rng(2)
    for n in (1, 7, 40):
        rows = to_bits(rng.standard_normal((n, shape.hidden)), dtype)
        ids = np.stack([rng.permutation(shape.experts)[: shape.top_k] for _ in range(n)]).astype(np.uint16)
        gates = rng.random((n, shape.top_k), dtype=np.float32)
        out = rng.standard_normal((n, shape.hidden)).astype(np.float32)
        wanted = weights.reference(1, rows, ids, gates, out)
        # The kernels here are native either way: the bits are the same.
        assert client.exchange(1, rows, ids, gates, out).tobytes() == wanted.tobytes()
    client.apply_view(replace(empty, epoch=2))
    assert client.adopted_epoch == 2
    with pytest.raises(ExpertsLost):
        client.exchange(1, rows, ids, gates, deadline_s=0.05)
    drop = np.full(len(rows), MAY_DROP, np.uint8)
    assert client.exchange(1, rows, ids, gates, out.copy(), drop=drop).tobytes() == out.tobytes()
    assert (drop == DROPPED).all()
    with pytest.raises(ExpertsLost):
        drop = np.full(len(rows), KEEP, np.uint8)
        client.exchange(1, rows, ids, gates, drop=drop, deadline_s=0.05)
    client.close()
    endpoint.close()
    for server, server_endpoint, control, pool in servers:
        control.stop(0).wait()
        pool.shutdown()
        server.close()
        server_endpoint.close()
    # Those of other tests may still run, or end meanwhile.
    end_s = time.monotonic() + 10
    while own := [thread for thread in threading.enumerate() if thread not in of_others]:
        assert time.monotonic() < end_s, own
        time.sleep(0.005)


def test_a_missing_library_is_said_once_and_served_anyway() -> None:
    code = (
        "import logging, pathlib, experts.native as n; logging.basicConfig()\n"
        "n.LIBRARY = pathlib.Path('/nothing')\n"
        "from experts import fallback\n"
        "fallback.load(); print(type(fallback.load()).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "FallbackLibrary"
    assert done.stderr.count("native_missing") == 1
