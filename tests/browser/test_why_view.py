"""The Why view: a bar a term that adds up to the measured step, and what each consists of behind it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry, made_record
from made_waterfall import STEP_MS, TERMS_MS, made_waterfall
from playwright.sync_api import Locator, expect
from tab import MARKUP, OpenTab, Tab

from lm_profiler.record.quantities import QUANTITIES, TERMS
from lm_profiler.record.run_record import read_run
from lm_profiler.report.run.waterfall_text import missing

RUN = "demo/version_0"
SHARES = {"data": 0.1, "forward": 0.3, "backward": 0.6}


@pytest.fixture
def make(logdir: Path) -> Iterator[Callable[..., None]]:
    """Makes the run ``why`` below the log folder, which is gone after the test."""

    def make_(**options: Any) -> None:
        made_entry(logdir / "why", **{"waterfall": made_waterfall(), "shares": SHARES, **options})

    yield make_
    shutil.rmtree(logdir / "why", ignore_errors=True)


def pixels(bar: Locator) -> tuple[float, float]:
    """From where to where the pieces of a bar reach."""
    spans = bar.locator(".piece").evaluate_all("all => all.map(each => each.getBoundingClientRect().toJSON())")
    return min(span["left"] for span in spans), max(span["right"] for span in spans)


@pytest.mark.parametrize("open_either, theme", [("tab", "light"), ("page", "dark")], indirect=["open_either"])
def test_bars_lead_from_the_ideal_to_the_measured_step(
    open_either: OpenTab, make: Callable[..., None], theme: str, screenshot: Any
) -> None:
    make()
    tab = open_either(theme)
    view = tab.open_run("why", "Why")
    expect(view).to_contain_text("168.3 ms [167.3, 170.3]")
    expect(view).to_contain_text("62.1 ms (36.9 %) would be ideal. Most is added by: 41.0 ms slow matmuls")
    taking = {name: ms for name, ms in TERMS_MS.items() if ms}
    rows = view.locator("details")
    expect(rows).to_have_count(len(taking))
    left, right = pixels(view.locator(".rung.whole"))
    per_ms = (right - left) / STEP_MS
    start = 0.0
    for at, (name, ms) in enumerate(taking.items()):
        row = rows.nth(at)
        assert row.get_attribute("data-term") == name
        expect(row.locator("summary")).to_contain_text(TERMS[name][0])
        found = pixels(row)
        assert found == pytest.approx((left + start * per_ms, left + (start + ms) * per_ms), abs=1.5)
        start += ms
    screenshot(tab, f"why-made-{theme}")


@pytest.mark.parametrize("open_either, theme", [("tab", "light"), ("page", "dark")], indirect=["open_either"])
def test_a_real_run_is_taken_apart_or_says_why_not(
    open_either: OpenTab, logdir: Path, theme: str, screenshot: Any
) -> None:
    """On a busy machine its own rates may be unknown, and so what they would be compared with."""
    record = read_run(logdir / RUN)
    tab = open_either(theme)
    view = tab.open_run(RUN, "Why")
    if record.waterfall is None:
        expect(view).to_contain_text(f"No waterfall: {missing(record)}")
        return
    texts = view.locator("summary > :nth-child(3)").all_inner_texts()
    step = view.locator(".whole > :nth-child(3)").inner_text()
    digits = len(step.partition(".")[2])
    assert round(sum(float(text.replace(",", "")) for text in texts), digits) == float(step.replace(",", ""))
    assert float(step.replace(",", "")) == pytest.approx(record.time["step"].mean * 1e3, rel=1e-3)
    screenshot(tab, f"why-{theme}")


def test_the_figures_beside_the_bars_add_up(open_tab: OpenTab, make: Callable[..., None]) -> None:
    make()
    view = open_tab().open_run("why", "Why")
    view.locator("details").first.wait_for()
    shown = view.locator("summary > :nth-child(3)").all_inner_texts()
    assert round(sum(map(float, shown)), 1) == STEP_MS
    expect(view.locator(".whole")).to_contain_text("100.0 %")
    expect(view.locator("[data-term=gaps] summary")).to_have_text("gaps+9.05.3 %9.0")


def test_a_bar_opens_what_it_consists_of_by_the_keyboard_too(
    open_tab: OpenTab, make: Callable[..., None], screenshot: Any
) -> None:
    make()
    tab = open_tab()
    view = tab.open_run("why", "Why")
    slow, beyond = (view.locator(f"[data-term={name}]") for name in ("slow_products", "beyond_bandwidth"))
    expect(slow.locator("table")).not_to_be_visible()
    slow.locator("summary").click()
    assert tab.table(slow) == [
        ["module", "what", "times", "time (ms)", "detail"],
        ["model.blocks.*.attn", "aten::mm", "96", "21.0", "13 ms in 48 matmul kernels; m 512, n 768, k 64"],
        ["model.blocks.*.ff", "aten::mm", "72", "11.5", ""],
        ["model.head", "aten::mm", "2", "8.5", "tiles of 128 x 128 waste 31 %"],
    ]
    expect(slow).to_contain_text("Could save at most 41.0 ms.")
    slow.locator("summary").press("Tab")
    view.locator("[data-term=bandwidth] summary").press("Tab")
    expect(beyond.locator("summary")).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(beyond).to_contain_text("<b>Memcpy</b>")
    expect(view.locator("[data-term=input]")).to_contain_text("What it consists of is not known.", use_inner_text=False)
    screenshot(tab, "why-made-open")
    tab.page.keyboard.press("Enter")
    expect(beyond.locator("table")).not_to_be_visible()


def test_what_it_is_measured_against_is_there_with_its_meaning(open_tab: OpenTab, make: Callable[..., None]) -> None:
    make(waterfall=made_waterfall(notes=[MARKUP]))
    tab = open_tab()
    tab.open_run("why", "Why")
    card = tab.card("What it is measured against")
    expect(card).to_contain_text("2,039.0 GB/s")
    peak = card.get_by_text("peak", exact=True)
    expect(peak).to_have_attribute("title", QUANTITIES["waterfall_peak_flops_per_s"].meaning)
    expect(tab.card("From the ideal step")).to_contain_text(f"Note: {MARKUP}")
    assert tab.inside.locator("img").count() == 0


@pytest.mark.parametrize("open_either, width", [("tab", 1280), ("page", 420)], indirect=["open_either"])
def test_nothing_runs_off_the_page(
    open_either: OpenTab, make: Callable[..., None], width: int, screenshot: Any
) -> None:
    make()
    tab = open_either(width=width)
    view = tab.open_run("why", "Why")
    view.locator("[data-term=slow_products] summary").click()
    assert tab.overflow_px() <= 0
    for bar in view.locator(".track").all():
        box, card = bar.bounding_box(), view.locator(".waterfall").bounding_box()
        assert box is not None
        assert card is not None
        assert card["x"] <= box["x"]
        assert box["x"] + box["width"] <= card["x"] + card["width"]
    screenshot(tab, f"why-made-{width}")


def test_a_term_of_a_later_version_and_a_negative_rest_are_drawn(open_tab: OpenTab, make: Callable[..., None]) -> None:
    make(waterfall=made_waterfall({"ideal": 8.0, "power_cap": 4.0, "unexplained": -2.0}, 10.0), shares={})
    view = open_tab().open_run("why", "Why")
    expect(view.locator("[data-term=power_cap] summary")).to_contain_text("power cap+4.00")
    expect(view.locator("[data-term=unexplained] summary")).to_contain_text("-2.00")
    cap, rest = (pixels(view.locator(f"[data-term={name}]")) for name in ("power_cap", "unexplained"))
    assert rest[1] == pytest.approx(cap[1], abs=1.5)
    assert rest[0] == pytest.approx(sum(cap) / 2, abs=1.5)
    expect(view.locator(".whole .hatched")).to_have_count(1)


def test_a_run_without_one_says_why_and_what_to_do(open_tab: OpenTab, make: Callable[..., None]) -> None:
    make(waterfall=None)
    view = open_tab().open_run("why", "Why")
    expect(view).to_contain_text("no step was traced. Run it again with --trace.steps=2.")
    expect(view.locator("details")).to_have_count(0)


def test_a_peak_that_nobody_knows_is_asked_for(open_tab: OpenTab, make: Callable[..., None]) -> None:
    use = made_record().utilisation
    assert use is not None
    unknown = use.model_copy(update={"peak_flops_per_s": None, "ceiling_flops_per_s": None})
    make(waterfall=None, utilisation=unknown, steps={"measure": 20, "trace": 2})
    tab: Tab = open_tab()
    expect(tab.open_run("why", "Why")).to_contain_text("Run it again with --peak_tflops")
