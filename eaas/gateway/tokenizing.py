"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's shapes: what a prompt is to the model, and back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from eaas.gateway.constraints import Strict
from eaas.gateway.gateway import Gateway
from eaas.gateway.routes import add_json_route
from eaas.gateway.schema import MAX_MESSAGES, Conversation, Message


class TokenizeRequest(Conversation):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of 'prompt' and 'messages' is needed")
        return self


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _json(shown: dict[str, Any]) -> Response:
    # Millions of tokens take the standard library's encoder a second.
    return Response(msgspec.json.encode(shown), media_type="application/json")


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``."""

    async def tokenize(request: Request) -> Response:
        """POST /tokenize."""
        with gateway.reading():
            wanted, served = await gateway.parse(request, TokenizeRequest)
            model = served.model
            if wanted.messages is None:
                special = wanted.add_special_tokens is not False
                tokens = await model.encode_text(wanted.prompt or "", add_special_tokens=special)
            else:
                tools = wanted.tool_dicts
                tokens = await model.encode_chat(wanted.messages, wanted, tools=tools, must_fit=False)
            names = await model.names(tokens) if wanted.return_token_strs else None
        return _json({"count": len(tokens), "max_model_len": served.context, "tokens": tokens, "token_strs": names})

    async def detokenize(request: Request) -> Response:
        """POST /detokenize."""
        with gateway.reading():
            wanted, served = await gateway.parse(request, DetokenizeRequest)
            served.model.check_tokens(wanted.tokens, "tokens")
            text = await served.model.decode(wanted.tokens)
        return _json({"prompt": text})

    async def describe(request: Request) -> Response:
        """GET /tokenizer_info?model=NAME: tokenizer_config.json, with the chat template that is used."""
        tokenizer = gateway.find(request.query_params.get("model")).model.tokenizer
        known = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config}
        return _json({**known, "chat_template": tokenizer.chat_template})

    app.add_api_route("/tokenizer_info", describe, methods=["GET", "HEAD"], response_model=None)
    add_json_route(app, "/tokenize", tokenize, TokenizeRequest, "tokenize")
    add_json_route(app, "/detokenize", detokenize, DetokenizeRequest, "detokenize")
