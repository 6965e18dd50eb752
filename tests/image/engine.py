"""The image and the chart's pods in podman, and what a kubelet does that `podman kube play` does not.

podman 4.3 plays Pods and claims. From rendered manifests this makes pods of Deployments and StatefulSets, with what it
lacks: Secrets (it has them, and writes their base64 into the files), names of Services (as aliases in a network of
their own), status.podIP and $(NAME) in arguments, an emptyDir that is one pod's own, probes (it would run curl in the
container, which the image has not), preStop, and the time to end.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/eaas-test-base:bookworm"
NETWORK, SUBNET = "eaas-test", "10.89.203"
PROGRAMS = ("podman", "buildah", "mmdebstrap")


def missing() -> str:
    """Which of the programs that these tests need are not there, and which are; empty if none is missing."""
    there = [name for name in PROGRAMS if shutil.which(name)]
    lacking = [name for name in PROGRAMS if name not in there]
    if not lacking and os.geteuid():
        return "needs root for a bridge of its own, found another user"
    return f"needs {', '.join(PROGRAMS)}; found {', '.join(there) or 'none'}" if lacking else ""


def run(*words: str, timeout_s: float = 120, stdin: str | None = None, check: bool = True) -> str:
    """Standard output of a command.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words[:6])} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout.strip()


def settle(folder: Path) -> None:
    """Have podman ask for no more than this machine allows, by a configuration of its own."""
    limits = {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1]}
    # podman lowers its own limit to pid_max and then may not raise it again where root has no CAP_SYS_RESOURCE.
    limits["nproc"] = int(Path("/proc/sys/kernel/pid_max").read_text())
    engine = ""
    if Path("/sys/fs/cgroup/unified/cgroup.controllers").exists() and shutil.which("runc"):
        engine = '[engine]\nruntime = "runc"\n'  # crun refuses a hybrid of cgroup v1 and v2.
    ulimits = ", ".join(f'"{name}={most}:{most}"' for name, most in limits.items())
    (folder / "containers.conf").write_text(f"[containers]\ndefault_ulimits = [{ulimits}]\n{engine}")
    os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
    os.environ["DISABLE_HC_SYSTEMD"] = "true"


def pip_settings(folder: Path) -> list[str]:
    """Options of a build by which pip finds packages there as it does here: its settings and the folders they name."""
    found = dict(re.findall(r"^[^.\n]+\.([\w.-]+)='(.*)'$", run(sys.executable, "-m", "pip", "config", "list"), re.M))
    settings = {name.rpartition(".")[2]: value for name, value in found.items()}
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (folder / "pip.conf").write_text(f"[global]\n{lines}")
    volumes = {str(folder / "pip.conf"): "/etc/pip.conf"}
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            path = path.parent if path.name == "simple" else path  # An index links to files beside it.
            volumes[str(path)] = str(path)
    return [word for here, there in volumes.items() for word in ("--volume", f"{here}:{there}:ro")]


def build(folder: Path, tag: str) -> None:
    """The image by the Dockerfile's own steps, on a base of Debian's packages: no registry is asked."""
    if not run("podman", "image", "ls", "--quiet", BASE):
        packages = "python3,python3-venv,python-is-python3,ca-certificates"
        base = str(folder / "base.tar")
        run(
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            f"--include={packages}",
            "bookworm",
            base,
            timeout_s=600,
        )
        run("podman", "import", "--quiet", base, BASE)
    options = ["--isolation=chroot", "--layers", f"--build-arg=BASE={BASE}", *pip_settings(folder)]
    run("nice", "make", "image", "ENGINE=buildah", f"IMAGE={tag}", f"ARGS={' '.join(options)}", timeout_s=1800)


def rendered(tag: str, *sets: str) -> list[dict[str, Any]]:
    """The chart's manifests for CPUs, with the image of this tag."""
    helm = shutil.which("helm", path=str(Path(sys.executable).parent)) or "helm"
    repository, _, version = tag.rpartition(":")
    words = [f"image.repository={repository}", f"image.tag={version}", "trustNetwork=true", *sets]
    chart = ROOT / "deploy" / "helm" / "eaas"
    options = [word for one in words for word in ("--set", one)]
    text = run(helm, "template", "eaas", str(chart), "-f", str(chart / "values-cpu.yaml"), *options)
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def secret(folder: Path, files: Mapping[str, Path]) -> Path:
    """A Secret as a kubelet mounts it in pods of this chart: a folder whose files the group of fsGroup may read."""
    folder.mkdir(parents=True)
    for key, path in files.items():
        (folder / key).write_bytes(path.read_bytes())
        os.chown(folder / key, 0, 10001)
        (folder / key).chmod(0o440)
    return folder


@dataclass(kw_only=True)
class Pod:
    """One pod: its manifest as podman plays it, and what podman leaves to us."""

    name: str
    role: str
    address: str
    image: str
    manifest: dict[str, Any]
    container: dict[str, Any]
    grace_s: int
    aliases: Sequence[str]

    def inspect(self, what: str) -> str:
        """A field of the container's state, as a Go template names it."""
        return run("podman", "inspect", "--format", f"{{{{{what}}}}}", f"{self.name}-{self.role}")

    def execute(self, *words: str, timeout_s: float = 180) -> str:
        """What a command in the container says."""
        return run("podman", "exec", f"{self.name}-{self.role}", *words, timeout_s=timeout_s)

    def log(self) -> str:
        """What the container has logged."""
        name = f"{self.name}-{self.role}"
        done = subprocess.run(["podman", "logs", name], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def passes(self, probe: str) -> bool:
        """Whether a probe of the chart passes, asked as a kubelet asks it: from outside, any certificate."""
        asked = self.container[probe]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        action = asked.get("httpGet") or asked["tcpSocket"]
        timeout_s = asked.get("timeoutSeconds", 1)
        try:
            if "tcpSocket" in asked:
                socket.create_connection((self.address, ports[action["port"]]), timeout_s).close()
                return True
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            link = http.client.HTTPSConnection(self.address, ports[action["port"]], timeout=timeout_s, context=context)
            with contextlib.closing(link):
                link.request("GET", action["path"])
                return 200 <= link.getresponse().status < 400
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to the container's first process; the kubelet's part, to start it again, is podman's."""
        os.kill(int(self.inspect(".State.Pid")), signal.SIGKILL)


class Node:
    """The pods of one chart in a network of their own.

    Args:
        manifests: For a tag of the image, what the chart renders.
        secrets: A folder for each Secret that the pods mount.
    """

    def __init__(self, manifests: Callable[[str], list[dict[str, Any]]], secrets: Mapping[str, Path]) -> None:
        self._manifests, self._secrets = manifests, secrets
        self._used, self.pods = 9, dict[str, Pod]()
        self.clear()
        run("podman", "network", "create", "--internal", "--subnet", f"{SUBNET}.0/24", NETWORK)

    def clear(self) -> None:
        """End everything of this network's name, an earlier run's too."""
        run("podman", "pod", "rm", "--force", "--time=1", *self.pods, check=False)
        run("podman", "network", "rm", "--force", NETWORK, check=False)
        names = run("podman", "volume", "ls", "--format", "{{.Name}}").split()
        run("podman", "volume", "rm", *(name for name in names if name.startswith("eaas-test-")), check=False)

    def of(self, role: str) -> list[Pod]:
        """The pods of a role."""
        return [pod for pod in self.pods.values() if pod.role == role]

    def workload(self, role: str, tag: str) -> tuple[dict[str, Any], list[str]]:
        """A role's Deployment or StatefulSet, and the Services that select its pods."""
        manifests = self._manifests(tag)
        (found,) = (
            one
            for one in manifests
            if one["kind"] in ("Deployment", "StatefulSet") and one["metadata"]["name"] == f"eaas-{role}"
        )
        labels = found["spec"]["template"]["metadata"]["labels"].items()
        services = [one for one in manifests if one["kind"] == "Service"]
        return found, [one["metadata"]["name"] for one in services if one["spec"]["selector"].items() <= labels]

    def start(self, role: str, ordinal: int, tag: str) -> Pod:
        """Start one pod, with an address that no pod had before."""
        workload, services = self.workload(role, tag)
        self._used += 1
        address, name = f"{SUBNET}.{self._used}", f"eaas-{role}-{ordinal}"
        spec = copy.deepcopy(workload["spec"]["template"]["spec"])
        claims = [one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())]
        spec["volumes"] += [{"name": one, "persistentVolumeClaim": {"claimName": one}} for one in claims]
        # In podman volumes have one name space: an emptyDir is each pod's own, and so is a claim.
        for volume in spec["volumes"]:
            if "secret" in volume:
                path = str(self._secrets[volume.pop("secret")["secretName"]])
                volume["hostPath"] = {"path": path, "type": "Directory"}
            elif "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = f"eaas-test-{name}-{volume['name']}"
            else:
                volume["name"] = f"eaas-test-{name}-{self._used}-{volume['name']}"
        (container,) = spec["containers"]
        asked = copy.deepcopy(container)
        names = {volume["name"].rpartition("-")[2]: volume["name"] for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            mount["name"] = names[mount["name"]]
        fields = {"status.podIP": address, "spec.nodeName": socket.gethostname()}
        values = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        container["env"] = [{"name": key, "value": value} for key, value in values.items()]
        container["args"] = [
            re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], str(word)) for word in container["args"]
        ]
        # podman would publish each port on the host, for every address it has.
        for unplayed in ("ports", "livenessProbe", "readinessProbe", "lifecycle"):
            container.pop(unplayed, None)
        # A kubelet starts nothing anew in a pod that ends; podman would, where a retired member has ended well.
        spec["restartPolicy"] = "OnFailure"
        labels = workload["spec"]["template"]["metadata"]["labels"]
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": spec,
        }
        pod = Pod(
            name=name,
            role=role,
            address=address,
            image=container["image"],
            manifest=manifest,
            container=asked,
            grace_s=spec["terminationGracePeriodSeconds"],
            aliases=services,
        )
        self.pods[name] = pod
        network = ",".join([f"{NETWORK}:ip={address}", *(f"alias={one}" for one in services)])
        run("podman", "kube", "play", "--network", network, "-", stdin=yaml.safe_dump(manifest))
        return pod

    def wait_ready(self, pods: Sequence[Pod], longest_s: float = 90) -> None:
        """Wait until every pod's readiness probe passes."""
        ends = time.monotonic() + longest_s
        while not all(pod.passes("readinessProbe") for pod in pods):
            if time.monotonic() > ends:
                late = [pod for pod in pods if not pod.passes("readinessProbe")]
                logs = "".join(f"\n{pod.name}: {pod.log()[-700:]}" for pod in late)
                raise TimeoutError(f"not ready within {longest_s:g} s:{logs}")
            time.sleep(0.2)

    def end(self, pod: Pod) -> float:
        """End a pod as a kubelet does: preStop in it, SIGTERM, and SIGKILL after what is left of its time.

        Returns how many seconds it took from SIGTERM to the end.
        """
        began = time.monotonic()
        hook = pod.container.get("lifecycle", {}).get("preStop")
        if hook:
            try:
                pod.execute(*hook["exec"]["command"], timeout_s=pod.grace_s)
            except RuntimeError:
                # A member that was retired ends by itself, and with its container what waits in there.
                if pod.inspect(".State.Running") == "true" or pod.inspect(".State.ExitCode") != "0":
                    raise
        asked = time.monotonic()
        left = max(2, round(pod.grace_s - (asked - began)))
        run("podman", "stop", f"--time={left}", f"{pod.name}-{pod.role}", timeout_s=left + 60)
        took = time.monotonic() - asked
        run("podman", "pod", "rm", "--force", "--time=1", pod.name)
        del self.pods[pod.name]
        return took


@contextlib.contextmanager
def node(manifests: Callable[[str], list[dict[str, Any]]], secrets: Mapping[str, Path]) -> Iterator[Node]:
    """A node, and nothing of it afterwards."""
    made = Node(manifests, secrets)
    try:
        yield made
    finally:
        made.clear()
