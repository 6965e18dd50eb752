"""vLLM as its users start it, from environments of its own, and pools that compute its experts."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.make_model import byte_tokenizer, tokenizer_config
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from router.client import RouterClient

ROOT = Path(__file__).parents[2]
# A folder with environments, named by version; as `make vllm` makes them.
ENVIRONMENTS = Path(os.environ.get("EAAS_VLLM", ROOT / ".vllm"))
VOCAB = 512
# On a machine that does other things too.
START_S = 400.0
_LOG_LINES = 60

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    # Ten times as usual, so that experts weigh in the logits as they do in a trained model.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
# vLLM's attention on CPUs computes heads of 64, and of DeepSeek's kind only those of its real size: 512 and 64.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 8, "mlp_only_layers": [1], "head_dim": 64,
    },
    "DeepseekV3": {
        "intermediate_size": 96, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "q_lora_rank": 32,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "GptOss": {"intermediate_size": 64, "num_local_experts": 8, "head_dim": 64},
    "Mixtral": {"intermediate_size": 64, "num_local_experts": 8, "head_dim": 64},
    "Glm4Moe": {
        "intermediate_size": 96, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 64,
    },
    "Olmoe": {"intermediate_size": 64, "num_experts": 8, "num_attention_heads": 2, "num_key_value_heads": 2},
    "ExaoneMoe": {
        "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 8, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 64,
    },
}  # fmt: skip


def write(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> Path:
    """A small checkpoint of random weights, as transformers writes it, with a tokenizer of bytes."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**_SIZES | FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(VOCAB)))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(512)))
    return folder


def tried() -> tuple[str, ...]:
    """Versions of vLLM that the plug-in says it was tried with, the newest last. It cannot be imported without vLLM."""
    said = re.search(r"^TRIED = \((.*)\)$", (ROOT / "eaas/integrations/vllm_options.py").read_text(), re.MULTILINE)
    assert said, "eaas/integrations/vllm_options.py does not say which versions it was tried with"
    return tuple(re.findall(r'"(.*?)"', said[1]))


def environment(version: str) -> Path:
    """The folder of commands of that vLLM; skips the test where it is not installed."""
    folder = ENVIRONMENTS / version / "bin"
    if not (folder / "vllm").exists():
        pytest.skip(f"needs vLLM's CPU build: make vllm VLLM={version}; found none in {folder}")
    return folder


@contextlib.contextmanager
def pool_of(model: Path, servers: int = 2, replicas: int = 2) -> Iterator[LocalCluster]:
    """The experts of a checkpoint, as `eaas pool` serves them."""
    config = ClusterConfig(
        model=model,
        served_model_name="pool",
        experts=servers,
        replicas=replicas,
        attention=0,
        endpoint=False,
    )
    with LocalCluster(config) as cluster:
        yield cluster


def whole(cluster: LocalCluster, router: RouterClient) -> bool:
    """Whether as many servers serve as are wanted, with every expert on as many as are wanted, all alive."""
    view, alive = router.status().view, set(cluster.pids().values())
    serving = [member for member in view.pool("expert") if member.state == "serving" and member.pid in alive]
    pairs = [(layer, expert) for layer in range(view.layers) for expert in range(view.experts)]
    fewest = min(sum(member.pid in alive for member in view.replicas(*pair)) for pair in pairs)
    return len(serving) >= cluster.config.experts and fewest >= cluster.config.replicas


def variables(plugins: str | None = None) -> dict[str, str]:
    """What vLLM finds in its environment: this checkout, a small cache, and nobody to tell anything."""
    chosen = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    caches = Path(os.environ["XDG_STATE_HOME"]) / "vllm"
    return {
        **os.environ,
        **chosen,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(caches),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def additional(cluster: LocalCluster | str, **options: Any) -> dict[str, Any]:
    """vLLM's additional configuration that names a pool."""
    router = cluster if isinstance(cluster, str) else cluster.router_address
    return {"eaas": {"router": router, **options}}


@dataclass(frozen=True)
class Made:
    """What an engine generated: token ids [prompts, tokens] and logits [prompts, tokens, vocabulary]."""

    tokens: np.ndarray
    logits: np.ndarray


def generate(
    version: str,
    model: Path,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    cluster: LocalCluster | None = None,
    plugins: str | None = None,
    dtype: str = "float32",
    eager: bool = True,
    at_once: int = 256,
) -> Made:
    """Greedy tokens and all logits of an engine that lives for this call.

    Args:
        cluster: The pool that computes its experts; None: it does so itself.
        plugins: Names of the plug-ins that it may load, "" for none; None: all that are installed.
        eager: False compiles the model, as vLLM does if not told otherwise.
        at_once: Requests that it computes together, at most.
    """
    out = model / "made.npz"
    options = {} if cluster is None else {"additional_config": additional(cluster)}
    engine = dict(model=str(model), dtype=dtype, max_model_len=256, seed=0, enforce_eager=eager, **options)
    engine["max_num_seqs"] = at_once
    order = {"engine": engine, "prompts": prompts, "tokens": tokens, "out": str(out)}
    done = subprocess.run(
        [environment(version) / "python", ROOT / "tests/vllm/engine.py"],
        input=json.dumps(order),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables(plugins),
        timeout=START_S,
    )
    assert done.returncode == 0, _end(done.stdout)
    # What computed the experts is not to be seen in what they gave.
    asked = "Experts come from the pool at" in done.stdout
    assert asked == (cluster is not None), _end(done.stdout)
    with np.load(out) as found:
        return Made(found["tokens"], found["logits"])


def _end(log: str) -> str:
    return "\n".join(log.splitlines()[-_LOG_LINES:])


@dataclass
class Server:
    """A running `vllm serve`, alone in its process group."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def worker(self) -> int:
        """Pid of the process that holds the model."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = os.getpgid(int(folder.name)) == self.process.pid
                if ours and (folder / "comm").read_text().startswith("VLLM::Worker"):
                    return int(folder.name)
        pytest.fail(f"no worker among the processes of {self.process.pid}")

    def kill(self) -> None:
        """End all of its processes, without a word."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def healthy(self) -> bool:
        """Whether it says so."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False


@contextlib.contextmanager
def serving(
    version: str,
    model: Path,
    log: Path,
    *options: str,
    cluster: LocalCluster | str | None = None,
    dtype: str = "float32",
) -> Iterator[Server]:
    """A `vllm serve` that answers, with options as on its command line, for the length of a `with`."""
    server = started(version, model, log, *options, cluster=cluster, dtype=dtype)
    try:
        end_s = time.monotonic() + START_S
        while not server.healthy():
            assert server.process.poll() is None, _end(log.read_text())
            assert time.monotonic() < end_s, f"not ready after {START_S:g} s:\n{_end(log.read_text())}"
            time.sleep(0.2)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()


def started(
    version: str,
    model: Path,
    log: Path,
    *options: str,
    cluster: LocalCluster | str | None = None,
    dtype: str = "float32",
) -> Server:
    """A `vllm serve` that was just started; the caller ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command: list[str | Path] = [environment(version) / "vllm", "serve", model, "--served-model-name=m"]
    command += ["--host=127.0.0.1", f"--port={port}", f"--dtype={dtype}", "--max-model-len=512", *options]
    if cluster is not None:
        command += ["--additional-config", json.dumps(additional(cluster))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables(), start_new_session=True
        )
    return Server(port, process, log)


@dataclass
class Stream:
    """One streamed completion: its token ids, when each came (seconds, monotonic), how it ended."""

    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    finish: str | None = None
    error: str = ""

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Longest time between two tokens of which a part lies between the two times."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return max((b - a for a, b in pairs if b >= begin_s and a <= end_s), default=0.0)


def stream(server: Server, prompt: Sequence[int], tokens: int) -> Stream:
    """Stream a greedy completion, over a connection of its own."""
    seen = Stream()
    order = {"model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        body = json.dumps(order | {"stream": True, "return_token_ids": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "choices" not in event:
                seen.error = str(event)
                continue
            choice = event["choices"][0]
            seen.tokens += choice.get("token_ids") or []
            seen.at_s += [time.monotonic()] * (len(seen.tokens) - len(seen.at_s))
            seen.finish = choice["finish_reason"] or seen.finish
    except (OSError, http.client.HTTPException) as error:
        seen.error = repr(error)
    finally:
        connection.close()
    return seen


class Load:
    """Streams of one prompt each, asked again and again by as many threads, until `stop`."""

    def __init__(self, server: Server, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self.done: list[list[Stream]] = [[] for _ in prompts]
        self._stopping = threading.Event()

        def ask(number: int) -> None:
            while not self._stopping.is_set():
                self.done[number].append(stream(server, prompts[number], tokens))

        # A test that fails before `stop` must not keep its process from ending.
        self._threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(prompts))]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[list[Stream]]:
        """Let each end what it has begun: all streams, by prompt."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self.done
