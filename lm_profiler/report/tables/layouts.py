"""Pivots, and the layouts of tables in published reports with their column names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from lm_profiler.analysis.steps.summaries import Steps, steps_after
from lm_profiler.models.config import DIMENSIONS
from lm_profiler.record.entry import Cut, Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import TimeSummary
from lm_profiler.record.steps import StepRow
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.rows import (
    MERGE_NOTE,
    cell,
    distinguishing_settings,
    fact_cell,
    heading,
    message_columns,
    naming_columns,
    notes,
    shared_fact_lines,
)
from lm_profiler.report.tables.run_groups import (
    STATUS_WORDS,
    RunGroup,
    distinct_values,
    fact_phrase,
    fact_value,
    group_by_facts,
    single_run_groups,
    sort_key,
    status_counts,
    status_text,
)
from lm_profiler.report.tables.table import (
    Heading,
    Table,
    TableCell,
    fact_text,
    titled_headings,
)
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    column,
    parameters,
    preset_of,
)

_STEP = TIMES["step"]

# -- pivots ------------------------------------------------------------------------------------------------------------


def pivot(
    entries: Sequence[Entry],
    row_facts: Sequence[Column],
    column_facts: Sequence[Column],
    value: Column,
) -> Table:
    """Return a table of ``value``: a row for each value of ``row_facts``, and a column for each of ``column_facts``.

    A cell without a figure has a word for the reason.
    """
    facts = [*row_facts, *column_facts]
    rows = group_by_facts(entries, row_facts)
    columns = group_by_facts(entries, column_facts)
    cells = group_by_facts(entries, facts)
    headings = [heading(fact, list(rows.values())) for fact in row_facts]
    fact_names = [fact_heading.name for fact_heading in headings]
    pivot_titles = [_pivot_title(group, column_facts) for group in columns.values()]
    for title in _distinct_titles(fact_names, pivot_titles):
        headings.append(Heading(title, title, figures=True))

    body = []
    has_intervals = False
    for row_key, group in rows.items():
        row = [fact_cell(group, fact) for fact in row_facts]
        for column_key in columns:
            row.append(value_cell(cells.get((*row_key, *column_key), ()), value))
        has_intervals = has_intervals or any(cell.low is not None for cell in row)
        body.append(row)

    groups = list(cells.values())
    title = heading(value, []).title
    if any(len(group) > 1 for group in groups):
        title += f": {MERGE_NOTE}"
    elif has_intervals:
        title += ": mean [95 % interval]"
    return Table(headings, body, above=[title], below=notes(groups, facts))


def _pivot_title(group: RunGroup, column_facts: Sequence[Column]) -> str:
    texts = [fact_text(fact_value(group, fact)) for fact in column_facts]
    return " ".join(texts) or "unknown"


def _distinct_titles(names: Sequence[str], titles: Sequence[str]) -> list[str]:
    """Return ``titles``, with its position added to each title that an earlier column has too.

    Facts of different types may have the same text. ``names`` are the names of the columns to the left.
    """
    earlier_titles = set(names)
    distinct_titles = []
    for position, title in enumerate(titles, len(names)):
        is_repeated = title in earlier_titles
        earlier_titles.add(title)
        distinct_titles.append(f"{title} ({position})" if is_repeated else title)
    return distinct_titles


def value_cell(group: RunGroup, value: Column, interval: bool = True) -> TableCell:
    """Return the cell of a figure of ``group``, with the number of runs if there are several.

    If no run was successful, the cell has a word for how they ended.
    """
    if not group:
        return TableCell()
    if value.quantity is None:
        return fact_cell(group, value)
    good_runs = [entry for entry in group if entry.status == "ok"]
    ended_runs = [entry for entry in group if entry.status != "not run"]
    if not good_runs:
        runs = ended_runs or group
        word = distinct_values(entry.status for entry in runs)[0]
        return TableCell(text=_word_for(word), status=status_text(runs))
    figure_cell = cell(good_runs, value, interval)
    text = figure_cell.text
    if len(good_runs) > 1:
        text += f" n={len(good_runs)}"
    failed_runs = [entry for entry in ended_runs if entry.status != "ok"]
    if failed_runs:
        text += f" ({status_counts(failed_runs)})"
    return replace(figure_cell, text=text)


def _word_for(status: str) -> str:
    return STATUS_WORDS.get(status, status)


# -- names of runs and devices -----------------------------------------------------------------------------------------

MODEL_FACTS = ("size", *DIMENSIONS, "parameters")


def model_name(entry: Entry) -> str:
    """Return the size with the dimensions that differ from its preset; a module without a size has the run's name."""
    size = COLUMNS["size"].get(entry)
    if size is None:
        return entry.name
    preset = preset_of(size)
    changed = []
    for name in DIMENSIONS:
        value = COLUMNS[name].get(entry)
        if value != getattr(preset, name, None):
            changed.append(f"{name} {value}")
    if not changed:
        return str(size)
    return f"{size} ({', '.join(changed)})"


def distinguishing(entries: Sequence[Entry]) -> list[Column]:
    """Return the facts that distinguish ``entries``, except facts about the outcome."""
    return distinguishing_settings(single_run_groups(entries))


def names(entries: Sequence[Entry]) -> list[str]:
    """Return a name for each entry: its model, the facts that distinguish it, and its run's name if needed."""
    facts = [fact for fact in distinguishing(entries) if fact.name not in MODEL_FACTS]
    labels = []
    for entry in entries:
        words = [model_name(entry)]
        for fact in facts:
            words.append(fact_phrase(fact, fact.get(entry)))
        labels.append(", ".join(filter(None, words)))
    uses = Counter(labels)
    distinct_names = []
    for label, entry in zip(labels, entries, strict=True):
        needs_run = uses[label] > 1 and label != entry.name
        distinct_names.append(f"{label}, {entry.name}" if needs_run else label)
    return distinct_names


def device_names(entries: Sequence[Entry]) -> dict[str | None, str]:
    """Return a short name for each device: its type, such as ``cuda``, or its full name if several have that type."""
    types: dict[str | None, str] = {}
    for entry in entries:
        device_type = "unknown"
        if entry.environment is not None:
            device_type = entry.environment.device_type
        types[COLUMNS["device"].get(entry)] = device_type
    uses = Counter(types.values())
    shown_names: dict[str | None, str] = {}
    for name, device_type in types.items():
        is_unique = uses[device_type] == 1
        shown_names[name] = device_type if name is None or is_unique else name
    return shown_names


# -- wide --------------------------------------------------------------------------------------------------------------

CellFunction = Callable[[Entry], TableCell]
_MEMORY_COLUMNS = {
    "model mem": "held_start_bytes",
    "model+fwd mem": "held_forward_bytes",
    "model+fwd+back mem": "held_backward_bytes",
    "fwd mem": "saved_bytes",
    "back mem": "backward_added_bytes",
}
_WIDE_PASSES = {"forward": "fwd", "backward": "back", "forward_backward": "fwd & back"}
_DTYPES = {
    "64-true": "float64",
    "32-true": "float32",
    "16-true": "float16",
    "bf16-true": "bfloat16",
}
_WORD_COLUMNS = ("device", "compile", "model", "dtype", "status")
_WIDE_FACTS = (
    *MODEL_FACTS,
    "device",
    "batch_size",
    "compile",
    "context_length",
    "precision",
    "warmup_steps",
)


def wide(entries: Sequence[Entry]) -> Table:
    """Return a row for each run with means and standard deviations in seconds, and with memory for attention alone."""
    # Repeats have separate rows, and so has each number of warm-up steps of one run.
    groups = single_run_groups(entries)
    shown_names = set(_WIDE_FACTS)
    if _is_attention_alone(entries):
        shown_names.add("attention")  # shown in the column of the model's name
    fact_names = []
    word_columns = set(_WORD_COLUMNS)
    for fact in distinguishing(entries):
        if fact.name in shown_names:
            continue
        fact_names.append(fact.name)
        if not heading(fact, groups).figures:
            word_columns.add(fact.name)
    columns = _wide_columns(entries, fact_names)
    headings = []
    for title in columns:
        headings.append(Heading(title, title, figures=title not in word_columns))
    body = []
    for entry in entries:
        body.append([make_cell(entry) for make_cell in columns.values()])
    notes_below = notes(groups, message_columns(naming_columns(groups)))
    return Table(headings, body, below=notes_below)


def _wide_columns(
    entries: Sequence[Entry], more_facts: Sequence[str]
) -> dict[str, CellFunction]:
    """Return the columns of ``wide``: title → a function that returns the cell of a run."""
    is_attention = _is_attention_alone(entries)
    types = device_names(entries)

    def device_cell(entry: Entry) -> TableCell:
        return _word_cell(types[COLUMNS["device"].get(entry)])

    columns: dict[str, CellFunction] = {
        "device": device_cell,
        "batch_size": _fact_column("batch_size"),
        "compile": _compile_cell,
        "model": _attention_cell if is_attention else _model_cell,
    }
    if is_attention:
        columns["d_model"] = _fact_column("d_model")
    columns["context_length"] = _fact_column("context_length")
    columns["dtype"] = _dtype_cell
    for name in more_facts:
        columns[name] = _fact_column(name)
    if any(entry.cut is not None for entry in entries):
        columns["warmup_steps"] = _fact_column("warmup_steps")
        columns["benchmark_steps"] = _fact_column("benchmark_steps")
    for part, title in _WIDE_PASSES.items():
        columns[f"{title} avg (sec)"] = _figure_column(f"{part}_s", _six_digits)
        columns[f"{title} std (sec)"] = _figure_column(f"{part}_std_s", _six_digits)
    if is_attention:
        for title, name in _MEMORY_COLUMNS.items():
            columns[title] = _figure_column(name, _mib_text)
    columns["status"] = _status_cell
    if any(entry.cell is not None and entry.cell.repeat for entry in entries):
        columns["repeat"] = _fact_column("repeat")
    return columns


def _is_attention_alone(entries: Sequence[Entry]) -> bool:
    """Return whether all runs measure attention alone: their model has a width but no size."""
    return all(
        COLUMNS["size"].get(entry) is None and COLUMNS["d_model"].get(entry) is not None
        for entry in entries
    )


def _model_cell(entry: Entry) -> TableCell:
    return _word_cell(model_name(entry))


def _attention_cell(entry: Entry) -> TableCell:
    return _word_cell(fact_text(COLUMNS["attention"].get(entry)))


def _compile_cell(entry: Entry) -> TableCell:
    # "True" or "False", as a data frame prints it
    return _word_cell(COLUMNS["compile"].get(entry))


def _status_cell(entry: Entry) -> TableCell:
    return TableCell(entry.status, _word_for(entry.status))


def _dtype_cell(entry: Entry) -> TableCell:
    precision = COLUMNS["precision"].get(entry)
    return _word_cell(_DTYPES.get(precision, precision))


def _word_cell(value: object) -> TableCell:
    return TableCell(value, "" if value is None else str(value))


def _fact_column(name: str) -> CellFunction:
    return lambda entry: fact_cell([entry], column(name))


def _figure_column(name: str, show: Callable[[float], str]) -> CellFunction:
    """Return a function that makes a run's cell of the figure ``name``; ``show`` makes the text of the cell."""

    def make_cell(entry: Entry) -> TableCell:
        # The forward pass alone is not a time of both passes.
        needs_backward = name.startswith("forward_backward")
        if needs_backward and COLUMNS["backward_s"].get(entry) is None:
            return TableCell()
        value = COLUMNS[name].get(entry)
        return TableCell(value, "" if value is None else show(value))

    return make_cell


def _six_digits(seconds: float) -> str:
    return f"{seconds:.6g}"


def _mib_text(count: float) -> str:
    digits = 1 if abs(count) >= 100 * 2**20 else 3
    return f"{count / 2**20:,.{digits}f} MiB"


# -- modes of a step ---------------------------------------------------------------------------------------------------

# The modes of a step: the part whose time is the mode's figure → the title. Each mode includes the ones before it.
MODES = {
    "forward": "forward",
    "forward_backward": "forward + backward",
    "step": "full step",
}
_FACTS_OF_MODES = tuple(COLUMNS[name] for name in ("verb", "optimizer", "parameters"))


def modes(entries: Sequence[Entry]) -> Table:
    """Return a row for each size and a column for each mode of a step: mean ± standard deviation of the steps."""
    groups = single_run_groups(entries)
    facts = [COLUMNS["size"], COLUMNS["parameters"]]
    facts += [fact for fact in distinguishing(entries) if fact not in _FACTS_OF_MODES]
    if any(entry.cell is not None and entry.cell.repeat for entry in entries):
        facts.append(COLUMNS["repeat"])
    row_facts = list(dict.fromkeys(facts))
    rows = list(group_by_facts(entries, row_facts).values())
    headings = [heading(fact, rows) for fact in row_facts]
    for part, title in MODES.items():
        title_with_unit = f"{title} ({_STEP.shown_unit})"
        headings.append(Heading(f"{part}_s", title_with_unit, figures=True))
    body = []
    for row in rows:
        cells = [fact_cell(row, fact) for fact in row_facts]
        cells += [_mode_cell(row, part) for part in MODES]
        body.append(cells)
    lines_above = ["mean ± standard deviation of the steps"]
    lines_above += shared_fact_lines(rows, [*row_facts, *_FACTS_OF_MODES])
    lines_below = notes(groups, message_columns(naming_columns(groups)))
    return Table(headings, body, lines_above, lines_below)


def _mode_of(entry: Entry) -> str:
    """Return which passes a run measures: forward, forward and backward, or a step with an optimizer."""
    if entry.verb != "fit":
        return "forward"
    has_no_optimizer = COLUMNS["optimizer"].get(entry) == "none"
    return "forward_backward" if has_no_optimizer else "step"


def _runs_that_time(group: RunGroup, part: str) -> list[Entry]:
    """Return the runs whose step is exactly ``part``; if there are none, those of the next longer mode.

    Modes are not mixed, because an optimizer makes both passes slower.
    """
    all_modes = list(MODES)
    for mode in all_modes[all_modes.index(part) :]:
        runs = [entry for entry in group if _mode_of(entry) == mode]
        if runs:
            return runs
    return []


def _mode_cell(group: RunGroup, part: str) -> TableCell:
    """Return the mean time of ``part`` with its standard deviation; without a time, how the run ended."""
    runs = _runs_that_time(group, part)
    if not runs:
        return TableCell()
    run = runs[0]
    mean = COLUMNS[f"{part}_s"].get(run)
    std = COLUMNS[f"{part}_std_s"].get(run)
    if mean is None:
        return TableCell(text=_word_for(run.status), status=run.status)
    text = _STEP.show(mean, unit=False, digits=2)
    if std is not None:
        text += f" ± {_STEP.show(std, unit=False, digits=2)}"
    if len(runs) > 1:
        text += f" (of {len(runs)})"
    return TableCell(mean, text, std=std)


# -- devices -----------------------------------------------------------------------------------------------------------

_DEVICE_PARTS = {"forward": "forward", "forward+backward": "forward_backward"}
_UPPER_CASE = ("cpu", "cuda", "mps", "xpu")


def devices(entries: Sequence[Entry]) -> Table:
    """Return a row for each size and columns for each device: the mean times of forward, and of forward + backward."""
    device = COLUMNS["device"]
    fact_names = ["size", *DIMENSIONS]
    if any(entry.cut is not None for entry in entries):
        fact_names.append("warmup_steps")
    row_facts = [COLUMNS[name] for name in fact_names]
    rows = group_by_facts(entries, row_facts)
    column_facts = group_by_facts(entries, [device])
    cells = group_by_facts(entries, [*row_facts, device])

    body = []
    for row_key, group in rows.items():
        row = [fact_cell(group, fact) for fact in row_facts]
        row.append(_parameters_cell(group))
        for device_key in column_facts:
            runs = cells.get((*row_key, *device_key), ())
            row += [_milliseconds_cell(runs, part) for part in _DEVICE_PARTS.values()]
        body.append(row)

    headings = [Heading("Size", "Size")]
    for name in fact_names[1:]:
        headings.append(Heading(name, name, figures=True))
    headings.append(Heading("num_params", "num_params"))
    shown_names = device_names(entries)
    for group in column_facts.values():
        device_name = shown_names[fact_value(group, device)]
        if device_name in _UPPER_CASE:
            device_name = device_name.upper()
        for part in _DEVICE_PARTS:
            title = f"{device_name} {part}"
            headings.append(Heading(title, title, figures=True))

    groups = list(cells.values())
    is_merged = any(len(group) > 1 for group in groups)
    lines_above = shared_fact_lines(groups, [*row_facts, device, COLUMNS["parameters"]])
    lines_below = [
        MERGE_NOTE if is_merged else "means",
        *notes(groups, [*row_facts, device]),
    ]
    return Table(headings, body, lines_above, lines_below)


def _milliseconds_cell(group: RunGroup, part: str) -> TableCell:
    """Return the cell of the mean time of ``part`` in ms; that of a single run also has its standard deviation."""
    runs = _runs_that_time(group, part)
    cell = value_cell(runs, COLUMNS[f"{part}_s"], interval=False)
    if cell.value is None:
        return cell
    std = None
    if len(runs) == 1:
        std = COLUMNS[f"{part}_std_s"].get(runs[0])
    milliseconds = _STEP.show(cell.value, unit=False, digits=1)
    return replace(cell, text=f"{milliseconds}ms", std=std)


def _parameters_cell(group: RunGroup) -> TableCell:
    """Return the number of parameters; an empty cell if it is unknown or the runs differ in it."""
    counts = distinct_values(parameters(entry, embedding=False) for entry in group)
    if len(counts) != 1:
        return TableCell()
    return TableCell(counts[0], f"{counts[0] / 1e6:.1f}M (without token embedding)")


# -- blocks ------------------------------------------------------------------------------------------------------------

_PASS_TITLES = {
    "forward": "Forward pass",
    "forward_backward": "Forward + Backward pass",
}
_SUMMARY = ("Model", "Params", "Forward (s)", "Backward (s)")
_BANNER_FACTS = ("device", "verb", "batch_size", "context_length", "precision")
_LONGEST_RULE = 80


def blocks(entries: Sequence[Entry]) -> Table:
    """Return a block of text for each entry below a banner for each cut of the steps, and a table of all entries.

    A cut is a choice of warm-up and measured steps (``--warmup``, ``--steps``).
    """
    lines_above: list[str] = []
    rows = []
    warmup_steps = COLUMNS["warmup_steps"]
    ordered = sorted(entries, key=lambda entry: sort_key(warmup_steps.get(entry)))
    entry_names = iter(names(ordered))
    for cut, entries_of_cut in groupby(ordered, key=lambda entry: entry.cut):
        cut_entries = list(entries_of_cut)
        lines_above += _banner_lines(cut_entries, cut)
        for entry in cut_entries:
            name = next(entry_names)
            steps = steps_after(entry) if entry.shows_steps else None
            lines_above += [*_model_block(entry, name, steps), ""]
            rows.append(_summary_row(entry, name, steps))
    headings = titled_headings(_SUMMARY, figures=("Params",))
    return Table(headings, rows, lines_above, verbatim=True)


def _banner_lines(entries: Sequence[Entry], cut: Cut | None) -> list[str]:
    """Return the lines above the runs of one cut: the facts that they share, between two horizontal rules."""
    facts = []
    if cut is not None and cut.warmup is not None:
        facts.append(f"warm-up {cut.warmup}")
    if cut is not None and cut.steps is not None:
        facts.append(f"steps {cut.steps}")
    for name in _BANNER_FACTS:
        fact = COLUMNS[name]
        values = [fact.get(entry) for entry in entries]
        is_shared = None not in values and len(distinct_values(values)) == 1
        if is_shared:
            facts.append(fact_phrase(fact, values[0]))
    text = ", ".join(facts)
    rule = "=" * min(len(text), _LONGEST_RULE)
    return [rule, text, rule, ""]


def _model_block(entry: Entry, name: str, steps: Steps | None) -> list[str]:
    """Return the lines of one model: its size, its passes step by step, and the ratio of backward to forward."""
    size = str(COLUMNS["size"].get(entry) or entry.name)
    parameters_text = fact_cell([entry], COLUMNS["parameters"]).text or "unknown"
    # ``name`` begins with the size, followed by what else distinguishes the run.
    details = name[len(size) :]
    lines = [f"{size.upper()} MODEL{details}", f"Parameters: {parameters_text}"]
    if entry.status != "ok":
        word = _word_for(entry.status)
        lines.append(f"{word}: {entry.reason}" if entry.reason else word)
    if steps is None:
        return lines
    has_backward = bool(steps.times["backward"].max)
    lines += _pass_lines("forward", steps)
    if has_backward:
        lines += _pass_lines("forward_backward", steps)
    forward_s = steps.times["forward"].mean
    backward_s = steps.times["backward"].mean
    if backward_s:
        ratio = f" ({backward_s / forward_s:.2f}x forward)" if forward_s else ""
        lines.append(f"  Backward-only: {backward_s:.6f} seconds{ratio}")
    return lines


def _pass_lines(part: str, steps: Steps) -> list[str]:
    """Return the lines of one pass: its warm-up and measured steps, their mean and coefficient of variation."""
    lines = [f"{_PASS_TITLES[part]}:"]
    if steps.left_out:
        lines += _step_lines("Warm-up", "Warm-up", steps.left_out, part)
    lines += _step_lines("Measurement", "Step", steps.rows, part)
    time = steps.times[part]
    if not time.n:
        return [*lines, "  no steps left"]
    cv = "" if time.cv is None else f" (CV: {time.cv:.2%})"
    return [*lines, f"  Mean: {_mean_and_std(time, ' ± ')} seconds{cv}"]


def _step_lines(kind: str, noun: str, rows: Sequence[StepRow], part: str) -> list[str]:
    """Return a heading for the ``kind`` of steps, and a line with the time of ``part`` for each of ``rows``."""
    lines = [f"  {kind} steps:"]
    for number, row in enumerate(rows, 1):
        lines.append(f"    {noun} {number}: {row.time(part):.6f} seconds")
    return lines


def _mean_and_std(time: TimeSummary, sign: str) -> str:
    if time.std is None:
        return f"{time.mean:.6f}"
    return f"{time.mean:.6f}{sign}{time.std:.6f}"


def _summary_row(entry: Entry, name: str, steps: Steps | None) -> list[TableCell]:
    """Return the cells of one model: its name, its parameters, and the mean times of both passes."""
    row = [TableCell(name, name), fact_cell([entry], COLUMNS["parameters"])]
    for part in ("forward", "backward"):
        if steps is None:
            row.append(TableCell(text=_word_for(entry.status), status=entry.status))
        elif steps.times[part].max:
            time = steps.times[part]
            row.append(TableCell(time.mean, _mean_and_std(time, "±"), std=time.std))
        else:
            row.append(TableCell())
    return row


# -- warm-ups ----------------------------------------------------------------------------------------------------------


def warmups(entries: Sequence[Entry]) -> Table:
    """Return a row for each run, pass and number of warm-up steps: mean and standard deviation in seconds."""
    titles = ("", "forward_only", "warmup_steps", "benchmark_steps", "avg", "std")
    runs: dict[Path, list[Entry]] = {}
    for entry in entries:
        runs.setdefault(entry.folder, []).append(entry)
    run_names = names([cuts[0] for cuts in runs.values()])
    body = []
    for name, cuts in zip(run_names, runs.values(), strict=True):
        for cut in cuts:
            if COLUMNS["forward_s"].get(cut) is not None:
                body.append(_warmup_row(cut, name, "forward"))
        for cut in cuts:
            if COLUMNS["backward_s"].get(cut) is not None:
                body.append(_warmup_row(cut, name, "forward_backward"))
    headings = []
    for index, title in enumerate(titles):
        headings.append(Heading(title or "model", title, figures=index > 1))
    return Table(headings, body)


def _warmup_row(entry: Entry, name: str, part: str) -> list[TableCell]:
    """Return the row of one ``part`` of a run: its numbers of steps, mean and standard deviation."""
    is_forward_only = part == "forward"
    cells = [_word_cell(name), _word_cell(is_forward_only)]
    for fact in ("warmup_steps", "benchmark_steps"):
        cells.append(_word_cell(COLUMNS[fact].get(entry)))
    for statistic in (f"{part}_s", f"{part}_std_s"):
        cells.append(_figure_column(statistic, _six_digits)(entry))
    return cells


# -- all of them -------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Sequence[Entry]], Table]] = {
    "blocks": blocks,
    "wide": wide,
    "devices": devices,
    "modes": modes,
    "warmups": warmups,
}


def laid_out(entries: Sequence[Entry], layout: str) -> Table:
    """Return the table of ``entries`` in the ``layout``, smallest sizes first; cells of a sweep keep their order."""
    return LAYOUTS[layout](by_size(entries))


def by_size(entries: Sequence[Entry]) -> list[Entry]:
    """Return ``entries``, which are in alphabetical order, from the smallest to the largest size.

    The cells of a single sweep keep their order in the sweep.
    """
    sweeps = {entry.sweep for entry in entries}
    is_one_sweep = len(sweeps) == 1 and None not in sweeps
    if is_one_sweep:
        return list(entries)
    size = COLUMNS["size"]
    return sorted(entries, key=lambda entry: sort_key(size.get(entry)))
