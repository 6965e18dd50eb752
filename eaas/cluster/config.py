"""What a local cluster consists of: pure configuration, refused where it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eaas.tracing import check_options
from experts.devices import Device
from p2p.transport import TransportChoice
from router.exposure import bound_address
from router.pools import autoscale_bounds


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """One model served by processes of this host.

    Raises:
        ValueError: a number is out of range, with what to change.
    """

    model: Path
    served_name: str
    # Pools as they begin; the router may be told to grow and shrink them later, down to none.
    experts: int = 2
    attention: int = 1
    replicas: int = 2
    # Copies in each layer beyond them; they follow the load.
    redundant_experts: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    cores: tuple[int, ...] = (0,)
    transport: str = "shm"
    # What computes, dealt out among the members of each pool.
    devices: tuple[str, ...] = ("cpu",)
    # Lanes of each expert server; 0: the cores are dealt out among the servers.
    expert_lanes: int = 0
    # 65,536 tokens x 2 (K and V) x 8 layers x 4 heads x 64 x 2 bytes = 512 MiB on shape S.
    kv_tokens: int = 65536
    step_tokens: int = 512
    deadline_s: float = 30.0
    lease_s: float = 2.0
    # Pools whose size follows their load, such as "expert:1..6".
    autoscale: tuple[str, ...] = ()
    # Of the router's admin listener; None: there is none, 0: any free one.
    admin_port: int | None = None
    admin_key_file: Path | None = None
    # Of the endpoint: HTTPS, and who may ask.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keys_file: Path | None = None
    # Whose pages may ask from a browser, with commas between; empty: nobody's.
    allowed_origins: str = ""
    trust_request_chat_template: bool = False
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    # Likeliest tokens told beside each, at most; None: as many as a gateway allows by itself.
    max_logprobs: int | None = None
    # SHA-256 of keys that were given by themselves: a file of them is made.
    api_key_digests: tuple[str, ...] = ()
    # Of the context, where fewer are wanted than the model has.
    max_model_len: int | None = None
    # Prefix of every path, behind a proxy.
    root_path: str = ""
    # Between the processes: a folder with one of each role, as `eaas certs` makes it; None: no TLS, on loopback.
    tls_dir: Path | None = None
    log_format: str = "text"
    # Of the first router; the others have the next ones. 0: any free one.
    router_port: int = 0
    prefix_reuse: bool = True
    # False leaves the gateway and the attention workers out: a bare expert pool, driven by whoever joins its router.
    endpoint: bool = True
    # Several routers, of which one leads, share what etcd holds; its addresses.
    routers: int = 1
    etcd: str = ""
    leader_ttl_s: float = 3.0
    # Every process takes the faults that the router passes on to it.
    allow_chaos: bool = False
    # Where traces go, by OTLP over HTTP, and of how many requests; empty: none are made.
    trace_url: str = ""
    trace_share: float = 1.0
    # Of journal and logs, where each cluster has a folder of its own; None: $XDG_STATE_HOME/eaas.
    state_dir: Path | None = None
    # Kill after this long when a process ignores SIGTERM; each role promises an orderly exit within 1 s.
    stop_s: float = 3.0

    def __post_init__(self) -> None:
        if self.experts < 0 or self.attention < 0:
            raise ValueError(
                f"{self.experts} expert servers and {self.attention} attention workers asked for; give 0 (requests "
                "wait until the pool grows) or more with --experts and --attention."
            )
        if self.replicas < 1 or self.replicas > self.experts > 0:
            raise ValueError(
                f"{self.replicas} replicas of each expert need {self.replicas} expert servers, found --experts "
                f"{self.experts}. Raise --experts or lower --replicas (at least 1)."
            )
        if self.routers < 1 or (self.routers > 1 and not self.etcd):
            raise ValueError(
                f"{self.routers} routers asked for, with {self.etcd or 'no etcd'} to share; one router needs none, "
                "several need one. Name it: --etcd http://127.0.0.1:2379."
            )
        ports = {"--port": self.port, "--admin-port": self.admin_port or 0, "router port": self.router_port}
        for option, port in ports.items():
            if not 0 <= port <= 65535:
                raise ValueError(f"{option} {port} is no TCP port; choose 0 (any free one) to 65535.")
        if self.admin_key_file is not None and self.admin_port is None:
            raise ValueError(
                "--admin-key-file without --admin-port: there is no listener to ask for the key."
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both, or neither.")
        if self.keys_file is not None and self.api_key_digests:
            raise ValueError(
                "--keys-file and --api-key exclude each other: add the key to the file, or leave one out."
            )
        bound_address(
            "--host",
            self.host,
            {
                "TLS (--tls-cert and --tls-key)": self.tls_cert is not None,
                "keys (--keys-file)": self.asks_for_keys,
            },
        )
        autoscale_bounds(self.autoscale)
        check_options(self.trace_url, self.trace_share)
        TransportChoice.parse(self.transport)
        kinds = [Device.parse(device).kind.value for device in self.devices]
        ask, answer = ({kinds[i % len(kinds)] for i in range(n)} for n in (self.attention, self.experts))
        if self.endpoint and ask and answer and ask != answer:
            raise ValueError(
                f"--device {','.join(self.devices)} deals {self.attention} attention workers out to "
                f"{' and '.join(sorted(ask))}, {self.experts} expert servers to {' and '.join(sorted(answer))}; "
                "workers ask servers of their own kind only. Give as many of each as devices are listed: --attention "
                f"{len(kinds)} --experts {len(kinds)}."
            )
        if not self.cores:
            raise ValueError("No CPU core given; name at least one.")
        if not 0 <= self.expert_lanes <= len(self.cores):
            raise ValueError(
                f"{self.expert_lanes} lanes for each expert server; 0 (deal out the cores) to {len(self.cores)}, one "
                "for each core, are possible."
            )

    @property
    def asks_for_keys(self) -> bool:
        """Whether the endpoint asks who it is that asks."""
        return self.keys_file is not None or bool(self.api_key_digests)


def expert_cores(slot: int, servers: int, cores: Sequence[int], lanes: int = 0) -> list[int]:
    """Cores of the expert server in launch slot `slot`: one lane each, `lanes` of them where that is not 0.

    With at least as many servers as cores each gets one core, round-robin; with fewer, the cores are dealt out
    among the servers so that none lies idle. A process keeps its cores when the pool changes later: one that
    started alone shares its cores with those that came after it.

    Args:
        servers: Wanted when this one starts.
    """
    if lanes:
        return [cores[(slot * lanes + lane) % len(cores)] for lane in range(lanes)]
    servers = max(servers, slot + 1)
    if servers >= len(cores):
        return [cores[slot % len(cores)]]
    return list(cores[slot % servers :: servers])
