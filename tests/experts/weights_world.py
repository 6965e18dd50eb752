"""A checkpoint, servers that give its packed experts, and a host that has nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from experts.checkpoint import Checkpoint
from experts.kernels import PackedExpert
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts
from experts.proto import experts_pb2_grpc as rpc
from experts.server import ExpertsService
from experts.transfer import WeightSender
from experts.weights import Weights
from p2p.local import ShmEndpoint
from router import bitmap
from router.view import Member, View
from tests.experts.checkpoint_files import QWEN3, write_model

# Of three pieces, the last one short.
CONFIG = QWEN3 | {"hidden_size": 512, "moe_intermediate_size": 704}
SHAPE = ExpertShape.from_config(CONFIG)
PAIRS = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]
SOON_S = 60.0


def write(directory: Path) -> Path:
    """The checkpoint."""
    return write_model(directory, CONFIG)


class Peer:
    """A server that gives what it has packed, and serves no rows."""

    def __init__(self, packed: PackedExperts, incarnation: int, opener: Callable[..., Any] = ShmEndpoint) -> None:
        self.packed = packed
        self.endpoint = opener(f"expert/{incarnation}", incarnation)
        self.served = set(PAIRS)
        self.sender = WeightSender(
            endpoint=self.endpoint,
            packed=lambda: [packed],
            serves=lambda model, layer, expert: (layer, expert) in self.served,
        )
        self.service = ExpertsService()
        self.service.sender = self.sender
        self.control = grpc.server(ThreadPoolExecutor(8))
        rpc.add_ExpertsServicer_to_server(self.service, self.control)
        self.address = f"127.0.0.1:{self.control.add_insecure_port('127.0.0.1:0')}"
        self.control.start()

    def member(self, **changed: Any) -> Member:
        held = bitmap.to_bytes(bitmap.of_pairs(PAIRS, SHAPE.experts), SHAPE.layers, SHAPE.experts)
        fields = {
            "name": self.endpoint.name, "pool": "expert", "state": "serving", "address": self.address, "pid": 1,
            "incarnation": self.endpoint.incarnation, "host": "here", "target": held, "serving": held,
            "numerics_class": self.packed.layout.numerics_class,
        }  # fmt: skip
        return Member(**(fields | changed))

    def close(self) -> None:
        self.control.stop(0).wait(SOON_S)
        self.sender.close()
        self.endpoint.close()


class World:
    """A checkpoint, its packed file, servers that have it, and a host that has nothing."""

    def __init__(self, root: Path, model: Path) -> None:
        self.checkpoint = Checkpoint.open(model)
        self.root, self.undo = root, []
        self.whole = PackedExperts.open(self.checkpoint, SHAPE, Dtype.BFLOAT16, directory=model / "packed")
        self.endpoint = ShmEndpoint("expert/9", 9)

    def peer(self, incarnation: int) -> Peer:
        made = Peer(self.whole, incarnation)
        self.undo.append(made.close)
        return made

    def weights(self, checkpoint: bool = False, peers: bool = True) -> Weights:
        return Weights(
            name="expert/9",
            packed=PackedExperts.begin(self.whole.manifest, self.root / "begun"),
            endpoint=self.endpoint if peers else None,
            checkpoint=self.checkpoint if checkpoint else None,
        )

    def view(self, *members: Member, epoch: int = 1) -> View:
        return View(
            term=1,
            epoch=epoch,
            replicas_wanted=1,
            layers=SHAPE.layers,
            experts=SHAPE.experts,
            members=members,
        )

    def close(self) -> None:
        self.endpoint.close()
        for undo in self.undo:
            undo()


def same(found: PackedExpert, wanted: PackedExpert) -> bool:
    return np.array_equal(found.gate_up, wanted.gate_up) and np.array_equal(found.down, wanted.down)
