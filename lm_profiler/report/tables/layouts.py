"""Layouts of tables: pivots, and layouts of published reports with their column names."""

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
from lm_profiler.report.tables.rows import (
    MERGE_NOTE,
    cell,
    distinguishing_facts,
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
from lm_profiler.report.tables.table import Heading, Table, TableCell, fact_text
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    Column,
    column,
    parameters,
    preset_of,
)

_STEP = TIMES["step"]

# -- pivots ------------------------------------------------------------------------------------------------------------


def pivot(
    entries: Sequence[Entry],
    down: Sequence[Column],
    across: Sequence[Column],
    value: Column,
) -> Table:
    """Return ``value`` by the facts ``down`` and ``across``, or a word for why there is none."""
    facts = [*down, *across]
    rows = group_by_facts(entries, down)
    columns = group_by_facts(entries, across)
    cells = group_by_facts(entries, facts)
    fact_headings = [heading(fact, list(rows.values())) for fact in down]
    names = [fact_heading.name for fact_heading in fact_headings]
    titles = _distinct_titles(
        names, [_pivot_title(group, across) for group in columns.values()]
    )
    headings = [
        *fact_headings,
        *(Heading(title, title, figures=True) for title in titles),
    ]

    body = []
    has_intervals = False
    for row_key, group in rows.items():
        row = [fact_cell(group, fact) for fact in down]
        for column_key in columns:
            row.append(value_cell(cells.get((*row_key, *column_key), ()), value))
        has_intervals = has_intervals or any(cell.low is not None for cell in row)
        body.append(row)

    title = heading(value, []).title
    if any(len(group) > 1 for group in cells.values()):
        title += f": {MERGE_NOTE}"
    elif has_intervals:
        title += ": mean [95 % interval]"
    return Table(headings, body, [title], notes(list(cells.values()), facts, [value]))


def _pivot_title(group: RunGroup, across: Sequence[Column]) -> str:
    return " ".join(fact_text(fact_value(group, fact)) for fact in across) or "unknown"


def _distinct_titles(names: Sequence[str], titles: Sequence[str]) -> list[str]:
    """Return ``titles`` with a number where one was used before: facts of different types may look the same.

    ``names`` are those of the columns to their left.
    """
    used = [*names, *titles]
    distinct = []
    for position, title in enumerate(titles, len(names)):
        is_first = used.index(title) == position
        distinct.append(title if is_first else f"{title} ({position})")
    return distinct


def value_cell(group: RunGroup, value: Column, interval: bool = True) -> TableCell:
    """Return the figure of ``group``, with the number of its runs if there are several, or a word for how it ended."""
    if not group:
        return TableCell()
    if value.quantity is None:
        return fact_cell(group, value)
    good = [entry for entry in group if entry.status == "ok"]
    tried = [entry for entry in group if entry.status != "not run"]
    if not good:
        word = distinct_values(entry.status for entry in (tried or group))[0]
        return TableCell(text=_word_for(word), status=status_text(tried or group))
    figure_cell = cell(good, value, interval)
    text = figure_cell.text
    if len(good) > 1:
        text += f" n={len(good)}"
    failed = [entry for entry in tried if entry.status != "ok"]
    if failed:
        text += f" ({status_counts(failed)})"
    return replace(figure_cell, text=text)


def _word_for(status: str) -> str:
    return STATUS_WORDS.get(status, status)


# -- names of runs and devices -----------------------------------------------------------------------------------------

_MODEL_FACTS = ("size", *DIMENSIONS, "parameters")


def model_name(entry: Entry) -> str:
    """Return the size with the dimensions that are not the preset's, or the run's name for a module without sizes."""
    size = COLUMNS["size"].get(entry)
    if size is None:
        return entry.name
    changed = []
    for name in DIMENSIONS:
        value = COLUMNS[name].get(entry)
        if value != getattr(preset_of(size), name, None):
            changed.append(f"{name} {value}")
    return f"{size} ({', '.join(changed)})" if changed else str(size)


def _distinguishing(entries: Sequence[Entry]) -> list[Column]:
    """Return the facts that distinguish ``entries``, except facts about the outcome."""
    outcome = COLUMNS["steadiness"].group
    return [
        fact
        for fact in distinguishing_facts(single_run_groups(entries))
        if fact.group != outcome
    ]


def names(entries: Sequence[Entry]) -> list[str]:
    """Return a name for each entry: its model, the other facts that distinguish it, and its run if they do not."""
    facts = [fact for fact in _distinguishing(entries) if fact.name not in _MODEL_FACTS]
    labels = []
    for entry in entries:
        words = [
            model_name(entry),
            *(fact_phrase(fact, fact.get(entry)) for fact in facts),
        ]
        labels.append(", ".join(filter(None, words)))
    uses = Counter(labels)
    distinct = []
    for label, entry in zip(labels, entries, strict=True):
        needs_run = uses[label] > 1 and label != entry.name
        distinct.append(f"{label}, {entry.name}" if needs_run else label)
    return distinct


def device_names(entries: Sequence[Entry]) -> dict[str | None, str]:
    """Return the type of each device, such as ``cuda``, or its name where several are of one type."""
    types: dict[str | None, str] = {}
    for entry in entries:
        environment = entry.environment
        types[COLUMNS["device"].get(entry)] = (
            "unknown" if environment is None else environment.device_type
        )
    uses = Counter(types.values())
    return {
        name: kind if name is None or uses[kind] == 1 else name
        for name, kind in types.items()
    }


# -- wide --------------------------------------------------------------------------------------------------------------

CellFunction = Callable[[Entry], TableCell]
_HELD = {
    "model mem": "held_start_bytes",
    "model+fwd mem": "held_forward_bytes",
    "model+fwd+back mem": "held_backward_bytes",
    "fwd mem": "saved_bytes",
    "back mem": "backward_added_bytes",
}
_PASSES = {"forward": "fwd", "backward": "back", "forward_backward": "fwd & back"}
_DTYPES = {
    "64-true": "float64",
    "32-true": "float32",
    "16-true": "float16",
    "bf16-true": "bfloat16",
}
_WORD_COLUMNS = ("device", "compile", "model", "dtype", "status")
_WIDE_FACTS = (
    *_MODEL_FACTS,
    "device",
    "batch_size",
    "compile",
    "context_length",
    "precision",
    "warmup_steps",
)


def wide(entries: Sequence[Entry]) -> Table:
    """Return a wide row for each run: means and standard deviations in seconds; memory as well for attention alone."""
    # Repeats have separate rows, and so do training, the forward pass alone, and each cut of the steps.
    groups = single_run_groups(entries)
    shown_names = {*_WIDE_FACTS}
    if _is_attention_alone(entries):
        shown_names.add("attention")  # it stands in the place of the model's name
    more_facts = [
        fact for fact in _distinguishing(entries) if fact.name not in shown_names
    ]
    columns = _wide_columns(entries, [fact.name for fact in more_facts])
    words = {
        *_WORD_COLUMNS,
        *(fact.name for fact in more_facts if not heading(fact, groups).figures),
    }
    headings = [Heading(title, title, figures=title not in words) for title in columns]
    body = []
    for entry in entries:
        body.append([cell_of(entry) for cell_of in columns.values()])
    return Table(
        headings, body, below=notes(groups, message_columns(naming_columns(groups)))
    )


def _wide_columns(
    entries: Sequence[Entry], more_facts: Sequence[str]
) -> dict[str, CellFunction]:
    """Return the columns of ``wide`` by their titles, each as a function that makes the cell of a run."""
    is_attention = _is_attention_alone(entries)
    types = device_names(entries)
    columns: dict[str, CellFunction] = {
        "device": lambda entry: _word_cell(types[COLUMNS["device"].get(entry)]),
        "batch_size": _fact_column("batch_size"),
        "compile": lambda entry: _word_cell(
            COLUMNS["compile"].get(entry)
        ),  # as a frame prints it: True, not true
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
    for part, title in _PASSES.items():
        columns[f"{title} avg (sec)"] = _figure_column(f"{part}_s", _six_digits)
        columns[f"{title} std (sec)"] = _figure_column(f"{part}_std_s", _six_digits)
    if is_attention:
        for title, name in _HELD.items():
            columns[title] = _figure_column(name, _mib)
    columns["status"] = lambda entry: TableCell(entry.status, _word_for(entry.status))
    if any(entry.cell is not None and entry.cell.repeat for entry in entries):
        columns["repeat"] = _fact_column("repeat")
    return columns


def _is_attention_alone(entries: Sequence[Entry]) -> bool:
    """Whether all runs are of attention alone, which has a width and no size."""
    return all(
        COLUMNS["size"].get(entry) is None and COLUMNS["d_model"].get(entry) is not None
        for entry in entries
    )


def _model_cell(entry: Entry) -> TableCell:
    return _word_cell(model_name(entry))


def _attention_cell(entry: Entry) -> TableCell:
    return _word_cell(fact_text(COLUMNS["attention"].get(entry)))


def _dtype_cell(entry: Entry) -> TableCell:
    precision = COLUMNS["precision"].get(entry)
    return _word_cell(_DTYPES.get(precision, precision))


def _word_cell(value: object) -> TableCell:
    return TableCell(value, "" if value is None else str(value))


def _fact_column(name: str) -> CellFunction:
    return lambda entry: fact_cell([entry], column(name))


def _figure_column(name: str, show: Callable[[float], str]) -> CellFunction:
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


def _mib(count: float) -> str:
    digits = 1 if abs(count) >= 100 * 2**20 else 3
    return f"{count / 2**20:,.{digits}f} MiB"


# -- modes of a step ---------------------------------------------------------------------------------------------------

# the extent of a run's step, by the part whose time is its figure; each mode has the parts before it, too
MODES = {
    "forward": "forward",
    "forward_backward": "forward + backward",
    "step": "full step",
}
_FACTS_OF_MODES = tuple(COLUMNS[name] for name in ("verb", "optimizer", "parameters"))


def modes(entries: Sequence[Entry]) -> Table:
    """Return sizes down and the modes of a step across: the mean of each ± the standard deviation of its steps."""
    groups = single_run_groups(entries)
    facts = [COLUMNS["size"], COLUMNS["parameters"]]
    facts += [fact for fact in _distinguishing(entries) if fact not in _FACTS_OF_MODES]
    if any(entry.cell is not None and entry.cell.repeat for entry in entries):
        facts.append(COLUMNS["repeat"])
    down = list(dict.fromkeys(facts))
    rows = list(group_by_facts(entries, down).values())
    headings = [heading(fact, rows) for fact in down]
    for part, title in MODES.items():
        headings.append(
            Heading(f"{part}_s", f"{title} ({_STEP.shown_unit})", figures=True)
        )
    body = []
    for row in rows:
        cells = [fact_cell(row, fact) for fact in down]
        cells += [_mode_cell(row, part) for part in MODES]
        body.append(cells)
    above = [
        "mean ± standard deviation of the steps",
        *shared_fact_lines(rows, [*down, *_FACTS_OF_MODES]),
    ]
    return Table(
        headings, body, above, notes(groups, message_columns(naming_columns(groups)))
    )


def _mode(entry: Entry) -> str:
    if entry.verb != "fit":
        return "forward"
    has_no_optimizer = COLUMNS["optimizer"].get(entry) == "none"
    return "forward_backward" if has_no_optimizer else "step"


def _timed_by(group: RunGroup, part: str) -> list[Entry]:
    """Return the runs that time a part of the step: those that do exactly that, else those of the next longer mode.

    Others would mix in another time: an optimizer makes both passes slower.
    """
    order = list(MODES)
    for mode in order[order.index(part) :]:
        timed = [entry for entry in group if _mode(entry) == mode]
        if timed:
            return timed
    return []


def _mode_cell(group: RunGroup, part: str) -> TableCell:
    timed = _timed_by(group, part)
    if not timed:
        return TableCell()
    mean = COLUMNS[f"{part}_s"].get(timed[0])
    std = COLUMNS[f"{part}_std_s"].get(timed[0])
    if mean is None:
        return TableCell(text=_word_for(timed[0].status), status=timed[0].status)
    text = " ± ".join(
        _STEP.show(seconds, unit=False, digits=2)
        for seconds in (mean, std)
        if seconds is not None
    )
    if len(timed) > 1:
        text += f" (of {len(timed)})"
    return TableCell(mean, text, std=std)


# -- devices -----------------------------------------------------------------------------------------------------------

_DEVICE_PARTS = {"forward": "forward", "forward+backward": "forward_backward"}
_UPPER_CASE = ("cpu", "cuda", "mps", "xpu")


def devices(entries: Sequence[Entry]) -> Table:
    """Return sizes down and devices across: the mean forward pass, and forward with backward."""
    device = COLUMNS["device"]
    fact_names = ["size", *DIMENSIONS]
    if any(entry.cut is not None for entry in entries):
        fact_names.append("warmup_steps")
    down = [COLUMNS[name] for name in fact_names]
    rows = group_by_facts(entries, down)
    across = group_by_facts(entries, [device])
    cells = group_by_facts(entries, [*down, device])

    body = []
    for row_key, group in rows.items():
        row = [*(fact_cell(group, fact) for fact in down), _parameters_cell(group)]
        for device_key in across:
            runs = cells.get((*row_key, *device_key), ())
            row += [_milliseconds_cell(runs, part) for part in _DEVICE_PARTS.values()]
        body.append(row)

    headings = [
        Heading("Size", "Size"),
        *(Heading(name, name, figures=True) for name in fact_names[1:]),
    ]
    headings.append(Heading("num_params", "num_params"))
    types = device_names(entries)
    for group in across.values():
        kind = types[fact_value(group, device)]
        title = kind.upper() if kind in _UPPER_CASE else kind
        headings += [
            Heading(f"{title} {part}", f"{title} {part}", figures=True)
            for part in _DEVICE_PARTS
        ]

    groups = list(cells.values())
    is_merged = any(len(group) > 1 for group in groups)
    above = shared_fact_lines(groups, [*down, device, COLUMNS["parameters"]])
    below = [MERGE_NOTE if is_merged else "means", *notes(groups, [*down, device])]
    return Table(headings, body, above, below)


def _milliseconds_cell(group: RunGroup, part: str) -> TableCell:
    timed = _timed_by(group, part)
    cell = value_cell(timed, COLUMNS[f"{part}_s"], interval=False)
    if cell.value is None:
        return cell
    std = COLUMNS[f"{part}_std_s"].get(timed[0]) if len(timed) == 1 else None
    return replace(
        cell, text=f"{_STEP.show(cell.value, unit=False, digits=1)}ms", std=std
    )


def _parameters_cell(group: RunGroup) -> TableCell:
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
    """Return a block of text for each entry, a banner for each cut of the steps, and a table that sums them up."""
    above: list[str] = []
    rows = []
    ordered = sorted(
        entries, key=lambda entry: sort_key(COLUMNS["warmup_steps"].get(entry))
    )
    for cut, pairs in groupby(
        zip(ordered, names(ordered), strict=True), lambda pair: pair[0].cut
    ):
        named_entries = list(pairs)
        above += _banner([entry for entry, _ in named_entries], cut)
        for entry, name in named_entries:
            steps = steps_after(entry) if entry.shows_steps else None
            above += [*_block(entry, name, steps), ""]
            rows.append(_summary_row(entry, name, steps))
    headings = [Heading(title, title, title == "Params") for title in _SUMMARY]
    return Table(headings, rows, above, verbatim=True)


def _banner(entries: Sequence[Entry], cut: Cut | None) -> list[str]:
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


def _block(entry: Entry, name: str, steps: Steps | None) -> list[str]:
    size = str(COLUMNS["size"].get(entry) or entry.name)
    parameters_text = fact_cell([entry], COLUMNS["parameters"]).text or "unknown"
    lines = [
        f"{size.upper()} MODEL{name[len(size) :]}",
        f"Parameters: {parameters_text}",
    ]
    if entry.status != "ok":
        word = _word_for(entry.status)
        lines.append(f"{word}: {entry.reason}" if entry.reason else word)
    if steps is None:
        return lines
    has_backward = bool(steps.times["backward"].max)
    lines += _pass_lines("forward", steps)
    if has_backward:
        lines += _pass_lines("forward_backward", steps)
    forward_s, backward_s = steps.times["forward"].mean, steps.times["backward"].mean
    if backward_s:
        ratio = f" ({backward_s / forward_s:.2f}x forward)" if forward_s else ""
        lines.append(f"  Backward-only: {backward_s:.6f} seconds{ratio}")
    return lines


def _pass_lines(part: str, steps: Steps) -> list[str]:
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
    lines = [f"  {kind} steps:"]
    for number, row in enumerate(rows, 1):
        lines.append(f"    {noun} {number}: {row.time(part):.6f} seconds")
    return lines


def _mean_and_std(time: TimeSummary, sign: str) -> str:
    if time.std is None:
        return f"{time.mean:.6f}"
    return f"{time.mean:.6f}{sign}{time.std:.6f}"


def _summary_row(entry: Entry, name: str, steps: Steps | None) -> list[TableCell]:
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
    """Return a row for each run, pass and warm-up: the mean seconds and their standard deviation."""
    titles = ("", "forward_only", "warmup_steps", "benchmark_steps", "avg", "std")
    runs: dict[Path, list[Entry]] = {}
    for entry in entries:
        runs.setdefault(entry.folder, []).append(entry)
    run_names = names([cuts[0] for cuts in runs.values()])
    body = []
    for name, cuts in zip(run_names, runs.values(), strict=True):
        for part, needed in (
            ("forward", "forward_s"),
            ("forward_backward", "backward_s"),
        ):
            for cut in cuts:
                if COLUMNS[needed].get(cut) is not None:
                    body.append(_warmup_row(cut, name, part))
    headings = [
        Heading(title or "model", title, index > 1)
        for index, title in enumerate(titles)
    ]
    return Table(headings, body)


def _warmup_row(entry: Entry, name: str, part: str) -> list[TableCell]:
    facts = [name, part == "forward"]
    facts += [COLUMNS[fact].get(entry) for fact in ("warmup_steps", "benchmark_steps")]
    cells = [_word_cell(fact) for fact in facts]
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
    """Return the table of ``entries`` in the ``layout``, smallest sizes first; cells of a sweep keep its order."""
    return LAYOUTS[layout](by_size(entries))


def by_size(entries: Sequence[Entry]) -> list[Entry]:
    """Return runs of different sizes from the smallest on: the names of their folders are in alphabetical order.

    The cells of one sweep stay in the order in which it names them.
    """
    sweeps = {entry.sweep for entry in entries}
    is_one_sweep = len(sweeps) == 1 and None not in sweeps
    if is_one_sweep:
        return list(entries)
    size = COLUMNS["size"]
    return sorted(entries, key=lambda entry: sort_key(size.get(entry)))
