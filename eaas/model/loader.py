"""From what a user typed to a model folder, its spec, and the attention worker's weights.

A model is a path, the built-in model, or a hub id. Weights are views of the mapped checkpoint, and only of what is
needed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from eaas.model.families import TensorPlan, spec_of, tensors_of, unknown_fields
from eaas.model.spec import ModelSpec
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.formats import Scheme, scheme_of
from experts.kernels import to_dtype
from experts.matrices import Matrix, holds, read
from experts.model import Dtype
from experts.quantized import Quantized

log = logging.getLogger(__name__)

_SERVED_DTYPES = ("BF16", "F16", "F32")
_JSON_LIMIT_BYTES = 64 << 20
DEMO = "demo"
_DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja"]


class ModelNotFound(ValueError):
    """No model under that name; the text says where it was looked for."""


def resolve_model(name: str | Path) -> Path:
    """The folder of a model, absolute.

    Args:
        name: A folder that holds config.json, "demo" (the built-in model), or a hub id like
            "Qwen/Qwen3-30B-A3B", which is downloaded unless it is cached.

    Raises:
        ModelNotFound: there is no such folder, or the hub does not have it or cannot be reached.
    """
    text = str(name)
    folder = Path(text).expanduser()
    # A folder that happens to be called "demo" counts only when it holds a model.
    if (folder / "config.json").is_file():
        return folder.resolve()
    if text == DEMO:
        if not (_DEMO_FOLDER / "config.json").is_file():
            raise ModelNotFound(f"The built-in model is missing from {_DEMO_FOLDER}. Install the package again.")
        return _DEMO_FOLDER
    if folder.is_dir():
        raise ModelNotFound(f"{folder} holds no config.json, so it is not a model folder.")
    if isinstance(name, Path) or not _HUB_ID.fullmatch(text):
        raise ModelNotFound(f"{text} is neither a model folder, nor 'demo', nor a hub id like 'Qwen/Qwen3-30B-A3B'.")
    return _download(text)


def load_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The model that a checkpoint folder describes.

    Raises:
        UnknownArchitecture: the architecture is not served.
        ConfigInvalid: a field is missing, makes no sense, or asks for what is not served.
        CheckpointInvalid: generation_config.json is unreadable.
    """
    spec = spec_of(checkpoint.config, read_object(checkpoint.directory / "generation_config.json"))
    unknown = unknown_fields(checkpoint.config)
    if unknown:
        log.warning("config_fields_ignored fields=%s", ",".join(unknown))
    return spec


def load_weights(
    checkpoint: Checkpoint, spec: ModelSpec, roles: Collection[str] | None = None
) -> dict[str, np.ndarray]:
    """Role -> read-only weights; see `families.tensors_of` for the roles. No routed expert is touched.

    Args:
        roles: Of which; None: of all.

    Returns:
        float32 arrays, or uint16 arrays that hold bfloat16 bits: views of the mapped files. float16 has no
        kernel and is converted to float32; what is quantized becomes bfloat16, or float32 where the model is
        not served in bfloat16.

    Raises:
        CheckpointInvalid: a tensor is missing, or its shape or type is not what config.json promises.
    """
    weights: dict[str, np.ndarray] = {}
    scheme = scheme_of(checkpoint.config)
    for role, plan in tensors_of(spec).items():
        if roles is not None and role not in roles:
            continue
        stored = stored_weight(checkpoint, scheme, role, plan)
        if isinstance(stored, Quantized) or holds(scheme, checkpoint, plan.module):
            wide = stored.dequantized() if isinstance(stored, Quantized) else stored
            weights[role] = to_dtype(wide, spec.dtype) if spec.dtype is Dtype.BFLOAT16 else wide
        else:
            weights[role] = stored.astype(np.float32) if stored.dtype == np.float16 else stored
    return weights


def stored_weight(checkpoint: Checkpoint, scheme: Scheme, role: str, plan: TensorPlan) -> Matrix:
    """One tensor of the attention worker, as it is stored.

    Args:
        role: What it is there for.

    Raises:
        CheckpointInvalid: as `load_weights`.
    """
    if len(plan.shape) == 2 and holds(scheme, checkpoint, plan.module):
        return read(scheme, checkpoint, plan.module, *plan.shape)
    if plan.name not in checkpoint:
        hint = " Is tie_word_embeddings missing from config.json?" if role == "head" else ""
        raise CheckpointInvalid(f"{checkpoint.directory}: tensor {plan.name} ({role}) is missing.{hint}")
    shape, dtype = checkpoint.shape(plan.name), checkpoint.dtype(plan.name)
    if shape != plan.shape:
        raise CheckpointInvalid(
            f"{checkpoint.directory}: {plan.name} has shape {list(shape)}, config.json needs {list(plan.shape)}."
        )
    if dtype not in _SERVED_DTYPES:
        raise CheckpointInvalid(
            f"{checkpoint.directory}: {plan.name} is {dtype}; served are {', '.join(_SERVED_DTYPES)}."
        )
    return checkpoint.tensor(plan.name)


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object of a model folder; None where there is no such file.

    Raises:
        CheckpointInvalid: it cannot be read, or holds something else.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            parsed = json.loads(file.read(_JSON_LIMIT_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"{path}: cannot be read as JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise CheckpointInvalid(f"{path}: an object is needed, found {type(parsed).__name__}.")
    return parsed


def _download(hub_id: str) -> Path:
    # Imported here: it costs 0.3 s, which a local model need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_FILES)).resolve()
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{hub_id}: not on the hub, or private (set HF_TOKEN); and there is no such folder."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{hub_id}: there is no such folder, it is not cached, and the hub cannot be reached."
            " Give a model folder, or 'demo'."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFound(f"{hub_id}: the download failed: {error}") from error
