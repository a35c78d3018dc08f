"""The table of runs: a row for each run, cell with its repeats, or group; a column for each fact or figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

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
    """Return a table for people: ``columns``, or the facts in which rows differ, the main figures and each run's end.

    ``by`` are the facts by which the user grouped the runs.
    """
    names = by or naming_columns(groups)
    if columns:
        shown_columns = list(columns)
        table = _table(groups, shown_columns)
    else:
        known_figures = []
        for figure in _main_figures(groups):
            if _is_known_column(groups, figure):
                known_figures.append(figure)
        shown_columns = [*names, *known_figures, COLUMNS["status"]]
        table = _table(groups, shown_columns, without_interval=known_figures[1:])

    lines_above = shared_fact_lines(groups, shown_columns)
    if columns is None:
        lines_above += _unknown_figures_line(groups)
    lines_below = _legend(groups, table)
    lines_below += notes(groups, by or message_columns(names))
    return Table(table.headings, table.rows, lines_above, lines_below)


def raw_runs_table(
    groups: Sequence[RunGroup],
    columns: Sequence[Column] | None = None,
    by: Sequence[Column] = (),
) -> Table:
    """Return a table for programs: facts that all rows share are columns too."""
    if columns is None:
        columns = _columns_for_programs(groups, by)
    return _table(groups, columns)


def _columns_for_programs(
    groups: Sequence[RunGroup], by: Sequence[Column]
) -> list[Column]:
    """Return the columns of a file for programs: all facts and figures that some group has, each once."""
    columns = list(by)
    for fact in COLUMNS.values():
        if fact.quantity is None and fact.place is Place.HEADLINE:
            columns.append(fact)
    columns += _known_facts(groups)
    columns += _main_figures(groups)
    for figure in figures(Place.FILE):
        if _is_known_column(groups, figure):
            columns.append(figure)
    by_name = {column.name: column for column in columns}
    return list(by_name.values())


def _table(
    groups: Sequence[RunGroup],
    columns: Sequence[Column],
    without_interval: Sequence[Column] = (),
) -> Table:
    """Return a table of ``groups`` with ``columns``; n is the number of runs that a row has."""
    headings = [heading(column, groups) for column in columns]
    is_merged = any(len(group) > 1 for group in groups)
    if is_merged:
        headings.append(Heading("n", "n", figures=True))
    rows = []
    for group in groups:
        row = [
            cell(group, column, interval=column not in without_interval)
            for column in columns
        ]
        if is_merged:
            n = sum(entry.status == "ok" for entry in runs_for_figures(group))
            row.append(TableCell(n, str(n)))
        rows.append(row)
    return Table(headings, rows)


# -- columns -----------------------------------------------------------------------------------------------------------


def _known_facts(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the facts that some row has; options without a column of their own are before the last of ``FACTS``."""
    options = [column(path) for path in overridden_options(groups)]
    other_options = [option for option in options if option.name not in COLUMNS]
    facts = [*FACTS[:-1], *other_options, FACTS[-1]]
    return [fact for fact in facts if _is_known_column(groups, fact)]


def _main_figures(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the main figures; of the three readings of memory only those that these runs have."""
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
    """Return the facts in which rows differ, without dimensions that follow from a size."""
    facts = []
    for fact in _known_facts(groups):
        if groups_differ(groups, fact) and not follows_from_size(groups, fact):
            facts.append(fact)
    return facts


def distinguishing_settings(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the facts in which rows differ, except those of the outcome: how steady the steps were."""
    outcome = COLUMNS["steadiness"].group
    return [fact for fact in distinguishing_facts(groups) if fact.group != outcome]


def naming_columns(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the facts that distinguish rows, after the runs' names unless the facts identify the rows' cells."""
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
    """Return the columns by which messages name a row: of ``naming_columns`` only the run if it is shown."""
    shows_run = naming[0].name in ("name", "folder")
    return naming[:1] if shows_run else naming


# -- cells -------------------------------------------------------------------------------------------------------------


def heading(column: Column, groups: Sequence[RunGroup]) -> Heading:
    """Return the heading of a column of facts or figures; numbers are right-aligned."""
    if column.quantity is not None:
        return Heading(column.name, column.quantity.heading, figures=True)
    values = distinct_values(fact_value(group, column) for group in groups)
    are_numbers = bool(values) and all(is_number(value) for value in values)
    return Heading(column.name, column.title, figures=are_numbers)


def cell(group: RunGroup, column: Column, interval: bool = True) -> TableCell:
    """Return the cell of a fact or figure; empty if the run did not get that far or has no such phase."""
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
    """Return the cell of a fact that the runs of ``group`` share; how they ended is shown in its style."""
    if column.name == "status":
        status = status_text(group)
        words = status_text(group, STATUS_WORDS)
        return TableCell(status, words, style=STATUS_STYLES.get(status, ""))
    value = fact_value(group, column)
    return TableCell(value, _text(value, column))


def _text(value: Any, column: Column) -> str:
    if column.name == "parameters" and isinstance(value, int):
        return f"{value:,}"
    return fact_text(value)


# -- lines around the table --------------------------------------------------------------------------------------------


def shared_fact_lines(
    groups: Sequence[RunGroup], shown_columns: Sequence[Column]
) -> list[str]:
    """Return a line of the facts that are the same in all rows, and one of the facts that only some rows have."""
    entries = list(chain.from_iterable(groups))
    runs = single_run_groups(entries)
    facts_of_all = []
    facts_of_some = []
    for fact in _known_facts(groups):
        if fact in shown_columns or groups_differ(runs, fact):
            continue
        text = f"{fact.title} {_text(fact_value(entries, fact), fact)}"
        rows_with_fact = sum(_all_know(group, fact) for group in groups)
        if rows_with_fact == len(groups):
            facts_of_all.append(text)
        else:
            facts_of_some.append(f"{text} ({rows_with_fact} of {len(groups)} rows)")
    lines = []
    if facts_of_all:
        lines.append(f"in all rows: {', '.join(facts_of_all)}")
    if facts_of_some:
        lines.append(f"where known: {', '.join(facts_of_some)}")
    return lines


def _all_know(group: RunGroup, fact: Column) -> bool:
    return all(fact.get(entry) is not None for entry in group)


def _unknown_figures_line(groups: Sequence[RunGroup]) -> list[str]:
    """Return a line of the main figures that no row has.

    A time that no row has belongs to a phase that did not occur, and a plan that no row has was not requested. Useful
    tokens are known only where batches have padding.
    """
    entries = chain.from_iterable(groups)
    has_plan = any(
        entry.record is not None and entry.record.planned for entry in entries
    )
    not_missed = {_USEFUL_TOKENS_PER_S}
    if not has_plan:
        not_missed.add(PEAK.name)
    titles = []
    for figure in _main_figures(groups):
        if figure.name in not_missed or figure.is_time:
            continue
        if not _is_known_column(groups, figure):
            titles.append(figure.title)
    if not titles:
        return []
    return [f"unknown in all rows: {', '.join(titles)}"]


def _legend(groups: Sequence[RunGroup], table: Table) -> list[str]:
    """Return a line on what the figures and brackets of ``table`` are, where it has any that need one."""
    if any(len(group) > 1 for group in groups):
        return [MERGE_NOTE]
    has_interval = any(
        "[" in cell.text and cell.low for cell in chain.from_iterable(table.rows)
    )
    if has_interval:
        return ["[ ]: 95 % interval of the mean"]
    return []


def notes(groups: Sequence[RunGroup], naming: Sequence[Column]) -> list[str]:
    """Return notes for the reader: which rows mix different runs, and why some have no figures.

    ``naming`` are the columns by which a note names a row.
    """
    return [*_mixed_row_notes(groups, naming), *_reasons(groups, naming)]


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


def _reasons(groups: Sequence[RunGroup], naming: Sequence[Column]) -> list[str]:
    """Return why runs have no figures, each reason of a row once."""
    reasons: dict[str, None] = {}
    for group in groups:
        for entry in group:
            if entry.reason is not None:
                status = STATUS_WORDS.get(entry.status, entry.status)
                reasons[f"{row_label(group, naming)}: {status}: {entry.reason}"] = None
    lines = list(reasons)
    if len(lines) <= _LISTED_REASONS:
        return lines
    hidden_lines = len(lines) - _LISTED_REASONS
    rest = f"and {hidden_lines} more; --columns name,status,reason shows all"
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
