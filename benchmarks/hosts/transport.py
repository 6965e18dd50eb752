"""What crossing hosts costs: one attention worker and two expert servers, in one host over shm and in two over nixl.

Both clusters run side by side on the same cores and are asked by turns; bytes and packets are those of the rails (UCX
over TCP over veth, whose segments may have 64 KB: a packet is a message or a part of a large one).

    python -m benchmarks.hosts.transport --streams 8,32 --rounds 5

Needs root, nixl-cu13, etcd, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.hosts.cluster import RAILS, HostsCluster, Setting, hosts_cluster
from benchmarks.hosts.network import refusal
from benchmarks.report import record, spread

TOKENS = 128
_CONTROL = ("etcd", "router", "gateway")
_APART = {"a": (*_CONTROL, "attention"), "b": ("expert", "expert")}
SETTINGS = {
    "shm": Setting(roles={"a": (*_CONTROL, "attention", "expert", "expert")}, transport="shm"),
    "nixl": Setting(roles=_APART, transport=f"nixl:{','.join(RAILS)}"),
    # A device of each host that is there already, as `tunnels` makes it.
    "wireguard": Setting(roles=_APART, transport="nixl:wg-{host}"),
}


def carried(cluster: HostsCluster) -> Mapping[str, int]:
    """bytes and packets that the worker's host sent and received over its rails until now."""
    found = [cluster.network.counters("a", rail) for rail in RAILS]
    return {name: sum(one[name] for one in found) for name in found[0]}


def ask(cluster: HostsCluster, streams: int) -> dict[str, float]:
    """tokens/s of so many streams at once; and, for each token, what went over the rails."""
    before = carried(cluster)
    seen = cluster.stream(streams=streams, tokens=TOKENS)
    if seen.errors:
        raise RuntimeError(f"streams failed: {seen.errors[:3]}")
    after = carried(cluster)
    each = {f"{name}_per_token": (after[name] - before[name]) / (streams * TOKENS) for name in after}
    return {"tokens_per_s": seen.tokens_per_s, **each}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", default="8,32")
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    if why := refusal():
        raise SystemExit(why)
    with ExitStack() as stack:
        clusters = {name: stack.enter_context(hosts_cluster(SETTINGS[name])) for name in ("shm", "nixl")}
        for streams in map(int, asked.streams.split(",")):
            found: dict[str, list[dict[str, float]]] = {name: [] for name in clusters}
            for cluster in clusters.values():
                ask(cluster, streams)
            for _ in range(asked.rounds):
                for name, cluster in clusters.items():
                    found[name].append(ask(cluster, streams))
            result: dict[str, Any] = {
                name: {
                    figure: spread([one[figure] for one in rounds])
                    for figure in rounds[0]
                    if name == "nixl" or figure == "tokens_per_s"
                }
                for name, rounds in found.items()
            }
            ratios = [
                nixl["tokens_per_s"] / shm["tokens_per_s"]
                for nixl, shm in zip(found["nixl"], found["shm"], strict=True)
            ]
            record("hosts.transport", {"streams": streams, **result, "nixl_over_shm": spread(ratios)})


if __name__ == "__main__":
    main()
