"""Experts in this process: each token's terms in their order, in the same bits whoever else is served."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.local_experts import LocalExperts, combine_reference
from experts.gpu.ffn import ffn_reference
from experts.gpu.weights import ExpertWeights
from tests.gpu.aot import compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, gpus, poisoned, same_bits

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, TOP_K = 144, 72, 2, 5, 3


class Case:
    """Two layers of experts in slots of no order, and tokens for one of them."""

    def __init__(self, seed: int, tokens: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        wide, high = (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
        slots = LAYERS * EXPERTS
        self.weights = ExpertWeights.allocate(slots=slots, hidden=HIDDEN, intermediate=INTERMEDIATE, device=DEVICE)
        for slot in range(slots):
            matrices = [torch.randn(shape, generator=draw) / shape[1] ** 0.5 for shape in (wide, wide, high)]
            self.weights.load(slot, *matrices)
        self.table = torch.randperm(slots, generator=draw).to(torch.int32).view(LAYERS, EXPERTS)
        self.experts = self.local()
        self.rows = torch.randn(tokens, HIDDEN, generator=draw).bfloat16()
        chosen = [torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens)]
        self.ids = torch.stack(chosen).to(torch.int32)
        self.gates = torch.rand(tokens, TOP_K, generator=draw)

    def local(self) -> LocalExperts:
        return LocalExperts(weights=self.weights, table=self.table.to(DEVICE), top_k=TOP_K, max_rows=64)

    def run(self, only: slice = slice(None), n: int | None = None) -> torch.Tensor:
        rows, ids, gates = (tensor[only].to(DEVICE) for tensor in (self.rows, self.ids, self.gates))
        n_rows = torch.tensor([len(rows) if n is None else n], dtype=torch.int32, device=DEVICE)
        out = poisoned(len(rows), HIDDEN)
        self.experts.enqueue(1, rows, ids, gates, n_rows, out)
        return out.cpu()

    def wanted(self) -> torch.Tensor:
        experts = [self.weights.unload(int(slot)) for slot in self.table[1]]
        pairs = [
            torch.cat([ffn_reference(row[None].to(DEVICE), *experts[e]) for e in ids])
            for row, ids in zip(self.rows, self.ids.tolist(), strict=True)
        ]
        return (self.gates.double()[:, :, None] * torch.stack(pairs).cpu()).sum(dim=1)


def test_tokens_get_their_terms() -> None:
    seed = fresh_seed()
    case = Case(seed, tokens=9)
    out = case.run(n=8)
    assert distance(out[:8], case.wanted()[:8]) < 2e-3, f"seed {seed}"
    assert out[8].isnan().all(), f"seed {seed}: a token that is not there was written"


def test_terms_are_added_in_their_order() -> None:
    seed = fresh_seed()
    case = Case(seed, tokens=4)
    out = case.run()
    answers = case.experts._out[: 4 * TOP_K].view(4, TOP_K, HIDDEN).cpu()
    assert same_bits(out, combine_reference(answers, case.gates)), f"seed {seed}"


def test_a_token_has_the_same_bits_alone_and_in_a_batch() -> None:
    seed = fresh_seed()
    case = Case(seed, tokens=40)
    whole = case.run()
    assert whole.isfinite().all(), f"seed {seed}"
    for only in (slice(13, 14), slice(20, 30)):
        assert same_bits(case.run(only), whole[only]), f"seed {seed}, tokens {only}"


def test_a_token_whose_expert_is_not_here_gets_nan_and_no_other_does() -> None:
    seed = fresh_seed()
    case = Case(seed, tokens=6)
    whole = case.run()
    case.table[1, 2] = -1
    case.experts = case.local()
    out = case.run()
    lost = (case.ids == 2).any(dim=1)
    assert out[lost].isnan().all(), f"seed {seed}"
    assert same_bits(out[~lost], whole[~lost]), f"seed {seed}"


def test_what_cannot_be_is_said() -> None:
    case = Case(fresh_seed(), tokens=4)
    with pytest.raises(ValueError, match=r"int32 \[layers, experts\] on"):
        LocalExperts(weights=case.weights, table=case.table.long().to(DEVICE), top_k=TOP_K, max_rows=4)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    rows, ids, gates = case.rows.to(DEVICE), case.ids.to(DEVICE), case.gates.to(DEVICE)
    with pytest.raises(ValueError, match="MoE layer 2 of 2; 0 to 1 exist"):
        case.experts.enqueue(2, rows, ids, gates, one, poisoned(4, HIDDEN))
    with pytest.raises(ValueError, match="65 rows; 1 to 64 are possible"):
        case.experts.enqueue(0, poisoned(65, HIDDEN, dtype=torch.bfloat16), ids, gates, one, poisoned(65, HIDDEN))
    with pytest.raises(ValueError, match=r"weights is torch\.float64"):
        case.experts.enqueue(0, rows, ids, gates.double(), one, poisoned(4, HIDDEN))


@pytest.mark.skipif(not gpus(), reason="needs 1 GPU, found 0")
def test_a_graph_follows_what_it_finds_on_the_device() -> None:
    seed = fresh_seed()
    case = Case(seed, tokens=40)
    whole = case.run()
    rows, ids, gates = (tensor.to(DEVICE) for tensor in (case.rows, case.ids, case.gates))
    n_rows, out = torch.tensor([40], dtype=torch.int32, device=DEVICE), poisoned(40, HIDDEN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.experts.enqueue(1, rows, ids, gates, n_rows, out)
    for shift, n in ((0, 40), (3, 17), (11, 40)):
        for held, given in ((rows, case.rows), (ids, case.ids), (gates, case.gates)):
            held.copy_(given.roll(shift, 0))
        n_rows.fill_(n)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out[:n].cpu(), whole.roll(shift, 0)[:n]), f"seed {seed}, {n} tokens moved by {shift}"
        assert out[n:].isnan().all(), f"seed {seed}"


def test_combining_compiles_without_spills() -> None:
    kinds = {
        "answers": "*fp32",
        "ids": "*i32",
        "table": "*i32",
        "weights": "*fp32",
        "n_rows": "*i32",
        "out": "*fp32",
    }
    built = compile_kernel(
        "benchmarks.gpu.local_experts",
        "_combine",
        kinds,
        {"HIDDEN": 7168, "TOP_K": 8, "WIDTH": 1024},
        num_warps=4,
    )
    assert built.spills == 0
    # Terms are rounded one by one.
    assert "fma" not in built.ptx
