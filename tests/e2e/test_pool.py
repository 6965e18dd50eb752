"""What eaas.pool promises a program, kept by a pool of real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eaas import pool as pools
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.pool import ConnectFailed, Dtype, ExpertShape, ExpertsLost, Pool, ShapeMismatch, connect
from experts.links import AttachFailed, config_of
from experts.proto import experts_pb2
from experts.server import ExpertServer
from experts.transfer import Refused
from router.client import RouterClient
from tests.e2e.waiting import wait_for
from tests.experts.steps import to_bits
from tests.host_stalls import bounded

ROOT = Path(__file__).parents[2]
CANARY = 7.0


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[LocalCluster]:
    """The experts of the tiny model, each on two servers."""
    config = ClusterConfig(model=tiny, served_model_name="pool", experts=2, replicas=2, attention=0, endpoint=False)
    with LocalCluster(config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool(cluster: LocalCluster) -> Iterator[Pool]:
    """Connected by its address alone."""
    with connect(cluster.router_address) as pool:
        yield pool


class Rows:
    """Rows that bfloat16 holds exactly, their experts and weights, and what the pool makes of them."""

    def __init__(self, pool: Pool, n: int, seed: int = 1) -> None:
        rng, shape = np.random.default_rng(seed), pool.shape
        self.bits = to_bits(rng.standard_normal((n, shape.hidden)), Dtype.BFLOAT16)
        self.floats = (self.bits.astype(np.uint32) << 16).view(np.float32)
        self.ids = np.array([rng.permutation(shape.experts)[: shape.top_k] for _ in range(n)], np.int64)
        self.ids = self.ids.reshape(n, shape.top_k)
        self.weights = rng.random((n, shape.top_k), np.float32)
        self.pool = pool
        self.out: NDArray[np.float32] = self.apply()

    def apply(self, **more: Any) -> Any:
        return self.pool.apply(0, self.floats, self.ids, self.weights, **more)


def as_torch(bits: NDArray[np.uint16]) -> torch.Tensor:
    """bfloat16 of these bits."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def test_the_pool_tells_a_client_without_a_checkpoint_what_it_serves(
    tiny: Path, cluster: LocalCluster, pool: Pool
) -> None:
    shape = ExpertShape.from_config(json.loads((tiny / "config.json").read_text()))
    assert (pool.shape, pool.dtype) == (shape, Dtype.BFLOAT16)
    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:9"):
        connect("127.0.0.1:9", start_s=0.5)
    with pytest.raises(ConnectFailed, match=r"serves the checkpoint .* from the same folder"):
        connect(cluster.router_address, fingerprint="00" * 32)


def test_a_server_describes_its_model_for_itself_alone_and_within_bounds(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = RouterClient(cluster.router_address)
    member = router.status().view.pool("expert")[0]
    router.close()
    assert config_of(member, None)["architectures"] == ["Qwen3MoeForCausalLM"]
    with pytest.raises(AttachFailed, match=r"FAILED_PRECONDITION: incarnation 7 is asked for, this is"):
        config_of(replace(member, incarnation=7), None)
    model = SimpleNamespace(config=b"x" * (1 << 20), model_hash="ab")
    server: Any = SimpleNamespace(incarnation=1, first=model, _models={"ab": model})
    request = experts_pb2.DescribeRequest(server_incarnation=1)
    assert len(ExpertServer.describe(server, request).config) == 1 << 20
    model.config += b"x"
    with pytest.raises(Refused, match=r"1048577 bytes; 1048576 are told. Name the shape"):
        ExpertServer.describe(server, request)

    def refusing(*_: object) -> dict[str, Any]:
        raise AttachFailed("expert/1 tells no configuration: UNIMPLEMENTED")

    monkeypatch.setattr(pools, "config_of", refusing)
    with pytest.raises(ConnectFailed, match="says what it serves: expert/1 tells no configuration: UNIMPLEMENTED"):
        connect(cluster.router_address, start_s=0.3)


def test_torch_and_numpy_give_the_same_bits_in_every_type_and_layout(pool: Pool) -> None:
    for n in (0, 1, 33, 2500):
        rows = Rows(pool, n)
        assert rows.out.dtype == np.float32 and rows.out.shape == rows.floats.shape
        assert np.isfinite(rows.out).all() and (n == 0 or rows.out.any())
        rounded = to_bits(rows.out, Dtype.BFLOAT16)
        ids, weights = torch.from_numpy(rows.ids), torch.from_numpy(rows.weights)
        found = pool.apply(0, as_torch(rows.bits), ids.int(), weights)
        assert found.dtype is torch.bfloat16 and torch.equal(found, as_torch(rounded))
        found = pool.apply(0, torch.from_numpy(rows.floats), ids, weights.requires_grad_())
        assert found.dtype is torch.float32 and found.numpy().tobytes() == rows.out.tobytes()
        assert pool.apply(0, rows.bits, rows.ids.astype(np.uint16), rows.weights).tobytes() == rounded.tobytes()
        # Every other column of a wider array, and columns first.
        wide = np.repeat(rows.floats, 2, axis=1)[:, ::2]
        turned = torch.from_numpy(np.ascontiguousarray(rows.ids.T)).T
        out = torch.full(rows.floats.shape, CANARY)
        assert pool.apply(0, wide, turned, rows.weights, out) is out
        assert out.numpy().tobytes() == rows.out.tobytes()
        assert pool.apply(0, rows.floats, rows.ids.astype(np.int16), rows.weights, rows.floats) is rows.floats
        assert rows.floats.tobytes() == rows.out.tobytes(), "out may be hidden itself"


def test_a_row_has_the_bits_that_it_has_alone_and_in_another_layer_others(pool: Pool) -> None:
    rows = Rows(pool, 40)
    for at in (0, 17, 39):
        alone = slice(at, at + 1)
        found = pool.apply(0, rows.floats[alone], rows.ids[alone], rows.weights[alone])
        assert found.tobytes() == rows.out[alone].tobytes()
    last = pool.shape.layers - 1
    assert pool.apply(last, rows.floats, rows.ids, rows.weights).tobytes() != rows.out.tobytes()


def test_pairs_without_an_expert_contribute_nothing(pool: Pool) -> None:
    rows = Rows(pool, 20)
    ids, weights = rows.ids.copy(), rows.weights.copy()
    ids[3], ids[5, 0], ids[7, 1:] = -1, -1, -1
    weights[3], weights[5, 0] = np.nan, np.inf
    found = pool.apply(0, torch.from_numpy(rows.floats), torch.from_numpy(ids).int(), weights).numpy()
    rows.ids[5, 0], rows.weights[5, 0] = rows.ids[5, 1], 0
    rows.ids[7, 1:], rows.weights[7, 1:] = rows.ids[7, 0], 0
    wanted = rows.apply()
    wanted[3] = 0
    assert found.tobytes() == wanted.tobytes()
    assert not pool.apply(0, rows.floats, np.full_like(ids, -1), weights).any()


def test_thousands_of_rows_that_are_not_finite_blame_nobody(cluster: LocalCluster, pool: Pool) -> None:
    rows = Rows(pool, 4096)
    spoilt = rows.floats.copy()
    bad = np.arange(4096) % 3 == 0
    spoilt[bad, 5] = np.resize([np.nan, np.inf, -np.inf], bad.sum())
    client = pool._idle[0].client

    def pairs() -> int:
        # A pair that is overdue goes to another server as well.
        return sum(stats.pairs - stats.hedges for stats in client.stats().values())

    before = pairs()
    for _ in range(3):
        found = pool.apply(0, spoilt, rows.ids, rows.weights)
        assert np.isnan(found[bad]).all()
        assert found[~bad].tobytes() == rows.out[~bad].tobytes()
    assert pairs() - before == 3 * (~bad).sum() * pool.shape.top_k, "they are sent to nobody"
    sent = pairs()
    assert np.isnan(pool.apply(0, np.full_like(spoilt, np.nan), rows.ids, rows.weights)).all()
    assert pairs() == sent
    for stats in client.stats().values():
        assert (stats.corrupt, stats.redispatches, stats.quarantined_until_ns) == (0, 0, 0)
    logs = "".join(path.read_text() for path in cluster.state_dir.glob("expert.*.log"))
    assert "weights_damaged" not in logs


def test_what_is_not_the_models_is_refused_in_words(pool: Pool) -> None:
    rows, shape = Rows(pool, 4), pool.shape
    out = np.full_like(rows.floats, CANARY)

    def refused(kind: type[Exception], words: str, layer: int = 0, **changed: Any) -> None:
        given = {"hidden": rows.floats, "topk_ids": rows.ids, "topk_weights": rows.weights, "out": out}
        with pytest.raises(kind, match=words):
            pool.apply(layer, **{**given, **changed})
        assert (out == CANARY).all()

    for layer in (-1, shape.layers):
        refused(
            ShapeMismatch,
            f"layer {layer} is asked for; the pool has MoE layers 0 to {shape.layers - 1}",
            layer,
        )
    refused(
        ShapeMismatch,
        rf"hidden is \(4, 3\); \(n, {shape.hidden}\) is needed",
        hidden=np.zeros((4, 3), np.float32),
    )
    refused(ShapeMismatch, "hidden is", hidden=rows.floats[0])
    refused(ShapeMismatch, rf"topk_ids is .* \(4, {shape.top_k}\) is needed", topk_ids=rows.ids[1:])
    refused(ShapeMismatch, "topk_weights is", topk_weights=rows.weights[:, :1])
    refused(ShapeMismatch, "out is", out=out[1:])
    wrong = rows.ids.copy()
    wrong[2, 1], wrong[3, 0] = shape.experts, -2
    last = shape.experts - 1
    refused(ShapeMismatch, rf"experts \[{shape.experts}, -2\]; each layer has experts 0 to {last}", topk_ids=wrong)
    refused(TypeError, "hidden is float64 on cpu", hidden=rows.floats.astype(np.float64))
    refused(TypeError, "hidden is float16 on cpu", hidden=torch.from_numpy(rows.floats).half())
    refused(TypeError, "hidden is list", hidden=rows.floats.tolist())
    refused(TypeError, "hidden is float32 on meta", hidden=torch.from_numpy(rows.floats).to("meta"))
    refused(TypeError, "topk_ids is float32", topk_ids=rows.weights)
    refused(TypeError, "topk_ids is bool", topk_ids=rows.ids > 0)
    refused(TypeError, "topk_weights is bfloat16", topk_weights=torch.from_numpy(rows.weights).bfloat16())
    refused(TypeError, "contiguous", out=np.full((4, 2 * shape.hidden), CANARY, np.float32)[:, ::2])
    fixed = out.copy()
    fixed.flags.writeable = False
    refused(TypeError, "read-only", out=fixed)
    assert rows.apply(out=out) is out and out.tobytes() == rows.out.tobytes()


def test_threads_share_the_memberships_and_each_has_its_own_rows(cluster: LocalCluster) -> None:
    router = RouterClient(cluster.router_address)
    before = len(router.status().view.pool("client"))
    with connect(cluster.router_address, calls=2) as pool:
        assert len(router.status().view.pool("client")) == before + 2
        wanted = [Rows(pool, 5 + seed, seed) for seed in range(6)]

        def ask(seed: int) -> bool:
            return all(wanted[seed].apply().tobytes() == wanted[seed].out.tobytes() for _ in range(40))

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(ask, range(6)))
        # Two at once and no more: a third has no membership to call by.
        with pool._turn(60.0) as one, pool._turn(60.0) as other:
            assert one is not other and one.client is not other.client
            third = threading.Thread(target=wanted[0].apply)
            third.start()
            third.join(0.1)
            assert third.is_alive()
            assert (one.busy, other.busy) == (True, True)
        third.join(20)
        assert not third.is_alive()
    with pytest.raises(ConnectFailed, match="closed; connect again"):
        wanted[0].apply()
    wait_for("both have left", lambda: len(router.status().view.pool("client")) <= before)
    router.close()
    with pytest.raises(ValueError, match="calls is 0 and weight 1; 1 or more"):
        connect(cluster.router_address, calls=0)


def test_closing_waits_for_calls_that_run(cluster: LocalCluster) -> None:
    pool = connect(cluster.router_address)
    rows = Rows(pool, 3)
    with pool._turn(60.0):
        closing, late = threading.Thread(target=pool.close), ThreadPoolExecutor(1).submit(rows.apply)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive(), "a call still runs"
    closing.join(20)
    assert not closing.is_alive()
    try:
        assert late.result(20).tobytes() == rows.out.tobytes()
    except ConnectFailed as error:
        assert "closed" in str(error)


def test_a_fork_refuses_and_leaves_its_parent_a_member(cluster: LocalCluster) -> None:
    with connect(cluster.router_address) as pool:
        rows, session = Rows(pool, 3), pool._idle[0]
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                rows.apply()
            except ConnectFailed as error:
                os.write(tell, str(error).encode())
            pool.close()
            os._exit(0)
        os.close(tell)
        text = os.read(told, 4096).decode()
        os.close(told)
        assert os.waitpid(pid, 0)[1] == 0
        assert re.search(rf"connected in process {os.getpid()}, .*{pid}, is a fork. Connect again", text), text
        assert rows.apply().tobytes() == rows.out.tobytes()
        assert pool._idle[0] is session, "it did not have to join anew"


def test_experts_that_are_lost_are_waited_for_until_the_deadline_and_out_stays(tiny: Path) -> None:
    config = ClusterConfig(model=tiny, served_model_name="pool", experts=1, replicas=1, attention=0, endpoint=False)
    with LocalCluster(config) as cluster, connect(cluster.router_address) as pool:
        rows = Rows(pool, 6)
        (server,) = (pid for name, pid in cluster.pids().items() if name.startswith("expert/"))
        out = np.full_like(rows.floats, CANARY)
        os.kill(server, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.raises(ExpertsLost, match=r"within 0\.05 s.*again"):
                rows.apply(out=out, deadline_s=0.05)
            assert time.monotonic() - began_s >= 0.05
            assert (out == CANARY).all()
        finally:
            os.kill(server, signal.SIGCONT)
        assert rows.apply(out=out).tobytes() == rows.out.tobytes()


def test_a_model_that_sleeps_wakes_with_the_call_and_not_with_the_next_renewal(tiny: Path) -> None:
    config = ClusterConfig(
        model=tiny, served_model_name="pool", experts=1, replicas=1, attention=0, endpoint=False, lease_s=32.0,
        sleep_after_s=0.5,
    )  # fmt: skip
    with LocalCluster(config) as cluster, connect(cluster.router_address) as pool:
        rows, session = Rows(pool, 6), pool._idle[0]
        wait_for("sleep", lambda: session.placement.asleep, cluster)
        spoke_s = session.router._spoke_s
        wait_for("a renewal that has just been sent", lambda: session.router._spoke_s != spoke_s, cluster)
        with bounded(2.0):  # and it is renewed each 4 s
            assert rows.apply().tobytes() == rows.out.tobytes()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A working directory with packages of these names, of somebody else."""
    for name in ("experts", "router", "p2p"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} of somebody else')")
    return tmp_path


def test_the_page_s_example_runs_where_others_have_packages_of_these_names(tiny: Path, elsewhere: Path) -> None:
    page = (ROOT / "docs" / "pool.md").read_text()
    example = re.findall(r"```python\n(import sys.*?)```", page, re.DOTALL)[0]
    # The working directory comes first on the path of -m and -c, and here once more.
    paths = {**os.environ, "PYTHONPATH": f"{elsewhere}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "eaas.ops.cli", "pool", str(tiny), "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=elsewhere, env=paths, **pipes) as process:
        try:
            said: list[str] = []
            address = None
            while address is None:
                assert process.stdout is not None
                said.append(process.stdout.readline())
                assert said[-1], "".join(said)
                address = re.search(r'connect\("([\d.:]+)", model\)', said[-1])
            python = [sys.executable, "-c", example, address[1]]
            done = subprocess.run(python, cwd=elsewhere, env=paths, capture_output=True, text=True, timeout=120)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
    assert done.returncode == 0 and "torch" not in done.stderr, done.stderr
    assert done.stdout.startswith("[["), done.stdout
    assert process.returncode == 0, "".join(said)


def test_a_package_of_somebody_else_that_is_there_already_is_named(elsewhere: Path) -> None:
    (elsewhere / "experts" / "__init__.py").write_text("")
    python = [sys.executable, "-c", "import experts, eaas.pool"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(python, cwd=elsewhere, env=paths, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: 'experts' was imported from {elsewhere}" in done.stderr
    assert f"needs its own at {ROOT / 'experts'}. Import eaas.pool first, or rename" in done.stderr


def test_importing_it_is_cheap_and_brings_no_torch() -> None:
    """`eaas` alone imports nothing of the others; `eaas.pool` no torch."""
    for name, banned in (("eaas", "numpy p2p router experts grpc"), ("eaas.pool", "torch transformers")):
        code = f"import sys, {name}; print(*[m for m in '{banned}'.split() if m in sys.modules])"
        python = [sys.executable, "-c", code]
        done = subprocess.run(python, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr + done.stdout


ON_TEAM = """
import ctypes, sys
import numpy as np, torch
from eaas.pool import Threads, connect
router, lanes = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(lanes)
library = ctypes.CDLL(f"{torch.__path__[0]}/lib/libtorch_cpu.so")
address = ctypes.cast(library.torch_parallel_for, ctypes.c_void_p).value
team = Threads(cores=(-1,) * lanes, parallel_for=address)
with connect(router) as alone, connect(router, threads=team) as pool:
    for n in (1, 2, 13):
        hidden = torch.randn(n, pool.shape.hidden)
        ids = torch.stack([torch.randperm(pool.shape.experts)[: pool.shape.top_k] for _ in range(n)])
        weights = torch.rand(n, pool.shape.top_k)
        for _ in range(20):
            assert torch.equal(pool.apply(0, hidden, ids, weights), alone.apply(0, hidden, ids, weights))
print("equal")
"""


@pytest.mark.parametrize("limit", [2, 99])
@pytest.mark.parametrize("lanes", [2, 3])
def test_a_program_s_own_threads_make_calls_however_many_there_are(
    cluster: LocalCluster, lanes: int, limit: int
) -> None:
    """With fewer threads than lanes a loop's parts are uneven, and a lane that nobody runs would be waited for."""
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_THREAD_LIMIT": str(limit)}
    python = [sys.executable, "-c", ON_TEAM, cluster.router_address, str(lanes)]
    done = subprocess.run(python, env=paths, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "equal", done.stderr
