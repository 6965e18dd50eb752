"""Two streams of one device: what the second runs overlaps what the first runs meanwhile, in a captured graph too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class Sent:
    """Work on the experts' stream: its end, once it has been launched."""

    event: torch.cuda.Event | None = None


class Streams:
    """The main stream and the experts'; nothing, in the interpreter."""

    def __init__(self, device: torch.device, main: torch.cuda.Stream | None = None) -> None:
        """Args: main: The main stream; a new one where None."""
        cuda = device.type == "cuda"
        self.stream = (main or torch.cuda.Stream(device)) if cuda else None
        self._experts = torch.cuda.Stream(device) if cuda else None
        if self.stream is not None:
            # Weights that came from elsewhere may still be on their way.
            self.stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def main(self) -> Iterator[None]:
        """What is launched inside goes to the main stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    @contextlib.contextmanager
    def away(self) -> Iterator[Sent]:
        """What is launched inside comes after all of the main stream so far, and beside what follows there."""
        sent = Sent()
        if self.stream is None or self._experts is None:
            yield sent
            return
        self._experts.wait_stream(self.stream)
        with torch.cuda.stream(self._experts):
            yield sent
            sent.event = torch.cuda.Event()
            sent.event.record(self._experts)

    def come_back(self, event: torch.cuda.Event | None) -> None:
        """The main stream goes on when that is done."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)

    def wait(self) -> None:
        """Until the main stream has done all."""
        if self.stream is not None:
            self.stream.synchronize()
