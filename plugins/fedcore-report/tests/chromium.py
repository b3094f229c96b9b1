"""Headless Chromium spoken to through a pipe (Chrome DevTools Protocol): no driver, no port, no package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The browser reads commands from its file 3 and writes answers to its file 4.
_LAUNCH = """
import fcntl, os, sys
given = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for file, number in zip(given, (3, 4)):
    os.dup2(file, number)
os.execv(sys.argv[3], sys.argv[3:])
"""

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """Return the browser's program, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page; ``errors`` collects what its console, its scripts and its network complain about."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.mkdtemp()
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self.profile}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(to_browser), str(from_browser), program, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest = 0, b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._read)
        shutil.rmtree(self.profile, ignore_errors=True)

    def open(self, file: Path, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Load a page at a width, with the user's preference for ``light`` or ``dark``; returns when it is loaded."""
        narrow = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow)
        self.prefer(scheme)
        self.errors.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._take()

    def prefer(self, scheme: str) -> None:
        """Change the user's preference while the page is open."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _take(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], 120)
            assert ready, "the browser has not answered for two minutes"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"the browser ended with code {self.process.poll()}"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        details = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(str(details["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning", "assert"):
                self.errors.append(str(details["args"]))
            case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(details["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
        return message
