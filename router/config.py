"""Options of the router and of the launcher, and those that every process of a cluster has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router import logs
from router.access import LOOPBACK, bound_address, target_of, told_address
from router.options import Options, OptionsInvalid, option
from router.pools import autoscale_bounds
from router.state import Config

# All tries of a start by webhook: the router gives up on an order after `start_s` and orders again.
START_TRIES_S = 0.75 * Config.start_s


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """Every verb that starts processes"""

    config: Path | None = option(None, "TOML file with options, in a table for each role.", metavar="FILE")
    allow_chaos: bool = option(False, "Take faults that are injected on purpose.")
    log_format: str = option(logs.TEXT, "json: each line of the log is one object.", choices=logs.FORMATS)
    log_level: str = option("info", "Log from this level on.", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class ChildOptions(ProcessOptions):
    """Each process that a launcher starts"""

    tls_dir: Path | None = option(
        None,
        "ca.pem, cert.pem and key.pem of this process's role, as `eaas certs` makes them: TLS with every other "
        "process, both ways. Without it there is none, and processes listen on loopback only.",
        metavar="DIR",
    )
    ready_fd: int = option(-1, "Write one JSON line to this descriptor when usable, for the launcher.")
    die_with: int = option(0, "Stop when this parent process ends.", metavar="PID")


@dataclass(frozen=True, kw_only=True)
class ListenerOptions(ChildOptions):
    """Where other processes connect"""

    host: str = option(
        LOOPBACK, "IP address to listen on; one that other machines can reach needs --tls-dir.", metavar="IP"
    )
    port: int = option(0, "TCP port to listen on; 0 takes a free one.", least=0, most=65535)
    advertise: str = option(
        "", "Name or address under which others reach this process; default: that of --host.", metavar="NAME"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Neither may be open without TLS, nor without a name that others can call.
        _ = self.told_host

    @property
    def bound_host(self) -> str:
        """The IP address to bind. Raises Exposed, as making these options does."""
        return bound_address("--host", self.host, {"TLS (--tls-dir)": self.tls_dir is not None})

    @property
    def told_host(self) -> str:
        """The host under which others are told to reach this process."""
        return told_address("--host", self.bound_host, self.advertise)


@dataclass(frozen=True, kw_only=True)
class JoinOptions(ChildOptions):
    """Each process that joins a router"""

    router: str = option(help="Address of each router.", metavar="HOST:PORT,...")

    def __post_init__(self) -> None:
        super().__post_init__()
        target_of(self.router)


@dataclass(frozen=True, kw_only=True)
class ExpertPoolOptions(Options):
    """Expert servers and replicas"""

    experts: int = option(1, "Expert servers wanted; with 0, requests wait until the pool grows.", least=0)
    replicas: int = option(1, "Servers that hold each expert; 2 survive any single loss.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas > self.experts > 0:
            raise OptionsInvalid(
                f"{self.replicas} replicas of each expert need {self.replicas} expert servers, found --experts "
                f"{self.experts}. Raise --experts or lower --replicas (at least 1)."
            )


@dataclass(frozen=True, kw_only=True)
class EtcdOptions(Options):
    """Whoever keeps state in etcd"""

    etcd_tls_dir: Path | None = option(
        None,
        "ca.pem that https etcds are trusted by, and cert.pem and key.pem where they ask for a certificate; default: "
        "the system's CAs, and none.",
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class PoolsOptions(ExpertPoolOptions, EtcdOptions):
    """Pools, and who looks after them"""

    attention: int = option(1, "Attention workers wanted; with 0, requests wait until the pool grows.", least=0)
    redundant_experts: int = option(0, "Copies in each layer beyond the replicas; they follow the load.", least=0)
    autoscale: tuple[str, ...] = option(
        (),
        "Let the size of a pool follow its load, such as expert:1..6; once for each pool.",
        metavar="POOL:LEAST..MOST",
        repeats=True,
    )
    lease_s: float = option(Config.lease_s, "Silence that ends a membership.", above=0)
    sleep_after_s: float = option(
        0.0,
        "Let the expert servers give up the memory of a model that nobody has asked for so long; the next request "
        "waits until they have it again. 0: never.",
        least=0,
    )
    etcd: str = option(
        "",
        "Addresses of the etcd that keeps the routers' state, http on loopback, https elsewhere; with it several "
        "routers can stand by.",
        metavar="URL,...",
    )
    leader_ttl_s: float = option(3.0, "With etcd: silence that ends a leading router's term, at least 2.")
    admin_port: int | None = option(
        None,
        "Port of the router for scaling, health and metrics over HTTP, and HTTPS with --tls-dir; 0 takes a free one; "
        "default: there is none.",
        least=0,
        most=65535,
    )
    admin_key_file: Path | None = option(
        None, "File with the key that requests to --admin-port must bring.", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.admin_key_file is not None and self.admin_port is None:
            raise OptionsInvalid("--admin-key-file without --admin-port: there is no listener to ask for the key.")
        autoscale_bounds(self.autoscale)


@dataclass(frozen=True, kw_only=True)
class RouterOptions(PoolsOptions, ListenerOptions):
    """Keep membership and placement of a cluster.

    Examples:
      eaas router --port 7000 --journal router.db --experts 4 --replicas 2
      eaas router --port 7000 --store etcd --etcd http://127.0.0.1:2379 --experts 4
    """

    store: str = option(
        "sqlite", "Where the state lives; with etcd, several routers stand by.", choices=("sqlite", "etcd")
    )
    journal: Path | None = option(None, "SQLite file of --store sqlite; made where it is missing.", metavar="FILE")
    cluster: str = option("eaas", "Name of this cluster in etcd.", metavar="NAME")
    models_file: Path | None = option(
        None,
        "JSON of models to serve where the state does not know them, as after its loss; `eaas serve` keeps it.",
        metavar="FILE",
    )
    first_model: str = option(
        "",
        "Name and folder with which gateways and servers are started, where they are of one model that nobody adds. "
        "Without it another may be added under its name.",
        metavar="NAME=PATH",
    )
    number: int = option(0, "This router is called router/NUMBER.", least=0)
    admin_host: str = option(
        LOOPBACK, "IP address of --admin-port; one that others can reach needs --tls-dir and a key.", metavar="IP"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_model and "=" not in self.first_model:
            raise OptionsInvalid(f"--first-model {self.first_model}: NAME=PATH needed, such as chat=/models/chat.")
        needed = "etcd" if self.store == "etcd" else "journal"
        if not getattr(self, needed):
            raise OptionsInvalid(f"--store {self.store} needs --{needed}; give it.")
        if self.etcd and self.store != "etcd":
            raise OptionsInvalid("--etcd without --store etcd: the state would be kept in --journal alone. Give both.")


@dataclass(frozen=True, kw_only=True)
class LauncherOptions(JoinOptions):
    """Carry out the router's orders to start and stop processes with a command or a webhook.

    The command finds EAAS_ACTION (start or stop), EAAS_POOL (expert or attention; to start a worker of another model
    than the first, attention:NAME), EAAS_ROUTER, EAAS_HOST, EAAS_PID, EAAS_ORDER and for a stop EAAS_MEMBER in its
    environment; the webhook gets the same as JSON. A process started so must have EAAS_HOST and EAAS_PID in its own
    environment: the order to stop it has the same EAAS_PID. A process of this machine without that EAAS_HOST is never
    ordered to stop.

    Example:
      eaas launcher --router 127.0.0.1:7000 --exec 'if [ $EAAS_ACTION = stop ]; then kill -9 $EAAS_PID;
        else exec eaas $EAAS_POOL --router $EAAS_ROUTER --model ./checkpoint; fi'
    """

    exec: str = option("", "Shell command to run for each order; this or --webhook.", metavar="COMMAND")
    webhook: str = option("", "Address to POST each order to as JSON; this or --exec.", metavar="URL")
    webhook_key_file: Path | None = option(
        None, "File with a key, sent as `Authorization: Bearer KEY`.", metavar="FILE"
    )
    host: str = option(
        "", "Name under which to take orders, needed with --webhook; default: this machine.", metavar="NAME"
    )
    timeout_s: float = option(30.0, "Longest time for a POST or a stop command.", above=0)
    tries: int = option(
        5,
        "Tries of a POST or a stop command, 0.5, 1, 2 ... s apart. A start by POST is tried for "
        f"{START_TRIES_S:g} s in all.",
        least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.exec) == bool(self.webhook):
            raise OptionsInvalid("One of --exec and --webhook is needed: how orders are carried out.")
        if self.webhook and not self.host:
            raise OptionsInvalid("--webhook starts processes elsewhere: give --host NAME, which they get as EAAS_HOST.")
        if self.webhook_key_file and not self.webhook:
            raise OptionsInvalid("--webhook-key-file with --exec: there is no POST to send the key with; leave it out.")
