"""One of the servers of `benchmarks.gpu.sharing`, in a process of its own, until it is killed or stdin ends.

python -m benchmarks.gpu.exchange_server PLACE REQUEST_FD REPLY_FD REQUEST_BYTES REPLY_BYTES
"""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.exchange import CLIENT, SERVER, TWO, TWO_INTERMEDIATE, random_experts
from experts.gpu.server import GpuServer, GroupedExperts
from p2p.cuda_device import Device, DeviceMemory
from p2p.cuda_driver import CudaDriver


def main() -> None:
    place, request_fd, reply_fd, request_bytes, reply_bytes = map(int, sys.argv[1:])
    device = Device(CudaDriver.load(), 0)
    request = DeviceMemory.receive(device, request_fd, request_bytes)
    reply = DeviceMemory.receive(device, reply_fd, reply_bytes)
    shape = TWO
    experts = GroupedExperts(random_experts(shape, TWO_INTERMEDIATE, 3), shape.pairs, torch.device("cuda"))
    server = GpuServer(shape, clients=1, compute=experts, incarnation=SERVER + place, device="cuda")
    server.attach(0, request=request.address, reply=reply.address, incarnation=CLIENT)
    for expert in range(shape.experts):
        server.hold(0, expert, expert)
    server.serve()
    print("serving", flush=True)
    sys.stdin.read()
    server.end_passes()
    for memory in (request, reply):
        memory.close()


if __name__ == "__main__":
    main()
