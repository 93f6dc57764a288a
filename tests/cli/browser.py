"""A headless Chromium that opens a file and tells all that happened: console, errors, requests.

Spoken to over a pipe, without a port.
The protocol: https://chromedevtools.github.io/devtools-protocol, one JSON object after another,
a zero byte behind each.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
MAX_S = 60.0


def find_browser() -> str | None:
    """The browser that is installed: of the system, or one that playwright brought."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    brought = sorted(Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))
    return str(brought[-1]) if brought else None


class Browser:
    """One page of one browser; `told` is every event it sent."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of, self._rest, self._number = to, of, b"", 0
        self.told: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.ask(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    _session = None

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """The answer to one command; events that come before it are kept."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._to,
            json.dumps({"id": self._number, "method": method, "params": values, **session}).encode()
            + b"\0",
        )
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                answer: dict[str, Any] = message["result"]
                return answer
            self.told.append(message)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._of], [], [], MAX_S)
            assert ready, "the browser does not answer"
            part = os.read(self._of, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        row: dict[str, Any] = json.loads(message)
        return row

    def open(
        self, file: Path, *, width: int = 1200, dark: bool = False, media: str = "screen"
    ) -> None:
        """Load a file and wait until it is drawn."""
        self.told.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.ask("Page.navigate", url=file.resolve().as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self.told):
            self.told.append(self._read())

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def complaints(self) -> list[str]:
        """Every console message, every error and every refused request since the page opened."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(each["params"]) for each in self.told if each.get("method") in kinds]

    def requests(self) -> list[str]:
        """Every address that was asked for since the page was opened."""
        return [
            each["params"]["request"]["url"]
            for each in self.told
            if each.get("method") == "Network.requestWillBeSent"
        ]

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def print_pages(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def browsing(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, ended behind the block."""
    read_command, to = os.pipe()
    of, write_answer = os.pipe()
    script = f'exec "$@" 3<&{read_command} 4>&{write_answer}'
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            script,
            "bash",
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        pass_fds=(read_command, write_answer),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_command)
    os.close(write_answer)
    try:
        yield Browser(to, of)
    finally:
        with suppress(OSError):
            os.write(to, b'{"id": 0, "method": "Browser.close"}\0')
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to)
        os.close(of)
