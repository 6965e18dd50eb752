"""Options of an expert server, and those that whoever computes has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2p.transport import TransportChoice
from router.config import JoinOptions, ListenerOptions
from router.options import Options, OptionsInvalid, option

AUTO, CHECKPOINT, PEERS = "auto", "checkpoint", "peers"
# Slots in a client's row of a server's window.
MOST_SLOTS = 16
# Of a client beside others.
MOST_WEIGHT = 1000


@dataclass(frozen=True, kw_only=True)
class ComputingOptions(Options):
    """What computes, and how rows travel"""

    dtype: str = option("auto", "bfloat16, float32, int8, or auto: what the checkpoint says.")
    transport: str = option(
        "shm",
        "How processes reach each other: shm (one host), nixl (between hosts), nixl:eth0,eth1 (its rails), "
        "shm+nixl:eth0 (shm within a host, nixl between them), cuda:0 (GPU kernels of one host; which GPU), or "
        "nixl@cuda:0 (GPU kernels between hosts).",
    )
    trust_network: bool = option(
        False,
        "Let --transport nixl leave this machine: it neither encrypts nor authenticates rows, so its network must be "
        "private, or encrypted below (WireGuard, IPsec).",
    )
    cores: tuple[int, ...] = option(
        (),
        "CPU cores, such as 0,1; a process runs one lane on each. Default: all that it may use; an expert server that "
        "is started by itself: one lane, on any of them.",
        metavar="CORE,...",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if TransportChoice.parse(self.transport).crosses_network and not self.trust_network:
            raise OptionsInvalid(
                f"--transport {self.transport} sends rows unencrypted to other machines. Give --trust-network where "
                "that network is private, or encrypted below (docs/security.md); on one machine use shm, or nixl:lo."
            )


@dataclass(frozen=True, kw_only=True)
class MemberOptions(JoinOptions, ListenerOptions):
    """Members that compute"""

    model: Path = option(help="Checkpoint folder.", metavar="DIR")
    device: str = option(
        "cpu",
        "What computes: cpu, cuda:0 (a GPU, by its number), or interpreter (the GPU's kernels on the CPU, thousands of "
        "times slower: to study and test them).",
    )


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(ComputingOptions, MemberOptions):
    """Serve experts as the router places them: of this model, and of those that are added to the pool later.

    Example:
      eaas expert --router 127.0.0.1:7000 --model ./model --cores 0,1
    """

    weights: str = option(
        AUTO,
        "Where weights come from, if no server of this host packed them yet: servers of the cluster and the "
        "checkpoint, whichever is faster (auto), the checkpoint alone, or peers alone: then the folder needs only "
        "config.json, and the model is the cluster's.",
        choices=(AUTO, CHECKPOINT, PEERS),
    )
    slots: int = option(MOST_SLOTS, "Most requests in flight of one client.", least=1, most=MOST_SLOTS)
    zone: str = option("", "What fails together, such as a rack: copies of an expert avoid one zone.")
