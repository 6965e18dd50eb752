"""What an expert computes between its two products. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Activation:
    """act(gate, up) = g * sigmoid(alpha * g) * (u + shift), g = min(gate, limit), u = up within -limit to limit.

    As it stands by default it is SwiGLU, silu(gate) * up. GPT-OSS has (1.702, 7, 1).

    Raises:
        ValueError: alpha is not positive, or the limit is not.
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.alpha < math.inf and self.limit > 0 and math.isfinite(self.shift)):
            raise ValueError(
                f"activation alpha {self.alpha}, limit {self.limit}, shift {self.shift}: alpha and limit must be"
                " positive, alpha and shift finite."
            )


SWIGLU = Activation()
