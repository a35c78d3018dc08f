"""The documentation, opened as files: every page comes without a network, with its pictures and a search that works."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCES = {".md", ".py", ".yaml", ".css", ".png", ".svg", ".json"}


def newest_source_s() -> float:
    """When anything was last changed that pages are made from."""
    folders = ("docs", "lm_profiler", "benchmarks", "examples")
    made = {DOCS / "_build", DOCS / "_generated"}
    files = [path for name in folders for path in (DOCS.parent / name).rglob("*") if path.suffix in SOURCES]
    files = [path for path in [*files, *DOCS.parent.glob("*.md")] if made.isdisjoint(path.parents)]
    return max(path.stat().st_mtime for path in files)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as they are now; what `make docs` has built of them is not built again."""
    built = DOCS / "_build"
    if (built / "index.html").exists() and (built / "index.html").stat().st_mtime > newest_source_s():
        return built
    out = tmp_path_factory.mktemp("docs") / "site"
    if built.is_dir():
        shutil.copytree(built, out)
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "-n", "-b", "html", str(DOCS), str(out)], check=True)
    return out


def test_pages_need_no_network(site: Path, chromium: Browser) -> None:
    context = chromium.new_context(offline=True)
    page, complaints = context.new_page(), []
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("how-to/*.md")))
    for file in pages:
        page.goto(file.as_uri())
        broken = page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
        assert broken == [], file
    assert complaints == []
    context.close()
