"""Compiles kernels for an H200 where there is none: what the compiler says of registers, spills and instructions.

In a process of its own: the interpreter and the compiler exclude each other in one.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = 90  # of an H100 or H200
SHARED_LIMIT_BYTES = 227 * 1024  # a thread block's most there


@dataclass(frozen=True, kw_only=True)
class Built:
    """What became of one kernel.

    Attributes:
        registers: Of each thread.
        spills: Local-memory stores and loads in the machine code.
        shared_bytes: Of each thread block.
        ttgir: Operations with the threads that hold their elements.
        ptx: The compiler's assembly.
        sass: The machine code, disassembled.
    """

    registers: int
    spills: int
    shared_bytes: int
    ttgir: str
    ptx: str
    sass: str

    @property
    def wgmma(self) -> bool:
        """Whether matrix products use Hopper's own instructions."""
        return "wgmma.mma_async" in self.ptx and ("HGMMA" in self.sass or "QGMMA" in self.sass)


def compile_kernel(
    module: str,
    kernel: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    multiples: Collection[str] = (),
    fp_fusion: bool = False,
    nvshmem: Path | None = None,
) -> Built:
    """Compile `module`.`kernel` for sm_90.

    Args:
        signature: Type of each argument that is no constexpr: "*bf16", "*fp8e4nv", "*i64", "i32", "fp32", ...
        constexprs: Value of each that is.
        multiples: Integers that are multiples of 16, as a launch would find them; pointers always are.
        nvshmem: Its library of device functions, where puts go by them.

    Raises:
        RuntimeError: the compiler refused it; the text is the compiler's.
    """
    order = {"module": module, "kernel": kernel, "signature": dict(signature), "constexprs": dict(constexprs)}
    order |= {"num_warps": num_warps, "num_stages": num_stages, "fp_fusion": fp_fusion}
    order["nvshmem"] = nvshmem and str(nvshmem)
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    order["aligned"] = [*pointers, *multiples]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.aot"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{kernel} does not compile for sm_{TARGET}:\n{done.stderr[-4000:]}")
    return Built(**json.loads(done.stdout.splitlines()[-1]))


def _build(order: Mapping[str, Any]) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from p2p import device

    libraries = {}
    if order["nvshmem"]:
        device.TRANSPORT = triton.language.constexpr("nvshmem")
        libraries["nvshmem"] = order["nvshmem"]
    kernel = getattr(importlib.import_module(order["module"]), order["kernel"])
    signature = dict(order["signature"]) | dict.fromkeys(order["constexprs"], "constexpr")
    # In the order of the kernel's own arguments.
    signature = {name: signature[name] for name in kernel.arg_names}
    places = [(kernel.arg_names.index(name),) for name in order["aligned"]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=order["constexprs"],
        attrs={place: [["tt.divisibility", 16]] for place in places},
    )
    options = {name: order[name] for name in ("num_warps", "num_stages")}
    built = triton.compile(
        source,
        target=GPUTarget("cuda", TARGET, 32),
        options=options | {"enable_fp_fusion": order["fp_fusion"], "extern_libs": libraries},
    )
    sass, registers = disassemble(built.asm["cubin"])
    return Built(
        registers=registers,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared_bytes=int(built.metadata.shared),
        ttgir=built.asm["ttgir"],
        ptx=built.asm["ptx"],
        sass=sass,
    )


def disassemble(cubin: bytes) -> tuple[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say how many registers: {usage.stdout}{usage.stderr}")
    return sass, int(found[1])


if __name__ == "__main__":
    print(json.dumps(asdict(_build(json.load(sys.stdin)))))
