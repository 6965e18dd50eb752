"""What a grammar is on its way from the gateway to an attention worker. Pure: the worker compiles it.

Limits come before anything is compiled; what compiling itself may cost is bounded by `eaas.worker.constraint`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, cast

import msgspec

MAX_GRAMMAR_BYTES = 64 << 10
MAX_REGEX_CHARACTERS = 4096
MAX_CHOICES = 1024
MAX_SCHEMA_DEPTH = 32
# An automaton that counts remainders has as many states as the least common multiple of a schema's "multipleOf".
MAX_MULTIPLE = 100_000

Kind = Literal["json_schema", "regex", "lark", "gbnf"]

_SCHEMA_IN_LARK = re.compile(r"%json\s*")
_EBNF = re.compile(r"^[ \t]*root\s*::=", re.MULTILINE)
_LONGEST_INTEGER = 400


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _LONGEST_INTEGER else math.inf


_schemas = json.JSONDecoder(parse_int=_integer)


class GrammarInvalid(ValueError):
    """A grammar is over a limit, or is none; the text says what to change."""


class Grammar(msgspec.Struct, frozen=True):
    """The language that an output must be in: every prefix of the output begins one of its texts, and the output ends
    only where it is one.

    Attributes:
        kind: How `text` is written: a JSON schema, a regular expression (Rust's syntax, for the whole output),
            llguidance's dialect of Lark, or EBNF as llama.cpp and xgrammar have it (GBNF).

    Raises:
        GrammarInvalid: the text is over a limit.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        count = len(self.text.encode())
        if not 1 <= count <= MAX_GRAMMAR_BYTES:
            raise GrammarInvalid(f"A grammar has {count} bytes; 1 to {MAX_GRAMMAR_BYTES} are possible")
        if self.kind == "regex" and len(self.text) > MAX_REGEX_CHARACTERS:
            raise GrammarInvalid(
                f"A regular expression has {len(self.text)} characters; at most {MAX_REGEX_CHARACTERS} are possible"
            )


def of_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """JSON that a schema accepts, its properties in the schema's order.

    Raises:
        GrammarInvalid: it is nested too deep, too large, or asks for multiples of too large a number.
    """
    check_schemas([schema])
    return Grammar("json_schema", json.dumps(schema, separators=(",", ":"), ensure_ascii=False))


def of_grammar(text: str) -> Grammar:
    """What a grammar describes: EBNF (`root ::= ...`), or llguidance's dialect of Lark.

    Raises:
        GrammarInvalid: as for `of_lark`.
    """
    # Whose size is known to be within the limit, before anything is looked for in it.
    ebnf = Grammar("gbnf", text)
    # Lark has no "::=" outside of strings, and none of its grammars has a rule called root that begins so.
    return ebnf if _EBNF.search(text) else of_lark(text)


def of_lark(text: str) -> Grammar:
    """What a grammar in llguidance's dialect of Lark describes, whose schemas keep the limits of others.

    Raises:
        GrammarInvalid: it is too large, a schema in it is over a limit, or no schema stands behind a ``%json``.
    """
    grammar = Grammar("lark", text)
    schemas: list[Any] = []
    for found in _SCHEMA_IN_LARK.finditer(text):
        try:
            schema, _ = _schemas.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict | bool):
            raise GrammarInvalid(
                "What follows a %json is no schema; a JSON object is needed right behind it, and %json nowhere else"
            )
        schemas.append(schema)
    check_schemas(schemas)
    return grammar


def check_schemas(schemas: Sequence[Any]) -> None:
    """Refuse what would take too long to compile, whichever way schemas come into a grammar.

    Raises:
        GrammarInvalid: one is nested too deep, or all together ask for multiples of too large a number.
    """
    depth = max(map(depth_of, schemas), default=0)
    if depth > MAX_SCHEMA_DEPTH:
        raise GrammarInvalid(f"A schema is nested {depth} deep; at most {MAX_SCHEMA_DEPTH} is possible")
    if _common_multiple(schemas) > MAX_MULTIPLE:
        raise GrammarInvalid(
            f"The least common multiple of all 'multipleOf', in the last decimal place of any, is over {MAX_MULTIPLE}; "
            "take others"
        )


def of_choices(choices: Sequence[str]) -> Grammar:
    """One of several texts, and nothing else.

    Raises:
        GrammarInvalid: there is none, one is empty, or they are too many or too large.
    """
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise GrammarInvalid(f"{len(choices)} choices were given; 1 to {MAX_CHOICES} are possible")
    if not all(choices):
        raise GrammarInvalid("A choice is empty; each needs at least one character")
    # Lark's strings have JSON's escapes, and no character 127.
    quoted = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in choices)
    return Grammar("lark", "start: " + " | ".join(quoted))


def _common_multiple(schema: Any) -> int:
    """Of all that "multipleOf" names, counted in the last decimal place of any; over the limit where it is over."""
    steps: list[Decimal] = []
    level: list[Any] | None = [schema]
    while level is not None:
        for value in level:
            step = cast("Mapping[str, Any]", value).get("multipleOf") if isinstance(value, Mapping) else None
            # JSON's true is a number to Python, and its integers may be longer than any float.
            if isinstance(step, bool) or not isinstance(step, int | float):
                continue
            if step == math.inf:
                return MAX_MULTIPLE + 1
            if step > 0:
                steps.append(Decimal(step if isinstance(step, int) else repr(step)).normalize())
        level = _inside(level)
    if not steps:
        return 1
    place = min(0, *(int(step.as_tuple().exponent) for step in steps))
    if max(step.adjusted() for step in steps) - place > len(str(MAX_MULTIPLE)):
        return MAX_MULTIPLE + 1
    return math.lcm(*(int(step.scaleb(-place)) for step in steps))


def depth_of(value: Any) -> int:
    """How deep the arrays and objects of a parsed JSON value are nested; 0 for any other value."""
    depth, level = 0, _inside([value])
    while level is not None:
        depth, level = depth + 1, _inside(level)
    return depth


def _inside(values: Sequence[Any]) -> list[Any] | None:
    """What the arrays and objects among these hold; None where there is none of them."""
    nested = False
    inside: list[Any] = []
    for value in values:
        if isinstance(value, Mapping | list):
            held = cast("Mapping[str, Any] | list[Any]", value)
            inside.extend(held.values() if isinstance(held, Mapping) else held)
            nested = True
    return inside if nested else None
