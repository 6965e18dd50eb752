"""What the verbs share: how they print, fail, and name the cluster that they mean."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="Address of the gateway, as `eaas serve` prints it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# Into a pipe or a file whole: what is cut off to fit 80 columns cannot be copied.
console = Console(width=None if sys.stdout.isatty() else 240)
errors = Console(stderr=True)
READY = Text.assemble(("ready", "bold green"))


def fail(message: str) -> typer.Exit:
    """Print why a verb failed; raise the result."""
    errors.print("[bold red]eaas:[/]", escape(message), highlight=False, soft_wrap=True)
    return typer.Exit(1)


@contextlib.contextmanager
def failing_on(*kinds: type[Exception]) -> Iterator[None]:
    """End the verb with status 1 and the text of the exception, if it is one of these."""
    try:
        yield
    except kinds as error:
        raise fail(str(error)) from None


def say(text: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def table(head: Sequence[str], rows: Iterable[Sequence[Text | str]], title: str = "", figures: bool = False) -> Table:
    """A table for the terminal; text as it is, no markup. figures: numbers after the first column, to the right."""
    made = Table(title=escape(title) or None, title_justify="left")
    for place, heading in enumerate(head):
        made.add_column(heading, justify="right" if figures and place else "left")
    for row in rows:
        made.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def takes(parameters: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb that takes keywords these parameters, each (annotation, default), for typer to read."""

    def given(verb: Callable[..., None]) -> Callable[..., None]:
        verb.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
                for name, (annotation, default) in parameters.items()
            ]
        )
        verb.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
        return verb

    return given
