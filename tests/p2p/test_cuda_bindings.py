"""The driver's structures and numbers are those of NVIDIA's own bindings, which need no GPU for it."""

from __future__ import annotations

import ctypes

import pytest

from p2p import cuda_device
from p2p.cuda_driver import _ADVICE, _FUNCTIONS, Access, AllocationProperties, Attribute, Location

driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings, found none; `make setup` installs it")

ATTRIBUTES = {
    Attribute.MULTIPROCESSORS: "MULTIPROCESSOR_COUNT",
    Attribute.COMPUTE_MODE: "COMPUTE_MODE",
    Attribute.CAPABILITY_MAJOR: "COMPUTE_CAPABILITY_MAJOR",
    Attribute.CAPABILITY_MINOR: "COMPUTE_CAPABILITY_MINOR",
    Attribute.VIRTUAL_MEMORY: "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    Attribute.POSIX_FD: "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    Attribute.RDMA_WITH_VIRTUAL_MEMORY: "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    Attribute.RDMA: "GPU_DIRECT_RDMA_SUPPORTED",
    Attribute.RDMA_FLUSH: "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    Attribute.RDMA_ORDERING: "GPU_DIRECT_RDMA_WRITES_ORDERING",
    Attribute.MPS: "MPS_ENABLED",
}
CONSTANTS = {
    "_PINNED": driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
    "_POSIX_FD": driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    "_ON_DEVICE": driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE,
    "_READ_WRITE": driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    "_RECOMMENDED": driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
    "_REGISTERED": driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP,
    "_NON_BLOCKING": driver.CUstream_flags.CU_STREAM_NON_BLOCKING,
    "_RELAXED": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
}


def test_every_attribute_has_the_drivers_number() -> None:
    assert ATTRIBUTES.keys() == set(Attribute)
    for attribute, name in ATTRIBUTES.items():
        found = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        assert attribute == found, f"{name}: {attribute} here, {int(found)} there"


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_has_the_drivers_value(name: str) -> None:
    assert getattr(cuda_device, name) == int(CONSTANTS[name])


def test_every_error_with_advice_is_one_of_the_drivers() -> None:
    assert _ADVICE.keys() <= {int(result) for result in driver.CUresult}


def test_every_function_is_one_of_the_drivers() -> None:
    known = {name.removesuffix("_v2") for name in _FUNCTIONS}
    assert known <= set(dir(driver)), known - set(dir(driver))


def test_structures_lie_in_memory_as_the_drivers_do() -> None:
    theirs = driver.CUmemAllocationProp()
    theirs.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    theirs.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 5
    theirs.allocFlags.compressionType = 7
    theirs.allocFlags.gpuDirectRDMACapable = 1
    theirs.allocFlags.usage = 0x1234
    ours = AllocationProperties(
        type=1, handle_types=1, location=Location(type=1, id=5), compression=7, rdma=1, usage=0x1234
    )
    assert bytes(ours) == ctypes.string_at(int(theirs.getPtr()), ctypes.sizeof(AllocationProperties))
    access = driver.CUmemAccessDesc()
    access.location.type, access.location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 5
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    wanted = ctypes.string_at(int(access.getPtr()), ctypes.sizeof(Access))
    assert bytes(Access(location=Location(type=1, id=5), flags=3)) == wanted
