"""One choice in flight, as the pool of attention workers keeps it. Pure."""

from __future__ import annotations

from eaas.gateway.choice_of_worker import beginning
from eaas.gateway.link import WorkerLink
from eaas.gateway.text import Choice, Generation
from eaas.gateway.token_log import TokenLog
from eaas.worker.protocol import SamplingParams


class Sequence:
    """One choice in flight: its log, its parameters, and where it is being served."""

    __slots__ = (
        "begun",
        "choice",
        "debt",
        "first_s",
        "generation",
        "id",
        "last_s",
        "link",
        "log",
        "numerics_class",
        "open_end",
        "params",
        "prefill",
        "prefix",
        "refused_by",
        "refused_since_s",
        "started_s",
        "traceparent",
        "trial_most",
        "waiting_since_s",
    )

    def __init__(
        self,
        *,
        id: str,
        prompt: list[int],
        params: SamplingParams,
        choice: Choice,
        generation: Generation,
        open_end: bool = False,
    ) -> None:
        """Args: open_end: the client named no limit; that of ``params`` is lowered to what the worker has room for."""
        self.id = id
        self.log = TokenLog(prompt)
        self.prefix = beginning(prompt)
        self.params = params
        self.open_end = open_end
        self.choice = choice
        self.generation = generation
        self.link: WorkerLink | None = None
        self.prefill = 0  # tokens to compute before this attempt's first new one
        self.begun = False  # its worker has begun to compute this attempt
        self.trial_most: int | None = None  # how many are tried with it at once, at most
        self.debt = 0  # tokens still to be computed, the prefill included
        self.numerics_class: str | None = None
        self.traceparent = ""  # of the request's span, where it is traced
        self.refused_by: set[int] = set()
        self.refused_since_s = 0.0  # every worker was full; 0: not since the last token
        self.started_s = 0.0
        self.first_s = 0.0
        self.last_s = 0.0
        self.waiting_since_s = 0.0

    def cost(self, most_output: int) -> int:
        """Tokens to be computed from here on: prefill, and at most so many reckoned for the output."""
        log = self.log
        left = self.params.max_tokens - len(log.output)
        return len(log.prompt) + len(log.output) + max(1, min(left, most_output))
