"""Logits and tokens have the bits that were recorded, on every instruction set that this CPU has."""

from __future__ import annotations

import json

import pytest

from tests.eaas.golden import ISAS, RECORDED, digests_of


@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_of_logits_and_tokens_are_those_recorded(isa: str) -> None:
    found = digests_of(isa)
    if found is None:
        pytest.skip(f"needs {isa}, which this CPU or build lacks")
    recorded = json.loads(RECORDED.read_text())
    unknown = found.keys() - recorded.keys()
    assert not unknown, f"{sorted(unknown)} are not recorded: python -m tests.eaas.golden --record"
    for name, models in found.items():
        differing = [model for model, digest in models.items() if recorded[name].get(model) != digest]
        assert not differing, f"{name}: {differing}"
