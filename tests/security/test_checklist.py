"""The promises of docs/security.md, one test each; what has a file of its own here is only named in its place.

Loopback by default, refusal to be open, admin and chaos off: test_listeners. Keys hashed, compared in constant time,
never logged: test_keys. Roles: test_roles. No pickle, marshal, eval or torch.load, no assert: tests/test_tidy.py.
"""

from __future__ import annotations

import ast
import fcntl
import json
import mmap
import os
import re
import struct
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.gateway.protection import OPERATOR_PATHS
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.manifest import BlobCorrupt
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts
from p2p.endpoint import ConnectRefused
from p2p.shm_link import create_memory, map_memory
from router.client import FaultRefused, RouterClient
from router.faults import Fault
from tests import test_tidy
from tests.experts.checkpoint_files import QWEN3, write_model
from tests.fuzz.targets import TARGETS
from tests.router.test_service import RouterProcess

ROOT = Path(__file__).resolve().parents[2]


def test_shared_memory_is_sealed_and_other_memory_is_not_mapped() -> None:
    fd = create_memory("test", mmap.PAGESIZE)
    try:
        for nbytes in (0, 2 * mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
        map_memory(fd, mmap.PAGESIZE).close()
    finally:
        os.close(fd)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(loose, mmap.PAGESIZE)
        with pytest.raises(ConnectRefused, match="sealed"):
            map_memory(loose, mmap.PAGESIZE)
    finally:
        os.close(loose)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "import dill as d",
    ],
)
def test_code_that_could_run_what_it_reads_is_found(code: str) -> None:
    """The judge of the syntax trees, judged."""
    assert any(test_tidy.unsafe(node) for node in ast.walk(ast.parse(code)))


def test_no_file_of_the_product_escapes_that_judge() -> None:
    seen = set(test_tidy.PYTHON)
    packages = [path for package in ("eaas", "experts", "router", "p2p") for path in (ROOT / package).rglob("*.py")]
    assert {path for path in packages if "_pb2" not in path.name and "build" not in path.parts} <= seen


def test_a_checkpoint_is_bounded_before_it_is_read_and_bytes_are_known_by_their_digest(
    tmp_path: Path,
) -> None:
    for claimed in (1 << 62, (1 << 64) - 1, 200 << 20):
        path = tmp_path / f"{claimed}"
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(struct.pack("<Q", claimed) + b"{}")
        with pytest.raises(CheckpointInvalid, match=r"claims a header|limit"):
            Checkpoint.open(path)


def test_weights_are_served_only_as_their_sha256_says(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "model"))
    shape = ExpertShape.from_config(QWEN3)
    packed = PackedExperts.open(checkpoint, shape, Dtype.BFLOAT16, directory=tmp_path / "cache")
    packed.verify(1, 1)
    with packed.path.open("r+b") as file:
        file.seek(packed.layout.offset(1, 1))
        byte = file.read(1)[0]
        file.seek(packed.layout.offset(1, 1))
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BlobCorrupt):
        packed.verify(1, 1)
    with pytest.raises(BlobCorrupt):
        packed.manifest.check(1, 1, packed.blob(1, 0))


@pytest.mark.parametrize("name", sorted(TARGETS))
@given(data=st.binary(max_size=400))
@settings(max_examples=25, deadline=None)
def test_damaged_headers_are_taken_or_refused(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.fixture
def router(tmp_path: Path):
    router = RouterProcess(tmp_path, "--admin-port", "0")
    yield router
    router.stop()


def test_chaos_is_off_unless_asked_for_on_every_way_in(router: RouterProcess) -> None:
    client = RouterClient(router.address)
    try:
        with pytest.raises(FaultRefused, match="--allow-chaos"):
            client.inject(["expert/1"], Fault(id="", kind="kill"))
    finally:
        client.close()
    body = {"names": ["expert/1"], "fault": {"kind": "kill"}}
    assert httpx.post(f"http://{router.admin}/admin/faults", json=body).status_code == 403


def test_admin_routes_are_on_their_own_listener(router: RouterProcess) -> None:
    """The gateway has none of the router's; the router's port for members speaks no HTTP that a browser would."""
    for path in (ROOT / "eaas" / "gateway").rglob("*.py"):
        found = set(re.findall(r'"(/(?:admin|chaos|faults|scale)[^"]*)"', path.read_text()))
        # Both take an operator's key. vLLM's clients ask for the one there, which takes the router's word, too; the
        # other is about requests that only the gateway knows, and is off unless workers have a folder for it.
        assert found <= {"/scale_elastic_ep", "/admin/inspect"} <= OPERATOR_PATHS, f"{path.name}: {found}"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{router.address}/admin/pools", timeout=3)
    assert httpx.get(f"http://{router.admin}/admin/pools").status_code == 200


def test_what_a_log_line_holds_cannot_pretend_to_be_another() -> None:
    import logging

    from router.logs import JsonLines, _Text

    nasty = "x\n2026-01-01 00:00:00,000 INFO router joined name=evil"
    for arguments in (("refused name=%s", nasty), ("plain %s", nasty)):
        record = logging.LogRecord("n", logging.INFO, "f", 1, arguments[0], (arguments[1],), None)
        for formatter in (JsonLines(), _Text()):
            assert "\n" not in formatter.format(record)
    record = logging.LogRecord("n", logging.INFO, "f", 1, "joined name=%s level=%d at 50%%", ("expert/1", 3), None)
    said = json.loads(JsonLines().format(record))
    assert (said["event"], said["name"], said["level"], said["level_"]) == ("joined", "expert/1", "info", 3)
    record = logging.LogRecord("n", logging.INFO, "f", 1, "three %d words=%s", (3, "x"), None)
    assert json.loads(JsonLines().format(record))["event"] == "three 3 words=x"
