"""Every production kernel by the compiler that is here: how many, how long, which fail.

What workers and servers of the published models launch is recorded without a GPU (tests/gpu/recorder.py) and compiled
for Hopper, by a process for each model.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from typing import Any

from tests.gpu.recorder import CAPABILITY, apart, recording

MODELS = ("S", "Qwen3-30B-A3B", "DeepSeek-V3")
SIZES = (1, 16, 64, 128, 512)
LIMIT_S = 110.0


def run(report: Callable[[Mapping[str, Any]], None], models: tuple[str, ...] = MODELS) -> None:
    """Report each model as soon as it is compiled."""
    with ThreadPoolExecutor(len(models)) as pool:
        for done in as_completed([pool.submit(result_of, model) for model in models]):
            report(done.result())


def result_of(model: str, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """One model's record."""
    began_s, failed = time.monotonic(), []
    try:
        binaries, failed = apart("benchmarks.gpu.compile:build", model, list(sizes), timeout_s=LIMIT_S)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        # What could not even be recorded, or ended in time: its words are the result.
        binaries, failed = 0, [["all", str(error)[-600:]]]
    return {
        "what": "kernels compiled", "model": model, "triton": version("triton"), "binaries": binaries,
        "seconds": round(time.monotonic() - began_s, 1), "failed": failed, "failures": len(failed),
        "holds": binaries > 0 and not failed,
    }  # fmt: skip


def build(model: str, sizes: list[int]) -> tuple[int, list[tuple[str, str]]]:
    """How many binaries there are, and those that the compiler refuses, with its words; in a process that compiles."""
    end_s = time.monotonic() + 0.85 * LIMIT_S
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from experts.model import Dtype
    from tests.gpu import production

    with recording() as seen:
        if model in production.MODELS:
            decoder = production.decoder_of(model, layers=2, taps=True)
            for size in sizes:
                production.decode_step(decoder, size)
        for dtype in (Dtype.BFLOAT16, Dtype.FP8):
            client = production.client_of(model, dtype)
            for size in sizes:
                production.expert_call(client, size)
            production.server_of(model, dtype).enqueue_pass()
    failed, launches = [], {(launch.kernel, launch.key): launch for launch in seen.launches}
    for number, launch in enumerate(launches.values()):
        if time.monotonic() > end_s:
            failed.append(("not tried", f"{len(launches) - number} binaries: no time was left"))
            break
        source = ASTSource(
            fn=launch.function, signature=launch.signature, constexprs=launch.constants, attrs=launch.attributes
        )  # fmt: skip
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in launch.options.items()}
        try:
            triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
        except Exception as error:
            # Whatever a compiler raises: the others are still to be tried, and its words are the result.
            failed.append((launch.kernel, str(error)[-300:]))
    return len(launches), failed
