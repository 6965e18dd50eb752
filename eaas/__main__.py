"""One role by its module, in whatever folder: `python -m eaas experts --router ...` is `python -m experts --router
..., even where the working directory has another `experts`.
"""

import runpy
import sys

runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
