"""POST /v1/responses and the cancelling of one in progress. Nothing is stored."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from eaas.gateway.errors import ApiError, ErrorReply
from eaas.gateway.gateway import Gateway
from eaas.gateway.responses_format import ResponsesFormat
from eaas.gateway.responses_schema import ResponsesRequest, as_chat
from eaas.gateway.routes import Prepared, encode_conversation, generate, grammar_of, tools_of


class ResponseRoutes:
    """The routes under /v1/responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        gateway = self._gateway

        async def prepare() -> Prepared:
            given, model = await gateway.parse(request, ResponsesRequest), gateway.model
            gateway.require_model(given.model)
            wanted = as_chat(given)
            use = tools_of(wanted)
            grammar = grammar_of(model, wanted, use)
            prompt = await encode_conversation(model, wanted, use)
            style = model.call_style if use.shown else None
            return Prepared(
                wanted=wanted,
                format=ResponsesFormat(_said(given), style),
                prompts=[prompt],
                grammar=grammar,
                shown_tokens=model.call_tokens if style else frozenset(),
            )

        return await gateway.counted("responses", generate(gateway, request, prepare))

    async def cancel(self, response_id: str) -> Response:
        """POST /v1/responses/{response_id}/cancel: the response ends with what it has said so far."""
        running = self._gateway.exchanges.values()
        mine = response_id.startswith(ResponsesFormat.prefix)
        exchange = next((exchange for exchange in running if mine and exchange.id == response_id), None)
        if exchange is None:
            raise _not_found(response_id)
        exchange.cancel()
        return Response(exchange.body(), media_type="application/json")

    async def stored(self, response_id: str) -> Response:
        """GET and DELETE /v1/responses/{response_id}, and its input items: there is none."""
        raise _not_found(response_id)


def _not_found(response_id: str) -> ApiError:
    message = (
        f"No response '{response_id[:128]}' is in progress here, and none is stored: what was said is in the answer to "
        "the request that asked for it."
    )
    return ApiError(ErrorReply(status=404, message=message, param="response_id", code="response_not_found"))


def _said(given: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request, with OpenAI's defaults."""
    text = given.text.model_dump(by_alias=True, exclude_none=True) if given.text else {}
    return {
        "background": False,
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": given.reasoning.effort if given.reasoning else None, "summary": None},
        "store": False,
        "temperature": 1.0 if given.temperature is None else given.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": given.tool_choice or "auto",
        "tools": [{"strict": None, **tool.model_dump(exclude_unset=True)} for tool in given.tools or ()],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": 1.0 if given.top_p is None else given.top_p,
        "truncation": "disabled",
        "user": given.user,
    }


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``."""
    routes = ResponseRoutes(gateway)
    schema = ResponsesRequest.model_json_schema()
    body = {"content": {"application/json": {"schema": schema}}, "required": True}
    path = "/v1/responses"
    app.add_api_route(
        path, routes.create, methods=["POST"], response_model=None, openapi_extra={"requestBody": body}
    )
    one = path + "/{response_id}"
    app.add_api_route(f"{one}/cancel", routes.cancel, methods=["POST"], response_model=None)
    app.add_api_route(one, routes.stored, methods=["GET", "DELETE"], response_model=None)
    app.add_api_route(f"{one}/input_items", routes.stored, methods=["GET"], response_model=None)
