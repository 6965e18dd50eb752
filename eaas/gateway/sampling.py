"""From an API request to the engine's sampling parameters: OpenAI's defaults and token limits."""

from __future__ import annotations

import base64
import re

import numpy as np

from eaas.gateway.errors import ApiError, invalid, out_of_vocabulary, too_long
from eaas.gateway.schema import ChatRequest, CompletionRequest
from eaas.worker.protocol import MAX_TOP_LOGPROBS, ForcedExperts, SamplingParams

_SEEDS = 1 << 64
# Taken as they are; left out, they are OpenAI's defaults in both.
_AS_GIVEN = (
    "cache_salt", "frequency_penalty", "ignore_eos", "min_p", "presence_penalty", "priority", "repetition_penalty",
    "temperature", "top_p",
)  # fmt: skip
_NO_EXPERT = 0xFFFF
# What numpy.save writes of integers, read without evaluating it.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)
_LOGPROB_FIELDS = ("top_logprobs", "logprobs", "prompt_logprobs")


def token_limit(wanted: ChatRequest | CompletionRequest, prompt: int, context: int) -> int:
    """Tokens that a choice may generate, for a prompt and a context of so many tokens. Raises ApiError: the prompt, or
    the prompt with the wanted completion, is over the context."""
    room, limit = context - prompt, wanted.token_limit
    if room < 1:
        found = f"but the prompt has {prompt} tokens, which leaves no room for a completion"
        needed = f"Shorten the prompt to at most {context - 1} tokens."
        raise too_long(context, found, needed, wanted.prompt_field)
    if limit is None:
        limit = min(room, wanted.default_limit or room)
    elif limit > room:
        tokens = f"{prompt + limit} tokens were requested ({prompt} in the prompt, {limit} for the completion)"
        needed = f"Shorten the prompt or ask for at most {room} tokens."
        raise too_long(context, f"but {tokens}", needed, wanted.token_limit_field)
    # A prompt that is shown alone takes a token too: the worker answers with nothing less.
    return max(1, limit)


def settle_logprobs(wanted: ChatRequest | CompletionRequest, *, vocab: int, most: int) -> None:
    """Put the number of likeliest tokens in place of -1, which asks for all `vocab`. Args: most: allowed for each
    token; -1: as many as workers tell. Raises ApiError: more are asked for."""
    allowed = MAX_TOP_LOGPROBS if most < 0 else min(most, MAX_TOP_LOGPROBS)
    for name in _LOGPROB_FIELDS:
        count = getattr(wanted, name, None)
        if count is None or isinstance(count, bool):  # a chat's `logprobs` only says whether
            continue
        asked = vocab if count < 0 else count
        if asked > allowed:
            whole = f"-1 asks for all {vocab} tokens" if count < 0 else f"it asks for {count} tokens"
            message = f"Invalid value for '{name}': {whole}; this server tells at most {allowed} (--max-logprobs)."
            raise invalid(message, param=name)
        setattr(wanted, name, min(asked, vocab))


def sampling_params(
    wanted: ChatRequest | CompletionRequest,
    prompt: int,
    limit: int,
    vocab: int,
    bad_tokens: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """The engine's parameters, with the seed 0 where the client gave none: each prompt then has one drawn for it, so
    that a replay repeats its draws.

    Args: prompt, limit: tokens of the first prompt, and that a choice may generate. vocab: token ids are below it.
    bad_tokens: sequences that are not in the output. Raises ApiError: parameters that cannot hold together."""
    least = wanted.min_tokens or 0
    if least > limit:
        message = f"min_tokens is {least}, over the limit of {limit} tokens. Lower it or raise max_tokens."
        raise invalid(message, param="min_tokens")
    stop_ids, allowed = tuple(wanted.stop_token_ids or ()), tuple(wanted.allowed_token_ids or ())
    for param, tokens in (
        ("stop_token_ids", stop_ids),
        ("allowed_token_ids", allowed),
        ("logit_bias", [token for token, _ in wanted.biases]),
    ):
        for token in tokens:
            if not 0 <= token < vocab:
                raise out_of_vocabulary(token, vocab, param)
    given = {name: getattr(wanted, name) for name in _AS_GIVEN if getattr(wanted, name) is not None}
    return SamplingParams(
        max_tokens=limit,
        min_tokens=least,
        # -1 and 0 both say "no limit".
        top_k=max(0, wanted.top_k or 0),
        seed=(wanted.seed or 0) % _SEEDS,
        logprobs=wanted.top_count,
        stop_token_ids=stop_ids,
        drop_lost_experts=bool(wanted.eaas_drop_lost_experts),
        grammar=wanted.grammar,
        logit_bias=wanted.biases,
        allowed_token_ids=allowed,
        bad_tokens=bad_tokens,
        prompt_logprobs=max(wanted.prompt_count, wanted.echo_count),
        forced=_forced(wanted.force_routed_experts, prompt + limit),
        routed_from=(wanted.routed_experts_prompt_start or 0) if wanted.return_routed_experts else -1,
        **given,
    )


def _forced(given: str | None, most: int) -> ForcedExperts | None:
    if given is None:
        return None
    try:
        file = base64.b64decode(given, validate=True)
    except ValueError as fault:
        raise _unreadable(f"is no base64: {fault}") from None
    header = _NPY.match(file)
    if header is None:
        raise _unreadable("is no .npy file of version 1.0, in C order, of integers with three dimensions")
    kind, (tokens, layers, top_k) = np.dtype(header[1].decode()), map(int, header.groups()[1:])
    wanted, found = tokens * layers * top_k * kind.itemsize, len(file) - header.end()
    if found != wanted:
        raise _unreadable(f"has {found} bytes of experts where its header says {wanted}")
    # Of tokens that there can be.
    held = file[header.end() :][: most * layers * top_k * kind.itemsize]
    experts = np.frombuffer(held, kind)
    outside = experts[(experts < 0) | (experts >= _NO_EXPERT)]
    if outside.size:
        message = f"'force_routed_experts' has expert {outside[0]}, which no model has; the first of a model is 0."
        raise invalid(message, param="force_routed_experts")
    return ForcedExperts(layers, top_k, experts.astype("<u2").tobytes())


def _unreadable(found: str) -> ApiError:
    return invalid(
        f"'force_routed_experts' {found}. It must be base64 of a .npy file, [tokens, MoE layers, top_k], as "
        "'routed_experts' of an answer is.",
        param="force_routed_experts",
    )
