"""While experts are packed, a terminal and a log show how far it is; a checkpoint that is cut short is named."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.make_model import make_model
from eaas.cluster.config import ClusterConfig
from eaas.ops import starting, terminal
from experts import pack
from experts.model import ConfigInvalid
from tests.experts.quantizing import quantize_model


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> io.StringIO:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return io.StringIO()


def test_a_log_gets_lines_with_experts_bytes_rate_and_time_left(
    printed: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console = Console(file=printed, width=200)
    for module in (starting, terminal):
        monkeypatch.setattr(module, "console", console)
    monkeypatch.setattr(starting, "_LINE_EVERY_S", 0.0)
    starting.pack_experts(make_model("tiny", "qwen3_moe", tmp_path / "m", seed=0), "auto", ("cpu",))
    lines = printed.getvalue().splitlines()
    count = len(lines)
    assert count > 1 and "\x1b" not in printed.getvalue()
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"packing experts: {number} of {count}, ")
        assert " GB, " in line and " MB/s, " in line and line.endswith(" s left")
    assert lines[-1].endswith(" 0 s left")


def test_a_terminal_gets_a_bar(printed: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    console = Console(file=printed, width=120, force_terminal=True)
    monkeypatch.setattr(starting, "console", console)
    folder = make_model("tiny", "qwen3_moe", tmp_path / "m", seed=0)
    starting.pack_experts(folder, "auto", ("cpu",))
    assert "packing experts" in printed.getvalue() and "/s" in printed.getvalue()


def test_a_truncated_shard_is_named_before_anything_starts(
    printed: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path / "m", seed=0)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    monkeypatch.setattr(terminal, "errors", Console(file=printed, width=400))
    with pytest.raises(Exception) as failure:
        starting.prepare_model(ClusterConfig(model=folder))
    assert getattr(failure.value, "exit_code", None) == 1
    assert str(file) in printed.getvalue() and "Download it again" in printed.getvalue()
    assert not list(pack.cache_directory().glob("*"))


@pytest.mark.parametrize(
    ("arch", "devices", "said"),
    [
        ("deepseek_v3", ("interpreter",), "has latent attention, which GPUs do not compute"),
        ("gpt_oss", ("interpreter",), "has attention sinks and a bias of the gate's logits, which GPUs"),
    ],
)
def test_what_gpus_do_not_compute_is_refused_before_anything_is_packed(
    printed: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arch: str,
    devices: tuple[str, ...],
    said: str,
) -> None:
    folder = make_model("tiny", arch, tmp_path / "m", seed=0)
    monkeypatch.setattr(terminal, "errors", Console(file=printed, width=400))
    with pytest.raises(Exception) as failure:
        starting.prepare_model(ClusterConfig(model=folder, device=devices))
    assert getattr(failure.value, "exit_code", None) == 1
    assert said in printed.getvalue()
    assert not list(pack.cache_directory().glob("*"))


def test_experts_of_a_pool_are_computed_by_cpus_alone_where_gpus_do_not(printed: io.StringIO, tmp_path: Path) -> None:
    folder = make_model("tiny", "gpt_oss", tmp_path / "m", seed=0)
    with pytest.raises(ConfigInvalid, match="experts of GptOssForCausalLM are computed by CPUs alone"):
        starting.pack_experts(folder, "auto", ("cpu", "interpreter"))


def test_devices_that_keep_experts_in_different_types_are_refused_before_anything_is_packed(
    printed: io.StringIO, tmp_path: Path
) -> None:
    wide = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128}
    source = make_model("tiny", "qwen3_moe", tmp_path / "m", seed=0, overrides=wide)
    quantize_model(source, tmp_path / "q", tmp_path / "p", "w4a16")
    with pytest.raises(ConfigInvalid, match="kept as int4-g32 on cpu, bfloat16 on interpreter"):
        starting.pack_experts(tmp_path / "q", "auto", ("cpu", "interpreter"))
    assert not list(pack.cache_directory().glob("*"))
    starting.pack_experts(tmp_path / "q", "bfloat16", ("cpu", "interpreter"))


def test_ctrl_c_while_libraries_are_imported_ends_the_command_without_a_stack() -> None:
    code = (
        "import sys\nfrom eaas.__main__ import main\n"
        "class Stop:\n  def find_spec(self, name, *_):\n    if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (130, "")
