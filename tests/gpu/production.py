"""What a GPU's processes make of a published model, for `tests.gpu.recorder`: decoders, clients and servers."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch

from benchmarks.gpu.decode import QWEN3_30B_A3B, greedily, plan_of
from benchmarks.make_model import SHAPES
from eaas.gpu.decoder import GpuDecoder
from eaas.gpu.weights import DeviceWeights
from eaas.model.families import spec_of, tensors_of
from eaas.model.spec import ModelSpec
from experts.gpu.backend import GpuBackend
from experts.gpu.client import GpuClient, Link
from experts.gpu.server import GpuServer
from experts.model import Dtype, ExpertShape
from experts.wire import WireShape

BLOCK_TOKENS = 16
CONTEXT = 1024
S = SHAPES["S"]
# The built-in model of shape S, as `make_model` describes it.
BUILT_IN_S = QWEN3_30B_A3B | {
    "vocab_size": S.vocab, "hidden_size": S.hidden, "num_hidden_layers": S.layers, "num_attention_heads": S.q_heads,
    "num_key_value_heads": S.kv_heads, "head_dim": S.head_dim, "num_experts": S.experts,
    "num_experts_per_tok": S.top_k, "moe_intermediate_size": S.intermediate,
}  # fmt: skip
MODELS = MappingProxyType({"S": BUILT_IN_S, "Qwen3-30B-A3B": QWEN3_30B_A3B})
EXPERTS = MappingProxyType(
    {
        "S": (S.layers, S.experts, S.hidden, S.intermediate, S.top_k),
        "Qwen3-30B-A3B": (48, 128, 2048, 768, 8),
        "DeepSeek-V3": (58, 256, 7168, 2048, 8),
    }
)


def wire_of(model: str, dtype: Dtype = Dtype.BFLOAT16) -> WireShape:
    """A model's experts."""
    layers, experts, hidden, intermediate, top_k = EXPERTS[model]
    shape = ExpertShape(
        architecture="", layer_ids=tuple(range(layers)), experts=experts, hidden=hidden, intermediate=intermediate,
        top_k=top_k,
    )  # fmt: skip
    return WireShape(shape=shape, dtype=dtype, model_hash=1 << 63)


def client_of(model: str, dtype: Dtype = Dtype.BFLOAT16, max_tokens: int = 512) -> GpuClient:
    """A worker's, with one server that holds every expert."""
    client = GpuBackend(torch.device("cuda", 0)).client(
        wire_of(model, dtype), incarnation=1, lanes=1, bell_page=0, max_tokens=max_tokens, patience_s=1.0
    )
    client.link(0, Link(request=1 << 30, reply=1 << 31, incarnation=2))
    client.write_tables(torch.zeros_like(client.tables.routes[0].cpu()))
    return client


def server_of(model: str, dtype: Dtype = Dtype.BFLOAT16) -> GpuServer:
    """One with room for as many experts as a GPU holds."""
    return GpuBackend(torch.device("cuda", 0)).server(wire_of(model, dtype), incarnation=2, cores=(), bell_page=0)


def spec_of_model(model: str, layers: int | None = None) -> ModelSpec:
    """A model's description, of so many of its layers."""
    config = MODELS[model]
    return spec_of(config | {"num_hidden_layers": layers or config["num_hidden_layers"]})


def decoder_of(model: str, layers: int | None = None, max_rows: int = 512, taps: bool = False) -> GpuDecoder:
    """A worker's decoder with its client."""
    spec = spec_of_model(model, layers)
    shapes = {role: plan.shape for role, plan in tensors_of(spec).items()}
    weights = DeviceWeights.upload(
        spec, lambda role: torch.empty(shapes[role], dtype=torch.bfloat16, device="cuda"), "cuda"
    )
    spec = replace(spec, max_model_len=CONTEXT + 4 * BLOCK_TOKENS)
    blocks = max_rows * -(-spec.max_model_len // BLOCK_TOKENS)
    return GpuDecoder(
        spec,
        weights,
        client_of(model, max_tokens=max_rows),
        kv_blocks=blocks,
        max_rows=max_rows,
        device="cuda:0",
        taps=taps,
    )


def decode_step(decoder: GpuDecoder, batch: int, position: int = CONTEXT) -> None:
    """One greedy step of `batch` sequences at a position."""
    columns = -(-decoder.spec.max_model_len // BLOCK_TOKENS)
    tables = np.arange(batch * columns, dtype=np.int32).reshape(batch, columns)
    plan = plan_of([1] * batch, [position] * batch, range(batch), tables, range(batch))
    decoder.step_tokens(plan, greedily(batch), 60.0)


def expert_call(client: GpuClient, batch: int) -> None:
    """The experts of one layer for `batch` rows."""
    shape = client.shape
    rows = torch.empty(batch, shape.hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.empty(batch, shape.top_k, dtype=torch.int32, device="cuda")
    weights = torch.empty(batch, shape.top_k, device="cuda")
    count = torch.empty(1, dtype=torch.int32, device="cuda")
    client.enqueue(1, rows, ids, weights, count, torch.empty(batch, shape.hidden, device="cuda"))
