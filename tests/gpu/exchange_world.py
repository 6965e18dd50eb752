"""One client and its servers over plain memory: windows, experts of a few numbers, and what a call must give."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from experts.gpu.client import GpuClient, Link
from experts.gpu.combine import combine, combine_reference
from experts.gpu.dispatch import dispatch
from experts.gpu.layout import ClientWord, ExchangeShape, RowsOut
from experts.gpu.server import Batch, GpuServer
from experts.gpu.tables import fill
from experts.gpu.wait_replies import wait_replies
from p2p.device import INTERPRET
from tests.gpu.device import DEVICE, poisoned
from tests.gpu.quick_interpreter import call_quickly

if INTERPRET:
    call_quickly()

CLIENT = 0xC11E47C11E47C11E
SERVER = 0x5E47E25E47E20000


def shape_of(**changes: object) -> ExchangeShape:
    """A model of a few numbers."""
    values = {
        "layers": 2, "experts": 6, "hidden": 128, "top_k": 2, "capacity": 8, "model_hash": 77,
    } | changes  # fmt: skip
    return ExchangeShape(**values)  # type: ignore[arg-type]


def settle() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def zeros(nbytes: int) -> torch.Tensor:
    """Window memory; torch gives addresses that are multiples of 64."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)


def request_of(shape: ExchangeShape) -> torch.Tensor:
    """A request window."""
    return zeros(shape.request_window.nbytes)


def reply_of(shape: ExchangeShape) -> torch.Tensor:
    """A reply window."""
    return zeros(shape.reply_window.nbytes)


def put_bytes(window: torch.Tensor, offset: int, what: bytes) -> None:
    """Write bytes into a window, as a peer would."""
    window[offset : offset + len(what)].copy_(torch.frombuffer(bytearray(what), dtype=torch.uint8))


def factor(slot: int) -> float:
    """What the expert in a weight slot multiplies by."""
    return 0.5 + 0.25 * slot


def toy_experts(batch: Batch) -> None:
    """Experts that scale a row by their slot's factor and turn it by slot + 1 columns."""
    batch.out.view(torch.int16).fill_(-1)
    for pair in range(int(batch.n_pairs[0])):
        slot = int(batch.slots[pair])
        if slot >= 0:
            batch.out[pair] = toy_answer(row_of_batch(batch, int(batch.row_of[pair])), slot)


def row_of_batch(batch: Batch, row: int) -> torch.Tensor:
    """A row that was gathered, as bf16."""
    if batch.scales is None:
        return batch.rows[row]
    return (batch.rows[row].float() * batch.scales[row].repeat_interleave(128)).bfloat16()


def toy_answer(row: torch.Tensor, slot: int) -> torch.Tensor:
    """One expert's answer to one row."""
    return (row.float() * factor(slot)).roll(slot + 1).bfloat16()


def travelled(rows: torch.Tensor, form: RowsOut) -> torch.Tensor:
    """Rows as a server sees them: bf16."""
    if form is RowsOut.BF16:
        return rows
    groups = rows.float().view(len(rows), -1, 128)
    largest = groups.abs().amax(dim=2).clamp_min(2.0**-100)
    scale = largest * (1 / 448)
    codes = (groups * (torch.full_like(largest, 448) / largest)[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale[:, :, None]).view_as(rows).bfloat16()


def slot_of(shape: ExchangeShape, layer: int, expert: int) -> int:
    """Where an expert's weights lie, on every server."""
    return layer * shape.experts + expert


@dataclass
class Call:
    """One expert call's arguments."""

    layer: int
    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    n_rows: torch.Tensor
    out: torch.Tensor

    @classmethod
    def random(cls, shape: ExchangeShape, seed: int, *, layer: int = 0, tokens: int = 4, live: int = 3) -> Call:
        """Rows of which the first `live` count."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randperm(shape.experts, generator=generator)[: shape.top_k] for _ in range(tokens)])
        return cls(
            layer=layer,
            rows=torch.randn(tokens, shape.hidden, generator=generator).bfloat16().to(DEVICE),
            ids=ids.to(torch.int32).to(DEVICE),
            weights=torch.rand(tokens, shape.top_k, generator=generator).to(DEVICE),
            n_rows=torch.tensor([live], dtype=torch.int32, device=DEVICE),
            out=poisoned(tokens, shape.hidden),
        )

    def arguments(self) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of `GpuClient.enqueue`."""
        return self.layer, self.rows, self.ids, self.weights, self.n_rows, self.out

    def expected(self, shape: ExchangeShape) -> torch.Tensor:
        """Computed here, without any exchange: the rows that count."""
        live = int(self.n_rows[0])
        rows = travelled(self.rows[:live], shape.rows_out)
        answers = torch.stack(
            [
                torch.stack(
                    [toy_answer(rows[token], slot_of(shape, self.layer, int(expert))) for expert in self.ids[token]]
                )
                for token in range(live)
            ]
        )
        return combine_reference(answers, self.weights[:live])


@dataclass
class World:
    """Servers that hold every expert, a client that knows them, and the memory between them."""

    shape: ExchangeShape = field(default_factory=shape_of)
    servers: int = 2
    replicas: int = 2
    rounds: int = 2
    patience_s: float = 0.001

    def __post_init__(self) -> None:
        self.client = GpuClient(
            self.shape, servers=self.servers, replicas=self.replicas, incarnation=CLIENT,
            device=DEVICE, rounds=self.rounds,
        )  # fmt: skip
        self.ends: list[GpuServer] = []
        self.requests, self.replies = [], []
        for place in range(self.servers):
            end = GpuServer(
                self.shape, clients=2, compute=toy_experts, incarnation=SERVER + place, device=DEVICE,
                idle_s=0.00002,
            )  # fmt: skip
            self.ends.append(end)
            self.requests.append(request_of(self.shape))
            self.replies.append(reply_of(self.shape))
            end.attach(
                0,
                request=self.requests[place].data_ptr(),
                reply=self.replies[place].data_ptr(),
                incarnation=CLIENT,
            )
            for layer in range(self.shape.layers):
                for expert in range(self.shape.experts):
                    end.hold(layer, expert, slot_of(self.shape, layer, expert))
            self.link(place)
        self.client.write_tables(self.routes())
        give_patience(self.client, self.patience_s)

    def begin(self) -> None:
        """A step comes. On a GPU compiling what a call launches may outlast the one before."""
        tables = self.client.tables
        fill(tables.control[ClientWord.STEP], int(tables.control[ClientWord.STEP]) + 1)

    def call(self, call: Call) -> None:
        """Run a step of one call with its servers in turn."""
        tables = self.client.tables
        self.begin()
        dispatch(tables, call.layer, call.rows, call.ids, call.n_rows)
        for end in self.ends:
            end.enqueue_pass()
        wait_replies(tables, call.layer, call.rows, call.ids, call.n_rows)
        combine(tables, call.layer, call.rows, call.ids, call.weights, call.n_rows, call.out)
        settle()

    def link(self, place: int, *, live: bool = True) -> None:
        """Tell the client of a server."""
        link = Link(
            request=self.requests[place].data_ptr(),
            reply=self.replies[place].data_ptr(),
            incarnation=SERVER + place,
            live=live,
        )
        self.client.link(place, link)

    def routes(self) -> torch.Tensor:
        """Expert e first at server e % servers, then at the following ones."""
        expert = torch.arange(self.shape.experts)[:, None] + torch.arange(self.replicas)[None, :]
        return (expert % self.servers).to(torch.int32).expand(self.shape.layers, -1, -1).contiguous()

    def request_slot(self, place: int, slot: int = 0) -> torch.Tensor:
        """Bytes of a request's slot."""
        return slot_bytes(self.requests[place], self.shape.request_window.slot_offset(slot))

    def reply_slot(self, place: int, slot: int = 0) -> torch.Tensor:
        """Bytes of a reply's slot."""
        return slot_bytes(self.replies[place], self.shape.reply_window.slot_offset(slot))


def give_patience(client: GpuClient, patience_s: float, wait_s: float | None = None) -> None:
    """Let a client suspect servers after `patience_s`, and wait `wait_s` for whom it has no other."""
    client.tables.limits.fill_(int(patience_s * 1e9))
    fill(client.tables.control[ClientWord.RUN_NS], int((wait_s or 8 * patience_s) * 1e9))
    fill(client.tables.control[ClientWord.STEP], 1)


def slot_bytes(window: torch.Tensor, offset: int) -> torch.Tensor:
    """A window from one of its slots on."""
    return window[offset:]
