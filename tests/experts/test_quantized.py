"""A quantized matrix stands for the numbers that its format defines; torch is the judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experts.quantized import Codes, Quantized


def test_every_code_of_e4m3_is_what_torch_reads() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    ours = Codes.E4M3.values
    number = ~np.isnan(theirs)
    assert (np.isnan(ours) == ~number).all()
    assert (ours.view(np.uint32) == theirs.view(np.uint32))[number].all(), "the sign of zero counts"


def test_a_short_last_group_has_its_own_scale_and_offset() -> None:
    codes = np.array([[1, 2, 3, 15, 0]], np.uint8)
    matrix = Quantized(
        kind=Codes.UINT4,
        codes=codes,
        scales=np.array([[2.0, 0.5]], np.float32),
        offsets=np.array([[-1.0, 8.0]], np.float32),
        group=4,
    )
    assert matrix.dequantized().tolist() == [[1.0, 3.0, 5.0, 29.0, 8.0]]


def test_scales_that_do_not_fit_their_codes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"need scales, and offsets, of shape \(1, 2\); found \(1, 1\)"):
        Quantized(kind=Codes.INT8, codes=np.zeros((1, 5), np.uint8), scales=np.ones((1, 1), np.float32), group=4)
