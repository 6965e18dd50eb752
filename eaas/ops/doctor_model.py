"""What a checkpoint is, whether it is served, and what that loads: from the headers of its files, before a start.

The rules are those of loading itself: what loads weights runs here on an outline of the checkpoint, where names, types
and shapes are as they are and every number is zero, once for each way in which weights are stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from eaas.model.families import tensors_of
from eaas.model.loader import load_spec, resolve_model, stored_weight
from eaas.model.spec import ModelSpec
from eaas.model.tokenizer import Tokenizer
from eaas.ops.doctor import Finding
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.devices import Device
from experts.formats import experts_dtype, scheme_of
from experts.manifest import PackLayout
from experts.model import Dtype, ExpertShape, UnknownArchitecture
from experts.native import IsaUnavailable
from experts.pack import layout_of, pack_blob
from experts.tensor_file import NUMPY, TensorEntry
from p2p.native import NativeMissing
from router.placement import place

_TOLD = 12  # tensors or faults that are named one by one
_REFUSED = (ValueError, IsaUnavailable, NativeMissing)


def examine_model(model: str, *, dtype: str, experts: int, replicas: int, redundant: int = 0) -> list[Finding]:
    """Look at a checkpoint as a cluster with these options, without GPUs, would load it. Only headers are read.
    Args: model: as for `resolve_model`. experts, replicas, redundant: expert servers, those that hold each expert,
    copies in each layer beyond them."""
    found: list[Finding] = []
    what = "checkpoint"
    try:
        folder = resolve_model(model)
        checkpoint = Checkpoint.open(folder)
        found.append(_stored(checkpoint))
        what = "experts"
        shape = ExpertShape.from_config(checkpoint.config)
        kept = experts_dtype(dtype, checkpoint.config, Device().keeps)
        # Sizes do not depend on which checkpoint it is, and its fingerprint takes time.
        layout = layout_of(shape, kept, "0" * 64)
        text = f"{shape.architecture}: {shape.layers} layers of {shape.experts} experts, {shape.top_k} for each token"
        found.append(_yes(what, f"{text}; served in {kept.label}, {layout.numerics_class}"))
        outline = _Outline(checkpoint)
        found += [_expert_weights(outline, layout), _loaded_by_servers(layout, experts, replicas, redundant)]
        what = "own engine"
        spec = replace(load_spec(checkpoint), dtype=Dtype.resolve(dtype, checkpoint.config))
        found += _loaded_by_workers(outline, spec)
        what = "tokenizer"
        Tokenizer.load(folder)
        found.append(_yes(what, "tokenizer.json and what belongs to it"))
    except UnknownArchitecture as error:
        # What is served behind other engines alone is served all the same.
        found.append(Finding(what, False, str(error), required=what == "experts"))
    except _REFUSED as error:
        found.append(Finding(what, False, str(error), required=True))
    return found


class _Outline(Checkpoint):
    """A checkpoint without its numbers, which are all zero but those that say which columns form a group.

    Attributes:
        read: What was asked for since this was last emptied.
    """

    def __init__(self, whole: Checkpoint) -> None:
        self.directory, self.config, self._file_of = whole.directory, whole.config, whole._file_of
        self.read: dict[str, TensorEntry] = {}

    def tensor(self, name: str) -> np.ndarray:
        entry = self._file(name).entries[name]
        self.read[name] = _sized(entry)
        if name.endswith(".g_idx"):
            # Whether columns are in order decides how the rest is read.
            return super().tensor(name)
        return np.broadcast_to(np.zeros((), NUMPY[entry.dtype]).view(_Zeros), entry.shape, subok=True)

    def quantized(self, name: str) -> None:
        """Codes need their numbers; as numbers they have the same shape."""

    def entry(self, name: str) -> TensorEntry | None:
        """What is told of a tensor but its place; None: there is none."""
        return _sized(self._file_of[name].entries[name]) if name in self else None


class _Zeros(np.ndarray):
    """A zero in every place, which takes the room of one, also in another type."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype).view(_Zeros), self.shape, subok=True)


def _sized(entry: TensorEntry) -> TensorEntry:
    return replace(entry, begin=0, end=entry.end - entry.begin)


class _Checks:
    """Reads groups of tensors from an outline by the rules of loading; those stored alike are read once."""

    def __init__(self, outline: _Outline) -> None:
        self.faults: list[str] = []
        self._outline = outline
        self._sound: list[tuple[object, dict[str, TensorEntry]]] = []

    def check(self, prefix: str, kind: object, read: Callable[[], object]) -> None:
        """Read a group, whose names begin with `prefix`, unless a sound one of the same kind is stored alike."""
        for known, parts in self._sound:
            if known == kind and all(self._outline.entry(prefix + rest) == parts[rest] for rest in parts):
                return
        self._outline.read.clear()
        try:
            read()
        except CheckpointInvalid as error:
            alike = next((parts for known, parts in self._sound if known == kind), {})
            missing = [prefix + rest for rest in alike if prefix + rest not in self._outline]
            self.faults += [f"no tensor {name}" for name in missing] or [str(error)]
        else:
            parts = {name.removeprefix(prefix): entry for name, entry in self._outline.read.items()}
            self._sound.append((kind, parts))

    def finding(self, what: str, text: str, **figures: int) -> Finding:
        """That all is sound, or each fault."""
        if not self.faults:
            return _yes(what, text, **figures)
        more = f"\nand {rest} more" if (rest := len(self.faults) - _TOLD) > 0 else ""
        return Finding(what, False, "\n".join(self.faults[:_TOLD]) + more, required=True)


def _stored(checkpoint: Checkpoint) -> Finding:
    files = {file.path: file for file in checkpoint._file_of.values()}
    kinds: Counter[str] = Counter()
    for file in files.values():
        # One tensor may have several names.
        for entry in {entry.begin: entry for entry in file.entries.values()}.values():
            kinds[entry.coded or entry.dtype] += entry.end - entry.begin
    method = scheme_of(checkpoint.config).method
    nbytes = sum(path.stat().st_size for path in files)
    types = ", ".join(f"{_size(size)} {kind}" for kind, size in kinds.most_common())
    text = f"{checkpoint.directory}: {_size(nbytes)}, files: {len(files)}; {types}" + f"; {method}" * bool(method)
    return _yes("checkpoint", text, files=len(files), bytes=nbytes)


def _expert_weights(outline: _Outline, layout: PackLayout) -> Finding:
    checks, shape = _Checks(outline), layout.shape
    if scheme_of(outline.config).method == "gguf":
        # Of its codes an outline has the numbers only, and its files themselves say whether all are kept.
        layout = replace(layout, dtype=Dtype.BFLOAT16)
    for layer, block in enumerate(shape.layer_ids):
        fused = shape.family.fused.prefix.format(layer=block)
        together = not shape.family.prefix or (
            shape.names(layer, 0)[0] not in outline and fused + shape.family.fused.gate_up in outline
        )
        for expert in range(1 if together else shape.experts):
            prefix = fused if together else shape.family.prefix.format(layer=block, expert=expert)
            checks.check(prefix, together, partial(pack_blob, layout, outline, layer, expert))
    return checks.finding("weights of experts", "all there, in types and shapes that are read")


def _loaded_by_servers(layout: PackLayout, experts: int, replicas: int, redundant: int) -> Finding:
    shape, each, whole = layout.shape, layout.blob_bytes, layout.count * layout.blob_bytes
    servers = {f"expert/{number}": 0 for number in range(experts)}
    placed = place(layers=shape.layers, experts=shape.experts, replicas=replicas, capacity=servers)
    # Redundant copies follow the load; they are spread as evenly as the others.
    beyond = -(-redundant * shape.layers // experts)
    most = min(max(held.bit_count() for held in placed.values()) + beyond, layout.count)
    text = (
        f"{_size(each)} an expert, {_size(whole)} for {layout.count}; with {experts} servers and {replicas} replicas at"
        f" most {most} experts, {_size(most * each)}, each. Servers of one host map one file"
    )
    return _yes("expert servers load", text, expert=each, experts=whole, server=most * each)


def _loaded_by_workers(outline: _Outline, spec: ModelSpec) -> list[Finding]:
    checks = _Checks(outline)
    plans, scheme = tensors_of(spec), scheme_of(outline.config)
    for role, plan in plans.items():
        read = partial(stored_weight, outline, scheme, role, plan)
        checks.check(plan.module, plan.shape, read)
    nbytes = sum(math.prod(plan.shape) for plan in plans.values()) * spec.dtype.nbytes
    stored = "bfloat16, its matrices then quantized" if spec.dtype is Dtype.INT8 else spec.dtype.label
    cached = 1000 * spec.layers * spec.kv_heads * spec.cached_dims * spec.dtype.nbytes
    return [
        checks.finding("attention worker loads", f"{_size(nbytes)} in {stored}", weights=nbytes),
        _yes("KV cache", f"{_size(cached)} for each 1,000 tokens", per_1000_tokens=cached),
    ]


def _yes(what: str, text: str, **figures: int) -> Finding:
    return Finding(what, True, text, required=True, figures=figures)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
