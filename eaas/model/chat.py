"""Chat templates: Jinja in a sandbox, with the names that Hugging Face templates expect."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from eaas.model.template_limits import LimitedEnvironment, TooMuch, limited, metered


class TemplateRefused(ValueError):
    """The chat template cannot render these messages, or there is no template; the text says why."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        if continue_final_message:
            # A word that stands nowhere else marks the end of the content, whatever the template puts around it.
            mark = secrets.token_hex(16)
            *before, last = messages
            marked = [*before, {**last, "content": str(last.get("content") or "") + mark}]
            text = self._rendered(marked, False, tools, options)
            head, found, _ = text.rpartition(mark)
            if not found:
                raise TemplateRefused(
                    "The chat template leaves out the last message, so it cannot be continued."
                )
            return head
        return self._rendered(messages, add_generation_prompt, tools, options)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> str:
        names = {
            **self._special_tokens,
            **(options or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with metered():
                return self._template.render(names)
        except TemplateError as error:
            raise TemplateRefused(
                f"The chat template refuses these messages: {error.message or error}."
            ) from error
        # The template is the model author's program over the client's data: what it trips over is refused.
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateRefused(f"The chat template fails on these messages: {error}.") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
