"""What keeps a comparison of engines honest: the same weights, the same work, nobody else on the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import decode, floor, scaling_report
from benchmarks.engines.process import EngineFailed, EngineProcess, settle
from benchmarks.engines.run import Run, Speed
from benchmarks.gguf_checkpoint import write_gguf
from benchmarks.http_client import StreamRecord, speed_of
from benchmarks.make_model import make_model
from benchmarks.neighbour import busy_core
from benchmarks.setting import interleave
from experts.checkpoint import Checkpoint

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny", "qwen3_moe", tmp_path_factory.mktemp("model") / "tiny", seed=3)


def test_gguf_holds_the_checkpoints_bits(tiny: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    reader = gguf.GGUFReader(write_gguf(tiny, tmp_path / "model.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    checkpoint = Checkpoint.open(tiny)
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight"),
    ):
        assert tensors[theirs].data.tobytes() == checkpoint.tensor(ours).tobytes(), theirs
    for part, name in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
        stacked = [checkpoint.tensor(f"model.layers.2.mlp.experts.{e}.{part}.weight") for e in range(8)]
        assert tensors[f"blk.2.ffn_{name}_exps.weight"].data.tobytes() == np.stack(stacked).tobytes(), part
    gate = checkpoint.tensor("model.layers.0.mlp.gate.weight")
    widened = (gate.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(tensors["blk.0.ffn_gate_inp.weight"].data, widened)
    assert "output.weight" not in tensors  # tied


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    model = make_model("tiny", "mixtral", tmp_path / "mixtral", seed=1)
    with pytest.raises(ValueError, match="a plain Qwen3MoeForCausalLM can be converted"):
        write_gguf(model, tmp_path / "model.gguf")


@pytest.mark.full(seconds=3)
def test_an_engine_with_other_weights_is_not_timed(tiny: Path, tmp_path: Path) -> None:
    class Endpoint:
        def texts(self, prompts: list[list[int]], tokens: int) -> list[str]:
            from eaas.model.tokenizer import Tokenizer

            rows = mine.generate(prompts, tokens).tokens
            return [Tokenizer.load(tiny).decode(row) for row in rows]

    other = make_model("tiny", "qwen3_moe", tmp_path / "other", seed=4)
    room = {"kv_tokens": 2048}
    with (
        EngineProcess("inproc", tiny, [0], **room) as mine,
        EngineProcess("inproc", other, [0], **room) as theirs,
    ):
        for name, why in (("llamacpp", "llamacpp is not the same model"), ("inproc", "different bits")):
            with pytest.raises(decode.NotTheSameModel, match=why):
                decode.check({"ours": mine, name: theirs}, Endpoint(), tiny, vocab=512)  # type: ignore[arg-type]


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no such directory"):
        EngineProcess("inproc", tmp_path / "none", [0], kv_tokens=64)


def test_agreement_ends_at_the_first_difference() -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((2, 50))
    found = decode.closeness(logits, [[1, 2, 3, 4], [1, 2, 3, 4]], logits, [[1, 2, 9, 4], [9, 2, 3, 4]])
    assert found["first_token_agreement"] == 0.5
    # Of the first row: 2 agrees, 9 does not, 4 is not compared. Of the second nothing is.
    assert found["later_token_agreement"] == 0.5
    assert found["correlation_min"] == pytest.approx(1.0)


def test_decoding_steps_are_those_after_all_prompts() -> None:
    run = Run(tokens=[[1, 2, 3], [4, 5, 6]], total_s=12, steps_s=[4.0, 3.0, 2.0, 1.0, 2.0], made=[0, 1, 2, 2, 1])
    assert run.decode_steps_s == [1.0]
    assert run.speed == Speed(decode=3 / 3.0, whole=6 / 12)


def test_streams_decode_from_the_last_ones_first_token_on() -> None:
    early = StreamRecord(sent_s=0.0, arrivals=[(0.5, 0), (1.0, 1), (2.0, 2), (4.0, 3), (5.0, 0)])
    late = StreamRecord(sent_s=0.0, arrivals=[(3.0, 1), (4.0, 4), (5.0, 1)])
    # At 3 s the early one has 3 of its 6 tokens and the late one 1 of 6; 8 more come in 2 s.
    assert speed_of([early, late], 6) == Speed(decode=8 / 2, whole=12 / 5)


def test_streams_that_came_in_one_piece_have_no_speed() -> None:
    with pytest.raises(RuntimeError, match="4 tokens are too few"):
        speed_of([StreamRecord(sent_s=0.0, arrivals=[(1.0, 5)])], 4)


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[tuple[str, int]] = []
    measures = {name: lambda n, name=name: order.append((name, n)) or n for name in ("a", "b")}
    assert interleave(measures, 2, {}) == {"a": [1, 2], "b": [1, 2]}
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]


def test_no_engine_is_measured_while_another_uses_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.process.IDLE_LIMIT_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            with pytest.raises(EngineFailed, match="spinner still uses the CPU"):
                settle({"spinner": spinning.pid})
        finally:
            spinning.kill()


def test_the_busy_neighbour_has_its_core_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: started.append(pid) or real(pid, cores))
    core = min(os.sched_getaffinity(0))
    with busy_core(core):
        assert os.sched_getaffinity(started[0]) == {core}
    assert not Path(f"/proc/{started[0]}").exists()


def test_the_floor_counts_what_a_step_must_read(tiny: Path) -> None:
    """Shape tiny by hand: hidden 64, 4 layers, 4 query and 2 KV heads of 16, 8 experts of 32, vocabulary 512."""
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16
    dense = 512 * 64 + 64 + 4 * (attention + 2 * 64 + 8 * 64)
    expert = 3 * 64 * 32
    step = floor.step_of(tiny, rows=3, context=100, distinct_experts=10)
    assert step.nbytes == 2 * (dense + 10 * expert) + 3 * 100 * 4 * 2 * 32 * 2
    assert step.flops == 3 * (2 * (dense + 4 * 2 * expert) + 4 * 100 * 4 * 64)
    assert step.seconds(step.nbytes, step.flops * 2) == 1.0
    assert step.seconds(step.nbytes * 2, step.flops) == 1.0


def test_the_plot_shows_each_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    figure = {"median": 2.0, "min": 1.0, "max": 3.0}
    base = {
        "shape": "S",
        "threads": 2,
        "servers": 2,
        "batch": 1,
        "context": 128,
        "step_ms": figure,
        "floor_ms": 1.5,
    }
    rows = [base | {"sweep": "batch", "batch": n} for n in (1, 2)] + [base | {"sweep": "servers", "servers": 4}]
    scaling_report.plot(rows, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "batch size" in text and "expert servers" in text and "context, tokens" not in text
