"""POST /v1/chat/completions (and batches of them), /v1/completions and /inference/v1/generate, and what each route that
makes tokens goes through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI, Request, Response

from eaas.gateway.batch_schema import BatchChatRequest
from eaas.gateway.config import GatewayConfig
from eaas.gateway.errors import invalid
from eaas.gateway.gateway import Gateway
from eaas.gateway.openai_format import ChatFormat, CompletionFormat, Format
from eaas.gateway.prompt_scores import MOST_SCORES
from eaas.gateway.sampling import sampling_params, settle_logprobs, token_limit
from eaas.gateway.schema import ChatRequest, CompletionRequest
from eaas.gateway.served_model import ServedModel
from eaas.gateway.stream import EventStream, Exchange, Work
from eaas.gateway.text import MOST_ROUTED_TOKENS, Echo
from eaas.gateway.tokens_format import TokensFormat
from eaas.gateway.tokens_schema import TokensRequest, as_completion
from eaas.gateway.tool_choice import ToolUse, call_grammar, tool_use
from eaas.gateway.tool_format import ToolChatFormat
from eaas.worker.grammar import Grammar, GrammarInvalid, check_schemas


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that has been read and encoded.

    Attributes:
        prompts: Token ids of each prompt.
        grammar: The language of the output, where the route asks for one rather than the client.
        shown_tokens: Special tokens that the format reads in the text.
    """

    wanted: ChatRequest | CompletionRequest
    format: Format
    prompts: Sequence[list[int]]
    grammar: Grammar | None = None
    shown_tokens: frozenset[int] = frozenset()


async def generate(
    gateway: Gateway, request: Request, prepare: Callable[[], Awaitable[Prepared]]
) -> Response:
    """Admit a request, read it, submit it, and answer.

    Raises:
        ApiError: the request was refused, or failed before anything was sent.
    """
    gateway.admit()
    exchange: Exchange | None = None
    response: Response | None = None

    def on_close() -> None:
        gateway.release()
        if exchange is not None:
            gateway.exchanges.pop(exchange.own_id, None)

    try:
        prepared = await prepare()
        bad_tokens = await gateway.model.bad_tokens(prepared.wanted.bad_words or ())
        work = _work(gateway, prepared, bad_tokens)
        gateway.refuse_if_paused()
        gateway.admit_tokens(work)
        exchange = Exchange(
            work=work,
            model=gateway.model,
            pool=gateway.pool,
            metrics=gateway.metrics,
            stall_s=gateway.config.stall_s,
            on_close=on_close,
        )
        gateway.exchanges[exchange.own_id] = exchange
        response = await exchange.answer(request)
        return response
    finally:
        if exchange is None:
            gateway.release()
        elif not isinstance(response, EventStream):
            exchange.close()


def _context(gateway: Gateway) -> int:
    return min(gateway.model.max_model_len, gateway.pool.max_model_len or gateway.model.max_model_len)


def _cut(gateway: Gateway, wanted: ChatRequest | CompletionRequest, prompt: list[int]) -> list[int]:
    tokens = wanted.cut(prompt, _context(gateway))
    if not tokens:
        message = "'truncate_prompt_tokens' leaves nothing of the prompt; ask for at least 1."
        raise invalid(message, param="truncate_prompt_tokens", code="invalid_value")
    return tokens


def _work(gateway: Gateway, prepared: Prepared, bad_tokens: tuple[tuple[int, ...], ...]) -> Work:
    wanted, prompts = prepared.wanted, prepared.prompts
    settle_logprobs(wanted, vocab=gateway.model.vocab, most=gateway.config.max_logprobs)
    context = _context(gateway)
    limits = [token_limit(wanted, len(prompt), context) for prompt in prompts]
    params = sampling_params(wanted, min(limits), gateway.model.vocab)
    if bad_tokens:
        params = msgspec.structs.replace(params, bad_tokens=bad_tokens)
    _check_scores(wanted, prompts, params.prompt_logprobs)
    _check_alternatives(wanted, limits, params.logprobs)
    _check_routing(wanted, prompts, limits)
    if prepared.grammar is not None:
        if params.ignore_eos:
            raise invalid(
                "A call that must be made ends where it is complete: it cannot be asked for with ignore_eos.",
                param="ignore_eos",
                code="invalid_value",
            )
        params = msgspec.structs.replace(params, grammar=prepared.grammar)
    return Work(
        format=prepared.format,
        prompts=prompts,
        limits=limits,
        choices=wanted.choices,
        params=params,
        seeded=wanted.seed is not None,
        stops=tuple(wanted.stop or ()),
        stream=bool(wanted.stream),
        include_usage=wanted.include_usage or gateway.config.enable_force_include_usage,
        usage_stats=wanted.usage_stats or gateway.config.enable_force_include_usage,
        open_end=wanted.token_limit is None,
        return_token_ids=bool(wanted.return_token_ids) or wanted.detokenize is False,
        text_shown=wanted.detokenize is not False,
        stop_shown=bool(wanted.include_stop_str_in_output),
        shown_tokens=prepared.shown_tokens,
        special_shown=wanted.skip_special_tokens is False,
        tokens_by_id=gateway.config.return_tokens_as_token_ids
        if wanted.return_tokens_as_token_ids is None
        else wanted.return_tokens_as_token_ids,
        request_id=wanted.request_id,
        echoes=_echoes(gateway.model, wanted, prompts),
        prompt_counts=(wanted.echo_count, wanted.prompt_count),
    )


def _check_scores(
    wanted: ChatRequest | CompletionRequest, prompts: Sequence[list[int]], likeliest: int
) -> None:
    """Bound what this process would keep of prompts; -1: nothing is told of them."""
    scores = (likeliest + 1) * wanted.choices * sum(map(len, prompts))
    if scores > MOST_SCORES:
        raise invalid(
            f"{scores} log-probabilities of prompts were asked for, counting each choice and each alternative; at most "
            f"{MOST_SCORES} are told at once. Send fewer or shorter prompts, or ask for fewer alternatives.",
            param="prompt_logprobs" if wanted.prompt_count >= 0 else "logprobs",
            code="invalid_value",
        )


def _check_alternatives(
    wanted: ChatRequest | CompletionRequest, limits: Sequence[int], likeliest: int
) -> None:
    """Bound what this process would keep of a whole answer, where more is told of its tokens than OpenAI tells."""
    scores = (likeliest + 1) * wanted.choices * sum(limits)
    if likeliest > GatewayConfig.max_logprobs and not wanted.stream and scores > MOST_SCORES:
        raise invalid(
            f"{scores} log-probabilities could be in the answer, counting each choice and each alternative; at most "
            f"{MOST_SCORES} are told at once. Lower '{wanted.token_limit_field}', or ask for a stream or for fewer.",
            param=wanted.token_limit_field,
            code="invalid_value",
        )


def _check_routing(
    wanted: ChatRequest | CompletionRequest, prompts: Sequence[list[int]], limits: Sequence[int]
) -> None:
    """Bound what this process would keep of the experts of tokens."""
    tokens = wanted.choices * (sum(map(len, prompts)) + sum(limits)) if wanted.return_routed_experts else 0
    if tokens > MOST_ROUTED_TOKENS:
        raise invalid(
            f"The experts of up to {tokens} tokens of prompts and outputs were asked for, counting each choice; at "
            f"most {MOST_ROUTED_TOKENS} are told at once. Send fewer or shorter prompts, or lower "
            f"'{wanted.token_limit_field}'.",
            param="return_routed_experts",
            code="invalid_value",
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


def tools_of(wanted: ChatRequest) -> ToolUse:
    """The tools that the model is shown, and whether it must call one.

    Raises:
        ApiError: ``tool_choice`` makes no sense.
    """
    try:
        return tool_use(wanted.tool_dicts, wanted.tool_choice, wanted.parallel_tool_calls)
    except ValueError as error:
        raise invalid(
            f"Invalid value for 'tool_choice': {error}.", param="tool_choice", code="invalid_value"
        ) from None


def grammar_of(model: ServedModel, wanted: ChatRequest, use: ToolUse) -> Grammar | None:
    """The language of the calls that the model must make; None where it is free.

    Raises:
        ApiError: the tools' schemas are over a limit, or the model would never hear of its tools.
    """
    if use.must_call:
        try:
            check_schemas([tool["function"].get("parameters") for tool in use.shown])
            return Grammar("lark", call_grammar(use, model.call_style, model.call_marks))
        except GrammarInvalid as error:
            raise invalid(
                f"Invalid value for 'tools': {error}", param="tools", code="invalid_value"
            ) from None
    shows = model.shows_tools if wanted.chat_template is None else "tools" in wanted.chat_template
    if use.shown and not shows:
        raise invalid(
            "This model's chat template does not tell it of tools, so it cannot choose to call one. Leave 'tools' out, "
            "or set 'tool_choice' to 'required' or to a function: then the answer is a call in any case.",
            param="tools",
            code="unsupported_value",
        )
    return None


async def encode_conversation(
    model: ServedModel, wanted: ChatRequest, use: ToolUse, *, must_fit: bool = True
) -> list[int]:
    """The prompt of a chat request.

    Args:
        must_fit: It is to be computed: one that is too long is refused, unless it is to be cut.

    Raises:
        ApiError: the chat template refuses it.
    """
    going_on = bool(wanted.continue_final_message)
    return await model.encode_chat(
        [message.model_dump(exclude_none=True) for message in wanted.messages],
        wanted.template_options,
        tools=use.shown,
        add_generation_prompt=wanted.begins_turn,
        continue_final_message=going_on,
        add_special_tokens=bool(wanted.add_special_tokens),
        field=wanted.prompt_field,
        template=wanted.chat_template,
        must_fit=must_fit and wanted.truncate_prompt_tokens is None,
    )


class GenerationRoutes:
    """The routes of completions of each kind."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        gateway = self._gateway

        async def prepare() -> Prepared:
            wanted, model = await gateway.parse(request, ChatRequest), gateway.model
            gateway.require_model(wanted.model)
            use = tools_of(wanted)
            grammar = grammar_of(model, wanted, use)
            prompt = _cut(gateway, wanted, await encode_conversation(model, wanted, use))
            prompt_ids = prompt if wanted.return_token_ids else None
            if not use.shown:
                return Prepared(wanted=wanted, format=ChatFormat(prompt_ids), prompts=[prompt])
            return Prepared(
                wanted=wanted,
                format=ToolChatFormat(model.call_style, prompt_ids),
                prompts=[prompt],
                grammar=grammar,
                shown_tokens=model.call_tokens,
            )

        return await gateway.counted("chat", generate(gateway, request, prepare))

    async def chat_batch(self, request: Request) -> Response:
        """POST /v1/chat/completions/batch: a choice for each conversation, in their order."""
        gateway = self._gateway

        async def prepare() -> Prepared:
            chats = (await gateway.parse(request, BatchChatRequest)).chats()
            gateway.require_model(chats[0].model)
            prompts = [
                _cut(gateway, wanted, await encode_conversation(gateway.model, wanted, tools_of(wanted)))
                for wanted in chats
            ]
            return Prepared(wanted=chats[0], format=ChatFormat(), prompts=prompts)

        return await gateway.counted("chat", generate(gateway, request, prepare))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        gateway = self._gateway

        async def prepare() -> Prepared:
            wanted = await gateway.parse(request, CompletionRequest)
            gateway.require_model(wanted.model)
            encoded = await gateway.model.encode_prompts(
                wanted.prompt,
                add_special_tokens=wanted.add_special_tokens is not False,
                must_fit=wanted.truncate_prompt_tokens is None,
            )
            prompts = [_cut(gateway, wanted, prompt) for prompt in encoded]
            shape = CompletionFormat(prompts if wanted.return_token_ids else None, wanted.choices)
            return Prepared(wanted=wanted, format=shape, prompts=prompts)

        return await gateway.counted("completions", generate(gateway, request, prepare))

    async def invoke(self, request: Request) -> Response:
        """POST /invocations: a chat where there are messages, else a completion."""
        with self._gateway.reading():
            body = await self._gateway.body_of(request)
        try:
            chats = "messages" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            chats = False  # Who reads it whole says what is wrong.
        return await (self.chat if chats else self.complete)(request)

    async def complete_tokens(self, request: Request) -> Response:
        """POST /inference/v1/generate."""
        gateway = self._gateway

        async def prepare() -> Prepared:
            given = await gateway.parse(request, TokensRequest)
            gateway.require_model(given.model)
            wanted = as_completion(given)
            prompts = await gateway.model.encode_prompts(wanted.prompt, field="token_ids")
            prompts = [_cut(gateway, wanted, prompt) for prompt in prompts]
            shape = TokensFormat(prompts[0] if given.return_token_ids else None)
            return Prepared(wanted=wanted, format=shape, prompts=prompts)

        return await gateway.counted("generate", generate(gateway, request, prepare))


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``."""
    routes = GenerationRoutes(gateway)
    app.add_api_route("/invocations", routes.invoke, methods=["POST"], response_model=None)
    # Bodies are read and checked here rather than by FastAPI: limits come first, parsing once.
    for path, route, shape in (
        ("/v1/chat/completions", routes.chat, ChatRequest),
        ("/v1/chat/completions/batch", routes.chat_batch, BatchChatRequest),
        ("/v1/completions", routes.complete, CompletionRequest),
        ("/inference/v1/generate", routes.complete_tokens, TokensRequest),
    ):
        body = {"content": {"application/json": {"schema": shape.model_json_schema()}}, "required": True}
        app.add_api_route(
            path, route, methods=["POST"], response_model=None, openapi_extra={"requestBody": body}
        )
