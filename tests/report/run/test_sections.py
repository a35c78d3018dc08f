"""All that a record knows is on its page: every figure of the registry, of a record in which no field is unknown."""

from __future__ import annotations

from typing import Any

import pytest
from made_runs import made_record
from whole_record import WHOLE

from lm_profiler.record.quantities import GROUPS, LISTS
from lm_profiler.record.run_record import (
    Finding,
    RunRecord,
)
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.run.sections import sections, shown
from lm_profiler.report.run.verdict import next_text, step_lines
from lm_profiler.report.tables.formats import lines


@pytest.fixture(scope="module")
def full() -> RunRecord:
    """Every field set; a run on a device, so that there are two clocks."""
    return RunRecord.model_validate(WHOLE)


@pytest.mark.parametrize("group", GROUPS)
def test_every_figure_of_the_registry_that_a_record_has_is_on_its_page(full: RunRecord, group: str) -> None:
    cells = {cell.text for table in sections(full) for row in table.rows for cell in row}
    for of in GROUPS[group]:
        assert of.get(full) is not None, of.name
        times = of.unit == "s" and of.path.partition(".")[0] in ("time", "host_time", "floors")
        in_ms = times or group in (
            "Terms of the waterfall",
            "Own work and waiting by phase",
            "Use of the CPU",
        )  # the titles say so
        text = of.rounded(of.get(full), *(of.interval(full) or ())) if in_ms else shown(of, full)
        assert text in cells, of.name


DRAWN = ("ranks.by_rank[].own_by_column_s", "ranks.columns")
"""As the heat map of the Ranks view."""


@pytest.mark.parametrize("path", [path for path in LISTS if path not in DRAWN])
def test_so_is_every_row_of_its_lists(full: RunRecord, path: str) -> None:
    tables = [table for table in sections(full) if {of.heading for of in LISTS[path]} <= {*table.titles}]
    expected = {"waterfall.terms": 13, "waterfall.terms[].contributors": 36}  # a row for the step; three of each of 12
    assert [len(table.rows) for table in tables] == [expected.get(path, 3)]


def test_80_columns_hold_the_page_and_cut_no_word_of_it(full: RunRecord, tmp_path: Any) -> None:
    tables = run_page(full.model_copy(update={"command": "short"}), tmp_path)
    shown_lines = [line for table in tables for line in lines(table, 80) if line != table.title]
    assert max(map(len, shown_lines)) <= 80
    assert "…" not in "".join(shown_lines)


def told(record: RunRecord, title: str) -> dict[str, str]:
    [section] = [table for table in sections(record) if table.title == title]
    return {row[0].text: row[1].text for row in section.rows}


@pytest.mark.parametrize(
    "odd_s, told",
    [
        (0.002, ["step: 119.4 ms = 117.4 level + 2.0 odd steps (2% of the mean)"]),
        (-0.002, ["step: 115.4 ms = 117.4 level - 2.0 odd steps (-2% of the mean)"]),
        (-5.551e-17, []),  # rounding: nothing was odd
        (4.9e-5, []),
        (5.1e-5, ["step: 117.5 ms = 117.4 level + 0.1 odd steps (0% of the mean)"]),
    ],
)
def test_the_mean_step_as_a_sum_has_one_sign_before_each_term(odd_s: float, told: list[str]) -> None:
    steadiness = made_record().steadiness
    of = {"level_s": 0.1174, "pattern_s": None, "odd_s": odd_s, "levels": [], "first": 1, "last": 20, "cut": 0}
    record = made_record().model_copy(update={"steadiness": steadiness.model_copy(update=of)})
    assert step_lines(record) == told


@pytest.mark.parametrize(
    "name, saves_s, share, end",
    [
        ("garbage", 0.005, 0.5, "It saves at most 5 ms (50%) of a step."),
        ("validation", 0.030, 0.75, "It saves at most 30 ms per step (75% of the time)."),  # a step takes 10 ms
    ],
)
def test_what_passes_between_steps_is_no_share_of_a_step(name: Any, saves_s: float, share: float, end: str) -> None:
    record = made_record(findings=[Finding(name=name, saves_s=saves_s, share=share)])
    assert next_text(record).endswith(end)
