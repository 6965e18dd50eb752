"""Rows that cross hosts are plain on the wire, unless WireGuard lies below: then its packets are all there is."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.hosts.cluster import hosts_cluster
from benchmarks.hosts.network import Network, refusal
from benchmarks.hosts.transport import SETTINGS

NEEDED = ("etcd", "wireguard-go", "wg")
MISSING = [program for program in NEEDED if shutil.which(program) is None]
PORT, PREFIX = 51820, "10.90.0."
# Reads every frame of a device until its input ends, and says how many of each protocol and port there were.
CAPTURE = """
import collections, json, select, socket, struct, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
link.bind((sys.argv[1], 0))
seen = collections.Counter()
print("listening", flush=True)
while not select.select([link, sys.stdin], [], [])[0].count(sys.stdin):
    frame = link.recv(65536)
    if frame[12:14] == b"\\x08\\x00":
        ports = struct.unpack_from("!HH", frame, 14 + 4 * (frame[14] & 15))
        seen[{6: "tcp", 17: "udp"}.get(frame[23], "other") + f" {max(ports) if frame[23] != 17 else min(ports)}"] += 1
print(json.dumps(seen))
"""

pytestmark = [
    pytest.mark.alone,
    pytest.mark.full(seconds=30),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "-"),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"needs {', '.join(NEEDED)} (Debian: etcd-server, wireguard-go, wireguard-tools), found no "
        f"{' and no '.join(MISSING)}",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu13") is None,
        reason="needs the package nixl-cu13 (pip install --no-deps nixl-cu13), found none",
    ),
]


def tunnels(network: Network, folder: Path) -> None:
    """A WireGuard device on hosts a and b, to each other over rail0, as docs/security.md says.

    In user space: kernels may have none.
    """
    keys = {host: run("wg", "genkey") for host in "ab"}
    public = {host: run("wg", "pubkey", said=key) for host, key in keys.items()}
    for number, (host, peer) in enumerate(("ab", "ba"), 1):
        file = folder / f"wg-{host}"
        file.touch(0o600)
        file.write_text(
            f"[Interface]\nPrivateKey = {keys[host]}\nListenPort = {PORT}\n"
            f"[Peer]\nPublicKey = {public[peer]}\nAllowedIPs = {PREFIX}{3 - number}/32\n"
            f"Endpoint = {network.address(peer, 'rail0')}:{PORT}\n"
        )
        inside = network.inside(host)
        run(*inside, "wireguard-go", f"wg-{host}")
        run(*inside, "wg", "setconf", f"wg-{host}", str(file))
        run(*inside, "ip", "addr", "add", f"{PREFIX}{number}/24", "dev", f"wg-{host}")
        run(*inside, "ip", "link", "set", f"wg-{host}", "up")


def run(*command: str, said: str = "") -> str:
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


@contextmanager
def captured(network: Network, device: str) -> Iterator[dict[str, int]]:
    """How many packets of each protocol and port pass a device of the switch meanwhile; filled at the end."""
    found: dict[str, int] = {}
    command = [*network.inside("switch"), sys.executable, "-c", CAPTURE, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield found
        time.sleep(0.2)
        process.stdin.close()
        found.update(json.loads(process.stdout.read()))


def test_under_wireguard_nothing_but_its_packets_is_on_the_wire_and_the_tokens_are_the_same() -> None:
    with hosts_cluster(SETTINGS["nixl"]) as cluster, captured(cluster.network, "a-rail0") as plain:
        bare = cluster.stream()
    assert any(name.startswith("tcp") and count > 100 for name, count in plain.items()), plain
    with hosts_cluster(SETTINGS["wireguard"], tunnels) as cluster:
        with captured(cluster.network, "a-rail0") as sealed, captured(cluster.network, "a-rail1") as other:
            under = cluster.stream()
        assert not under.errors and under.texts == bare.texts
    assert set(sealed) == {f"udp {PORT}"} and sealed[f"udp {PORT}"] > 100, sealed
    assert not other, other
