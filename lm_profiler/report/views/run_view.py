"""The Run view: what limits the run, its steps and its phases; other lines and figures are in folds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from lm_profiler.analysis.steps.summaries import mean_over_ranks
from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import ms_text
from lm_profiler.record.quantities import PARTS, TIMED, count_text
from lm_profiler.record.run_record import OtherByOwner, RecordError, RunRecord
from lm_profiler.record.steps import StepRow
from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.run.run_page import (
    failure_lines,
    main_lines,
    summary_lines,
    time_table,
)
from lm_profiler.report.run.sections import sections
from lm_profiler.report.run.verdict import odd_text, verdict_lines
from lm_profiler.report.views.blocks import (
    Json,
    bar,
    bars,
    card,
    chart,
    choice,
    command,
    escaped,
    fold,
    line,
    piece,
    section,
    side_by_side,
    table,
)
from lm_profiler.report.views.view import Limits, View, left_no_run

# A warm-up step that takes this many times as long as all others is cut off, so that the others can be read.
_SLOW_WARMUP = 2
_AXIS_HEIGHT = 1.2  # the end of the axis as a multiple of the longest measured step, if the warm-up is cut off
# the most owners that are drawn; the fold with all figures has the others too
_MOST_OWNERS = 12


def blocks(entry: Entry, limits: Limits) -> list[Json]:
    """Return the page of a run: the verdict, its steps and phases, and every figure."""
    record = entry.record
    assert record is not None
    view_blocks = [_conclusion_card(record)]
    view_blocks += _steps_card(entry, record, limits.steps)
    view_blocks += _phase_cards(record)
    view_blocks += _more_lines(record)
    if record.other_by_owner is not None and record.other_by_owner.actions:
        view_blocks.append(_owners_fold(record.other_by_owner))
    view_blocks.append(fold("Every figure", *_figure_sections(record)))
    if record.command:
        view_blocks.append(fold("Repeat it", command(record.command)))
    return view_blocks


def missing(entry: Entry) -> str | None:
    return left_no_run(entry) if entry.record is None else None


RUN = View("run", "Run", blocks, missing)


def _conclusion_card(record: RunRecord) -> Json:
    """Return the card with the conclusion: how the run failed, or what limits it and what to do next."""
    head_blocks = [line(text, "error") for text in failure_lines(record)]
    verdict = verdict_lines(record)
    if verdict:
        bound_line, next_line = verdict
        bound_by = bound_line.partition(": ")[2]
        next_step = next_line.partition(": ")[2]
        head_blocks.append(line(bound_by, "headline"))
        head_blocks.append(line(f"Next: {next_step}", "next"))
    head_blocks += [line(text) for text in main_lines(record)]
    head_blocks.append(line(_start_text(record), "quiet"))
    title = time_table(record).title or record.name
    return card(title, *head_blocks, words=[record.status, *record.words])


def _start_text(record: RunRecord) -> str:
    """Return when the run started, in UTC, and how long it took if it has ended."""
    try:
        started = datetime.fromisoformat(record.started).astimezone(timezone.utc)
        text = f"Started {started:%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        text = f"Started {record.started}"
    if record.status == "unfinished":
        return text
    return f"{text}, took {record.duration_s:,.1f} s"


def _phase_cards(record: RunRecord) -> list[Json]:
    times = replace(time_table(record), above=[], below=[])
    return [card("Time by phase", *table(times))] if times.rows else []


def _more_lines(record: RunRecord) -> list[Json]:
    """Return a fold with the notes and the further lines of the terminal; its title has their numbers."""
    head_lines = {*main_lines(record), *verdict_lines(record), *failure_lines(record)}
    notes = []
    further_lines = []
    for text in summary_lines(record):
        if text in head_lines:
            continue
        if text.startswith(("note: ", "odd: ")):
            notes.append(line(text, "note"))
        else:
            further_lines.append(line(text))
    counts = []
    if notes:
        counts.append(count_text(len(notes), "note"))
    if further_lines:
        counts.append(count_text(len(further_lines), "further line"))
    if not counts:
        return []
    return [fold(", ".join(counts), *notes, *further_lines)]


def _owners_fold(owned: OtherByOwner) -> Json:
    """Return a fold with the owners of the time outside the phases: a bar for each of the longest actions."""
    actions = owned.actions[:_MOST_OWNERS]
    longest_s = max(action.seconds for action in actions)
    rows = []
    for action in actions:
        ms = ms_text(action.seconds)
        calls = f"{action.calls:,g}"
        steps_with_action = f"{action.in_steps} of {owned.steps}"
        cells = [ms, calls, steps_with_action]
        length = action.seconds / longest_s if longest_s else 0.0
        pieces = [piece(0.0, length, PART_COLOURS["other"], f"{ms} ms")]
        rows.append(bar(action.name, pieces, cells))
    steps = count_text(owned.steps, "step")
    text = f"Each action of {steps} was timed: {ms_text(owned.seconds)} ms per step in total."
    if len(owned.actions) > _MOST_OWNERS:
        text += (
            f" The longest {_MOST_OWNERS} of {len(owned.actions):,} actions are shown."
        )
    drawn = bars(["owner and action", "", "ms", "calls", "in steps"], rows)
    return fold(
        "Which code uses the time outside of the phases", line(text, "quiet"), drawn
    )


def _figure_sections(record: RunRecord) -> list[Json]:
    """Return the sections of ``report RUN``; small ones are placed side by side."""
    section_blocks: list[Json] = []
    for printed_table in sections(record):
        # The section shows the title of its first table; further tables of the section have no title.
        blocks_of_table = table(replace(printed_table, title=""))
        if printed_table.title:
            section_blocks.append(section(printed_table.title, *blocks_of_table))
        else:
            section_blocks[-1]["blocks"] += blocks_of_table
    return [side_by_side(*section_blocks)]


# -- the chart of the steps --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StepColumns:
    """The steps that are drawn, as timed by one clock; the first ``warmup`` of them are in no summary."""

    rows: Sequence[StepRow]
    warmup: int
    clock: str

    def column_ms(self, part: str) -> list[float | None]:
        return [self.time_ms(row, part) for row in self.rows]

    def time_ms(self, row: StepRow, part: str = "step") -> float | None:
        """Return the time of a part in ms; None if the device failed before it reported the time."""
        if row.seconds is None and self.clock == "device":
            return None
        return round(row.time(part, self.clock) * 1e3, 6)


def _steps_card(entry: Entry, record: RunRecord, most_steps: int) -> list[Json]:
    """Return the card with the chart of warm-up and measured steps on each clock; no card without steps."""
    title = "Time of each step"
    if not record.steps:
        return []
    try:
        timed = entry.rows.of_stages("warmup", "measure")
    except RecordError as error:
        return [card(title, line(f"the steps: {error}", "error"))]
    means = mean_over_ranks(timed)
    if not means:
        return []
    stride = math.ceil(len(means) / most_steps)
    rows = means[::stride]
    warmup_rows = sum(row.stage == "warmup" for row in rows)
    # The figures of the run begin at measured step ``stretch.start``. Steps before it are drawn like warm-up.
    unused_rows = math.ceil(record.stretch.start / stride)
    warmup = min(warmup_rows + unused_rows, len(rows))
    row_by_step = {row.step: row for row in means}
    charts = {}
    for clock, name in _clock_titles(record, rows).items():
        steps = _StepColumns(rows, warmup, clock)
        charts[name] = [_chart_of_steps(steps, _odd_marks(record, row_by_step, steps))]
    notes = []
    if stride > 1:
        notes.append(f"The picture shows every {stride}th of {len(means):,} steps.")
    if len(record.rank_step_s) > 1:
        ranks = count_text(len(record.rank_step_s), "rank")
        waiting = "phases include waiting, which the Ranks view separates"
        notes.append(f"Means over {ranks}: {waiting}.")
    note_lines = [line(note, "quiet") for note in notes]
    if len(charts) > 1:
        return [card(title, *note_lines, choice("Clock", charts))]
    [single_chart] = charts.values()
    return [card(title, *note_lines, *single_chart)]


def _clock_titles(record: RunRecord, rows: Sequence[StepRow]) -> dict[str, str]:
    """Return the clocks that timed the steps, with their titles; without a device there is only the host's."""
    has_device = (
        record.environment is not None and record.environment.device_type != "cpu"
    )
    was_reported = any(row.seconds is not None for row in rows)
    if has_device and was_reported:
        return {"device": "Device clock", "host": "Host clock"}
    return {"host": "Host clock"}


def _chart_of_steps(steps: _StepColumns, odd_marks: list[Json]) -> Json:
    """Return the chart of the steps: a bar for each step, stacked from its phases, with marks at odd steps."""
    data: list[Json] = []
    numbers = [row.step for row in steps.rows]
    for part in PARTS:
        if part not in TIMED:
            continue
        column = steps.column_ms(part)
        if not any(column):
            continue
        trace = {
            "type": "bar",
            "name": part,
            "x": numbers,
            "y": column,
            "marker": {"color": PART_COLOURS[part]},
            "hovertemplate": f"{part}: %{{y:.3f}} ms<extra>step %{{x}}</extra>",
        }
        data.append(trace)
    layout: Json = {
        "barmode": "stack",
        "bargap": 0.1,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {
            "title": {"text": f"ms on the {steps.clock}'s clock"},
            "rangemode": "tozero",
        },
    }
    if steps.warmup:
        _shade_warmup(layout, steps)
    return chart([*data, *odd_marks], layout)


def _shade_warmup(layout: Json, steps: _StepColumns) -> None:
    """Shade the warm-up steps in ``layout``, and limit the axis if their bars would flatten all others."""
    step_ms = [time_ms or 0.0 for time_ms in steps.column_ms("step")]
    longest_warmup_ms = max(step_ms[: steps.warmup])
    longest_measured_ms = max(step_ms[steps.warmup :], default=0.0)
    begin = steps.rows[0].step - 0.5
    end = steps.rows[steps.warmup - 1].step + 0.5
    text = "warm-up"
    would_flatten = longest_warmup_ms > _SLOW_WARMUP * longest_measured_ms
    if longest_measured_ms > 0 and would_flatten:
        text = f"warm-up, up to {longest_warmup_ms:,.1f} ms"
        layout["yaxis"]["range"] = [0, _AXIS_HEIGHT * longest_measured_ms]
    area = {
        "type": "rect",
        "xref": "x",
        "x0": begin,
        "x1": end,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "fillcolor": PALE,
        "opacity": 0.25,
        "line": {"width": 0},
    }
    layout["shapes"] = [area]
    annotation = {
        "x": begin,
        "xanchor": "left",
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "text": text,
        "showarrow": False,
    }
    layout["annotations"] = [annotation]


def _odd_marks(
    record: RunRecord, row_by_step: dict[int, StepRow], steps: _StepColumns
) -> list[Json]:
    """Return a mark at each odd step, whose text is shown when the pointer is on it."""
    odd_steps = [odd for odd in record.odd_steps if odd.step in row_by_step]
    if not odd_steps:
        return []
    has_ranks = len(record.rank_step_s) > 1
    marker = {
        "symbol": "circle-open",
        "size": 12,
        "line": {"width": 2},
        "color": SERIES_COLOURS[2],
    }
    texts = []
    for odd in odd_steps:
        text = escaped(odd_text(odd, has_ranks))
        texts.append(text.replace(": ", ":<br>"))
    marks = {
        "type": "scatter",
        "mode": "markers",
        "name": "odd",
        "x": [odd.step for odd in odd_steps],
        "y": [steps.time_ms(row_by_step[odd.step]) for odd in odd_steps],
        "text": texts,
        "marker": marker,
        "hovertemplate": "%{text}<extra></extra>",
    }
    return [marks]
