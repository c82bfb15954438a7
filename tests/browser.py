"""A headless Chromium, driven by the DevTools protocol over a pipe: no package beside the browser itself."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
]  # fmt: skip


PATIENCE = 60.0  # seconds: a deadline for a busy machine, not an expectation


def find_browser() -> str | None:
    """A browser that starts: while a package is being installed, the program is there before its libraries are."""
    found = (path for name in NAMES if (path := shutil.which(name)))
    works = (path for path in found if subprocess.run([path, "--version"], capture_output=True).returncode == 0)
    return next(works, None)


def browser_program(timeout: float = 240.0) -> tuple[str | None, str]:
    """A browser, installed if need be, or why there is none. One process at a time looks for it."""
    with open(Path(tempfile.gettempdir()) / f"rl-training-browser-{os.geteuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reason = "" if find_browser() else install_browser(timeout)
        return (None, reason) if reason else (find_browser(), "")


def install_browser(timeout: float) -> str:
    """Debian's Chromium, where this process may install it; else why there is none."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "Chromium is not installed, and only root on a Debian-like system can install it here"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::Retries=2"]
    install = ["apt-get", *options, "install", "-y", "--no-install-recommends", "chromium"]
    end, reason = time.monotonic() + timeout, ""
    for command in (install, ["apt-get", *options, "update"], install):  # lists may be missing on a fresh machine
        try:
            left = max(1.0, end - time.monotonic())
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return f"Chromium could not be installed within {timeout:.0f} s"
        if done.returncode == 0 and find_browser():
            return ""
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"Chromium could not be installed: {reason}"


class Browser:
    """One page. Console messages, exceptions, failed and attempted requests are kept in `events`."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4; each message ends with a null byte.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]  # out of the way of 3 and 4
        start = f"import os, sys; os.dup2({ends[0]}, 3); os.dup2({ends[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", start, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self.events: list[dict[str, Any]] = []
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], 60)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def open(self, path: Path, width: int, height: int, dark: bool) -> None:
        """Load a file at a size, and wait until its script has run to the end."""
        self.show(path.as_uri(), width, height, dark)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.value("document.readyState === 'complete' && document.documentElement.dataset.ready") == "yes":
                return
            time.sleep(0.05)
        raise TimeoutError(f"{path} was not ready after a minute: {self.events}")

    def show(self, url: str, width: int, height: int, dark: bool) -> None:
        """Go to an address at a size."""
        self.events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> bytes:
        data = base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        path.write_bytes(data)
        return data

    @property
    def problems(self) -> list[Any]:
        """Console messages, log entries (also violations of the page's policy) and uncaught exceptions."""
        bad = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        return [event for event in self.events if event.get("method") in bad]

    @property
    def requests(self) -> list[str]:
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
