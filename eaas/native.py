"""The native library of this package, bound by ctypes: decoder and sampler."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_float, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experts import native as experts_native
from p2p.native import NativeMissing, open_library

LIBRARY = Path(__file__).resolve().parent / "_eaas.so"

# Codes of eaas/native/decoder.h and sampler.h.
DECODER_E_ROWS = -101
DECODER_E_TOKEN = -102
DECODER_E_POSITION = -103
DECODER_E_SEQUENCE = -104
DECODER_E_BLOCK = -105
DECODER_E_LOGITS_ROW = -106
DECODER_E_SHAPE = -107
DECODER_E_MEMORY = -108
DECODER_E_WEIGHT = -109
SAMPLER_E_NOT_FINITE = -1
SAMPLER_E_TOKEN = -2
SAMPLER_E_NOTHING_LEFT = -3

# ExpertCall of eaas/native/decoder.h, for who stands between a decoder and its experts: state, pool, lane, layer,
# rows, n, expert_ids, weights, out, drop, deadline_ns, overlap, arg.
EXPERT_CALL = CFUNCTYPE(
    c_int32, c_void_p, c_void_p, c_uint32, c_uint32, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p,
    c_void_p, c_uint64, c_void_p, c_void_p,
)  # fmt: skip

QK_NORMS = ("none", "head", "full")
# Order of enum DecoderRole.
ROLES = (
    *(
        "embed",
        "head",
        "final_norm",
        "input_norm",
        "q",
        "k",
        "v",
        "o",
        "q_bias",
        "k_bias",
        "v_bias",
        "o_bias",
    ),
    *(
        "q_norm",
        "k_norm",
        "post_norm",
        "gate",
        "gate_correction",
        "shared_gate_up",
        "shared_down_proj",
        "shared_gate",
    ),
    *("dense_gate_up", "dense_down_proj"),
    *("q_a", "q_a_norm", "kv_a", "kv_a_norm", "key_up", "value_up", "sinks", "gate_bias"),
)


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class DecoderShape(ctypes.Structure):
    """struct DecoderShape of decoder.h."""

    _fields_ = [
        *_fields(
            c_uint32,
            "hidden layers q_heads kv_heads head_dim vocab rope_pairs q_rank kv_rank nope_dim value_dim",
        ),
        *_fields(c_uint32, "experts top_k dense_intermediate"),
        *_fields(
            c_uint32, "shared_intermediate shared_gate qk_norm gate_sigmoid gate_normalise groups groups_kept"
        ),
        *_fields(c_uint32, "kv_blocks block_tokens max_rows max_positions"),
        ("dtype", c_int32),
        *_fields(c_float, "eps clip_qkv gate_scale query_scale"),
    ]


class DecoderPlan(ctypes.Structure):
    """struct DecoderPlan of decoder.h."""

    _fields_ = [
        *_fields(c_void_p, "tokens positions sequences tables logits_rows logits drop routed"),
        ("deadline_ns", c_uint64),
        *_fields(c_uint32, "rows tables_rows table_blocks logits_count"),
    ]


# struct SampleRow of sampler.h.
SAMPLE_ROW = np.dtype(
    [
        *_fields("u8", "prompt output forbidden allowed allowed_too biased biases seed index"),
        *_fields("u4", "prompt_count output_count forbidden_count biased_count choice given"),
        *_fields("f4", "temperature top_p min_p repetition presence frequency"),
        *_fields("i4", "top_k top_count"),
    ],
    align=True,
)


_word, _pointer, _code = c_uint32, c_void_p, c_int32
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "decoder_new": (
        _pointer,
        (POINTER(DecoderShape), *[_pointer] * 4, _word, *[_pointer] * 3, POINTER(c_int32)),
    ),
    "decoder_free": (None, (_pointer,)),
    "decoder_set": (_code, (_pointer, _word, _code, _pointer, _pointer, _code, c_uint64)),
    "decoder_step": (_code, (_pointer, POINTER(DecoderPlan), POINTER(c_uint32))),
    "decoder_trace": (None, (_pointer, _pointer, _word, _pointer)),
    "decoder_ops": (_pointer, ()),
    "sampler_sample": (_code, (_pointer, _word, _word, *[_pointer] * 6, _word, _pointer)),
    "sampler_philox": (None, (*[_pointer] * 3,)),
}


@cache
def load() -> ctypes.CDLL:
    """Load _eaas.so once and declare its functions.

    Raises:
        NativeMissing: it has not been built, or does not load.
    """
    experts_native.load()
    return open_library(LIBRARY, "eaas", _FUNCTIONS)


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Address of an exported function, for native code that calls it through a pointer."""
    address = ctypes.cast(getattr(library, name), c_void_p).value
    if address is None:
        raise NativeMissing(f"{library._name} has no function {name}. Run `python -m p2p.build`.")
    return address
