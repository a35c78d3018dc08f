"""What a user does to the parts of a view: open a bar, choose a clock, sort and filter a table."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import made_entry
from made_waterfall import made_waterfall
from playwright.sync_api import expect
from tab import MARKUP, OpenTab

RUN = "demo/version_0"


@pytest.fixture
def taken_apart(logdir: Path) -> Iterator[str]:
    made_entry(logdir / "why", waterfall=made_waterfall())
    yield "why"
    shutil.rmtree(logdir / "why")


def test_a_bar_opens_by_mouse_and_keyboard(open_tab: OpenTab, taken_apart: str) -> None:
    tab = open_tab()
    view = tab.open_run(taken_apart, "Why")
    slow, beyond = (view.locator(f"[data-term={name}]") for name in ("slow_products", "beyond_bandwidth"))
    expect(slow.locator("table")).not_to_be_visible()
    slow.locator("summary").click()
    expect(slow.locator("table")).to_be_visible()
    view.locator("[data-term=bandwidth] summary").press("Tab")
    expect(beyond.locator("summary")).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(beyond).to_contain_text("<b>Memcpy</b>")
    tab.page.keyboard.press("Enter")
    expect(beyond.locator("table")).not_to_be_visible()


def test_the_clock_switches_where_there_are_two(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.open_run(MARKUP)  # made by hand: 5 ms of backward, half of that on the host
    card = tab.card("Time of each step")
    assert tab.chart(card)["data"]["backward"]["y"] == pytest.approx([5.0] * 25)
    card.get_by_role("button", name="Host clock").click()
    assert tab.chart(card)["data"]["backward"]["y"] == pytest.approx([2.5] * 25)


def test_a_fold_shows_the_meanings_of_figures(open_tab: OpenTab) -> None:
    tab = open_tab()
    view = tab.open_run(RUN)
    expect(view.locator(".fold table")).to_have_count(0)
    view.get_by_role("heading", name="Every figure").click()
    machine = tab.section("Machine")
    expect(machine).to_be_visible()
    expect(machine.locator(".explained").first).to_have_attribute("title", re.compile(r"\w"))


def test_the_table_of_operators_can_be_sorted_and_filtered(open_tab: OpenTab) -> None:
    tab = open_tab()
    tab.open_run(RUN, "Kernels")
    card = tab.card("Largest operators")
    header, *rows = tab.table(card)
    times = [float(row[header.index("ms")].replace(",", "")) for row in rows]
    assert times == sorted(times, reverse=True)
    card.get_by_role("button", name="calls").click()
    counts = [float(row[header.index("calls")]) for row in tab.table(card)[1:]]
    assert counts == sorted(counts, reverse=True)
    card.get_by_label("Filter").fill("matmul FORWARD model.head")
    left = tab.table(card)[1:]
    assert 0 < len(left) < len(rows)
    assert all(word in " ".join(row) for row in left for word in ("matmul", "forward", "model.head"))
