"""The command line as a newcomer and an operator meet it: real processes, real signals, clear words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from eaas.cluster.process import default_root
from eaas.cluster.status import fetch_status
from eaas.ops.chaos.plan import read_plan
from eaas.ops.credentials import make_certs
from tests.e2e.waiting import wait_for

EAAS = [sys.executable, "-m", "eaas.ops.cli"]
START_S = 60


def run(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}
    return subprocess.run([*EAAS, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment)


def folders_of(pid: int) -> list[Path]:
    """Where the launcher of this pid keeps its cluster's journal and logs."""
    return list(default_root().glob(f"cluster-{pid}-*"))


def descendants(pid: int) -> set[int]:
    """Pids of the children of a process, and theirs."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found |= {int(entry.name)} | descendants(int(entry.name))
    return found


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`eaas serve ARGUMENTS --port 0`, ready, and its URL."""
    process = subprocess.Popen(
        [*EAAS, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1"},
    )
    try:
        seen = []
        for line in process.stdout or ():
            seen.append(line)
            found = re.search(r"ready .* at (http://[\d.:]+)/v1", line)
            if found:
                yield process, found.group(1)
                break
        else:
            pytest.fail("eaas serve ended before it was ready:\n" + "".join(seen))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.full(seconds=8)
def test_without_expert_servers_the_hint_is_a_command_that_works_as_it_stands(tiny: Path, tmp_path: Path) -> None:
    certs = str(tmp_path / "certs")
    make_certs(Path(certs))
    with served(str(tiny), "--experts", "0", "--tls-dir", certs) as (process, _):
        assert process.stdout is not None
        hint = next(line for line in process.stdout if "No expert server runs" in line)
        command = hint.partition("eaas scale ")[2].split()
        assert command[-2:] == ["--tls-dir", certs]
        done = run("scale", *command, "--wait-s", "60", timeout_s=90)
        assert done.returncode == 0, done.stderr


@pytest.mark.full(seconds=8)
def test_a_key_a_context_and_a_prefix_may_be_given_on_the_command_line(tiny: Path) -> None:
    """And they hold for the gateway that comes after the first, whose folder was removed."""
    asked = ("--api-key", "one", "--api-key", "two", "--max-model-len", "64", "--root-path", "/llm/")
    with served(str(tiny), "--experts", "2", *asked) as (process, url):

        def models(path: str, key: str) -> httpx.Response:
            return httpx.get(f"{url}{path}/v1/models", headers={"authorization": f"Bearer {key}"})

        def guards() -> bool:
            found = [(path, key) for path in ("", "/llm") for key in ("one", "two")]
            assert all(models(*one).json()["data"][0]["max_model_len"] == 64 for one in found)
            return all(models(path, "three").status_code == 401 for path in ("", "/llm", "/llm/llm"))

        wait_for("the gateway", guards)
        operator = {"x-api-key": "two"}
        assert httpx.get(f"{url}/llm/status", headers=operator).status_code == 200
        assert httpx.get(f"{url}/llm/status").status_code == 401
        too_long = {"prompt": "a", "max_tokens": 64}
        refused = httpx.post(f"{url}/v1/completions", json=too_long, headers=operator)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert httpx.get(f"{url}/openapi.json", headers=operator).json()["servers"] == [{"url": "/llm"}]
        (folder,) = folders_of(process.pid)
        assert not any(b"one" in file.read_bytes() for file in folder.glob("*.json"))
        shutil.rmtree(folder)
        status = httpx.get(f"{url}/status", headers=operator).json()
        os.kill(status["gateway"]["pid"], signal.SIGKILL)
        wait_for("the next gateway", lambda: guards())


def test_serve_answers_shows_its_members_survives_chaos_and_leaves_nothing(tiny: Path) -> None:
    with served(str(tiny), "--experts", "2") as (process, url):
        family = descendants(process.pid)
        assert len(family) == 5  # router, two expert servers, attention worker, gateway
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        first = client.completions.create(model="tiny", prompt="a b c", max_tokens=8, temperature=0)

        status = json.loads(run("status", "--json", "--url", url).stdout)
        names = [member["name"] for member in status["members"]]
        assert sorted(names) == ["attention/1", "expert/1", "expert/2", "gateway/1", "router/0"]
        assert {"model", "epoch", "gateway", "members"} <= set(status)
        for member in status["members"]:
            assert {"name", "pid", "state", "incarnation", "experts", "load"} <= set(member)
            assert member["pid"] in family, member
        assert "expert/2" in run("status", "--url", url).stdout

        killed = run("chaos", "kill", "expert/1", "--url", url)
        assert killed.returncode == 0, killed.stderr
        frozen = run("chaos", "freeze", "attention/1", "--for", "0.2", "--url", url)
        assert frozen.returncode == 0, frozen.stderr
        assert "thawed" in frozen.stdout
        second = client.completions.create(model="tiny", prompt="a b c", max_tokens=8, temperature=0)
        assert second.choices[0].text == first.choices[0].text
        unknown = run("chaos", "kill", "expert/99", "--url", url)
        assert unknown.returncode == 1
        assert "expert/99" in unknown.stderr
        assert "attention/1" in unknown.stderr
        family |= descendants(process.pid)

        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    left = [pid for pid in family if Path(f"/proc/{pid}").exists()]
    assert not left, f"processes left behind: {left}"
    assert not folders_of(process.pid), "its folder is left behind"
    with (
        pytest.raises(OSError),
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1),
    ):
        pass


@pytest.mark.full(seconds=5)
def test_a_launcher_that_is_killed_takes_its_processes_along(tiny: Path) -> None:
    with served(str(tiny), "--experts", "2") as (process, url):
        family = descendants(process.pid)
        frozen = {m["pid"] for m in fetch_status(url)["members"] if m["pool"] in ("expert", "attention")}
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
    assert folders_of(process.pid), "the killed launcher removed its folder"
    end_s = time.monotonic() + 60
    while (left := [pid for pid in family if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"
    with served(str(tiny), "--experts", "2"):
        swept = not folders_of(process.pid)
    assert swept, "the next launcher removes what the killed one left"


@pytest.mark.full(seconds=10)
def test_a_state_folder_that_is_removed_is_made_again_and_no_other_launcher_takes_it(tiny: Path) -> None:
    """The journal with it: the next router must go on where the last one was."""
    with served(str(tiny), "--experts", "2") as (process, url):
        with served(str(tiny), "--experts", "2"):
            (folder,) = folders_of(process.pid)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def said() -> str:
            return client.completions.create(model="tiny", prompt="a b c", max_tokens=8, temperature=0).choices[0].text

        def serving() -> set[int]:
            members = fetch_status(url)["members"]
            return {m["pid"] for m in members if m["pool"] == "expert" and m["state"] == "serving"}

        first = said()
        shutil.rmtree(folder)
        wait_for("the journal again", lambda: (folder / "router.sqlite").exists())
        for role in ("router/0", "expert/1"):
            before = serving()
            assert run("chaos", "kill", role, "--url", url).returncode == 0
            assert said() == first
            wait_for("two servers", lambda: len(serving()) == 2)
        wait_for("another server", lambda: len(serving() - before) == 1 and len(serving()) == 2)
        assert said() == first
    assert not folders_of(process.pid), "its folder is left behind"


@pytest.mark.full(seconds=6)
def test_a_log_reader_that_goes_away_takes_nothing_along(tiny: Path) -> None:
    """`eaas serve | head` ends its reader; the events that follow have nowhere to go."""
    with served(str(tiny), "--experts", "2") as (process, url):
        assert process.stdout is not None
        process.stdout.close()
        assert run("chaos", "kill", "expert/1", "--url", url).returncode == 0

        def experts() -> set[str]:
            members = fetch_status(url)["members"]
            return {m["name"] for m in members if m["pool"] == "expert" and m["state"] == "serving"}

        wait_for("a replacement", lambda: len(experts() - {"expert/1"}) == 2)
        assert process.poll() is None


def serving(url: str) -> set[str]:
    members = json.loads(run("status", "--json", "--url", url).stdout or '{"members": []}')["members"]
    return {member["name"] for member in members if member["state"] == "serving"}


@pytest.mark.full(seconds=1.5)
@pytest.mark.parametrize("module", ["router", "experts", "eaas.worker", "eaas.gateway"])
def test_a_process_whose_launcher_has_ended_already_does_not_start(tiny: Path, module: str, tmp_path: Path) -> None:
    needed = (
        ["--journal", str(tmp_path / "j")] if module == "router" else ["--router", "127.0.0.1:9", "--model", str(tiny)]
    )
    # Pid 1 is nobody's launcher here: as if it had ended and another process had become the parent.
    done = subprocess.run(
        [sys.executable, "-m", module, *needed, "--die-with", "1"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "launcher" in done.stderr


def broken(model: Path, folder: Path, damage: str) -> Path:
    """A copy of the model with one kind of damage."""
    copy = folder / damage.replace(" ", "-")
    shutil.copytree(model, copy)
    weights = copy / "model.safetensors"
    if damage == "no weights":
        weights.unlink()
    elif damage == "truncated weights":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "unknown architecture":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    elif damage == "no tokenizer":
        (copy / "tokenizer.json").unlink()
    return copy


@pytest.mark.full(seconds=1)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no weights", ["safetensors"]),
        ("truncated weights", ["model.safetensors", "bytes"]),
        ("unknown architecture", ["NoSuchForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"]),
        ("no tokenizer", ["tokenizer.json"]),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_clear_words(
    tiny: Path, tmp_path: Path, damage: str, words: list[str]
) -> None:
    done = run("serve", str(broken(tiny, tmp_path, damage)), "--port", "0")
    assert done.returncode == 1, done.stdout
    for word in words:
        assert word in done.stderr, f"{damage}: {done.stderr}"
    assert "Traceback" not in done.stderr


@pytest.mark.full(seconds=1.5)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "3", "--experts", "2"], ["3 replicas", "--experts 2"]),
        (["--experts", "-1"], ["--experts -1", "at least 0"]),
        (["--dtype", "float8"], ["float8", "bfloat16"]),
        (["--host", "0.0.0.0"], ["loopback"]),
        (["--cores", "0,x"], ["--cores", "0,x"]),
        (["--max-model-len", "1000000"], ["--max-model-len", "2048"]),
        (["--api-key", "a", "--keys-file", "b"], ["--api-key", "--keys-file", "exclude"]),
        (["--root-path", "llm"], ["--root-path", "/llm"]),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(tiny: Path, arguments: list[str], words: list[str]) -> None:
    done = run("serve", str(tiny), "--port", "0", *arguments)
    assert done.returncode == 1, done.stdout
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    done = run("serve", str(tmp_path / "nothing"), "--port", "0")
    assert done.returncode == 1
    assert "nothing" in done.stderr


def test_a_port_in_use_is_named(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("serve", str(tiny), "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "gateway" in done.stderr
    assert "in use" in done.stderr


def test_status_without_a_cluster_says_what_to_do() -> None:
    done = run("status", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "eaas serve" in done.stderr


@pytest.mark.full(seconds=4)
def test_doctor_finds_this_machine_fit() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stdout
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert findings["transport shm (one host)"]["usable"]
    assert run("doctor").returncode == 0


@pytest.mark.full(seconds=1)
@pytest.mark.parametrize("verb", ["serve", "router", "expert", "attention", "gateway", "status", "demo"])
def test_every_verb_explains_itself(verb: str) -> None:
    done = run(verb, "--help")
    assert done.returncode == 0
    assert "--" in done.stdout


def test_the_version_and_the_help_are_told() -> None:
    assert re.fullmatch(r"eaas \d+\.\d+\.\d+\n", run("--version").stdout)
    for words in (("-h",), ("serve", "-h"), ("chaos", "kill", "-h")):
        done = run(*words)
        assert done.returncode == 0 and "Usage: " in done.stdout


def test_every_plan_that_the_documents_name_is_there_and_can_be_read() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    named = {plan for page in pages for plan in re.findall(r"deploy/chaos/[\w-]+\.toml", page.read_text())}
    assert named
    for path in named:
        assert read_plan(root / path).steps, path
