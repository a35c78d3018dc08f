"""A real TensorBoard over a real run, in a real Chromium that reaches nothing but this machine.

Not part of a plain ``pytest``: ``make test-browser``. Screenshots of 1280 × 800 go to the folder that the environment
variable SCREENSHOTS names, if it does. Chromium, TensorBoard and playwright's event loop end with the package.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm
from made_runs import made_entry
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Request, expect, sync_playwright
from tab import MARKUP, Alone, OpenTab, Tab

from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.record.entry import collect
from lm_profiler.report.page.page import write_page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE_MS = 60_000  # a condition is waited for as long as a slow machine may need
expect.set_options(timeout=PATIENCE_MS)
LOCAL_ONLY = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1"
HEIGHT = 800
OURS = "iframe[src*='name=lm_profiler']"
TINY = ["--model.num_layers=1", "--data.context_length=32", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="package")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a real run, ``demo/version_0``, and one made by hand, on a GPU, that is named to do harm."""
    folder = tmp_path_factory.mktemp("logs")
    done = warm.run_python(
        *("-m", "lm_profiler", "fit", "--config", "configs/demo.yaml", *TINY, f"--log_dir={folder}"),
        folder=ROOT,
        rates=True,
    )
    assert done.returncode == 0, done.stderr
    made_entry(folder / MARKUP, name=MARKUP)
    return folder


@pytest.fixture(scope="package")
def tensorboard(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a TensorBoard over ``logdir``."""
    stderr = tmp_path_factory.mktemp("tensorboard") / "stderr"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    with stderr.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield _address(process, stderr)
        finally:
            process.terminate()


def _address(process: subprocess.Popen[bytes], stderr: Path, patience_s: float = 90.0) -> str:
    until = time.monotonic() + patience_s
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", stderr.read_text()):
            return found[0]
        time.sleep(0.1)
    pytest.fail(f"TensorBoard did not start: {stderr.read_text()}")


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The system's Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.fail("these tests need Chromium: `make test-browser` installs it, or apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", LOCAL_ONLY])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def kept(chromium: Browser, tensorboard: str) -> Callable[[str], Page]:
    """A window of a theme, with TensorBoard in it, all of which takes four times as long as our tab."""

    @cache
    def open_(theme: str) -> Page:
        page = _context(chromium, theme).new_page()
        page.goto(f"{tensorboard}/#lm_profiler")
        page.locator(OURS).wait_for()
        return page

    return open_


def _context(chromium: Browser, theme: str) -> BrowserContext:
    context = chromium.new_context(color_scheme=theme)
    context.set_default_timeout(PATIENCE_MS)
    return context


@pytest.fixture
def heard(tensorboard: str) -> Iterator[Callable[[Page], None]]:
    """Listens to a page; when the test is over, nothing of ours has complained in it, or asked anything of others."""
    complaints: list[str] = []
    pages: list[Page] = []

    def listen(page: Page) -> None:
        pages.append(page)
        for event, listener in listeners.items():
            page.on(event, listener)

    def ask(request: Request) -> None:
        here = request.url.startswith((tensorboard, "data:", "blob:", "file:"))
        if not here and request.failure != "csp":  # forbidden by the page itself: nobody was asked
            complaints.append(f"asked for {request.url}")

    def hear(message: ConsoleMessage) -> None:
        source = message.location["url"]
        if message.type in ("error", "warning") and _is_ours(source) and not _is_refusal(message.text):
            complaints.append(f"{source}: {message.text}")

    def fail(error: Error) -> None:
        complaints.append(f"uncaught: {error}")

    listeners: dict[Any, Any] = {"requestfinished": ask, "requestfailed": ask, "console": hear, "pageerror": fail}
    yield listen
    for page in pages:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert complaints == []


@pytest.fixture
def open_tab(kept: Callable[[str], Page], heard: Callable[[Page], None], tensorboard: str) -> Iterator[OpenTab]:
    """Opens the tab, as it is when TensorBoard has just come to it."""
    pages: list[Page] = []

    def open_(theme: str = "light", width: int = 1280) -> Tab:
        page = kept(theme)
        page.set_viewport_size({"width": width, "height": HEIGHT})
        pages.append(page)
        element = page.locator(OURS).element_handle()
        frame, address = element.content_frame(), f"{tensorboard}/{element.get_attribute('src')}"
        frame.goto("about:blank")  # what the test before had asked for ends here
        page.evaluate("localStorage.clear(); history.replaceState(null, '', '#lm_profiler')")
        heard(page)
        frame.goto(address)
        return Tab(page, tensorboard)

    yield open_
    for page in pages:
        page.unroute_all()
        for other in page.context.pages:
            if other != page:
                other.close()


@pytest.fixture
def new_page(chromium: Browser, heard: Callable[[Page], None]) -> Iterator[Callable[..., Page]]:
    """Opens an empty window."""
    contexts: list[BrowserContext] = []

    def open_(theme: str = "light", width: int = 1280) -> Page:
        contexts.append(_context(chromium, theme))
        page = contexts[-1].new_page()
        page.set_viewport_size({"width": width, "height": HEIGHT})
        heard(page)
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture(scope="package")
def kept_alone(chromium: Browser) -> Callable[[str], Page]:
    """An empty window of a theme; in it plotly, of the same file, is compiled once."""
    return cache(lambda theme: _context(chromium, theme).new_page())


@pytest.fixture(scope="package")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page of each test stands in turn."""
    return tmp_path_factory.mktemp("page") / "page.html"


@pytest.fixture
def open_page(
    kept_alone: Callable[[str], Page], heard: Callable[[Page], None], logdir: Path, page_file: Path
) -> OpenTab:
    """Writes the page of all runs below the log folder, as it is now, and opens the file, as if for the first time."""

    def open_(theme: str = "light", width: int = 1280) -> Tab:
        write_page(with_unfinished(collect([logdir])), page_file)
        page = kept_alone(theme)
        page.set_viewport_size({"width": width, "height": HEIGHT})
        if page.url.startswith("file:"):  # another test has left it there
            page.evaluate("localStorage.clear()")
            page.goto("about:blank")
        heard(page)
        page.goto(page_file.as_uri())
        return Alone(page, str(logdir))

    return open_


def _is_ours(source: str) -> bool:
    """Perfetto talks to its own developers; the rest is TensorBoard's."""
    return ("lm_profiler" in source or source.startswith("file:")) and "/perfetto/" not in source


def _is_refusal(text: str) -> bool:
    """The server's, which the page shows: no error of the page."""
    return text.startswith("Failed to load resource") and "status of 400" in text


@pytest.fixture
def screenshot() -> Callable[[Tab, str], None]:
    """Keeps a picture of the window, if anybody wants it; those of the tab have the names of the documentation's."""
    folder = os.environ.get("SCREENSHOTS")

    def keep(tab: Tab, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            prefix = "page-" if isinstance(tab, Alone) else ""
            tab.page.screenshot(path=Path(folder) / f"{prefix}{name}.png")

    return keep
