"""How a checkpoint's experts are quantized, and the type in which kernels keep them so. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from experts.model import Dtype


def stored_as(config: Mapping[str, Any]) -> Dtype | None:
    """The type that holds a checkpoint's experts as its files do; None: there is none, or they are not quantized.

    Args:
        config: The checkpoint's config.json.
    """
    quantization = cast(Mapping[str, Any], config.get("quantization_config") or {})
    return Dtype.MXFP4 if quantization.get("quant_method") == "mxfp4" else None


def experts_dtype(wanted: str, config: Mapping[str, Any], keeps: Collection[Dtype]) -> Dtype:
    """The type that a checkpoint's experts are served in: as they are stored where nothing else is asked for.

    Args:
        wanted: As for `Dtype.resolve`.
        config: The checkpoint's config.json.
        keeps: Types whose kernels the device has, of those that `stored_as` may give.

    Raises:
        ConfigInvalid: as `Dtype.resolve`.
    """
    dtype, stored = Dtype.resolve(wanted, config), stored_as(config)
    return stored if wanted == "auto" and stored is not None and stored in keeps else dtype
