"""A headless Chromium, driven by the WebDriver protocol (w3.org/TR/webdriver2) that chromedriver speaks over HTTP."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
KEYS = {
    "left": "\ue012",
    "up": "\ue013",
    "right": "\ue014",
    "down": "\ue015",
    "tab": "\ue004",
    "home": "\ue011",
    "end": "\ue010",
    "enter": "\ue007",
}


def missing() -> str:
    """What a test of a browser lacks on this machine; empty for nothing."""
    if not any(map(shutil.which, NAMES)):
        return "there is no Chromium here: apt-get install chromium chromium-driver"
    return "" if shutil.which("chromedriver") else "there is no chromedriver here: apt-get install chromium-driver"


class Browser:
    """One window, of 1280 x 900 pixels if not told otherwise."""

    def __init__(self, folder: Path) -> None:
        program = next(found for found in map(shutil.which, NAMES) if found)
        environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder)}
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self._base = f"http://127.0.0.1:{self._port()}"
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        always = {
            "browserName": "chrome",
            "timeouts": {"script": 90_000, "pageLoad": 90_000},
            "goog:chromeOptions": {"binary": program, "args": [*words, "--window-size=1280,900"]},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})
        self._base += f"/session/{made['sessionId']}"

    def _port(self) -> str:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                return line.rstrip(".\n").split()[-1]
        raise RuntimeError("chromedriver did not start")

    def _ask(self, method: str, path: str, data: dict[str, Any] | None = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._base + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        self._ask("POST", "/url", {"url": path.as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str) -> None:
        """Until a script returns something true; a minute at most."""
        waiting = (
            "const done = arguments[0], until = performance.now() + 60000;"
            f"const asked = () => {{ {script} }};"
            "const look = () => { const found = asked();"
            "if (found || performance.now() > until) done(!!found); else setTimeout(look, 10); }; look();"
        )
        assert self._ask("POST", "/execute/async", {"script": waiting, "args": []}), script

    def press(self, *keys: str) -> None:
        """Keys, one after another, where the focus is; names are those of ``KEYS``."""
        actions = [
            {"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")
        ]  # fmt: skip
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def point(self, x: int, y: int, *more: dict[str, Any]) -> None:
        """Move the pointer to a place of the window, then do more."""
        moved = {"type": "pointerMove", "duration": 0, "x": x, "y": y}
        source = {"type": "pointer", "id": "mouse", "actions": [moved, *more]}
        self._ask("POST", "/actions", {"actions": [source]})

    def command(self, name: str, **values: object) -> Any:
        """A command of the Chrome DevTools Protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": values})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """``browser`` (the console) or ``performance`` since the last call."""
        found: list[dict[str, Any]] = self._ask("POST", "/se/log", {"type": kind})
        return found

    def size(self, width: int, height: int) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **sizes)

    def printed(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self.command("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=60)
