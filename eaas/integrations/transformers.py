"""Experts of transformers' models, computed by an expert pool: `model.set_experts_implementation("eaas")`.

    from eaas.integrations import transformers as eaas

    model = eaas.load("./DeepSeek-V3")          # everything but the experts
    with eaas.connect("127.0.0.1:7000", model):  # what `eaas pool ./DeepSeek-V3` printed
        model.generate(...)

Importing this module registers the implementation. transformers keeps doing everything else: attention, gate, shared
experts, sampling. How rows are added up, `eaas.pool.Pool.apply` says; docs/transformers.md tells more.
"""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from eaas import pool as pools
from eaas.model.families import tensors_of
from eaas.model.loader import load_spec
from eaas.pool import START_S, ConnectFailed, Pool
from experts.backend import ExpertsLost
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.formats import scheme_of
from experts.matrices import holds, read, size_of
from experts.model import EXPERT_TENSORS, ConfigInvalid, ExpertShape
from experts.quantized import Quantized

__all__ = ["ConnectFailed", "ExpertsLost", "NotConnected", "Pool", "connect", "load"]

log = logging.getLogger(__name__)

IMPLEMENTATION = "eaas"


class NotConnected(RuntimeError):
    """A layer's experts are to be computed by a pool, and none was connected to its model."""


# By module of experts: the pool, and the layer's number among MoE layers.
_connected: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Pool, int]] = weakref.WeakKeyDictionary()


def connect(
    address: str,
    model: PreTrainedModel,
    *,
    checkpoint: str | Path | None = None,
    transport: str = "shm",
    tls_dir: str | Path | None = None,
    deadline_s: float = 30.0,
    start_s: float = START_S,
) -> Pool:
    """Have a pool compute the experts of a model from now on.

    Args:
        address: host:port of the pool's router; or the URL of a gateway, whose cluster's expert servers are used.
        model: Any with transformers' experts interface whose experts EaaS serves. Its own expert weights, if it has
            any, are not used.
        checkpoint: Folder that the model was loaded from, to see that the pool serves the same, and as which of its
            models; by default the one that the model itself names. Where there is none, only the sizes are compared.
        transport, deadline_s, start_s: As of `eaas.pool.connect`. tls_dir: Its `tls`.

    Returns:
        The connection. Close it, or use it in `with`; the model cannot compute afterwards until it is connected again.

    Raises:
        ConnectFailed: no such pool, it serves another model, or EaaS cannot compute this model's experts.
    """
    try:
        shape = ExpertShape.from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    except ConfigInvalid as error:
        raise ConnectFailed(str(error)) from error
    layers = _expert_modules(model, shape)
    pool = pools.connect(
        address,
        shape=shape,
        fingerprint=_fingerprint(model, checkpoint),
        transport=transport,
        tls=tls_dir,
        deadline_s=deadline_s,
        start_s=start_s,
    )
    for number, module in enumerate(layers):
        _connected[module] = (pool, number)
    model.set_experts_implementation(IMPLEMENTATION)
    return pool


def load(name: str | Path, **options: Any) -> PreTrainedModel:
    """A causal language model without its experts, which `connect` gives it.

    No expert weight is read from the checkpoint, and none takes memory: the modules of experts have no parameters.
    What else a checkpoint holds quantized is dequantized, unless a `quantization_config` says how transformers is to
    keep it.

    Args:
        name: Folder or hub id.
        options: As for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ConnectFailed: EaaS cannot compute this model's experts.
    """
    config = options.pop("config", None) or AutoConfig.from_pretrained(name)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    options = {"config": config, "experts_implementation": IMPLEMENTATION} | options
    folder = None if "quantization_config" in options else _quantized(name, config, options.get("revision"))
    if folder is None:
        model: Any = _without_experts(model_class).from_pretrained(name, **options)
    else:
        if options.get("dtype", "auto") == "auto":
            options["dtype"] = config.dtype or torch.bfloat16
        tensors = _dequantized(Checkpoint.open(folder), options["dtype"])
        model = _without_experts(model_class).from_pretrained(None, state_dict=tensors, **options)
        model.config._name_or_path = str(name)
        with contextlib.suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(folder)
    # From here on it is like any other: only loading had to be told.
    model.__class__ = model_class
    return model


def _quantized(name: str | Path, config: Any, revision: str | None) -> Path | None:
    """The folder of a checkpoint that is dequantized here; None: transformers reads all that is not of experts.

    Raises:
        ConnectFailed: it is quantized in a way that is not served.
    """
    try:
        method = scheme_of(config.to_dict()).method
    except ConfigInvalid as error:
        raise ConnectFailed(str(error)) from error
    if method:
        del config.quantization_config
    folder = Path(name)
    # MXFP4 is of experts alone.
    if method in ("", "mxfp4") and not _gguf(folder):
        return None
    return folder if folder.is_dir() else Path(snapshot_download(str(name), revision=revision))


def _gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def _dequantized(checkpoint: Checkpoint, dtype: torch.dtype | str) -> dict[str, torch.Tensor]:
    """Tensors but those of experts; matrices that were quantized are of that type. Raises CheckpointInvalid."""
    scheme, tensors = scheme_of(checkpoint.config), dict[str, torch.Tensor]()
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    names = checkpoint.names()
    if _gguf(checkpoint.directory):
        # Each tensor is there under its names in all families.
        names = [plan.name for plan in tensors_of(load_spec(checkpoint)).values()]
    for name in names:
        module, _, part = name.rpartition(".")
        if re.search(EXPERT_TENSORS, name):
            continue
        coded = holds(scheme, checkpoint, module)
        if coded and part in ("weight", "weight_packed", "qweight"):
            matrix = read(scheme, checkpoint, module, *size_of(scheme, checkpoint, module))
            wide = matrix.dequantized() if isinstance(matrix, Quantized) else matrix
            tensors[f"{module}.weight"] = torch.from_numpy(wide).to(kind)
        # What else belongs to codes was read with them.
        elif not coded or not re.search("_scale|zero|g_idx|scales|_shape", part):
            # A copy: torch takes no view of what cannot be written.
            tensor = torch.from_numpy(checkpoint.tensor(name).copy())
            tensors[name] = tensor.view(torch.bfloat16) if checkpoint.dtype(name) == "BF16" else tensor
    return tensors


def _without_experts(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A model class whose models have no parameters of experts, so that transformers finds none to load."""

    def init(self: PreTrainedModel, config: Any, *arguments: Any, **options: Any) -> None:
        model_class.__init__(self, config, *arguments, **options)
        modules: list[Any] = [module for module in self.modules() if hasattr(module, "is_transposed")]
        if not modules:
            raise ConnectFailed(f"{model_class.__name__} has no experts that an implementation could compute.")
        for module in modules:
            for parameter in list(module._parameters):
                del module._parameters[parameter]
            # There is nothing left to initialize, and a family's own code would look for it.
            module._is_hf_initialized = True

    ignored = list(getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ())
    body = {
        "__init__": init,
        # transformers reads the source of a class's module to see what its models can do.
        "__module__": model_class.__module__,
        "_keys_to_ignore_on_load_unexpected": [*ignored, EXPERT_TENSORS],
    }
    return type(model_class.__name__, (model_class,), body)


def _expert_modules(model: PreTrainedModel, shape: ExpertShape) -> list[torch.nn.Module]:
    """The model's modules of experts, in the order of its MoE layers. Raises ConnectFailed."""
    name = type(model).__name__
    found: dict[int, Any] = {
        int(numbers[-1]): module
        for path, module in model.named_modules()
        if hasattr(module, "is_transposed") and (numbers := re.findall(r"\d+", path))
    }
    if tuple(sorted(found)) != shape.layer_ids:
        raise ConnectFailed(
            f"{name} has experts in layers {sorted(found)}, its configuration says {list(shape.layer_ids)}."
        )
    for module in found.values():
        own_gate = type(module)._apply_gate.__name__ != "_default_apply_gate"
        if not module.has_gate or module.has_post_expert_norm or own_gate != shape.family.clamped:
            raise ConnectFailed(
                f"{name}: the experts of this version of transformers have a gate or a norm that is not computed."
            )
    return [found[layer] for layer in shape.layer_ids]


def _fingerprint(model: PreTrainedModel, checkpoint: str | Path | None) -> str:
    """Of the folder that the model came from; empty where that is not known, or not whole."""
    named = str(checkpoint or model.config._name_or_path)
    folder = Path(named)
    if named and not folder.is_dir():
        try:
            cached = try_to_load_from_cache(named, "config.json")
        except HFValidationError:
            cached = None
        folder = Path(cached).parent if isinstance(cached, str) else folder
    try:
        if named:
            return Checkpoint.open(folder).fingerprint
    except CheckpointInvalid as error:
        if checkpoint is not None:
            raise ConnectFailed(str(error)) from error
    log.warning("checkpoint_not_compared model=%s folder=%s", type(model).__name__, named or "unknown")
    return ""


# A compiled model breaks its graph here: the rows leave this process.
@torch.compiler.disable
def experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One layer's experts, as transformers' experts interface calls them.

    Args:
        hidden_states: [n, hidden], on any device, of any floating type.
        top_k_index: [n, k] experts.
        top_k_weights: [n, k].

    Returns:
        [n, hidden], where and what hidden_states is.

    Raises:
        NotConnected: no pool was connected to this model.
        ExpertsLost: no live replica of some expert answered within the deadline; nothing is broken.
    """
    place = _connected.get(module)
    if place is None:
        raise NotConnected(
            'This model\'s experts are set to "eaas" and no pool computes them. Call'
            " eaas.integrations.transformers.connect(ADDRESS, model)."
        )
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        return _ForwardOnly.apply(hidden_states, top_k_index, top_k_weights, *place)  # type: ignore[no-any-return]
    return _exchange(hidden_states, top_k_index, top_k_weights, *place)


def _exchange(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, pool: Pool, layer: int
) -> torch.Tensor:
    rows = hidden_states.detach().cpu()
    if rows.dtype is not torch.bfloat16:
        rows = rows.float()
    weights = top_k_weights.detach().to("cpu", torch.float32)
    out = pool.apply(layer, rows, top_k_index.detach().cpu(), weights)
    return out.to(hidden_states.device, hidden_states.dtype)


class _ForwardOnly(torch.autograd.Function):
    """The exchange, where a caller records gradients: there are none to be had, which is said when one is asked for."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        return _exchange(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "An expert pool computes no gradients. Train with another experts implementation, or generate under"
            " torch.no_grad()."
        )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
