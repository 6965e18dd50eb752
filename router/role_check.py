"""gRPC servers that ask every caller for its role before a method runs: router/roles.py says who may call what."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from router.roles import claim_refusal, refusal
from router.tls import caller_role

log = logging.getLogger(__name__)

_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def _why_not(context: Any, method: str, request: object) -> str:
    role = caller_role(context)
    reason = refusal(role, method) or claim_refusal(role, method, request)
    if reason:
        log.warning("call_refused peer=%s reason=%s", context.peer(), reason)
    return reason


def _rebuilt(handler: Any, guard: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
    name, make = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        guard(getattr(handler, name)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class RequireRoles(grpc.aio.ServerInterceptor):
    """For a server of asyncio: PERMISSION_DENIED, and why, unless the caller's certificate allows the method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method behind the check."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method: str = handler_call_details.method

        async def check(request: Any, context: Any) -> None:
            if reason := _why_not(context, method, request):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)

        def guard(behaviour: Callable[..., Any]) -> Callable[..., Any]:
            async def one(request: Any, context: Any) -> Any:
                await check(request, context)
                return await behaviour(request, context)

            async def many(request: Any, context: Any) -> AsyncIterator[Any]:
                await check(request, context)
                answers = behaviour(request, context)
                if inspect.isawaitable(answers):
                    # Health writes its answers itself.
                    await answers
                    return
                async for answer in answers:
                    yield answer

            return many if handler.response_streaming else one

        return _rebuilt(handler, guard)


class RequireRolesThreaded(grpc.ServerInterceptor):
    """The same for a server of threads."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method behind the check."""
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return handler
        method: str = handler_call_details.method

        def guard(behaviour: Callable[..., Any]) -> Callable[..., Any]:
            def checked(request: Any, context: Any, *more: Any) -> Any:
                if reason := _why_not(context, method, request):
                    context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
                return behaviour(request, context, *more)

            # Health's Watch answers through a callback of its own.
            for name in ("experimental_non_blocking", "experimental_thread_pool"):
                if hasattr(behaviour, name):
                    setattr(checked, name, getattr(behaviour, name))
            return checked

        return _rebuilt(handler, guard)
