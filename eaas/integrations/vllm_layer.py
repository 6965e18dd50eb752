"""What stands in for a layer's routed experts in vLLM's worker: no weights, and an operator that asks the pool."""

# vLLM has an environment of its own, with other versions of what both need.
# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import logging
import os
import re
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.utils import extract_layer_index
from vllm.version import __version__

from eaas.integrations.vllm_options import PoolOptions, Refused, why_not
from eaas.pool import ConnectFailed, Dtype, ExpertShape, ExpertsLost, HostArrays, Pool, Threads, connect
from experts.checkpoint import Checkpoint
from experts.model import SWIGLU

log = logging.getLogger("vllm.eaas")

# One try of a call, and the longest. Between two of them the worker hears signals.
_TRY_S, _LAST_TRY_S = 2.0, 64.0
_PAUSE_S = 0.2
# More of vLLM's threads would wait for servers longer at one another than at them.
_MOST_THREADS = 8
# How vLLM tells its worker's threads which cores they have.
_BINDINGS = {
    "KMP_AFFINITY": r".*proclist=\[([\d,]+)\]",
    "GOMP_CPU_AFFINITY": r"([\d ]+)",
    "OMP_PLACES": r"\{([\d,]+)\}",
}
_TYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16}

# Of this process, which has one model: the worker that vLLM starts.
_pool: Pool | None = None
_taken: set[int] = set()  # layers that are computed here


def _join(options: PoolOptions, config: VllmConfig) -> Pool:
    """The connection of this process, made with the model's first layer. Raises Refused, ConnectFailed."""
    global _pool
    if _pool is None:
        reason = why_not(config, __version__)
        if reason:
            raise Refused(f"An expert pool and this vLLM: {reason}")
        model = config.model_config
        if model.dtype not in _TYPES:
            raise Refused(f"--dtype {model.dtype} is not computed by a pool. Use bfloat16 or float32.")
        shape = ExpertShape.from_config(model.hf_config.to_dict() | {"architectures": model.architectures})
        threads = _threads()
        _pool = connect(
            options.router,
            model=options.model,
            shape=shape,
            transport=options.transport,
            tls=options.tls,
            threads=threads,
        )
        log.info("Experts come from the pool at %s: %d layers of %d.", _pool.router, shape.layers, shape.experts)
    return _pool


def compare(folder: str) -> None:
    """See that the checkpoint in a folder is the pool's. Raises Refused, CheckpointInvalid."""
    found = Checkpoint.open(folder).fingerprint
    if _pool is None or found != _pool.fingerprint:
        known = f"the pool at {_pool.router} serves {_pool.fingerprint[:16]}" if _pool else "it has no pool"
        raise Refused(f"{folder} holds the checkpoint {found[:16]}; {known}. Start a pool from the same files.")


def _threads() -> Threads:
    """Those that torch computes with here: between two loops they spin, and would keep their cores from servers."""
    count = min(torch.get_num_threads(), _MOST_THREADS)
    if count == 1:
        return Threads()
    forms = (re.fullmatch(form, os.environ.get(name, "")) for name, form in _BINDINGS.items())
    bound = next((re.findall(r"\d+", form[1]) for form in forms if form), [])
    cores = tuple(map(int, bound[:count])) if len(bound) >= count else (-1,) * count
    library = ctypes.CDLL(f"{torch.__path__[0]}/lib/libtorch_cpu.so")
    address = ctypes.cast(library.torch_parallel_for, ctypes.c_void_p).value
    return Threads(cores=cores, parallel_for=address or 0)


class PoolExperts(FusedMoEMethodBase):
    """How one layer computes its experts: it has no weights, and asks the pool."""

    def __init__(self, layer: RoutedExperts, prefix: str, moe: Any, options: PoolOptions, config: VllmConfig) -> None:
        """Raises Refused, ConnectFailed."""
        super().__init__(moe)
        shape = _join(options, config).shape
        index = extract_layer_index(prefix)
        found = (moe.num_experts, moe.experts_per_token, moe.hidden_dim, moe.has_bias)
        needed = (shape.experts, shape.top_k, shape.hidden, shape.biased)
        if index not in shape.layer_ids or found != needed:
            raise Refused(
                f"{prefix}: (experts, of each token, hidden size, biases) are {found}, in the pool {needed}, which"
                f" has the layers {list(shape.layer_ids)}. Start the pool from this checkpoint, and vLLM without"
                " redundant experts and without a draft model that has any."
            )
        plain = shape.activation == SWIGLU
        if moe.activation.value != ("silu" if plain else "swigluoai") or (plain and moe.swiglu_limit):
            raise Refused(
                f"{prefix} computes {moe.activation.value} with the limit {moe.swiglu_limit}; the pool computes"
                f" {'SwiGLU' if plain else 'the form of GPT-OSS'}. Serve this model without a pool."
            )
        if layer.apply_router_weight_on_input:
            raise Refused(f"{prefix} weights its rows before its experts; the pool does so behind them.")
        if index in _taken:
            raise Refused(
                f"{prefix}: this process has layer {index} of a model already. A draft model with experts, or a second"
                " model in one process, cannot use a pool."
            )
        _taken.add(index)
        self._number = shape.layer_ids.index(index)

    def create_weights(self, *arguments: Any, **options: Any) -> None:
        """None."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: it is the pool that stores them."""

    def maybe_roundup_sizes(self, hidden_size: int, intermediate: int, *others: Any) -> tuple[int, int]:
        """As they are."""
        return hidden_size, intermediate

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> torch.Tensor:
        """[n, hidden], as x is. Shared experts are vLLM's."""
        return torch.ops.eaas.experts(x, topk_weights, topk_ids, self._number)


def _experts(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """One layer's experts, from the pool, however long that takes: a row is computed or waited for, never made up.

    An error here would end vLLM's engine with all of its requests, so that no outage of the pool is one.
    """
    pool = _pool
    if pool is None:
        raise RuntimeError("eaas::experts ran in a process whose model has no expert pool.")
    here = rows.cpu().contiguous()
    weights, ids = weights.to("cpu", torch.float32).contiguous(), ids.cpu().contiguous()
    out = torch.empty_like(here)
    kind = _TYPES[rows.dtype]
    arrays = HostArrays(
        *(layer, here.data_ptr(), kind, len(here), ids.data_ptr(), ids.element_size()),
        *(weights.data_ptr(), out.data_ptr(), kind),
    )
    try_s = _TRY_S
    while True:
        try:
            pool.apply_pointers(arrays, try_s)
            return out.to(rows.device)
        except (ConnectFailed, ExpertsLost) as error:
            log.warning("Waiting for the experts of layer %d: %s", layer, error)
            # It may be the work that takes so long, with few servers left.
            try_s = min(2 * try_s, _LAST_TRY_S)
            time.sleep(_PAUSE_S)


def _like(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


_library = torch.library.Library("eaas", "DEF")
_library.define("experts(Tensor rows, Tensor weights, Tensor ids, int layer) -> Tensor")
_library.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake("eaas::experts", _like, lib=_library)
