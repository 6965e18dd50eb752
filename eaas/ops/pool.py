"""The verb `eaas pool`: the experts of a model alone, for whoever connects to their router."""

from __future__ import annotations

from collections.abc import Callable

from eaas.cluster.config import PoolConfig
from eaas.cluster.local import LocalCluster
from eaas.ops.starting import pack_experts, run_cluster, with_model
from eaas.ops.terminal import console
from router.view import CLIENT


def run_pool(options: PoolConfig, show: Callable[[str], None]) -> None:
    """Run the pool until Ctrl-C, and say how to connect. Raises as its imports from eaas.ops.starting do."""
    config = with_model(options.cluster())
    shape = pack_experts(config.model, config.dtype)

    def tell(cluster: LocalCluster) -> None:
        proof = f', tls_dir="{config.tls_dir / CLIENT}"' if config.tls_dir is not None else ""
        console.print(
            f"[bold green]ready[/] {shape.layers} x {shape.experts} experts of {config.model.name} "
            f"on {config.experts} servers, router at {cluster.router_address}, logs in {cluster.state_dir}. "
            "Ctrl-C stops it. Connect:\n"
            f'  eaas.integrations.transformers.connect("{cluster.router_address}", model{proof})',
            highlight=False,
            soft_wrap=True,
        )

    run_cluster(config, show=show, on_ready=tell)
