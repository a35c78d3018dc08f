"""The waterfall's tables: its terms, with their ceilings and by phase, and what each of them consists of."""

from __future__ import annotations

from collections.abc import Sequence

from lm_profiler.record.quantities import LISTS, PARTS, Quantity, term_title
from lm_profiler.record.run import RunRecord, Waterfall
from lm_profiler.report.run.waterfall import adding_up, digits_of, ms_text, step_text
from lm_profiler.report.tables.table import Heading, Table, TableCell

_MOST_CONTRIBUTORS = 5


def waterfall_tables(record: RunRecord) -> list[Table]:
    """The terms and the largest contributors of each; none without a waterfall."""
    fall = record.waterfall
    return [] if fall is None else [table for table in (_terms(fall), _contributors(fall)) if table.rows]


def _terms(fall: Waterfall) -> Table:
    """A row a term, and the step that they add up to; of the phases those that occur."""
    name, seconds, at_most, *phases = LISTS["waterfall.terms"]
    occurring = {
        part: of for part, of in zip(PARTS, phases, strict=True) if any(t.phases.get(part) for t in fall.terms)
    }
    headings = [*_headings((name, seconds)), Heading("share", "share", True)]
    headings += _headings((at_most, *occurring.values()))
    digits, rows = digits_of(fall.step_s), []
    texts = adding_up([term.seconds for term in fall.terms], fall.step_s)
    for term, text in zip(fall.terms, texts, strict=True):
        more = (term.at_most_s, *(term.phases.get(part) for part in occurring))
        cells = [TableCell(term.seconds, text), _share(term.seconds, fall.step_s), *(_ms(x, digits) for x in more)]
        rows.append([_text(term_title(term.name)), *cells])
    step = [_text("step"), TableCell(fall.step_s, step_text(fall)), _share(fall.step_s, fall.step_s)]
    rows.append([TableCell(cell.value, cell.text, style="bold") for cell in step] + [_text("")] * (len(occurring) + 1))
    below = ["at most to win: a ceiling, never a gain", *(f"note: {note}" for note in fall.notes)]
    return Table(headings, rows, below=below)


def _contributors(fall: Waterfall) -> Table:
    """The largest of each term, behind its title."""
    digits, rows, left = digits_of(fall.step_s), [], 0
    for term in fall.terms:
        ranked = sorted(term.contributors, key=lambda of: -of.seconds)
        left += len(ranked[_MOST_CONTRIBUTORS:])
        for of in ranked[:_MOST_CONTRIBUTORS]:
            figures = [TableCell(of.count, f"{of.count:,g}"), _ms(of.seconds, digits)]
            rows.append([*map(_text, (term_title(term.name), of.module, of.what)), *figures, _text(of.detail)])
    headings = [Heading("term", "term"), *_headings(LISTS["waterfall.terms[].contributors"])]
    return Table(headings, rows, below=[f"and {left:,} smaller ones"] if left else [])


def _headings(columns: Sequence[Quantity]) -> list[Heading]:
    return [Heading(of.name, of.heading, not of.is_text) for of in columns]


def _text(text: str | None) -> TableCell:
    return TableCell(text, text or "")


def _ms(seconds: float | None, digits: int) -> TableCell:
    return TableCell(seconds, ms_text(seconds, digits) if seconds else "")


def _share(seconds: float, step_s: float) -> TableCell:
    share = seconds / step_s if step_s else None
    return TableCell(share, "" if share is None else f"{share:.1%}")
