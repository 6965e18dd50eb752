"""The bits of logits and tokens that each numerics class gave when they were recorded, for tests/eaas/test_golden.py.

Two commits whose bits agree here compute the same; a change that means to alter them records them anew, and says so.
Other machines add the classes of their instruction sets.

    python -m tests.eaas.golden             # this process's numerics classes, as JSON
    python -m tests.eaas.golden --record    # into golden.json, those of every instruction set of this CPU
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from eaas.model.loader import load_spec, load_weights, resolve_model
from eaas.worker.decoder import Decoder
from experts.checkpoint import Checkpoint
from experts.kernels import numerics_class
from experts.model import CHOICES, Dtype, ExpertShape
from experts.native import IsaUnavailable
from tests.eaas.decoder_world import VARIANTS, VOCAB, Runner, World
from tests.eaas.local_experts import LocalExperts
from tests.eaas.sampling import Sampler, SamplingRow

RECORDED = Path(__file__).with_suffix(".json")
ISAS = ("avx512", "avx2", "portable")
SEED = 20261124
PROMPT, CHUNK, DECODED = 70, 23, 8


def demo(dtype: Dtype) -> Runner:
    """The demonstration model, with its experts in this process."""
    checkpoint = Checkpoint.open(resolve_model("demo"))
    spec = replace(load_spec(checkpoint), dtype=dtype)
    shape = ExpertShape.from_config(checkpoint.config)
    local = LocalExperts(
        layers=shape.layers,
        experts=shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        top_k=shape.top_k,
        dtype=dtype,
        lanes=1,
    )
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            local.set(layer, expert, *(checkpoint.tensor(name) for name in shape.names(layer, expert)))
    return Runner(Decoder(spec, load_weights(checkpoint, spec), local.backend, [-1], 64), local)


def digest(runner: Runner) -> str:
    """Of all logits and sampled tokens: a prompt in chunks, then tokens one by one, greedy and drawn in turn."""
    tokens = np.random.Generator(np.random.Philox(key=SEED)).integers(3, VOCAB, PROMPT).tolist()
    blocks, seen = range(PROMPT), hashlib.sha256()
    for start in range(0, PROMPT, CHUNK):
        logits = runner.run([(tokens[start : start + CHUNK], start, blocks)])
        seen.update(logits.tobytes())
    sampler = Sampler(logits.shape[1])
    for index in range(DECODED):
        last = np.ascontiguousarray(logits[-1:])
        row = SamplingRow(seed=SEED, index=index, temperature=index % 2, top_p=0.9, top_k=50)
        tokens.append(sampler.sample(last, [row])[0].token)
        logits = runner.run([(tokens[-1:], len(tokens) - 1, blocks)])
        seen.update(logits.tobytes())
    seen.update(np.array(tokens, dtype=np.int32).tobytes())
    return seen.hexdigest()


def digests() -> dict[str, dict[str, str]]:
    """By numerics class of this process, then by model."""
    found: dict[str, dict[str, str]] = {}
    for dtype in CHOICES:
        for name, spec in VARIANTS.items():
            runner = World.make(replace(spec, dtype=dtype), SEED).decoder()
            found.setdefault(numerics_class(runner.decoder.dtype), {})[name] = digest(runner)
        runner = demo(dtype)
        found[numerics_class(runner.decoder.dtype)]["demo"] = digest(runner)
    return found


def digests_of(isa: str) -> dict[str, dict[str, str]] | None:
    """Those of an instruction set, from a process that uses it; None where this CPU or build lacks it."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.eaas.golden"],
        env={**os.environ, "EAAS_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode == os.EX_UNAVAILABLE:
        return None
    if found.returncode:
        raise RuntimeError(f"EAAS_ISA={isa}: exit code {found.returncode}\n{found.stderr}")
    return json.loads(found.stdout)


def main() -> None:
    """Print or record."""
    if "--record" not in sys.argv:
        try:
            print(json.dumps(digests()))
        except IsaUnavailable as error:
            print(error, file=sys.stderr)
            sys.exit(os.EX_UNAVAILABLE)
        return
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for isa in ISAS:
        known |= digests_of(isa) or {}
    RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
