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

import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.version import __version__

from eaas.integrations.vllm_options import PoolOptions, Refused, tried, why_not

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


def register() -> None:
    """Called by vLLM in each of its processes, before any model is made."""
    if not tried(__version__):
        # Nothing inside is touched then, but an option that would have no effect is refused.
        VllmConfig.__post_init__ = _refusing(VllmConfig.__post_init__)
        return
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    # Methods of the base classes, which GPT-OSS's, DBRX's and the Transformers backend's experts inherit: a class
    # registered in place of RoutedExperts would not be theirs.
    RoutedExperts._get_quant_method = _choose(RoutedExperts._get_quant_method)
    DefaultModelLoader._get_weights_iterator = _without_experts(DefaultModelLoader._get_weights_iterator)


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
        from experts.model import EXPERT_TENSORS

        folder, files, safe, _ = loader._prepare_weights(
            *(source.model_or_path, source.subfolder, source.revision),
            *(source.fall_back_to_pt, source.allow_patterns_overrides),
        )
        if not safe:
            raise Refused(f"{source.model_or_path} holds no safetensors, which are all that is read beside a pool.")
        vllm_layer.compare(folder)
        if not loader.counter_before_loading_weights:
            loader.counter_before_loading_weights = time.perf_counter()  # what it says of loading begins there
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if not re.search(EXPERT_TENSORS, name):
                        yield source.prefix + name, file.get_tensor(name)

    return tensors
