"""What surrounds the views, in the tab and in the page that is one file: choosing, reloading, links, light and dark."""

import functools
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from made_improve import made_improve, made_search
from made_ranks import made_ranks
from made_runs import made_entry
from made_waterfall import made_waterfall
from playwright.sync_api import Browser, Route, expect
from tab import MARKUP, OpenTab

from lm_profiler.report.page.listing import page_views, tab_views

RUN = "demo/version_0"


@pytest.fixture
def whole(logdir: Path) -> Iterator[str]:
    """A run that every view has something to show of, until the test is over."""
    shutil.copytree(logdir / RUN, logdir / "whole")
    made_entry(logdir / "whole", waterfall=made_waterfall(), ranks=made_ranks(), notes=[MARKUP])
    made_search(logdir / "search", made_improve())
    yield "whole"
    for name in ("whole", "search"):
        shutil.rmtree(logdir / name)


@pytest.mark.parametrize("opened, theme, width", [("open_tab", "light", 1280), ("open_page", "dark", 420)])
def test_every_view_draws_all_of_its_parts(
    request: pytest.FixtureRequest, whole: str, screenshot: Any, opened: str, theme: str, width: int
) -> None:
    """The tab and the page, a wide and a narrow window, light and dark: of each view once."""
    tab = request.getfixturevalue(opened)(theme, width=width)
    views = tab_views() if opened == "open_tab" else page_views()
    for view in (view for view in views if view["name"] != "trace"):  # test_trace_view.py has it
        section = tab.open_run(whole, view["title"]) if view["of_run"] else tab.open_view(view["title"])
        if section.locator(".chart").count():
            section.locator(".chart .main-svg").first.wait_for(state="attached")
        screenshot(tab, f"{view['name']}-{theme}")
        for fold in section.locator(".fold > summary").all():
            fold.click()
        for chart in section.locator(".chart").all():
            chart.scroll_into_view_if_needed()
            chart.locator(".main-svg").first.wait_for(state="attached")
        expect(section.locator(".error")).to_have_count(0)
        assert tab.overflow_px() <= 0, view["title"]
    assert tab.frame.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.inside.locator("img").count() == 0
    assert "injected" not in (tab.page.title(), tab.frame.title())


def test_the_theme_of_a_chart_follows_tensorboards(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.open_run(RUN)
    chart = tab.card("Time of each step").locator(".js-plotly-plot")
    tab.chart(tab.card("Time of each step"))
    before = chart.evaluate("chart => chart.layout.font.color")
    tab.page.evaluate("document.body.classList.add('dark-mode')")
    try:
        expect(tab.inside.locator("html[data-theme=dark]")).to_have_count(1)
        assert chart.evaluate("chart => chart.layout.font.color") != before
    finally:
        tab.page.evaluate("document.body.classList.remove('dark-mode')")


def test_new_folders_appear_when_tensorboard_reloads(open_tab: OpenTab, logdir: Path) -> None:
    tab = open_tab()
    tab.open_view("Run")
    chooser = tab.inside.get_by_label("Run", exact=True)
    expect(chooser.locator("option")).to_have_count(2)
    try:
        made_entry(logdir / "later")
        (logdir / "damaged").mkdir()
        (logdir / "damaged" / "run.json").write_text("{")
        tab.page.locator("app-header-reload button").click()
        expect(chooser.locator("option")).to_have_count(3)
        tab.inside.get_by_text("1 folder is left out").click()
        expect(tab.inside.get_by_text("damaged/run.json")).to_be_visible()
    finally:
        for name in ("later", "damaged"):
            shutil.rmtree(logdir / name)


def test_refusals_of_the_server_are_shown(open_tab: OpenTab) -> None:
    def refuse(route: Route) -> None:
        route.fulfill(status=400, body="Invalid argument: it needs --logdir")

    tab = open_tab()
    tab.page.route("**/lm_profiler/runs", refuse)
    tab.page.reload()
    expect(tab.inside.get_by_text("it needs --logdir")).to_have_text("it needs --logdir")


def test_texts_that_turn_writing_around_are_spelled_out(open_tab: OpenTab, logdir: Path) -> None:
    name = "a\u202eb\x1b[31m"
    made_entry(logdir / "odd", name=name, command="fit \x07")
    try:
        tab = open_tab()
        view = tab.open_run("odd")
        expect(view).to_contain_text("a\\u{202e}b\\u{1b}[31m: 20 steps of fit")
        view.get_by_text("Repeat it").click()
        expect(view.locator(".command code")).to_have_text("fit \\u{7}")
    finally:
        shutil.rmtree(logdir / "odd")


def test_a_link_to_a_missing_run_is_reported(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.open_view("Run")
    tab.page.goto(f"{tab.address}/#lm_profiler&p.lm_profiler.run=..%2Fsecret%3Cb%3E&p.lm_profiler.view=Kernels")
    expect(tab.inside.locator("section[data-view=Kernels]")).to_contain_text("There is no run ../secret<b> in")
    tab.choose_run(RUN)
    expect(tab.inside.locator("section[data-view=Kernels]")).to_contain_text("Time by phase and kind")


def test_the_button_copies_the_link_to_the_view(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.choose_run(RUN)
    tab.open_view("Kernels")
    tab.inside.get_by_role("button", name="Copy link").click()
    tab.inside.get_by_role("button", name="Copied").wait_for()
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == tab.page.url
    assert set(copied.split("#")[1].split("&")) == {
        "lm_profiler",
        "p.lm_profiler.run=demo%2Fversion_0",
        "p.lm_profiler.view=Kernels",
    }


@pytest.fixture
def elsewhere(tensorboard: str, tmp_path: Path) -> Iterator[str]:
    """The address of a page with the tab in a frame, from another server; so of another origin than TensorBoard."""
    entry = f"{tensorboard}/data/plugin_entry.html?name=lm_profiler"
    (tmp_path / "page.html").write_text(f"<iframe src='{entry}'></iframe>")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/page.html"
        server.shutdown()
        thread.join()


def test_a_page_from_elsewhere_cannot_frame_the_tab(chromium: Browser, elsewhere: str) -> None:
    page = chromium.new_page()
    try:
        page.goto(elsewhere)
        inside = page.frame_locator("iframe")
        expect(inside.get_by_text("shown in TensorBoard only")).to_be_visible()
        assert inside.get_by_role("tab").count() == 0
        assert RUN not in inside.locator("body").inner_text()
    finally:
        page.close()
