"""Every error that a client can see, in OpenAI's shape: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from eaas.worker.protocol import Failed

INVALID_REQUEST = "invalid_request_error"
OVERLOADED = "overloaded_error"
SERVER_ERROR = "server_error"
# However long it may take: a client looks again after that.
_MOST_AFTER_S = 600.0

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class ErrorReply:
    """What one failure looks like to the client.

    Attributes:
        status: HTTP status; inside a stream only the body is sent, since the status has gone out already.
        kind: OpenAI's ``type``.
        code: Machine-readable reason, or None.
        param: Name of the request field at fault, or None.
        retry_after_s: Seconds for the Retry-After header; None sends no header.
    """

    status: int
    message: str
    kind: str = INVALID_REQUEST
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON object, ready for a response body or a stream event."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def all_headers(self) -> dict[str, str]:
        """Headers of the response, Retry-After included."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers


class ApiError(Exception):
    """Raised anywhere in the gateway to answer a request with ``reply``."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


def invalid(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400: the request cannot be served as it stands, and sending it again will not help."""
    return ApiError(ErrorReply(status=400, message=message, param=param, code=code))


def wrong_field(field: str, reason: str) -> ApiError:
    """A 400 for the value of one field."""
    return invalid(f"Invalid value for '{field}': {reason}.", param=field)


def too_long(limit: int, found: str, needed: str, param: str) -> ApiError:
    """A 400 for what is over the context of so many tokens."""
    message = f"This model's maximum context length is {limit} tokens, {found}. {needed}"
    return invalid(message, param=param, code="context_length_exceeded")


def out_of_vocabulary(token: int, vocab: int, param: str) -> ApiError:
    """A 400 for the id of a token that there is none of; `vocab` is how many there are."""
    message = f"Token {token} is out of vocabulary, which has {vocab} tokens; their ids are 0 to {vocab - 1}."
    return invalid(message, param=param)


def unknown_model(name: str, served: Iterable[str]) -> ApiError:
    """A 404 for a model name that this gateway does not serve. Args: served: those that it does."""
    others = ", ".join(f"`{other}`" for other in served) or "none just now"
    message = f"The model `{name}` does not exist here. This server has {others}."
    return ApiError(ErrorReply(status=404, message=message, param="model", code="model_not_found"))


def unavailable(message: str, *, after_s: float, code: str = "service_unavailable") -> ApiError:
    """A 503 that the client may send again. Args: after_s: when what is missing is expected back."""
    return _later(503, message, code, after_s)


def full(message: str, *, after_s: float, code: str = "too_many_requests") -> ApiError:
    """A 429: what waits is bounded, and the bound is reached. Args: after_s: when a place is expected to be free."""
    return _later(429, message, code, after_s)


def _later(status: int, message: str, code: str, after_s: float) -> ApiError:
    # The header is of whole seconds.
    after = math.ceil(min(max(after_s, 1.0), _MOST_AFTER_S))
    return ApiError(ErrorReply(status=status, message=message, kind=OVERLOADED, code=code, retry_after_s=after))


def internal(message: str, *, code: str = "internal_error") -> ApiError:
    """A 500: a fault of the server that a retry may not cure."""
    return ApiError(ErrorReply(status=500, message=message, kind=SERVER_ERROR, code=code))


def checked(shape: type[R], given: bytes | Mapping[str, Any], names: Mapping[str, str] | None = None) -> R:
    """What a client sent, as a request of this shape. Raises ApiError: 400 for the first of pydantic's findings, which
    names the field.

    Args: given: JSON, or its fields. names: what the client calls a field, where that differs; "a.b" where it wrote it
    inside of another, and then nothing further inside is named."""
    try:
        return shape.model_validate_json(given) if isinstance(given, bytes) else shape.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "extra_forbidden":
            field, known = first["loc"][0], ", ".join(shape.model_fields)
            message = f"There is no field '{field}' here; known are {known}."
            raise invalid(message, param=str(field), code="unknown_parameter") from None
        raise _found(first["type"], first["msg"], first["loc"], names or {}) from None


_QUOTED = re.compile(r"'(\w+)'")
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_UNION_ARMS = frozenset({"str", "int", "float", "bool", "list"})


def _found(kind: str, reason: str, place: tuple[int | str, ...], names: Mapping[str, str]) -> ApiError:
    if kind == "json_invalid":
        message = f"The request body is not valid JSON: {reason.removeprefix('Invalid JSON: ')}. Send one JSON object."
        return invalid(message, code="invalid_json")
    reason = reason.removeprefix("Value error, ")
    if kind.endswith(_BOUNDS):
        # vLLM's clients look for pydantic's word.
        reason = f"{reason} ({kind})"
    if not place:
        # What several fields make together begins with the name of one.
        quoted = _QUOTED.match(reason)
        param = quoted[1] if quoted is not None else None
        return invalid(f"The request body is not valid: {reason}.", param=param)
    named = names.get(str(place[0]), str(place[0]))
    # Unions add the name of each arm to the path: keep what the client wrote, field names and positions.
    inside = [part for part in place[1:] if isinstance(part, int) or part.isidentifier()]
    inside = [str(part) for part in inside if part not in _UNION_ARMS]
    where = ".".join([named, *([] if "." in named else inside)])
    code = "missing_required_parameter" if kind == "missing" else "invalid_value"
    return invalid(f"Invalid value for '{where}': {reason}.", param=where, code=code)


# Ends of an attempt that say nothing against the request.
REFUSALS = frozenset({"class_lost", "overloaded", "too_long", "never_fits"})
# The experts of a worker's numerics class are lost: just now, or for as long as a request may wait.
LOST = frozenset({"class_lost", "expert_lost"})
BLAMELESS = REFUSALS | LOST | {"drained", "paused", "shared", "shutting_down", "silent"}
_CLIENT_FAULTS = {
    "too_long": "context_length_exceeded",
    "never_fits": "request_too_large",
    "bad_request": "invalid_value",
}


def error_of(message: Failed, *, begun: bool, after_s: float) -> ApiError:
    """What a client is told of a choice that no worker will go on with.
    Args: begun: it has tokens already. after_s: when what it lacked is expected back."""
    if message.code == "no_token":
        return invalid(message.message)
    if message.code in _CLIENT_FAULTS and not begun:
        quoted = _QUOTED.match(message.message)
        return invalid(message.message, param=quoted and quoted[1], code=_CLIENT_FAULTS[message.code])
    if message.retryable:
        return unavailable(message.message, code=message.code, after_s=after_s)
    return internal(message.message, code=message.code)
