"""Window layout: native and Python agree, and a window that is not the agreed one is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p import native
from p2p.window import WindowLayout

SLOTS, CAPACITY, OWNER = 3, 5000, 42


@given(slots=st.integers(1, 4096), capacity=st.integers(1, 1 << 30))
def test_native_and_python_agree_on_sizes(slots: int, capacity: int) -> None:
    layout = WindowLayout(slots=slots, payload_bytes=capacity)
    assert native.load().p2p_window_bytes(slots, capacity) == layout.nbytes
    assert layout.slot_offset(slots - 1) + layout.stride_bytes == layout.nbytes
    assert layout.stride_bytes % 4096 == 0 and layout.stride_bytes >= 128 + capacity


@pytest.mark.parametrize("slots, capacity", [(0, 1), (4097, 1), (1, 0), (1, (1 << 30) + 1)])
def test_sizes_out_of_bounds_are_refused(slots: int, capacity: int) -> None:
    assert native.load().p2p_window_bytes(slots, capacity) == 0
    with pytest.raises(ValueError, match="choose 1 to"):
        WindowLayout(slots=slots, payload_bytes=capacity)


def test_a_slot_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="has slots 0 to 2"):
        WindowLayout(slots=SLOTS, payload_bytes=CAPACITY).slot_offset(3)


def test_only_the_agreed_window_passes_the_check() -> None:
    library = native.load()
    layout = WindowLayout(slots=SLOTS, payload_bytes=CAPACITY)
    memory = np.zeros(layout.nbytes, np.uint8)
    at = memory.ctypes.data

    def check(nbytes: int = layout.nbytes, owner: int = OWNER, slots: int = SLOTS, capacity: int = CAPACITY) -> int:
        return library.p2p_window_check(at, nbytes, owner, slots, capacity)

    assert check() == -21, "memory that was never initialised"
    assert library.p2p_window_init(at, layout.nbytes - 1, OWNER, SLOTS, CAPACITY) == -20
    assert library.p2p_window_init(at, layout.nbytes, OWNER, SLOTS, CAPACITY) == 0
    assert check() == 0
    assert check(nbytes=layout.nbytes - 1) == -20
    assert check(owner=OWNER + 1) == -23
    assert check(slots=SLOTS - 1) == check(capacity=CAPACITY - 1) == -24
    memory[4] = 9
    assert check() == -22
