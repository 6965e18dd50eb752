"""A real etcd for tests: one member on free ports, its data in memory, that can be killed, frozen and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.etcd import Etcd, EtcdUnavailable


class EtcdProcess:
    """One member. It keeps its data and its address when it is started again.

    Args:
        tls_dir: With ca.pem, cert.pem and key.pem: it speaks TLS with who shows a certificate of that CA.
    """

    def __init__(self, tls_dir: Path | None = None) -> None:
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="eaas-etcd-", dir=memory if memory.is_dir() else None))
        self.url, self._peers = _free_url(), _free_url()
        self.tls_dir = tls_dir
        self._tls: list[str] = []
        if tls_dir is not None:
            self.url = self.url.replace("http:", "https:")
            named = {"trusted-ca-file": "ca", "cert-file": "cert", "key-file": "key"}
            self._tls = [f"--{option}={tls_dir / name}.pem" for option, name in named.items()]
            self._tls.append("--client-cert-auth")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("etcd", "--data-dir", str(self.folder / "data"), "--logger", "zap"),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", self._peers, "--initial-advertise-peer-urls", self._peers),
                    *("--initial-cluster", f"default={self._peers}"),
                    *self._tls,
                ],
                stdout=log,
                stderr=log,
            )
        end_s = time.monotonic() + 60
        while True:
            try:
                Etcd(self.url, tls_dir=self.tls_dir).call("kv/range", {"key": "YQ=="})
                return
            except EtcdUnavailable as error:
                said = (self.folder / "log").read_text(errors="replace")[-1000:]
                assert time.monotonic() < end_s and self.process.poll() is None, f"{error}: {said}"
                time.sleep(0.05)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        # The signal is sent at once, but each thread stops only when it next runs.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def etcd_process(tls_dir: Path | None = None) -> Iterator[EtcdProcess]:
    """A member for the length of a `with`; the test is skipped where etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd on PATH (Debian: apt-get install etcd-server), found none")
    process = EtcdProcess(tls_dir)
    try:
        yield process
    finally:
        process.close()


def _free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
