"""The fleet simulator against cases that can be added up by hand."""

from __future__ import annotations

import pytest

from benchmarks.fleet import Costs, Shape, simulate

COSTS = Costs(worker_s=1e-3, handover_s=2e-4, pass_s=1e-5, expert_s=3e-5, row_s=1e-6)
# Every token takes every expert, so that nothing is left to chance.
SHAPE = Shape(layers=3, experts=4, top_k=4)


def test_one_worker_and_one_server_take_turns() -> None:
    outcome = simulate(COSTS, SHAPE, workers=1, servers=1, batch=5, noise=0.0)
    layer_s = 1e-3 + 2e-4 + 1e-5 + 4 * 3e-5 + 20 * 1e-6
    assert outcome.step_s == pytest.approx(3 * layer_s)
    assert outcome.tokens_per_s == pytest.approx(5 / (3 * layer_s))
    assert outcome.busy == pytest.approx((layer_s - 1.2e-3) / layer_s, rel=0.05)


def test_experts_of_four_servers_are_computed_at_once() -> None:
    outcome = simulate(COSTS, SHAPE, workers=1, servers=4, batch=5, noise=0.0)
    assert outcome.step_s == pytest.approx(3 * (1e-3 + 2e-4 + 1e-5 + 3e-5 + 5e-6))


def test_a_server_that_is_never_idle_bounds_the_fleet_and_shares_its_reads() -> None:
    outcome = simulate(COSTS, SHAPE, workers=64, servers=1, batch=5)
    assert outcome.busy > 0.95
    assert outcome.requests_per_group > 4
    alone_s = 3 * (1e-5 + 4 * 3e-5 + 20 * 1e-6)
    assert outcome.tokens_per_s > 1.5 * 5 / alone_s, "reads of weights were not shared"
    assert outcome.tokens_per_s < 1 / (3 * 4 * 1e-6), "rows cost nothing"


@pytest.mark.parametrize("seed", range(3))
def test_one_seed_is_one_run(seed: int) -> None:
    runs = [simulate(COSTS, SHAPE, workers=3, servers=2, batch=2, seed=seed) for _ in range(2)]
    assert runs[0] == runs[1], f"seed {seed}"
