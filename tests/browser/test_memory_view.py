"""The Memory view: what memory is held for over one step, with the peak and what is alive there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from tab import OpenTab

from lm_profiler.record.memory_timeline import HELD, read_timelines, write_timeline
from lm_profiler.record.quantities import bytes_text
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS

RUN = "demo/version_0"

DRAWN = """({ data, layout }) => ({
    stacks: Object.fromEntries(data.map(({ name, x, y, fillcolor }) => [name, { x: [...x], y: [...y], fillcolor }])),
    texts: layout.annotations.map(({ text }) => text), top: layout.yaxis.range[1] })"""


@pytest.mark.parametrize("open_either, theme", [("tab", "light"), ("page", "dark")], indirect=["open_either"])
def test_the_stack_reaches_the_peak_and_names_phases(
    open_either: OpenTab, logdir: Path, theme: str, screenshot: Any
) -> None:
    (timeline,) = read_timelines(logdir / RUN)
    tab = open_either(theme)
    tab.open_run(RUN, "Memory")
    card = tab.card("Bytes in use over one step")
    chart = card.locator(".js-plotly-plot")
    chart.locator(".scatterlayer .trace").first.wait_for(state="attached")
    drawn = chart.evaluate(DRAWN)
    titles = {HELD[cause]: CAUSE_COLOURS[cause] for cause in timeline.curves()[1]}
    assert {name: stack["fillcolor"] for name, stack in drawn["stacks"].items()} == titles
    totals = [sum(at) for at in zip(*(stack["y"] for stack in drawn["stacks"].values()), strict=True)]
    assert max(totals) * 2**20 == pytest.approx(timeline.peak, rel=1e-5)
    assert max(totals) < drawn["top"]
    assert {phase for phase, _, _ in timeline.shaded()} < {*drawn["texts"]}
    assert f"<b>peak {bytes_text(timeline.peak)}</b>" in drawn["texts"]
    rows = tab.table(tab.card("Peak"))
    assert [row[0] for row in rows[1:]] == [bytes_text(of.bytes) for of in timeline.largest]
    assert tab.overflow_px() <= 0
    screenshot(tab, f"memory-{theme}")


def test_a_plan_and_a_history_stand_below_each_other(
    open_tab: OpenTab, logdir: Path, request: pytest.FixtureRequest, screenshot: Any
) -> None:
    (planned,) = read_timelines(logdir / RUN)
    both = logdir / "both"
    request.addfinalizer(lambda: shutil.rmtree(both))
    shutil.copytree(logdir / RUN, both)
    write_timeline(planned.model_copy(update={"source": "measured"}), both)
    tab = open_tab()
    view = tab.open_run("both", "Memory")
    expect(view.locator(".js-plotly-plot")).to_have_count(2)
    screenshot(tab, "memory-both")


def test_a_run_without_one_says_why(open_tab: OpenTab, logdir: Path, request: pytest.FixtureRequest) -> None:
    bare = logdir / "bare"
    request.addfinalizer(lambda: shutil.rmtree(bare))
    shutil.copytree(logdir / RUN, bare, ignore=shutil.ignore_patterns("memory_timeline*"))
    expect(open_tab().open_run("bare", "Memory")).to_contain_text("No memory timeline")
