"""How a checkpoint is quantized, from quantization_config of its config.json. Pure.

Served are the formats in which models are published, by their quant_method: fp8, mxfp4, compressed-tensors, gptq, awq.
`experts.matrices` has what of them is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from experts.model import ConfigInvalid, Dtype, ExpertShape
from experts.quantized import Codes


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How some modules of a checkpoint are stored.

    Attributes:
        group: Columns of a row that share a scale; 0: all.
        targets: Names of modules, or parts of names between dots; "re:" begins a pattern, "Linear" is every one.
        asymmetric: Each group has a zero point.
        permuted: Which columns form a group is a table of the file.
    """

    codes: Codes
    group: int
    targets: tuple[str, ...] = ("Linear",)
    asymmetric: bool = False
    permuted: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a checkpoint is quantized.

    Attributes:
        method: quant_method of config.json; empty: it is not.
        groups: The first whose targets name a module says how that is stored.
        ignored: Modules stored plainly, named as targets are.
        block: Rows and columns that share a scale of FP8.
        zeros_less_one: Zero points are stored less one, as the first version of GPTQ's files has them.
    """

    method: str = ""
    groups: tuple[Stored, ...] = ()
    ignored: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False

    def stored(self, name: str) -> Stored | None:
        """How config.json says that a module is stored; None: plainly."""
        if _named(self.ignored, name):
            return None
        return next((group for group in self.groups if _named(group.targets, name)), None)


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """How a checkpoint of that config.json is quantized.

    Raises:
        ConfigInvalid: in a way that is not served; the text says which are.
    """
    method: Any = config.get("quantization_config")
    if not method:
        return Scheme()
    try:
        fields = _object(config, "quantization_config")
        method = fields.get("quant_method")
        if method not in _METHODS:
            raise _refused(str(method))
        scheme = _METHODS[method](fields)
        for entry in [*scheme.ignored, *(target for group in scheme.groups for target in group.targets)]:
            if entry.startswith("re:"):
                # Matching goes back over each choice: with few it is done at once, with repeated groups never.
                if len(entry) > 512 or _ENDLESS.search(entry) or len(_CHOICE.findall(entry)) > 6:
                    raise re.error(f"pattern {entry[:80]} may take forever to match")
                re.compile(entry[3:])
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, re.error) as error:
        raise _refused(f"{method}, malformed: {error}") from error
    return scheme


def stored_as(config: Mapping[str, Any]) -> Dtype | None:
    """The type that holds a checkpoint's experts as its files do; None: there is none, or they are not quantized.

    Raises:
        ConfigInvalid: as `scheme_of`.
    """
    scheme = scheme_of(config)
    if scheme.method == "mxfp4":
        return Dtype.MXFP4
    if not scheme.groups:
        return None
    shape = ExpertShape.from_config(config)
    if not shape.family.prefix:
        return None
    # Lists of exceptions are long, and mostly of modules that no expert has, whatever its numbers.
    text = re.sub(r"\d", "", " ".join(["Linear", "re:", *shape.names(0, 0)]))
    few = (entry for entry in scheme.ignored if re.sub(r"\d|(?<=^re:).*", "", entry).strip(".") in text)
    scheme = replace(scheme, ignored=tuple(few))
    places = ((layer, expert) for layer in range(shape.layers) for expert in range(shape.experts))
    names = (name.removesuffix(".weight") for place in places for name in shape.names(*place))
    kinds = (_kept(scheme.stored(name)) for name in names)
    first = next(kinds)
    return first if all(kind is first for kind in kinds) else None


def _kept(stored: Stored | None) -> Dtype | None:
    if stored is None or stored.permuted:
        return None
    if stored.codes is Codes.UINT4 and stored.group % 32 == 0:
        return Dtype.INT4_G32 if stored.group % 128 else Dtype.INT4
    return Dtype.FP8 if stored.codes is Codes.E4M3 and stored.group % 128 == 0 else None


def experts_dtype(wanted: str, config: Mapping[str, Any], keeps: Collection[Dtype]) -> Dtype:
    """The type that a checkpoint's experts are served in: as they are stored where nothing else is asked for.

    Args:
        wanted: As for `Dtype.resolve`.
        keeps: Types whose kernels the device has, of those that `stored_as` may give.

    Raises:
        ConfigInvalid: as `Dtype.resolve`.
    """
    dtype, stored = Dtype.resolve(wanted, config), stored_as(config)
    return stored if wanted == "auto" and stored is not None and stored in keeps else dtype


def _fp8(fields: Mapping[str, Any]) -> Scheme:
    if (kind := fields.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"fp8 as {kind}")
    block = _block("fp8", fields.get("weight_block_size"))
    stored = Stored(codes=Codes.E4M3, group=block[1] if block else 0)
    return Scheme(method="fp8", groups=(stored,), ignored=_excepted(fields), block=block)


def _compressed(fields: Mapping[str, Any]) -> Scheme:
    method = "compressed-tensors"
    sparse = _object(fields, "sparsity_config").get("format", "dense")
    if sparse != "dense" or _object(fields, "transform_config").get("config_groups"):
        raise _refused(f"{method} as {sparse}, or rotated by transform_config")
    groups: list[Stored] = []
    block = None
    for each in fields["config_groups"].values():
        if not (weights := each.get("weights")):
            continue
        kind, bits, strategy = (weights.get(field) for field in ("type", "num_bits", "strategy"))
        codes = _KINDS.get((kind, bits))
        if codes is None or strategy not in ("tensor", "channel", "group", "block"):
            form = each.get("format") or fields.get("format")
            raise _refused(f"{method} as {form}, {bits} bits of {kind} for each {strategy}")
        size = weights.get("group_size") if strategy == "group" else -1
        if strategy == "block" and (block := _block(method, weights.get("block_structure"))):
            size = block[1]
        groups.append(
            Stored(
                codes=codes,
                group=_size(method, size),
                targets=tuple(each.get("targets") or ["Linear"]),
                asymmetric=not weights.get("symmetric", True),
                permuted=str(weights.get("actorder")).lower() in ("group", "dynamic", "true"),
            )
        )
    return Scheme(method=method, groups=tuple(groups), ignored=_excepted(fields), block=block)


def _gptq(fields: Mapping[str, Any]) -> Scheme:
    form = fields.get("checkpoint_format") or "gptq"
    groups: list[Stored] = []
    ignored: list[str] = []
    # Patterns with settings of their own ("-:": stored plainly) come before the rule.
    rules: list[tuple[str, dict[str, Any]]] = [*_object(fields, "dynamic").items(), ("+:.*", {})]
    for pattern, changed in rules:
        if pattern.startswith("-:"):
            ignored.append("re:" + pattern[2:])
            continue
        said = {**fields, **changed}
        bits, word = said.get("bits"), said.get("pack_dtype", "int32")
        if bits not in (4, 8) or form not in ("gptq", "gptq_v2") or word != "int32":
            raise _refused(f"gptq of {bits} bits, checkpoint_format {form}, in words of {word}")
        group = _size("gptq", said.get("group_size"))
        groups.append(
            Stored(
                codes=_KINDS["int", bits],
                group=group,
                targets=("re:" + pattern.removeprefix("+:"),),
                asymmetric=True,
                permuted=bool(said.get("desc_act")) and group > 0,
            )
        )
    excepted = (*ignored, *_excepted(fields))
    return Scheme(method="gptq", groups=tuple(groups), ignored=excepted, zeros_less_one=form == "gptq")


def _awq(fields: Mapping[str, Any]) -> Scheme:
    bits, version = fields.get("bits"), fields.get("version", "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _refused(f"awq of {bits} bits, version {version}")
    stored = Stored(codes=Codes.UINT4, group=_size("awq", fields.get("group_size")), asymmetric=True)
    return Scheme(method="awq", groups=(stored,), ignored=_excepted(fields))


def _gguf(fields: Mapping[str, Any]) -> Scheme:
    """As `experts.gguf` finds it in the files; what is not kept in 4 bits is read as numbers."""
    coded = (Stored(codes=Codes.UINT4, group=32, asymmetric=True),) if fields.get("experts_bits") == 4 else ()
    return Scheme(method="gguf", groups=coded)


_ENDLESS = re.compile(r"\)\s*[*+{]|\(\?\w*x")
_CHOICE = re.compile(r"\(\??|[*+?{]+")
_KINDS = {("int", 4): Codes.UINT4, ("int", 8): Codes.INT8, ("float", 8): Codes.E4M3}
_METHODS: Mapping[object, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": lambda _: Scheme(method="mxfp4"),
    "gguf": _gguf,
}


def _refused(what: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"config.json: the checkpoint is quantized ({what}). Served are fp8, mxfp4, awq (4 bits, gemm), gptq (4 or 8"
        " bits), compressed-tensors (integers of 4 or 8 bits, FP8), and what is not quantized."
    )


def _excepted(fields: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("ignore", "modules_to_not_convert", "ignored_layers")
    return tuple(entry for name in names for entry in cast("list[str]", fields.get(name) or []))


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", fields.get(name) or {})


def _size(method: str, group: object) -> int:
    if not isinstance(group, int) or group == 0 or group >= 1 << 31:
        raise _refused(f"{method} in groups of {group!r}")
    return max(group, 0)


def _block(method: str, block: object) -> tuple[int, int] | None:
    match block:
        case None:
            return None
        case [int(rows), int(columns)] if 0 < rows < 1 << 31 and 0 < columns < 1 << 31:
            return rows, columns
        case _:
            raise _refused(f"{method} in blocks of {block!r}")


def _named(entries: Sequence[str], name: str) -> bool:
    return any(
        entry == "Linear"
        or (re.match(entry[3:], name) if entry.startswith("re:") else f".{entry.strip('.')}." in f".{name}.")
        for entry in entries
    )
