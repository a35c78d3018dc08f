"""The Improve view: the way down as bars, and all that was tried."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_improve import made_improve, made_search, nothing_helped
from playwright.sync_api import expect


@pytest.fixture
def searches(logdir: Path) -> Iterator[None]:
    """One search that helped and one that did not, below the log folder until the test is over."""
    made_search(logdir / "helped", made_improve())
    made_search(logdir / "nothing", nothing_helped())
    yield
    for name in ("helped", "nothing"):
        shutil.rmtree(logdir / name)


@pytest.mark.usefixtures("searches")
@pytest.mark.parametrize("opened, theme", [("open_tab", "light"), ("open_page", "dark")])
def test_bars_go_down_with_each_change_that_was_kept(
    request: pytest.FixtureRequest, screenshot: Any, opened: str, theme: str
) -> None:
    tab = request.getfixturevalue(opened)(theme)
    view = tab.open_view("Improve")
    helped = view.locator("[data-search$='helped']")
    expect(helped).to_contain_text("step 168.0 → 97.1 ms, 1.73 × [1.69, 1.77], measured anew in 4 pairs")
    track = helped.locator(".way .track").first.bounding_box()["width"]
    bars = [piece.bounding_box()["width"] / track for piece in helped.locator(".way .piece:not(.saved)").all()]
    assert bars == pytest.approx([1.0, 120 / 168, 97.2 / 168], abs=0.01)
    assert helped.locator(".way .whisker").count() == 2
    rows = tab.table(helped)
    assert [row[-1] for row in rows[1:]] == ["FASTER, kept", "NUMERICS", "FASTER, kept", "SAME", "REFUSED"]
    nothing = view.locator("[data-search$='nothing']")
    expect(nothing).to_contain_text("nothing helped")
    assert nothing.locator(".way").count() == 0
    assert tab.overflow_px() <= 0
    screenshot(tab, f"improve-{theme}")
    tab.open_view("Run").wait_for()
    high = [tab.inside.locator(part).bounding_box()["height"] for part in ("header", "nav")]
    assert high[0] < high[1] + 10, "the bar has one line, with the run to choose in it"
