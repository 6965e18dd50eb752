"""The data path whose rows are carried and computed by kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

from experts.devices import Device, DeviceUnavailable, Kind
from experts.model import Dtype
from experts.paths import DataPath
from experts.wire import WireShape
from p2p.window import WindowLayout

MOST_SLOT_BYTES = 1 << 28


def device_path(device: Device) -> DataPath:
    """The path of a device that runs kernels.

    Raises:
        DeviceUnavailable: it is not here, or what it needs is not installed.
    """
    if device.kind is Kind.INTERPRETER:
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
            f"--device {device} needs torch and triton, and found: {error}. Install them: pip install torch triton."
        ) from error
    if device.kind is Kind.CUDA and (found := torch.cuda.device_count()) <= device.index:
        raise DeviceUnavailable(
            f"--device {device} needs GPU {device.index}; torch {torch.__version__} sees {found}. See `eaas "
            "doctor`; without a GPU serve with --device cpu."
        )
    # torch and triton are here: now the kernels can be.
    from experts.gpu import library, numerics
    from experts.gpu.client_end import ACTIVATION_PAIRS
    from experts.gpu.layout import WIRE_VERSION

    place = torch.device("cuda", device.index) if device.kind is Kind.CUDA else torch.device("cpu")

    def numerics_class(dtype: Dtype) -> str:
        if dtype is not Dtype.BFLOAT16:
            raise ValueError(
                f"--device {device} computes in bfloat16, and {dtype.label} is asked for: --dtype bfloat16."
            )
        return numerics.numerics_class(place)

    def self_test(dtype: Dtype) -> None:
        numerics_class(dtype)
        library.self_test(place)

    return DataPath(
        library=library.DeviceLibrary(place),
        wire_version=WIRE_VERSION,
        most_slot_bytes=MOST_SLOT_BYTES,
        numerics_class=numerics_class,
        self_test=self_test,
        activation_rows=ACTIVATION_PAIRS,
        window=window,
    )


def window(wire: WireShape, most_tokens: int, slots: int) -> WindowLayout:
    """Windows of a client, both ways: a frame of the largest kind fits a slot. `slots` is the path's own affair.

    Raises:
        ValueError: no such frame can be.
    """
    from experts.gpu.library import exchange_shape

    shape = exchange_shape(wire)
    there, back = shape.request_window, shape.reply_window
    return WindowLayout(slots=shape.slots, payload_bytes=max(there.payload_bytes, back.payload_bytes))
