"""A comparison as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from lm_profiler.analysis.compare.comparison import Comparison, MemoryChange, PartChange, RateChange
from lm_profiler.analysis.compare.differences import Difference
from lm_profiler.analysis.compare.ratio import CONFIDENCE, MARGIN, RatioInterval
from lm_profiler.record.quantities import MEMORY, QUANTITIES, TIMES, TOKENS_PER_S, Quantity
from lm_profiler.report.tables.table import Heading, Table, TableCell

_SURE = f"{CONFIDENCE * 100:.0f} %"
HEADER = ("mean (ms)", "A", "B", "B - A", "of A's step", f"B / A [{_SURE} interval]", "verdict")
_STYLES = {"FASTER": "green", "LESS": "green", "SLOWER": "red", "MORE": "red", "UNCLEAR": "yellow"}
_SHOWN = 3  # phases that a verdict names


def as_json(comparison: Comparison) -> str:
    """Return every field of the comparison as JSON, in SI units."""
    return json.dumps(asdict(comparison), indent=1) + "\n"


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
    lines = [f"{label}: {_folders(folders)}" for label, folders in (("A", comparison.a), ("B", comparison.b))]
    if comparison.unlike:
        lines += ["not the same work on the same device (A → B):", *_listed(comparison.unlike)]
    for what, differences in (("configs", comparison.config), ("environments", comparison.environment)):
        if differences:
            lines += [f"{what} differ (A → B):", *_listed(differences)]
        else:
            lines.append(f"{what}: the same" if differences is not None else f"{what}: of A or B unknown")
    return lines


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
        lines.append(f"next: {_how_to_be_sure(comparison)}")
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


def _how_to_be_sure(comparison: Comparison) -> str:
    if comparison.detectable is None:
        return (
            "measure more steps (--stages.measure_steps=30), and repeat both, three times or more, alternating A and B"
        )
    told = f"a change of {comparison.detectable:.1%} or more" if comparison.detectable < 1.0 else "no change under 100%"
    if len(comparison.a) == len(comparison.b) == 1:
        more = "repeat both, three times or more, alternating A and B; or measure longer (--stages.until_ci=0.005)"
    else:
        more = f"repeat more often than {len(comparison.a)} and {len(comparison.b)} times, alternating A and B"
    return f"runs like these can detect {told}; to detect smaller changes, {more}"


def _ratio(interval: RatioInterval | None, a: float, b: float) -> str:
    if interval is None:
        return "unknown, repeat" if a > 0.0 and b > 0.0 else ""
    ratio, low, high = (f"{x:.3f}" if x < 10 else f"{x:.3g}" for x in (interval.ratio, interval.low, interval.high))
    return f"{ratio} [{low}, {high}]"


def _folders(folders: Sequence[str]) -> str:
    return folders[0] if len(folders) == 1 else f"{len(folders)} runs: {', '.join(folders)}"


def _listed(differences: Iterable[Difference]) -> list[str]:
    return [f"  {row.path}: {_value(row.a)} → {_value(row.b)}" for row in differences]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
