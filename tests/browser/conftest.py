"""A real TensorBoard over a real run, in a real Chromium that reaches nothing but this machine.

Not part of a plain ``pytest``: ``make test-browser``. Screenshots of 1280 × 800 go to the folder that the environment
variable SCREENSHOTS names, if it does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_runs import made_entry
from playwright.sync_api import Browser, ConsoleMessage, Route, expect, sync_playwright
from tab import MARKUP, OpenTab, Tab

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE_MS = 60_000  # a condition is waited for as long as a slow machine may need
expect.set_options(timeout=PATIENCE_MS)
LOCAL_ONLY = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1"
TINY = ["--model.num_layers=1", "--data.context_length=32", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="session")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a real run, ``demo/version_0``, and one made by hand, on a GPU, that is named to do harm."""
    folder = tmp_path_factory.mktemp("logs")
    command = [sys.executable, "-m", "lm_profiler", "fit", "--config", "configs/demo.yaml", "--log_dir", str(folder)]
    subprocess.run([*command, *TINY], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    made_entry(folder / MARKUP, name=MARKUP)
    return folder


@pytest.fixture(scope="session")
def tensorboard(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a TensorBoard over ``logdir``."""
    said = tmp_path_factory.mktemp("tensorboard") / "stderr"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    with said.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield _address(process, said)
        finally:
            process.terminate()


def _address(process: subprocess.Popen[bytes], said: Path, patience_s: float = 90.0) -> str:
    until = time.monotonic() + patience_s
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", said.read_text()):
            return found[0]
        time.sleep(0.1)
    pytest.fail(f"TensorBoard did not start: {said.read_text()}")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The system's Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.fail("these tests need Chromium: `make test-browser` installs it, or apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", LOCAL_ONLY])
        yield browser
        browser.close()


@pytest.fixture
def open_tab(chromium: Browser, tensorboard: str) -> Iterator[OpenTab]:
    """Opens the tab; when the test is over, nothing of ours has complained, or asked for anything elsewhere."""
    complaints: list[str] = []
    contexts = []

    def open_(theme: str = "light") -> Tab:
        context = chromium.new_context(viewport={"width": 1280, "height": 800}, color_scheme=theme)
        contexts.append(context)
        context.route(lambda url: not url.startswith((tensorboard, "data:", "blob:")), refuse)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", hear)
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        page.goto(f"{tensorboard}/#lm_profiler")
        return Tab(page, tensorboard)

    def refuse(route: Route) -> None:
        complaints.append(f"asked for {route.request.url}")
        route.abort()

    def hear(message: ConsoleMessage) -> None:
        source = message.location["url"]
        if message.type in ("error", "warning") and _is_ours(source) and not _is_refusal(message.text):
            complaints.append(f"{source}: {message.text}")

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def _is_ours(source: str) -> bool:
    """Perfetto talks to its own developers; the rest is TensorBoard's."""
    return "lm_profiler" in source and "/perfetto/" not in source


def _is_refusal(text: str) -> bool:
    """The server's, which the page shows: no error of the page."""
    return text.startswith("Failed to load resource") and "status of 400" in text


@pytest.fixture
def screenshot() -> Callable[[Tab, str], None]:
    """Keeps a picture of the page, if anybody wants it."""
    folder = os.environ.get("SCREENSHOTS")

    def keep(tab: Tab, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            tab.page.screenshot(path=Path(folder) / f"{name}.png")

    return keep
