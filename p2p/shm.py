"""The shm transport: endpoints of one host and one user, joined by sealed memfds (links: see local.py)."""

from __future__ import annotations

import ctypes
import mmap
import socket
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from p2p.descriptor import Descriptor, Transport
from p2p.frame import check_words
from p2p.local import LocalEndpoint, LocalPeer, LocalWindow, address_of
from p2p.shm_link import call, create_memory, map_memory


class ShmWindow(LocalWindow):
    """Memory that one peer writes and this process reads. Made by `ShmEndpoint.export_window`."""

    def __init__(self, endpoint: ShmEndpoint, offer: Descriptor) -> None:
        super().__init__(endpoint, offer, create_memory(f"p2p-{offer.name}"[:200], offer.nbytes))
        self._library = endpoint.library
        self._memory = np.empty(0, dtype=np.uint8)
        try:
            self._memory = np.frombuffer(mmap.mmap(self._fd, offer.nbytes), dtype=np.uint8)
            # Asked for once: numpy takes microseconds to say it.
            self._address = int(self._memory.ctypes.data)
        except BaseException:
            self._release()
            raise

    @property
    def address(self) -> int:
        self._require_open()
        return self._address

    @property
    def memory(self) -> NDArray[np.uint8]:
        self._require_open()
        return self._memory

    @property
    def is_open(self) -> bool:
        return len(self._memory) > 0

    def poll(self, offset: int, count: int, stride_bytes: int = 8) -> NDArray[np.uint64]:
        """Read `count` signal words, the first at `offset`, each an acquire: u64[count].

        Raises:
            ValueError: a word would lie outside the window or off 8 bytes.
        """
        self._require_open()
        check_words(self.nbytes, offset, count, stride_bytes)
        words = (ctypes.c_uint64 * count)()
        self._library.p2p_signals_load(self._address + offset, stride_bytes, count, words)
        return np.ctypeslib.as_array(words)

    def _let_go(self) -> None:
        # Views keep the mapping: what Python code still holds stays readable.
        self._memory = np.empty(0, dtype=np.uint8)


class ShmPeer(LocalPeer):
    """Another endpoint's window, mapped. Made by `ShmEndpoint.connect`."""

    def __init__(self, offer: Descriptor, link: socket.socket, window: mmap.mmap, page: mmap.mmap) -> None:
        super().__init__(offer, link, page)
        self._window = window
        self._address = address_of(window)

    @property
    def address(self) -> int:
        self._require_open()
        return self._address

    @property
    def is_open(self) -> bool:
        return not self._window.closed

    def _let_go(self) -> None:
        self._window.close()


class ShmEndpoint(LocalEndpoint[ShmWindow, ShmPeer]):
    """One process's end of the shm transport. A context manager; safe to use from several threads.

    Args:
        name: For logs and error messages, at most 255 bytes.
        incarnation: Of this process's life; a restarted process has another.
        lanes: Doorbells to offer, 1 to 63.
        retired_limit_bytes: A peer that keeps more than this of closed windows mapped is refused new ones.
    """

    transport: ClassVar[Transport] = Transport.SHM

    def _new_window(self, nbytes: int, incarnation: int) -> ShmWindow:
        return ShmWindow(self, self._describe(nbytes, incarnation))

    def _join(self, offer: Descriptor, timeout_s: float) -> ShmPeer:
        map_window = partial(map_memory, nbytes=offer.nbytes)
        return ShmPeer(offer, *call(offer, offer.address, self.incarnation, timeout_s, map_window))

    def _store(self, peer: ShmPeer, offset: int, data: NDArray[np.uint8]) -> None:
        peer._window[offset : offset + len(data)] = data.data

    def _store_signal(self, peer: ShmPeer, offset: int, value: int) -> None:
        self.library.p2p_signal_store(peer.address + offset, value)
