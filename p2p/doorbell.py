"""Doorbells without native code: the same page (native/doorbell.h), rung and waited on through libc.

An increment here is not atomic and the wake is unconditional. That is enough: a doorbell is only a hint, and
every wait ends after at most 5 ms. Native code and this one can share a page.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import time
from typing import Final

PAGE_BYTES: Final = 4096
MAGIC: Final = 0x42503250
VERSION: Final = 1
LANES_LIMIT: Final = 63
WAIT_NS: Final = 5_000_000
BLIND_WAIT_NS: Final = 50_000

_HEADER: Final = struct.Struct("<IIQQII")
_HEARTBEAT_OFFSET: Final = 16
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_EVERY_WAITER: Final = 0x7FFFFFFF
_FUTEX_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def page_header(incarnation: int, lanes: int) -> bytes:
    """The first bytes of an endpoint's doorbell page; the rest is zero.

    Raises:
        ValueError: lanes not in 1..63.
    """
    if not 1 <= lanes <= LANES_LIMIT:
        raise ValueError(f"{lanes} lanes asked for; a doorbell page has room for 1 to {LANES_LIMIT}.")
    return _HEADER.pack(MAGIC, VERSION, incarnation, 0, 0, lanes)


def beat(page_address: int) -> None:
    """Say in the page's heartbeat word that the loop which waits on its bells goes on."""
    if page_address:
        ctypes.c_uint64.from_address(page_address + _HEARTBEAT_OFFSET).value += 1


def heartbeat(page_address: int) -> int:
    """The heartbeat word; 0 where the page is null."""
    return ctypes.c_uint64.from_address(page_address + _HEARTBEAT_OFFSET).value if page_address else 0


def ring(page_address: int, lane: int) -> None:
    """Wake whoever waits on that lane; nothing where the page is null or the lane out of range."""
    if not page_address or not 0 <= lane < LANES_LIMIT:
        return
    bell = _bell(page_address, lane)
    bell.value += 1
    _futex(bell, _FUTEX_WAKE, _EVERY_WAITER, None)


def read(page_address: int, lane: int) -> int:
    """The bell's present value: read it, scan the signals, then wait on it."""
    return _bell(page_address, lane).value if page_address and 0 <= lane < LANES_LIMIT else 0


def wait(page_address: int, lane: int, seen: int, timeout_ns: int) -> bool:
    """Park until the bell differs from `seen` or the time (at most 5 ms) is over; True where it rang."""
    if not page_address or not 0 <= lane < LANES_LIMIT:
        time.sleep(min(timeout_ns, BLIND_WAIT_NS) / 1e9)
        return False
    bell = _bell(page_address, lane)
    # Native senders look at this word before they pay for a wake.
    sleeping = ctypes.c_uint32.from_address(page_address + 64 * (1 + lane) + 4)
    sleeping.value = 1
    _futex(bell, _FUTEX_WAIT, seen, _Duration(0, min(timeout_ns, WAIT_NS)))
    sleeping.value = 0
    return bell.value != seen


def _bell(page_address: int, lane: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(page_address + 64 * (1 + lane))


def _futex(word: ctypes.c_uint32, operation: int, value: int, timeout: _Duration | None) -> None:
    number = _FUTEX_NUMBERS.get(platform.machine())
    if number is None:
        time.sleep(BLIND_WAIT_NS / 1e9 if operation == _FUTEX_WAIT else 0)
        return
    limit = ctypes.byref(timeout) if timeout is not None else None
    arguments = (ctypes.c_long(number), ctypes.byref(word), operation, ctypes.c_uint32(value), limit, None, 0)
    expected = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
    if _libc.syscall(*arguments) < 0 and ctypes.get_errno() not in expected:
        raise OSError(ctypes.get_errno(), "futex refused")
