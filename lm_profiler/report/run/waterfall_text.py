"""The waterfall in words and tables: why a step takes as long as it does, and what could be saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lm_profiler.record.figure import digits_of, ms_text, share_text
from lm_profiler.record.quantities import LISTS, PARTS, TERMS, TIMES, term_title
from lm_profiler.record.run_record import RunRecord, Term, Waterfall
from lm_profiler.report.tables.table import Heading, Table, TableCell, headings_of, text_cell

# terms below this share of the step are summed up on the terminal
_SMALL = 0.01
_NOTHING = 1e-3  # a rest without a phase below this share of a term is rounding
# Beyond this unexplained share of the step, any term may be longer than the trace shows: no ceilings.
_UNSURE = 0.1
_ENDS = ("ideal", "unexplained")  # always shown, first and last
_PRODUCTS = "slow_products"  # the term of matrix products, to which convolutions belong too
_UNKNOWN_BANDWIDTH = "kernels that wait for memory, whose bandwidth is unknown"

# why the terms of a run on a busy machine are not shown as a sum
NO_SUM = "other programs lengthened the step, and its terms are upper bounds"


@dataclass(frozen=True)
class Rung:
    """A term as it is drawn: it begins ``start_s`` after the step begins, where the term before it ends."""

    term: Term
    start_s: float
    text: str  # its time in ms, rounded so that all of them add up to the step's own text
    title: str

    @property
    def signed_text(self) -> str:
        """The text with its sign; the ideal, which begins at 0, has none."""
        return self.text if self.term.name == "ideal" or self.text.startswith("-") else f"+{self.text}"

    @property
    def pieces(self) -> dict[str, float]:
        """Its seconds by phase, in the order of a step; seconds of no known phase have an empty name."""
        known = {part: seconds for part in PARTS if (seconds := self.term.phases.get(part))}
        rest = self.term.seconds - sum(known.values())
        return known | ({"": rest} if abs(rest) > _NOTHING * abs(self.term.seconds) else {})


def rungs(fall: Waterfall) -> list[Rung]:
    """Return the terms whose text is not 0, in the record's order, and always the ideal and the unexplained."""
    drawn, start_s = [], 0.0
    for term, text in zip(fall.terms, _term_texts(fall), strict=True):
        if text.strip("-0.,") or term.name in _ENDS:
            drawn.append(Rung(term, start_s, text, title_in(fall, term.name)))
        start_s += term.seconds
    return drawn


def title_in(fall: Waterfall, name: str) -> str:
    """Return the title of a term: if the bandwidth is unknown, the two terms of memory-bound kernels are one."""
    if name == "beyond_bandwidth" and fall.bandwidth_bytes_per_s is None:
        return "memory-bound"
    if name == _PRODUCTS:
        return _products_title(fall)
    return term_title(name)


def _products_title(fall: Waterfall) -> str:
    """Return "slow matmuls", "slow convolutions" or both, by the operators that the term consists of."""
    operators = [part.what for term in fall.terms if term.name == _PRODUCTS for part in term.contributors]
    convolutions = [operator for operator in operators if "conv" in operator]
    if not convolutions:
        return term_title(_PRODUCTS)
    if len(convolutions) == len(operators):
        return "slow convolutions"
    return "slow matmuls and convolutions"


def meaning_in(fall: Waterfall, name: str) -> str:
    """Return what a term means, in a line without a full stop; empty for a term of a later version."""
    if name not in TERMS:
        return ""
    _, meaning = TERMS[name]
    if name == "beyond_bandwidth" and fall.bandwidth_bytes_per_s is None:
        return _UNKNOWN_BANDWIDTH
    if name == _PRODUCTS:
        return meaning.replace("matrix products", _products_title(fall).removeprefix("slow "))
    return meaning


def of_the_step(record: RunRecord) -> dict[str, float]:
    """Return the seconds of each phase in the step that the terms add up to; empty where they are unknown."""
    fall = record.waterfall
    if fall is not None and fall.step_phases:
        return {part: seconds for part in PARTS if (seconds := fall.step_phases.get(part))}
    # Records of earlier versions have only the shares of the mean step.
    step_s = fall.step_s if fall is not None else 0.0
    return {part: share * step_s for part in PARTS if (share := record.shares.get(part))}


def step_text(fall: Waterfall) -> str:
    """Return the step in ms with its interval, to four digits, as ``report`` shows it everywhere."""
    ends = () if fall.ci_low is None or fall.ci_high is None else (fall.ci_low, fall.ci_high)
    return TIMES["step"].rounded(fall.step_s, *ends)


def _term_texts(fall: Waterfall) -> list[str]:
    """Return the time of each term in ms with the step's digits; the texts add up to that of the step."""
    # The largest-remainder method: round all down, then give the missing units to those that lost most.
    digits, scale = digits_of(fall.step_s), TIMES["step"].scale
    units = [term.seconds * scale * 10**digits for term in fall.terms]
    whole = [math.floor(unit) for unit in units]
    missing = round(fall.step_s * scale * 10**digits) - sum(whole)
    if not 0 <= missing <= len(units):  # a foreign record, whose terms do not add up
        return [ms_text(term.seconds, digits) for term in fall.terms]
    for at in sorted(range(len(units)), key=lambda at: whole[at] - units[at])[:missing]:
        whole[at] += 1
    return [f"{unit / 10**digits:,.{digits}f}" for unit in whole]


def why_lines(record: RunRecord) -> list[str]:
    """Return the mean step as a sum in one line: the ideal, the others by their size, the small ones as one."""
    fall = record.waterfall
    if fall is None or not fall.terms:
        asked = fall is None and record.status == "ok" and record.steps_planned.get("trace")
        return [f"why: unknown: {missing(record)}"] if asked else []
    if record.contended:
        return [f"why: no sum here: {NO_SUM}"]
    drawn = rungs(fall)
    between = [of for of in drawn if of.term.name not in _ENDS]
    small = [of for of in between if of.term.seconds < _SMALL * fall.step_s]
    small = small if len(small) > 1 else []
    told = [(of.title, of.text) for of in sorted(between, key=lambda of: -of.term.seconds) if of not in small]
    if small:
        total = sum(float(of.text.replace(",", "")) for of in small)
        told.append(("smaller terms", f"{total:,.{digits_of(fall.step_s)}f}"))
    first, *last = ((of.title, of.text) for of in drawn if of.term.name in _ENDS)
    signed = ((text.startswith("-"), text.removeprefix("-"), title) for title, text in [*told, *last])
    terms = [f"{first[1]} {first[0]}", *(f"{'+-'[negative]} {text} {title}" for negative, text, title in signed)]
    shown, bracket, interval = step_text(fall).partition(" [")
    return [f"why: {shown} ms{bracket}{interval} = {' '.join(terms)}"]


def ceiling_text(fall: Waterfall, term: Term) -> str:
    """Return the most ms that could be saved in ``term``; empty if nothing could, or too much is unexplained."""
    if not term.at_most_s or unsure(fall):
        return ""
    whole = math.isclose(term.at_most_s, term.seconds)  # then both print the same
    return _term_texts(fall)[fall.terms.index(term)] if whole else ms_text(term.at_most_s, digits_of(fall.step_s))


def ends_text(fall: Waterfall, term: Term) -> str:
    """Return the least and the most ms of ``term`` in the traced steps; empty where one was traced."""
    ends = [ms_text(end, digits_of(fall.step_s)) for end in (term.low_s, term.high_s) if end is not None]
    return f"{' to '.join(ends)} ms in {fall.traced_steps} traced steps" if ends else ""


def unsure(fall: Waterfall) -> str:
    """Return why no ceiling is shown; empty where ceilings are shown."""
    rest = sum(term.seconds for term in fall.terms if term.name == "unexplained") / (fall.step_s or 1.0)
    if abs(rest) <= _UNSURE:
        return ""
    if rest < 0:
        return f"unknown, as the traced steps took {-rest:.0%} more than the measured"
    return f"unknown, as {rest:.0%} of the step is unexplained"


def missing(record: RunRecord) -> str:
    """Return the first thing that the run's waterfall lacks, and how to get it."""
    use, failed = record.utilisation, record.failure
    if record.status != "ok":
        why = f": {failed.type} in {failed.where}" if failed is not None else ""
        return f"the run ended before it could be taken apart ({record.status}{why})."
    if not record.steps.get("trace"):
        planned = record.steps_planned.get("trace")
        stages = f"Let the loop run for all stages: {sum(record.steps_planned.values())} steps or more."
        return f"no step was traced, of {planned} planned. {stages}" if planned else _TRACE
    if use is None:
        return "the FLOPs of a step are unknown; a note says why, or run it again with --memory.steps=1."
    if use.dtype is None:
        return "the dtype of its matmuls is unknown."
    if use.peak_flops_per_s is None and use.ceiling_flops_per_s is None:
        return "no peak is known for this device. Run it again with --peak_tflops, from its datasheet."
    return "a note of the run says why, or an earlier version ran it."


_TRACE = "no step was traced. Run it again with --trace.steps=2."

_MOST_CONTRIBUTORS = 5
_CONTRIBUTOR = LISTS["waterfall.terms[].contributors"]


def waterfall_tables(record: RunRecord) -> list[Table]:
    """Return tables of the terms and of the largest contributors of each; none without a waterfall."""
    fall = record.waterfall
    return [] if fall is None else [table for table in (_terms_table(fall), _largest_contributors(fall)) if table.rows]


def _terms_table(fall: Waterfall) -> Table:
    """Return a row for each term and one for the step that they add up to; columns of phases that occur."""
    name, seconds, low, high, at_most, *phases = LISTS["waterfall.terms"]
    ends = () if all(term.low_s is None for term in fall.terms) else (low, high)  # one traced step, or an older record
    there = {part: of for part, of in zip(PARTS, phases, strict=True) if any(t.phases.get(part) for t in fall.terms)}
    headings = [*headings_of((name, seconds)), Heading("share", "share", True)]
    headings += headings_of((*ends, at_most, *there.values()))
    digits, rows = digits_of(fall.step_s), []
    for term, text in zip(fall.terms, _term_texts(fall), strict=True):
        told = [TableCell(term.seconds, text), _share(term.seconds, fall.step_s)]
        if term.name in fall.untold:
            told = [TableCell(text="unknown"), TableCell()]
        told += [_ms(of.get(term), digits) for of in ends]
        ceiling = TableCell(term.at_most_s, ceiling_text(fall, term))
        by_phase = [_ms(term.phases.get(part), digits) for part in there]
        rows.append([text_cell(title_in(fall, term.name)), *told, ceiling, *by_phase])
    step = [text_cell("step"), TableCell(fall.step_s, step_text(fall)), _share(fall.step_s, fall.step_s)]
    bold: Sequence[TableCell] = [TableCell(cell.value, cell.text, style="bold") for cell in step]
    rows.append([*bold, *[text_cell("")] * (len(headings) - len(step))])
    told_by = f"from, to: what each of the {fall.traced_steps} traced steps alone would tell; no interval"
    below = [told_by] * bool(ends) + [f"could save at most: {unsure(fall) or 'a ceiling, never a gain'}"]
    return Table(headings, rows, below=[*below, *(f"note: {n}" for n in fall.notes)])


def _largest_contributors(fall: Waterfall) -> Table:
    rows, left = [], 0
    for term in fall.terms:
        of_term = contributors(term, fall).rows
        left += len(of_term[_MOST_CONTRIBUTORS:])
        rows += [[text_cell(title_in(fall, term.name)), *row] for row in of_term[:_MOST_CONTRIBUTORS]]
    headings = [Heading("term", "term"), *headings_of(_CONTRIBUTOR)]
    return Table(headings, rows, below=[f"and {left:,} smaller ones"] if left else [])


def contributors(term: Term, fall: Waterfall) -> Table:
    digits = digits_of(fall.step_s)
    rows = []
    for of in sorted(term.contributors, key=lambda of: -of.seconds):
        times = TableCell(of.count, f"{of.count:,g}")
        rows.append([text_cell(of.module), text_cell(of.what), times, _ms(of.seconds, digits), text_cell(of.detail)])
    return Table(headings_of(_CONTRIBUTOR), rows)


def _ms(seconds: float | None, digits: int) -> TableCell:
    return TableCell(seconds, ms_text(seconds, digits) if seconds else "")


def _share(seconds: float, step_s: float) -> TableCell:
    share = seconds / step_s if step_s else None
    return TableCell(share, share_text(share))
