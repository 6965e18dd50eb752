"""The expert service on a GPU: kernels in Triton, and the ends of its protocol in device memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from experts.backend import DeviceUnavailable

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
    try:
        import torch
        import triton  # noqa: F401 - kernels are not asked for where it is missing
    except ImportError as error:
        raise DeviceUnavailable(
            f"--device {name} needs torch and triton, and found: {error}. Install them: pip install torch triton."
        ) from error
    if gpu is not None and (found := torch.cuda.device_count()) <= gpu:
        raise DeviceUnavailable(
            f"--device {name} needs GPU {gpu}; torch {torch.__version__} sees {found}. See `eaas doctor`; without a"
            " GPU serve with --device cpu."
        )
    # torch and triton are here: now the kernels can be.
    from experts.gpu.backend import GpuBackend

    return GpuBackend(torch.device("cpu") if gpu is None else torch.device("cuda", gpu))
