"""What is random about one response, all of it drawn at once. Pure."""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One response's: whatever in it is chosen by chance follows from this, so that every gateway that is given the
    same request under the same identity makes the same bytes.

    Attributes:
        drawn: 32 hexadecimal digits.
        created: Unix time in seconds.
    """

    drawn: str
    created: int

    def digest(self, label: str) -> bytes:
        """32 bytes for one purpose, which no other label tells anything of."""
        return hashlib.sha256(f"{self.drawn} {label}".encode()).digest()

    def seed(self, prompt: int) -> int:
        """The seed of a prompt's choices, by its number, where the client gave none; below 2**63."""
        return int.from_bytes(self.digest(f"seed {prompt}")[:8], "big") >> 1

    def item_id(self, prefix: str, number: int) -> str:
        """The id of an item of the output."""
        return f"{prefix}_{self.digest(f'item {number}').hex()[:32]}"

    def call_id(self, choice: int, number: int, letters: int = 0) -> str:
        """The id of a call, by its number in its choice: of so many letters; 0: of OpenAI's form."""
        digest = self.digest(f"call {choice} {number}")
        return (
            "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:letters])
            or f"call_{digest.hex()[:24]}"
        )
