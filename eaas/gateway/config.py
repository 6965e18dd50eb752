"""Settings of one gateway. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.events import DRAIN_S


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Limits and times of a gateway.

    Attributes:
        model_name: The one name under /v1/models.
        tokens_by_id: Log-probabilities name tokens by their ids where a request does not say.
        always_usage: Every chunk of a stream has its usage, and the last one that of all.
        max_logprobs: Likeliest tokens told beside each, at most; -1: as many as workers tell.
        deadline_s: Longest wait for an attention worker to appear, for a new request and for a replay alike. What
            waits in the queue of a worker that computes others has none.
        max_requests: Requests in progress; one more is refused with 429 and Retry-After.
        body_limit_bytes: Largest request body.
        body_timeout_s: Longest time for a body to arrive.
        max_owed_tokens: Tokens still to be computed for all requests, prompts and reckoned outputs; a request that
            would exceed it is refused like one too many, unless it is alone.
        stall_s: A stream whose client reads nothing for so long is ended.
        drain_s: Longest that a gateway which has been replaced goes on with the streams that it has.
        suspect_losses: Attempts of one choice that ended in a row with its worker and without a new token, from which
            on it is tried where it can take no other with it, with half of its like: a request may bring down what
            computes it, and with it those beside it.
        max_losses: Attempts of one request's choices, tried alone in the end, that may end so.
        ttft_target_s, tpot_target_s: A choice within both counts as good (goodput): its first token, and the mean time
            of each later one.
        batch_tokens: Output tokens reckoned for a choice when its worker is chosen, at most: limits are
            mostly far above what is generated.
        silence_margin_s: Beyond the deadline, before a silent worker is taken for lost.
        max_connections: Connections of clients; one more is closed at once.
        head_limit_bytes: Largest request line with its headers.
        max_headers: Most headers of a request, trailers included.
        head_timeout_s: Longest time for the head of a request to arrive; for the first, since the connection was made.
        tls_dir: What this gateway proves its role with towards router and attention workers; None: no TLS there.
        drain_move_s: Choices that have not ended so long after their worker began to drain go on elsewhere: each
            costs its prefill once, and all together hold a whole worker.
    """

    model_name: str
    tokens_by_id: bool = False
    always_usage: bool = False
    max_logprobs: int = 20
    deadline_s: float = 30.0
    # Each holds a descriptor, and where its reader is slow 64 KiB of events here, as much or little more in the
    # connection's buffer and 256 KiB in the kernel's: 0.4 GiB where all of them are slow.
    max_requests: int = 1024
    # 1,024 requests of 1,024 tokens. As Python ints of 36 bytes with their place in a list, 38 MB; at 2,000 tokens/s
    # of prompts, nine minutes of one worker.
    max_owed_tokens: int = 1 << 20
    body_limit_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    # Some 10 KB each while idle, 30 KB with TLS.
    max_connections: int = 4096
    head_limit_bytes: int = 64 << 10
    max_headers: int = 128
    head_timeout_s: float = 30.0
    tls_dir: Path | None = None
    stall_s: float = 60.0
    drain_s: float = 600.0
    suspect_losses: int = 2
    max_losses: int = 3
    # A reader waits a second without wondering, and reads at most 10 tokens a second.
    ttft_target_s: float = 1.0
    tpot_target_s: float = 0.1
    batch_tokens: int = 256
    silence_margin_s: float = 5.0
    # Half of what the router gives a member by default; whoever remains is replayed when its process ends.
    drain_move_s: float = DRAIN_S / 2

    def __post_init__(self) -> None:
        if self.max_logprobs < -1:
            raise ValueError(
                f"--max-logprobs {self.max_logprobs}; give -1 (as many as workers tell), 0 or more."
            )
        for name in (
            "deadline_s",
            "max_requests",
            "max_owed_tokens",
            "drain_s",
            "body_limit_bytes",
            "body_timeout_s",
            "max_connections",
            "head_limit_bytes",
            "max_headers",
            "head_timeout_s",
            "stall_s",
            "suspect_losses",
            "max_losses",
            "ttft_target_s",
            "tpot_target_s",
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
