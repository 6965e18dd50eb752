"""What a router that does not lead answers: who it is, how it does, and to all else that it does not lead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

SERVICE = "router.v1.Router"
# The name under which health says only whether a router leads. Clients choose among several routers by it: one
# that leads and cannot write its journal must still hear renewals.
LEADER = "router.v1.Leader"

# Trailing metadata of a refusal.
STANDBY = "router-standby"

_ANSWERED = ("/grpc.", f"/{SERVICE}/Status")


async def refuse_as_standby(context: grpc.aio.ServicerContext, reason: str) -> NoReturn:
    """Abort a call with UNAVAILABLE, and say that nothing of it was carried out."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, reason, ((STANDBY, "1"),))
    raise RuntimeError("abort returned")


class RefuseUnlessLeading(grpc.aio.ServerInterceptor):
    """Aborts every call of every service with UNAVAILABLE, but health, reflection and Status."""

    def __init__(self, leads: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Args: reason: what the caller is told."""

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            del request
            await refuse_as_standby(context, reason())

        self._leads = leads
        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method's own way to answer, or the refusal."""
        if self._leads() or handler_call_details.method.startswith(_ANSWERED):
            return await continuation(handler_call_details)
        return self._refusal
