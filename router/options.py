"""Options of a process: each declared once, read from a command line, the environment and a file, and passed on.

A package declares its options as fields of frozen, keyword-only dataclasses:

    class GatewayOptions(ChildOptions):
        stall_s: float = option(60.0, "End a stream whose client reads nothing for so long.", above=0)

For the role `gateway` this is the flag --stall-s, the variable EAAS_GATEWAY_STALL_S, and `stall_s` in the table
[gateway] of the TOML file that --config names. The flag counts before the variable, the variable before the file, the
file before the default. Units end names. A field that is not declared by `option` is set by code alone.

This is argparse over dataclasses, 200 lines of the standard library: pydantic-settings would cost expert servers and
router a dependency and 0.2 s of start-up, and would still need the bounds, the groups and the passing on.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import inspect
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

# Tables of the file, and the middle of variables' names.
ROLES = ("serve", "pool", "router", "expert", "attention", "gateway", "launcher")
EXIT_CODES = (
    "Exit codes: 0 stopped by a signal or drained, 1 could not start or was fenced (the reason is printed), "
    "2 the command line cannot be read."
)
_NEEDED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
_METAVARS = {"_s": "SECONDS", "_bytes": "BYTES", "_tokens": "TOKENS", "_fd": "FD", "_port": "PORT"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class OptionsInvalid(ValueError):
    """An option, or several together, make no sense: what was found, what is needed."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of one class, as `option` declares it.

    Attributes:
        metavar: What stands for the value in help.
        choices: All that it may be.
        least, most, above: Bounds of a number; `above` itself is out of them.
        positional: It has no flag; a command line gives it by itself.
        repeats: The flag is given once for each of several values. Without it they have commas between them.
        word: Of its flag, where that is not its name.
        name, hint, owner: Of its field, its type, and the class that declares it.
    """

    default: Any
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    positional: bool = False
    repeats: bool = False
    word: str = ""
    name: str = ""
    hint: Any = None
    owner: type = object

    @property
    def flag(self) -> str:
        """As it stands on a command line."""
        return self.name if self.positional else f"--{self.word or self.name.replace('_', '-')}"

    @property
    def kind(self) -> type:
        """The type of one value."""
        return typing.get_args(self.hint)[0] if self.is_several else self.hint

    @property
    def is_several(self) -> bool:
        return typing.get_origin(self.hint) is tuple

    @property
    def is_needed(self) -> bool:
        return self.default is MISSING

    @property
    def default_text(self) -> str:
        """The default in words; empty where the help says what happens without a value."""
        if self.default in (MISSING, None, "", (), -1) or isinstance(self.default, bool):
            return "on" if self.default is True else ""
        if self.is_several:
            return ",".join(map(str, self.default))
        return f"{self.default:g}" if self.kind is float else str(self.default)

    @property
    def shown(self) -> str:
        """What stands for its value in help."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        units = (unit for end, unit in _METAVARS.items() if f"_{self.name}".endswith(end))
        word = self.metavar or next(units, "N" if self.kind is int else self.name.rpartition("_")[2].upper())
        return f"{word},..." if self.is_several and not self.repeats and "," not in word else word

    def variable(self, role: str) -> str:
        """Its name in the environment of a process of this role."""
        return f"EAAS_{role}_{self.name}".upper()

    def value(self, raw: Any, where: str) -> Any:
        """A value from text, or from what TOML holds. Raises OptionsInvalid, which says where it was found."""
        if not self.is_several:
            return self._one(raw, f"{where} {raw}")
        items = raw if isinstance(raw, list) else raw.split() if self.repeats and isinstance(raw, str) else [raw]
        if not self.repeats:
            parts = (item.split(",") if isinstance(item, str) else [item] for item in items)
            items = [item for part in parts for item in part if item != ""]
        shown = ",".join(map(str, raw)) if isinstance(raw, list) else raw
        return tuple(self._one(item, f"{where} {shown}") for item in items)

    def _one(self, raw: Any, found: str) -> Any:
        kind = self.kind
        try:
            if kind is bool:
                return raw if isinstance(raw, bool) else _BOOLEANS[raw.lower()]
            if isinstance(raw, str):
                return Path(raw).expanduser() if kind is Path else kind(raw)
            if not isinstance(raw, bool) and (type(raw) is kind or (kind is float and isinstance(raw, int))):
                return kind(raw)
        except (ValueError, KeyError, AttributeError):
            pass
        raise OptionsInvalid(f"{found}: {_NEEDED[kind]} is needed{' for each' if self.is_several else ''}.")

    def check(self, value: Any) -> None:
        """Refuse a value out of bounds. Raises OptionsInvalid."""
        if self.choices and value not in self.choices:
            raise OptionsInvalid(f"{self.flag} {value}: one of {', '.join(self.choices)} is needed.")
        if value is None or self.least is self.most is self.above is None:
            return
        bounds = {"more than": self.above, "at least": self.least, "at most": self.most}
        needed = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)
        low = self.above is None or value > self.above
        if not (low and (self.least is None or value >= self.least) and (self.most is None or value <= self.most)):
            raise OptionsInvalid(f"{self.flag} {value}: {needed} is needed.")


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """Declare an option.

    Args:
        default: Value where nobody gives another; without one somebody must.
        help: What it is, as a sentence. Empty: this is a base class's option with another default.
        more: Of the attributes of `Option`: metavar, choices, bounds and how it is given.
    """
    return field(default=default, metadata={"option": Option(default=default, help=help, **more)})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of every class that declares options; a subclass adds its own checks to `__post_init__`.

    Attributes:
        given: Names of those that somebody gave, be it with the value of the default.
    """

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what makes no sense. Raises OptionsInvalid, or another ValueError with found, needed, next move."""
        for one in options_of(type(self)).values():
            one.check(getattr(self, one.name))


_T = TypeVar("_T", bound=Options)


@functools.cache
def options_of(kind: type[Options]) -> Mapping[str, Option]:
    """The options of a class by name, in the order of their declaration, those of its bases first."""
    hints = typing.get_type_hints(kind)
    found = (one for one in dataclasses.fields(kind) if "option" in one.metadata)
    return {one.name: _in_class(kind, one.name, hints[one.name]) for one in found}


def _in_class(kind: type[Options], name: str, hint: Any) -> Option:
    bases = [base for base in kind.__mro__ if name in inspect.get_annotations(base)]
    declared = [(base, base.__dataclass_fields__[name].metadata["option"]) for base in bases]
    owner, one = next((base, one) for base, one in declared if one.help)
    if isinstance(hint, UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not NoneType)
    return dataclasses.replace(one, name=name, hint=hint, owner=owner, default=declared[0][1].default)


def read(kind: type[_T], role: str, arguments: Sequence[str], environment: Mapping[str, str]) -> _T:
    """The options of a process. Exits with 0 after --help, with 2 where the command line cannot be read.

    Raises:
        OptionsInvalid: a value, or the file, is not what is needed.
        ValueError: the class refuses them.
    """
    options = options_of(kind)
    parser = _parser(kind, role, options)
    given = vars(parser.parse_args(arguments))
    variables = {name: one.variable(role) for name, one in options.items()}
    path = given.get("config") or environment.get(variables.get("config", ""))
    table = _table(Path(path), role, options) if path else {}
    values: dict[str, Any] = {}
    for name, one in options.items():
        if name in given:
            values[name] = one.value(given[name], one.flag)
        elif variables[name] in environment:
            values[name] = one.value(environment[variables[name]], variables[name])
        elif name in table:
            values[name] = one.value(table[name], f"{path}: {name} in [{role}]")
    missing = [one.flag for name, one in options.items() if one.is_needed and name not in values]
    if missing:
        parser.error(f"{' and '.join(missing)} must be given")
    return kind(**values, given=frozenset(values))


def arguments(options: Options) -> list[str]:
    """The command line that gives these options: each that was given, or differs from its default, once."""
    words: list[str] = []
    for name, one in options_of(type(options)).items():
        value = getattr(options, name)
        if value == one.default and name not in options.given:
            continue
        if isinstance(value, bool):
            words.append(one.flag if value else f"--no-{one.flag[2:]}")
        elif one.repeats:
            words += [f"{one.flag}={item}" for item in value]
        else:
            text = ",".join(map(str, value)) if one.is_several else str(value)
            words.append(text if one.positional else f"{one.flag}={text}")
    return words


def derived(options: Options, kind: type[_T], **more: Any) -> _T:
    """Options of another process: those that both have by one declaration as they are here, and `more`, which counts
    before them. Raises as `kind` does."""
    theirs = options_of(kind)
    ours = {name: one.owner for name, one in options_of(type(options)).items()}
    both = {name for name, one in theirs.items() if ours.get(name) is one.owner}
    values = {name: getattr(options, name) for name in both} | {"given": options.given & both}
    return kind(**values | more)


def _table(path: Path, role: str, options: Mapping[str, Option]) -> Mapping[str, Any]:
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OptionsInvalid(f"--config {path} cannot be read: {error}") from None
    _refuse_unknown(f"--config {path}: table", tables, ROLES)
    _refuse_unknown(f"--config {path}: in [{role}]", tables.get(role, {}), options)
    return tables.get(role, {})


def _refuse_unknown(where: str, found: Mapping[str, Any], known: typing.Collection[str]) -> None:
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"{close[0]}?" if close else f"one of {', '.join(known)} is needed."
            raise OptionsInvalid(f"{where} {name} is not known; {hint}")


class _Help(argparse.RawDescriptionHelpFormatter):
    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")


def _parser(kind: type[Options], role: str, options: Mapping[str, Option]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"eaas {role}",
        usage=f"eaas {role} {'[MODEL] ' if any(one.positional for one in options.values()) else ''}[options]",
        description=inspect.cleandoc(kind.__doc__ or ""),
        epilog=f"Each option may also come from the environment, as EAAS_{role.upper()}_NAME, or from the table "
        f"[{role}] of --config FILE.\n{EXIT_CODES}",
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[type, Any] = {}
    # The role's own options stand first.
    for one in sorted(options.values(), key=lambda one: kind.__mro__.index(one.owner)):
        if one.owner not in groups:
            groups[one.owner] = parser if one.owner is kind else parser.add_argument_group(title_of(one.owner))
        said = " (needed)" if one.is_needed else f" (default: {one.default_text})" if one.default_text else ""
        words: dict[str, Any] = {"help": (one.help + said).replace("%", "%%")}
        if one.kind is bool:
            words["action"] = argparse.BooleanOptionalAction
        else:
            words["metavar"] = one.shown
            words |= {"nargs": "?"} if one.positional else {"dest": one.name}
            words |= {"action": "append"} if one.is_several else {}
        groups[one.owner].add_argument(one.flag, **words)
    return parser


def title_of(owner: type) -> str:
    """What a class's options are called together."""
    return inspect.cleandoc(owner.__doc__ or "").partition("\n")[0].rstrip(".:")
