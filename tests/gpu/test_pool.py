"""Clients and servers as they are everywhere else, over kernels: attach, serve, move, fence, lose a server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from experts.backend import ClientLink, HostArrays, LinkRefused, ServerLink
from experts.client import ExpertClient
from experts.gpu.client import GpuClient
from experts.gpu.ffn import ffn_fp8_reference, ffn_reference
from experts.kernels import Weights, from_dtype
from experts.model import Dtype
from experts.quantized import Quantized
from experts.wire import WireShape
from p2p.transport import TransportChoice
from router import bitmap
from router.view import Member, View
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits
from tests.gpu.kernel_server import DEVICE_NAME, EVERY, FINGERPRINT, SHAPE, matrices_of

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=8)]

ROWS = 5


def until(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    end_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


REFERENCES = {Dtype.BFLOAT16: ffn_reference, Dtype.FP8: ffn_fp8_reference}


def stored(matrix: Weights) -> torch.Tensor:
    """What a matrix stands for, in double."""
    wide = matrix.dequantized() if isinstance(matrix, Quantized) else from_dtype(matrix)
    return torch.from_numpy(wide).double()


class Server:
    """A server's process."""

    def __init__(
        self, seed: int, incarnation: int, holes: tuple[tuple[int, int], ...], dtype: Dtype, undo: ExitStack
    ) -> None:
        words = ",".join(f"{layer}.{expert}" for layer, expert in holes) or "none"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.gpu.kernel_server",
                str(seed),
                str(incarnation),
                words,
                dtype.label,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        undo.callback(self.end)
        held = [pair for pair in EVERY if pair not in holes]
        address = self.process.stdout.readline().strip()  # type: ignore[union-attr]
        assert address, f"seed {seed}: the server did not start"
        serving = bitmap.to_bytes(bitmap.of_pairs(held, SHAPE.experts), SHAPE.layers, SHAPE.experts)
        self.member = Member(
            name=f"expert/{incarnation}", pool="expert", state="serving", incarnation=incarnation,
            address=address, pid=self.process.pid, host="here", serving=serving,
        )  # fmt: skip

    def tell(self, word: str) -> int:
        """Do what the word says; clients that the server has then."""
        self.process.stdin.write(f"{word}\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return int(self.process.stdout.readline())  # type: ignore[union-attr]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class World:
    """Servers in processes of their own, and one client here."""

    def __init__(self, undo: ExitStack, dtype: Dtype = Dtype.BFLOAT16) -> None:
        self.seed, self.dtype = fresh_seed(), dtype
        self.backend = DEVICE_NAME.backend()
        self._undo, self._epoch = undo, 0
        rng = np.random.default_rng(self.seed + 1)
        self.matrices = matrices_of(self.seed, dtype)
        rows = rng.standard_normal((ROWS, SHAPE.hidden), np.float32)
        ids = np.stack([rng.permutation(SHAPE.experts)[: SHAPE.top_k] for _ in range(ROWS)])
        self.rows = torch.from_numpy(rows).bfloat16().to(DEVICE)
        self.ids = torch.from_numpy(ids.astype(np.int32)).to(DEVICE)
        self.weights = torch.from_numpy(rng.random((ROWS, SHAPE.top_k), np.float32)).to(DEVICE)
        self.n_rows = torch.tensor([ROWS], dtype=torch.int32, device=DEVICE)

    def server(self, incarnation: int, *holes: tuple[int, int]) -> Server:
        return Server(self.seed, incarnation, holes, self.dtype, self._undo)

    def client(self) -> ExpertClient:
        endpoint = DEVICE_NAME.opener(TransportChoice.parse("shm"))("attention/1", 9, 1)
        self._undo.callback(endpoint.close)
        client = ExpertClient(
            endpoint=endpoint, shape=SHAPE, dtype=self.dtype, model_hash=FINGERPRINT, incarnation=9,
            max_tokens=8, backend=self.backend,
        )  # fmt: skip
        self._undo.callback(client.close)
        return client

    def view(self, *servers: Server) -> View:
        self._epoch += 1
        empty = View(term=1, epoch=self._epoch, replicas_wanted=1, layers=SHAPE.layers, experts=SHAPE.experts)
        return replace(empty, members=tuple(server.member for server in servers))

    def call(self, client: ExpertClient, layer: int, deadline_s: float = 60.0):  # type: ignore[no-untyped-def]
        calls, out = client.backend, poisoned(ROWS, SHAPE.hidden)
        assert isinstance(calls, GpuClient)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        calls.begin(deadline_s)
        with torch.cuda.stream(calls.stream):
            calls.enqueue(layer, self.rows, self.ids, self.weights, self.n_rows, out)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return out, calls.end()

    def wanted(self, layer: int) -> torch.Tensor:
        """In double."""
        total = torch.zeros(ROWS, SHAPE.hidden, dtype=torch.float64)
        for row in range(ROWS):
            for slot in range(SHAPE.top_k):
                three = self.matrices[layer, int(self.ids[row, slot])]
                x, ffn = self.rows[row : row + 1].cpu(), REFERENCES[self.dtype]
                total[row] += float(self.weights[row, slot]) * ffn(x, *map(stored, three))[0]
        return total


WIRE = WireShape(shape=SHAPE, dtype=Dtype.BFLOAT16, model_hash=7)


def new_client() -> GpuClient:
    client = DEVICE_NAME.backend().client(WIRE, incarnation=9, lanes=1, bell_page=0, max_tokens=5, patience_s=0.0)
    assert isinstance(client, GpuClient)
    return client


def test_a_window_in_which_kernels_would_touch_what_is_not_theirs_is_refused() -> None:
    client = new_client()
    server = DEVICE_NAME.backend().server(WIRE, incarnation=5, cores=(-1,), bell_page=0)
    there, back = client.shape.request_window.nbytes, client.shape.reply_window.nbytes
    for less_there, less_back in ((0, 0), (1, 0), (0, 1)):
        sizes = {"slots": client.shape.slots, "slot_bytes": 0, "tx": 4096, "rx": 8192}
        to_server = ServerLink(tx_bytes=there - less_there, rx_bytes=back - less_back, server_incarnation=5, **sizes)
        to_client = ClientLink(rx_bytes=there - less_there, tx_bytes=back - less_back, client_incarnation=9, **sizes)
        if not less_there + less_back:
            assert client.add_server(to_server) == server.add_client(to_client) == 0
            continue
        for refuse in (lambda: client.add_server(to_server), lambda: server.add_client(to_client)):  # noqa: B023
            with pytest.raises(LinkRefused, match="bytes are needed"):
                refuse()
    server.remove_client(0)
    server.close()


def test_a_step_has_room_for_rows_up_to_a_power_of_two() -> None:
    calls, out = new_client(), poisoned(8, SHAPE.hidden)
    rows = torch.zeros(8, SHAPE.hidden, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.zeros(8, SHAPE.top_k, dtype=torch.int32, device=DEVICE)
    calls.begin(1.0)
    with torch.cuda.stream(calls.stream):
        calls.enqueue(0, rows, ids, torch.zeros(8, SHAPE.top_k, device=DEVICE), torch.full_like(ids[0, :1], 5), out)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert calls.end().lost == tuple(range(5)), "nobody was there to answer"


def test_rows_of_the_host_are_refused() -> None:
    with pytest.raises(TypeError, match="--device cpu"):
        new_client().apply(HostArrays(0, 0, Dtype.BFLOAT16, 1, 0, 2, 0, 0, Dtype.BFLOAT16), 0)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with ExitStack() as undo:
        yield World(undo, getattr(request, "param", Dtype.BFLOAT16))


@pytest.mark.parametrize("world", list(REFERENCES), ids=lambda dtype: dtype.label, indirect=True)
def test_a_pool_over_kernels_answers_and_outlives_servers(world: World) -> None:
    one, other = world.server(5), world.server(6)
    client = world.client()
    client.apply_view(world.view(one, other))
    assert until(lambda: client.adopted_epoch == 1), "the epoch was not adopted while no step ran"
    first, report = world.call(client, 0)
    assert report.usable, f"seed {world.seed}: {report}"
    assert distance(first, world.wanted(0)) < 1e-2, f"seed {world.seed}"
    one.process.send_signal(signal.SIGKILL)
    again, report = world.call(client, 0, deadline_s=120)
    assert report.usable and same_bits(first, again), f"seed {world.seed}: {report}"
    client.apply_view(world.view(other))
    assert until(lambda: client.adopted_epoch == 2 and client.attached == ("expert/6",))
    third, report = world.call(client, 0)
    assert report.usable and same_bits(first, third) and not report.redispatched, f"seed {world.seed}: {report}"


def test_a_fenced_server_answers_nobody(world: World) -> None:
    server = world.server(5)
    client = world.client()
    client.apply_view(world.view(server))
    assert until(lambda: client.adopted_epoch == 1)
    server.tell("fence")
    _, report = world.call(client, 0, deadline_s=3.0)
    assert report.lost == tuple(range(ROWS)), f"seed {world.seed}: {report}"


def test_an_expert_that_nobody_holds_is_reported_with_its_tokens(world: World) -> None:
    missing = int(world.ids[2, 0])
    server = world.server(5, (1, missing))
    client = world.client()
    client.apply_view(world.view(server))
    assert until(lambda: client.adopted_epoch == 1)
    out, report = world.call(client, 1)
    wanted = tuple(row for row in range(ROWS) if missing in world.ids[row].tolist())
    assert report.lost == wanted and not report.usable, f"seed {world.seed}: {report}"
    assert [row for row in range(ROWS) if bool(out[row].isnan().any())] == list(wanted)


def test_an_expert_that_moved_is_served_where_it_went(world: World) -> None:
    first, second = world.server(5), world.server(6)
    client = world.client()
    client.apply_view(world.view(first))
    assert until(lambda: client.adopted_epoch == 1)
    before, _ = world.call(client, 1)
    client.apply_view(world.view(second))
    assert until(lambda: client.adopted_epoch == 2)
    first.tell("clear")
    after, report = world.call(client, 1)
    assert report.usable and not report.redispatched and same_bits(before, after), f"seed {world.seed}: {report}"
    assert until(lambda: first.tell("clients") == 0), "windows that nobody uses were kept"


def test_rows_are_counted_by_expert_and_each_step_once(world: World) -> None:
    client = world.client()
    client.apply_view(world.view(world.server(5)))
    assert until(lambda: client.adopted_epoch == 1)
    for _ in range(2):
        assert world.call(client, 1)[1].usable
    rows, steps = client.take_routed()
    asked = np.bincount(world.ids.cpu().numpy().ravel(), minlength=SHAPE.experts)
    assert rows.reshape(SHAPE.layers, -1).tolist() == [[0] * SHAPE.experts, (2 * asked).tolist()], f"{world.seed}"
    assert steps.reshape(SHAPE.layers, -1)[1].tolist() == (2 * (asked > 0)).tolist(), f"seed {world.seed}"
    assert not client.take_routed()[0].any(), "counted twice"


def test_servers_that_hold_the_same_are_both_asked_and_their_speeds_are_known(world: World) -> None:
    client = world.client()
    client.apply_view(world.view(world.server(5), world.server(6)))
    assert until(lambda: client.adopted_epoch == 1)
    for _ in range(2):
        assert world.call(client, 0)[1].usable
    client.take_routed()
    found = client.stats()
    assert list(found) == ["expert/5", "expert/6"]
    assert sum(stats.pairs for stats in found.values()) == 2 * ROWS * SHAPE.top_k, f"seed {world.seed}: {found}"
    assert all(stats.replies and stats.service_sum_ns for stats in found.values()), f"{world.seed}: {found}"
    assert sum(stats.speed for stats in found.values()) == pytest.approx(2), f"seed {world.seed}: {found}"
    # Whatever order of replicas that made, the answers are the same.
    before, _ = world.call(client, 0)
    assert distance(before, world.wanted(0)) < 1e-2, f"seed {world.seed}"
