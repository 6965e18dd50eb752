"""Tenants have tokens by their weights where they want more than there is; background work yields."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from eaas.worker.blocks import BlockPool
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import SamplingParams, Share
from eaas.worker.request import Refused, Request
from eaas.worker.scheduler import QUIET_STEPS, Scheduler, SchedulerConfig
from tests.eaas.fake_decoder import BLOCK_TOKENS, FakeDecoder, expected_output


@dataclass
class Load:
    """A tenant whose clients each send a request as soon as their last has ended."""

    name: str
    weight: int
    clients: int
    draw: Callable[[random.Random], tuple[int, int]]  # tokens of prompt and output
    background: bool = False


@dataclass
class Machine:
    """A scheduler whose steps take no time, and the record of whose rows they were."""

    seed: int
    slots: int = 8
    step_tokens: int = 64
    blocks: int = 4096
    background_rows: int = 16
    rows: Counter[str] = field(default_factory=Counter[str])
    yielded: int = 0  # rows of requests in the background, however long they had waited
    outputs: Counter[str] = field(default_factory=Counter[str])
    history: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pool = BlockPool(blocks=self.blocks, block_tokens=16, reuse=False)
        config = SchedulerConfig(
            max_model_len=8192,
            step_tokens=self.step_tokens,
            max_running=self.slots,
            background_rows=self.background_rows,
        )
        self.scheduler = Scheduler(config, self.pool)
        self.loads: dict[str, Load] = {}
        self.steps = self.asked = 0
        self.first_step: dict[str, int] = {}
        self.yielding: list[bool] = []  # of the last step's requests that generate, which are in the background

    def ask(self, load: Load, prompt: int = 0, output: int = 0) -> Request:
        if not prompt:
            prompt, output = load.draw(self.random)
        self.asked += 1
        request = Request(
            owner=0,
            id=f"{load.name}/{self.asked}",
            attempt=1,
            prompt=np.zeros(prompt, np.int32),
            output=[],
            params=SamplingParams(max_tokens=output),
            share=Share(tenant=load.name, weight=load.weight, background=load.background),
        )
        self.scheduler.add(request)
        return request

    def start(self, *loads: Load) -> None:
        for load in loads:
            self.loads[load.name] = load
            for _ in range(load.clients):
                self.ask(load)

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.steps += 1
        assert len(plan.seqs) <= self.step_tokens, f"seed {self.seed}"
        self.yielding = [request.share.background for request in plan.requests]
        by_slot = {request.slot: request for request in self.scheduler.live() if request.slot >= 0}
        for slot in plan.seqs.tolist():
            self.rows[by_slot[slot].share.tenant] += 1
            self.yielded += by_slot[slot].share.background
        for made in self.scheduler.complete([0] * len(plan.requests)):
            tenant = made.request.share.tenant
            self.outputs[tenant] += 1
            self.first_step.setdefault(made.request.id, self.steps)
            if made.finish and tenant in self.loads:
                self.ask(self.loads[tenant])
        return plan

    def window(self, steps: int) -> Counter[str]:
        """Rows computed for each tenant in so many steps."""
        before = self.rows.copy()
        for _ in range(steps):
            self.step()
        return Counter({name: count - before[name] for name, count in self.rows.items()})


def fixed(prompt: int, output: int) -> Callable[[random.Random], tuple[int, int]]:
    return lambda _: (prompt, output)


def between(prompt: tuple[int, int], output: tuple[int, int]) -> Callable[[random.Random], tuple[int, int]]:
    return lambda random: (random.randint(*prompt), random.randint(*output))


SHAPES = {
    "short": (between((1, 40), (1, 40)), between((1, 40), (1, 40)), 2000),
    "prompts": (between((100, 900), (1, 4)), between((100, 900), (1, 4)), 4000),
    "long outputs": (between((5, 20), (50, 300)), between((5, 20), (50, 300)), 10_000),
    "outputs beside prompts": (between((5, 20), (50, 200)), between((100, 900), (1, 4)), 10_000),
    "prompts beside outputs": (between((100, 900), (1, 4)), between((5, 20), (50, 200)), 10_000),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_two_tenants_of_weights_1_and_3_have_tokens_1_to_3(shape: str) -> None:
    machine = Machine(time.time_ns())
    one, three, steps = SHAPES[shape]
    machine.start(Load("one", 1, 20, one), Load("three", 3, 20, three))
    machine.window(steps // 4)
    had = machine.window(steps)
    assert had["three"] / had["one"] == pytest.approx(3, rel=0.05), f"{had}, seed {machine.seed}"


def test_a_tenant_alone_is_served_as_if_there_were_no_tenants() -> None:
    """Step by step the same plans, whatever it is called and weighs."""
    seed = time.time_ns()

    def plans(tenant: str, weight: int) -> list[list[int]]:
        machine = Machine(seed, blocks=200)
        machine.start(Load(tenant, weight, 20, between((1, 300), (1, 60))))
        made = [machine.step() for _ in range(500)]
        return [[*plan.seqs.tolist(), *plan.positions.tolist()] for plan in made if plan is not None]

    assert plans("", 1) == plans("acme", 7), f"seed {seed}"


def test_what_a_tenant_did_not_use_is_not_saved_up() -> None:
    machine = Machine(time.time_ns())
    shape = between((1, 40), (1, 40))
    machine.start(Load("one", 1, 20, shape))
    machine.window(2000)
    machine.start(Load("three", 3, 20, shape))
    machine.window(200)
    had = machine.window(2000)
    assert had["three"] / had["one"] == pytest.approx(3, rel=0.05), f"{had}, seed {machine.seed}"


def test_a_long_prompt_of_one_tenant_does_not_hold_up_another() -> None:
    machine = Machine(0, step_tokens=64)
    flood, other = Load("flood", 1, 0, fixed(4000, 1)), Load("other", 1, 0, fixed(1, 1))
    for _ in range(3):
        machine.ask(flood, 4000, 1)
    machine.window(5)
    asked = machine.ask(other, 60, 2)
    machine.window(3)
    assert asked.id in machine.first_step, "it waited behind the prompts of others"


def test_when_blocks_run_out_the_tenant_that_had_most_gives_them_up() -> None:
    machine = Machine(0, blocks=40, step_tokens=64)
    heavy, light = Load("heavy", 1, 0, fixed(1, 1)), Load("light", 1, 0, fixed(1, 1))
    many = [machine.ask(heavy, 100, 200) for _ in range(4)]
    machine.window(20)
    one = machine.ask(light, 20, 300)
    machine.window(350)
    assert one.id in machine.first_step and one.preemptions == 0 and sum(r.preemptions for r in many) > 0


def test_who_came_first_and_took_the_whole_queue_keeps_nobody_out() -> None:
    machine = Machine(0)
    machine.scheduler.config = SchedulerConfig(max_model_len=8192, max_waiting=16)
    flood, other = Load("flood", 3, 0, fixed(1, 1)), Load("other", 1, 0, fixed(1, 1))
    for _ in range(16):
        machine.ask(flood, 1, 1)
    with pytest.raises(Refused, match="16 requests wait"):
        machine.ask(flood, 1, 1)
    for _ in range(2):
        machine.ask(other, 1, 1)
    with pytest.raises(Refused, match="18 requests wait"):
        machine.ask(other, 1, 1)


BACKGROUND = Load("jobs", 1, 40, between((1, 300), (1, 200)), background=True)


def test_beside_background_work_a_request_waits_as_if_alone() -> None:
    """Counted in steps; and no step holds more background rows than are allowed."""
    seed = time.time_ns()

    def waits(*beside: Load) -> list[int]:
        machine = Machine(seed, slots=8, blocks=300, background_rows=8)
        machine.start(*beside)
        draw, mine, waited = random.Random(seed), Load("me", 1, 0, fixed(1, 1)), list[int]()
        for _ in range(300):
            request, began = machine.ask(mine, draw.randint(1, 200), draw.randint(1, 30)), machine.steps
            while request.id not in machine.first_step:
                before = machine.yielded
                machine.step()
                assert machine.yielded - before <= 8, f"seed {seed}"
            waited.append(machine.first_step[request.id] - began)
            for _ in range(draw.randint(0, 10)):
                if machine.step() is None:
                    machine.steps += 1
        return waited

    alone, beside = np.array(waits()), np.array(waits(BACKGROUND))
    assert (beside <= alone + 1).all() and (beside > alone).mean() < 0.3, f"{beside - alone}, seed {seed}"


def test_a_step_with_rows_of_others_has_few_in_the_background_and_none_beside_their_prompts() -> None:
    machine = Machine(time.time_ns(), slots=32, step_tokens=64, background_rows=4)
    machine.start(Load("jobs", 1, 8, fixed(1, 500), background=True))
    machine.start(Load("me", 1, 7, between((1, 100), (30, 60))))
    for _ in range(2000):
        prompts = [request for request in machine.scheduler.prefills() if not request.share.background]
        assert machine.step() is not None
        jobs = sum(machine.yielding)
        others = len(machine.yielding) - jobs
        assert jobs <= min(4, 1 + others // 4), f"{jobs} beside {others}, seed {machine.seed}"
        assert not jobs or not prompts, f"seed {machine.seed}"
    assert machine.rows["jobs"], f"seed {machine.seed}"


def test_a_step_has_no_more_rows_than_it_may_with_prompts_in_the_background_too() -> None:
    machine = Machine(0, slots=16, step_tokens=16, background_rows=4)
    machine.ask(BACKGROUND, 1, 100)
    machine.window(3)
    machine.start(Load("me", 1, 13, fixed(1, 200)))
    machine.window(5)
    machine.ask(BACKGROUND, 1000, 1)
    machine.window(100)


def test_the_cores_rest_after_steps_for_the_background_alone_while_others_come() -> None:
    machine = Machine(0, background_rows=4)
    assert not machine.scheduler.rests
    machine.start(Load("jobs", 1, 8, fixed(10, 8000), background=True))
    machine.window(10)
    assert not machine.scheduler.rests, "nobody else has come for long"
    machine.ask(Load("me", 1, 0, fixed(1, 1)), 5, 3)
    rested = []
    for _ in range(QUIET_STEPS + 3):
        machine.step()
        rested.append(machine.scheduler.rests)
    assert rested == [False] * 3 + [True] * (QUIET_STEPS - 1) + [False]


def test_nobody_in_the_background_is_preempted_while_there_is_room() -> None:
    machine = Machine(0, slots=16)
    jobs = [machine.ask(BACKGROUND, 10, 100) for _ in range(8)]
    machine.window(10)
    machine.start(Load("me", 1, 4, between((1, 40), (1, 40))))
    machine.window(500)
    assert not any(job.preemptions for job in jobs)


def test_background_work_goes_on_when_others_take_everything() -> None:
    machine = Machine(time.time_ns(), slots=4, blocks=80)
    jobs = [machine.ask(BACKGROUND, 40, 20) for _ in range(4)]
    machine.start(Load("me", 1, 30, between((100, 300), (1, 40))))
    done = 0
    for _ in range(20_000):
        machine.step()
        done = sum(len(job.output) == 20 for job in jobs)
        if done == len(jobs):
            break
    assert done == len(jobs), f"{done} jobs have ended, seed {machine.seed}"
    assert machine.rows["jobs"] < machine.rows["me"] / 10, f"{machine.rows}, seed {machine.seed}"


def test_background_work_alone_has_the_whole_machine() -> None:
    machine = Machine(0, slots=32, step_tokens=64)
    machine.start(Load("jobs", 1, 64, fixed(200, 50), background=True))
    had = machine.window(500)
    assert had["jobs"] > 0.9 * 500 * 32, had


def test_bits_are_those_of_a_request_alone_whoever_is_beside_it() -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    pool = BlockPool(blocks=24, block_tokens=BLOCK_TOKENS)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, step_tokens=8, max_running=6, background_rows=2), pool)
    decoder, asked = FakeDecoder(24), dict[str, tuple[list[int], int]]()
    requests: list[Request] = []
    for number in range(150):
        prompt, output = [draw.randrange(9) for _ in range(draw.randint(1, 20))], draw.randint(1, 20)
        share = Share(tenant=draw.choice("abc"), weight=draw.randint(1, 9), background=draw.random() < 0.4)
        request = Request(
            owner=0, id=str(number), attempt=1, prompt=np.array(prompt, np.int32), output=[],
            params=SamplingParams(max_tokens=output), share=share,
        )  # fmt: skip
        scheduler.add(request)
        requests.append(request)
        asked[request.id] = prompt, output
        for _ in range(draw.randint(0, 4)):
            if (plan := scheduler.plan()) is not None:
                scheduler.complete(decoder.step(plan, 1.0).argmax(axis=1).tolist())
    while (plan := scheduler.plan()) is not None:
        scheduler.complete(decoder.step(plan, 1.0).argmax(axis=1).tolist())
    assert pool.free == pool.blocks and not list(scheduler.live()), f"seed {seed}"
    for request in requests:
        prompt, output = asked[request.id]
        assert request.output == expected_output(prompt, output), f"request {request.id}, seed {seed}"
