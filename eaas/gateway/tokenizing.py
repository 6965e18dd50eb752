"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's shapes: what a prompt is to the model, and back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from eaas.gateway.errors import out_of_vocabulary
from eaas.gateway.gateway import Gateway
from eaas.gateway.schema import MAX_MESSAGES, MAX_TOOLS, ChatTemplateSource, Message, Tool

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    model_config = _STRICT

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    # A chat template mostly writes the special tokens itself.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: ChatTemplateSource | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of 'prompt' and 'messages' is needed")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("'add_generation_prompt' and 'continue_final_message' exclude each other")
        return self


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = _STRICT

    model: str | None = None
    tokens: list[int]


class TokenizingRoutes:
    """The tokenizer's routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        wanted, model = await self._gateway.parse(request, TokenizeRequest), self._gateway.model
        if wanted.model is not None:
            self._gateway.require_model(wanted.model)
        if wanted.messages is None:
            special = wanted.add_special_tokens is not False
            tokens = await model.encode_text(wanted.prompt or "", add_special_tokens=special)
        else:
            going_on, begins = bool(wanted.continue_final_message), wanted.add_generation_prompt
            tokens = await model.encode_chat(
                [message.model_dump(exclude_none=True) for message in wanted.messages],
                wanted.chat_template_kwargs,
                tools=[tool.model_dump(exclude_unset=True) for tool in wanted.tools or ()],
                add_generation_prompt=not going_on if begins is None else begins,
                continue_final_message=going_on,
                add_special_tokens=bool(wanted.add_special_tokens),
                must_fit=False,
                template=wanted.chat_template,
            )
        names = await model.names(tokens) if wanted.return_token_strs else None
        shown = {
            "count": len(tokens),
            "max_model_len": model.max_model_len,
            "tokens": tokens,
            "token_strs": names,
        }
        # Millions of tokens take the standard library's encoder a second.
        return Response(msgspec.json.encode(shown), media_type="application/json")

    async def describe(self) -> Response:
        """GET /tokenizer_info: tokenizer_config.json, with the chat template that is used."""
        tokenizer = self._gateway.model.tokenizer
        shown = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokenizer.config,
            "chat_template": tokenizer.chat_template,
        }
        return Response(msgspec.json.encode(shown), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        wanted, model = await self._gateway.parse(request, DetokenizeRequest), self._gateway.model
        if wanted.model is not None:
            self._gateway.require_model(wanted.model)
        wrong = next((token for token in wanted.tokens if not 0 <= token < model.vocab), None)
        if wrong is not None:
            raise out_of_vocabulary(wrong, model.vocab, "tokens")
        return Response(
            msgspec.json.encode({"prompt": await model.decode(wanted.tokens)}), media_type="application/json"
        )


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``."""
    routes = TokenizingRoutes(gateway)
    app.add_api_route("/tokenizer_info", routes.describe, methods=["GET", "HEAD"], response_model=None)
    for path, route, shape in (
        ("/tokenize", routes.tokenize, TokenizeRequest),
        ("/detokenize", routes.detokenize, DetokenizeRequest),
    ):
        body = {"content": {"application/json": {"schema": shape.model_json_schema()}}, "required": True}
        app.add_api_route(
            path, route, methods=["POST"], response_model=None, openapi_extra={"requestBody": body}
        )
