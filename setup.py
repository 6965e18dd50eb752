"""Builds the native libraries whenever the packages are built or installed, editable or not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class BuildWithNative(build_py):
    """Compiles into the source folders, from where package data picks the libraries up."""

    def run(self) -> None:
        spec = importlib.util.spec_from_file_location(
            "native_build", Path(__file__).parent / "p2p" / "build.py"
        )
        if spec is None or spec.loader is None:
            raise FileNotFoundError("p2p/build.py is missing from the source tree; fetch it again.")
        native_build = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = native_build
        spec.loader.exec_module(native_build)
        if native_build.compiler() is None:
            print(
                "No C++ compiler found: installing without native code, which is correct but slow.",
                file=sys.stderr,
            )
        else:
            native_build.build()
        super().run()


class NativeDistribution(Distribution):
    """Marks wheels as belonging to one platform: they hold shared objects."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithNative}, distclass=NativeDistribution)
