"""What verbs that start a cluster have in common: look at the model, pack its experts, start, and run until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from eaas import native
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.process import StartFailed
from eaas.cluster.state_dir import StateDirUnusable
from eaas.model.families import spec_of
from eaas.model.resolve import DEMO, resolve_model
from eaas.model.tokenizer import Tokenizer, TokenizerInvalid
from eaas.ops.terminal import failing_on
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.model import ConfigInvalid, Dtype, ExpertShape
from experts.native import IsaUnavailable
from experts.pack import PackedExperts, PackUnavailable
from p2p.native import NativeMissing
from router.tls import CredentialsInvalid

PACK_ERRORS = (CheckpointInvalid, ConfigInvalid, IsaUnavailable, NativeMissing, PackUnavailable)
# The model cannot be found, an option makes no sense, or a process does not start.
START_ERRORS = (StartFailed, StateDirUnusable, CredentialsInvalid, ValueError)


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The same with its model's folder and name. Raises ModelNotFound."""
    asked = str(config.model)
    folder = resolve_model(asked)
    name = config.served_model_name or (asked if asked == DEMO else folder.name)
    return replace(config, model=folder, served_model_name=name)


def pack_experts(model: Path, dtype: str) -> ExpertShape:
    """Pack a model's experts, with a progress bar, so that every expert server of this host maps the same file.

    Raises: one of PACK_ERRORS, before any process has started.
    """
    checkpoint = Checkpoint.open(model)
    shape = ExpertShape.from_config(checkpoint.config)
    with Progress(
        TextColumn("packing experts"), BarColumn(), TaskProgressColumn(), transient=True
    ) as progress:
        task = progress.add_task("pack", total=None)
        PackedExperts.open(
            checkpoint,
            shape,
            Dtype.resolve(dtype, checkpoint.config),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    return shape


def prepare_model(model: Path, dtype: str) -> None:
    """Find what is wrong with a model before any process starts, and pack its experts once, with a progress bar, so
    that every expert server of the host maps the same file.
    """
    with failing_on(*PACK_ERRORS, TokenizerInvalid):
        # Here too, though others compute: what is wrong with it is said before any of them starts.
        native.load()
        spec_of(Checkpoint.open(model).config)
        Tokenizer.load(model)
        pack_experts(model, dtype)


def run_cluster(
    config: ClusterConfig, *, show: Callable[[str], None], on_ready: Callable[[LocalCluster], None]
) -> None:
    """Run a cluster until SIGINT, SIGTERM or SIGHUP; one that comes while it starts ends it at once.

    Args:
        show: Gets a line for each event.
        on_ready: Called once, when the cluster can answer.

    Raises:
        StartFailed, StateDirUnusable, CredentialsInvalid, ValueError: as LocalCluster does.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    cluster = LocalCluster(config, on_event=show)
    try:
        _start_or_stop(cluster, stop)
        if not stop.is_set():
            on_ready(cluster)
            stop.wait()
    finally:
        cluster.stop()


def _start_or_stop(cluster: LocalCluster, stop: threading.Event) -> None:
    """Start the cluster, giving up at once when `stop` comes first. Raises StartFailed."""
    failures: list[StartFailed] = []

    def start() -> None:
        try:
            cluster.start()
        except StartFailed as failure:
            failures.append(failure)
        finally:
            done.set()

    done = threading.Event()
    threading.Thread(target=start, name="start", daemon=True).start()
    while not done.wait(0.05):
        if stop.is_set():
            return
    if failures:
        raise failures[0]
