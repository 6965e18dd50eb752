"""What several test modules of this package need: a stand-in for libcuda, and the two transports of one host."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p.build import run_compiler
from tests.p2p.one_host import OneHost

SOURCE = Path(__file__).parent / "fake_cuda.cpp"


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a libcuda.so.1 whose device memory is memfds; alone in its folder."""
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    flags = ("-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
    run_compiler([*flags, str(SOURCE), "-o", str(library)])
    return library


@pytest.fixture(params=["shm", "cuda"])
def one_host(request: pytest.FixtureRequest) -> OneHost:
    """Each transport of one host, by turns."""
    return OneHost(request.getfixturevalue("stand_in") if request.param == "cuda" else None)
