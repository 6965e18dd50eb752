"""`make wheel`: what it builds serves in an empty environment, outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import httpx
import openai
import pytest

pytestmark = pytest.mark.full(seconds=40)

ROOT = Path(__file__).resolve().parents[2]
HELD = {
    *("p2p/_p2p.so", "experts/_experts.so", "eaas/_eaas.so"),
    *("eaas/demo_model/model.safetensors", "eaas/demo_model/tokenizer.json", "eaas/demo_model/config.json"),
    *(
        "eaas/gateway/dashboard/page/dashboard.html",
        "eaas/gateway/dashboard/page/dashboard.js",
        "eaas/gateway/dashboard/page/dashboard.css",
    ),
    *("router/proto/router.proto", "router/proto/router_pb2.py", "experts/proto/experts_pb2.py"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    for left in (*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist.*")):
        shutil.rmtree(left)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("needs a package index with setuptools 77 or later, found none")
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = folder.glob("eaas-*.whl")
    return built


def test_the_wheel_holds_what_serving_needs_and_nothing_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= HELD, f"without {sorted(HELD - names)}"
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "eaas",
        "experts",
        "p2p",
        "router",
    }
    assert not [name for name in names if "native/build" in name]
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py")}
    assert not {name for name in names if name.endswith(".py")} - sources, "of a build before this one"


def test_it_serves_the_built_in_model_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    empty = tmp_path / "venv"
    venv.create(empty, symlinks=True)
    python = empty / "bin" / "python"
    # Where this checkout is not found: pip would take it for what is asked for.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    away = tmp_path / "elsewhere"
    away.mkdir()
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], cwd=away, env=environment, check=True)
    # The requirements are those of this environment: torch is not downloaded again. Its own installation of this
    # project is not among them, for files named in a path file name no further folders.
    (packages,) = (empty / "lib").glob("python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment |= {"COLUMNS": "300", "NO_COLOR": "1", "PATH": str(empty / "bin")}
    code = "import eaas.native, experts.native, p2p.native as p; print(p.LIBRARY, eaas.native.LIBRARY)"
    found = subprocess.run([python, "-c", code], cwd=away, env=environment, capture_output=True, text=True, check=True)
    assert all(Path(name).is_relative_to(packages) for name in found.stdout.split()), found.stdout
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [empty / "bin" / "eaas", "serve", "--port", "0"],
            cwd=away, env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        for line in process.stdout or ():
            if ready := re.search(r"ready .* at (http://[\d.:]+)/v1", line):
                break
        else:
            pytest.fail(f"it ended before it was ready:\n{(tmp_path / 'log').read_text()}")
        url = ready.group(1)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        answer = client.completions.create(model="demo", prompt="ROMEO:", max_tokens=16, temperature=0)
        assert answer.usage and answer.usage.completion_tokens == 16 and answer.choices[0].text
        assert "<html" in httpx.get(f"{url}/dashboard").text
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
