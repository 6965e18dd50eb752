"""A worker and two expert servers on one GPU, in processes of their own: without MPS, and with it as `eaas serve` does.

For each: whether windows shared by file descriptor carry the right bits, what a layer takes, and what becomes of the
client when the first server is killed (SIGKILL) while its kernels run: the second answers in its place, or MPS takes
the client along. MPS is started in a folder of its own, where that is permitted, and ended; the compute mode stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eaas.cluster.config import ClusterConfig
from eaas.cluster.mps import quit_mps, ready_gpus
from p2p.endpoint import P2PError

Report = Callable[[Mapping[str, Any]], None]
ALONE, MPS = "taking turns", "MPS"
LIMIT_S = 35.0  # of one of the two
LAYERS = 200
CALM, AFTER = 3, 3  # calls before the kill, and after


def run(report: Report) -> None:
    """Report both ways; nothing here touches the GPU but the processes that it starts."""
    watch(report, ALONE, {})
    with tempfile.TemporaryDirectory() as folder:
        config = ClusterConfig(model=Path(folder), device=("cuda:0",), experts=2, attention=0, endpoint=False)
        try:
            environment = ready_gpus(config, Path(folder))
        except P2PError as refused:
            report({"what": "MPS", "refused": str(refused)})
            return
        try:
            watch(report, MPS, environment)
        finally:
            quit_mps(Path(folder))


def watch(report: Report, mode: str, environment: Mapping[str, str], program: str = "benchmarks.gpu.sharing") -> None:
    """Run the client's process, hand on what it reports, and say how it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", program], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # Its servers end with their standard input.
        process.kill()
        text, _ = process.communicate()
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for result in results:
        report({**result, "mode": mode})
    if not any(result["what"] == "the first server killed" for result in results):
        said = f"the client ended with {process.returncode} before it could tell"
        report({"what": "the first server killed", "mode": mode, "said": said, "holds": False})


def main() -> None:
    """The client's process: two servers, calls, a kill, calls."""
    import torch

    from benchmarks.gpu.exchange import (
        CLIENT,
        SERVER,
        TWO,
        TWO_INTERMEDIATE,
        Call,
        local_result,
        random_experts,
    )
    from benchmarks.gpu.section import report
    from experts.gpu.client import GpuClient, Link
    from p2p.cuda_device import Device, DeviceMemory
    from p2p.cuda_driver import CudaDriver

    shape, device = TWO, Device(CudaDriver.load(), 0)
    client = GpuClient(shape, servers=2, replicas=2, incarnation=CLIENT, device="cuda")
    client.tables.limits.fill_(int(4e9))  # nothing is late before
    call = Call(shape, 32)
    wanted = local_result(shape, random_experts(shape, TWO_INTERMEDIATE, 3), call, 0)
    children = []
    for place in range(2):
        there = DeviceMemory.create(device, shape.request_window.nbytes)
        back = DeviceMemory.create(device, shape.reply_window.nbytes)
        fds = [there.export_fd(), back.export_fd()]
        words = [str(place), *map(str, fds), str(there.nbytes), str(back.nbytes)]
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.exchange_server", *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds, text=True,
            )
        )  # fmt: skip
        for fd in fds:
            os.close(fd)
        client.link(place, Link(request=there.address, reply=back.address, incarnation=SERVER + place))
    ready = all(child.stdout and child.stdout.readline() == "serving\n" for child in children)
    client.write_tables(torch.arange(2, dtype=torch.int32).expand(shape.layers, shape.experts, -1).contiguous())

    def calls(count: int) -> tuple[list[float], bool]:
        """Microseconds of each, and whether all had the right bits."""
        times, same = [], ready
        for _ in range(count):
            call.out.fill_(float("nan"))
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            client.enqueue(0, *call.arguments())
            torch.cuda.synchronize()
            times.append(round(1e6 * (time.perf_counter() - began_s), 1))
            same &= client.report().usable and torch.equal(call.out, wanted)
        return times, same

    calls(CALM)
    end_s, times, same = time.monotonic() + 8.0, [], True
    while len(times) < LAYERS and time.monotonic() < end_s:
        took, right = calls(1)
        times, same = times + took, same and right
    report(
        {
            "what": "a layer between two processes", "layers": len(times), "us": sorted(times)[len(times) // 2],
            "us_worst": max(times), "holds": same,
        }
    )  # fmt: skip
    children[0].kill()
    children[0].wait()
    try:
        after, same = calls(AFTER)
        said = f"{'the same bits' if same else 'OTHER BITS'}, calls of {after} us"
    except RuntimeError as error:
        # What MPS may do to its other clients: the driver's words are the result.
        same, said = False, f"the client failed: {str(error)[:200]}"
    report({"what": "the first server killed", "said": said, "holds": same})
    children[1].kill()
    # The context may be lost, and with it every orderly way to let its memory go.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
