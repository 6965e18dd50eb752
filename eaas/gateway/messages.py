"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from eaas.gateway.gateway import Gateway
from eaas.gateway.messages_format import PATH, MessagesFormat
from eaas.gateway.messages_schema import CountTokensRequest, MessagesRequest, as_chat
from eaas.gateway.routes import Prepared, encode_conversation, generate, grammar_of, tools_of


class MessageRoutes:
    """The routes under /v1/messages."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""
        gateway = self._gateway

        async def prepare() -> Prepared:
            given, model = await gateway.parse(request, MessagesRequest), gateway.model
            gateway.require_model(given.model)
            wanted = as_chat(given)
            use = tools_of(wanted)
            grammar = grammar_of(model, wanted, use)
            prompt = await encode_conversation(model, wanted, use)
            style = model.call_style if use.shown else None
            return Prepared(
                wanted=wanted,
                format=MessagesFormat(len(prompt), style),
                prompts=[prompt],
                grammar=grammar,
                shown_tokens=model.call_tokens if style else frozenset(),
            )

        return await gateway.counted("messages", generate(gateway, request, prepare))

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: how long the prompt would be."""
        gateway = self._gateway
        with gateway.reading():
            given = await gateway.parse(request, CountTokensRequest)
            gateway.require_model(given.model)
            wanted = as_chat(given)
            prompt = await encode_conversation(gateway.model, wanted, tools_of(wanted), must_fit=False)
        return JSONResponse({"input_tokens": len(prompt)})


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``."""
    routes = MessageRoutes(gateway)
    for path, route, shape in (
        (PATH, routes.create, MessagesRequest),
        (f"{PATH}/count_tokens", routes.count, CountTokensRequest),
    ):
        body = {"content": {"application/json": {"schema": shape.model_json_schema()}}, "required": True}
        app.add_api_route(
            path, route, methods=["POST"], response_model=None, openapi_extra={"requestBody": body}
        )
