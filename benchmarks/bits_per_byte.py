"""Bits per byte of a model over the end of a text: total negative log-likelihood over the bytes of that text.

    python -m benchmarks.bits_per_byte --model demo --text input.txt
    python -m benchmarks.bits_per_byte --model demo --text input.txt --dtype int8
    python -m benchmarks.bits_per_byte --model demo --text input.txt --dtype auto --quantize w4a16

The weights as stored, computed in float32 by the readable reference decoder; with --dtype, by the kernels that
serve. With --quantize first the reference, on the weights that the format's own library reads from the checkpoint
which it has quantized; then that checkpoint, by the kernels. Windows overlap, so that every token but the first ones
has at least half a window before it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from eaas.model.loader import load_spec, load_weights, resolve_model
from eaas.model.tokenizer import Tokenizer
from eaas.worker.decoder import BLOCK_TOKENS, Decoder
from eaas.worker.plan import StepPlan
from experts.checkpoint import Checkpoint
from experts.devices import Device
from experts.formats import experts_dtype
from experts.model import CHOICES, Dtype, ExpertShape
from experts.quantized import Quantized
from experts.tensors import tensors_of
from tests.eaas.local_experts import LocalExperts
from tests.eaas.reference import ReferenceDecoder


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured: bits per byte, over so many tokens and bytes."""

    bits_per_byte: float
    tokens: int
    bytes: int


def open_reference(folder: Path) -> ReferenceDecoder:
    """The reference decoder over a model folder, in float32."""
    checkpoint = Checkpoint.open(folder)
    spec = load_spec(checkpoint)
    shape = ExpertShape.from_config(checkpoint.config)

    def expert(layer: int, number: int):
        found = tensors_of(checkpoint, shape, layer, number)
        matrices = (found.gate, found.up, found.down)
        plain = (w.dequantized() if isinstance(w, Quantized) else w for w in matrices)
        return *plain, *(found.biases or ())

    return ReferenceDecoder(spec, load_weights(checkpoint, spec), expert, activation=shape.activation)


class KernelLogits:
    """Logits of every position of up to `window` tokens, [tokens, vocab], by the native decoder."""

    def __init__(self, folder: Path, dtype: str, window: int) -> None:
        checkpoint = Checkpoint.open(folder)
        spec = replace(load_spec(checkpoint), dtype=Dtype.resolve(dtype, checkpoint.config))
        kept = experts_dtype(dtype, checkpoint.config, Device().keeps)
        # The decoder holds only its address.
        self._experts = LocalExperts.load(checkpoint, kept, max_rows=window)
        self._blocks = -(-window // BLOCK_TOKENS)
        weights = load_weights(checkpoint, spec)
        self._decoder = Decoder(spec, weights, self._experts.backend, [-1], self._blocks, max_rows=window)

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        rows = np.arange(len(tokens), dtype=np.int32)
        plan = StepPlan(
            token_ids=np.array(tokens, np.int32),
            positions=rows,
            seqs=np.zeros_like(rows),
            block_tables=np.arange(self._blocks, dtype=np.int32)[None],
            logits_rows=rows,
        )
        return self._decoder.step(plan, deadline_s=1.0)


def measure(folder: Path, text: str, window: int = 1024, dtype: str | None = None) -> Measured:
    """Measure a model on all of `text`, from a start-of-text token on.

    Args:
        folder: Model folder.
        text: What to predict.
        window: Tokens the model sees at once; the second half of each is counted (of the first one: all).
        dtype: Computed by the kernels that serve in it, as for --dtype; by the reference where None.

    Raises:
        ValueError: the text is empty, or the model has no token to begin a text with.
    """
    spec, ids = load_spec(Checkpoint.open(folder)), Tokenizer.load(folder).encode(text)
    starts = spec.eos_ids
    if not ids or not starts:
        raise ValueError(f"{len(ids)} tokens to predict after one of {list(starts)}; at least one of each is needed.")
    window = min(window, spec.max_model_len)
    logits_of = open_reference(folder).logits if dtype is None else KernelLogits(folder, dtype, window)
    given = [starts[0], *ids]
    nats, counted = 0.0, 0
    while counted < len(ids):
        first = max(0, counted - window // 2)
        end = min(first + window, len(ids))
        logits = torch.from_numpy(logits_of(given[first:end]))[counted - first :]
        wanted = torch.tensor(ids[counted:end])
        nats += torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum").item()
        counted = end
    size = len(text.encode())
    return Measured(bits_per_byte=nats / math.log(2) / size, tokens=len(ids), bytes=size)


def end_of(path: Path, share: float) -> str:
    """The last `share` of a text file, by characters."""
    text = path.read_text(encoding="utf-8")
    return text[int(len(text) * (1 - share)) :]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model folder, hub id, or demo")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--last", type=float, default=0.1, help="share of the text, from its end")
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    labels = ["auto", *(dtype.label for dtype in CHOICES)]
    parser.add_argument("--dtype", choices=labels, help="by the kernels of this type (default: the reference)")
    parser.add_argument("--quantize", metavar="METHOD", help="one of tests.experts.quantizing: fp8, w4a16, awq, ...")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    text, folder = end_of(options.text, options.last), resolve_model(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        if options.quantize:
            # Imported here: the libraries of the formats cost seconds.
            from tests.experts.quantizing import quantize_model

            quantized, plain = Path(scratch, "quantized"), Path(scratch, "plain")
            quantize_model(folder, quantized, plain, options.quantize)
            folder = quantized
            print(json.dumps({"weights of": "the library", **asdict(measure(plain, text, options.window))}))
        print(json.dumps(asdict(measure(folder, text, options.window, options.dtype))))


if __name__ == "__main__":
    main()
