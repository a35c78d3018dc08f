"""The Trace view: Perfetto's page has loaded the run's trace, without a network."""

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from playwright.sync_api import Frame, expect
from tab import OpenTab, Tab

from lm_profiler.analysis.trace.range_names import phase_range_name
from lm_profiler.record.quantities import PHASES

RUN = "demo/version_0"
TRACE = "rank0.pt.trace.json.gz"

LOADED = "() => window.app?.trace !== undefined && window.app.isLoadingTrace !== true"
COUNT_PHASES = """async () => {
  const answer = await window.app.trace.engine.query(
    "select name, count() as n from slice where name like 'lm_profiler phase: %' group by name");
  const counts = {};
  for (const row = answer.iter({ name: "str", n: 0 }); row.valid(); row.next()) counts[row.name] = row.n;
  return counts;
}"""


def perfetto(tab: Tab) -> Frame:
    """Perfetto's frame, once it has loaded a trace."""
    tab.inside.frame_locator("iframe[title=Perfetto]").locator("body").wait_for()
    [frame] = [frame for frame in tab.page.frames if "/perfetto/" in frame.url]
    frame.wait_for_function(LOADED)
    return frame


def phases_in(path: Path) -> dict[str, int]:
    """How often the trace itself names each phase, on the host."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = (event["name"] for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation")
    return Counter(name for name in names if name.startswith("lm_profiler phase: "))


def test_perfetto_shows_one_of_several_traces(open_tab: OpenTab, logdir: Path, screenshot: Any) -> None:
    """In the dark, which Perfetto takes over."""
    folder = logdir / RUN / "trace"
    packed = gzip.compress(b"another trace")
    try:
        (folder / "rank1.pt.trace.json.gz").write_bytes(packed)
        tab = open_tab("dark")
        tab.choose_run(RUN)
        tab.open_view("Trace")
        frame = perfetto(tab)
        counts = frame.evaluate(COUNT_PHASES)
        assert counts == phases_in(folder / TRACE)
        assert counts.keys() == {phase_range_name(phase) for phase in PHASES}
        expect(frame.get_by_text("main thread")).to_be_visible()  # the groups of tracks are open
        assert tab.frame.evaluate("document.documentElement.dataset.theme") == "dark"
        expect(frame.locator(".pf-theme-provider--dark")).to_have_count(1)
        screenshot(tab, "trace-dark")

        with tab.page.expect_response(lambda response: "rank1.pt.trace.json.gz" in response.url) as response:
            tab.inside.get_by_label("Trace", exact=True).select_option("rank1.pt.trace.json.gz")
        assert response.value.body() == packed  # which Perfetto is given as the first
        with tab.page.expect_download() as download:
            tab.inside.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "demo_version_0_rank1.pt.trace.json.gz"
        assert Path(download.value.path()).read_bytes() == packed
    finally:
        (folder / "rank1.pt.trace.json.gz").unlink()


def test_a_run_without_a_trace_is_reported(open_tab: OpenTab, logdir: Path) -> None:
    shutil.copytree(logdir / RUN, logdir / "untraced", ignore=shutil.ignore_patterns("trace"))
    try:
        tab = open_tab()
        tab.choose_run("untraced")
        expect(tab.open_view("Trace")).to_contain_text("This run has no trace")
    finally:
        shutil.rmtree(logdir / "untraced")


def test_without_perfettos_page_the_view_names_what_to_install(open_tab: OpenTab, logdir: Path) -> None:
    tab = open_tab()
    answer = json.dumps({"traces": [{"file": TRACE, "bytes": 1}], "perfetto": False})
    tab.page.route("**/traces?*", lambda route: route.fulfill(body=answer, content_type="application/json"))
    tab.choose_run(RUN)
    view = tab.open_view("Trace")
    expect(view).to_contain_text('pip install "lm_profiler[perfetto]"')
    expect(view.get_by_role("link", name="Download")).to_be_visible()
