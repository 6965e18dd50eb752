"""A checkpoint is read whole or refused with the reason; no number of a file is believed unchecked."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts import tensor_file
from experts.checkpoint import Checkpoint, CheckpointInvalid
from tests.experts.checkpoint_files import file_bytes, safetensors_bytes, write_model

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.uint8),
    "c": np.arange(4, dtype=np.uint16).reshape(2, 2),  # begins at an odd byte
    "empty": np.zeros((0, 7), np.float16),
}


def model(root: Path, content: bytes) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text('{"architectures": []}')
    (root / "model.safetensors").write_bytes(content)
    return root


def sharded(root: Path, weight_map: object) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text("{}")
    (root / "one.safetensors").write_bytes(safetensors_bytes({"a": TENSORS["a"]}))
    (root / "two.safetensors").write_bytes(safetensors_bytes({"b": TENSORS["b"]}))
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return root


def test_every_tensor_comes_back_as_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model(tmp_path, safetensors_bytes(TENSORS)))
    assert checkpoint.names() == ("a", "b", "c", "empty")
    assert checkpoint.config == {"architectures": []}
    assert [checkpoint.dtype(name) for name in checkpoint.names()] == ["F32", "U8", "BF16", "F16"]
    for name, tensor in TENSORS.items():
        found = checkpoint.tensor(name)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape == checkpoint.shape(name)
        assert np.array_equal(found, tensor) and found.flags.aligned


def test_tensors_cannot_be_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model(tmp_path, safetensors_bytes(TENSORS)))
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.tensor("a")[0, 0] = 1


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))
    assert checkpoint.names() == ("a", "b") and "a" in checkpoint and "c" not in checkpoint
    assert np.array_equal(checkpoint.tensor("b"), TENSORS["b"])


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model(tmp_path, safetensors_bytes(TENSORS)))
    with pytest.raises(CheckpointInvalid, match="no tensor z among 4"):
        checkpoint.tensor("z")


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        (
            {"a": "one.safetensors", "b": "three.safetensors"},
            r"three.safetensors: cannot be read: No such file",
        ),
        ({"a": "two.safetensors"}, "a should be in two.safetensors"),
        ({"a": "../one.safetensors"}, "not a plain file name"),
        ({"a": ".."}, "not a plain file name"),
        ({"a": 7}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, weight_map: object, text: str) -> None:
    with pytest.raises(CheckpointInvalid, match=text):
        Checkpoint.open(sharded(tmp_path, weight_map))


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def headed(header: object, data_bytes: int = 8) -> bytes:
    return file_bytes(json.dumps(header).encode(), bytes(data_bytes))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "0 bytes"),
        (b"\1\0\0\0", "4 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "header ends at 108, the file at 10"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "claims a header of 9223372036854775808 bytes"),
        ((65 << 20).to_bytes(8, "little") + b"{}", "the limit is"),
        (file_bytes(b"{nonsense", b""), "not JSON"),
        (file_bytes(b"\xff\xfe{}", b""), "not JSON"),
        (file_bytes(b"[" * 100_000, b""), "not JSON"),
        (file_bytes(b'{"a": 1e999999999' + b"9" * 5000 + b"}", b""), "lacks dtype"),
        (file_bytes(b'{"a": ' + b"9" * 5000 + b"}", b""), "not JSON"),
        (file_bytes(b'{"a": {}, "a": {}}', b""), "a key stands twice"),
        (file_bytes(b"[]", b""), "not an object"),
        (headed({"a": 3}), "a lacks dtype"),
        (headed({"a": {"dtype": "F32", "shape": [2]}}), "a lacks dtype"),
        (headed({"a": entry(dtype="F3")}), "dtype 'F3'"),
        (headed({"a": entry(dtype=["F32"])}), "dtype"),
        (headed({"a": entry(shape=[-2])}), "shape"),
        (headed({"a": entry(shape=[True, 2])}), "shape"),
        (headed({"a": entry(shape=[2.0])}), "shape"),
        (headed({"a": entry(shape="2")}), "shape"),
        (headed({"a": entry(shape=[1 << 47] * 9)}), "shape"),
        (headed({"a": entry(shape=[1 << 47] * 8)}), "needs"),
        (headed({"a": entry(shape=[3])}), "needs 12 bytes and has 8"),
        (headed({"a": entry(offsets=[0, 8, 9])}), "data_offsets"),
        (headed({"a": entry(offsets=[8, 0])}), "bytes 8 to 0"),
        (headed({"a": entry(offsets=[8, 16])}), "bytes 8 to 16, the file holds 8"),
        (headed({"a": entry(), "b": entry(offsets=[4, 12])}, 12), "b begins at 4 and overlaps a"),
        (headed({"a": entry(), "b": entry(offsets=[10, 18])}, 18), "leaves 2 unused bytes after a"),
        (headed({"a": entry()}, 11), "fill 8 bytes, the file holds 11"),
        (headed({}, 1), "fill 0 bytes"),
        (safetensors_bytes(TENSORS)[:-1], "Download it again"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, text: str) -> None:
    with pytest.raises(CheckpointInvalid, match=text):
        Checkpoint.open(model(tmp_path, content))


def test_a_hostile_header_length_allocates_nothing(tmp_path: Path) -> None:
    path = model(tmp_path, (60 << 20).to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointInvalid):
        Checkpoint.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = safetensors_bytes({"a": TENSORS["a"], "c": TENSORS["c"]})
    for length in range(len(content)):
        with pytest.raises(CheckpointInvalid):
            Checkpoint.open(model(tmp_path, content[:length]))


def test_no_flipped_header_byte_escapes_as_another_error(tmp_path: Path) -> None:
    seed = 7
    content = safetensors_bytes({"a": TENSORS["a"], "c": TENSORS["c"]})
    generator = np.random.default_rng(seed)
    for trial in range(400):
        broken = bytearray(content)
        for at in generator.integers(0, len(content) - 32, 2):
            broken[at] ^= int(generator.integers(1, 256))
        try:
            checkpoint = Checkpoint.open(model(tmp_path, bytes(broken)))
        except CheckpointInvalid:
            continue
        total = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
        assert total == 32, f"seed {seed} trial {trial}"


def broken_config(root: Path) -> None:
    (root / "config.json").write_text("{,}")


def no_config(root: Path) -> None:
    (root / "config.json").unlink()


def no_weights(root: Path) -> None:
    (root / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (broken_config, "config.json: its text is not JSON"),
        (no_config, "config.json: cannot be read: No such file"),
        (no_weights, "holds neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, breaks: Callable[[Path], None], text: str) -> None:
    root = model(tmp_path, safetensors_bytes(TENSORS))
    breaks(root)
    with pytest.raises(CheckpointInvalid, match=text):
        Checkpoint.open(root)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="no such directory"):
        Checkpoint.open(tmp_path / "absent")


def test_the_fingerprint_changes_with_config_and_every_byte_and_with_nothing_else(tmp_path: Path) -> None:
    root = write_model(tmp_path / "m")
    base = Checkpoint.open(root).fingerprint
    assert base == Checkpoint.open(write_model(tmp_path / "same")).fingerprint
    assert len(base) == 64
    whole = (root / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    seed = int(np.random.default_rng().integers(1 << 31))
    for at in (start, len(whole) - 1, *np.random.default_rng(seed).integers(start, len(whole), 20).tolist()):
        content = bytearray(whole)
        content[at] ^= 1
        (root / "model.safetensors").write_bytes(content)
        assert base != Checkpoint.open(root).fingerprint, f"seed {seed} byte {at}"
    config = tmp_path / "same" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert base != Checkpoint.open(tmp_path / "same").fingerprint


def test_the_fingerprint_heeds_which_of_two_files_a_tensor_is_meant_from_and_not_their_names(
    tmp_path: Path,
) -> None:
    found = set()
    for number, (first, second, meant) in enumerate((("1", "2", "1"), ("2", "1", "2"), ("1", "2", "2"))):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "config.json").write_text("{}")
        (root / first).write_bytes(safetensors_bytes({"a": TENSORS["a"], "b": TENSORS["b"]}))
        (root / second).write_bytes(safetensors_bytes({"a": -TENSORS["a"], "c": TENSORS["c"]}))
        weight_map = {"a": meant, "b": first, "c": second}
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        found.add((number == 2, Checkpoint.open(root).fingerprint))
    assert len(found) == len({fingerprint for _, fingerprint in found}) == 2


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose digest is noted at once, and for every size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tensor_file, "NOTED_BYTES", 0)
    monkeypatch.setattr(tensor_file, "SETTLED_S", -60.0)
    return write_model(tmp_path / "m")


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read whole from now on."""
    reads, whole = list[str](), hashlib.file_digest

    def digest(file: Any, kind: str) -> Any:
        reads.append(file.name)
        return whole(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    return reads


def test_a_large_file_is_read_once_and_again_when_anything_wrote_to_it(
    noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, file = count_reads(monkeypatch), noted / "model.safetensors"
    base = Checkpoint.open(noted).fingerprint
    assert Checkpoint.open(noted).fingerprint == base and len(reads) == 1
    # Times that were set back, as archives and downloads do, leave the time of the change itself.
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as data:
        data.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = Checkpoint.open(noted).fingerprint
    assert changed != base and len(reads) == 2
    # Another file of the same name, size and time.
    content[-1] ^= 1
    other = file.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert Checkpoint.open(noted).fingerprint == base and len(reads) == 3
    assert Checkpoint.open(noted).fingerprint == base and len(reads) == 3


def test_what_was_written_just_now_is_read_again_and_so_is_what_a_torn_note_tells_of(
    noted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, reads = Checkpoint.open(noted).fingerprint, count_reads(monkeypatch)
    (note,) = (tmp_path / "cache" / "eaas" / "digests").iterdir()
    text = note.read_bytes()
    for torn in (b"", text[:64], text[:-1], text.replace(text[:64], b""), b"\xff" * 99):
        note.write_bytes(torn)
        reads.clear()
        assert Checkpoint.open(noted).fingerprint == base and len(reads) == 1, torn
    note.unlink()
    monkeypatch.setattr(tensor_file, "SETTLED_S", 60.0)
    reads.clear()
    for _ in range(2):
        assert Checkpoint.open(noted).fingerprint == base
    assert len(reads) == 2 and not note.read_bytes()
    # Without a place for notes there are none.
    monkeypatch.setenv("XDG_CACHE_HOME", str(noted / "config.json"))
    assert Checkpoint.open(noted).fingerprint == base
