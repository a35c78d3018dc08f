"""The table of runs: a row for each run, cell with its repeats, or group; a column for each fact or figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import AT_LEAST, TOO_FEW_STEPS
from lm_profiler.record.machine import PEAK
from lm_profiler.record.quantities import MEMORY, Place
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.run_groups import (
    STATUS_WORDS,
    RunGroup,
    distinct_values,
    estimate,
    fact_phrase,
    fact_value,
    follows_from_size,
    groups_differ,
    mixed_facts,
    overridden_options,
    runs_for_figures,
    single_run_groups,
    status_text,
)
from lm_profiler.report.tables.table import (
    STATUS_STYLES,
    Heading,
    Table,
    TableCell,
    fact_text,
    is_number,
)
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    FACTS,
    column,
    figures,
    peak_memory,
)

MERGE_NOTE = "n > 1: the median of n runs' means [the lowest, the highest]; n = 1: the run's mean [95 % interval]"
_USEFUL_TOKENS_PER_S = "useful_tokens_per_s"
_LISTED_REASONS = 20
_LISTED_ROWS = 3  # the most rows that a note names


# -- tables ------------------------------------------------------------------------------------------------------------


def runs_table(
    groups: Sequence[RunGroup],
    columns: Sequence[Column] | None = None,
    by: Sequence[Column] = (),
) -> Table:
    """Return a table for people.

    Its columns are ``columns`` or, by default, the facts in which rows differ, the main figures and the status. ``by``
    are the facts by which the user grouped the runs.
    """
    names = by or naming_columns(groups)
    if columns:
        shown_columns = list(columns)
        table = _table_of_rows(groups, shown_columns)
    else:
        known_figures = []
        for figure in _main_figures(groups):
            if _is_known_column(groups, figure):
                known_figures.append(figure)
        shown_columns = [*names, *known_figures, COLUMNS["status"]]
        # To keep the table narrow, only the first figure, the step, is shown with its interval.
        table = _table_of_rows(
            groups, shown_columns, without_interval=known_figures[1:]
        )

    lines_above = shared_fact_lines(groups, shown_columns)
    if columns is None:
        lines_above += _unknown_figures_line(groups)
    lines_below = _legend_lines(groups, table)
    lines_below += notes(groups, by or message_columns(names))
    return Table(table.headings, table.rows, lines_above, lines_below)


def raw_runs_table(
    groups: Sequence[RunGroup],
    columns: Sequence[Column] | None = None,
    by: Sequence[Column] = (),
) -> Table:
    """Return a table for programs, in which facts that all rows share are columns too."""
    if columns is None:
        columns = _columns_for_programs(groups, by)
    return _table_of_rows(groups, columns)


def _columns_for_programs(
    groups: Sequence[RunGroup], by: Sequence[Column]
) -> list[Column]:
    """Return the columns of a table for programs: all facts and figures that are known in any group."""
    columns = list(by)
    for fact in COLUMNS.values():
        if fact.quantity is None and fact.place is Place.HEADLINE:
            columns.append(fact)
    columns += _known_facts(groups)
    columns += _main_figures(groups)
    for figure in figures(Place.FILE):
        if _is_known_column(groups, figure):
            columns.append(figure)
    # A column that was added twice is kept once.
    by_name = {column.name: column for column in columns}
    return list(by_name.values())


def _table_of_rows(
    groups: Sequence[RunGroup],
    columns: Sequence[Column],
    without_interval: Sequence[Column] = (),
) -> Table:
    """Return a table of ``groups`` with ``columns``; the column n has the number of successful runs of each row."""
    headings = [heading(column, groups) for column in columns]
    is_merged = any(len(group) > 1 for group in groups)
    if is_merged:
        headings.append(Heading("n", "n", figures=True))
    rows = []
    for group in groups:
        row = []
        for shown_column in columns:
            shows_interval = shown_column not in without_interval
            row.append(cell(group, shown_column, interval=shows_interval))
        if is_merged:
            n = sum(entry.status == "ok" for entry in runs_for_figures(group))
            row.append(TableCell(n, str(n)))
        rows.append(row)
    return Table(headings, rows)


# -- columns -----------------------------------------------------------------------------------------------------------


def _known_facts(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the facts that are known in any row, among them options without a column in ``COLUMNS``."""
    options = [column(path) for path in overridden_options(groups)]
    further_options = [option for option in options if option.name not in COLUMNS]
    # The last of ``FACTS`` is about the outcome, and stays last.
    *settings, outcome = FACTS
    facts = [*settings, *further_options, outcome]
    return [fact for fact in facts if _is_known_column(groups, fact)]


def _main_figures(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the main figures, with only those readings of memory that these runs have."""
    entries = list(chain.from_iterable(groups))
    allocated = COLUMNS[MEMORY["allocated_peak"].name]
    resident = COLUMNS[MEMORY["resident_peak"].name]
    memory_figures = [peak_memory(entries)]
    lacks_allocated = any(
        entry.status == "ok" and allocated.get(entry) is None for entry in entries
    )
    if lacks_allocated and resident not in memory_figures:
        memory_figures.append(resident)
    main_figures = []
    for figure in figures(Place.TABLE):
        if figure not in (allocated, resident):
            main_figures.append(figure)
    return main_figures + memory_figures


def _is_known_column(groups: Sequence[RunGroup], column: Column) -> bool:
    return any(column.get(entry) is not None for entry in chain.from_iterable(groups))


def distinguishing_facts(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the facts in which rows differ, without dimensions that follow from the size of a preset."""
    facts = []
    for fact in _known_facts(groups):
        if groups_differ(groups, fact) and not follows_from_size(groups, fact):
            facts.append(fact)
    return facts


def distinguishing_settings(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the facts in which rows differ, except facts about the outcome, such as whether steps were steady."""
    outcome = COLUMNS["steadiness"].group
    return [fact for fact in distinguishing_facts(groups) if fact.group != outcome]


def naming_columns(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the columns that identify rows: the facts that distinguish them, after the names of the runs.

    Names are left out if all rows are cells of sweeps, and the facts alone distinguish them.
    """
    facts = distinguishing_facts(groups)
    labels = set()
    for group in groups:
        labels.add(tuple(fact_text(fact_value(group, fact)) for fact in facts))
    all_are_cells = all(group[0].cell is not None for group in groups)
    if facts and all_are_cells and len(labels) == len(groups):
        return facts
    name = COLUMNS["name"]
    names = distinct_values(fact_value(group, name) for group in groups)
    if len(names) < len(groups):
        name = COLUMNS["folder"]
    return [name, *facts]


def message_columns(naming: Sequence[Column]) -> Sequence[Column]:
    """Return the columns by which messages name a row: only the run's name if ``naming`` has it, else all of them."""
    first_column = naming[0]
    if first_column.name in ("name", "folder"):
        return [first_column]
    return naming


# -- cells -------------------------------------------------------------------------------------------------------------


def heading(column: Column, groups: Sequence[RunGroup]) -> Heading:
    """Return the heading of a column of facts or figures; numbers are right-aligned."""
    if column.quantity is not None:
        return Heading(column.name, column.quantity.heading, figures=True)
    values = distinct_values(fact_value(group, column) for group in groups)
    are_numbers = bool(values) and all(is_number(value) for value in values)
    return Heading(column.name, column.title, figures=are_numbers)


def cell(group: RunGroup, column: Column, interval: bool = True) -> TableCell:
    """Return the cell of a fact or figure; empty if the run ended before it or has no such phase."""
    if column.quantity is None:
        return fact_cell(group, column)
    typical = estimate(group, column)
    if typical.value is None:
        has_no_figure = status_text(group) != "ok" or column.is_time
        return TableCell(text="" if has_no_figure else "unknown")
    if interval:
        text = column.quantity.rounded(typical.value, typical.low, typical.high)
    else:
        text = column.quantity.rounded(typical.value)
    if interval and typical.lacks_interval:
        text += f" [{TOO_FEW_STEPS}]"
    bound = None
    if typical.is_lower_bound:
        bound = AT_LEAST
        text = f"{AT_LEAST} {text}"
    return TableCell(typical.value, text, typical.low, typical.high, bound=bound)


def fact_cell(group: RunGroup, column: Column) -> TableCell:
    """Return the cell of a fact that the runs of ``group`` share; a status has its colour."""
    if column.name == "status":
        status = status_text(group)
        words = status_text(group, STATUS_WORDS)
        return TableCell(status, words, style=STATUS_STYLES.get(status, ""))
    value = fact_value(group, column)
    return TableCell(value, _fact_text(value, column))


def _fact_text(value: Any, column: Column) -> str:
    if column.name == "parameters" and isinstance(value, int):
        return f"{value:,}"
    return fact_text(value)


# -- lines around the table --------------------------------------------------------------------------------------------


def shared_fact_lines(
    rows: Sequence[RunGroup], shown_columns: Sequence[Column]
) -> list[str]:
    """Return a line with the facts that all rows share, and one with the facts that are known in only some rows.

    A row is a group of runs. A fact is left out if it is a column, or if it differs between runs, even of one row.
    """
    entries = list(chain.from_iterable(rows))
    facts_of_all = []
    facts_of_some = []
    for fact in _known_facts(rows):
        if fact in shown_columns or _runs_differ(entries, fact):
            continue
        text = f"{fact.title} {_fact_text(fact_value(entries, fact), fact)}"
        rows_with_fact = sum(_is_known_in_all(row, fact) for row in rows)
        if rows_with_fact == len(rows):
            facts_of_all.append(text)
        else:
            facts_of_some.append(f"{text} ({rows_with_fact} of {len(rows)} rows)")
    lines = []
    if facts_of_all:
        lines.append(f"in all rows: {', '.join(facts_of_all)}")
    if facts_of_some:
        lines.append(f"where known: {', '.join(facts_of_some)}")
    return lines


def _runs_differ(entries: Sequence[Entry], fact: Column) -> bool:
    return groups_differ(single_run_groups(entries), fact)


def _is_known_in_all(group: RunGroup, fact: Column) -> bool:
    return all(fact.get(entry) is not None for entry in group)


def _unknown_figures_line(groups: Sequence[RunGroup]) -> list[str]:
    """Return a line with the main figures that are unknown in all rows.

    Three figures are not listed: times, because the phase did not occur; the planned peak, if no run was planned; and
    useful tokens, which are known only if batches have padding.
    """
    entries = chain.from_iterable(groups)
    has_plan = any(
        entry.record is not None and entry.record.planned for entry in entries
    )
    unlisted_names = {_USEFUL_TOKENS_PER_S}
    if not has_plan:
        unlisted_names.add(PEAK.name)
    titles = []
    for figure in _main_figures(groups):
        if figure.name in unlisted_names or figure.is_time:
            continue
        if not _is_known_column(groups, figure):
            titles.append(figure.title)
    if not titles:
        return []
    return [f"unknown in all rows: {', '.join(titles)}"]


def _legend_lines(groups: Sequence[RunGroup], table: Table) -> list[str]:
    """Return a line that explains the figures and brackets of ``table``; none if there are no brackets."""
    if any(len(group) > 1 for group in groups):
        return [MERGE_NOTE]
    has_interval = any(
        "[" in cell.text and cell.low for cell in chain.from_iterable(table.rows)
    )
    if has_interval:
        return ["[ ]: 95 % interval of the mean"]
    return []


def notes(groups: Sequence[RunGroup], naming: Sequence[Column]) -> list[str]:
    """Return notes on which rows combine different runs, and why some rows have no figures.

    ``naming`` are the columns by which a note names a row.
    """
    return [*_mixed_row_notes(groups, naming), *_reason_lines(groups, naming)]


def _mixed_row_notes(groups: Sequence[RunGroup], naming: Sequence[Column]) -> list[str]:
    """Return a note for each set of facts that differ within a row."""
    labels_by_facts: dict[str, list[str]] = {}
    for group in groups:
        facts = ", ".join(mixed_facts(group))
        if facts:
            labels_by_facts.setdefault(facts, []).append(row_label(group, naming))
    lines = []
    for facts, labels in labels_by_facts.items():
        rows = _first_labels(labels)
        lines.append(f"note: runs that differ in {facts} share a row: {rows}")
    return lines


def _reason_lines(groups: Sequence[RunGroup], naming: Sequence[Column]) -> list[str]:
    """Return a line for each reason why runs of a row have no figures."""
    reasons: dict[str, None] = {}  # an ordered set of lines
    for group in groups:
        for entry in group:
            if entry.reason is not None:
                status = STATUS_WORDS.get(entry.status, entry.status)
                line = f"{row_label(group, naming)}: {status}: {entry.reason}"
                reasons[line] = None
    lines = list(reasons)
    if len(lines) <= _LISTED_REASONS:
        return lines
    hidden_lines = len(lines) - _LISTED_REASONS
    rest = f"and {hidden_lines} more; --columns name,status,reason shows all reasons"
    return [*lines[:_LISTED_REASONS], rest]


def _first_labels(labels: Sequence[str]) -> str:
    """Return the names of the first rows, and how many more there are."""
    text = "; ".join(labels[:_LISTED_ROWS])
    if len(labels) > _LISTED_ROWS:
        text += f" and {len(labels) - _LISTED_ROWS} more"
    return text


def row_label(group: RunGroup, naming: Iterable[Column]) -> str:
    """Return the name of the row of ``group`` in messages: its facts in the columns ``naming``, or its run."""
    phrases = []
    for fact in naming:
        phrase = fact_phrase(fact, fact_value(group, fact))
        if phrase:
            phrases.append(phrase)
    return " ".join(phrases) or group[0].name
