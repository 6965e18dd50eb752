"""Promises of the GPU's decoder: the model that the definition computes, and a row's bits its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.gpu.local_experts import LocalExperts
from benchmarks.make_model import make_model
from eaas.gpu import decoder as module
from eaas.gpu.decoder import GpuDecoder
from eaas.model.loader import load_spec, load_weights
from eaas.model.spec import ModelSpec, MoeSpec, QkNorm, Rope, Score
from eaas.native import SAMPLE_ROW
from eaas.worker.decoder import DecoderError, ExpertsLost, PlanInvalid, WeightsInvalid
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import SamplingParams, Submit, Token
from eaas.worker.sample import DeviceSamples
from experts.checkpoint import Checkpoint
from experts.gpu.client import StepReport
from experts.gpu.weights import ExpertWeights
from experts.model import Dtype, ExpertShape
from tests.eaas import reference
from tests.eaas.decoder_world import VARIANTS, VOCAB, Runner, World, spec_of, tokens_of
from tests.eaas.reference import choose_experts, to_tensor
from tests.gpu.device import DEVICE, fresh_seed

Experts = Sequence[Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]]


class TorchExperts:
    """Experts in this process by torch, a pair at a time: a row's sum is its own."""

    stream = None

    def __init__(self, experts: Experts) -> None:
        self.experts = [
            [tuple(to_tensor(matrix, torch.float32).to(DEVICE) for matrix in expert) for expert in layer]
            for layer in experts
        ]

    def enqueue(self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor, n_rows: Tensor, out: Tensor) -> None:
        for row in range(int(n_rows)):
            x, total = rows[row].float(), torch.zeros_like(out[row])
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                gate, up, down = self.experts[layer][expert]
                act = (silu(gate @ x) * (up @ x)).to(torch.bfloat16).float()
                total += weight * (down @ act)
            out[row] = total

    def begin(self, deadline_s: float) -> None:
        """Nobody is waited for."""

    def end(self) -> StepReport:
        return StepReport()


class FarExperts:
    """Experts that say they were lost when they are told to."""

    def __init__(self, near: TorchExperts | LocalExperts) -> None:
        self.enqueue = near.enqueue
        self.stream = torch.cuda.Stream() if DEVICE == "cuda" else None
        self.budgets: list[float] = []
        self.reports: list[StepReport] = []

    def begin(self, deadline_s: float) -> None:
        self.budgets.append(deadline_s)

    def end(self) -> StepReport:
        return self.reports.pop(0) if self.reports else StepReport()


def experts_of(world: World, max_rows: int) -> TorchExperts | LocalExperts:
    """A world's experts: in the interpreter by torch, which is faster there."""
    if DEVICE == "cpu":
        return TorchExperts(world.experts)
    layers, moe = len(world.experts), world.spec.moe
    weights = ExpertWeights.allocate(
        slots=layers * moe.experts,
        hidden=world.spec.hidden,
        intermediate=moe.expert_intermediate,
        device=DEVICE,
    )
    for layer, experts in enumerate(world.experts):
        for number, expert in enumerate(experts):
            weights.load(layer * moe.experts + number, *expert)
    table = torch.arange(layers * moe.experts, dtype=torch.int32, device=DEVICE).view(layers, moe.experts)
    return LocalExperts(weights=weights, table=table, top_k=moe.top_k, max_rows=max_rows)


def runner_of(world: World, **sizes: object) -> Runner:
    experts = sizes.pop("experts", None) or experts_of(world, 512)
    decoder = GpuDecoder(world.spec, world.weights, experts, **{"kv_blocks": 64, "device": DEVICE, **sizes})  # type: ignore[arg-type]
    # What nobody wrote is read by nobody.
    for tensor in (
        decoder._keys,
        decoder._values,
        *decoder._buffers.values(),
        decoder._scores,
        decoder._logits,
    ):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    return Runner(decoder, experts)  # type: ignore[arg-type]


def bf16(spec: ModelSpec) -> ModelSpec:
    """The same in bfloat16, with at most two layers: the interpreter takes a tenth of a second for a row and layer."""
    return replace(spec, dtype=Dtype.BFLOAT16, layers=min(spec.layers, 2), sliding_window=spec.sliding_window[:2])


def plan_of(
    tokens: Sequence[int],
    positions: Sequence[int],
    seqs: Sequence[int],
    tables: object,
    wanted: Sequence[int],
) -> StepPlan:
    arrays = [np.array(values, dtype=np.int32) for values in (tokens, positions, seqs, tables, wanted)]
    names = ("token_ids", "positions", "seqs", "block_tables", "logits_rows")
    return StepPlan(**dict(zip(names, arrays, strict=True)))


def same_bits(ours: np.ndarray, theirs: np.ndarray, what: str, seed: int) -> None:
    differing = int((ours.view(np.uint32) != theirs.view(np.uint32)).sum())
    assert differing == 0, f"{what}: {differing} of {ours.size} values differ, seed {seed}"


def off_by(ours: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(ours - wanted) / np.linalg.norm(wanted))


REFUSED = {
    "odd sizes": "multiples of 8 columns; this model has hidden 50, query columns 30",
    "a quarter of each head rotated": "has rope over a part of each head, which the GPU does not compute",
    "sinks, gate with a bias, some windows": "has attention sinks and a bias of the gate's logits, which the GPU",
} | {
    name: "DeepseekV3ForCausalLM has latent attention, which the GPU does not compute. Serve with --device cpu"
    for name, spec in VARIANTS.items()
    if spec.latent
}
SERVED = {name: bf16(spec) for name, spec in VARIANTS.items() if name not in REFUSED} | {
    "every head its own key, 40 wide": bf16(
        spec_of(hidden=56, head_dim=40, q_heads=3, kv_heads=3, expert_intermediate=24, experts=5, top_k=5)
    )
}


@contextlib.contextmanager
def noticing_ties(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A list to which each choice of the definition's gates that is near a tie adds a word.

    bfloat16 may turn a near tie, and another expert is another answer: so a choice must stay the same when its
    logits move by what bfloat16 moves them.
    """
    ties: list[str] = []

    def choose(moe: MoeSpec, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        chosen = choose_experts(moe, logits, correction)
        for _ in range(64):
            noisy = choose_experts(moe, logits + 0.03 * torch.randn_like(logits), correction)[0]
            if not torch.equal(noisy.sort().values, chosen[0].sort().values):
                ties.append("gate")
                break
        return chosen

    with monkeypatch.context() as patch:
        patch.setattr(reference, "choose_experts", choose)
        yield ties


def without_ties(
    spec: ModelSpec, rows: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, World, list[int], np.ndarray]:
    """A seed, its world and tokens and what the definition says in float64, of which no gate is near a tie."""
    with noticing_ties(monkeypatch) as ties:
        for _ in range(1000):
            seed = fresh_seed()
            world, tokens = World.make(spec, seed), tokens_of(rows, seed)
            ties.clear()
            wanted = world.reference(torch.float64).logits(tokens)
            if not ties:
                return seed, world, tokens, wanted
    raise AssertionError("1,000 worlds were drawn, and a gate of each was near a tie")


def greedy_without_ties(
    world: World, rows: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[int], list[np.ndarray]]:
    """A seed, its prompt with the tokens that the definition adds in float64, and the logits that it adds them by.

    No gate is near a tie on the way, and no token.
    """
    definition = world.reference(torch.float64)
    with noticing_ties(monkeypatch) as ties:
        for _ in range(1000):
            seed = fresh_seed()
            tokens, wanted = tokens_of(rows, seed), []
            ties.clear()
            while len(wanted) < new and not ties:
                wanted.append(definition.logits(tokens)[-1])
                second, first = np.sort(wanted[-1])[-2:]
                if first - second < 0.1 * wanted[-1].std():
                    ties.append("token")
                tokens.append(int(wanted[-1].argmax()))
            if not ties:
                return seed, tokens, wanted
    raise AssertionError("1,000 prompts were drawn, and a gate or a token of each was near a tie")


@pytest.mark.parametrize("name", SERVED)
def test_every_feature_equals_its_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, world, tokens, wanted = without_ties(SERVED[name], 9, monkeypatch)
    off = [off_by(*rows) for rows in zip(runner_of(world).prefill(tokens), wanted, strict=True)]
    assert max(off) < 2e-2, f"{name}: off by {off}, seed {seed}"


def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks() -> None:
    seed = fresh_seed()
    spec = SERVED["sigmoid, groups, correction, shared, leading dense"]
    world = World.make(replace(spec, sliding_window=(7, 0), q_heads=4, kv_heads=1), seed)
    sequences = [tokens_of(length, seed + length) for length in (1, 2, 17)]
    tables = [[9, 3], [4, 33], [5, 40]]
    runner = runner_of(world)
    alone = [runner.prefill(tokens, 44) for tokens in sequences]
    pieces = [(tokens, 0, table) for tokens, table in zip(sequences, tables, strict=True)]
    together = runner.run(pieces)
    same_bits(together, np.concatenate(alone), "in a batch", seed)
    parts = [runner.run([(sequences[2][a:b], a, tables[0])]) for a, b in ((0, 7), (7, 16), (16, 17))]
    same_bits(np.concatenate(parts), alone[2], "in chunks, the last of one row", seed)
    two = runner_of(world, double_batching=True, block_tokens=32)
    blocks = [(tokens, 0, [number]) for number, tokens in enumerate(sequences)]
    same_bits(two.run(blocks), together, "in two micro-batches and blocks of 32", seed)
    lasts = np.stack([logits[-1] for logits in alone])
    for mode, given in ((runner, pieces), (two, blocks)):
        batch = [([tokens[-1]], len(tokens) - 1, table) for tokens, _, table in given]
        same_bits(mode.run(batch), lasts, "a batch of decoding rows", seed)
        same_bits(mode.run(batch, wanted=[2, 0, 2]), lasts[[2, 0, 2]], "picked rows", seed)
    assert runner.run([([1], 0, [60])], wanted=[]).shape == (0, VOCAB)


def test_more_logits_rows_than_the_device_keeps_at_once_come_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = fresh_seed()
    world = World.make(bf16(spec_of(layers=1)), seed)
    tokens, wanted = tokens_of(7, seed), [6, 0, 1, 5, 2, 3, 4]
    whole = runner_of(world).run([(tokens, 0, [1])], wanted)
    monkeypatch.setattr(module, "LOGITS_ROWS", 3)
    same_bits(runner_of(world).run([(tokens, 0, [1])], wanted), whole, "three at a time", seed)


@pytest.mark.parametrize("arch", [pytest.param("qwen3_moe", marks=pytest.mark.smoke), "qwen2_moe", "olmoe", "mixtral"])
def test_a_checkpoint_of_each_family_decodes_the_references_greedy_tokens(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_seed = fresh_seed()
    checkpoint = Checkpoint.open(make_model("tiny", arch, tmp_path, weights_seed, overrides={"num_hidden_layers": 2}))
    spec, shape = load_spec(checkpoint), ExpertShape.from_config(checkpoint.config)
    experts = [
        [tuple(checkpoint.tensor(name) for name in shape.names(layer, expert)) for expert in range(shape.experts)]
        for layer in range(shape.layers)
    ]
    world = World(spec, load_weights(checkpoint, spec), experts)  # type: ignore[arg-type]
    seed, tokens, wanted = greedy_without_ties(world, 5, 3, monkeypatch)
    runner, table = runner_of(world), [3, 1]
    logits = runner.run([(tokens[:5], 0, table)], wanted=[4])
    off = []
    for position, row in enumerate(wanted, start=5):
        off.append(off_by(logits[-1], row))
        assert int(logits[-1].argmax()) == tokens[position], f"seeds {weights_seed}, {seed}"
        logits = runner.run([([tokens[position]], position, table)])
    assert max(off) < 2e-2, f"off by {off}, seeds {weights_seed}, {seed}"


def test_tokens_chosen_on_the_device_are_those_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = fresh_seed()
    world = World.make(bf16(spec_of(layers=1)), seed)
    # Two of three logits rows at once, so that a step has a second piece.
    monkeypatch.setattr(module, "LOGITS_ROWS", 2)
    decoder = runner_of(world).decoder
    assert isinstance(decoder, GpuDecoder)
    plan = plan_of([3, 9, 27], [0, 1, 2], [0, 0, 0], [[5]], wanted=[2, 0, 1])
    logits = decoder.step(plan, 1.0).copy()
    rows = np.zeros(3, dtype=SAMPLE_ROW)
    rows["repetition"], rows["top_p"], rows["top_count"] = 1.0, 1.0, -1
    for left in ([], [1], [2], [0, 2], [0, 1, 2]):
        rows["top_count"] = -1
        rows["top_count"][left] = 0
        found = decoder.step_tokens(plan, rows, 1.0)
        here = [row for row in range(3) if row not in left]
        assert np.flatnonzero(found.sampled).tolist() == here
        assert found.tokens[here].tolist() == logits.argmax(-1)[here].tolist(), f"{left}, seed {seed}"
        assert found.sound[here].all()
        # The logits of the others, and nobody else's.
        same_bits(found.logits, logits[left], f"left {left}", seed)
    with pytest.raises(DecoderError, match="1 ways to sample for 3 logits rows"):
        decoder.step_tokens(plan, rows[:1], 1.0)


WAYS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 40, "seed": 8},
    {"temperature": 0.7, "seed": 9, "logprobs": 3},
    {"temperature": 0.8, "seed": 10, "presence_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": tuple(range(0, VOCAB, 2))},
)


def test_the_engine_over_the_device_emits_the_tokens_that_its_own_sampler_chooses() -> None:
    seed = fresh_seed()
    world = World.make(bf16(spec_of(layers=1)), seed)
    decoder = runner_of(world, kv_blocks=32, max_rows=16).decoder
    assert isinstance(decoder, GpuDecoder)
    steps = {"step": 0, "step_tokens": 0}

    class Counting:
        """The decoder, with or without the choice of tokens."""

        def step(self, plan: StepPlan, deadline_s: float) -> np.ndarray:
            steps["step"] += 1
            return decoder.step(plan, deadline_s)

    class Choosing(Counting):
        def step_tokens(self, plan: StepPlan, rows: np.ndarray, deadline_s: float) -> DeviceSamples:
            steps["step_tokens"] += 1
            return decoder.step_tokens(plan, rows, deadline_s)

    def emitted(stand_in: Counting) -> dict[str, list[Token]]:
        config = EngineConfig(max_model_len=64, step_tokens=16, kv_blocks=32, vocab=VOCAB)
        engine = Engine(stand_in, config)
        for number, way in enumerate(WAYS):
            params = SamplingParams(max_tokens=3, **way)  # type: ignore[arg-type]
            prompt = tokens_of(3, seed + number)
            assert engine.submit(Submit(id=str(number), attempt=1, prompt=prompt, output=[], params=params)) is None
        tokens: dict[str, list[Token]] = {}
        while (outcome := engine.step()) is not None:
            assert not outcome.failed
            for token in outcome.tokens.get(0, []):
                tokens.setdefault(token.id, []).append(token)
        return tokens

    by_device = emitted(Choosing())
    assert steps["step"] == 0
    assert steps["step_tokens"] > 0
    assert by_device == emitted(Counting()), f"seed {seed}"
    assert {id: len(tokens) for id, tokens in by_device.items() if id != "5"} == dict.fromkeys("01234", 3)
    assert all(len(token.top) == 3 for token in by_device["3"])


def test_many_sequences_and_long_tables_are_kept_up_to_date() -> None:
    seed = fresh_seed()
    world = World.make(bf16(spec_of(layers=1)), seed)
    runner = runner_of(world, max_rows=4, kv_blocks=80)
    tokens = tokens_of(4, seed)
    wanted = runner.run([(tokens, 0, [7])])
    # A table of a sequence that comes and goes, among more sequences than a step has rows.
    pieces = [([0], 0, [number]) for number in range(20, 23)]
    for place in (0, 3, 2):
        given = [*pieces[:place], (tokens[:1], 0, [50 + place, -5, 9999]), *pieces[place:]]
        same_bits(runner.run(given)[place], wanted[0], f"as sequence {place}", seed)
    tables = [[number % 80, -1, -1] for number in range(600)]
    plan = plan_of(tokens[:3], [0, 0, 0], [599, 3, 77], tables, wanted=[0])
    same_bits(runner.decoder.step(plan, 1.0)[0], wanted[0], "of 600 tables", seed)


def test_a_wrong_plan_is_refused_in_words_and_changes_nothing() -> None:
    seed = fresh_seed()
    world = World.make(bf16(spec_of(layers=1)), seed)
    runner = runner_of(world, max_rows=8)
    whole = runner.prefill([1, 2])
    for pieces, wanted, message in (
        ([([131], 0, [0])], [0], "Row 0: token 131"),
        ([([1], 16, [0])], [0], "Row 0: position 16; 0 to 15 have a place"),
        ([([1, 2], 15, [0, 64])], [0], "Row 1: its block table names a block outside 0 to 63"),
        ([([1, 2], 15, [-1, 1])], [0], "Row 0: its block table"),
        ([([1], 0, [0])], [1], "Logits row 1 is asked for; there are 1 rows"),
        ([([1] * 9, 0, [0])], [0], "9 rows, 1 logits rows; 1 to 8 are possible"),
    ):
        with pytest.raises(PlanInvalid, match=message):
            runner.run(pieces, wanted)
    same_bits(runner.prefill([1, 2]), whole, "after the refusals", seed)
    runner.decoder.close()
    runner.decoder.close()
    with pytest.raises(DecoderError, match="closed"):
        runner.prefill([1])


def test_a_step_with_a_damaged_answer_runs_again_and_one_that_lost_experts_names_the_rows() -> None:
    seed = fresh_seed()
    world = World.make(bf16(spec_of(layers=1)), seed)
    far = FarExperts(experts_of(world, 512))
    runner = runner_of(world, experts=far)
    whole = runner.prefill([1, 2])
    # On a GPU a capture was among the runs before.
    far.budgets.clear()
    far.reports = [StepReport(corrupt=(1,)), StepReport(corrupt=(0, 1))]
    same_bits(runner.prefill([1, 2]), whole, "run again", seed)
    assert len(far.budgets) == 3
    assert 0 < far.budgets[2] <= far.budgets[1] <= far.budgets[0] <= 10
    for reports, rows, message in (
        (
            [StepReport(corrupt=(0,)), StepReport(lost=(1,), corrupt=(0,))],
            [1],
            "in time",
        ),
        ([StepReport(corrupt=(0,))] * 9, [0], "soundly"),
    ):
        far.reports = list(reports)
        with pytest.raises(ExpertsLost, match=f"1 rows have an expert that did not answer {message}") as lost:
            runner.prefill([1, 2])
        assert lost.value.rows is not None
        assert lost.value.rows.tolist() == rows
    far.reports = []
    same_bits(runner.prefill([1, 2]), whole, "afterwards", seed)


@pytest.mark.smoke
def test_a_decoder_is_warm_for_all_its_steps() -> None:
    seed = fresh_seed()
    world = World.make(bf16(spec_of(layers=1)), seed)
    for two in (False, True):
        runner = runner_of(world, max_rows=5, double_batching=two)
        decoder = runner.decoder
        assert isinstance(decoder, GpuDecoder)
        assert decoder.sizes == (1, 2, 4, 8)
        decoder.warm(decoder.sizes)
        made = dict(decoder._sizes)
        assert sorted(made) == [(1, 1), *((rows, 1 + two) for rows in (2, 4, 8))]
        for rows in range(1, 6):
            runner.run([(tokens_of(rows, seed), 0, [rows])])
        assert decoder._sizes == made, f"seed {seed}"


def test_nothing_about_servers_is_written_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other threads launch on the stream of a capture would become part of the graph, or end it."""
    world = World.make(bf16(spec_of(layers=1)), 1)
    far, events = FarExperts(experts_of(world, 512)), []
    decoder = runner_of(world, experts=far).decoder
    assert isinstance(decoder, GpuDecoder)

    @contextlib.contextmanager
    def capture(graph: object, **options: object) -> Iterator[None]:
        events.append("captured")
        yield
        events.append("whole")

    monkeypatch.setattr(far, "begin", lambda deadline_s: events.append("begin"), raising=False)
    monkeypatch.setattr(far, "end", lambda: events.append("end"), raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    decoder._capture(decoder._size(2))
    assert events[-4:] == ["begin", "captured", "whole", "end"]


def test_every_part_of_a_model_is_computed_or_refused() -> None:
    """A field that is new here needs kernels, or a line in what `GpuDecoder` refuses."""
    parts = {kind.__name__: {field.name for field in fields(kind)} for kind in (ModelSpec, MoeSpec, Rope)}
    assert parts == {
        "ModelSpec": {
            "architecture", "hidden", "layers", "q_heads", "kv_heads", "head_dim", "vocab", "intermediate", "eps",
            "rope", "max_model_len", "qk_norm", "qkv_bias", "o_bias", "clip_qkv", "sliding_window",
            "tie_embeddings", "dtype", "moe", "eos_ids", "sinks", "latent",
        },
        "MoeSpec": {
            "experts", "top_k", "expert_intermediate", "norm_topk", "score", "correction_bias", "groups",
            "groups_topk", "scaling_factor", "dense_layers", "shared_intermediate", "shared_gate", "gate_bias",
        },
        "Rope": {"kind", "theta", "inv_freq", "attention_factor", "all_dim_factor"},
    }  # fmt: skip


def test_what_the_gpu_does_not_serve_is_refused_in_words() -> None:
    world = World.make(bf16(spec_of(layers=1)), 1)
    for change, message in (
        ({"dtype": Dtype.FLOAT32}, "float32 is asked for"),
        ({"block_tokens": 24}, "blocks of 24 positions"),
        ({"device": "cpu" if DEVICE == "cuda" else "cuda"}, "TRITON_INTERPRET"),
        ({"max_rows": 0}, "0 rows a step"),
    ):
        with pytest.raises(DecoderError, match=message):
            runner_of(world, **change)
    for variant, message in REFUSED.items():
        refused = World.make(bf16(VARIANTS[variant]), 1)
        with pytest.raises(DecoderError, match=message):
            runner_of(refused, experts=FarExperts(TorchExperts([])))
    del world.weights["0.o"]
    with pytest.raises(WeightsInvalid, match=r"0\.o is missing"):
        runner_of(world)
    world = World.make(bf16(spec_of(layers=1, qk_norm=QkNorm.HEAD, score=Score.SIGMOID)), 1)
    world.weights["0.q_norm"] = world.weights["0.q_norm"][:-1]
    with pytest.raises(WeightsInvalid, match=r"0\.q_norm has shape \[31\]; the spec needs \[32\]"):
        runner_of(world)
