"""Stop strings, matched in a stream of text whatever the token boundaries. Pure.

An Aho-Corasick automaton over the stop strings reads one character at a time. Its state is the longest suffix
of the text that begins some stop string: exactly the text that must be withheld. A match is taken where the
first stop string ends, and the longest one that ends there wins, so the result does not depend on how the
text was cut into pushes, and a replay finds the same place.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopAutomaton:
    """The automaton of one set of stop strings; immutable, shared by the choices of a request."""

    __slots__ = ("children", "depth", "fail", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Build it in time proportional to the total length of ``stops``. Raises ValueError: a stop string is empty."""
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.matched = [0]
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty: every stop string needs at least one character")
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            depth = self.depth[node] + 1
            node = self.children[node].setdefault(character, len(self.children))
            if node == len(self.children):
                self.children.append({})
                self.depth.append(depth)
                self.fail.append(0)
                self.matched.append(0)
        self.matched[node] = len(stop)

    def _link(self) -> None:
        level = list(self.children[0].values())
        while level:
            below: list[int] = []
            for node in level:
                for character, child in self.children[node].items():
                    self.fail[child] = self.step(self.fail[node], character)
                    # The node's own string is longer than any that ends at its failure link.
                    self.matched[child] = self.matched[child] or self.matched[self.fail[child]]
                    below.append(child)
            level = below

    def step(self, node: int, character: str) -> int:
        """The node after reading one character at ``node``."""
        while node and character not in self.children[node]:
            node = self.fail[node]
        return self.children[node].get(character, 0)


class StopMatcher:
    """Reads one choice's text and says what may be shown; ``stopped`` once a stop string has been found."""

    __slots__ = ("_automaton", "_held", "_node", "_stop_shown", "found", "stopped")

    def __init__(self, automaton: StopAutomaton, *, stop_shown: bool = False) -> None:
        """Args: stop_shown: the stop string that ends the text is part of it."""
        self._automaton = automaton
        self._stop_shown = stop_shown
        self._held = ""
        self._node = 0
        self.stopped = False
        self.found = ""  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Read ``text`` and return what can no longer be part of a stop string; nothing after a match."""
        if self.stopped:
            return ""
        automaton, node = self._automaton, self._node
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            node = automaton.step(node, character)
            if automaton.matched[node]:
                self.stopped = True
                self._held = ""
                start = position - automaton.matched[node]
                self.found = pending[start:position]
                return pending[: position if self._stop_shown else start]
        self._node = node
        keep = len(pending) - automaton.depth[node]
        self._held = pending[keep:]
        return pending[:keep]

    def flush(self) -> str:
        """The withheld text, when the stream has ended without a match."""
        held, self._held, self._node = self._held, "", 0
        return held
