"""An expert server process of the tests: random experts by seed, an explicit list of them, no router.

    python -m tests.experts.serve_experts '{"seed": 1, "incarnation": 7, "held": [[0, 1]], ...}'

Prints its address as one line, then obeys lines on stdin: "hold L E", "drop L E", "fault JSON", "clear ID", "clients";
ends with stdin.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from experts.faults import SERVER_FAULTS, SelfInflicted
from experts.model import Dtype
from experts.proto import experts_pb2_grpc as rpc
from experts.server import ExpertServer, ExpertsService
from p2p.local import ShmEndpoint
from router.faults import SERVER_POINTS, Fault
from tests.experts.steps import Weights, shape_of


def main(order: dict) -> None:
    shape = shape_of(**order["shape"])
    dtype = Dtype(order["dtype"])
    lanes = order.get("lanes", 1)
    weights = Weights(shape, dtype, order["seed"])
    endpoint = ShmEndpoint(f"expert/{order['incarnation']}", order["incarnation"], lanes)
    server = ExpertServer(
        endpoint=endpoint, shape=shape, dtype=dtype, model_hash=order["fingerprint"], cores=(-1,) * lanes
    )

    def hold(layer: int, expert: int) -> None:
        key = (layer, expert)
        server.first.set_expert(layer, expert, weights.gate_up[key], weights.down[key])

    for layer, expert in order["held"]:
        hold(layer, expert)
    service = ExpertsService()
    service.server = server
    control = grpc.server(ThreadPoolExecutor(4))
    rpc.add_ExpertsServicer_to_server(service, control)
    port = control.add_insecure_port("127.0.0.1:0")
    control.start()
    server.start()
    ended = threading.Event()

    def reap() -> None:
        while not ended.wait(0.05):
            server.reap()

    reaper = threading.Thread(target=reap)
    reaper.start()
    print(f"127.0.0.1:{port}", flush=True)
    faults = SelfInflicted(kinds=SERVER_FAULTS, points=SERVER_POINTS)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "hold":
            hold(*map(int, numbers))
        elif word == "fault":
            faults.begin(Fault.from_dict(json.loads(line.removeprefix("fault "))))
        elif word == "clear":
            faults.end(numbers[0])
        elif word == "drop":
            server.first.clear_expert(*map(int, numbers))
        print(len(server.clients), flush=True)
    ended.set()
    reaper.join()
    control.stop(0)
    server.close()
    endpoint.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
