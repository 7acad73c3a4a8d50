"""A headless Chromium, steered through its own protocol over two pipes: nothing to install but the browser."""

import base64
import contextlib
import io
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 90
"""How long an answer may take on a busy machine."""

# Pipes lie where the browser looks for them: commands at 3, answers at 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)

# Pages are our own, and in containers Chromium's sandbox mostly cannot be had.
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--force-color-profile=srgb", "--font-render-hinting=none", "--remote-debugging-pipe",
)  # fmt: skip


def binary() -> str:
    """Where the browser is.

    Raises:
        FileNotFoundError: There is none.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise FileNotFoundError(
            f"no {_NAMES[0]} on PATH: these tests look at pictures in it (apt-get install chromium)"
        )
    return found


class Chromium:
    """A browser with one tab. What its pages log, raise and ask for is kept.

    Attributes:
        said: Messages and errors of the console, and dialogs.
        asked: Addresses that were asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        browser = binary()
        commands, self._commands = os.pipe()
        answers_from, answers = os.pipe()
        numbers = [sys.executable, "-c", _START, str(commands), str(answers)]
        self._process = subprocess.Popen(
            [*numbers, browser, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._numbers = count(1)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(answers_from,), daemon=True)
        self._reader.start()
        page = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._tab = self._call("Target.attachToTarget", {"targetId": page, "flatten": True})["sessionId"]

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(Exception):
            self._call("Browser.close")
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        self._reader.join(30)

    def open(self, path: Path, *, width: int = 1300) -> None:
        """Open a page, in a window as high as the page, and wait until all of it is drawn."""
        self.said.clear()
        self.asked.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size, self._tab)
        self._call("Page.navigate", {"url": path.as_uri()}, self._tab)
        self.evaluate(_DRAWN)
        size["height"] = self.evaluate("document.documentElement.scrollHeight")
        self._call("Emulation.setDeviceMetricsOverride", size, self._tab)
        self.evaluate(_DRAWN)

    def evaluate(self, code: str) -> Any:
        """Return what JavaScript comes to; what it promises is waited for."""
        asked = {"expression": code, "awaitPromise": True, "returnByValue": True}
        found = self._call("Runtime.evaluate", asked, self._tab)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", code))
        return found["result"].get("value")

    def picture(self) -> Image.Image:
        """Return what the window shows."""
        found = self._call("Page.captureScreenshot", {"format": "png"}, self._tab)
        return Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse there."""
        for step in (3, 0):
            moved = {"type": "mouseMoved", "x": x + step, "y": y}
            self._call("Input.dispatchMouseEvent", moved, self._tab)
        self.evaluate(_TWO_FRAMES)

    def click(self, x: float, y: float) -> None:
        """Click there."""
        self.drag(x, x, y)

    def drag(self, start: float, end: float, y: float) -> None:
        """Press the left button at one place, and let go of it at another one at the same height."""
        for kind, x in (("mouseMoved", start), ("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
            self._call("Input.dispatchMouseEvent", event, self._tab)
        self.evaluate(_TWO_FRAMES)

    def prefer(self, scheme: str) -> None:
        """Say that the user prefers "light" or "dark" pages."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", {"features": features}, self._tab)
        self.evaluate(_TWO_FRAMES)

    def _watch(self, session: str) -> None:
        """Hear of all that a session's pages and the frames in them say and ask for; no answer is waited for."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable", {}, session)
        attach = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
        self._send("Target.setAutoAttach", attach, session)
        self._send("Runtime.runIfWaitingForDebugger", {}, session)

    def _send(self, method: str, parameters: dict[str, Any], session: str | None) -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return number

    def _call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> Any:
        number = self._send(method, parameters or {}, session)
        while True:
            try:
                answer = self._answers.get(timeout=_SECONDS)
            except queue.Empty:
                raise TimeoutError(f"no answer to {method} for {_SECONDS} s") from None
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        of, facts = event.get("method"), event.get("params", {})
        if of == "Runtime.consoleAPICalled" and facts["type"] in {"warning", "error", "assert"}:
            self.said.append(" ".join(str(one.get("value", one.get("description"))) for one in facts["args"]))
        elif of == "Runtime.exceptionThrown":
            self.said.append(str(facts["exceptionDetails"]))
        elif of == "Log.entryAdded" and facts["entry"]["level"] in {"warning", "error"}:
            self.said.append(facts["entry"]["text"])
        elif of == "Page.javascriptDialogOpening":
            self.said.append(f"dialog: {facts['message']}")
        elif of == "Network.requestWillBeSent":
            self.asked.append(facts["request"]["url"])
        elif of == "Target.attachedToTarget":
            self._watch(facts["sessionId"])

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            for message in _messages(pipe):
                self._answers.put(json.loads(message))


def _messages(pipe: Any) -> Iterator[bytes]:
    held = b""
    while got := pipe.read1(1 << 16):
        *whole, held = (held + got).split(b"\0")
        yield from whole


_TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"

# A report says when it is drawn; other pages are done once they are loaded.
_DRAWN = """
new Promise(done => {
  const drawn = () => document.readyState === "complete"
    && (!document.getElementById("data") || "drawn" in document.documentElement.dataset);
  const look = () => drawn()
    ? requestAnimationFrame(() => requestAnimationFrame(() => done(true)))
    : setTimeout(look, 20);
  look();
})
"""
