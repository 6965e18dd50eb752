"""Clocks differ, step and leap; no token depends on them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from tests.e2e.calm import Calm

ROOT = Path(__file__).resolve().parents[2]
# Shown to people: when a fault or a retirement began, "created" in an answer, what happened on the dashboard, a span's
# begin, the date that a chat template may ask for.
SHOWN = {
    ("eaas/spans.py", "time.time_ns"),
    ("eaas/gateway/dashboard/app.py", "time.time"),
    ("eaas/gateway/routes.py", "time.time"),
    ("eaas/model/chat.py", "time.time"),
    ("router/injection.py", "time.time"),
    ("router/service.py", "time.time"),
}
# Ages of stored responses, which outlive every process and its clocks: after a step one is forgotten at another time.
STORED = {("eaas/gateway/jobs.py", "time.time_ns"), ("eaas/gateway/job_store.py", "time.time")}
# Whether a file changed so long ago that its time of change tells it from later ones: that time is of the same clock.
# After a step its digest is noted later, or anew.
CHANGED = {("experts/tensor_file.py", "time.time")}
# Dates that people set: until when a key or a certificate is good.
SET = {
    ("eaas/ops/credentials.py", "datetime.datetime.now"),
    ("eaas/gateway/protection.py", "time.time"),
}
TIME_OF_DAY = {
    "time.time",
    "time.time_ns",
    "time.CLOCK_REALTIME",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
}
NATIVE = re.compile(r"CLOCK_REALTIME|system_clock|gettimeofday|[^_a-z]time\(")


def test_nothing_decides_by_the_time_of_day() -> None:
    """A step of CLOCK_REALTIME changes no token: a module asks for it to show it, or for a date that people set."""
    found: set[tuple[str, str]] = set()
    for package in ("p2p", "experts", "router", "eaas"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in TIME_OF_DAY:
                    found.add((str(path.relative_to(ROOT)), ast.unparse(node)))
                if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                    names = {f"{node.module}.{alias.name}" for alias in node.names}
                    assert not names & (TIME_OF_DAY | {"datetime.datetime"}), f"{path}: import the module"
        for path in sorted((ROOT / package).rglob("*.[ch]*")):
            if path.suffix in (".cpp", ".h"):
                assert not NATIVE.search(path.read_text()), f"{path} asks for the time of day"
    assert found == SHOWN | STORED | CHANGED | SET


@pytest.mark.full(seconds=12)
@pytest.mark.parametrize(("boottime", "monotonic"), [(500_000, 70_000), (90, -20)])
def test_servers_whose_clocks_differ_serve_the_same_tokens(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boottime: int, monotonic: int
) -> None:
    """Every other process is of another time namespace: hosts share no clock."""
    apart = ["unshare", "--time", "--boottime", str(boottime), "--monotonic", str(monotonic)]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs time namespaces, found: {tried.stderr.strip()}")
    with LocalCluster(
        ClusterConfig(model=tiny, served_model_name="tiny", experts=4, replicas=2, port=0, cores=(0, 1))
    ) as cluster:
        alone = Calm(cluster).texts
    interpreter = tmp_path / "python"
    # Every other of those that serve: python -m eaas ROLE.
    interpreter.write_text(
        "#!/bin/sh\n"
        'case "$3" in experts|eaas.worker) ;; *) exec ' + sys.executable + ' "$@";; esac\n'
        f"count=$(cat {tmp_path}/count 2>/dev/null || echo 0); echo $((count + 1)) > {tmp_path}/count\n"
        f'[ $((count % 2)) = 0 ] && exec {" ".join(apart)} {sys.executable} "$@"\n'
        f'exec {sys.executable} "$@"\n'
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with LocalCluster(
        ClusterConfig(model=tiny, served_model_name="tiny", experts=4, attention=2, replicas=2, port=0, cores=(0, 1))
    ) as cluster:
        mixed = Calm(cluster)
        assert mixed.texts == alone, f"clocks apart by {boottime} s and {monotonic} s changed tokens"
        spaces = {Path(f"/proc/{pid}/ns/time").readlink() for pid in cluster.pids().values()}
        assert len(spaces) > 2, f"no process was of another time namespace: {spaces}"
