"""Options of verbs that start a whole cluster, and what each process of it gets of them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaas.gateway.config import EndpointOptions, GatewayOptions
from eaas.gateway.listening import check_exposure
from eaas.worker.config import NO_DRAFTS, NO_OVERLAP, EngineOptions, WorkerOptions, drafts_of
from experts.config import MOST_WEIGHT, ComputingOptions, ExpertOptions
from experts.devices import CPU, CUDA, Device
from router.access import LOOPBACK
from router.config import ChildOptions, ExpertPoolOptions, PoolsOptions, ProcessOptions, RouterOptions
from router.models import NAME
from router.options import Options, OptionsInvalid, derived, option
from router.pools import autoscale_bounds
from router.state import MOST_MEMBERS

# Of the cluster's folder: keys that its command line gave by themselves.
KEYS_FILE = "keys.json"
MODELS_FILE = "models.json"
# Where responses are kept that outlive their connection, but not the cluster.
JOBS_FILE = "responses.sqlite"
# And what its gateways seal the ids of events with, so that each goes on with streams of the others.
RESUME_KEY_FILE = "resume.key"

# A path, and what stands behind it.
_PATH = re.compile(r"(.*?)((?:,(?:weight|attention)=[^,]*)*)$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One of the models that a cluster serves, as NAME=PATH,weight=W,attention=N says it.

    path: Checkpoint folder, hub id or `demo`. weight: Of its rows beside other models' on a server that is busy.
    attention: Workers to begin with.
    """

    name: str
    path: Path
    weight: int = 1
    attention: int

    @classmethod
    def parse(cls, words: str, attention: int) -> ServedModel:
        """Read one; `attention`: workers where it says none. Raises OptionsInvalid."""
        name, equals, rest = words.partition("=")
        path, more = _PATH.findall(rest)[0]
        wrong, numbers = "", {"weight": 1, "attention": attention}
        for word, _, value in (each.partition("=") for each in more.split(",")[1:]):
            least, most = (1, MOST_WEIGHT) if word == "weight" else (0, MOST_MEMBERS)
            numbers[word] = int(value) if re.fullmatch("[0-9]{1,4}", value, re.ASCII) else -1
            if not least <= numbers[word] <= most:
                wrong = f"{word}={value} found behind it. Give ,{word}={least} to {most}, or leave it out"
        if not equals:
            wrong = f"no = found. Give it a name: --model NAME={words}"
        elif not name:
            wrong = f"no name found before the =. Give it one: --model NAME={rest}"
        elif not path:
            wrong = f"no path found behind the =. Give a folder, a hub id or demo: --model {name}=PATH{more}"
        elif not NAME.fullmatch(name):
            needed = "up to 64 letters, digits and ._/- that begins with a letter or a digit"
            wrong = f"{name[:80]!r} found as its name. Give one of {needed}"
        if wrong:
            raise OptionsInvalid(f"--model {words}: NAME=PATH is needed, {wrong}.")
        return cls(name=name, path=Path(path), **numbers)

    def __str__(self) -> str:
        return f"{self.name}={self.path},weight={self.weight},attention={self.attention}"


@dataclass(frozen=True, kw_only=True)
class HostOptions(Options):
    """A cluster of this host"""

    tls_dir: Path | None = option(
        None,
        "TLS between the processes: a folder with one of each role, as `eaas certs` makes it. Without it there is "
        "none, and they listen on loopback only.",
        metavar="DIR",
    )
    state_dir: Path | None = option(None, "Folder for journal and logs; default: $XDG_STATE_HOME/eaas.", metavar="DIR")
    models: tuple[str, ...] = option(
        (),
        "Instead of MODEL, once for each model of the pool: the name that requests give, its folder or hub id, the "
        "weight of its rows beside those of the others, and its attention workers; default: 1, and --attention.",
        metavar="NAME=PATH[,weight=W][,attention=N]",
        repeats=True,
        word="model",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if "models" in self.given and self.given & {"model", "served_model_name"}:
            raise OptionsInvalid(
                "--model NAME=PATH says each model and its name: leave MODEL and --served-model-name out."
            )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(PoolsOptions, EngineOptions, EndpointOptions, ComputingOptions, HostOptions, ProcessOptions):
    """Serve a model: a router, expert servers, attention workers and the HTTP gateway, each its own process.

    What this verb is told holds for every process that has the option; their other options come from the environment
    or the file, such as EAAS_GATEWAY_MAX_REQUESTS.

    Examples:
      eaas serve
      eaas serve ./my-checkpoint --experts 4 --replicas 2 --port 8001
    """

    model: Path = option(Path("demo"), "Checkpoint folder, hub id, or `demo`, the built-in model.", positional=True)
    experts: int = option(2)
    replicas: int = option(2)
    device: tuple[str, ...] = option(
        ("cpu",),
        "What computes: cpu, GPUs as cuda:0,cuda:1, both as cuda:0,cpu, or interpreter (the GPUs' kernels on the CPU, "
        "very slowly). Dealt out to the expert servers, then to the attention workers; several kinds to each pool.",
    )
    on: str = option(
        "here",
        "Where expert servers and attention workers run: here, or on the nodes of this host's Ray cluster, each in an "
        "actor that asks for one CPU, and one GPU with --device cuda:0; needs `pip install eaas[ray]`.",
        choices=("here", "ray"),
    )
    expert_lanes: int = option(
        0, "Cores of each expert server; 0 deals them out among the servers.", metavar="CORES", least=0
    )
    gateways: int = option(
        1,
        "Gateways, which share the endpoint's port: while one is replaced or frozen the others answer. Each takes the "
        "memory of one, and limits and figures are each one's own.",
        least=1,
        most=16,
    )
    routers: int = option(1, "Routers; one leads, the others take over. Needs --etcd.")
    api_key: tuple[str, ...] = option(
        (),
        "A key that requests must bring, instead of --keys-file; may be given again. Who sees this host's processes "
        "sees it.",
        repeats=True,
    )

    # Of the first router; the others have the next ones. 0: any free one.
    router_port: int = 0
    # False leaves the gateway and the attention workers out: a bare expert pool, driven by whoever joins its router.
    endpoint: bool = True
    # Kill after this long when a process ignores SIGTERM; each role promises an orderly exit within 1 s.
    stop_s: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.routers < 1 or (self.routers > 1 and not self.etcd):
            raise OptionsInvalid(
                f"{self.routers} routers asked for, with {self.etcd or 'no etcd'} to share; one router needs none, "
                "several need one. Name it: --etcd http://127.0.0.1:2379."
            )
        if self.keys_file is not None and self.api_key:
            raise OptionsInvalid(
                "--keys-file and --api-key exclude each other: add the key to the file, or leave one out."
            )
        check_exposure("--host", self.host, tls=self.tls_cert is not None, keys=self.asks_for_keys)
        kinds = [Device.parse(device).kind for device in self.device]
        names, workers = [each.name for each in self.served], self.served[0].attention
        name, times = Counter(names).most_common(1)[0]
        wrong = ""
        if times > 1:
            wrong = f"{times} have one name, {name}. Give each its own"
        elif len(names) > 1 and set(kinds) != {CPU}:
            wrong = "GPUs serve one model in a pool. Serve several with --device cpu"
        if wrong:
            raise OptionsInvalid(f"--model {' --model '.join(self.models)}: {wrong}.")
        ask, answer = ({kinds[i % len(kinds)] for i in range(n)} for n in (workers, self.experts))
        if self.endpoint and ask and answer and ask != answer:
            raise OptionsInvalid(
                f"--device {','.join(self.device)} deals {workers} attention workers out to "
                f"{' and '.join(sorted(ask))}, {self.experts} expert servers to {' and '.join(sorted(answer))}; "
                "workers ask servers of their own kind only. Give as many of each as devices are listed: --attention "
                f"{len(kinds)} --experts {len(kinds)}."
            )
        if self.overlap and CPU in ask:
            raise OptionsInvalid(NO_OVERLAP)
        if drafts_of(self.speculate) and ask - {CPU}:
            raise OptionsInvalid(NO_DRAFTS)
        given = self.cores or self.expert_lanes or self.device not in (("cpu",), ("cuda:0",))
        if self.on == "ray" and given:
            raise OptionsInvalid(
                f"--on ray with --cores, --expert-lanes or --device {','.join(self.device)}: Ray gives each process "
                "what it computes on. Leave the first two out, and give --device cpu or cuda:0."
            )
        if self.cores and self.expert_lanes > len(self.cores):
            raise OptionsInvalid(
                f"{self.expert_lanes} lanes for each expert server; 0 (deal out the cores) to {len(self.cores)}, one "
                "for each core, are possible."
            )

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """Its models. Processes are told of the first when they start, and hear of the others from the router."""
        alone = ServedModel(name=self.served_model_name, path=self.model, attention=self.attention)
        return tuple(ServedModel.parse(words, self.attention) for words in self.models) or (alone,)

    @property
    def first(self) -> tuple[str, str]:
        """Name and folder of the first, where the router has them from its options; empty where --model names it."""
        folder = self.served[0].path.resolve()
        name = self.served[0].name or folder.name
        return ("", "") if self.models or "=" in name else (name, str(folder))

    @property
    def wanted(self) -> dict[str, int]:
        """Processes of each launched pool to begin with."""
        first, *others = self.served
        pools = {"expert": self.experts, "attention": first.attention}
        return pools | {f"attention:{each.name}": each.attention for each in others}

    @property
    def most(self) -> dict[str, int]:
        """Processes of each pool that computes, however far it may grow."""
        grown = autoscale_bounds(self.autoscale)
        return {pool: max(count, grown.get(pool, (0, 0))[1]) for pool, count in self.wanted.items()}

    def device_of(self, pool: str, slot: int) -> str:
        """What computes in a launch slot. Of one kind, workers follow all servers, so that each may have its own."""
        alike = len({Device.parse(device).kind for device in self.device}) == 1
        first = self.most["expert"] if pool != "expert" and alike else 0
        return self.device[(first + slot) % len(self.device)]

    @property
    def gpus(self) -> Counter[int]:
        """How many processes compute on each GPU, at most."""
        names = [self.device_of(pool, slot) for pool, count in self.most.items() for slot in range(count)]
        return Counter(device.index for device in map(Device.parse, names) if device.kind == CUDA)

    @property
    def asks_for_keys(self) -> bool:
        return self.keys_file is not None or bool(self.api_key)


@dataclass(frozen=True, kw_only=True)
class PoolConfig(ExpertPoolOptions, ComputingOptions, HostOptions, ProcessOptions):
    """Serve the experts of a model alone: a router and expert servers, no attention workers and no HTTP endpoint.

    The rest of the model runs elsewhere, for example in transformers (docs/transformers.md). So the experts of models
    are served that EaaS does not serve whole.

    Example:
      eaas pool ./DeepSeek-V3 --experts 4
    """

    model: Path | None = option(None, "Checkpoint folder or hub id.", positional=True)
    experts: int = option(2)
    replicas: int = option(2)
    port: int = option(7000, "TCP port of the router on 127.0.0.1; 0 takes a free one.", least=0, most=65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None and not self.models:
            raise OptionsInvalid("MODEL, or --model NAME=PATH for each of several, must be given.")
        if any(ServedModel.parse(words, 0).attention for words in self.models):
            raise OptionsInvalid("A bare pool has no attention workers: leave ,attention=N out of each --model.")

    def cluster(self) -> ClusterConfig:
        return derived(
            self, ClusterConfig, model=self.model or Path(), attention=0, router_port=self.port, endpoint=False
        )


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What a process finds in the cluster that it is started into.

    Attributes:
        router_address: Of the routers, once there are any.
        experts_wanted: Size of the expert pool now.
        listen_fd: The endpoint's socket, -1 without one.
        admin_address: Where a router of this slot had its admin listener before; empty: it had none.
        node: Address of the node on which it runs, by which the others reach it.
        model: Checkpoint folder of what it is for; None: of the first model.
    """

    state_dir: Path
    router_address: str
    experts_wanted: int
    listen_fd: int
    admin_address: str
    node: str = LOOPBACK
    model: Path | None = None


def child_options(config: ClusterConfig, context: LaunchContext, pool: str, slot: int, port: int) -> ChildOptions:
    """Options of the process in launch slot `slot` of a pool; `port`: where a router listens."""
    role, first = pool.partition(":")[0], config.served[0]
    tls_dir = config.tls_dir / role if config.tls_dir is not None else None
    if pool == "router":
        store: dict[str, Any] = {"journal": context.state_dir / "router.sqlite"}
        if config.etcd:
            store = {"store": "etcd", "cluster": context.state_dir.name}
        store["models_file"] = context.state_dir / MODELS_FILE
        admin_port = _admin_port(config, context, slot)
        where = {"host": context.node, "port": port, "admin_port": admin_port}
        store |= {"attention": first.attention, "number": slot}
        store["first_model"] = "=".join(config.first).strip("=")
        return derived(config, RouterOptions, tls_dir=tls_dir, **where, **store)
    model = context.model or first.path
    member: dict[str, Any] = {"tls_dir": tls_dir, "router": context.router_address, "model": model}
    device = config.device_of(pool, slot)
    if pool == "expert":
        cores = expert_cores(slot, context.experts_wanted, config.cores, config.expert_lanes)
        member |= {"cores": tuple(cores), "zone": context.node if config.on == "ray" else ""}
        return derived(config, ExpertOptions, device=device, host=context.node, **member)
    if role == "attention":
        return derived(config, WorkerOptions, device=device, host=context.node, **member)
    made: dict[str, Any] = {
        "listen_fd": context.listen_fd,
        "keys_file": config.keys_file or (context.state_dir / KEYS_FILE if config.asks_for_keys else None),
        "jobs": config.jobs or str(context.state_dir / JOBS_FILE),
        "resume_key_file": context.state_dir / RESUME_KEY_FILE,
        "served_model_name": first.name,
    }
    return derived(config, GatewayOptions, **made, **member)


def _admin_port(config: ClusterConfig, context: LaunchContext, slot: int) -> int | None:
    first = config.admin_port
    if first is None:
        return None
    # A router started again listens where it did; several have ports side by side.
    return int(context.admin_address.rpartition(":")[2] or (first + slot if first else 0))


def expert_cores(slot: int, servers: int, cores: Sequence[int], lanes: int = 0) -> list[int]:
    """Cores of the expert server in launch slot `slot`: one lane each, `lanes` of them where that is not 0.

    With at least as many servers as cores each gets one core, round-robin; with fewer, the cores are dealt out
    among the servers so that none lies idle. A process keeps its cores when the pool changes later: one that
    started alone shares its cores with those that came after it.

    Args:
        servers: Wanted when this one starts.
        cores: Of this host; none: of another, where it takes any.
    """
    if not cores:
        return []
    if lanes:
        return [cores[(slot * lanes + lane) % len(cores)] for lane in range(lanes)]
    servers = max(servers, slot + 1)
    if servers >= len(cores):
        return [cores[slot % len(cores)]]
    return list(cores[slot % servers :: servers])
