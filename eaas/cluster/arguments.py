"""Command lines of a local cluster's processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eaas.cluster.config import ClusterConfig, expert_cores

# Of the cluster's folder: keys that its command line gave by themselves.
KEYS_FILE = "keys.json"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a process finds in the cluster that it is started into.

    Attributes:
        state_dir: Of this cluster.
        router_address: Of the routers, once there are any.
        experts_wanted: Size of the expert pool now.
        listen_fd: The endpoint's socket, -1 without one.
        admin_address: Where a router of this slot had its admin listener before; empty: it had none.
    """

    state_dir: Path
    router_address: str
    experts_wanted: int
    listen_fd: int
    admin_address: str


def arguments_of(
    config: ClusterConfig, surroundings: Surroundings, pool: str, slot: int, port: int
) -> list[str]:
    """Of the process in launch slot `slot` of a pool; `port`: where a router listens."""
    return [*_of_role(config, surroundings, pool, slot, port), *_of_all(config, pool)]


def _of_all(config: ClusterConfig, pool: str) -> list[str]:
    chaos = ["--allow-chaos"] if config.allow_chaos else []
    tls = ["--tls-dir", str(config.tls_dir / pool)] if config.tls_dir is not None else []
    return ["--log-format", config.log_format, *chaos, *tls]


def _of_role(config: ClusterConfig, surroundings: Surroundings, pool: str, slot: int, port: int) -> list[str]:
    if pool == "router":
        store = ["--journal", str(surroundings.state_dir / "router.sqlite")]
        if config.etcd:
            store = ["--store", "etcd", "--etcd", config.etcd, "--cluster", surroundings.state_dir.name]
            store += ["--leader-ttl-s", str(config.leader_ttl_s)]
        return [
            *store,
            *("--port", str(port), "--number", str(slot)),
            *("--experts", str(config.experts), "--attention", str(config.attention)),
            *("--replicas", str(config.replicas), "--lease-s", str(config.lease_s)),
            *("--redundant-experts", str(config.redundant_experts)),
            *(word for pool in config.autoscale for word in ("--autoscale", pool)),
            *_admin(config, surroundings, slot),
        ]
    shared = ["--router", surroundings.router_address, "--model", str(config.model)]
    traced = ["--trace-url", config.trace_url] if config.trace_url else []
    workers = ["--dtype", config.dtype, "--transport", config.transport]
    workers += ["--device", config.devices[slot % len(config.devices)]]
    if pool == "expert":
        cores = expert_cores(slot, surroundings.experts_wanted, config.cores, config.expert_lanes)
        return [*shared, *workers, "--cores", ",".join(map(str, cores))]
    if pool == "attention":
        return [
            *shared,
            *workers,
            *("--cores", ",".join(map(str, config.cores))),
            *("--kv-tokens", str(config.kv_tokens), "--step-tokens", str(config.step_tokens)),
            *("--deadline-s", str(config.deadline_s)),
            *_context(config),
            "--prefix-reuse" if config.prefix_reuse else "--no-prefix-reuse",
            *traced,
        ]
    return [
        *shared,
        *("--served-model-name", config.served_name),
        *("--listen-fd", str(surroundings.listen_fd)),
        *("--deadline-s", str(config.deadline_s)),
        *(*traced, "--trace-share", str(config.trace_share)),
        *(("--tls-cert", str(config.tls_cert)) if config.tls_cert else ()),
        *(("--tls-key", str(config.tls_key)) if config.tls_key else ()),
        *(
            ("--keys-file", str(config.keys_file or surroundings.state_dir / KEYS_FILE))
            if config.asks_for_keys
            else ()
        ),
        *_context(config),
        *(("--root-path", config.root_path) if config.root_path else ()),
        *(("--allowed-origins", config.allowed_origins) if config.allowed_origins else ()),
        *(("--trust-request-chat-template",) if config.trust_request_chat_template else ()),
        *(("--return-tokens-as-token-ids",) if config.return_tokens_as_token_ids else ()),
        *(("--enable-force-include-usage",) if config.enable_force_include_usage else ()),
        *(() if config.max_logprobs is None else (f"--max-logprobs={config.max_logprobs}",)),
    ]


def _context(config: ClusterConfig) -> list[str]:
    return [] if config.max_model_len is None else ["--max-model-len", str(config.max_model_len)]


def _admin(config: ClusterConfig, surroundings: Surroundings, slot: int) -> list[str]:
    first = config.admin_port
    if first is None:
        return []
    # A router started again listens where it did; several have ports side by side.
    port = surroundings.admin_address.rpartition(":")[2] or str(first + slot if first else 0)
    key_file = config.admin_key_file
    return ["--admin-port", port, *(("--admin-key-file", str(key_file)) if key_file else ())]
