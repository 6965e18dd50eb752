"""What this machine can do, each finding with what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from p2p.trial import Trial, try_out


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: whether it can be used, what was found, and whether serving needs it."""

    what: str
    usable: bool
    found: str
    required: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return asdict(self)


def examine() -> list[Finding]:
    """Look at everything that serving on this host depends on."""
    return [*_host(), *_native(), *_transports(), *_accelerators()]


def _host() -> list[Finding]:
    cores = sorted(os.sched_getaffinity(0))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    linux = platform.system() == "Linux"
    return [
        Finding(what="operating system", usable=linux, found=platform.platform(), required=True),
        Finding(what="python", usable=True, found=platform.python_version(), required=True),
        Finding(
            what="CPU cores",
            usable=bool(cores),
            found=f"{len(cores)}: {', '.join(map(str, cores))}",
            required=True,
        ),
        Finding(what="memory", usable=True, found=f"{memory_bytes / 2**30:.1f} GiB", required=True),
    ]


def _native() -> list[Finding]:
    compiler = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    findings = [
        Finding(
            what="C++ compiler",
            usable=bool(compiler),
            found=compiler or "none: install g++ 12 or later, then `make setup`",
        )
    ]
    for package in ("p2p", "experts", "eaas"):
        module = importlib.import_module(f"{package}.native")
        try:
            module.load()
            findings.append(Finding(what=f"native library of {package}", usable=True, found="loaded"))
        except (OSError, RuntimeError) as error:
            findings.append(Finding(what=f"native library of {package}", usable=False, found=str(error)))
    from experts.kernels import numerics_class
    from experts.model import Dtype

    classes = [
        Finding(what=f"numerics class, {dtype.label}", usable=True, found=numerics_class(dtype))
        for dtype in Dtype
    ]
    return findings + classes


def _transports() -> list[Finding]:
    shm, nixl = try_out("shm"), try_out("nixl")
    findings = [
        _tried("transport shm (one host)", shm, required=True),
        _tried("transport nixl (between hosts)", nixl),
    ]
    if nixl.usable:
        findings += [_tried(f"rail {rail}", try_out(f"nixl:{rail}")) for rail in _rails()]
    adapters = _names(Path("/sys/class/infiniband"))
    return [
        *findings,
        Finding(
            what="RDMA adapters",
            usable=bool(adapters),
            found=", ".join(adapters) or "none in /sys/class/infiniband: between hosts nixl goes over TCP",
        ),
        Finding(what="transport sim (tests)", usable=True, found="always"),
    ]


def _tried(what: str, trial: Trial, required: bool = False) -> Finding:
    measured = (
        f"{trial.round_trip_us:.0f} us for 4 KiB there and back, {trial.bandwidth_bytes_per_s / 1e9:.1f} GB/s"
        ", within this host, from Python"
    )
    return Finding(what=what, usable=trial.usable, found=trial.problem or measured, required=required)


def _rails(folder: Path = Path("/sys/class/net")) -> list[str]:
    """Network devices that are up."""
    return [name for name in _names(folder) if _state(folder / name) not in ("", "down")]


def _state(device: Path) -> str:
    try:
        return (device / "operstate").read_text().strip()
    except OSError:
        return ""  # no device but a file, such as bonding_masters, or one that has just gone


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _accelerators() -> list[Finding]:
    cuda = shutil.which("nvidia-smi")
    triton = importlib.util.find_spec("triton") is not None
    return [
        Finding(
            what="GPU",
            usable=False,
            found=(cuda or "no nvidia-smi on the PATH")
            + "; this version serves on CPUs only"
            + (", triton is installed" * triton),
        )
    ]


def report_table(findings: Sequence[Finding]) -> Table:
    """Findings as a table: usable, missing, or missing and needed."""
    table = Table()
    for heading in ("", "what", "found"):
        table.add_column(heading)
    for finding in findings:
        mark = (
            "[green]yes[/]"
            if finding.usable
            else "[bold red]needed[/]"
            if finding.required
            else "[yellow]no[/]"
        )
        table.add_row(mark, finding.what, finding.found)
    return table
