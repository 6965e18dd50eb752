"""Builds the native libraries whenever the packages are built or installed, editable or not."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


def load_native_build() -> ModuleType:
    """p2p/build.py, without the package around it, whose requirements are not installed yet."""
    spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parent / "p2p" / "build.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("p2p/build.py is missing from the source tree; fetch it again.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


native_build = load_native_build()


def compiler_wanted() -> list[str]:
    """What to install before the build: nothing where there is a compiler."""
    try:
        native_build.compiler()
    except native_build.BuildFailed:
        return ["ziglang>=0.17"]
    return []


class BuildWithNative(build_py):
    """Compiles into the source folders, from where package data picks the libraries up."""

    def run(self) -> None:
        if not self.editable_mode:
            # Whatever an earlier build left there would be packed too.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        native_build.build()
        super().run()


class NativeDistribution(Distribution):
    """Marks wheels as belonging to one platform: they hold shared objects."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithNative},
    distclass=NativeDistribution,
    setup_requires=compiler_wanted(),
)
