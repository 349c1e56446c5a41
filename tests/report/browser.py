"""A headless Chromium that opens a page from disk, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EXECUTABLE = next((path for name in NAMES if (path := shutil.which(name))), None)
PATIENCE_S = 60.0
# What a key is called, its DOM code and its Windows virtual key code.
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "PageUp": 33,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
    "Tab": 9,
    "Enter": 13,
}


class Browser:
    """One browser with one page. Use as a context manager; `profile` is a folder it may fill."""

    def __init__(self, profile: Path) -> None:
        assert EXECUTABLE is not None
        # The browser reads commands from its descriptor 3 and writes answers to its 4.
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()
        # Far from 3 and 4, so that the shell below cannot close one end while it moves the other.
        high = [_moved_up(to_read), _moved_up(from_write)]
        command = [
            *(EXECUTABLE, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--no-first-run", "--force-device-scale-factor=1"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        wiring = f"exec 3<&{high[0]} 4>&{high[1]}; exec " + '"$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", wiring, "browser", *command],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in high:
            os.close(end)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and wait for it."""
        if self._process.poll() is None:
            os.write(self._to, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        os.close(self._to)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        os.close(self._from)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        until = time.monotonic() + PATIENCE_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded."""
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + PATIENCE_S
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(until))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises waited for; a thrown error fails."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Press a key of `KEYS` on whatever has the focus."""
        for _ in range(times):
            named = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **named, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def show(self, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Set the preferred colour scheme and the size of the window."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page, or of the window alone."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors of scripts, refused resources, and whatever else the console was told."""
        self.run("0")
        found = []
        for event in self.events:
            inner = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(inner["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(inner["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(json.dumps(inner["args"]))
        return found

    def requests(self) -> list[str]:
        """What the page asked for since it was opened."""
        self.run("0")
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(0.0, left))
            if not ready:
                raise TimeoutError(f"the browser said nothing for {PATIENCE_S:.0f} s")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise ConnectionError(f"the browser ended, code {self._process.poll()}")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


def _moved_up(end: int) -> int:
    """The same descriptor under a number of 10 or more, inheritable."""
    import fcntl

    moved = fcntl.fcntl(end, fcntl.F_DUPFD, 10)
    os.close(end)
    return moved
