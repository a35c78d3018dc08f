"""What a machine that others use distorts is not printed; times are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_environment import made_contention
from made_runs import made_entry, made_record
from made_waterfall import made_waterfall

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.analysis.steps.summaries import share_in_steps
from lm_profiler.record.quantities import GROUPS
from lm_profiler.record.run_record import BetweenSteps, Contention, Floor, RunRecord, json_of
from lm_profiler.report.run.comparison_table import rows
from lm_profiler.report.run.run_page import end_lines, time_table
from lm_profiler.report.run.sections import sections, shown
from lm_profiler.report.run.waterfall_text import why_lines

SHARED = made_contention(0.5, wall_s=10.0, had_s=5.0, waited_s=5.0, others_s=5.0)


def record_with(contention: Contention | None) -> RunRecord:
    floors = {"forward": Floor(seconds=1e-3, bound="compute", times=3.0)}
    return made_record(contention=contention, floors=floors, waterfall=made_waterfall())


def test_a_run_on_a_shared_machine_has_no_rates() -> None:
    shared, alone = record_with(SHARED), record_with(None)
    assert shared.contended
    assert any("floor" in title for title in time_table(alone).titles)
    assert not any("floor" in title for title in time_table(shared).titles)
    assert any("MFU" in line for line in end_lines(alone))
    assert not any("MFU" in line for line in end_lines(shared))
    assert any(character.isdigit() for character in why_lines(alone)[0])
    assert [line.partition(":")[0] for line in why_lines(shared)] == ["why"]
    assert not any(character.isdigit() for line in why_lines(shared) for character in line)


def test_times_on_a_shared_machine_are_upper_bounds() -> None:
    for lines, least in ((end_lines(record_with(SHARED)), True), (end_lines(record_with(None)), False)):
        assert [("at least " in line) for line in lines if "tokens/s" in line] == [least]
    for record, least in ((record_with(SHARED), True), (record_with(None), False)):
        (value,) = [row[1].text for table in sections(record) for row in table.rows if row[0].text == "tokens/s"]
        assert value.startswith("at least ") == least
    assert [row[1].text for row in time_table(record_with(SHARED)).rows] == [
        row[1].text for row in time_table(record_with(None)).rows
    ]


def test_the_lower_bound_includes_what_passed_between_steps() -> None:
    """Known answer: 4 steps, and the same time again between them (not in validation), halve the rate."""
    record = record_with(SHARED)
    steps_s = record.steps["measure"] * (record.time["step"].mean or 0.0)
    between = [BetweenSteps(what="validation", seconds=7.0, times=1)]
    slowed = record.model_copy(update={"between_steps_s": steps_s + 7.0, "between": between})
    assert share_in_steps(slowed) == pytest.approx(0.5)
    (figure,) = [figure for figure in GROUPS["Throughput"] if figure.path == "throughput.tokens_per_s"]
    expected = figure.fit(record.throughput.tokens_per_s / 2)
    assert shown(figure, slowed).startswith(f"at least {expected}")
    alone = slowed.model_copy(update={"contention": None})
    assert not shown(figure, alone).startswith("at least")


def test_a_comparison_marks_the_side_whose_rate_is_a_lower_bound(tmp_path: Path) -> None:
    a, b = made_entry(tmp_path / "a"), made_entry(tmp_path / "b")
    shared_b = replace(b, record=b.record.model_copy(update={"contention": SHARED}))
    comparison = compare([a], [shared_b])
    content = json.loads(json_of(comparison))["tokens"]
    assert (content["a_bound"], content["b_bound"]) == (None, "at least")
    (row,) = [row for row in rows(comparison) if row[0] == "tokens/s"]
    assert [text.startswith("at least ") for text in row[1:3]] == [False, True]
