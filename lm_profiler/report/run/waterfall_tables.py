"""The waterfall's tables: its terms, with their ceilings and by phase, and what each of them consists of."""

from __future__ import annotations

from lm_profiler.record.quantities import LISTS, PARTS
from lm_profiler.record.run import RunRecord, Term, Waterfall
from lm_profiler.report.run.milliseconds import digits_of, ms_text
from lm_profiler.report.run.waterfall import ceiling_text, step_text, term_texts, title_in, unsure
from lm_profiler.report.tables.table import Heading, Table, TableCell, headings_of

_MOST_CONTRIBUTORS = 5
_CONTRIBUTOR = LISTS["waterfall.terms[].contributors"]


def waterfall_tables(record: RunRecord) -> list[Table]:
    """The terms and the largest contributors of each; none without a waterfall."""
    fall = record.waterfall
    return [] if fall is None else [table for table in (_terms(fall), _contributors(fall)) if table.rows]


def _terms(fall: Waterfall) -> Table:
    """A row a term, and the step that they add up to; of the phases those that occur."""
    name, seconds, low, high, at_most, *phases = LISTS["waterfall.terms"]
    ends = () if all(term.low_s is None for term in fall.terms) else (low, high)  # of a version before
    occurring = {
        part: of for part, of in zip(PARTS, phases, strict=True) if any(t.phases.get(part) for t in fall.terms)
    }
    headings = [*headings_of((name, seconds)), Heading("share", "share", True)]
    headings += headings_of((*ends, at_most, *occurring.values()))
    digits, texts, rows = digits_of(fall.step_s), term_texts(fall), []
    for term in fall.terms:
        told = [TableCell(term.seconds, texts[term.name]), _share(term.seconds, fall.step_s)]
        if term.name in fall.untold:
            told = [TableCell(text="unknown"), TableCell()]
        told += [_ms(of.get(term), digits) for of in ends]
        ceiling = TableCell(term.at_most_s, ceiling_text(fall, term))
        by_phase = [_ms(term.phases.get(part), digits) for part in occurring]
        rows.append([_text(title_in(fall, term.name)), *told, ceiling, *by_phase])
    step = [_text("step"), TableCell(fall.step_s, step_text(fall)), _share(fall.step_s, fall.step_s)]
    rows.append(
        [TableCell(cell.value, cell.text, style="bold") for cell in step]
        + [_text("")] * (len(ends) + len(occurring) + 1)
    )
    below = [
        f"could save at most: {unsure(fall) or 'a ceiling, never a gain'}",
        *(f"note: {note}" for note in fall.notes),
    ]
    return Table(headings, rows, below=below)


def _contributors(fall: Waterfall) -> Table:
    """The largest of each term, behind its title."""
    rows, left = [], 0
    for term in fall.terms:
        of_term = contributors(term, fall).rows
        left += len(of_term[_MOST_CONTRIBUTORS:])
        rows += [[_text(title_in(fall, term.name)), *row] for row in of_term[:_MOST_CONTRIBUTORS]]
    headings = [Heading("term", "term"), *headings_of(_CONTRIBUTOR)]
    return Table(headings, rows, below=[f"and {left:,} smaller ones"] if left else [])


def contributors(term: Term, fall: Waterfall) -> Table:
    """What ``term`` consists of, the largest first."""
    digits = digits_of(fall.step_s)
    ranked = sorted(term.contributors, key=lambda of: -of.seconds)
    count = [TableCell(of.count, f"{of.count:,g}") for of in ranked]
    rows = [
        [_text(of.module), _text(of.what), times, _ms(of.seconds, digits), _text(of.detail)]
        for of, times in zip(ranked, count, strict=True)
    ]
    return Table(headings_of(_CONTRIBUTOR), rows)


def _text(text: str | None) -> TableCell:
    return TableCell(text, text or "")


def _ms(seconds: float | None, digits: int) -> TableCell:
    return TableCell(seconds, ms_text(seconds, digits) if seconds else "")


def _share(seconds: float, step_s: float) -> TableCell:
    share = seconds / step_s if step_s else None
    return TableCell(share, "" if share is None else f"{share:.1%}")
