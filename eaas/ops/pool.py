"""The verb `eaas pool`: the experts of a model alone, for whoever connects to their router."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from eaas.ops.terminal import console, failing_on


def pool(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    experts: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 2,
    replicas: Annotated[
        int, typer.Option(help="Servers that hold each expert; 2 survive any single loss.")
    ] = 2,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port of the router on 127.0.0.1; 0 takes a free one.")
    ] = 7000,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float32, int8, or auto: what the checkpoint says.")
    ] = "auto",
    cores: Annotated[str, typer.Option(help="CPU cores to use, such as 0,1; default: all allowed.")] = "",
    transport: Annotated[str, typer.Option(help="How rows travel: shm or nixl.")] = "shm",
    tls_dir: Annotated[
        Path | None,
        typer.Option(
            help="TLS between the processes: a folder with one of each role, as `eaas certs` makes it."
        ),
    ] = None,
) -> None:
    """Serve the experts of a model alone: a router and expert servers, no attention workers and no HTTP endpoint.

    The rest of the model runs elsewhere, for example in transformers (docs/transformers.md). So the experts of models
    are served that EaaS does not serve whole.

    Example:

      eaas pool ./DeepSeek-V3 --experts 4
    """
    # Here, so that `eaas --help` answers at once.
    from eaas.cluster.config import ClusterConfig
    from eaas.cluster.local import LocalCluster
    from eaas.cluster.process import StartFailed
    from eaas.cluster.state_dir import StateDirUnusable
    from eaas.model.resolve import ModelNotFound, resolve_model
    from eaas.ops.starting import PACK_ERRORS, pack_experts, start_or_stop
    from p2p.cores import named_cores
    from router.view import CLIENT

    refused = (ModelNotFound, StartFailed, StateDirUnusable, ValueError)
    with failing_on(*PACK_ERRORS, *refused):
        folder = resolve_model(model)
        config = ClusterConfig(
            model=folder,
            served_name=folder.name,
            experts=experts,
            attention=0,
            replicas=replicas,
            router_port=port,
            dtype=dtype,
            cores=named_cores(cores),
            transport=transport,
            endpoint=False,
            tls_dir=tls_dir,
        )
        shape = pack_experts(folder, dtype)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: stop.set())
        cluster = LocalCluster(
            config, on_event=lambda text: console.print(f"[dim]{text}[/]", highlight=False)
        )
        try:
            start_or_stop(cluster, stop)
            proof = f', tls_dir="{tls_dir / CLIENT}"' if tls_dir is not None else ""
            if not stop.is_set():
                console.print(
                    f"[bold green]ready[/] {shape.layers} x {shape.experts} experts of {folder.name} "
                    f"on {experts} servers, router at {cluster.router_address}, logs in {cluster.state_dir}. "
                    "Ctrl-C stops it. Connect:\n"
                    f'  eaas.integrations.transformers.connect("{cluster.router_address}", model{proof})',
                    highlight=False,
                    soft_wrap=True,
                )
                stop.wait()
        finally:
            cluster.stop()
