"""The script that trains the demonstration model, on a very small one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bits_per_byte import measure, open_reference
from benchmarks.demo_model_card import load_table
from benchmarks.demo_model_data import Segmenter, as_chat, train_tokenizer
from benchmarks.demo_model_net import Model, RmsScale, Shape, hf_tensors
from benchmarks.train_demo_model import Recipe, held_out_bits, orthogonalize, train
from eaas.model.tokenizer import Tokenizer

SMALL = Shape(vocab=300, hidden=32, layers=2, q_heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, intermediate=16)


def play(seed: int, speeches: int) -> str:
    """A text laid out as a play, of made-up words."""
    rng = random.Random(seed)
    words = ["king", "crown", "night", "sword", "love", "the", "my", "is", "of", "lost", "fair", "é"]
    speech = lambda: " ".join(rng.choice(words) for _ in range(rng.randrange(4, 20))).capitalize() + "."  # noqa: E731
    return "\n\n".join(f"{rng.choice(['HAL', 'ANNE'])}:\n{speech()}" for _ in range(speeches))


@pytest.mark.full(seconds=4)
def test_training_lowers_the_held_out_bits_and_saves_what_it_measured(tmp_path: Path) -> None:
    text, held = play(1, 400), play(2, 20)
    recipe = Recipe(seed=1, steps=4, tokens=2048, every=2)
    bits = train(text, held, tmp_path, SMALL, recipe)
    stored = measure(tmp_path, held)
    assert stored.bits_per_byte == pytest.approx(bits, rel=0.02), "the saved bfloat16 weights are those measured"
    untrained = train(text, held, tmp_path / "less", SMALL, replace(recipe, steps=1))
    assert bits < untrained
    assert {path.name for path in tmp_path.glob("*.json*")} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.jsonl",
    }  # fmt: skip


def test_the_model_that_is_trained_is_the_model_that_is_served(tmp_path: Path) -> None:
    train(play(1, 400), play(2, 20), tmp_path, SMALL, Recipe(steps=1, tokens=2048))
    reference, model = open_reference(tmp_path), Model(SMALL, 0.0)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    weights = {name: tensor.numpy() for name, tensor in hf_tensors(model).items()}
    served = type(reference)(
        reference.spec,
        {role: weights[plan] for role, plan in plans(reference.spec).items()},
        lambda layer, expert: expert_of(weights, layer, expert),
    )
    tokens = np.random.default_rng(3).integers(0, SMALL.vocab, 50).tolist()
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([tokens]))[0][0].numpy()
    np.testing.assert_allclose(served.logits(tokens), logits, atol=2e-5)


def plans(spec) -> dict[str, str]:
    from eaas.model.families import tensors_of

    return {role: plan.name for role, plan in tensors_of(spec).items()}


def expert_of(weights: dict[str, np.ndarray], layer: int, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    return (
        weights[prefix + "gate_proj.weight"],
        weights[prefix + "up_proj.weight"],
        weights[prefix + "down_proj.weight"],
    )


def test_without_dropout_the_segmentation_is_the_tokenizers_own(tmp_path: Path) -> None:
    text = play(4, 300)
    tokenizer = train_tokenizer(text, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = as_chat(text)
    plain = Segmenter(tokenizer, 0.0, 1, np.random.default_rng(4))
    assert plain.encode(chat).tolist() == tokenizer.encode(chat).ids
    torn = Segmenter(tokenizer, 0.3, 4, np.random.default_rng(4)).encode(chat).tolist()
    assert len(torn) > len(plain.encode(chat))
    assert Tokenizer.load(tmp_path).decode(torn, skip_special=False) == chat


def test_a_chat_is_two_speeches_in_turn() -> None:
    assert as_chat("A:\none\n\nB:\ntwo") == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|><|endoftext|>"
    )


def test_the_norm_has_the_right_gradient() -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(3, 4, 8, dtype=torch.double), torch.rand(8, dtype=torch.double)
    x.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: RmsScale.apply(x, weight, 1e-6), (x, weight))


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(6)
    for shape in ((3, 16, 40), (40, 16), (24, 24)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(*shape)))
        assert values.max() < 1.3, f"{shape}, seed 6"
        assert values.median() > 0.6, f"{shape}, seed 6"


def test_expert_load_counts_every_row_and_is_laid_out_by_layer() -> None:
    torch.manual_seed(7)
    _, load = held_out_bits(Model(SMALL, 0.0), torch.randint(0, 300, (100,)), 100, length=32)
    assert load.shape == (2, 4)
    assert load.sum(1).tolist() == pytest.approx([1, 1])
    assert load_table(torch.tensor([[0.25, 0.75]])).splitlines()[-1] == "| 0 | 25.0 | 75.0 |"
