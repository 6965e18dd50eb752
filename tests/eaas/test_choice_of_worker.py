"""Prompts that begin alike meet at one worker, unless it is clearly busier than the others."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass

import pytest

from eaas.gateway.failover import PREFIX_TOKENS, choose, prefix_hash
from eaas.worker.protocol import ToWorker


@dataclass
class Worker:
    incarnation: int
    outstanding: int = 0
    chosen: int = 0

    def send(self, message: ToWorker) -> None:
        """Nothing is sent."""


def prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(50_000) for _ in range(tokens)]


@pytest.mark.parametrize("seed", range(5))
def test_what_begins_alike_is_computed_once(seed: int) -> None:
    """Tokens found in a worker's cache, by the test's own record of what each worker has seen."""
    draw = random.Random(seed)
    beginnings = [prompt(draw, 256) for _ in range(12)]
    asked = [beginnings[draw.randrange(12)] + prompt(draw, 16) for _ in range(240)]

    def reused(affine: bool) -> float:
        workers = [Worker(100 + number) for number in range(4)]
        seen: dict[int, set[tuple[int, ...]]] = {worker.incarnation: set() for worker in workers}
        found = total = 0
        running: list[tuple[Worker, int]] = []
        for number, one in enumerate(asked):
            chosen = choose(workers, prefix_hash(one) if affine else None)
            assert chosen is not None
            blocks = [tuple(one[: end * 16]) for end in range(1, len(one) // 16 + 1)]
            found += 16 * sum(block in seen[chosen.incarnation] for block in blocks)
            total += len(one)
            seen[chosen.incarnation].update(blocks)
            chosen.chosen = number
            chosen.outstanding += 300
            running.append((chosen, 300))
            if len(running) > 12:
                worker, debt = running.pop(0)
                worker.outstanding -= debt
        return found / total

    with_affinity, without = reused(True), reused(False)
    assert with_affinity > 0.8, f"seed {seed}: {with_affinity:.2f} of all tokens reused, {without:.2f} without"
    assert with_affinity > without + 0.05, f"seed {seed}: {with_affinity:.2f}, {without:.2f} without affinity"


@pytest.mark.parametrize("seed", range(5))
def test_one_popular_beginning_is_shared_out_before_its_worker_is_clearly_busier(seed: int) -> None:
    draw = random.Random(seed)
    workers = [Worker(draw.randrange(1 << 60)) for _ in range(4)]
    prefix = prefix_hash(prompt(draw, 128))
    for number in range(400):
        chosen = choose(workers, prefix)
        assert chosen is not None
        mean = sum(worker.outstanding for worker in workers) / 4
        assert chosen.outstanding <= 1.25 * mean + 512, f"seed {seed}: request {number}"
        chosen.outstanding += 400
    least, most = (f(worker.outstanding for worker in workers) for f in (min, max))
    assert most <= 1.25 * 40_000 + 512 + 400, f"seed {seed}"
    assert least > 0, f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_goes_moves_only_its_own(seed: int) -> None:
    draw = random.Random(seed)
    workers = [Worker(draw.randrange(1 << 60)) for _ in range(5)]
    for _ in range(200):
        prefix = prefix_hash(prompt(draw, PREFIX_TOKENS))
        before = choose(workers, prefix)
        after = choose([worker for worker in workers if worker is not workers[2]], prefix)
        assert before is after or before is workers[2], f"seed {seed}"


def test_short_prompts_go_to_the_least_busy_the_longest_ago_chosen_first() -> None:
    assert prefix_hash([1] * (PREFIX_TOKENS - 1)) is None
    workers = [Worker(1, 10, 3), Worker(2, 5, 2), Worker(3, 5, 1)]
    assert choose(workers, None) is workers[2]
    assert choose([], None) is None
    assert choose([], 7) is None


def test_every_gateway_finds_the_same_worker() -> None:
    environment = {"PYTHONPATH": "."}
    code = "from eaas.gateway.failover import prefix_hash; print(prefix_hash(list(range(100))))"
    command = [sys.executable, "-c", code]
    numbers = {
        subprocess.run(command, capture_output=True, check=True, env={**environment, "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert numbers == {f"{prefix_hash(list(range(200)))}\n".encode()}
