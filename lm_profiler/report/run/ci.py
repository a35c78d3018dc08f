"""What a CI service reads: figures in the formats of its trackers, and a summary of a comparison for GitHub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from lm_profiler.analysis.compare.comparison import Comparison, PartChange
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import MEMORY, TIMES, TOKENS_PER_S, Quantity
from lm_profiler.record.text import printable
from lm_profiler.report.run.comparison_table import HEADER, closing, opening, rows, verdict_line
from lm_profiler.report.tables.formats import render
from lm_profiler.report.tables.table import Table, text_table

CiFormat = Literal["bmf", "github-action-benchmark", "junit"]

# longest summary: a comment of GitHub takes 65,536 characters (its REST API, "Create an issue comment")
_MOST_BYTES = 64_000

_LEVELS = {"SLOWER": "error", "UNCLEAR": "warning"}  # the annotation of a verdict, where it is not a notice


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
    times = [(TIMES[row.part], row.a_s, row.b_s, row.interval, row.verdict) for row in _parts(comparison)]
    peaks = [(MEMORY[row.reading], row.a_bytes, row.b_bytes, row.interval, row.verdict) for row in comparison.memory]
    figures = []
    for of, a, b, interval, verdict in [*times, *peaks]:
        low, high = (None, None) if interval is None else (a * interval.low, a * interval.high)
        failure = verdict if verdict in ("SLOWER", "MORE") else None
        figures.append(CiFigure("B", of, b, low, high, failure))
    return figures


def _parts(comparison: Comparison) -> list[PartChange]:
    return [comparison.step, *comparison.phases]


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
    for each in figures:
        if each.of.unit == "1/s":
            continue
        row: dict[str, str | float] = {"name": f"{each.subject} {each.of.title}", "value": each.value * each.of.scale}
        row["unit"] = each.of.shown_unit or each.of.unit
        if each.low is not None and each.high is not None:
            row["range"] = f"[{each.low * each.of.scale:.6g}, {each.high * each.of.scale:.6g}]"
        content.append(row)
    return content


def _junit(figures: Sequence[CiFigure]) -> str:
    failures = sum(each.failure is not None for each in figures)
    suite = ElementTree.Element("testsuite", name="lm_profiler", tests=str(len(figures)), failures=str(failures))
    for each in figures:
        seconds = each.value if each.of.unit == "s" else 0.0
        case = ElementTree.SubElement(
            suite, "testcase", classname=printable(each.subject), name=each.of.title, time=f"{seconds:.9f}"
        )
        if each.failure is not None:
            ElementTree.SubElement(case, "failure", message=each.failure)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_summary(comparison: Comparison) -> str:
    """Return Markdown of at most 64 kB: the verdict, a picture and the table; settings and notes are folded."""
    table = text_table(HEADER, rows(comparison))
    folded = render([Table(above=[*opening(comparison), "", *closing(comparison)], verbatim=True)], "markdown")
    head = f"### Step time: {printable(verdict_line(comparison))}\n\n"
    body = "\n".join([_chart(comparison), render([table], "markdown")])
    end = "\n<details><summary>What was compared</summary>\n\n{}\n</details>\n"
    whole = head + body + end.format(folded)
    if len(whole.encode()) > _MOST_BYTES:
        whole = head + body + end.format("Left out: it is too long for a summary.")
    return whole.encode()[:_MOST_BYTES].decode(errors="ignore")


def _chart(comparison: Comparison) -> str:
    parts = [row for row in comparison.phases if max(row.a_s, row.b_s) >= 0.01 * comparison.step.a_s]
    names = ", ".join(f'"{TIMES[row.part].title}"' for row in parts)
    sides = [row.a_s for row in parts], [row.b_s for row in parts]
    a, b = (", ".join(f"{1e3 * seconds:.4g}" for seconds in side) for side in sides)
    title = 'title "ms a step: bars are A, the line is B"'
    lines = ["xychart-beta", title, f"x-axis [{names}]", f"bar [{a}]", f"line [{b}]"]
    return "\n".join(["```mermaid", *lines, "```", ""])


def tell_github(comparison: Comparison, environment: Mapping[str, str]) -> str:
    """Append the summary and the outputs to the files that GitHub names; return the annotation, a line for stdout."""
    interval, verdict = comparison.step.interval, comparison.step.verdict
    ends = {} if interval is None else {"ratio": interval.ratio, "low": interval.low, "high": interval.high}
    outputs = "".join(f"{name}={value}\n" for name, value in {"verdict": verdict, **ends}.items())
    for name, text in (("GITHUB_STEP_SUMMARY", github_summary(comparison)), ("GITHUB_OUTPUT", outputs)):
        if file := environment.get(name):
            with Path(file).open("a", encoding="utf-8") as out:
                out.write(text)
    line = printable(verdict_line(comparison)).replace("%", "%25")  # a workflow command decodes percent signs
    return f"::{_LEVELS.get(verdict, 'notice')} title=lm_profiler::{line}\n"
