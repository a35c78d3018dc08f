"""A comparison as a table, and as CI services read it; and what a new conclusion changes in a record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from lm_profiler.analysis.compare.comparison import Comparison, MemoryChange, PartChange, RateChange
from lm_profiler.analysis.compare.differences import Difference
from lm_profiler.analysis.compare.ratio import CONFIDENCE, MARGIN, RatioInterval
from lm_profiler.analysis.conclude import Change
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import MEMORY, QUANTITIES, TIMES, TOKENS_PER_S, Quantity, counted
from lm_profiler.record.text import printable
from lm_profiler.report.tables.formats import render
from lm_profiler.report.tables.table import Heading, Table, TableCell, text_table

_SURE = f"{CONFIDENCE * 100:.0f} %"
HEADER = ("mean (ms)", "A", "B", "B - A", "of A's step", f"B / A [{_SURE} interval]", "verdict")
_STYLES = {"FASTER": "green", "LESS": "green", "SLOWER": "red", "MORE": "red", "UNCLEAR": "yellow"}
_SHOWN = 3  # phases that a verdict names


def comparison_table(comparison: Comparison) -> Table:
    """Return a table with a row for each of ``rows``, differences of the settings above, verdict and notes below."""
    small = {TIMES[row.part].title for row in comparison.phases if _small(row)}
    body = []
    for texts in rows(comparison):
        style = "bold" if texts[0] == "step" else "dim" if texts[0] in small else ""
        cells = [TableCell(text, text, style=style) for text in texts]
        body.append([*cells[:-1], replace(cells[-1], style=_STYLES.get(texts[-1], style))])
    headings = [Heading(title, title, 0 < at < len(HEADER) - 1) for at, title in enumerate(HEADER)]
    return Table(headings, body, [*opening(comparison), ""], ["", *closing(comparison)])


def opening(comparison: Comparison) -> list[str]:
    """Return lines on what is compared, and on the differences of the two sides' settings."""
    lines = []
    for label, of in (("A", comparison.a), ("B", comparison.b)):
        lines.append(f"{label}: {of[0] if len(of) == 1 else f'{len(of)} runs: ' + ', '.join(of)}")
    if comparison.unlike:
        lines += ["not the same work on the same device (A → B):", *_listed(comparison.unlike)]
    for what, differences in (("configs", comparison.config), ("environments", comparison.environment)):
        if differences:
            lines += [f"{what} differ (A → B):", *_listed(differences)]
        else:
            lines.append(f"{what}: the same" if differences is not None else f"{what}: of A or B unknown")
    return lines


def _listed(differences: Sequence[Difference]) -> list[str]:
    values = ((x if isinstance(x, str) else json.dumps(x) for x in (row.a, row.b)) for row in differences)
    return [f"  {row.path}: {' → '.join(each)}" for row, each in zip(differences, values, strict=True)]


def rows(comparison: Comparison) -> list[list[str]]:
    """Return a row of texts for the step, each part, work and waiting, tokens/s, each peak, as ``HEADER`` has them."""
    parts = (comparison.step, comparison.forward_backward, *comparison.phases)
    texts = [_cells(TIMES[part.part], part.a_s, part.b_s, part) for part in parts]
    texts += [_cells(QUANTITIES[of.part], of.a_s, of.b_s, of) for of in comparison.ranks]
    if (rate := comparison.tokens) is not None:
        texts.append(_cells(TOKENS_PER_S, rate.a_per_s, rate.b_per_s, rate))
    return texts + [_cells(MEMORY[peak.reading], peak.a_bytes, peak.b_bytes, peak) for peak in comparison.memory]


def _cells(of: Quantity, a: float, b: float, change: PartChange | RateChange | MemoryChange) -> list[str]:
    shown_a, shown_b, more = (of.show(x, unit=False) for x in (a, b, b - a))
    title = of.title if of.unit == "s" else of.heading
    share = change.of_step if isinstance(change, PartChange) else None
    of_step = "" if share is None else f"{share:+.1%}"
    return [title, shown_a, shown_b, "+" * (a <= b) + more, of_step, _ratio(change.interval, a, b), change.verdict]


def closing(comparison: Comparison) -> list[str]:
    """Return lines on the verdict, what to be careful with, and how to be surer."""
    lines = [f"verdict: {verdict_line(comparison)}"]
    lines += [f"note: {note}" for note in comparison.notes]
    lines.append(
        f"note: {_SURE} confidence for the step's interval, and for those of all its parts together; "
        f"a change of less than {MARGIN:.0%} counts as none"
    )
    if comparison.step.verdict == "UNCLEAR":
        least = comparison.detectable
        told = "" if least is None or least >= 1.0 else f"runs like these can detect a change of {least:.1%} or more; "
        more = "repeat both more often, alternating A and B, or measure longer (--stages.until_ci=0.005)"
        lines.append(f"next: {told}to be surer, {more}")
    return lines


def verdict_line(comparison: Comparison) -> str:
    """Return the verdict on the step with its figures, and the phases that made the difference."""
    step = comparison.step
    if step.interval is None:
        return f"{step.verdict}: too few or too unlike steps to tell; repeat"
    change, low, high = (f"{x - 1.0:+.1%}" for x in (step.interval.ratio, step.interval.low, step.interval.high))
    line = f"{step.verdict}: step time {change} [{low}, {high}] from A to B"
    if step.verdict not in ("FASTER", "SLOWER"):
        return line
    causes = [row for row in comparison.phases if not _small(row)][:_SHOWN]
    named = ", ".join(f"{TIMES[row.part].title} {row.of_step:+.1%}" for row in causes)
    return f"{line}, of which {named}" if named else line


def _small(row: PartChange) -> bool:
    return row.of_step is not None and abs(row.of_step) < MARGIN


def _ratio(interval: RatioInterval | None, a: float, b: float) -> str:
    if interval is None:
        return "unknown, repeat" if a > 0.0 and b > 0.0 else ""
    ratio, low, high = (f"{x:.3f}" if x < 10 else f"{x:.3g}" for x in (interval.ratio, interval.low, interval.high))
    return f"{ratio} [{low}, {high}]"


# -- for CI services ---------------------------------------------------------------------------------------------------

CiFormat = Literal["bmf", "github-action-benchmark", "junit"]

# longest summary: a comment of GitHub takes 65,536 characters (its REST API, "Create an issue comment")

SUMMARY_BYTES = 64_000  # so that it fits a comment


@dataclass(frozen=True)
class CiFigure:
    """A figure of ``subject`` in SI units with the ends of its interval, and why a check of it fails, if it does."""

    subject: str
    of: Quantity
    value: float
    low: float | None = None
    high: float | None = None
    failure: str | None = None


def measured_in(comparison: Comparison) -> list[CiFigure]:
    """Return B's figures of ``comparison``. An interval is that of the ratio, applied to A's figure."""
    parts = [comparison.step, *comparison.phases]
    times = [(TIMES[row.part], row.a_s, row.b_s, row.interval, row.verdict) for row in parts]
    peaks = [(MEMORY[row.reading], row.a_bytes, row.b_bytes, row.interval, row.verdict) for row in comparison.memory]
    figures = []
    for of, a, b, interval, verdict in [*times, *peaks]:
        low, high = (None, None) if interval is None else (a * interval.low, a * interval.high)
        failure = verdict if verdict in ("SLOWER", "MORE") else None
        figures.append(CiFigure("B", of, b, low, high, failure))
    return figures


def measured_by(entries: Iterable[Entry]) -> list[CiFigure]:
    """Return step, phases, tokens/s and peaks of each run; a run without a measured step has its failure alone."""
    figures = []
    for entry in entries:
        name, record = str(entry.folder), entry.record
        step = None if record is None else record.time.get("step")
        if record is None or step is None or step.mean is None:
            figures.append(CiFigure(name, TIMES["step"], 0.0, failure=entry.status))
            continue
        for part, of in record.time.items():
            if of.mean is not None and part in TIMES:
                figures.append(CiFigure(name, TIMES[part], of.mean, of.mean_low, of.mean_high))
        known = [(of, of.get(record)) for of in (TOKENS_PER_S, *MEMORY.values())]
        figures += [CiFigure(name, of, float(value)) for of, value in known if isinstance(value, (int, float))]
    return figures


def ci_text(figures: Sequence[CiFigure], kind: CiFormat) -> str:
    """Return ``figures`` in a format of CI services; figures without a value are tests that fail, and nothing else."""
    if kind == "junit":
        return _junit(figures)
    figures = [each for each in figures if each.value]
    content = _bmf(figures) if kind == "bmf" else _action_benchmark(figures)
    return json.dumps(content, indent=1) + "\n"


def _bmf(figures: Iterable[CiFigure]) -> dict[str, dict[str, Mapping[str, float]]]:
    measures = {"s": ("latency", 1e9), "1/s": ("throughput", 1.0), "bytes": ("memory", 1.0)}
    content: dict[str, dict[str, Mapping[str, float]]] = {}
    for each in figures:
        measure, scale = measures[each.of.unit]
        ends = {"value": each.value, "lower_value": each.low, "upper_value": each.high}
        metric = {name: scale * end for name, end in ends.items() if end is not None}
        content[f"{each.subject} {each.of.title}"] = {measure: metric}
    return content


def _action_benchmark(figures: Iterable[CiFigure]) -> list[dict[str, str | float]]:
    content = []
    for each in (each for each in figures if each.of.unit != "1/s"):  # of which more is better
        of, ends = each.of, (each.low, each.high)
        row: dict[str, str | float] = {"name": f"{each.subject} {of.title}", "value": each.value * of.scale}
        around = [f"{end * of.scale:.6g}" for end in ends if end is not None]
        content.append(row | {"unit": of.shown_unit} | ({"range": f"[{', '.join(around)}]"} if around else {}))
    return content


def _junit(figures: Sequence[CiFigure]) -> str:
    failures = str(sum(each.failure is not None for each in figures))
    suite = ElementTree.Element("testsuite", name="lm_profiler", tests=str(len(figures)), failures=failures)
    for each in figures:
        seconds = each.value if each.of.unit == "s" else 0.0
        about = {"classname": printable(each.subject), "name": each.of.title, "time": f"{seconds:.9f}"}
        case = ElementTree.SubElement(suite, "testcase", about)
        if each.failure is not None:
            ElementTree.SubElement(case, "failure", message=each.failure)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_summary(comparison: Comparison) -> str:
    """Return Markdown of at most ``SUMMARY_BYTES``: the verdict, a picture and the table; the rest is folded."""
    table = text_table(HEADER, rows(comparison))
    folded = render([Table(above=[*opening(comparison), "", *closing(comparison)], verbatim=True)], "markdown")
    head = f"### Step time: {printable(verdict_line(comparison))}\n\n"
    body = "\n".join([_chart(comparison), render([table], "markdown")])
    end = "\n<details><summary>What was compared</summary>\n\n{}\n</details>\n"
    whole = head + body + end.format(folded)
    long = len(whole.encode()) > SUMMARY_BYTES
    return head + body + end.format("Left out: it is too long for a summary.") if long else whole


def _chart(comparison: Comparison) -> str:
    parts = [row for row in comparison.phases if max(row.a_s, row.b_s) >= 0.01 * comparison.step.a_s]
    names = ", ".join(f'"{TIMES[row.part].title}"' for row in parts)
    sides = [row.a_s for row in parts], [row.b_s for row in parts]
    a, b = (", ".join(f"{1e3 * seconds:.4g}" for seconds in side) for side in sides)
    title = 'title "ms a step: bars are A, the line is B"'
    lines = ["xychart-beta", title, f"x-axis [{names}]", f"bar [{a}]", f"line [{b}]"]
    return "\n".join(["```mermaid", *lines, "```", ""])


def github_outputs(comparison: Comparison) -> dict[str, Any]:
    """Return the verdict on the step, and B over A with its interval where that is known."""
    interval, verdict = comparison.step.interval, comparison.step.verdict
    ends = {} if interval is None else {"ratio": interval.ratio, "low": interval.low, "high": interval.high}
    return {"verdict": verdict, **ends}


def github_annotation(comparison: Comparison, fails: bool) -> str:
    """Return the line from which GitHub makes an annotation: an error where the job ``fails`` for it."""
    level = "error" if fails else "warning" if comparison.step.verdict in ("SLOWER", "UNCLEAR") else "notice"
    line = printable(verdict_line(comparison)).replace("%", "%25")  # a workflow command decodes percent signs
    return f"::{level} title=lm_profiler::{line}\n"


_MOST_CHANGES = 40


def changes_table(folder: Path, changes: Sequence[Change]) -> Table:
    """Return a row for each field that differs; one line where none does."""
    if not changes:
        return Table(above=[f"{folder}: this version says the same"])
    rows = [[of.field, _changed(of.before), _changed(of.now)] for of in changes[:_MOST_CHANGES]]
    more = len(changes) - _MOST_CHANGES
    below = [f"and {counted(more, 'more field')}"] if more > 0 else []
    titles = ("changed", "the record", "by this version")
    return text_table(titles, rows, left=3, above=[f"{folder}: by this version's rules"], below=below)


def _changed(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
