"""Opens a page in headless Chromium and says what came of it: requests, console errors, load time, what does not fit.

Chromium speaks its DevTools protocol over a pair of pipes (``--remote-debugging-pipe``), so that no port is opened and
no library is needed; messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Browser", "PageLoad", "find_chromium", "open_browser"]

LIMIT_S = 120.0
"""Longest wait for any answer; a loaded machine takes many times as long as an idle one."""

# What is cut off or runs into something: texts of drawings outside of them, or over one another, and a page that
# scrolls sideways. Half a pixel is rounding.
_LOOK = """(() => {
  const clipped = [], overlapping = [];
  for (const svg of document.querySelectorAll('figure > svg')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [name, b] of boxes)
      if (b.left < frame.left - .5 || b.right > frame.right + .5 ||
          b.top < frame.top - .5 || b.bottom > frame.bottom + .5) clipped.push(name);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [p, a] = boxes[i], [q, b] = boxes[j];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 3) overlapping.push(p + ' | ' + q);
    }
  }
  const smallest = Math.min(...[...document.querySelectorAll('figure > svg text')]
    .filter(t => t.getBoundingClientRect().width).map(t => t.getBoundingClientRect().height));
  const timing = performance.getEntriesByType('navigation')[0];
  return {clipped, overlapping, smallest_px: isFinite(smallest) ? smallest : 0,
    load_s: timing.loadEventEnd / 1000, dom_s: timing.domContentLoadedEventEnd / 1000,
    nodes: document.querySelectorAll('*').length, height: document.documentElement.scrollHeight,
    sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth};
})()"""


def find_chromium() -> str | None:
    """Return the browser's command, or None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLoad:
    """What came of opening a page.

    Attributes:
        requests: addresses that it asked for, its own file first.
        errors: what the console was told of: exceptions, errors and warnings.
        load_s: from the navigation's start to the end of its load event, by Navigation Timing.
        num_nodes: elements.
        height_px: of the whole page.
        sideways_px: how far it scrolls sideways.
        clipped: texts of drawings that reach out of them.
        overlapping: pairs of texts of drawings that run into each other.
        smallest_text_px: height of the smallest of them, 0 without any.
    """

    requests: tuple[str, ...]
    errors: tuple[str, ...]
    load_s: float
    num_nodes: int
    height_px: int
    sideways_px: int
    clipped: tuple[str, ...]
    overlapping: tuple[str, ...]
    smallest_text_px: float


@dataclass(slots=True)
class Browser:
    """A browser at the other end of two pipes."""

    write_to: int
    read_from: int
    _number: int = 0
    _rest: bytes = b""
    _events: list[dict[str, Any]] = field(default_factory=list)
    _session: str = ""

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> PageLoad:
        """Open a file in a page of its own, which stays the current one.

        Raises:
            TimeoutError: the browser gave no answer in time.
        """
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._events.clear()
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        self._ask("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._ask("Page.navigate", {"url": path.resolve().as_uri()})
        self._wait_for("Page.loadEventFired")
        looked = self._ask("Runtime.evaluate", {"expression": _LOOK, "returnByValue": True})["result"]["value"]
        events = [event for event in self._events if event.get("sessionId") == self._session]
        return PageLoad(
            requests=tuple(
                event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
            ),
            errors=tuple(_complaint(event) for event in events if _complaint(event)),
            load_s=looked["load_s"],
            num_nodes=looked["nodes"],
            height_px=looked["height"],
            sideways_px=looked["sideways"],
            clipped=tuple(looked["clipped"]),
            overlapping=tuple(looked["overlapping"]),
            smallest_text_px=looked["smallest_px"],
        )

    def screenshot(self, *, width: int, top: int = 0, height: int) -> bytes:
        """Return a PNG of a stretch of the current page."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        options = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self._ask("Page.captureScreenshot", options)["data"])

    def print_pdf(self) -> bytes:
        """Return the current page as it prints on A4."""
        options = {"preferCSSPageSize": True, "printBackground": True}
        return base64.b64decode(self._ask("Page.printToPDF", options)["data"])

    def evaluate(self, expression: str) -> Any:
        """Return what an expression gives in the current page."""
        return self._ask("Runtime.evaluate", {"expression": expression, "returnByValue": True})["result"].get("value")

    def _ask(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": dict(params or {})}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self.write_to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._read(method, deadline)
            if answer.get("id") != self._number:
                self._events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error'].get('message')}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _wait_for(self, name: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not any(event["method"] == name and event.get("sessionId") == self._session for event in self._events):
            self._events.append(self._read(name, deadline))

    def _read(self, what: str, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.read_from], [], [], left)[0]:
                raise TimeoutError(f"Chromium gave no answer to {what} in {LIMIT_S:.0f} s")
            piece = os.read(self.read_from, 1 << 20)
            if not piece:
                raise RuntimeError(f"Chromium ended while it was asked for {what}")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read


def _complaint(event: Mapping[str, Any]) -> str:
    params = event.get("params", {})
    match event["method"]:
        case "Runtime.exceptionThrown":
            return str(params["exceptionDetails"].get("text", "exception"))
        case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
            return " ".join(str(argument.get("value", "")) for argument in params["args"])
        case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
            return str(params["entry"]["text"])
        case _:
            return ""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start headless Chromium and end it again.

    Raises:
        FileNotFoundError: there is none.
    """
    command = find_chromium()
    if command is None:
        raise FileNotFoundError("no chromium, chromium-browser or google-chrome is installed")
    to_browser, our_write = os.pipe()
    our_read, from_browser = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol wants descriptors 3 and 4, whatever ours are called; sh knows those of one digit only.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", command, *options, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(our_write, our_read)
        finally:
            os.close(our_write)
            os.close(our_read)
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
