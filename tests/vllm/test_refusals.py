"""What does not go with a pool is refused by vLLM's start, in words that say what to do."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.servers import (
    ROOT,
    START_S,
    additional,
    environment,
    pool_of,
    started,
    tried,
    variables,
    write,
)

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=30), pytest.mark.timeout(600)]


def refusals(version: str, orders: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    """What the plug-in says to options in the environment of a vLLM, by name."""
    done = subprocess.run(
        [environment(version) / "python", ROOT / "tests/vllm/configured.py"],
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        env=variables(""),
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_options_that_do_not_go_with_a_pool_are_refused_by_name(version: str, tmp_path: Path) -> None:
    model = str(write("Qwen3Moe", tmp_path))

    def order(engine: dict[str, Any] | None = None, pool: object = None, **faked: Any) -> dict[str, Any]:
        options = {"eaas": pool} if pool is not None else additional("127.0.0.1:7000")
        return {"engine": {"model": model, "additional_config": options, **(engine or {})}, **faked}

    said = refusals(
        version,
        {
            "nothing": order(),
            "tensors": order({"tensor_parallel_size": 2}),
            "pipeline": order({"pipeline_parallel_size": 2}),
            "eplb": order(eplb=True),
            "lora": order({"enable_lora": True}),
            "version": order(version="0.30.0"),
            "built for a CPU": order(version=f"{version}+cpu"),
            "graphs": order(device="cuda", compilation={"cudagraph_mode": "FULL_AND_PIECEWISE"}),
            "uncut graphs": order(device="cuda", compilation={"cudagraph_mode": "PIECEWISE"}),
            "no graphs": order(device="cuda", compilation={"cudagraph_mode": "NONE"}),
            "no router": order(pool={}),
            "an address alone": order(pool="127.0.0.1:7000"),
            "a word too many": order(pool={"router": "127.0.0.1:7000", "routes": 1}),
        },
    )
    words = {
        "tensors": "parallel sizes are 2, 1 and 1; 1 is needed",
        "pipeline": "parallel sizes are 1, 2 and 1; 1 is needed",
        "eplb": r"--enable-eplb .* Leave it out",
        "lora": r"--enable-lora .* Leave it out",
        "version": rf"vLLM 0\.30\.0 was not tried .* {re.escape(' and '.join(tried()))}",
        "graphs": "--enforce-eager",
        "uncut graphs": "--enforce-eager",
        "no router": r"router.*HOST:PORT",
        "an address alone": r"127\.0\.0\.1:7000.*HOST:PORT",
        "a word too many": r"routes.*HOST:PORT",
    }
    for name in said:
        assert bool(said[name]) == (name in words), f"{name}: {said[name]}"
        assert re.search(words.get(name, ""), said[name] or ""), f"{name}: {said[name]}"
    # What is said to pass instead is accepted.
    found = re.search(r"--compilation-config '(.*)'", said["graphs"] or "")
    assert found, said["graphs"]
    again = refusals(version, {"as told": order(device="cuda", compilation=json.loads(found[1]))})
    assert again == {"as told": None}


@pytest.mark.parametrize("of", ["nobody", "another checkpoint"])
def test_a_pool_that_is_not_this_model_s_ends_the_start_in_words(of: str, newest: str, tmp_path: Path) -> None:
    folder, other = (write("Qwen3Moe", tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    with pool_of(other) as cluster:
        if of == "nobody":
            cluster.stop()
            words = f"ConnectFailed.*The expert pool at {cluster.router_address} cannot be joined: .+"
        else:
            words = r"Refused: .+ holds the checkpoint \w+; the pool at .+ serves \w+\. Start a pool from the same"
        server = started(newest, folder, tmp_path / "log", "--enforce-eager", cluster=cluster)
        try:
            assert server.process.wait(START_S) != 0
        finally:
            server.kill()
    log = (tmp_path / "log").read_text()
    assert re.search(words, log), log[-5000:]
