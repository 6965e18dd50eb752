"""One role by its module, in whatever folder: `python -m eaas experts --router ...` is `python -m experts --router
..., even where the working directory has another `experts`.
"""

import runpy
import sys

import eaas.beside  # noqa: F401

if len(sys.argv) < 2:
    sys.exit("Name a role: python -m eaas experts --help. Whole clusters are for the command eaas.")
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
