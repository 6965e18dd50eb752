"""The routes that make tokens, of every API, and what each request goes through; a table at the end lists them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import JSONResponse

from eaas.gateway import messages, responses
from eaas.gateway.config import GatewayConfig
from eaas.gateway.errors import invalid, wrong_field
from eaas.gateway.event_ids import Identity, Seal, Seen
from eaas.gateway.formats import Format
from eaas.gateway.gateway import Gateway, Served
from eaas.gateway.jobs import Jobs
from eaas.gateway.logprobs import MOST_SCORES
from eaas.gateway.messages import CountTokensRequest, MessagesFormat, MessagesRequest
from eaas.gateway.openai_format import ChatFormat, CompletionFormat
from eaas.gateway.output_reader import Reading
from eaas.gateway.protection import key_name_of, share_of
from eaas.gateway.responses import ResponsesFormat, ResponsesRequest
from eaas.gateway.sampling import sampling_params, settle_logprobs, token_limit
from eaas.gateway.schema import BatchChatRequest, ChatRequest, CompletionRequest, StreamOptions
from eaas.gateway.served_model import ServedModel
from eaas.gateway.stream import EventStream, Exchange, Work
from eaas.gateway.text import MOST_ROUTED_TOKENS, Echo
from eaas.gateway.tokens import TokensFormat, TokensRequest, as_completion
from eaas.gateway.tool_calls import ToolUse, after_thoughts, call_grammar, tool_use
from eaas.model.chat import ASKED_AT
from eaas.worker.grammar import Grammar, GrammarInvalid, check_schemas
from eaas.worker.protocol import SamplingParams, Share


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that has been read and encoded.

    Attributes:
        prompts: Token ids of each prompt.
        grammar: The language of the output, where it is another than the client asked for.
        shown_tokens: Special tokens that the format reads in the text.
    """

    wanted: ChatRequest | CompletionRequest
    format: Format
    prompts: Sequence[list[int]]
    grammar: Grammar | None = None
    shown_tokens: frozenset[int] = frozenset()


Prepare = Callable[[Served, Any], Awaitable[Prepared]]
Route = Callable[[Request], Awaitable[Response]]


async def generate(
    gateway: Gateway, request: Request, shape: type[BaseModel], prepare: Prepare, kept: Jobs
) -> Response:
    """Admit a request, read it as of this shape, submit it, and answer. Raises ApiError: the request was refused, or
    failed before anything was sent."""
    share = share_of(request.scope)
    gateway.admit(share)
    served: Served | None = None
    exchange: Exchange | None = None
    response: Response | None = None

    def on_close() -> None:
        if served is not None:
            served.release(share)
        gateway.release(share)
        if exchange is not None:
            gateway.exchanges.pop(exchange.own_id, None)

    try:
        asked, found, seal = await _asked(gateway, request, shape)
        found.admit(share)
        served = found
        seen = _seen(gateway, request, asked, seal)
        drawn = Identity(drawn=uuid.uuid4().hex, created=int(time.time()))
        identity = drawn if seen is None else seen.identity
        if isinstance(asked, ResponsesRequest):
            await kept.prepare(request, asked, identity)
        work = await work_of(served, prepare, asked, share, identity.created)
        if isinstance(asked, ResponsesRequest) and asked.background:
            response = await kept.create(request, asked, identity, served, work)
            return response
        gateway.refuse_if_paused()
        served.admit_tokens(work)
        running = () if seen is None else gateway.exchanges.values()
        before = [one for one in running if one.identity == identity and one.seal == seal]
        exchange = Exchange(
            work,
            served.model,
            served.pool,
            identity,
            on_close=on_close,
            seal=seal if work.wanted.stream and gateway.config.event_ids else None,
            seen=seen,
        )
        gateway.exchanges[exchange.own_id] = exchange
        if isinstance(asked, ResponsesRequest) and asked.store:
            exchange.keep = kept.keeper(request, asked, served, exchange)
        response = await exchange.answer(request, gateway.config.stall_s, before)
        return response
    finally:
        if exchange is None:
            on_close()
        elif not isinstance(response, EventStream):
            exchange.close()


async def _asked(gateway: Gateway, request: Request, shape: type[BaseModel]) -> tuple[BaseModel, Served, Seal]:
    """What a request asks, of which model, and what makes ids of its events those of no other."""
    body, name, path = await gateway.body_of(request), key_name_of(request.scope), request.scope["path"]
    asked, served = await gateway.parse(request, shape, identified=True)
    return asked, served, Seal.of(gateway.resume_key, name, path, served.model.fingerprint, body)


def _seen(gateway: Gateway, request: Request, asked: BaseModel, seal: Seal) -> Seen | None:
    """What the client has seen of a stream that it goes on with; None: it begins one."""
    id = request.headers.get("last-event-id")
    if id is None:
        return None
    if not getattr(asked, "stream", None) or not gateway.config.event_ids:
        found = "This request asks for no stream" if gateway.config.event_ids else "Events here have no ids"
        raise invalid(f"{found}: send it without the header Last-Event-ID.", param="last-event-id")
    return seal.read(id)


async def work_of(served: Served, prepare: Prepare, asked: Any, share: Share, created: int) -> Work:
    """What a request of that Unix time comes down to. Raises ApiError: it cannot be served as it stands."""
    ASKED_AT.set(created)
    prepared, model = await prepare(served, asked), served.model
    bad_tokens = await model.bad_tokens(prepared.wanted.bad_words or ())
    wanted, prompts, config = prepared.wanted, prepared.prompts, served.config
    settle_logprobs(wanted, vocab=model.vocab, most=config.max_logprobs)
    context = served.context
    limits = [token_limit(wanted, len(prompt), context) for prompt in prompts]
    params = sampling_params(wanted, len(prompts[0]), min(limits), model.vocab, bad_tokens)
    # It may be megabytes, which the parameters have.
    wanted.force_routed_experts = None
    _refuse_too_much(wanted, prompts, limits, params)
    if prepared.grammar is not None:
        if params.ignore_eos:
            raise invalid(
                "A call that must be made ends where it is complete: it cannot be asked for with ignore_eos.",
                param="ignore_eos",
            )
        params = msgspec.structs.replace(params, grammar=prepared.grammar)
    usage, forced = wanted.stream_options or StreamOptions(), config.enable_force_include_usage
    by_id = wanted.return_tokens_as_token_ids
    return Work(
        wanted=wanted,
        format=prepared.format,
        prompts=prompts,
        limits=limits,
        params=params,
        include_usage=bool(usage.include_usage) or forced,
        usage_stats=bool(usage.include_usage and usage.continuous_usage_stats) or forced,
        shown_tokens=prepared.shown_tokens,
        tokens_by_id=config.return_tokens_as_token_ids if by_id is None else by_id,
        echoes=_echoes(model, wanted, prompts),
        share=share,
    )


def _refuse_too_much(
    wanted: ChatRequest | CompletionRequest, prompts: Sequence[list[int]], limits: Sequence[int], params: SamplingParams
) -> None:
    """Bound what this process would keep of one answer: log-probabilities and experts of tokens."""
    prompt_tokens, output_tokens = (wanted.choices * n for n in (sum(map(len, prompts)), sum(limits)))
    scores, limit = (params.prompt_logprobs + 1) * prompt_tokens, wanted.token_limit_field
    if scores > MOST_SCORES:
        raise invalid(
            f"{scores} log-probabilities of prompts were asked for, counting each choice and each alternative; at most "
            f"{MOST_SCORES} are told at once. Send fewer or shorter prompts, or ask for fewer alternatives.",
            param="prompt_logprobs" if wanted.prompt_count >= 0 else "logprobs",
        )
    scores = (params.logprobs + 1) * output_tokens
    # As many as OpenAI tells are told of a whole answer in any case.
    if params.logprobs > GatewayConfig.max_logprobs and not wanted.stream and scores > MOST_SCORES:
        raise invalid(
            f"{scores} log-probabilities could be in the answer, counting each choice and each alternative; at most "
            f"{MOST_SCORES} are told at once. Lower '{limit}', or ask for a stream or for fewer.",
            param=limit,
        )
    if params.forced is not None and wanted.choices * len(prompts) > 1:
        raise invalid(
            f"{wanted.choices * len(prompts)} choices were asked for; the experts that are forced are those of one. "
            "Ask for each by itself.",
            param="force_routed_experts",
        )
    tokens = prompt_tokens + output_tokens
    if wanted.return_routed_experts and tokens > MOST_ROUTED_TOKENS:
        raise invalid(
            f"The experts of up to {tokens} tokens of prompts and outputs were asked for, counting each choice; at "
            f"most {MOST_ROUTED_TOKENS} are told at once. Send fewer or shorter prompts, or lower '{limit}'.",
            param="return_routed_experts",
        )


def _echoes(
    model: ServedModel, wanted: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]
) -> list[Echo] | None:
    if not wanted.echo:
        return None
    if isinstance(wanted, ChatRequest):
        last = wanted.messages[-1]
        # Where no turn is opened for the assistant, the answer is of the last message's role.
        same = last.role == "assistant" or not wanted.begins_turn
        return [Echo(last.content, alone=False)] if same and last.content else None
    texts = (
        given
        if isinstance(given, str) and wanted.truncate_prompt_tokens is None
        else model.tokenizer.decode(tokens, skip_special=False)
        for given, tokens in zip(wanted.prompt, prompts, strict=True)
    )
    return [Echo(text, wanted.max_tokens == 0) for text in texts]


# -- conversations, in whichever API's words


def _tools_of(wanted: ChatRequest) -> ToolUse:
    try:
        return tool_use(wanted.tool_dicts, wanted.tool_choice, wanted.parallel_tool_calls)
    except ValueError as error:
        raise wrong_field("tool_choice", str(error)) from None


def _grammar_of(model: ServedModel, wanted: ChatRequest, use: ToolUse) -> Grammar | None:
    """The language of the calls that the model must make; None where it is free."""
    if use.must_call:
        try:
            check_schemas([tool["function"].get("parameters") for tool in use.shown])
            return Grammar("lark", call_grammar(use, model.call_style, model.marks))
        except GrammarInvalid as error:
            raise invalid(f"Invalid value for 'tools': {error}", param="tools") from None
    shows = model.shows_tools if wanted.chat_template is None else "tools" in wanted.chat_template
    if use.shown and not shows:
        raise invalid(
            "This model's chat template does not tell it of tools, so it cannot choose to call one. Leave 'tools' out, "
            "or set 'tool_choice' to 'required' or to a function: then the answer is a call in any case.",
            param="tools",
            code="unsupported_value",
        )
    return None


async def _encode(served: Served, wanted: ChatRequest, use: ToolUse, *, must_fit: bool = True) -> list[int]:
    """The prompt of a conversation. Args: must_fit: it is to be computed: one that is too long is refused, unless it is
    to be cut."""
    must_fit = must_fit and wanted.truncate_prompt_tokens is None
    prompt = await served.model.encode_chat(wanted.messages, wanted, tools=use.shown, must_fit=must_fit)
    return _cut(served, wanted, prompt)


def _cut(served: Served, wanted: ChatRequest | CompletionRequest, prompt: list[int]) -> list[int]:
    """The prompt's tokens, as many as `truncate_prompt_tokens` says: the last ones, or the first."""
    most = wanted.truncate_prompt_tokens
    if most is None:
        return prompt
    most = served.context - 1 if most < 0 else most
    tokens = prompt[:most] if wanted.truncation_side == "right" else prompt[max(0, len(prompt) - most) :]
    if not tokens:
        message = "'truncate_prompt_tokens' leaves nothing of the prompt; ask for at least 1."
        raise invalid(message, param="truncate_prompt_tokens")
    return tokens


def _prepared(
    model: ServedModel,
    wanted: ChatRequest,
    use: ToolUse,
    prompts: list[list[int]],
    calls: Grammar | None,
    format_of: Callable[[Reading | None, list[int]], Format],
) -> Prepared:
    """Prepare conversations. Args: calls: the language of those that must be made. format_of: given how outputs are
    read, and the first prompt."""
    shown = wanted.include_reasoning is not False
    reading, *others = (model.reading(one, use, thinks=not wanted.echo, shown=shown) for one in prompts)
    if any(other != reading for other in others):
        raise wrong_field("messages", "only some of them go on with a thought; send these in another batch")
    grammar = calls or wanted.grammar
    if grammar is not None and reading is not None and reading.thoughts is not None:
        thoughts, thinking = reading.thoughts, reading.thinking
        try:
            calls = after_thoughts(grammar, thoughts, model.marks, thinking=thinking, calls=calls is not None)
        except GrammarInvalid as error:
            message = "The output's language is too large with thoughts before it; make it smaller"
            raise invalid(f"{message}. {error}.") from None
        if calls is None:
            # What must be said is said at once.
            calls, reading = grammar, replace(reading, thoughts=None)
    return Prepared(
        wanted=wanted,
        format=format_of(reading, prompts[0]),
        prompts=prompts,
        grammar=calls,
        shown_tokens=model.shown_tokens(reading),
    )


async def _conversation(
    served: Served, wanted: ChatRequest, format_of: Callable[[Reading | None, list[int]], Format]
) -> Prepared:
    use = _tools_of(wanted)
    calls = _grammar_of(served.model, wanted, use)
    return _prepared(served.model, wanted, use, [await _encode(served, wanted, use)], calls, format_of)


# -- what the table names: how each kind of request is prepared


async def chat(served: Served, wanted: ChatRequest) -> Prepared:
    """A chat."""
    shows_ids = bool(wanted.return_token_ids)
    return await _conversation(
        served, wanted, lambda reading, prompt: ChatFormat(reading, prompt if shows_ids else None)
    )


async def chat_batch(served: Served, given: BatchChatRequest) -> Prepared:
    """Several chats: a choice for each, in their order."""
    chats = given.chats()
    prompts = [await _encode(served, wanted, _tools_of(wanted)) for wanted in chats]
    return _prepared(served.model, chats[0], ToolUse(), prompts, None, lambda reading, _: ChatFormat(reading))


async def create_response(served: Served, given: ResponsesRequest) -> Prepared:
    """A response in OpenAI's newer shape."""
    wanted = responses.as_chat(given)
    said = responses.repeated(given, wanted)
    return await _conversation(served, wanted, lambda reading, _: ResponsesFormat(reading, said))


async def create_message(served: Served, given: MessagesRequest) -> Prepared:
    """A message in Anthropic's shape."""
    wanted = messages.as_chat(given)
    if given.thinking is not None and given.thinking.type == "enabled" and served.model.thought_style is None:
        raise wrong_field("thinking", "this model does not think aloud; leave it out, or use type 'disabled'")
    return await _conversation(
        served, wanted, lambda reading, prompt: MessagesFormat(reading, prompt_tokens=len(prompt))
    )


async def complete(served: Served, wanted: CompletionRequest) -> Prepared:
    """A completion of each of some prompts."""
    encoded = await served.model.encode_prompts(
        wanted.prompt,
        add_special_tokens=wanted.add_special_tokens is not False,
        must_fit=wanted.truncate_prompt_tokens is None,
    )
    prompts = [_cut(served, wanted, prompt) for prompt in encoded]
    shape = CompletionFormat(prompts if wanted.return_token_ids else None, wanted.choices)
    return Prepared(wanted=wanted, format=shape, prompts=prompts)


async def complete_tokens(served: Served, given: TokensRequest) -> Prepared:
    """A completion of token ids."""
    wanted = as_completion(given)
    (prompt,) = await served.model.encode_prompts(wanted.prompt, field="token_ids")
    prompt = _cut(served, wanted, prompt)
    shape = TokensFormat(prompt if given.return_token_ids else None)
    return Prepared(wanted=wanted, format=shape, prompts=[prompt])


# Of each route its path, the name that its requests are counted under, the shape of its body, and what prepares it.
ROUTES: Sequence[tuple[str, str, type[BaseModel], Prepare]] = (
    ("/v1/chat/completions", "chat", ChatRequest, chat),
    ("/v1/chat/completions/batch", "chat", BatchChatRequest, chat_batch),
    ("/v1/completions", "completions", CompletionRequest, complete),
    ("/v1/responses", "responses", ResponsesRequest, create_response),
    (messages.PATH, "messages", MessagesRequest, create_message),
    ("/inference/v1/generate", "generate", TokensRequest, complete_tokens),
)


class _RawRoute(APIRoute):
    """A route that is given the request as it is: what FastAPI does before and after would cost as much as ours."""

    def get_route_handler(self) -> Route:
        return self.endpoint


def add_json_route(app: FastAPI, path: str, route: Route, shape: type[BaseModel], name: str) -> None:
    """Serve a POST whose body is described as of this shape, and read and checked by the route rather than by FastAPI:
    limits come first, parsing once."""
    extra = {"requestBody": {"content": {"application/json": {"schema": shape}}, "required": True}}
    told = {"response_model": None, "name": name, "openapi_extra": extra}
    app.router.add_api_route(path, route, methods=["POST"], route_class_override=_RawRoute, **told)


def describe(app: FastAPI) -> dict[str, Any]:
    """The routes as OpenAPI has them. Schemas of bodies are made when somebody asks: they would double a start."""
    for route in app.routes:
        body = (getattr(route, "openapi_extra", None) or {}).get("requestBody")
        described = body["content"]["application/json"] if body else {}
        if isinstance(shape := described.get("schema"), type):
            described["schema"] = shape.model_json_schema()
    return FastAPI.openapi(app)


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``, and what goes with them."""
    kept = Jobs(gateway, lambda served, *of: work_of(served, create_response, *of))

    def route_of(counted_as: str, shape: type[BaseModel], prepare: Prepare) -> Route:
        async def route(request: Request) -> Response:
            return await gateway.counted(counted_as, request, generate(gateway, request, shape, prepare, kept))

        route.__doc__ = prepare.__doc__
        return route

    routes: dict[str, Route] = {}
    for path, counted_as, shape, prepare in ROUTES:
        routes[path] = route_of(counted_as, shape, prepare)
        add_json_route(app, path, routes[path], shape, prepare.__name__)

    async def invoke(request: Request) -> Response:
        """POST /invocations: a chat where there are messages, else a completion."""
        with gateway.reading():
            body = await gateway.body_of(request)
        try:
            chats = "messages" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            chats = False  # Who reads it whole says what is wrong.
        return await routes["/v1/chat/completions" if chats else "/v1/completions"](request)

    async def count_tokens(request: Request) -> Response:
        """POST /v1/messages/count_tokens: how long the prompt would be."""
        with gateway.reading():
            given, served = await gateway.parse(request, CountTokensRequest)
            wanted = messages.as_chat(given)
            prompt = await _encode(served, wanted, _tools_of(wanted), must_fit=False)
        return JSONResponse({"input_tokens": len(prompt)})

    async def cancel(response_id: str, request: Request) -> Response:
        """POST /v1/responses/{response_id}/cancel: the response ends with what it has said so far."""
        running, key_name = gateway.exchanges.values(), key_name_of(request.scope)
        mine = (x for x in running if x.id == response_id and x.key_name == key_name and not x.in_background)
        exchange = next(mine, None) if response_id.startswith(ResponsesFormat.prefix) else None
        if exchange is None:
            return await kept.cancel(response_id, request)
        exchange.cancel()
        return Response(exchange.body(), media_type="application/json")

    app.add_api_route("/invocations", invoke, methods=["POST"], response_model=None)
    add_json_route(app, f"{messages.PATH}/count_tokens", count_tokens, CountTokensRequest, "count_tokens")
    one = "/v1/responses/{response_id}"
    app.add_api_route(f"{one}/cancel", cancel, methods=["POST"], response_model=None)
    app.add_api_route(one, kept.get, methods=["GET"], response_model=None)
    app.add_api_route(one, kept.delete, methods=["DELETE"], response_model=None)
    app.add_api_route(f"{one}/input_items", kept.list_input, methods=["GET"], response_model=None)
