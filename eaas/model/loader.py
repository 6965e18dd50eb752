"""The attention worker's weights: views of the mapped checkpoint, and only of what it needs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from eaas.model.families import spec_of, tensors_of, unknown_fields
from eaas.model.spec import ModelSpec
from experts.checkpoint import Checkpoint, CheckpointInvalid

log = logging.getLogger(__name__)

_SERVED_DTYPES = ("BF16", "F16", "F32")
_JSON_LIMIT_BYTES = 16 << 20


def load_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The model that a checkpoint folder describes.

    Raises:
        UnknownArchitecture: the architecture is not served.
        ConfigInvalid: a field is missing, makes no sense, or asks for what is not served.
        CheckpointInvalid: generation_config.json is unreadable.
    """
    spec = spec_of(checkpoint.config, _generation_config(checkpoint.directory))
    unknown = unknown_fields(checkpoint.config)
    if unknown:
        log.warning("config_fields_ignored fields=%s", ",".join(unknown))
    return spec


def load_weights(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Role -> read-only weights; see `families.tensors_of` for the roles. No routed expert is touched.

    Returns:
        float32 arrays, or uint16 arrays that hold bfloat16 bits: views of the mapped files. float16 has no
        kernel and is converted to float32.

    Raises:
        CheckpointInvalid: a tensor is missing, or its shape or type is not what config.json promises.
    """
    weights: dict[str, np.ndarray] = {}
    for role, plan in tensors_of(spec).items():
        if plan.name not in checkpoint:
            hint = " Is tie_word_embeddings missing from config.json?" if role == "head" else ""
            raise CheckpointInvalid(f"{checkpoint.directory}: tensor {plan.name} ({role}) is missing.{hint}")
        shape, dtype = checkpoint.shape(plan.name), checkpoint.dtype(plan.name)
        if shape != plan.shape:
            raise CheckpointInvalid(
                f"{checkpoint.directory}: {plan.name} has shape {list(shape)}, config.json needs"
                f" {list(plan.shape)}."
            )
        if dtype not in _SERVED_DTYPES:
            raise CheckpointInvalid(
                f"{checkpoint.directory}: {plan.name} is {dtype}; served are {', '.join(_SERVED_DTYPES)}."
            )
        tensor = checkpoint.tensor(plan.name)
        weights[role] = tensor.astype(np.float32) if dtype == "F16" else tensor
    return weights


def _generation_config(directory: Path) -> dict[str, Any] | None:
    path = directory / "generation_config.json"
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
