"""All that a record knows is on its page: every figure of the registry, of a record in which no field is unknown."""

from typing import Any

import pytest
from made_runs import made_record
from made_waterfall import made_waterfall
from whole_record import WHOLE

from lm_profiler.record.quantities import GROUPS, LISTS
from lm_profiler.record.run_record import (
    Contributor,
    Finding,
    OddStep,
    RunRecord,
    StepCounters,
    Sync,
    Term,
    Verdict,
    Waterfall,
)
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.run.sections import list_table, sections, shown
from lm_profiler.report.run.verdict import next_text, odd_text, step_lines
from lm_profiler.report.tables.formats import lines
from lm_profiler.report.tables.table import Table


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
        value = figure.get(full)
        assert value is not None, figure.name
        is_time_of_part = figure.unit == "s" and figure.path.partition(".")[0] in ("time", "host_time", "floors")
        if is_time_of_part or group in IN_MILLISECONDS:
            text = figure.rounded(value, *(figure.interval(full) or ()))
        else:
            text = shown(figure, full)
        assert text in cells, figure.name


DRAWN = ("ranks.by_rank[].own_by_column_s", "ranks.columns")
"""As the heat map of the Ranks view."""


@pytest.mark.parametrize("path", [path for path in LISTS if path not in DRAWN])
def test_every_row_of_a_list_is_on_the_page(full: RunRecord, path: str) -> None:
    """Each list of the record has three rows; a waterfall has twelve terms, and a row for the step."""
    titles = {column.heading for column in LISTS[path]}
    tables = [table for table in sections(full) if titles <= {*table.titles}]
    lists_with_equal_columns = [name for name in LISTS if {column.heading for column in LISTS[name]} == titles]
    assert len(tables) == len(lists_with_equal_columns)
    rows = {"waterfall.terms": 12 + 1, "waterfall.terms[].contributors": 12 * 3}
    for table in tables:
        assert len(table.rows) == rows.get(path, 3)


def test_80_columns_hold_the_page(full: RunRecord, tmp_path: Any) -> None:
    tables = run_page(full.model_copy(update={"command": "short"}), tmp_path)
    shown_lines = [line for table in tables for line in lines(table, 80) if line != table.title]
    assert max(map(len, shown_lines)) <= 80
    assert "…" not in "".join(shown_lines)


def rows_of_section(record: RunRecord, title: str) -> dict[str, str]:
    [section] = [table for table in sections(record) if table.title == title]
    return {row[0].text: row[1].text for row in section.rows}


def test_lines_that_synchronize_are_listed() -> None:
    """A hundred lines, which call 1, 2, … 100 times; 64 of them are shown."""
    syncs = [Sync(file="m.py", line=n, function="f", count=n, call="item") for n in range(1, 101)]
    record = made_record(syncs=syncs)
    [table] = [table for table in sections(record) if "call" in table.titles]
    assert len(table.rows) == 64
    assert table.below == ["and 36 more"]
    assert rows_of_section(record, "Synchronization")["synchronizations"] == "5,050"


def test_ranks_are_listed_with_their_steps() -> None:
    record = made_record(rank_step_s=[0.010, 0.012])
    ranks = rows_of_section(record, "Ranks")
    assert ranks["slowest rank longer by"] == "20.0 %"
    assert ranks["slowest rank's step"] == "12.000 ms"
    [table] = [table for table in sections(record) if "rank" in table.titles]
    assert [[cell.text for cell in row] for row in table.rows] == [["0", "10.000"], ["1", "12.000"]]


def titles_of(table: Table) -> list[str]:
    return [heading.title for heading in table.headings]


def test_the_counters_of_odd_steps_stand_below_what_is_usual() -> None:
    usual = StepCounters(rank=0, gc_s=0.0, minor_faults=10.0)
    slow = StepCounters(step=9, rank=0, gc_s=1.0, gc_generation=2, minor_faults=12.0)
    table = list_table(made_record(step_counters=[usual, slow]), "step_counters")
    assert titles_of(table) == ["step", "rank", "garbage (ms)", "generation", "minor faults"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["median", "0", "0.000", "", "10"],
        ["9", "0", "1,000.000", "2", "12"],
    ]


def test_causes_of_odd_steps_have_columns_if_any_is_known() -> None:
    odd = OddStep(step=9, step_s=1.1, ratio=11.0, part="other", excess_s=1.0, cause="garbage", cause_s=1.0, rank=0)
    table = list_table(made_record(odd_steps=[odd]), "odd_steps")
    assert titles_of(table)[-3:] == ["cause", "explained (ms)", "rank"]
    without_cause = OddStep(step=9, step_s=1.1, ratio=11.0, part="other", excess_s=1.0)
    record = made_record(odd_steps=[without_cause])
    assert len(list_table(record, "odd_steps").headings) == 5
    assert not list_table(record, "step_counters").rows
    assert odd_text(without_cause).endswith("in other")


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
    terms_s = {"level_s": 0.1174, "pattern_s": None, "odd_s": odd_s, "levels": [], "first": 1, "last": 20, "cut": 0}
    record = made_record().model_copy(update={"steadiness": steadiness.model_copy(update=terms_s)})
    assert step_lines(record) == terms


@pytest.mark.parametrize(
    "known, end",
    [
        ({"is_watched": True}, "; `lm_profiler watch` shows them"),
        ({"is_watched": False}, "; --watch=true reports them"),
        ({"loop": "own"}, ""),
    ],
)
def test_a_short_window_names_what_sees_rarer_events_in_this_run(known: dict[str, object], end: str) -> None:
    window = {"took_s": 1.5, "first": 1, "last": 20, "level_s": 0.1}
    steadiness = made_record().steadiness.model_copy(update=window)
    record = made_record().model_copy(update={"steadiness": steadiness, **known})
    assert step_lines(record)[-1] == "not seen: events rarer than once in 20 steps or 1.5 s" + end


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


LOW_USE = "No known cause was found, although the run uses only 11% of what the machine can reach."
NOTHING = "Nothing stands out: no known single change would save 5% of the step."


def waterfall_of_updates(step_s: float, updates_s: float) -> Waterfall:
    """A step whose optimizer spends ``updates_s`` outside of modules."""
    updates = Contributor(module=None, what="optimizer: aten::_foreach_add_", count=1.0, seconds=updates_s, detail=None)
    term = Term(name="bandwidth", seconds=updates_s, contributors=[updates])
    return made_waterfall().model_copy(update={"step_s": step_s, "terms": [term]})


@pytest.mark.parametrize(
    "utilisation, waterfall, text",
    [
        # 21 ms of products and 19.2 ms of softmax, of 168.3 ms
        (
            0.11,
            made_waterfall(),
            f"{LOW_USE} Look first at model.blocks.*.attn: it takes 24% of the step, mostly in mm.",
        ),
        # half of the step outside of modules
        (
            0.11,
            waterfall_of_updates(step_s=0.1, updates_s=0.05),
            f"{LOW_USE} Look first at foreach_add_ in optimizer: it takes 50% of the step.",
        ),
        (0.11, made_waterfall(step_ms=1000.0), LOW_USE),  # no module takes a tenth
        (0.11, None, LOW_USE),
        (0.6, made_waterfall(), NOTHING),
        (None, made_waterfall(), NOTHING),
    ],
)
def test_a_run_without_findings_says_how_much_of_the_machine_it_uses(
    utilisation: float | None, waterfall: Waterfall | None, text: str
) -> None:
    facts = {} if utilisation is None else {"utilisation": utilisation}
    verdict = Verdict(bound_by="compute", share=0.98, because="compute", facts=facts)
    assert next_text(made_record(findings=[], verdict=verdict, waterfall=waterfall)) == text
