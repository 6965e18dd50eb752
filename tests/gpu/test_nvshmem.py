"""The exchange's kernels over NVSHMEM's device functions: compiled and linked for an H200; nothing of it has run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

import re

import pytest

from benchmarks.gpu import nvshmem_host as nvshmem
from tests.gpu.device import gpus
from tests.gpu.test_exchange_compile import built

try:
    LIBRARY = nvshmem.library(*nvshmem.DEVICE_LIBRARIES)
except nvshmem.NvshmemError as error:
    pytest.skip(str(error), allow_module_level=True)


def test_a_group_has_a_name_and_where_there_is_no_gpu_it_says_so() -> None:
    one, other = nvshmem.unique_id(), nvshmem.unique_id()
    assert len(one) == nvshmem.UNIQUE_ID_BYTES and one != other
    if not gpus():
        with pytest.raises(nvshmem.NvshmemError, match="nvshmemx_hostlib_init_attr: status"):
            nvshmem.Group(one, pe=0, pes=1)
    with pytest.raises(nvshmem.NvshmemError, match=r"libnvshmem_none.so needed, not found: pip install"):
        nvshmem.library("libnvshmem_none.so")


@pytest.mark.full(seconds=60)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["dispatch", "reply"])
def test_kernels_that_put_by_nvshmem_compile_and_link(name: str) -> None:
    """The compiler's last step turns down what refers to anything that is not there."""
    kernel = built(name, LIBRARY)
    assert set(re.findall(r"\.extern \.func[^;]*?(\w+)\s*\(\s*\.param", kernel.ptx)) <= {
        "vprintf",
        "__assertfail",
    }
    assert ".visible .const .align 8 .b8 nvshmemi_device_state_d" in kernel.ptx, "which the host fills in"
    body = kernel.ptx[kernel.ptx.index(f".entry {name}_kernel") :]
    assert not re.search(r"(st|atom|red)\.\S*release\.sys\.global", body.partition("\n}\n")[0]), (
        "a signal of another kind"
    )
    assert kernel.sass.count("Function :") == 1
