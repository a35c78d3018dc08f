"""The findings of ``improve`` in words: a row for each change, what all of them save together, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from lm_profiler.analysis.compare.ratio import MARGIN
from lm_profiler.record.figure import digits_of, ms_text
from lm_profiler.record.files import relative_to_cwd
from lm_profiler.record.improve_record import (
    IMPROVED_CONFIG,
    Final,
    ImproveRecord,
    Numerics,
    Tried,
)
from lm_profiler.record.quantities import (
    TRIED_COLUMNS,
    bytes_text,
    count_text,
    duration_text,
)
from lm_profiler.report.tables.table import Table, TableCell, headings_of

# the styles of verdicts; every other verdict is yellow
_STYLES = {"FASTER": "green", "SLOWER": "red", "SAME": "dim"}
# ratios below this have three decimals: with two they could look like 1
_NEARLY_EQUAL = 1.1


def improve_table(record: ImproveRecord, folder: Path | None = None) -> Table:
    """Return a row for each change in the order of the trials; with ``folder``, also the command that runs the result.

    The interval of a single change is not corrected for the choice of the best among many changes. The line with the
    total is not affected by this, because its runs are separate.
    """
    rows = [_row(change) for change in record.tried]
    headings = headings_of(TRIED_COLUMNS) if rows else []
    lines_below = [headline(record), *_lines_below(record)]
    if folder is not None:
        lines_below += _command_lines(folder)
    return Table(headings, rows, below=lines_below, title=f"improve: {record.name}")


def _command_lines(folder: Path) -> list[str]:
    """Return a line with the command that runs the final setting; none if no change helped."""
    improved_config = folder / IMPROVED_CONFIG
    if not improved_config.exists():
        return []
    config = quote(str(relative_to_cwd(improved_config)))
    return [f"to run it: lm_profiler fit --config {config}"]


def headline(record: ImproveRecord) -> str:
    """Return what all accepted changes save together, or that nothing helped."""
    if record.ended == "failed":
        return "the run of the first setting did not finish, so no change could be compared with it"
    if record.final is not None:
        return final_line(record.final)
    if record.steps_after_changes:
        begin_s = record.steps_after_changes[0].step_s
        end_s = record.steps_after_changes[-1].step_s
        ratio = ratio_text(begin_s / end_s)
        return (
            f"step {_change_in_ms(begin_s, end_s)} ms, {ratio} × (measured when the changes were chosen, not measured "
            "again)"
        )
    has_compared = any(change.pairs for change in record.tried)
    if record.ended == "budget" and not has_compared:
        return "nothing was tried: the budget is too short for a comparison"
    return _without_result(record)


def _without_result(record: ImproveRecord) -> str:
    """Return what a search without any accepted change has shown: that nothing helps, or nothing at all."""
    compared = [change for change in record.tried if change.pairs]
    undecided = [change for change in compared if change.needs_more_pairs]
    if record.ended not in ("done", "budget"):
        return "nothing helped so far"
    if not undecided:
        return "nothing helped"
    if len(undecided) == len(compared):
        return "nothing was decided: runs differ too much for this budget; use a larger one, or a quieter machine"
    number = count_text(len(undecided), "change")
    return f"no change helped so far; {number} would need a larger budget to decide"


def final_line(final: Final) -> str:
    """Return the total: ``step 168.0 → 97.1 ms, 1.73 × [1.69, 1.77], measured again in 4 pairs``."""
    step = f"step {_change_in_ms(final.first_s, final.final_s)} ms"
    ratio = f"{ratio_text(final.ratio)} × [{ratio_text(final.low)}, {ratio_text(final.high)}]"
    line = f"{step}, {ratio}, measured again in {count_text(final.pairs, 'pair')}"
    is_surely_faster = final.low > 1.0
    if is_surely_faster:
        return line
    return f"{line}; the final setting may not be faster at all"


def way_texts(record: ImproveRecord) -> list[tuple[str, str]]:
    """Return the step in ms and its interval after each accepted change, with as many digits as the first step."""
    if not record.steps_after_changes:
        return []
    digits = digits_of(record.steps_after_changes[0].step_s)
    texts = []
    for point in record.steps_after_changes:
        interval = _interval(point.low_s, point.high_s, digits)
        texts.append((ms_text(point.step_s, digits), interval))
    return texts


def _interval(low_s: float | None, high_s: float | None, digits: int) -> str:
    if low_s is None or high_s is None:
        return ""
    return f"[{ms_text(low_s, digits)}, {ms_text(high_s, digits)}]"


def ratio_text(ratio: float) -> str:
    """Return a ratio with two decimals, or with three if it is near 1."""
    decimals = 2 if ratio >= _NEARLY_EQUAL else 3
    return f"{ratio:.{decimals}f}"


def verdict_text(change: Tried) -> str:
    """Return the verdict and whether the change was kept; ``being tried`` while there is none."""
    if change.verdict is None:
        return "being tried"
    if change.accepted:
        return f"{change.verdict}, kept"
    return change.verdict


def saved_text(change: Tried) -> str:
    """Return the saved ms of a step with their interval, with as many digits as the step; empty if unknown."""
    if change.saved_s is None or change.a_s is None:
        return ""
    digits = digits_of(change.a_s)
    interval = _interval(change.low_s, change.high_s, digits)
    return f"{ms_text(change.saved_s, digits)} {interval}".rstrip()


def _row(change: Tried) -> list[TableCell]:
    """Return the cells of a change that was tried; a cell is empty if its figure is unknown."""
    step = ceiling = memory = numerics = style = ""
    if change.a_s is not None and change.b_s is not None:
        step = _change_in_ms(change.a_s, change.b_s)
    if change.ceiling_s is not None:
        ceiling = ms_text(change.ceiling_s, digits_of(change.a_s or change.ceiling_s))
    if change.a_bytes is not None and change.b_bytes is not None:
        memory = _change_in_bytes(change.a_bytes, change.b_bytes)
    if change.numerics is not None:
        numerics = numerics_text(change.numerics)
    if change.verdict is not None:
        style = _STYLES.get(change.verdict, "yellow")
    return [
        TableCell(change.name, change.name),
        TableCell(change.b_s, step),
        TableCell(
            change.saved_s, saved_text(change), low=change.low_s, high=change.high_s
        ),
        TableCell(change.ceiling_s, ceiling),
        TableCell(change.pairs, str(change.pairs or "")),
        TableCell(change.b_bytes, memory),
        TableCell(numerics, numerics),
        TableCell(change.verdict, verdict_text(change), style=style),
    ]


def _change_in_bytes(a_bytes: int, b_bytes: int) -> str:
    return f"{bytes_text(a_bytes)} → {bytes_text(b_bytes)}"


def _change_in_ms(a_s: float, b_s: float) -> str:
    digits = digits_of(a_s)
    return f"{ms_text(a_s, digits)} → {ms_text(b_s, digits)}"


_TOLERANCE_WORDS = {True: "", False: "too much", None: "unknown"}


def numerics_text(numerics: Numerics) -> str:
    """Return the relative errors of loss and gradients, and whether they exceed the tolerance."""
    shares = {"loss": numerics.loss, "gradients": numerics.gradients}
    texts = []
    for name, share in shares.items():
        if share:
            texts.append(f"{name} {share * 100:.2g} %")
    errors = ", ".join(texts)
    word = _TOLERANCE_WORDS[numerics.within]
    known_parts = [text for text in (word, errors) if text]
    if known_parts:
        return ": ".join(known_parts)
    was_compared = any(share is not None for share in shares.values())
    return "nothing" if was_compared else ""


def _lines_below(record: ImproveRecord) -> Iterator[str]:
    """Yield the lines below the headline: how it ended, what was not tried, and the notes."""
    yield _ending_text(record)
    if record.first_s is not None and not record.steps_after_changes:
        yield f"first setting: step {ms_text(record.first_s, digits_of(record.first_s))} ms, in its first run"
    if record.final is not None and _memory_changed(record.final):
        first_bytes = record.final.first_bytes or 0
        final_bytes = record.final.final_bytes or 0
        yield f"memory {_change_in_bytes(first_bytes, final_bytes)}"
    if record.left:
        title = "not tried yet" if record.ended == "unfinished" else "not tried"
        yield f"{title}: {', '.join(record.left)}"
    for change in record.tried:
        if change.why:
            yield f"{change.name}: {change.why}"
    for change in record.tried:
        if change.accepted and change.may_change:
            yield f"{change.name} may change the results: {change.may_change}"
    for note in record.notes:
        yield f"note: {note}"


def _memory_changed(final: Final) -> bool:
    """Return whether the final setting needs notably more or less memory than the first; not if it is unknown."""
    if final.first_bytes is None or final.final_bytes is None:
        return False
    return abs(final.final_bytes - final.first_bytes) > MARGIN * final.first_bytes


_ENDINGS = {
    "done": "every change was tried",
    "budget": "the budget is too small to try more",
    "interrupted": "interrupted: run the same command again to resume",
    "unfinished": "the search is still running, or its process was killed: run the same command again to resume",
}


def _ending_text(record: ImproveRecord) -> str:
    """Return how many changes were tried in how many runs, the time they took, and why the search ended."""
    compared = {change.name for change in record.tried if change.verdict != "REFUSED"}
    tried = f"{count_text(len(compared), 'change')} tried in {count_text(record.runs, 'run')}"
    spent = f"{duration_text(record.elapsed_s)} of a budget of {duration_text(record.budget_s)}"
    ending = _ENDINGS.get(record.ended, record.ended)
    return f"{tried}, {spent}; {ending}"
