"""What vLLM is told of its expert pool, and what of a vLLM server does not go with one."""

# vLLM has an environment of its own, with other versions of what both need.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.config import VllmConfig

# What this reaches into is vLLM's own and moves between releases: others are refused by name.
TRIED = ("0.31.0", "0.32.0")
# All are read by the loader that is told here to leave experts out.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "mistral", "dummy")
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
        model: Its name at a pool of several; empty: the one of this shape.
    """

    router: str
    transport: str = "shm"
    tls: str | None = None
    model: str = ""

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
                f'"eaas" in --additional-config is {found!r} ({error}). Give {{"router": "HOST:PORT"}}; "transport",'
                ' "tls" and "model" may stand beside it.'
            ) from error


def tried(version: str) -> bool:
    """Whether this reached into a vLLM of that version before."""
    return version.partition("+")[0] in TRIED


def why_not(config: VllmConfig, version: str) -> str | None:
    """What of a server does not go with a pool, in words; None where all does."""
    parallel, device = config.parallel_config, config.device_config.device_type
    if not tried(version):
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
