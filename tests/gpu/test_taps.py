"""Promises of what GPUs record of rows: the CPU's decoder records the same, and who is not asked computes as before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from eaas.gpu import decoder as module
from eaas.gpu import norm_rope
from eaas.gpu import taps as tap_module
from eaas.gpu.decoder import GpuDecoder
from eaas.gpu.taps import statistics_reference, tap
from eaas.model.spec import ModelSpec
from eaas.native import SAMPLE_ROW
from eaas.worker.decoder import Decoder, ExpertsLost, PlanInvalid
from eaas.worker.plan import StepPlan, StepTaps
from eaas.worker.taps import KINDS, OF_EXPERTS, WHOLE, Tap
from experts.gpu.client import StepReport
from tests.eaas.decoder_world import World, spec_of, tokens_of
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned
from tests.gpu.device import same_bits as same
from tests.gpu.test_decoder import (
    SERVED,
    FarExperts,
    bf16,
    experts_of,
    noticing_ties,
    off_by,
    plan_of,
    runner_of,
    same_bits,
)  # fmt: skip

RECORDED = KINDS[:-1]


def taps_of(spec: ModelSpec, rows: Sequence[int], statistics: bool, left_out: Sequence[Tap] = ()) -> StepTaps:
    """Everything that there is of these rows, but for what is left out; each frame begins senseless."""
    places, end = np.full((len(RECORDED), spec.layers), -1, dtype=np.int64), 0
    for number, kind in enumerate(RECORDED):
        layers = (0,) if kind in WHOLE else spec.moe_layers if kind in OF_EXPERTS else range(spec.layers)
        for layer in layers:
            if Tap(kind, layer) not in left_out:
                places[number, layer] = end
                end += len(rows) * (4 if statistics and kind != "logits" else Tap(kind, layer).width(spec))
    return StepTaps(
        rows=np.array(rows, dtype=np.int32), places=places, experts=np.zeros((0, 3), dtype=np.int64),
        frame=np.full(end, -7, dtype=np.float32), statistics=statistics,
    )  # fmt: skip


def recorded(spec: ModelSpec, taps: StepTaps) -> Mapping[Tap, np.ndarray]:
    """What is in the frame, [rows, numbers] of each."""
    found = {}
    for (number, layer), place in np.ndenumerate(taps.places):
        if place >= 0:
            what = Tap(RECORDED[number], layer)
            width = 4 if taps.statistics and what.kind != "logits" else what.width(spec)
            rows = taps.frame[place : place + len(taps.rows) * width].reshape(-1, width)
            found[what] = rows[:, :4] if taps.statistics else rows
    return found


def a_chunk_beside_decoding_rows(world: World, seed: int, decoders: Sequence[GpuDecoder | Decoder]) -> StepPlan:
    """A step of 6 rows, of which 4 are a prompt's chunk; what came before it is in these decoders' caches.

    Two micro-batches of it leave a gap: 3 rows each, in buffers of 4.
    """
    one, two, three = (tokens_of(count, seed + count) for count in (6, 3, 1))
    before = plan_of([*one[:2], *two[:2]], [0, 1, 0, 1], [0, 0, 1, 1], [[3], [5]], wanted=[])
    for decoder in decoders:
        decoder.step(before, 10.0)
    return plan_of(
        [two[2], *one[2:], *three],
        [2, 2, 3, 4, 5, 0],
        [1, 0, 0, 0, 0, 2],
        [[3], [5], [9]],
        wanted=[5, 0],
    )


def gpu(world: World, **sizes: object) -> GpuDecoder:
    decoder = runner_of(world, max_rows=8, **sizes).decoder
    assert isinstance(decoder, GpuDecoder)
    return decoder


def worlds(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[int, World]:
    """A seed and its world, no gate of which is near a tie for the sequences of the step."""
    with noticing_ties(monkeypatch) as ties:
        for _ in range(1000):
            seed = fresh_seed()
            world = World.make(spec, seed)
            ties.clear()
            for count in (6, 3, 1):
                if not ties:
                    world.reference(torch.float64).logits(tokens_of(count, seed + count))
            if not ties:
                return seed, world
    raise AssertionError("1,000 worlds were drawn, and a gate of each was near a tie")


@pytest.mark.parametrize(
    ("name", "double_batching"),
    [
        ("sigmoid, groups, correction, shared, leading dense", False),
        pytest.param("sigmoid, groups, correction, shared, leading dense", True, marks=pytest.mark.smoke),
        ("bias, shared expert with gate", True),
        ("output bias, many queries per key", False),
    ],
)
def test_rows_are_recorded_as_the_cpu_records_them(
    name: str, double_batching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SERVED[name]
    seed, world = worlds(spec, monkeypatch)
    decoder, cpu = gpu(world, taps=True, double_batching=double_batching), world.decoder()
    assert decoder.tap_kinds == set(RECORDED)
    plan = a_chunk_beside_decoding_rows(world, seed, (decoder, cpu.decoder))
    for statistics, rows in ((False, [0, 2, 3, 5]), (True, [1, 4])):
        ours, theirs = (taps_of(spec, rows, statistics) for _ in range(2))
        decoder.step(replace(plan, taps=ours), 10.0)
        cpu.decoder.step(replace(plan, taps=theirs), 10.0)
        wanted = recorded(spec, theirs)
        for what, found in recorded(spec, ours).items():
            label = f"{what.name} of rows {rows}, seed {seed}"
            if what.kind == "experts" and not statistics:
                # Two that score alike may change places.
                assert np.array_equal(np.sort(found), np.sort(wanted[what])), label
            elif statistics:
                # The mean of numbers about 0 is exact to what they are large.
                slack = np.maximum(np.abs(wanted[what]), wanted[what][:, 1:2])
                assert (np.abs(found - wanted[what]) <= 2e-2 * slack).all(), f"{label}: {found}, {wanted[what]}"
            else:
                off = [off_by(*pair) for pair in zip(found, wanted[what], strict=True)]
                assert max(off) < 2e-2, f"{label}: off by {off}"


def test_what_is_recorded_is_what_the_step_computes_with() -> None:
    """The stream adds up, layer by layer, and logits are the step's own."""
    seed = fresh_seed()
    spec = SERVED["sigmoid, groups, correction, shared, leading dense"]
    world = World.make(spec, seed)
    frames = []
    for two in (False, True):
        decoder = gpu(world, taps=True, double_batching=two)
        plan = a_chunk_beside_decoding_rows(world, seed, (decoder,))
        taps = taps_of(spec, range(6), False)
        logits = decoder.step(replace(plan, taps=taps, logits_rows=np.arange(6, dtype=np.int32)), 10.0)
        same_bits(recorded(spec, taps)[Tap("logits")], logits, "logits", seed)
        frames.append(taps.frame)
    same_bits(frames[1], frames[0], "in two micro-batches", seed)
    found = recorded(spec, taps)
    same_bits(found[Tap("embed")], world_rows(world, plan.token_ids), "embedding", seed)
    last = torch.from_numpy(found[Tap("residual", spec.layers - 1)]).double()
    weight = torch.from_numpy(as_float(world.weights["final_norm"])).double()
    normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + spec.eps) * weight
    assert distance(torch.from_numpy(found[Tap("final_norm")]), normed) < 3e-3, f"seed {seed}"


def as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def world_rows(world: World, tokens: np.ndarray) -> np.ndarray:
    return as_float(world.weights["embed"])[tokens]


@pytest.mark.parametrize("double_batching", [False, True], ids=["whole", "two micro-batches"])
def test_who_is_not_asked_records_nothing_and_computes_the_same(
    double_batching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = fresh_seed()
    spec = bf16(spec_of(shared_intermediate=40))
    world = World.make(spec, seed)
    # Two of the rows' logits at once, so that recorded ones come in pieces, too.
    monkeypatch.setattr(module, "LOGITS_ROWS", 2)
    decoder, without = (gpu(world, taps=taps, double_batching=double_batching) for taps in (True, False))
    assert (without.tap_kinds, without.tap_floats) == (frozenset(), 0)
    plan = a_chunk_beside_decoding_rows(world, seed, (decoder, without))
    logits = without.step(plan, 10.0).copy()
    assert decoder._taps is not None
    frame = decoder._taps._frame.fill_(-7)
    left_out = [Tap("residual", 0), Tap("gate", 1), Tap("final_norm")]
    for statistics in (False, True):
        taps = taps_of(spec, [1, 2, 5], statistics, left_out)
        same_bits(decoder.step(replace(plan, taps=taps), 10.0), logits, "beside a record", seed)
        if not statistics:
            assert not (taps.frame == -7).any(), f"seed {seed}"
            whole = recorded(spec, taps)
            assert (frame[taps.frame.size :] == -7).all(), f"beyond the frame, seed {seed}"
            same_bits(whole[Tap("logits")][2], logits[0], "logits of the second piece", seed)
    for what, brief in recorded(spec, taps).items():
        four = statistics_reference(torch.from_numpy(whole[what]))
        assert np.allclose(brief, four, rtol=1e-5, atol=1e-6), f"{what.name}, seed {seed}"
    frame.fill_(-7)
    same_bits(decoder.step(plan, 10.0), logits, "after a record", seed)
    assert (frame == -7).all(), f"seed {seed}"
    rows = np.zeros(2, dtype=SAMPLE_ROW)
    rows["repetition"], rows["top_p"], rows["top_count"] = 1.0, 1.0, -1
    again = taps_of(spec, [1, 2, 5], False, left_out)
    tokens = decoder.step_tokens(replace(plan, taps=again), rows, 10.0).tokens
    assert tokens.tolist() == logits.argmax(-1).tolist()
    same_bits(again.frame, np.concatenate([found.ravel() for found in whole.values()]), "with tokens", seed)


def test_a_record_that_cannot_be_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = fresh_seed()
    spec = bf16(spec_of(layers=1))
    world = World.make(spec, seed)
    monkeypatch.setattr(tap_module, "FRAME_FLOATS", 700)
    far = FarExperts(experts_of(world, 512))
    decoder = gpu(world, taps=True, experts=far)
    assert decoder.tap_floats == 700
    plan = plan_of([1, 2], [0, 1], [0, 0], [[4]], wanted=[1])
    fits, large = (taps_of(spec, rows, False) for rows in ([1], [0, 1]))
    assert fits.frame.size <= 700 < large.frame.size
    single = replace(fits, experts=np.array([[0, 1, 0]], dtype=np.int64))
    logits = decoder.step(plan, 1.0).copy()
    for taps, words in ((large, f"{large.frame.size} floats"), (single, "1 single experts")):
        with pytest.raises(PlanInvalid, match=f"{words}.*at most 700 floats a step and no single expert"):
            decoder.step(replace(plan, taps=taps), 1.0)
    with pytest.raises(PlanInvalid, match="made without taps"):
        gpu(world).step(replace(plan, taps=fits), 1.0)
    far.reports = [StepReport(lost=(1,))]
    with pytest.raises(ExpertsLost):
        decoder.step(replace(plan, taps=fits), 1.0)
    assert (fits.frame == -7).all(), "a step that failed has recorded"
    same_bits(decoder.step(replace(plan, taps=fits), 1.0), logits, "after the refusals", seed)
    assert not (fits.frame == -7).any()


def one(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def test_what_is_added_up_is_what_the_norm_adds_up() -> None:
    seed = fresh_seed()
    generator, rows, width = torch.Generator().manual_seed(seed), 3, 1500
    parts = torch.randn(3, rows, width, generator=generator).to(DEVICE)
    x, addend, shared = parts.clone()
    bias, scale = (
        torch.randn(width, generator=generator).to(DEVICE),
        torch.rand(rows, generator=generator).to(DEVICE),
    )
    more = {"addend": addend, "shared": shared, "scale": scale}
    numbers = torch.arange(rows, dtype=torch.int32, device=DEVICE)

    def found(source: torch.Tensor, **more: Any) -> torch.Tensor:
        frame = poisoned(rows, width)
        tap(source, numbers, one(rows), one(0), one(0), frame.view(-1), **more)
        return frame

    assert same(found(parts), parts[0] + parts[1] + parts[2]), f"seed {seed}"
    assert same(found(x, bias=bias), x + bias), f"seed {seed}"
    ours = found(x, **more)
    norm_rope.add_norm(x, bias, one(rows), 1e-6, out=poisoned(rows, width, dtype=torch.bfloat16), **more)
    assert same(ours, x), f"seed {seed}"


@pytest.mark.smoke
@pytest.mark.parametrize("width", [1, 50, 2500])
def test_statistics_leave_out_what_is_not_finite_and_say_how_much(width: int) -> None:
    seed = fresh_seed()
    source = (torch.randn(4, width, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE)
    source[1, ::7] = torch.nan
    source[2, 0], source[2, -1] = torch.inf, -torch.inf
    source[3] = torch.nan
    # Rows are numbered as they please; one is not recorded, and one does not count.
    numbers = torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    for wide in (False, True):
        apart, frame = width if wide and width >= 4 else 4, poisoned(5 + 4 * max(4, width))
        tap(source, numbers, one(4), one(5), one(1), frame, wide=apart != 4)
        wanted = statistics_reference(source)
        for row, number in enumerate(numbers.tolist()):
            found = frame[5 + number * apart :][:4]
            assert np.allclose(found.cpu(), wanted[row].cpu(), rtol=1e-5, atol=1e-5), f"row {row}, seed {seed}"
    frame = poisoned(5 + 4 * width)
    for place, n_rows in ((-1, 4), (5, 0)):
        tap(source, numbers, one(n_rows), one(place), one(0), frame)
        assert frame.isnan().all(), "recorded where nothing is asked for"
    numbers[0] = -1
    tap(source, numbers, one(3), one(5), one(0), frame)
    kept = frame[5:].view(4, width)
    assert torch.equal(kept[:2].nan_to_num(9.0), source[[1, 2]].nan_to_num(9.0)), f"seed {seed}"
    assert kept[2:].isnan().all()
