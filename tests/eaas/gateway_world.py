"""A world for the gateway: a tiny checkpoint folder, a router that shows what a test wants, attention workers
whose tokens repeat the prompt, and the real gateway process between them, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eaas.worker.loop import BEAT_S
from eaas.worker.protocol import (
    PROTOCOL,
    Cancel,
    EndInspection,
    Failed,
    ForgetBlocks,
    Hello,
    Inspect,
    Inspected,
    Step,
    Submit,
    Token,
    encode,
    for_worker,
)
from router.proto import router_pb2 as pb
from router.proto import router_pb2_grpc as rpc

EOS = 256
MAX_MODEL_LEN = 8192
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 260,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": EOS,
}
CHAT_TEMPLATE = (
    "{% if tools %}(tools{% for t in tools %} {{ t.function.name }}{% endfor %}){% endif %}"
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments.at }} {{ c.id }}]{% endfor %}"
    "{% if mark %}{{ mark }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(folder: Path, *, context: int = MAX_MODEL_LEN, template: str = CHAT_TEMPLATE) -> Path:
    """A checkpoint folder whose tokenizer has one token for each byte."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": context}))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|endoftext|>"}))
    return folder


def _byte_vocabulary() -> dict[str, int]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {letter: byte for byte, letter in sorted(letters.items())}


class FakeRouter(rpc.RouterServicer):
    """Shows whatever View a test sets; every change has a higher epoch."""

    def __init__(self) -> None:
        self.pid = 41
        self.scaled: list[tuple[str, int, float]] = []
        self.expert_classes: tuple[str, ...] = ("",)  # an expert server of each is shown, which serves every expert
        self.held = False  # no View goes out
        self.models: tuple[pb.Model, ...] = ()  # of the Views to come; their workers are shown as of their models
        self._condition = threading.Condition()
        self._view = pb.View(term=1, epoch=0, replicas_wanted=1, layers=2, experts=4)
        self._server = grpc.server(ThreadPoolExecutor(16))
        rpc.add_RouterServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def show(self, *workers: FakeWorker, **states: str) -> None:
        """Publish a View with these attention workers, serving unless ``states`` says otherwise by name."""
        with self._condition:
            hash = self.models[0].hash if self.models else ""
            self._view = pb.View(
                term=1, epoch=self._view.epoch + 1, replicas_wanted=1, layers=2, experts=4, model_hash=hash,
                models=self.models,
            )  # fmt: skip
            for number, numerics_class in enumerate(self.expert_classes, 1):
                self._view.members.add(
                    name=f"expert/{number}", pool="expert", state="serving", incarnation=76 + number,
                    address="127.0.0.1:1", pid=os.getpid(), load={"busy": 0.25},
                    serving=b"\xff" * max(1, len(self.models)),
                    numerics_class=numerics_class,
                )  # fmt: skip
            for worker in workers:
                self._view.members.add(
                    name=worker.name, pool="attention",
                    state=states.get(worker.name.replace("/", "_"), "serving"),
                    incarnation=worker.incarnation, address=worker.address, pid=os.getpid(),
                    numerics_class=worker.numerics_class, model=worker.model_hash if self.models else "",
                )  # fmt: skip
            self._condition.notify_all()

    def Scale(self, request: Any, context: Any) -> pb.ScaleReply:
        if request.wanted > 9:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.wanted} found; at most 9")
        self.scaled.append((request.pool, request.wanted, request.drain_s))
        return pb.ScaleReply(pool=pb.Pool(wanted=request.wanted))

    def drain(self, address: str) -> None:
        """Order gateway/0, which listens there, to drain: another does too."""
        with self._condition:
            self._view.epoch += 1
            for name, state in (("gateway/0", "draining"), ("gateway/9", "serving")):
                self._view.members.add(name=name, pool="gateway", state=state, address=address)
            self._condition.notify_all()

    def Watch(self, request: Any, context: Any) -> Iterator[pb.View]:
        sent = -1
        while context.is_active():
            with self._condition:
                self._condition.wait_for(lambda sent=sent: self._view.epoch > sent, timeout=0.2)
                view = pb.View.FromString(self._view.SerializeToString())
            if view.epoch > sent and not self.held:
                sent = view.epoch
                for member in view.members:
                    member.serving = zlib.compress(member.serving)
                yield view

    def Status(self, request: Any, context: Any) -> pb.StatusReply:
        return pb.StatusReply(view=self._view, pid=self.pid)

    def stop(self) -> None:
        self._server.stop(0).wait()


@dataclass
class Job:
    """One request at a worker."""

    submit: Submit
    index: int
    writer: asyncio.StreamWriter


@dataclass
class FakeWorker:
    """Speaks the worker protocol. Token i of a request is byte i of its prompt, over and over; the end token
    in a prompt ends it. ``frozen`` stops the steps; what was submitted stays, and the worker says that it lives.
    ``silent`` stops that too, as SIGSTOP would."""

    loop: asyncio.AbstractEventLoop
    name: str
    incarnation: int
    model_hash: str
    numerics_class: str = "cpu-f32-fma-1"
    step_s: float = 0.001
    frozen: bool = False
    silent: bool = False
    queues: bool = False  # it computes the first that it gets; the others wait in its queue
    protocol: int = PROTOCOL
    nameless: bool = False  # it does not say which model it serves
    context: int = MAX_MODEL_LEN
    drops_at: int = 1 << 30  # token from which on it lacks experts, for requests that allow that
    address: str = ""
    submits: list[Submit] = field(default_factory=list)
    forgotten: int = 0
    connections: int = 0
    inspections: list[str] = field(default_factory=list)
    says: dict[str, Any] = field(default_factory=dict)  # of an inspection
    cancels: list[str] = field(default_factory=list)
    refuse: Callable[[Submit], Failed | None] = lambda _: None
    script: list[str] = field(default_factory=list)  # the last of them is said instead of the prompt
    draws: bool = False  # what is sampled follows from the seed
    jobs: dict[str, Job] = field(default_factory=dict)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    sent: int = 0

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def start(self) -> FakeWorker:
        self.run(self._start())
        return self

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._stepper = self.loop.create_task(self._steps())
        self._beater = self.loop.create_task(self._beats())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        self.connections += 1
        writer.write(
            encode(
                Hello(
                    name=self.name, incarnation=self.incarnation, numerics_class=self.numerics_class,
                    model_hash="" if self.nameless else self.model_hash, max_model_len=self.context, vocab=260,
                    kv_tokens=1 << 20, protocol=self.protocol,
                )
            )
        )  # fmt: skip
        messages = for_worker()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                for message in messages.feed(data):
                    if isinstance(message, Cancel):
                        # Who waits for the cancel then looks whether the job is gone.
                        self.jobs.pop(message.id, None)
                        self.cancels.append(message.id)
                        if not self.silent:
                            writer.write(encode(Step(tokens=[])))
                        continue
                    if isinstance(message, ForgetBlocks):
                        self.forgotten += 1
                        continue
                    if isinstance(message, Inspect | EndInspection):
                        self.inspections.append(message.id)
                        told = {"ended": isinstance(message, EndInspection), **self.says}
                        writer.write(encode(Inspected(id=message.id, **told)))
                        continue
                    self.submits.append(message)
                    failed = self.refuse(message)
                    if failed is not None:
                        writer.write(encode(failed))
                    else:
                        self.jobs[message.id] = Job(message, len(message.output), writer)
                        if not self.queues or len(self.jobs) == 1:
                            writer.write(encode(Step(tokens=[], begun=[(message.id, message.attempt)])))
        self.writers.discard(writer)
        for id in [id for id, job in self.jobs.items() if job.writer is writer]:
            del self.jobs[id]
        writer.close()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not (self.frozen or self.silent):
                self.step()

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for writer in self.writers if self.jobs and not self.silent else ():
                writer.write(encode(Step(tokens=[])))

    def step(self) -> None:
        """One engine step: a token for every request, one message for every gateway."""
        by_writer: dict[asyncio.StreamWriter, list[Token]] = {}
        dropped: dict[asyncio.StreamWriter, list[tuple[str, int]]] = {}
        for id, job in list(self.jobs.items()):
            script = self.script[-1] if self.script else None
            token = make_token(job.submit, job.index, script, draws=self.draws)
            if job.submit.params.drop_lost_experts and job.index >= self.drops_at:
                dropped.setdefault(job.writer, []).append((id, job.submit.attempt))
            job.index += 1
            self.sent += 1
            by_writer.setdefault(job.writer, []).append(token)
            if token.finish:
                del self.jobs[id]
        for writer, tokens in by_writer.items():
            writer.write(encode(Step(tokens=tokens, dropped=dropped.get(writer, []))))

    def send(self, message: Step | Failed) -> None:
        """Say something out of turn to every gateway."""

        async def write() -> None:
            for writer in self.writers:
                writer.write(encode(message))

        self.run(write())

    def stop(self) -> None:
        """Die: every connection is reset at once and the address answers no more."""

        async def abort() -> None:
            self.stop_now()

        self.run(abort())

    def stop_now(self) -> None:
        """Die; on the worker's own loop."""
        self._server.close()
        self._stepper.cancel()
        self._beater.cancel()
        for writer in list(self.writers):
            writer.transport.abort()


def make_token(submit: Submit, index: int, script: str | None = None, *, draws: bool = False) -> Token:
    said = submit.prompt if script is None else [*script.encode(), EOS]
    token = said[index % len(said)]
    params = submit.params
    if draws and script is None and params.temperature > 0:
        token = b"abcdefghijklmnop \xc3\xa9"[zlib.crc32(f"{params.seed} {params.choice} {index}".encode()) % 19]
    finish = "length" if index + 1 == params.max_tokens else ""
    if (token == EOS and not params.ignore_eos and index >= params.min_tokens) or token in params.stop_token_ids:
        finish = "stop"
    if params.logprobs < 0:
        return Token(submit.id, submit.attempt, index, token, finish)
    top = [(token, -0.5), *(((token + n) % 256, -1.0 - n) for n in range(1, params.logprobs))]
    return Token(submit.id, submit.attempt, index, token, finish, -0.5, top[: params.logprobs])


class World:
    """Router, workers and gateways of one test session."""

    def __init__(self, folder: Path) -> None:
        from experts.checkpoint import Checkpoint

        self.model = write_model(folder)
        self.model_hash = Checkpoint.open(self.model).fingerprint
        self.router = FakeRouter()
        self.router.models = self.alone = (pb.Model(hash=self.model_hash, layers=2, experts=4),)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._numbers = itertools.count(1)
        self._workers: list[FakeWorker] = []

    def worker(self, **options: Any) -> FakeWorker:
        number = next(self._numbers)
        worker = FakeWorker(
            **{
                "loop": self.loop, "name": f"attention/{number}", "incarnation": (1 << 60) + number,
                "model_hash": self.model_hash, **options,
            }
        ).start()  # fmt: skip
        self._workers.append(worker)
        return worker

    def stop_workers(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def close(self) -> None:
        self.stop_workers()
        self.router.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class GatewayProcess:
    """``python -m eaas.gateway`` as the launcher starts it."""

    def __init__(self, world: World, *arguments: str, descriptors: int | None = None) -> None:
        read_fd, write_fd = os.pipe()
        command = [
            sys.executable, "-m", "eaas.gateway", "--router", world.router.address,
            "--model", str(world.model), "--served-model-name", "tiny", "--port", "0",
            "--ready-fd", str(write_fd), "--die-with", str(os.getpid()), "--log-level", "warning", *arguments,
        ]  # fmt: skip
        if descriptors is not None:
            command = ["prlimit", f"--nofile={descriptors}", *command]
        self.process = subprocess.Popen(command, pass_fds=(write_fd,), stderr=subprocess.PIPE)
        os.close(write_fd)
        with os.fdopen(read_fd) as pipe:
            self.report = json.loads(pipe.readline() or "{}")
        self.url = f"http://{self.report.get('address')}"

    def stop(self) -> tuple[int, str]:
        """Returns the exit status and the log."""
        self.process.terminate()
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, log.decode()


@contextlib.contextmanager
def gateway_url(world: World, *arguments: str) -> Iterator[str]:
    """Address of a gateway process with these options; at the end it must stop cleanly, its log without traceback."""
    gateway = GatewayProcess(world, *arguments)
    yield gateway.url
    status, log = gateway.stop()
    assert status == 0
    assert "Traceback" not in log, log


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    """Wait until ``condition`` holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
