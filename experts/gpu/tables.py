"""Tables in device memory, and the host's side of them: what changes about servers and clients is a write here.

A client's peers and routes exist twice; one word says which copy is in use. `publish` writes the other on a stream of
its own while steps run, then turns the word over in the order of the steps' stream: a step sees one state from its
first kernel to its last, and no graph is captured again. What kernels change (sequences, suspects, slots that owe a
reply) exists once, and the host changes it in the steps' order as well. A server's rows are independent of each other:
a client's is filled first and made live last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from experts.gpu.layout import (
    AskedWord,
    ClientWord,
    CountWord,
    ExchangeShape,
    HostWord,
    JobWord,
    PeerWord,
    ReportWord,
    SeenWord,
    ServerWord,
    constants_of,
    power_of_two,
    row_warps,
)
from experts.gpu.patience import SIZES, STEPS, UNKNOWN_NS
from experts.gpu.words import LAYOUT

NO_BUDGET_NS = 1 << 62  # beyond any clock, and the sum of both is still a word


def host_words(count: int, device: torch.device) -> torch.Tensor:
    """int64 [count] zeros that kernels and the host share, so that neither has to ask the other."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")


def signed(word: int) -> int:
    """A u64 as the int64 of equal bits, which is how tables hold it."""
    return (word & (1 << 64) - 1) - ((word & 1 << 63) << 1)


def fill(words: torch.Tensor, value: int) -> None:
    """Set words of a table, in the order of the current stream. By a copy: torch loads each of its kernels on the first
    launch, for which it may wait until the device is idle; and passes may fill all processors."""
    words.copy_(torch.full(words.shape, value, dtype=words.dtype), non_blocking=True)


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, needed: tuple[int, ...]) -> None:
    """Raises ValueError: a tensor has another type or shape than a kernel needs, or is not contiguous."""
    if tensor.dtype != dtype or tuple(tensor.shape) != needed or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"{name}: found {found}, needed {dtype} {needed}, contiguous.")


def _made(device: torch.device) -> None:
    """Tables are used on other streams than the one they are made on: wait until they are."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class ClientTables:
    """What a client's kernels read and write, on `device`; made of what `experts.gpu.client.GpuClient` is made of."""

    def __init__(
        self, shape: ExchangeShape, *, servers: int, replicas: int, rounds: int, incarnation: int,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        limits = (("servers", servers, 1, 64), ("replicas", replicas, 1, 8), ("rounds", rounds, 0, 8))
        for name, found, least, most in limits:
            if not least <= found <= most:
                raise ValueError(f"{name} is {found}; {least} to {most} is possible.")
        self.shape, self.servers, self.replicas = shape, servers, replicas
        self.rounds, self.device = rounds, torch.device(device)

        def words(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.control = words(ClientWord.WORDS)
        self.peers = words(2, servers, PeerWord.WORDS)
        self.routes = words(2, shape.layers, shape.experts, replicas, dtype=torch.int32).fill_(-1)
        self.suspect, self.sequence = words(servers), words(servers)
        self.owed = words(servers, shape.slots)
        # By server and size: when to hedge and when to suspect, and how many replies took how long since it was read.
        self.limits = words(servers, SIZES, 2).fill_(UNKNOWN_NS)
        self.took = words(servers, SIZES, STEPS)
        self.asked = words(rounds + 1, servers, AskedWord.WORDS)
        self.place = words(shape.capacity, shape.top_k, dtype=torch.int32)
        # Where a pair was asked in the round before it went to another server.
        self.before = words(max(1, rounds), shape.capacity, shape.top_k, dtype=torch.int32)
        self.listed, self.counted = words(servers).view(torch.uint64), words(servers)
        self.blank = words(shape.answer_stride // 8)
        # Rows asked of each expert, steps that asked any, and the step that did so last.
        self.routed = words(3, shape.layers, shape.experts)
        self.seen = words(servers, SeenWord.WORDS)
        self.report = host_words(ReportWord.WORDS + servers + shape.capacity, self.device)
        self._on_gpu = self.device.type == "cuda"
        self._copying = torch.cuda.Stream(self.device) if self._on_gpu else None
        self._turned = torch.cuda.Event() if self._on_gpu else None
        self._copy = 0
        fill(self.control[ClientWord.INCARNATION], signed(incarnation))
        for word in (ClientWord.BUDGET_NS, ClientWord.RUN_NS, ClientWord.DEADLINE_NS, ClientWord.END_NS):
            fill(self.control[word], NO_BUDGET_NS)
        _made(self.device)

    @property
    def send_warps(self) -> int:
        """Warps of programs that hold a row that goes out."""
        return row_warps(self.shape.hidden // 2)

    @property
    def wait_warps(self) -> int:
        """Warps of the program that judges and sends again: half a processor's registers at most."""
        return min(4, self.send_warps)

    @property
    def back_warps(self) -> int:
        """Warps of programs that hold rows that come back."""
        return row_warps(self.shape.answer_words)

    def constants(self, names: Iterable[str]) -> dict[str, int]:
        """The constants that a kernel with arguments of these names takes."""
        own = {
            "LAYOUT": LAYOUT,
            "SERVERS": self.servers,
            "REPLICAS": self.replicas,
            "ROUNDS": self.rounds,
            "WIDTH": max(8, power_of_two(self.servers)),
            "WIDE": power_of_two(self.shape.top_k),
            "TILE": power_of_two(self.shape.hidden),
            "SEND_THREADS": 32 * self.send_warps,
            "WAIT_THREADS": 32 * self.wait_warps,
            "BACK_THREADS": 32 * self.back_warps,
        }
        return constants_of(names, self.shape, own)

    def publish(self, peers: Sequence[Sequence[int]], routes: torch.Tensor) -> None:
        """Let the steps launched from now on see these peers and routes. Call it where steps are launched.

        Args:
            peers: For each place request and reply window's address, incarnation (u64), and 1 if it may be asked.
            routes: int32 [layers, experts, replicas], places in order of preference, then -1; on the host.

        Raises:
            ValueError: a shape does not fit, or a route names a place that does not exist.
        """
        if tuple(routes.shape) != tuple(self.routes.shape[1:]) or routes.dtype != torch.int32:
            needed = tuple(self.routes.shape[1:])
            raise ValueError(f"routes are {routes.dtype} {tuple(routes.shape)}; int32 {needed} are needed.")
        if len(peers) != self.servers:
            raise ValueError(f"{len(peers)} peers; {self.servers} places are there, the empty ones all zero.")
        low, high = int(routes.min()), int(routes.max())
        if low < -1 or high >= self.servers:
            raise ValueError(f"routes name places {low} to {high}; 0 to {self.servers - 1} exist, -1 is nobody.")
        rows = torch.tensor([[signed(word) for word in row] for row in peers], dtype=torch.int64)
        copy = 1 - self._copy
        if self._on_gpu:
            self._publish_on_gpu(copy, rows, routes)
        else:
            self.peers[copy].copy_(rows)
            self.routes[copy].copy_(routes)
            fill(self.control[ClientWord.COPY], copy)
        self._copy = copy

    def _publish_on_gpu(self, copy: int, rows: torch.Tensor, routes: torch.Tensor) -> None:
        steps = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copying):
            # Steps launched before the last turn may still read this copy.
            self._turned.wait(self._copying)  # type: ignore[union-attr]
            self.peers[copy].copy_(rows.pin_memory(), non_blocking=True)
            self.routes[copy].copy_(routes.pin_memory(), non_blocking=True)
            written = torch.cuda.Event()
            written.record(self._copying)
        steps.wait_event(written)
        fill(self.control[ClientWord.COPY], copy)
        self._turned.record(steps)  # type: ignore[union-attr]

    def forget(self, place: int) -> None:
        """A place's sequence, suspicion and slots are as if it had never been asked: its windows are new."""
        for table in (self.suspect, self.sequence, self.seen, self.owed, self.took):
            fill(table[place], 0)
        fill(self.limits[place], UNKNOWN_NS)


class ServerTables:
    """What a server's kernels read and write, on `device`; made of what `experts.gpu.server.GpuServer` is made of."""

    def __init__(self, shape: ExchangeShape, *, clients: int, incarnation: int, device: torch.device | str) -> None:
        if not 1 <= clients <= 64:
            raise ValueError(f"clients is {clients}; 1 to 64 is possible.")
        self.shape, self.clients, self.device = shape, clients, torch.device(device)

        def words(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.control = words(ServerWord.WORDS)
        self.peers = words(clients, PeerWord.WORDS)
        self.held = words(shape.layers, shape.experts, dtype=torch.int32).fill_(-1)
        self.done, self.rejected = words(clients, shape.slots), words(clients, shape.slots)
        self.jobs = words(clients, JobWord.WORDS)
        pairs = clients * shape.pairs
        self.slots = words(pairs, dtype=torch.int32).fill_(-1)
        self.row_of, self.origin = words(pairs, dtype=torch.int32), words(pairs, dtype=torch.int32)
        self.n_pairs = words(1, dtype=torch.int32)
        self.counts = words(CountWord.WORDS)
        # The pass that was asked for each expert last.
        self.asked_in = words(shape.layers, shape.experts)
        self.host = host_words(HostWord.WORDS, self.device)
        self.control[ServerWord.HOST] = self.host.data_ptr()
        self.control[ServerWord.INCARNATION] = signed(incarnation)
        self.control[ServerWord.LEASE_NS] = NO_BUDGET_NS
        _made(self.device)

    @property
    def pairs(self) -> int:
        """Of one pass, at most."""
        return self.clients * self.shape.pairs

    def constants(self, names: Iterable[str]) -> dict[str, int]:
        """The constants that a kernel with arguments of these names takes."""
        own = {
            "LAYOUT": LAYOUT,
            "CLIENTS": self.clients,
            "CLIENTS_WIDE": power_of_two(self.clients),
            "WIDE": power_of_two(self.shape.top_k),
            "SLOTS_WIDE": power_of_two(self.shape.slots),
            "ROW_TILE": power_of_two(self.shape.row_words),
            "ANSWER_TILE": power_of_two(self.shape.answer_words),
        }
        return constants_of(names, self.shape, own)
