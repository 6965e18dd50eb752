"""Kernels touch a peer's memory through p2p/device.py alone: no other module stores to an address or signals."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = {
    path.stem + "." + path.parent.parent.name: path.read_text()
    for folder in ("experts/gpu", "eaas/gpu")
    for path in sorted((ROOT / folder).glob("*.py"))
}
MEMORY = {"store"} | {f"atomic_{name}" for name in ("add", "and", "cas", "max", "min", "or", "xchg", "xor")}
LOADS = {"load", "load_acquire", "load_once"}  # what comes of them is a value, no pointer
ORDERS = {("sem", "release"), ("sem", "acquire"), ("scope", "sys")}
# Assembly, and the inner functions of the seam.
INSIDE = {
    "inline_asm_elementwise",
    "extern_elementwise",
    "store_release",
    "loaded",
    "nvshmem",
    "own_instance",
}
# Addresses of this GPU's tables or its host's memory, which no peer has.
OWN = {"report", "HOST", "MARK"}


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def functions_of(sources: Mapping[str, str]) -> list[tuple[str, ast.FunctionDef]]:
    """Every function, with the module it stands in."""
    return [
        (module, node)
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]


def from_address(node: ast.AST, names: set[str], makers: set[str]) -> bool:
    """Whether a pointer that was made of an address is part of an expression, or comes of one of these names."""
    return any(
        (isinstance(part, ast.Name) and part.id in names)
        or called(part) in makers
        or (called(part) == "to" and casts(part))
        for part in ast.walk(node)
    )


def casts(node: ast.AST) -> bool:
    """Whether `address.to(tl.pointer_type(...))` may make a pointer into a peer's memory."""
    parts = list(ast.walk(node))
    names = {getattr(part, "id", getattr(part, "attr", "")) for part in parts}
    return "pointer_type" in names and not names & OWN


def made_in(function: ast.FunctionDef, makers: set[str]) -> set[str]:
    """Names of a function that hold pointers made of addresses."""
    names: set[str] = set()
    while True:
        found = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
            and node.value is not None
            and called(node.value) not in LOADS
            and from_address(node.value, names, makers)
            for place in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for target in ast.walk(place)
            if isinstance(target, ast.Name)
        }
        if found <= names:
            return names
        names |= found


def violations(sources: Mapping[str, str]) -> Iterator[str]:
    """What reaches memory other than through the seam: "module:line: what"."""
    functions = functions_of(sources)
    makers: set[str] = set()
    while True:
        more = {
            function.name
            for _, function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Return)
            and node.value is not None
            and from_address(node.value, made_in(function, makers), makers)
            and called(node.value) not in LOADS
        }
        if more <= makers:
            break
        makers |= more
    for module, function in functions:
        names = made_in(function, makers)
        for node in ast.walk(function):
            at = f"{module}:{getattr(node, 'lineno', 0)}"
            if called(node) in MEMORY and from_address(node.args[0], names, makers):
                yield f"{at}: {called(node)} to an address"
            elif called(node) in INSIDE:
                yield f"{at}: {called(node)}"
            elif isinstance(node, ast.keyword) and (node.arg, getattr(node.value, "value", "")) in ORDERS:
                yield f"{at}: {node.arg}={node.value.value}"


def test_no_kernel_reaches_a_peer_but_through_the_seam() -> None:
    assert len(KERNELS) > 20
    assert not list(violations(KERNELS))


PLANTED = {
    "a store to an address": "tl.store(at.to(tl.pointer_type(tl.int64)) + i, word)",
    "a store to a name for one": """
        to = tl.multiple_of(at.to(tl.pointer_type(tl.uint32)), 64)
        row = to + i
        tl.store(row, word)
        """,
    "a store to what another function makes": "tl.store(header_words(at, i), word)",
    "an atomic on an address": "tl.atomic_xchg(at.to(tl.pointer_type(tl.int64)), word, sem='relaxed')",
    "a release of one's own": "tl.atomic_xchg(table, word, sem='release')",
    "an order of the whole system": "tl.atomic_add(table, word, scope='sys')",
    "assembly": "tl.inline_asm_elementwise('st.release.sys', '=r', [at], tl.int32, False, 1)",
    "the seam's own way to signal": "device.store_release(at, word, at != 0)",
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_seam_is_seen_to_be_broken(name: str) -> None:
    body = textwrap.indent(textwrap.dedent(PLANTED[name]).strip(), "    ")
    planted = f"@triton.jit\ndef planted(at, table, slot_at, i, word):\n{body}\n"
    found = list(violations(KERNELS | {"planted": planted}))
    assert len(found) == 1 and found[0].startswith("planted:"), found
