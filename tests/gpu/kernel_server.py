"""An expert server over kernels, as a process: python -m tests.gpu.kernel_server SEED INCARNATION HOLES DTYPE

Says its address on stdout once it serves. Then each line of stdin is done and answered: `fence`, `clear`, `clients`.
HOLES are the experts "layer.expert" that it does not hold, with commas between them; DTYPE is bfloat16 or fp8.

Two processes, because Triton's interpreter runs one kernel at a time in each, and clients wait for servers in one.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from experts.devices import Device
from experts.grouped import sample
from experts.kernels import Weights, pack_expert, to_dtype
from experts.model import Dtype, ExpertShape
from experts.proto import experts_pb2_grpc as rpc
from experts.server import ExpertServer, ExpertsService
from p2p.transport import TransportChoice
from tests.gpu.device import DEVICE

DEVICE_NAME = Device.parse("interpreter" if DEVICE == "cpu" else "cuda:0")
SHAPE = ExpertShape(architecture="", layer_ids=(0, 1), experts=4, hidden=128, intermediate=64, top_k=2)
FINGERPRINT = "ab" * 32
EVERY = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]


def matrices_of(seed: int, dtype: Dtype) -> dict[tuple[int, int], list[Weights]]:
    """Gate, up and down of every expert, as they are stored."""
    rng = np.random.default_rng(seed)
    wide, high = (SHAPE.intermediate, SHAPE.hidden), (SHAPE.hidden, SHAPE.intermediate)

    def drawn(size: tuple[int, int]) -> Weights:
        if dtype is Dtype.FP8:
            return sample(dtype, *size, rng)
        return to_dtype(rng.standard_normal(size, np.float32) / np.float32(8), dtype)

    return {pair: [drawn(size) for size in (wide, wide, high)] for pair in EVERY}


def main() -> None:
    seed, incarnation, holes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
    dtype = Dtype[sys.argv[4].upper()]
    backend = DEVICE_NAME.backend()
    endpoint = DEVICE_NAME.opener(TransportChoice.parse("shm"))(f"expert/{incarnation}", incarnation, 1)
    server = ExpertServer(endpoint=endpoint, shape=SHAPE, dtype=dtype, model_hash=FINGERPRINT, backend=backend)
    packed = {pair: pack_expert(*three, dtype) for pair, three in matrices_of(seed, dtype).items()}
    for (layer, expert), weights in packed.items():
        if f"{layer}.{expert}" not in holes:
            server.first.set_expert(layer, expert, weights.gate_up, weights.down)
    service = ExpertsService()
    service.server = server
    control = grpc.server(ThreadPoolExecutor(2))
    rpc.add_ExpertsServicer_to_server(service, control)
    port = control.add_insecure_port("127.0.0.1:0")
    control.start()
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    for line in sys.stdin:
        if line == "fence\n":
            server.set_lease(0)
        elif line == "clear\n":
            for pair in EVERY:
                server.first.clear_expert(*pair)
        server.reap()
        print(len(server.clients), flush=True)
    control.stop(0)
    server.close()
    endpoint.close()


if __name__ == "__main__":
    main()
