"""Debian's Chromium, headless, by its DevTools protocol: what a person would see of a page, and what it asked for."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

_KEYS = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "j": 74, "k": 75}
_WAIT = 60.0  # seconds; a busy machine is no failure


def missing() -> str:
    return "" if shutil.which("chromium") else "chromium is not installed (apt-get install chromium)"


class Page:
    """One tab. `complaints` are errors and warnings of the console, `requests` the addresses asked for."""

    def __init__(self, connection: ClientConnection) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._connection, self._number, self._session = connection, 0, ""
        self._loaded = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def size(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def open(self, url: str) -> None:
        """And wait until the page and its charts are there."""
        before = self._loaded
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        while self._loaded == before:
            self._receive()
        self.wait("[...document.querySelectorAll('[data-charts]')].every(each => each.dataset.drawn)")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Until an expression is true; TimeoutError after a minute."""
        expression = f"""new Promise((done, fail) => {{
            const end = Date.now() + {_WAIT * 900};
            const look = () => ({script}) ? done(true) : Date.now() > end ? fail("never") : setTimeout(look, 20);
            look();
        }})"""
        self.run(expression)

    def press(self, key: str, text: str = "") -> None:
        code = _KEYS[key]
        text = text or (key if len(key) == 1 else {"Enter": "\r"}.get(key, ""))
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def go(self, key: str) -> None:
        """Press a key that leads to another page."""
        before = self._loaded
        self.press(key)
        while self._loaded == before:
            self._receive()

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        self._connection.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._connection.recv(_WAIT))
        method, values = found.get("method"), found.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("warning", "error"):
            self.complaints.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("warning", "error", "assert"):
            self.complaints.append(str(values["args"]))
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr)
            url = next(line.split()[-1] for line in lines if "DevTools listening on" in line)
            with connect(url, max_size=None, proxy=None) as connection:
                yield Page(connection)
        finally:
            process.kill()
