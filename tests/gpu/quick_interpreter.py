"""Makes Triton's interpreter call device functions quickly: it rewires the whole language again at each such call."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import triton.language as tl
from triton.runtime import interpreter


def call_quickly() -> None:
    """From now on rewire the language once per launch: device functions find it rewired already. Idempotent."""
    rewire = interpreter._patch_lang
    if getattr(rewire, "once", False):
        return

    def rewire_once(fn: Callable[..., object]) -> object:
        if id(fn.__globals__) not in known:
            found = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            known[id(fn.__globals__)] = found
        # A function of the language that was rewired is no builtin any more.
        if all(not tl.core.is_builtin(lang.load) for lang in known[id(fn.__globals__)]):
            return interpreter._LangPatchScope()
        return rewire(fn)

    known: dict[int, list[ModuleType]] = {}
    rewire_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = rewire_once
