"""A headless Chromium, driven by its DevTools protocol over a pipe: nothing to install but Debian's package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

NAME = "chromium"


def missing() -> str:
    """Why the browser's tests cannot run; empty when they can."""
    return "" if shutil.which(NAME) else f"needs {NAME} (Debian: {NAME}), found none"


class Page:
    """One page of one browser process of its own."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        (low_read, self._write), (self._read, low_write) = os.pipe(), os.pipe()
        # Away from 3 and 4, which the shell sets one after the other.
        to_read, to_write = (fcntl.fcntl(low, fcntl.F_DUPFD, 20) for low in (low_read, low_write))
        # The browser reads commands from descriptor 3 and answers on 4.
        command = [
            "bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-', "bash",
            NAME, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", f"--user-data-dir={folder}",
            "--disable-background-networking", "--disable-component-update", "about:blank",
        ]  # fmt: skip
        log = (folder.parent / f"{folder.name}.log").open("wb")
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), stderr=log, stdout=log)
        for descriptor in (low_read, low_write, to_read, to_write):
            os.close(descriptor)
        log.close()
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._told = threading.Condition()
        self._ended = False
        self._next = 0
        self._session = ""
        threading.Thread(target=self._listen, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.prefer("dark" if dark else "light")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)

    def _listen(self) -> None:
        left = b""
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                *messages, left = (left + data).split(b"\0")
                with self._told:
                    for message in map(json.loads, messages):
                        if "id" in message:
                            self._answers[message["id"]] = message
                        else:
                            self.events.append(message)
                    self._told.notify_all()
        with self._told:
            self._ended = True
            self._told.notify_all()

    def call(self, method: str, timeout_s: float = 60.0, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._next += 1
        number = self._next
        command = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        with self._told:
            found = self._told.wait_for(lambda: number in self._answers or self._ended, timeout_s)
        assert found and number in self._answers, f"{method}: no answer of the browser"
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def resize(self, width: int, height: int) -> None:
        """Give the page so many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Have the page believe that its reader prefers "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Go there, and wait until its scripts have begun."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def until(self, script: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression in the page is true."""
        end_s = time.monotonic() + timeout_s
        while not self.run(f"!!({script})"):
            assert time.monotonic() < end_s, f"not within {timeout_s} s: {script}; shown: {self.text()[:2000]}"
            time.sleep(0.05)

    def text(self) -> str:
        """What the page shows, as text."""
        return self.run("document.body ? document.body.innerText : ''")

    def press(self, key: str, code: int = 0) -> None:
        """Press and release a key; code: its Windows key code, where it writes no character."""
        shown = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            down = shown if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **down)

    def problems(self) -> list[str]:
        """What the page complained of: exceptions, errors in its console, what its policy refused."""
        found: list[str] = []
        for event in list(self.events):
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> set[str]:
        """Every address that the page asked for."""
        return {
            event["params"]["request"]["url"]
            for event in list(self.events)
            if event["method"] == "Network.requestWillBeSent"
        }

    def picture(self, path: Path) -> None:
        """Write a PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
