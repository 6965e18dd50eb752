"""The compiler's part in what kernels cost stays as good as `compiled.txt` says; and both versions compute alike."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.gpu.compiled import DATA, MODELS, NUMBERS, VERSIONS, Line, built, folder_of, read
from tests.gpu.recorder import ROOT

# Kernels that no process at these shapes launches, and why.
ABSENT = {
    "eaas.gpu.norm_rope.swiglu_kernel": "these models have neither dense layers nor shared experts",
    "experts.gpu.group._group_small": "a server's pass has room for more pairs: it serves experts in one process",
}
SMALL = ("experts.gpu.wait_replies.wait_kernel", "experts.gpu.gather.gather_kernel")


@functools.cache
def folder(triton: str) -> Path | None:
    """Where that version is; the test skips where it is not."""
    try:
        return folder_of(triton)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def worse(found: list[Line]) -> list[str]:
    """What is worse than the data, or not in it."""
    known = {line[:4]: line.numbers for line in read()}
    faults = []
    for line in found:
        then = known.get(line[:4])
        if then is None:
            faults.append(f"{' '.join(line[:4])} is not in {DATA.name}; python -m tests.gpu.compiled writes it anew")
            continue
        for at, (name, before, now) in enumerate(zip(NUMBERS, then, line.numbers, strict=True)):
            if (now < before) if at == len(NUMBERS) - 1 else (now > before):
                faults.append(f"{' '.join(line[:4])}: {now} {name}, {before} before")
    return faults


@pytest.mark.smoke
def test_two_kernels_are_as_good_as_before() -> None:
    folder(VERSIONS[-1])
    found = built(VERSIONS[-1], MODELS[0], SMALL)
    assert {line.kernel for line in found} == set(SMALL) and not worse(found), "\n".join(worse(found))


@pytest.mark.full(seconds=60)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("triton", VERSIONS)
def test_no_kernel_gets_worse(triton: str, model: str) -> None:
    """More registers, spills or shared memory, or fewer matrix instructions, in any binary."""
    folder(triton)
    assert not (faults := worse(built(triton, model))), "\n".join(faults)


def test_every_kernel_of_the_product_is_compiled() -> None:
    launched = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{node.func.value.id}"
        for package in ("eaas/gpu", "experts/gpu")
        for path in (ROOT / package).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
        and not node.func.value.id[0].isupper() and node.func.value.id not in ("cast", "dict", "list")
    }  # fmt: skip
    for triton in VERSIONS:
        found = {line.kernel for line in read() if line.triton == triton}
        assert found | set(ABSENT) == launched, f"triton {triton}: {sorted((found | set(ABSENT)) ^ launched)}"
