"""The baseline of the nixl transport: NIXL's own calls, with nothing around them.

Memory is registered once and every transfer initialised before it is timed; a request is one WRITE that carries a
notification, posted again and again. Nothing is sealed, validated or copied out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.transports.side import SLOTS, Load, rounds, until

_DONE = "DONE"


class NixlBare:
    """One agent; for each link SLOTS pieces of registered memory to write from, and as many to be written."""

    pinned = True

    def __init__(self, index: int, links: int, payload_bytes: int) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._name = f"bare-{os.getpid()}-{index}"
        self._agent: Any = nixl_agent(self._name, config)
        self._source = np.ones(payload_bytes, np.uint8)
        self._memory = np.ones((links, SLOTS, payload_bytes), np.uint8)
        self._registered = [
            self._agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
            for array in (self._source, self._memory)
        ]
        self._peers: list[tuple[str, int]] = []
        self._posted: dict[tuple[int, int, int], Any] = {}
        self._under_way: set[tuple[int, int, int]] = set()
        self._arrived: Counter[str] = Counter()
        self._numbers = [0] * links

    def offers(self) -> list[str]:
        """The agent's metadata and where each link's memory lies."""
        metadata = self._agent.get_agent_metadata().hex()
        return [json.dumps([metadata, self._name, row.ctypes.data]) for row in self._memory]

    def join(self, offers: Sequence[str]) -> None:
        """Load the other agents' metadata."""
        for offer in offers:
            metadata, name, address = json.loads(offer)
            self._agent.add_remote_agent(bytes.fromhex(metadata))
            self._peers.append((name, address))

    def drive(self, load: Load) -> list[int]:
        """As `Side.drive`."""
        self._prepare(load.request_bytes)
        links = range(len(self._peers))

        def post(number: int) -> None:
            for link in links:
                self._send(link, load.request_bytes)

        def finish(number: int) -> None:
            for link in links:
                self._take([link])

        return rounds(load, post, finish)

    def serve(self, load: Load) -> None:
        """As `Side.serve`."""
        self._prepare(load.reply_bytes)
        links = list(range(len(self._peers)))
        for _ in range(len(links) * load.count):
            link = self._take(links)
            links.append(links.pop(links.index(link)))
            self._send(link, load.reply_bytes)
        for key in self._posted:
            self._finish(key)

    def close(self) -> None:
        """Release transfers, peers and memory."""
        for handle in self._posted.values():
            self._agent.release_xfer_handle(handle)
        for name, _ in self._peers:
            self._agent.remove_remote_agent(name)
        for registered in self._registered:
            self._agent.deregister_memory(registered)

    def _prepare(self, nbytes: int) -> None:
        """Initialise the transfers of this size."""
        for link, (name, address) in enumerate(self._peers):
            for slot in range(SLOTS):
                if (link, slot, nbytes) in self._posted:
                    continue
                place = address + slot * self._source.nbytes
                local = self._agent.get_xfer_descs([(self._source.ctypes.data, nbytes, 0)], "DRAM")
                remote = self._agent.get_xfer_descs([(place, nbytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("WRITE", local, remote, name, b"1")
                self._posted[link, slot, nbytes] = handle

    def _send(self, link: int, nbytes: int) -> None:
        self._numbers[link] += 1
        key = (link, self._numbers[link] % SLOTS, nbytes)
        self._finish(key)
        self._agent.transfer(self._posted[key])
        self._under_way.add(key)

    def _finish(self, key: tuple[int, int, int]) -> None:
        """Until that transfer, if it was posted, is done."""
        until(lambda: key not in self._under_way, self._advance)

    def _advance(self) -> None:
        """Ask after every transfer under way: a notification leaves only when its transfer is seen to be done."""
        for key in list(self._under_way):
            if self._agent.check_xfer_state(self._posted[key]) == _DONE:
                self._under_way.remove(key)

    def _take(self, links: Sequence[int]) -> int:
        """The first of the links that has a notification, which this takes."""
        found = -1

        def look() -> bool:
            nonlocal found
            self._advance()
            for name, notes in self._agent.get_new_notifs().items():
                self._arrived[name] += len(notes)
            found = next((link for link in links if self._arrived[self._peers[link][0]]), -1)
            return found >= 0

        until(look, lambda: None)
        self._arrived[self._peers[found][0]] -= 1
        return found
