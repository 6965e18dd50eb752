"""Chat templates: Jinja in a sandbox, with a clock and a budget, and the names that Hugging Face templates expect.

A template is its model author's program, run over the clients' data in the gateway. Jinja's sandbox keeps it from
reaching anything outside; this keeps it from taking for ever, or all memory. Each turn of a loop and each call of a
macro is a step, at which the clock is read; whatever is put together or shown is paid for by its length, before it is
made where one operation could make it of any size. A single operation on what fits in the budget is not interrupted.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SECONDS = 2.0
# A body of 4 MiB, each character of it put together some ten times on its way through a template.
MOST_CHARACTERS = 64 << 20
# Widths, counts and indentations: a larger one is meant to do harm.
_MOST_NUMBER = 1 << 16
_MOST_BITS = 1 << 16
_WIDE = re.compile(r"[1-9]\d{5}")
# What an item of a list counts for: walking over it takes time, too.
_ITEM = 256
# Nothing that a prompt needs, and each makes much of little.
_LEFT_OUT = ("center", "wordwrap", "urlize", "xmlattr", "pprint")


class TemplateRefused(ValueError):
    """The chat template cannot render these messages, or there is no template; the text says why."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Unix time in seconds that a template takes for the present: a request's own, so that who goes on with it another day
# or in another time zone makes the same prompt. 0: of no request.
ASKED_AT: ContextVar[int] = ContextVar("asked_at", default=0)


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: Jinja text, as in tokenizer_config.json or chat_template.jinja.
        special_tokens: Names such as "bos_token" and their text.

    Raises:
        TemplateRefused: the text is no Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = LimitedEnvironment([_GenerationTag, loopcontrols], {"tojson": _to_json})
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            with metered():
                self._template = environment.from_string(limited(environment.parse(source)))
        except TemplateSyntaxError as error:
            raise TemplateRefused(f"The chat template, line {error.lineno}: {error.message}.") from error
        except (TemplateError, TooMuch) as error:
            raise TemplateRefused(f"The chat template: {error}.") from error
        # Nested too deep for Jinja or for Python, which compiles what Jinja makes of it, or no constant that can be.
        except (RecursionError, MemoryError, SyntaxError, ValueError, TypeError, LookupError) as error:
            raise TemplateRefused(f"The chat template cannot be compiled: {error}.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        Args:
            messages: Each with "role" and "content", oldest first.
            add_generation_prompt: End with the beginning of the assistant's turn.
            continue_final_message: End with the last message's content, instead of what comes after it.
            tools: Tool descriptions, for templates that know them.
            options: More names for the template, for example {"enable_thinking": False}.

        Raises:
            TemplateRefused: the template does not accept the messages.
        """
        mark = ""
        if continue_final_message:
            # A word that stands nowhere else marks the end of the content, whatever the template puts around it.
            mark = secrets.token_hex(16)
            *before, last = messages
            messages = [*before, {**last, "content": str(last.get("content") or "") + mark}]
        names = {
            **self._special_tokens,
            **(options or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            with metered():
                text = self._template.render(names)
        except TemplateError as error:
            raise TemplateRefused(f"The chat template refuses these messages: {error.message or error}.") from error
        # The template is the model author's program over the client's data: what it trips over is refused.
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateRefused(f"The chat template fails on these messages: {error}.") from error
        if not mark:
            return text
        head, found, _ = text.rpartition(mark)
        if not found:
            raise TemplateRefused("The chat template leaves out the last message, so it cannot be continued.")
        return head


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.fromtimestamp(ASKED_AT.get() or time.time(), datetime.UTC).strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TooMuch(ValueError):
    """A template takes too long, or makes something too large; the text says which."""


class _Meter:
    """What is left of one rendering's time and budget."""

    def __init__(self) -> None:
        self.end_s = time.monotonic() + MOST_SECONDS
        self.left = MOST_CHARACTERS

    def spend(self, characters: int) -> None:
        self.left -= characters
        if self.left < 0:
            raise TooMuch(f"it puts together more than {MOST_CHARACTERS} characters; send fewer or shorter messages")


_METER: ContextVar[_Meter] = ContextVar("_METER")


@contextmanager
def metered() -> Iterator[None]:
    """Within it, what templates do in this thread is measured."""
    token = _METER.set(_Meter())
    try:
        yield
    finally:
        _METER.reset(token)


def step(characters: int) -> None:
    """One step, whose body has so many characters of its own. Raises TooMuch: the time or the budget is over."""
    meter = _METER.get()
    meter.spend(characters + 16)
    if time.monotonic() > meter.end_s:
        raise TooMuch(f"it takes longer than {MOST_SECONDS:g} s; send fewer or shorter messages")


def concatenated(*values: Any) -> str:
    """What Jinja's ``~`` makes, paid for. Raises TooMuch: the budget is over."""
    return "".join([shown(value) for value in values])


def shown(value: Any) -> str:
    """A value as a template shows it, paid for before it is made. Raises TooMuch: the budget is over."""
    _METER.get().spend(_length(value))
    return str(value)


def _length(value: Any, most: int = MOST_CHARACTERS) -> int:
    """Characters of a value at least; lists within lists are counted as often as they would be shown."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Undefined) or not isinstance(value, Mapping | list | tuple | set):
        return 8
    total = 2
    items = (part for pair in value.items() for part in pair) if isinstance(value, Mapping) else value
    for item in items:
        total += _ITEM + _length(item, most - total)
        if total > most:
            raise TooMuch(f"it puts together more than {MOST_CHARACTERS} characters; send fewer or shorter messages")
    return total


def limited(tree: nodes.Template) -> nodes.Template:
    """The same template, which counts its steps."""
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        for node in tree.find_all(kind):
            own = sum(len(data.data) for part in node.body for data in _texts(part))
            node.body.insert(0, nodes.ExprStmt(_call("step", [nodes.Const(own)])).set_lineno(node.lineno))
    for node in list(tree.find_all(nodes.Node)):
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(node, name, _call("concatenated", value.nodes))
            elif isinstance(value, list):
                value[:] = [_call("concatenated", v.nodes) if isinstance(v, nodes.Concat) else v for v in value]
    return tree


def _texts(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    # Imported by the compiled template, so that the template has no name for it to give to something else.
    return nodes.Call(nodes.ImportedName(f"{__name__}.{name}"), arguments, [], None, None)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with those limits. Compile and render within ``metered()``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Sequence[Any], filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=shown)
        self.globals.pop("lipsum")
        for name in _LEFT_OUT:
            self.filters.pop(name)
        for name, act in {**self.filters, **filters}.items():
            self.filters[name] = _limited_filter(name, act)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Carry out an operator whose result may be large."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers and operator in ("*", "**"):
            bits = left.bit_length() + right.bit_length()
            if (left.bit_length() * abs(right) if operator == "**" else bits) > _MOST_BITS:
                raise TooMuch(f"a number of it has more than {_MOST_BITS} bits")
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _METER.get().spend(len(left) + len(right))
        elif operator == "*":
            sized, count = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(sized, Sized) and isinstance(count, int):
                _METER.get().spend(len(sized) * max(0, count))
        elif operator == "%" and isinstance(left, str):
            _judge((left, *(right if isinstance(right, tuple) else (right,))), formats=True)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What stands for a string's ``format`` and ``format_map``."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*values: Any, **named: Any) -> str:
            _judge((value.__self__, *values, *named.values()), formats=True)
            return _paid(wrapped(*values, **named))

        return formatted

    def call(self, context: Context, callee: Any, /, *values: Any, **named: Any) -> Any:  # pyright: ignore
        owner = getattr(callee, "__self__", None)
        if not isinstance(owner, str):
            return super().call(context, callee, *values, **named)
        name = callee.__name__
        if name == "join" and values:
            values = (list(values[0]),)
            _METER.get().spend(_length(values[0]) + len(owner) * len(values[0]))
        else:
            _judge((owner, *values, *named.values()), formats=False)
        return _paid(super().call(context, callee, *values, **named))


def _limited_filter(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    # What Jinja passes first to some filters is none of the template's values.
    given = 1 if hasattr(act, "jinja_pass_arg") else 0

    @functools.wraps(act)
    def limited_act(*values: Any, **named: Any) -> Any:
        own = values[given:]
        if name == "join" and own:
            items = list(own[0])
            values = (*values[:given], items, *own[1:])
            own = (items, *own[1:])
            _METER.get().spend(len(items) * max([len(v) for v in own[1:] if isinstance(v, str)], default=0))
        if name in ("join", "string", "tojson") and own:
            _METER.get().spend(_length(own[0]))
        _judge((*own, *named.values()), formats=name == "format")
        return _paid(act(*values, **named))

    return limited_act


def _judge(values: Sequence[Any], *, formats: bool) -> None:
    """Refuse arguments that make one operation's result far larger than they are."""
    texts = [value for value in values if isinstance(value, str)]
    if any(isinstance(value, int) and abs(value) > _MOST_NUMBER for value in values[1:]):
        raise TooMuch(f"a width or count in it is over {_MOST_NUMBER}")
    if formats and texts and _WIDE.search(texts[0]):
        raise TooMuch("a width in one of its formats has more than five digits")
    if len(texts) > 1:
        # Replacing, indenting: at worst every character, or every line, gives way to the longest argument.
        often = texts[0].count(texts[1]) if len(texts) > 2 else texts[0].count("\n") + 1
        _METER.get().spend(often * max(len(text) for text in texts[1:]))
    elif texts:
        most = max((value for value in values[1:] if isinstance(value, int)), default=0)
        _METER.get().spend((texts[0].count("\n") + 1) * most)


def _paid(result: Any) -> Any:
    if isinstance(result, str):
        _METER.get().spend(len(result))
    return result
