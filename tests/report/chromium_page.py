"""A page in headless Chromium, driven through the DevTools protocol over two pipes: no other driver is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

SECONDS = 60.0
"""For an answer."""

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """A page, for `with`; skips the test where there is no Chromium. events: what it has told of itself."""

    def __init__(self, profile: Path) -> None:
        names = ("chromium", "chromium-browser", "google-chrome")
        program = next((found for name in names if (found := shutil.which(name))), None)
        if program is None or shutil.which("bash") is None:
            pytest.skip("no Chromium here (Debian: apt-get install chromium)")
        its_in, self._to = os.pipe()
        self._from, its_out = os.pipe()
        ends = ("bash", "-c", f'exec "$@" 3<&{its_in} 4>&{its_out}', "bash")  # it listens on 3 and answers on 4
        self._process = subprocess.Popen(
            (*ends, program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"), pass_fds=(its_in, its_out),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(its_in)
        os.close(its_out)
        self.events: list[dict[str, Any]] = []
        self._left, self._calls, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What a method of the protocol gives."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._calls:
                assert "error" not in told, told
                return dict(told["result"])
            self.events.append(told)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._left:
            assert select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0], "Chromium says nothing"
            piece = os.read(self._from, 1 << 20)
            assert piece, "Chromium is gone"
            self._left += piece
        message, self._left = self._left.split(b"\0", 1)
        return dict(json.loads(message))

    def open(self, file: Path) -> None:
        """Load a file and wait until all of it is there."""
        self.value("window.last = true")
        self.call("Page.navigate", url=file.resolve().as_uri())
        end = time.monotonic() + SECONDS
        while not self.value("!window.last && document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """As large a window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, text=text)

    def screenshot(self, file: Path, whole: bool = True) -> None:
        """A picture of the page, of all of it or what is in the window."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def print(self, file: Path) -> None:
        """The page on paper, A4."""
        data = self.call("Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69)["data"]
        file.write_bytes(base64.b64decode(data))

    def problems(self) -> list[dict[str, Any]]:
        """Errors and warnings of the console, and exceptions."""
        self.value("0")  # what was told before this is heard before its answer
        found = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if (
                method == "Runtime.exceptionThrown"
                or (method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"))
                or (method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"))
            ):
                found.append(parameters)
        return found

    def requests(self) -> list[str]:
        """The addresses that it has asked for."""
        self.value("0")
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
