"""A page in Debian's chromium, headless, for pictures and tests: the DevTools protocol over two pipes.

    with Browser() as browser:
        browser.open(path, width=390)
        browser.press("ArrowRight")          # a real key, as a reader presses it
        browser.value("document.title")
        browser.picture(png)

`found` is the browser's path, or None.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SECONDS = 60.0
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
#: The browser reads commands from descriptor 3, and writes answers to 4.
WRAPPED = (
    "import os, sys\nread, write = map(int, sys.argv[1:3])\nos.dup2(read, 103), os.dup2(write, 104)\n"
    "os.dup2(103, 3), os.dup2(104, 4)\nos.execv(sys.argv[3], sys.argv[3:])"
)
#: Name of a key -> its virtual code, and the text that it types.
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    " ": (32, " "),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
}

found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A browser with one page."""

    def __enter__(self) -> Browser:
        assert found is not None, "no chromium is installed"
        self.folder = TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self.write = os.pipe()
        self.read, mine = os.pipe()
        words = [found, *FLAGS, f"--user-data-dir={self.folder.name}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRAPPED, str(theirs), str(mine), *words],
            pass_fds=(theirs, mine),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(mine)
        self.number, self.rest, self.session, self.seen = 0, b"", "", list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)
        self.folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self.number += 1
        request: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write, json.dumps(request).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self.seen.append(answer.get("method", ""))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        """The next message of the browser."""
        until = time.monotonic() + SECONDS
        while b"\0" not in self.rest:
            if not select.select([self.read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has not answered within {SECONDS:g} s")
            got = os.read(self.read, 1 << 20)
            if not got:
                raise RuntimeError(f"the browser ended with exit code {self.process.wait()}")
            self.rest += got
        first, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file on a screen of so many pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.seen.clear()
        self.call("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in self.seen:
            self.seen.append(self._next().get("method", ""))

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in got:
            raise RuntimeError(got["exceptionDetails"]["exception"]["description"])
        return got["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after another: those of `KEYS`, or a character."""
        for key in keys:
            code, text = KEYS.get(key) or (ord(key.upper()) if key.isalnum() else 0, key)
            both = {"key": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **both)
            self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Click at a place."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """Write what the screen shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
