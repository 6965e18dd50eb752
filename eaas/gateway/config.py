"""Settings of one gateway. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router.events import DRAIN_S


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Limits and times of a gateway.

    Attributes:
        model_name: The one name under /v1/models.
        deadline_s: Longest wait for an attention worker to appear, for a new request and for a replay alike.
        max_requests: Requests in progress; one more is refused with 429 and Retry-After.
        body_limit_bytes: Largest request body.
        body_timeout_s: Longest time for a body to arrive.
        stall_s: A stream whose client reads nothing for so long is ended.
        max_losses: Attempts of one choice that may end in a row without a new token.
        batch_tokens: Output tokens reckoned for a choice when its worker is chosen, at most: limits are
            mostly far above what is generated.
        silence_margin_s: Beyond the deadline, before a silent worker is taken for lost.
        drain_move_s: Choices that have not ended so long after their worker began to drain go on elsewhere: each
            costs its prefill once, and all together hold a whole worker.
    """

    model_name: str
    deadline_s: float = 30.0
    max_requests: int = 1024
    body_limit_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    stall_s: float = 60.0
    max_losses: int = 4
    batch_tokens: int = 256
    silence_margin_s: float = 5.0
    # Half of what the router gives a member by default; whoever remains is replayed when its process ends.
    drain_move_s: float = DRAIN_S / 2

    def __post_init__(self) -> None:
        for name in (
            "deadline_s",
            "max_requests",
            "body_limit_bytes",
            "body_timeout_s",
            "stall_s",
            "max_losses",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not self.model_name:
            raise ValueError("the served model name is empty; pass --served-model-name")

    @property
    def silence_s(self) -> float:
        """A worker that has work and is silent for so long is taken for lost: its own deadline is over."""
        return self.deadline_s + self.silence_margin_s
