"""What an expert computes between its two products. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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

    def apply(self, gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
        """By its definition, in the type of its arguments."""
        if self == SWIGLU:
            # No sum with 0, which would take the sign of -0 away.
            with np.errstate(over="ignore"):
                return gate / (1 + np.exp(-gate)) * up
        gated, upped = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        with np.errstate(over="ignore"):
            return gated / (1 + np.exp(-self.alpha * gated)) * (upped + self.shift)


SWIGLU = Activation()
