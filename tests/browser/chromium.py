"""Drives a Chromium by the DevTools protocol, over the pipe that it offers: no driver and no library is needed."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from tests.waits import PATIENCE_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENT = "(() => { try { const found = %s; return found instanceof Node || found } catch { return null } })()"
"""An element that was found counts as true; what is not there yet does not throw."""

ZONE = "Asia/Kolkata"
"""The time zone of the browser, in which no hour has the minutes of UTC."""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class PageError(Exception):
    """The page threw an exception."""


class Chromium:
    """A browser with one page at a time. `problems` collects what the browser's console complains about."""

    def __init__(self, executable: str, profile: Path) -> None:
        low_read, self._write = os.pipe()
        self._read, low_write = os.pipe()
        inner_read, inner_write = (fcntl.fcntl(low, fcntl.F_DUPFD, 10) for low in (low_read, low_write))
        command = [executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--disable-background-networking", "--no-first-run", "--remote-debugging-pipe"]
        command += ["--disable-extensions", "--disable-component-update", "--disable-sync", "--disable-default-apps"]
        # The browser reads from its file 3 and writes to its file 4.
        redirect = f'exec "$@" 3<&{inner_read} 4>&{inner_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", *command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(inner_read, inner_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(profile)},
        )
        for file in (low_read, low_write, inner_read, inner_write):
            os.close(file)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._target: str | None = None
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.received_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("Browser.close", own=False)
            self._process.wait(10)
        except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open `url` in a page of its own, with storage of its own, in place of the page before."""
        if self._target is not None:  # whose page would go on reading and painting
            self._call("Target.closeTarget", own=False, targetId=self._target)
        self._target = target = self._call("Target.createTarget", own=False, url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", own=False, targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.problems, self.requests, self.received_bytes = [], [], 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Performance.enable", timeDomain="threadTicks")
        origin = "/".join(url.split("/")[:3])
        self._call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
        self._call("Network.clearBrowserCache")
        self.resize(width, height)
        self.use_dark(dark)
        self._call("Emulation.setTimezoneOverride", timezoneId=ZONE)
        self._call("Page.navigate", url=url)

    def use_dark(self, dark: bool) -> None:
        """Prefer a dark colour scheme, or a light one."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of `expression` once it is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                value = self.evaluate(PATIENT % expression)
            except PageError as error:
                if "navigated" not in str(error):  # another page begins
                    raise
                value = None
            if value:
                return value
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText.slice(0, 600)")
                raise TimeoutError(f"it does not come true: {expression}; {self.problems}; the page shows: {text}")
            time.sleep(0.03)

    def processor_seconds(self) -> float:
        """Return what the thread that runs the page has taken of the processor since it was opened."""
        metrics = {metric["name"]: metric["value"] for metric in self._call("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        event: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def accessible_names(self) -> list[tuple[str, str]]:
        """Return the role and the name of everything that assistive technology is told of."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write an image of the page."""
        image = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(image["data"]))

    def _call(self, method: str, *, own: bool = True, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if own:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("sessionId") == self._session:
                self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Log.entryAdded" and event["entry"]["level"] in {"warning", "error"}:
            self.problems.append(event["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Network.loadingFinished":
            self.received_bytes += int(event["encodedDataLength"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise EOFError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
