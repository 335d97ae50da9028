"""A real Chromium browser, controlled through the W3C WebDriver protocol."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A browser window."""

    def __init__(self, address: str) -> None:
        self._address = address

    def _ask(self, name: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self._address}/{name}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._ask("url", {"url": url})

    def _find(self, selector: str) -> str:
        return self._ask("element", {"using": "css selector", "value": selector})[_ELEMENT]

    def command(self, name: str, **params: Any) -> Any:
        """Run a command of Chromium's DevTools protocol."""
        return self._ask("goog/cdp/execute", {"cmd": name, "params": params})

    def click(self, selector: str) -> None:
        self._ask(f"element/{self._find(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        self._ask(f"element/{self._find(selector)}/value", {"text": text})

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript function body."""
        return self._ask("execute/sync", {"script": script, "args": []})

    def call(self, script: str, *arguments: Any) -> Any:
        """Return the value that an asynchronous function body passes to its last argument."""
        return self._ask("execute/async", {"script": script, "args": list(arguments)})

    def until(self, condition: str, *, deadline_s: float = 40.0) -> Any:
        """Return the value of an expression as soon as it is true."""
        look = """const [text, ms, done] = arguments; const end = Date.now() + ms;
        const look = () => {
          const value = eval(text);
          if (value || Date.now() > end) done(value); else setTimeout(look, 20);
        };
        look();"""
        value = self._ask("execute/async", {"script": look, "args": [condition, deadline_s * 1000]})
        assert value, f"{condition} did not become true; the page says {self.run('return document.body.innerText')!r}"
        return value


@contextmanager
def browser(profile: Path, *, width: int = 1280) -> Iterator[Browser]:
    """Open a window of `width` CSS pixels."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        port = next(found[1] for line in driver.stdout if (found := re.search(r"on port (\d+)\.", line)))
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        screen = {"deviceMetrics": {"width": width, "height": 900, "pixelRatio": 1}}
        options = {"binary": CHROMIUM, "args": flags, "mobileEmulation": screen}
        first = Browser(f"http://127.0.0.1:{port}")
        wanted = {"timeouts": {"script": 60_000}, "goog:chromeOptions": options}
        session = first._ask("session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        address = f"http://127.0.0.1:{port}/session/{session}"
        try:
            yield Browser(address)
        finally:
            urllib.request.urlopen(urllib.request.Request(address, method="DELETE"), timeout=60).close()
    finally:
        driver.terminate()
        driver.wait(30)
