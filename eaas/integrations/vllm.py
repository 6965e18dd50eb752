"""The experts of a vLLM server, computed by an expert pool: `--additional-config '{"eaas": {"router": "HOST:PORT"}}'`.

    eaas pool ./DeepSeek-V3                          # prints the router's address
    vllm serve ./DeepSeek-V3 --additional-config '{"eaas": {"router": "127.0.0.1:7000"}}'

vLLM finds `register` by the entry point of this distribution, in each of its processes. Without that option nothing
changes. With it vLLM keeps doing everything but the routed experts: their tensors are not read, and where a layer's
experts would be computed, one operator sends the rows to the pool. The option is part of the hash that vLLM's compile
cache goes by, so that no graph of a stock server is used. docs/vllm.md tells more.
"""

# vLLM has an environment of its own, with other versions of what both need.
# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import extract_layer_index
from vllm.version import __version__

from eaas.pool import (
    ConnectFailed,
    Dtype,
    ExpertShape,
    ExpertsLost,
    HostArrays,
    Pool,
    Threads,
    connect,
    fingerprint_of,
)

log = logging.getLogger("vllm.eaas")

# What this reaches into is vLLM's own and moves between releases: others are refused by name.
TRIED = ("0.31.0", "0.32.0")
# One try of a call. Between two of them the worker hears signals.
_TRY_S = 2.0
_PAUSE_S = 0.2
# More of vLLM's threads would wait for servers longer at one another than at them.
_MOST_THREADS = 8
_TYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16}
# Where vLLM puts the cores that it gives to its worker's threads.
_BINDINGS = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES")
# Not ".shared_experts.": those stay with vLLM.
_EXPERT_TENSOR = re.compile(r"\.experts\.")
# Where vLLM cuts its graphs for a GPU, these must be among the operators it cuts at.
_CUTS = ("vllm::moe_forward", "vllm::moe_forward_shared")


class Refused(RuntimeError):
    """This vLLM, or an option of it, does not go with a pool; the text says what was found and what to do."""


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """What stands under "eaas" in vLLM's additional configuration.

    Attributes:
        router: host:port of the pool's router; of several, all with commas between.
        transport: As the pool's: shm or nixl.
        tls: Folder with ca.pem, cert.pem and key.pem of the role `client`; None: the pool has no TLS.
    """

    router: str
    transport: str = "shm"
    tls: str | None = None

    @classmethod
    def of(cls, config: VllmConfig) -> PoolOptions | None:
        """Those that vLLM was started with; None where it names no pool. Raises Refused."""
        additional = config.additional_config
        found = additional.get("eaas") if isinstance(additional, Mapping) else None
        if found is None:
            return None
        try:
            return cls(**found)
        except TypeError as error:
            raise Refused(
                f'"eaas" in --additional-config is {found!r} ({error}). Give {{"router": "HOST:PORT"}}; "transport" and'
                ' "tls" may stand beside it.'
            ) from error


def register() -> None:
    """Called by vLLM in each of its processes, before any model is made."""
    # Methods of the base classes, which GPT-OSS's, DBRX's and the Transformers backend's experts inherit: a class
    # registered in place of RoutedExperts would not be theirs.
    RoutedExperts._get_quant_method = _choose(RoutedExperts._get_quant_method)
    DefaultModelLoader._get_weights_iterator = _without_experts(DefaultModelLoader._get_weights_iterator)


def _choose(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What computes a layer's experts: the pool where one is named, else what vLLM itself chooses."""

    def choose(layer: RoutedExperts, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        config = get_current_vllm_config()
        options = PoolOptions.of(config)
        if options is None:
            return stock(layer, prefix, quant_config, moe_config)
        return _PoolExperts(layer, prefix, moe_config, _join(options, config))

    return choose


def _without_experts(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint's tensors but for those of routed experts, of which nothing is read."""

    def tensors(loader: DefaultModelLoader, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if PoolOptions.of(get_current_vllm_config()) is None:
            yield from stock(loader, source)
            return
        _, files, safe, _ = loader._prepare_weights(
            *(source.model_or_path, source.subfolder, source.revision),
            *(source.fall_back_to_pt, source.allow_patterns_overrides),
        )
        if not loader.counter_before_loading_weights:
            loader.counter_before_loading_weights = (
                time.perf_counter()
            )  # what it says of loading begins there
        if not safe:
            raise Refused(
                f"{source.model_or_path} holds no safetensors, which are all that is read beside a pool."
            )
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if not _EXPERT_TENSOR.search(name):
                        yield source.prefix + name, file.get_tensor(name)

    return tensors


def why_not(config: VllmConfig, version: str) -> str | None:
    """What of a server does not go with a pool, in words; None where all does."""
    parallel, device = config.parallel_config, config.device_config.device_type
    if version.partition("+")[0] not in TRIED:
        return f"vLLM {version} was not tried with this plug-in; {' and '.join(TRIED)} were. Install one of those."
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        return (
            f"the tensor, pipeline and data parallel sizes are {parallel.tensor_parallel_size},"
            f" {parallel.pipeline_parallel_size} and {parallel.data_parallel_size}; 1 is needed. Start several servers,"
            " each by itself: they may share a pool."
        )
    if parallel.enable_eplb:
        return "--enable-eplb moves experts between workers, which have none here. Leave it out: the pool balances."
    if config.lora_config is not None:
        return "--enable-lora may adapt experts, which the pool computes as they are stored. Leave it out."
    compilation = config.compilation_config
    if device != "cpu" and compilation.cudagraph_mode.name != "NONE":
        cuts = compilation.splitting_ops or []
        if compilation.cudagraph_mode.name != "PIECEWISE" or not set(_CUTS) <= set(cuts):
            wanted = {"cudagraph_mode": "PIECEWISE", "splitting_ops": [*compilation._attention_ops, *_CUTS]}
            return (
                "a CUDA graph cannot hold a call that leaves the process. Pass --enforce-eager, or"
                f" --compilation-config '{json.dumps(wanted)}'."
            )
    return None


# Of this process, which has one model: the worker that vLLM starts.
_pool: Pool | None = None


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
        _pool = connect(
            options.router,
            shape=shape,
            fingerprint=fingerprint_of(model.model),
            transport=options.transport,
            tls=options.tls,
            threads=_threads(),
        )
    return _pool


def _threads() -> Threads:
    """Those that torch computes with here: between two loops they spin, and would keep their cores from servers."""
    count = min(torch.get_num_threads(), _MOST_THREADS)
    if count == 1:
        return Threads()
    bound = (re.findall(r"\d+", os.environ.get(name, "")) for name in _BINDINGS)
    cores = next((tuple(map(int, found)) for found in bound if len(found) >= count), (-1,) * count)
    library = ctypes.CDLL(f"{torch.__path__[0]}/lib/libtorch_cpu.so")
    address = ctypes.cast(library.torch_parallel_for, ctypes.c_void_p).value
    return Threads(cores=cores[:count], parallel_for=address or 0)


class _PoolExperts(FusedMoEMethodBase):
    """How one layer computes its experts: it has no weights, and asks the pool."""

    def __init__(self, layer: RoutedExperts, prefix: str, moe: Any, pool: Pool) -> None:
        super().__init__(moe)
        index = extract_layer_index(prefix)
        shape = pool.shape
        found = (moe.num_experts, moe.experts_per_token, moe.hidden_dim, moe.has_bias)
        needed = (shape.experts, shape.top_k, shape.hidden, shape.biased)
        if index not in shape.layer_ids or found != needed:
            raise Refused(
                f"{prefix}: (experts, of each token, hidden size, biases) are {found}, in the pool {needed}, which"
                f" has the layers {list(shape.layer_ids)}. Start the pool from this checkpoint, and vLLM without"
                " redundant experts and without a draft model that has any."
            )
        if layer.apply_router_weight_on_input:
            raise Refused(f"{prefix} weights its rows before its experts; the pool does so behind them.")
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
        *shared: Any,
        **others: Any,
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
    while True:
        try:
            pool.apply_pointers(arrays, _TRY_S)
            return out.to(rows.device)
        except (ConnectFailed, ExpertsLost) as error:
            log.warning("Waiting for the experts of layer %d: %s", layer, error)
            time.sleep(_PAUSE_S)


_library = torch.library.Library("eaas", "DEF")
_library.define("experts(Tensor rows, Tensor weights, Tensor ids, int layer) -> Tensor")
_library.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "eaas::experts", lambda rows, weights, ids, layer: torch.empty_like(rows), lib=_library
)
