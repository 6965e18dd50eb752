"""NVIDIA's driver, bound by ctypes: which GPUs there are, and calls whose every failure is an exception with words.

Only libcuda, which comes with the driver: neither the CUDA toolkit nor torch is needed.
"""

from __future__ import annotations

import ctypes
import uuid
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final

from p2p.endpoint import P2PError

LIBRARY: Final = "libcuda.so.1"

PEER_ACCESS, PEER_ATOMICS = 2, 3  # CUdevice_P2PAttribute, as far as it is asked for here
_NAME_BYTES: Final = 256


class Attribute(IntEnum):
    """CUdevice_attribute, as far as it is asked for here."""

    MULTIPROCESSORS = 16
    COMPUTE_MODE = 20
    CAPABILITY_MAJOR = 75
    CAPABILITY_MINOR = 76
    VIRTUAL_MEMORY = 102
    POSIX_FD = 103
    RDMA_WITH_VIRTUAL_MEMORY = 110
    RDMA = 116
    RDMA_FLUSH = 117
    RDMA_ORDERING = 118
    MPS = 133


class Location(ctypes.Structure):
    """CUmemLocation: 0 type (int), 4 id (int); 8 bytes."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes, of which the last 8 are allocFlags."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),  # requestedHandleTypes
        ("location", Location),
        ("win32", c_void_p),  # win32HandleMetaData, null
        ("compression", c_ubyte),
        ("rdma", c_ubyte),  # gpuDirectRDMACapable
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc: 0 location, 8 flags (int); 12 bytes."""

    _fields_ = (("location", Location), ("flags", c_int))


# Names as the library exports them: cuda.h gives most of these another name by a macro.
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
}

_LOST: Final = "A kernel of this process has failed and its context is lost: end the process."
_ADVICE: Final = {
    1: "An argument was refused: run the same release on both sides.",
    2: "Give the GPU back some memory (nvidia-smi shows who holds it), or ask for less.",
    3: "The driver does not work after a fork: spawn the process instead.",
    34: "A stub of the CUDA toolkit was loaded: take its folder out of LD_LIBRARY_PATH.",
    46: "Another process holds the GPU for itself: end it, or set the compute mode to default.",
    100: "Give this container or machine a GPU (nvidia-smi shows them), or empty CUDA_VISIBLE_DEVICES.",
    101: "Choose a device that nvidia-smi and CUDA_VISIBLE_DEVICES show.",
    214: "Memory of the GPU is broken: nvidia-smi -q -d ECC tells more.",
    217: "These two GPUs do not reach each other: place both processes on one GPU, or use nixl.",
    **dict.fromkeys((700, 702, 710, 716, 718, 719), _LOST),
    800: "The container or the driver forbids it: give it all of /dev/nvidia*.",
    801: "This driver or GPU cannot do it: use another transport.",
    802: "The GPU fabric is still starting: look at nvidia-fabricmanager.",
    803: "The driver's library is of another version than the kernel's: update the container or the host.",
    804: "Update the driver.",
    805: "The MPS daemon does not answer: start it, or unset CUDA_MPS_PIPE_DIRECTORY.",
    807: "The MPS server is starting: try again.",
    808: "Too many MPS clients: end some.",
}
_OTHERWISE: Final = "nvidia-smi and the kernel's log (dmesg) may tell more."


class CudaMissing(P2PError):
    """There is no driver, or one that is too old; the text says what to install."""


class CudaError(P2PError):
    """The driver refused a call.

    Args:
        doing: What was tried, as the beginning of a sentence.
        code: The driver's CUresult.
        name: What the driver calls that, such as CUDA_ERROR_OUT_OF_MEMORY.
        text: What the driver says of it.
    """

    def __init__(self, doing: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{doing}: {name} ({code}), {text}. {_ADVICE.get(code, _OTHERWISE)}")
        self.code = code
        self.name = name


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One GPU, as the driver describes it."""

    ordinal: int
    name: str
    uuid: uuid.UUID
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    exports_fds: bool  # device memory can be shared between processes by a POSIX file descriptor
    exports_rdma: bool  # such memory can be reached by network adapters
    exclusive: bool  # one process at a time, or none
    mps: bool

    def __str__(self) -> str:
        return f"device {self.ordinal} ({self.name}, GPU-{self.uuid})"


class CudaDriver:
    """The driver's library, started in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.call("Starting the CUDA driver", "cuInit", 0)

    @classmethod
    def load(cls, path: str = LIBRARY) -> CudaDriver:
        """Load and start the driver, by its name or from a file.

        Raises:
            CudaMissing: there is none, or one that lacks a function needed.
            CudaError: it does not start; without a GPU for example.
        """
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaMissing(
                f"{path} is needed and does not load: {error}. Install NVIDIA's driver, or run the container with "
                "its GPUs (docker run --gpus all)."
            ) from error
        for name, arguments in _FUNCTIONS.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise CudaMissing(f"{path} has no function {name}: a driver of CUDA 12 or later is needed.") from error
            function.argtypes, function.restype = arguments, c_int
        return cls(library)

    def call(self, doing: str, function: str, *arguments: Any) -> None:
        """Call one of the driver's functions.

        Raises:
            CudaError: it returned anything but success.
        """
        code = getattr(self._library, function)(*arguments)
        if code:
            raise CudaError(doing, code, self._words("cuGetErrorName", code), self._words("cuGetErrorString", code))

    def _words(self, function: str, code: int) -> str:
        said = c_char_p()
        known = getattr(self._library, function)(code, ctypes.byref(said)) == 0
        return str(said.value, errors="replace") if known and said.value else "an error unknown to this driver"

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports, such as (13, 0)."""
        number = c_int()
        self.call("Asking for the driver's version", "cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def entry(self, function: str) -> int:
        """Where one of the driver's functions is, for native code."""
        return ctypes.cast(getattr(self._library, function), c_void_p).value or 0

    def attribute(self, ordinal: int, attribute: Attribute) -> int:
        """One property of a GPU."""
        device, value = c_int(), c_int()
        asking = f"Asking after {attribute.name} of device {ordinal}"
        self.call(asking, "cuDeviceGet", ctypes.byref(device), ordinal)
        self.call(asking, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def peer_has(self, ordinal: int, peer: int, attribute: int) -> bool:
        """Whether kernels of one GPU have access to another's memory (PEER_ACCESS), or atomics there (PEER_ATOMICS)."""
        value, asking = c_int(), f"Asking what device {ordinal} can do in the memory of device {peer}"
        self.call(asking, "cuDeviceGetP2PAttribute", ctypes.byref(value), attribute, ordinal, peer)
        return bool(value.value)

    def devices(self) -> list[DeviceFacts]:
        """Every GPU that this process sees, in the driver's order."""
        count = c_int()
        self.call("Counting GPUs", "cuDeviceGetCount", ctypes.byref(count))
        return [self._facts(ordinal) for ordinal in range(count.value)]

    def _facts(self, ordinal: int) -> DeviceFacts:
        asking, device = f"Asking after device {ordinal}", c_int()
        name, identity, total = ctypes.create_string_buffer(_NAME_BYTES), (c_ubyte * 16)(), c_size_t()
        self.call(asking, "cuDeviceGet", ctypes.byref(device), ordinal)
        self.call(asking, "cuDeviceGetName", name, _NAME_BYTES, device)
        self.call(asking, "cuDeviceGetUuid_v2", identity, device)
        self.call(asking, "cuDeviceTotalMem_v2", ctypes.byref(total), device)

        has = partial(self.attribute, ordinal)
        return DeviceFacts(
            ordinal=ordinal,
            name=name.value.decode(errors="replace"),
            uuid=uuid.UUID(bytes=bytes(identity)),
            total_bytes=total.value,
            capability=(has(Attribute.CAPABILITY_MAJOR), has(Attribute.CAPABILITY_MINOR)),
            multiprocessors=has(Attribute.MULTIPROCESSORS),
            exports_fds=bool(has(Attribute.VIRTUAL_MEMORY) and has(Attribute.POSIX_FD)),
            exports_rdma=bool(has(Attribute.RDMA_WITH_VIRTUAL_MEMORY)),
            exclusive=has(Attribute.COMPUTE_MODE) != 0,
            mps=self.version >= (12, 4) and bool(has(Attribute.MPS)),
        )
