"""The expert service on a GPU: kernels in Triton, and the ends of its protocol in device memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from experts.backend import DeviceUnavailable
from experts.pack import cache_directory
from p2p.cuda_driver import CudaDriver
from p2p.endpoint import P2PError

if TYPE_CHECKING:
    from experts.gpu.backend import GpuBackend


def open_backend(gpu: int | None) -> GpuBackend:
    """The backend of a GPU by its number, or with None of Triton's interpreter, which computes on the CPU.

    Raises:
        DeviceUnavailable: it is not here, or what it needs is not installed.
    """
    name = "interpreter" if gpu is None else f"cuda:{gpu}"
    if gpu is None:
        # Before any kernel is imported: that is when Triton looks.
        os.environ["TRITON_INTERPRET"] = "1"
    # Before CUDA starts: a write into a server's tables must not share one of the usual eight queues with its passes,
    # which never leave theirs empty.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Beside the packed experts, where the image and the units have room: compiling takes a minute.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory().with_name("triton")))
    try:
        # What is to be mended first is said first: without a GPU no package helps.
        seen = 0 if gpu is None else len(CudaDriver.load().devices())
        import torch

        if gpu is not None and (usable := torch.cuda.device_count()) <= gpu:
            found = f"the driver sees {seen}, torch {torch.__version__} {usable}"
            raise DeviceUnavailable(f"--device {name} needs GPU {gpu}; {found}: see `eaas doctor`.")
        import triton  # noqa: F401 - kernels are not asked for where it is missing
    except ImportError as error:
        raise DeviceUnavailable(f"--device {name}: {error}. Install it: pip install {error.name}.") from error
    except P2PError as error:
        raise DeviceUnavailable(f"--device {name}: {error} Without a GPU: --device cpu.") from error
    # torch and triton are here: now the kernels can be.
    from experts.gpu.backend import GpuBackend

    return GpuBackend(torch.device("cpu") if gpu is None else torch.device("cuda", gpu))
