"""For the Python of a vLLM environment: what the plug-in says to options, without an engine.

An order comes as JSON on standard input, by name: `engine`, options of vLLM; `device` and `compilation`, what to find
in their place where this machine has it not; `version` likewise. Written is what was refused, by the same name, null
for nothing.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from eaas.integrations.vllm_options import PoolOptions, Refused, why_not


def refused(order: dict[str, Any]) -> str | None:
    """In words."""
    config = EngineArgs(**order["engine"]).create_engine_config()
    if "device" in order:
        config.device_config = SimpleNamespace(device_type=order["device"])
    if "compilation" in order:
        mode = CUDAGraphMode[order["compilation"]["cudagraph_mode"]]
        config.compilation_config.cudagraph_mode = mode
        config.compilation_config.splitting_ops = order["compilation"].get("splitting_ops")
    config.parallel_config.enable_eplb = order.get("eplb", False)
    try:
        PoolOptions.of(config)
    except Refused as error:
        return str(error)
    return why_not(config, order.get("version", vllm.__version__))


if __name__ == "__main__":
    print("\n" + json.dumps({name: refused(order) for name, order in json.load(sys.stdin).items()}))
