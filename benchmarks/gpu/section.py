"""One section of `benchmarks.gpu` in this process: each result is a JSON line on stdout."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def report(result: Mapping[str, Any]) -> None:
    """Say one result. "what" names it; "holds" False: a check that did not hold."""
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    # A client and its servers in one process: streams that shared one of the usual eight queues would wait for each
    # other. Before CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    importlib.import_module(f"benchmarks.gpu.{sys.argv[1]}").run(report)
