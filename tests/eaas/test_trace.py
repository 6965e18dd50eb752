"""Promises of a traced step: all of a lane's time belongs to a phase, bits stay, and what does not fit is dropped."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks.step_trace import PHASES, StepTrace
from tests.eaas.decoder_world import VARIANTS, World, spec_of, tokens_of

pytestmark = pytest.mark.alone

SEED = 20261121


def test_every_lanes_time_belongs_to_phases_and_bits_stay() -> None:
    runner = World.make(spec_of(), SEED).decoder(lanes=2)
    tokens = tokens_of(20, SEED)
    untraced = runner.prefill(tokens)
    with StepTrace(runner.decoder, lanes=2) as trace:
        began_s = time.perf_counter()
        traced = [runner.prefill(tokens) for _ in range(3)]
        elapsed_us = (time.perf_counter() - began_s) * 1e6
    assert all(logits.tobytes() == untraced.tobytes() for logits in traced), f"seed {SEED}"
    steps = trace.steps()
    assert [len(step) for step in steps] == [2, 2, 2]
    for lane in (0, 1):
        spent = [step[lane] for step in steps]
        assert {"norm", "project", "attend", "output", "gate", "gate_up", "down", "head", "meet"} <= set(spent[0])
        assert 0 < sum(sum(phases.values()) for phases in spent) < elapsed_us
    runner.prefill(tokens)
    assert len(trace.steps()) == 3, "a step after the tracing was stamped"


def test_a_dense_layers_product_has_a_phase_of_its_own() -> None:
    name = "sigmoid, groups, correction, shared, leading dense"
    runner = World.make(VARIANTS[name], SEED).decoder()
    with StepTrace(runner.decoder, lanes=1) as trace:
        runner.prefill(tokens_of(4, SEED))
    assert "dense" in trace.steps()[0][0]


def test_stamps_beyond_the_capacity_are_dropped() -> None:
    runner = World.make(spec_of(), SEED).decoder()
    trace = StepTrace(runner.decoder, lanes=1, capacity=5)
    with trace:
        runner.prefill(tokens_of(4, SEED))
    assert len(trace.steps()) == 1
    assert set(trace.steps()[0][0]) <= set(PHASES.values())
    assert np.count_nonzero(trace._stamps[0, :, 0]) == 5
