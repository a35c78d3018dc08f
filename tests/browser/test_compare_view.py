"""The Compare view: every run in one table, two of them side by side, any figure against any option.

Runs made by hand: forward 3 ms (or what they are given), backward 5 ms, other 2 ms.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry
from playwright.sync_api import Locator, expect
from tab import MARKUP, OpenTab, Tab
from tabled import write_sweep

RUN = "demo/version_0"
FORWARD_S = {("sdpa", 128): 3e-3, ("sdpa", 256): 6e-3, ("math", 128): 4e-3, ("math", 256): None}
"""By attention and context length; None ran out of memory."""


@pytest.fixture(scope="module")
def sweep(logdir: Path) -> Iterator[Path]:
    """A sweep of two repeats, in which one cell ran out of memory and left no run."""
    folder, cells, names = logdir / "sweep", [], []
    for (attention, context), forward_s in FORWARD_S.items():
        for repeat in range(2):
            name, run = f"{attention},{context},r{repeat}", None
            overrides = {"model.attention": attention, "data.context_length": str(context)}
            if forward_s:
                run, forward_s = folder / name / "version_0", forward_s * (1 + repeat / 1000)
                made_entry(run, overrides, name=name, forward_s=forward_s)
            cells.append((overrides, repeat, "ok" if run else "oom", run))
            names.append(name)
    yield write_sweep(folder, cells, names)
    shutil.rmtree(folder)


@pytest.fixture
def compare(open_tab: OpenTab) -> Callable[..., Tab]:
    """Opens the view; with two runs as A and B, compares them."""

    def open_(a: str | None = None, b: str | None = None) -> Tab:
        tab = open_tab()
        tab.open_view("Compare")
        for side, run in (("A", a), ("B", b)):
            if run is not None:
                tab.inside.get_by_label(f"{run} as {side}", exact=True).check()
        return tab

    return open_


def run_of(attention: str, context: int, repeat: int = 0) -> str:
    return f"sweep/{attention},{context},r{repeat}/version_0"


def label(run: str) -> str:
    """Return the table's name of a run: the facts in which it differs."""
    return run.removesuffix("/version_0")


def rows_of(tab: Tab, card: Locator) -> list[dict[str, str]]:
    header, *rows = tab.table(card)
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_every_run_and_cell_is_listed_with_its_figures(compare: Callable[..., Tab], logdir: Path, sweep: Path) -> None:
    tab = compare()
    listed = {row["run"]: row for row in rows_of(tab, tab.card("Runs and cells"))}
    assert len(listed) == 10
    record = json.loads((logdir / RUN / "run.json").read_text())
    assert float(listed[label(RUN)]["step (ms)"].replace(",", "")) == pytest.approx(
        record["time"]["step"]["mean"] * 1e3, abs=6e-4
    )
    resident = record["memory"]["measured"]["resident_peak"]
    assert listed[label(RUN)]["peak resident"] == f"{resident / 2**30:.2f} GiB"
    assert listed[label(RUN)]["peak allocated"] == "unknown"
    assert listed[label(run_of("math", 128))]["peak allocated"] == "2.00 GiB"
    assert float(listed[label(run_of("math", 128))]["step (ms)"]) == pytest.approx(11.0, rel=0.01)
    oom = listed["sweep/math,256,r0"]
    expect(tab.inside.get_by_label("sweep/math,256,r0 as A")).to_be_disabled()
    assert (oom["status"], oom["context"], oom["attention"], oom["step (ms)"]) == ("oom", "256", "math", "")
    assert oom["why"].startswith("it was oom")
    assert MARKUP in listed
    assert tab.inside.locator("img").count() == 0
    assert "injected" not in (tab.page.title(), tab.frame.title())


def test_the_table_can_be_sorted_and_filtered(compare: Callable[..., Tab], sweep: Path) -> None:
    tab = compare()
    card = tab.card("Runs and cells")
    by_step = card.get_by_role("button", name="step (ms)")
    for take_largest in (True, False):
        by_step.click()
        texts = [row["step (ms)"] for row in rows_of(tab, card)]
        assert texts[-2:] == ["", ""]  # either way
        figures = [float(text.replace(",", "")) for text in texts[:-2]]
        assert figures == sorted(figures, reverse=take_largest)
    card.get_by_label("Filter").fill("128 MATH")
    assert {row["run"] for row in rows_of(tab, card)} == {label(run_of("math", 128, repeat)) for repeat in range(2)}
    card.get_by_label("Filter").fill("")
    card.get_by_label("Status").select_option("oom")
    assert {row["run"] for row in rows_of(tab, card)} == {f"sweep/math,256,r{repeat}" for repeat in range(2)}
    expect(card).to_contain_text("2 of 10 runs and cells shown")


def test_two_runs_are_compared_by_part_after_what_differs(compare: Callable[..., Tab], sweep: Path, screenshot: Any):
    tab = compare(run_of("sdpa", 128), run_of("math", 128))
    card = tab.card("B against A")
    expect(card).to_contain_text("with all repeats (2 and 2 runs)")
    card.get_by_label("with all repeats").uncheck()
    expect(card).to_contain_text("verdict: UNCLEAR: step time +10.0%")
    rows = {row[0]: row[1:] for row in tab.table(card)}
    assert rows["step"][:4] == ["10.000", "11.000", "+1.000", "+10.0%"]
    ratio, *interval = (float(text.strip("[],")) for text in rows["step"][4].split())
    assert interval[0] <= ratio <= interval[1]
    assert ratio == pytest.approx(1.1, abs=0.01)
    verdicts = {part: cells[-1] for part, cells in rows.items()}
    assert {verdicts[part] for part in ("step", "backward")} == {"UNCLEAR"}  # single processes
    assert verdicts["forward"] == "SLOWER"
    card.get_by_role("heading", name="What differs").click()
    expect(card).to_contain_text("model.attention: sdpa → math")
    card.evaluate("card => card.scrollIntoView()")
    screenshot(tab, "compare-light")


def test_unlike_runs_are_compared_only_if_one_insists(compare: Callable[..., Tab]) -> None:
    tab = compare(RUN, MARKUP)
    card = tab.card("B against A")
    expect(card).to_contain_text("These runs did different work")
    expect(card).to_contain_text("→ a GPU")
    expect(card).not_to_contain_text("verdict")
    card.get_by_role("heading", name="Compare anyway").click()
    expect(card).to_contain_text("verdict:")
    assert tab.inside.locator("img").count() == 0


def test_figures_by_an_option_have_intervals_and_failures(compare: Callable[..., Tab], sweep: Path, screenshot: Any):
    tab = compare()
    tab.inside.get_by_label("Filter").fill("sweep/ r0")
    card = tab.card("Figure against option")
    card.get_by_label("Figure", exact=True).select_option(label="forward")
    card.get_by_label("against").select_option(label="context")
    card.get_by_label("by", exact=True).select_option(label="attention")
    card.locator(".chart").scroll_into_view_if_needed()
    expect(card.locator(".legendtext").last).to_have_text("no figure")
    chart = tab.chart(card)
    assert chart["data"].keys() == {"attention math", "attention sdpa", "no figure"}
    assert chart["data"]["attention sdpa"]["x"] == ["128", "256"]
    assert chart["data"]["attention sdpa"]["y"] == pytest.approx([3.0, 6.0], rel=0.01)
    assert chart["data"]["attention math"]["x"] == ["128"]
    assert chart["data"]["no figure"] | {"colour": ""} == {"x": ["256"], "y": [0], "colour": ""}
    expect(card.locator(".textpoint")).to_have_text("oom")
    record = json.loads((sweep / "math,128,r0" / "version_0" / "run.json").read_text())["time"]["forward"]
    bars = card.locator(".js-plotly-plot").evaluate("({ data }) => data.find((d) => d.name.endsWith('math')).error_y")
    assert bars["array"] == pytest.approx([(record["mean_high"] - record["mean"]) * 1e3], rel=1e-3)
    assert bars["arrayminus"] == pytest.approx([(record["mean"] - record["mean_low"]) * 1e3], rel=1e-3)
    card.scroll_into_view_if_needed()
    screenshot(tab, "compare-chart-light")


def test_of_many_runs_the_first_hundred_are_shown(compare: Callable[..., Tab], logdir: Path):
    first = made_entry(logdir / "many" / "0").folder
    try:
        for number in range(1, 220):
            (logdir / "many" / str(number)).mkdir()
            for name in ("run.json", "steps.csv"):
                (logdir / "many" / str(number) / name).hardlink_to(first / name)
        tab = compare()
        card = tab.card("Runs and cells")
        expect(card.locator("tbody tr")).to_have_count(100)
        card.get_by_role("button", name="Show more").click()
        expect(card.locator("tbody tr")).to_have_count(200)
        card.get_by_label("Filter").fill("many/219")
        expect(card.locator("tbody tr")).to_have_count(1)
    finally:
        shutil.rmtree(logdir / "many")


LONG = "attention_and_precision_on_two_devices/size=small,precision=bf16-mixed,context_length=512,compile=true,r0"


@pytest.fixture
def long_named(logdir: Path) -> Iterator[str]:
    run = made_entry(logdir / LONG / "version_0", {"model.attention": "math", "data.num_workers": "3"}).folder
    yield run.relative_to(logdir).as_posix()
    shutil.rmtree(logdir / LONG.partition("/")[0])


def test_the_main_columns_come_first_and_stay(compare: Callable[..., Tab], long_named: str, sweep: Path):
    tab = compare()
    card = tab.card("Runs and cells")
    header = tab.table(card)[0]
    first = ["A", "B", "run", "step (ms)", "tokens/s", "peak allocated", "peak resident", "status"]
    assert header[: len(first)] == first
    assert {"size", "context", "attention", "data.num_workers"} >= set(header[len(first) : len(first) + 2])
    heads = card.locator("th")
    for place in range(len(first)):
        expect(heads.nth(place)).to_be_in_viewport(ratio=1.0)
    before = [heads.nth(place).bounding_box() for place in range(len(first))]
    scrolled = card.locator(".long").evaluate("long => { long.scrollLeft = 300; return long.scrollLeft; }")
    assert scrolled > 0
    assert [heads.nth(place).bounding_box() for place in range(len(first))] == before


def test_a_link_restores_the_view(compare: Callable[..., Tab], sweep: Path) -> None:
    a, b = run_of("sdpa", 128), run_of("math", 128)
    tab = compare(a, b)
    expect(tab.card("B against A")).to_contain_text("verdict:")
    tab.page.reload()  # the address is all that is left
    tab.inside.get_by_label(f"{a} as A", exact=True).wait_for()
    expect(tab.inside.get_by_label(f"{a} as A", exact=True)).to_be_checked()
    expect(tab.inside.get_by_label(f"{b} as B", exact=True)).to_be_checked()

    link = tab.inside.get_by_role("link", name=b, exact=True).get_attribute("href")
    other = tab.page.context.new_page()
    other.goto(link)
    opened = Tab(other, tab.address)
    expect(opened.inside.get_by_role("tab", name="Run")).to_have_attribute("aria-selected", "true")
    expect(opened.inside.get_by_label("Run", exact=True)).to_have_value(b)
    expect(opened.inside.locator("main")).to_contain_text("math,128,r0: 20 steps of fit")


def test_the_page_names_the_command_that_compares_runs(open_page: OpenTab, sweep: Path) -> None:
    tab = open_page()
    tab.open_view("Compare")
    card = tab.card("Runs and cells")
    assert {label(RUN), "sweep/math,256,r0"} <= {row["run"] for row in rows_of(tab, card)}
    expect(card).to_contain_text("lm_profiler compare A B")
    expect(card.get_by_role("radio")).to_have_count(0)
