"""The waterfall in words and tables: why a step takes as long as it does, and what could be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lm_profiler.record.figure import (
    AT_LEAST,
    TOO_FEW_STEPS,
    digits_of,
    is_zero_text,
    ms_text,
    share_text,
)
from lm_profiler.record.quantities import LISTS, PARTS, TERMS, TIMES, term_title
from lm_profiler.record.run_record import RunRecord, Term, Waterfall
from lm_profiler.report.tables.table import (
    Heading,
    Table,
    TableCell,
    headings_of,
    text_cell,
)

# terms below this share of the step are summed up on the terminal
_SMALL_SHARE = 0.01
_NOTHING = 1e-3  # a rest without a phase below this share of a term is rounding
# Beyond this unexplained share of the step, any term may be longer than the trace shows: no ceilings.
_MOST_UNEXPLAINED = 0.1
_ENDS = ("ideal", "unexplained")  # always shown, first and last
# the term of matrix products, to which convolutions belong too
_PRODUCTS = "slow_products"
_UNKNOWN_BANDWIDTH = "kernels that wait for memory, whose bandwidth is unknown"

# why the terms of a run on a busy machine are not shown as a sum
NO_SUM = "other programs lengthened the step, so its terms are upper bounds"


@dataclass(frozen=True)
class Rung:
    """A term as it is drawn: it begins ``start_s`` after the step begins, where the term before it ends."""

    term: Term
    start_s: float
    # its time in ms, rounded so that all of them add up to the step's own text
    text: str
    title: str

    @property
    def shown_ms(self) -> float:
        """The number in ``text``: a sum of shown numbers differs from the sum of exact ones."""
        return float(self.text.replace(",", ""))

    @property
    def signed_text(self) -> str:
        """The text with its sign; the ideal, which begins at 0, has none."""
        has_own_sign = self.term.name == "ideal" or self.text.startswith("-")
        return self.text if has_own_sign else f"+{self.text}"

    @property
    def pieces(self) -> dict[str, float]:
        """Its seconds by phase, in the order of a step; seconds of no known phase have an empty name."""
        pieces = _in_order_of_step(self.term.phases)
        rest_s = self.term.seconds - sum(pieces.values())
        if abs(rest_s) > _NOTHING * abs(self.term.seconds):
            pieces[""] = rest_s
        return pieces


def _in_order_of_step(seconds_by_part: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that took time, in the order of a step."""
    ordered = {}
    for part in PARTS:
        seconds = seconds_by_part.get(part)
        if seconds:
            ordered[part] = seconds
    return ordered


def rungs(fall: Waterfall) -> list[Rung]:
    """Return the terms whose text is not 0, in the record's order, and always the ideal and the unexplained."""
    shown_rungs = []
    start_s = 0.0
    for term, text in zip(fall.terms, _term_texts(fall), strict=True):
        if not is_zero_text(text) or term.name in _ENDS:
            shown_rungs.append(Rung(term, start_s, text, title_in(fall, term.name)))
        start_s += term.seconds
    return shown_rungs


def title_in(fall: Waterfall, name: str) -> str:
    """Return the title of a term: if the bandwidth is unknown, the two terms of memory-bound kernels are one."""
    if name == "beyond_bandwidth" and fall.bandwidth_bytes_per_s is None:
        return "memory-bound"
    if name == _PRODUCTS:
        return _products_title(fall)
    if name == "ideal" and fall.ideal_is_lower_bound:
        return f"{term_title(name)} ({AT_LEAST})"
    return term_title(name)


def _products_title(fall: Waterfall) -> str:
    """Return "slow matmuls", "slow convolutions" or both, by the operators that the term consists of."""
    operators: list[str] = []
    for term in fall.terms:
        if term.name == _PRODUCTS:
            operators += [part.what for part in term.contributors]
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
        products = _products_title(fall).removeprefix("slow ")
        return meaning.replace("matrix products", products)
    return meaning


def of_the_step(record: RunRecord) -> dict[str, float]:
    """Return the seconds of each phase in the step that the terms add up to; empty if they are unknown."""
    fall = record.waterfall
    if fall is not None and fall.step_phases:
        return _in_order_of_step(fall.step_phases)
    # Records of earlier versions have only the shares of the mean step.
    step_s = fall.step_s if fall is not None else 0.0
    shares = _in_order_of_step(record.shares)
    return {part: share * step_s for part, share in shares.items()}


def step_text(fall: Waterfall) -> str:
    """Return the step in ms with its interval, to four digits, as ``report`` shows it everywhere."""
    if fall.ci_low is None or fall.ci_high is None:
        return f"{TIMES['step'].rounded(fall.step_s)} [{TOO_FEW_STEPS}]"
    return TIMES["step"].rounded(fall.step_s, fall.ci_low, fall.ci_high)


def _term_texts(fall: Waterfall) -> list[str]:
    """Return the time of each term in ms with the step's digits; the texts add up to that of the step."""
    # The largest-remainder method: round all down, then give the missing units to those that lost most.
    digits = digits_of(fall.step_s)
    # a unit is one of the last digit
    units_per_second = TIMES["step"].scale * 10**digits
    exact_units = [term.seconds * units_per_second for term in fall.terms]
    rounded_units = [math.floor(units) for units in exact_units]
    missing_units = round(fall.step_s * units_per_second) - sum(rounded_units)
    adds_up = 0 <= missing_units <= len(exact_units)
    if not adds_up:  # a foreign record
        return [ms_text(term.seconds, digits) for term in fall.terms]
    losses = []
    for exact, rounded in zip(exact_units, rounded_units, strict=True):
        losses.append(exact - rounded)
    by_loss = sorted(range(len(losses)), key=lambda index: losses[index], reverse=True)
    for index in by_loss[:missing_units]:
        rounded_units[index] += 1
    return [f"{units / 10**digits:,.{digits}f}" for units in rounded_units]


def why_lines(record: RunRecord) -> list[str]:
    """Return the mean step as a sum in one line: the ideal, the others by their size, the small ones as one.

    In place of the sum the line has the reason why there is none. No line at all if no trace was to be expected.
    """
    fall = record.waterfall
    if fall is None:
        should_have_trace = record.status == "ok" and record.steps_planned.get("trace")
        if not should_have_trace:
            return []
        return [f"why: unknown: {missing(record)}"]
    if not fall.terms:
        return []
    if record.contended:
        return [f"why: not shown as a sum: {NO_SUM}"]
    ideal, *other_rungs = rungs(fall)  # the record has the ideal first
    middle_rungs = []
    last_rungs = []  # the unexplained time, which is always shown
    for rung in other_rungs:
        if rung.term.name in _ENDS:
            last_rungs.append(rung)
        else:
            middle_rungs.append(rung)
    middle_rungs.sort(key=lambda rung: rung.term.seconds, reverse=True)
    large_rungs = []
    small_rungs = []
    for rung in middle_rungs:
        if rung.term.seconds < _SMALL_SHARE * fall.step_s:
            small_rungs.append(rung)
        else:
            large_rungs.append(rung)
    if len(small_rungs) == 1:
        large_rungs += small_rungs
        small_rungs = []

    terms = [f"{ideal.text} {ideal.title}"]
    for rung in large_rungs:
        terms.append(_with_sign(rung.text, rung.title))
    if small_rungs:
        total_ms = sum(rung.shown_ms for rung in small_rungs)
        total = f"{total_ms:,.{digits_of(fall.step_s)}f}"
        terms.append(_with_sign(total, "smaller terms"))
    for rung in last_rungs:
        terms.append(_with_sign(rung.text, rung.title))
    # "12.3 [12.1, 12.5]" becomes "12.3 ms [12.1, 12.5]"
    mean, bracket, interval = step_text(fall).partition(" [")
    step = f"{mean} ms{bracket}{interval}"
    return [f"why: {step} = {' '.join(terms)}"]


def _with_sign(text: str, title: str) -> str:
    """Return a further term of a sum, after its plus or minus."""
    if text.startswith("-"):
        return f"- {text.removeprefix('-')} {title}"
    return f"+ {text} {title}"


def ceiling_text(fall: Waterfall, term: Term) -> str:
    """Return the most ms that could be saved in ``term``; empty if nothing could, or too much is unexplained."""
    if not term.at_most_s or reason_without_ceilings(fall):
        return ""
    is_whole_term = math.isclose(term.at_most_s, term.seconds)
    if is_whole_term:  # then both print the same
        return _term_texts(fall)[fall.terms.index(term)]
    return ms_text(term.at_most_s, digits_of(fall.step_s))


def ends_text(fall: Waterfall, term: Term) -> str:
    """Return the least and the most ms of ``term`` in the traced steps; empty if one was traced."""
    if term.low_s is None or term.high_s is None:
        return ""
    digits = digits_of(fall.step_s)
    return f"{ms_text(term.low_s, digits)} to {ms_text(term.high_s, digits)} ms in {fall.traced_steps} traced steps"


def reason_without_ceilings(fall: Waterfall) -> str:
    """Return why no ceiling is shown; empty where ceilings are shown."""
    unexplained_s = 0.0
    for term in fall.terms:
        if term.name == "unexplained":
            unexplained_s += term.seconds
    share = unexplained_s / (fall.step_s or 1.0)
    if abs(share) <= _MOST_UNEXPLAINED:
        return ""
    if share < 0:
        return f"unknown, because the traced steps took {-share:.0%} longer than the measured ones"
    return f"unknown, because {share:.0%} of the step is unexplained"


def missing(record: RunRecord) -> str:
    """Return the first thing that the run's waterfall lacks, and how to get it."""
    use = record.utilisation
    if record.status != "ok":
        reason = ""
        if record.failure is not None:
            reason = f": {record.failure.type} in {record.failure.where}"
        return f"the run ended before its step could be analysed ({record.status}{reason})."
    if not record.steps.get("trace"):
        planned_steps = record.steps_planned.get("trace")
        if not planned_steps:
            return "no step was traced. Run it again with --trace.steps=2."
        stages = f"Let the loop run for all stages: {sum(record.steps_planned.values())} steps or more."
        return f"no step was traced, of {planned_steps} planned. {stages}"
    if use is None:
        return "the FLOPs of a step are unknown; a note gives the reason. Or run it again with --memory.steps=1."
    if use.dtype is None:
        return "the dtype of its matmuls is unknown."
    if use.peak_flops_per_s is None and use.ceiling_flops_per_s is None:
        return "no peak is known for this device. Run it again with --peak_tflops, from its datasheet."
    return "a note of the run gives the reason, or an earlier version wrote the run."


_MOST_CONTRIBUTORS = 5
_CONTRIBUTOR = LISTS["waterfall.terms[].contributors"]


def waterfall_tables(record: RunRecord) -> list[Table]:
    """Return tables of the terms and of the largest contributors of each; none without a waterfall."""
    fall = record.waterfall
    if fall is None:
        return []
    return tables_of_waterfall(fall)


def tables_of_waterfall(fall: Waterfall) -> list[Table]:
    """Return tables of the terms and of the largest contributors of each."""
    tables = [_terms_table(fall), _largest_contributors(fall)]
    return [table for table in tables if table.rows]


def _terms_table(fall: Waterfall) -> Table:
    """Return a row for each term and one for the step that they add up to; columns of phases that occur."""
    name, seconds, low, high, ceiling, *phases = LISTS["waterfall.terms"]
    # none for one traced step, or an older record
    has_ends = any(term.low_s is not None for term in fall.terms)
    ends = [low, high] if has_ends else []
    phase_columns = {}
    for part, column in zip(PARTS, phases, strict=True):
        if any(term.phases.get(part) for term in fall.terms):
            phase_columns[part] = column
    headings = [*headings_of((name, seconds)), Heading("share", "share", figures=True)]
    headings += headings_of((*ends, ceiling, *phase_columns.values()))

    digits = digits_of(fall.step_s)
    rows = []
    for term, text in zip(fall.terms, _term_texts(fall), strict=True):
        row = [text_cell(title_in(fall, term.name))]
        if term.name in fall.merged_terms:
            row += [TableCell(text="unknown"), TableCell()]
        else:
            row += [TableCell(term.seconds, text), _share(term.seconds, fall.step_s)]
        row += [_ms(end.get(term), digits) for end in ends]
        row.append(TableCell(term.at_most_s, ceiling_text(fall, term)))
        row += [_ms(term.phases.get(part), digits) for part in phase_columns]
        rows.append(row)
    rows.append(_step_row(fall, columns=len(headings)))

    lines_below = []
    if has_ends:
        steps = f"the {fall.traced_steps} traced steps"
        lines_below.append(
            f"from, to: smallest and largest of {steps}, no confidence interval"
        )
    meaning = reason_without_ceilings(fall) or "a ceiling, never a gain"
    lines_below.append(f"could save at most: {meaning}")
    lines_below += [f"note: {note}" for note in fall.notes]
    return Table(headings, rows, below=lines_below)


def _step_row(fall: Waterfall, columns: int) -> list[TableCell]:
    """Return the row of the whole step, in bold, filled up to ``columns`` cells."""
    share = _share(fall.step_s, fall.step_s)
    cells = [
        TableCell(None, "step", style="bold"),
        TableCell(fall.step_s, step_text(fall), style="bold"),
        TableCell(share.value, share.text, style="bold"),
    ]
    empty_cells = [text_cell("")] * (columns - len(cells))
    return cells + empty_cells


def _largest_contributors(fall: Waterfall) -> Table:
    """Return a row for each of the largest contributors of each term."""
    rows = []
    rows_left = 0
    for term in fall.terms:
        term_cell = text_cell(title_in(fall, term.name))
        contributor_rows = contributors(term, fall).rows
        for row in contributor_rows[:_MOST_CONTRIBUTORS]:
            rows.append([term_cell, *row])
        rows_left += len(contributor_rows[_MOST_CONTRIBUTORS:])
    headings = [Heading("term", "term"), *headings_of(_CONTRIBUTOR)]
    lines_below = [f"and {rows_left:,} smaller ones"] if rows_left else []
    return Table(headings, rows, below=lines_below)


def contributors(term: Term, fall: Waterfall) -> Table:
    """Return a row for each contributor of ``term``, the largest first."""
    digits = digits_of(fall.step_s)
    rows = []
    for part in sorted(term.contributors, key=lambda part: part.seconds, reverse=True):
        count = TableCell(part.count, f"{part.count:,g}")
        seconds = _ms(part.seconds, digits)
        rows.append(
            [
                text_cell(part.module),
                text_cell(part.what),
                count,
                seconds,
                text_cell(part.detail),
            ]
        )
    return Table(headings_of(_CONTRIBUTOR), rows)


def _ms(seconds: float | None, digits: int) -> TableCell:
    text = ms_text(seconds, digits) if seconds else ""
    return TableCell(seconds, text)


def _share(seconds: float, step_s: float) -> TableCell:
    share = seconds / step_s if step_s else None
    return TableCell(share, share_text(share))
