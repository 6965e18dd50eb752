"""A process whose native code finds no memory, at each allocation in turn: test_starved.py runs it, over starve.cpp.

Prints each part's name and how many allocations were refused in it. What is refused works when there is memory again.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from experts.model import Dtype
from p2p import faults
from p2p.endpoint import P2PError
from tests.experts.steps import MEMORY, OK, Call, World, shape_of

_starve = ctypes.CDLL(None)
_starve.starve_after.argtypes = [ctypes.c_long]


def check(holds: bool, text: str) -> None:
    """Unlike `assert` also under python -O, in a process of its own."""
    if not holds:
        sys.exit(text)


def each(
    name: str,
    prepare: Callable[[], Any],
    attempt: Callable[[Any], Any],
    judge: Callable[[Any, Any, bool], bool],
) -> None:
    """Refuse an attempt's first allocation, in a second one the second, until none is left to refuse.

    Args:
        attempt: What is made of a subject that `prepare` made; its answer, or the exception that it may raise.
        judge: Whether an answer is right, by the subject, the answer, and whether an allocation was refused.
    """
    for count in itertools.count():
        subject = prepare()
        _starve.starve_after(count)
        try:
            answer = attempt(subject)
        except (MemoryError, P2PError) as error:
            answer = error
        refused = bool(_starve.starve_end())
        check(judge(subject, answer, refused), f"{name}: {answer!r}, allocation {count} refused: {refused}")
        if not refused:
            print(name, count, flush=True)
            return


def begun() -> tuple[World, Call]:
    """A request under way to one of two servers, each of which has every expert."""
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=23)
    for server, layer, expert in itertools.product(range(2), range(world.shape.layers), range(world.shape.experts)):
        world.hold(server, layer, expert)
    client = world.add_client()
    world.publish(client, 1)
    return world, Call(world, client, np.random.default_rng(23), 8, 0)


def answered(subject: tuple[World, Call], code: int, refused: bool) -> bool:
    """The code says what happened, and the call ends well either way: the other server has the rows too."""
    world, call = subject
    fine = call.run() == OK and call.exact() and (code == MEMORY) == refused
    world.close()
    return fine


def published(subject: tuple[World, Call], code: int, refused: bool) -> bool:
    """Routes are taken whole or not at all."""
    return (code == MEMORY) == refused and answered(subject, MEMORY if refused else OK, refused)


def publish(subject: tuple[World, Call]) -> int:
    world, call = subject
    table = np.zeros((world.shape.layers, world.shape.experts, 8), np.uint8)
    code: int = world.library.expert_client_publish_routes(world.clients[call.client], 2, table.ctypes.data)
    return code


def step(subject: tuple[World, Call]) -> int:
    world, _ = subject
    return min(world.library.expert_server_step(server.handle, world.now_ns) for server in world.servers)


def run(subject: tuple[World, Call]) -> int:
    world, _ = subject
    return min(world.library.expert_server_run(server.handle, 10_000_000) for server in world.servers)


def native_experts() -> None:
    each("routes", begun, publish, published)
    each("step", begun, step, answered)
    each("run", begun, run, answered)
    library = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=0, seed=1).library
    sizes = (2**32 - 1, 65535, 64)
    check(not library.expert_client_new(*sizes, 2, 0, 1, 1, 1, None, 1), "a client of absurd size")
    check(
        not library.expert_server_new(1 << 24, *sizes[1:], 64, 2, 0, 1, 1, 1, None, None, 4096, None),
        "a server of absurd size",
    )
    print("sizes 2", flush=True)


def native_faults() -> None:
    faults.allow()
    numbers = itertools.count(1)
    said = lambda _, answer, refused: isinstance(answer, MemoryError) == refused  # noqa: E731
    each(
        "arm",
        lambda: next(numbers),
        lambda number: faults.arm(number, "delay", by_s=1.0, peers=["x" * 99]),
        said,
    )
    each("link", lambda: next(numbers) << 12, lambda window: faults.link(window, "y" * 99), said)


def native_links() -> None:
    from p2p.nixl import NixlEndpoint

    def well(_: Any, answer: Any, refused: bool) -> bool:
        return refused or not isinstance(answer, Exception)

    with NixlEndpoint("owner", 1) as owner, NixlEndpoint("writer", 2) as writer:
        each("export", lambda: None, lambda _: owner.export_window(4096), well)
        each(
            "connect",
            lambda: owner.export_window(4096),
            lambda window: writer.connect(window.descriptor, 1.0),
            well,
        )

        def send(peer: Any) -> None:
            for _ in range(50):  # more than are noted without allocating
                writer.put(peer, 8, b"x" * 64)
            writer.signal(peer, 0, 1)

        each("put", lambda: writer.connect(owner.export_window(4096).descriptor), send, well)
        each("endpoint", lambda: None, lambda _: NixlEndpoint("third", 3).close(), well)
        window = owner.export_window(4096)
        send(writer.connect(window.descriptor))
        for _ in range(20_000):
            if window.poll(0, 1)[0] == 1:
                break
            owner.progress()
            writer.progress()
        check(bytes(window.memory[8:72]) == b"x" * 64, "with memory again nothing travels")


if __name__ == "__main__":
    {"experts": native_experts, "faults": native_faults, "links": native_links}[sys.argv[1]]()
