"""The verb `eaas roll`; what it does is in roll.py, which is loaded when it runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from eaas.ops.terminal import DEFAULT_URL, RouterAddress, Url, console, failing_on


def roll(
    pools: Annotated[
        list[str] | None,
        typer.Argument(help="router, expert, attention, gateway; default: all, in this order."),
    ] = None,
    wait_s: Annotated[
        float, typer.Option(min=1, help="Longest for each process; exit 1 if not within this.")
    ] = 120.0,
    drain_s: Annotated[
        float, typer.Option(min=1, help="Longest wait for a process that goes to finish what runs on it.")
    ] = 30.0,
    router: RouterAddress = "",
    tls_dir: Annotated[
        Path | None, typer.Option(help="As `eaas serve` got it: a folder with one of each role.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Replace the processes of a running cluster one after another, as an upgrade does; requests go on meanwhile.

    Each is started anew from the code that is installed now, and takes over before the old one ends.

    Examples:

      eaas roll

      eaas roll expert attention --drain-s 10
    """
    # Here, so that `eaas --help` answers at once.
    from eaas.cluster.status import GatewayUnreachable, RouterUnknown, router_address
    from eaas.ops.roll import ROLES, Roll, RollFailed
    from eaas.ops.status import operator_credentials
    from router.client import RouterClient, RouterUnavailable, ScaleRefused
    from router.tls import CredentialsInvalid

    wrong = [pool for pool in pools or () if pool not in ROLES]
    refused = (RollFailed, RouterUnknown, RouterUnavailable, ScaleRefused)
    with failing_on(CredentialsInvalid, GatewayUnreachable, *refused):
        if wrong:
            raise RollFailed(f"{wrong[0]!r} is no pool; give some of {', '.join(ROLES)}, or none for all.")
        with closing(RouterClient(router or router_address(url), operator_credentials(tls_dir))) as client:
            Roll(url, client, wait_s=wait_s, drain_s=drain_s, show=console.out).roll(pools or ROLES)
