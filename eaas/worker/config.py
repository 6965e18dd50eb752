"""Options of an attention worker, and those that whoever answers requests has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eaas.tracing import TracingOptions
from experts.config import MOST_WEIGHT, ComputingOptions, MemberOptions
from router.options import Options, OptionsInvalid, option

# Tokens of one block of the KV cache.
BLOCK_TOKENS = 16
NO_OVERLAP = (
    "--overlap is for attention workers on GPUs: a CPU computes a step as a whole. Leave it out, or serve with "
    "--device cuda."
)

NO_DRAFTS = (
    "--speculate is for attention workers on CPUs: a GPU samples where it computes, one token of each request a step. "
    "Leave it out, or serve with --device cpu."
)
MOST_DRAFTS = 16


def drafts_of(speculate: str) -> int:
    """Most tokens guessed ahead of a request, as the option says it. Raises OptionsInvalid."""
    kind, _, count = speculate.partition(":")
    if speculate == "off":
        return 0
    if kind != "ngram" or not count.isdecimal() or not 1 <= int(count) <= MOST_DRAFTS:
        raise OptionsInvalid(
            f"--speculate {speculate}: off, or ngram:N with 1 to {MOST_DRAFTS} tokens guessed ahead, is needed."
        )
    return int(count)


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Options):
    """Requests"""

    deadline_s: float = option(
        30.0,
        "Longest wait for a lost attention worker or expert server to return, for a new request and for one that goes "
        "on alike. What waits in the queue of a worker that computes others has none.",
        above=0,
    )
    max_model_len: int | None = option(
        None, "Longest prompt and output together; default: what the model allows.", metavar="TOKENS", least=1
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """The engine of an attention worker"""

    # 65,536 tokens x 2 (K and V) x 8 layers x 4 heads x 64 x 2 bytes = 512 MiB on shape S.
    kv_tokens: int = option(65536, "Tokens of KV cache of each attention worker.", least=BLOCK_TOKENS)
    step_tokens: int = option(512, "Most rows computed in one step.", metavar="ROWS", least=1)
    max_running: int = option(256, "Most requests that run at once.", least=1)
    # A step of a few rows more is hardly longer, and it is what a request waits for.
    background_rows: int = option(
        4, "Most rows of a step for background requests while others come.", metavar="ROWS", least=1
    )
    prefill_share: float = option(
        0.5,
        "Least share of their speed alone that prompts keep while other requests generate; more where more requests "
        "wait than generate. Above it, a step with prompts takes at most twice as long as one without; 1: prompts may "
        "take all rows of a step.",
        above=0,
        most=1,
    )
    pool_weight: int = option(
        1,
        "Part that rows of these attention workers have at CPU expert servers which others want more of than they can "
        "compute: other pools, or programs. Among several models times the weight of their own.",
        metavar="WEIGHT",
        least=1,
        most=MOST_WEIGHT,
    )
    prefix_reuse: bool = option(True, "Compute a common beginning of prompts once.")
    speculate: str = option(
        "off",
        "On CPUs: guess up to N tokens ahead of each request, from what it has said or was told and from its grammar, "
        "where that makes tokens come faster. Whatever is guessed, the tokens are the same.",
        metavar="ngram:N",
    )
    inspect_folder: Path | None = option(
        None,
        "Let operators record what the model computes (`eaas inspect`), into files below this folder. Default: nothing "
        "can be recorded.",
        metavar="FOLDER",
    )
    overlap: bool = option(
        False,
        "On GPUs: compute a step in two halves, one at the experts while the other attends. It pays where attention "
        "and transfer take longer than reading the experts' weights again, as each half asks nearly all of them.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        drafts_of(self.speculate)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(EngineOptions, RequestOptions, ComputingOptions, TracingOptions, MemberOptions):
    """Compute attention, gates and sampling for gateways; expert servers compute the experts.

    Example:
      eaas attention --router 127.0.0.1:7000 --model ./checkpoint
    """

    start_s: float = option(110.0, "Longest wait for the first placement.", above=0)
