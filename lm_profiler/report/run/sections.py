"""The table of a run's phases, and the sections of its page: the facts and the lists of each group of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel

from lm_profiler.analysis.hardware.roofline import LEAST_S
from lm_profiler.analysis.steps.summaries import lower_bound_share
from lm_profiler.record.figure import (
    AT_LEAST,
    TOO_FEW_STEPS,
    digits_of,
    ms_text,
    share_text,
)
from lm_profiler.record.quantities import (
    FLOOR,
    GROUPS,
    LISTS,
    PARTS,
    TIMES,
    TIMES_FLOOR,
    Quantity,
)
from lm_profiler.record.run_record import MOMENTS, CodePart, Floor, RunRecord
from lm_profiler.report.run.waterfall_text import waterfall_tables
from lm_profiler.report.tables.table import (
    Heading,
    Table,
    TableCell,
    fact_text,
    headings_of,
    text_cell,
    text_table,
    titled_headings,
)


def phase_table(record: RunRecord) -> Table:
    """Return a row for each phase that occurred, with its marked parts, then forward + backward, and the step."""
    has_device = _has_device(record)
    titles = ["phase", "mean [95 % interval] (ms)", "std", "median", "p95", "share"]
    if has_device:
        titles.append("host (ms)")
    rows = []
    for part in (*PARTS, "forward_backward", "step"):
        if not _has_occurred(record, part):
            continue
        texts = list(_row_texts(record, part))
        if has_device:
            texts.append(_ms(record.host_time[part].mean, _digits(record, part)))
        rows.append((part, texts))
        for code_part in code_parts_in(record, part):
            part_texts = _code_part_texts(record, code_part)
            if has_device:
                part_texts.append("")
            rows.append((f"part {code_part.name}", part_texts))
    # On a shared machine other programs lengthen the times, so a ratio to the floor would be misleading.
    floors = {} if record.contended else record.floors
    return table_with_floors(titles, rows, floors)


def code_parts_in(record: RunRecord, phase: str) -> list[CodePart]:
    """Return the parts that the program marks within ``phase``, whose time includes them."""
    return [code_part for code_part in record.code_parts if code_part.phase == phase]


def _code_part_texts(record: RunRecord, code_part: CodePart) -> list[str]:
    """Return the texts of a part's row: its title, its time and its share of the step."""
    step_s = record.time["step"].mean
    share = None
    if step_s:
        share = code_part.seconds / step_s
    digits = max(digits_of(code_part.seconds), 1)
    mean = _ms(code_part.seconds, digits)
    # Only the mean of a marked part is known: std, median and p95 are empty.
    return [f"  of which {code_part.name}", mean, "", "", "", share_text(share)]


def _has_device(record: RunRecord) -> bool:
    """Return whether a device has a clock of its own; on the CPU the two clocks are one."""
    environment = record.environment
    return environment is not None and environment.device_type != "cpu"


def _has_occurred(record: RunRecord, part: str) -> bool:
    """Return whether ``part`` took time on any clock; phases that this verb or loop lacks have none."""
    if part == "step":
        return True
    if part == "forward_backward":
        # Without backward the sum of both would repeat the forward pass.
        part = "backward"
    clocks = (record.time, record.host_time)
    return any(part in clock and clock[part].max for clock in clocks)


def table_with_floors(
    titles: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    floors: Mapping[str, Floor],
) -> Table:
    """Return a table whose rows are pairs of a part and its texts, the last row in bold.

    If any floor is known, two columns show the floors.
    """
    headings = titled_headings(titles, figures=titles[1:])
    has_floors = any((floor.seconds or 0.0) >= LEAST_S for floor in floors.values())
    if has_floors:
        for figure in (FLOOR, TIMES_FLOOR):
            headings.append(Heading(figure.heading, figure.heading, figures=True))
    cells = []
    for index, (part, texts) in enumerate(rows):
        is_last_row = index == len(rows) - 1
        style = "bold" if is_last_row else ""
        row_texts = list(texts)
        if has_floors:
            row_texts += floor_texts(floors.get(part))
        cells.append([text_cell(text, style) for text in row_texts])
    return Table(headings, cells)


def step_line(record: RunRecord) -> str:
    """Return one line with the measured step, its interval and its spread, for tables without such columns."""
    texts = _row_texts(record, "step")
    spread = {
        "std": texts.std,
        "CV": share_text(record.time["step"].cv),
        "median": texts.median,
        "p95": texts.p95,
    }
    words = [f"step: {texts.mean} ms"]
    for name, value in spread.items():
        if value:
            words.append(f"{name} {value}")
    return ", ".join(words)


class _RowTexts(NamedTuple):
    """The texts of a row of the table of phases; times are in ms."""

    title: str
    mean: str  # with its interval
    std: str
    median: str
    p95: str
    share: str  # of the step


def _row_texts(record: RunRecord, part: str) -> _RowTexts:
    """Return the texts of the row of ``part``."""
    time = record.time[part]
    digits = _digits(record, part)
    mean = _ms(time.mean, digits)
    if time.mean_low is not None:
        mean += f" [{_ms(time.mean_low, digits)}, {_ms(time.mean_high, digits)}]"
    elif TIMES[part].lacks_interval(record):
        mean += f" [{TOO_FEW_STEPS}]"
    std = ""
    if time.std is not None:
        std = _ms(time.std, digits)
    share = record.shares.get(part)
    step_s = record.time["step"].mean
    if part not in record.shares and step_s:
        share = (time.mean or 0.0) / step_s
    return _RowTexts(
        title=TIMES[part].title,
        mean=mean,
        std=std,
        median=_ms(time.median, digits),
        p95=_ms(time.p95, digits),
        share=share_text(share),
    )


def _digits(record: RunRecord, part: str) -> int:
    return max(digits_of(record.time[part].mean or 0.0), 1)


def _ms(seconds: float | None, digits: int) -> str:
    return "unknown" if seconds is None else ms_text(seconds, digits)


def floor_texts(floor: Floor | None) -> list[str]:
    """Return the floor of a phase with the limit that sets it, and the ratio of the measured time to the floor."""
    if floor is None or floor.seconds is None or floor.seconds < LEAST_S:
        return ["", ""]
    bound = _BOUNDS.get(floor.bound or "", "")
    if floor.times is None:
        times = ""
    elif floor.times >= 100:
        times = f"{floor.times:,.0f}"
    else:
        times = f"{floor.times:,.1f}"
    return [ms_text(floor.seconds) + bound, times]


_BOUNDS = {"compute": " FLOPs", "memory": " bytes"}

# section → the paths of the lists in a record that it shows
_LISTS_IN_SECTION = {
    "Other, by its owner": ("other_by_owner.actions",),
    "Steps": ("code_parts", "odd_steps", "step_counters", "between", "outside"),
    "Model": ("experts",),
    "Use of the CPU": (
        "python_times",
        "worker_times",
        "slow_calls",
        "outer_calls",
        "data_calls",
        "large_results",
        "repeated_results",
    ),
    "Steadiness": ("steadiness.levels", "steadiness.pattern.slow", "steadiness.kinds"),
    "Use of the hardware": ("rates.flops", "utilisation.by_dtype"),
    "Synchronization": ("syncs",),
    "Waterfall": ("waterfall.needless", "needless_operators"),
    "Numerics": ("numerics.kinds", "numerics.losses", "numerics.gradient_norms"),
    "Ranks": (
        "rank_step_s",
        "ranks.finding.slow",
        "ranks.by_rank",
        "ranks.collectives",
    ),
}
# lists whose columns are left out if no row has a value
_LISTS_WITHOUT_EMPTY_COLUMNS = (
    "needless_operators",
    "odd_steps",
    "step_counters",
    "ranks.by_rank",
    "findings",
    "other_by_owner.actions",
    "outer_calls",
)
# lists of plain numbers → the heading of their row numbers, and the first of these numbers
_NUMBERED_LISTS = {
    "rank_step_s": ("rank", 0),
    "numerics.losses": ("step", 1),
    "numerics.gradient_norms": ("step", 1),
}
_GROUPS_OF_TIMES = (
    "Time of a step",
    "Time on the host's clock",
    "Spread of the steps",
    "Shares of the typical step",
)
_GROUPS_WITH_OWN_TABLES = (*_GROUPS_OF_TIMES, "Terms of the waterfall")
_MOST_ROWS = 64
# parts and moments → their titles, in the order of the rows of a family
_MEMBER_TITLES = {
    part: TIMES[part].title for part in (*PARTS, "forward_backward", "step")
}
_MEMBER_TITLES |= MOMENTS


def shown(figure: Quantity, record: RunRecord) -> str:
    """Return a figure with its unit, and with its interval if it has one; a rate on a busy machine is a lower bound."""
    value = figure.get(record)
    interval: tuple[float, ...] = figure.interval(record) or ()
    share = lower_bound_share(figure, record)
    if share is not None and value is not None:
        value *= share
        interval = tuple(end * share for end in interval)
    text = figure.fit(value)
    if interval:
        ends = ", ".join(figure.show(end, unit=False) for end in interval)
        text += f" [{ends}]"
    elif figure.lacks_interval(record):
        text += f" [{TOO_FEW_STEPS}]"
    return text if share is None else f"{AT_LEAST} {text}"


def sections(record: RunRecord) -> list[Table]:
    """Return all figures of ``record``: times by phase, then a section for each group; empty ones are left out."""
    times: list[Quantity] = []
    for title in _GROUPS_OF_TIMES:
        times += GROUPS[title]
    host_times = []
    step_times = []
    for figure in times:
        if figure.path.startswith("host_"):
            host_times.append(figure)
        else:
            step_times.append(figure)
    tables = [replace(list_table(record, "findings"), title="What could be saved")]
    tables.append(_family_table(record, step_times, "Time of a step (ms)"))
    if _has_device(record):
        tables.append(
            _family_table(record, host_times, "Time on the host's clock (ms)")
        )
    for title, group in GROUPS.items():
        if title not in _GROUPS_WITH_OWN_TABLES:
            tables += _tables_of_group(record, title, group)
    return [table for table in tables if table.rows]


def _tables_of_group(
    record: RunRecord, title: str, group: Sequence[Quantity]
) -> list[Table]:
    """Return the tables of one group: its facts with their meanings, its lists, and its families."""
    single_figures = []
    family_figures = []
    for figure in group:
        if figure.member is None:
            single_figures.append(figure)
        else:
            family_figures.append(figure)
    tables = [known_table(record, single_figures, _word_rows(record, title))]
    for path in _LISTS_IN_SECTION.get(title, ()):
        tables.append(list_table(record, path))
    tables.append(_family_table(record, family_figures))
    if title == "Waterfall":
        tables += waterfall_tables(record)
    titled_tables: list[Table] = []
    for table in tables:
        if table.rows:
            # The title stands above the first table.
            table_title = "" if titled_tables else title
            titled_tables.append(replace(table, title=table_title))
    return titled_tables


def known_table(
    record: RunRecord, group: Sequence[Quantity], words: Sequence[Sequence[str]] = ()
) -> Table:
    """Return the known figures of ``group`` with their meanings, and then the rows of ``words``."""
    rows = []
    for figure in group:
        if figure.get(record) is not None:
            rows.append([figure.title, shown(figure, record), figure.meaning])
    return text_table(("", "", ""), [*rows, *words], left=3)


def _word_rows(record: RunRecord, title: str) -> list[list[str]]:
    """Return a row for each field of the model or the machine that is not a figure."""
    parts: dict[str, BaseModel | None] = {
        "Model": record.model,
        "Machine": record.environment,
    }
    part = parts.get(title)
    if part is None:
        return []
    rows = []
    for name, value in part.model_dump().items():
        text = _value_text(value)
        if text:
            rows.append([name.replace("_", " "), text, ""])
    return rows


def _value_text(value: Any) -> str:
    """Return ``value`` as text; empty for numbers, which are separate figures."""
    if isinstance(value, dict):
        entries = [f"{name} {_value_text(entry)}" for name, entry in value.items()]
        return ", ".join(entries)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, (str, bool)):
        return fact_text(value)
    return ""


def list_table(record: RunRecord, path: str) -> Table:
    """Return a table with the first rows of the list at ``path``; empty if the record has none."""
    items: Any = record
    for key in path.split("."):
        items = getattr(items, key, None)
    is_single_rank = path == "rank_step_s" and items is not None and len(items) < 2
    if not items or is_single_rank:
        return Table()
    columns = _known_columns(path, items)
    headings = headings_of(columns)
    rows = []
    for item in items[:_MOST_ROWS]:
        rows.append([_list_cell(figure, item, path) for figure in columns])
    if path in _NUMBERED_LISTS:
        noun, first_number = _NUMBERED_LISTS[path]
        headings = [Heading(noun, noun, figures=True), *headings]
        for number, row in enumerate(rows, first_number):
            row.insert(0, TableCell(number, str(number)))
    table = Table(headings, rows)
    rows_left = len(items) - _MOST_ROWS
    if rows_left > 0:
        table = replace(table, below=[f"and {rows_left:,} more"])
    return table


def _known_columns(path: str, items: Sequence[Any]) -> list[Quantity]:
    """Return the columns of the list at ``path``, for some lists without those in which no row has a value."""
    if path not in _LISTS_WITHOUT_EMPTY_COLUMNS:
        return list(LISTS[path])
    # In the list of ranks, a phase that did not occur has the value 0.
    empty_values: tuple[float | None, ...] = (None,)
    if path == "ranks.by_rank":
        empty_values = (None, 0.0)
    columns = []
    for figure in LISTS[path]:
        if any(figure.get(item) not in empty_values for item in items):
            columns.append(figure)
    return columns


def _list_cell(figure: Quantity, item: Any, path: str) -> TableCell:
    """Return the cell of a figure of ``item``, which is in the list at ``path``.

    An unknown figure is an empty cell in the lists of ``_LISTS_WITHOUT_EMPTY_COLUMNS``.
    """
    value = figure.get(item)
    if value is not None or path not in _LISTS_WITHOUT_EMPTY_COLUMNS:
        return TableCell(value, figure.show(value, unit=False))
    if figure.name == "step":
        # In the table of counters, the row without a step has the median values.
        return TableCell(None, "median")
    return TableCell(None, "")


def _time_text(figure: Quantity, record: RunRecord) -> str:
    """Return the text of a known time with its interval, or with the reason why it has none."""
    interval: tuple[float, ...] = figure.interval(record) or ()
    text = figure.rounded(figure.get(record), *interval)
    if figure.lacks_interval(record):
        return f"{text} [{TOO_FEW_STEPS}]"
    return text


def _family_table(
    record: RunRecord, group: Sequence[Quantity], title: str = ""
) -> Table:
    """Return a table of figures that exist once per part of a step, or once per moment.

    Such figures form families, such as the medians of all parts. A family is a column, and a part is a row; both are
    left out if none of their figures is known.
    """
    # family → part → text
    columns: dict[str, dict[str, str]] = {}
    for figure in group:
        # without a member, the part is the key in a path such as ``time.forward.mean``
        part = figure.member or figure.path.split(".")[1]
        value = figure.get(record)
        is_zero_amount = not value and figure.shown_unit  # no time, or no memory
        if value is None or is_zero_amount:
            continue
        title_of_member = figure.title.removesuffix(" (host)")
        family = title_of_member.removeprefix(_MEMBER_TITLES[part]).lstrip(": ")
        column = columns.setdefault(family or "mean [95 % interval]", {})
        if figure.unit == "s":
            column[part] = _time_text(figure, record)
        else:
            column[part] = figure.fit(value)
    are_moments = False
    rows = []
    for part, part_title in _MEMBER_TITLES.items():
        texts = [column.get(part, "") for column in columns.values()]
        if any(texts):
            rows.append([part_title, *texts])
            are_moments = are_moments or part in MOMENTS
    noun = "moment" if are_moments else "phase"
    return text_table([noun, *columns], rows, title=title)
