"""All that a record knows is on its page: every figure of the registry, of a record in which no field is unknown."""

from typing import Any

import pytest
from made_runs import made_record
from whole_record import WHOLE

from lm_profiler.record.quantities import GROUPS, LISTS
from lm_profiler.record.run_record import Finding, OddStep, RunRecord, StepCounters, Sync
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.run.sections import list_table, sections, shown
from lm_profiler.report.run.verdict import next_text, odd_text, step_lines
from lm_profiler.report.tables.formats import lines


@pytest.fixture(scope="module")
def full() -> RunRecord:
    """Every field set; a run on a device, so that there are two clocks."""
    return RunRecord.model_validate(WHOLE)


IN_MILLISECONDS = ("Terms of the waterfall", "Own work and waiting by phase", "Use of the CPU")
"""Groups whose titles give the unit."""


@pytest.mark.parametrize("group", GROUPS)
def test_every_figure_of_the_registry_is_on_the_page(full: RunRecord, group: str) -> None:
    cells = {cell.text for table in sections(full) for row in table.rows for cell in row}
    for figure in GROUPS[group]:
        assert figure.get(full) is not None, figure.name
        times = figure.unit == "s" and figure.path.partition(".")[0] in ("time", "host_time", "floors")
        in_ms = times or group in IN_MILLISECONDS
        text = figure.rounded(figure.get(full), *(figure.interval(full) or ())) if in_ms else shown(figure, full)
        assert text in cells, figure.name


DRAWN = ("ranks.by_rank[].own_by_column_s", "ranks.columns")
"""As the heat map of the Ranks view."""


@pytest.mark.parametrize("path", [path for path in LISTS if path not in DRAWN])
def test_every_row_of_a_list_is_on_the_page(full: RunRecord, path: str) -> None:
    tables = [table for table in sections(full) if {column.heading for column in LISTS[path]} <= {*table.titles}]
    expected = {"waterfall.terms": 13, "waterfall.terms[].contributors": 36}  # a row for the step; three of each of 12
    counts = [expected.get(path, 3)]
    if path in ("python_times", "worker_times"):
        counts = [3, 3]  # two lists with equal columns
    assert [len(table.rows) for table in tables] == counts


def test_80_columns_hold_the_page(full: RunRecord, tmp_path: Any) -> None:
    tables = run_page(full.model_copy(update={"command": "short"}), tmp_path)
    shown_lines = [line for table in tables for line in lines(table, 80) if line != table.title]
    assert max(map(len, shown_lines)) <= 80
    assert "…" not in "".join(shown_lines)


def rows_of_section(record: RunRecord, title: str) -> dict[str, str]:
    [section] = [table for table in sections(record) if table.title == title]
    return {row[0].text: row[1].text for row in section.rows}


def test_lines_that_synchronize_are_listed() -> None:
    syncs = [Sync(file="m.py", line=n, function="f", count=n, call="item") for n in range(1, 101)]
    record = made_record(syncs=syncs)
    [table] = [table for table in sections(record) if "call" in table.titles]
    assert len(table.rows) == 64
    assert table.below == ["and 36 more"]
    assert rows_of_section(record, "Synchronization")["synchronizations"] == "5,050"
    record = made_record(rank_step_s=[0.010, 0.012])
    ranks = rows_of_section(record, "Ranks")
    assert (ranks["slowest rank longer by"], ranks["slowest rank's step"]) == ("20.0 %", "12.000 ms")
    [table] = [table for table in sections(record) if "rank" in table.titles]
    assert [[cell.text for cell in row] for row in table.rows] == [["0", "10.000"], ["1", "12.000"]]


def test_the_counters_of_odd_steps_stand_below_what_is_usual() -> None:
    usual = StepCounters(rank=0, gc_s=0.0, minor_faults=10.0)
    slow = StepCounters(step=9, rank=0, gc_s=1.0, gc_generation=2, minor_faults=12.0)
    odd = OddStep(step=9, step_s=1.1, ratio=11.0, part="other", excess_s=1.0, cause="garbage", cause_s=1.0, rank=0)
    record = made_record(odd_steps=[odd], step_counters=[usual, slow])
    table = list_table(record, "step_counters")
    assert [heading.title for heading in table.headings] == [
        "step", "rank", "garbage (ms)", "generation", "minor faults",
    ]  # fmt: skip
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["median", "0", "0.000", "", "10"],
        ["9", "0", "1,000.000", "2", "12"],
    ]
    assert [heading.title for heading in list_table(record, "odd_steps").headings][-3:] == [
        "cause", "explained (ms)", "rank",
    ]  # fmt: skip
    record = made_record(odd_steps=[{"step": 9, "step_s": 1.1, "ratio": 11.0, "part": "other", "excess_s": 1.0}])
    assert len(list_table(record, "odd_steps").headings) == 5
    assert not list_table(record, "step_counters").rows
    assert odd_text(record.odd_steps[0]).endswith("in other")


@pytest.mark.parametrize(
    "odd_s, terms",
    [
        (0.002, ["step: 119.4 ms = 117.4 level + 2.0 odd steps (2% of the mean)"]),
        (-0.002, ["step: 115.4 ms = 117.4 level - 2.0 odd steps (-2% of the mean)"]),
        (-5.551e-17, []),  # rounding: nothing was odd
        (4.9e-5, []),
        (5.1e-5, ["step: 117.5 ms = 117.4 level + 0.1 odd steps (0% of the mean)"]),
    ],
)
def test_the_mean_step_as_a_sum_has_one_sign_before_each_term(odd_s: float, terms: list[str]) -> None:
    steadiness = made_record().steadiness
    of = {"level_s": 0.1174, "pattern_s": None, "odd_s": odd_s, "levels": [], "first": 1, "last": 20, "cut": 0}
    record = made_record().model_copy(update={"steadiness": steadiness.model_copy(update=of)})
    assert step_lines(record) == terms


@pytest.mark.parametrize(
    "name, saves_s, share, end",
    [
        ("garbage", 0.005, 0.5, "It saves at most 5 ms (50%) of a step."),
        (
            "validation",
            0.030,
            0.75,
            "It saves at most 75% of all time (30 ms per step, including the time between steps).",
        ),  # a step takes 10 ms
    ],
)
def test_time_between_steps_is_no_share_of_a_step(name: Any, saves_s: float, share: float, end: str) -> None:
    record = made_record(findings=[Finding(name=name, saves_s=saves_s, share=share)])
    assert next_text(record).endswith(end)
