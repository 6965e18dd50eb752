"""docs/one-token.md names files and functions: each is there, and there are few enough to read in one sitting."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "one-token.md"
MOST_FILES = 25
# **4. [eaas/gateway/pool.py](../eaas/gateway/pool.py)** · `WorkerPool.submit`, `WorkerPool._place`
ENTRY = re.compile(r"^\*\*(\d+)\. \[(\S+)\]\(\.\./(\S+)\)\*\* · (.+)$", re.MULTILINE)
# `plan_again` (13), `fill` in 11
MENTION = re.compile(r"`([A-Za-z_][\w.]*)` (?:\((\d+)\)|in (\d+))")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
# Words in backticks that are no names in the listed files.
OTHERS = {"eaas", "experts", "p2p"}


def python_names(path: Path) -> set[str]:
    """Classes and functions of a module, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def native_names(path: Path) -> set[str]:
    """Functions and structures that a C++ file defines at its outermost level."""
    text = path.read_text()
    functions = re.findall(r"^(?!return|//)[A-Za-z_][\w:<>,*& ]*[ *&](\w+)\(", text, re.MULTILINE)
    return {*functions, *re.findall(r"^(?:struct|class)\s+(?:alignas\(\d+\)\s+)?(\w+)", text, re.MULTILINE)}


def names_of(path: Path) -> set[str]:
    return python_names(path) if path.suffix == ".py" else native_names(path)


def test_every_file_and_name_is_in_the_code() -> None:
    text = PAGE.read_text()
    files: dict[int, set[str]] = {}
    wrong = []
    for number, shown, target, named in ENTRY.findall(text):
        path = ROOT / target
        if shown != target or not path.is_file():
            wrong.append(f"{number}. {shown}: no such file, or the link leads elsewhere")
            continue
        files[int(number)] = names_of(path)
        wrong += [f"{number}. {target} lacks {name}" for name in NAME.findall(named) if name not in files[int(number)]]
    wrong += [
        f"`{name}` ({place or other}) is not in that file"
        for name, place, other in MENTION.findall(text)
        if name not in files.get(int(place or other), set())
    ]
    known = OTHERS.union(*files.values())
    wrong += [f"`{name}` is in no file of the page" for name in sorted({*NAME.findall(text)} - known)]
    assert not wrong, "docs/one-token.md is behind the code:\n" + "\n".join(wrong)


def test_it_is_read_in_one_sitting() -> None:
    numbers = [int(number) for number, *_ in ENTRY.findall(PAGE.read_text())]
    assert numbers == list(range(1, len(numbers) + 1)), f"files are numbered {numbers}"
    assert 0 < len(numbers) <= MOST_FILES, f"{len(numbers)} files are listed, at most {MOST_FILES}"


def test_definitions_count_and_calls_do_not(tmp_path: Path) -> None:
    python, native = tmp_path / "a.py", tmp_path / "a.cpp"
    python.write_text("class Pool:\n    async def submit(self): self.place()\n\ndef run(): ended()\n")
    native.write_text(
        "struct Slot {};\n\nP2P_API int32_t call(Client* client) {\n    helped(client);\n    return ended(1);\n}\n"
        "template <class T>\nvoid each(T t) {}\n"
    )
    assert python_names(python) == {"Pool", "Pool.submit", "run"}
    assert native_names(native) == {"Slot", "call", "each"}
