"""What this machine can do, each finding with what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

from rich.table import Table
from rich.text import Text

from eaas.cluster.mps import CONTROL
from eaas.ops.terminal import table
from experts.kernels import numerics_class
from experts.model import Dtype
from experts.native import IsaUnavailable
from p2p.build import BuildFailed, compiler
from p2p.cuda_driver import PEER_ACCESS, PEER_ATOMICS, CudaDriver, DeviceFacts
from p2p.endpoint import P2PError
from p2p.native import NativeMissing
from p2p.trial import Trial, try_out

# Of a GPU: bfloat16 products, and asynchronous copies into shared memory.
_LEAST_CAPABILITY = (8, 0)
_SHARING = {
    True: "memory can be shared between processes",
    False: "memory cannot be shared between processes: no transport cuda here",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: whether it can be used, what was found, whether serving needs it, and figures."""

    what: str
    usable: bool
    found: str
    required: bool = False
    figures: Mapping[str, int] = field(default_factory=dict[str, int])


def examine() -> list[Finding]:
    """Look at everything that serving on this host depends on."""
    return [*_host(), *_native(), *_transports(), *_gpus(), _triton(), _torch()]


def _host() -> list[Finding]:
    cores = sorted(os.sched_getaffinity(0))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    linux = platform.system() == "Linux"
    busy = os.getloadavg()[0]
    said = "quiet" if busy < 0.3 * len(cores) else "busy, so the times below are those of a busy machine"
    return [
        Finding("operating system", linux, platform.platform(), required=True),
        Finding("python", True, platform.python_version(), required=True),
        Finding("CPU cores", bool(cores), f"{len(cores)}: {', '.join(map(str, cores))}", required=True),
        Finding("other work", True, f"load average {busy:.1f} on {len(cores)} cores: {said}"),
        Finding("memory", True, f"{memory_bytes / 2**30:.1f} GiB", required=True),
    ]


def _native() -> list[Finding]:
    try:
        findings = [Finding("C++ compiler", True, " ".join(compiler()))]
    except BuildFailed as missing:
        findings = [Finding("C++ compiler", False, f"{missing} What is built needs none.")]
    for package in ("p2p", "experts", "eaas"):
        module, what = importlib.import_module(f"{package}.native"), f"native library of {package}"
        try:
            module.load()
        except (NativeMissing, IsaUnavailable) as error:
            findings.append(Finding(what, False, str(error), required=True))
        else:
            findings.append(Finding(what, True, "loaded", required=True))
    if not all(finding.usable for finding in findings if finding.required):
        return findings
    classes = [Finding(f"numerics class, {dtype.label}", True, numerics_class(dtype)) for dtype in Dtype]
    return findings + classes


def _transports() -> list[Finding]:
    shm, nixl = try_out("shm"), try_out("nixl")
    findings = [_tried("transport shm (one host)", shm, required=True), _tried("transport nixl (between hosts)", nixl)]
    if nixl.usable:
        findings += [_tried(f"rail {rail}", try_out(f"nixl:{rail}")) for rail in _rails()]
    adapters = _names(Path("/sys/class/infiniband"))
    none = "none in /sys/class/infiniband: between hosts nixl goes over TCP"
    return [*findings, Finding("RDMA adapters", bool(adapters), ", ".join(adapters) or none)]


def _tried(what: str, trial: Trial, required: bool = False) -> Finding:
    measured = (
        f"{trial.round_trip_us:.0f} us for 4 KiB there and back, {trial.bandwidth_bytes_per_s / 1e9:.1f} GB/s"
        ", within this host, from Python"
    )
    return Finding(what, trial.usable, trial.problem or measured, required=required)


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


def _gpus() -> list[Finding]:
    try:
        driver = CudaDriver.load()
        version, gpus = driver.version, driver.devices()
    except P2PError as error:
        return [Finding("GPU", False, str(error))]
    findings = [Finding("GPU driver", True, f"for CUDA {version[0]}.{version[1]}")]
    for gpu in gpus:
        findings.append(_gpu(gpu))
        for way, reach in (("cuda", "one host"), ("nixl@cuda", "between hosts")):
            choice = f"{way}:{gpu.ordinal}"
            findings.append(_tried(f"transport {choice} ({reach})", try_out(choice)))
        findings.append(_sharing(gpu))
    findings += [_pair(driver, *pair) for pair in permutations([gpu.ordinal for gpu in gpus], 2)]
    return findings


def _gpu(gpu: DeviceFacts) -> Finding:
    major, minor = gpu.capability
    found = (
        f"{gpu.name}, {gpu.total_bytes / 2**30:.0f} GiB, {gpu.multiprocessors} multiprocessors, compute capability "
        f"{major}.{minor}, {_SHARING[gpu.exports_fds]}"
    )
    if gpu.capability < _LEAST_CAPABILITY:
        found += f"; the kernels need {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]}: use another GPU"
    usable = gpu.capability >= _LEAST_CAPABILITY and gpu.exports_fds
    return Finding(f"GPU {gpu.ordinal}", usable, found)


def _sharing(gpu: DeviceFacts) -> Finding:
    """Whether several processes can compute on a GPU at once: the first that holds."""
    alone = f"refused: without {CONTROL}, which is not on PATH, they take turns of milliseconds in each layer"
    said = (
        (gpu.mps, True, "an MPS daemon runs for it"),
        (" MIG " in gpu.name, False, "a slice by MIG without an MPS daemon: start one, or share no slice"),
        (gpu.exclusive, False, "its compute mode lets in one at a time, or none: nvidia-smi -c DEFAULT"),
        (shutil.which(CONTROL), True, f"`eaas serve` starts {CONTROL} where it deals out a GPU to several"),
        (True, False, alone),
    )
    usable, found = next((usable, found) for holds, usable, found in said if holds)
    return Finding(f"several processes on GPU {gpu.ordinal}", usable, found)


def _pair(driver: CudaDriver, one: int, other: int) -> Finding:
    access, atomics = (driver.peer_has(one, other, attribute) for attribute in (PEER_ACCESS, PEER_ATOMICS))
    reached = f"reach its memory, with{'' if atomics else 'out'} native atomics, which none uses"
    found = reached if access else "do not reach its memory: processes on these two cannot serve together"
    return Finding(f"GPU {one} to GPU {other}", access, f"kernels {found}")


def _triton() -> Finding:
    try:
        return Finding("triton (GPU kernels)", True, importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        why = "not installed: pip install 'triton>=3.6'; needed to serve on a GPU"
        return Finding("triton (GPU kernels)", False, why)


def _torch() -> Finding:
    """What torch was built for, read and not imported: that takes seconds."""
    what = "torch for CUDA"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Finding(what, False, "no torch: pip install 'torch>=2.11'; needed to serve on a GPU")
    stated = (Path(spec.origin).parent / "version.py").read_text()
    built = dict(re.findall(r"^(__version__|cuda)\b[^=]*= *'([^']*)'", stated, re.MULTILINE))
    version = built.get("__version__", "of an unknown version")
    if "cuda" not in built:
        why = f"{version} is built without CUDA: pip install 'torch>=2.11' from an index with CUDA builds"
        return Finding(what, False, f"{why}; needed to serve on a GPU")
    return Finding(what, True, f"{version}, for CUDA {built['cuda']}")


def report_table(findings: Sequence[Finding]) -> Table:
    """Findings as a table: usable, missing, or missing and needed."""
    marks = {True: Text("needed", "bold red"), False: Text("no", "yellow")}
    return table(
        ("", "what", "found"),
        ((Text("yes", "green") if f.usable else marks[f.required], f.what, f.found) for f in findings),
    )
