"""gRPC: unary calls of raw bytes over loopback TCP, as grpcio makes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from benchmarks.transports.side import SILENCE_S, SLOTS, Load, Silent, rounds

_METHOD = "/benchmark/answer"
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Rpc:
    """A server in every process, and a channel to each other end."""

    pinned = False

    def __init__(self, links: int) -> None:
        self._pool = ThreadPoolExecutor(SLOTS * links)
        self._server = grpc.server(self._pool, options=_OPTIONS)
        answer = grpc.unary_unary_rpc_method_handler(self._answer)
        service = grpc.method_handlers_generic_handler("benchmark", {"answer": answer})
        self._server.add_generic_rpc_handlers((service,))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._links = links
        self._serving, self._served, self._reply = threading.Event(), threading.Semaphore(0), b""
        self._channels: list[grpc.Channel] = []

    def offers(self) -> list[str]:
        """The server's port, for every link."""
        return [str(self._port)] * self._links

    def join(self, offers: Sequence[str]) -> None:
        """Open the channels."""
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) for port in offers]

    def drive(self, load: Load) -> list[int]:
        """As `Side.drive`; a single request under way is a plain call, which is the fastest that grpcio has."""
        calls = [channel.unary_unary(_METHOD) for channel in self._channels]
        request = bytes(load.request_bytes)
        under_way: dict[int, list[Any]] = {}
        alone = len(calls) == load.depth == 1

        def post(number: int) -> None:
            if alone:
                calls[0](request, timeout=SILENCE_S)
            else:
                under_way[number] = [call.future(request, timeout=SILENCE_S) for call in calls]

        def finish(number: int) -> None:
            for future in under_way.pop(number, ()):
                future.result()

        return rounds(load, post, finish)

    def serve(self, load: Load) -> None:
        """As `Side.serve`: the server's threads answer, this one counts."""
        self._reply = bytes(load.reply_bytes)
        self._serving.set()
        for _ in range(self._links * load.count):
            if not self._served.acquire(timeout=SILENCE_S):
                raise Silent(f"no call came for {SILENCE_S:.0f} s; the other process has ended or is stuck.")
        self._serving.clear()

    def close(self) -> None:
        """Close channels and server."""
        for channel in self._channels:
            channel.close()
        self._server.stop(0).wait()
        self._pool.shutdown()

    def _answer(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        self._serving.wait(SILENCE_S)
        self._served.release()
        return self._reply
