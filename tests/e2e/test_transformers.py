"""transformers' models compute as they do alone when a pool of real processes computes their experts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from eaas import pool as pools
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.integrations import transformers as eaas
from experts.checkpoint import Checkpoint
from router.bitmap import to_bytes
from router.client import JoinRefused, RouterClient
from router.view import Member, View
from tests import moe_families
from tests.e2e.waiting import wait_for
from tests.experts.quantizing import METHODS, quantize_model
from tests.experts.test_gguf import model as gguf_model

pytestmark = pytest.mark.full(seconds=8)

VOCAB, LAYERS = 128, 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    # Ten times as usual, so that experts weigh in the logits as they do in a trained model.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8, "mlp_only_layers": [1]},
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 8},
    "DeepseekV3": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
    "GptOss": {"intermediate_size": 48, "num_local_experts": 8, "head_dim": 16},
}  # fmt: skip
# Of logits, relative to the largest: float32 sums in another order.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def write(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 1) -> Path:
    """A small checkpoint of random weights, as transformers writes it."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**_SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LocalCluster]]:
    """A small Mixtral, and its experts on two servers."""
    folder = write("Mixtral", tmp_path_factory.mktemp("models") / "mixtral")
    with serving(folder) as cluster:
        yield folder, cluster


@contextlib.contextmanager
def serving(folder: Path, servers: int = 2, replicas: int = 2, dtype: str = "auto") -> Iterator[LocalCluster]:
    """The experts of a checkpoint, as `eaas pool` serves them."""
    config = ClusterConfig(
        model=folder,
        served_model_name="pool",
        experts=servers,
        replicas=replicas,
        dtype=dtype,
        attention=0,
        endpoint=False,
    )
    with LocalCluster(config) as cluster:
        yield cluster


def experts_of(model: torch.nn.Module) -> list[Any]:
    """Its modules of experts."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """In float32."""
    with torch.no_grad():
        return model(tokens).logits.float()


def prompt(seed: int, rows: int = 2, length: int = 17) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, tokens: torch.Tensor, **options: Any) -> list[list[int]]:
    """Greedy tokens."""
    return model.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0, **options).tolist()


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error <= TOLERANCE[dtype], f"logits differ by {error:.3g} of the largest"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in FAMILIES] + [("Qwen3Moe", torch.bfloat16)],
    ids=lambda value: value if isinstance(value, str) else str(value).removeprefix("torch."),
)
def test_a_model_without_experts_gives_eagers_logits_and_tokens(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(family, tmp_path, dtype)
    whole = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    model = eaas.load(folder)
    assert type(model) is type(whole)
    assert model.dtype == dtype
    assert experts_of(model) and not any(list(module.parameters()) for module in experts_of(model))
    with serving(folder) as cluster, eaas.connect(cluster.router_address, model):
        tokens = prompt(3)
        found = logits(model, tokens)
        assert_close(found, logits(whole, tokens), dtype)
        if dtype is torch.float32:
            assert generated(model, tokens) == generated(whole, tokens)
        # Experts matter here: without them the logits are others.
        with torch.no_grad():
            for module in experts_of(whole):
                module.down_proj.zero_()
        assert (logits(whole, tokens) - found).abs().max() > 0.1 * found.abs().max()
        # A batch larger than one call may be goes in several, with the same bits.
        monkeypatch.setattr(pools, "MOST_ROWS", 7)
        with eaas.connect(cluster.router_address, model):
            assert torch.equal(logits(model, tokens), found)


@pytest.mark.parametrize("family", moe_families.FAMILIES)
def test_a_model_of_every_family_gives_its_own_logits(family: str, tmp_path: Path) -> None:
    whole = moe_families.model_of(family)
    whole.set_experts_implementation("eager")
    whole.save_pretrained(tmp_path)
    tokens = prompt(9) % moe_families.VOCAB
    wanted = logits(whole, tokens)
    model = eaas.load(tmp_path)
    with (
        serving(tmp_path, servers=1, replicas=1) as cluster,
        eaas.connect(cluster.router_address, model),
    ):
        assert_close(logits(model, tokens), wanted, torch.float32)
    with torch.no_grad():
        for module in experts_of(whole):
            module.down_proj.zero_()
    assert (logits(whole, tokens) - wanted).abs().max() > 0.05 * wanted.abs().max(), "experts matter here"


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_checkpoint_gives_the_logits_of_the_weights_it_stands_for(method: str, tmp_path: Path) -> None:
    # Groups of up to 128 columns, and words of 8 rows, in every matrix.
    wide = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    moe_families.model_of("Qwen3Moe", **wide).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    quantize_model(tmp_path / "source", folder, plain, method)
    whole = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")
    tokens = prompt(4) % moe_families.VOCAB
    model = eaas.load(folder, dtype=torch.float32)
    with serving(folder, dtype="float32") as cluster, eaas.connect(cluster.router_address, model):
        assert_close(logits(model, tokens), logits(whole, tokens), torch.float32)
    # As a user has it: experts as they are stored, what stands beside them in the checkpoint's own type. A rounded row
    # may choose other experts, so that it is the error of the model in bfloat16 which bounds this one.
    model, many = eaas.load(folder), prompt(5, 16, 64) % moe_families.VOCAB
    assert model.dtype == torch.bfloat16
    exact = logits(whole, many)
    usual = rms(logits(whole.to(torch.bfloat16), many) - exact)
    with serving(folder) as cluster, eaas.connect(cluster.router_address, model):
        assert rms(logits(model, many) - exact) <= 1.2 * usual


def test_a_gguf_file_gives_the_logits_of_the_weights_it_stands_for(tmp_path: Path) -> None:
    folder, plain = gguf_model(tmp_path, "mixtral", seed=11)
    whole = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")
    model = eaas.load(folder, dtype=torch.float32)
    with serving(folder, dtype="float32") as cluster, eaas.connect(cluster.router_address, model):
        assert_close(logits(model, prompt(4)), logits(whole, prompt(4)), torch.float32)


def test_a_bias_beside_a_quantized_gate_is_loaded_and_its_scales_are_not(tmp_path: Path) -> None:
    gate = "model.layers.0.mlp.gate"
    tensors = {
        f"{gate}.weight": torch.ones(4, 8, dtype=torch.float8_e4m3fn),
        f"{gate}.weight_scale_inv": torch.full((1, 1), 2.0),
        f"{gate}.input_scale": torch.ones(()),
        f"{gate}.bias": torch.ones(4),
        f"{gate}.e_score_correction_bias": torch.arange(4.0),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fields}))
    found = eaas._dequantized(Checkpoint.open(tmp_path), torch.float32)
    assert set(found) == {f"{gate}.{part}" for part in ("weight", "bias", "e_score_correction_bias")}
    assert torch.equal(found[f"{gate}.weight"], torch.full((4, 8), 2.0))
    assert torch.equal(found[f"{gate}.e_score_correction_bias"], torch.arange(4.0))


def test_a_checkpoint_quantized_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(quantization_config={"quant_method": "hqq"})
    with pytest.raises(eaas.ConnectFailed, match=r"quantized \(hqq\)"):
        eaas.load(tmp_path, config=config)


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_killed_expert_server_changes_no_generated_token(replicas: int, tmp_path: Path) -> None:
    folder = write("DeepseekV3", tmp_path)
    model = eaas.load(folder)
    with serving(folder, replicas=replicas) as cluster, eaas.connect(cluster.router_address, model):
        tokens = prompt(5)
        calm = generated(model, tokens)
        victim = next(pid for name, pid in cluster.pids().items() if name.startswith("expert/"))
        steps: list[int] = []

        def kill_at_the_tenth(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            steps.append(ids.shape[1])
            if len(steps) == 10:
                os.kill(victim, signal.SIGKILL)
            return scores

        assert generated(model, tokens, logits_processor=[kill_at_the_tenth]) == calm
        assert len(steps) == 24
        wait_for("the killed server is missed", lambda: victim not in cluster.pids().values())


def test_a_client_that_is_no_member_any_more_becomes_a_new_one(mixtral: tuple[Path, LocalCluster]) -> None:
    folder, cluster = mixtral
    model = eaas.load(folder)
    with eaas.connect(cluster.router_address, model):
        calm = generated(model, prompt(6))
        router = RouterClient(cluster.router_address)

        def clients() -> list[Any]:
            return list(router.status().view.pool("client"))

        # One of a test before may have left without a word.
        wait_for("no client but this one, serving", lambda: [m.state for m in clients()] == ["serving"])
        (member,) = clients()
        router.retire(member.name, "test")
        wait_for("the client is no member", lambda: member.name not in [m.name for m in clients()])
        wait_for("it joins anew", lambda: generated(model, prompt(6)) == calm and bool(clients()))
        assert clients()[0].name != member.name
        router.close()


def test_who_comes_as_the_last_server_goes_waits_for_the_next() -> None:
    server = Member(
        name="expert/1", pool="expert", state="serving", incarnation=1, address="a", pid=1, host="h",
        numerics_class="cpu-bf16-fma-1",
    )  # fmt: skip
    shown = View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=2, members=(server,))

    class Router:
        """Its only server goes as the client joins, and is back at the fourth look."""

        looks, asked = 4, 0

        def status(self, timeout_s: float) -> SimpleNamespace:
            self.looks += 1
            return SimpleNamespace(view=shown if self.looks > 3 else replace(shown, members=()))

        def join(self, **asked: object) -> SimpleNamespace:
            self.asked += 1
            if self.asked == 1:
                self.looks = 0
                raise JoinRefused("no expert server is a member")
            return SimpleNamespace(name="client/1")

    pool: Any = object.__new__(eaas.Pool)
    pool.shape, pool.router, pool.model, pool.fingerprint = SimpleNamespace(layers=1, experts=2), "r", "", ""
    router: Any = Router()
    identity, view, found = pools._join(router, pool, 10.0)
    assert (identity.name, view, found) == ("client/1", shown, "cpu-bf16-fma-1")
    assert router.asked == 2


def test_a_gateways_cluster_lends_its_experts_and_sends_the_client_nothing(tiny: Path) -> None:
    model = eaas.load(tiny)
    whole = AutoModelForCausalLM.from_pretrained(tiny, experts_implementation="eager")
    config = ClusterConfig(model=tiny, served_model_name="tiny", experts=2, port=0)
    with LocalCluster(config) as cluster, eaas.connect(cluster.url, model):
        tokens = torch.arange(20)[None]
        assert_close(logits(model, tokens), logits(whole, tokens), torch.bfloat16)
        assert cluster.pids().keys() >= {"gateway/1", "attention/1"}
        router = RouterClient(cluster.router_address)

        def others() -> list[tuple[str, str]]:
            members = router.status().view.members
            return [(m.pool, m.state) for m in members if m.pool in ("attention", "client")]

        # A client says that it serves when it renews its lease next.
        wait_for("both serve", lambda: others() == [("attention", "serving"), ("client", "serving")], cluster)
        router.close()


def test_what_does_not_fit_is_refused_in_words(
    mixtral: tuple[Path, LocalCluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, cluster = mixtral
    model = eaas.load(folder)
    with pytest.raises(eaas.NotConnected, match="connect"):
        logits(model, prompt(1))
    with pytest.raises(eaas.ConnectFailed, match="cannot be joined"):
        eaas.connect("127.0.0.1:9", model, start_s=0.5)
    assert "waiting_for_router" in caplog.text, "a long wait says what it is for"
    other = eaas.load(write("Mixtral", tmp_path / "other", seed=2))
    with pytest.raises(eaas.ConnectFailed, match=r"serves the checkpoint .* from the same folder"):
        eaas.connect(cluster.router_address, other)
    with pytest.raises(eaas.ConnectFailed, match="serves 3 layers of 8 experts, this model has 2 of 8"):
        eaas.connect(cluster.router_address, eaas.load(write("Qwen3Moe", tmp_path / "qwen")))
    dense = AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=32)
    )
    with pytest.raises(eaas.ConnectFailed, match=r"LlamaForCausalLM.*Experts are served of"):
        eaas.connect(cluster.router_address, dense)
    pool = eaas.connect(cluster.router_address, model)
    out = model(prompt(1)).logits
    with pytest.raises(RuntimeError, match="computes no gradients"):
        out.sum().backward()
    pool.close()
    pool.close()
    with pytest.raises(eaas.ConnectFailed, match="closed; connect again"):
        logits(model, prompt(1))


def test_of_several_classes_one_of_cpus_that_has_every_expert_is_asked() -> None:
    def server(name: str, numerics_class: str, held: int) -> Member:
        return Member(
            name=name, pool="expert", state="serving", incarnation=1, address="a", pid=1, host="h",
            numerics_class=numerics_class, serving=to_bytes(held, 1, 2),
        )  # fmt: skip

    pool: Any = object.__new__(eaas.Pool)
    pool.shape, pool.router, pool.fingerprint = SimpleNamespace(layers=1, experts=2), "r", ""
    gpu, part = server("expert/1", "cuda-sm90-bf16-1", 3), server("expert/2", "cpu-bf16-vdpbf16-1", 1)
    whole = server("expert/3", "cpu-bf16-fma-1", 3)

    def found(*members: Member) -> str:
        view = View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=2, members=members)
        return pool.check(view, 1.0)

    assert found(gpu, part, whole) == "cpu-bf16-fma-1"
    assert found(gpu, part) == "cpu-bf16-vdpbf16-1", "it may become whole"
    with pytest.raises(eaas.ConnectFailed, match="GPU"):
        found(gpu)


def test_experts_on_the_meta_device_are_not_touched(mixtral: tuple[Path, LocalCluster]) -> None:
    folder, cluster = mixtral
    model = AutoModelForCausalLM.from_pretrained(folder)
    wanted = logits(model, prompt(8))
    for module in experts_of(model):
        module.to("meta")
    with eaas.connect(cluster.router_address, model):
        assert_close(logits(model, prompt(8)), wanted, torch.float32)
    assert {p.device.type for module in experts_of(model) for p in module.parameters()} == {"meta"}


def test_the_page_s_example_runs_against_what_eaas_pool_starts(tiny: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    script = tmp_path / "example.py"
    script.write_text(re.findall(r"```python\n(import sys.*?)```", page, re.DOTALL)[0])
    command = [sys.executable, "-m", "eaas.ops.cli", "pool", str(tiny), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said: list[str] = []
            address = None
            while address is None:
                said.append(process.stdout.readline())
                assert said[-1], "".join(said)
                address = re.search(r'connect\("([\d.:]+)", model\)', said[-1])
            done = subprocess.run(
                [sys.executable, str(script), str(tiny), address[1]],
                capture_output=True,
                text=True,
                timeout=120,
            )
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 0
    assert process.returncode == 0, "".join(said)
