"""The verbs of `eaas keys`: a gateway's keys file, made and edited."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eaas.gateway.keys import MOST_KEYS, Key, KeysInvalid, digest_of, editing, new_key, read_keys
from eaas.ops.terminal import console, failing_on, table

keys_app = typer.Typer(
    no_args_is_help=True,
    help="Make, list and revoke API keys of a gateway: the file that it gets as --keys-file.\n\n"
    "The file holds hashes. A gateway reads it again within two seconds of a change; answers that have begun go on.",
)

_File = Annotated[Path, typer.Argument(help="Keys file; `new` creates it.")]


_REFUSED = (KeysInvalid, OSError, msgspec.ValidationError)


@keys_app.command("new")
def new(
    file: _File,
    name: Annotated[str, typer.Argument(help="Whose key it is; logs and metrics show this name.")],
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests a minute; default: no bound.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens a minute, of prompts and answers.")] = None,
    days: Annotated[float | None, typer.Option(min=0, help="Until it expires; default: never.")] = None,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="May look at the cluster too: /metrics, /status, /dashboard ..."),
    ] = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept.

    A second key under the same name is its successor: give it out, then revoke the first. Budgets go by name, and are
    those of the newest key.

    `eaas status`, `top`, `scale`, `roll` and Prometheus need a key made with --operator; programs that ask for tokens
    do not.

    Example: eaas keys new ./keys.json alice --rpm 60 --tpm 100000 --days 90
    """
    key = new_key()
    expires = (
        datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days) if days is not None else None
    )
    with failing_on(*_REFUSED):
        entry = msgspec.convert(
            {
                "name": name,
                "sha256": digest_of(key),
                "requests_per_minute": rpm,
                "tokens_per_minute": tpm,
                "expires": expires,
                "operator": operator,
            },
            Key,
        )
        with editing(file) as keys:
            if len(keys) >= MOST_KEYS:
                raise KeysInvalid(f"{file} has {len(keys)} keys, the most it may have: revoke some")
            keys.append(entry)
    print(key)


@keys_app.command("list")
def list_keys(file: _File) -> None:
    """Show whose keys there are, by name and the first digits of each hash; never a key."""
    with failing_on(*_REFUSED):
        keys = read_keys(file)
    now_s = datetime.datetime.now(datetime.UTC).timestamp()
    rows = [
        (
            key.name,
            key.sha256[:12],
            "ask, operate" if key.operator else "ask",
            str(key.requests_per_minute or "no bound"),
            str(key.tokens_per_minute or "no bound"),
            (key.expires.isoformat(timespec="minutes") if key.expires else "never")
            + (" (expired)" if key.expired(now_s) else ""),
        )
        for key in keys
    ]
    console.print(table(("name", "hash", "may", "requests/min", "tokens/min", "expires"), rows))


@keys_app.command("revoke")
def revoke(
    file: _File,
    which: Annotated[str, typer.Argument(help="A name: all its keys; or the first digits of one hash.")],
) -> None:
    """Take keys away: the gateway refuses them within two seconds."""
    with failing_on(*_REFUSED), editing(file) as keys:
        gone = [key for key in keys if key.name == which]
        if not gone and len(which) >= 8:
            gone = [key for key in keys if key.sha256.startswith(which)]
        if not gone:
            raise KeysInvalid(
                f"{file} has no key of the name {which!r}, nor a hash that begins so (8 digits needed)"
            )
        keys[:] = [key for key in keys if key not in gone]
    for key in gone:
        print(f"revoked {key.name} {key.sha256[:12]}")
