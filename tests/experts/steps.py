"""Clients and servers of one process, stepped over plain memory: the shipped native code, no waiting."""

from __future__ import annotations

import ctypes
import mmap
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts import native
from experts.model import Dtype, ExpertShape
from p2p import native as p2p_native

MODEL_HASH = 0x1234_5678_9ABC_DEF0
NO_SERVER = 255
NO_EXPERT = 65535
REPLICAS = 8
OK, PENDING, LOST, ARGUMENT, MEMORY = 0, 1, -1, -2, -4


@contextmanager
def out_of_memory() -> Iterator[None]:
    """No MiB in one piece is left to this process."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    held: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Not what is in use now: what another thread or the collector unmaps would be room again.
    resource.setrlimit(resource.RLIMIT_AS, (0, before[1]))
    try:
        # What earlier tests freed is still ours.
        while block := libc.malloc(1 << 20):
            held.append(block)
        yield
    finally:
        for block in held:
            libc.free(block)
        resource.setrlimit(resource.RLIMIT_AS, before)


def shape_of(
    layers: int = 2, experts: int = 8, hidden: int = 48, intermediate: int = 40, top_k: int = 2
) -> ExpertShape:
    """A shape without a checkpoint."""
    return ExpertShape(
        architecture="Qwen3MoeForCausalLM",
        layer_ids=tuple(range(layers)),
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        top_k=top_k,
    )


def sizes_of(shape: ExpertShape) -> tuple[int, ...]:
    """As native code takes them."""
    return shape.layers, shape.experts, shape.hidden, shape.intermediate, shape.top_k


def to_bits(values: NDArray[np.float32], dtype: Dtype) -> NDArray[Any]:
    """float32 rows as the dtype holds them (bfloat16 as uint16)."""
    if dtype is Dtype.FLOAT32:
        return np.ascontiguousarray(values, np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Weights:
    """Random experts, packed; and the FFN of one row computed alone, the reference of every test."""

    def __init__(self, shape: ExpertShape, dtype: Dtype, seed: int) -> None:
        self.shape, self.dtype = shape, dtype
        self.library = native.load()
        rng = np.random.default_rng(seed)
        self.gate_up: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self.down: dict[tuple[int, int], NDArray[np.uint8]] = {}
        hidden, inter = shape.hidden, shape.intermediate
        for layer in range(shape.layers):
            for expert in range(shape.experts):
                gate, up = (to_bits(rng.standard_normal((inter, hidden)) * 0.2, dtype) for _ in range(2))
                down = to_bits(rng.standard_normal((hidden, inter)) * 0.2, dtype)
                packed = _aligned(self.library.experts_gate_up_bytes(dtype, inter, hidden))
                self.library.experts_pack_gate_up(
                    dtype, gate.ctypes.data, up.ctypes.data, dtype, inter, hidden, packed.ctypes.data
                )
                self.gate_up[layer, expert] = packed
                packed = _aligned(self.library.experts_pack_bytes(dtype, hidden, inter))
                self.library.experts_pack_matrix(dtype, down.ctypes.data, dtype, hidden, inter, packed.ctypes.data)
                self.down[layer, expert] = packed

    def row(self, layer: int, expert: int, x: NDArray[Any]) -> NDArray[np.float32]:
        """One row through one expert; zeros where it is NO_EXPERT."""
        if expert == NO_EXPERT:
            return np.zeros(self.shape.hidden, np.float32)
        shape, dtype = self.shape, self.dtype
        stride = (shape.intermediate + 63) // 64 * 64
        act = np.zeros(stride, x.dtype)
        out = np.zeros(shape.hidden, np.float32)
        self.library.experts_ffn_gate_up(
            dtype,
            self.gate_up[layer, expert].ctypes.data,
            shape.hidden,
            shape.intermediate,
            x.ctypes.data,
            len(x),
            1,
            act.ctypes.data,
            stride,
            0,
            (shape.intermediate + 31) // 32,
        )
        self.library.experts_linear(
            dtype,
            self.down[layer, expert].ctypes.data,
            shape.hidden,
            shape.intermediate,
            act.ctypes.data,
            stride,
            1,
            out.ctypes.data,
            shape.hidden,
            0,
            (shape.hidden + 63) // 64,
        )
        return out

    def reference(
        self,
        layer: int,
        x: NDArray[Any],
        ids: NDArray[np.uint16],
        weights: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """out[t] + sum over k, in order, each product and sum rounded to float32."""
        result = out.copy()
        for t in range(len(x)):
            total = weights[t, 0] * self.row(layer, int(ids[t, 0]), x[t])
            for k in range(1, ids.shape[1]):
                total = total + weights[t, k] * self.row(layer, int(ids[t, k]), x[t])
            result[t] = result[t] + total
        return result


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


class Memory:
    """A window of plain memory."""

    def __init__(self, slots: int, slot_bytes: int, incarnation: int) -> None:
        self.library = p2p_native.load()
        self.nbytes = self.library.p2p_window_bytes(slots, slot_bytes)
        self._map = mmap.mmap(-1, self.nbytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data
        assert self.library.p2p_window_init(self.address, self.nbytes, incarnation, slots, slot_bytes) == 0
        self.stride = (128 + slot_bytes + 4095) // 4096 * 4096

    def slot(self, index: int) -> NDArray[np.uint8]:
        """Bytes of one slot, signal line first."""
        start = 4096 + index * self.stride
        return self.bytes[start : start + self.stride]


@dataclass
class Server:
    """One native server."""

    handle: int
    incarnation: int
    held: set[tuple[int, int]] = field(default_factory=set)
    frozen: bool = False
    dead: bool = False


@dataclass
class Link:
    """One client and one server."""

    index: int
    place: int
    request: Memory
    reply: Memory
    life: tuple[socket.socket, socket.socket]


class World:
    """Servers, clients and a clock of whole nanoseconds."""

    def __init__(
        self,
        *,
        shape: ExpertShape,
        dtype: Dtype,
        servers: int,
        seed: int,
        slots: int = 2,
        slot_bytes: int = 1 << 16,
        lanes: int = 1,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """Args: lanes: of a server; of more than one, `run_servers` has it serve instead of `step_servers`."""
        self.shape, self.dtype, self.slots, self.slot_bytes = shape, dtype, slots, slot_bytes
        self.library, self.lanes, self.seed = library or native.load(), lanes, seed
        self.weights = Weights(shape, dtype, seed)
        self.now_ns = 1_000_000_000
        self.model, self.model_hash, self.others = 0, MODEL_HASH, list[World]()
        self.servers: list[Server] = []
        self.clients: list[int] = []
        self.links: dict[tuple[int, int], Link] = {}
        for _ in range(servers):
            self.add_server()

    def add_server(self) -> int:
        """A server with no experts and no clients; its number."""
        incarnation = 100 + len(self.servers)
        cores = (ctypes.c_int32 * self.lanes)(*[-1] * self.lanes)
        handle = self.library.expert_server_new(
            *sizes_of(self.shape),
            self.dtype,
            MODEL_HASH,
            incarnation,
            self.lanes,
            cores,
            None,
            self.slot_bytes,
            None,
        )
        assert handle
        self.servers.append(Server(handle, incarnation))
        return len(self.servers) - 1

    def beside(self, shape: ExpertShape) -> World:
        """The same servers, each with one more model, and that one's clients; closed with this one."""
        other = World(
            shape=shape,
            dtype=self.dtype,
            servers=0,
            seed=self.seed + 1 + len(self.others),
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            library=self.library,
        )
        self.others.append(other)
        other.model_hash += len(self.others)
        for server in self.servers:
            other.model = self.library.expert_server_add_model(
                server.handle, *sizes_of(shape), self.dtype, other.model_hash, None
            )
            assert other.model > 0
            other.servers.append(Server(server.handle, server.incarnation))
        return other

    def hold(self, server: int, layer: int, expert: int) -> None:
        """Give a server an expert."""
        key = (layer, expert)
        self.servers[server].held.add(key)
        gate_up, down = self.weights.gate_up[key].ctypes.data, self.weights.down[key].ctypes.data
        handle = self.servers[server].handle
        assert self.library.expert_server_set_expert(handle, self.model, layer, expert, gate_up, down) == 0

    def drop(self, server: int, layer: int, expert: int) -> None:
        """Take it away."""
        self.servers[server].held.discard((layer, expert))
        handle = self.servers[server].handle
        assert self.library.expert_server_set_expert(handle, self.model, layer, expert, None, None) == 0

    def add_client(self, max_tokens: int = 64, lanes: int = 1, weight: int = 1) -> int:
        """A client attached to every server; its number."""
        s = self.shape
        number = len(self.clients)
        client = self.library.expert_client_new(
            s.layers,
            s.experts,
            s.hidden,
            s.top_k,
            self.dtype,
            self.model_hash,
            1000 + number,
            lanes,
            None,
            max_tokens,
        )
        assert client
        self.clients.append(client)
        for server in range(len(self.servers)):
            self.attach(number, server, lane=server % lanes, weight=weight)
        return number

    def attach(
        self,
        client: int,
        server: int,
        lane: int = 0,
        page: int | None = None,
        bell_lanes: int = 8,
        weight: int = 1,
    ) -> None:
        """Exchange windows."""
        them = self.servers[server]
        incarnation = 1000 + client
        request = Memory(self.slots, self.slot_bytes, them.incarnation)
        reply = Memory(self.slots, self.slot_bytes, incarnation)
        life = socket.socketpair()
        theirs = native.ClientLink(
            rx=request.address,
            rx_bytes=request.nbytes,
            tx=reply.address,
            tx_bytes=reply.nbytes,
            bell_page=page,
            client_incarnation=incarnation,
            client_lanes=8,
            bell_lanes=bell_lanes,
            weight=weight,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            model=self.model,
        )
        place = self.library.expert_server_add_client(them.handle, theirs)
        assert place >= 0
        ours = native.ServerLink(
            tx=request.address,
            tx_bytes=request.nbytes,
            rx=reply.address,
            rx_bytes=reply.nbytes,
            bell_page=None,
            server_incarnation=them.incarnation,
            liveness_fd=life[0].fileno(),
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            lane=lane,
            lanes=1,
        )
        index = self.library.expert_client_add_server(self.clients[client], ours)
        assert index >= 0
        self.links[client, server] = Link(index, place, request, reply, life)

    def publish(self, client: int, epoch: int, without: set[int] | None = None) -> None:
        """Routes to every server that holds an expert, except `without`."""
        table = np.full((self.shape.layers, self.shape.experts, REPLICAS), NO_SERVER, np.uint8)
        for layer in range(self.shape.layers):
            for expert in range(self.shape.experts):
                able = [
                    self.links[client, i].index
                    for i, server in enumerate(self.servers)
                    if (layer, expert) in server.held and i not in (without or set()) and (client, i) in self.links
                ]
                table[layer, expert, : len(able)] = able
        self.library.expert_client_publish_routes(self.clients[client], epoch, table.ctypes.data)

    def kill(self, server: int) -> None:
        """The process ends: it computes no more, and its sockets hang up."""
        self.servers[server].dead = True
        for (_, number), link in self.links.items():
            if number == server:
                link.life[1].close()

    def step_servers(self) -> int:
        """One batch of each server that runs; requests answered."""
        return sum(
            self.library.expert_server_step(server.handle, self.now_ns)
            for server in self.servers
            if not server.dead and not server.frozen
        )

    def run_servers(self) -> None:
        """Batches of each server that runs, by all of its lanes, for some milliseconds."""
        for server in self.servers:
            self.library.expert_server_run(server.handle, 5_000_000)

    def counters(self, server: int) -> native.ServerCounters:
        """What a server counted."""
        counters = native.ServerCounters()
        self.library.expert_server_counters(self.servers[server].handle, counters)
        return counters

    def adopted(self, client: int) -> int:
        """The epoch that the router may count on."""
        return self.library.expert_client_adopted_epoch(self.clients[client])

    def stats(self, client: int, server: int) -> native.ServerStats:
        """What the client counted."""
        stats = native.ServerStats()
        assert self.library.expert_client_stats(self.clients[client], self.links[client, server].index, stats) == 0
        return stats

    def close(self) -> None:
        """Free everything."""
        for other in self.others:
            other.servers.clear()
            other.close()
        for client in self.clients:
            self.library.expert_client_free(client)
        for server in self.servers:
            self.library.expert_server_free(server.handle)
        for link in self.links.values():
            for end in link.life:
                end.close()


class Call:
    """One call of a client, begun and then stepped."""

    def __init__(
        self,
        world: World,
        client: int,
        rng: np.random.Generator,
        n: int,
        layer: int,
        deadline_ns: int = 10**9,
        begun_under: AbstractContextManager[None] | None = None,
        drop: np.ndarray | None = None,
        spoilt: Callable[[NDArray[Any]], None] = lambda x: None,
        without: float = 0,
    ) -> None:
        """Args: spoilt: changes the rows before they are given. without: the share of pairs that have no expert."""
        shape = world.shape
        self.world, self.client, self.layer = world, client, layer
        self.x = to_bits(rng.standard_normal((n, shape.hidden)), world.dtype)
        spoilt(self.x)
        self.ids = np.stack([rng.permutation(shape.experts)[: shape.top_k] for _ in range(n)]).astype(np.uint16)
        self.ids[rng.random(self.ids.shape) < without] = NO_EXPERT
        self.gates = rng.random((n, shape.top_k), dtype=np.float32)
        self.before = rng.standard_normal((n, shape.hidden)).astype(np.float32)
        self.out = self.before.copy()
        with begun_under or nullcontext():
            self.status = world.library.expert_client_begin(
                world.clients[client],
                layer,
                self.x.ctypes.data,
                n,
                self.ids.ctypes.data,
                self.gates.ctypes.data,
                self.out.ctypes.data,
                None if drop is None else drop.ctypes.data,
                world.now_ns,
                world.now_ns + deadline_ns,
            )
        if self.status == OK:
            self.status = PENDING

    def step(self) -> int:
        """One step of the client."""
        self.status = self.world.library.expert_client_step(self.world.clients[self.client], self.world.now_ns)
        return self.status

    def run(self, tick_ns: int = 100_000, limit: int = 200_000) -> int:
        """Steps of all, until the call ends."""
        for _ in range(limit):
            if self.step() != PENDING:
                return self.status
            self.world.step_servers()
            self.world.now_ns += tick_ns
        raise AssertionError(f"the call did not end within {limit} steps")

    def exact(self) -> bool:
        """Whether the result has the reference's bits."""
        wanted = self.world.weights.reference(self.layer, self.x, self.ids, self.gates, self.before)
        return wanted.tobytes() == self.out.tobytes()

    def untouched(self) -> bool:
        """Whether the output is as it was."""
        return self.out.tobytes() == self.before.tobytes()
