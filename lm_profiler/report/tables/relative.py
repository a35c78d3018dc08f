"""Figures relative to a baseline, such as attention=sdpa: each row is divided by the otherwise equal baseline row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lm_profiler.analysis.compare.ratio import (
    RatioInterval,
    repeats_interval,
    single_interval,
)
from lm_profiler.analysis.steps.statistics import Interval
from lm_profiler.record.entry import Entry
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.rows import distinguishing_settings
from lm_profiler.report.tables.run_groups import (
    Estimate,
    RunGroup,
    estimate,
    fact_value,
    facts_named,
    group_by_facts,
    have_options,
    known_values_text,
    runs_for_figures,
)
from lm_profiler.report.tables.table import Heading, Table, TableCell, fact_text
from lm_profiler.report.tables.table_columns import COLUMNS
from lm_profiler.usage_error import UsageError

_FASTER_LEGEND = (
    "x: the baseline's time divided by the time in this column, with a 97 % interval"
)
_TIMES_LEGEND = (
    "x: the figure in this column divided by the baseline's, with a 97 % interval"
)
_LEGEND = (
    "ratios: each figure divided by that of the row with {baseline} and otherwise equal options, with a 97 % "
    "interval"
)


@dataclass(frozen=True)
class Baseline:
    """The fact and its value that mark the rows by which others are divided."""

    column: Column
    value: str

    @property
    def text(self) -> str:
        return f"{self.column.name}={self.value}"


def baseline_named(text: str, groups: Sequence[RunGroup]) -> Baseline:
    """Return the baseline that ``text`` names, such as ``attention=sdpa``.

    Raises:
        UsageError: it names no fact, or no row has that value.
    """
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise UsageError(
            f"relative: expected an option or property and its value, such as attention=sdpa, given {text!r}"
        )
    entries = list(chain.from_iterable(groups))
    [column] = facts_named([name], entries, "relative")
    baseline = Baseline(column, value)
    if not any(_is_baseline(group, baseline) for group in groups):
        known_values = known_values_text(column, entries)
        raise UsageError(
            f"relative: expected a run with {text}, found none; {known_values}"
        )
    return baseline


def with_relative(
    table: Table, groups: Sequence[RunGroup], baseline: Baseline
) -> Table:
    """Return ``table`` with a further column after each figure: its ratio to the baseline's figure.

    ``groups`` are the rows of ``table``.
    """
    baselines = _baseline_of_each(groups, baseline)
    headings: list[Heading] = []
    rows: list[list[TableCell]] = [[] for _ in groups]
    for index, heading in enumerate(table.headings):
        headings.append(heading)
        for row, cells in zip(rows, table.rows, strict=True):
            row.append(cells[index])
        column = COLUMNS.get(heading.name)
        if column is None or column.quantity is None:
            continue
        title = f"{column.quantity.title} / {baseline.value}"
        headings.append(Heading(f"{column.name}_relative", title, figures=True))
        for row, group, baseline_group in zip(rows, groups, baselines, strict=True):
            row.append(_ratio_cell(group, baseline_group, column))
    lines_below = [*table.below, _LEGEND.format(baseline=baseline.text)]
    if None in baselines:
        lines_below.append(
            "a row without a ratio has no such baseline row, or more than one"
        )
    return replace(table, headings=headings, rows=rows, below=lines_below)


def with_speedups(
    table: Table,
    entries: Sequence[Entry],
    row_facts: Sequence[Column],
    column_facts: Sequence[Column],
    value: Column,
    baseline: Baseline,
) -> Table:
    """Return ``table``, a pivot of ``value``, with a column of ratios to the baseline for each other column.

    For times the ratio is the speed-up. The fact of the baseline has to be one of ``column_facts``.
    """
    # The keys are the texts of the facts; a cell's are those of its row and then those of its column.
    row_keys = list(group_by_facts(entries, row_facts))
    columns = group_by_facts(entries, column_facts)
    column_keys = list(columns)
    cells = group_by_facts(entries, [*row_facts, *column_facts])
    titles = [heading.title for heading in table.headings[len(row_facts) :]]
    headings = list(table.headings)
    rows = [list(cells_of_row) for cells_of_row in table.rows]
    baselines = _baselines_across(list(columns.values()), column_facts, baseline)
    for index, baseline_index in enumerate(baselines):
        if baseline_index is None or baseline_index == index:
            continue
        title = f"{titles[index]} vs {titles[baseline_index]}"
        headings.append(Heading(title, title, figures=True))
        for row, row_key in zip(rows, row_keys, strict=True):
            group = cells.get((*row_key, *column_keys[index]), [])
            baseline_group = cells.get((*row_key, *column_keys[baseline_index]), [])
            row.append(_times_cell(group, baseline_group, value))
    legend = _FASTER_LEGEND if value.is_time else _TIMES_LEGEND
    return replace(table, headings=headings, rows=rows, below=[*table.below, legend])


def _baselines_across(
    columns: Sequence[RunGroup], column_facts: Sequence[Column], baseline: Baseline
) -> list[int | None]:
    """Return, for each column of a pivot, the index of the column by which it is divided; None if there is none.

    The two columns have equal facts, except that the divisor has the baseline's value. ``columns`` are the runs of each
    column, and ``column_facts`` the facts by which the pivot divides runs into columns.
    """
    other_facts = [fact for fact in column_facts if fact.name != baseline.column.name]
    baseline_is_among_facts = len(other_facts) < len(column_facts)
    if not baseline_is_among_facts:
        names = ", ".join(fact.name for fact in column_facts)
        raise UsageError(
            f"relative: expected an option or property in the columns of the pivot ({names}), given {baseline.text}"
        )
    # the index of each baseline column, by the texts of its other facts
    baseline_indices = {}
    for index, group in enumerate(columns):
        if _is_baseline(group, baseline):
            baseline_indices[_fact_texts(group, other_facts)] = index
    return [baseline_indices.get(_fact_texts(group, other_facts)) for group in columns]


def _times_cell(group: RunGroup, baseline_group: RunGroup, value: Column) -> TableCell:
    """Return the ratio of the figure of ``group`` to the baseline's; for times, the speed-up."""
    no_ratio = TableCell(text="—")
    if not group or not baseline_group:
        return no_ratio
    numerator, denominator = group, baseline_group
    if value.is_time:
        numerator, denominator = baseline_group, group
    ratio = _ratio_cell(numerator, denominator, value)
    if ratio.value is None:
        return no_ratio
    text = f"{ratio.value:.2f}x"
    if ratio.low is not None and ratio.high is not None:
        text += f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return replace(ratio, text=text)


def _baseline_of_each(
    groups: Sequence[RunGroup], baseline: Baseline
) -> list[RunGroup | None]:
    """Return for each group its baseline: the group with the baseline's value and the same other settings.

    It is None if there is no such group, or if there are several.
    """
    other_facts = []
    for fact in distinguishing_settings(groups):
        # If runs have options, these determine the number of parameters.
        is_derived = fact.name == "parameters" and have_options(groups)
        if fact.name != baseline.column.name and not is_derived:
            other_facts.append(fact)
    # the groups with the baseline's value, by the texts of their other facts
    candidates: dict[tuple[str, ...], list[RunGroup]] = {}
    for group in groups:
        if _is_baseline(group, baseline):
            candidates.setdefault(_fact_texts(group, other_facts), []).append(group)
    baselines: list[RunGroup | None] = []
    for group in groups:
        matches = candidates.get(_fact_texts(group, other_facts), [])
        baselines.append(matches[0] if len(matches) == 1 else None)
    return baselines


def _is_baseline(group: RunGroup, baseline: Baseline) -> bool:
    return fact_text(fact_value(group, baseline.column)) == baseline.value


def _fact_texts(group: RunGroup, facts: Sequence[Column]) -> tuple[str, ...]:
    return tuple(fact_text(fact_value(group, fact)) for fact in facts)


def _ratio_cell(
    group: RunGroup, baseline_group: RunGroup | None, column: Column
) -> TableCell:
    """Return the figure of ``group`` divided by the baseline's, with its interval if that is known."""
    if baseline_group is None:
        return TableCell()
    figure = estimate(group, column)
    baseline_figure = estimate(baseline_group, column)
    if figure.value is None or not baseline_figure.value:
        return TableCell()
    if group is baseline_group:
        return TableCell(1.0, "1")
    interval = _ratio_interval(group, baseline_group, column)
    if interval is None:
        ratio = figure.value / baseline_figure.value
        return TableCell(ratio, f"{ratio:.3g}")
    text = f"{interval.ratio:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
    return TableCell(interval.ratio, text, interval.low, interval.high)


def _ratio_interval(
    group: RunGroup, baseline_group: RunGroup, column: Column
) -> RatioInterval | None:
    """Return the ratio to the baseline with its interval; None if a group has neither repeats nor an interval."""
    if max(len(group), len(baseline_group)) > 1:
        return repeats_interval(_values(baseline_group, column), _values(group, column))
    interval = _interval(estimate(group, column))
    baseline_interval = _interval(estimate(baseline_group, column))
    if interval is None or baseline_interval is None:
        return None
    return single_interval(baseline_interval, interval)


def _values(group: RunGroup, column: Column) -> list[float]:
    values = [column.get(entry) for entry in runs_for_figures(group)]
    return [value for value in values if value is not None]


def _interval(figure: Estimate) -> Interval | None:
    if figure.value is None or figure.low is None or figure.high is None:
        return None
    return Interval(figure.value, figure.low, figure.high)
