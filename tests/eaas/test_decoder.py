"""The native decoder against its definition, and its promise of equal bits."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engines.gate_tap import EXPERT_CALL
from eaas.worker.decoder import (
    Decoder,
    DecoderError,
    ExpertBackend,
    ExpertsLost,
    PlanInvalid,
    WeightsInvalid,
)
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import SamplingParams
from eaas.worker.sample import SlotSampler
from experts import native as experts_native
from experts.model import Dtype
from tests.eaas.decoder_world import VARIANTS, World, spec_of, tokens_of
from tests.eaas.reference import choose_experts
from tests.eaas.test_sample import params_of, request_of

SEED = 20261121
BF16 = spec_of(dtype=Dtype.BFLOAT16, qkv_bias=True, shared_intermediate=32, shared_gate=True, head_dim=64, layers=2)
EXACT = {
    "float32": VARIANTS["sliding windows"],
    "bfloat16": BF16,
    "dense, sigmoid": VARIANTS["sigmoid, groups, correction, shared, leading dense"],
    "full norm": VARIANTS["one head per key, full norm, clip"],
    "latents": VARIANTS["latent attention, sigmoid, shared"],
    "latents of the row, bfloat16": replace(
        VARIANTS["latent attention of the row itself, in halves"], dtype=Dtype.BFLOAT16
    ),
}


@pytest.fixture(scope="module", params=EXACT)
def world(request: pytest.FixtureRequest) -> World:
    return World.make(EXACT[request.param], SEED)


def same_bits(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    differing = int((ours.view(np.uint32) != theirs.view(np.uint32)).sum())
    assert differing == 0, f"{what}: {differing} of {ours.size} values differ, seed {SEED}"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_feature_equals_its_definition(name: str) -> None:
    world = World.make(VARIANTS[name], SEED)
    tokens = tokens_of(150, SEED)
    ours = world.decoder(lanes=2).prefill(tokens)
    theirs = world.reference().logits(tokens)
    worst = float(np.abs(ours - theirs).max())
    assert worst < 2e-4, f"{name}: off by {worst}, largest logit {np.abs(theirs).max()}, seed {SEED}"


def test_bfloat16_errs_no_more_than_its_rounding() -> None:
    world = World.make(BF16, SEED)
    tokens = tokens_of(100, SEED)
    exact = world.reference(torch.float64).logits(tokens)
    ours = world.decoder().prefill(tokens)
    error = np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert np.median(error) < 0.01, f"median relative error {np.median(error)}, seed {SEED}"


def test_a_row_has_the_same_bits_alone_and_in_a_batch_of_17_lengths(world: World) -> None:
    runner = world.decoder(kv_blocks=400)
    lengths = [1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 63, 64, 65, 66, 80, 100, 129]
    sequences = [tokens_of(length, SEED + i) for i, length in enumerate(lengths)]
    alone = [runner.prefill(tokens)[-1] for tokens in sequences]
    tables = np.random.Generator(np.random.Philox(key=SEED)).permutation(400)[: 17 * 10].reshape(17, 10).tolist()
    for start in range(0, 17, 4):
        pieces = [
            (s[:-1], 0, t) for s, t in zip(sequences[start : start + 4], tables[start:], strict=False) if len(s) > 1
        ]
        runner.run(pieces)
    batch = runner.run([([s[-1]], len(s) - 1, t) for s, t in zip(sequences, tables, strict=True)])
    for row, length in enumerate(lengths):
        same_bits(batch[row], alone[row], f"length {length} decoded in a batch of 17 against prefilled alone")


def test_every_chunk_boundary_gives_the_same_bits(world: World) -> None:
    runner = world.decoder()
    tokens = tokens_of(70, SEED)
    whole = runner.prefill(tokens)
    for cut in range(1, 70):
        blocks = list(range(10, 15)) if cut % 2 else [3, 60, 1, 30, 2]
        first = runner.run([(tokens[:cut], 0, blocks)])
        second = runner.run([(tokens[cut:], cut, blocks)])
        same_bits(np.concatenate((first, second)), whole, f"cut at {cut}")


def test_decoding_gives_the_bits_of_prefill(world: World) -> None:
    runner = world.decoder()
    tokens = tokens_of(90, SEED)
    whole = runner.prefill(tokens)
    for position, token in enumerate(tokens):
        row = runner.run([([token], position, range(20, 26))])[0]
        same_bits(row, whole[position], f"position {position}")


def test_lanes_change_no_bit(world: World) -> None:
    sequences = [tokens_of(length, SEED + length) for length in (1, 40, 77)]
    pieces = [(tokens, 0, range(8 * i, 8 * i + 6)) for i, tokens in enumerate(sequences)]
    one = world.decoder(lanes=1).run(pieces)
    for lanes in (2, 3):
        runner = world.decoder(lanes=lanes)
        same_bits(runner.run(pieces), one, f"{lanes} lanes")
        same_bits(runner.run([(sequences[2][-1:], 76, range(16, 22))])[0], one[-1], f"{lanes} lanes, one row")


def test_instruction_sets_that_share_a_numerics_class_give_the_same_bits(world: World) -> None:
    library = experts_native.load()
    chosen = library.experts_isa_name()
    results: dict[bytes, np.ndarray] = {}
    try:
        for name in (b"portable", b"avx2", b"avx512"):
            if library.experts_isa_select(name) == 0:
                numerics = library.experts_numerics_class(int(world.spec.dtype))
                logits = world.decoder().prefill(tokens_of(70, SEED))
                same_bits(logits, results.setdefault(numerics, logits), f"{name} in {numerics}")
    finally:
        library.experts_isa_select(chosen)


def test_block_size_and_stale_blocks_change_no_bit(world: World) -> None:
    tokens = tokens_of(75, SEED)
    whole = world.decoder().prefill(tokens)
    runner = world.decoder(block_tokens=48, kv_blocks=8)
    runner.run([(tokens_of(100, SEED + 1), 0, [5, 2, 1])])
    same_bits(runner.run([(tokens, 0, [1, 5])]), whole, "blocks of 48, used before")


def test_values_of_another_request_cannot_leak_even_as_nan() -> None:
    world = World.make(VARIANTS["grouped heads, head norm, tied"], SEED)
    broken = World(world.spec, dict(world.weights), world.experts)
    embed = world.weights["embed"].copy()
    embed[7] = np.nan
    broken.weights["embed"] = embed
    runner = broken.decoder()
    tokens = [token for token in tokens_of(40, SEED) if token != 7]
    clean = runner.prefill(tokens)
    assert np.isnan(runner.run([([7] * 60, 0, [0, 1, 2, 3])])).all()
    same_bits(runner.run([(tokens, 0, [3, 0, 2])]), clean, "in blocks that held NaN")


def test_a_step_can_be_run_again() -> None:
    world = World.make(BF16, SEED)
    runner = world.decoder()
    tokens = tokens_of(50, SEED)
    first = runner.prefill(tokens)
    same_bits(runner.prefill(tokens), first, "the same step again")
    same_bits(runner.run([(tokens[20:], 20, range(4))]), first[20:], "its end again")


def test_only_the_logits_asked_for_are_returned_in_their_order() -> None:
    world = World.make(VARIANTS["odd sizes"], SEED)
    runner = world.decoder()
    tokens = tokens_of(30, SEED)
    whole = runner.prefill(tokens)
    some = runner.run([(tokens, 0, range(2))], wanted=[29, 3, 3, 7, 0, 11])
    same_bits(some, whole[[29, 3, 3, 7, 0, 11]], "picked rows")
    assert runner.run([(tokens, 0, range(2))], wanted=[]).shape == (0, world.spec.vocab)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(("vocab", "broken"), [(131, None), (1000, None), (1000, "row"), (1000, "logit")])
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_chosen_in_the_head_are_those_of_its_logits(
    name: str, vocab: int, broken: str | None, lanes: int
) -> None:
    seed = time.time_ns()
    source = np.random.default_rng(seed)
    world = World.make(replace(VARIANTS[name], vocab=vocab, tie_embeddings=False, dtype=Dtype.BFLOAT16), SEED)
    # The same logits again and again, in other tiles and lanes.
    period = int(source.integers(20, vocab))
    world.weights["head"] = world.weights["head"][np.arange(vocab) % period]
    count = int(source.integers(1, 25))
    if broken == "row":
        world.weights["embed"][0] = 0x7FC0
    elif broken == "logit":
        world.weights["head"][int(source.integers(vocab))] = 0x7F80
    requests = [
        request_of(
            params_of(source) if source.random() < 0.4 else SamplingParams(max_tokens=8, temperature=0.0),
            [5, 6],
            [7],
        )
        for _ in range(count)
    ]
    plan = StepPlan(
        token_ids=source.integers(0, 12, count).astype(np.int32),
        positions=np.zeros(count, dtype=np.int32),
        seqs=np.arange(count, dtype=np.int32),
        block_tables=source.permutation(32)[:count, None].astype(np.int32),
        logits_rows=source.permutation(count).astype(np.int32),
        requests=requests,
    )
    runner = world.decoder(lanes=lanes)
    sampler, other = (SlotSampler(vocab=vocab, slots=count) for _ in range(2))
    rows = sampler.rows(plan)
    logits = runner.decoder.step(plan, 10.0).copy()
    wanted = other.sample(plan, other.rows(plan), logits)
    device = runner.decoder.step_tokens(plan, rows, 10.0)
    found = sampler.sample(plan, rows, device.logits, device=device)
    plain = [request.params == SamplingParams(max_tokens=8, temperature=0.0) for request in requests]
    assert device.sampled[plain].all(), f"seed {seed}"
    same_bits(device.logits, logits[~device.sampled], f"logits left, seed {seed}")
    assert found.refused == wanted.refused, f"seed {seed}"
    sound = [row for row in range(count) if row not in wanted.refused]
    for row in sound:
        assert found.tokens[row] == wanted.tokens[row], f"seed {seed}, row {row}"
        asked = requests[row].params.logprobs
        if asked >= 0:
            assert found.top(row, asked) == wanted.top(row, asked), f"seed {seed}"
    assert broken != "logit" or not sound, f"seed {seed}"


@pytest.mark.parametrize("lanes", [1, 2])
def test_rows_that_nobody_reads_change_no_bit_of_the_others_now_or_later(world: World, lanes: int) -> None:
    first, second = tokens_of(40, SEED), tokens_of(23, SEED + 1)
    pieces = [(first, 0, range(3)), (second, 0, range(3, 5))]
    everything, runner = world.decoder(lanes=lanes).run(pieces), world.decoder(lanes=lanes)
    for wanted in ([39, 62], [62, 5, 5, 41], [17]):
        assert np.array_equal(runner.run(pieces, wanted=wanted), everything[wanted]), f"{wanted}, seed {SEED}"
    chunked = world.decoder(lanes=lanes)
    assert not chunked.run([(first[:21], 0, range(3))], wanted=[]).size
    last = chunked.run([(first[21:], 21, range(3))], wanted=[18])
    assert np.array_equal(last[0], everything[39]), f"seed {SEED}"


def test_gate_ties_go_to_the_lowest_expert() -> None:
    spec = spec_of(layers=1, top_k=3)
    world = World.make(spec, SEED)
    world.weights["0.gate"] = np.zeros_like(world.weights["0.gate"])
    tokens = tokens_of(5, SEED)
    ids, _ = choose_experts(spec.moe, torch.zeros(1, spec.moe.experts), None)
    assert ids.tolist() == [[0, 1, 2]]
    worst = np.abs(world.decoder().prefill(tokens) - world.reference().logits(tokens)).max()
    assert worst < 2e-4, f"off by {worst}, seed {SEED}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", [0, 131], "Row 1: token 131 is outside the vocabulary of 131"),
        ("token_ids", [-1, 0], "Row 0: token -1"),
        ("positions", [0, -1], "Row 1: position -1; 0 to 31 have a place"),
        ("positions", [0, 32], "Row 1: position 32; 0 to 31 have a place"),
        ("seqs", [0, 1], "Row 1: sequence 1; there are 1 block tables"),
        ("block_tables", [[0, 64]], "Row 1: its block table names a block outside 0 to 63"),
        ("block_tables", [[-1, 1]], "Row 0: its block table"),
        ("logits_rows", [0, 2], "Logits row 2 is asked for; there are 2 rows"),
        ("token_ids", [1], "1 tokens, 2 positions and 2 sequences differ"),
    ],
)
def test_a_plan_outside_the_limits_is_refused_before_anything_runs(field: str, value: list, message: str) -> None:
    runner = World.make(spec_of(layers=1), SEED).decoder()
    parts = {
        "token_ids": [1, 2],
        "positions": [0, 20],
        "seqs": [0, 0],
        "block_tables": [[0, 1]],
        "logits_rows": [1],
    } | {field: value}
    arrays: dict[str, Any] = {name: np.array(part, dtype=np.int32) for name, part in parts.items()}
    plan = StepPlan(**arrays)
    with pytest.raises(PlanInvalid, match=message):
        runner.decoder.step(plan, 1.0)
    with pytest.raises(PlanInvalid, match="int64"):
        runner.decoder.step(replace(plan, positions=plan.positions.astype(np.int64)), 1.0)


def test_too_many_rows_are_refused() -> None:
    runner = World.make(spec_of(layers=1), SEED).decoder(max_rows=8)
    with pytest.raises(PlanInvalid, match="9 rows, 9 logits rows; 1 to 8 are possible"):
        runner.prefill(tokens_of(9, SEED))


def test_wrong_weights_and_sizes_are_refused() -> None:
    world = World.make(spec_of(layers=1), SEED)
    gone = {role: array for role, array in world.weights.items() if role != "0.k"}
    with pytest.raises(WeightsInvalid, match=r"Weight 0.k is missing"):
        World(world.spec, gone, world.experts).decoder()
    small = world.weights | {"0.o": world.weights["0.o"][:-1]}
    with pytest.raises(WeightsInvalid, match=r"Weight 0.o has shape \[71, 192\]"):
        World(world.spec, small, world.experts).decoder()
    with pytest.raises(DecoderError, match="a multiple of 16"):
        world.decoder(block_tokens=24)
    with pytest.raises(
        DecoderError, match=r"A KV cache of 100,000,000,000 tokens takes [\d,.]+ GiB.* Lower --kv-tokens: "
    ):
        Decoder(world.spec, world.weights, world.decoder().local.backend, [-1], 100_000_000_000 // 16)


def test_a_lost_expert_is_an_error_that_leaves_the_decoder_usable() -> None:
    world = World.make(spec_of(layers=2), SEED)
    local = world.decoder().local
    left = [1]
    real = EXPERT_CALL(local.backend.call)

    @EXPERT_CALL
    def sometimes(*arguments: int) -> int:
        left[0] -= 1
        return -1 if left[0] == -1 else real(*arguments)

    backend = ExpertBackend(call=ctypes.cast(sometimes, ctypes.c_void_p).value or 0, state=local.backend.state)
    decoder = Decoder(world.spec, world.weights, backend, [-1], 8)
    tokens = np.array(tokens_of(20, SEED), dtype=np.int32)
    plan = StepPlan(
        token_ids=tokens,
        positions=np.arange(20, dtype=np.int32),
        seqs=np.zeros(20, dtype=np.int32),
        block_tables=np.array([[3, 4]], dtype=np.int32),
        logits_rows=np.arange(20, dtype=np.int32),
    )
    with pytest.raises(ExpertsLost, match="code -1"):
        decoder.step(plan, 1.0)
    same_bits(decoder.step(plan, 1.0), world.decoder().prefill(tokens.tolist()), "the step run again")
    decoder.close()
    decoder.close()
    with pytest.raises(DecoderError, match="closed"):
        decoder.step(plan, 1.0)
