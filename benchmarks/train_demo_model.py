"""Train the demonstration model: a small Qwen3-MoE over the text of one file, on a CPU.

    python -m benchmarks.train_demo_model --text input.txt --out eaas/demo_model --seed 1

The last tenth of the text is held out: neither the weights nor the tokenizer see it; it only chooses which
of the checkpoints is kept (early stopping). Training is plain torch in float32; what is saved is bfloat16.
The text is small (1 MB), so overfitting sets the limit: dropout, weight decay, a fresh random segmentation of
every word in each epoch (BPE dropout) and averaged weights are there for that. Some of the training rows are
the same speeches laid out as a chat, so that the model knows the chat template and ends its turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.demo_model_data import Segmenter, as_chat, batches, train_tokenizer
from benchmarks.demo_model_net import MAX_MODEL_LEN, Model, Shape, hf_config, hf_tensors
from benchmarks.make_model import TensorOut, tokenizer_config, write_json, write_safetensors

HELD_OUT = 0.1  # of the text, at its end


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. Learning rates rise for 50 steps, then fall along a line to zero.

    Attributes:
        steps: Optimizer steps; fewer when `minutes` end first, the learning rate then falls by the clock.
        tokens: Tokens of one step.
        chat_share: Share of rows laid out as a chat.
        muon_lr: Peak learning rate of the matrices inside the layers.
        adam_lr: Peak learning rate of embeddings, norms and gates.
        balance: Weight of the balance loss, which spreads rows over the experts.
        bpe_dropout: Probability of leaving out one merge of the tokenizer, in training only.
        every: Steps between two measurements on the held-out text.
    """

    seed: int = 1
    steps: int = 2000
    minutes: float = math.inf
    tokens: int = 8192
    chat_share: float = 1 / 16
    muon_lr: float = 6e-3
    adam_lr: float = 3e-3
    decay: float = 0.1
    dropout: float = 0.1
    bpe_dropout: float = 0.1
    balance: float = 0.01
    every: int = 50


def orthogonalize(g: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix of each [..., r, c], by five Newton-Schulz steps (as in Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized per matrix; for the matrices inside the layers."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(parameter.grad.lerp(state["momentum"], group["momentum"]))
                scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))  # the size an AdamW update would have
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


@torch.no_grad()
def held_out_bits(model: Model, ids: Tensor, size_bytes: int, length: int = 1024) -> tuple[float, Tensor]:
    """Bits per byte over `ids`, windows of `length` side by side; and the expert load [layers, experts]."""
    model.eval()
    nll, load = 0.0, torch.zeros(model.shape.layers, model.shape.experts)
    given = torch.cat((torch.zeros(1, dtype=torch.long), ids))  # id 0 is <|endoftext|>, the start of a text
    for start in range(0, len(ids), length):
        wanted = ids[start : start + length]
        logits, _, counts = model(given[None, start : start + len(wanted)])
        nll += F.cross_entropy(logits[0], wanted, reduction="sum").item()
        load += torch.stack(counts)
    return nll / math.log(2) / size_bytes, load / load.sum(1, keepdim=True)


def train(text: str, held: str, out: Path, shape: Shape, recipe: Recipe) -> float:
    """Train, and keep in `out` the averaged weights that did best on the held-out text.

    Returns:
        Bits per byte of what was kept, in float32.
    """
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(text, shape.vocab)
    segmenter = Segmenter(tokenizer, recipe.bpe_dropout, 8, np.random.default_rng(recipe.seed))
    model, average = Model(shape, recipe.dropout), Model(shape, 0.0)
    average.load_state_dict(model.state_dict())
    save_settings(shape, tokenizer, out)
    held_ids, held_bytes = torch.tensor(tokenizer.encode(held).ids), len(held.encode())
    muon, adam = optimizers(model, recipe)
    source = batches(segmenter, text, as_chat(text), recipe.tokens, recipe.chat_share)
    began, best, smooth, step, done = time.monotonic(), math.inf, 0.0, 0, 0.0
    with (out / "training.jsonl").open("w") as log:
        while done < 1:
            minutes = (time.monotonic() - began) / 60
            done = max((step + 1) / recipe.steps, minutes / recipe.minutes)
            rate = max(min(1.0, (step + 1) / 50, 1 - done), 0.0)
            muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = (
                recipe.muon_lr * rate,
                recipe.adam_lr * rate,
            )
            ids, wanted = next(source)
            logits, balance, _ = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            (loss + recipe.balance * balance).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            recent = max(0.02, 1 / step)
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, recent)
            smooth += (loss.item() - smooth) * recent
            if step % recipe.every and done < 1:
                continue
            bits, load = held_out_bits(average, held_ids, held_bytes)
            line = {
                "step": step,
                "minutes": round(minutes, 1),
                "train_nats_per_token": round(smooth, 3),
                "held_out_bits_per_byte": round(bits, 4),
                "busiest_expert_share": round(load.max().item(), 3),
            }
            print(json.dumps(line), file=log, flush=True)
            print(json.dumps(line), flush=True)
            if bits < best:
                best = bits
                save_weights(average, out)
    return best


def optimizers(model: Model, recipe: Recipe) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and gates."""
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim > 1 and not name.startswith("embed") and not name.endswith("gate.weight")
        (inner if matrix else outer).append(parameter)
    return Muon(inner, 0.95, recipe.decay), torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0)


def save_settings(shape: Shape, tokenizer: Tokenizer, out: Path) -> None:
    """Write everything of the model folder but the weights."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", hf_config(shape))
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 0})
    write_json(out / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(out / "tokenizer_config.json", tokenizer_config(MAX_MODEL_LEN))


def save_weights(model: Model, out: Path) -> None:
    """Write model.safetensors: bfloat16, Hugging Face names."""
    tensors = [
        TensorOut(
            name=name,
            dtype="BF16",
            shape=tuple(tensor.shape),
            chunks=lambda tensor=tensor: [bf16_bytes(tensor)],
        )
        for name, tensor in hf_tensors(model).items()
    ]
    write_safetensors(out, tensors)


def bf16_bytes(tensor: Tensor) -> bytes:
    """Rounded to bfloat16 (to nearest, ties to even), little-endian."""
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().astype("<i2").tobytes()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="text file to train on")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes, help="end by then at the latest")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    raw = options.text.read_text(encoding="utf-8")
    cut = int(len(raw) * (1 - HELD_OUT))
    recipe = Recipe(seed=options.seed, steps=options.steps, minutes=options.minutes)
    bits = train(raw[:cut], raw[cut:], options.out, Shape(), recipe)
    print(f"{options.out}: {bits:.4f} bits per byte on the held-out text (float32)")


if __name__ == "__main__":
    main()
