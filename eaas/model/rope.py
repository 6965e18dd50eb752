"""Rotary position embedding: the inverse frequencies that a config asks for. Pure.

Formulas as in transformers (modeling_rope_utils.py), computed in double precision and rounded to float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from experts.model import ConfigInvalid

KNOWN_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Position p turns the pair (x[i], x[i + head_dim / 2]) by the angle p * inv_freq[i].

    Attributes:
        kind: One of KNOWN_TYPES.
        theta: Base of the wavelengths.
        inv_freq: head_dim / 2 values, each exactly a float32; radians per position.
        attention_factor: Multiplies both cosine and sine.
    """

    kind: str
    theta: float
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


def rope_of(config: Mapping[str, Any], head_dim: int, max_model_len: int, default_theta: float) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Raises:
        ConfigInvalid: a type that is not served, or a parameter that is missing or makes no sense.
    """
    # transformers lets rope_scaling win over rope_parameters, and values inside over those beside.
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(source) or {}
    if not isinstance(scaling, Mapping):
        raise ConfigInvalid(f"config.json: {source} is {scaling!r}; an object is needed.")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ConfigInvalid(
            f"config.json: {source} differs by layer type; only one for all layers is served."
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KNOWN_TYPES:
        raise ConfigInvalid(
            f"config.json: rope type {kind!r} is not served. Known are {', '.join(KNOWN_TYPES)}."
        )
    for fields in (scaling, config):
        if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
            share = fields["partial_rotary_factor"]
            raise ConfigInvalid(
                f"config.json: partial_rotary_factor is {share!r}; only whole heads are rotated (1.0)."
            )
    theta = scaling.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    theta = default_theta if theta is None else theta
    if not _is_number(theta) or theta <= 1:
        raise ConfigInvalid(f"config.json: rope_theta is {theta!r}; a number above 1 is needed.")
    inv_freq = [float(theta) ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    attention_factor = 1.0
    if kind == "linear":
        factor = _number(scaling, "factor", source)
        inv_freq = [frequency / factor for frequency in inv_freq]
    elif kind == "dynamic":
        # Its base grows only beyond max_position_embeddings, where no request reaches.
        _number(scaling, "factor", source)
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling, source, max_model_len)
    elif kind == "yarn":
        inv_freq, attention_factor = _yarn(inv_freq, float(theta), scaling, source, max_model_len)
    return Rope(
        kind=kind,
        theta=float(theta),
        inv_freq=tuple(map(_as_float32, inv_freq)),
        attention_factor=_as_float32(attention_factor),
    )


def _llama3(
    inv_freq: list[float], scaling: Mapping[str, Any], source: str, max_model_len: int
) -> list[float]:
    factor = _number(scaling, "factor", source)
    low = _number(scaling, "low_freq_factor", source)
    high = _number(scaling, "high_freq_factor", source)
    original = _number(scaling, "original_max_position_embeddings", source, default=max_model_len)
    if high <= low:
        raise ConfigInvalid(
            f"config.json: {source} has high_freq_factor {high} and low_freq_factor {low}; high > low."
        )
    out: list[float] = []
    for frequency in inv_freq:
        turns = original * frequency / (2 * math.pi)  # over the original context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append((1 - keep) * frequency / factor + keep * frequency)
    return out


def _yarn(
    inv_freq: list[float], theta: float, scaling: Mapping[str, Any], source: str, max_model_len: int
) -> tuple[list[float], float]:
    size = 2 * len(inv_freq)
    original = _number(scaling, "original_max_position_embeddings", source, default=max_model_len)
    factor = _number(scaling, "factor", source, default=max_model_len / original)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        attention_factor = _number(scaling, "attention_factor", source)
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = _number(scaling, "mscale", source), _number(scaling, "mscale_all_dim", source)
        attention_factor = magnitude(above) / magnitude(below)
    else:
        attention_factor = magnitude(1.0)

    def pair_turning(times: float) -> float:
        return size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(_number(scaling, "beta_fast", source, default=32.0))
    high = pair_turning(_number(scaling, "beta_slow", source, default=1.0))
    truncate = scaling.get("truncate")
    if truncate is None or truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low if high != low else 0.001
    out: list[float] = []
    for i, frequency in enumerate(inv_freq):
        slow = min(max((i - low) / span, 0.0), 1.0)
        out.append(frequency / factor * slow + frequency * (1 - slow))
    return out, attention_factor


def _number(scaling: Mapping[str, Any], field: str, source: str, default: float | None = None) -> float:
    value = scaling.get(field)
    if value is None and default is not None:
        return float(default)
    if not _is_number(value) or value <= 0:
        raise ConfigInvalid(f"config.json: {source} has {field} {value!r}; a number above 0 is needed.")
    return float(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]
