"""The Run view shows the figures that the run's own files hold: in the tab, and in the page that is one file."""

from __future__ import annotations

import csv
import functools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry, made_record
from playwright.sync_api import Browser, Route, expect
from tab import MARKUP, OpenTab, Tab
from whole_record import WHOLE

from lm_profiler.record.quantities import GROUPS, PARTS, QUANTITIES
from lm_profiler.record.run_record import Contention, OddStep, RunRecord, Sync
from lm_profiler.record.steps import write_steps
from lm_profiler.report.pictures.drawing import PART_COLOURS
from lm_profiler.report.run.sections import sections

RUN = "demo/version_0"


@pytest.fixture
def record(logdir: Path) -> dict[str, Any]:
    return json.loads((logdir / RUN / "run.json").read_text())


@pytest.mark.parametrize("open_either, theme", [("tab", "light"), ("page", "dark")], indirect=["open_either"])
def test_it_shows_the_verdict_the_phases_and_how_to_repeat_it(
    open_either: OpenTab, record: dict[str, Any], theme: str, screenshot: Any
) -> None:
    tab = open_either(theme)
    tab.open_run(RUN)
    header, *rows = tab.table(tab.card("Time by phase"))
    mean = next(i for i, title in enumerate(header) if title.startswith("mean"))
    shown = {row[0]: float(row[mean].split(" ")[0].replace(",", "")) for row in rows}
    assert {"data", "forward", "backward", "optimizer", "other", "step"} <= shown.keys()
    for part, ms in shown.items():
        exact = record["time"][part.replace("forward + backward", "forward_backward")]["mean"] * 1e3
        assert ms == pytest.approx(exact, rel=0.01, abs=0.0006)
    view = tab.inside.locator("main")
    expect(view).to_contain_text(record["verdict"]["evidence"])
    expect(view).to_contain_text(record["verdict"]["advice"])
    expect(tab.section("Machine")).to_contain_text(record["environment"]["device_name"])
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
    tab.open_run(RUN)
    chart = tab.chart(tab.card("Time of each step"))
    chart["data"].pop("odd", None)
    assert list(chart["data"]) == list(PARTS)
    for part, bars in chart["data"].items():
        assert bars["x"] == [int(row["step"]) for row in rows]
        assert bars["y"] == pytest.approx([float(row[f"{part}_host_s"]) * 1e3 for row in rows], rel=1e-5, abs=2e-6)
        assert bars["colour"] == PART_COLOURS[part]
    [shade] = chart["layout"]["shapes"]
    left_out = record["steps"]["warmup"] + record["steadiness"]["cut"]
    assert (shade["x0"], shade["x1"]) == (0.5, left_out + 0.5)


def test_other_is_shown_by_its_owner(open_tab: OpenTab, logdir: Path, record: dict[str, Any]) -> None:
    names = ["LearningRateMonitor.on_train_batch_start", "<b>Mine</b>.on_after_backward", "Lightning's loop"]
    owners = [
        ("LearningRateMonitor", "on_train_batch_start"),
        ("<b>Mine</b>", "on_after_backward"),
        ("Lightning", "loop"),
    ]
    actions = [
        {"owner": owner, "action": action, "seconds": 4e-3 / 2**n, "calls": 1.0, "in_steps": 3}
        for n, (owner, action) in enumerate(owners)
    ]
    record["other_by_owner"] = {"steps": 3, "seconds": 7e-3, "actions": actions}
    (logdir / RUN / "run.json").write_text(json.dumps(record))
    tab = open_tab()
    tab.open_run(RUN)
    card = tab.card("Whose other is")
    expect(card).to_contain_text("Of a mean step of 3 that were timed action by action, 7.000 ms in all.")
    bars = tab.chart(card)["data"]["other"]
    assert bars["x"] == pytest.approx([4.0, 2.0, 1.0])
    assert bars["colour"] == PART_COLOURS["other"]
    for name in names:
        expect(card.locator(".ytick", has_text=name)).to_have_count(1)
    header, *rows = tab.table(tab.section("Other, by its owner").locator("table").nth(1))
    assert header == ["owner", "action", "time (ms)", "calls", "in steps"]
    assert rows[0] == ["LearningRateMonitor", "on_train_batch_start", "4.000", "1.000", "3"]


def test_memory_is_shown_by_phase_and_cause(open_tab: OpenTab, record: dict[str, Any]) -> None:
    tab = open_tab()
    tab.open_run(RUN)
    chart = tab.chart(tab.card("Memory by phase and cause"))
    parameters = record["memory"]["causes"]["backward"]["parameters"]
    bars = chart["data"]["parameters"]
    assert dict(zip(bars["x"], bars["y"], strict=True))["backward"] == pytest.approx(parameters / 2**20)
    assert "MiB" in chart["layout"]["yaxis"]["title"]["text"]
    header, *rows = tab.table(tab.section("Memory by cause"))
    [backward] = [dict(zip(header, row, strict=True)) for row in rows if row[0] == "backward"]
    assert backward["parameters"] == f"{parameters / 2**20:.1f} MiB"
    levels = record["memory"]["held"]
    held = dict(tab.table(tab.section("Memory")))
    assert float(held["saved for backward"].removesuffix(" MiB")) == pytest.approx(
        (levels["forward"] - levels["start"]) / 2**20, rel=0.01
    )


@pytest.mark.parametrize("open_either, width", [("tab", 1280), ("page", 420)], indirect=["open_either"])
def test_every_figure_that_a_record_can_have_is_there_with_its_meaning(
    open_either: OpenTab, logdir: Path, width: int, screenshot: Any
) -> None:
    """Of a record in which nothing is unknown; as the page of text has it."""
    record = RunRecord.model_validate(WHOLE)
    made_entry(logdir / "whole")
    record.write(logdir / "whole" / "run.json")
    try:
        tab = open_either(width=width)
        view = tab.open_run("whole")
        tab.section("Machine").wait_for()
        cells = set(view.locator("td").all_inner_texts())
        lacking = {cell.text for table in sections(record) for row in table.rows for cell in row[:2]} - cells
        assert {text for text in lacking if text.strip()} == set()
        energy = tab.section("GPU").get_by_text("energy per token")
        expect(energy).to_have_attribute("title", QUANTITIES["energy_per_token_j"].meaning)
        for title in GROUPS.keys() - {"Time of a step", "Terms of the waterfall"}:
            if QUANTITIES[GROUPS[title][0].name].of is None:
                expect(tab.section(title).or_(tab.section(f"{title} (ms)"))).to_have_count(1)
        assert tab.overflow_px() <= 0
        view.locator("section.facts").nth(5).scroll_into_view_if_needed()
        screenshot(tab, f"figures-{width}")
    finally:
        shutil.rmtree(logdir / "whole")


def test_the_clock_switches_where_there_are_two_and_names_are_text(open_either: OpenTab) -> None:
    tab = open_either()
    tab.open_run(MARKUP)  # made by hand: 5 ms of backward, half of that on the host
    card = tab.card("Time of each step")
    chart = tab.chart(card)
    assert chart["data"]["backward"]["y"] == pytest.approx([5.0] * 25)
    [said] = chart["layout"]["annotations"]  # a first step of a second would leave nothing of the others' 10 ms
    assert "1,008.0 ms" in said["text"]
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


def test_a_run_that_died_shows_its_error_and_no_empty_chart(open_either: OpenTab, logdir: Path) -> None:
    made_entry(logdir / "died", status="oom", steps={"warmup": 0})
    write_steps(logdir / "died" / "steps.csv", [])
    try:
        tab = open_either()
        view = tab.open_run("died")
        expect(view.locator(".error")).to_have_text("oom in setup: OutOfMemoryError: no memory left")
        expect(view.locator(".chart")).to_have_count(0)
        for name in ("Kernels", "Trace") if type(tab) is Tab else ("Kernels",):
            expect(tab.open_view(name)).to_contain_text("ended before its trace stage")
    finally:
        shutil.rmtree(logdir / "died")


def test_a_damaged_part_of_a_record_hides_no_other(open_either: OpenTab, logdir: Path) -> None:
    """A time that is none, controls and marks that turn writing around: everything else is there."""
    name = "a\u202eb\x1b[31m"
    made_entry(logdir / "odd", started="yesterday", name=name, notes=["turned \u202e round"], command="fit \x07")
    try:
        tab = open_either()
        view = tab.open_run("odd")
        expect(view).to_contain_text("started yesterday")
        expect(view).to_contain_text("a\\u{202e}b\\u{1b}[31m: 20 steps of fit")
        expect(view).to_contain_text("note: turned \\u{202e} round")
        expect(tab.card("Repeat it")).to_contain_text("fit \\u{7}")
        tab.chart(tab.card("Time of each step"))
        expect(tab.section("Machine")).to_contain_text("a GPU")
        tab.open_view("Compare")
        expect(tab.inside.get_by_role("link", name=tab.name("odd"), exact=True)).to_be_visible()
    finally:
        shutil.rmtree(logdir / "odd")


def test_what_the_record_knows_besides_is_shown_by_what_it_is_about(open_tab: OpenTab, logdir: Path) -> None:
    syncs = [Sync(file="train.py", line=7, function=MARKUP, count=3, call="aten::item")]
    made_entry(logdir / "ranks", rank_step_s=[0.010, 0.012], between_steps_s=0.031, syncs=syncs)
    try:
        tab = open_tab()
        tab.open_run("ranks")
        ranks = tab.section("Ranks")
        expect(ranks).to_contain_text("20.0 %")
        expect(ranks).to_contain_text("12.000")
        expect(tab.section("Synchronization").locator("tr").last).to_have_text(f"train.py7{MARKUP}3aten::item")
        expect(tab.section("Steps")).to_contain_text("31.000 ms")
        assert tab.inside.locator("img").count() == 0
    finally:
        shutil.rmtree(logdir / "ranks")


def test_a_run_that_has_not_ended_is_called_so_beside_its_figures(open_either: OpenTab, logdir: Path) -> None:
    entry = made_entry(logdir / "running")
    untold = ("time", "host_time", "memory", "throughput", "steadiness", "utilisation", "verdict", "steps")
    record = entry.record.model_dump(exclude=set(untold)) | {"status": "unfinished"}
    RunRecord.model_validate(record).write(entry.folder / "run.json")
    try:
        tab = open_either()
        view = tab.open_run("running")
        expect(view.locator(".status").first).to_have_text("unfinished")
        expect(view).to_contain_text("still running, or its process was killed")
        rows = {row[0]: row[1:] for row in tab.table(tab.card("Time by phase"))}
        assert rows["backward"][0].startswith("5.000")
        assert len(tab.chart(tab.card("Time of each step"))["data"]["backward"]["x"]) == 25
    finally:
        shutil.rmtree(logdir / "running")


def test_a_link_to_what_is_no_run_says_so(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.open_view("Run")
    tab.page.goto(f"{tab.address}/#lm_profiler&p.lm_profiler.run=..%2Fsecret%3Cb%3E&p.lm_profiler.view=Kernels")
    expect(tab.inside.locator("section[data-view=Kernels]")).to_contain_text("There is no run ../secret<b> in")
    tab.choose_run(RUN)
    expect(tab.inside.locator("section[data-view=Kernels]")).to_contain_text("Time by phase and kind")


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


def test_what_takes_a_runs_figures_back_stands_beside_its_name(open_tab: OpenTab, logdir: Path) -> None:
    """Noisy steps, a step far from the others, and a machine that something else used."""
    made = made_record()
    contention = Contention(
        wall_s=2.0, cpus=2, had_s=1.5, waited_s=1.0, others_s=1.25, stolen_s=0.0, throttled_s=None, pressure=0.4,
        involuntary_switches=9, not_had=0.41,
    )  # fmt: skip
    steadiness = made.steadiness.model_copy(update={"word": "noisy", "known_to": 0.25})
    odd = OddStep(
        step=9, step_s=1.0, ratio=100.0, part="other", excess_s=0.99, rank=0, cause="waiting for a CPU", cause_s=0.9
    )
    made_entry(logdir / "noisy", steadiness=steadiness, contention=contention, odd_steps=[odd])
    try:
        tab = open_tab()
        view = tab.open_run("noisy")
        expect(view.locator("h2 .status")).to_have_text(["ok", "noisy", "shared"])
        expect(view.locator(".verdict")).to_contain_text("noisy: the level is only known to within ±25%")
        expect(view.locator(".verdict")).to_contain_text("other processes took 41%")
        expect(view.locator(".note")).to_contain_text("step 9: 1.0 s, 100 x what others take")
        expect(view.locator(".note")).to_contain_text("+990 ms in other: waiting for a CPU, 900 ms")
        marks = tab.chart(tab.card("Time of each step"))["data"]["odd"]
        assert marks["x"] == [9]
        expect(tab.section("What else used the machine")).to_contain_text("41.0 %")
    finally:
        shutil.rmtree(logdir / "noisy")


def test_the_button_copies_the_link_to_the_run_and_the_view(open_tab: OpenTab) -> None:
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
