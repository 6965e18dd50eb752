"""What is written from the options is what they declare; and what a launched process gets of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig, LaunchContext, PoolConfig, child_options
from eaas.settings import PAGE, ROLES, SCHEMA, chart_schema, options_page
from router.options import OptionsInvalid, arguments, read

HOST = LaunchContext(
    state_dir=Path("/s/cluster-1"),
    router_address="127.0.0.1:7",
    experts_wanted=2,
    listen_fd=5,
    admin_address="",
)


def test_the_page_and_the_schema_of_the_chart_are_what_is_declared() -> None:
    assert PAGE.read_text() == options_page(), "write them anew: python -m eaas.settings"
    assert json.loads(SCHEMA.read_text()) == chart_schema(), "write them anew: python -m eaas.settings"


def launched(*words: str, pool: str, slot: int = 0) -> list[str]:
    """The command line of a process of `eaas serve WORDS`, which its program reads as it was meant."""
    config = read(ClusterConfig, "serve", ["/m", *words], {})
    options = child_options(config, HOST, pool, slot, port=0)
    written = arguments(options)
    assert read(ROLES[pool].options, pool, written, {}) == options
    return sorted(written)


def test_on_a_ray_cluster_a_node_is_address_and_zone_and_its_cores_are_its_own() -> None:
    config = read(ClusterConfig, "serve", ["/m", "--on", "ray", "--tls-dir", "/t"], {})
    node = replace(HOST, node="10.0.0.2")
    assert sorted(arguments(child_options(config, node, "expert", 0, port=0))) == [
        "--host=10.0.0.2", "--model=/m", "--router=127.0.0.1:7", "--tls-dir=/t/expert", "--zone=10.0.0.2",
    ]  # fmt: skip
    for pool in ("router", "attention"):
        assert "--host=10.0.0.2" in arguments(child_options(config, node, pool, 0, port=0))
    gateway = arguments(child_options(config, node, "gateway", 0, port=0))
    assert not any(word.startswith(("--host", "--zone")) for word in gateway)


@pytest.mark.parametrize(
    "words",
    [("--cores", "0"), ("--expert-lanes", "1"), ("--device", "cuda:1"), ("--device", "cuda:0,cuda:1")],
)
def test_ray_gives_each_process_what_it_computes_on(words: tuple[str, str]) -> None:
    with pytest.raises(OptionsInvalid, match="Ray gives each process what it computes on"):
        read(ClusterConfig, "serve", ["--on", "ray", *words], {})


def test_a_process_is_started_with_what_differs_from_its_defaults_or_was_asked_for() -> None:
    kept = ["--journal=/s/cluster-1/router.sqlite", "--models-file=/s/cluster-1/models.json"]
    assert launched(pool="router") == ["--experts=2", "--first-model=m=/m", *kept, "--replicas=2"]
    assert launched("--deadline-s", "30", pool="gateway") == [
        "--deadline-s=30.0", "--jobs=/s/cluster-1/responses.sqlite", "--listen-fd=5",
        "--model=/m", "--resume-key-file=/s/cluster-1/resume.key", "--router=127.0.0.1:7",
    ]  # fmt: skip
    assert "--jobs=etcd://e:1/x" in launched("--jobs", "etcd://e:1/x", pool="gateway")
    assert launched("--kv-tokens", "64", "--device", "cuda:0,cuda:1", pool="attention", slot=1) == [
        "--device=cuda:1", "--kv-tokens=64", "--model=/m", "--router=127.0.0.1:7",
    ]  # fmt: skip


def test_every_role_gets_its_own_certificate_and_every_option_that_it_shares() -> None:
    asked = (
        "--tls-dir",
        "/tls",
        "--allow-chaos",
        "--log-format",
        "json",
        "--max-logprobs=-1",
        "--api-key",
        "k",
    )
    asked += ("--cores", "0,1", "--expert-lanes", "1", "--trace-url", "http://127.0.0.1:4318/v1/traces")
    for pool in ("router", "expert", "attention", "gateway"):
        words = launched(*asked, pool=pool)
        assert {f"--tls-dir=/tls/{pool}", "--allow-chaos", "--log-format=json"} <= set(words), words
        assert ("--max-logprobs=-1" in words) == (pool == "gateway")
        assert ("--trace-url=http://127.0.0.1:4318/v1/traces" in words) == (pool in ("attention", "gateway"))
        assert not any("api-key" in word for word in words), "ps must not show keys more often than needed"
    assert "--keys-file=/s/cluster-1/keys.json" in launched(*asked, pool="gateway")
    assert "--cores=1" in launched(*asked, pool="expert", slot=1)
    assert "--cores=0,1" in launched(*asked, pool="attention")


def test_routers_that_share_etcd_keep_no_journal_and_have_admin_ports_side_by_side() -> None:
    asked = (
        "--routers",
        "2",
        "--etcd",
        "http://127.0.0.1:1",
        "--admin-port",
        "9100",
        "--autoscale",
        "expert:1..6",
    )
    words = launched(*asked, pool="router", slot=1)
    assert {
        *(
            "--store=etcd",
            "--etcd=http://127.0.0.1:1",
            "--cluster=cluster-1",
            "--number=1",
            "--admin-port=9101",
        ),
        "--autoscale=expert:1..6",
    } <= set(words)
    assert not any("journal" in word for word in words)


def test_a_bare_pool_is_a_cluster_without_an_endpoint() -> None:
    options = read(
        PoolConfig, "pool", ["/m", "--experts", "4", "--port", "7001", "--dtype", "int8", "--cores", "0"], {}
    )
    config = options.cluster()
    assert (config.experts, config.attention, config.endpoint, config.router_port) == (4, 0, False, 7001)
    assert "--dtype=int8" in arguments(child_options(config, HOST, "expert", 0, port=0))
