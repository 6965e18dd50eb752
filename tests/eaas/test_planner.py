"""The planner: what it predicts is what a simulation of single requests finds, and it says no where it should."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.fleet import Costs, Shape, simulate
from benchmarks.make_model import SHAPES, make_config
from eaas.model.families import spec_of
from eaas.ops.cli import app
from eaas.ops.planner import KNOWN, Hardware, PlanInfeasible, Task, Work, disaggregated, monolithic, plan

DEMO = Path(__file__).parents[2] / "eaas" / "demo_model"
WORK = Work(
    layers=8,
    experts=32,
    top_k=4,
    dense_bytes=8e9,
    dense_flops=8e9,
    kv_bytes=1e5,
    kv_flops=1e5,
    expert_bytes=1e8,
    expert_flops=1e8,
    row_bytes=8192,
    reply_bytes=16384,
    max_context=8192,
)


def some_hardware(dice: random.Random) -> Hardware:
    return Hardware(
        name="some",
        bytes_per_s=10 ** dice.uniform(11, 13),
        flops_per_s=10 ** dice.uniform(13, 15),
        memory_bytes=10 ** dice.uniform(10.3, 11.3),
        link_bytes_per_s=10 ** dice.uniform(9, 12),
        handover_s=10 ** dice.uniform(-6, -4),
    )


def test_the_cache_of_latent_attention_does_not_grow_with_the_heads() -> None:
    for heads in (4, 8):
        spec = spec_of(make_config(replace(SHAPES["tiny"], q_heads=heads), "deepseek_v3", "bfloat16"))
        work = Work.of(spec)
        # 4 layers; a key of 32 + 8 and a value of 32, in bfloat16.
        assert work.kv_bytes == 4 * 2 * (40 + 32)
        assert work.kv_flops == 4 * 2 * heads * (40 + 32)


@pytest.mark.parametrize("seed", range(12))
def test_the_prediction_is_near_the_simulation_of_every_request(seed: int) -> None:
    dice = random.Random(seed)
    device = replace(KNOWN["h200"], link_bytes_per_s=1e15, handover_s=20e-6, reach=1.0)
    workers, servers, batch = dice.choice((1, 2, 4, 8)), dice.choice((2, 4, 8)), dice.choice((4, 8, 16))
    work = replace(WORK, expert_bytes=dice.choice((2e7, 1e8)), expert_flops=0.0, kv_bytes=0.0, kv_flops=0.0)
    costs = Costs(
        worker_s=work.dense_bytes / work.layers / device.bytes_per_s,
        handover_s=20e-6,
        pass_s=0.0,
        expert_s=work.expert_bytes / device.bytes_per_s,
        row_s=1e-12,
    )
    shape = Shape(layers=work.layers, experts=work.experts, top_k=work.top_k)
    simulated = simulate(costs, shape, workers=workers, servers=servers, batch=batch, zipf=0.0, seed=seed)
    # The batch is given here: room for exactly so many sequences, and all the time they want.
    work = replace(work, kv_bytes=1e6)
    room = work.dense_bytes + (batch + 0.5) * work.kv_bytes
    small = replace(device, memory_bytes=room, bytes_per_s=device.bytes_per_s)
    task = Task(tpot_s=1e3, context=1e-9, replicas=1)
    fleet = disaggregated(work, small, device, task, workers, servers)
    assert fleet is not None and fleet.batch == batch, f"seed {seed}: {fleet}"
    ratio = fleet.tpot_s / simulated.step_s
    assert 0.7 < ratio < 1.3, f"seed {seed}: {workers} workers, {servers} servers, batch {batch}: {ratio:.2f}"


@pytest.mark.parametrize("seed", range(20))
def test_the_best_fleet_keeps_every_limit_and_nobody_loses_by_faster_hardware(seed: int) -> None:
    dice = random.Random(seed)
    device = some_hardware(dice)
    task = Task(
        tpot_s=10 ** dice.uniform(-2, 0),
        context=dice.randint(1, 8192),
        devices=dice.randint(2, 24),
        overlap=dice.random() < 0.5,
    )
    found = []
    for hardware in (
        device,
        replace(device, bytes_per_s=2 * device.bytes_per_s, link_bytes_per_s=2 * device.link_bytes_per_s),
    ):
        try:
            chosen = plan(WORK, hardware, hardware, task)
        except PlanInfeasible as error:
            assert "devices" in str(error) or "GB" in str(error) or "ms" in str(error), f"seed {seed}: {error}"
            found.append((0.0, 0.0))
            continue
        for fleet in (chosen.disaggregated, chosen.monolithic):
            if fleet is None:
                continue
            assert fleet.tpot_s <= task.tpot_s and fleet.devices <= task.devices, f"seed {seed}: {fleet}"
            kv = fleet.batch * task.context * WORK.kv_bytes
            experts = 0.0 if fleet.servers else WORK.layers * WORK.experts * WORK.expert_bytes / fleet.workers
            assert WORK.dense_bytes + kv + experts <= hardware.memory_bytes, f"seed {seed}: {fleet}"
            if fleet.servers:
                held = task.replicas * WORK.layers * WORK.experts * WORK.expert_bytes
                assert held <= fleet.servers * hardware.memory_bytes, f"seed {seed}: {fleet}"
        found.append(tuple(0.0 if f is None else f.per_price for f in (chosen.disaggregated, chosen.monolithic)))
    slow, fast = found
    assert all(after >= before * 0.999 for before, after in zip(slow, fast, strict=True)), f"seed {seed}: {found}"


def test_one_device_alone_costs_what_its_bytes_cost() -> None:
    device = replace(KNOWN["h200"], reach=1.0, memory_bytes=1e12)
    fleet = monolithic(WORK, device, Task(tpot_s=1e3, context=1e6, devices=1), 1)
    assert fleet is not None
    chosen = 32 * (1 - (1 - 4 / 32) ** fleet.batch)
    # By hand: dense weights and keys and values once, each chosen expert of each layer once.
    nbytes = 8e9 + fleet.batch * 1e6 * 1e5 + 8 * chosen * 1e8
    assert fleet.tpot_s == pytest.approx(nbytes / 4.8e12, rel=1e-6)
    assert fleet.network_s == 0


def test_it_says_no_where_the_network_is_slow_and_yes_where_experts_are_cheap_to_feed() -> None:
    task = Task(tpot_s=0.05, context=64, devices=16, replicas=1)
    slow = replace(KNOWN["h200"], link_bytes_per_s=1e8)
    refused = plan(WORK, slow, slow, task)
    assert not refused.pays and "network" in refused.why, refused
    # Attention on devices with memory and little arithmetic, at a tenth of the price: what two pools are for.
    cheap = replace(KNOWN["h20"], price=0.1, flops_per_s=5e12, link_bytes_per_s=1e12)
    dear = replace(KNOWN["h200"], link_bytes_per_s=1e12)
    work = replace(WORK, dense_flops=8e8, expert_bytes=4e8, expert_flops=4e9)
    accepted = plan(work, cheap, dear, replace(task, context=4096, tpot_s=0.2))
    assert accepted.pays and accepted.gain > 0, accepted


def test_what_cannot_be_served_says_what_stands_in_the_way() -> None:
    device = KNOWN["h200"]
    for task, work, words in (
        (
            Task(tpot_s=0.05, context=64, devices=2),
            replace(WORK, expert_bytes=1e12),
            "expert servers of 141 GB",
        ),
        (Task(tpot_s=0.05, context=64), replace(WORK, dense_bytes=1e12), "an attention worker has 141 GB"),
        (Task(tpot_s=1e-6, context=64), WORK, "no batch meets 0.001 ms"),
        (Task(tpot_s=0.05, context=8193), WORK, "8,193 tokens .* the model has 8,192 positions"),
        (Task(tpot_s=0.05, context=8192), WORK, "one of them for that token.* at most 8,191"),
    ):
        with pytest.raises(PlanInfeasible, match=words):
            plan(work, device, device, task)
    plan(WORK, device, device, Task(tpot_s=0.05, context=8191))


def test_the_command_plans_from_a_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    (tmp_path / "laptop.toml").write_text(
        "bytes_per_s = 33e9\nflops_per_s = 196e9\nmemory_bytes = 24e9\nlink_bytes_per_s = 10e9\nhandover_s = 30e-6\n"
    )
    options = ["plan", str(tmp_path), "--hardware", str(tmp_path / "laptop.toml"), "--devices", "8"]
    ran = CliRunner().invoke(app, [*options, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    assert found["monolithic"]["workers"] >= 1 and found["pays"] in (True, False)
    assert CliRunner().invoke(app, options).output.count("tokens/s") >= 2
    # The demonstration model has 2,048 positions: the default leaves room for the token, and so must a number given.
    assert CliRunner().invoke(app, [*options, "--context", "2047"]).exit_code == 0
    assert CliRunner().invoke(app, [*options, "--context", "2048"]).exit_code == 1
    wrong = CliRunner().invoke(app, ["plan", str(tmp_path), "--hardware", "abacus"])
    assert wrong.exit_code == 1
