"""What clients see while hosts and the links between them fail: five namespaces, real processes, TLS, nixl, etcd.

Sixteen streams run through each fault. Each token comes once and is the one that came without a fault, or the line says
otherwise; how long a stream stood still at most is told beside what it was without a fault, on the same busy cores.

    python -m benchmarks.hosts --fault cut-off,long-link --rounds 3

Needs root, nixl-cu13, etcd, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.hosts.cluster import HostsCluster, Outcome, hosts_cluster
from benchmarks.hosts.faults import FAULTS
from benchmarks.hosts.network import refusal
from benchmarks.report import record


def stalls(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Milliseconds: of the longest time between two tokens in each stream."""
    found = [stall for outcome in outcomes for stall in outcome.stalls_ms]
    return {f"p{p}": round(float(np.percentile(found, p))) for p in (50, 99, 100)}


def changed(outcome: Outcome, calm: Outcome) -> int:
    """Streams whose text is not that of the same client without a fault."""
    return sum(text != calm.texts[number % len(calm.texts)] for number, text in enumerate(outcome.texts))


def befall(cluster: HostsCluster, name: str, rounds: int, calm: Sequence[Outcome]) -> dict[str, Any]:
    """Strike `rounds` times, each time at the whole cluster."""
    fault, seen, whole_s = FAULTS[name], list[Outcome](), list[float]()
    for _ in range(rounds):
        seen.append(cluster.stream(lambda: fault.strike(cluster)))
        fault.mend(cluster)
        whole_s.append(cluster.wait_whole())
    return {
        "fault": name,
        "what": fault.what,
        "streams": sum(len(outcome.texts) for outcome in seen),
        "failed": sum(len(outcome.errors) for outcome in seen),
        "errors": [error for outcome in seen for error in outcome.errors][:3],
        "changed": sum(changed(outcome, calm[0]) for outcome in seen),
        "stall_ms": stalls(seen),
        "calm_stall_ms": stalls(calm),
        "whole_again_s": round(max(whole_s), 1),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--fault", default=",".join(FAULTS), help=f"with commas; default: all of {', '.join(FAULTS)}")
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    if why := refusal():
        raise SystemExit(why)
    names = asked.fault.split(",")
    by_setting = itertools.groupby(
        sorted(names, key=lambda name: repr(FAULTS[name].setting)), lambda name: FAULTS[name].setting
    )
    for setting, group in by_setting:
        possible = []
        for name in group:
            if why := FAULTS[name].refusal():
                print(f"{name}: {why}")
            else:
                possible.append(name)
        if not possible:
            continue
        with hosts_cluster(setting) as cluster:
            calm = [cluster.stream() for _ in range(3)]
            for name in sorted(possible, key=names.index):
                record("hosts", befall(cluster, name, asked.rounds, calm))


if __name__ == "__main__":
    main()
