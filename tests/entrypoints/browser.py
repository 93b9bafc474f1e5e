# SPDX-License-Identifier: Apache-2.0
"""Drives Debian's Chromium through its DevTools protocol, over the two pipes that need no library for WebSockets."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
WITH_PIPES = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
TIMEOUT_S = 120


class BrowserError(Exception):
    """The browser has refused a call, or has left the page that it was about."""


class Browser:
    """A tab of a headless Chromium.

    Attributes:
        events: what the tab reported so far: requests, messages of the console, refusals by a policy.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--window-size=1280,1000"]
        flags += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]
        self._process = subprocess.Popen(
            ["bash", "-c", WITH_PIPES, CHROMIUM, *flags, "about:blank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        self.events: list[dict[str, Any]] = []
        self._received = b""
        self._count = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; raise BrowserError if there is none."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, url: str) -> None:
        """Open a page; return at once."""
        self.events.clear()
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript, or what its promise becomes."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the value of an expression as soon as it is true, on this page or the one that it leads to."""
        end_s = time.monotonic() + timeout_s
        while not (value := self._run_if_open(script)):
            assert time.monotonic() < end_s, f"is still {value!r}: {script}"
            time.sleep(0.1)
        return value

    def screenshot(self) -> bytes:
        """Return a picture of what the tab shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser, which ends its child processes once its pipe is closed."""
        self._commands.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
        self._answers.close()

    def _run_if_open(self, script: str) -> Any:
        """Return the value of an expression, and None if its page is left while it is evaluated."""
        try:
            return self.run(script)
        except BrowserError as error:
            if "navigated" in str(error):
                return None
            raise

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            readable, _, _ = select.select([self._answers], [], [], TIMEOUT_S)
            assert readable, "the browser does not answer"
            part = os.read(self._answers.fileno(), 2**20)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with an empty profile in a folder."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
