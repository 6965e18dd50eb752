"""Options of a gateway. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eaas.tracing import TracingOptions
from eaas.worker.config import RequestOptions
from router.config import ChildOptions, EtcdOptions, JoinOptions
from router.events import DRAIN_S
from router.options import OptionsInvalid, option


@dataclass(frozen=True, kw_only=True)
class EndpointOptions(RequestOptions, TracingOptions, EtcdOptions):
    """The HTTP endpoint"""

    host: str = option(
        "127.0.0.1",
        "IP address to listen on; beyond loopback it needs --tls-cert, --tls-key and --keys-file.",
        metavar="IP",
    )
    port: int = option(8000, "TCP port of the HTTP endpoint; 0 takes a free one.", least=0, most=65535)
    served_model_name: str = option("", "Name that clients use; default: the model's own.", metavar="NAME")
    root_path: str = option(
        "",
        "Prefix of every path, such as /llm, where a proxy passes requests on with it: with it and without it requests "
        "are the same.",
        metavar="/PREFIX",
    )
    tls_cert: Path | None = option(
        None, "PEM chain to speak HTTPS with, own certificate first; needs --tls-key.", metavar="FILE"
    )
    tls_key: Path | None = option(None, "Private key of --tls-cert.", metavar="FILE")
    keys_file: Path | None = option(
        None,
        "API keys as `eaas keys` writes them: every request must bring one, but GET /health, /ping and /version. Read "
        "again when it changes, and on SIGHUP.",
        metavar="FILE",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Pages of these origins may ask from a browser, such as https://chat.example; * for any; default: none.",
        metavar="ORIGIN,...",
    )
    jobs: str = option(
        "",
        "Where responses are kept that are asked for in the background, or to be stored: a file, for gateways of one "
        "host, or etcd://HOST:PORT[,...]/PREFIX (TLS beyond loopback). `eaas serve` keeps them in its own folder, "
        "which ends with it; without it no response is kept.",
        metavar="FILE|URL",
    )
    trust_request_chat_template: bool = option(
        False, "Requests may bring a chat template of their own, which runs in the sandbox of the model's."
    )
    return_tokens_as_token_ids: bool = option(
        False, "Log-probabilities name tokens token_id:7 where a request does not say otherwise."
    )
    enable_force_include_usage: bool = option(
        False, "Every chunk of every stream has its usage, and the last one that of all."
    )
    max_logprobs: int = option(
        20,
        "Likeliest tokens that a request may ask for beside each token; -1: as many as workers tell, 4,096.",
        least=-1,
    )
    event_ids: bool = option(
        True,
        "Events of streams have ids, by which a client goes on with one that was cut: send the request again with the "
        "header Last-Event-ID. Off for clients that take every line for data, such as `vllm bench serve`.",
    )
    trace_share: float = option(
        1.0, "Share of requests that are traced, where the client does not say.", least=0, most=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionsInvalid("--tls-cert and --tls-key belong together: give both, or neither.")
        if self.root_path.rstrip("/") and not re.fullmatch(r"(/[\w.~-]+)+/*", self.root_path, re.ASCII):
            raise OptionsInvalid(f"--root-path {self.root_path} is no path prefix; give one such as /llm.")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(EndpointOptions, ChildOptions):
    """Limits and times of the gateway"""

    # Each holds a descriptor, and where its reader is slow 64 KiB of events here, as much or little more in the
    # connection's buffer and 256 KiB in the kernel's: 0.4 GiB where all of them are slow.
    max_requests: int = option(
        1024, "Requests in progress, of each model; one more is refused with 429 and Retry-After.", above=0
    )
    # 1,024 requests of 1,024 tokens. As Python ints of 36 bytes with their place in a list, 38 MB; at 2,000 tokens/s
    # of prompts, nine minutes of one worker.
    max_owed_tokens: int = option(
        1 << 20,
        "Tokens still to be computed for all requests of a model, prompts and estimated outputs; a request that would "
        "exceed it is refused like one too many, unless it is alone.",
        above=0,
    )
    max_body_bytes: int = option(4 << 20, "Largest request body.", above=0)
    # Some 10 KB each while idle, 30 KB with TLS.
    max_connections: int = option(4096, "Connections of clients; one more is closed at once.", above=0)
    jobs_most: int = option(
        4096, "Responses that are kept; one more is refused with 429, unless it need not be.", above=0
    )
    jobs_bytes: int = option(1 << 30, "Bytes of responses that are kept; more are refused so too.", above=0)
    jobs_kept_s: float = option(86400.0, "How long a response is kept when it has ended.", above=0)
    # Each holds up to 8 MiB of events.
    jobs_running: int = option(
        16, "Background responses of each model that one gateway computes at a time.", above=0, most=64
    )
    stall_s: float = option(60.0, "End a stream whose client reads nothing for so long.", above=0)
    drain_s: float = option(
        600.0, "Longest that a gateway which has been replaced goes on with the streams that it has.", above=0
    )
    # A reader waits a second without wondering, and reads at most 10 tokens a second.
    ttft_target_s: float = option(1.0, "Longest time to the first token that counts as good in goodput.", above=0)
    tpot_target_s: float = option(0.1, "Longest mean time of each later token that counts as good in goodput.", above=0)

    # Longest time for a body to arrive.
    body_timeout_s: float = 30.0
    # Of a request's line with its headers, trailers included, and the longest time for them to arrive; for the first
    # request, since the connection was made.
    head_limit_bytes: int = 64 << 10
    max_headers: int = 128
    head_timeout_s: float = 30.0
    # Attempts of one choice that ended in a row with its worker and without a new token, from which on it is tried
    # where it can take no other with it, with half of its like: a request may bring down what computes it, and with it
    # those beside it. And attempts of one request's choices, tried alone in the end, that may end so.
    suspect_losses: int = 2
    max_losses: int = 3
    # Output tokens estimated for a choice when its worker is chosen, at most: limits are mostly far above what is
    # generated.
    batch_tokens: int = 256
    # Beyond the deadline, before a silent worker is taken for lost.
    silence_margin_s: float = 5.0
    # Choices that have not ended so long after their worker began to drain go on with another: each costs its prefill
    # once, and all together hold a whole worker. Half of what the router gives a member by default; whoever remains is
    # replayed when its process ends.
    drain_move_s: float = DRAIN_S / 2

    @property
    def silence_s(self) -> float:
        """A worker that has work and is silent for so long is taken for lost: its own deadline is over."""
        return self.deadline_s + self.silence_margin_s


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(GatewayConfig, JoinOptions):
    """Serve the OpenAI API over HTTP for the attention workers that the router knows.

    Example:
      eaas gateway --router 127.0.0.1:7000 --model ./checkpoint --port 8000
    """

    model: Path = option(help="Checkpoint folder: tokenizer and configuration.", metavar="DIR")
    listen_fd: int = option(-1, "Listening socket from the launcher, instead of --host and --port.")
    resume_key_file: Path | None = option(
        None,
        "Secret of at least 32 bytes that all gateways of a cluster share: each goes on with streams of the others. "
        "Without one each goes on with its own alone. Read at the start.",
        metavar="FILE",
    )
    drain_on_term: bool = option(
        False,
        "At SIGTERM go on with the streams that there are, as after a replacement; a second one ends them. For "
        "orchestrators that have started another gateway before. Without it they end at once, with an error.",
    )
    open_metrics: bool = option(False, "Answer GET /metrics without a key, as Prometheus asks by default.")
    log_requests: bool = option(
        False, "Log a line for each request: method, path, status, time and the name of its key; never what was asked."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.open_metrics and self.keys_file is None:
            raise OptionsInvalid("--open-metrics without --keys-file: nothing asks for a key; leave it out.")
