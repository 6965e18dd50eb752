"""What the compiler makes of every production kernel at published models: committed data, which may only improve.

`compiled.txt` beside this holds a line for each binary that a worker's steps of SIZES rows and a server's passes run,
under each version of Triton: registers of a thread, loads and stores of spilled ones, bytes of shared memory, and
Hopper's matrix instructions. `python -m tests.gpu.compiled [MODEL ...]` writes it anew, in some minutes.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.gpu.aot import disassemble
from tests.gpu.recorder import CAPABILITY, Launch, apart, recording

DATA = Path(__file__).with_suffix(".txt")
VERSIONS = ("3.6.0", "3.9.0")
MODELS = ("DeepSeek-V3", "Qwen3-30B-A3B", "S")
SIZES = (1, 16, 64, 128, 512)
# Numbers of a line: fewer are better, but of the last.
NUMBERS = ("registers", "spills", "shared bytes", "matrix instructions")


class Line(NamedTuple):
    """One binary: `where` tells it from the others of its kernel, by the constants and attributes that differ."""

    model: str
    kernel: str
    where: str
    triton: str
    numbers: tuple[int, ...]


def read() -> list[Line]:
    """The committed data."""
    lines = []
    for text in DATA.read_text().splitlines() if DATA.exists() else ():
        if not text.startswith("#"):
            triton, model, kernel, *rest = text.split()
            numbers = tuple(map(int, rest[: len(NUMBERS)]))
            lines.append(Line(model, kernel, " ".join(rest[len(NUMBERS) :]), triton, numbers))
    return lines


def write(lines: Iterable[Line]) -> None:
    """Sorted, so that the two versions of a binary stand together."""
    head = "# triton, model, kernel, " + ", ".join(NUMBERS) + ", where; written by python -m tests.gpu.compiled\n"
    body = [
        f"{line.triton} {line.model:13} {line.kernel:42}"
        + "".join(f" {number:6}" for number in line.numbers)
        + f" {line.where}".rstrip()
        for line in sorted(lines)
    ]
    DATA.write_text(head + "\n".join(body) + "\n")


def folder_of(triton: str) -> Path | None:
    """Where that version lies beside the installed one; None: it is the installed one.

    Raises:
        FileNotFoundError: it is not here.
    """
    if version("triton") == triton:
        return None
    folder = Path(sys.prefix) / f"triton-{triton}"
    if not (folder / "triton").is_dir():
        raise FileNotFoundError(
            f"triton {triton} needed, not found in {folder}; make check installs it where an index has it"
        )
    return folder


def built(triton: str, model: str, only: Sequence[str] = ()) -> list[Line]:
    """A model's binaries by that version of Triton: all, or of these kernels."""
    found = apart("tests.gpu.compiled:build", model, list(only), triton=folder_of(triton), timeout_s=1800)
    return [Line(model, kernel, where, triton, tuple(numbers)) for kernel, where, numbers in found]


# -- in a process that can compile


def launches_of(model: str) -> list[Launch]:
    """What a model's attention worker, where GPUs serve that side, and expert server launch."""
    from experts.model import Dtype
    from tests.gpu import production

    with recording() as seen:
        if model in production.MODELS:
            decoder = production.decoder_of(model, layers=2, taps=True)
            for size in SIZES:
                production.decode_step(decoder, size)
        for dtype in (Dtype.BFLOAT16,) if model in production.MODELS else (Dtype.BFLOAT16, Dtype.FP8):
            client = production.client_of(model, dtype)
            for size in SIZES:
                production.expert_call(client, size)
            client.reclaim()
            production.server_of(model, dtype).enqueue_pass()
    return seen.launches


def build(model: str, only: Sequence[str]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Kernel, where and numbers of each binary of a model."""
    binaries: dict[str, dict[str, Launch]] = defaultdict(dict)
    for launch in launches_of(model):
        if not only or launch.kernel in only:
            binaries[launch.kernel][launch.key] = launch
    return [
        (kernel, where, numbers_of(launch))
        for kernel, launches in binaries.items()
        for where, launch in named(list(launches.values()))
    ]


def named(launches: Sequence[Launch]) -> list[tuple[str, Launch]]:
    """Each launch with what tells it from the others."""

    def facts(launch: Launch) -> dict[str, str]:
        found = {name: f"{name}={value}" for name, value in launch.constants.items()}
        names = list(launch.signature)
        return found | {names[at]: f"16|{names[at]}" for (at,), held in launch.attributes.items() if held}

    each = [facts(launch) for launch in launches]
    known = {name for one in each for name in one}
    differ = sorted(name for name in known if len({one.get(name) for one in each}) > 1)
    return [
        (" ".join(one[name] for name in differ if name in one), launch)
        for one, launch in zip(each, launches, strict=True)
    ]


def numbers_of(launch: Launch) -> tuple[int, ...]:
    """Compile it and look."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=launch.function, signature=launch.signature, constexprs=launch.constants, attrs=launch.attributes
    )  # fmt: skip
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in launch.options.items()}
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    sass, registers = disassemble(made.asm["cubin"])
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return registers, spills, int(made.metadata.shared), len(re.findall(r"\b[HQ]GMMA\b", sass))


if __name__ == "__main__":
    jobs = [(triton, model) for model in sys.argv[1:] or MODELS for triton in VERSIONS]
    with ThreadPoolExecutor(2) as pool:
        for job, made in zip(jobs, pool.map(lambda job: built(*job), jobs), strict=True):
            write([*(line for line in read() if (line.triton, line.model) != job), *made])
