"""The tables of two traces side by side, and of the traces of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from lm_profiler.record.figure import count_text
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.text import shortened
from lm_profiler.record.trace_answer import (
    RankWait,
    TimeDifference,
    TraceComparison,
    TraceRanks,
    TraceSide,
)
from lm_profiler.report.tables.table import Table, text_table

_LARGEST = 15
# the titles of the columns after the names, as ``_difference_rows`` has them
_TITLES = ("change", "A ms", "B ms", "difference", "A calls", "B calls")


def comparison_tables(comparison: TraceComparison) -> list[Table]:
    """Return the tables of the differences of two traces, in milliseconds of one step."""
    step_a_s, step_b_s = comparison.a.step_s, comparison.b.step_s
    lines = [
        _side_line("A", comparison.a),
        _side_line("B", comparison.b),
        (
            f"a step of B takes {step_b_s / step_a_s:.3f} times as long as a step of A "
            f"({_signed_ms(step_b_s - step_a_s)} ms)"
        ),
    ]
    lines += [f"note: {note}" for note in comparison.notes]
    kinds = _difference_rows(comparison.kinds, has_module=False)
    kinds.append(
        [
            "step",
            "",
            _ms(step_a_s),
            _ms(step_b_s),
            _signed_ms(step_b_s - step_a_s),
            "",
            "",
        ]
    )
    return [
        Table(above=lines),
        text_table(
            ["kind", *_TITLES],
            kinds,
            left=2,
            title="by kind; the rows add up to the step",
        ),
        _differences_table("operator", comparison.operators, has_module=True),
        _differences_table("kernel", comparison.kernels, has_module=False),
    ]


def _side_line(label: str, side: TraceSide) -> str:
    device = f" on {side.device}" if side.device else ""
    return f"{label}: {side.trace}: {count_text(side.steps, 'step')} of {_ms(side.step_s)} ms{device}"


def _differences_table(
    noun: str, differences: Sequence[TimeDifference], has_module: bool
) -> Table:
    """Return a table of the largest differences; the line below has the sum of the others."""
    titles = [noun, *_TITLES]
    if has_module:
        titles.insert(1, "module")
    hidden = differences[_LARGEST:]
    lines_below = []
    if hidden:
        hidden_s = sum(difference.b_s - difference.a_s for difference in hidden)
        lines_below.append(
            f"{count_text(len(hidden), 'smaller difference')}, {_signed_ms(hidden_s)} ms together"
        )
    rows = _difference_rows(differences[:_LARGEST], has_module)
    return text_table(titles, rows, left=3 if has_module else 2, title=f"by {noun}, the largest difference first",
                      below=lines_below)  # fmt: skip


def _difference_rows(
    differences: Sequence[TimeDifference], has_module: bool
) -> list[list[str]]:
    """Return a row of texts for each of ``differences`` between two traces."""
    rows = []
    for difference in differences:
        row = [shortened(difference.name)]
        if has_module:
            row.append(shortened(difference.module or ""))
        row += [
            difference.change,
            _ms(difference.a_s),
            _ms(difference.b_s),
            _signed_ms(difference.b_s - difference.a_s),
            f"{difference.a_calls:,.5g}",
            f"{difference.b_calls:,.5g}",
        ]
        rows.append(row)
    return rows


def ranks_tables(answer: TraceRanks) -> list[Table]:
    """Return tables of the times of each rank, and of which rank waited for which, in milliseconds of one step."""
    calls = count_text(answer.matched, "collective call")
    lines = [
        f"{len(answer.ranks)} ranks, {count_text(answer.steps, 'step')}, {calls} compared by their durations",
        "the rank on which a call is shortest arrived last, and the others waited for it",
    ]
    if answer.unmatched:
        lines.append(
            f"{count_text(answer.unmatched, 'call')} not compared, because no other rank has a matching call"
        )
    lines += [f"note: {note}" for note in answer.notes]
    tables = [Table(above=lines), _table_of_ranks(answer)]
    if answer.waits:
        tables.append(_table_of_waits(answer.waits))
    return tables


def _table_of_ranks(answer: TraceRanks) -> Table:
    """Return a row with the times of each rank."""
    titles = [
        "rank",
        "step ms",
        "communication",
        "exposed",
        "waited for others",
        "others waited for it",
    ]
    rows = []
    for rank in answer.ranks:
        times_s = (
            rank.step_s,
            rank.communication_s,
            rank.exposed_s,
            rank.waited_s,
            rank.caused_s,
        )
        rows.append([str(rank.rank), *(_ms(seconds) for seconds in times_s)])
    return text_table(titles, rows, title="ranks")


def _table_of_waits(waits: Sequence[RankWait]) -> Table:
    """Return a row for each of the largest ``waits``; the line below has the sum of the others."""
    titles = ["collective", "rank", "waits for", "calls", "ms"]
    rows = []
    for wait in waits[:_LARGEST]:
        rows.append(
            [
                wait.collective,
                str(wait.rank),
                str(wait.last_rank),
                f"{wait.calls:,.5g}",
                _ms(wait.waited_s),
            ]
        )
    hidden = waits[_LARGEST:]
    lines_below = []
    if hidden:
        hidden_s = sum(wait.waited_s for wait in hidden)
        lines_below.append(
            f"{count_text(len(hidden), 'smaller wait')}, {_ms(hidden_s)} ms together"
        )
    return text_table(
        titles, rows, title="which rank waits for which", below=lines_below
    )


def _ms(seconds: float) -> str:
    return TIMES["step"].show(seconds, unit=False, digits=3)


def _signed_ms(seconds: float) -> str:
    text = _ms(abs(seconds))
    return f"-{text}" if seconds < 0 else f"+{text}"
