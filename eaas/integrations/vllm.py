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

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.version import __version__

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

# What this reaches into is vLLM's own and moves between releases: others are refused by name.
TRIED = ("0.31.0", "0.32.0")
# All are read by the loader that is told here to leave experts out.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "mistral", "dummy")
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
    if not _tried(__version__):
        # Nothing inside is touched then, but an option that would have no effect is refused.
        VllmConfig.__post_init__ = _refusing(VllmConfig.__post_init__)
        return
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    # Methods of the base classes, which GPT-OSS's, DBRX's and the Transformers backend's experts inherit: a class
    # registered in place of RoutedExperts would not be theirs.
    RoutedExperts._get_quant_method = _choose(RoutedExperts._get_quant_method)
    DefaultModelLoader._get_weights_iterator = _without_experts(DefaultModelLoader._get_weights_iterator)


def _tried(version: str) -> bool:
    return version.partition("+")[0] in TRIED


def _refusing(stock: Callable[[VllmConfig], None]) -> Callable[[VllmConfig], None]:
    def check(config: VllmConfig) -> None:
        stock(config)
        if PoolOptions.of(config):
            raise Refused(str(why_not(config, __version__)))

    return check


def _choose(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What computes a layer's experts: the pool where one is named, else what vLLM itself chooses."""

    def choose(layer: RoutedExperts, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        config = get_current_vllm_config()
        options = PoolOptions.of(config)
        if options is None:
            return stock(layer, prefix, quant_config, moe_config)
        from eaas.integrations.vllm_layer import PoolExperts

        return PoolExperts(layer, prefix, moe_config, options, config)

    return choose


def _without_experts(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint's tensors but for those of routed experts, of which nothing is read."""

    def tensors(loader: DefaultModelLoader, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if PoolOptions.of(get_current_vllm_config()) is None:
            yield from stock(loader, source)
            return
        from safetensors import safe_open

        from eaas.integrations import vllm_layer

        folder, files, safe, _ = loader._prepare_weights(
            *(source.model_or_path, source.subfolder, source.revision),
            *(source.fall_back_to_pt, source.allow_patterns_overrides),
        )
        if not safe:
            raise Refused(
                f"{source.model_or_path} holds no safetensors, which are all that is read beside a pool."
            )
        vllm_layer.compare(folder)
        if not loader.counter_before_loading_weights:
            loader.counter_before_loading_weights = (
                time.perf_counter()
            )  # what it says of loading begins there
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if not _EXPERT_TENSOR.search(name):
                        yield source.prefix + name, file.get_tensor(name)

    return tensors


def why_not(config: VllmConfig, version: str) -> str | None:
    """What of a server does not go with a pool, in words; None where all does."""
    parallel, device = config.parallel_config, config.device_config.device_type
    if not _tried(version):
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
    loading, quantized = config.load_config.load_format, config.model_config.quantization
    if loading not in _LOAD_FORMATS or quantized == "torchao":
        return (
            f"--load-format {loading} (quantization: {quantized}) reads experts, which are not here. Load as"
            f" {', '.join(_LOAD_FORMATS)}, and not by torchao."
        )
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
