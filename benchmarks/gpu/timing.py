"""Times on a GPU: events around replays of a captured graph, medians; and the two ceilings of the card."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

ROUNDS = 15
WARM_UPS = 3
L2_BYTES = 60 << 20  # of an H200; what is timed must not fit into it


def seconds(act: Callable[[], object], *, rounds: int = ROUNDS, repeats: int = 1) -> float:
    """Median seconds of one call of `act`, which only launches work on the current stream.

    It is captured once, `repeats` times over, so that what launching costs the host is not in the figure. Launches of
    the same call may therefore not allocate: give it its outputs.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            act()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            act()
    for _ in range(WARM_UPS):
        graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def copy_rate(nbytes: int = 4 << 30) -> float:
    """Bytes a second of a device-to-device copy, those read and those written, on random data."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source))


def matrix_rate(n: int = 8192) -> float:
    """Flops a second of torch's own bf16 product of two n x n matrices, on random data."""
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / seconds(lambda: torch.mm(a, b, out=out))
