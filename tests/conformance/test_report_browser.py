"""`glmquant report`'s page in a real headless Chromium: it renders, fits, says what it should, and asks for nothing.

Chromium is driven over its own protocol on a pipe, so only the browser is needed: $CHROMIUM, or one of the usual names
on PATH (Debian: `apt-get install chromium`). In CI it is installed if it is missing.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import support
from harness import EnvironmentUnavailable

import glmquant
from glmquant import operate

pytestmark = pytest.mark.conformance

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # Chromium refuses to run as root with it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
LIMIT = 60.0


@cache
def install() -> None:
    """Once, whatever comes of it."""
    command = "apt-get update -q && apt-get install -yq --no-install-recommends chromium fonts-dejavu-core"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=300, env=environment
        )


def chromium() -> str:
    """The browser, installed first if this is CI.

    Raises:
        EnvironmentUnavailable: there is none.
    """
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found and os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        install()
        found = shutil.which("chromium")
    if not found:
        raise EnvironmentUnavailable("no Chromium: apt-get install chromium, or set CHROMIUM to its path")
    return found


class Browser:
    """One page of a headless Chromium; remembers every request, console message and exception."""

    def __init__(self, folder: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        arguments = [chromium(), *SWITCHES, f"--user-data-dir={folder}", "about:blank"]
        self.log = folder / "chromium.log"
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command, *arguments],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._rest, self._ids = ours_in, ours_out, b"", itertools.count(1)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        """Load a page, and wait until it is."""
        self.requests.clear()
        self.complaints.clear()
        self._events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._receive()
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, expression: str) -> Any:
        """Evaluate from outside of the page: its Content-Security-Policy does not hold for this."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def look(self, width: int, scheme: str) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            assert chunk, f"Chromium said nothing:\n{self.log.read_text(errors='replace')[-3000:]}"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        event, params = message.get("method", ""), message.get("params", {})
        self._events.append(event)
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(params))
        return message


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(prefix="glmquant-chromium-", ignore_cleanup_errors=True) as folder:
        found = Browser(Path(folder))
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the trained model, quantized with its MTP layer, and compared with its source."""
    out = support.output(support.TRAINED, "moe-mtp").output
    html = tmp_path_factory.mktemp("report") / "report.html"
    return operate.report(out, support.TRAINED, html=html).html


def test_the_harness_sees_what_it_is_to_find(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><title>bad</title><img src='other.png'><p style='width:3000px'>wide</p>"
        "<script>console.error('here'); nothing.there</script>"
    )
    browser.look(400, "light")
    browser.open(bad.as_uri())
    assert any("here" in text for text in browser.complaints)
    assert any("nothing is not defined" in text for text in browser.complaints)
    assert (tmp_path / "other.png").as_uri() in browser.requests
    assert browser.js("document.documentElement.scrollWidth") > 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_renders(browser: Browser, page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    browser.look(width, scheme)
    browser.open(page.as_uri())
    assert browser.complaints == []
    assert browser.requests == [page.as_uri(), "data:,"] or browser.requests == [page.as_uri()]
    # no sideways scrolling of the page; wide tables scroll by themselves
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.js("document.compatMode") == "CSS1Compat"
    hidden = (
        "[...document.querySelectorAll('section, h2, svg, table, .tile b')]"
        ".filter(e => !e.closest('details') && !(e.getBoundingClientRect().width > 20)).map(e => e.outerHTML)"
    )
    assert browser.js(hidden) == []
    marks = "[...document.querySelectorAll('svg')].map(s => { const b = s.getBBox(), v = s.viewBox.baseVal; return "
    marks += "b.x >= -1 && b.y >= -1 && b.x + b.width <= v.width + 1 && b.y + b.height <= v.height + 1 })"
    inside = browser.js(marks)
    assert len(inside) >= 8 and all(inside)
    # legible: text of charts is not scaled down, and stands out from its background (WCAG 2.2, 1.4.3)
    assert browser.js("Math.min(...[...document.querySelectorAll('svg')].map(s => s.getScreenCTM().a))") > 0.8
    assert browser.js(LOWEST_CONTRAST) >= 4.5
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000  # a blank page takes some 10 kB


LOWEST_CONTRAST = """
(() => {
  const rgb = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return Math.min(...[...document.querySelectorAll('body *')]
    .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()) && e.tagName != 'title')
    .map(e => { const style = getComputedStyle(e);
      return ratio(light(rgb(e.closest('svg') ? style.fill : style.color)), light(behind(e))); }));
})()
"""


def test_it_shows_the_figures(browser: Browser, page: Path) -> None:
    browser.look(1280, "light")
    browser.open(page.as_uri())
    text = browser.js("document.body.innerText")
    out = support.output(support.TRAINED, "moe-mtp").output
    proof = glmquant.verify(out, support.TRAINED)
    assert f"{proof.errors[0].sqnr:.2f} dB" in text and proof.errors[0].name in text
    assert f"{len(proof.errors):,} weights compared" in text
    assert "no errors" in text and "sglang 0.5.13" in text and "vllm 0.3" in text
    total = sum(error.noise for error in proof.errors), sum(error.signal for error in proof.errors)
    assert total[0] < total[1]
    charts = browser.js("document.querySelectorAll('#sqnr svg').length")
    assert charts == 6  # three projections of routed and of shared experts
    browser.js("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.js("document.querySelectorAll('#sqnr table tbody tr').length") >= 4
    assert "MTP" in browser.js("document.querySelector('#sqnr table').innerText")


def test_names_of_strangers_do_nothing(browser: Browser, tmp_path: Path) -> None:
    """Tensor, shard and folder names that try to be HTML; the page holds them as text."""
    import checkpoints

    evil = "<img src=x onerror=console.error('run')>\"'><script>console.error('run')</script>"
    folder = tmp_path / "<b onclick=1>&amp;"
    tensors = {f"model.layers.0.{evil}.weight": ("U8", [4, 16]), f"model.layers.0.{evil}.weight_scale": ("U8", [4, 1])}
    checkpoints.write_checkpoint(folder, {"<i>-00001-of-00001.safetensors": tensors})
    html = operate.report(folder, html=tmp_path / "report.html").html
    browser.look(400, "light")
    browser.open(html.as_uri())
    assert browser.complaints == []
    assert browser.js("document.querySelectorAll('script, img, b[onclick], i:not([style])').length") == 0
    assert evil in browser.js("document.querySelector('#worst').innerText")
    assert browser.js("document.documentElement.scrollWidth") <= 400
