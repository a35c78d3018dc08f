"""The Ranks view: the rank that is waited for stands out, by phase and step by step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_ranks import STEPS, made_ranks
from made_runs import made_entry
from playwright.sync_api import Locator, expect
from tab import OpenTab


@pytest.fixture
def make(logdir: Path) -> Iterator[Callable[..., None]]:
    """Makes the run ``ranks`` below the log folder, which is gone after the test."""

    def make_(**options: Any) -> None:
        made_entry(logdir / "ranks", **options)

    yield make_
    shutil.rmtree(logdir / "ranks", ignore_errors=True)


def coloured(table: Locator) -> list[str]:
    """The texts of the cells that have a colour."""
    cells: list[str] = table.locator("td").evaluate_all(
        "cells => cells.filter(cell => cell.style.background).map(cell => cell.innerText)"
    )
    return cells


@pytest.mark.parametrize(
    "open_either, theme, world", [("tab", "light", 2), ("page", "dark", 64)], indirect=["open_either"]
)
def test_the_rank_that_is_waited_for_stands_out(
    open_either: OpenTab, make: Callable[..., None], theme: str, world: int, screenshot: Any
) -> None:
    make(ranks=made_ranks(world=world, slow=1))
    tab = open_either(theme)
    view = tab.open_run("ranks", "Ranks")
    expect(view).to_contain_text("is 30.0 ms slower in data")
    table = view.locator("table.heat")
    assert table.locator("tbody tr").count() == world
    assert sorted(set(coloured(table))) == ["30.0", "35.0"]  # the others' waiting, its data
    assert len(coloured(table)) == world
    drawn = view.locator(".js-plotly-plot")
    drawn.locator(".heatmaplayer image").first.wait_for(state="attached")
    rows = drawn.evaluate("({ data }) => data[0].z.map(row => row.filter(more => more > 20).length)")
    assert rows == [STEPS if rank == 1 else 0 for rank in range(world)]
    assert tab.overflow_px() <= 0
    screenshot(tab, f"ranks-{world}-{theme}")


def test_a_run_of_one_rank_says_so(open_tab: OpenTab, make: Callable[..., None]) -> None:
    make()
    expect(open_tab().open_run("ranks", "Ranks")).to_contain_text("nobody waits for another")
