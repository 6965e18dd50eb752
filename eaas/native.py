"""The native library of this package, bound by ctypes as its headers declare it: decoder and sampler."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from experts import native as experts_native
from p2p.native import Declarations, NativeMissing, open_library

LIBRARY = Path(__file__).resolve().parent / "_eaas.so"

# Codes of eaas/native/decoder.h and sampler.h.
DECODER_E_ROWS = -101
DECODER_E_TOKEN = -102
DECODER_E_POSITION = -103
DECODER_E_SEQUENCE = -104
DECODER_E_BLOCK = -105
DECODER_E_LOGITS_ROW = -106
DECODER_E_SHAPE = -107
DECODER_NOT_FINITE = -1
DECODER_LEFT = -2
DECODER_FREE = 0xFFFF
SAMPLER_E_NOT_FINITE = -1
SAMPLER_E_TOKEN = -2
SAMPLER_E_NOTHING_LEFT = -3

QK_NORMS = ("none", "head", "full")

_DECLARED = Declarations("eaas", "decoder sampler", "DecoderShape DecoderTaps DecoderPlan")
DecoderShape, DecoderTaps, DecoderPlan = _DECLARED.structures.values()
ROLES = tuple(name.removeprefix("ROLE_").lower() for name in _DECLARED.enumerated("DecoderRole"))
# Its rows come as an array of them, so no function is declared with it.
SAMPLE_ROW = np.dtype(Declarations("eaas", "sampler", "SampleRow").structures["SampleRow"])


@cache
def load() -> ctypes.CDLL:
    """Load _eaas.so once and declare its functions. Raises NativeMissing: it has not been built, or does not load."""
    experts_native.load()
    return open_library(LIBRARY, "eaas", _DECLARED.functions())


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Address of an exported function, for native code that calls it through a pointer."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    if address is None:
        raise NativeMissing(f"{library._name} has no function {name}. Run `python -m p2p.build`.")
    return address
