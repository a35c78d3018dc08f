"""Tables of a comparison, also in the formats of CI services; and of what this version concludes differently."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lm_profiler.analysis.compare.comparison import (
    Comparison,
    MemoryChange,
    PartChange,
    RateChange,
)
from lm_profiler.analysis.compare.differences import Difference
from lm_profiler.analysis.compare.ratio import CONFIDENCE, MARGIN, RatioInterval
from lm_profiler.analysis.compare.sides import CPU_TIME, WITHOUT_CPU_WAITS
from lm_profiler.analysis.conclude import Change
from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import Figure
from lm_profiler.record.quantities import (
    MEMORY,
    QUANTITIES,
    TIMES,
    TOKENS_PER_S,
    Quantity,
    count_text,
)
from lm_profiler.record.text import printable
from lm_profiler.report.tables.formats import render
from lm_profiler.report.tables.table import (
    Table,
    TableCell,
    text_table,
    titled_headings,
)

_SURE = f"{CONFIDENCE * 100:.0f} %"
HEADER = (
    "mean (ms)",
    "A",
    "B",
    "B - A",
    "of A's step",
    f"B / A [{_SURE} interval]",
    "verdict",
)
_STYLES = {
    "FASTER": "green",
    "LESS": "green",
    "SLOWER": "red",
    "MORE": "red",
    "UNCLEAR": "yellow",
}
_MOST_CAUSES = 3  # the most phases that a verdict names
_MOST_CHARACTERS = 60  # the most characters of a value in the table of changed fields

# what decides on a busy machine
_WORK = {
    WITHOUT_CPU_WAITS: Figure(
        "step without CPU waits",
        "ms",
        "duration of the step without the time for which the training thread waited for a CPU",
        "step_without_cpu_waits_s",
    ),
    CPU_TIME: Figure(
        "CPU time",
        "ms",
        "CPU time of the process per step, all threads together",
        "cpu_time_s",
    ),
}
_DECIDING = {
    "step": "step time",
    WITHOUT_CPU_WAITS: "step without waits for a CPU",
    CPU_TIME: "CPU time of a step",
}

_ADVICE = "repeat A and B alternately and more often, or measure longer (--stages.until_ci=0.005)"


def comparison_table(comparison: Comparison) -> Table:
    """Return a table of ``rows``; above it are the differences in settings, below it verdict and notes."""
    small_titles = set()
    for row in comparison.phases:
        if _is_small_change(row):
            small_titles.add(TIMES[row.part].title)
    body = []
    for texts in rows(comparison):
        style = ""
        if texts[0] == "step":
            style = "bold"
        elif texts[0] in small_titles:
            style = "dim"
        cells = [TableCell(text, text, style=style) for text in texts[:-1]]
        word = texts[-1]
        cells.append(TableCell(word, word, style=_STYLES.get(word, style)))
        body.append(cells)
    headings = titled_headings(HEADER, figures=HEADER[1:-1])
    return Table(
        headings,
        body,
        [*opening_lines(comparison), ""],
        ["", *closing_lines(comparison)],
    )


def opening_lines(comparison: Comparison) -> list[str]:
    """Return lines that name both sides and list the differences in their settings."""
    lines = [_side_line("A", comparison.a), _side_line("B", comparison.b)]
    if comparison.unlike:
        lines.append("not the same work on the same device (A → B):")
        lines += _difference_lines(comparison.unlike)
    lines += _settings_lines("configs", comparison.config)
    lines += _settings_lines("environments", comparison.environment)
    return lines


def _settings_lines(name: str, differences: Sequence[Difference] | None) -> list[str]:
    """Return lines with the ``differences`` in the settings called ``name``; None if a side's are unknown."""
    if differences is None:
        return [f"{name}: unknown for A or B"]
    if not differences:
        return [f"{name}: the same"]
    return [f"{name} differ (A → B):", *_difference_lines(differences)]


def _side_line(label: str, folders: Sequence[str]) -> str:
    if len(folders) == 1:
        return f"{label}: {folders[0]}"
    return f"{label}: {len(folders)} runs: {', '.join(folders)}"


def _difference_lines(differences: Sequence[Difference]) -> list[str]:
    """Return an indented line for each option that differs: ``model.size: small → large``."""
    lines = []
    for row in differences:
        change = f"{_option_text(row.a)} → {_option_text(row.b)}"
        lines.append(f"  {row.path}: {change}")
    return lines


def _option_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the rows of the table; each has a text for each column of ``HEADER``.

    There are rows for the step, the figures that decide on a busy machine, each phase, own work and waiting of ranks,
    tokens/s, and each peak of memory.
    """
    step = comparison.step
    texts = [_cells_of_row(TIMES["step"], step.a_s, step.b_s, step)]
    for row in comparison.work:
        texts.append(_cells_of_row(_WORK[row.part], row.a_s, row.b_s, row))
    for row in (comparison.forward_backward, *comparison.phases):
        texts.append(_cells_of_row(TIMES[row.part], row.a_s, row.b_s, row))
    for row in comparison.ranks:
        texts.append(_cells_of_row(QUANTITIES[row.part], row.a_s, row.b_s, row))
    useful_tokens_per_s = QUANTITIES["useful_tokens_per_s"]
    texts += _rate_rows(TOKENS_PER_S, comparison.tokens)
    texts += _rate_rows(useful_tokens_per_s, comparison.useful_tokens)
    for peak in comparison.memory:
        quantity = MEMORY[peak.reading]
        texts.append(_cells_of_row(quantity, peak.a_bytes, peak.b_bytes, peak))
    return texts


def _rate_rows(quantity: Quantity, rate: RateChange | None) -> list[list[str]]:
    """Return the row of a rate; none if it is unknown."""
    if rate is None:
        return []
    title, a_text, b_text, *further_texts = _cells_of_row(
        quantity, rate.a_per_s, rate.b_per_s, rate
    )
    a_text = _with_bound(a_text, rate.a_bound)
    b_text = _with_bound(b_text, rate.b_bound)
    return [[title, a_text, b_text, *further_texts]]


def _cells_of_row(
    quantity: Quantity, a: float, b: float, row: PartChange | RateChange | MemoryChange
) -> list[str]:
    """Return the texts of a row: the figures of A and B, their difference and ratio, and the verdict."""
    title = quantity.title if quantity.unit == "s" else quantity.heading
    difference = quantity.show(b - a, unit=False)
    if a <= b:
        difference = f"+{difference}"
    of_step = ""
    if isinstance(row, PartChange) and row.of_step is not None:
        of_step = f"{row.of_step:+.1%}"
    return [
        title,
        quantity.show(a, unit=False),
        quantity.show(b, unit=False),
        difference,
        of_step,
        _ratio_text(row.interval, a, b),
        row.verdict,
    ]


def _with_bound(text: str, bound: str | None) -> str:
    """Return the ``text`` of a rate after its ``bound``, such as "at least" on a busy machine."""
    return text if bound is None else f"{bound} {text}"


def closing_lines(comparison: Comparison) -> list[str]:
    """Return lines with the verdict, the notes, and what would make an unclear verdict clear."""
    lines = [f"verdict: {verdict_line(comparison)}"]
    if comparison.flops is not None and abs(comparison.flops - 1.0) >= MARGIN:
        lines.append(
            f"note: a step of B computes {comparison.flops:.3g} times as many FLOPs as a step of A"
        )
    lines += [f"note: {note}" for note in comparison.notes]
    lines.append(
        f"note: the interval of the deciding figure has {_SURE} confidence, and so have all other intervals jointly; "
        f"changes below {MARGIN:.0%} count as no change"
    )
    if comparison.verdict == "UNCLEAR":
        lines.append(f"next: {_how_to_be_surer(comparison)}")
    return lines


def _how_to_be_surer(comparison: Comparison) -> str:
    """Return what would make an unclear comparison clear, and which change runs like these can detect."""
    advice = comparison.advice or _ADVICE
    if comparison.assumption is not None:
        advice += (
            "; with three runs per side, the spread of processes need not be assumed"
        )
    text = f"for a clearer result, {advice}"
    least_change = comparison.detectable
    if least_change is None or least_change >= 1.0:
        return text
    return f"runs like these can detect a change of {least_change:.1%} or more; {text}"


def verdict_line(comparison: Comparison) -> str:
    """Return the verdict with its figures, the phases that caused the difference, and the assumed spread if any."""
    decision = comparison.decision
    if decision.interval is None:
        return f"{decision.verdict}: there are too few steps, or they vary too much; repeat the runs"
    interval = decision.interval
    line = f"{decision.verdict}: {_DECIDING[decision.part]} {_change_text(interval)} from A to B"
    if decision.verdict == "SAME":
        line += f": any difference is below {interval.largest_change:.1%}"
    if decision.verdict in ("FASTER", "SLOWER"):
        causes = _largest_changes(comparison)
        if causes:
            line += f", of which {', '.join(causes)}"
    if comparison.assumption is not None:
        line += f"; one run per side: {comparison.assumption}"
    return line


def _change_text(interval: RatioInterval) -> str:
    """Return the change with its interval, such as ``+3.1% [+2.5%, +3.8%]``."""
    change = interval.ratio - 1.0
    low = interval.low - 1.0
    high = interval.high - 1.0
    return f"{change:+.1%} [{low:+.1%}, {high:+.1%}]"


def _largest_changes(comparison: Comparison) -> list[str]:
    """Return the phases that changed most, each with its change as a share of A's step."""
    phases = comparison.phases
    if comparison.decision.part != "step":
        phases = comparison.work_phases
    large = [row for row in phases if not _is_small_change(row)]
    return [
        f"{TIMES[row.part].title} {row.of_step:+.1%}" for row in large[:_MOST_CAUSES]
    ]


def _is_small_change(row: PartChange) -> bool:
    return row.of_step is not None and abs(row.of_step) < MARGIN


def _ratio_text(interval: RatioInterval | None, a: float, b: float) -> str:
    """Return the ratio B / A with its interval; empty if a side has no such time, so that there is no ratio."""
    if interval is None:
        has_ratio = a > 0.0 and b > 0.0
        return "unknown, repeat" if has_ratio else ""
    ratio = _ratio_number(interval.ratio)
    low = _ratio_number(interval.low)
    high = _ratio_number(interval.high)
    return f"{ratio} [{low}, {high}]"


def _ratio_number(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"


# -- for CI services ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedFigure:
    """A figure of ``subject`` in SI units, and the reason if a check of it fails."""

    subject: str
    quantity: Quantity
    value: float
    failure: str | None = None


def checked_comparison(comparison: Comparison) -> list[CheckedFigure]:
    """Return the figures of B for a CI check; those that are worse than A's have failed."""
    figures = []
    for row in (comparison.step, *comparison.phases):
        figures.append(
            _checked_figure(TIMES[row.part], row.a_s, row.b_s, row, comparison)
        )
    for row in comparison.work:
        figures.append(
            _checked_figure(_WORK[row.part], row.a_s, row.b_s, row, comparison)
        )
    for peak in comparison.memory:
        quantity = MEMORY[peak.reading]
        figure = _checked_figure(quantity, peak.a_bytes, peak.b_bytes, peak, comparison)
        figures.append(figure)
    return figures


def _checked_figure(
    quantity: Quantity,
    a: float,
    b: float,
    row: PartChange | MemoryChange,
    comparison: Comparison,
) -> CheckedFigure:
    """Return B's figure for a CI check, as failed if it is worse than A's.

    ``a`` and ``b`` are the values of ``quantity`` in ``row``. The row that decides has the verdict of the comparison.
    """
    failure = None
    if row is comparison.decision and row.verdict == "SLOWER":
        failure = verdict_line(comparison)
    elif row.verdict in ("SLOWER", "MORE"):
        failure = f"{row.verdict}: {quantity.title} {quantity.show(a)} in A, {quantity.show(b)} in B"
        if row.interval is not None:
            failure += f", {_change_text(row.interval)}"
    return CheckedFigure(subject="B", quantity=quantity, value=b, failure=failure)


def checked_runs(entries: Iterable[Entry]) -> list[CheckedFigure]:
    """Return step, phases, tokens/s and peaks of each run for a CI check; a run without a measured step has failed."""
    figures = []
    for entry in entries:
        name = str(entry.folder)
        record = entry.record
        step = None if record is None else record.time.get("step")
        if record is None or step is None or step.mean is None:
            failure = entry.status
            if entry.reason:
                failure += f": {entry.reason}"
            figures.append(
                CheckedFigure(
                    subject=name, quantity=TIMES["step"], value=0.0, failure=failure
                )
            )
            continue
        for part, summary in record.time.items():
            if summary.mean is not None and part in TIMES:
                figures.append(
                    CheckedFigure(
                        subject=name, quantity=TIMES[part], value=summary.mean
                    )
                )
        for quantity in (TOKENS_PER_S, *MEMORY.values()):
            value = quantity.get(record)
            if isinstance(value, (int, float)):
                figures.append(
                    CheckedFigure(subject=name, quantity=quantity, value=float(value))
                )
    return figures


def junit_text(figures: Sequence[CheckedFigure]) -> str:
    """Return ``figures`` as JUnit's XML, which CI services read: a test for each figure."""
    failures = sum(figure.failure is not None for figure in figures)
    suite = ElementTree.Element(
        "testsuite", name="lm_profiler", tests=str(len(figures)), failures=str(failures)
    )
    for figure in figures:
        seconds = figure.value if figure.quantity.unit == "s" else 0.0
        attributes = {
            "classname": printable(figure.subject),
            "name": figure.quantity.title,
            "time": f"{seconds:.9f}",
        }
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if figure.failure is not None:
            message = printable(figure.failure)
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = message
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_summary(comparison: Comparison) -> str:
    """Return Markdown with the verdict and the table; the other lines are in a section that a click opens."""
    table = text_table(HEADER, rows(comparison))
    details = [*opening_lines(comparison), "", *closing_lines(comparison)]
    folded = render([Table(above=details, verbatim=True)], "markdown")
    head = f"### Step time: {printable(verdict_line(comparison))}\n\n"
    body = render([table], "markdown")
    end = f"\n<details><summary>What was compared</summary>\n\n{folded}\n</details>\n"
    return head + body + end


def github_outputs(comparison: Comparison) -> dict[str, Any]:
    """Return the verdict, and B over A with its interval if that is known."""
    interval = comparison.decision.interval
    outputs: dict[str, Any] = {"verdict": comparison.verdict}
    if interval is not None:
        outputs |= {"ratio": interval.ratio, "low": interval.low, "high": interval.high}
    return outputs


def github_annotation(comparison: Comparison, fails: bool) -> str:
    """Return the workflow command with which GitHub annotates a job: an error if the job ``fails`` because of it."""
    level = "notice"
    if fails:
        level = "error"
    elif comparison.verdict in ("SLOWER", "UNCLEAR"):
        level = "warning"
    # a workflow command decodes percent signs
    line = printable(verdict_line(comparison)).replace("%", "%25")
    return f"::{level} title=lm_profiler::{line}\n"


_MOST_CHANGES = 40


def changes_table(folder: Path, changes: Sequence[Change]) -> Table:
    """Return a row for each field of a record that this version concludes differently; one line if there is none."""
    if not changes:
        return Table(above=[f"{folder}: this version reaches the same conclusions"])
    rows = []
    for change in changes[:_MOST_CHANGES]:
        values = [_value_text(change.before), _value_text(change.now)]
        rows.append([change.field, *values])
    lines_below = []
    changes_left = len(changes) - _MOST_CHANGES
    if changes_left > 0:
        lines_below.append(f"and {count_text(changes_left, 'more field')}")
    titles = ("changed", "the record", "by this version")
    return text_table(
        titles,
        rows,
        left=3,
        above=[f"{folder}: by this version's rules"],
        below=lines_below,
    )


def _value_text(value: Any) -> str:
    """Return the value of a field as a short text, cut if it is long."""
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS - 1]}…"
