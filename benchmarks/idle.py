"""What a cluster costs that nobody asks anything: CPU time of each process in a second.

Leases, heartbeats, ticks and scrubbing go on while it computes, too: on a host with few cores they take from every
token. The launcher is this command's own process.

    python -m benchmarks.idle --experts 2
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from benchmarks.engines.process import cpu_s
from benchmarks.report import record, spread
from benchmarks.setting import checkpoint, cluster, cores_of, parser

# What a start leaves to be done is over by then.
REST_S = 5.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line."""
    command = parser(__doc__)
    command.set_defaults(shape="tiny", rounds=5)
    command.add_argument("--experts", type=int, default=2, help="expert servers")
    command.add_argument("--seconds", type=float, default=4.0, help="length of a round")
    options = command.parse_args(argv)
    cores = cores_of(options)
    with (
        checkpoint(options.shape, options.checkpoints) as model,
        cluster(model, cores, servers=options.experts, endpoint=True) as running,
    ):
        pids = {**running.pids(), "launcher": os.getpid()}
        found: dict[str, list[float]] = {name: [] for name in pids}
        time.sleep(REST_S)
        for _ in range(options.rounds):
            before, began_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
            time.sleep(options.seconds)
            elapsed_s = time.monotonic() - began_s
            for name, pid in pids.items():
                found[name].append((cpu_s(pid) - before[name]) / elapsed_s * 1e3)
    sums = [sum(each) for each in zip(*found.values(), strict=True)]
    row = {name: spread(each) for name, each in sorted(found.items())} | {"all": spread(sums)}
    record("idle", {"experts": options.experts, "threads": len(cores), "cpu_ms_per_s": row}, (), options.results)


if __name__ == "__main__":
    main()
