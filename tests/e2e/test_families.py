"""Every family, and every format of quantization, keeps its bits, however it is served. The judge is each request
alone, its experts in this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.make_model import make_model
from tests.e2e.pool import Driver, Logits, Pool, local_experts, pool_of
from tests.e2e.test_exactness import NEW_TOKENS, different, prompts
from tests.experts.quantizing import quantize_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe": ("glm4_moe", {"n_group": 4, "topk_group": 2}),
    "gpt_oss": ("gpt_oss", {}),
    "minimax_m2": ("minimax_m2", {}),
    "deepseek_v3": ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "dots1": ("dots1", {}),
}
WIDE = {"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 128, "num_hidden_layers": 2}
# Of those that METHODS has: one for each type that experts are kept in, and one that is dequantized.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("qwen3_moe", WIDE),
    "w4a16": ("qwen3_moe", WIDE),
    "awq": ("qwen3_moe", WIDE),
    "w8a8": ("qwen3_moe", WIDE),
    "mxfp4": ("gpt_oss", {}),
}
# At and beside the edges of blocks; the last is longer than a step.
LENGTHS = (1, 15, 16, 31, 32, 33, 90)


class Family(NamedTuple):
    """A tiny checkpoint, and the bits of each request by itself, its prompt in one chunk."""

    folder: Path
    asked: dict[str, list[int]]
    alone: Logits


@pytest.fixture(scope="module", params=[*MODELS, *FORMATS])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    arch, fields = (MODELS | FORMATS)[request.param]
    folder = make_model("tiny", arch, tmp_path_factory.mktemp(request.param), seed=1, overrides=fields)
    if request.param in FORMATS:
        quantize_model(folder, folder / "quantized", folder / "plain", request.param)
        folder /= "quantized"
    asked, logits = prompts(LENGTHS), {}
    driver = Driver(folder, local_experts(folder), step_tokens=128)
    for id, prompt in asked.items():
        logits |= driver.run({id: prompt}, NEW_TOKENS)
    driver.close()
    return Family(folder, asked, logits)


@pytest.fixture(scope="module")
def pool(family: Family) -> Iterator[Pool]:
    with pool_of(family.folder, servers=4, replicas=2) as running:
        yield running


def test_every_chunk_boundary_of_a_prefill(family: Family) -> None:
    prompt = family.asked["r5"]
    for cut in range(1, len(prompt)):
        driver = Driver(family.folder, local_experts(family.folder), step_tokens=cut, kv_blocks=8)
        logits = driver.run({"r5": prompt}, 2)
        driver.close()
        assert not different(logits, family.alone), f"chunks of {cut} tokens"


def test_prefix_reuse_and_preemption(family: Family) -> None:
    driver = Driver(family.folder, local_experts(family.folder), prefix_reuse=True)
    assert not different(driver.run(family.asked, NEW_TOKENS), family.alone)
    steps = driver.steps
    assert not different(driver.run(family.asked, NEW_TOKENS), family.alone)
    assert driver.steps < steps, "the second run must be shorter: its prompts are in the cache"
    driver.close()
    driver = Driver(family.folder, local_experts(family.folder), kv_blocks=9)
    logits = driver.run({id: family.asked[id] for id in ("r1", "r2", "r3", "r4", "r5")}, NEW_TOKENS)
    assert driver.engine.scheduler.preemptions > 0, "no preemption happened; the test shows nothing"
    assert not different(logits, family.alone)
    driver.close()


@pytest.mark.full(seconds=5)
def test_one_server(family: Family) -> None:
    with pool_of(family.folder, servers=1, replicas=1) as pool:
        driver = Driver(family.folder, pool.client)
        assert not different(driver.run(family.asked, NEW_TOKENS), family.alone)
        driver.close()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_four_servers_of_which_one_is_struck(family: Family, pool: Pool, fault: signal.Signals) -> None:
    pool.settle(servers=4)
    driver = Driver(family.folder, pool.client)
    assert not different(driver.run(family.asked, NEW_TOKENS), family.alone), "before"
    victim = next(one for one in pool.serving() if one.name in pool.cluster.pids())

    def strike(step: int) -> None:
        if step == NEW_TOKENS // 2:
            os.kill(victim.pid, fault)

    try:
        logits = driver.run(family.asked, NEW_TOKENS, before=strike)
    finally:
        # One that the launcher has replaced is gone.
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGCONT)
    driver.close()
    if fault is signal.SIGKILL:
        pool.wait_exit(victim.name)
    assert len(logits) == len(family.asked) * NEW_TOKENS
    assert not different(logits, family.alone), f"{victim.name} struck by {fault.name}"
