"""Runs production wrappers for a GPU of compute capability 9.0 where there is none, and records what they launch.

Tensors "on cuda" are plain memory that says otherwise; operations of torch on large ones are not run; streams, events
and graphs are stand-ins; Triton specializes each launch for sm_90, and compiles and launches nothing. In a process of
its own (`apart`), since the interpreter excludes all that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSORS, CAPABILITY = 132, 90  # of an H100 or H200
LARGE = 1 << 16  # elements from which torch computes nothing
_NO_RESERVE = 0x4000  # of mmap on Linux


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: Its module and name.
        warps: Of a program.
        key: Two launches of one kernel with equal keys run one binary.
        constants: Values of the arguments that are compiled in, by name.
        arguments: Values of all others; tensors as they are.
        captured: Whether it became part of a graph.
        signature, attributes, options, function: What `triton.compile` takes.
    """

    kernel: str
    grid: tuple[int, ...]
    warps: int
    key: str
    constants: Mapping[str, Any]
    arguments: Mapping[str, Any]
    captured: bool
    signature: Mapping[str, str]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    function: Any


@dataclass(kw_only=True, eq=False)
class Recording:
    """What was asked of the device, in order.

    Attributes:
        operations: Of torch, by name, that launch a kernel or a copy; and whether each was captured. "copy_" copies
            bytes as they lie, and needs no kernel; "copy_ by a kernel" changes type or order.
        graphs: Captures of graphs that ended.
        replays: Launches of graphs.
    """

    launches: list[Launch] = field(default_factory=list)
    operations: list[tuple[str, bool]] = field(default_factory=list)
    graphs: int = 0
    replays: int = 0

    def clear(self) -> None:
        """Forget what was recorded."""
        self.launches.clear()
        self.operations.clear()
        self.graphs = self.replays = 0


def apart(function: str, *arguments: Any, triton: Path | None = None, timeout_s: float = 600.0) -> Any:
    """What `function` ("package.module:name") returns of these arguments in a new process, where `recording` works.

    Args:
        arguments: Such as JSON holds; so is what it returns.
        triton: Folder of another version.

    Raises:
        RuntimeError: it failed; the text is its own.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    first = [] if triton is None else [str(triton)]
    environment["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.recorder", function],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"{function}{arguments} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """All that this thread does inside with device "cuda" is recorded, and launches nothing."""
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter launches nothing. Record in `apart`.")
    seen = Recording()
    capturing: list[bool] = []
    pending: list[tuple[tuple[int, ...], tuple[Any, ...], Mapping[str, Any]]] = []

    def hook(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        grid, args, named = pending[-1]
        function = fn.jit_function
        values = dict(zip(function.arg_names, args, strict=False)) | dict(named)
        constants = {function.arg_names[at]: value for (at,), value in compile["constants"].items()}
        launched = Launch(
            kernel=f"{fn.module}.{fn.name}",
            grid=grid,
            warps=compile["num_warps"],
            key=compile["key"],
            constants=constants,
            arguments={name: values[name] for name in function.arg_names if name not in constants},
            captured=bool(capturing),
            signature=compile["signature"],
            attributes=compile["configs"][0],
            options=json.loads(compile["specialization_data"])["options"],
            function=function,
        )
        seen.launches.append(launched)
        return True

    run = JITFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        pending.append((tuple(grid), args, named))
        try:
            return run(self, *args, grid=grid, warmup=warmup, **named)
        finally:
            pending.pop()

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        capturing.append(True)
        yield
        capturing.pop()
        seen.graphs += 1

    class Graph:
        def replay(self) -> None:
            seen.replays += 1

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _=None: 0,
    )
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, name="recorder", total_memory=141 << 30)
    stand_ins = {
        "Stream": _Stream, "Event": _Stream, "CUDAGraph": Graph, "graph": graph,
        "stream": lambda _=None: contextlib.nullcontext(), "device": lambda _=None: contextlib.nullcontext(),
        "current_stream": lambda _=None: _Stream(), "synchronize": lambda _=None: None,
        "get_device_properties": lambda _=None: properties,
        "get_device_capability": lambda _=None: divmod(CAPABILITY, 10),
        "mem_get_info": lambda _=None: (130 << 30, 141 << 30),
        "device_count": lambda: 1, "is_available": lambda: True,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(driver, "_active", device))
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", hook))
        stack.enter_context(mock.patch.object(JITFunction, "run", noted))
        place, operations = _modes(lambda name: seen.operations.append((name, bool(capturing))))
        stack.enter_context(operations)
        stack.enter_context(place)
        yield seen


class _Stream:
    """A stream or an event: nothing runs, so nothing is waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def wait(self, _: Any = None) -> None: ...
    def record(self, _: Any = None) -> None: ...
    def record_event(self, _: Any = None) -> _Stream:
        return _Stream()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def _modes(note: Any) -> tuple[Any, Any]:
    """What makes plain memory a device's: for torch's functions, and for the operations that they come to."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    cuda = torch.device("cuda", 0)
    # Storages on the device, kept: an address must not come back as the host's.
    kept: dict[int, torch.UntypedStorage] = {}
    targets: list[str | None] = [None]
    # What torch passes where a tensor is asked for an attribute.
    asked = {getattr(torch.Tensor, name).__get__: value for name, value in (("device", cuda), ("is_cuda", True))}

    def there(tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and storage_of(tensor) in kept

    def storage_of(tensor: torch.Tensor) -> int:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata

    def bring(tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            kept[storage_of(tensor)] = tensor.untyped_storage()

    class Place(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            mine = bool(args) and there(args[0])
            if mine and func in asked:
                return asked[func]
            if mine and func == torch.Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy: copy it to the host first.")
            if mine and func == torch.Tensor.tolist:
                note("tolist")
            if func == torch.Tensor.pin_memory:
                return args[0]
            kwargs.pop("pin_memory", None)
            target = None
            if func is not torch.device:
                given = [*args[1:], kwargs.get("device")]
                for device in given:
                    if isinstance(device, torch.device) or (isinstance(device, str) and device in ("cpu", "cuda")):
                        target = torch.device(device).type
            if func == torch.Tensor.cpu:
                target = "cpu"
            elif func == torch.Tensor.cuda:
                func, args, target = torch.Tensor.to, (args[0], "cuda"), "cuda"
            if target == "cuda":
                args = tuple(torch.device("cpu") if _is_cuda(part) else part for part in args)
                if _is_cuda(kwargs.get("device")):
                    kwargs["device"] = torch.device("cpu")
            targets.append(target)
            try:
                result = func(*args, **kwargs)
                if func == torch.Tensor.data_ptr:
                    # No GPU's memory, nor what is pinned for one, lies below 2^31: triton would take it for an i32.
                    result += 1 << 46
                if target in ("cuda", "cpu") and isinstance(result, torch.Tensor):
                    copies = func in (torch.Tensor.to, torch.Tensor.cpu, torch.tensor, torch.as_tensor)
                    if copies and there(result) == (target == "cpu"):
                        note("copy")
                        targets[-1] = "quiet"
                        result = result.clone()
                    if target == "cuda":
                        bring(result)
                    else:
                        kept.pop(storage_of(result), None)
                return result
            finally:
                targets.pop()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = func._schema.name.removeprefix("aten::")
            inputs = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
            on_device = targets[-1] == "cuda" or any(map(there, inputs))
            silent = func.is_view or name.startswith(("empty", "lift", "detach", "_unsafe_view", "set_"))
            if (
                on_device
                and not silent
                and targets[-1] != "quiet"
                and not any(part.device.type == "meta" for part in inputs)
            ):
                note(name + " by a kernel" * (name == "copy_" and not alike(*inputs[:2])))
            if name == "empty" and on_device:
                result = unwritten(torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta"))
            elif silent or not on_device or kwargs.get("device") == torch.device("meta"):
                result = func(*args, **kwargs)
            else:
                result = small_or_none(func, args, kwargs)
            # What was written in place lies where it did: a copy to the host does.
            for part in () if func._schema.is_mutable else tree_leaves(result):
                if on_device and isinstance(part, torch.Tensor) and part.device.type == "cpu":
                    bring(part)
            return result

    def small_or_none(func: Any, args: Any, kwargs: Any) -> Any:
        """Run it; or, where that would touch much memory, give what it would give, unwritten."""

        def meta(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
            return torch.device("meta") if isinstance(part, torch.device) else part

        if func._schema.name == "aten::_local_scalar_dense":
            return func(*args, **kwargs)
        named = tree_map(meta, kwargs)
        if not any(isinstance(part, torch.Tensor) for part in tree_leaves((args, kwargs))):
            named["device"] = torch.device("meta")
        sizes = [part.numel() for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        sizes += [int(torch.Size(part).numel()) for part in args if isinstance(part, list | tuple) and _whole(part)]
        if max(sizes, default=0) < LARGE:
            return func(*args, **kwargs)
        shapes = func(*tree_map(meta, args), **named)
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda part: unwritten(part) if isinstance(part, torch.Tensor) else part, shapes)

    def alike(to: torch.Tensor, source: torch.Tensor) -> bool:
        return to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()

    def unwritten(meta: Any) -> Any:
        """A tensor of that shape on the device, of zeros; untouched it takes no memory, however large."""
        elements = 1 + sum((size - 1) * step for size, step in zip(meta.shape, meta.stride(), strict=True))
        if not meta.numel():
            return torch.empty(meta.shape, dtype=meta.dtype)
        whole = mmap.mmap(-1, elements * meta.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON | _NO_RESERVE)
        return torch.frombuffer(whole, dtype=meta.dtype).as_strided(meta.shape, meta.stride())

    return Place(), Operations()


def _whole(numbers: Any) -> bool:
    return bool(numbers) and all(isinstance(number, int) for number in numbers)


def _is_cuda(part: Any) -> bool:
    import torch

    return (isinstance(part, torch.device) and part.type == "cuda") or (
        isinstance(part, str) and part.partition(":")[0] == "cuda"
    )


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.load(sys.stdin))))
