"""Finds the bytes of an expert: in this host's packed file, at a server that serves it, or in the checkpoint.

Whichever is faster, by measurement. What the file holds is mapped, and costs one pass of reading. What it lacks is
had from the source with the best estimate of bytes per second, and written into the file, where every server of the
host finds it. The first server and the checkpoint are each measured on one expert (a server on its second: the first
waits for the connection); from then on the best of what was measured is taken. A server not measured yet counts as the
best one that was, and while a source is not used its estimate rises by 1% with each expert, so that none is written
off for good. A source that failed is left alone for a while, and one that gave wrong bytes for longer: its bytes may
have been repaired since.

Whoever gives the bytes, the manifest decides whether they are right.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.kernels import PackedExpert
from experts.manifest import BlobCorrupt, Manifest, PackLayout
from experts.pack import PackedExperts, pack_blob
from experts.transfer import PeerSource, SourceFailed, manifest_of
from p2p.endpoint import Endpoint
from router.tls import Credentials
from router.view import EXPERT, Member, View, of_model

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
UNUSED_RISE = 1.01
SPARED_S = 5.0
DISTRUSTED_S = 60.0
MANIFEST_TRIES = 4


class WeightsUnavailable(RuntimeError):
    """No source has an expert now; the text lists what each said."""


class Rates:
    """What is known of sources by name: bytes per second, and which are better left alone. Has no clock."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[str, float] = {}
        self._spared_until_s: dict[str, float] = {}

    def order(self, names: Iterable[str], now_s: float) -> list[str]:
        """Those that may be asked now, best first; among equals, measured ones, then as given."""
        asked = [name for name in names if self._spared_until_s.get(name, -math.inf) <= now_s]
        return sorted(asked, key=lambda name: (-self._estimate(name), name not in self._bytes_per_s))

    def measured(self, name: str, nbytes: int, seconds: float) -> None:
        """A source gave an expert."""
        for other in self._bytes_per_s:
            self._bytes_per_s[other] *= UNUSED_RISE
        self._bytes_per_s[name] = nbytes / max(seconds, 1e-9)

    def failed(self, name: str, until_s: float) -> None:
        """Leave a source alone until then."""
        self._bytes_per_s.pop(name, None)
        self._spared_until_s[name] = until_s

    def _estimate(self, name: str) -> float:
        if name in self._bytes_per_s:
            return self._bytes_per_s[name]
        servers = [rate for other, rate in self._bytes_per_s.items() if other != CHECKPOINT]
        return max(servers) if servers and name != CHECKPOINT else math.inf


def manifest_from(view: View, layout: PackLayout, credentials: Credentials | None = None) -> Manifest | None:
    """What the experts are, as a server of this View says; None where none says it."""
    own = of_model(view, layout.fingerprint)
    servers = [member for member in own.pool(EXPERT) if _gives(member, layout)]
    for member in servers[:MANIFEST_TRIES]:
        try:
            return manifest_of(member, layout, credentials)
        except SourceFailed as error:
            log.warning("no_manifest reason=%s", error)
    return None


def _gives(member: Member, layout: PackLayout) -> bool:
    return bool(member.serving_count) and member.numerics_class == layout.numerics_class


class Weights:
    """The experts of one model at one server. For use from one thread, but for `stop`.

    Args:
        name: Of the server, which is no source for itself.
        endpoint: Over which others give; None: ask nobody.
        checkpoint: None where this host has none.
    """

    def __init__(
        self,
        *,
        name: str,
        packed: PackedExperts,
        endpoint: Endpoint | None,
        checkpoint: Checkpoint | None,
        credentials: Credentials | None = None,
    ) -> None:
        self.packed, self._credentials = packed, credentials
        self._name, self._endpoint = name, endpoint
        self._stop = threading.Event()
        self._rates = Rates()
        self._checkpoint = checkpoint
        self._sources: dict[str, PeerSource] = {}

    def expert(self, layer: int, expert: int, view: View, *, anew: bool = False) -> PackedExpert:
        """An expert whose bytes are right, mapped for as long as this process lives. Blocks.

        Args:
            view: Of this model; it names the servers that may be asked.
            anew: Ask a source even if the file holds it.

        Raises:
            WeightsUnavailable: no source has it now.
        """
        if anew or not self.is_here(layer, expert):
            self._obtain(layer, expert, view)
        return self.packed.expert(layer, expert)

    def rest(self) -> None:
        """Close what is open to servers; the next expert opens it again."""
        while self._sources:
            self._sources.popitem()[1].close()

    def stop(self) -> None:
        """Have what waits for a server fail, now and later. From any thread."""
        self._stop.set()

    def is_here(self, layer: int, expert: int) -> bool:
        """Whether the file holds an expert, byte for byte as it was packed. Reads all of it."""
        if self.packed.is_hole(layer, expert):
            return False
        try:
            self.packed.verify(layer, expert)
        except BlobCorrupt as corrupt:
            log.error("pack_corrupt layer=%d expert=%d reason=%s", layer, expert, corrupt)
            return False
        return True

    def _obtain(self, layer: int, expert: int, view: View) -> None:
        servers = {
            member.name: member
            for member in view.replicas(layer, expert)
            if self._endpoint is not None and member.name != self._name and _gives(member, self.packed.layout)
        }
        names = [CHECKPOINT] if self._checkpoint else []
        names += [name for name in self._sources if name in servers]
        # Each server begins with another of those that it never asked.
        start = sum(self._name.encode()) % max(1, len(servers))
        names += [name for name in (*servers, *servers)[start : start + len(servers)] if name not in names]
        faults: list[str] = []
        for name in self._rates.order(names, time.monotonic()):
            connected = name == CHECKPOINT or name in self._sources
            began_s = time.monotonic()
            try:
                blob = self._blob(name, servers, layer, expert)
                took_s = time.monotonic() - began_s
                self._put(layer, expert, blob)
            except BlobCorrupt as corrupt:
                faults.append(f"{name} gave wrong bytes: {corrupt}")
                self._leave(name, time.monotonic() + DISTRUSTED_S)
            except SourceFailed as failed:
                faults.append(str(failed))
                self._leave(name, time.monotonic() + SPARED_S)
            else:
                if connected:
                    self._rates.measured(name, len(blob), took_s)
                log.debug("weights layer=%d expert=%d from=%s took_s=%.4f", layer, expert, name, took_s)
                return
            log.error("source_failed layer=%d expert=%d reason=%s", layer, expert, faults[-1])
        raise WeightsUnavailable(
            f"expert {expert} of MoE layer {layer}: {'; '.join(faults) or 'no source may be asked now'}."
        )

    def _put(self, layer: int, expert: int, blob: NDArray[np.uint8]) -> None:
        """Fill a place and see that it holds what was given. Raises BlobCorrupt: these are not the expert's bytes."""
        try:
            self.packed.fill(layer, expert, blob)
        except OSError as error:
            # Another source would not help.
            raise WeightsUnavailable(f"{self.packed.path}: cannot be written: {error}.") from error
        try:
            self.packed.manifest.check(layer, expert, self.packed.blob(layer, expert))
        except BlobCorrupt as corrupt:
            # What was written was right, so its source is not to blame.
            raise WeightsUnavailable(
                f"{self.packed.path}: reads otherwise than it was written: {corrupt} See to this machine's memory and"
                " disk."
            ) from corrupt

    def _blob(self, name: str, servers: dict[str, Member], layer: int, expert: int) -> NDArray[np.uint8]:
        """The bytes that a source gives, not checked yet. Raises SourceFailed."""
        if name == CHECKPOINT and self._checkpoint is not None:
            try:
                blob = pack_blob(self.packed.layout, self._checkpoint, layer, expert)
                self._checkpoint.let_go()
                return blob
            except CheckpointInvalid as error:
                raise SourceFailed(str(error)) from error
            except OSError as error:
                raise SourceFailed(f"{self._checkpoint.directory}: cannot be read: {error}.") from error
        if name not in self._sources and self._endpoint is not None:
            self._sources[name] = PeerSource(
                endpoint=self._endpoint,
                member=servers[name],
                manifest=self.packed.manifest,
                stop=self._stop,
                credentials=self._credentials,
            )
        return self._sources[name].blob(layer, expert)

    def _leave(self, name: str, until_s: float) -> None:
        self._rates.failed(name, until_s)
        if source := self._sources.pop(name, None):
            source.close()
