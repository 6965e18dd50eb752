"""Measure the demonstration model and write its card.

    python -m benchmarks.demo_model_card --model eaas/demo_model --text input.txt

Reads how it was trained from training.jsonl beside the weights, which `benchmarks.train_demo_model` wrote.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.bits_per_byte import Measured, end_of, measure
from benchmarks.demo_model_net import Model, Shape, hf_tensors
from benchmarks.train_demo_model import HELD_OUT, Recipe, held_out_bits
from eaas.model.tokenizer import Tokenizer
from experts.checkpoint import Checkpoint
from tests.eaas.reference import to_tensor

CARD = """\
---
license: apache-2.0
language: en
tags: [mixture-of-experts, demonstration]
---
# The demonstration model

A small Mixture-of-Experts language model (`Qwen3MoeForCausalLM`) that writes in the manner of
Shakespeare's plays. It is there so that `make serve` and `make demo` have a real, trained model to serve
on any machine.

| | |
|---|---|
| Parameters | {parameters:,} in all, {active:,} active per token |
| Weights | bfloat16, {megabytes:.1f} MB, embeddings tied |
| Layers | {layers}, hidden {hidden}, {q_heads} query and {kv_heads} key-value heads of {head_dim} |
| Experts | {experts} in each layer, {top_k} per token, intermediate {intermediate} |
| Tokenizer | byte-level BPE, {vocab} entries, {bytes_per_token:.2f} bytes per token on the held-out text |
| Context | {max_model_len} tokens |
| **Held-out bits per byte** | **{bits:.3f}** ({tokens:,} tokens, {size:,} bytes) |

The figure is for the weights as stored, over the last tenth of the text, total negative log-likelihood
over bytes:

    python -m benchmarks.bits_per_byte --model eaas/demo_model --text tinyshakespeare_input.txt

## Data
The "tiny Shakespeare" text (1.1 MB) of karpathy/char-rnn; Shakespeare's words are in the public domain.
The first nine tenths were trained on, the tokenizer included. The last tenth was held out; it was used
only to choose, among the measurements every {every} steps, which weights to keep. The figure above is
therefore of the text that made that choice; no other data was held back.

## Training
    python -m benchmarks.train_demo_model --text tinyshakespeare_input.txt --out eaas/demo_model \\
        --seed {seed} --steps {steps}

Plain torch in float32 on two CPU cores, {steps} steps of {batch:,} tokens, {minutes:.0f} minutes (beside
other work): Muon and AdamW, learning rate falling to zero, dropout {dropout}, BPE dropout {bpe_dropout},
weight decay {decay}, a balance loss of {balance} for the gate, averaged weights, those of step {kept}
kept. One row in {chat} is the same speeches as a chat (one speech asks, the next one answers), which is
how it learned its chat template. `training.jsonl` is the log of the run. The run was bounded by the
clock (`--minutes 62`, on a busy machine); the command repeats its number of steps. Another machine or
another number of threads gives other last digits.

## Expert load
Share of each expert among the rows of its layer on the held-out text, in percent; an even load is
{even:.1f}.

{load}

## Use
For showing and testing a serving system. It knows no facts, follows no instructions and may print what
offends in old plays. Licence of the weights: Apache-2.0, as the rest of the repository.
"""


def load_model(folder: Path) -> Model:
    """The training-time model with the weights of a folder, in float32."""
    checkpoint = Checkpoint.open(folder)
    model = Model(Shape(), 0.0)
    for name, parameter in hf_tensors(model).items():
        parameter.copy_(to_tensor(checkpoint.tensor(name), torch.float32))
    return model


def load_table(load: Tensor) -> str:
    """Markdown table of the share of each expert, [layers, experts], in percent."""
    layers, experts = load.shape
    lines = [
        "| layer | " + " | ".join(str(expert) for expert in range(experts)) + " |",
        "|---" * (experts + 1) + "|",
    ]
    lines += [
        f"| {i} | " + " | ".join(f"{100 * share:.1f}" for share in load[i].tolist()) + " |" for i in range(layers)
    ]
    return "\n".join(lines)


def card(folder: Path, measured: Measured, load: Tensor) -> str:
    """The text of README.md."""
    shape, recipe = Shape(), Recipe()
    parameters = sum(parameter.numel() for parameter in hf_tensors(Model(shape, 0.0)).values())
    idle = shape.layers * (shape.experts - shape.top_k) * 3 * shape.hidden * shape.intermediate
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    return CARD.format(
        **{name: getattr(shape, name) for name in ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "vocab")},
        **{name: getattr(shape, name) for name in ("experts", "top_k", "intermediate")},
        **{name: getattr(recipe, name) for name in ("seed", "dropout", "bpe_dropout", "decay", "balance", "every")},
        parameters=parameters,
        active=parameters - idle,
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        bytes_per_token=measured.bytes / measured.tokens,
        max_model_len=config["max_position_embeddings"],
        bits=measured.bits_per_byte,
        tokens=measured.tokens,
        size=measured.bytes,
        steps=log[-1]["step"],
        kept=min(log, key=lambda line: line["held_out_bits_per_byte"])["step"],
        minutes=log[-1]["minutes"],
        batch=recipe.tokens,
        chat=round(1 / recipe.chat_share),
        even=100 / shape.experts,
        load=load_table(load),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that train_demo_model wrote")
    parser.add_argument("--text", type=Path, required=True, help="the text it was trained on")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    held = end_of(options.text, HELD_OUT)
    measured = measure(options.model, held)
    ids = torch.tensor(Tokenizer.load(options.model).encode(held))
    _, load = held_out_bits(load_model(options.model), ids, measured.bytes)
    (options.model / "README.md").write_text(card(options.model, measured, load), encoding="utf-8")
    print(f"{options.model / 'README.md'}: {measured.bits_per_byte:.4f} bits per byte")


if __name__ == "__main__":
    main()
