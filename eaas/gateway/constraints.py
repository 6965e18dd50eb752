"""The fields of a request that bind its output's tokens: structured outputs, biases, allowed tokens. Pure.

Shapes and sizes are judged here; whether a grammar makes sense, the attention worker that compiles it says, before the
first token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from eaas.worker.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarInvalid, of_choices, of_grammar, of_schema
from eaas.worker.protocol import MAX_BIASES, MOST_BIAS

MAX_ALLOWED_TOKENS = 1 << 16
_ID = re.compile(r"[0-9]{1,10}")
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

# Likeliest tokens; -1: the whole vocabulary. How many are allowed is the server's setting.
LogprobCount = Annotated[int, Field(ge=-1)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


class Strict(BaseModel):
    """A part of a request: "5" is no integer, null means "not given", fields that nobody knows are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class JsonSchemaFormat(Strict):
    """``response_format.json_schema``. Strict or not, the output follows the schema to the letter."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("type 'json_schema' needs 'json_schema' with 'name' and 'schema'")
        return self

    def asked(self) -> Grammar | None:
        """The language that it asks for; None: any text. Raises GrammarInvalid: the schema is over a limit."""
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return None if self.type == "text" else of_schema(_ANY_OBJECT if schema is None else schema)


class StructuredOutputs(Strict, extra="allow"):
    """``structured_outputs``, as vLLM names them: exactly one of the fields."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        unknown = next((name for name, value in (self.model_extra or {}).items() if value), None)
        if unknown is not None:
            raise ValueError(f"this server does not support '{unknown[:64]}'; leave it out")
        wanted = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        given = sum(value is not None for value in wanted)
        if given != 1:
            raise ValueError(
                f"{given} of 'json', 'regex', 'choice', 'grammar' and 'json_object' were given; give exactly one"
            )
        return self

    def asked(self) -> Grammar:
        """The language that it asks for. Raises GrammarInvalid: what is given is over a limit, or is no JSON."""
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.grammar is not None:
            return of_grammar(self.grammar)
        if self.choice is not None:
            return of_choices(self.choice)
        return of_schema(_ANY_OBJECT if self.json_ is None else _parsed(self.json_))


Asked = ResponseFormat | StructuredOutputs | None


class ConstrainedRequest(Strict):
    """What chat and plain completions share of these fields."""

    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    prompt_logprobs: LogprobCount | None = None

    @field_validator("response_format", "structured_outputs", mode="after")
    @classmethod
    def _within_limits(cls, value: Asked) -> Asked:
        # Measured here, so that the field at fault is named.
        if value is not None:
            value.asked()
        return value

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _ids(cls, biases: Mapping[str, float] | None) -> Mapping[str, float] | None:
        wrong = [key for key in biases or () if not _ID.fullmatch(key)]
        if wrong:
            shown = ", ".join(repr(key[:32]) for key in wrong[:4])
            raise ValueError(f"keys are token ids; found {shown}")
        return biases

    @model_validator(mode="after")
    def _agree_on_grammar(self) -> ConstrainedRequest:
        given = [name for name in _GUIDED if getattr(self, name) is not None]
        given += ["structured_outputs"] if self.structured_outputs is not None else []
        formatted = self.response_format is not None and self.response_format.type != "text"
        given += ["response_format"] if formatted else []
        if len(given) > 1:
            raise ValueError(f"{' and '.join(map(repr, given))} were given; an output follows one of them")
        if given and self.ignore_eos:
            raise ValueError(f"'{given[0]}' says where the output ends: it cannot be given with 'ignore_eos'")
        if given and given[0] in _GUIDED:
            asked = {given[0].removeprefix("guided_"): getattr(self, given[0])}
            self.structured_outputs = StructuredOutputs.model_validate(asked)
            try:
                self.structured_outputs.asked()
            except GrammarInvalid as error:
                raise ValueError(f"'{given[0]}': {error}") from None
        return self

    @property
    def prompt_count(self) -> int:
        """Alternatives reported for each token of the prompt by id; -1: none are."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def grammar(self) -> Grammar | None:
        """The language that the output must be in; None: any text."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.asked()

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Tokens whose logits are changed, and by how much."""
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())


def _parsed(schema: Mapping[str, Any] | bool | str) -> Mapping[str, Any] | bool:
    if not isinstance(schema, str):
        return schema
    if len(schema) > MAX_GRAMMAR_BYTES:
        raise GrammarInvalid(f"A schema has {len(schema)} characters; at most {MAX_GRAMMAR_BYTES} are possible")
    try:
        found = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise GrammarInvalid(f"The schema is no JSON: {error}") from None
    if isinstance(found, Mapping):
        return cast("Mapping[str, Any]", found)
    if not isinstance(found, bool):
        raise GrammarInvalid(f"A schema is an object, or true or false; found {type(found).__name__}")
    return found
