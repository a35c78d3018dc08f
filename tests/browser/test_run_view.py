"""The Run view shows the figures that the run's own files hold."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry
from playwright.sync_api import Route, expect
from tab import MARKUP, OpenTab

from lm_profiler.record.quantities import PARTS
from lm_profiler.report.colours import PART_COLOURS

RUN = "demo/version_0"


@pytest.fixture
def record(logdir: Path) -> dict[str, Any]:
    return json.loads((logdir / RUN / "run.json").read_text())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_shows_the_verdict_the_phases_and_how_to_repeat_it(
    open_tab: OpenTab, record: dict[str, Any], theme: str, screenshot: Any
) -> None:
    tab = open_tab(theme)
    tab.open_view("Run")
    tab.choose_run(RUN)
    header, *rows = tab.table(tab.card("Time by phase"))
    median = next(i for i, title in enumerate(header) if title.startswith("median"))
    shown = {row[0]: float(row[median].split(" ")[0].replace(",", "")) for row in rows}
    assert {"data", "forward", "backward", "optimizer", "other", "step"} <= shown.keys()
    for part, ms in shown.items():
        exact = record["time"][part.replace("forward + backward", "forward_backward")]["median"] * 1e3
        assert ms == pytest.approx(exact, rel=0.01, abs=0.0006)
    view = tab.inside.locator("main")
    expect(view).to_contain_text(record["verdict"]["evidence"])
    expect(view).to_contain_text(record["verdict"]["advice"])
    expect(view).to_contain_text(record["environment"]["device_name"])
    expect(tab.card("Repeat it").locator("code")).to_have_text(record["command"])
    assert tab.frame.evaluate("document.documentElement.dataset.theme") == theme
    tab.chart(tab.card("Time of each step"))
    screenshot(tab, f"run-{theme}")


def test_steps_are_bars_of_their_phases_with_the_warmup_shaded(
    open_tab: OpenTab, logdir: Path, record: dict[str, Any]
) -> None:
    with (logdir / RUN / "steps.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["stage"] in ("warmup", "measure")]
    tab = open_tab()
    tab.open_view("Run")
    tab.choose_run(RUN)
    chart = tab.chart(tab.card("Time of each step"))
    assert list(chart["data"]) == list(PARTS)
    for part, bars in chart["data"].items():
        assert bars["x"] == [int(row["step"]) for row in rows]
        assert bars["y"] == pytest.approx([float(row[f"{part}_host_s"]) * 1e3 for row in rows])
        assert bars["colour"] == PART_COLOURS[part]
    [shade] = chart["layout"]["shapes"]
    left_out = record["steps"]["warmup"] + record["steadiness"]["cut"]
    assert (shade["x0"], shade["x1"]) == (0.5, left_out + 0.5)


def test_memory_is_shown_by_phase_and_cause(open_tab: OpenTab, record: dict[str, Any]) -> None:
    tab = open_tab()
    tab.open_view("Run")
    tab.choose_run(RUN)
    card = tab.card("Memory by phase and cause")
    chart = tab.chart(card)
    parameters = record["memory"]["causes"]["backward"]["parameters"]
    bars = chart["data"]["parameters"]
    assert dict(zip(bars["x"], bars["y"], strict=True))["backward"] == pytest.approx(parameters / 2**30)
    header, *rows = tab.table(card)
    [backward] = [dict(zip(header, row, strict=True)) for row in rows if row[0] == "backward"]
    assert float(backward["parameters"]) == pytest.approx(parameters / 2**30, abs=6e-4)


def test_the_clock_switches_where_there_are_two_and_names_are_text(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.open_view("Run")
    tab.choose_run(MARKUP)  # made by hand: 5 ms of backward, half of that on the host
    card = tab.card("Time of each step")
    chart = tab.chart(card)
    assert chart["data"]["backward"]["y"] == pytest.approx([5.0] * 25)
    [said] = chart["layout"]["annotations"]  # a first step of a second would leave nothing of the others' 10 ms
    assert said["text"] == "warm-up, up to 1,008.0 ms"
    assert chart["layout"]["yaxis"]["range"] == pytest.approx([0, 12.036])
    card.get_by_role("button", name="Host clock").click()
    assert tab.chart(card)["data"]["backward"]["y"] == pytest.approx([2.5] * 25)
    expect(tab.inside.locator("main")).to_contain_text(MARKUP)
    assert tab.inside.locator("img[src=x]").count() == 0
    assert "injected" not in (tab.page.title(), tab.frame.title())


def test_new_runs_and_damaged_folders_appear_when_tensorboard_reloads(open_tab: OpenTab, logdir: Path) -> None:
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


def test_without_one_folder_the_tab_says_what_it_needs(open_tab: OpenTab) -> None:
    def refuse(route: Route) -> None:
        route.fulfill(status=400, body="Invalid argument: it needs --logdir")

    tab = open_tab()
    for route in ("colours", "runs"):  # as with --logdir_spec
        tab.page.route(f"**/lm_profiler/{route}", refuse)
    tab.page.reload()
    expect(tab.inside.get_by_text("it needs --logdir")).to_have_text("it needs --logdir")
