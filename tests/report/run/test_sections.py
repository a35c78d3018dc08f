"""All that a record knows is on its page: every figure of the registry, of a record in which no field is unknown."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from made_runs import made_record
from pydantic import BaseModel

from lm_profiler.analysis.steps.statistics import mean_interval, summarise_times
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import GROUPS, LISTS, PARTS, TIMES, TOKENS_PER_S
from lm_profiler.record.run_record import (
    MOMENTS,
    Finding,
    OddStep,
    RunRecord,
    StepCounters,
    Sync,
    Term,
    TermName,
    Throughput,
    TimeSummary,
)
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.run.sections import list_table, phase_table, sections, shown
from lm_profiler.report.run.verdict import next_text, odd_text, step_lines
from lm_profiler.report.tables.formats import lines, render
from lm_profiler.report.tables.rows import raw_runs_table, runs_table


def filled(kind: Any, numbers: Iterator[int]) -> Any:
    """A value of the type ``kind`` with nothing unknown in it, each number another one."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return filled(next(of for of in inner if of is not types.NoneType), numbers)
    if origin is Literal:
        return inner[0]
    if inner and inner[0] is Term:
        return [filled(Term, numbers).model_copy(update={"name": name}) for name in get_args(TermName)]
    if origin in (list, tuple):
        return origin(filled(inner[0], numbers) for _ in range(2))
    if origin is dict:
        keys = (*PARTS, *MOMENTS, "forward_backward", "step", *DTYPES) if isinstance(inner[1], type) else ("key",)
        return {key: filled(inner[1], numbers) for key in keys}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind(**{name: filled(of.annotation, numbers) for name, of in kind.model_fields.items()})
    number = next(numbers)
    return {bool: True, int: number, float: number * 1.01, str: f"word{number}"}.get(kind, f"any{number}")


DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture(scope="module")
def full() -> RunRecord:
    """Every field set; a run on a device, so that there are two clocks."""
    record: RunRecord = filled(RunRecord, itertools.count(10_001))
    names = ("warmup", "measure", "collectives", "actions", "memory", "trace")
    stages = {stage: n for n, stage in enumerate(names, 20_001)}
    return record.model_copy(update={"steps": stages, "steps_planned": stages, "time": in_order(record.time)})


def in_order(times: dict[str, TimeSummary]) -> dict[str, TimeSummary]:
    return {part: times[part] for part in TIMES}


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
    expected = {"waterfall.terms": 13, "waterfall.terms[].contributors": 24}  # a row for the step; two of each of 12
    assert [len(table.rows) for table in tables] == [expected.get(path, 2)]


@pytest.mark.parametrize("kind", ["terminal", "markdown"])
def test_the_page_says_what_is_no_figure_too(full: RunRecord, kind: str, tmp_path: Any) -> None:
    page = render(run_page(full, tmp_path), kind)
    assert full.command in page
    assert all(note in page for note in full.notes)


def test_80_columns_hold_the_page_and_cut_no_word_of_it(full: RunRecord, tmp_path: Any) -> None:
    tables = run_page(full.model_copy(update={"command": "short"}), tmp_path)
    shown_lines = [line for table in tables for line in lines(table, 80) if line != table.title]
    assert max(map(len, shown_lines)) <= 80
    assert "…" not in "".join(shown_lines)


def told(record: RunRecord, title: str) -> dict[str, str]:
    [section] = [table for table in sections(record) if table.title == title]
    return {row[0].text: row[1].text for row in section.rows}


def test_unknown_figures_are_left_out_and_older_records_lack_no_interval() -> None:
    titles = [table.title for table in sections(made_record(status="oom"))]
    assert titles == ["Steps"]
    made = made_record()
    on_cpu = made.model_copy(update={"environment": made.environment.model_copy(update={"device_type": "cpu"})})
    for record, expected in ((made, 1), (on_cpu, 0)):
        assert sum("host" in table.title for table in sections(record)) == expected
    times = next(table for table in sections(made_record()) if table.title.startswith("Time of a step"))
    assert [row[0].text for row in times.rows] == ["forward", "backward", "other", "forward + backward", "step"]
    assert [row[1].text.split()[0] for row in times.rows] == ["3.000", "5.000", "2.000", "8.000", "10.00"]
    # Version 0.2 wrote intervals of medians, under other names.
    record = made_record()
    content = record.model_dump()
    for times in ("time", "host_time"):
        for summary in content[times].values():
            del summary["mean_low"], summary["mean_high"]
    older = RunRecord.model_validate(content)
    assert not TIMES["step"].lacks_interval(older)
    assert not TOKENS_PER_S.lacks_interval(older)
    assert TIMES["step"].lacks_interval(RunRecord.model_validate(content | {"time": _without_ends(content["time"])}))


def test_lines_that_synchronize_are_listed_up_to_a_page_and_ranks_are_told_apart() -> None:
    syncs = [Sync(file="m.py", line=n, function="f", count=n, call="item") for n in range(1, 101)]
    record = made_record(syncs=syncs)
    [table] = [table for table in sections(record) if "call" in table.titles]
    assert len(table.rows) == 64
    assert table.below == ["and 36 more"]
    assert told(record, "Synchronization")["synchronizations"] == "5,050"
    record = made_record(rank_step_s=[0.010, 0.012])
    ranks = told(record, "Ranks")
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


def test_an_interval_that_would_say_nothing_is_replaced_by_its_reason() -> None:
    """Three steps of 1, 1 and 300 ms: the interval reaches farther than the mean itself."""
    times = {part: summarise_times([0.0] * 3) for part in PARTS}
    seconds = [0.001, 0.001, 0.3]
    interval = mean_interval(seconds)
    assert not interval.is_informative
    times |= dict.fromkeys(("forward", "forward_backward", "step"), summarise_times(seconds, interval))
    rate = Throughput(tokens_per_step=64, tokens_per_s=64 / 0.1007)
    record = made_record(time=times, host_time=times, throughput=rate, waterfall=None)
    mean = {row[0].text: row[1].text for row in phase_table(record).rows}
    assert mean["step"] == "100.7 [too few steps]"
    assert shown(TOKENS_PER_S, record) == "636 tokens/s [too few steps]"
    (family,) = [table for table in sections(record) if table.title == "Time of a step (ms)"]
    assert "100.7 [too few steps]" in {cell.text for row in family.rows for cell in row}
    entry = Entry(folder=Path("logs/run"), record=record)
    for kind in ("terminal", "markdown"):
        assert "[too few steps]" in render([runs_table([[entry]])], kind)
    # Nothing of it reaches files for programs.
    assert "too few" not in render([raw_runs_table([[entry]])], "json")


def _without_ends(times: dict[str, Any]) -> dict[str, Any]:
    return {part: summary | {"mean_low": None, "mean_high": None} for part, summary in times.items()}


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
