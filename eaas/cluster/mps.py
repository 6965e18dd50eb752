"""NVIDIA's MPS daemon, for GPUs on which several processes of a cluster compute.

Without it they take turns of milliseconds, in each MoE layer: a server's stream is never idle, and a worker's kernels
wait for servers. What a killed process means to the others under MPS, docs/gpu.md says.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

from eaas.cluster.config import ClusterConfig
from p2p.cuda_driver import PEER_ACCESS, CudaDriver, DeviceFacts
from p2p.endpoint import P2PError

logger = logging.getLogger(__name__)

CONTROL, PIPES = "nvidia-cuda-mps-control", "CUDA_MPS_PIPE_DIRECTORY"
_FOLDER, _ANSWER_S = "mps", 10.0


def ready_gpus(config: ClusterConfig, state_dir: Path) -> Mapping[str, str]:
    """Start MPS where processes share a GPU and none runs; what to add to the environment of those that use GPUs.

    Raises P2PError: GPUs are missing or do not reach each other, or processes would share one without MPS.
    """
    used = sorted(config.gpus)
    if not used:
        return {}
    driver = CudaDriver.load()
    found = driver.devices()
    for one, other in permutations(used, 2):
        if not driver.peer_has(one, other, PEER_ACCESS):
            raise P2PError(f"{found[one]} does not reach the memory of {found[other]}: `eaas doctor` lists who does.")
    shared = [gpu for gpu in found if config.gpus[gpu.ordinal] > 1]
    if not shared or os.environ.get(PIPES) or all(gpu.mps for gpu in shared):
        return {}
    try:
        return _start(state_dir / _FOLDER, found)
    except (OSError, subprocess.SubprocessError) as error:
        crowd = f"{config.gpus[shared[0].ordinal]} processes would share {shared[0]}, taking turns of milliseconds"
        raise P2PError(
            f"{crowd} in each layer; MPS, which prevents it, cannot be had: {error} Mend that, or name as many GPUs as "
            f"there are processes, {config.gpus.total()}."
        ) from error


def _start(folder: Path, gpus: Sequence[DeviceFacts]) -> Mapping[str, str]:
    if sliced := [gpu for gpu in gpus if " MIG " in gpu.name]:
        raise OSError(f"{sliced[0]} is a slice of a GPU, for which whoever sliced it has to start a daemon.")
    if shutil.which(CONTROL) is None:
        raise OSError(f"{CONTROL}, which comes with NVIDIA's driver (nvidia-compute-utils), is not on PATH.")
    folder.mkdir(mode=0o700)
    # By UUIDs: the daemon numbers those that it sees anew, and its clients theirs among them.
    seen = ",".join(f"GPU-{gpu.uuid}" for gpu in gpus)
    environment = {PIPES: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder), "CUDA_VISIBLE_DEVICES": seen}
    # A file and no pipe, which the daemon would hold open.
    with (folder / "start.log").open("w+") as log:
        heard = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "timeout": _ANSWER_S}
        code = subprocess.run([CONTROL, "-d"], env=os.environ | environment, **heard).returncode
        if code:
            log.seek(0)
            raise OSError(f"{CONTROL} -d ended with {code}: {log.read().strip() or 'no words'}.")
    return environment


def quit_mps(state_dir: Path) -> bool:
    """End the daemon that a cluster started, if it did; its clients have ended. Whether none is left."""
    if not (folder := state_dir / _FOLDER).is_dir():
        return True
    told = {"env": os.environ | {PIPES: str(folder)}, "input": b"quit -t 5\n", "timeout": _ANSWER_S}
    try:
        subprocess.run([CONTROL], capture_output=True, check=True, **told)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("mps_not_ended folder=%s reason=%s", folder, error)
        return False
    return True
