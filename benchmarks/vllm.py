"""Tokens per second of vLLM whose experts a pool computes, over those of stock vLLM on the same cores, in one run.

Both are servers of the same vLLM on the same random weights in bfloat16, asked over HTTP. Rounds are interleaved, and
while one is measured every process of the other stands still, the pool's too: what spins would be measured with it.
Stock vLLM has all cores (its own choice, `--bind auto`, leaves one of two idle). `make vllm` makes an environment.

    python -m benchmarks.vllm --shape S --batch 1,8,32 --rounds 9
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines.process import ROOT
from benchmarks.engines.run import PROMPT_TOKENS, Speed, prompts_for
from benchmarks.http_client import StreamRecord, speed_of
from benchmarks.make_model import SHAPES
from benchmarks.report import record, spread
from benchmarks.setting import (
    NAME,
    HttpEndpoint,
    NotTheSameModel,
    checkpoint,
    cores_of,
    interleave,
    numbers,
    parser,
)

ENVIRONMENTS = Path(os.environ.get("EAAS_VLLM", ROOT / ".vllm"))
VERSION, DTYPE = "0.32.0", "bfloat16"
# 1 GiB of keys and values: 131,072 tokens of shape S, more than any batch here asks for.
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
START_S, END_S = 300.0, 30.0
CHECKED_PROMPTS, LEAST_AGREEMENT = 16, 0.5
# A pool that stood still has lost its leases: the first answer waits until it is whole again.
WARM_TOKENS = 8
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


def missing_vllm(version: str) -> str | None:
    """Why that version cannot be measured here and what to do about it; None where it can."""
    folder = ENVIRONMENTS / version
    if (folder / "bin" / "vllm").exists():
        return None
    return f"needs vLLM in {folder}, found none: make vllm VLLM={version}"


def openmp_of(environment: Path) -> str:
    """The LD_PRELOAD with which stock vLLM was fastest: Intel's OpenMP, where its environment has it."""
    library = environment / "lib" / "libiomp5.so"
    return str(library) if library.exists() else ""


def free_address() -> tuple[str, int]:
    """A port of this host that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()


def healthy(address: tuple[str, int]) -> bool:
    """Whether the server there says so."""
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


class ServerFailed(RuntimeError):
    """A server ended or was not ready in time; the text holds its last words."""


class Server:
    """A command and all processes it starts. Use as a context manager."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        # Not a pipe, which nobody would empty.
        self._log = tempfile.NamedTemporaryFile(prefix="eaas-bench-")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            start_new_session=True,
            # What holds weights ends with a benchmark that is killed, even where it was made to stand still.
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def said(self) -> str:
        """All it wrote so far."""
        return Path(self._log.name).read_text(errors="replace")

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Raises ServerFailed."""
        end_s = time.monotonic() + START_S
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise ServerFailed(f"{self._process.args} did not get ready:\n{self.said()[-3000:]}")
            time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """To the process and every descendant that there is now."""
        parents: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(path.parent.name))
        tree = [self._process.pid]
        for pid in tree:
            tree += parents.get(pid, [])
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Side(HttpEndpoint):
    """An endpoint that can be made to stand still: its server, and the pool behind that where there is one."""

    def __init__(self, address: tuple[str, int], servers: Sequence[Server]) -> None:
        super().__init__(address)
        self.servers = list(servers)

    def signal(self, number: signal.Signals) -> None:
        """To every process."""
        for server in self.servers:
            server.signal(number)

    def streams_awake(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[StreamRecord]:
        """As `streams`, its processes running for that time alone; as many short ones wake them up first."""
        self.signal(signal.SIGCONT)
        self.streams([row[: -PROMPT_TOKENS - 1 : -1] for row in prompts], WARM_TOKENS)
        came = self.streams(prompts, tokens)
        self.signal(signal.SIGSTOP)
        return came

    def speed_awake(self, prompts: Sequence[Sequence[int]], tokens: int) -> Speed:
        """Of all together, measured so."""
        return speed_of(self.streams_awake(prompts, tokens), tokens)


def agreement(ours: HttpEndpoint, theirs: HttpEndpoint, vocab: int) -> float:
    """Share of prompts to which both answer the same first token.

    Raises:
        NotTheSameModel: they are fewer than rounding to bfloat16 explains; other weights leave none.
    """
    prompts = prompts_for(CHECKED_PROMPTS, vocab, seed=99)
    pairs = zip(ours.first_texts(prompts), theirs.first_texts(prompts), strict=True)
    found = sum(a == b for a, b in pairs) / CHECKED_PROMPTS
    if found < LEAST_AGREEMENT:
        raise NotTheSameModel(f"The two servers agree on {found:.0%} of first tokens, so neither is timed.")
    return found


@contextlib.contextmanager
def vllm(
    environment: Path, model: Path, bind: str, preload: str, router: str | None = None, dtype: str = DTYPE
) -> Iterator[Side]:
    """A vLLM server that is ready; with a router's address, its experts are that pool's.

    Raises:
        ServerFailed: it did not get ready.
    """
    address = free_address()
    command = [environment / "bin" / "vllm", "serve", model, "--host", address[0], "--port", str(address[1])]
    command += ["--dtype", dtype, "--max-model-len", "1024", "--served-model-name", NAME]
    if router:
        command += ["--additional-config", f'{{"eaas": {{"router": "{router}"}}}}']
    variables = {
        **SETTINGS,
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        **({"LD_PRELOAD": preload} if preload else {}),
    }
    with Server([str(part) for part in command], variables) as server:
        server.wait(lambda: healthy(address))
        yield Side(address, [server])


@contextlib.contextmanager
def stock(version: str, model: Path, cores: Sequence[int], dtype: str = DTYPE) -> Iterator[tuple[Side, dict[str, str]]]:
    """Stock vLLM as a peer, ready, at its best: a thread for each core, Intel's OpenMP where there is one.

    Returns:
        Its side, and what a record says of it.

    Raises:
        ServerFailed: it did not get ready.
    """
    bind, preload = f"{cores[0]}-{cores[-1]}", openmp_of(ENVIRONMENTS / version)
    with vllm(ENVIRONMENTS / version, model, bind, preload, dtype=dtype) as side:
        yield side, {"version": version, "dtype": dtype, "bind": bind, "preload": Path(preload).name}


def eaas(verb: str, model: Path, cores: Sequence[int], experts: int, *words: str) -> Server:
    """`eaas VERB`, started."""
    command = [sys.executable, "-m", "eaas.ops.cli", verb, str(model), "--experts", str(experts), *words]
    return Server([*command, "--cores", ",".join(map(str, cores))])


@contextlib.contextmanager
def pool(model: Path, cores: Sequence[int], experts: int) -> Iterator[tuple[Server, str]]:
    """An expert pool that is ready, and its router's address.

    Raises:
        ServerFailed: it did not get ready.
    """
    with eaas("pool", model, cores, experts, "--port", "0") as server:
        server.wait(lambda: "router at " in server.said())
        yield server, server.said().partition("router at ")[2].partition(",")[0]


def measure(sides: Mapping[str, Side], batch: int, options: Any) -> dict[str, Any]:
    """Interleaved rounds at one batch size: tokens/s of both and the ratios of pairs, decoding and whole."""
    vocab = SHAPES[options.shape].vocab

    def alone(side: Side, number: int) -> Speed:
        return side.speed_awake(prompts_for(batch, vocab, number), options.tokens)

    for side in sides.values():
        side.signal(signal.SIGSTOP)
    # Nothing to settle: what is not measured is stopped.
    speeds = interleave({name: partial(alone, side) for name, side in sides.items()}, options.rounds, {})
    for side in sides.values():
        side.signal(signal.SIGCONT)
    result: dict[str, Any] = {}
    for field, suffix in (("decode", ""), ("whole", "_with_prefill")):
        values = {name: [getattr(speed, field) for speed in rounds] for name, rounds in speeds.items()}
        result[f"tokens_per_s{suffix}"] = {name: spread(rounds) for name, rounds in values.items()}
        pairs = zip(values["pool"], values["stock"], strict=True)
        result[f"ratio{suffix}"] = spread([a / b for a, b in pairs])
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Check, measure, and append one JSON line for each batch size."""
    command = parser(__doc__)
    command.add_argument("--batch", default="1,8,32", help="batch sizes, comma-separated")
    command.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    command.add_argument("--vllm", default=VERSION, help="version; .vllm, or EAAS_VLLM, has a folder of that name")
    command.add_argument("--experts", type=int, default=2, help="expert servers")
    command.add_argument("--bind", help="both servers' VLLM_CPU_OMP_THREADS_BIND; without it, all cores")
    command.add_argument("--preload", default="", help="both servers' LD_PRELOAD")
    options = command.parse_args(argv)
    if reason := missing_vllm(options.vllm):
        command.error(reason)
    environment = ENVIRONMENTS / options.vllm
    cores = cores_of(options)
    bind = options.bind or f"{cores[0]}-{cores[-1]}"
    with checkpoint(options.shape, options.checkpoints) as model, contextlib.ExitStack() as closing:
        experts, router = closing.enter_context(pool(model, cores, options.experts))
        sides = {
            "pool": closing.enter_context(vllm(environment, model, bind, options.preload, router)),
            "stock": closing.enter_context(vllm(environment, model, bind, options.preload)),
        }
        sides["pool"].servers.append(experts)
        agreed = agreement(sides["pool"], sides["stock"], SHAPES[options.shape].vocab)
        for batch in numbers(options.batch):
            result = {
                "shape": options.shape,
                "batch": batch,
                "vllm": options.vllm,
                "experts": options.experts,
                "threads": len(cores),
                "bind": bind,
                "preload": [Path(library).name for library in options.preload.split(":") if library],
                "rounds": options.rounds,
                "tokens": options.tokens,
                **measure(sides, batch, options),
                "first_token_agreement": agreed,
            }
            record("vllm", result, (), options.results)


if __name__ == "__main__":
    main()
