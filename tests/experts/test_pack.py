"""The packed expert cache is whole or absent, is built once, and knows when its bytes changed."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.make_model import make_model
from experts import pack
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.kernels import answer_of, ffn, ffn_reference, from_dtype, numerics_class, pack_expert, to_dtype
from experts.manifest import BlobCorrupt, Manifest, ManifestInvalid
from experts.model import CHOICES, Dtype, ExpertShape
from experts.pack import PackedExperts, PackUnavailable, layout_of
from experts.weights import Weights, WeightsUnavailable
from router.view import View
from tests.experts.checkpoint_files import QWEN3, expert_tensors, fine_tune, safetensors_bytes, write_model

SHAPE = ExpertShape.from_config(QWEN3)
DTYPE = Dtype.BFLOAT16


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(write_model(tmp_path / "model"))


def opened(checkpoint: Checkpoint, directory: Path) -> PackedExperts:
    return PackedExperts.open(checkpoint, SHAPE, DTYPE, directory=directory)


@pytest.mark.parametrize("dtype", CHOICES)
def test_every_blob_holds_its_experts_weights(tmp_path: Path, checkpoint: Checkpoint, dtype: Dtype) -> None:
    steps: list[tuple[int, int]] = []
    packed = PackedExperts.open(
        checkpoint,
        SHAPE,
        dtype,
        directory=tmp_path / "c",
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(done, 8) for done in range(1, 9)]
    for layer in range(SHAPE.layers):
        for expert in range(SHAPE.experts):
            packed.verify(layer, expert)
            gate, up, down = (checkpoint.tensor(name) for name in SHAPE.names(layer, expert))
            wanted = pack_expert(gate, up, down, dtype)
            found = packed.expert(layer, expert)
            assert np.array_equal(found.gate_up, wanted.gate_up) and np.array_equal(found.down, wanted.down)
            blob = packed.blob(layer, expert)
            address = blob.ctypes.data
            assert address == found.gate_up.ctypes.data and address % 4096 == 0
            assert found.down.ctypes.data == address + packed.layout.gate_up_bytes
            assert blob.nbytes == found.gate_up.nbytes + found.down.nbytes
            assert packed.manifest.answer(layer, expert) == answer_of(wanted)


def test_a_mapped_expert_computes_its_definition(tmp_path: Path, checkpoint: Checkpoint) -> None:
    packed = opened(checkpoint, tmp_path / "c")
    gate, up, down = (from_dtype(checkpoint.tensor(name)) for name in SHAPE.names(1, 2))
    x = np.random.default_rng(3).standard_normal((3, SHAPE.hidden), np.float32)
    found = ffn(packed.expert(1, 2), to_dtype(x, DTYPE))
    wanted = ffn_reference(gate, up, down, x, DTYPE)
    # act is rounded to 2**-9 of itself; far more than float32 accumulation adds.
    assert np.abs(found - wanted).max() < 2**-8 * np.abs(wanted).max(), "seed 3"


def test_whoever_packs_holds_no_page_of_the_checkpoint(tmp_path: Path, checkpoint: Checkpoint) -> None:
    def mapped_kib() -> int:
        smaps = Path("/proc/self/smaps").read_text()
        found = re.findall(r"/model\.safetensors\n.*?^Rss: +(\d+) kB$", smaps, re.M | re.S)
        assert found, "the checkpoint is not mapped"
        return sum(map(int, found))

    assert all(checkpoint.tensor(name).any() for name in checkpoint.names()) and mapped_kib() > 0
    packed = opened(checkpoint, tmp_path / "c")
    assert mapped_kib() == 0
    # One that went bad is read from the checkpoint again.
    with packed.path.open("r+b") as out:
        out.seek(packed.layout.offset(0, 0))
        out.write(bytes(64))
    Weights(name="e-0", packed=packed, endpoint=None, checkpoint=checkpoint).expert(0, 0, NOBODY)
    packed.verify(0, 0)
    assert mapped_kib() == 0


def test_a_second_open_builds_nothing(tmp_path: Path, checkpoint: Checkpoint) -> None:
    first = opened(checkpoint, tmp_path / "c")
    before = first.path.stat()
    second = PackedExperts.open(
        checkpoint, SHAPE, DTYPE, directory=tmp_path / "c", progress=lambda *_: pytest.fail("built again")
    )
    assert second.path.stat() == before


def test_caches_of_other_checkpoints_and_dtypes_stand_beside_it(tmp_path: Path, checkpoint: Checkpoint) -> None:
    first = opened(checkpoint, tmp_path / "c")
    other = opened(Checkpoint.open(write_model(tmp_path / "m2", seed=1)), tmp_path / "c")
    wide = PackedExperts.open(checkpoint, SHAPE, Dtype.FLOAT32, directory=tmp_path / "c")
    assert len({first.path, other.path, wide.path}) == 3
    assert all(path.exists() for path in (first.path, other.path, wide.path))


def test_a_flipped_byte_in_any_blob_is_found_and_its_right_bytes_cure_it(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    packed = opened(checkpoint, tmp_path / "c")
    right, layout = packed.blob(1, 1).copy(), packed.layout
    with packed.path.open("r+b") as file:
        at = layout.offset(1, 1) + layout.blob_bytes - 1
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    packed.verify(1, 0)
    with pytest.raises(BlobCorrupt, match="expert 1 of MoE layer 1"):
        packed.verify(1, 1)
    with pytest.raises(BlobCorrupt):
        packed.fill(1, 1, packed.blob(1, 0))
    packed.fill(1, 1, right)
    packed.verify(1, 1)
    opened(checkpoint, tmp_path / "c").verify(1, 1)


def test_a_file_begun_with_a_manifest_is_all_holes_until_right_bytes_fill_them(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    whole = opened(checkpoint, tmp_path / "c")
    begun = PackedExperts.begin(whole.manifest, tmp_path / "other")
    beside = PackedExperts.find(begun.layout, tmp_path / "other")
    assert beside is not None
    pairs = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]
    for layer, expert in pairs:
        with pytest.raises(BlobCorrupt, match="not filled in"):
            begun.verify(layer, expert)
        wrong = whole.blob(layer, expert).copy()
        wrong[-1] ^= 1
        for blob in (wrong, wrong[:-1], whole.blob(layer, expert)[:-1]):
            with pytest.raises(BlobCorrupt):
                begun.fill(layer, expert, blob)
        assert begun.is_hole(layer, expert)
        begun.fill(layer, expert, whole.blob(layer, expert))
        beside.verify(layer, expert)
    assert begun.path.read_bytes() == whole.path.read_bytes()


def test_a_manifest_of_anything_else_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    manifest = opened(checkpoint, tmp_path / "c").manifest
    data, layout = manifest.encode(), manifest.layout
    assert Manifest.decode(data, layout) == manifest
    for at in range(len(data)):
        with pytest.raises(ManifestInvalid):
            Manifest.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], layout)
    for wrong in (data[:-1], data + b"0", b"", data[:100]):
        with pytest.raises(ManifestInvalid, match="needed"):
            Manifest.decode(wrong, layout)
    for other in (
        replace(layout, fingerprint="ab" * 32),
        replace(layout, numerics_class="cpu-other-1"),
        replace(layout, shape=replace(SHAPE, intermediate=46)),
    ):
        with pytest.raises(ManifestInvalid, match="it is not of"):
            Manifest.decode(data, other)


def test_an_expert_without_finite_rows_is_said_before_anything_is_served(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model")
    tensors = expert_tensors(SHAPE)
    broken = tensors[SHAPE.names(1, 2)[2]].copy()
    broken[3, 3] = 0x7F80  # infinity
    (root / "model.safetensors").write_bytes(safetensors_bytes(tensors | {SHAPE.names(1, 2)[2]: broken}))
    with pytest.raises(CheckpointInvalid, match="expert 2 of MoE layer 1: its row is not finite"):
        opened(Checkpoint.open(root), tmp_path / "c")


def test_a_truncated_cache_is_rebuilt(tmp_path: Path, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    path = opened(checkpoint, tmp_path / "c").path
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for length in (0, 100, 5000, path.stat().st_size - 1):
        with path.open("r+b") as file:
            file.truncate(length)
        with caplog.at_level(logging.WARNING):
            opened(checkpoint, tmp_path / "c").verify(1, 3)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest, f"truncated to {length}"
        assert "reason=size" in caplog.text


def test_every_flipped_header_or_digest_byte_leads_to_a_rebuild(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = opened(checkpoint, tmp_path / "c").path
    layout = layout_of(SHAPE, DTYPE, checkpoint.fingerprint)
    content = path.read_bytes()
    for at in range(160 + 64 * layout.count):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
        assert PackedExperts.find(layout, path.parent) is None, f"byte {at}"
    opened(checkpoint, tmp_path / "c")
    assert path.read_bytes() == content


BUILDER = """
import sys
from pathlib import Path
from experts.checkpoint import Checkpoint
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts
checkpoint = Checkpoint.open(sys.argv[1])
shape = ExpertShape.from_config(checkpoint.config)
built = []
packed = PackedExperts.open(checkpoint, shape, Dtype.BFLOAT16, directory=Path(sys.argv[2]),
                            progress=lambda done, total: built.append(done))
for layer in range(shape.layers):
    for expert in range(shape.experts):
        packed.verify(layer, expert)
print(len(built))
"""


def test_two_builders_at_once_make_one_good_file(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model", QWEN3 | {"hidden_size": 512, "moe_intermediate_size": 256})
    command = [sys.executable, "-c", BUILDER, str(root), str(tmp_path / "c")]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    results = [builder.communicate(timeout=60) for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], results
    assert sorted(int(out) for out, _ in results) == [0, 8]
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".experts", ".lock"]


TINY_PAIRS = [(layer, expert) for layer in range(4) for expert in range(8)]
TUNED = [(0, 5), (2, 0), (3, 7)]
NOBODY = View(term=1, epoch=1, replicas_wanted=1, layers=4, experts=8, members=())


class Family:
    """A model, a fine-tune of it that shares all experts but TUNED, and a cache directory.

    Args:
        code: The module that packs; one that is wrong in one way is planted here.
    """

    def __init__(self, root: Path, code: ModuleType = pack) -> None:
        self.root, self.code, self.cache = root, code, root / "cache"
        base = make_model("tiny", "qwen3_moe", root / "base", seed=1)
        self.base, self.tune = Checkpoint.open(base), Checkpoint.open(fine_tune(base, root / "tune", TUNED))

    def open(self, checkpoint: Checkpoint, directory: Path | None = None) -> PackedExperts:
        shape = ExpertShape.from_config(checkpoint.config)
        return self.code.PackedExperts.open(checkpoint, shape, DTYPE, directory=directory or self.cache)

    def alone(self, checkpoint: Checkpoint) -> dict[tuple[int, int], bytes]:
        """What a file that shares with none holds."""
        packed = PackedExperts.open(
            checkpoint, ExpertShape.from_config(checkpoint.config), DTYPE, directory=self.root / "alone"
        )
        return {pair: bytes(packed.blob(*pair)) for pair in TINY_PAIRS}

    def shared(self) -> tuple[PackedExperts, PackedExperts]:
        return self.open(self.base), self.open(self.tune)


def weights_of(packed: PackedExperts, checkpoint: Checkpoint | None = None) -> Weights:
    return Weights(name="expert/1", packed=packed, endpoint=None, checkpoint=checkpoint)


def own_bytes(packed: PackedExperts, pair: tuple[int, int]) -> bytes:
    """What the file itself holds at a place."""
    start = packed.layout.offset(*pair)
    return packed.path.read_bytes()[start : start + packed.layout.blob_bytes]


def spoil(packed: PackedExperts, pair: tuple[int, int]) -> None:
    """Have a place of the file go bad, under everybody who maps it."""
    with packed.path.open("r+b") as file:
        file.seek(packed.layout.offset(*pair) + 100)
        file.write(bytes(byte ^ 0xFF for byte in own_bytes(packed, pair)[100:200]))


def test_fine_tunes_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    """One place in 32 differs, and none of the first bytes of a tensor."""
    made = Family(tmp_path)
    assert made.base.fingerprint != made.tune.fingerprint
    base, tune = made.shared()
    assert base.path != tune.path
    for pair in TUNED:
        assert bytes(tune.blob(*pair)) == bytes(pack.pack_blob(tune.layout, made.tune, *pair))
        assert bytes(tune.blob(*pair)) != bytes(base.blob(*pair))


def test_one_byte_in_the_middle_of_a_tensor_makes_another_model_with_experts_of_its_own(
    tmp_path: Path,
) -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    folder = make_model("tiny", "qwen3_moe", tmp_path / "base", seed=1)
    base = Checkpoint.open(folder)
    shape = ExpertShape.from_config(base.config)
    pairs = [TINY_PAIRS[n] for n in rng.choice(len(TINY_PAIRS), 2, replace=False)]
    tunes: list[Checkpoint] = []
    for number, pair in enumerate(pairs):
        root = fine_tune(folder, tmp_path / str(number), ())
        file = base._file(name := shape.names(*pair)[2])
        entry = file.entries[name]
        # The sign of one weight.
        weight = int(rng.integers(40, (entry.end - entry.begin) // 2 - 40))
        with (root / "model.safetensors").open("r+b") as data:
            data.seek(at := file._start + entry.begin + 2 * weight + 1)
            (byte,) = data.read(1)
            data.seek(at)
            data.write(bytes([byte ^ 0x80]))
        tunes.append(Checkpoint.open(root))
    assert len({checkpoint.fingerprint for checkpoint in (base, *tunes)}) == 3, f"seed {seed}"
    packs = [PackedExperts.open(each, shape, DTYPE, directory=tmp_path / "cache") for each in (base, *tunes)]
    assert len({packed.path for packed in packs}) == 3
    x = to_dtype(rng.standard_normal((8, shape.hidden), np.float32), DTYPE)
    for checkpoint, packed, pair in zip(tunes, packs[1:], pairs, strict=True):
        alone = PackedExperts.open(checkpoint, shape, DTYPE, directory=checkpoint.directory / "alone")
        said = {each: ffn(each.expert(*pair), x).tobytes() for each in (alone, *packs)}
        assert said.pop(packed) == said.pop(alone), f"seed {seed}"
        assert len(set(said.values())) == 1 and ffn(packed.expert(*pair), x).tobytes() not in said.values(), seed


def test_fine_tunes_share_the_bytes_of_the_experts_that_they_share(tmp_path: Path) -> None:
    made = Family(tmp_path)
    base, tune = made.shared()
    wanted = made.alone(made.tune)
    assert {pair: bytes(tune.blob(*pair)) for pair in TINY_PAIRS} == wanted
    assert (
        tune.manifest
        == PackedExperts.open(
            made.tune, ExpertShape.from_config(made.tune.config), DTYPE, directory=tmp_path / "alone"
        ).manifest
    )
    for pair in TINY_PAIRS:
        assert any(own_bytes(tune, pair)) == (pair in TUNED), pair
        assert answer_of(tune.expert(*pair)) == tune.manifest.answer(*pair)
    one, both = (sum(p.path.stat().st_blocks for p in packs) for packs in ([base], [base, tune]))
    print(f"{both / one:.3f} of one model's {one} blocks")
    assert both <= 1.15 * one, f"{both} blocks of two, {one} of one"
    # In either order, and for files that are filled one expert after another.
    begun = PackedExperts.begin(base.manifest, tmp_path / "begun")
    begun.fill(1, 1, base.blob(1, 1))
    beside = PackedExperts.begin(tune.manifest, tmp_path / "begun")
    assert beside.is_hole(1, 2) and not beside.is_hole(1, 1)
    begun.fill(1, 2, base.blob(1, 2))
    assert bytes(beside.blob(1, 2)) == wanted[1, 2] and beside.path.stat().st_blocks * 512 <= 4096


SERVES = """
import sys
from pathlib import Path
from experts.checkpoint import Checkpoint
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts, layout_of
checkpoint = Checkpoint.open(sys.argv[1])
shape = ExpertShape.from_config(checkpoint.config)
packed = PackedExperts.find(layout_of(shape, Dtype.BFLOAT16, checkpoint.fingerprint), Path(sys.argv[2]))
for layer in range(shape.layers):
    for expert in range(shape.experts):
        packed.verify(layer, expert)
print("ready", flush=True)
sys.stdin.read()
"""


def mapped_bytes(made: Family, *checkpoints: Checkpoint) -> int:
    """What processes that each hold one of these models take for it, what they share counted once."""
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVES, str(each.directory), str(made.cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for each in checkpoints
    ]
    try:
        assert [server.stdout and server.stdout.readline() for server in servers] == [b"ready\n"] * len(servers)
        maps = "".join(Path(f"/proc/{server.pid}/smaps").read_text() for server in servers)
    finally:
        for server in servers:
            server.communicate()
    found = re.findall(r"\.experts\n(?:\w+: .*\n)*?Pss: +(\d+) kB", maps)
    return sum(map(int, found)) << 10


def test_processes_that_serve_two_fine_tunes_take_the_memory_of_one_and_what_differs(tmp_path: Path) -> None:
    made = Family(tmp_path)
    file_bytes = made.shared()[0].layout.file_bytes
    # Nothing maps them but the processes that are measured.
    gc.collect()
    one, both = mapped_bytes(made, made.base), mapped_bytes(made, made.base, made.tune)
    print(f"{both / one:.3f} of one model's {one} bytes")
    assert one >= 0.9 * file_bytes and both <= 1.15 * one, (
        f"{both} bytes of two, {one} of one, {file_bytes} in the file"
    )


def judge_bytes(made: Family) -> None:
    """Whoever maps a file finds right bytes, wherever its siblings have them, and nothing of them where none has."""
    base, tune = made.shared()
    wanted = made.alone(made.tune)
    # A sibling under the same name that has the same experts at other places.
    count, entries = base.layout.count, base.manifest.entries
    turned = b"".join(entries[64 * (n + 1) : 64 * (n + 2)] for n in range(count - 1)) + entries[:64]
    blobs = [bytes(base.blob(*pair)) for pair in TINY_PAIRS]
    assert not tune.is_hole(1, 1)
    base.path.unlink()
    other = PackedExperts.begin(Manifest(layout=base.layout, entries=turned), made.cache)
    for pair, blob in zip(TINY_PAIRS, [*blobs[1:], blobs[0]], strict=True):
        other.fill(*pair, np.frombuffer(blob, np.uint8))
    assert {pair: bytes(tune.blob(*pair)) for pair in TINY_PAIRS} == wanted, "mapped before, the old one is read"
    again = made.code.PackedExperts.find(tune.layout, made.cache)
    for pair in TINY_PAIRS:
        again.verify(*pair)
        assert bytes(again.blob(*pair)) == wanted[pair]
    # Two that each have a hole where the other has one lend each other nothing.
    other.path.unlink()
    hollow = PackedExperts.begin(base.manifest, made.cache)
    last = made.code.PackedExperts.find(tune.layout, made.cache)
    for pair in TINY_PAIRS:
        assert last.is_hole(*pair) == (pair not in TUNED)
    hollow.fill(0, 0, np.frombuffer(wanted[0, 0], np.uint8))
    assert not last.is_hole(0, 0)


def judge_damage(made: Family) -> None:
    """What a sibling lends is compared where it is served from, and mended in the own place by each process."""
    base, tune = made.shared()
    wanted, pair = made.alone(made.tune), (1, 3)
    # Two servers of the fine-tune; the second stands for another process.
    beside = made.code.PackedExperts.find(tune.layout, made.cache)
    servers = [weights_of(packed, made.tune) for packed in (tune, beside)]
    served = [server.expert(*pair, NOBODY).gate_up for server in servers]
    right = bytes(served[0])
    assert not any(own_bytes(tune, pair))
    spoil(base, pair)
    for server, rows in zip(servers, served, strict=True):
        assert bytes(rows) != right and not server.is_here(*pair), "what is served is bad, and passes"
        assert bytes(server.expert(*pair, NOBODY).gate_up) == right and server.is_here(*pair)
        assert own_bytes(tune, pair) == wanted[pair]
    assert own_bytes(base, pair) != wanted[pair], "only whoever serves it mends a sibling"
    assert bytes(weights_of(base, made.base).expert(*pair, NOBODY).gate_up) == right
    assert own_bytes(base, pair) == wanted[pair]
    # And what is bad already when a fine-tune is packed is not left to the sibling.
    spoil(base, pair)
    tune.path.unlink()
    anew = made.open(made.tune)
    for each in TINY_PAIRS:
        anew.verify(*each)
    assert any(own_bytes(anew, pair)) and not any(own_bytes(anew, (1, 4)))


@pytest.mark.parametrize("judge", [judge_bytes, judge_damage])
def test_shared_bytes_are_right_whatever_befalls_the_sibling(tmp_path: Path, judge: Callable[[Family], None]) -> None:
    judge(Family(tmp_path))


@pytest.mark.parametrize(
    ("says", "instead", "judge"),
    [
        pytest.param(
            "place = sibling.manifest.places.get(digest)",
            "place = next(iter(sibling.manifest.places.values()))",
            judge_bytes,
            id="lends whatever the sibling has",
        ),
        pytest.param("if place and sibling._is_written(*place):", "if place:", judge_bytes, id="lends holes"),
        pytest.param(
            "return self._borrowed.get((layer, expert), self._own(layer, expert))",
            "own = self._own(layer, expert)\n"
            "        return own if self._is_written(layer, expert) else self._borrowed.get((layer, expert), own)",
            judge_damage,
            id="compares the own place while the sibling's is served",
        ),
        pytest.param(
            "        self._borrowed.pop((layer, expert), None)\n",
            "",
            judge_damage,
            id="goes on with the sibling's after the own place was filled",
        ),
        pytest.param(
            "if lent is not None and np.array_equal(lent, blob):",
            "if lent is not None:",
            judge_damage,
            id="leaves a hole for bytes that went bad",
        ),
    ],
)
def test_a_wrong_way_to_share_is_noticed(
    tmp_path: Path, says: str, instead: str, judge: Callable[[Family], None]
) -> None:
    source = Path(str(pack.__file__)).read_text()
    assert source.count(says) == 1
    planted = ModuleType("experts.pack")
    exec(compile(source.replace(says, instead), "planted", "exec"), planted.__dict__)
    with pytest.raises((AssertionError, BlobCorrupt, WeightsUnavailable)):
        judge(Family(tmp_path, planted))


def test_a_deleted_sibling_is_read_until_the_end_and_missed_by_who_starts_later(tmp_path: Path) -> None:
    made = Family(tmp_path)
    base, tune = made.shared()
    wanted, pair = made.alone(made.tune), (1, 3)
    running = weights_of(tune)
    running.expert(*pair, NOBODY)
    base.path.unlink()
    del base
    gc.collect()
    # Also what it had not read yet.
    for each in TINY_PAIRS:
        assert running.is_here(*each) and bytes(tune.blob(*each)) == wanted[each]
    later = made.open(made.tune)
    with pytest.raises(WeightsUnavailable):
        weights_of(later).expert(*pair, NOBODY)
    mended = weights_of(later, made.tune)
    for each in TINY_PAIRS:
        mended.expert(*each, NOBODY)
        assert own_bytes(later, each) == wanted[each]
    # Now the other one leaves holes.
    assert not any(own_bytes(made.open(made.base), pair))
    assert bytes(made.open(made.base).blob(*pair)) == wanted[pair]


def test_fine_tunes_that_are_packed_at_once_beside_a_builder_that_was_killed_are_both_right(
    tmp_path: Path,
) -> None:
    made = Family(tmp_path)
    command = [sys.executable, "-c", BUILDER]
    seed = int(np.random.default_rng().integers(1 << 31))
    pauses = np.random.default_rng(seed).uniform(0.2, 1.0, 2)
    for pause_s in pauses:
        doomed = subprocess.Popen([*command, str(made.tune.directory), str(made.cache)], stdout=subprocess.DEVNULL)
        time.sleep(pause_s)
        doomed.kill()
        doomed.wait()
    builders = [
        subprocess.Popen([*command, str(each.directory), str(made.cache)], stderr=subprocess.PIPE)
        for each in (made.base, made.tune, made.base, made.tune)
    ]
    said = [builder.communicate(timeout=60)[1] for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 4, f"seed {seed}: {said}"
    for each in (made.base, made.tune):
        packed, wanted = made.open(each), made.alone(each)
        assert {pair: bytes(packed.blob(*pair)) for pair in TINY_PAIRS} == wanted, f"seed {seed}"
    assert sorted(path.suffix for path in made.cache.iterdir()) == [".experts"] * 2 + [".lock"] * 2


def test_what_a_dead_builder_left_is_cleared(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = opened(checkpoint, tmp_path / "c").path
    path.unlink()
    stale = path.with_suffix(".12345.partial")
    stale.write_bytes(b"half")
    opened(checkpoint, tmp_path / "c")
    assert path.exists() and not stale.exists()


def test_a_failed_build_leaves_no_file(tmp_path: Path) -> None:
    tensors = expert_tensors(SHAPE)
    last = SHAPE.names(1, 3)[2]
    root = write_model(tmp_path / "model")
    for broken, text in (
        (tensors[last][:-1], "config.json says"),
        (tensors[last].astype(np.int64), "stored as I64"),
    ):
        (root / "model.safetensors").write_bytes(safetensors_bytes(tensors | {last: broken}))
        with pytest.raises(CheckpointInvalid, match=text):
            opened(Checkpoint.open(root), tmp_path / "c")
        assert [path.suffix for path in (tmp_path / "c").iterdir() if path.suffix != ".lock"] == []


def test_float16_experts_are_packed_exactly_in_float32(tmp_path: Path) -> None:
    root = write_model(tmp_path / "model")
    wide = {name: from_dtype(tensor) for name, tensor in expert_tensors(SHAPE).items()}
    half = {name: tensor.astype(np.float16) for name, tensor in wide.items()}
    (root / "model.safetensors").write_bytes(safetensors_bytes(half))
    packed = PackedExperts.open(Checkpoint.open(root), SHAPE, Dtype.FLOAT32, directory=tmp_path / "c")
    gate, up, down = (half[name].astype(np.float32) for name in SHAPE.names(0, 1))
    assert np.array_equal(packed.expert(0, 1).down, pack_expert(gate, up, down, Dtype.FLOAT32).down)


def test_no_room_is_said_before_anything_is_written(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = pack.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PackUnavailable, match=r"needs \d+ bytes, 1000 are free"):
        opened(checkpoint, tmp_path / "c")


def test_an_unwritable_directory_is_said(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackUnavailable, match="cannot be written: Not a directory"):
        opened(checkpoint, tmp_path / "file" / "c")


@pytest.mark.parametrize(("layer", "expert"), [(2, 0), (0, 4), (-1, 0)])
def test_an_expert_outside_the_shape_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, layer: int, expert: int
) -> None:
    packed = opened(checkpoint, tmp_path / "c")
    for call in (packed.blob, packed.expert, packed.verify):
        with pytest.raises(IndexError, match="packed are 2 x 4"):
            call(layer, expert)


def test_the_cache_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pack.cache_directory() == tmp_path / "eaas" / "packed"
    monkeypatch.setenv("HOME", os.fspath(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert pack.cache_directory() == tmp_path / "home" / ".cache" / "eaas" / "packed"


def test_the_layout_fields_stand_where_the_docstring_says(tmp_path: Path, checkpoint: Checkpoint) -> None:
    packed = opened(checkpoint, tmp_path / "c")
    content = packed.path.read_bytes()
    layout = packed.layout
    assert content[:8] == b"EAASPACK"
    assert np.frombuffer(content, "<u4", 6, 8).tolist() == [2, 1, 2, 4, 70, 45]
    assert np.frombuffer(content, "<u8", 4, 32).tolist() == [
        layout.gate_up_bytes, layout.blob_bytes, layout.blob_stride, layout.data_offset,
    ]  # fmt: skip
    assert content[64:96].hex() == checkpoint.fingerprint
    assert content[96:128] == numerics_class(DTYPE).encode().ljust(32, b"\0")
    assert content[128:160] == hashlib.sha256(content[:128] + content[160 : 160 + 8 * 64]).digest()
    assert content[160:192] == hashlib.sha256(packed.blob(0, 0)).digest()
    assert layout.file_name == f"{checkpoint.fingerprint}-{numerics_class(DTYPE)}-v2.experts"
