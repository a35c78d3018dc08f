"""The findings of ``improve`` in words: a row for each change, what all of them save together, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from lm_profiler.analysis.compare.ratio import MARGIN
from lm_profiler.record.figure import digits_of, ms_text
from lm_profiler.record.files import from_here
from lm_profiler.record.improve_record import IMPROVED_CONFIG, Final, ImproveRecord, Numerics, Tried
from lm_profiler.record.quantities import TRIED_COLUMNS, bytes_text, counted, duration_text
from lm_profiler.report.tables.table import Table, TableCell, headings_of

_STYLES = {"FASTER": "green", "SLOWER": "red", "SAME": "dim"}  # the others are yellow
_NEAR = 1.1  # ratios below this have three decimals: with two they could look like 1


def improve_table(record: ImproveRecord, folder: Path | None = None) -> Table:
    """Return a row for each change in the order of the trials; with ``folder``, also the command that runs the result.

    The interval of a single change ignores that it was chosen among many; the line of the total does not.
    """
    rows = [_row(of) for of in record.tried]
    below = [headline(record), *_lines(record)]
    if folder is not None and (folder / IMPROVED_CONFIG).exists():
        below.append(f"to run it: lm_profiler fit --config {quote(str(from_here(folder / IMPROVED_CONFIG)))}")
    return Table(headings_of(TRIED_COLUMNS) if rows else [], rows, below=below, title=f"improve: {record.name}")


def headline(record: ImproveRecord) -> str:
    """Return what all accepted changes save together, or that nothing helped."""
    if record.ended == "failed":
        return "the first setting does not run to its end: nothing could be compared with it"
    if record.final is not None:
        return final_line(record.final)
    if way := record.way:
        before, after = way[0].step_s, way[-1].step_s
        return f"step {_from_to(before, after)} ms, {ratio_text(before / after)} × as it was chosen, not compared anew"
    if record.ended == "budget" and not any(of.pairs for of in record.tried):
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
        return "nothing was decided: runs differ too much for this budget; give it a larger one, or a quieter machine"
    number = counted(len(undecided), "change")
    return f"nothing helped of what was decided; {number} would need a larger budget"


def final_line(final: Final) -> str:
    """Return the total: ``step 168.0 → 97.1 ms, 1.73 × [1.69, 1.77], measured anew in 4 pairs``."""
    around = f"[{ratio_text(final.low)}, {ratio_text(final.high)}]"
    unsure = "" if final.low > 1.0 else "; that it is faster at all is not sure"
    anew = f"measured anew in {counted(final.pairs, 'pair')}"
    return f"step {_from_to(final.first_s, final.final_s)} ms, {ratio_text(final.ratio)} × {around}, {anew}{unsure}"


def way_texts(record: ImproveRecord) -> list[tuple[str, str]]:
    """Return the step in ms and its interval for each point of the way, with as many digits as the first step."""
    digits = digits_of(record.way[0].step_s) if record.way else 0
    return [(ms_text(of.step_s, digits), _around(of.low_s, of.high_s, digits)) for of in record.way]


def _around(low_s: float | None, high_s: float | None, digits: int) -> str:
    return "" if low_s is None or high_s is None else f"[{ms_text(low_s, digits)}, {ms_text(high_s, digits)}]"


def ratio_text(ratio: float) -> str:
    """Return a ratio with two decimals, or three near 1."""
    return f"{ratio:.{2 if ratio >= _NEAR else 3}f}"


def verdict_text(of: Tried) -> str:
    """Return the verdict and whether the change was kept; ``being tried`` while there is none."""
    return "being tried" if of.verdict is None else f"{of.verdict}, kept" if of.accepted else of.verdict


def saved_text(of: Tried) -> str:
    """Return the saved ms of a step with their interval, with as many digits as the step; empty where unknown."""
    if of.saved_s is None or of.a_s is None:
        return ""
    digits = digits_of(of.a_s)
    return f"{ms_text(of.saved_s, digits)} {_around(of.low_s, of.high_s, digits)}".rstrip()


def _row(of: Tried) -> list[TableCell]:
    step = "" if of.a_s is None or of.b_s is None else _from_to(of.a_s, of.b_s)
    at_most = "" if of.ceiling_s is None else ms_text(of.ceiling_s, digits_of(of.a_s or of.ceiling_s))
    memory = "" if of.a_bytes is None or of.b_bytes is None else _bytes_from_to(of.a_bytes, of.b_bytes)
    numerics = "" if of.numerics is None else numerics_text(of.numerics)
    return [
        TableCell(of.name, of.name),
        TableCell(of.b_s, step),
        TableCell(of.saved_s, saved_text(of), of.low_s, of.high_s),
        TableCell(of.ceiling_s, at_most),
        TableCell(of.pairs, str(of.pairs or "")),
        TableCell(of.b_bytes, memory),
        TableCell(numerics, numerics),
        TableCell(of.verdict, verdict_text(of), style=_STYLES.get(of.verdict, "yellow") if of.verdict else ""),
    ]


def _bytes_from_to(before: int, after: int) -> str:
    return f"{bytes_text(before)} → {bytes_text(after)}"


def _from_to(before_s: float, after_s: float) -> str:
    digits = digits_of(before_s)
    return f"{ms_text(before_s, digits)} → {ms_text(after_s, digits)}"


def numerics_text(of: Numerics) -> str:
    """Return how far off loss and gradients are, and whether that is beyond the tolerance."""
    known = {what: share for what, share in (("loss", of.loss), ("gradients", of.gradients)) if share is not None}
    off = ", ".join(f"{what} {share * 100:.2g} %" for what, share in known.items() if share)
    word = {True: "", False: "too much", None: "unknown"}[of.within]
    return ": ".join(filter(None, (word, off))) or "nothing" * bool(known)


def _lines(record: ImproveRecord) -> Iterator[str]:
    yield _end(record)
    if record.first_s is not None and not record.way:
        yield f"first setting: step {ms_text(record.first_s, digits_of(record.first_s))} ms, in its first run"
    first, last = (None, None) if record.final is None else (record.final.first_bytes, record.final.final_bytes)
    if first is not None and last is not None and abs(last - first) > MARGIN * first:
        yield f"memory {_bytes_from_to(first, last)}"
    if record.left:
        yield f"not tried{' yet' * (record.ended == 'unfinished')}: {', '.join(record.left)}"
    yield from (f"{of.name}: {of.why}" for of in record.tried if of.why)
    yield from (
        f"{of.name} may change the results: {of.may_change}" for of in record.tried if of.accepted and of.may_change
    )
    yield from (f"note: {note}" for note in record.notes)


def _end(record: ImproveRecord) -> str:
    compared = {of.name for of in record.tried if of.verdict != "REFUSED"}
    tried = f"{counted(len(compared), 'change')} tried in {counted(record.runs, 'run')}"
    spent = f"{duration_text(record.elapsed_s)} of a budget of {duration_text(record.budget_s)}"
    words = {
        "done": "all was tried",
        "budget": "the budget has no room for more",
        "interrupted": "interrupted: the same call resumes it",
        "unfinished": "it is still running, or its process was killed: the same call resumes it",
    }
    return f"{tried}, {spent}; {words.get(record.ended, record.ended)}"
