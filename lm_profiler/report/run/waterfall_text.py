"""The waterfall as lines and tables: why a step takes as long as it does, and what could be saved."""

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
from lm_profiler.record.quantities import (
    LISTS,
    MEANING_OF_PRODUCTS,
    PARTS,
    TERMS,
    TIMES,
    term_title,
)
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
# below this share of a term, its seconds without a known phase are a rounding error
_ROUNDING_SHARE = 1e-3
# Beyond this unexplained share of the step, any term may be longer than the trace shows: no ceilings.
_MOST_UNEXPLAINED = 0.1
# the first and the last term, shown even if their text is 0
_ALWAYS_SHOWN = ("ideal", "unexplained")
# the term of matrix products, to which convolutions belong too
_PRODUCTS = "slow_products"
_UNKNOWN_BANDWIDTH = "kernels that wait for memory (the bandwidth is unknown)"

# why the terms of a run on a busy machine are not shown as a sum
NO_SUM = "other programs lengthened the step, so its terms are upper bounds"


@dataclass(frozen=True)
class Rung:
    """A term as it is drawn in a chart: it begins where the previous term ends, ``start_s`` after the step begins."""

    term: Term
    start_s: float
    # its time in ms, rounded so that the texts of all terms add up to that of the step
    text: str
    title: str

    @property
    def shown_ms(self) -> float:
        """The number in ``text``: sums of printed numbers use it, since exact numbers have another sum."""
        return float(self.text.replace(",", ""))

    @property
    def signed_text(self) -> str:
        """The text with its sign; the ideal, which begins at 0, has no plus sign."""
        has_own_sign = self.term.name == "ideal" or self.text.startswith("-")
        return self.text if has_own_sign else f"+{self.text}"

    @property
    def pieces(self) -> dict[str, float]:
        """Its seconds by phase, in the order of a step; the empty name stands for seconds without a known phase."""
        pieces = _in_order_of_step(self.term.phases)
        rest_s = self.term.seconds - sum(pieces.values())
        if abs(rest_s) > _ROUNDING_SHARE * abs(self.term.seconds):
            pieces[""] = rest_s
        return pieces


def _in_order_of_step(seconds_by_part: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of the parts that took time, in the order of a step."""
    ordered = {}
    for part in PARTS:
        seconds = seconds_by_part.get(part)
        if seconds:
            ordered[part] = seconds
    return ordered


def rungs(waterfall: Waterfall) -> list[Rung]:
    """Return the terms whose text is not 0, in the record's order. Two terms are always included."""
    shown_rungs = []
    start_s = 0.0
    for term, text in zip(waterfall.terms, _term_texts(waterfall), strict=True):
        if not is_zero_text(text) or term.name in _ALWAYS_SHOWN:
            shown_rungs.append(
                Rung(term, start_s, text, title_in(waterfall, term.name))
            )
        start_s += term.seconds
    return shown_rungs


def title_in(waterfall: Waterfall, name: str) -> str:
    """Return the title of a term: if the bandwidth is unknown, the two terms of memory-bound kernels are one."""
    if name == "beyond_bandwidth" and waterfall.bandwidth_bytes_per_s is None:
        return "memory-bound"
    if name == _PRODUCTS:
        return f"slow {_kinds_of_products(waterfall)}"
    if name == "ideal" and waterfall.ideal_is_lower_bound:
        return f"{term_title(name)} ({AT_LEAST})"
    return term_title(name)


def _kinds_of_products(waterfall: Waterfall) -> str:
    """Return "matmuls", "convolutions" or both, by the operators that the term ``_PRODUCTS`` consists of."""
    operators: list[str] = []
    for term in waterfall.terms:
        if term.name == _PRODUCTS:
            operators += [part.what for part in term.contributors]
    convolutions = [operator for operator in operators if "conv" in operator]
    if not convolutions:
        return "matmuls"
    if len(convolutions) == len(operators):
        return "convolutions"
    return "matmuls and convolutions"


def meaning_in(waterfall: Waterfall, name: str) -> str:
    """Return the meaning of a term without a full stop; empty for a term that a later version has added."""
    if name not in TERMS:
        return ""
    _, meaning = TERMS[name]
    if name == "beyond_bandwidth" and waterfall.bandwidth_bytes_per_s is None:
        return _UNKNOWN_BANDWIDTH
    if name == _PRODUCTS:
        return MEANING_OF_PRODUCTS.format(products=_kinds_of_products(waterfall))
    return meaning


def phases_of_step(record: RunRecord) -> dict[str, float]:
    """Return the seconds of each phase in the step that the terms add up to; empty if they are unknown."""
    waterfall = record.waterfall
    if waterfall is not None and waterfall.step_phases:
        return _in_order_of_step(waterfall.step_phases)
    # Records of earlier versions have only the shares of the mean step.
    step_s = waterfall.step_s if waterfall is not None else 0.0
    shares = _in_order_of_step(record.shares)
    return {part: share * step_s for part, share in shares.items()}


def step_text(waterfall: Waterfall) -> str:
    """Return the step in ms with its interval, to four digits, as ``report`` shows it everywhere."""
    step = TIMES["step"]
    has_interval = waterfall.ci_low is not None and waterfall.ci_high is not None
    if not has_interval:
        return f"{step.rounded(waterfall.step_s)} [{TOO_FEW_STEPS}]"
    return step.rounded(waterfall.step_s, waterfall.ci_low, waterfall.ci_high)


def _term_texts(waterfall: Waterfall) -> list[str]:
    """Return the time of each term in ms with the step's digits; the texts add up to that of the step."""
    # The largest-remainder method: round all terms down, then add the missing units to the terms that lost most.
    digits = digits_of(waterfall.step_s)
    # A unit is 1 in the last printed digit.
    units_per_second = TIMES["step"].scale * 10**digits
    exact_units = [term.seconds * units_per_second for term in waterfall.terms]
    rounded_units = [math.floor(units) for units in exact_units]
    missing_units = round(waterfall.step_s * units_per_second) - sum(rounded_units)
    adds_up = 0 <= missing_units <= len(exact_units)
    if not adds_up:  # The record was not written by lm_profiler.
        return [ms_text(term.seconds, digits) for term in waterfall.terms]
    losses = []
    for exact, rounded in zip(exact_units, rounded_units, strict=True):
        losses.append(exact - rounded)
    by_loss = sorted(range(len(losses)), key=lambda index: losses[index], reverse=True)
    for index in by_loss[:missing_units]:
        rounded_units[index] += 1
    return [f"{units / 10**digits:,.{digits}f}" for units in rounded_units]


def why_lines(record: RunRecord) -> list[str]:
    """Return a line with the mean step as a sum: first the ideal, then the other terms by size, small ones combined.

    If there is no sum, the line gives the reason. A run without planned traces has no line.
    """
    waterfall = record.waterfall
    if waterfall is None:
        should_have_trace = record.status == "ok" and record.steps_planned.get("trace")
        if not should_have_trace:
            return []
        return [f"why: unknown: {missing_input(record)}"]
    if not waterfall.terms:
        return []
    if record.contended:
        return [f"why: no sum is shown: {NO_SUM}"]
    ideal, *other_rungs = rungs(waterfall)  # the record has the ideal first
    large_rungs = []
    small_rungs = []
    last_rungs = []  # the unexplained time, which is always shown
    for rung in sorted(other_rungs, key=_seconds_of_rung, reverse=True):
        if rung.term.name in _ALWAYS_SHOWN:
            last_rungs.append(rung)
        elif rung.term.seconds < _SMALL_SHARE * waterfall.step_s:
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
        total = f"{total_ms:,.{digits_of(waterfall.step_s)}f}"
        terms.append(_with_sign(total, "smaller terms"))
    for rung in last_rungs:
        terms.append(_with_sign(rung.text, rung.title))
    # "12.3 [12.1, 12.5]" becomes "12.3 ms [12.1, 12.5]"
    mean, bracket, interval = step_text(waterfall).partition(" [")
    step = f"{mean} ms{bracket}{interval}"
    return [f"why: {step} = {' '.join(terms)}"]


def _seconds_of_rung(rung: Rung) -> float:
    return rung.term.seconds


def _with_sign(text: str, title: str) -> str:
    """Return a term of a sum after its plus or minus sign."""
    if text.startswith("-"):
        return f"- {text.removeprefix('-')} {title}"
    return f"+ {text} {title}"


def ceiling_text(waterfall: Waterfall, term: Term) -> str:
    """Return the most ms that could be saved in ``term``; empty if there is no such ceiling."""
    if not term.at_most_s or reason_without_ceilings(waterfall):
        return ""
    is_whole_term = math.isclose(term.at_most_s, term.seconds)
    if is_whole_term:  # Then the ceiling has the same text as the term.
        return _term_texts(waterfall)[waterfall.terms.index(term)]
    return ms_text(term.at_most_s, digits_of(waterfall.step_s))


def ends_text(waterfall: Waterfall, term: Term) -> str:
    """Return the smallest and the largest ms of ``term`` in the traced steps; empty if only one step was traced."""
    if term.low_s is None or term.high_s is None:
        return ""
    digits = digits_of(waterfall.step_s)
    low = ms_text(term.low_s, digits)
    high = ms_text(term.high_s, digits)
    return f"{low} to {high} ms in {waterfall.traced_steps} traced steps"


def reason_without_ceilings(waterfall: Waterfall) -> str:
    """Return why no ceiling is shown; empty where ceilings are shown."""
    unexplained_s = 0.0
    for term in waterfall.terms:
        if term.name == "unexplained":
            unexplained_s += term.seconds
    share = unexplained_s / (waterfall.step_s or 1.0)
    if abs(share) <= _MOST_UNEXPLAINED:
        return ""
    if share < 0:
        return f"unknown, because the traced steps took {-share:.0%} longer than the measured ones"
    return f"unknown, because {share:.0%} of the step is unexplained"


def missing_input(record: RunRecord) -> str:
    """Return the first missing input of the run's waterfall, and how to provide it."""
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
        return f"none of the {planned_steps} planned steps was traced. {stages}"
    if use is None:
        return "the FLOPs of a step are unknown (a note gives the reason). Run it again with --memory.steps=1."
    if use.dtype is None:
        return "the dtype of its matmuls is unknown."
    if use.peak_flops_per_s is None and use.ceiling_flops_per_s is None:
        return "no peak is known for this device. Run it again with --peak_tflops, from its datasheet."
    return (
        "see the notes of the run; if none of them gives the reason, "
        "an earlier version of lm_profiler wrote the run."
    )


_MOST_CONTRIBUTORS = 5
_CONTRIBUTOR = LISTS["waterfall.terms[].contributors"]


def waterfall_tables(record: RunRecord) -> list[Table]:
    """Return tables of the terms and of the largest contributors of each; none without a waterfall."""
    waterfall = record.waterfall
    if waterfall is None:
        return []
    return tables_of_waterfall(waterfall)


def tables_of_waterfall(waterfall: Waterfall) -> list[Table]:
    """Return tables of the terms and of the largest contributors of each."""
    tables = [_terms_table(waterfall), _largest_contributors(waterfall)]
    return [table for table in tables if table.rows]


def _terms_table(waterfall: Waterfall) -> Table:
    """Return a row for each term and one for the step that they add up to; columns of phases that occur."""
    # in the order of the fields of ``Term``; the last are a column for each phase
    name, seconds, low, high, ceiling, *phases = LISTS["waterfall.terms"]
    # One traced step has no range, and an older record does not contain one.
    has_ends = any(term.low_s is not None for term in waterfall.terms)
    ends = [low, high] if has_ends else []
    phase_columns = {}
    for part, column in zip(PARTS, phases, strict=True):
        if any(term.phases.get(part) for term in waterfall.terms):
            phase_columns[part] = column
    headings = [*headings_of((name, seconds)), Heading("share", "share", figures=True)]
    headings += headings_of((*ends, ceiling, *phase_columns.values()))

    digits = digits_of(waterfall.step_s)
    rows = []
    for term, text in zip(waterfall.terms, _term_texts(waterfall), strict=True):
        time_cell = TableCell(term.seconds, text)
        share_cell = _share(term.seconds, waterfall.step_s)
        if term.name in waterfall.merged_terms:
            time_cell = TableCell(text="unknown")
            share_cell = TableCell()
        row = [text_cell(title_in(waterfall, term.name)), time_cell, share_cell]
        row += [_ms(end.get(term), digits) for end in ends]
        row.append(TableCell(term.at_most_s, ceiling_text(waterfall, term)))
        row += [_ms(term.phases.get(part), digits) for part in phase_columns]
        rows.append(row)
    rows.append(_step_row(waterfall, columns=len(headings)))

    return Table(headings, rows, below=_lines_below_terms(waterfall, has_ends))


def _lines_below_terms(waterfall: Waterfall, has_ends: bool) -> list[str]:
    """Return lines on what the columns of the terms mean, and the notes; ``has_ends`` is whether they have a range."""
    lines = []
    if has_ends:
        steps = f"the {waterfall.traced_steps} traced steps"
        lines.append(f"from, to: the range over {steps}, not a confidence interval")
    meaning = (
        reason_without_ceilings(waterfall) or "an upper limit, not an expected gain"
    )
    lines.append(f"could save at most: {meaning}")
    lines += [f"note: {note}" for note in waterfall.notes]
    return lines


def _step_row(waterfall: Waterfall, columns: int) -> list[TableCell]:
    """Return the row of the whole step, in bold, filled up to ``columns`` cells."""
    share = _share(waterfall.step_s, waterfall.step_s)
    cells = [
        TableCell(None, "step", style="bold"),
        TableCell(waterfall.step_s, step_text(waterfall), style="bold"),
        TableCell(share.value, share.text, style="bold"),
    ]
    empty_cells = [text_cell("")] * (columns - len(cells))
    return cells + empty_cells


def _largest_contributors(waterfall: Waterfall) -> Table:
    """Return a row for each of the largest contributors of each term."""
    rows = []
    rows_left = 0
    for term in waterfall.terms:
        term_cell = text_cell(title_in(waterfall, term.name))
        contributor_rows = contributors(term, waterfall).rows
        for row in contributor_rows[:_MOST_CONTRIBUTORS]:
            rows.append([term_cell, *row])
        rows_left += len(contributor_rows[_MOST_CONTRIBUTORS:])
    headings = [Heading("term", "term"), *headings_of(_CONTRIBUTOR)]
    lines_below = [f"and {rows_left:,} smaller ones"] if rows_left else []
    return Table(headings, rows, below=lines_below)


def contributors(term: Term, waterfall: Waterfall) -> Table:
    """Return a row for each contributor of ``term``, the largest first."""
    digits = digits_of(waterfall.step_s)
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
