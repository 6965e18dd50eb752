"""What it means that a worker gave up a choice, by the code it gave. Pure."""

from __future__ import annotations

from eaas.engine.worker_protocol import Failed
from eaas.gateway.errors import ApiError, internal, invalid, unavailable

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


def error_of(message: Failed, *, begun: bool) -> ApiError:
    """What a client is told of a choice that no worker will go on with. Args: begun: it has tokens already."""
    if message.code == "no_token":
        return invalid(message.message, code="invalid_value")
    if message.code in _CLIENT_FAULTS and not begun:
        return invalid(message.message, code=_CLIENT_FAULTS[message.code])
    if message.retryable:
        return unavailable(message.message, code=message.code)
    return internal(message.message, code=message.code)
