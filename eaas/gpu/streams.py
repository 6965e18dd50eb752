"""Two streams of one device: what the second runs overlaps what the first runs meanwhile, in a captured graph too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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

    def main(self) -> contextlib.AbstractContextManager[object]:
        """What is launched inside goes to the main stream."""
        return torch.cuda.stream(self.stream)

    @contextlib.contextmanager
    def away(self) -> Iterator[torch.cuda.Event | None]:
        """What is launched inside comes after all of the main stream so far, and beside what follows there.

        The event, where there are streams, is its end, once it has been launched.
        """
        if self.stream is None or self._experts is None:
            yield None
            return
        self._experts.wait_stream(self.stream)
        with torch.cuda.stream(self._experts):
            end = torch.cuda.Event()
            yield end
            end.record(self._experts)

    def come_back(self, event: torch.cuda.Event | None) -> None:
        """The main stream goes on when that is done."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)

    def wait(self) -> None:
        """Until the main stream has done all."""
        if self.stream is not None:
            self.stream.synchronize()
