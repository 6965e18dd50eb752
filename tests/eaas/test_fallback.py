"""Promises of a machine without a compiler: the same tokens, by Python alone, and one warning that says so."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from eaas.cluster.status import fetch_status
from eaas.engine import fallback_sampler
from eaas.engine.decoder import BLOCK_TOKENS, DecoderError, ExpertsLost, PlanInvalid, StepPlan
from eaas.engine.fallback import FallbackDecoder, numerics_class
from eaas.engine.sampler import LogitsInvalid, Sampled, Sampler, SamplingInvalid, SamplingRow, bits_of, philox
from eaas.model.make_model import make_model
from eaas.model.tokenizer import Tokenizer
from experts import client, kernels
from experts.kernels import ffn, pack_expert
from experts.model import Dtype
from tests.e2e.pool import Driver, local_experts
from tests.eaas.decoder_world import VARIANTS, Runner, World, spec_of, tokens_of

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261121
PROMPTS = ["a b c", "the fox and the dog met once more"]
TOKENS = 40


class PythonExperts:
    """The experts of a world in this process, a row at a time."""

    def __init__(self, world: World) -> None:
        self._packed = [[pack_expert(*expert, world.spec.dtype) for expert in row] for row in world.experts]
        self.lost = False

    def exchange(
        self,
        layer: int,
        rows: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
        *,
        deadline_s: float,
        drop: np.ndarray | None = None,
    ) -> np.ndarray:
        if self.lost:
            raise client.ExpertsLost(f"nobody within {deadline_s} s")
        total = np.zeros((len(rows), self._packed[0][0].hidden), np.float32)
        for row, (chosen, scales) in enumerate(zip(ids.tolist(), weights, strict=True)):
            for expert, scale in zip(chosen, scales, strict=True):
                total[row] += scale * ffn(self._packed[layer][expert], rows[row : row + 1])[0]
        return total


@contextlib.contextmanager
def runner_of(world: World, **sizes: int) -> Iterator[Runner]:
    """Runs sequences through a fallback decoder."""
    experts = PythonExperts(world)
    decoder = FallbackDecoder(world.spec, world.weights, experts, **{"kv_blocks": 64, **sizes})
    with contextlib.closing(decoder):
        yield Runner(decoder, experts)  # type: ignore[arg-type]


def same_bits(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    differing = int((ours.view(np.uint32) != theirs.view(np.uint32)).sum())
    assert differing == 0, f"{what}: {differing} of {ours.size} values differ, seed {SEED}"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_feature_equals_its_definition(name: str) -> None:
    world = World.make(VARIANTS[name], SEED)
    tokens = tokens_of(70, SEED)
    with runner_of(world) as runner:
        worst = float(np.abs(runner.prefill(tokens) - world.reference().logits(tokens)).max())
    assert worst < 2e-4, f"{name}: off by {worst}, seed {SEED}"


@pytest.mark.parametrize(
    "spec",
    [
        VARIANTS["sliding windows"],
        VARIANTS["odd sizes"],
        replace(VARIANTS["sigmoid, groups, correction, shared, leading dense"], dtype=Dtype.BFLOAT16),
        replace(VARIANTS["sigmoid, groups, correction, shared, leading dense"], dtype=Dtype.INT8),
    ],
    ids=["sliding windows", "odd sizes", "bfloat16, dense, shared", "int8, dense, shared"],
)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(spec: object) -> None:
    world = World.make(spec, SEED)  # type: ignore[arg-type]
    sequences = [tokens_of(length, SEED + length) for length in (1, 17, 50)]
    tables = [[9, 3, 20, 1], [4, 33, 2, 60], [5, 40, 8, 7]]
    with runner_of(world) as runner:
        alone = [runner.prefill(tokens, 44) for tokens in sequences]
        pieces = [(tokens, 0, table) for tokens, table in zip(sequences, tables, strict=True)]
        same_bits(runner.run(pieces), np.concatenate(alone), "in a batch")
        for cut in (1, 16, 31, 49):
            parts = [runner.run([(sequences[2][a:b], a, tables[0])]) for a, b in ((0, cut), (cut, 50))]
            same_bits(np.concatenate(parts), alone[2], f"cut at {cut}")
        steps = [runner.run([([token], at, tables[1])]) for at, token in enumerate(sequences[2])]
        same_bits(np.concatenate(steps), alone[2], "decoded")
        same_bits(runner.run(pieces, wanted=[67, 0]), np.stack([alone[2][49], alone[0][0]]), "picked rows")


@pytest.mark.parametrize("name", ["sigmoid, groups, correction, shared, leading dense", "odd sizes"])
def test_int8_is_what_native_code_computes_but_for_float32_rounding(name: str) -> None:
    world = World.make(replace(VARIANTS[name], dtype=Dtype.INT8), SEED)
    tokens = tokens_of(70, SEED)
    wanted = world.decoder().prefill(tokens)
    rough = (
        World(replace(world.spec, dtype=Dtype.FLOAT32), world.weights, world.experts)
        .decoder()
        .prefill(tokens)
    )
    with runner_of(world) as runner:
        off = np.abs(runner.prefill(tokens) - wanted)
    # A value on the edge between two integers may fall on either side; most logits see none of those.
    quantised = float(np.abs(rough - wanted).mean())
    assert off.mean() < quantised / 4, f"off by {off.mean()}, int8 is off by {quantised}, seed {SEED}"


def test_a_lost_expert_and_a_wrong_plan_leave_the_decoder_usable() -> None:
    world = World.make(spec_of(layers=1), SEED)
    with runner_of(world, max_rows=8) as runner:
        whole = runner.prefill([1, 2])
        runner.local.lost = True  # type: ignore[attr-defined]
        with pytest.raises(ExpertsLost, match="nobody within"):
            runner.prefill([1, 2])
        runner.local.lost = False  # type: ignore[attr-defined]
        for pieces, wanted, message in (
            ([([131], 0, [0])], [0], "Row 0: token 131"),
            ([([1], BLOCK_TOKENS, [0])], [0], "Row 0: position 16; 0 to 15 have a place"),
            ([([1, 2], 15, [0, 64])], [0], "Row 1: its block table names a block outside 0 to 63"),
            ([([1, 2], 15, [-1, 1])], [0], "Row 0: its block table"),
            ([([1], 0, [0])], [1], "Logits row 1 is asked for; there are 1 rows"),
            ([([1] * 9, 0, [0])], [0], "9 rows, 1 logits rows; 1 to 8 are possible"),
        ):
            with pytest.raises(PlanInvalid, match=message):
                runner.run(pieces, wanted)
        same_bits(runner.prefill([1, 2]), whole, "after the refusals")
        decoder = runner.decoder
    with pytest.raises(DecoderError, match="closed"):
        one = np.zeros(1, np.int32)
        decoder.step(
            StepPlan(token_ids=one, positions=one, seqs=one, block_tables=one[None], logits_rows=one), 1.0
        )


def test_its_numerics_class_is_no_native_one() -> None:
    for dtype in Dtype:
        assert numerics_class(dtype) != kernels.numerics_class(dtype)


def sampled_by(
    library: object, monkeypatch: pytest.MonkeyPatch, logits: np.ndarray, rows: list
) -> list[Sampled]:
    with monkeypatch.context() as patch:
        patch.setattr(fallback_sampler, "load", lambda: library)
        return Sampler(logits.shape[1]).sample(logits, rows)


def test_the_samplers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(SEED)
    vocab, count = 300, 400

    def maybe(value: float, off: float) -> float:
        return value if source.random() < 0.5 else off

    rows = [
        SamplingRow(
            seed=int(source.integers(1 << 63)) * 2 + 1,
            index=int(source.integers(1 << 40)),
            choice=int(source.integers(4)),
            temperature=maybe(1.3, 0.0 if index % 3 == 0 else 0.7),
            top_k=int(maybe(7, 0)),
            top_p=maybe(0.8, 1.0),
            min_p=maybe(0.05, 0.0),
            repetition_penalty=maybe(1.4, 1.0),
            presence_penalty=maybe(0.9, 0.0),
            frequency_penalty=maybe(0.6, 0.0),
            prompt=source.integers(0, vocab, 9),
            output=source.integers(0, vocab, 6),
            forbidden=source.integers(0, vocab, 2),
            allowed=bits_of(source.permutation(vocab)[:40], vocab) if index % 5 == 0 else None,
            allowed_too=bits_of(source.permutation(vocab)[:250], vocab) if index % 4 == 0 else None,
            biased=source.permutation(vocab)[: index % 3],
            biases=source.standard_normal(index % 3) * 4,
            given=index % 50 if index % 11 == 5 else -1,
            logprobs=index % 7 - 1,
        )
        for index in range(count)
    ]
    logits = (source.standard_normal((count, vocab)) * 3).astype(np.float32)
    python = fallback_sampler.FallbackSampler()
    ours = sampled_by(python, monkeypatch, logits, rows)
    theirs = Sampler(vocab).sample(logits, rows)
    # Only a draw within rounding of the border of two tokens may fall on either side.
    differing = [i for i in range(count) if ours[i].token != theirs[i].token]
    assert len(differing) <= 1, f"rows {differing}, seed {SEED}"
    for mine, native in zip(ours, theirs, strict=True):
        assert [token for token, _ in mine.top] == [token for token, _ in native.top]
        assert [chance for _, chance in mine.top] == pytest.approx(
            [chance for _, chance in native.top], abs=1e-5
        )
        if mine.token == native.token:
            assert mine.logprob == pytest.approx(native.logprob, abs=1e-5)
    alone = sampled_by(python, monkeypatch, logits[7:8].copy(), rows[7:8])
    assert alone == ours[7:8]
    words = [5, 6, 7, 8], [9, 0xFFFFFFFF]
    assert fallback_sampler.philox(*words) == philox(*words)
    broken = logits[:1].copy()
    broken[0, 3] = np.nan
    with pytest.raises(LogitsInvalid, match="NaN or infinity"):
        sampled_by(python, monkeypatch, broken, rows[:1])
    for change, error, message in (
        ({"forbidden": range(vocab)}, LogitsInvalid, "every token is forbidden"),
        ({"forbidden": [vocab]}, SamplingInvalid, "outside the vocabulary of 300"),
    ):
        with pytest.raises(error, match=message):
            sampled_by(python, monkeypatch, logits[:1], [replace(rows[0], **change)])


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages as they are where nothing was compiled."""
    tree = tmp_path_factory.mktemp("bare")
    for package in ("eaas", "experts", "p2p", "router"):
        shutil.copytree(
            ROOT / package, tree / package, ignore=shutil.ignore_patterns("*.so", "build", "demo_model")
        )
    return tree


@contextlib.contextmanager
def served(tree: Path, model: Path, log: Path) -> Iterator[str]:
    """`eaas serve` from that tree, ready, at its URL."""
    command = [
        sys.executable,
        "-m",
        "eaas.ops.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--kv-tokens",
        "2048",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "COLUMNS": "300",
        "NO_COLOR": "1",
        "XDG_STATE_HOME": str(log.parent),
    }
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        for line in process.stdout or ():
            if found := re.search(r"ready .* at (http://[\d.:]+)/v1", line):
                yield found.group(1)
                break
        else:
            pytest.fail(f"eaas serve ended before it was ready:\n{log.read_text()}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(20)


def native_texts(model: Path) -> list[str]:
    """What native code in this process answers to the prompts."""
    tokenizer, driver = Tokenizer.load(model), Driver(model, local_experts(model))
    with contextlib.closing(driver):
        driver.run({text: tokenizer.encode(text) for text in PROMPTS}, TOKENS)
    return [tokenizer.decode(driver.tokens[text], skip_special=True) for text in PROMPTS]


def test_it_serves_what_native_code_would_and_survives_the_loss_of_a_server(
    bare: Path, tmp_path: Path
) -> None:
    model = make_model("tiny", "qwen3_moe", tmp_path / "tiny", seed=1, dtype="float32")
    with served(bare, model, tmp_path / "log") as url:
        members = {member["name"]: member for member in fetch_status(url)["members"]}
        assert members["attention/1"]["numerics_class"] == "cpu-f32-torch-1"
        assert members["expert/1"]["numerics_class"] == "cpu-f32-numpy-1"
        answers = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        texts = []
        for number, prompt in enumerate(PROMPTS):
            stream = answers.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            texts.append("")
            for count, chunk in enumerate(stream):
                texts[-1] += chunk.choices[0].text if chunk.choices else ""
                if number == 1 and count == TOKENS // 3:
                    os.kill(members["expert/1"]["pid"], signal.SIGKILL)
        computing = [
            path for pool in ("expert", "attention") for path in tmp_path.glob(f"eaas/*/{pool}.*.log")
        ]
        said = {
            path.name: re.findall("native_missing.*", path.read_text())
            for path in (tmp_path / "log", *computing)
        }
    assert texts == native_texts(model)
    # The replacement of the killed server may not have come to it yet.
    assert sum(map(len, said.values())) >= 4, "the launcher, two expert servers and the attention worker"
    for name, warnings in said.items():
        assert len(warnings) <= 1, f"{name}: {warnings}"
        assert all("_experts.so is missing" in text and "install g++" in text for text in warnings)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PATH": "/nothing"}, "No C++ compiler found"),
        ({"CXX": "/nothing/g++"}, "/nothing/g++ cannot be run"),
    ],
)
def test_a_build_without_a_compiler_says_what_to_install(bare: Path, environment: dict, message: str) -> None:
    command = [sys.executable, str(bare / "p2p" / "build.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
