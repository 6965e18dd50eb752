"""The command `eaas`. And one role by its module, in whatever folder: `python -m eaas experts --router ...` is
`python -m experts --router ...`, even where the working directory has another `experts`."""

import runpy
import sys

import eaas.beside  # noqa: F401


def main() -> None:
    """Run the command line. Ctrl-C while its libraries are imported ends it without a stack."""
    try:
        from eaas.ops.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Name a role: python -m eaas experts --help. Whole clusters are for the command eaas.")
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
